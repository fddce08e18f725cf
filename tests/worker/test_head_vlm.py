"""Heads of other families equal those of mlx-vlm, also as its splitters write them.

mlx-vlm has many dependencies, of which its heads need none: `pip install --no-deps mlx-vlm` is enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specd.worker.heads.head import Head
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.head_loader import read_head
from specd.worker.model.loader import read
from tests.worker.head_files import Tensors
from tests.worker.layout_heads import NEXT, save
from tests.worker.test_head_layouts import embed, logits_of

SIZE = 32
# The pairs of three passes: a prompt, a token, and a verify.
SPANS = ((0, 7), (7, 8), (8, 12))


def made(directory: Path, family: str) -> tuple[Head, Tensors, dict[str, Any]]:
    """Return a head, its raw tensors, and the configuration of its target."""
    raw, _ = save(directory, family)
    embed(directory, raw)
    network, _, _ = read(family, directory)
    network.set_dtype(mx.float32)
    head = read_head(network, directory)
    assert head is not None
    return head, raw, json.loads((directory / "config.json").read_text())


def largest_difference(head: Any, theirs: Any) -> float:
    """Return the largest difference of logits; `theirs` gives the states for embeddings and hidden states."""
    hidden = mx.random.normal((1, NEXT.size, SIZE), key=mx.random.key(5))
    layers, largest = SessionLayers(head), 0.0
    for start, end in SPANS:
        tokens, states = NEXT[:, start:end], hidden[:, start:end]
        own = head(tokens, states, layers.caches)
        layers.fed(end - start)
        expected = head.states.logits(theirs(head.states.embed(tokens), states))
        assert float(mx.abs(expected).max()) > 0.5
        largest = max(largest, float(mx.abs(head.logits(own) - expected).max()))
    print(f"largest difference of logits: {largest:.1e}")
    return largest


def test_a_head_of_nemotron_equals_that_of_mlx_vlm(tmp_path: Path) -> None:
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.nemotron_h_mtp", reason="mlx-vlm is not installed")
    head, raw, config = made(tmp_path / "target", "nemotron_h")
    text = config | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    theirs = drafters.Model(drafters.ModelConfig.from_dict({"text_config": text}))
    own = {name.removeprefix("mtp."): tensor for name, tensor in raw.items()}
    theirs.load_weights(list(theirs.sanitize(own).items()))
    cache = theirs.make_cache()

    def states(embeddings: mx.array, hidden: mx.array) -> mx.array:
        result: mx.array = theirs._forward_hidden(embeddings, hidden, None, cache)[0]
        return result

    assert largest_difference(head, states) < 1e-4


def test_a_head_of_glm_5_equals_that_of_mlx_vlm(tmp_path: Path) -> None:
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.glm_moe_dsa_mtp", reason="mlx-vlm is not installed")
    split: Any = pytest.importorskip("mlx_vlm.speculative.drafters.glm_moe_dsa_mtp.split")
    head, raw, config = made(tmp_path / "target", "glm_moe_dsa")
    splitter = split.GlmMoeDsaMTPSplitter()
    chosen = {name: tensor for name, tensor in raw.items() if not name.endswith(("embed_tokens.weight", "head.weight"))}
    tensors = splitter.rename(chosen, config)
    splitter.postprocess(tensors, config)
    theirs = drafters.Model(drafters.ModelConfig.from_dict({"text_config": config}))
    theirs.load_weights(list(tensors.items()))
    theirs._cache = theirs.make_cache()

    def states(embeddings: mx.array, hidden: mx.array) -> mx.array:
        cache = theirs._cache[0]
        result: mx.array = theirs.mtp(hidden, embeddings, theirs._mask_for(embeddings, cache), cache)
        return result

    assert largest_difference(head, states) < 1e-4


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe_lite", "nemotron_h"])
def test_a_head_that_mlx_vlm_has_split_gives_the_logits_by_hand(family: str, tmp_path: Path) -> None:
    split: Any = pytest.importorskip(f"mlx_vlm.speculative.drafters.{family}_mtp.split")
    raw, by_hand = save(tmp_path / "target", family)
    embed(tmp_path / "target", raw)
    name = {"glm_moe_dsa": "GlmMoeDsa", "glm4_moe_lite": "Glm4MoeLite", "nemotron_h": "NemotronH"}[family]
    splitter = getattr(split, f"{name}MTPSplitter")()
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    if family == "nemotron_h":
        config["mtp_hybrid_override_pattern"] = "*E"
    tensors = splitter.rename({key: raw[key] for key in raw if splitter.select_keys(key, config)}, config)
    if splitter.draft_model_cls is not None:
        tensors = splitter.draft_model_cls.sanitize(splitter.sanitize_ctx(config), tensors)
    splitter.postprocess(tensors, config)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({"model_type": splitter.output_model_type}))
    mx.save_safetensors(str(tmp_path / "head" / "model.safetensors"), tensors, {"format": "mlx"})
    network, _, _ = read(family, tmp_path / "target")
    network.set_dtype(mx.float32)
    own = np.array(logits_of(tmp_path / "target", tmp_path / "head"))
    tolerance = 0.2 if family == "glm4_moe_lite" else 1e-4  # its splitter casts to bfloat16
    np.testing.assert_allclose(own, np.array(by_hand(network)), atol=tolerance)
