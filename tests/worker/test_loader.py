"""The loader's description of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_bigcode

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT
from specd.worker.model.context import context_length
from specd.worker.model.loader import load
from tests.worker.models import FAMILIES, SMALL, small_network, write_model


def small_bigcode() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_inner": 64, "n_head": 4, "n_positions": 48, "layer_norm_epsilon": 1e-5}
    return gpt_bigcode.Model(gpt_bigcode.ModelArgs.from_dict({"model_type": "gpt_bigcode", "vocab_size": 16} | sizes))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2"])
@pytest.mark.parametrize("limit", [512, None])
def test_without_a_table_of_positions_the_config_says_it(name: str, limit: int | None) -> None:
    assert context_length("m", small_network(name), limit) == (limit or 2**31 - 1)


@pytest.mark.parametrize(("network", "size"), [(small_network("gpt2"), 64), (small_bigcode(), 48)])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_table_of_positions_is_the_limit(network: Any, size: int, is_quantized: bool) -> None:
    if is_quantized:
        nn.quantize(network, group_size=32)
    assert context_length("m", network, None) == size
    assert context_length("m", network, 1000) == size
    assert context_length("m", network, 40) == 40


def test_a_table_that_is_not_found_is_refused() -> None:
    network = small_network("llama")
    network.model.pos_emb = mx.zeros((64, 32))
    with pytest.raises(StartupError, match=r"m has learned positions \(model.pos_emb\)"):
        context_length("m", network, 512)


def test_gpt2_says_its_context(tmp_path: Path) -> None:
    """Its config has no max_position_embeddings: MLX read foreign memory past the 128th token."""
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors"))
    config = {"model_type": "gpt2", "n_ctx": 128, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
    config |= {"layer_norm_epsilon": 1e-5, "vocab_size": 8192}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(small_network("gpt2", n_positions=128, vocab_size=8192).parameters()))
    mx.save_safetensors(str(tmp_path / "gpt2" / "model.safetensors"), weights)
    assert load(str(tmp_path / "gpt2"), blas="").info.context_length == 128


QUANTISATIONS = [
    *(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
    *(("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)),
]


@pytest.mark.parametrize(("mode", "bits", "group_size"), QUANTISATIONS)
def test_on_a_cpu_quantised_weights_become_float32(mode: str, bits: int, group_size: int, tmp_path: Path) -> None:
    """Also for weights in 16 bits, because products in bfloat16 do not go through BLAS."""
    network = small_network("llama", vocab_size=8192)
    network.set_dtype(mx.bfloat16)
    nn.quantize(network, group_size=group_size, bits=bits, mode=mode)
    quantization = {"group_size": group_size, "bits": bits, "mode": mode}
    config = SMALL | {"model_type": "llama", "vocab_size": 8192, "quantization": quantization}
    weights: Any = tree_flatten(network.parameters())
    model = load(write_model(tmp_path / "model", config, dict(weights)), blas="")
    parameters: Any = tree_flatten(model.network.parameters())
    assert {array.dtype for _, array in parameters} == {mx.float32}
    packed = network.model.layers[0].mlp.up_proj
    scales = packed.scales.astype(mx.float32) if mode == "affine" else packed.scales
    biases = packed.biases.astype(mx.float32) if mode == "affine" else None
    expected = mx.dequantize(packed.weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    assert mx.array_equal(model.network.model.layers[0].mlp.up_proj.weight, expected.astype(mx.float32))
