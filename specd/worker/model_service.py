"""ModelService: describes the model of a worker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc

from specd.errors import SpecdError, to_status
from specd.rpc.deferred import Deferred
from specd.rpc.messages import to_cache_parts, to_model, to_step_costs
from specd.v1 import model_pb2, model_pb2_grpc
from specd.worker.session_stream import Worker

_CHUNK_BYTES = 1024 * 1024


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Describes the worker's model and hands out its tokenizer."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self._worker = worker

    async def Describe(
        self, request: model_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> model_pb2.DescribeResponse:
        """Return the model's description; it has the whole fingerprint if that is known, or waited for."""
        worker = await self._get(context)
        whole = worker.whole_fingerprint
        if request.wait_for_whole_fingerprint:
            await asyncio.shield(asyncio.wrap_future(whole))
        info = dataclasses.replace(worker.model.info, whole_fingerprint=whole.result() if whole.done() else "")
        return model_pb2.DescribeResponse(
            model=to_model(info),
            incarnation=worker.incarnation,
            cache_capacity_bytes=worker.caches.capacity_bytes,
            cache_parts=to_cache_parts(worker.caches.footprint),
            bytes_per_source_token=worker.caches.footprint.bytes_per_source_token,
            step_costs=to_step_costs(worker.costs),
        )

    async def GetTokenizer(
        self, request: model_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        """Stream the tokenizer, with what tokenizer.json does not say in the first message."""
        model = (await self._get(context)).model
        data = model.tokenizer_json
        config = model_pb2.TokenizerConfig(**dataclasses.asdict(model.tokenizer_config))
        yield model_pb2.GetTokenizerResponse(chunk=data[:_CHUNK_BYTES], config=config)
        for start in range(_CHUNK_BYTES, len(data), _CHUNK_BYTES):
            yield model_pb2.GetTokenizerResponse(chunk=data[start : start + _CHUNK_BYTES])

    async def _get(self, context: grpc.aio.ServicerContext[object, object]) -> Worker:
        try:
            return self._worker.get()
        except SpecdError as error:
            await context.abort_with_status(to_status(error))
            raise
