"""GenerationService: the coordinator's gRPC edge."""

from __future__ import annotations

import dataclasses
import secrets
from contextlib import aclosing

import grpc

from coordinator.chat import Chat, plain
from coordinator.coordinator import Coordinator, Emission
from coordinator.hand_back import HandBack
from coordinator.metrics import CoordinatorMetrics
from coordinator.output import EmittedToken
from coordinator.prompt import Prompt
from coordinator.request import GenerationRequest, StopConditions
from coordinator.round import Round
from coordinator.session import FinishReason
from coordinator.statistics import SessionStatistics
from specd.deferred import Deferred
from specd.model_info import ModelInfo
from specd.reporting import reporting_errors
from specd.sampling import Sampling
from specd.sampling_messages import sampling_from, to_log_probabilities
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.v1 import generation_pb2, generation_pb2_grpc, model_pb2, sampling_pb2

_FINISH_REASONS = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
}

# Short enough to be read aloud, and for languages whose numbers are all doubles.
_SEED_BITS = 32


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generates text for clients."""

    def __init__(self, coordinator: Deferred[Coordinator], metrics: CoordinatorMetrics, hand_back: HandBack) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._hand_back = hand_back

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> None:
        """Stream a completion."""
        async with reporting_errors(context, self._metrics.errors), self._hand_back.running():
            traceparent = dict(context.invocation_metadata() or ()).get("traceparent", "")
            emissions = self._coordinator.get().generate(_request(request, str(traceparent)))
            async with aclosing(emissions):
                async for emission in emissions:
                    await context.write(_response(emission))

    async def GetModelInfo(
        self,
        request: generation_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetModelInfoRequest, generation_pb2.GetModelInfoResponse],
    ) -> generation_pb2.GetModelInfoResponse:
        """Describe the models and the limits of a request."""
        async with reporting_errors(context, self._metrics.errors):
            coordinator = self._coordinator.get()
            draft = coordinator.draft
            return generation_pb2.GetModelInfoResponse(
                target=_model(coordinator.model),
                draft=_model(draft.model) if draft.model is not None else None,
                draft_fault=draft.fault,
                default_num_draft_tokens=coordinator.settings.given_num_draft_tokens,
                max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
            )


def _request(request: generation_pb2.GenerateRequest, traceparent: str) -> GenerationRequest:
    return GenerationRequest(
        prompt=_prompt(request),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        num_draft_tokens=request.num_draft_tokens if request.HasField("num_draft_tokens") else None,
        sampling=_sampling(request),
        stop=StopConditions(
            request.stop.ignore_eos,
            request.stop.min_tokens,
            tuple(request.stop.token_ids),
            tuple(request.stop.strings),
        ),
        session_id=request.session_id,
        traceparent=traceparent,
    )


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "chat":
            return _chat(request.chat)
    return None


def _chat(chat: generation_pb2.Chat) -> Chat:
    return Chat(
        messages=tuple(
            {**plain(message.fields), "role": message.role, "content": message.content} for message in chat.messages
        ),
        tools=tuple(plain(tool) for tool in chat.tools),
        template_arguments=plain(chat.template_arguments),
        continue_final_message=chat.continue_final_message,
    )


def _sampling(request: generation_pb2.GenerateRequest) -> Sampling:
    message = sampling_pb2.SessionSampling(parameters=request.sampling)
    if request.HasField("top_log_probabilities"):
        message.top_log_probabilities = request.top_log_probabilities
    sampling = sampling_from(message)
    if request.sampling.HasField("seed"):
        return sampling
    return dataclasses.replace(sampling, seed=secrets.randbits(_SEED_BITS))


def _response(emission: Emission) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(
        session_id=emission.session_id,
        text="".join(token.text for token in emission.tokens),
        tokens=map(_token, emission.tokens),
        round=_round(emission.round),
        seed=emission.seed,
    )
    if emission.finish_reason is not None:
        response.finish_reason = _FINISH_REASONS[emission.finish_reason]
        response.statistics.CopyFrom(_statistics(emission.statistics))
        if emission.finish_reason is FinishReason.STOP_TOKEN:
            response.stop_token_id = emission.tokens[-1].token_id
        elif emission.stop_string is not None:
            response.stop_string = emission.stop_string
    return response


def _token(token: EmittedToken) -> generation_pb2.GeneratedToken:
    message = generation_pb2.GeneratedToken(id=token.token_id, text=token.text, drafted=token.drafted)
    if token.log_probabilities is not None:
        message.log_probabilities.CopyFrom(to_log_probabilities(token.log_probabilities, token.texts))
    return message


def _round(round_: Round) -> generation_pb2.Round:
    return generation_pb2.Round(
        proposed=round_.num_proposed,
        accepted=round_.commit.num_accepted,
        draft_seconds=round_.draft_seconds,
        verify_seconds=round_.verify_seconds,
        queue_seconds=round_.queue_seconds,
        wire_seconds=round_.wire_seconds,
        coordinator_seconds=round_.coordinator_seconds,
        wire_bytes=round_.wire_bytes,
        was_ahead=round_.proposal.was_ahead,
    )


_AVERAGED = ("draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds", "coordinator_seconds", "wire_bytes")


def _statistics(statistics: SessionStatistics) -> generation_pb2.SessionStatistics:
    values = dataclasses.asdict(statistics)
    sums = {name: values.pop(name) for name in _AVERAGED}
    del values["round_seconds"], values["target_only_seconds"]
    sums["tokens"] = values.pop("tokens_after_first_round")
    rounds = max(statistics.rounds - 1, 1)
    averages = generation_pb2.RoundAverages(**{name: value / rounds for name, value in sums.items()})
    return generation_pb2.SessionStatistics(
        **values, wasted_tokens=statistics.wasted_tokens, speedup=statistics.speedup, round_averages=averages
    )


def _model(model: ModelInfo) -> model_pb2.Model:
    return model_pb2.Model(**dataclasses.asdict(model))
