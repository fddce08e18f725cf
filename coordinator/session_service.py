"""SessionService: the gRPC edge of the sessions that are kept."""

from __future__ import annotations

import asyncio

import grpc
import structlog
from google.protobuf import timestamp_pb2

from coordinator.coordinator import Coordinator
from coordinator.metrics import CoordinatorMetrics
from coordinator.session_store import KeptSession, SessionStore
from specd.deferred import Deferred
from specd.errors import InvalidRequestError
from specd.reporting import reporting_errors
from specd.v1 import session_pb2, session_pb2_grpc

log = structlog.get_logger()


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Lists, shows and deletes the sessions that a Generate can continue."""

    def __init__(self, coordinator: Deferred[Coordinator], metrics: CoordinatorMetrics) -> None:
        self._coordinator = coordinator
        self._metrics = metrics

    async def ListSessions(  # noqa: N802
        self, request: session_pb2.ListSessionsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.ListSessionsResponse:
        """List the sessions, the most recently used first."""
        async with reporting_errors(context, self._metrics.errors):
            store = self._coordinator.get().sessions
            return session_pb2.ListSessionsResponse(sessions=[_session(store, session) for session in store.list()])

    async def GetSession(  # noqa: N802
        self, request: session_pb2.GetSessionRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.GetSessionResponse:
        """Return a session with its tokens and text."""
        async with reporting_errors(context, self._metrics.errors):
            coordinator = self._coordinator.get()
            session = coordinator.sessions.get(_checked(request.session_id))
            # All of it before the wait, after which the session can be another turn's.
            token_ids = session.token_ids
            response = session_pb2.GetSessionResponse(
                session=_session(coordinator.sessions, session), token_ids=token_ids
            )
            response.text = await asyncio.to_thread(coordinator.decode_text, token_ids)  # can be many
            return response

    async def DeleteSession(  # noqa: N802
        self, request: session_pb2.DeleteSessionRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.DeleteSessionResponse:
        """Forget a session."""
        async with reporting_errors(context, self._metrics.errors):
            self._coordinator.get().sessions.delete(_checked(request.session_id))
            log.info("session deleted", session_id=request.session_id)
            return session_pb2.DeleteSessionResponse()


def _checked(session_id: str) -> str:
    if not session_id:
        raise InvalidRequestError("EMPTY_SESSION_ID", "session_id is empty: set it to one that ListSessions returns")
    return session_id


def _session(store: SessionStore, session: KeptSession) -> session_pb2.Session:
    expires_at = store.expires_at(session)
    return session_pb2.Session(
        session_id=session.session_id,
        num_tokens=len(session.token_ids),
        num_turns=session.num_turns,
        busy=session.busy,
        created_at=_timestamp(session.created_at),
        last_used_at=_timestamp(session.last_used_at),
        expires_at=_timestamp(expires_at) if expires_at is not None else None,
    )


def _timestamp(unix_seconds: float) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromMicroseconds(round(unix_seconds * 1e6))
    return timestamp
