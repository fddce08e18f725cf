"""The calls of sessions to one worker: a call of its own for each, or a stream in a call that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from coordinator.core import SessionSetup
from coordinator.workers.multiplexer import Multiplexer
from specd.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc


class SessionCalls:
    """Opens the calls for the streams of sessions."""

    def __init__(self, method: Callable[[grpc.aio.Channel], Any], parse: Callable[[bytes], Any]) -> None:
        """`method` returns the worker's method on a channel, and `parse` reads its responses."""
        self._method = method
        self._parse = parse
        self._shared: Multiplexer | None = None

    def open(self, channel: grpc.aio.Channel, setup: SessionSetup, *, multiplexes: bool = False) -> Any:
        """Open a session's call, in one with others if the worker `multiplexes` and the session's messages are short.

        A long message would hold up the others.
        """
        if not (multiplexes and setup.has_short_messages):
            return self._method(channel)(metadata=(("specd-session-id", setup.session_id),))
        if self._shared is None or self._shared.has_ended or self._shared.channel is not channel:
            self._shared = Multiplexer(channel, self._parse)
        return self._shared.open(setup.session_id)


def propose_calls() -> SessionCalls:
    """Return the calls to a draft worker."""
    return SessionCalls(
        lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose, draft_pb2.ProposeResponse.FromString
    )


def verify_calls() -> SessionCalls:
    """Return the calls to a target worker."""
    return SessionCalls(
        lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify, target_pb2.VerifyResponse.FromString
    )
