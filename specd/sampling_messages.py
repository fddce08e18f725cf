"""sampling.proto to plain values and back, for the edges of all three processes."""

from __future__ import annotations

from specd.errors import InvalidRequestError
from specd.sampling import Acceptance, RankedToken, Sampling, TokenDistribution, TokenLogProbabilities
from specd.v1 import sampling_pb2

_ACCEPTANCE = {
    sampling_pb2.ACCEPTANCE_METHOD_UNSPECIFIED: Acceptance.COUPLED,
    sampling_pb2.ACCEPTANCE_METHOD_COUPLED: Acceptance.COUPLED,
    sampling_pb2.ACCEPTANCE_METHOD_REJECTION: Acceptance.REJECTION,
}
_ACCEPTANCE_MESSAGES = {
    Acceptance.COUPLED: sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
    Acceptance.REJECTION: sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
}

_PLAIN = ("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "lenience")
_OPTIONAL = ("top_p", "repetition_penalty", "penalty_context_size", "seed")


def sampling_from(message: sampling_pb2.SessionSampling) -> Sampling:
    """Read what a session's first request to a worker says. Raises InvalidRequestError for an unknown method."""
    parameters = message.parameters
    if parameters.acceptance not in _ACCEPTANCE:
        raise InvalidRequestError("OUT_OF_RANGE", f"acceptance is {parameters.acceptance}: there is no such method")
    return Sampling(
        **{name: getattr(parameters, name) for name in _PLAIN},
        **{name: getattr(parameters, name) for name in _OPTIONAL if parameters.HasField(name)},
        logit_bias=dict(parameters.logit_bias),
        acceptance=_ACCEPTANCE[parameters.acceptance],
        suppressed_token_ids=tuple(message.suppressed_token_ids),
        suppressed_before=message.suppressed_before,
        vocabulary_size=message.vocabulary_size,
        top_log_probabilities=message.top_log_probabilities if message.HasField("top_log_probabilities") else None,
    )


def to_session_sampling(sampling: Sampling) -> sampling_pb2.SessionSampling:
    """Write what a worker must know."""
    parameters = sampling_pb2.SamplingParameters(
        **{name: getattr(sampling, name) for name in (*_PLAIN, *_OPTIONAL)},
        logit_bias=sampling.logit_bias,
        acceptance=acceptance_message(sampling.acceptance),
    )
    return sampling_pb2.SessionSampling(
        parameters=parameters,
        suppressed_token_ids=sampling.suppressed_token_ids,
        suppressed_before=sampling.suppressed_before,
        vocabulary_size=sampling.vocabulary_size,
        top_log_probabilities=sampling.top_log_probabilities,
    )


def acceptance_message(acceptance: Acceptance) -> sampling_pb2.AcceptanceMethod:
    """Write an acceptance method."""
    return _ACCEPTANCE_MESSAGES[acceptance]


def distribution_from(message: sampling_pb2.TokenDistribution) -> TokenDistribution:
    """Read a distribution."""
    return TokenDistribution(message.token_ids, message.probabilities)


def to_distribution(distribution: TokenDistribution) -> sampling_pb2.TokenDistribution:
    """Write a distribution."""
    return sampling_pb2.TokenDistribution(token_ids=distribution.token_ids, probabilities=distribution.probabilities)


def log_probabilities_from(message: sampling_pb2.TokenLogProbabilities) -> TokenLogProbabilities:
    """Read the log-probabilities of a token."""
    return TokenLogProbabilities(
        message.model,
        message.sampling,
        [RankedToken(token.id, token.log_probability) for token in message.top_model],
        [RankedToken(token.id, token.log_probability) for token in message.top_sampling],
    )


def to_log_probabilities(
    values: TokenLogProbabilities, texts: dict[int, str] | None = None
) -> sampling_pb2.TokenLogProbabilities:
    """Write the log-probabilities of a token, with the texts of the most likely ones where they are known."""
    texts = texts or {}

    def ranked(tokens: list[RankedToken]) -> list[sampling_pb2.RankedToken]:
        return [
            sampling_pb2.RankedToken(
                id=token.token_id, text=texts.get(token.token_id, ""), log_probability=token.log_probability
            )
            for token in tokens
        ]

    return sampling_pb2.TokenLogProbabilities(
        model=values.model,
        sampling=values.sampling,
        top_model=ranked(values.top_model),
        top_sampling=ranked(values.top_sampling),
    )
