"""Requests of clients, and the checks of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from coordinator.sessions.prompt import AnswerStart, EncodedPrompt, Prompt
from coordinator.sessions.resumption import Resumption
from specd.caller import CallerLimits
from specd.errors import InvalidRequestError, about
from specd.grammar import Grammar
from specd.model_info import ModelInfo
from specd.sampling import (
    MAX_PROMPT_LOG_PROBABILITIES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Sampling,
    check_count,
    check_token_ids,
)
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.text.reasoning import ReasoningMarkers
from specd.vocabulary import DraftSource

# Tokens to generate if a request sets no number.
DEFAULT_MAX_TOKENS = 256

_MAX_STOP_STRING_CHARACTERS = 256


@dataclass(frozen=True)
class StopConditions:
    """Conditions that end a generation, in addition to max_tokens; generation.proto explains the fields."""

    ignore_eos: bool = False
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    reasoning: ReasoningMarkers | None = None

    def end_token_ids(self, model: ModelInfo) -> frozenset[int]:
        """Return the model's end tokens, unless they are ignored, and the stop tokens."""
        return frozenset(self.token_ids) | frozenset(() if self.ignore_eos else model.eos_token_ids)

    def check(self, model: ModelInfo, max_tokens: int) -> None:
        """Raise InvalidRequestError, naming field and value, unless every field is in its range."""
        check_count("stop.token_ids", len(self.token_ids), MAX_STOP_TOKENS)
        check_count("stop.strings", len(self.strings), MAX_STOP_STRINGS)
        for string in self.strings:
            if not 1 <= len(string) <= _MAX_STOP_STRING_CHARACTERS:
                shown = repr(string if len(string) <= 40 else f"{string[:40]}…")
                raise InvalidRequestError(
                    "OUT_OF_RANGE",
                    f"stop.strings has {shown} of {len(string)} characters: "
                    f"it must have 1 to {_MAX_STOP_STRING_CHARACTERS}",
                    for_log=f"stop.strings has one of {len(string)} characters: "
                    f"it must have 1 to {_MAX_STOP_STRING_CHARACTERS}",
                    metadata=about("stop.strings", len(string), _MAX_STOP_STRING_CHARACTERS),
                )
        if self.reasoning is not None:
            for name, marker, least in (("begin", self.reasoning.begin, 0), ("end", self.reasoning.end, 1)):
                if not least <= len(marker) <= _MAX_STOP_STRING_CHARACTERS:
                    raise InvalidRequestError(
                        "OUT_OF_RANGE",
                        f"stop.reasoning.{name} has {len(marker)} characters: "
                        f"it must have {least} to {_MAX_STOP_STRING_CHARACTERS}",
                        metadata=about(f"stop.reasoning.{name}", len(marker), _MAX_STOP_STRING_CHARACTERS),
                    )
        check_token_ids(
            "stop.token_ids", self.token_ids, vocabulary_size=model.vocabulary_size, model_name=model.short_name
        )
        if self.min_tokens > max_tokens:
            raise InvalidRequestError(
                "CONTRADICTION",
                f"min_tokens is {self.min_tokens}: it must be at most max_tokens, which is {max_tokens}",
                metadata=about("stop.min_tokens", self.min_tokens, max_tokens),
            )


