"""`specd models`, as its user sees it: real processes, offline or with a server that plays the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from tests.e2e.fake_hub import COMMIT, FakeHub
from tests.e2e.processes import PATIENCE_SECONDS, environment, run_specd
from tests.unit.made_up_models import LLAMA, content_of, model_files, weights, write_directory, write_repository

INDEX = {"weight_map": {"w": "model-1-of-2.safetensors", "v": "model-2-of-2.safetensors"}}
SMALL = {name: content_of(value) for name, value in model_files(model__safetensors=None).items()}
SHARDED = SMALL | {
    "model.safetensors.index.json": content_of(INDEX),
    "model-1-of-2.safetensors": weights("w", size=5_000),
    "model-2-of-2.safetensors": weights("v", size=6_000_000),
}
OTHERS = {
    "README.md": b"---\nlicense: mit\n---\n",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"GGUF",
    "consolidated.safetensors": weights("w"),
    "original/model.safetensors": weights("w"),
    "onnx/config.json": b"{}",
    "image.png": b"PNG",
}
REPOSITORIES = {
    "org/whole": SHARDED | OTHERS,
    "org/lacks-shard": {name: content for name, content in SHARDED.items() if name != "model-2-of-2.safetensors"},
    "org/cut": SMALL | {"model.safetensors": weights()[:-1]},
    "org/pickle": SMALL | {"pytorch_model.bin": b"pickle"},
    "org/gguf": {"model.gguf": b"GGUF"},
    "org/unknown": SMALL
    | {"model.safetensors": weights(), "config.json": content_of({**LLAMA, "model_type": "nosuch"})},
}


@pytest.fixture(autouse=True)
def no_other_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(REPOSITORIES, gated=("org/gated",)) as server:
        yield server


def models(home: Path, *arguments: str, stdin: bytes = b"", **variables: Any) -> CompletedProcess[str]:
    """Run `specd models` with the hub's cache under `home`, unless HF_HUB_CACHE is given."""
    return run_specd("models", *arguments, stdin=stdin, HF_HOME=str(home), **variables)


def pull(home: Path, hub: FakeHub, *arguments: str) -> CompletedProcess[str]:
    return models(home, "pull", *arguments, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")


def files_in(home: Path, name: str) -> set[str]:
    snapshot = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}


# -- list, show, rm


