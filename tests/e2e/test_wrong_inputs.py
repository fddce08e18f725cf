"""Mistakes of newcomers: refused before a process starts, with the reason and the remedy in the last line."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_TARGET
from tests.e2e.guarded import expire, make_certificates
from tests.e2e.processes import run_specd

# Python runs it at its start: it notes what was started.
_NOTES = "import os, sys; open(os.environ['STARTED'], 'a').write(' '.join(sys.orig_argv) + chr(10))\n"

Place = dict[str, str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Directories that are no models, or none that fit."""
    root = tmp_path_factory.mktemp("models")

    def copy(name: str, change: Callable[[Path], object]) -> str:
        directory = shutil.copytree(EMBEDDED_DRAFT, root / name)
        change(directory)
        return str(directory)

    def configured(**values: object) -> Callable[[Path], object]:
        def change(directory: Path) -> None:
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps({**config, **values}))

        return change

    def swap_two_tokens(directory: Path) -> None:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["return"], vocabulary["import"] = vocabulary["import"], vocabulary["return"]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))

    def cut_weights(directory: Path) -> None:
        os.truncate(directory / "model.safetensors", 10_000)

    (root / "empty").mkdir()
    (root / "file").write_text("weights")
    return {
        "empty": str(root / "empty"),
        "file": str(root / "file"),
        "no weights": copy("no-weights", lambda d: (d / "model.safetensors").unlink()),
        "cut": copy("cut", cut_weights),
        "no tokenizer": copy("no-tokenizer", lambda d: (d / "tokenizer.json").unlink()),
        "no type": copy("no-type", configured(model_type=None)),
        "unknown": copy("unknown", configured(model_type="nosuch")),
        "code": copy("code", configured(model_file="run_me.py")),
        "other": copy("other", swap_two_tokens),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Certificates, of which one has expired, and no tokens."""
    certs = make_certificates(tmp_path_factory.mktemp("certs"))
    expire(certs, "gateway")
    (certs / "garbage").write_text("no token")
    (certs / "settings.toml").write_text('[up]\ntarrget = "model"\n')
    return {"certs": str(certs)}


@pytest.fixture
def port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused before anything else starts; return the last line that it prints."""

    def run(*arguments: str, **variables: Any) -> str:
        (tmp_path / "sitecustomize.py").write_text(_NOTES)
        started = tmp_path / "started"
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        done = run_specd(*arguments, PYTHONPATH=path, STARTED=str(started), **variables)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert len(started.read_text().splitlines()) == 1  # the command itself
        lines = done.stderr.splitlines()
        assert [line for line in lines if line.startswith(("specd: ", "Error: "))] == lines[-1:]
        return lines[-1]

    return run


UP = ["up", "--listen", "127.0.0.1:0", "--no-metrics"]
MODELS = [
    pytest.param(
        ["--target", "/nowhere"], "the model /nowhere does not exist: name a local directory", id="no directory"
    ),
    pytest.param(
        ["--target", "nobody/nothing"], "the Hugging Face repository cannot be downloaded", id="no repository"
    ),
    pytest.param(["--target", "{file}"], "is a file: name the directory", id="a file"),
    pytest.param(["--target", "{empty}"], "has no config.json, so it is not a model", id="empty"),
    pytest.param(["--draft", "{no weights}"], "has no weights", id="no weights"),
    pytest.param(["--draft", "{cut}"], "Download or convert the model again", id="half of the weights"),
    pytest.param(["--draft", "{no tokenizer}"], "has no tokenizer.json", id="no tokenizer"),
    pytest.param(["--draft", "{no type}"], "has no model_type", id="no type"),
    pytest.param(["--draft", "{unknown}"], "mlx-lm has no class for the model type 'nosuch'", id="unknown type"),
    pytest.param(["--draft", "{code}"], "which specd never runs", id="code of its own"),
    pytest.param(["--draft", "{other}"], "have different tokenizers (token '", id="another tokenizer"),
    pytest.param(["--draft", EMBEDDED_T5_DRAFT], "use a draft of the target's family", id="encoder"),
    pytest.param(
        ["--target", "/a", "--draft", "/b"],
        "the model /a does not exist: name a local directory or a",
        id="two at once",
    ),
]


@pytest.mark.parametrize(("options", "says"), MODELS)
def test_a_model(models: Place, refused: Callable[..., str], options: list[str], says: str) -> None:
    assert says in refused(*UP, *(option.format_map(models) for option in options))


ADDRESSES = [
    pytest.param(["up", "--no-metrics", "--listen", "{port}"], "cannot listen at {port}", id="port in use"),
    pytest.param([*UP, "--http", "{port}"], "cannot listen at {port}", id="http port in use"),
    pytest.param([*UP, "--http", "nowhere"], "'nowhere' is not an address: write HOST:PORT", id="no address"),
    pytest.param([*UP, "--http", "0.0.0.0:0"], "set --tls-cert and --tls-key", id="http open to all"),
    pytest.param(
        ["up", "--listen", "0.0.0.0:0"], "set --tls-cert, --tls-key and --tls-ca or --tokens", id="open to all"
    ),
    pytest.param(["up", "--listen", "unix:/nowhere/socket"], "there is no directory /nowhere", id="no directory"),
    pytest.param([*UP, "--num-draft-tokens", "33"], "write 'auto' or 0 to 32", id="too many draft tokens"),
    pytest.param([*UP, "--draft", "lookup", "--no-lookup"], "leave out one", id="contradiction"),
    pytest.param(
        [*UP, "--draft", "none", "--draft-in-target"],
        "--draft none and --draft-in-target contradict each other: leave out one",
        id="no draft in the target",
    ),
    pytest.param(
        [*UP, "--draft", "lookup", "--draft-in-target"],
        "--draft lookup and --draft-in-target contradict each other: leave out one",
        id="look-up in the target",
    ),
    pytest.param(
        [*UP, "--draft-in-target", "--target-ranks", "2"],
        "--target-ranks 2 and --draft-in-target contradict each other: leave out one",
        id="a divided target with a draft",
    ),
    pytest.param(
        ["target-worker", "--ranks", "2", "--self-draft", "/d"],
        "self_draft is /d, but a target with several ranks has no draft of its own",
        id="a rank with a draft",
    ),
    pytest.param(
        ["target-worker", "--ranks", "2", "--follow", "127.0.0.1:1"],
        "ranks is 2 and follow is 127.0.0.1:1: only rank 0 has a number of ranks",
        id="a follower with followers",
    ),
    pytest.param(["target-worker", "--follow", "nowhere"], "'nowhere' is not an address", id="follows no address"),
    pytest.param([*UP, "--nosuch"], "No such option: --nosuch", id="no option"),
    pytest.param(["genrate", "x"], "No such command 'genrate'. Did you mean 'generate'?", id="no command"),
    pytest.param(
        ["generate", "x", "-t", "-1"], "temperature is -1: it must be 0 (greedy) or in [0.01, 100]", id="temperature"
    ),
    pytest.param(["generate", "x", "--top-p", "2"], "top_p is 2: it must be in", id="top_p"),
    pytest.param(["generate", "x", "-k", "99"], "it is 99, but it must be 0 to 32", id="draft tokens"),
    pytest.param(["chat", "-n", "0"], "it is 0, but it must be 1 to", id="no tokens"),
]


@pytest.mark.parametrize(("arguments", "says"), ADDRESSES)
def test_an_option(port: str, refused: Callable[..., str], arguments: list[str], says: str) -> None:
    assert says.format(port=port) in refused(*(argument.format(port=port) for argument in arguments))


def test_an_address_that_is_given_twice(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    assert f"cannot listen at {free}" in refused("up", "--no-metrics", "--listen", free, "--http", free)


def test_a_metrics_port_that_was_asked_for(port: str, refused: Callable[..., str]) -> None:
    said = refused("up", "--listen", "127.0.0.1:0", SPECD_TARGET_WORKER_METRICS_LISTEN=port)
    assert f"the metrics of the target-worker: cannot listen at {port}" in said
    assert "--no-metrics" in said


CREDENTIALS = [
    pytest.param(["--tls-cert", "{certs}/coordinator.crt"], "set both a certificate and its key", id="no key"),
    pytest.param(["--tls-cert", "/a", "--tls-key", "/b"], "cannot read /a", id="no certificate"),
    pytest.param(
        ["--tls-cert", "{certs}/coordinator.crt", "--tls-key", "{certs}/client.key"],
        "does not belong to the certificate",
        id="other key",
    ),
    pytest.param(["--tls-cert", "{certs}/gateway.crt", "--tls-key", "{certs}/gateway.key"], "expired", id="expired"),
    pytest.param(["--tokens", "/nowhere"], "'specd token new NAME --tokens /nowhere' makes it", id="no tokens"),
    pytest.param(["--tokens", "{certs}/garbage"], "line 1 of the token file", id="garbage"),
    pytest.param(
        [
            *(
                "--tls-cert",
                "{certs}/coordinator.crt",
                "--tls-key",
                "{certs}/coordinator.key",
                "--tls-ca",
                "{certs}/ca.crt",
            ),
            *("--http", "127.0.0.1:0"),
        ],
        "SPECD_GATEWAY_COORDINATOR_CERT",
        id="no certificate for the gateway",
    ),
    pytest.param(
        ["--tls-cert", "{certs}/coordinator.crt", "--tls-key", "{certs}/coordinator.key", "--http", "127.0.0.1:0"],
        "set --tls-ca to the authority's certificate",
        id="no authority for the gateway",
    ),
]


@pytest.mark.parametrize(("options", "says"), CREDENTIALS)
def test_a_credential(files: Place, refused: Callable[..., str], options: list[str], says: str) -> None:
    assert says in refused(*UP, *(option.format_map(files) for option in options))


def test_a_name_in_the_settings_file(files: Place, refused: Callable[..., str]) -> None:
    said = refused("--config", f"{files['certs']}/settings.toml", *UP)
    assert said == "specd: wrong settings: [up] has no 'tarrget': did you mean 'target'?"


def test_a_misspelt_variable_is_said() -> None:
    done = run_specd(*UP, "--target", "/nowhere", SPECD_TARRGET=EMBEDDED_TARGET, SPECD_PORT_80_TCP="of a cluster")
    warning, reason = done.stderr.splitlines()
    assert warning == "specd: warning: specd has no variable SPECD_TARRGET: did you mean SPECD_TARGET?"
    assert "the model /nowhere does not exist" in reason
