"""The items of a response, and their events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from gateway.reply.parts import Kind, Part, Text
from gateway.reply.tool_parsers import ToolCall

Event = dict[str, Any]


class Items:
    """The output of a response: reasoning, messages and function calls, in order."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: Kind | None = None

    def take(self, parts: Sequence[Part]) -> list[Event]:
        """Return the events of new parts of the reply."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, ToolCall):
                events += [*self.close(), *self._call(part)]
            else:
                if self._open is not part.kind:
                    events += [*self.close(), *self._begin(part.kind)]
                events.append(self._extend(part))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return []
        item, at, kind = self.output[-1], self._place(), self._open
        self._open = None
        item["status"] = status
        content = item["content"][0]
        done = self._text_event("done", kind, text=content["text"])
        part = {"type": "response.content_part.done", **at, "content_index": 0, "part": content}
        return [done, part, self._event("response.output_item.done")]

    def _begin(self, kind: Kind) -> list[Event]:
        self._open = kind
        if kind is Kind.CONTENT:
            item = {"type": "message", "id": _new_id("msg"), "status": "in_progress", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            item = {"type": "reasoning", "id": _new_id("rs"), "status": "in_progress", "summary": []}  # type: ignore[dict-item]
            part = {"type": "reasoning_text", "text": ""}
        self.output.append({**item, "content": []})
        added = self._event("response.output_item.added")
        self.output[-1]["content"] = [part]
        return [added, {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(part)}]

    def _extend(self, part: Text) -> Event:
        self.output[-1]["content"][0]["text"] += part.text
        return self._text_event("delta", part.kind, delta=part.text)

    def _text_event(self, name: str, kind: Kind, **text: str) -> Event:
        of = "output_text" if kind is Kind.CONTENT else "reasoning_text"
        event = {"type": f"response.{of}.{name}", **self._place(), "content_index": 0, **text}
        return {**event, "logprobs": []} if kind is Kind.CONTENT else event

    def _call(self, call: ToolCall) -> list[Event]:
        item = {
            "type": "function_call",
            "id": _new_id("fc"),
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.output.append(item)
        added = self._event("response.output_item.added")
        item |= {"arguments": call.arguments, "status": "completed"}
        at, name = self._place(), "response.function_call_arguments"
        delta = {"type": f"{name}.delta", **at, "delta": call.arguments}
        done = {"type": f"{name}.done", **at, "name": call.name, "arguments": call.arguments}
        return [added, delta, done, self._event("response.output_item.done")]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.output) - 1, "item": dict(self.output[-1])}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
