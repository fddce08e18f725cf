"""What the benchmark makes of its measurements."""

from __future__ import annotations

import errno
import io
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.acceptance import METHODS, coupled, estimate, rounds
from specd.bench import throughput
from specd.bench.comparison import compare
from specd.bench.contenders import Specd
from specd.bench.plot import draw, save_plot
from specd.bench.prompts import load_prompts
from specd.bench.run import Options, _table
from specd.bench.sample import Result, Round, Sample, count_rejections, summarise
from specd.bench.setup import MLX_LM, SPECD, Setup, setups
from specd.cli.app import app
from specd.client import Client
from specd.errors import StartupError
from specd.sampling import Acceptance
from specd.v1 import generation_pb2

if TYPE_CHECKING:
    from specd.worker.model import LoadedModel

ROOT = Path(__file__).parents[1]
RANDOM = np.random.default_rng(0)
P, Q = RANDOM.dirichlet([0.3] * 6, 20), RANDOM.dirichlet([0.3] * 6, 20)

COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION
ALONE = Setup(SPECD, temperature=1.0)
ROUND = Round(0.004, 0.02, 0.001, 0.002, 0.003, wire_bytes=1500)
SAMPLE = Sample("a", 0, tuple(range(11)), 0.5, 1.0, rounds=(ROUND,) * 5)


def test_each_k_meets_each_way_to_accept_and_lenience_is_for_rejection() -> None:
    labels = [setup.label for setup in setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2])]
    assert labels == [
        "specd, target alone",
        *("specd, k = 3", "specd, k = 3, rejection", "specd, k = 3, lenience 0.2"),
        *("specd, k = 7", "specd, k = 7, rejection", "specd, k = 7, lenience 0.2"),
        "mlx-lm, target alone",
        *("mlx-lm, k = 3", "mlx-lm, k = 7"),
    ]


def test_adaptive_comes_after_every_fixed_k_and_mlx_lm_has_none() -> None:
    contenders = list(setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True))
    fixed = list(setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2]))
    added = [setup for setup in contenders if setup not in fixed]
    assert [setup.label for setup in contenders][7:10] == [setup.label for setup in added]
    assert [setup.label for setup in added] == [
        "specd, adaptive",
        "specd, adaptive, rejection",
        "specd, adaptive, lenience 0.2",
    ]
    assert all(setup.system == SPECD and setup.num_draft_tokens is None and setup.speculates for setup in added)
    assert [setup for setup in contenders if setup not in added] == fixed


def test_names_are_unique_over_temperatures() -> None:
    names = [
        setup.name
        for t in (0.0, 0.7, 1.0)
        for setup in setups(t, [3, 7], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True)
    ]
    assert len(set(names)) == len(names)
    assert Setup(SPECD, 3).name == "specd, k = 3"
    assert Setup(SPECD, 3, 0.7).name == "specd, k = 3, T = 0.7"


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(SPECD, 3), True),
        (Setup(MLX_LM, 3), True),
        (Setup(SPECD, 3, 0.0, REJECTION), True),
        (Setup(SPECD, 3, 0.0, REJECTION, 0.1), False),
        (Setup(SPECD, 3, 1.0), True),
        (Setup(SPECD, None), True),
        (Setup(SPECD, None, 1.0), True),
        (Setup(SPECD, None, 1.0, REJECTION), False),
        (Setup(SPECD, 3, 1.0, REJECTION), False),
        (Setup(MLX_LM, 3, 1.0), False),
        (Setup(MLX_LM, 0, 1.0), False),
    ],
)
def test_who_must_give_the_tokens_of_the_target_alone(setup: Setup, expected: bool) -> None:
    assert setup.repeats_target is expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ("DDDt DDDt", 0),  # bonus tokens
        ("DDt t DDDt Dt", 3),
        ("DDDt DD", 0),  # the last round is cut, by the end of the text or by an end token
        ("DDDt t", 1),
        ("", 0),
    ],
)
def test_rejections_are_own_tokens_after_fewer_than_k_drafted(rounds: str, expected: int) -> None:
    assert count_rejections([letter == "D" for letter in rounds.replace(" ", "")], 3) == expected


def test_the_target_alone_rejects_nothing() -> None:
    assert count_rejections([False] * 5, 0) == 0


