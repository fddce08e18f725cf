"""One stream to a running worker, without a coordinator: what a verify and a proposal take, for `accelerator.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from specd.rpc.channel import open_channel
from specd.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_RANDOM_TOKENS = 1000  # ids below this are in every vocabulary


async def verify(address: str, prompt: Sequence[int], width: int, count: int) -> dict[str, float]:
    """Return milliseconds of verifies of `width` tokens, of which width - 1 are random proposals.

    The session grows by one token or more in each, as in decoding.
    """
    rng = random.Random(width)
    tokens = [*prompt]
    times: list[tuple[float, float]] = []
    async with open_channel(address) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        position = 0
        for number in range(count + 1):  # the first is the prompt's
            proposal = [rng.randrange(_RANDOM_TOKENS) for _ in range(width - 1)] if number else []
            request = target_pb2.VerifyRequest(
                round=number, position=position, token_ids=tokens[position:], proposal=proposal
            )
            answer, seconds = await _exchange(call, request)
            times.append((answer.time.compute_seconds, seconds))
            tokens += [*proposal[: answer.num_accepted], answer.next_token_id]
            position = len(tokens) - 1
        call.cancel()
    return _summary(times[1:])


async def propose(
    address: str, prompt: Sequence[int], k: int, count: int, *, accepted: bool = False, confidences: bool = False
) -> dict[str, float]:
    """Return milliseconds of proposals of `k` tokens: none of each proposal is accepted, or all are.

    With `confidences` the worker computes them, as for an adaptive k, and ends no proposal by them.
    """
    rng = random.Random(k)
    tokens = [*prompt]
    times: list[tuple[float, float]] = []
    async with open_channel(address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        position = 0
        for number in range(count + 1):
            request = draft_pb2.ProposeRequest(
                round=number,
                position=position,
                token_ids=tokens[position:],
                num_draft_tokens=k,
                min_confidences=[0.0] * k if confidences else [],
            )
            answer, seconds = await _exchange(call, request)
            times.append((answer.time.compute_seconds, seconds))
            position = min(answer.cached_len, len(tokens)) if not accepted else answer.cached_len
            tokens += [*(answer.token_ids if accepted else []), rng.randrange(_RANDOM_TOKENS)]
        call.cancel()
    summary = _summary(times[1:])
    return summary | {"per_token_ms": summary["compute_ms"] / k}


async def _exchange(call: Any, request: Any) -> tuple[Any, float]:
    begun_at = time.perf_counter()
    await call.write(request)
    answer = await call.read()
    return answer, time.perf_counter() - begun_at


def _summary(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return medians and the longest, of pairs of the worker's seconds and those of the round trip."""
    compute = [1000 * own for own, _ in times]
    return {
        "first_ms": compute[0],
        "compute_ms": median(compute),
        "longest_ms": max(compute),
        "round_trip_ms": 1000 * median(seconds for _, seconds in times),
        "longest_round_trip_ms": 1000 * max(seconds for _, seconds in times),
        "wire_ms": 1000 * median(seconds - own for own, seconds in times),
    }
