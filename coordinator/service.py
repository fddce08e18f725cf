"""GenerationService: the coordinator's gRPC edge."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import grpc
from prometheus_client import Counter

from coordinator.conversation import MAX_ENTRIES, chat_from
from coordinator.core import Round
from coordinator.emission import Emission
from coordinator.generation import Generation
from coordinator.models.choice import choose_model
from coordinator.models.loader import LoadProgress
from coordinator.models.models import Models
from coordinator.models.served_model import ModelState, ServedModel
from coordinator.models.waiting import Waiting, starting
from coordinator.output import EmittedToken
from coordinator.pacing import at_intervals
from coordinator.sessions.prompt import AnswerStart, Prompt
from coordinator.sessions.request import GenerationRequest, StopConditions
from coordinator.sessions.resumption import Resumption
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.token_count import count_tokens
from specd.caller import Caller
from specd.errors import ClientStalledError, UnavailableError
from specd.model_info import ModelInfo
from specd.protocol import PROTOCOL
from specd.rpc.access import current_caller
from specd.rpc.messages import (
    draft_source_from,
    grammar_from,
    sampling_from,
    to_finish_reason,
    to_log_probabilities,
    to_model,
    to_source_counts,
    to_token_source,
)
from specd.rpc.reporting import reporting_errors
from specd.rpc.server import Server
from specd.sampling import MAX_LOGIT_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKENS, Sampling, check_count
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.text.reasoning import ReasoningMarkers
from specd.v1 import generation_pb2, generation_pb2_grpc, model_pb2, sampling_pb2
from specd.version import __version__
from specd.vocabulary import FinishReason, TokenSource, sums_by_source

_LONG_BYTES = 1 << 14

_GO_ON = "the coordinator is stopping: to go on, resume with the tokens so far when it is back, or at another"
_STOPPING = partial(UnavailableError, "STOPPING", _GO_ON, retry_after_seconds=1.0)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Short enough to be read aloud, and for languages whose numbers are all doubles.
_SEED_BITS = 32


_STATES = {
    ModelState.UNLOADED: generation_pb2.MODEL_STATE_UNLOADED,
    ModelState.WAITING: generation_pb2.MODEL_STATE_WAITING,
    ModelState.LOADING: generation_pb2.MODEL_STATE_LOADING,
    ModelState.READY: generation_pb2.MODEL_STATE_READY,
    ModelState.LEAVING: generation_pb2.MODEL_STATE_LEAVING,
}


class _UnreadMessage:
    """The last message of a stream, until its client has read it."""

    def __init__(self) -> None:
        self._writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.set_result(None)

    async def write(self, context: _Context, response: generation_pb2.GenerateResponse, stall_seconds: float) -> None:
        """Send the next message. Raises ClientStalledError if the client does not read it in time."""
        self._writing = asyncio.ensure_future(context.write(response))
        self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())  # read in any case
        try:
            done, _ = await asyncio.wait({self._writing}, timeout=stall_seconds)
        except asyncio.CancelledError:
            self._writing.cancel()
            raise
        if not done:
            raise ClientStalledError(stall_seconds)
        self._writing.result()

    async def taken(self) -> None:
        """Wait until gRPC can accept the status; while a message waits for its client, the call would hang for ever."""
        await asyncio.wait({self._writing})


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generates text for clients."""

    def __init__(self, models: Models, errors: Counter, server: Server, *, stall_seconds: float) -> None:
        """A client that leaves a message unread for `stall_seconds` ends its call."""
        self._models = models
        self._errors = errors
        self._server = server
        self._stall_seconds = stall_seconds

    async def Generate(self, request: generation_pb2.GenerateRequest, context: _Context) -> None:
        """Stream a completion."""
        unread = _UnreadMessage()
        async with (
            reporting_errors(context, self._errors, before_status=unread.taken),
            self._server.until_stopped(_STOPPING),
        ):
            traceparent = dict(context.invocation_metadata() or ()).get("traceparent", "")
            async with self._using(request.model, request.session_id, waits=not request.refuse_unloaded) as waiting:
                async for progress in waiting.progress():
                    loading = generation_pb2.GenerateResponse(loading=_load_progress(progress))
                    await unread.write(context, loading, self._stall_seconds)
                coordinator = await waiting.ready()
                coordinator.check_model(request.model)
                converted = await _converted(request, str(traceparent), current_caller())
                del request  # as long as the prompt, and of no use to the rounds
                emissions = Generation(coordinator, converted).emissions()
                async with aclosing(at_intervals(emissions, coordinator.settings.stream_interval_seconds)) as batches:
                    async for batch in batches:
                        await unread.write(context, response_from(batch), self._stall_seconds)

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, context: _Context
    ) -> generation_pb2.CountTokensResponse:
        """Count the tokens of a generation's prompt."""
        async with reporting_errors(context, self._errors):
            generation = request.generation
            async with self._using(
                generation.model, generation.session_id, waits=not generation.refuse_unloaded
            ) as waiting:
                coordinator = await waiting.ready()
                coordinator.check_model(generation.model)
                converted = await _converted(generation, "", current_caller())
                count = await count_tokens(
                    coordinator, converted, add_special_tokens=not request.without_special_tokens
                )
            return generation_pb2.CountTokensResponse(
                prompt_tokens=len(count.token_ids),
                source_tokens=count.source_tokens,
                room=count.room,
                fits=count.fits,
                token_ids=count.token_ids if request.return_token_ids else (),
            )

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: _Context
    ) -> generation_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        async with reporting_errors(context, self._errors), self._using(request.model) as waiting:
            coordinator = await waiting.ready()
            coordinator.check_model(request.model)
            return generation_pb2.DetokenizeResponse(text=await coordinator.detokenize(request.token_ids))

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: _Context
    ) -> generation_pb2.ListModelsResponse:
        """List the models that a request can name."""
        async with reporting_errors(context, self._errors):
            response = generation_pb2.ListModelsResponse()
            for model in self._models.all:
                if model.name:
                    response.statuses.append(self._status_of(model))
                if model.infos:
                    response.models.extend(map(_public, model.infos))
                elif model.name:
                    response.models.add(name=model.name)
                    for adapter in model.entry.adapters:
                        response.models.add(name=adapter, parent=model.name)
                else:
                    raise starting()
            return response

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: _Context
    ) -> generation_pb2.GetModelInfoResponse:
        """Describe the models and the limits of a request."""
        waits = not request.refuse_unloaded
        async with (
            reporting_errors(context, self._errors),
            self._using(request.model, request.session_id, waits=waits) as waiting,
        ):
            coordinator = await waiting.ready()
            coordinator.check_model(request.model)
            draft = coordinator.draft_model
            return generation_pb2.GetModelInfoResponse(
                target=_public(coordinator.served_model),
                draft=_public(draft) if draft is not None else None,
                draft_fault=coordinator.draft_fault,
                default_num_draft_tokens=coordinator.settings.given_num_draft_tokens,
                max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
                sources=[source.value for source in coordinator.available_sources],
                chat_template=coordinator.tokenizer.chat_template,
                special_tokens=coordinator.tokenizer.special_tokens,
                version=__version__,
                protocol=PROTOCOL,
            )

    @asynccontextmanager
    async def _using(self, name: str, session_id: str = "", *, waits: bool = True) -> AsyncIterator[Waiting]:
        """Use the model that a request names, or that its session has."""
        caller = current_caller()
        model = await choose_model(self._models.all, name, caller.name, session_id)
        async with self._models.using(model, caller, waits=waits) as waiting:
            yield waiting

    def _status_of(self, model: ServedModel) -> generation_pb2.ModelStatus:
        is_loading = model.state is ModelState.LOADING
        return generation_pb2.ModelStatus(
            name=model.name,
            state=_STATES[model.state],
            loading=_load_progress(self._models.progress_of(model)) if is_loading else None,
            memory_bytes=model.entry.num_bytes,
            pinned=model.entry.pinned,
            active_requests=model.num_users,
        )


