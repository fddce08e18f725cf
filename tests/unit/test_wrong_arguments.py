"""Wrong arguments of commands: refused before the command connects, listens or imports MLX, which is missing here."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from specd.cli.app import app
from specd.launch import run_app

Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the shell that runs the tests sets."""
    for name in ("ADDRESS", "CONFIG", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"SPECD_{name}", raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must end with an exit code, 2 by default; return the last line that it prints."""

    def run(*arguments: str, code: int = 2) -> str:
        with pytest.raises(SystemExit) as ended:
            run_app(app, arguments, name="specd")
        printed = capsys.readouterr()
        assert (ended.value.code, printed.out) == (code, "")
        return printed.err.splitlines()[-1]

    return run


@pytest.fixture
def port() -> Iterator[str]:
    """Yield an address where a socket listens that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("command", [("generate", "x", "--address"), ("chat", "--address"), ("health",), ("top",)])
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1", "'127.0.0.1' is not an address: write HOST:PORT"),
        ("127.0.0.1:abc", "'127.0.0.1:abc' is not an address: write HOST:PORT"),
        ("http://127.0.0.1:1", "'http://127.0.0.1:1' is not an address: write HOST:PORT"),
        ("127.0.0.1:70000", "'127.0.0.1:70000' has the port 70000: it must be 1 to 65535"),
        ("127.0.0.1:0", "'127.0.0.1:0' has the port 0: it must be 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be(refused: Refuse, command: tuple[str, ...], address: str, says: str) -> None:
    assert says in refused(*command, address)


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("health",), ("top",)])
def test_the_variable_of_the_address(
    refused: Refuse, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECD_ADDRESS", "127.0.0.1")
    assert "'127.0.0.1' is not an address: write HOST:PORT" in refused(*command)


def test_an_empty_address(refused: Refuse) -> None:
    assert "'' is not an address: write HOST:PORT or unix:PATH" in refused("generate", "x", "--address", "")


def test_health_of_nothing(refused: Refuse) -> None:
    said = refused("health", "127.0.0.1:1", code=1)
    assert said.startswith("specd: no process of specd answers at 127.0.0.1:1: start one")


def test_health_of_something_that_does_not_answer(refused: Refuse, port: str) -> None:
    said = refused("health", port, "--timeout-seconds", "0.2", code=1)
    assert said.startswith(f"specd: the process at {port} has not answered within 0.2 s")
