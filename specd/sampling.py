"""Sampling parameters of a request as plain values, and their limits."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specd.errors import InvalidRequestError, about
from specd.grammar import SessionGrammar

MAX_TOP_LOG_PROBABILITIES = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_STOP_STRINGS = 64
MAX_BIAS = 100
MAX_CHAT_VALUES = 2**16  # in the messages, tools and template arguments of a request
# Below this range the quotients overflow float32, and above it the model's preferences vanish.
TEMPERATURES = (0.01, 100.0)
_REPETITION_PENALTIES = (0.01, 10.0)  # for the same reasons
_MAX_PENALTY_CONTEXT_SIZE = 2**31 - 1  # the largest index of a slice in MLX

# The most tokens of a prompt times the most likely ones at each place: all travel in one message.
MAX_PROMPT_LOG_PROBABILITIES = 2**15

# Far below the probability of any likely token, and far above the values that a device rounds to 0.
LOWEST_TOP_P = 1e-6
_MAX_VOCABULARY_SIZE = 2**22


class Acceptance(enum.Enum):
    """Acceptance rules for draft tokens; sampling.proto explains both."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a session; sampling.proto explains the fields.

    The defaults choose greedily. `top_log_probabilities` is None for none at all, `vocabulary_size` 0 for the worker's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    acceptance: Acceptance = Acceptance.COUPLED
    lenience: float = 0.0
    suppressed_token_ids: tuple[int, ...] = ()
    suppressed_before: int = 0
    top_log_probabilities: int | None = None
    prompt_log_probabilities: bool = False
    vocabulary_size: int = 0
    grammar: SessionGrammar | None = None

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens cannot be chosen."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are biased, penalised or masked, so that acceptance tells nothing about other sessions."""
        neutral = Sampling()
        return bool(self.logit_bias or self.suppressed_token_ids or self.grammar) or any(
            getattr(self, name) != getattr(neutral, name)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )

    def check(self, *, vocabulary_size: int, model_name: str) -> None:
        """Raise InvalidRequestError, naming field and value, unless every field is in its range."""
        lowest, highest = TEMPERATURES
        # Rounded, because a client's 0.01 arrives as the nearest float32. A NaN fails each of these tests.
        if self.temperature != 0 and not lowest <= round(self.temperature, 6) <= highest:
            raise _out_of_range("temperature", self.temperature, f"0 (greedy) or in [{lowest:g}, {highest:g}]")
        if not LOWEST_TOP_P <= round(self.top_p, 9) <= 1:
            raise _out_of_range("top_p", self.top_p, f"in [{LOWEST_TOP_P:g}, 1], where 1 allows all tokens")
        lowest, highest = _REPETITION_PENALTIES
        if not lowest <= round(self.repetition_penalty, 6) <= highest:
            raise _out_of_range(
                "repetition_penalty", self.repetition_penalty, f"in [{lowest:g}, {highest:g}], where 1 is no penalty"
            )
        for name, value, low, high in (
            ("min_p", self.min_p, 0, 1),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("lenience", self.lenience, 0, 1),
            ("penalty_context_size", self.penalty_context_size, 0, _MAX_PENALTY_CONTEXT_SIZE),
            ("vocabulary_size", self.vocabulary_size, 0, _MAX_VOCABULARY_SIZE),
            ("top_log_probabilities", self.top_log_probabilities or 0, 0, MAX_TOP_LOG_PROBABILITIES),
        ):
            if not low <= value <= high:
                raise _out_of_range(name, value, f"in [{low}, {high}]")
        if self.prompt_log_probabilities and self.top_log_probabilities is None:
            raise InvalidRequestError(
                "CONTRADICTION", "prompt_log_probabilities is set, but top_log_probabilities is not: set both"
            )
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        for token_id, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_BIAS:
                raise _out_of_range(f"logit_bias of token {token_id}", bias, f"in [-{MAX_BIAS}, {MAX_BIAS}]")
        check_token_ids("logit_bias", tuple(self.logit_bias), vocabulary_size=vocabulary_size, model_name=model_name)
        check_token_ids(
            "suppressed_token_ids", self.suppressed_token_ids, vocabulary_size=vocabulary_size, model_name=model_name
        )
        if self.lenience > 0 and self.acceptance is Acceptance.COUPLED:
            raise InvalidRequestError(
                "CONTRADICTION",
                f"lenience is {self.lenience:g}, but acceptance is COUPLED, which has no lenience: set REJECTION",
            )


def check_count(field_name: str, count: int, most: int) -> None:
    """Raise InvalidRequestError, naming field and count, for more entries than a request may have."""
    if count > most:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"{field_name} has {count} entries: send at most {most}",
            metadata=about(field_name, count, most),
        )


def check_token_ids(field_name: str, token_ids: Sequence[int], *, vocabulary_size: int, model_name: str) -> None:
    """Raise InvalidRequestError, naming field and value, if an id is outside the vocabulary."""
    if max(token_ids, default=0) >= vocabulary_size:
        raise InvalidRequestError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{field_name} has {max(token_ids)}, but the vocabulary of {model_name} ends at {vocabulary_size - 1}",
            metadata=about(field_name, max(token_ids), vocabulary_size - 1),
        )


def _out_of_range(name: str, value: float, allowed: str) -> InvalidRequestError:
    shown = value if isinstance(value, int) else f"{value:.8g}"  # enough digits to distinguish float32 neighbours
    return InvalidRequestError(
        "OUT_OF_RANGE", f"{name} is {shown}: it must be {allowed}", metadata=about(name, shown, allowed)
    )


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution that a token was sampled from, serialised; sampling.proto explains the bytes."""

    token_ids: bytes
    probabilities: bytes


def certain(token_id: int) -> TokenDistribution:
    """Return the distribution that gives one token the probability 1."""
    return TokenDistribution(struct.pack("<I", token_id), struct.pack("<f", 1.0))


@dataclass(frozen=True)
class RankedToken:
    """One of the most likely tokens, with the natural logarithm of its probability.

    `own_bytes` are its own text, where that is known.
    """

    token_id: int
    log_probability: float
    own_bytes: bytes = b""


@dataclass(frozen=True)
class Margin:
    """How clearly the target chose a token; the message `Margin` in target.proto explains both fields."""

    value: float
    is_near_tie: bool = False


@dataclass(frozen=True)
class TokenLogProbabilities:
    """Natural logarithms of a token's probability under the model, and under the distribution that it was sampled from.

    A token of a prompt has only the first, because it was not sampled.
    """

    model: float
    sampling: float = 0.0
    top_model: Sequence[RankedToken] = ()
    top_sampling: Sequence[RankedToken] = ()
