"""The form of a model's reasoning and tool calls, from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.calls.syntax import OBJECT_IN_TAGS, UNKNOWN, ReplySyntax
from gateway.reply.forms import CHANNELS, REASONING, TOOLS, WRAPPERS, ChannelForm, Markers
from gateway.reply.own_parsers import parse_json
from gateway.reply.tool_parsers import JSON_STRINGS, ToolParser


@dataclass(frozen=True)
class ReplyFormat:
    """The form of a model's replies; None for a part that it does not have, or has in an unknown form.

    `dropped` are markers without a meaning. The content can stand in a `wrapper`. `syntax` is as far as it is known.
    """

    reasoning: Markers | None = None
    tools: ToolParser | None = None
    dropped: tuple[str, ...] = ()
    wrapper: Markers | None = None
    channels: ChannelForm | None = None
    syntax: ReplySyntax = UNKNOWN

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools are read."""
        return self.tools is not None or self.channels is not None

    @property
    def before_answer(self) -> tuple[str, str] | None:
        """The markers of the part before the answer; with channels, there always is one."""
        if self.channels is not None:
            return "", self.channels.answer_start
        return (self.reasoning.start, self.reasoning.end) if self.reasoning is not None else None

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has begun the reasoning already, as with some templates."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning.start)


def detect_format(chat_template: str, special_tokens: Mapping[int, str]) -> ReplyFormat:
    """Return the form of the replies of the model with this template and these special tokens."""
    tokens = set(special_tokens.values())

    def shows(texts: tuple[str, ...]) -> bool:
        return all(text in chat_template for text in texts)

    def has(needed: tuple[str, ...]) -> bool:
        return bool(needed) and tokens.issuperset(needed)

    channels = next((form for form in CHANNELS if shows(form.texts)), None)
    if channels is not None:
        return ReplyFormat(channels=channels, syntax=channels.reply)
    reasoning = next(
        (
            form
            for form in REASONING
            if (form.text or form.markers.end) in chat_template
            or has(form.tokens)
            or has((form.markers.start, form.markers.end))
        ),
        None,
    )
    tools = next(
        (form for form in TOOLS if any(map(shows, form.texts))),
        next((form for form in TOOLS if has(form.tokens)), None),
    )
    parser = tools.load() if tools else None
    syntax = UNKNOWN
    if tools is not None and parser is not None:
        syntax = ReplySyntax(tools.calls, "" if parser.bare else parser.start, last=not parser.end)
    return ReplyFormat(
        reasoning.markers if reasoning else None,
        parser,
        reasoning.dropped if reasoning else (),
        next((wrapper for text, wrapper in WRAPPERS.items() if reasoning and text in chat_template), None),
        syntax=syntax,
    )


def with_calls(reply_format: ReplyFormat) -> ReplyFormat:
    """Return a form with calls: where none is known, or none that can be written, they are JSON in <tool_call>."""
    if reply_format.syntax.calls or reply_format.channels is not None:
        return reply_format
    parser = ToolParser("<tool_call>", "</tool_call>", parse_json, JSON_STRINGS)
    return replace(reply_format, tools=parser, syntax=ReplySyntax((OBJECT_IN_TAGS,), parser.start))
