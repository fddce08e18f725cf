"""Near ties, from a target's calibration to its clients: float32 on a CPU gives no near tie."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from specd.client import Client
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.model_pb2 import DescribeRequest
from specd.v1.model_pb2_grpc import ModelServiceStub
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from tests.conftest import TWENTY_PROMPTS
from tests.e2e.calls import responses_to
from tests.e2e.faults import PATIENT
from tests.e2e.processes import read_metric, run_specd
from tests.raw_client import RawClient

PROMPT = "class Stack:\n    def"
COARSE = 0.02  # of 16 bits


async def test_in_float32_on_a_cpu_nothing_is_a_near_tie(stack: Stack, client: RawClient) -> None:
    before = read_metric(stack.coordinator, "specd_near_ties_total")  # other tests' requests may have some
    for i, path in enumerate(TWENTY_PROMPTS[:6]):
        sampling = SamplingParameters(temperature=(i % 2) * 0.8, seed=i)
        responses = await responses_to(client.generate(path.read_text(), max_tokens=48, sampling=sampling))
        statistics = responses[-1].statistics
        assert statistics.near_ties == 0
        assert statistics.smallest_margin > 0
        margins = [token.margin for response in responses for token in response.tokens]
        assert margins[statistics.smallest_margin_position] == statistics.smallest_margin == min(margins)
    assert read_metric(stack.coordinator, "specd_near_ties_total") == before


async def test_by_rejection_there_are_no_margins(client: RawClient) -> None:
    sampling = SamplingParameters(temperature=1.0, acceptance=ACCEPTANCE_METHOD_REJECTION)
    responses = await responses_to(client.generate(PROMPT, max_tokens=16, sampling=sampling))
    assert not responses[-1].statistics.HasField("smallest_margin")
    assert not any(token.HasField("margin") for response in responses for token in response.tokens)


@pytest.mark.thorough
async def test_a_coarse_target_says_where_its_choices_were_near_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start takes the rounding from what an earlier one has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = {**PATIENT, "SPECD_CALIBRATION_SECONDS": "0.2"}
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=quick) as stack:
        assert 0 < await rounding_of(stack) < 1e-5
    for path in (tmp_path / "specd").glob("step-costs-*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "logit_rounding": COARSE}))
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=quick) as stack:
        assert await rounding_of(stack) == COARSE
        with Client(stack.address) as client:
            completion = client.generate(PROMPT, max_tokens=64).completion()
        statistics, tokens = completion.statistics, completion.tokens
        near_ties = [token for token in tokens if token.near_tie]
        assert 0 < statistics.near_ties == len(near_ties) < 48
        smallest = tokens[statistics.smallest_margin_position or 0]
        assert smallest.margin == statistics.smallest_margin == min(token.margin or 0 for token in tokens)
        assert smallest.near_tie
        assert read_metric(stack.coordinator, "specd_near_ties_total") == len(near_ties)
        shown = run_specd("generate", PROMPT, "--max-tokens", "64", "--address", stack.address)
        assert f"{len(near_ties)} near ties (smallest margin" in shown.stderr


async def rounding_of(stack: Stack) -> float:
    """Return the rounding that a target describes."""
    async with grpc.aio.insecure_channel(stack.target.facts["address"]) as channel:
        return (await ModelServiceStub(channel).Describe(DescribeRequest())).logit_rounding