def _load_progress(progress: LoadProgress) -> generation_pb2.LoadProgress:
    return generation_pb2.LoadProgress(**asdict(progress))


def _public(model: ModelInfo) -> model_pb2.Model:
    return to_model(replace(model, name=model.public_name))


async def _converted(request: generation_pb2.GenerateRequest, traceparent: str, caller: Caller) -> GenerationRequest:
    """Return the request in a message, converted on a thread if it is long: 4 MiB of fields take 2 s."""
    _check_counts(request)
    if request.ByteSize() < _LONG_BYTES:
        return request_from(request, traceparent, caller)
    return await asyncio.to_thread(request_from, request, traceparent, caller)


def _check_counts(request: generation_pb2.GenerateRequest) -> None:
    """Raise InvalidRequestError for impossible numbers of entries, before the conversion, which needs much memory."""
    check_count("chat.messages", len(request.chat.messages), MAX_ENTRIES)
    check_count("chat.tools", len(request.chat.tools), MAX_ENTRIES)
    check_count("logit_bias", len(request.sampling.logit_bias), MAX_LOGIT_BIASES)
    check_count("stop.token_ids", len(request.stop.token_ids), MAX_STOP_TOKENS)
    check_count("stop.strings", len(request.stop.strings), MAX_STOP_STRINGS)


def request_from(request: generation_pb2.GenerateRequest, traceparent: str, caller: Caller) -> GenerationRequest:
    """Return the request in a message. Raises InvalidRequestError."""
    return GenerationRequest(
        prompt=_prompt(request),
        answer=_answer(request),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        num_draft_tokens=request.num_draft_tokens if request.HasField("num_draft_tokens") else None,
        draft_source=draft_source_from(request.draft_source),
        prediction=_prediction(request),
        sampling=_sampling(request),
        stop=StopConditions(
            request.stop.ignore_eos,
            request.stop.min_tokens,
            tuple(request.stop.token_ids),
            tuple(request.stop.strings),
            _reasoning(request.stop),
        ),
        session_id=request.session_id,
        model=request.model,
        resumption=Resumption(
            tuple(request.resumption.token_ids),
            request.resumption.prompt_fingerprint,
            tuple(request.resumption.session_token_ids),
        ),
        returns_prompt=request.return_prompt_token_ids,
        echo=request.echo,
        traceparent=traceparent,
        cut_max_tokens=request.cut_max_tokens,
        grammar=grammar_from(request.grammar) if request.HasField("grammar") else None,
        client=caller.name,
        client_limits=caller.limits,
    )


