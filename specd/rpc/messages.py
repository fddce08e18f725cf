"""Conversion between messages and plain values, for the edges of all three processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf import empty_pb2

from specd.cache_footprint import CacheFootprint
from specd.errors import InvalidRequestError, about
from specd.grammar import Grammar, GrammarKind, ReasoningTokens, SessionGrammar
from specd.model_info import AdapterInfo, ModelInfo
from specd.sampling import Acceptance, Margin, RankedToken, Sampling, TokenDistribution, TokenLogProbabilities
from specd.step_costs import StepCosts
from specd.v1 import generation_pb2, model_pb2, sampling_pb2, target_pb2
from specd.vocabulary import DraftSource, FinishReason, SourceCounts, TokenSource

# The key in a stream's initial metadata that has the incarnation of the worker.
INCARNATION = "specd-incarnation"

_LONGEST_STEP_SECONDS = 3600.0

_ACCEPTANCE = {
    sampling_pb2.ACCEPTANCE_METHOD_UNSPECIFIED: Acceptance.COUPLED,
    sampling_pb2.ACCEPTANCE_METHOD_COUPLED: Acceptance.COUPLED,
    sampling_pb2.ACCEPTANCE_METHOD_REJECTION: Acceptance.REJECTION,
}
_ACCEPTANCE_MESSAGES = {
    Acceptance.COUPLED: sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
    Acceptance.REJECTION: sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
}
_TOKEN_SOURCE_MESSAGES = {
    source: cast(generation_pb2.TokenSource, generation_pb2.TokenSource.Value(f"TOKEN_SOURCE_{source.name}"))
    for source in TokenSource
}
_TOKEN_SOURCES: dict[int, TokenSource] = {message: source for source, message in _TOKEN_SOURCE_MESSAGES.items()}
_FINISH_REASON_MESSAGES = {
    reason: cast(generation_pb2.FinishReason, generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"))
    for reason in FinishReason
}
_FINISH_REASONS: dict[int, FinishReason] = {message: reason for reason, message in _FINISH_REASON_MESSAGES.items()}
_DRAFT_SOURCE_MESSAGES = {
    source: cast(
        generation_pb2.DraftSource,
        generation_pb2.DraftSource.Value(
            f"DRAFT_SOURCE_{'UNSPECIFIED' if source is DraftSource.AUTO else source.name}"
        ),
    )
    for source in DraftSource
}

# A new sampling parameter needs no code here: its name in `Sampling` is that of its field.
_PARAMETERS = sampling_pb2.SamplingParameters.DESCRIPTOR.fields


def sampling_from(message: sampling_pb2.SessionSampling) -> Sampling:
    """Return the sampling of a session. Raises InvalidRequestError for an unknown acceptance method."""
    parameters = message.parameters
    if parameters.acceptance not in _ACCEPTANCE:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"acceptance is {parameters.acceptance}: it must be in [0, {max(_ACCEPTANCE)}]",
            metadata=about("acceptance", parameters.acceptance, max(_ACCEPTANCE)),
        )
    values = {
        each.name: getattr(parameters, each.name)
        for each in _PARAMETERS
        if not each.has_presence or parameters.HasField(each.name)
    }
    values |= {"logit_bias": dict(parameters.logit_bias), "acceptance": _ACCEPTANCE[parameters.acceptance]}
    return Sampling(
        **values,
        suppressed_token_ids=tuple(message.suppressed_token_ids),
        suppressed_before=message.suppressed_before,
        vocabulary_size=message.vocabulary_size,
        top_log_probabilities=message.top_log_probabilities if message.HasField("top_log_probabilities") else None,
        prompt_log_probabilities=message.prompt_log_probabilities,
        grammar=_session_grammar_from(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_from(message: sampling_pb2.Grammar) -> Grammar:
    """Return the grammar in a message. Raises InvalidRequestError if it has none."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError("OUT_OF_RANGE", "grammar has no kind: set json_schema, json_object, regex or lark")
    return Grammar(GrammarKind(kind), "" if kind == "json_object" else getattr(message, kind))


def to_grammar(grammar: Grammar) -> sampling_pb2.Grammar:
    """Return the message for a grammar."""
    value: Any = empty_pb2.Empty() if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    return sampling_pb2.Grammar(**{grammar.kind.value: value})


