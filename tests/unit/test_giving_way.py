"""Sessions that pause: for their client, or because it is the turn of others."""

from __future__ import annotations

from collections import Counter

from tests.unit.crowd import Crowd, Request, settle


async def test_the_place_of_a_paused_session_goes_to_the_next_and_its_memory_does_not() -> None:
    async with Crowd(max_sessions=1, capacity=10) as crowd:
        first, second, large = crowd.come(6), crowd.come(4), crowd.come(5)
        await settle()
        first.pause()
        await settle()
        assert crowd.running == [second]
        second.end()
        await settle()
        assert crowd.running == []
        assert crowd.waiting == [large]  # until there is memory
        first.next_round()
        await settle()
        assert crowd.running == [first]
        first.end()
        await settle()
        assert crowd.running == [large]


async def test_a_session_that_goes_on_waits_for_a_place_before_new_ones_of_its_client() -> None:
    async with Crowd(max_sessions=1) as crowd:
        first, second, third = crowd.come(), crowd.come(), crowd.come()
        await settle()
        first.pause()
        await settle()
        first.next_round()
        await settle()
        assert crowd.running == [second]
        second.end()
        await settle()
        assert crowd.running == [first]
        assert crowd.waiting == [third]


async def test_beyond_as_many_as_may_pause_a_session_keeps_its_place() -> None:
    async with Crowd(max_sessions=2, max_queued=1, capacity=100) as crowd:
        for _ in range(3):
            request = crowd.come()
            await settle()
            request.pause()
        kept = crowd.come()
        await settle()
        kept.pause()
        await settle()
        assert (len(crowd.paused), crowd.running) == (3, [kept])


async def test_who_runs_more_gives_way_between_rounds_until_all_run_as_many() -> None:
    async with Crowd(max_sessions=4, max_queued=10) as crowd:
        greedy = [crowd.come(client="a") for _ in range(5)]
        await settle()
        others = [crowd.come(client="b") for _ in range(3)]
        await settle()
        assert crowd.running == [*greedy[:4], others[0]]
        for one in greedy[:4]:
            one.next_round()
            await settle()
        assert crowd.paused == greedy[:2]
        assert crowd.running == [*greedy[2:4], *others[:2]]
        for one in others:
            one.end()
        await settle()
        assert crowd.paused == []


async def test_where_a_batch_costs_time_a_client_with_one_session_has_half_of_the_machine() -> None:
    async with Crowd(max_sessions=8, seconds_per_token=lambda number: number) as crowd:
        greedy = [crowd.come(client="a") for _ in range(8)]
        await settle()
        one = crowd.come(client="b")
        await settle()
        for _ in range(2):
            for each in [*crowd.running]:
                each.next_round()
            await settle()
        assert crowd.running == [greedy[7], one]
        one.end()
        await settle()
        assert set(crowd.running) == set(greedy)


async def test_sessions_of_a_client_that_gave_way_take_turns() -> None:
    async with Crowd(max_sessions=8, seconds_per_token=lambda number: number) as crowd:
        greedy = [crowd.come(client="a") for _ in range(4)]
        one = crowd.come(client="b")
        rounds = Counter[Request]()
        await settle()
        for _ in range(100):
            for each in [*crowd.running]:
                rounds[each] += 1
                each.next_round()
            await settle()
        assert rounds[one] == 100
        assert max(rounds[each] for each in greedy) - min(rounds[each] for each in greedy) <= 10


async def test_who_is_about_to_leave_does_not_go_on() -> None:
    async with Crowd(max_sessions=1) as crowd:
        first, second = crowd.come(), crowd.come()
        await settle()
        first.pause()
        first.next_round()
        await settle()
        assert (crowd.running, crowd.paused) == ([second], [first])
        first.stop_waiting()
        await settle()
        second.end()
        third = crowd.come()
        await settle()
        assert crowd.running == [third]
