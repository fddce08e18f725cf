"""The coordinator, as the gateway calls it: plain values to messages of the protocol and back."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from gateway.generation import (
    Conversation,
    Generation,
    Increment,
    ModelCard,
    Prompt,
    ProposalCounts,
    Ranked,
    Requester,
    Statistics,
    TextToken,
)
from gateway.http.errors import ApiError, invalid
from gateway.http.long_bodies import beside_loop
from gateway.wording import field_of, in_http_words
from specd.errors import DOMAIN
from specd.json_text import to_json
from specd.rpc.messages import draft_source_message, to_parameters, token_source_from
from specd.sampling import MAX_CHAT_VALUES
from specd.v1 import generation_pb2, generation_pb2_grpc
from specd.version import __version__
from specd.vocabulary import TokenSource

_DESCRIBE_SECONDS = 5.0
_HEALTH_SECONDS = 2.0

_FINISH_REASONS: dict[int, str] = {
    generation_pb2.FINISH_REASON_EOS: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    generation_pb2.FINISH_REASON_STOP_STRING: "stop",
}
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Without a word of the coordinator's own, an error is gRPC's, whose words can name addresses.
_WORDS = {
    401: "the coordinator wants a token: send it as `Authorization: Bearer TOKEN`",
    403: "this token does not allow that",
    429: "the coordinator takes no more requests now",
    503: "the coordinator cannot be reached",
    504: "the coordinator did not answer in time",
}
# Clients look for these.
_CODES = {"CONTEXT_EXCEEDED": "context_length_exceeded", "UNAUTHENTICATED": "invalid_api_key"}
_RETRY_SECONDS = 1.0
# The same code says that a message is too long and that there are too many requests; only the latter can be retried.
_TOO_LONG = "SERVER: Received message larger than max"  # gRPC's core


class CoordinatorLink:
    """The services of a coordinator, over a channel that somebody else closes. All methods raise ApiError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        # Takes bytes: a long message is made beside the event loop, and dropped when it is written.
        self._generate: Any = channel.unary_stream(
            "/specd.v1.GenerationService/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        self._health = health_pb2_grpc.HealthStub(channel)

    async def generate(self, generation: Generation, caller: Requester) -> AsyncGenerator[Increment]:
        """Generate, a round at a time; closing the iterator ends the generation."""
        message = await beside_loop(_message_of, generation)
        call = self._generate(message, metadata=_metadata(caller))
        try:
            async for response in call:
                yield _increment(response)
        except grpc.aio.AioRpcError as error:
            raise to_api_error(error, max_tokens=generation.max_tokens_field) from error
        finally:
            call.cancel()

    async def model(self, caller: Requester) -> ModelCard:
        """Describe the model."""
        try:
            response = await self._generation.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), metadata=_metadata(caller), timeout=_DESCRIBE_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise to_api_error(error) from error
        return _model(response)

    async def is_serving(self) -> bool:
        """Say whether a generation could begin now."""
        request = health_pb2.HealthCheckRequest(service="specd.v1.GenerationService")
        try:
            response = await self._health.Check(request, timeout=_HEALTH_SECONDS)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _metadata(caller: Requester) -> tuple[tuple[str, str], ...]:
    token = (("authorization", f"Bearer {caller.token}"),) if caller.token else ()
    return (*token, ("traceparent", caller.traceparent)) if caller.traceparent else token


