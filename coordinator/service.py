"""GenerationService: the coordinator's gRPC edge."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import structlog

from coordinator.coordinator import Coordinator, Emission
from coordinator.metrics import CoordinatorMetrics
from coordinator.round import Round
from coordinator.session import FinishReason
from coordinator.statistics import SessionStatistics
from specd.deferred import Deferred
from specd.errors import InternalError, SpecdError, to_status
from specd.model_info import ModelInfo
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.v1 import generation_pb2, generation_pb2_grpc, model_pb2

log = structlog.get_logger()

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generates text for clients."""

    def __init__(self, coordinator: Deferred[Coordinator], metrics: CoordinatorMetrics) -> None:
        self._coordinator = coordinator
        self._metrics = metrics

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a completion."""
        try:
            emissions = self._coordinator.get().generate(
                list(request.token_ids.ids) if request.HasField("token_ids") else request.text,
                max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
                num_draft_tokens=request.num_draft_tokens if request.HasField("num_draft_tokens") else None,
            )
            async with aclosing(emissions):
                async for emission in emissions:
                    yield _response(emission)
        except SpecdError as error:
            self._metrics.errors.labels(error.reason).inc()
            log.info("request ended with an error", reason=error.reason, error=str(error))
            await context.abort_with_status(to_status(error))
        except Exception:
            log.exception("request failed")
            self._metrics.errors.labels("INTERNAL").inc()
            unexpected = InternalError("INTERNAL", "the coordinator failed on this request; its log says why")
            await context.abort_with_status(to_status(unexpected))

    async def GetModelInfo(
        self,
        request: generation_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetModelInfoRequest, generation_pb2.GetModelInfoResponse],
    ) -> generation_pb2.GetModelInfoResponse:
        """Describe the models and the limits of a request."""
        try:
            coordinator = self._coordinator.get()
        except SpecdError as error:
            await context.abort_with_status(to_status(error))
            raise
        draft = coordinator.draft
        return generation_pb2.GetModelInfoResponse(
            target=_model(coordinator.model),
            draft=_model(draft.model) if draft.model is not None else None,
            draft_fault=draft.fault,
            default_num_draft_tokens=coordinator.settings.num_draft_tokens,
            max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
        )


def _response(emission: Emission) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(
        session_id=emission.session_id,
        text="".join(token.text for token in emission.tokens),
        tokens=[
            generation_pb2.GeneratedToken(id=token.token_id, text=token.text, drafted=token.drafted)
            for token in emission.tokens
        ],
        round=_round(emission.round),
    )
    if emission.finish_reason is not None:
        response.finish_reason = _FINISH_REASONS[emission.finish_reason]
        response.statistics.CopyFrom(_statistics(emission.statistics))
    return response


def _round(round_: Round) -> generation_pb2.Round:
    return generation_pb2.Round(
        proposed=round_.num_proposed,
        accepted=round_.commit.num_accepted,
        draft_seconds=round_.draft_seconds,
        verify_seconds=round_.verify_seconds,
        queue_seconds=round_.queue_seconds,
        wire_seconds=round_.wire_seconds,
        coordinator_seconds=round_.coordinator_seconds,
    )


def _statistics(statistics: SessionStatistics) -> generation_pb2.SessionStatistics:
    values = dataclasses.asdict(statistics)
    sums = {name: values.pop(name) for name in ("draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds")}
    sums["coordinator_seconds"] = values.pop("coordinator_seconds")
    sums["tokens"] = values.pop("tokens_after_first_round")
    rounds = max(statistics.rounds - 1, 1)
    averages = generation_pb2.RoundAverages(**{name: value / rounds for name, value in sums.items()})
    return generation_pb2.SessionStatistics(**values, round_averages=averages)


def _model(model: ModelInfo) -> model_pb2.Model:
    return model_pb2.Model(**dataclasses.asdict(model))