def _session_grammar_from(message: sampling_pb2.SessionGrammar) -> SessionGrammar:
    reasoning = None
    if message.HasField("reasoning_end"):
        begin = message.reasoning_begin if message.HasField("reasoning_begin") else None
        reasoning = ReasoningTokens(message.reasoning_end, begin, message.is_reasoning_open)
    return SessionGrammar(grammar_from(message.grammar), message.begins_at, reasoning)


def _to_session_grammar(grammar: SessionGrammar) -> sampling_pb2.SessionGrammar:
    reasoning = grammar.reasoning
    return sampling_pb2.SessionGrammar(
        grammar=to_grammar(grammar.grammar),
        begins_at=grammar.begins_at,
        reasoning_end=reasoning.end if reasoning is not None else None,
        reasoning_begin=reasoning.begin if reasoning is not None else None,
        is_reasoning_open=reasoning is not None and reasoning.is_open,
    )


def to_session_sampling(sampling: Sampling) -> sampling_pb2.SessionSampling:
    """Return the message for a session's sampling."""
    return sampling_pb2.SessionSampling(
        parameters=to_parameters(vars(sampling)),
        suppressed_token_ids=sampling.suppressed_token_ids,
        suppressed_before=sampling.suppressed_before,
        vocabulary_size=sampling.vocabulary_size,
        top_log_probabilities=sampling.top_log_probabilities,
        prompt_log_probabilities=sampling.prompt_log_probabilities,
        grammar=_to_session_grammar(sampling.grammar) if sampling.grammar is not None else None,
    )


def to_parameters(values: Mapping[str, Any]) -> sampling_pb2.SamplingParameters:
    """Return the message for sampling parameters, by name; None leaves one out, and other names are ignored.

    Raises ValueError or TypeError for a value that the message cannot hold.
    """
    given = {each.name: values[each.name] for each in _PARAMETERS if values.get(each.name) is not None}
    if "acceptance" in given:
        given["acceptance"] = acceptance_message(Acceptance(given["acceptance"]))
    return sampling_pb2.SamplingParameters(**given)


def to_token_source(source: TokenSource) -> generation_pb2.TokenSource:
    """Return the value of the protocol for who said a token."""
    return _TOKEN_SOURCE_MESSAGES[source]


def token_source_from(value: int) -> TokenSource:
    """Return who said a token; the target, if this version does not know the source."""
    return _TOKEN_SOURCES.get(value, TokenSource.TARGET)


def to_source_counts(counts: Mapping[TokenSource, SourceCounts]) -> dict[str, generation_pb2.SourceCounts]:
    """Return the messages for counts by source."""
    return {
        source.value: generation_pb2.SourceCounts(proposed=each.proposed, accepted=each.accepted)
        for source, each in counts.items()
    }


def source_counts_from(messages: Mapping[str, generation_pb2.SourceCounts]) -> dict[TokenSource, SourceCounts]:
    """Return counts by source, without sources that this version does not know."""
    return {
        source: SourceCounts(messages[source.value].proposed, messages[source.value].accepted)
        for source in TokenSource
        if source.value in messages
    }


def to_finish_reason(reason: FinishReason) -> generation_pb2.FinishReason:
    """Return the value of the protocol for why a generation ended."""
    return _FINISH_REASON_MESSAGES[reason]


def finish_reason_from(value: int) -> FinishReason | None:
    """Return why a generation ended; None if it has not."""
    return _FINISH_REASONS.get(value)


def acceptance_message(acceptance: Acceptance) -> sampling_pb2.AcceptanceMethod:
    """Return the message for an acceptance method."""
    return _ACCEPTANCE_MESSAGES[acceptance]


def draft_source_from(value: int) -> DraftSource:
    """Return the sources that may propose tokens. Raises InvalidRequestError for an unknown value."""
    for source, known in _DRAFT_SOURCE_MESSAGES.items():
        if value == known:
            return source
    raise InvalidRequestError(
        "OUT_OF_RANGE", f"draft_source is {value}: it must be in [0, {max(_DRAFT_SOURCE_MESSAGES.values())}]"
    )


def draft_source_message(source: DraftSource) -> generation_pb2.DraftSource:
    """Return the enum value for the sources that may propose tokens."""
    return _DRAFT_SOURCE_MESSAGES[source]


