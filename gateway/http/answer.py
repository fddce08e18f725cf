"""Answers of endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.http.notice import Notice

_UNREAD = "the model writes tool calls in an unknown form, so they are part of the content"


@dataclass(frozen=True)
class Answer:
    """A JSON object, or a stream of events in bytes, and the ignored fields of the request.

    `has_unread_calls` is true if the request has tools, but the model's calls are not read. `more_headers` can be set
    until the first event. The stream repeats the `notice` in comments while it has no event.
    """

    json: Mapping[str, Any] | None = None
    events: AsyncGenerator[bytes] | None = None
    ignored: Sequence[str] = ()
    has_unread_calls: bool = False
    more_headers: Mapping[str, str] = field(default_factory=dict)
    notice: Notice = field(default_factory=Notice)

    @property
    def headers(self) -> dict[str, str]:
        """The headers with the ignored fields, with a note about unread calls, and others."""
        # Names come from the client, so names that a header cannot carry are left out.
        shown = [name[:64].rstrip() for name in self.ignored if _can_be_shown(name)][:32]
        ignored = {"x-specd-ignored-fields": ", ".join(shown)} if shown else {}
        unread = {"x-specd-unread-tool-calls": _UNREAD} if self.has_unread_calls else {}
        return {**ignored, **unread, **self.more_headers}


def _can_be_shown(name: str) -> bool:
    """Return whether a list in a header can have this name; the value of a header has no spaces at its ends."""
    return name != "" and name == name.strip() and name.isascii() and name.isprintable() and "," not in name
