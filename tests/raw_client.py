"""The messages of the protocol as they come, for measurements and tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from specd.rpc.channel import open_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2


class RawClient:
    """One channel to the coordinator, as an async context manager; specd.client is for programs."""

    def __init__(self, address: str, credentials: ClientCredentials = PLAIN) -> None:
        """Connect to HOST:PORT or unix:PATH. Raises StartupError for credentials that cannot be used."""
        self.address = address
        self.channel = open_channel(address, credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.channel.close()

    def generate(
        self,
        prompt: str | Sequence[int] | generation_pb2.Chat,
        *,
        sampling: sampling_pb2.SamplingParameters | None = None,
        **fields: Any,
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream the completion of a text, token ids or a conversation; `fields` are those of GenerateRequest.

        Raises grpc.aio.AioRpcError.
        """
        request = generation_pb2.GenerateRequest(sampling=sampling, **fields)
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, generation_pb2.Chat):
            request.chat.CopyFrom(prompt)
        else:
            request.token_ids.ids.extend(prompt)
        call: AsyncIterator[generation_pb2.GenerateResponse] = self._stub.Generate(request)
        return call

    async def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """Describe the models behind the coordinator. Raises grpc.aio.AioRpcError."""
        response: generation_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
            generation_pb2.GetModelInfoRequest()
        )
        return response
