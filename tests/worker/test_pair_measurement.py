"""The trial of a pair: its texts are the target's, and its counts those of decoding with the draft."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from specd.bench.pair_measurement import TargetText, agreements_of, decoded_rounds, measure_pairs, run, texts_of
from specd.pair_worth import DraftTrial, TargetTrial, rounds_along, worth_of
from specd.sampling import Sampling
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.step_costs import StepCosts
from specd.vocabulary import OWN_HEAD
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.self_draft import ModelDraft
from tests.worker.head_files import save_bigram, save_bigram_apart
from tests.worker.models import copy_variant


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return load(EMBEDDED_DRAFT, blas="")


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[TargetText]:
    return texts_of(target)


def test_the_texts_are_the_targets_own(target: LoadedModel, texts: list[TargetText]) -> None:
    assert sum(len(text.tokens) - text.start for text in texts) >= 48
    for text in texts:
        number = len(text.tokens) - text.start
        prompt = mx.array(list(text.tokens[: text.start]))
        expected = [int(token) for token, _ in generate_step(prompt, target.network, max_tokens=number)]
        assert list(text.tokens[text.start :]) == expected


@pytest.mark.parametrize("k", [1, 3, 8])
def test_rounds_along_a_text_are_those_that_target_and_draft_decode(
    target: LoadedModel, draft: LoadedModel, texts: list[TargetText], k: int
) -> None:
    drafts = ModelDraft(draft, StepCosts({1: {1: 0.01}}), PrefixCache(0), PrefillChunk(1.0))
    accepted = 0
    for text in texts:
        drafter = drafts.begin(Sampling(), target.info.vocabulary_size)
        decoded = run(decoded_rounds(target, drafter, text, k))
        rounds = rounds_along(run(agreements_of(draft, target.info, text)), k)
        # The last round of the decoder may begin where a whole proposal would pass the end of the text.
        assert abs(decoded.rounds - rounds.rounds) <= 1
        assert abs(decoded.accepted - rounds.accepted) <= k
        accepted += rounds.accepted
    assert accepted > 20


def measured(target: str, drafts: dict[str, str]) -> tuple[TargetTrial, dict[str, DraftTrial]]:
    request = {"target": target, "heads": {}, "drafts": drafts, "threads": {"target": 1, "draft": 1}}
    first, *others = measure_pairs(request, "")
    again = list(measure_pairs({**request, "target": "/nowhere", "known": first["target"]}, ""))
    trials = {each["draft"]: DraftTrial.restored(each["trial"]) for each in others}
    # With what is known of the target, it is not loaded, and the counts are the same.
    assert {each["draft"]: DraftTrial.restored(each["trial"]).rounds for each in again} == {
        key: each.rounds for key, each in trials.items()
    }
    return TargetTrial.restored(first["target"]), trials


def test_each_draft_has_counts_and_times_or_a_reason(tmp_path: Path) -> None:
    broken = copy_variant(EMBEDDED_DRAFT, tmp_path / "broken", {"config.json": {"hidden_size": 128}})
    target, trials = measured(EMBEDDED_TARGET, {"a": EMBEDDED_DRAFT, "b": EMBEDDED_T5_DRAFT, "c": broken})
    assert {1, 5} <= set(target.seconds) <= set(range(1, 10))
    worth = worth_of(target, trials["a"])
    assert worth is not None
    assert worth.acceptance > 0.5
    assert {1, 4} <= set(trials["a"].seconds) <= {1, 2, 4, 8}
    assert "has an encoder" in trials["b"].failure
    assert "cannot load the model" in trials["c"].failure


def test_an_encoder_decoder_has_sources() -> None:
    target, trials = measured(EMBEDDED_T5_TARGET, {"a": EMBEDDED_T5_DRAFT})
    worth = worth_of(target, trials["a"])
    assert worth is not None
    assert worth.acceptance > 0.2


def test_a_target_without_a_head_has_no_trial_of_one() -> None:
    _, head = measure_pairs(heads_of(EMBEDDED_TARGET, OWN_HEAD), "")
    assert "no head" in head["trial"]["failure"]


def heads_of(target: str, *heads: str) -> dict[str, Any]:
    threads = {"target": 1, "draft": 1}
    return {"target": target, "heads": {head: head for head in heads}, "drafts": {}, "threads": threads}


def test_a_head_of_its_own_is_measured_or_has_a_reason(tmp_path: Path) -> None:
    _, exact = save_bigram_apart(tmp_path / "bigram", "qwen3_5")
    foreign = copy_variant(exact, tmp_path / "foreign", {})
    shutil.copy(Path(EMBEDDED_DRAFT) / "model.safetensors", foreign)
    first, own, other = measure_pairs(heads_of(str(tmp_path / "bigram"), exact, foreign), "")
    worth = worth_of(TargetTrial.restored(first["target"]), DraftTrial.restored(own["trial"]))
    assert worth is not None
    assert worth.acceptance > 0.9
    assert f"the head in {foreign} has " in other["trial"]["failure"]


def test_a_head_is_measured_with_its_target(tmp_path: Path) -> None:
    """This head is always right."""
    save_bigram(tmp_path / "bigram", "qwen3_5")
    first, head = measure_pairs(heads_of(str(tmp_path / "bigram"), OWN_HEAD), "")
    trial = DraftTrial.restored(head["trial"])
    assert trial.failure == ""
    worth = worth_of(TargetTrial.restored(first["target"]), trial)
    assert worth is not None
    assert worth.acceptance > 0.9
