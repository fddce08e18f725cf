"""The grammar of a reply, if its calls or its answer must have a form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gateway.calls.arguments import ArgumentWriter
from gateway.calls.parameters import Parameters
from gateway.calls.syntax import CallSyntax, ReplySyntax
from gateway.calls.tool_choice import ToolChoice
from gateway.http.errors import invalid
from specd.client import Grammar
from specd.lark import LarkGrammar, choice, without

_T = TypeVar("_T")

_NAME = re.compile(r"[\w.:/-]+")
_PARTS = re.compile(r"\$(name|arguments|number|line)")
# Errors that reading an invalid schema can raise.
_NO_SCHEMA = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


def can_be_kept(syntax: ReplySyntax, tools: ToolChoice, *, has_answer: bool = False) -> bool:
    """Return whether a grammar can hold the calls of a reply; `has_answer` if a reply without calls has a form."""
    return bool(syntax.calls) and (tools.must_call or has_answer or bool(syntax.trigger))


def grammar_of(
    syntax: ReplySyntax, tools: ToolChoice, special_tokens: Mapping[int, str], answer: Grammar | None = None
) -> Grammar:
    """Return the grammar of a reply: calls if one must be made, else calls or an answer in this form, else any text.

    Raises ApiError if that cannot be enforced.
    """
    return Grammar.lark(_ReplyWriter(syntax, tools, LarkGrammar(special_tokens)).written(answer))


class _ReplyWriter:
    def __init__(self, syntax: ReplySyntax, tools: ToolChoice, grammar: LarkGrammar) -> None:
        self._syntax = syntax
        self._tools = tools
        self._grammar = grammar
        self._parameters = [self._read(i, tool["function"]) for i, tool in enumerate(tools.tools)]

    def written(self, answer: Grammar | None) -> str:
        if answer is None and not self._tools.must_call:
            return self._grammar.written(self._text_with_calls())
        alternatives = [self._calls(syntax) for syntax in self._syntax.calls if self._tools.tools]
        if not self._tools.must_call:
            assert answer is not None
            alternatives.append(f"{self._grammar.literal(self._syntax.answer)} {self._form(answer)}")
        whole = choice(alternatives)
        if self._syntax.thought is None:
            return self._grammar.written(whole)
        begin, end = self._syntax.thought
        thought = self._grammar.rule(f"{self._grammar.literal(begin)} {self._grammar.text_to(end)}")
        return self._grammar.written(f"{thought}* {whole}")

    def _text_with_calls(self) -> str:
        """Return the expression of any text, in which all that begins like a call is one."""
        trigger = self._syntax.trigger
        calls = choice(self._calls(syntax, after=trigger) for syntax in self._syntax.calls)
        others = self._grammar.any_special(but=trigger)
        if self._grammar.is_special(trigger):
            text = self._grammar.rule("/(?s:.)+/", prefix="T")
            begun = f"{text}? {self._grammar.literal(trigger)}"
        else:
            text = self._grammar.rule(f"/(?s:.)+/ & {without(trigger)}", prefix="T")
            begun = self._grammar.text_to(trigger)
        before = f"({text}? {others})*" if others else ""
        said = self._grammar.rule(f"{before} {begun} {calls}".strip())
        rest = f"{before} {text}?".strip()
        is_repeated = self._tools.has_parallel_calls and not self._syntax.last
        return f"{said}* {rest}" if is_repeated else f"({said} | {rest})"

    def _calls(self, syntax: CallSyntax, *, after: str = "") -> str:
        """Return the expression of calls in a syntax, without the text `after` at its beginning."""
        start = syntax.start.removeprefix(after)
        first = self._one(syntax, after="" if syntax.start else after)
        parts = [self._grammar.literal(start), first]
        if self._tools.has_parallel_calls and syntax.between is not None and (syntax.start or not after):
            parts.append(f"({self._text(syntax.between)} {self._one(syntax)})*")
        return self._grammar.rule(" ".join(filter(None, [*parts, self._grammar.literal(syntax.end)])))

    def _one(self, syntax: CallSyntax, *, after: str = "") -> str:
        return choice(self._call(syntax, i, tool["function"], after) for i, tool in enumerate(self._tools.tools))

    def _call(self, syntax: CallSyntax, index: int, function: Mapping[str, Any], after: str) -> str:
        writer = ArgumentWriter(self._grammar, self._parameters[index], strict=bool(function.get("strict")))
        arguments = self._kept(index, lambda: writer.expression(syntax.arguments))
        text = syntax.call.removeprefix(after).replace("$name", function["name"])
        return self._grammar.rule(self._text(text, arguments))

    def _text(self, text: str, arguments: str = "") -> str:
        """Return the expression of a text with its parts."""
        pieces = _PARTS.split(text)
        parts = {"arguments": arguments, "number": "/[0-9]{1,3}/", "line": '"\\n"?'}
        return " ".join(
            filter(None, (parts[piece] if i % 2 else self._grammar.literal(piece) for i, piece in enumerate(pieces)))
        )

    def _form(self, answer: Grammar) -> str:
        try:
            return self._grammar.form(answer)
        except (ValueError, RecursionError) as error:
            raise invalid(f"the form of the answer cannot be read: {error}") from error

    def _read(self, index: int, function: Mapping[str, Any]) -> Parameters:
        if not _NAME.fullmatch(function["name"]):
            place = self._tools.name_place(index)
            shown = function["name"][:100]
            raise invalid(
                f"{place} is {shown!r}: a call can be enforced of letters, digits and any of _.:/- only", place
            )
        return self._kept(index, lambda: Parameters(function.get("parameters")))

    def _kept(self, index: int, make: Callable[[], _T]) -> _T:
        """Return something of the schema of a tool. Raises ApiError if that is not a schema, or cannot be enforced."""
        place = self._tools.parameters_place(index)
        try:
            return make()
        except _NO_SCHEMA as error:
            why = str(error) if isinstance(error, ValueError) else "it is not a JSON schema"
            raise invalid(f"{place}: {why}", place) from error