def test_summary_takes_medians_and_counts_tries() -> None:
    sample = replace(SAMPLE, decode_seconds=0.5, proposed_tokens=15, accepted_tokens=6, rejections=4)
    slow = replace(sample, decode_seconds=2.0, accepted_tokens=3, rejections=5)
    result = summarise(Setup(SPECD, 3, 1.0), [sample, sample, slow], [SAMPLE] * 3)

    assert result.tokens_per_second == 20
    assert result.speedup == 2
    assert result.acceptance_rate == pytest.approx(15 / 45)
    assert result.acceptance_per_try == pytest.approx(15 / 28)
    assert result.acceptance_length == 2
    assert result.round_kilobytes == 1.5
    assert result.round_milliseconds["total"] == pytest.approx(30)
    assert result.round_milliseconds["wire_and_coordinator"] == pytest.approx(5)


def test_limit_is_the_speed_if_only_verifying_took_time() -> None:
    # 10 tokens after the first in 5 rounds, which verify for 0.02 s each, and 1 s in all.
    result = summarise(Setup(SPECD, 3), [SAMPLE], [SAMPLE])
    assert result.limit_tokens_per_second == pytest.approx(10 / (5 * 0.02))
    assert result.of_limit == pytest.approx(0.1)


def test_limit_takes_medians_over_samples_of_itself_and_of_the_ratio() -> None:
    slow, quick = replace(ROUND, verify_seconds=0.1), replace(ROUND, verify_seconds=0.01)
    samples = [
        replace(SAMPLE, decode_seconds=0.2, rounds=(slow, quick)),
        replace(SAMPLE, decode_seconds=0.4, rounds=(slow, slow)),
        replace(SAMPLE, decode_seconds=0.5, rounds=(quick, quick)),
    ]
    result = summarise(Setup(SPECD, None), samples, [SAMPLE] * 3)
    assert result.limit_tokens_per_second == pytest.approx(10 / 0.11)
    assert result.of_limit == pytest.approx(0.5)  # of 0.11 / 0.2, 0.2 / 0.4 and 0.02 / 0.5


def test_only_speculation_whose_rounds_are_known_has_a_limit() -> None:
    alone = summarise(Setup(SPECD, 0), [SAMPLE], [SAMPLE])
    of_mlx_lm = summarise(Setup(MLX_LM, 3), [replace(SAMPLE, rounds=())], [SAMPLE])
    for result in (alone, of_mlx_lm):
        assert (result.limit_tokens_per_second, result.of_limit) == (None, None)


def test_a_text_of_one_token_does_not_count_for_the_limit() -> None:
    short = replace(SAMPLE, token_ids=(0,), decode_seconds=0.0, rounds=())
    result = summarise(Setup(SPECD, 3), [short, short, SAMPLE], [SAMPLE] * 3)
    assert result.limit_tokens_per_second == pytest.approx(100)


def test_records_hold_what_the_medians_are_made_of() -> None:
    records = [replace(SAMPLE, decode_seconds=seconds).as_record() for seconds in (0.25, 0.5, 2.0)]
    result = summarise(
        Setup(SPECD, 3), [replace(SAMPLE, decode_seconds=seconds) for seconds in (0.25, 0.5, 2.0)], [SAMPLE] * 3
    )
    speeds = [(record["token_ids"] - 1) / record["decode_seconds"] for record in records]
    limits = [(record["token_ids"] - 1) / record["verify_seconds"] for record in records]
    assert median(speeds) == pytest.approx(result.tokens_per_second)
    assert median(limits) == pytest.approx(result.limit_tokens_per_second)
    assert median(np.divide(speeds, limits)) == pytest.approx(result.of_limit)
    assert [record["rounds"] for record in records] == [5, 5, 5]


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


def test_a_text_of_one_token_has_no_speed() -> None:
    short = replace(SAMPLE, token_ids=(0,), decode_seconds=0.0, rounds=())
    assert summarise(ALONE, [short, SAMPLE], [SAMPLE, SAMPLE]).speedup == 1
    assert summarise(ALONE, [SAMPLE, SAMPLE], [SAMPLE, short]).speedup == 1


def test_a_record_has_the_setup_among_its_fields() -> None:
    record = summarise(Setup(SPECD, 3, 1.0, REJECTION, 0.1), [SAMPLE], [SAMPLE]).as_record()
    assert record["name"] == "specd, k = 3, lenience 0.1, T = 1"
    assert (record["acceptance"], record["lenience"], record["temperature"]) == ("rejection", 0.1, 1.0)
    assert record["acceptance_per_try"] is None


