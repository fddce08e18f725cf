"""GPT-2 in the forms in which it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specd.errors import StartupError
from specd.worker.model.loader import load
from tests.worker.gpt2_models import NUM_POSITIONS, make_gpt2, save_gpt2, weights_on_the_hub

TOKENS = mx.array([[5, 6, 7, 8, 9]])


def with_masked_bias_and_head(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    masks = {f"transformer.h.{layer}.attn.masked_bias": mx.array(-1e4) for layer in range(2)}
    return weights | masks | {"lm_head.weight": weights["transformer.wte.weight"]}


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        pytest.param(weights_on_the_hub(""), {"n_ctx": NUM_POSITIONS}, id="gpt2"),
        pytest.param(weights_on_the_hub("transformer."), {"n_ctx": NUM_POSITIONS}, id="distilgpt2"),
        pytest.param(weights_on_the_hub("transformer."), {}, id="transformers 5"),
        pytest.param(
            with_masked_bias_and_head(weights_on_the_hub("transformer.")), {"n_ctx": NUM_POSITIONS}, id="DialoGPT"
        ),
        pytest.param(dict(tree_flatten(make_gpt2().parameters())), {"n_ctx": NUM_POSITIONS}, id="converted by mlx-lm"),
    ],
)
def test_every_form_gives_the_same_logits(
    weights: dict[str, mx.array], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = load(save_gpt2(tmp_path / "model", weights, **changes), blas="")
    np.testing.assert_allclose(np.array(model.network(TOKENS)), np.array(make_gpt2()(TOKENS)), atol=1e-5)
    assert model.info.context_length == NUM_POSITIONS
    assert model.batches


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({"n_inner": 64}, "n_inner is 64"),
    ],
)
def test_what_mlx_lm_computes_wrongly_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=named):
        load(save_gpt2(tmp_path / "model", weights_on_the_hub(""), **changes), blas="")


def test_an_output_layer_of_its_own_is_refused(tmp_path: Path) -> None:
    weights = weights_on_the_hub("transformer.") | {"lm_head.weight": mx.ones((8192, 32))}
    with pytest.raises(StartupError, match=r"lm_head\.weight differs from the embedding"):
        load(save_gpt2(tmp_path / "model", weights), blas="")
