"""Low-rank adapters (Hu et al., arXiv 2106.09685) beside a network. All of them share its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.model_info import AdapterInfo
from specd.worker.cpu.packed_mlp import PackedMLP
from specd.worker.engine.forward import agree, has_encoder, rewinds_exactly, trial_logits
from specd.worker.model.adapter_files import AdapterFiles
from specd.worker.model.fingerprint import digest_of


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory: mlx-lm's low-rank layers by the path of their place, without the layers behind them.

    `expected` are the trial's logits of mlx-lm's own network with the adapter.
    """

    files: AdapterFiles
    info: AdapterInfo
    layers: Mapping[str, Module]
    expected: mx.array

    @classmethod
    def read(cls, network: Module, files: AdapterFiles) -> Self:
        """Read the weights of an adapter for a network of mlx-lm, which stays as it is. Raises StartupError."""
        adapted = _adapted_by_mlx_lm(network, files)
        expected = trial_logits(adapted, batches=False)
        mx.eval(expected)
        if not mx.all(mx.isfinite(expected)):
            raise files.wrong("it gives logits that are not finite")
        layers = {path: part for path, part in adapted.named_modules() if path in files.layers}
        for part in layers.values():
            part.pop(_bases()[type(part)])
            if mx.default_device().type == mx.cpu:
                part.set_dtype(mx.float32)  # as the network, because 16-bit products do not go through BLAS
            mx.eval(part.parameters())
        try:
            digest = digest_of(files.files)
        except (RuntimeError, OSError) as error:
            raise files.wrong(error) from error
        return cls(files, AdapterInfo(files.name, digest), layers, expected)

    def on(self, network: Module) -> Module:
        """Return a network that computes with the adapter: it has the layers of `network`, and these before some.

        It shares all arrays and all other modules, also those that were replaced since the adapter was read. Only the
        modules on the way to a low-rank layer are copied.
        """
        places: dict[str, Any] = {}
        for path, layer in self.layers.items():
            *parents, last = path.split(".")
            inner = places
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = layer
        adapted: Module = _with(network, places)
        return adapted


def check_fit(network: Module, adapters: Sequence[AdapterFiles]) -> None:
    """Raise StartupError unless the tensors of adapters fit a network, before its weights are read."""
    for files in adapters:
        _adapted_by_mlx_lm(network, files)


def check_logits(network: Module, adapters: Sequence[Adapter], *, batches: bool) -> None:
    """Raise StartupError unless adapters compute the same on a loaded network as in mlx-lm."""
    for adapter in adapters:
        adapted = adapter.on(network)
        for several in {False, batches}:
            if not agree(trial_logits(adapted, batches=several), adapter.expected):
                raise adapter.files.wrong("its logits differ from mlx-lm's: merge it into its model with mlx_lm.fuse")
        if not rewinds_exactly(adapted):
            raise adapter.files.wrong("its logits differ after a rewind: merge it into its model with mlx_lm.fuse")


@cache
def _bases() -> dict[type[Module], str]:
    """Return mlx-lm's layers, with the names by which they hold the layer that they stand before."""
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear  # late, as below

    return {LoRALinear: "linear", LoRASwitchLinear: "linear", LoRAEmbedding: "embedding"}


def _adapted_by_mlx_lm(network: Any, files: AdapterFiles) -> Module:
    """Return a copy of a network, with the same arrays, that mlx-lm has adapted. Raises StartupError."""
    from mlx_lm.tuner.utils import load_adapters  # late: a worker without adapters does without mlx-lm's training

    if has_encoder(network):
        raise files.wrong("its model has an encoder, and mlx-lm has no adapters for one")
    if files.num_layers > len(network.layers):
        raise files.wrong(f"it is for the last {files.num_layers} layers, and the model has {len(network.layers)}")
    try:
        adapted = load_adapters(_copied(network, {}), str(files.directory))
    except Exception as error:  # values in a config can cause any error of mlx-lm
        raise files.wrong(f"it does not fit the model: {error}") from error
    adapted.eval()
    for path, part in adapted.named_modules():
        if path in files.layers and type(part) not in _bases():
            raise files.wrong(f"its layer {path} is a {type(part).__name__}, which specd does not know")
    return adapted


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a network's modules with the same arrays; a module in several places stays one."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Module):
        copied: Any = copy.copy(value)
        copies[id(value)] = copied
        for name, child in value.items():
            copied[name] = _copied(child, copies)
        return copied
    if isinstance(value, list):
        return [_copied(each, copies) for each in value]
    if isinstance(value, dict):
        return {name: _copied(each, copies) for name, each in value.items()}
    return value


def _with(part: Any, places: Any) -> Any:
    """Return a part of a network with the low-rank layers at these places in it."""
    if isinstance(places, Module):
        layer: Any = copy.copy(places)
        setattr(layer, _bases()[type(layer)], part)
        return layer
    if isinstance(part, PackedMLP):  # it computes its layers in one
        part = part.plain
    if isinstance(part, list):
        return [_with(each, places[str(i)]) if str(i) in places else each for i, each in enumerate(part)]
    copied = copy.copy(part)
    for name, inner in places.items():
        copied[name] = _with(part[name], inner)
    return copied