def test_comparison_pairs_the_same_k_and_knows_the_best_without_lenience() -> None:
    per_try = {COUPLED: 64, REJECTION: 67}
    samples = {}
    for setup in setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.5]):
        accepted = 48 if setup.system == MLX_LM else 80 if setup.lenience else per_try[setup.acceptance]
        speed = (1 + setup.lenience) * (1 + setup.num_draft_tokens / 10)
        sample = replace(SAMPLE, decode_seconds=1 / speed, accepted_tokens=accepted, rejections=100 - accepted)
        samples[setup] = sample if setup.num_draft_tokens else SAMPLE
    verdicts = compare([summarise(setup, [sample], [SAMPLE]) for setup, sample in samples.items()])

    assert verdicts["best specd (specd, k = 7) / specd with the target alone"] == pytest.approx(1.7)
    assert verdicts["best specd / best mlx-lm (mlx-lm, k = 7)"] == pytest.approx(1)
    for k in (3, 7):
        assert verdicts[f"COUPLED / REJECTION, accepted per try, k = {k}"] == pytest.approx(64 / 67)
        assert verdicts[f"COUPLED / mlx-lm (independent sampling), accepted per try, k = {k}"] == pytest.approx(64 / 48)
        assert verdicts[f"lenience 0.5 / lenience 0, accepted per try, k = {k}"] == pytest.approx(80 / 67)
        assert verdicts[f"lenience 0.5 / lenience 0, speed-up, k = {k}"] == pytest.approx(1.5)


def test_greedy_comparison_is_of_speed_only() -> None:
    results = [summarise(setup, [SAMPLE], [SAMPLE]) for setup in setups(0.0, [3], [COUPLED], [0.0])]
    assert len(compare(results)) == 5


def results_at(speeds: dict[Setup, float]) -> list[Result]:
    """Results of contenders that are so many times as fast as `SAMPLE`."""
    return [summarise(setup, [replace(SAMPLE, decode_seconds=1 / speed)], [SAMPLE]) for setup, speed in speeds.items()]


SPEEDS = {
    Setup(SPECD, 0): 1.0,
    Setup(SPECD, 3): 2.0,
    Setup(SPECD, 5): 2.5,
    Setup(SPECD, None): 2.0,
    Setup(MLX_LM, 0): 1.25,
    Setup(MLX_LM, 3): 3.2,
}


