"""The part of a network that one of several ranks holds, by mlx-lm's own `shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.errors import StartupError


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a model that this rank holds: `group` is that of mx.distributed.

    `meet` returns when all ranks have called it with the same facts, so that none waits in a collective for one that
    still reads its weights.
    """

    group: Any
    backend: str
    meet: Callable[[str], None]

    @property
    def num_ranks(self) -> int:
        """The number of parts."""
        return int(self.group.size())

    @property
    def description(self) -> str:
        """The ranks, for people, and for the comparison of workers: sums over other ranks round otherwise."""
        return f"{self.num_ranks} ranks by {self.backend}"


def shard(name: str, network: Any, part: Shard) -> None:
    """Reduce a network with lazy weights to a rank's part, and read the weights of that part.

    Raises StartupError, which names what cannot be divided.
    """
    if not hasattr(network, "shard"):
        raise StartupError(
            f"the model {name} cannot be divided among {part.num_ranks} ranks: mlx-lm's class of its architecture, "
            f"{type(network).__module__.rpartition('.')[2]}, has no shard(); serve it with one rank"
        )
    before = dict(_numbers_of_heads(network))
    try:
        network.shard(part.group)
    except Exception as error:  # of a matrix that cannot be split evenly, or of a network that checks this itself
        raise StartupError(f"the model {name} cannot be divided among {part.num_ranks} ranks: {error}") from error
    for place, number in _numbers_of_heads(network):
        whole = before.get(place, number)
        if whole != number and whole % part.num_ranks:
            raise StartupError(
                f"the model {name} cannot be divided among {part.num_ranks} ranks: {place} is {whole}, which "
                f"{part.num_ranks} does not divide; choose another number of ranks"
            )
    # Layer by layer, so that never more than a layer is whole in memory.
    for layer in network.layers:
        mx.eval(layer.parameters())
        mx.clear_cache()
    mx.eval(network.parameters())
    mx.clear_cache()


def _numbers_of_heads(network: Module) -> Iterator[tuple[str, int]]:
    for path, module in network.named_modules():
        for name, value in vars(module).items():
            if "heads" in name and isinstance(value, int):
                yield f"{path}.{name}", value
