"""The ways to decode that are compared. Each takes the same prompt tokens and gives a `Sample`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step

from specd.bench.sample import Round, Sample
from specd.client import Client
from specd.v1 import generation_pb2
from specd.worker.model import LoadedModel


class Contender(Protocol):
    """A way to decode."""

    @property
    def name(self) -> str:
        """How the table calls it."""

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt greedily and measure it."""


class Specd:
    """A running specd system, through gRPC."""

    def __init__(self, client: Client, num_draft_tokens: int) -> None:
        self.name = f"specd, k = {num_draft_tokens}" if num_draft_tokens else "specd, target alone"
        self._client = client
        self._num_draft_tokens = num_draft_tokens

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt; times are the client's."""
        token_ids: list[int] = []
        rounds: list[Round] = []
        statistics = generation_pb2.SessionStatistics()
        started_at = first_at = last_at = time.perf_counter()
        async for response in self._client.generate(
            prompt_ids, max_tokens=max_tokens, num_draft_tokens=self._num_draft_tokens
        ):
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
            tuple(rounds),
        )


class MlxLm:
    """mlx-lm in this process: its plain decoding, or its speculative decoding with k draft tokens."""

    def __init__(self, target: LoadedModel, draft: LoadedModel, num_draft_tokens: int) -> None:
        self.name = f"mlx-lm, k = {num_draft_tokens}" if num_draft_tokens else "mlx-lm, target alone"
        self._target = target
        self._draft = draft
        self._num_draft_tokens = num_draft_tokens

    async def decode(self, prompt: str, repeat: int, prompt_ids: list[int], max_tokens: int) -> Sample:
        """Decode one prompt, up to and with an end token, as specd does."""
        token_ids: list[int] = []
        accepted = 0
        started_at = first_at = time.perf_counter()
        for token_id, drafted in self._tokens(prompt_ids, max_tokens):
            if not token_ids:
                first_at = time.perf_counter()
            token_ids.append(token_id)
            accepted += drafted
            if token_id in self._target.info.eos_token_ids:
                break
        decode_seconds = time.perf_counter() - first_at
        return Sample(prompt, repeat, tuple(token_ids), first_at - started_at, decode_seconds, accepted_tokens=accepted)

    def _tokens(self, prompt_ids: list[int], max_tokens: int) -> Iterator[tuple[int, bool]]:
        prompt = mx.array(prompt_ids)
        if self._num_draft_tokens == 0:
            for token_id, _ in generate_step(prompt, self._target.network, max_tokens=max_tokens):
                yield int(token_id), False
            return
        for token_id, _, drafted in speculative_generate_step(
            prompt,
            self._target.network,
            self._draft.network,
            num_draft_tokens=self._num_draft_tokens,
            max_tokens=max_tokens,
        ):
            yield int(token_id), drafted


def _round(round_: generation_pb2.Round) -> Round:
    return Round(**{field.name: getattr(round_, field.name) for field in fields(Round)})