def test_adaptive_is_put_beside_the_target_alone_mlx_lm_and_the_best_fixed_k() -> None:
    verdicts = compare(results_at(SPEEDS))
    assert verdicts["best specd (specd, k = 5) / specd with the target alone"] == pytest.approx(2.5)
    assert verdicts["specd, adaptive / specd with the target alone"] == pytest.approx(2)
    assert verdicts["specd, adaptive / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2 / 3.2)
    assert verdicts["specd, adaptive / best fixed k (specd, k = 5)"] == pytest.approx(0.8)


def test_comparison_says_how_near_the_limit_the_best_and_the_adaptive_one_are() -> None:
    verdicts = compare(results_at(SPEEDS))  # the limit of each is 100 tokens/s, ten times the speed of `SAMPLE`
    assert verdicts["best specd, % of its limit"] == pytest.approx(25)
    assert verdicts["specd, adaptive, % of its limit"] == pytest.approx(20)


def test_adaptive_can_be_the_best() -> None:
    verdicts = compare(results_at(SPEEDS | {Setup(SPECD, None): 2.8}))
    assert verdicts["best specd (specd, adaptive) / specd with the target alone"] == pytest.approx(2.8)
    assert verdicts["best specd / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2.8 / 3.2)
    assert verdicts["specd, adaptive / best fixed k (specd, k = 5)"] == pytest.approx(2.8 / 2.5)


def test_without_adaptive_nothing_is_said_of_it() -> None:
    verdicts = compare(results_at({setup: speed for setup, speed in SPEEDS.items() if not setup.is_adaptive}))
    assert verdicts["best specd (specd, k = 5) / specd with the target alone"] == pytest.approx(2.5)
    assert not [name for name in verdicts if "adaptive" in name]


def test_without_a_fixed_k_adaptive_is_put_beside_the_others() -> None:
    verdicts = compare(
        results_at(
            {setup: SPEEDS[setup] for setup in SPEEDS if setup.num_draft_tokens not in (3, 5)} | {Setup(MLX_LM, 3): 3.2}
        )
    )
    assert verdicts["specd, adaptive / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2 / 3.2)
    assert not [name for name in verdicts if "best fixed k" in name]


def test_a_lenient_adaptive_one_is_not_the_best_of_the_adaptive_ones() -> None:
    setup = Setup(SPECD, None, 0.0, REJECTION, 0.5)
    verdicts = compare(results_at(SPEEDS | {setup: 9.0}))
    assert verdicts["specd, adaptive / specd with the target alone"] == pytest.approx(2)


def test_adaptive_is_compared_with_adaptive_by_acceptance_and_lenience() -> None:
    accepted = {COUPLED: 60, REJECTION: 75}
    results = []
    for setup in setups(1.0, [3], [COUPLED, REJECTION], [0.0, 0.5], adaptive=True):
        count = 90 if setup.lenience else accepted[setup.acceptance] if setup.is_adaptive else 50
        sample = replace(SAMPLE, accepted_tokens=count, rejections=100 - count)
        results.append(summarise(setup, [sample], [SAMPLE]))
    verdicts = compare(results)
    assert verdicts["COUPLED / REJECTION, accepted per try, adaptive"] == pytest.approx(60 / 75)
    assert verdicts["lenience 0.5 / lenience 0, accepted per try, adaptive"] == pytest.approx(90 / 75)
    assert "COUPLED / mlx-lm (independent sampling), accepted per try, k = 3" in verdicts
    assert "COUPLED / mlx-lm (independent sampling), accepted per try, adaptive" not in verdicts


def test_an_adaptive_record_has_no_number_of_draft_tokens() -> None:
    record = summarise(Setup(SPECD, None), [SAMPLE], [SAMPLE]).as_record()
    assert (record["name"], record["num_draft_tokens"]) == ("specd, adaptive", None)


def test_prompts_in_json_lines_are_named_by_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['"def f(x):\\n"', '{"prompt": "é \u2028 \\ud83d\\ude00", "id": 7}', "", '  {"id": [], "prompt": " "}  ']
    file.write_bytes("\r\n".join(lines).encode())
    assert load_prompts(file) == {
        "prompts.jsonl:1": "def f(x):\n",
        "prompts.jsonl:2": "é \u2028 😀",
        "prompts.jsonl:4": " ",
    }


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"def f(x):", "not JSON"),
        (b'{"prompt": "def f(x):"', "not JSON"),
        (b'{"text": "def f(x):"}', '{"text": "def f(x):"} is no prompt'),
        (b'{"prompt": 7}', '{"prompt": 7} is no prompt'),
        (b'["def f(x):"]', "is no prompt"),
        (b"null", "null is no prompt"),
        (b"[" + b"7, " * 1000 + b"7]", "… is no prompt"),
        (b'{"prompt": ""}', "not empty"),
        (b'""', "not empty"),
        (b'"\xe9"', "not UTF-8"),
        (b'"\\ud83d"', "surrogate"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_file_and_line(tmp_path: Path, line: bytes, wrong: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"def f(x):"\n\n' + line + b'\n"class A:"\n')
    with pytest.raises(StartupError) as raised:
        load_prompts(file)
    message = str(raised.value)
    assert message.startswith(f"{file}, line 3: ")
    assert wrong in message
    assert len(message) < len(str(file)) + 160


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(StartupError, match=r"there is no prompt in .*prompts\.jsonl"):
        load_prompts(file)


def test_bench_takes_prompts_from_a_file_and_from_a_directory(measured: list[Options], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n{"prompt": "b"}\n"c"\n')
    assert bench("--prompts", str(file), "--num-prompts", "2") is None
    assert bench("--prompts", str(tmp_path)) is None
    assert [options.prompts for options in measured] == [
        {"prompts.jsonl:1": "a", "prompts.jsonl:2": "b"},
        {"prompts.jsonl": file.read_text()},
    ]


PLOTTED = [
    summarise(
        setup,
        [
            replace(
                SAMPLE,
                decode_seconds=1 / (1 + (4 if setup.is_adaptive else setup.num_draft_tokens or 0) / 10),
                proposed_tokens=10 if setup.speculates and setup.system == SPECD else 0,
                accepted_tokens=5 if setup.is_adaptive else 8 - (setup.num_draft_tokens or 0),
            )
        ],
        [SAMPLE],
    )
    for temperature in (0.0, 0.7)
    for setup in setups(temperature, [3, 7], [COUPLED], [0.0], adaptive=True)
]


def test_plot_is_a_png_of_a_plausible_size(tmp_path: Path) -> None:
    for name, results in (("both.png", PLOTTED), ("greedy.png", PLOTTED[: len(PLOTTED) // 2])):
        save_plot(results, "a title", tmp_path / name)
    sizes = {}
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert data[12:16] == b"IHDR"
        assert 20_000 < len(data) < 1_000_000  # an empty white image has 10 kB
        sizes[file.name] = struct.unpack(">II", data[16:24])
    assert sizes == {"both.png": (1650, 1260), "greedy.png": (1650, 630)}


def test_plot_has_a_row_for_each_temperature_and_says_what_is_drawn() -> None:
    axes = draw(PLOTTED, "a title").axes
    assert [panel.get_title() for panel in axes] == [
        "speed-up, greedy",
        "acceptance rate, greedy",
        "speed-up, temperature 0.7",
        "acceptance rate, temperature 0.7",
    ]
    assert all("k, draft tokens a round" in panel.get_xlabel() for panel in axes)
    assert ["%" in panel.get_ylabel() for panel in axes] == [False, True] * 2


@pytest.mark.parametrize("row", [0, 1])
def test_plot_draws_each_k_and_adaptive_as_a_horizontal_line(row: int) -> None:
    speedup, acceptance = (
        {line.get_label(): np.transpose(line.get_data()).tolist() for line in panel.get_lines()}
        for panel in draw(PLOTTED, "").axes[2 * row : 2 * row + 2]
    )
    assert set(speedup) == {"specd", "specd, adaptive", "mlx-lm"}
    np.testing.assert_allclose(speedup["specd"], [[0, 1], [3, 1.3], [7, 1.7]])
    np.testing.assert_allclose(speedup["mlx-lm"], [[0, 1], [3, 1.3], [7, 1.7]])
    np.testing.assert_allclose(speedup["specd, adaptive"], [[0, 1.4], [1, 1.4]])  # from one edge to the other

    assert set(acceptance) == {"specd", "specd, adaptive"}
    np.testing.assert_allclose(acceptance["specd"], [[3, 50], [7, 10]])
    np.testing.assert_allclose(acceptance["specd, adaptive"], [[0, 50], [1, 50]])


def test_plot_keeps_away_from_pyplot_whose_state_is_global(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.test_bench import PLOTTED, save_plot\n"
        "save_plot(PLOTTED, '', Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "plot.png")], cwd=ROOT, check=True)


def test_each_way_to_accept_has_a_line_of_its_own() -> None:
    contenders = setups(1.0, [3], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True)
    panel = draw([summarise(setup, [SAMPLE], [SAMPLE]) for setup in contenders], "").axes[0]
    assert [line.get_label() for line in panel.get_lines()] == [
        *("specd", "specd, adaptive", "specd, rejection", "specd, adaptive, rejection"),
        *("specd, lenience 0.2", "specd, adaptive, lenience 0.2", "mlx-lm"),
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


class RecordingClient(Client):
    """A client that keeps the requests, and gets a token in each of three rounds."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []

    async def generate(self, *_: object, **fields: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(generation_pb2.GenerateRequest(**fields))
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
    assert (sample.accepted_tokens, sample.rejections) == (4, 2)  # its tries are its own rounds', whatever their k
    assert sample.token_ids == (0, 1, 2)
    assert len(sample.rounds) == 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """What `specd bench` would have measured, in place of a measurement."""
    options: list[Options] = []

    def keep(chosen: Options, *_: object) -> bool:
        options.append(chosen)
        return True

    monkeypatch.setattr("specd.bench.run.run_bench", keep)
    monkeypatch.setattr("specd.bench.run.run_throughput", keep)
    monkeypatch.setattr("specd.cli.app._configure_logging", lambda process: None)
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
    ],
)
def test_contradictions_are_refused_before_anything_is_measured(
    measured: list[Options], arguments: list[str], named: str
) -> None:
    complaint = bench(*arguments)
    assert complaint is not None
    assert named in complaint
    assert measured == []


def bench(*arguments: str) -> str | None:
    """Run `specd bench` here; returns what the user has to mend, if there is anything."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is None:
        return None
    assert isinstance(result.exception, StartupError), result.output
    return str(result.exception)


def test_coupled_is_the_formula_of_the_paper() -> None:
    expected = [
        [1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(6)) for x in range(6)] for p, q in zip(P, Q, strict=True)
    ]
    np.testing.assert_allclose(coupled(P, Q), expected, rtol=1e-9)


def test_coupled_is_what_the_same_noise_gives() -> None:
    noise = RANDOM.gumbel(size=(20000, 1, 6))
    target, draft = (np.argmax(np.log(distributions) + noise, axis=-1) for distributions in (P, Q))
    np.testing.assert_allclose(coupled(P, Q).sum(-1), (target == draft).mean(0), atol=0.015)


def test_a_draft_that_is_the_target_is_always_accepted_unless_they_sample_independently() -> None:
    np.testing.assert_allclose(coupled(P, P), P)
    np.testing.assert_allclose(METHODS["rejection"](P, P), P)
    assert (METHODS["independent"](P, P).sum(-1) < 1).all()


def test_rounds_of_a_text() -> None:
    # Places 1, 4, 7 and 10 begin rounds; the one at 10 could reach past the end.
    assert rounds(np.ones(12), 2) == (3, 6, 6)
    assert rounds(np.zeros(12), 2) == (9, 9, 0)
    # Two tries in a quarter of the rounds that accept the first.
    num_rounds, num_tries, num_accepted = rounds(np.full(5000, 0.25), 2)
    assert num_tries / num_rounds == pytest.approx(1.25)
    assert num_accepted / num_tries == pytest.approx(0.25)
    assert (5000 - 3) / num_rounds == pytest.approx(1 + num_accepted / num_rounds, rel=1e-3)


def test_standard_error_of_a_mean_and_of_a_ratio_that_does_not_vary() -> None:
    values = np.array([1.0, 2.0, 4.0])
    mean, error = estimate(lambda weights: float(weights @ values / weights.sum()), 3)
    assert mean == pytest.approx(7 / 3)
    assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    assert estimate(lambda weights: float((weights @ values) / (weights @ (2 * values))), 3) == (0.5, 0)


@pytest.mark.processes
async def test_many_at_once_give_the_same_tokens_and_the_table_says_how_far_they_drafted(client: Client) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    alone, fixed = [await throughput.Specd(client, Setup(SPECD, k)).decode(prompts, 2, 12) for k in (0, 2)]
    assert alone.token_ids == fixed.token_ids
    assert alone.drafted_per_round == 0
    assert 1 < fixed.drafted_per_round <= 2  # less at the end of a text
    of_mlx_lm = replace(alone, load=throughput.Load(Setup(MLX_LM), 2), seconds=2 * alone.seconds)
    results = throughput.summarise([alone, fixed, of_mlx_lm])
    assert all(result.same_tokens for result in results)
    assert [result.to_mlx_lm for result in results][::2] == [pytest.approx(2), 1]
    rows = written(throughput.table(results, "3 requests")).splitlines()
    assert [row.split()[-7] for row in rows[-3:-1]] == ["0.0", f"{fixed.drafted_per_round:.1f}"]


@pytest.mark.processes
async def test_both_count_what_comes_while_as_many_as_there_should_be_are_decoded(
    client: Client, target: LoadedModel
) -> None:
    """Of three texts of twelve tokens, two at once, the third is alone for most of its time."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    contenders = [throughput.Specd(client, Setup(SPECD, 0)), throughput.MlxLmBatch(target)]
    ours, theirs = [await contender.decode(prompts, 2, 12) for contender in contenders]
    assert ours.token_ids == theirs.token_ids
    for run in (ours, theirs):
        assert sum(map(len, run.token_ids)) == 36
        assert 24 <= run.num_tokens <= 26
        assert run.tokens_per_second == run.num_tokens / run.seconds > 0
    assert (await contenders[0].decode(prompts, 1, 12)).num_tokens == 36


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


def written(table: Any) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(table)
    return output.getvalue()