def test_list_for_people(tmp_path: Path) -> None:
    write_repository(tmp_path / "hub", "org/whole", model_files(README__md="---\nlicense: mit\n---\n"))
    write_repository(tmp_path / "hub", "org/half", model_files(model__safetensors=None))
    write_repository(tmp_path / "hub", "org/unknown", model_files({**LLAMA, "model_type": "nosuch"}))
    write_directory(tmp_path / "models" / "mine", model_files())
    done = models(tmp_path, "list", "--dir", str(tmp_path / "models"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    rows = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines()[1:] if " is not served" not in line}
    assert rows == {
        **{"org/half": "partial", "org/unknown": "no", "org/whole": "yes", "mine": "yes"},
        **dict.fromkeys(("pycode-47m-4bit", "pycode-3.6m-8bit", "t5-code-28m-4bit", "t5-code-3m-8bit"), "yes"),
        "pycode-47m-eagle3-8bit": "head",
    }
    assert (
        "org/half is not served: it lacks the weights: 'specd models pull org/half' downloads the rest" in done.stdout
    )
    assert "mlx-lm has no class for the model type 'nosuch'" in done.stdout
    assert "full attention" in done.stdout


def test_list_for_programs(tmp_path: Path) -> None:
    write_repository(tmp_path / "elsewhere", "org/whole", model_files())
    done = models(tmp_path, "list", "--json", HF_HUB_CACHE=str(tmp_path / "elsewhere"))
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found["org/whole"]["served"]
    assert found["org/whole"]["source"] == "hub"
    assert found["pycode-47m-4bit"]["bits"] == 4
    assert found["pycode-47m-4bit"]["path"] == EMBEDDED_TARGET


@pytest.mark.parametrize("command", [["list"], ["show", "pycode-47m-4bit"]])
def test_models_are_described_without_mlx_and_without_a_network(tmp_path: Path, command: list[str]) -> None:
    write_repository(tmp_path, "org/whole", model_files(chat_template__jinja="{{ tools }}"))
    code = (
        "import sys, socket; from specd.cli import main\n"
        "def refuse(*_): raise SystemExit('a connection')\n"
        "socket.socket.connect = refuse\n"
        f"try: main(['models', *{command}])\n"
        "except SystemExit as error: print('ended', error.code, [m for m in ('mlx', 'mlx_lm', 'transformers', 'torch')"
        " if m in sys.modules])"
    )
    variables = environment(HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="0")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout.splitlines()[-1] == "ended 0 []"


def test_show(tmp_path: Path) -> None:
    done = models(tmp_path, "show", "pycode-47m-4bit", "--json")
    found = json.loads(done.stdout)
    assert found["drafts"] == ["pycode-3.6m-8bit"]
    assert found["tokenizer"] == "BPE, 8,192 tokens"
    assert found["files"]["model.safetensors"] == (Path(EMBEDDED_TARGET) / "model.safetensors").stat().st_size
    assert found["cache_bytes_per_token_cpu"] == 2 * 12 * 3 * 64 * 4
    shown = models(tmp_path, "show", EMBEDDED_DRAFT).stdout
    assert "\x1b" not in shown
    assert "8-bit affine" in shown
    assert "drafts that fit" not in shown


def test_a_wrong_name(tmp_path: Path) -> None:
    for command in ("show", "rm"):
        done = models(tmp_path, command, "pycode-47m-4bits")
        assert done.returncode == 2
        assert "has no model 'pycode-47m-4bits': did you mean pycode-47m-4bit" in done.stderr


def test_rm(tmp_path: Path) -> None:
    root = write_repository(tmp_path / "hub", "org/gone", model_files())
    write_repository(tmp_path / "hub", "org/kept", model_files())
    size = sum(path.stat().st_size for path in (root / "blobs").iterdir())
    refused = models(tmp_path, "rm", "org/gone", stdin=b"n\n")
    assert refused.returncode == 1
    assert root.exists()
    assert models(tmp_path, "rm", "org/gone").returncode == 1  # no answer
    assert root.exists()
    done = models(tmp_path, "rm", "org/gone", stdin=b"y\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"removed org/gone: {size:,} bytes are free" in done.stdout
    assert not root.exists()
    assert models(tmp_path, "rm", "org/kept", "--yes").returncode == 0
    assert not [*(tmp_path / "hub").glob("models--*")]
    included = models(tmp_path, "rm", "pycode-47m-4bit", "--yes")
    assert included.returncode == 2
    assert "specd does not remove directories" in included.stderr
    assert Path(EMBEDDED_TARGET).is_dir()


# -- pull


def test_pull_takes_what_counts(tmp_path: Path, hub: FakeHub) -> None:
    done = pull(tmp_path, hub, "org/whole")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert files_in(tmp_path, "org/whole") == {*SHARDED, "README.md", "chat_template.jinja"}
    assert f"org/whole is in {tmp_path / 'hub'}" in done.stdout
    assert "cannot serve" not in done.stdout
    (listed, *_) = json.loads(models(tmp_path, "list", "--json").stdout)
    assert (listed["name"], listed["served"], listed["licence"], listed["chat"]) == ("org/whole", True, "mit", True)
    hub.sent.clear()
    assert pull(tmp_path, hub, "org/whole", "--revision", COMMIT).returncode == 0
    assert hub.sent == []  # everything is there


def test_pull_resumes_where_a_connection_broke(tmp_path: Path, hub: FakeHub) -> None:
    hub.stops["model-2-of-2.safetensors"] = 15_000_000
    done = pull(tmp_path, hub, "org/whole")
    assert done.returncode == 0, done.stderr
    begins = [begin for path, begin in hub.sent if path == "model-2-of-2.safetensors"]
    assert len(begins) == 2
    assert begins[0] == 0 < begins[1] <= 15_000_000  # the client keeps whole chunks of 10 MiB
    (blob,) = (path for path in (tmp_path / "hub").glob(f"*/snapshots/{COMMIT}/model-2-of-2.safetensors"))
    assert blob.read_bytes() == SHARDED["model-2-of-2.safetensors"]


def test_pull_after_a_kill_takes_only_what_is_missing(tmp_path: Path, hub: FakeHub) -> None:
    hub.stops["model-2-of-2.safetensors"] = 15_000_000
    hub.hangs = True
    variables = environment(HF_HOME=str(tmp_path), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")
    process = subprocess.Popen([sys.executable, "-m", "specd", "models", "pull", "org/whole"], env=variables)
    assert hub.is_hanging.wait(PATIENCE_SECONDS)
    small = {*SHARDED, "README.md", "chat_template.jinja"} - {"model-2-of-2.safetensors"}
    while not small <= files_in(tmp_path, "org/whole"):
        assert process.poll() is None
    process.kill()
    process.wait()
    (listed, *_) = json.loads(models(tmp_path, "list", "--json").stdout)
    assert (listed["state"], listed["served"]) == ("partial", False)
    assert listed["reason"] == "it lacks model-2-of-2.safetensors: 'specd models pull org/whole' downloads the rest"
    hub.sent.clear()
    assert pull(tmp_path, hub, "org/whole").returncode == 0
    assert [path for path, _ in hub.sent] == ["model-2-of-2.safetensors"]
    (listed, *_) = json.loads(models(tmp_path, "list", "--json").stdout)
    assert listed["served"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["org/lacks-shard"], "names 'model-2-of-2.safetensors', which is missing"),
        (["org/cut"], "model.safetensors is not a valid safetensors file"),
        (["org/pickle"], "has no weights in safetensors"),
        (["org/gguf"], "has no weights in safetensors"),
        (["org/nosuch"], "the hub has no repository org/nosuch, or it is private"),
        (["org/gated"], "the repository org/gated is gated: accept its terms"),
        (["org/whole", "--revision", "nosuch"], "has no revision 'nosuch'"),
        (["no name"], "'no name' is not the name of a Hugging Face repository"),
        (["../etc"], "../etc"),
    ],
)
def test_pull_refuses(tmp_path: Path, hub: FakeHub, arguments: list[str], complaint: str) -> None:
    done = pull(tmp_path, hub, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_pull_of_a_model_that_cannot_be_served(tmp_path: Path, hub: FakeHub) -> None:
    done = pull(tmp_path, hub, "org/unknown")
    assert done.returncode == 0, done.stderr
    assert "specd cannot serve it: cannot load the model org/unknown: mlx-lm has no class" in done.stdout


def test_pull_without_a_network(tmp_path: Path, hub: FakeHub) -> None:
    offline = models(tmp_path, "pull", "org/whole")
    assert (offline.returncode, offline.stdout) == (1, "")
    assert "cannot be downloaded, because HF_HUB_OFFLINE is set" in offline.stderr
    lost = models(tmp_path, "pull", "org/whole", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert (lost.returncode, lost.stdout) == (1, "")
    assert "the hub cannot be reached to download org/whole" in lost.stderr


def test_pull_onto_a_full_disk(tmp_path: Path) -> None:
    """The sizes are checked before a byte is taken: this disk has no room for such a file, which is never sent."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

    class Huge(bytes):
        def __len__(self) -> int:
            return 2 * free

    with FakeHub({"org/huge": SMALL | {"model.safetensors": Huge(b"")}}) as hub:
        done = pull(tmp_path, hub, "org/huge")
        assert done.returncode == 1
        assert "org/huge needs " in done.stderr
        assert "GB more on the disk" in done.stderr
        assert hub.sent == []
