"""The file of clients' tokens."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from specd.caller import Caller, CallerLimits
from specd.cli.token import app as token_app
from specd.errors import StartupError, UnauthenticatedError
from specd.identity.tokens import TokenFile, new_token, read_tokens, write_tokens

NOON = datetime(2027, 1, 31, 12, tzinfo=UTC)


class Clock:
    """The time, as the test sets it."""

    def __init__(self) -> None:
        self.now = NOON.timestamp()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


def bearer(text: str) -> list[str]:
    return [f"Bearer {text}"]


def reason_of(tokens: TokenFile, authorization: list[str]) -> str:
    with pytest.raises(UnauthenticatedError) as raised:
        tokens.identify(authorization)
    return raised.value.reason


def test_a_token_names_its_client_and_its_limits(path: Path) -> None:
    alice, line = new_token("alice", sessions=2, tokens_per_minute=1000, max_tokens=50)
    bob, other = new_token("bob")
    write_tokens(path, [line, other])
    tokens = TokenFile(path)
    assert tokens.identify(bearer(alice)) == Caller("alice", CallerLimits(2, 1000, 50))
    assert tokens.identify([f"bearer {bob}"]) == Caller("bob")


def test_the_file_holds_no_token_and_is_for_its_owner_alone(path: Path) -> None:
    text, line = new_token("alice")
    write_tokens(path, [line])
    assert text not in path.read_text()
    assert text.removeprefix("specd_") not in path.read_text()
    assert hashlib.sha256(text.encode()).hexdigest() in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len({new_token("alice")[0] for _ in range(50)}) == 50
    assert len(text) > 43  # 256 random bits


def test_a_file_that_others_may_read_stays_so(path: Path) -> None:
    write_tokens(path, [])
    path.chmod(0o640)
    write_tokens(path, [new_token("alice")[1]])
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ([], "TOKEN_MISSING"),
        (["Bearer"], "TOKEN_MISSING"),
        (["Bearer "], "TOKEN_MISSING"),
        (["Basic dXNlcjpwYXNz"], "TOKEN_MISSING"),
        (["{token}"], "TOKEN_MISSING"),
        (["Bearer {token}", "Bearer {token}"], "TOKEN_MISSING"),
        (["Bearer specd_wrong"], "TOKEN_UNKNOWN"),
        (["Bearer {token}x"], "TOKEN_UNKNOWN"),
        (["Bearer {digest}"], "TOKEN_UNKNOWN"),
        (["Bearer " + "x" * 100_000], "TOKEN_UNKNOWN"),
        (["Bearer ⁂"], "TOKEN_UNKNOWN"),
    ],
)
def test_what_is_no_token_is_refused(path: Path, authorization: list[str], reason: str) -> None:
    text, line = new_token("alice")
    write_tokens(path, [line])
    given = [each.format(token=text, digest=line.sha256) for each in authorization]
    assert reason_of(TokenFile(path), given) == reason


def test_a_refusal_says_nothing_of_the_token(path: Path) -> None:
    write_tokens(path, [new_token("alice")[1]])
    with pytest.raises(UnauthenticatedError) as raised:
        TokenFile(path).identify(bearer("specd_CANARY"))
    assert "CANARY" not in str(raised.value)


def test_a_token_expires_in_its_second(path: Path) -> None:
    clock = Clock()
    text, line = new_token("alice", expires=NOON + timedelta(seconds=1))
    write_tokens(path, [line])
    tokens = TokenFile(path, clock=clock)
    assert tokens.identify(bearer(text)).name == "alice"
    clock.now += 1
    assert reason_of(tokens, bearer(text)) == "TOKEN_EXPIRED"


def test_all_digests_are_compared_and_each_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time reveals neither the matching token nor the length of a match."""
    made = [new_token(f"client-{i}") for i in range(7)]
    write_tokens(path, [line for _, line in made])
    tokens = TokenFile(path)
    compared: list[str] = []
    original = hmac.compare_digest

    def compare(ours: str, theirs: str) -> bool:
        compared.append(ours)
        return original(ours, theirs)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for text in (made[0][0], made[6][0]):
        compared.clear()
        tokens.identify(bearer(text))
        assert compared == [line.sha256 for _, line in made]


def test_changes_hold_from_the_next_call_on(path: Path) -> None:
    alice, line = new_token("alice")
    write_tokens(path, [line])
    tokens = TokenFile(path)
    assert tokens.identify(bearer(alice)).name == "alice"
    bob, other = new_token("bob")
    write_tokens(path, [other])
    assert reason_of(tokens, bearer(alice)) == "TOKEN_UNKNOWN"
    assert tokens.identify(bearer(bob)).name == "bob"
    write_tokens(path, [other.model_copy(update={"max_tokens": 5})])
    assert tokens.identify(bearer(bob)).limits.max_tokens == 5


@pytest.mark.parametrize("broken", ["not json\n", "", "gone"])
def test_a_file_that_breaks_while_it_is_used_lets_in_who_was_in(path: Path, broken: str) -> None:
    """All but an empty one, which is reported."""
    text, line = new_token("alice")
    write_tokens(path, [line])
    tokens = TokenFile(path)
    if broken == "gone":
        path.unlink()
    else:
        path.write_text(broken)
    with capture_logs() as log:
        if broken:
            assert tokens.identify(bearer(text)).name == "alice"
            assert tokens.identify(bearer(text)).name == "alice"
        else:
            assert reason_of(tokens, bearer(text)) == "TOKEN_UNKNOWN"
    assert [entry["log_level"] for entry in log] == (["error"] if broken else ["info"])


GOOD = '{"name": "alice", "sha256": "' + "0" * 64 + '"}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "line 2"),
        ('{"name": "bob"}', "sha256"),
        ('{"name": "bob", "sha256": "specd_secret"}', "sha256"),
        (GOOD.replace("alice", "../bob"), "not a valid name for a client"),
        (GOOD.replace("}", ', "max_tokens": 0}'), "max_tokens"),
        (GOOD.replace("}", ', "max_tokens": true}'), "max_tokens"),
        (GOOD.replace("}", ', "max_token": 5}'), "max_token"),
        (GOOD.replace("}", ', "expires": "2027-01-31T12:00"}'), "expires"),
    ],
)
def test_a_wrong_line_is_named_and_not_quoted(path: Path, line: str, problem: str) -> None:
    path.write_text(GOOD + line)
    with pytest.raises(StartupError, match="line 2") as raised:
        TokenFile(path)
    assert problem in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(StartupError, match="specd token new NAME --tokens"):
        read_tokens(path)
    path.write_bytes(b"\xff")
    with pytest.raises(StartupError, match=str(path)):
        read_tokens(path)
    with pytest.raises(StartupError, match=r"nosuch/t\.jsonl"):
        write_tokens(path.parent / "nosuch" / "t.jsonl", [])
    assert list(path.parent.iterdir()) == [path]


def test_a_second_token_of_a_name_is_said(path: Path) -> None:
    def new(name: str) -> str:
        done = CliRunner().invoke(token_app, ["new", name, "--tokens", str(path)])
        assert done.exit_code == 0
        assert len(done.stdout.splitlines()) == 1  # the token alone
        return done.stderr

    assert "All belong" not in new("alice")
    assert "All belong" not in new("bob")
    first = read_tokens(path)[0].id
    assert f"alice has another token, id {first}. All belong to one client" in new("alice")
    second = read_tokens(path)[2].id
    assert f"alice has 2 other tokens, id {first}, {second}. All belong to one client" in new("alice")
    assert len(read_tokens(path)) == 4
