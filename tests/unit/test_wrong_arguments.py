"""Wrong arguments of commands: refused before the command connects, listens or imports MLX, which is missing here."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specd.cli.app import app
from specd.identity.authority import Authority
from specd.launch import PROCESSES, run_app
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT

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
def without_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the import of a process's main module fail: it takes a second, or three with MLX."""
    monkeypatch.setattr(sys, "argv", ["specd"])
    for process in PROCESSES:
        monkeypatch.setitem(sys.modules, f"{process.replace('-', '_')}.main", None)


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
        ("DNS:host:5", "'DNS:host:5' is not an address: write HOST:PORT"),
        ("::1:5", ", an IPv6 address in brackets"),
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


@pytest.mark.usefixtures("without_main")
@pytest.mark.parametrize("process", PROCESSES)
def test_an_address_in_use(refused: Refuse, port: str, process: str) -> None:
    others = () if process == "gateway" else ("--metrics-listen", "none")
    assert refused(process, "--listen", port, *others).startswith(f"specd: cannot listen at {port}: ")


@pytest.mark.usefixtures("without_main")
@pytest.mark.parametrize("process", [process for process in PROCESSES if process != "gateway"])
def test_an_address_of_metrics_in_use(refused: Refuse, port: str, process: str) -> None:
    said = refused(process, "--listen", "127.0.0.1:0", "--metrics-listen", port)
    assert said.startswith(f"specd: cannot serve metrics at {port}: ")
    assert said.endswith("; set --metrics-listen to another address, or to 'none'")


@pytest.mark.usefixtures("without_main")
@pytest.mark.parametrize(
    "arguments",
    [
        ("draft-worker", "--model"),
        ("target-worker", "--model"),
        ("target-worker", "--self-draft"),
    ],
)
def test_a_model_of_a_worker(refused: Refuse, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    listening = ("--listen", "127.0.0.1:0", "--metrics-listen", "none")
    assert "the model /nowhere does not exist" in refused(*arguments, "/nowhere", *listening)
    assert "has no config.json, so it is not a model" in refused(*arguments, str(tmp_path), *listening)


@pytest.mark.usefixtures("without_main")
def test_a_draft_in_the_target_that_does_not_fit(refused: Refuse) -> None:
    said = refused("target-worker", "--self-draft", EMBEDDED_T5_DRAFT, "--listen", "127.0.0.1:0")
    assert "use a draft of the target's family" in said


@pytest.mark.usefixtures("without_main")
@pytest.mark.parametrize("process", PROCESSES)
def test_a_certificate_of_a_process(refused: Refuse, tmp_path: Path, process: str) -> None:
    garbage = tmp_path / "garbage.crt"
    garbage.write_text("no certificate")
    options = ("--listen", "127.0.0.1:0", "--tls-key", str(garbage), "--tls-cert")
    others = () if process == "gateway" else ("--metrics-listen", "none")
    assert "PEM" in refused(process, *options, str(garbage), *others)


@pytest.mark.usefixtures("without_main")
def test_a_file_of_tokens(refused: Refuse) -> None:
    options = ("--listen", "127.0.0.1:0", "--metrics-listen", "none", "--tokens", "/nowhere")
    assert "there is no token file /nowhere" in refused("coordinator", *options)


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_a_model_of_a_benchmark(refused: Refuse, tmp_path: Path, option: str) -> None:
    assert "the model /nowhere does not exist" in refused("bench", option, "/nowhere")
    assert "has no config.json, so it is not a model" in refused("bench", option, str(tmp_path))
    assert "use a draft of the target's family" in refused("bench", option, EMBEDDED_T5_DRAFT)


def test_a_conversion(refused: Refuse, tmp_path: Path) -> None:
    out, unknown = str(tmp_path / "out"), tmp_path / "unknown"
    assert "the model nonsense does not exist" in refused("convert", "nonsense", out)
    assert "has no config.json, so it is not a model" in refused("convert", str(tmp_path), out)
    assert f"{tmp_path} exists already" in refused("convert", EMBEDDED_DRAFT, str(tmp_path))
    assert "is quantised already" in refused("convert", EMBEDDED_DRAFT, out)
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "../nosuch"}))
    assert "has no weights (model*.safetensors or pytorch_model*.bin)" in refused("convert", str(unknown), out)
    (unknown / "pytorch_model.bin").touch()
    assert "mlx-lm has no class for the model type '../nosuch'" in refused("convert", str(unknown), out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "x", "-k", "33"), "'--num-draft-tokens' / '-k': it is 33, but it must be 0 to 32"),
        (("generate", "x", "-k", "many"), "'--num-draft-tokens' / '-k': it is many, but it must be 0 to 32"),
        (("generate", "x", "-t", "hot"), "'--temperature' / '-t': it is hot, but it must be a number"),
        (("generate", "x", "-n", "0"), "'--max-tokens' / '-n': it is 0, but it must be 1 to 4294967295"),
        (("generate", "x", "--acceptance", "all"), "'--acceptance': 'all' is not one of 'coupled', 'rejection'."),
        (("bench", "-k", "3", "-k", "99"), "'--num-draft-tokens' / '-k': it is 99, but it must be 1 to 32"),
        (("token", "new", "x", "--sessions", "0"), "'--sessions': it is 0, but it must be 1 or more"),
    ],
)
def test_a_value_of_an_option(refused: Refuse, arguments: tuple[str, ...], says: str) -> None:
    assert refused(*arguments) == f"Error: Invalid value for {says}"


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("health",), ("top",)])
def test_a_certificate_of_a_client(refused: Refuse, tmp_path: Path, command: tuple[str, ...]) -> None:
    garbage = tmp_path / "garbage.crt"
    garbage.write_text("no certificate")
    wrong = f"specd: {garbage} has no certificate in PEM form: name a file with -----BEGIN CERTIFICATE-----"
    assert refused(*command, "--tls-ca", str(garbage)) == wrong
    Authority.create(tmp_path / "certs")
    own = ("--tls-ca", str(tmp_path / "certs" / "ca.crt"), "--tls-cert", str(garbage), "--tls-key", str(garbage))
    assert refused(*command, *own) == wrong


def test_a_line_that_is_no_token(refused: Refuse, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    said = refused("token", "list", "--tokens", str(tokens))
    assert said.startswith(f"specd: line 1 of the token file {tokens} is invalid: it is not JSON; remove the line, ")
    assert said.endswith(f"'specd token new NAME --tokens {tokens}', which writes it")
