"""Random adapters, in the form in which mlx-lm's training writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import dequantize_model, load_model

from specd.worker.model.adapters import _copied

# The layers that mlx-lm's own examples adapt.
QUERIES_AND_VALUES = ("self_attn.q_proj", "self_attn.v_proj")


def save_adapter(
    directory: Path,
    base: Any,
    *,
    seed: int,
    rank: int = 8,
    scale: float = 20.0,
    size: float = 0.05,
    num_layers: int = -1,
    keys: Sequence[str] | None = None,
) -> str:
    """Save a random adapter of a network, or of a model's directory, and return its directory.

    `size` is the standard deviation of the second matrices, which training begins with zeros; without `keys`, all
    linear layers of the last `num_layers` blocks have low-rank ones.
    """
    network = _copied(base if isinstance(base, Module) else load_model(Path(base), lazy=True)[0], {})
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = [*keys]
    network.freeze()
    linear_to_lora_layers(network, num_layers, parameters)
    mx.random.seed(seed)
    trained: Any = tree_flatten(network.trainable_parameters())
    weights = {
        name: mx.random.normal(w.shape) * (size if name.endswith("lora_b") else w.shape[-2] ** -0.5)
        for name, w in trained
        if name.endswith(("lora_a", "lora_b"))
    }
    return write_adapter(directory, weights, num_layers=num_layers, lora_parameters=parameters)


def write_adapter(directory: Path, weights: dict[str, mx.array], **config: Any) -> str:
    """Write the two files of an adapter."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", **config}))
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    return str(directory)


def adapted_by_mlx_lm(model: str, adapter: str = "") -> Any:
    """Return mlx-lm's own network with an adapter, in float32."""
    network, _ = load_model(Path(model))
    network.set_dtype(mx.float32)
    network = dequantize_model(network)
    if adapter:
        network = load_adapters(network, adapter)
    network.eval()
    mx.eval(network.parameters())
    return network