@dataclass(frozen=True)
class GenerationRequest:
    """A Generate in plain values; generation.proto explains the fields. Without `session_id` it begins a session.

    `model` is the name of the target or of one of its adapters, "" for that of the session or else the target.
    `traceparent` is the caller's W3C trace context, if it has sent one. `client` is the client's name, "" where clients
    have no credentials, and `client_limits` are its limits.
    """

    prompt: Prompt = None
    answer: AnswerStart = None
    max_tokens: int | None = None
    num_draft_tokens: int | None = None
    draft_source: DraftSource = DraftSource.AUTO
    prediction: AnswerStart = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopConditions = field(default_factory=StopConditions)
    session_id: str = ""
    model: str = ""
    resumption: Resumption = field(default_factory=Resumption)
    returns_prompt: bool = False
    echo: bool = False
    traceparent: str = ""
    client: str = field(kw_only=True)
    client_limits: CallerLimits = field(default_factory=CallerLimits)
    cut_max_tokens: bool = False
    grammar: Grammar | None = None

    @property
    def namespace(self) -> bytes:
        """A digest of the client's name for the workers: sessions with the same one share cached prefixes."""
        return sha256(self.client.encode()).digest()[:16] if self.client else b""

    def check(self, model: ModelInfo, prompt: EncodedPrompt) -> int:
        """Return the most tokens to generate. Raises InvalidRequestError, which names field and value."""
        k = self.num_draft_tokens
        if k is not None and k > MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError(
                "OUT_OF_RANGE",
                f"num_draft_tokens is {k}: it must be in [0, {MAX_NUM_DRAFT_TOKENS}]",
                metadata=about("num_draft_tokens", k, MAX_NUM_DRAFT_TOKENS),
            )
        self.sampling.check(vocabulary_size=model.vocabulary_size, model_name=model.short_name)
        self._check_grammar(model)
        if self.answer and not model.has_encoder:
            raise InvalidRequestError(
                "CONTRADICTION",
                f"the request has the start of an answer, but {model.short_name} has no encoder: put it behind the "
                "prompt",
            )
        if model.has_encoder:
            check_tokens(model, prompt.source)
        check_prompt(model, prompt.token_ids)
        self._check_prediction(model, prompt.prediction)
        self._check_echo(len(prompt.token_ids))
        wanted, allowed = self._most_tokens(model, prompt), self.client_limits.max_tokens
        max_tokens = resolve_max_tokens(model, len(prompt.token_ids), wanted, allowed)
        self.stop.check(model, max_tokens)
        self.resumption.check(
            model,
            prompt,
            max_tokens=max_tokens,
            min_tokens=self.stop.min_tokens,
            end_tokens=self.stop.end_token_ids(model),
        )
        return max_tokens

    def _check_grammar(self, model: ModelInfo) -> None:
        if self.grammar is None:
            return
        if model.has_encoder:
            raise InvalidRequestError(
                "CONTRADICTION", f"the request has a grammar, but {model.short_name} has an encoder: leave it out"
            )
        if self.stop.ignore_eos:
            raise InvalidRequestError(
                "CONTRADICTION",
                "the request has a grammar and stop.ignore_eos, so nothing ends the text: leave one out",
            )

    def _most_tokens(self, model: ModelInfo, prompt: EncodedPrompt) -> int | None:
        if self.max_tokens is None or not self.cut_max_tokens:
            return self.max_tokens
        allowed = self.client_limits.max_tokens
        room = model.context_length - len(prompt.token_ids)
        return min(self.max_tokens, room if allowed is None else min(room, allowed))

    def check_session(self) -> None:
        """Raise InvalidRequestError if the request would both continue a session and restore one."""
        if self.session_id and self.resumption.session_token_ids:
            raise InvalidRequestError(
                "CONTRADICTION", "the request has both session_id and resumption.session_token_ids: leave one out"
            )

    def _check_echo(self, prompt_len: int) -> None:
        top = self.sampling.top_log_probabilities
        if self.echo and top is not None and prompt_len * (1 + top) > MAX_PROMPT_LOG_PROBABILITIES:
            raise InvalidRequestError(
                "OUT_OF_RANGE",
                f"echo of {prompt_len} tokens with top_log_probabilities {top} makes {prompt_len * (1 + top)} "
                f"log-probabilities: the most is {MAX_PROMPT_LOG_PROBABILITIES}",
            )

    @staticmethod
    def _check_prediction(model: ModelInfo, prediction: Sequence[int]) -> None:
        check_token_ids("prediction", prediction, vocabulary_size=model.vocabulary_size, model_name=model.short_name)
        if len(prediction) > model.context_length:
            raise InvalidRequestError(
                "CONTEXT_EXCEEDED",
                f"the prediction has {len(prediction)} tokens, but the context of {model.short_name} is "
                f"{model.context_length} tokens: send what can still come",
                metadata=about("prediction", len(prediction), model.context_length),
            )


def check_tokens(model: ModelInfo, token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError if the target cannot read these tokens."""
    if not token_ids:
        kinds = "`text` or `token_ids`" if model.has_encoder else "`text`, `token_ids` or `chat`"
        raise InvalidRequestError("EMPTY_PROMPT", f"the prompt is empty: set {kinds}")
    check_token_ids("token_ids", token_ids, vocabulary_size=model.vocabulary_size, model_name=model.short_name)


def check_prompt(model: ModelInfo, prompt_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError if the target cannot continue these tokens."""
    check_tokens(model, prompt_ids)
    if len(prompt_ids) >= model.context_length:
        raise InvalidRequestError(
            "CONTEXT_EXCEEDED",
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room to generate: "
            # LiteLLM and others know by these words that it is too long.
            f"this model's maximum context length is {model.context_length} tokens: send at most "
            f"{model.context_length - 1}",
            metadata=about("prompt", len(prompt_ids), model.context_length - 1),
        )


def resolve_max_tokens(model: ModelInfo, prompt_len: int, max_tokens: int | None, limit: int | None = None) -> int:
    """Return the most tokens to generate, for a client with this limit.

    Raises InvalidRequestError if the limit or the context has no room for `max_tokens`.
    """
    room = model.context_length - prompt_len
    if max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room, limit or room)
    if limit is not None and max_tokens > limit:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"max_tokens is {max_tokens}: this client may generate at most {limit}",
            metadata=about("max_tokens", max_tokens, limit),
        )
    if max_tokens == 0:
        raise InvalidRequestError(
            "OUT_OF_RANGE", "max_tokens is 0: it must be at least 1", metadata=about("max_tokens", 0, room)
        )
    if max_tokens > room:
        raise InvalidRequestError(
            "CONTEXT_EXCEEDED",
            f"the prompt's {prompt_len} tokens and max_tokens {max_tokens} make {prompt_len + max_tokens}, "
            f"but the context of {model.short_name} is {model.context_length} tokens: max_tokens can be at most {room}",
            metadata=about("max_tokens", max_tokens, room),
        )
    return max_tokens
