"""SessionService: the sessions that clients can continue, at the coordinator's gRPC edge."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import timestamp_pb2
from prometheus_client import Counter

from coordinator.models.choice import model_of_session
from coordinator.models.kept_sessions import KeptSessions
from coordinator.models.models import Models
from coordinator.models.served_model import ServedModel
from coordinator.models.waiting import starting
from coordinator.sessions.session_store import KeptSession
from specd.errors import InvalidRequestError
from specd.rpc.access import current_caller
from specd.rpc.reporting import reporting_errors
from specd.v1 import session_pb2, session_pb2_grpc

log = structlog.get_logger()

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LARGEST_PAGE = 1000
_PAGE_TOKEN = re.compile("[0-9a-f]{1,15}")


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Lists, shows and deletes the sessions that a Generate can continue."""

    def __init__(self, models: Models, errors: Counter) -> None:
        self._models = models
        self._errors = errors

    async def ListSessions(
        self, request: session_pb2.ListSessionsRequest, context: _Context
    ) -> session_pb2.ListSessionsResponse:
        """List the caller's sessions, the most recently used first, a page at a time."""
        async with reporting_errors(context, self._errors):
            most, before = _page_size(request.page_size), _last_use(request.page_token)
            found: list[tuple[KeptSession, ServedModel]] = []
            for model in self._models.all:
                store = (await self._sessions_of(model)).store
                found += [(session, model) for session in store.list(current_caller().name, before=before)]
            found.sort(key=lambda each: -each[0].use)
            page = found[:most]
            return session_pb2.ListSessionsResponse(
                sessions=[_session(model, session) for session, model in page],
                next_page_token=f"{page[-1][0].use:x}" if len(found) > len(page) else "",
            )

    async def GetSession(
        self, request: session_pb2.GetSessionRequest, context: _Context
    ) -> session_pb2.GetSessionResponse:
        """Return a session of the caller with its tokens and text."""
        async with reporting_errors(context, self._errors):
            model, session = await self._find(request.session_id)
            # Everything is read before the wait, because another turn can change the session during it.
            token_ids = session.token_ids
            response = session_pb2.GetSessionResponse(
                session=_session(model, session),
                token_ids=token_ids,
                source_token_ids=session.source,
            )
            tokenizer = model.tokenizer
            if tokenizer is None:
                async with self._models.using(model, current_caller()) as waiting:
                    tokenizer = (await waiting.ready()).tokenizer
            # There can be many tokens.
            response.text = await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=False)
            return response

    async def DeleteSession(
        self, request: session_pb2.DeleteSessionRequest, context: _Context
    ) -> session_pb2.DeleteSessionResponse:
        """Forget a session of the caller."""
        async with reporting_errors(context, self._errors):
            model, session = await self._find(request.session_id)
            await model.sessions.keeper.delete(session)
            model.sessions.store.delete(request.session_id, current_caller().name)
            log.info("session deleted", session_id=request.session_id)
            return session_pb2.DeleteSessionResponse()

    async def _find(self, session_id: str) -> tuple[ServedModel, KeptSession]:
        """Return a session of the caller, and its model. Raises NotFoundError (SESSION_NOT_FOUND)."""
        client, first = current_caller().name, self._models.all[0]
        _check_started(first)
        model = await model_of_session(self._models.all, _checked(session_id), client) or first
        return model, model.sessions.store.get(session_id, client)

    async def _sessions_of(self, model: ServedModel) -> KeptSessions:
        """Return a model's sessions, with those of the caller that are kept elsewhere. Raises UnavailableError."""
        _check_started(model)
        await model.sessions.keeper.refresh(current_caller().name)
        return model.sessions


def _check_started(model: ServedModel) -> None:
    if not model.name and model.tokenizer is None:
        raise starting()


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


def _session(model: ServedModel, session: KeptSession) -> session_pb2.Session:
    expires_at = model.sessions.store.expires_at(session)
    name = model.infos[0].public_name if model.infos else model.name
    return session_pb2.Session(
        session_id=session.session_id,
        num_tokens=session.num_tokens,
        num_turns=session.num_turns,
        busy=session.busy,
        created_at=_timestamp(session.created_at),
        last_used_at=_timestamp(session.last_used_at),
        expires_at=_timestamp(expires_at) if expires_at is not None else None,
        model=session.adapter.name if session.adapter is not None else name,
    )


def _timestamp(unix_seconds: float) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromMicroseconds(round(unix_seconds * 1e6))
    return timestamp
