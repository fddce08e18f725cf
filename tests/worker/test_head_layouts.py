"""Heads of the families after DeepSeek-V3's report and of MiMo: names, order, conversion, and exact texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from specd.sampling import Sampling
from specd.worker.heads.layouts import layout_of
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.head_loader import read_head
from specd.worker.model.loader import load, read
from specd.worker.session.head_draft import HeadDraft
from tests.worker.families import save_family
from tests.worker.head_files import Tensors
from tests.worker.test_convert import convert
from tests.worker.test_self_draft import COSTS, decode_all, prompts_of, serving

IDS, NEXT = [[5, 9, 100, 7, 8000, 3, 44, 2]], [[9, 100, 7, 8000, 3, 44, 2, 77]]
NEXT_N = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "model.layers.4.")
NAMES = {
    "glm4_moe": NEXT_N,
    "glm4_moe_lite": NEXT_N,
    "deepseek_v3": NEXT_N,
    "kimi_k25": (*NEXT_N[:-1], f"language_model.{NEXT_N[-1]}"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "model.mtp_layers.0."),
}


def save(directory: Path, family: str) -> tuple[Tensors, Callable[[Any], mx.array]]:
    """Save a tiny target; return a raw head for it, and the logits that a network has with it, by hand."""
    save_family(directory, family)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    network, _, _ = read(family, directory)
    network.set_dtype(mx.float32)
    args: Any = _text_model(network).args
    known = layout_of(network)
    assert known is not None
    layout, kind = known
    mx.random.seed(3)
    layer: Any = layout.make_layer(kind, args)
    shapes: Any = tree_flatten(layer.parameters())
    weights = {name: mx.random.normal(each.shape) / each.shape[-1] ** 0.5 for name, each in shapes}
    layer.update(tree_unflatten([*weights.items()]))
    size = args.hidden_size
    norms = [1 + 0.3 * mx.random.normal((size,)) for _ in range(3)]
    fc = mx.random.normal((size, 2 * size)) / size**0.5

    def logits(other: Any) -> mx.array:
        caches, other = SessionLayers(other).caches, _text_model(other)
        embedding, hidden = other.model.embed_tokens, other.model(mx.array(IDS), caches)
        of_token = mx.fast.rms_norm(embedding(mx.array(NEXT)), norms[0], args.rms_norm_eps)
        of_state = mx.fast.rms_norm(hidden, norms[1], args.rms_norm_eps)
        pair = [of_state, of_token] if family == "mimo" else [of_token, of_state]
        x, cache = mx.concatenate(pair, axis=-1) @ fc.T, KVCache()
        x = layer(x, create_attention_mask(x, cache, return_array=True), cache)
        output = other.lm_head if "lm_head" in other else embedding.as_linear
        result: mx.array = output(mx.fast.rms_norm(x, norms[2], args.rms_norm_eps))
        return result

    *own, prefix = NAMES[family]
    tensors = (norms[0], norms[1], fc, norms[2])
    head = {f"{prefix}{name}.weight": tensor for name, tensor in zip(own, tensors, strict=True)}
    head |= {f"{prefix}{name}": tensor for name, tensor in _as_published(weights, args).items()}
    if prefix.endswith(NEXT_N[-1]):  # copies of the target's, which nothing reads
        head |= {f"{prefix}embed_tokens.weight": mx.zeros((8, 2)), f"{prefix}shared_head.head.weight": mx.zeros((8, 2))}
    return head, logits


def _text_model(network: Any) -> Any:
    return getattr(network, "language_model", network)


def _as_published(weights: Tensors, args: Any) -> Tensors:
    """Return a layer's weights with a tensor for each expert, and keys and values of latents in one."""
    result: Tensors = {}
    for name, tensor in weights.items():
        if ".switch_mlp." in name:
            result |= {name.replace("switch_mlp", f"experts.{i}"): mx.contiguous(part) for i, part in enumerate(tensor)}
        elif name == "self_attn.embed_q.weight":
            both = mx.concatenate([tensor.swapaxes(-1, -2), weights["self_attn.unembed_out.weight"]], axis=1)
            result["self_attn.kv_b_proj.weight"] = mx.contiguous(both.reshape(-1, both.shape[-1]))
        elif name != "self_attn.unembed_out.weight":
            result[name] = tensor
    return result


def embed(directory: Path, head: Tensors) -> None:
    mx.save_safetensors(str(directory / "model-00002-of-00002.safetensors"), head, {"format": "pt"})


def logits_of(directory: Path, separate: Path | None = None) -> mx.array:
    network, _, _ = read("target", directory)
    network.set_dtype(mx.float32)
    head = read_head(network, directory, separate)
    assert head is not None
    _, hidden = head.states.run(mx.array(IDS), SessionLayers(network).caches)
    return head.logits(head(mx.array(NEXT), hidden, SessionLayers(head).caches))


# mlx-lm drops the head of DeepSeek-V3, which Kimi K2.5 has too, only behind 61 layers.
@pytest.mark.parametrize("family", [name for name in NAMES if name not in ("deepseek_v3", "kimi_k25")])
def test_a_published_head_gives_the_logits_by_hand_also_after_a_conversion(family: str, tmp_path: Path) -> None:
    head, by_hand = save(tmp_path / "target", family)
    embed(tmp_path / "target", head)
    network, _, _ = read(family, tmp_path / "target")
    network.set_dtype(mx.float32)
    expected = np.array(by_hand(network))
    assert expected.std() > 0.1
    np.testing.assert_allclose(np.array(logits_of(tmp_path / "target")), expected, atol=1e-4)
    assert "head" not in convert(tmp_path / "target", tmp_path / "converted")
    np.testing.assert_allclose(np.array(logits_of(tmp_path / "converted")), expected, atol=1e-4)


@pytest.mark.parametrize("family", NAMES)
def test_a_published_head_can_have_a_directory_of_its_own(family: str, tmp_path: Path) -> None:
    head, by_hand = save(tmp_path / "target", family)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    embed(tmp_path / "head", head)
    network, _, _ = read(family, tmp_path / "target")
    network.set_dtype(mx.float32)
    np.testing.assert_allclose(
        np.array(logits_of(tmp_path / "target", tmp_path / "head")), np.array(by_hand(network)), atol=1e-4
    )


@pytest.mark.parametrize("family", NAMES)
async def test_texts_are_those_of_the_target_alone(family: str, tmp_path: Path) -> None:
    head, _ = save(tmp_path / "target", family)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    embed(tmp_path / "head", head)
    model = load(str(tmp_path / "target"), blas="", is_optimized=True, head=str(tmp_path / "head"))
    assert model.head is not None
    for temperature in (0.0, 1.0):
        sampling, prompts = Sampling(temperature=temperature, seed=2), prompts_of(2, 3)
        async with serving(None, model) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=2, is_erratic=False)
        async with serving(HeadDraft(model.head.info, COSTS), model) as service:
            said, callers = await decode_all(service, sampling, prompts, (0, 1, 4), seed=2, is_erratic=True)
            assert {fault for each in callers for fault in each.faults} <= {""}
        assert said == expected
