"""Arguments of a call, as expressions of a grammar, in all the ways in which models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.calls.parameters import Parameters, Schema, properties_of, required_of, unkept
from gateway.calls.syntax import Braces, Keywords, Tags
from specd.lark import LarkGrammar, choice

_KEY_IN_TAGS = re.compile(r"[^\s<>\"'=]+")
_KEY_IN_BRACES = re.compile(r"[\w-]+")
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties")
_CLOSABLE = {"type", "properties", "required", "$defs", "definitions"}
_OF_STRINGS = ("type", "enum", "const", "minLength", "maxLength", "pattern")
_OF_NUMBERS = ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_ARRAYS = ("type", "items", "minItems", "maxItems")
_OF_UNIONS = ("anyOf", "oneOf")
_STRING = frozenset({"string"})
_ANY = frozenset({"string", "number", "boolean", "null"})


class ArgumentWriter:
    """Writes the arguments of one tool.

    If it is `strict`, they keep the schema, and a keyword that cannot be enforced raises ValueError.
    """

    def __init__(self, grammar: LarkGrammar, parameters: Parameters, *, strict: bool) -> None:
        self._grammar = grammar
        self._parameters = parameters
        self._strict = strict

    def expression(self, syntax: Tags | Keywords | Braces | None) -> str:
        """Return the expression of the arguments. Raises ValueError."""
        match syntax:
            case None:
                return self._json({"type": "object", **self._parameters.root, **self._closed()})
            case Tags():
                return self._in_tags(syntax)
            case Keywords():
                return self._listed(
                    (
                        f"{self._grammar.literal(f'{_checked(key, str.isidentifier)}=')} {self._json(schema)}",
                        is_required,
                    )
                    for key, schema, is_required in self._arguments(self._parameters.object)
                )
            case Braces():
                return self._object_in_braces(self._parameters.object, syntax)

    def _closed(self) -> dict[str, Any]:
        """Return what leaves out arguments that the schema does not name: a weak model would invent them for ever."""
        root = self._parameters.root
        return {"additionalProperties": False} if root.keys() <= _CLOSABLE and root.get("properties") else {}

    def _json(self, schema: Schema) -> str:
        return self._grammar.json(self._parameters.whole(schema), lenient=not self._strict)

    def _arguments(self, schema: Mapping[str, Any]) -> list[tuple[str, Schema, bool]]:
        self._check(schema, _OF_OBJECTS)
        properties, required = properties_of(schema), required_of(schema)
        if self._strict and (missing := sorted(required - properties.keys())):
            raise ValueError(f"it requires {missing[0]!r}, which is not among its properties")
        return [(key, each, key in required) for key, each in properties.items()]

    def _check(self, schema: Mapping[str, Any], kept: Iterable[str]) -> None:
        """Raise ValueError for a keyword that must be kept and cannot be."""
        if self._strict and (name := next(unkept(schema, kept), None)) is not None:
            raise ValueError(f"the keyword {name!r} cannot be enforced in this model's form of calls")

    def _in_tags(self, tags: Tags) -> str:
        written: list[str] = []
        for key, schema, is_required in self._arguments(self._parameters.object):
            _checked(key, _KEY_IN_TAGS.fullmatch)
            begin, begin_string = (
                self._line(text.replace("$key", key)) for text in (tags.before, tags.before_string or tags.before)
            )
            kinds = self._parameters.types(schema)
            has_strings = kinds is None or "string" in kinds
            values: list[str] = []
            if has_strings:
                values.append(f"{begin_string} {self._string_in_tags(schema, kinds, tags.after)}")
            if not has_strings or (tags.before_string and kinds != _STRING):
                values.append(f"{begin} {self._json(_without_strings(schema, kinds))} {self._line(tags.after)}")
            written.append(f"{choice(values)}{'' if is_required else '?'}")
        return " ".join(written)

    def _line(self, text: str) -> str:
        """Return the expression of a text with line breaks that may be left out."""
        first, *rest = map(self._grammar.literal, text.split("$line"))
        return " ".join([first, *(f'"\\n"? {each}'.strip() for each in rest)])

    def _string_in_tags(self, schema: Schema, kinds: frozenset[str] | None, after: str) -> str:
        schema = self._parameters.resolved(schema)
        end, line, _ = after.partition("$line")
        behind = ' "\\n"?' if line else ""
        whole = schema if isinstance(schema, Mapping) else {}
        if kinds == _STRING and not any(name in whole for name in _OF_UNIONS):
            self._check(whole, _OF_STRINGS)
            if (texts := _texts(whole)) is not None:
                return f"{choice(map(self._grammar.literal, texts))} {self._grammar.literal(end)}{behind}"
            return f"{self._grammar.text_to(end, *_patterns(whole, strict=self._strict))}{behind}"
        self._check_free(whole)
        return f"{self._grammar.text_to(end)}{behind}"

    def _check_free(self, schema: Mapping[str, Any]) -> None:
        """Raise ValueError if values of several types, of which any text is one, must be kept to more than a type."""
        members, seen = [schema], set()
        while members:
            member = self._parameters.resolved(members.pop())
            if not isinstance(member, Mapping) or id(member) in seen:
                continue
            seen.add(id(member))
            self._check(member, ("type", *_OF_UNIONS))
            members += [each for name in _OF_UNIONS for each in member.get(name, ())]

    def _listed(self, parts: Iterable[tuple[str, bool]], separator: str = ", ") -> str:
        """Return the expression of a list: elements in this order, of which some may be left out."""
        between = self._grammar.literal(separator)
        # The rest of the list from an element on: behind others, and as the first ones; whether it can be empty.
        more, first, can_be_empty = "", "", True
        for expression, is_required in reversed(list(parts)):
            begun = f"{expression} {more}".strip()
            first = begun if is_required or not first else self._grammar.rule(choice([begun, first]))
            more = self._grammar.rule(f"({between} {expression}){'' if is_required else '?'} {more}".strip())
            can_be_empty = can_be_empty and not is_required
        return f"({first})?" if first and can_be_empty else first

    def _object_in_braces(self, schema: Mapping[str, Any], braces: Braces) -> str:
        parts: list[tuple[str, bool]] = []
        for key, each, is_required in self._arguments(schema):
            begun = self._grammar.literal(f"{_checked(key, _KEY_IN_BRACES.fullmatch)}:")
            parts.append((f"{begun} {self._in_braces(each, braces)}", is_required))
        return self._grammar.rule(" ".join(['"{"', self._listed(parts, ","), '"}"']))

    def _in_braces(self, schema: Schema, braces: Braces) -> str:
        """Return the expression of a value, in which objects have bare keys and strings their own marks."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._grammar.named(
                f"{id(self._parameters)} {schema['$ref']}",
                lambda: self._in_braces(self._parameters.resolved(schema), braces),
            )
        whole = schema if isinstance(schema, Mapping) else {}
        for union in _OF_UNIONS:
            if union in whole:
                self._check(whole, (union, "type"))
                return choice(self._in_braces(member, braces) for member in whole[union])
        if "const" in whole or "enum" in whole:
            values = [whole["const"]] if "const" in whole else whole["enum"]
            return choice(self._grammar.literal(_in_marks(value, braces)) for value in values)
        kinds = self._parameters.types(whole) or _ANY
        return choice(self._of_kind(kind, whole, braces) for kind in sorted(kinds))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], braces: Braces) -> str:
        match kind:
            case "string":
                self._check(schema, _OF_STRINGS)
                text = self._grammar.text_to(braces.quote, *_patterns(schema, strict=self._strict))
                return f"{self._grammar.literal(braces.quote)} {text}"
            case "array":
                self._check(schema, _OF_ARRAYS)
                return self._array_in_braces(schema, braces)
            case "object":
                return self._object_in_braces(schema, braces)
            case _:
                self._check(schema, _OF_NUMBERS)
                numeric = {name: value for name, value in schema.items() if name in _OF_NUMBERS}
                return self._json({**numeric, "type": kind})

    def _array_in_braces(self, schema: Mapping[str, Any], braces: Braces) -> str:
        item = self._in_braces(schema.get("items", True), braces)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'


