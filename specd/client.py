"""A client of the coordinator, for the commands, the benchmarks and the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from specd.channel import open_channel
from specd.v1 import generation_pb2, generation_pb2_grpc


class Client:
    """An async context manager around one channel to the coordinator."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = open_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        num_draft_tokens: int | None = None,
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a completion of a text, or of token ids. Raises grpc.aio.AioRpcError."""
        request = generation_pb2.GenerateRequest(max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)
        if isinstance(prompt, str):
            request.text = prompt
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
