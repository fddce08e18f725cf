"""Heads of the families after DeepSeek-V3's report and of others: names, order, conversion, and exact texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from specd.errors import StartupError
from specd.sampling import Sampling
from specd.worker.layers import rows
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.head_loader import read_head
from specd.worker.model.loader import load, read
from specd.worker.session.head_draft import HeadDraft
from tests.thorough import examples
from tests.worker.families import save_family
from tests.worker.head_files import Tensors
from tests.worker.layout_heads import HEADS, IDS, NEXT, save
from tests.worker.test_convert import convert
from tests.worker.test_self_draft import COSTS, decode_all, prompts_of, serving


def embed(directory: Path, head: Tensors) -> None:
    mx.save_safetensors(str(directory / "model-00002-of-00002.safetensors"), head, {"format": "pt"})


def logits_of(directory: Path, separate: Path | None = None, drafted: Sequence[int] = ()) -> mx.array:
    """Return the logits of all pairs, and those of a chain of drafts, with the head's own states."""
    network, _, _ = read("target", directory)
    network.set_dtype(mx.float32)
    head = read_head(network, directory, separate)
    assert head is not None
    _, hidden = head.states.run(IDS, SessionLayers(network).caches)
    layers: Any = SessionLayers(head)
    states = [feed(head, layers, NEXT, hidden)]
    for token in drafted:
        states += [feed(head, layers, mx.array([[token]]), states[-1][:, -1:])]
    return head.logits(mx.concatenate(states, axis=1))


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


@pytest.mark.parametrize("family", ["bailing_moe_v3", "deepseek_v32", "mimo_v2_flash", "nemotron_h"])
def test_a_quantised_conversion_keeps_a_head(family: str, tmp_path: Path) -> None:
    head, by_hand = save(tmp_path / "target", family)
    embed(tmp_path / "target", head)
    assert "head" not in convert(tmp_path / "target", tmp_path / "converted", bits=8)
    network, _, _ = read(family, tmp_path / "converted")
    network.set_dtype(mx.float32)
    expected, own = np.array(by_hand(network)), np.array(logits_of(tmp_path / "converted"))
    assert 1e-6 < np.abs(own - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("family", HEADS)
def test_a_published_head_can_have_a_directory_of_its_own(family: str, tmp_path: Path) -> None:
    head, by_hand = save(tmp_path / "target", family)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    embed(tmp_path / "head", head)
    network, _, _ = read(family, tmp_path / "target")
    network.set_dtype(mx.float32)
    drafted = [70, 800, 6]
    own = np.array(logits_of(tmp_path / "target", tmp_path / "head", drafted))
    np.testing.assert_allclose(own, np.array(by_hand(network, drafted)), atol=1e-4)


@pytest.mark.parametrize("family", HEADS)
def test_after_any_rewind_or_copy_a_head_gives_what_a_fresh_one_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with a window too rewinds by any number."""
    monkeypatch.setattr(rows, "SLACK", 1)
    monkeypatch.setattr(KVCache, "step", 2)
    head = made(tmp_path, family)
    hidden = mx.random.normal((1, NEXT.size, head.size), key=mx.random.key(4))
    fresh = feed(head, SessionLayers(head), NEXT, hidden)
    layers = SessionLayers(head)
    feed(head, layers, NEXT, hidden)
    for position in (11, 10, 3, 8, 1, 0, 5):
        assert layers.rewind(position) == position
        feed(head, layers, NEXT[:, ::-1][:, :2], hidden[:, :2])  # drafts, which are forgotten
        assert layers.rewind(position) == position
        copied = layers.copy(position) if position else SessionLayers(head)
        for own in (layers, copied):
            states = feed(head, own, NEXT[:, position:], hidden[:, position:])
            np.testing.assert_allclose(np.array(states), np.array(fresh[:, position:]), atol=1e-4)


def made(directory: Path, family: str) -> Any:
    """Return a head of random weights."""
    tensors, _ = save(directory / "target", family)
    network, _, _ = read(family, directory / "target")
    network.set_dtype(mx.float32)
    (directory / "config.json").write_text("{}")
    embed(directory, tensors)
    return read_head(network, directory / "target", directory)


def feed(head: Any, layers: SessionLayers, tokens: mx.array, hidden: mx.array) -> mx.array:
    """Feed pairs to a session of a head, and return its states."""
    states: mx.array = head(tokens, hidden, layers.caches)
    layers.fed(tokens.shape[1])
    return states


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("nemotron_h", {"n_routed_experts": None}, 'heads with the blocks "\\*E" are supported'),
        ("step3p5", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types .* has 4 items"),
        ("step3p5", {"rope_theta": [10000.0] * 4}, "rope_theta in config.json has 4 items"),
    ],
)
def test_a_head_that_a_config_does_not_describe_is_refused(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = tmp_path / "target"
    head, _ = save(directory, family)
    embed(directory, {name: tensor for name, tensor in head.items() if ".experts." not in name})
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    with pytest.raises(StartupError, match=reason):
        logits_of(directory)


def test_a_head_with_a_recurrent_block_is_refused_by_its_names(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    head, _ = save(directory, "nemotron_h")
    recurrent = {name: tensor for name, tensor in head.items() if ".0.mixer." not in name}
    embed(directory, recurrent | {"mtp.layers.0.mixer.A_log": mx.zeros(8), "mtp.layers.0.mixer.D": mx.zeros(8)})
    with pytest.raises(StartupError, match=r"it lacks layers\.0\.mixer\.k_proj.*also has layers\.0\.mixer\.A_log"):
        logits_of(directory)


def test_a_head_beside_embeddings_of_n_grams_is_refused(tmp_path: Path) -> None:
    head, _ = save(tmp_path / "other", "longcat_flash")
    save_family(tmp_path / "target", "longcat_flash_ngram")
    embed(tmp_path / "target", head)
    with pytest.raises(StartupError, match="n-grams"):
        logits_of(tmp_path / "target")


@pytest.mark.parametrize("family", examples(HEADS, 4))
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
