"""What an endpoint answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A JSON object, or a stream of events in bytes; and the fields of the request that did nothing."""

    json: Mapping[str, Any] | None = None
    events: AsyncGenerator[bytes] | None = None
    ignored: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """The header that names what was ignored."""
        # Names come from the client: what no header can carry is left out.
        shown = [name for name in self.ignored if name.isascii() and name.isprintable() and "," not in name][:32]
        return {"x-specd-ignored-fields": ", ".join(name[:64] for name in shown)} if shown else {}
