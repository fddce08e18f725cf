"""The benchmark of many sessions at once, and the plot in a process of its own."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from specd.bench import throughput
from specd.bench.setup import MLX_LM, SPECD, Setup
from specd.client import AsyncClient
from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Stack
from tests.e2e.processes import PATIENCE_SECONDS, run_specd

if TYPE_CHECKING:
    from specd.worker.model.loader import LoadedModel

ROOT = Path(__file__).parents[2]
TARGET = str(EMBEDDED_DRAFT)


@pytest.fixture
async def asking(stack: Stack) -> AsyncIterator[AsyncClient]:
    """A client of `stack` as the bench has it."""
    async with AsyncClient(stack.address) as client:
        yield client


async def test_many_at_once_give_the_same_tokens_and_the_table_says_how_far_they_drafted(
    asking: AsyncClient,
) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    alone, fixed = [await throughput.SpecdClients(asking, Setup(SPECD, k)).decode(prompts, 2, 12) for k in (0, 2)]
    assert alone.token_ids == fixed.token_ids
    assert alone.drafted_per_round == 0
    assert 1 < fixed.drafted_per_round <= 2  # less at the end of a text
    of_mlx_lm = replace(alone, load=throughput.Load(Setup(MLX_LM), 2), seconds=2 * alone.seconds)
    results = throughput.summarise([alone, fixed, of_mlx_lm])
    assert all(result.same_tokens for result in results)
    assert [result.to_mlx_lm for result in results][::2] == [pytest.approx(2), 1]
    rows = written(throughput.table(results, "3 requests")).splitlines()
    assert [row.split()[-7] for row in rows[-3:-1]] == ["0.0", f"{fixed.drafted_per_round:.1f}"]


async def test_both_count_what_comes_while_as_many_as_there_should_be_are_decoded(
    asking: AsyncClient, target: LoadedModel
) -> None:
    """With three texts of twelve tokens, two at once, the third is alone for most of its time."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    contenders: list[Any] = [throughput.SpecdClients(asking, Setup(SPECD, 0)), throughput.MlxLmBatch(target)]
    ours, theirs = [await contender.decode(prompts, 2, 12) for contender in contenders]
    assert ours.token_ids == theirs.token_ids
    for run in (ours, theirs):
        assert sum(map(len, run.token_ids)) == 36
        assert 24 <= run.num_tokens <= 26
        assert run.tokens_per_second == run.num_tokens / run.seconds > 0
    assert (await contenders[0].decode(prompts, 1, 12)).num_tokens == 36


@pytest.mark.thorough
@pytest.mark.parametrize("draft", [["--step-ms", "1"], ["--draft", str(EMBEDDED_DRAFT)]], ids=["none", "computing"])
async def test_a_replayed_text_is_accepted_at_the_rate_that_was_asked_for(tmp_path: Path, draft: list[str]) -> None:
    """With some 170 tries, 0.15 is more than four standard deviations. The draft is the target, and never wrong."""
    report = tmp_path / "report.json"
    options = ["--replay", "0.7", "-k", "4", "--num-prompts", "3", "-n", "64", "--json", str(report)]
    done = run_specd("bench", "--target", TARGET, *draft, *options, timeout_seconds=2 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "gave the same tokens" in done.stdout
    assert "3 of 3 prompts, tokens/s: specd, target alone" in done.stderr
    alone, fixed, _ = json.loads(report.read_text())["results"]
    assert alone["acceptance_per_try"] is None
    assert fixed["acceptance_per_try"] == pytest.approx(0.7, abs=0.15)
    assert fixed["round_milliseconds"]["draft"] >= (4 if "--step-ms" in draft else 0.5)


@pytest.mark.thorough
def test_a_text_can_be_replayed_to_several_sessions(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--replay", "1", "-c", "2", "-k", "4", "--no-adaptive", "--num-prompts", "3", "-n", "16"]
    done = run_specd("bench", "--target", TARGET, *options, "--json", str(report), timeout_seconds=2 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "specd, k = 4, 2 at once: " in done.stderr
    alone, fixed, _ = json.loads(report.read_text())["results"]
    assert alone["drafted_per_round"] == 0
    assert fixed["drafted_per_round"] > 2  # without replayed texts it would be 0


@pytest.mark.thorough
def test_a_target_that_drafts_itself_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--draft-in-target", "-c", "2", "-k", "4", "--no-adaptive", "--num-prompts", "3", "-n", "16"]
    done = run_specd("bench", *options, "--json", str(report), timeout_seconds=2 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    written_report = json.loads(report.read_text())
    assert written_report["environment"]["draft"].endswith(" in the target")
    alone, fixed, _ = written_report["results"]
    assert alone["drafted_per_round"] == 0
    assert fixed["drafted_per_round"] > 2


# A shell lets its jobs in the background ignore SIGINT, and so do all that they start.
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.thorough
def test_an_interrupted_bench_reports_the_results_so_far(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--replay", "0.7", "-k", "2", "--no-adaptive", "--num-prompts", "8", "-n", "32", "--repeats", "1000"]
    command = [sys.executable, "-m", "specd", "bench", "--target", TARGET, *options, "--json", str(report)]
    running = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        assert running.stderr is not None
        for line in running.stderr:
            if "2 of 8000 prompts" in line:
                running.send_signal(signal.SIGINT)
                break
        stdout, stderr = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "specd, k = 2" in stdout
    written_report = json.loads(report.read_text())
    assert [result["num_draft_tokens"] for result in written_report["results"]] == [0, 2]
    assert {len(own) for own in written_report["samples"].values()} <= {2, 3}


@pytest.mark.thorough
def test_the_run_for_accelerators_measures_and_compares(tmp_path: Path) -> None:
    """It works on a CPU too, with random models that are small."""
    report = tmp_path / "report.json"
    options = ["--shape", "tiny", "--models", str(tmp_path), "--parts", "raw,target-only,verify,draft"]
    command = [sys.executable, str(ROOT / "benchmarks" / "accelerator.py"), *options, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=True)
    assert "FAILED" not in done.stdout
    measured = json.loads(report.read_text())
    assert {ratio["what"] for ratio in measured["ratios"]} >= {"2. verify of 8 / raw pass"}
    assert measured["parts"]["target-only"]["target alone"]["tokens_per_round"] == 1
    assert measured["parts"]["draft"]["k = 4, all accepted"]["per_token_ms"] > 0


def test_plot_keeps_away_from_pyplot_whose_state_is_global(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_bench_plot import PLOTTED, save_plot\n"
        "save_plot(PLOTTED, '', Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "plot.png")], cwd=ROOT, check=True)


def written(table: Any) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(table)
    return output.getvalue()
