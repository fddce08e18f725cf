"""The columns of docs/models.md about the replies of a family, from the gateway's tables."""

from __future__ import annotations

from gateway.reply.forms import CHANNELS, REASONING, TOOLS

HEADER = ("reasoning", "tool calls")


def columns_of(family: str) -> tuple[str, str]:
    """Return in which forms the reasoning and the tool calls of a family's models are read."""
    channels = [form.name for form in CHANNELS if family in form.families]
    reasoning = [_code(form.markers.start) for form in REASONING if family in form.families]
    tools = [form.name for form in TOOLS if family in form.families]
    return ", ".join(channels + reasoning) or "-", ", ".join(channels + [_coded(name) for name in tools]) or "-"


def forms_of_no_family() -> tuple[list[str], list[str]]:
    """Return the forms of reasoning and of tool calls that no family has, but models of several ones."""
    reasoning = [f"`{form.markers.start}`" for form in REASONING if not form.families]
    return reasoning, [form.name for form in TOOLS if not form.families and form.load() is not None]


def _code(text: str) -> str:
    # A pipe ends a cell of a table, in code too.
    return f"`{text.replace('|', chr(92) + '|')}`"


def _coded(name: str) -> str:
    """Return a name with its markers as code."""
    words, marker, rest = name.partition("<")
    return f"{words}{_code(marker + rest)}" if marker else name