def to_api_error(error: grpc.aio.AioRpcError, *, max_tokens: str = "max_tokens") -> ApiError:
    """Return the error that a client gets for a status of the coordinator's, with its name for `max_tokens`."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    retry_after_seconds = 0.0
    for detail in status.details if status is not None else ():
        if detail.Unpack(retry):
            retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(info)
    code = _STATUSES.get(error.code(), 500)
    is_ours = info.domain == DOMAIN
    if info.reason == "MESSAGE_TOO_LARGE" or (not is_ours and str(error.details()).startswith(_TOO_LONG)):
        return ApiError(413, "body_too_large", "the request is longer than the coordinator's --max-request-bytes")
    message = _WORDS.get(code, "the coordinator failed on this request")
    if is_ours:
        message = in_http_words(info.reason, str(error.details()), max_tokens=max_tokens)
    if code in {429, 503} and not retry_after_seconds:
        retry_after_seconds = _RETRY_SECONDS
    reason = info.reason if is_ours else error.code().name
    return ApiError(
        code,
        _CODES.get(reason, reason.lower()),
        message,
        param=field_of(message) if code == 400 else None,
        retry_after_seconds=retry_after_seconds,
    )


def _message_of(generation: Generation) -> bytes:
    """Return the message for a generation. Raises ApiError for more values than a conversation may have."""
    reasoning = generation.reasoning
    request = generation_pb2.GenerateRequest(
        max_tokens=generation.max_tokens,
        cut_max_tokens=generation.cut_max_tokens,
        num_draft_tokens=generation.num_draft_tokens,
        sampling=to_parameters(vars(generation)),
        stop=generation_pb2.StopConditions(
            ignore_eos=generation.ignore_eos,
            min_tokens=generation.min_tokens,
            token_ids=generation.stop_token_ids,
            strings=generation.stop_strings,
            reasoning=generation_pb2.Reasoning(begin=reasoning[0], end=reasoning[1]) if reasoning else None,
        ),
        top_log_probabilities=generation.top_log_probabilities,
        echo=generation.echo,
        session_id=generation.session_id,
        draft_source=draft_source_message(generation.draft_source),
    )
    if generation.prediction:
        request.prediction_text = generation.prediction
    _set_prompt(request, generation.prompt)
    return request.SerializeToString()


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Conversation):
        _check_values(prompt)
        # In its place: a message that is made elsewhere would be copied.
        chat = request.chat
        for message in prompt.messages:
            others = {name: value for name, value in message.items() if name not in {"role", "content"}}
            own = {"role": message["role"], "content": message["content"]}
            chat.messages.add(**own, fields_json=to_json(others) if others else "")
        chat.tools_json = to_json(prompt.tools) if prompt.tools else ""
        chat.template_arguments_json = to_json(prompt.template_arguments) if prompt.template_arguments else ""
        chat.continue_final_message = prompt.continue_final_message
    else:
        request.token_ids.ids.extend(prompt)


def _check_values(prompt: Conversation) -> None:
    values: list[Any] = [*prompt.messages, *prompt.tools, prompt.template_arguments]
    num_values = 0
    while values:
        value = values.pop()
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        values += parts
        num_values += len(parts)
        if num_values > MAX_CHAT_VALUES:
            raise invalid(
                f"messages, tools and template arguments have more than {MAX_CHAT_VALUES} values: send fewer",
                code="too_many_values",
            )


def _increment(response: generation_pb2.GenerateResponse) -> Increment:
    return Increment(
        response.session_id,
        tuple(map(_token, response.tokens)),
        ProposalCounts(response.round.proposed, response.round.accepted),
        _FINISH_REASONS.get(response.finish_reason, ""),
        _statistics(response.statistics) if response.finish_reason else None,
        response.prompt_end,
        tuple(map(_token, response.prompt_tokens)),
        response.max_tokens,
    )


def _token(token: generation_pb2.GeneratedToken) -> TextToken:
    source = token_source_from(token.source).value
    if not token.HasField("log_probabilities"):
        return TextToken(token.id, token.text, source, token.own_bytes)
    values = token.log_probabilities
    top = tuple(Ranked(ranked.id, ranked.own_bytes, ranked.log_probability) for ranked in values.top_model)
    return TextToken(token.id, token.text, source, token.own_bytes, values.model, top)


def _statistics(statistics: generation_pb2.SessionStatistics) -> Statistics:
    predicted = statistics.sources[TokenSource.PREDICTION.value]
    return Statistics(
        prompt_tokens=statistics.prompt_tokens,
        generated_tokens=statistics.generated_tokens,
        proposed_tokens=statistics.proposed_tokens,
        accepted_tokens=statistics.accepted_tokens,
        reused_tokens=statistics.target_reused_tokens,
        prediction_accepted_tokens=predicted.accepted,
        prediction_rejected_tokens=predicted.proposed - predicted.accepted,
        time_to_first_token_seconds=statistics.time_to_first_token_seconds,
        decode_seconds=statistics.decode_seconds,
        speedup=statistics.speedup,
        rounds=statistics.rounds,
    )


def _model(response: generation_pb2.GetModelInfoResponse) -> ModelCard:
    target = response.target
    # What decides which token follows: the weights, and the device and the library that compute with them.
    deciding = (target.fingerprint, target.vocabulary_fingerprint, target.precision, target.device, __version__)
    digest = hashlib.sha256("\n".join(deciding).encode()).hexdigest()
    return ModelCard(
        model_id=target.name,
        context_length=target.context_length,
        vocabulary_size=target.vocabulary_size,
        system_fingerprint=f"specd_{digest[:16]}",
        chat_template=response.chat_template,
        special_tokens=dict(response.special_tokens),
        details={
            "architecture": target.architecture,
            "precision": target.precision,
            "draft": response.draft.name if response.HasField("draft") else None,
            "sources": {each.value: each.label for each in TokenSource if each.value in response.sources},
            "chat": bool(response.chat_template),
        },
    )
