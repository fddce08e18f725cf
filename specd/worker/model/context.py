"""The context length of a model: the most tokens that a session can have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten

from specd.errors import StartupError
from specd.worker.engine.forward import bare_cache

_NO_LIMIT = 2**31 - 1
# Names of parameters with learned positions.
_POSITIONS = re.compile(r"(^|\.)(wpe|(learned_)?pos(itional|ition)?_?(enc|emb)\w*|embed_positions)(\.weight)?$")


def context_length(name: str, network: Module, limit: int | None) -> int:
    """Return the most tokens that a session can have: the limit of the config, or a shorter table of positions.

    MLX does not check bounds: a position beyond the table reads foreign memory. Configs name the size of the table in
    many ways, and use the same names for numbers that are no limit. So the tables are found by their use: if equal
    tokens make a network look up different rows of an embedding, the rows are positions.

    Raises StartupError if the network has learned positions outside of an embedding layer.
    """
    caches = bare_cache(network).layers.caches
    with _recorded_lookups() as lookups:
        network(mx.zeros((1, 16), mx.int32), cache=caches)
    tables = [weight for weight, indices in lookups if _are_positions(indices)]
    known = {id(weight) for weight in tables}
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(network.parameters()))
    for path, parameter in parameters:
        if _POSITIONS.search(path) and id(parameter) not in known:
            raise StartupError(
                f"the model {name} has learned positions ({path}) of an unknown kind. specd cannot find out their "
                "number, and MLX would read past their end: use another model"
            )
    return min(int(limit or _NO_LIMIT), *(len(weight) for weight in tables), _NO_LIMIT)


def _are_positions(indices: mx.array) -> bool:
    # Only the last two, because a network that looks up pairs or triples of tokens differs at the beginning.
    before_last, last = cast("list[int]", indices.reshape(-1)[-2:].tolist())
    return before_last != last


@contextmanager
def _recorded_lookups() -> Iterator[list[tuple[mx.array, mx.array]]]:
    """Record the weights of the embeddings that are called, and the indices of the calls."""
    lookups: list[tuple[mx.array, mx.array]] = []
    kinds: tuple[Any, ...] = (Embedding, QuantizedEmbedding)
    calls = [kind.__call__ for kind in kinds]

    def recording(call: Any) -> Any:
        def look_up(embedding: Any, indices: mx.array) -> mx.array:
            lookups.append((embedding.weight, indices))
            rows: mx.array = call(embedding, indices)
            return rows

        return look_up

    try:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = recording(call)
        yield lookups
    finally:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = call