def distribution_from(message: sampling_pb2.TokenDistribution) -> TokenDistribution:
    """Return the distribution in a message."""
    return TokenDistribution(message.token_ids, message.probabilities)


def to_distribution(distribution: TokenDistribution) -> sampling_pb2.TokenDistribution:
    """Return the message for a distribution."""
    return sampling_pb2.TokenDistribution(token_ids=distribution.token_ids, probabilities=distribution.probabilities)


def log_probabilities_from(message: sampling_pb2.TokenLogProbabilities) -> TokenLogProbabilities:
    """Return the log-probabilities of a token in a message."""
    return TokenLogProbabilities(
        message.model,
        message.sampling,
        [RankedToken(token.id, token.log_probability, token.own_bytes) for token in message.top_model],
        [RankedToken(token.id, token.log_probability, token.own_bytes) for token in message.top_sampling],
    )


def to_log_probabilities(
    values: TokenLogProbabilities, own_bytes: Callable[[int], bytes] = lambda _: b""
) -> sampling_pb2.TokenLogProbabilities:
    """Return the message for the log-probabilities of a token, with the own bytes of each token by its id."""

    def ranked(tokens: Sequence[RankedToken]) -> list[sampling_pb2.RankedToken]:
        messages = []
        for token in tokens:
            own = own_bytes(token.token_id)
            text = own.decode(errors="replace")
            messages.append(
                sampling_pb2.RankedToken(
                    id=token.token_id, text=text, log_probability=token.log_probability, own_bytes=own
                )
            )
        return messages

    return sampling_pb2.TokenLogProbabilities(
        model=values.model,
        sampling=values.sampling,
        top_model=ranked(values.top_model),
        top_sampling=ranked(values.top_sampling),
    )


def margin_from(message: target_pb2.Margin) -> Margin:
    """Return the margin of a token in a message."""
    return Margin(message.value, message.is_near_tie)


def to_margin(margin: Margin) -> target_pb2.Margin:
    """Return the message for the margin of a token."""
    return target_pb2.Margin(value=margin.value, is_near_tie=margin.is_near_tie)


def model_from(message: model_pb2.Model) -> ModelInfo:
    """Return the description of a model in a message."""
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(ModelInfo)}
    if not message.HasField("decoder_start_token_id"):
        values["decoder_start_token_id"] = None
    values["eos_token_ids"] = tuple(message.eos_token_ids)
    values["adapters"] = tuple(AdapterInfo(each.name, each.fingerprint) for each in message.adapters)
    return ModelInfo(**values)


def to_model(model: ModelInfo) -> model_pb2.Model:
    """Return the message for the description of a model."""
    return model_pb2.Model(**dataclasses.asdict(model))


def footprint_from(message: model_pb2.DescribeResponse) -> CacheFootprint:
    """Return the memory of a session's caches in a message."""
    parts = CacheFootprint.total(CacheFootprint({p.most_tokens: p.bytes_per_token}) for p in message.cache_parts)
    return CacheFootprint(parts.bytes_per_token, message.bytes_per_source_token)


def to_cache_parts(footprint: CacheFootprint) -> list[model_pb2.CachePart]:
    """Return the messages for the memory of a session's caches."""
    return [model_pb2.CachePart(most_tokens=k, bytes_per_token=v) for k, v in footprint.bytes_per_token.items()]


def step_costs_from(messages: Iterable[model_pb2.StepCost]) -> StepCosts | None:
    """Return the costs in messages; None if there are none. Raises ValueError for an impossible cost."""
    measured: dict[int, dict[int, float]] = {}
    for message in messages:
        # A NaN is not in the range.
        if not (0 < message.seconds <= _LONGEST_STEP_SECONDS and message.sessions and message.width):
            raise ValueError(
                f"the cost of a step of {message.sessions} sessions with {message.width} tokens each is invalid: "
                f"{message.seconds:g} s"
            )
        measured.setdefault(message.sessions, {})[message.width] = message.seconds
    return StepCosts(measured) if measured else None


def to_step_costs(costs: StepCosts) -> list[model_pb2.StepCost]:
    """Return the messages for measured costs."""
    return [
        model_pb2.StepCost(sessions=sessions, width=width, seconds=seconds)
        for sessions, curve in costs.measured.items()
        for width, seconds in curve.items()
    ]
