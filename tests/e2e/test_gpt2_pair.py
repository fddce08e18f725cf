"""A pair of GPT-2 models as they are on the hub, such as gpt2-medium with distilgpt2, through the service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specd.supervisor import Stack
from specd.v1.generation_pb2 import FinishReason, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import load
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.processes import PATIENCE_SECONDS, run_specd
from tests.e2e.reference import decode_with_mlx_lm
from tests.raw_client import RawClient
from tests.thorough import examples
from tests.worker.gpt2_models import NUM_POSITIONS, save_gpt2, weights_on_the_hub

IGNORE_EOS = StopConditions(ignore_eos=True)
PROMPT = [*range(5, 25)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The target without a prefix in its names, as gpt2-medium; the draft with one, as distilgpt2."""
    directory: Path = tmp_path_factory.mktemp("models")
    target = save_gpt2(directory / "target", weights_on_the_hub(""), n_ctx=NUM_POSITIONS)
    return target, save_gpt2(directory / "draft", weights_on_the_hub("transformer.", noise=0.15))


@pytest.fixture(scope="module")
async def gpt2_client(pair: tuple[str, str]) -> AsyncIterator[RawClient]:
    async with (
        Stack(target=pair[0], draft=pair[1], environment=ENVIRONMENT) as stack,
        RawClient(stack.address) as connected,
    ):
        yield connected


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
]


@pytest.mark.parametrize("options", examples(SAMPLINGS, 2), ids=str)
async def test_a_draft_changes_no_token(gpt2_client: RawClient, pair: tuple[str, str], options: dict[str, Any]) -> None:
    sampling = SamplingParameters(seed=7, **options)
    fields: dict[str, Any] = {"max_tokens": 60, "sampling": sampling, "stop": IGNORE_EOS}
    alone = await complete(gpt2_client, PROMPT, num_draft_tokens=0, **fields)
    if not options:
        assert alone.token_ids == decode_with_mlx_lm(load(pair[0], blas=""), PROMPT, 60)
    for k in (1, 4, 8, None):
        drafted = await complete(gpt2_client, PROMPT, **fields, **({} if k is None else {"num_draft_tokens": k}))
        assert drafted.token_ids == alone.token_ids


async def test_at_the_end_of_the_positions_a_session_ends(gpt2_client: RawClient) -> None:
    """Proposals look past the end, and nothing is read there."""
    prompt = [5 + i % 4000 for i in range(NUM_POSITIONS - 20)]
    texts = [await complete(gpt2_client, prompt, num_draft_tokens=k, stop=IGNORE_EOS) for k in (0, 4, 16)]
    assert [text.token_ids for text in texts] == [texts[0].token_ids] * 3
    assert len(texts[0].token_ids) == 20
    assert all(text.finish_reasons == [FinishReason.FINISH_REASON_LENGTH] for text in texts)


@pytest.mark.thorough
def test_bench(pair: tuple[str, str], tmp_path: Path) -> None:
    """Beside mlx-lm, greedy and with a temperature."""
    report, prompts = tmp_path / "report.json", tmp_path / "prompts.jsonl"
    prompts.write_text('"The first of two prompts"\n"def main():"\n')
    models = ["--target", pair[0], "--draft", pair[1]]
    options = ["--prompts", str(prompts), "-n", "24", "-k", "3", "-t", "0", "-t", "0.8", "--json", str(report)]
    done = run_specd("bench", *models, *options, timeout_seconds=2 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert len(results) == 2 * 5
    assert all(result["tokens_per_second"] > 0 for result in results)
