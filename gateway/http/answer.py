"""What an endpoint answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNREAD = "the model writes calls of tools in no form that is known here, so they are part of the content"


@dataclass(frozen=True)
class Answer:
    """A JSON object, or a stream of events in bytes; and the fields of the request that did nothing.

    `has_unread_calls` where tools were offered to a model whose calls of them are not read. `more_headers` can be set
    until the first event.
    """

    json: Mapping[str, Any] | None = None
    events: AsyncGenerator[bytes] | None = None
    ignored: Sequence[str] = ()
    has_unread_calls: bool = False
    more_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that name what was ignored, and say that calls come as text, and others."""
        # Names come from the client: what no header can carry is left out.
        shown = [name for name in self.ignored if name.isascii() and name.isprintable() and "," not in name][:32]
        ignored = {"x-specd-ignored-fields": ", ".join(name[:64] for name in shown)} if shown else {}
        unread = {"x-specd-unread-tool-calls": _UNREAD} if self.has_unread_calls else {}
        return {**ignored, **unread, **self.more_headers}
