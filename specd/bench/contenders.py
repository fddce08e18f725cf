"""The decoders that are compared. Each turns the same prompt tokens into a `Sample`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from specd.bench.sample import RoundTimes, Sample, count_rejections
from specd.bench.setup import Setup
from specd.client import AsyncClient
from specd.v1 import generation_pb2
from specd.worker.model.loader import LoadedModel


class Contender(Protocol):
    """A decoder to measure."""

    @property
    def setup(self) -> Setup:
        """Its setup."""

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt and measure it."""


class Specd:
    """A running specd system, through gRPC. Adaptive requests leave out the number of draft tokens."""

    def __init__(self, client: AsyncClient, setup: Setup, *, ignore_eos: bool = False) -> None:
        self.setup = setup
        self._client = client
        self._ignore_eos = ignore_eos

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt; times are the client's."""
        token_ids: list[int] = []
        rounds: list[RoundTimes] = []
        statistics = generation_pb2.SessionStatistics()
        started_at = first_at = last_at = time.perf_counter()
        stream = self._client.generate(
            prompt_ids,
            max_tokens=max_tokens,
            num_draft_tokens=self.setup.num_draft_tokens,
            temperature=self.setup.temperature,
            seed=seed_of(prompt, repeat),
            acceptance=self.setup.acceptance,
            lenience=self.setup.lenience,
            ignore_eos=self._ignore_eos,
        )
        async for response in stream.messages():
            last_at = time.perf_counter()
            if token_ids:
                rounds.append(_round(response.round))
            else:
                first_at = last_at
            token_ids.extend(token.id for token in response.tokens)
            statistics = response.statistics
        return Sample(
            prompt,
            repeat,
            tuple(token_ids),
            first_at - started_at,
            last_at - first_at,
            statistics.proposed_tokens,
            statistics.accepted_tokens,
            statistics.recovered_tokens,
            tuple(rounds),
        )


class MlxLm:
    """mlx-lm in this process: its plain decoding, or its speculative decoding with k draft tokens.

    With a temperature it samples draft and target independently, and accepts where they agree. It runs with OpenBLAS,
    and without specd's other optimisations for the CPU.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel, setup: Setup) -> None:
        assert setup.num_draft_tokens is not None, "mlx-lm does not choose k"
        self.setup = setup
        self._num_draft_tokens = setup.num_draft_tokens
        self._target = target
        self._draft = draft

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt, up to and with an end token, as specd does."""
        token_ids: list[int] = []
        drafted: list[bool] = []
        mx.random.seed(seed_of(prompt, repeat))
        started_at = first_at = time.perf_counter()
        for token_id, is_drafted in self._tokens(prompt_ids, max_tokens):
            if not token_ids:
                first_at = time.perf_counter()
            token_ids.append(token_id)
            drafted.append(is_drafted)
            if token_id in self._target.info.eos_token_ids:
                break
        return Sample(
            prompt,
            repeat,
            tuple(token_ids),
            first_at - started_at,
            time.perf_counter() - first_at,
            accepted_tokens=sum(drafted),
            rejections=count_rejections(drafted, self._num_draft_tokens),
        )

    def _tokens(self, prompt_ids: list[int], max_tokens: int) -> Iterator[tuple[int, bool]]:
        prompt = mx.array(prompt_ids)
        sampler = make_sampler(temp=self.setup.temperature)
        if self._num_draft_tokens == 0:
            for token_id, _ in generate_step(prompt, self._target.network, max_tokens=max_tokens, sampler=sampler):
                yield int(token_id), False
            return
        for token_id, _, drafted in speculative_generate_step(
            prompt,
            self._target.network,
            self._draft.network,
            num_draft_tokens=self._num_draft_tokens,
            max_tokens=max_tokens,
            sampler=sampler,
        ):
            yield int(token_id), drafted


def seed_of(prompt: str, repeat: int) -> int:
    """Return the seed for a prompt and a repeat, the same in every run and for every contender."""
    return zlib.crc32(f"{prompt} {repeat}".encode())


def _round(round_: generation_pb2.Round) -> RoundTimes:
    return RoundTimes(**{field.name: getattr(round_, field.name) for field in fields(RoundTimes)})
