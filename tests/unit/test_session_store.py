"""Kept sessions: atomic turns, who is forgotten, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from coordinator.sessions.session_store import KeptSession, SessionStore
from specd.errors import ConflictError, NotFoundError
from specd.text.chat import Chat

IDLE_SECONDS = 10.0
BUDGET_TOKENS = 10


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Expected:
    """A session, as the oracle has it."""

    client: str
    session_id: str
    token_ids: list[int]
    num_turns: int
    last_used_at: float
    idle_since: float
    busy: bool


clients = st.sampled_from(["", "a", "b"])


class Store(RuleBasedStateMachine):
    """Any order of calls by three clients, against a list of sessions in the order of their use and the rules."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.steady_clock = Clock(), Clock()
        self.store = SessionStore(IDLE_SECONDS, BUDGET_TOKENS, self.clock, self.steady_clock)
        self.expected: list[Expected] = []  # the least recently used first
        self.turns: dict[str, KeptSession] = {}
        self.num_begun = 0

    def find(self, session_id: str) -> Expected | None:
        return next((one for one in self.expected if one.session_id == session_id), None)

    def find_own(self, session_id: str, client: str) -> Expected | None:
        one = self.find(session_id)
        return one if one is not None and one.client == client else None

    def forget_what_is_idle_too_long(self) -> None:
        for one in [*self.expected]:
            if not one.busy and self.steady_clock.now - one.idle_since >= IDLE_SECONDS:
                self.expected.remove(one)

    def idle_tokens(self, client: str) -> int:
        return sum(len(one.token_ids) for one in self.expected if not one.busy and one.client == client)

    def forget_what_is_too_much(self, last: Expected) -> None:
        if len(last.token_ids) > BUDGET_TOKENS:
            self.expected.remove(last)
        while sum(map(self.idle_tokens, ("", "a", "b"))) > BUDGET_TOKENS:
            # Between two with equally much, the store may forget either.
            most = max(map(self.idle_tokens, ("", "a", "b")))
            oldest = {client: None for client in ("", "a", "b") if self.idle_tokens(client) == most}
            candidates = [next(o for o in self.expected if not o.busy and o.client == client) for client in oldest]
            kept = {session.session_id for client in ("", "a", "b") for session in self.store.list(client)}
            self.expected.remove(next(one for one in candidates if one.session_id not in kept))

    def use(self, one: Expected) -> None:
        one.last_used_at, one.idle_since = self.clock.now, self.steady_clock.now
        self.expected.remove(one)
        self.expected.append(one)

    @rule(target=ids, client=clients)
    def begin(self, client: str) -> str:
        self.num_begun += 1
        session_id = f"s{self.num_begun}"
        self.turns[session_id] = self.store.begin(session_id, client)
        self.expected.append(Expected(client, session_id, [], 0, self.clock.now, self.steady_clock.now, busy=True))
        return session_id

    def refusal(self, call: Callable[[str, str], object], session_id: str, client: str) -> type[Exception] | None:
        """Call as a client, and return the kind of error that this must give, and has given."""
        self.forget_what_is_idle_too_long()
        one = self.find_own(session_id, client)
        if one is not None and not one.busy:
            return None
        kind = NotFoundError if one is None else ConflictError
        with pytest.raises(kind, match=session_id) as error:
            call(session_id, client)
        if one is None:  # another's is like one that never was, word for word
            with pytest.raises(kind) as never:
                call("s0", client)
            assert str(never.value) == str(error.value).replace(session_id, "s0")
        return kind

    @rule(session_id=ids, client=clients)
    def acquire(self, session_id: str, client: str) -> None:
        if self.refusal(self.store.acquire, session_id, client) is None:
            one = self.find(session_id)
            assert one is not None
            session = self.store.acquire(session_id, client)
            assert session.token_ids.tolist() == one.token_ids
            one.busy = True
            self.use(one)
            self.turns[session_id] = session

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=BUDGET_TOKENS + 2))
    def finish(self, data: st.DataObject, token_ids: list[int]) -> None:
        session = self.turns.pop(data.draw(st.sampled_from(sorted(self.turns))))
        self.store.finish(session, token_ids, None)
        one = self.find(session.session_id)
        assert one is not None
        one.token_ids = token_ids
        one.num_turns += 1
        one.busy = False
        self.use(one)
        self.forget_what_is_idle_too_long()
        self.forget_what_is_too_much(one)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        session = self.turns.pop(data.draw(st.sampled_from(sorted(self.turns))))
        self.store.abandon(session)
        one = self.find(session.session_id)
        assert one is not None
        one.busy = False
        self.use(one)
        self.forget_what_is_idle_too_long()
        if one.num_turns == 0:
            self.expected.remove(one)
        else:
            self.forget_what_is_too_much(one)

    @rule(session_id=ids, client=clients)
    def delete(self, session_id: str, client: str) -> None:
        if self.refusal(self.store.delete, session_id, client) is None:
            self.store.delete(session_id, client)
            one = self.find(session_id)
            assert one is not None
            self.expected.remove(one)

    @rule(session_id=ids, client=clients)
    def get(self, session_id: str, client: str) -> None:
        self.forget_what_is_idle_too_long()
        one = self.find_own(session_id, client)
        if one is None:
            with pytest.raises(NotFoundError, match=session_id):
                self.store.get(session_id, client)
        else:
            assert self.store.get(session_id, client).token_ids.tolist() == one.token_ids

    @rule(seconds=st.sampled_from([1.0, IDLE_SECONDS - 1.0, IDLE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.steady_clock.now += seconds

    @rule(seconds=st.sampled_from([-86_400.0, 86_400.0]))
    def set_the_clock(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert 0 <= self.store.idle.num_tokens <= BUDGET_TOKENS

    # Not an invariant: listing forgets what has expired, and every other call is to do that by itself.
    @rule()
    def list_all(self) -> None:
        self.forget_what_is_idle_too_long()
        for client in ("", "a", "b"):
            listed = [
                Expected(
                    s.client, s.session_id, s.token_ids.tolist(), s.num_turns, s.last_used_at, s.idle_since, s.busy
                )
                for s in self.store.list(client)
            ]
            assert listed == [one for one in self.expected[::-1] if one.client == client]
        assert self.store.idle.num_tokens == sum(map(self.idle_tokens, ("", "a", "b")))


TestAnyOrderOfCalls = Store.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> SessionStore:
    return SessionStore(IDLE_SECONDS, BUDGET_TOKENS, clock, clock)


def keep(store: SessionStore, session_id: str, num_tokens: int) -> None:
    store.finish(store.begin(session_id, ""), range(num_tokens), None)


def ids(store: SessionStore) -> list[str]:
    return [session.session_id for session in store.list("")]


def test_a_turn_is_seen_only_when_it_has_finished(store: SessionStore, clock: Clock) -> None:
    keep(store, "a", 2)
    clock.now += 1
    turn = store.acquire("a", "")
    seen = store.get("a", "")
    assert (seen.token_ids.tolist(), seen.num_turns, seen.busy) == ([0, 1], 1, True)
    assert store.expires_at(seen) is None
    before = seen.token_ids
    clock.now += 1
    store.finish(turn, [0, 1, 2, 3], None)
    assert before.tolist() == [0, 1]  # readers of it are not disturbed
    seen = store.get("a", "")
    assert (seen.token_ids.tolist(), seen.num_turns, seen.busy) == ([0, 1, 2, 3], 2, False)
    assert (seen.created_at, seen.last_used_at) == (clock.now - 2, clock.now)
    assert store.expires_at(seen) == clock.now + IDLE_SECONDS


def test_a_jump_of_the_clock_changes_no_time_that_is_left() -> None:
    clock, steady_clock = Clock(), Clock()
    store = SessionStore(IDLE_SECONDS, BUDGET_TOKENS, clock, steady_clock)
    keep(store, "a", 2)
    clock.now += 86_400
    steady_clock.now += 1
    assert store.expires_at(store.get("a", "")) == clock.now + IDLE_SECONDS - 1


def test_an_abandoned_turn_leaves_the_session_as_it_was(store: SessionStore) -> None:
    keep(store, "a", 2)
    store.abandon(store.acquire("a", ""))
    assert store.get("a", "").token_ids.tolist() == [0, 1]
    assert store.get("a", "").num_turns == 1
    store.abandon(store.begin("b", ""))
    assert ids(store) == ["a"]


def test_a_turn_longer_than_the_idle_time_does_not_lose_the_session(store: SessionStore, clock: Clock) -> None:
    keep(store, "a", 2)
    turn = store.acquire("a", "")
    clock.now += 100 * IDLE_SECONDS
    store.expire()
    store.abandon(turn)
    assert ids(store) == ["a"]


@pytest.mark.parametrize(
    "call",
    [
        lambda store, turn: store.expire(),
        lambda store, turn: store.list(""),
        lambda store, turn: store.begin("b", ""),
        lambda store, turn: store.get(turn.session_id, ""),
        lambda store, turn: store.abandon(turn),
        # Counted as expired, and not as evicted to make room.
        lambda store, turn: store.finish(turn, range(BUDGET_TOKENS), None),
    ],
    ids=["expire", "list", "begin", "get", "abandon", "finish"],
)
def test_any_call_forgets_what_is_idle_for_too_long(
    call: Callable[[SessionStore, KeptSession], object], store: SessionStore, clock: Clock
) -> None:
    turn = store.begin("busy", "")
    keep(store, "a", 2)
    clock.now += IDLE_SECONDS
    call(store, turn)
    assert "a" not in ids(store)
    assert "a" not in ids(store)


def test_reading_is_no_use(store: SessionStore, clock: Clock) -> None:
    keep(store, "a", 2)
    keep(store, "b", 2)
    clock.now += IDLE_SECONDS - 1
    store.get("a", "")
    assert ids(store) == ["b", "a"]
    clock.now += 1
    assert ids(store) == []


def test_the_least_recently_used_goes_first_and_never_a_busy_one(store: SessionStore) -> None:
    for session_id in "abc":
        keep(store, session_id, 3)
    store.acquire("a", "")
    store.abandon(store.acquire("b", ""))
    keep(store, "d", 5)
    assert ids(store) == ["d", "b", "a"]


def test_who_has_no_more_than_an_equal_share_loses_nothing_to_another(store: SessionStore) -> None:
    for session_id in ("a1", "a2"):
        store.finish(store.begin(session_id, "a"), range(2), None)
    for number in range(20):
        store.finish(store.begin(f"b{number}", "b"), range(3), None)
    assert [session.session_id for session in store.list("a")] == ["a2", "a1"]
    assert [session.session_id for session in store.list("b")] == ["b19", "b18"]


def test_many_small_sessions_of_one_client_do_not_push_out_another(clock: Clock) -> None:
    store = SessionStore(IDLE_SECONDS, 10**9, clock, clock)
    store.finish(store.begin("a", "a"), [1], None)
    for number in range(10_050):
        store.finish(store.begin(f"b{number}", "b"), [1], None)
    assert len(store) == 10_000
    assert [session.session_id for session in store.list("a")] == ["a"]


def test_a_conversation_that_the_template_ignores_counts_by_its_length(store: SessionStore) -> None:
    hidden = ({"role": "user", "content": "", "note": "x" * 4 * BUDGET_TOKENS},)
    store.finish(store.begin("small", ""), [1], Chat(({"role": "user", "content": "hi"},)))
    store.finish(store.begin("large", ""), [1], Chat(hidden))
    assert ids(store) == ["small"]


def test_too_large_a_session_goes_and_takes_no_other_with_it(store: SessionStore) -> None:
    keep(store, "a", 1)
    keep(store, "b", BUDGET_TOKENS + 1)
    assert ids(store) == ["a"]
    store.finish(store.acquire("a", ""), range(BUDGET_TOKENS + 1), None)
    assert ids(store) == []


@pytest.mark.parametrize(("idle_seconds", "budget_tokens"), [(0.0, 10), (10.0, 0)])
def test_with_nothing_allowed_nothing_is_kept(idle_seconds: float, budget_tokens: int, clock: Clock) -> None:
    store = SessionStore(idle_seconds, budget_tokens, clock, clock)
    turn = store.begin("a", "")
    assert ids(store) == ["a"]
    store.finish(turn, [1], None)
    with pytest.raises(NotFoundError, match="keeps no sessions"):
        store.acquire("a", "")
    assert store.idle.num_tokens == 0


def test_errors_say_which_session_and_what_to_expect(store: SessionStore) -> None:
    with pytest.raises(NotFoundError, match=r"'nowhere'.*10 s") as missing:
        store.acquire("nowhere", "")
    assert (missing.value.reason, missing.value.code) == ("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
    store.begin("a", "")
    for call in (store.acquire, store.delete):
        with pytest.raises(ConflictError, match="session a") as busy:
            call("a", "")
        assert (busy.value.reason, busy.value.code) == ("SESSION_BUSY", grpc.StatusCode.ABORTED)


def test_an_endless_id_does_not_make_an_endless_error(store: SessionStore) -> None:
    with pytest.raises(NotFoundError) as missing:
        store.get("x" * 1_000_000, "")
    assert len(str(missing.value)) < 300
