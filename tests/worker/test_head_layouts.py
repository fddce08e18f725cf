"""Heads of the families after DeepSeek-V3's report and of others: names, order, conversion, and exact texts."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from specd.sampling import Sampling
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.head_loader import read_head
from specd.worker.model.loader import load, read
from specd.worker.session.head_draft import HeadDraft
from tests.worker.head_files import Tensors
from tests.worker.layout_heads import HEADS, IDS, NEXT, save
from tests.worker.test_convert import convert
from tests.worker.test_self_draft import COSTS, decode_all, prompts_of, serving


def embed(directory: Path, head: Tensors) -> None:
    mx.save_safetensors(str(directory / "model-00002-of-00002.safetensors"), head, {"format": "pt"})


def logits_of(directory: Path, separate: Path | None = None) -> mx.array:
    network, _, _ = read("target", directory)
    network.set_dtype(mx.float32)
    head = read_head(network, directory, separate)
    assert head is not None
    _, hidden = head.states.run(IDS, SessionLayers(network).caches)
    return head.logits(head(NEXT, hidden, SessionLayers(head).caches))


# mlx-lm drops the head of DeepSeek-V3, which Kimi K2.5 has too, only behind 61 layers.
@pytest.mark.parametrize("family", [name for name in HEADS if name not in ("deepseek_v3", "kimi_k25")])
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


@pytest.mark.parametrize("family", HEADS)
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


@pytest.mark.parametrize("family", HEADS)
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