def _without_strings(schema: Schema, kinds: frozenset[str] | None) -> Schema:
    if kinds is None:
        return {"type": sorted(_ANY - {"string"})}
    return {"allOf": [schema], "type": sorted(kinds - {"string"})} if "string" in kinds else schema


def _checked(key: str, fits: Any) -> str:
    if not fits(key):
        raise ValueError(f"the argument {key[:100]!r} cannot be written in this model's form of calls")
    return key


def _texts(schema: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the strings that alone are valid, if these are listed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def _patterns(schema: Mapping[str, Any], *, strict: bool) -> list[str]:
    """Return regular expressions of the strings that are valid; a pattern of the schema counts if it is `strict`."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    patterns = [f"(?s:.){{{least},{most}}}"] if least or most != "" else []
    if strict and (wanted := schema.get("pattern")) is not None:
        begin, end = ("" if wanted.startswith("^") else "(?s:.)*"), ("" if wanted.endswith("$") else "(?s:.)*")
        patterns.append(f"{begin}(?:{wanted.removeprefix('^').removesuffix('$')}){end}")
    return patterns


def _in_marks(value: Any, braces: Braces) -> str:
    match value:
        case str():
            return f"{braces.quote}{value}{braces.quote}"
        case list():
            return f"[{','.join(_in_marks(each, braces) for each in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_in_marks(each, braces)}' for key, each in value.items())}}}"
    return json.dumps(value)
