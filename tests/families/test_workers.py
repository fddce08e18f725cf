"""Every family of mlx-lm with a tiny configuration, through real processes: the tokens are mlx-lm's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import load
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.reference import decode_with_mlx_lm
from tests.raw_client import RawClient
from tests.worker.families import save_family
from tests.worker.family_configs import NETWORKS

MAX_TOKENS = 24
PROMPTS = [[1 + 37 * i * length % 8000 for i in range(length)] for length in (5, 40, 300)]
SEEDED = PROMPTS[1]
# These tests do not need a good choice of k.
QUICK = {f"SPECD_{worker}_WORKER_CALIBRATION_SECONDS": "0.05" for worker in ("DRAFT", "TARGET")}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about fields that mlx-lm wants
@pytest.mark.parametrize("name", sorted(NETWORKS))
async def test_every_k_gives_the_tokens_of_mlx_lm(name: str, tmp_path: Path) -> None:
    target, draft = save_family(tmp_path / "target", name), save_family(tmp_path / "draft", name, noise=0.15)
    model = load(target, blas="")
    expected = [decode_with_mlx_lm(model, prompt, MAX_TOKENS) for prompt in PROMPTS]

    async with (
        Stack(target=target, draft=draft, environment=ENVIRONMENT | QUICK) as stack,
        RawClient(stack.address) as client,
    ):

        async def tokens(prompt: list[int], k: int, temperature: float = 0.0) -> list[int]:
            completion = await complete(
                client,
                prompt,
                num_draft_tokens=k,
                max_tokens=MAX_TOKENS,
                sampling=SamplingParameters(temperature=temperature, seed=1),
                stop=StopConditions(),
            )
            return completion.token_ids

        sampled = await tokens(SEEDED, 0, 1.0)
        for k in (0, 1, 4, 8):
            together = [*(tokens(prompt, k) for prompt in PROMPTS), tokens(SEEDED, k, 1.0)]
            assert await asyncio.gather(*together) == [*expected, sampled]
            assert [await tokens(SEEDED, k), await tokens(SEEDED, k, 1.0)] == [expected[1], sampled]
