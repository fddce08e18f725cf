"""A head of the target as its draft: exact texts, and proposals that depend on the session's tokens alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specd.sampling import Acceptance, Sampling
from specd.vocabulary import OWN_HEAD
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import StaticStep
from specd.worker.heads.head import attach_head
from specd.worker.heads.recent_states import KEPT
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.head_draft import HeadDraft
from specd.worker.session.session_cache import SessionCache
from tests.thorough import examples
from tests.worker.head_files import converted, embed, raw_head, save_target
from tests.worker.models import tiny_model
from tests.worker.oracle_head import OracleHead
from tests.worker.test_self_draft import COSTS, Caller, decode_all, prompts_of, serving


def with_head(right: float) -> LoadedModel:
    model = tiny_model()
    head = OracleHead(model.network, right=right)
    head.batches = model.batches
    attach_head(model.network, head)
    return model


def as_on_a_gpu(model: LoadedModel, *, shares: bool) -> LoadedModel:
    """Return the model with whole buffers, compiled passes and, if it `shares`, one pass for all sessions."""
    model.network.fixed_shapes = True
    static = StaticStep(model.network, 10**6, 1)
    return replace(model, static=static, sharing=Sharing(static, 10**9) if shares else None)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_texts_and_proposals_are_the_same_in_the_forms_of_a_gpu(
    temperature: float, shares: bool, count: int
) -> None:
    """A single session also runs ahead in rounds without a proposal."""
    model = as_on_a_gpu(with_head(1.0), shares=shares)
    sampling, prompts = Sampling(temperature=temperature, seed=4), prompts_of(4, count)
    async with serving(None) as service:
        expected, _ = await decode_all(service, sampling, prompts, (0,), seed=4, is_erratic=False)
    async with serving(HeadDraft(model.info, COSTS), model, runs_ahead=True) as service:
        for is_erratic in (True, False):
            said, callers = await decode_all(service, sampling, prompts, (0, 3, 5), seed=4, is_erratic=is_erratic)
            assert said == expected
        assert accepted(callers) > 0.97


@pytest.mark.parametrize(
    ("right", "temperature", "count"),
    examples([(0.7, 1.0, 4), (1.0, 0.0, 1), *product([1.0, 0.7, 0.0], [0.0, 0.7, 1.0], [1, 4, 8])], 2),
)
async def test_texts_are_those_of_the_target_alone(right: float, temperature: float, count: int) -> None:
    model = with_head(right)
    ks = (0, *range(1, 9))
    for seed in range(2):
        sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.1 if seed else 1.0)
        prompts = prompts_of(seed, count)
        async with serving(None) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=seed, is_erratic=False)
        async with serving(HeadDraft(model.info, COSTS), model) as service:
            for is_erratic in (False, True, True):
                said, _ = await decode_all(service, sampling, prompts, ks, seed=seed, is_erratic=is_erratic)
                assert said == expected


def accepted(callers: list[Caller]) -> float:
    return sum(each.num_accepted for each in callers) / sum(each.num_proposed for each in callers)


@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_oracle_is_always_accepted(temperature: float, acceptance: Acceptance) -> None:
    """Its proposals are right only if its pairs are exactly those of the session."""
    model = with_head(1.0)
    sampling = Sampling(temperature=temperature, seed=3, acceptance=acceptance)
    async with serving(HeadDraft(model.info, COSTS), model) as service:
        for seed in (3, 4, 3):  # the last continues what the first has left
            _, callers = await decode_all(service, sampling, prompts_of(seed, 4), (2, 5), seed=seed, is_erratic=False)
            assert {fault for each in callers for fault in each.faults} == {""}
            assert accepted(callers) > 0.97


class Late(Random):
    """Asks for no tokens in the first rounds, for more tokens than hidden states are kept."""

    num_rounds = 0

    def choice(self, seq: Any) -> Any:
        self.num_rounds += 1
        return 0 if self.num_rounds <= 2 * KEPT else super().choice(seq)


@pytest.mark.parametrize(("count", "runs_ahead"), [(2, False), (1, True)])
async def test_rounds_without_a_proposal_lose_no_pairs(count: int, runs_ahead: bool) -> None:
    model = with_head(1.0)
    async with serving(HeadDraft(model.info, COSTS), model, runs_ahead=runs_ahead) as service:
        callers = [Caller(service, Sampling(), Late(i), [5, 3, i]) for i in range(count)]
        await asyncio.gather(*(each.decode(2 * KEPT + 30, ks=(3,), is_erratic=False) for each in callers))
    assert all(each.num_proposed > 15 for each in callers)
    assert accepted(callers) > 0.97


async def test_a_replay_proposes_what_the_undisturbed_session_proposes() -> None:
    """A worker that has begun again gets all tokens at once: its pairs are those of the tokens, in other chunks."""
    model = with_head(0.7)
    sampling = Sampling(temperature=1.0, seed=1)
    async with serving(HeadDraft(model.info, COSTS), model) as service:
        _, (caller,) = await decode_all(service, sampling, prompts_of(1, 1), (4,), seed=1, is_erratic=True)
    assert len(caller.proposals) > 10
    for length, proposal in caller.proposals[::3]:
        async with serving(HeadDraft(model.info, COSTS), model) as service:
            replayed = Caller(service, sampling, Random(0), caller.tokens[: length - 1])
            await replayed.decode(1, ks=(len(proposal),), is_erratic=False)
        assert replayed.tokens == caller.tokens[:length]
        assert replayed.proposals == [(length, proposal)]


async def test_a_second_turn_reuses_all_but_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a recurrent state, which goes back by a token: the pair of the last token has another second one."""
    target = save_target(tmp_path / "target", "qwen3_5")
    embed(target.directory, converted(raw_head(target.text)), "mlx")
    model = load(str(target.directory), blas="", is_optimized=True, head=OWN_HEAD)
    assert model.head is not None
    reused: list[int] = []
    take_over = SessionCache._take_over

    def watched(cache: SessionCache, token_ids: Sequence[int]) -> None:
        take_over(cache, token_ids)
        reused.append(cache.reused_len)

    monkeypatch.setattr(SessionCache, "_take_over", watched)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        first = Caller(service, Sampling(), Random(2), prompts_of(2, 1)[0] * 4)
        await first.decode(20, ks=(3,), is_erratic=False)
        second = Caller(service, Sampling(), Random(2), [*first.tokens, 3, 1, 2])
        await second.decode(1, ks=(3,), is_erratic=False)
    assert reused[0] == 0
    assert reused[1] >= len(first.tokens) - 3
