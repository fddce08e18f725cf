"""`specd bench`: what it measures with which options, and what it refuses before it measures."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specd.bench import throughput
from specd.bench.contenders import Specd
from specd.bench.run import Options, _draft_name, _table
from specd.bench.sample import summarise, whole_turns
from specd.bench.setup import MLX_LM, SPECD, Setup
from specd.cli.app import app
from specd.client import AsyncClient, GenerationOptions
from specd.client.protocol.wire import to_request
from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.v1 import generation_pb2
from tests.unit.test_bench_summary import ALONE, REJECTION, ROUND, SAMPLE


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Fixed results of `specd bench`, instead of a measurement."""
    options: list[Options] = []

    def keep(chosen: Options, *_: object) -> bool:
        options.append(chosen)
        return True

    monkeypatch.setattr("specd.bench.run.run_bench", keep)
    monkeypatch.setattr("specd.bench.run.run_throughput", keep)
    monkeypatch.setattr("specd.cli.bench.start_logging", lambda process: None)
    monkeypatch.setenv("SPECD_LOG_LEVEL", "warning")  # which the command would set for good
    return options


@pytest.mark.parametrize(("arguments", "expected"), [([], True), (["--adaptive"], True), (["--no-adaptive"], False)])
def test_bench_is_adaptive_unless_told_otherwise(measured: list[Options], arguments: list[str], expected: bool) -> None:
    assert bench(*arguments) is None
    (options,) = measured
    assert options.adaptive is expected
    assert list(options.num_draft_tokens) == [3, 4, 5, 7]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-c", "2", "-t", "0.5"], "--temperature"),
        (["-c", "2", "--plot", "plot.png"], "--plot"),
        (["--plot", "plot.svg"], "plot.svg"),
        (["--cached-prompts"], "--concurrency"),
        (["--lenience", "0.1"], "--acceptance rejection"),
        (["--replay", "0.7", "-t", "0.5"], "--temperature"),
        (["--replay", "0.7", "--draft-in-target"], "--draft-in-target"),
        (["--step-ms", "2"], "--replay"),
        (["--replay", "0.7", "--draft", "a model", "--step-ms", "2"], "--draft"),
    ],
)
def test_contradictions_are_refused_before_anything_is_measured(
    measured: list[Options], arguments: list[str], named: str
) -> None:
    complaint = bench(*arguments)
    assert complaint is not None
    assert named in complaint
    assert measured == []


def test_a_replay_computes_with_a_draft_only_if_one_is_named(measured: list[Options]) -> None:
    for arguments in ([], ["--replay", "0.7"], ["--replay", "0.7", "--draft", EMBEDDED_TARGET, "-c", "2"]):
        assert bench(*arguments) is None
    assert [options.draft for options in measured] == [EMBEDDED_DRAFT, "", EMBEDDED_TARGET]


