"""The layout of a kind of MTP head: its layers, and the names of its tensors in published files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from specd.worker.heads.kind import Tensors

# Names that most write, `save_head` too. The group is the name within the head.
_OURS = re.compile(r"(?:.*\.)?mtp\.(.+)")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def _sees_all(layer: Any, args: Any) -> int | None:
    return None


@dataclass(frozen=True)
class HeadLayout:
    """A kind of head.

    `promise` is the field of a config with the number of heads. `pattern`, in which N stands for the number of the
    target's layers, finds the tensors in the target's files; its group is the name within the head. Where it finds
    none, the names begin with `mtp.`. `names` maps the beginnings of the names within the head to those of `MTPHead`,
    the longest first, and "" drops a tensor. With `state_first`, the state comes before the embedding in `fc`.
    `adds_one` is whether norms multiply by 1 + w until a converter adds the 1.

    `make_layers` makes the head's layers, of a class of layers, for a target's arguments; one of them has attention.
    `make_cache` makes the cache of this layer, and `window` tells how many tokens it sees. The cache keeps all tokens,
    because `Pairs` rewinds by any number. Some layers need the mask as an array. `eps` names the argument of the norms.
    With `before_norm`, the states that the head reads and returns are those before the last norm, the target's and its
    own. A head that `shares_norm` has the target's last norm.
    """

    promise: str
    make_layers: Callable[[Any, Any], Sequence[Module]]
    pattern: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    state_first: bool = False
    adds_one: bool = False
    make_cache: Callable[[], Any] = KVCache
    window: Callable[[Any, Any], int | None] = _sees_all
    needs_array: bool = False
    eps: str = "rms_norm_eps"
    before_norm: bool = False
    shares_norm: bool = False

    def own(self, tensors: Mapping[str, mx.array], num_layers: int) -> Tensors:
        """Return the head's tensors among those of a target with `num_layers` layers, by their names within the head.

        A file that has nothing but a head can also have these names, and no tensors are found then.
        """
        pattern = re.compile(r"(?:language_model\.)?" + self.pattern.replace("N", str(num_layers)))
        for each in (pattern, _OURS) if self.pattern else (_OURS,):
            if own := {match[1]: tensor for name, tensor in tensors.items() if (match := each.fullmatch(name))}:
                return own
        return {}

    def renamed(self, own: Tensors, network: Any) -> Tensors:
        """Return the head's tensors by the names of `MTPHead`, lazily; `own` has their names within the head.

        Raises ValueError if mlx-lm cannot convert the head's layers.
        """
        if not own or not self.names or any(name.startswith("fc.") for name in own):
            return own  # with the names of `MTPHead`
        named = {self._name(name): tensor for name, tensor in own.items() if self._name(name)}
        if self.state_first and "fc.weight" in named:
            of_state, of_embedding = mx.split(named["fc.weight"], 2, axis=-1)
            named["fc.weight"] = mx.concatenate([of_embedding, of_state], axis=-1)
        return _as_layers_of(network, named)

    def _name(self, name: str) -> str:
        for beginning, own in self.names.items():
            if name.startswith(beginning):
                return own and own + name.removeprefix(beginning)
        return name if name.startswith("layers.") else f"layers.0.{name}"


def _as_layers_of(network: Any, tensors: Tensors) -> Tensors:
    """Let mlx-lm convert layers as it converts those of the target: experts are stacked, 8-bit floats decoded.

    Layer i of the head gets the name of the target's last layer but i.
    """
    last = len(network.layers) - 1
    prefix = "backbone.layers." if hasattr(network, "backbone") else "model.layers."
    if hasattr(network, "language_model"):
        prefix = f"language_model.{prefix}"
    parts = {name: match for name in tensors if (match := _LAYER.fullmatch(name))}
    own = {f"{prefix}{last - int(match[1])}.{match[2]}": tensors[name] for name, match in parts.items()}
    try:
        converted = network.sanitize(own)
    except Exception as error:  # experts or latents of another form can cause any error
        raise ValueError(f"mlx-lm cannot convert its layer: {error!r}") from error
    result = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name, tensor in converted.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        result[f"layers.{last - int(number)}.{rest}"] = tensor
    return result
