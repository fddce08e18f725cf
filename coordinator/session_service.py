"""SessionService: the sessions that clients can continue, at the coordinator's gRPC edge."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import timestamp_pb2

from coordinator.coordinator import Coordinator
from coordinator.sessions.session_store import KeptSession, SessionStore
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.errors import InvalidRequestError
from specd.model_info import ModelInfo
from specd.rpc.access import current_caller
from specd.rpc.deferred import Deferred
from specd.rpc.reporting import reporting_errors
from specd.v1 import session_pb2, session_pb2_grpc

log = structlog.get_logger()

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LARGEST_PAGE = 1000
_PAGE_TOKEN = re.compile("[0-9a-f]{1,15}")


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Lists, shows and deletes the sessions that a Generate can continue."""

    def __init__(self, coordinator: Deferred[Coordinator], metrics: CoordinatorMetrics) -> None:
        self._coordinator = coordinator
        self._metrics = metrics

    async def ListSessions(
        self, request: session_pb2.ListSessionsRequest, context: _Context
    ) -> session_pb2.ListSessionsResponse:
        """List the caller's sessions, the most recently used first, a page at a time."""
        async with reporting_errors(context, self._metrics.errors):
            coordinator = self._coordinator.get()
            store = coordinator.sessions
            await coordinator.keeper.refresh(current_caller().name)
            most = _page_size(request.page_size)
            sessions = store.list(current_caller().name, before=_last_use(request.page_token))
            page = sessions[:most]
            return session_pb2.ListSessionsResponse(
                sessions=[_session(store, session, coordinator.served_model) for session in page],
                next_page_token=f"{page[-1].use:x}" if len(sessions) > len(page) else "",
            )

    async def GetSession(
        self, request: session_pb2.GetSessionRequest, context: _Context
    ) -> session_pb2.GetSessionResponse:
        """Return a session of the caller with its tokens and text."""
        async with reporting_errors(context, self._metrics.errors):
            coordinator, client = self._coordinator.get(), current_caller().name
            await coordinator.keeper.refresh(client, _checked(request.session_id))
            session = coordinator.sessions.get(request.session_id, client)
            # Everything is read before the wait, because another turn can change the session during it.
            token_ids = session.token_ids
            response = session_pb2.GetSessionResponse(
                session=_session(coordinator.sessions, session, coordinator.served_model),
                token_ids=token_ids,
                source_token_ids=session.source,
            )
            response.text = await asyncio.to_thread(coordinator.decode_text, token_ids)  # there can be many
            return response

    async def DeleteSession(
        self, request: session_pb2.DeleteSessionRequest, context: _Context
    ) -> session_pb2.DeleteSessionResponse:
        """Forget a session of the caller."""
        async with reporting_errors(context, self._metrics.errors):
            coordinator, client = self._coordinator.get(), current_caller().name
            await coordinator.keeper.refresh(client, _checked(request.session_id))
            session = coordinator.sessions.get(request.session_id, client)
            await coordinator.keeper.delete(session)
            coordinator.sessions.delete(request.session_id, client)
            log.info("session deleted", session_id=request.session_id)
            return session_pb2.DeleteSessionResponse()


def _page_size(asked: int) -> int:
    if asked < 0:
        raise InvalidRequestError("OUT_OF_RANGE", f"page_size is {asked}: it must be 0 (for the largest page) or more")
    return min(asked or _LARGEST_PAGE, _LARGEST_PAGE)


def _last_use(page_token: str) -> float:
    """Return the number of the use that ended the previous page, or infinity for the first page."""
    if not page_token:
        return math.inf
    if not _PAGE_TOKEN.fullmatch(page_token):
        raise InvalidRequestError("OUT_OF_RANGE", "page_token was not returned by ListSessions: leave it out")
    return int(page_token, 16)


def _checked(session_id: str) -> str:
    if not session_id:
        raise InvalidRequestError("EMPTY_SESSION_ID", "session_id is empty: set it to one that ListSessions returns")
    return session_id


def _session(store: SessionStore, session: KeptSession, target: ModelInfo) -> session_pb2.Session:
    expires_at = store.expires_at(session)
    return session_pb2.Session(
        session_id=session.session_id,
        num_tokens=session.num_tokens,
        num_turns=session.num_turns,
        busy=session.busy,
        created_at=_timestamp(session.created_at),
        last_used_at=_timestamp(session.last_used_at),
        expires_at=_timestamp(expires_at) if expires_at is not None else None,
        model=session.adapter.name if session.adapter is not None else target.public_name,
    )


def _timestamp(unix_seconds: float) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromMicroseconds(round(unix_seconds * 1e6))
    return timestamp