def test_the_target_computes_the_draft_where_it_is_told_to(
    measured: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ([], ["--draft-in-target"]):
        assert bench(*arguments) is None
    monkeypatch.setattr("specd.bench.run.Stack", lambda **given: (given["draft"], given.get("options")))
    stacks: list[Any] = [options.stack({}) for options in measured]
    assert stacks == [
        (EMBEDDED_DRAFT, None),
        ("", {"target-worker": {"self_draft": EMBEDDED_DRAFT}}),
    ]
    name = Path(EMBEDDED_DRAFT).name
    assert [_draft_name(options) for options in measured] == [name, f"{name} in the target"]


def test_an_interrupted_measurement_keeps_whole_turns_or_the_first_samples() -> None:
    other, third = Setup(SPECD, 2), Setup(MLX_LM, 0)
    first, second = SAMPLE, replace(SAMPLE, repeat=1)
    assert whole_turns({ALONE: [first, second], other: [first, second], third: [first]}) == {
        setup: [first] for setup in (ALONE, other, third)
    }
    assert whole_turns({ALONE: [first], other: [first], third: []}) == {ALONE: [first], other: [first]}
    assert whole_turns({ALONE: [], other: []}) == whole_turns({}) == {}


def test_bench_takes_prompts_from_a_file_and_from_a_directory(measured: list[Options], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n{"prompt": "b"}\n"c"\n')
    assert bench("--prompts", str(file), "--num-prompts", "2") is None
    assert bench("--prompts", str(tmp_path)) is None
    assert [options.prompts for options in measured] == [
        {"prompts.jsonl:1": "a", "prompts.jsonl:2": "b"},
        {"prompts.jsonl": file.read_text()},
    ]


def hide_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_matplotlib_plot_says_what_to_install_before_anything_is_measured(
    measured: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_matplotlib(monkeypatch)
    complaint = bench("--plot", str(tmp_path / "plot.png"))
    assert complaint is not None
    assert "pip install matplotlib" in complaint
    assert measured == []


def test_without_matplotlib_the_rest_works(measured: list[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    hide_matplotlib(monkeypatch)
    assert bench() is None
    assert len(measured) == 1


@pytest.mark.parametrize("option", ["--plot", "--json"])
@pytest.mark.parametrize("directory", ["missing", "file"])
def test_a_file_that_cannot_be_made_is_refused_before_anything_is_measured(
    measured: list[Options], tmp_path: Path, option: str, directory: str
) -> None:
    (tmp_path / "file").write_text("")
    complaint = bench(option, str(tmp_path / directory / "report.png"))
    assert complaint is not None
    assert f"cannot write {tmp_path / directory}" in complaint
    assert measured == []


def test_in_a_directory_that_is_locked_only_files_that_are_there_are_taken(
    measured: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root can write everywhere
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("{}")
    assert bench("--json", str(there)) is None
    assert bench("--json", str(new)) == f"cannot write {new}: {tmp_path}: Permission denied"
    assert len(measured) == 1


def test_looking_whether_files_can_be_written_leaves_nothing(measured: list[Options], tmp_path: Path) -> None:
    assert bench("--json", str(tmp_path / "new.json"), "--plot", str(tmp_path / "PLOT.PNG")) is None
    assert len(measured) == 1
    assert list(tmp_path.iterdir()) == []


class RecordingClient(AsyncClient):
    """A client that keeps the requests, and gets a token in each of three rounds."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []

    def generate(self, prompt: Any, **options: Any) -> Any:
        self.requests.append(to_request(prompt, cast(GenerationOptions, options)))
        return self

    async def messages(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        statistics = generation_pb2.SessionStatistics(proposed_tokens=9, accepted_tokens=4, recovered_tokens=2)
        for token_id in range(3):
            token = generation_pb2.GeneratedToken(id=token_id)
            round_ = generation_pb2.Round(verify_seconds=0.5)
            yield generation_pb2.GenerateResponse(tokens=[token], round=round_, statistics=statistics)


@pytest.mark.parametrize("k", [0, 3, None])
async def test_only_an_adaptive_contender_leaves_k_to_the_service(k: int | None) -> None:
    client = RecordingClient()
    sample = await Specd(client, Setup(SPECD, k)).decode("a", 0, [1, 2], 16)
    (request,) = client.requests
    assert request.HasField("num_draft_tokens") is (k is not None)
    assert request.num_draft_tokens == (k or 0)
    assert (sample.accepted_tokens, sample.rejections) == (4, 2)  # its tries are those of its own rounds, for any k
    assert sample.token_ids == (0, 1, 2)
    assert len(sample.rounds) == 2


def bench(*arguments: str) -> str | None:
    """Run `specd bench` here; returns what the user has to mend, if there is anything."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is None:
        return None
    assert isinstance(result.exception, StartupError), result.output
    return str(result.exception)


def test_a_load_is_full_until_a_text_ends_that_none_follows() -> None:
    load = throughput._FullLoad(num_prompts=5, concurrency=3)
    for text in range(5):
        assert (load.seconds > 0) == (text >= 3)
        load.came(10)
        load.ended()
    assert load.num_tokens == 30
    few = throughput._FullLoad(num_prompts=2, concurrency=3)
    few.came(1)
    few.ended()
    few.came(1)
    few.ended()
    assert few.num_tokens == 1


def test_the_table_fits_in_its_width_and_loses_nothing() -> None:
    setup = Setup(SPECD, 32, 1.0, REJECTION, 0.25)
    round_ = replace(ROUND, draft_seconds=0.123456, verify_seconds=0.123456, wire_bytes=123456)
    sample = replace(SAMPLE, decode_seconds=0.0081, proposed_tokens=9, accepted_tokens=9, rounds=(round_,) * 5)
    results = [
        summarise(other, [sample if other.speculates else SAMPLE], [SAMPLE])
        for other in (ALONE, setup, Setup(SPECD, None, 1.0, REJECTION), Setup(MLX_LM, 0, 1.0))
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_table(results, "medians, T = 1"))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 120
    assert "…" not in shown
    for text in (*setup.label.split(), "1234.6", "123.46", "100.0%", "123.5", "limit", "16.2"):
        assert text in shown