def _reasoning(stop: generation_pb2.StopConditions) -> ReasoningMarkers | None:
    if not stop.HasField("reasoning"):
        return None
    return ReasoningMarkers(stop.reasoning.begin, stop.reasoning.end)


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "chat":
            return chat_from(request.chat)
    return None


def _answer(request: generation_pb2.GenerateRequest) -> AnswerStart:
    if request.WhichOneof("answer") == "answer_text":
        return request.answer_text
    return list(request.answer_token_ids.ids)


def _prediction(request: generation_pb2.GenerateRequest) -> AnswerStart:
    if request.WhichOneof("prediction") == "prediction_text":
        return request.prediction_text
    return list(request.prediction_token_ids.ids)


def _sampling(request: generation_pb2.GenerateRequest) -> Sampling:
    message = sampling_pb2.SessionSampling(parameters=request.sampling)
    if request.HasField("top_log_probabilities"):
        message.top_log_probabilities = request.top_log_probabilities
        message.prompt_log_probabilities = request.echo
    sampling = sampling_from(message)
    if request.sampling.HasField("seed"):
        return sampling
    return replace(sampling, seed=secrets.randbits(_SEED_BITS))


def response_from(emissions: Sequence[Emission]) -> generation_pb2.GenerateResponse:
    """Return the message for one emission, or for several in a row."""
    emission = emissions[-1]
    tokens = [token for each in emissions for token in each.tokens]
    response = generation_pb2.GenerateResponse(
        session_id=emission.session_id,
        text="".join(token.text for token in tokens),
        tokens=map(_token, tokens),
        round=_round([each.round for each in emissions]),
        seed=emission.seed,
    )
    if (beginning := emissions[0].beginning) is not None:
        response.prompt_fingerprint = beginning.prompt_fingerprint
        response.max_tokens = beginning.max_tokens
        response.prompt_end = beginning.prompt_end
        response.prompt_token_ids.extend(beginning.prompt_token_ids)
        response.source_token_ids.extend(beginning.source_token_ids)
        response.prompt_tokens.extend(map(_prompt_token, beginning.prompt_tokens))
    if emission.finish_reason is not None:
        response.finish_reason = to_finish_reason(emission.finish_reason)
        response.statistics.CopyFrom(_statistics(emission.statistics))
        if emission.finish_reason is FinishReason.STOP_TOKEN:
            response.stop_token_id = emission.tokens[-1].token_id
        elif emission.stop_string is not None:
            response.stop_string = emission.stop_string
    return response


def _token(token: EmittedToken) -> generation_pb2.GeneratedToken:
    message = _prompt_token(token)
    message.drafted = token.source is not TokenSource.TARGET
    message.source = to_token_source(token.source)
    if token.special_position is not None:
        message.special_position = token.special_position
    if token.margin is not None:
        message.margin, message.near_tie = token.margin.value, token.margin.is_near_tie
    return message


def _prompt_token(token: EmittedToken) -> generation_pb2.GeneratedToken:
    message = generation_pb2.GeneratedToken(id=token.token_id, text=token.text)
    if token.token_bytes is not None:
        message.own_bytes = token.token_bytes.of(token.token_id)
        if token.log_probabilities is not None:
            message.log_probabilities.CopyFrom(to_log_probabilities(token.log_probabilities, token.token_bytes.of))
    return message


def _round(rounds: Sequence[Round]) -> generation_pb2.Round:
    stages = [round_.stage_seconds for round_ in rounds]
    return generation_pb2.Round(
        proposed=sum(round_.num_proposed for round_ in rounds),
        sources=to_source_counts(reduce(sums_by_source, [round_.source_counts for round_ in rounds])),
        accepted=sum(round_.commit.num_accepted for round_ in rounds),
        wire_bytes=sum(round_.wire_bytes for round_ in rounds),
        **{f"{stage}_seconds": sum(each[stage] for each in stages) for stage in stages[0]},
    )


def _statistics(statistics: SessionStatistics) -> generation_pb2.SessionStatistics:
    known = generation_pb2.SessionStatistics.DESCRIPTOR.fields_by_name
    values = {name: value for name, value in asdict(statistics).items() if name in known}
    values["sources"] = to_source_counts(statistics.sources)
    return generation_pb2.SessionStatistics(
        **values,
        wasted_tokens=statistics.wasted_tokens,
        speedup=statistics.speedup,
        round_averages=generation_pb2.RoundAverages(**statistics.round_averages),
    )
