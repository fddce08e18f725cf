"""Check 7: calls that begin and are cancelled at once, on several connections (CVE-2023-44487)."""

from __future__ import annotations

import pytest

from specd.rpc.limits import MAX_STREAMS
from specd.supervisor import Stack
from tests.e2e.processes import draft_of, eventually, read_metric
from tests.security.attacks import attacking
from tests.security.http2 import Connection
from tests.security.standing import Standing, assert_served

SECONDS = 5


@pytest.mark.parametrize("connections", [1, 20])
async def test_others_are_served_during_a_rapid_reset(standing: Standing, connections: int) -> None:
    address = standing.stack.address
    async with attacking("rapid_reset", address, connections=connections, rate=5000, seconds=SECONDS) as outcomes:
        await assert_served(standing)
    (outcome,) = outcomes
    assert outcome.num_operations > 1000


async def test_a_connection_has_a_limited_number_of_calls(stack: Stack) -> None:
    for child, most in (
        (stack.coordinator, 32 + 128 + 64),
        (stack.target, MAX_STREAMS),
        (draft_of(stack), MAX_STREAMS),
    ):
        connection = await Connection.open(child.facts["address"])
        await connection.receive()
        assert connection.h2.remote_settings.max_concurrent_streams == most
        connection.close()


async def test_a_worker_outlives_a_rapid_reset(stack: Stack, standing: Standing) -> None:
    target = stack.target.facts["address"]
    async with attacking("rapid_reset_verify", target, connections=4, rate=2000, seconds=SECONDS) as outcomes:
        await assert_served(standing)
    (outcome,) = outcomes
    assert outcome.num_operations > 500


async def test_a_cancelled_call_leaves_no_session(stack: Stack, standing: Standing) -> None:
    async with attacking("rapid_reset", stack.address, connections=4, rate=1000, seconds=2):
        pass
    await eventually(lambda: read_metric(stack.coordinator, "specd_active_sessions") == 0)
