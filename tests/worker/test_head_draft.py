"""A head of the target as its draft: exact texts, and proposals that depend on the session's tokens alone."""

from __future__ import annotations

import pytest

from specd.sampling import Sampling
from specd.worker.heads.pairs import attach_head
from specd.worker.model.loader import LoadedModel
from specd.worker.session.head_draft import HeadDraft
from tests.worker.models import tiny_model
from tests.worker.oracle_head import OracleHead
from tests.worker.test_self_draft import COSTS, Caller, decode_all, prompts_of, serving


def with_head(right: float) -> LoadedModel:
    model = tiny_model()
    head = OracleHead(model.network, right=right)
    head.batches = model.batches
    attach_head(model.network, head)
    return model


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
async def test_texts_are_those_of_the_target_alone(right: float, temperature: float, count: int) -> None:
    model = with_head(right)
    for seed in range(3):
        sampling = Sampling(temperature=temperature, seed=seed)
        prompts = prompts_of(seed, count)
        async with serving(None) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=seed, is_erratic=False)
        async with serving(HeadDraft(model.info, COSTS), model) as service:
            for is_erratic in (False, True, True):
                said, _ = await decode_all(service, sampling, prompts, (0, 1, 4, 8), seed=seed, is_erratic=is_erratic)
                assert said == expected


def accepted(callers: list[Caller]) -> float:
    return sum(each.num_accepted for each in callers) / sum(each.num_proposed for each in callers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_oracle_is_always_accepted(temperature: float) -> None:
    model = with_head(1.0)
    sampling = Sampling(temperature=temperature, seed=3)
    async with serving(HeadDraft(model.info, COSTS), model) as service:
        for seed in (3, 4, 3):  # the last continues what the first has left
            _, callers = await decode_all(service, sampling, prompts_of(seed, 4), (2, 5), seed=seed, is_erratic=False)
            assert {fault for each in callers for fault in each.faults} == {""}
            assert accepted(callers) > 0.97
