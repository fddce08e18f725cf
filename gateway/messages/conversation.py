"""The conversation of a request: its messages and their blocks, from Anthropic's form to that of chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.chat.messages import Contents, text_of
from gateway.fields import Array, JsonObject, StrictModel
from gateway.http.errors import ApiError, invalid

_MAX_BLOCKS = 4096
# Claude Code's first block of the system prompt. Its hash changes with each request, so no cached prefix would match.
_BILLING = "x-anthropic-billing-header:"

_GAP = "\n\n"  # between texts that are not one reply

TemplateMessage = dict[str, Any]


class Block(StrictModel):
    """A part of a message: text, thinking, a call of a tool, or its result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: Contents | None = None
    is_error: bool | None = Field(None, description="No effect: the content says it.")


class InputMessage(StrictModel):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Array[Block], Field(max_length=_MAX_BLOCKS)]


def template_messages(system: Contents | None, turns: Sequence[InputMessage]) -> list[TemplateMessage]:
    """Return the messages as templates read them. Raises ApiError for blocks that the model cannot read.

    Messages of one role that follow one another become one message, as at Anthropic. A later system message is one of
    the user's, because many templates accept it at the beginning only.
    """
    text = _system_text(system)
    said: list[TemplateMessage] = [{"role": "system", "content": text}] if text else []
    is_beginning = True
    for i, turn in enumerate(turns):
        place = f"messages[{i}].content"
        is_beginning = is_beginning and turn.role == "system"
        if turn.role == "assistant":
            said.append(_assistants(turn, place))
        else:
            said += ({**each, "role": "system"} if is_beginning else each for each in _users(turn, place))
    # The result of each call is a message of its own.
    groups = groupby(enumerate(said), lambda each: (each[1]["role"], each[0] if each[1]["role"] == "tool" else 0))
    return [_joined([message for _, message in group]) for _, group in groups]


def check_prefill(turns: Sequence[InputMessage]) -> bool:
    """Return whether the last message is the beginning of the reply. Raises ApiError if it cannot be continued."""
    last = turns[-1]
    if last.role != "assistant":
        return False
    place = f"messages[{len(turns) - 1}].content"
    blocks = _blocks(last)
    if any(block.type == "tool_use" for block in blocks):
        raise invalid(f"{place} has a tool_use, and nothing follows it: send its tool_result", place)
    if not any(block.text for block in blocks):
        raise invalid(f"{place} has no text to continue: leave the last message out, or send its text", place)
    return True


def _system_text(system: Contents | None) -> str:
    """Return the text of the system prompt. Raises ApiError for blocks of another type."""
    whole = text_of(system, "system")
    if system is None or isinstance(system, str):
        return whole
    texts = [part.text or "" for part in system]
    return _GAP.join(text for text in texts if text and not text.startswith(_BILLING))


def _users(turn: InputMessage, place: str) -> Iterator[TemplateMessage]:
    """Yield the messages of a user: results of tools, and the texts between them."""
    texts: list[str] = []
    for block, at in _placed(turn, place):
        if block.type == "tool_result" and turn.role == "user":
            if texts:
                yield {"role": "user", "content": _GAP.join(texts)}
                texts = []
            call_id = _given(block.tool_use_id, f"{at}.tool_use_id")
            yield {"role": "tool", "content": text_of(block.content, f"{at}.content"), "tool_call_id": call_id}
        elif block.type == "text":
            texts.append(_given(block.text, f"{at}.text"))
        else:
            raise _unreadable(block, at, turn.role)
    if texts or not turn.content:
        yield {"role": "user", "content": _GAP.join(texts)}


def _assistants(turn: InputMessage, place: str) -> TemplateMessage:
    """Return the message of an assistant: its text, its reasoning, and its calls of tools."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, at in _placed(turn, place):
        match block.type:
            case "text":
                texts.append(_given(block.text, f"{at}.text"))
            case "thinking":
                thoughts.append(_given(block.thinking, f"{at}.thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": _given(block.name, f"{at}.name"), "arguments": block.input or {}}
                calls.append({"id": _given(block.id, f"{at}.id"), "type": "function", "function": function})
            case _:
                raise _unreadable(block, at, turn.role)
    message: TemplateMessage = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined(messages: Sequence[TemplateMessage]) -> TemplateMessage:
    """Return messages of one role as one."""
    whole = dict(messages[0])
    if len(messages) == 1:
        return whole
    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in messages if each.get(name)]:
            whole[name] = _GAP.join(texts)
    if calls := [call for each in messages for call in each.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def _blocks(turn: InputMessage) -> Sequence[Block]:
    return [Block(type="text", text=turn.content, is_error=None)] if isinstance(turn.content, str) else turn.content


def _placed(turn: InputMessage, place: str) -> Iterable[tuple[Block, str]]:
    return ((block, f"{place}[{i}]") for i, block in enumerate(_blocks(turn)))


def _given(value: str | None, place: str) -> str:
    if value is None:
        raise invalid(f"{place} is missing", place, "missing_required_parameter")
    return value


def _unreadable(block: Block, place: str, role: str) -> ApiError:
    return invalid(
        f"{place} is of type {block.type[:100]!r}, which cannot be read here in a message with the role {role!r}",
        place,
        "unsupported_content",
    )
