"""Replies of messages with headers, which name a channel or a recipient: harmony of gpt-oss, and Muse's ATEM.

Harmony: `<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>`, and a
call is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`
(https://github.com/openai/harmony/blob/main/docs/format.md). OpenAI's own reader, openai-harmony, reads the token ids
of one vocabulary, which it downloads. The gateway has no token ids, and the form is small.

ATEM: ` to=self<|message|>Why?<|eom|><|start|>assistant to=user<|message|>So.<|eot|>`; a call has its own markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from gateway.reply.cutter import CallBody, Cutter
from gateway.reply.parts import BrokenCall, Found, Kind, Text
from gateway.reply.sections import Parse
from gateway.reply.tool_parsers import JSON_STRINGS, ToolCall, tool_call

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CALL_ENDS = ("<|call|>", "<|end|>", "<|return|>", "<|eom|>", "<|eot|>", _START)
_TEXT_ENDS = (*_CALL_ENDS, _CHANNEL)
_MARKERS = {_MESSAGE, "<|constrain|>", *_TEXT_ENDS}
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_AUTHOR = re.compile(r"^\s*(<\|start\|>)?\s*(assistant\b)?\s*")
_TO_ITSELF = "self"
# The readers of messages that are not calls.
_READERS = {"assistant", "user", "all", _TO_ITSELF}


class HarmonyReader:
    """Separates the messages of a reply while its text comes."""

    def __init__(self, tool_names: Collection[str], parse: Parse | None, prompt_end: str) -> None:
        """Read the reply to a prompt with this end. Without tool names, calls are text; without `parse`, JSON."""
        self._names = tool_names
        self._parse = parse
        self._cutter = Cutter()
        self._body: CallBody | None = None
        self._trusts_strings = True
        self._header: list[str] | None = []
        self.kind = Kind.CONTENT
        start, message = prompt_end.rfind(_START), prompt_end.rfind(_MESSAGE)
        if prompt_end and message >= start:  # the prompt has begun a message, which may be longer than its shown end
            self._begin_message(prompt_end[max(start, 0) : max(message, 0)])

    def means(self, special: str) -> bool:
        """Return whether a special token, which texts leave out, is part of the form."""
        return special in _MARKERS

    def read(self, text: str) -> list[Found]:
        """Return the parts that this text completes."""
        self._cutter.add(text)
        return self._advance()

    def finish(self, *, is_cut: bool) -> list[Found]:
        """Return the held parts, at the end of the reply; `is_cut` if the model was not done."""
        rest = self._cutter.rest()
        if self._body is not None:
            self._body.add(rest)
            if is_cut and self._body.first_end is None:
                return [BrokenCall(self._body.text, self._body.raw, is_cut=True)]
            # A call that ended earlier leaves a rest.
            return [*self._end_call(), *self._advance(), *self.finish(is_cut=is_cut)]
        if self._header is None:
            return self._say(rest)
        header = "".join((*self._header, rest))
        is_header = is_cut or "<|" in header or _RECIPIENT.search(header)
        self.kind = Kind.CONTENT
        return [] if is_header else self._say(header)  # a reply without any message

    def _advance(self) -> list[Found]:
        parts: list[Found] = []
        while True:
            if self._body is not None:
                if not self._body.read(self._cutter):
                    return parts
                parts += self._end_call()
            elif self._header is not None:
                text, marker = self._cutter.cut((_MESSAGE,))
                self._header.append(text)
                if not marker:
                    return parts
                parts += self._begin_message("".join(self._header))
            else:
                text, marker = self._cutter.cut(_TEXT_ENDS)
                parts += self._say(text)
                if not marker:
                    return parts
                self._header = [marker] if marker == _CHANNEL else []

    def _begin_message(self, header: str) -> list[Found]:
        self._header = None
        channels, recipients = _CHANNEL_NAME.findall(header), _RECIPIENT.findall(header)
        is_call = bool(recipients) and recipients[-1] not in _READERS
        is_reasoning = recipients[-1:] == [_TO_ITSELF] or (channels[-1:] == ["analysis"] and not is_call)
        self.kind = Kind.REASONING if is_reasoning else Kind.CONTENT
        if not is_call:
            return []
        begun = f"{_AUTHOR.sub('', header)}{_MESSAGE}"
        if not self._names:
            return self._say(begun)
        self._body = CallBody(begun, _CALL_ENDS, JSON_STRINGS if self._trusts_strings else {})
        return []

    def _say(self, text: str) -> list[Found]:
        return [Text(self.kind, text)] if text else []

    def _end_call(self) -> list[Found]:
        body, self._body = self._body, None
        assert body is not None
        self._header, self.kind = [], Kind.CONTENT
        try:
            return [*self._calls(body.begun, body.text)]
        except (ValueError, RecursionError):
            if body.first_end is None:
                return [BrokenCall(body.text, body.raw)]
        # A string did not close, so the first end marker was the real one.
        before, behind = body.first_end
        self._trusts_strings = False  # at most one more pass, so that time is linear
        self._cutter.put_back(f"{body.text[behind:]}{body.ended}")
        return [BrokenCall(body.text[:before], f"{body.begun}{body.text[:behind]}")]

    def _calls(self, header: str, text: str) -> list[ToolCall]:
        if self._parse is not None:
            return self._parse(text)
        recipient = _RECIPIENT.findall(header)[-1]
        name = recipient.removeprefix("functions.")
        if name == recipient and name not in self._names:
            raise ValueError(f"{name!r} is not one of the client's functions")
        arguments = json.loads(text)  # checks that it is JSON; the client gets the model's own text
        return [tool_call({"name": name, "arguments": text.strip() if isinstance(arguments, dict) else arguments})]
