"""ModelService: describes the model of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from specd.errors import SpecdError, to_status
from specd.rpc.deferred import Deferred
from specd.rpc.messages import to_step_costs
from specd.v1 import model_pb2, model_pb2_grpc
from specd.worker.session.stream import Worker

_CHUNK_BYTES = 1024 * 1024


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Describes the worker's model and hands out its tokenizer."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self._worker = worker

    async def Describe(
        self, request: model_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> model_pb2.DescribeResponse:
        """Return the model's description, with the whole fingerprint if it is known, or if the request waits for it."""
        worker = await self._get(context)
        whole = worker.whole_fingerprint
        if request.wait_for_whole_fingerprint:
            await asyncio.shield(asyncio.wrap_future(whole))
        response = model_pb2.DescribeResponse(step_costs=to_step_costs(worker.costs))
        response.MergeFrom(worker.description)
        if worker.self_draft is not None:
            response.self_draft.step_costs.extend(to_step_costs(worker.self_draft.costs))
        response.model.whole_fingerprint = whole.result() if whole.done() else ""
        return response

    async def GetTokenizer(
        self, request: model_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        """Stream the tokenizer. The first message has the fields that tokenizer.json lacks."""
        worker = await self._get(context)
        data = worker.model.tokenizer_json
        yield model_pb2.GetTokenizerResponse(chunk=data[:_CHUNK_BYTES], config=worker.tokenizer_config)
        for start in range(_CHUNK_BYTES, len(data), _CHUNK_BYTES):
            yield model_pb2.GetTokenizerResponse(chunk=data[start : start + _CHUNK_BYTES])

    async def _get(self, context: grpc.aio.ServicerContext[object, object]) -> Worker:
        try:
            return self._worker.get()
        except SpecdError as error:
            await context.abort_with_status(to_status(error))
            raise
