"""What the gateway asks the coordinator for, and what comes back, in plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specd.sampling import Acceptance
from specd.vocabulary import DraftSource


@dataclass(frozen=True)
class Requester:
    """Who asks: the token of the client, and the trace that its request is part of; empty if it sent none."""

    token: str = ""
    traceparent: str = ""


@dataclass(frozen=True)
class Conversation:
    """Messages and tools, for the model's chat template; each message has `role` and `content`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


Prompt = str | Sequence[int] | Conversation


@dataclass(frozen=True)
class Generation:
    """One generation; the fields are those of GenerateRequest and SamplingParameters, and None leaves one out."""

    prompt: Prompt
    seed: int
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # as the endpoint names it
    is_max_tokens_given: bool = False  # by the client
    cut_max_tokens: bool = False
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context_size: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    acceptance: Acceptance = Acceptance.COUPLED
    lenience: float = 0.0
    stop_strings: Sequence[str] = ()
    reasoning: tuple[str, str] | None = None
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    top_log_probabilities: int | None = None
    echo: bool = False
    num_draft_tokens: int | None = None
    draft_source: DraftSource = DraftSource.AUTO
    prediction: str = ""
    session_id: str = ""


@dataclass(frozen=True)
class Ranked:
    """A token that was likely, its own bytes, and the natural logarithm of its probability under the model."""

    token_id: int
    own: bytes
    log_probability: float


@dataclass(frozen=True)
class TextToken:
    """A token, the text that it completes, and who said it first, by its name in TokenSource.

    If log-probabilities are asked for, its own bytes, the natural logarithm of its probability under the model, and the
    most likely tokens in its place. The first token of a prompt has its bytes only.
    """

    token_id: int
    text: str
    source: str
    own: bytes = b""
    log_probability: float | None = None
    top: tuple[Ranked, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        """The token as `token_sources` shows it."""
        return {"id": self.token_id, "text": self.text, "source": self.source}


@dataclass(frozen=True)
class Statistics:
    """What a generation took; generation.proto explains the fields of the same names."""

    prompt_tokens: int
    generated_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    reused_tokens: int
    prediction_accepted_tokens: int
    prediction_rejected_tokens: int
    time_to_first_token_seconds: float
    decode_seconds: float
    speedup: float
    rounds: int


@dataclass(frozen=True)
class ProposalCounts:
    """Tokens that were proposed in a round, and those of them that were accepted."""

    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Increment:
    """What one round of a generation brought, or several that came together.

    The last one has a finish reason, `stop` or `length`, and the statistics; the first one of a conversation the end
    of its prompt, as the template wrote it, and that of an echo the prompt's tokens. The first one also says how many
    tokens there can be at most.
    """

    session_id: str
    tokens: tuple[TextToken, ...]
    counts: ProposalCounts = ProposalCounts()
    finish_reason: str = ""
    statistics: Statistics | None = None
    prompt_end: str = ""
    prompt_tokens: tuple[TextToken, ...] = ()
    max_tokens: int = 0


@dataclass(frozen=True)
class ModelCard:
    """The model that the coordinator serves, as its clients name it, and what decides the tokens of a seed."""

    model_id: str
    context_length: int
    vocabulary_size: int
    system_fingerprint: str
    chat_template: str
    special_tokens: Mapping[int, str]
    details: Mapping[str, Any] = field(default_factory=dict)
