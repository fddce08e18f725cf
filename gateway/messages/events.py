"""The content blocks of a message, and their events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.reply.parts import Kind, Part, Text
from gateway.reply.tool_parsers import ToolCall

Event = dict[str, Any]


class ContentBlocks:
    """The content of a message: thinking, texts and calls of tools, in order."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block
        self._open: Kind | None = None

    def take(self, parts: Sequence[Part]) -> list[Event]:
        """Return the events of new parts of the reply."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, ToolCall):
                events += [*self.close(), *self._call(part)]
            else:
                if self._open is not part.kind:
                    events += [*self.close(), self._begin(part.kind)]
                events.append(self._extend(part))
        return events

    def close(self) -> list[Event]:
        """Return the event that ends the open block, if there is one."""
        if self._open is None:
            return []
        self.content[-1]["text" if self._open is Kind.CONTENT else "thinking"] = "".join(self._texts)
        self._open, self._texts = None, []
        return [self._event("stop")]

    def _begin(self, kind: Kind) -> Event:
        self._open = kind
        # A signature says that Anthropic has written it.
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        self.content.append({"type": "text", "text": ""} if kind is Kind.CONTENT else thinking)
        return self._event("start", content_block=dict(self.content[-1]))

    def _extend(self, part: Text) -> Event:
        self._texts.append(part.text)
        if part.kind is Kind.CONTENT:
            return self._event("delta", delta={"type": "text_delta", "text": part.text})
        return self._event("delta", delta={"type": "thinking_delta", "thinking": part.text})

    def _call(self, call: ToolCall) -> list[Event]:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        self.content.append({**block, "input": json.loads(call.arguments)})
        return [
            self._event("start", content_block=block),
            self._event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}),
            self._event("stop"),
        ]

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"content_block_{name}", "index": len(self.content) - 1, **fields}
