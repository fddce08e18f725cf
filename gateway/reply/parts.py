"""The parts of a reply: text of the content, text of the reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.reply.tool_parsers import ToolCall


class Kind(Enum):
    """The part of the reply to which a text belongs."""

    CONTENT = "content"
    REASONING = "reasoning_content"


@dataclass(frozen=True)
class Text:
    """A piece of the content, or of the reasoning."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class BrokenCall:
    """A text behind the marker of a call that is not a valid call: `body` without its markers, `raw` with them.

    `is_cut` is whether the reply ended before the call did.
    """

    body: str
    raw: str
    is_cut: bool = False


Part = Text | ToolCall
Found = Part | BrokenCall


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind as one."""
    texts: list[list[str]] = []  # the pieces of each part that is text
    kept: list[Part] = []
    for part in parts:
        last = kept[-1] if kept else None
        if isinstance(part, Text) and isinstance(last, Text) and part.kind is last.kind:
            texts[-1].append(part.text)
        else:
            kept.append(part)
            texts.append([part.text] if isinstance(part, Text) else [])
    return [
        Text(part.kind, "".join(pieces)) if isinstance(part, Text) else part
        for part, pieces in zip(kept, texts, strict=True)
    ]
