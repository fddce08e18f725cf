"""Checks of workers' answers. A worker may be wrong, or hostile.

Times in answers are limited to the coordinator's own measurements, so that a lie in them can only mislead the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.core import Part, Plan, SessionSetup, Verdict
from coordinator.workers.errors import WorkerError
from specd.sampling import Acceptance, Margin, TokenDistribution, TokenLogProbabilities

# What the rounding of 150,000 float32 can come to, with much to spare.
_SUM_TOLERANCE = 1e-3
_LARGEST_LOG_PROBABILITY = 0.01


def check_proposal(part: Part, plan: Plan, setup: SessionSetup, *, session_len: int, vocabulary_size: int) -> None:
    """Raise WorkerError (DRAFT_BROKEN) unless the draft's part after `session_len` tokens is one that was asked for.

    The target worker would refuse the whole round for one bad id, or for one invalid distribution.
    """
    num_tokens, most = len(part.token_ids), plan.limit(part.source)
    fewest = 1 if plan.min_confidences else most
    rejects = setup.sampling.acceptance is Acceptance.REJECTION
    if not fewest <= num_tokens <= most:
        raise _broken_draft(f"{num_tokens} tokens, and was asked for {fewest} to {most}")
    if max(part.token_ids) >= vocabulary_size:
        raise _broken_draft(f"tokens beyond the vocabulary of {vocabulary_size}")
    if len(part.confidences) not in {0, num_tokens} or not all(0 <= each <= 1 for each in part.confidences):
        raise _broken_draft("invalid confidences")
    if not session_len <= part.cached_len <= session_len + num_tokens:
        raise _broken_draft(f"{part.cached_len} tokens in its cache, of a session of {session_len}")
    if part.reused_len > len(setup.source) + session_len:
        raise _broken_draft(f"{part.reused_len} tokens reused, of a session of {session_len}")
    if rejects and not (
        len(part.distributions) == num_tokens
        and all(
            is_distribution(each, token_id, vocabulary_size)
            for each, token_id in zip(part.distributions, part.token_ids, strict=True)
        )
    ):
        raise _broken_draft("distributions from which its tokens cannot be samples")


def check_self_proposal(part: Part, ahead: Plan, *, vocabulary_size: int) -> None:
    """Raise WorkerError (TARGET_BROKEN) unless these can be the target's own draft tokens that were planned ahead."""
    num_tokens, most = len(part.token_ids), ahead.limit(part.source)
    if num_tokens > most or max(part.token_ids, default=0) >= vocabulary_size:
        raise _broken_target(f"proposed {num_tokens} tokens, up to {max(part.token_ids)}, and was asked for {most}")
    if len(part.confidences) not in {0, num_tokens} or not all(0 <= each <= 1 for each in part.confidences):
        raise _broken_target("sent invalid confidences")


def check_verdict(
    verdict: Verdict,
    proposal: Sequence[int],
    setup: SessionSetup,
    *,
    session_len: int,
    vocabulary_size: int,
    is_first: bool = False,
) -> None:
    """Raise WorkerError (TARGET_BROKEN) unless the verdict can be one on this proposal after `session_len` tokens.

    `is_first` is whether the request had all of the session's tokens.
    """
    num_accepted, num_proposed = verdict.num_accepted, len(proposal)
    if num_accepted > num_proposed or verdict.next_token_id >= vocabulary_size:
        raise _broken_target(f"accepted {num_accepted} of {num_proposed} tokens and chose {verdict.next_token_id}")
    is_coupled = setup.sampling.acceptance is Acceptance.COUPLED
    if is_coupled and num_accepted < num_proposed and verdict.next_token_id == proposal[num_accepted]:
        raise _broken_target("rejected a token and chose the same one")
    if verdict.cached_len != session_len + num_proposed:
        raise _broken_target(
            f"holds {verdict.cached_len} tokens after a request that made {session_len + num_proposed}"
        )
    if verdict.reused_len > len(setup.source) + session_len:
        raise _broken_target(f"reused {verdict.reused_len} tokens of a session of {session_len}")
    if len(verdict.margins) not in {0, num_accepted + 1} or not all(map(_is_possible, verdict.margins)):
        raise _broken_target("sent impossible margins")
    top = setup.sampling.top_log_probabilities
    num_scored = session_len - 1 if setup.sampling.prompt_log_probabilities and is_first else 0
    if top is not None and not (
        len(verdict.log_probabilities) == num_accepted + 1
        and len(verdict.prompt_log_probabilities) == num_scored
        and all(
            _are_sound(each, top, vocabulary_size)
            for each in (*verdict.log_probabilities, *verdict.prompt_log_probabilities)
        )
    ):
        raise _broken_target("did not send the log-probabilities of its tokens")


def is_distribution(distribution: TokenDistribution, token_id: int, vocabulary_size: int) -> bool:
    """Return whether this is a distribution over the vocabulary of which the token can be a sample."""
    if len(distribution.probabilities) % 4 or len(distribution.token_ids) % 4:
        return False
    probabilities = np.frombuffer(distribution.probabilities, "<f4")
    token_ids = np.frombuffer(distribution.token_ids, "<u4")
    if not 0 < probabilities.size <= vocabulary_size or token_ids.size not in {0, probabilities.size}:
        return False
    if token_ids.size:
        if token_ids[-1] >= vocabulary_size or not (token_ids[1:] > token_ids[:-1]).all():
            return False
        of_token = probabilities[token_ids == token_id].sum()
    else:
        of_token = probabilities[token_id] if token_id < probabilities.size else 0.0
    # A NaN fails each of these.
    total = probabilities.sum(dtype=np.float64)
    return bool(probabilities.min() >= 0 and abs(total - 1) <= _SUM_TOLERANCE and of_token > 0)


def _are_sound(values: TokenLogProbabilities, top: int, vocabulary_size: int) -> bool:
    ranked = (*values.top_model, *values.top_sampling)
    return (
        max(len(values.top_model), len(values.top_sampling)) <= top
        and all(token.token_id < vocabulary_size for token in ranked)
        and all(
            each <= _LARGEST_LOG_PROBABILITY  # a NaN is not
            for each in (values.model, values.sampling, *(token.log_probability for token in ranked))
        )
    )


def _is_possible(margin: Margin) -> bool:
    return margin.value >= 0 and not (margin.is_near_tie and margin.value == math.inf)  # a NaN is not at least 0


def _broken_draft(what: str) -> WorkerError:
    return WorkerError("DRAFT_BROKEN", f"the draft worker answered with {what}")


def _broken_target(what: str) -> WorkerError:
    return WorkerError("TARGET_BROKEN", f"the target worker {what}")
