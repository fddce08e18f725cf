"""A model that is being loaded, on the terminal."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from specd.client.async_client import AsyncClient
from specd.client.client import Client
from specd.client.events import Loading
from specd.client.protocol.service import ModelStatus, ServiceDescription
from specd.errors import UnavailableError
from specd.rpc.credentials import ClientCredentials

_PROGRESS_SECONDS = 0.5


class LoadingLine:
    """A line of progress that goes away, as a context manager. It is there on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, model: str, progress: Loading | None = None) -> None:
        """Show how far a model is."""
        if not self._console.is_terminal:
            return
        text = f"loading {model or 'the model'}" + (f", {progress.words}" if progress is not None else "")
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def clear(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def load_model(client: Client, model: str, credentials: ClientCredentials, console: Console) -> ServiceDescription:
    """Return the description of a model, once it is loaded, with a line of its progress until then.

    Raises SpecdError, and KeyboardInterrupt, after which the model still loads.
    """
    try:
        return client.describe(model, refuse_unloaded=True)
    except UnavailableError as error:
        if error.reason != "MODEL_LOADING":
            raise
    with LoadingLine(console) as line:
        # An event loop ends its calls on Ctrl-C, where one of a thread can leave a lock of gRPC held.
        return asyncio.run(_loaded(client.address, model, credentials, line))


async def _loaded(address: str, model: str, credentials: ClientCredentials, line: LoadingLine) -> ServiceDescription:
    async with AsyncClient(address, credentials=credentials) as client:
        describing = asyncio.ensure_future(client.describe(model, timeout_seconds=None))
        try:
            while not describing.done():
                statuses = await client.statuses()
                status = next((each for each in statuses if each.name == model), statuses[0] if not model else None)
                line.show(model or statuses[0].name, status.loading if status is not None else None)
                await asyncio.wait({describing}, timeout=_PROGRESS_SECONDS)
        finally:
            describing.cancel()
        return await describing


def state_of(status: ModelStatus) -> str:
    """Return the state of a model in words."""
    if status.loading is not None and status.loading.process:
        return f"{status.state}, {status.loading.words}"
    return "waiting for memory" if status.state == "waiting" else status.state
