"""Check 9: floods of frames that are cheap to send, and readers that take nothing or a byte at a time."""

from __future__ import annotations

import pytest

from tests.e2e.completions import complete
from tests.security.attacks import attacking
from tests.security.standing import Standing, assert_served


@pytest.mark.parametrize(
    "attack", ["ping_flood", "settings_flood", "priority_flood", "window_flood", "empty_data_flood"]
)
async def test_others_are_served_during_a_flood(standing: Standing, attack: str) -> None:
    async with attacking(attack, standing.stack.address, connections=8, rate=10_000, seconds=4) as outcomes:
        await assert_served(standing, num_times=1)
    assert outcomes[0].num_operations > 1000


@pytest.mark.parametrize("attack", ["zero_window_verify", "one_byte_verify"])
async def test_a_target_serves_others_beside_slow_readers(standing: Standing, attack: str) -> None:
    target = standing.stack.target.facts["address"]
    async with attacking(attack, target, connections=2, rate=40, seconds=4):
        await assert_served(standing, num_times=1)


@pytest.mark.parametrize("attack", ["zero_window_generate", "one_byte_generate"])
async def test_clients_that_read_nothing_do_not_keep_others_out(standing: Standing, attack: str) -> None:
    """20 that ask for 400 tokens each: they take their share of the steps, and no more."""
    async with attacking(attack, standing.stack.address, connections=1, rate=40, seconds=60):
        completion = await complete(standing.client)
    assert completion.token_ids == standing.token_ids
