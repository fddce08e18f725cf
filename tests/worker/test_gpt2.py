"""GPT-2 in the forms in which it is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT
from specd.worker.model.loader import load

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 8192,
    "eos_token_id": 0,
}
TOKENS = mx.array([[5, 6, 7, 8, 9]])


def make_network() -> gpt2.Model:
    mx.random.seed(0)
    return gpt2.Model(gpt2.ModelArgs.from_dict({**CONFIG, "n_ctx": 64}))


def weights_on_the_hub(prefix: str) -> dict[str, mx.array]:
    """Return the weights as transformers has them: matrices the other way round, by other names, beside masks."""
    pairs: Any = tree_flatten(make_network().parameters())
    weights = {}
    for name, array in pairs:
        is_matrix = array.ndim == 2 and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        weights[prefix + name.removeprefix("model.")] = mx.contiguous(array.T) if is_matrix else array
    for layer in range(2):
        weights[f"{prefix}h.{layer}.attn.bias"] = mx.tril(mx.ones((1, 1, 64, 64)))
    return weights


def save(directory: Path, weights: dict[str, mx.array], **changes: Any) -> str:
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(EMBEDDED_DRAFT) / name, directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    return str(directory)


def with_masked_bias_and_head(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    masks = {f"transformer.h.{layer}.attn.masked_bias": mx.array(-1e4) for layer in range(2)}
    return weights | masks | {"lm_head.weight": weights["transformer.wte.weight"]}


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        pytest.param(weights_on_the_hub(""), {"n_ctx": 64}, id="gpt2"),
        pytest.param(weights_on_the_hub("transformer."), {"n_ctx": 64}, id="distilgpt2"),
        pytest.param(weights_on_the_hub("transformer."), {}, id="transformers 5"),
        pytest.param(with_masked_bias_and_head(weights_on_the_hub("transformer.")), {"n_ctx": 64}, id="DialoGPT"),
        pytest.param(dict(tree_flatten(make_network().parameters())), {"n_ctx": 64}, id="converted by mlx-lm"),
    ],
)
def test_every_form_gives_the_same_logits(
    weights: dict[str, mx.array], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = load(save(tmp_path / "model", weights, **changes), blas="")
    np.testing.assert_allclose(np.array(model.network(TOKENS)), np.array(make_network()(TOKENS)), atol=1e-5)
    assert model.info.context_length == 64
    assert model.batches


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"activation_function": "gelu"}, "activation_function = 'gelu'"),
        ({"n_inner": 64}, "n_inner = 64"),
    ],
)
def test_what_mlx_lm_computes_wrongly_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=named):
        load(save(tmp_path / "model", weights_on_the_hub(""), **changes), blas="")


def test_an_output_layer_of_its_own_is_refused(tmp_path: Path) -> None:
    weights = weights_on_the_hub("transformer.") | {"lm_head.weight": mx.ones((8192, 32))}
    with pytest.raises(StartupError, match=r"lm_head\.weight is an output layer of its own"):
        load(save(tmp_path / "model", weights), blas="")
