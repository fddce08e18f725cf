"""The benchmark of many sessions at once, and the plot in a process of its own."""

from __future__ import annotations

import io
import json
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


async def test_a_replayed_text_is_accepted_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    """With some 170 tries, 0.15 is more than four standard deviations."""
    report = tmp_path / "report.json"
    models = ["--target", str(EMBEDDED_DRAFT), "--draft", "none of them"]
    options = ["--replay", "0.7", "--step-ms", "1", "-k", "4", "--num-prompts", "3", "-n", "64", "--json", str(report)]
    done = run_specd("bench", *models, *options, timeout_seconds=2 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "gave the same tokens" in done.stdout
    alone, fixed, _ = json.loads(report.read_text())["results"]
    assert alone["acceptance_per_try"] is None
    assert fixed["acceptance_per_try"] == pytest.approx(0.7, abs=0.15)
    assert fixed["round_milliseconds"]["draft"] >= 4


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
