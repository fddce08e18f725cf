"""Sessions that pause: for their client, or because it is the turn of others."""

from __future__ import annotations

from collections import Counter

from tests.unit.crowd import Crowd, Request, settle


def linear(number: int) -> float:
    """The time of a token in each of several sessions that are computed one after the other."""
    return float(number)


async def rounds(crowd: Crowd, count: int) -> Counter[str]:
    """Let all running sessions have this number of rounds, and return the number of running sessions by client."""
    for _ in range(count):
        for each in [*crowd.running]:
            each.next_round()
        await settle()
    return Counter(each.client for each in crowd.running)


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
    async with Crowd(max_sessions=8, seconds_per_token=linear) as crowd:
        greedy = [crowd.come(client="a") for _ in range(8)]
        await settle()
        one = crowd.come(client="b")
        await settle()
        await rounds(crowd, 2)
        assert crowd.running == [greedy[7], one]
        one.end()
        await settle()
        assert set(crowd.running) == set(greedy)


async def test_sessions_of_a_client_that_gave_way_alternate() -> None:
    async with Crowd(max_sessions=8, seconds_per_token=linear) as crowd:
        greedy = [crowd.come(client="a") for _ in range(4)]
        one = crowd.come(client="b")
        had = Counter[Request]()
        await settle()
        for _ in range(100):
            had.update(crowd.running)
            await rounds(crowd, 1)
        assert had[one] == 100
        assert max(had[each] for each in greedy) - min(had[each] for each in greedy) <= 10


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


async def test_a_client_that_runs_keeps_a_place_when_more_clients_come_than_there_are_places() -> None:
    async with Crowd(max_sessions=2) as crowd:
        for client in "aab":
            crowd.come(client=client)
        await settle()
        await rounds(crowd, 2)
        crowd.come(client="c")
        assert await rounds(crowd, 50) == {"a": 1, "b": 1}


async def test_nobody_gives_way_to_who_waits_for_memory_or_behind_one_who_does() -> None:
    async with Crowd(max_sessions=8, capacity=20, seconds_per_token=linear) as crowd:
        for _ in range(8):
            crowd.come(2, client="a")
        await settle()
        crowd.come(15, client="b")
        crowd.come(1, client="c")
        assert await rounds(crowd, 30) == {"a": 8}


async def test_what_has_no_memory_does_not_count_as_wanted() -> None:
    async with Crowd(max_sessions=8, capacity=20, seconds_per_token=linear) as crowd:
        for _ in range(8):
            crowd.come(14, client="a")
        await settle()
        for _ in range(6):
            crowd.come(1, client="b")
        assert await rounds(crowd, 30) == {"a": 1, "b": 1}


async def test_what_a_batch_costs_may_change() -> None:
    slope = 0.0
    async with Crowd(max_sessions=8, seconds_per_token=lambda number: 1 + slope * number) as crowd:
        for client in "aaaaaaab":
            crowd.come(client=client)
        assert await rounds(crowd, 10) == {"a": 7, "b": 1}
        slope = 100.0
        assert await rounds(crowd, 10) == {"a": 1, "b": 1}
        slope = 0.0
        assert await rounds(crowd, 10) == {"a": 7, "b": 1}


async def test_sessions_of_one_client_alone_do_not_alternate() -> None:
    async with Crowd(max_sessions=1) as crowd:
        first, second = crowd.come(), crowd.come()
        await settle()
        first.pause()
        first.next_round()
        await rounds(crowd, 12)
        assert crowd.running == [second]
