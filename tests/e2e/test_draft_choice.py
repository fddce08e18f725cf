"""`--draft auto` and `specd pair` on real models: the measured best is chosen, and remembered."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specd.cli.pairs.candidates import Candidate
from specd.cli.pairs.choice import choose
from specd.cli.pairs.chooser import DraftChooser
from specd.cli.pairs.record import PairRecord
from specd.cli.pairs.trial import tried
from specd.machine import total_memory
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.startup_error import StartupError
from tests.e2e.fake_hub import FakeHub
from tests.e2e.processes import complaint, eventually, processes_mentioning, run_specd
from tests.e2e.terminal import CTRL_C, Terminal
from tests.worker.draft_families import save_family
from tests.worker.head_files import converted, raw_head, save_apart, save_bigram_apart
from tests.worker.models import copy_variant

_SECONDS = 180.0  # for a machine that has much else to do


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Variables that keep the user's models and records out of a test. Its processes end with it."""
    variables = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "TMPDIR": str(tmp_path),
        "OPENBLAS_NUM_THREADS": "2",
    }
    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, variables[name])
    monkeypatch.setattr("specd.cli.pairs.chooser.hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr("specd.cli.pairs.listing.hub_cache", lambda: tmp_path / "hub")
    yield variables
    for pid in processes_mentioning(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def pair_of(target: Path, directory: Path, *options: str, **variables: Any) -> dict[str, Any]:
    arguments = ("pair", str(target), "--dir", str(directory), "--json", *options)
    done = run_specd(*arguments, timeout_seconds=_SECONDS, **variables)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(10))
def test_the_best_draft_of_a_family_is_chosen_and_remembered(
    number: int, tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow draft is accepted as often or more, and the foreign one would be perfect, but for two tokens."""
    family = save_family(tmp_path / "models", number)
    shown = pair_of(family.target, tmp_path / "models", **places)
    assert shown["draft"] == family.best.name
    assert shown["setting"] == str(family.best)
    by_name = {each["name"]: each for each in shown["candidates"]}
    best, slow = by_name[family.best.name], by_name[family.slow.name]
    assert [name for name, each in by_name.items() if each["chosen"]] == [family.best.name]
    assert 0.5 < best["acceptance"] <= slow["acceptance"]
    assert slow["speedup"] < 1.05 <= best["speedup"]
    assert best["speedup"] == pytest.approx(best["tokens_per_second"] / shown["tokens_per_second"])
    (reason,) = (each["reason"] for each in shown["unfit"] if each["name"] == family.foreign.name)
    assert "have different tokenizers" in reason

    monkeypatch.setattr(subprocess, "Popen", None)  # no trial, and nothing else either
    chooser = DraftChooser(str(family.target), [tmp_path / "models"])
    chooser._threads = {"target": 2, "draft": 1}  # this process has one
    remembered = chooser.recall()
    assert remembered is not None
    assert remembered.setting == str(family.best)


@pytest.mark.thorough
def test_up_measures_once_and_serves_with_the_best_draft(tmp_path: Path, places: dict[str, Any]) -> None:
    family = save_family(tmp_path / "models", 0)
    options = ("--target", str(family.target), "--draft-dirs", str(tmp_path / "models"))
    for is_first in (True, False):
        with Terminal("up", *options, "--listen", "127.0.0.1:0", "--no-metrics", **places, COLUMNS="300") as terminal:
            terminal.wait_for("try +specd generate --address .*\n")
            assert bool(re.search("measuring once which draft is best for target-0: best-0", terminal.text)) == is_first
            assert len(terminal.screen) <= 6
            (line,) = (line for line in terminal.screen if line.startswith("draft "))
            told = rf"draft +best-0 and look-up \(chosen of 3, \d+\.\dx; specd pair {re.escape(str(family.target))}\)$"
            assert re.match(told, line.rstrip()), line
            terminal.type(CTRL_C)
            assert terminal.exit_code() == 0


@pytest.mark.thorough
def test_a_target_is_downloaded_for_its_trial_if_a_model_here_has_its_tokens(
    tmp_path: Path, places: dict[str, Any]
) -> None:
    """The second repository has tokens of its own, so it is left to its worker."""
    families = [save_family(tmp_path / "models", number) for number in (1, 2)]
    files = {
        f"org/{each.target.name}": {path.name: path.read_bytes() for path in each.target.iterdir()} for each in families
    }
    for path in families[1].best, families[1].slow, families[1].foreign:
        shutil.rmtree(path)
    for family in families:
        shutil.rmtree(family.target)
    variables = {**places, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "COLUMNS": "300"}
    options = ("--draft-dirs", str(tmp_path / "models"), "--listen", "127.0.0.1:0", "--no-metrics")
    drafts = (r"best-1 and look-up \(chosen of 2, \d+\.\dx; specd pair org/target-1\)", "look-up")
    for family, draft in zip(families, drafts, strict=True):
        name = f"org/{family.target.name}"
        with FakeHub(files) as hub, Terminal("up", "--target", name, *options, **variables, HF_ENDPOINT=hub.url) as up:
            up.wait_for("try +specd generate --address .*\n")
            (line,) = (line for line in up.screen if line.startswith("draft "))
            assert re.match(f"draft +{draft}$", line.rstrip()), line
            assert [path for path, _ in hub.sent].count("model.safetensors") == 1
            up.type(CTRL_C)
            assert up.exit_code() == 0


async def test_ctrl_c_ends_a_trial(tmp_path: Path, places: dict[str, Any]) -> None:
    target = copy_variant(EMBEDDED_TARGET, tmp_path / "target", {})
    with Terminal("up", "--target", target, "--listen", "127.0.0.1:0", "--no-metrics", **places) as terminal:
        terminal.wait_for("measuring once which draft is best for target: the target")
        await eventually(lambda: bool(processes_mentioning("specd.bench.pair_trial")))
        terminal.type(CTRL_C)
        assert terminal.exit_code() in {0, 256 - signal.SIGINT}
        assert "\x1b[?25h" in terminal.shown[terminal.shown.rindex("\x1b[?25l") :]  # the cursor is back
        assert "Traceback" not in terminal.text
        assert "KeyboardInterrupt" not in terminal.text
    await eventually(lambda: not processes_mentioning("specd.bench.pair_trial"))


@pytest.mark.thorough
def test_a_draft_that_cannot_be_loaded_is_left_out(tmp_path: Path, places: dict[str, Any]) -> None:
    """Its weights are sound by their headers, but have another shape than its config says."""
    models = tmp_path / "models"
    copy_variant(EMBEDDED_TARGET, models / "target", {})
    copy_variant(EMBEDDED_DRAFT, models / "broken", {"config.json": {"hidden_size": 128}})
    shown = pair_of(models / "target", models, **places)
    (broken,) = (each for each in shown["candidates"] if each["name"] == "broken")
    assert broken["tokens_per_second"] is None
    assert "broken" in broken["failure"]
    assert shown["draft"] == Path(EMBEDDED_DRAFT).name


@pytest.mark.thorough
def test_a_head_of_its_own_is_chosen_and_drafts_in_the_target(tmp_path: Path, places: dict[str, Any]) -> None:
    """The head is always right. Another one has the shape of the target's, but was not trained for it."""
    models = tmp_path / "models"
    target, _ = save_bigram_apart(models / "target", "qwen3_5")
    save_apart(models / "other", converted(raw_head(target.text)), target.text)
    shown = pair_of(models / "target", models, **places)
    assert (shown["draft"], shown["setting"]) == ("head", str(models / "head"))
    other, head = sorted(shown["candidates"], key=lambda each: each["acceptance"])
    assert (other["name"], head["name"]) == ("other", "head")
    assert other["acceptance"] < 0.2
    assert head["acceptance"] > 0.9
    options = ("--target", str(models / "target"), "--draft-dirs", str(models), "--listen", "127.0.0.1:0")
    with Terminal("up", *options, "--no-metrics", **places, COLUMNS="300") as terminal:
        terminal.wait_for("try +specd generate --address .*\n")
        (line,) = (line for line in terminal.screen if line.startswith("draft "))
        assert re.match(r"draft +target \(head\) and look-up \(chosen of 2, ", line), line
        assert not {*processes_mentioning("draft-worker")} & {*processes_mentioning(str(tmp_path))}
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0


_PLAYED = """
import json, os, sys
request = json.loads(sys.stdin.readline())
if request.get("known") is None:
    print(json.dumps({"target": {"seconds": {"1": 0.01}, "device": "cpu"}}))
for key in {**request["heads"], **request["drafts"]}:
    if key == "deadly":
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    rounds = {"1": {"rounds": 9, "accepted": 9, "rejected": 0}}
    print(json.dumps({"draft": key, "trial": {"rounds": rounds, "seconds": {"1": 0.001}, "failure": ""}}))
"""


def test_a_draft_that_ends_the_trial_has_a_failure_and_the_others_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.cli.pairs.trial._COMMAND", (sys.executable, "-c", _PLAYED))
    candidates = [Candidate(key, key, f"/{key}") for key in ("first", "deadly", "last")]
    told: list[str] = []
    record = tried(PairRecord(), "/target", candidates, {}, told.append)
    assert list(record.drafts) == ["first", "deadly", "last"]
    assert "exit code -9" in record.drafts["deadly"].failure
    assert not record.drafts["last"].failure
    assert told[0] == "the target"
    assert choose(candidates, record).setting == "/first"


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import sys; sys.stdin.readline()"])
def test_a_target_that_cannot_be_measured_is_an_error(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("specd.cli.pairs.trial._COMMAND", (sys.executable, "-c", program))
    with pytest.raises(StartupError, match="the trial of the target has failed"):
        tried(PairRecord(), "/target", [Candidate("a", "a", "/a")], {})


@pytest.mark.thorough
def test_the_table_has_the_drafts_and_the_reasons_against_the_others(tmp_path: Path, places: dict[str, Any]) -> None:
    done = run_specd("pair", Path(EMBEDDED_TARGET).name, timeout_seconds=_SECONDS, **places)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^pycode-3\.6m-8bit +\d+% +\d+ +[\d.]+ +[\d.]+ +14\.3 MB +chosen$", done.stdout, re.MULTILINE)
    assert re.search(r"^look-up alone +by the text", done.stdout, re.MULTILINE)
    assert "t5-code-3m-8bit does not fit: " in done.stdout
    assert re.search(r"^pycode-47m-4bit alone: 188\.8 MB of weights on cpu", done.stdout, re.MULTILINE)
    wrong = run_specd("pair", "pycode-47m-4bi", **places)
    assert wrong.returncode == 2
    assert "did you mean pycode-47m-4bit" in complaint(wrong.stderr)


def save_huge(directory: Path, num_bytes: int) -> Path:
    """Save a model with weights of this many bytes, in a file without blocks."""
    copy_variant(EMBEDDED_TARGET, directory, {}, without=["model.safetensors"])
    rows = num_bytes // 4096
    tensor = {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}
    header = json.dumps({"model.embed_tokens.weight": tensor, **_small_tensors(rows * 4096)}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * 4096 + 64 * 4)
    return directory


def _small_tensors(start: int) -> dict[str, Any]:
    """Return as many tensors as a config may have layers."""
    return {
        f"w{i}": {"dtype": "F32", "shape": [1], "data_offsets": [start + 4 * i, start + 4 * i + 4]} for i in range(64)
    }


@pytest.mark.parametrize("command", [("up", "--listen", "127.0.0.1:0", "--no-metrics", "--target"), ("pair",)])
def test_a_target_larger_than_the_memory_is_refused_before_it_is_loaded(
    tmp_path: Path, places: dict[str, Any], command: tuple[str, ...]
) -> None:
    huge = save_huge(tmp_path / "huge", 2 * total_memory())
    message = complaint(run_specd(*command, str(huge), **places).stderr)
    numbers = re.search(r"the weights of huge need ([\d,.]+) GB of memory, but this machine has ([\d,.]+) GB", message)
    assert numbers is not None, message
    needed, there = (float(each.replace(",", "")) for each in numbers.groups())
    assert needed == pytest.approx(2 * there, rel=0.01)
    assert "choose smaller or more quantised models" in message


def test_a_draft_too_large_for_the_memory_is_refused_with_both_numbers(tmp_path: Path, places: dict[str, Any]) -> None:
    huge = save_huge(tmp_path / "huge", 2 * total_memory())
    done = run_specd("up", "--draft", str(huge), "--listen", "127.0.0.1:0", "--no-metrics", **places)
    assert done.returncode == 2
    message = complaint(done.stderr)
    assert re.search(r"need 188\.8 MB of memory and those of its draft huge [\d,.]+ GB, [\d,.]+ GB together", message)
    assert "--draft lookup" in message
