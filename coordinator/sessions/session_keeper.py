"""The place where kept sessions outlive a coordinator: here none, a file, or a server that coordinators share."""

from __future__ import annotations

from coordinator.sessions.session_store import KeptSession


class SessionKeeper:
    """Keeps sessions in the coordinator's memory alone."""

    async def take(self, session_id: str, client: str) -> None:
        """Bring a client's session into the store, for a turn that no other coordinator then runs on it.

        Raises ConflictError (SESSION_BUSY) while another turn runs on it, and UnavailableError (SESSION_SERVER).
        """

    async def save(self, session: KeptSession) -> None:
        """Keep a session as the turn that ends has left it."""

    def release(self, session_id: str, client: str) -> None:
        """Note that a turn on a client's session has ended without a change."""

    async def refresh(self, client: str, session_id: str | None = None) -> None:
        """Bring all sessions of a client into the store, or one. Raises UnavailableError (SESSION_SERVER)."""

    async def delete(self, session: KeptSession) -> None:
        """Delete a session that its client has deleted."""

    def forget(self, session: KeptSession) -> None:
        """Note that the store has forgotten a session."""

    async def close(self) -> None:
        """Finish all writes."""
