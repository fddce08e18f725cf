"""The JSON schema of a tool's parameters, as far as a grammar of calls looks into it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool

# Keywords without an effect on what is valid.
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
_DEFINITIONS = ("$defs", "definitions")
_SHOWN = _ANNOTATIONS - {"$id", *_DEFINITIONS}  # what models read, and grammars need not
# Keywords with a schema for each name, and those with values.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", *_DEFINITIONS}
_VALUES = {"enum", "const", "required", "dependentRequired"}
_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
    (type(None), "null"),
)
_MOST_REFERENCES = 32


def without_annotations(schema: Any) -> Any:
    """Return a schema without what it only says to people and models."""
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value
        if name in _VALUES
        else {key: without_annotations(each) for key, each in value.items()}
        if name in _BY_NAME and isinstance(value, Mapping)
        else without_annotations(value)
        for name, value in schema.items()
        if name not in _SHOWN
    }


def type_of(value: Any) -> str:
    """Return the JSON type of a value; a whole number is an integer."""
    return next(name for kinds, name in _TYPES if isinstance(value, kinds))


class Parameters:
    """The parameters of a function: an object with properties."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self.root: Mapping[str, Any] = without_annotations(schema or {})
        self._types: dict[int, frozenset[str] | None] = {}  # by the identity of the schema, which `root` keeps

    def resolved(self, schema: Any) -> Any:
        """Return the schema, or the one that it refers to. Raises ValueError for a reference that leads nowhere."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            found: Any = self.root
            reference = str(schema["$ref"])
            for part in reference.removeprefix("#").split("/")[1:]:
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            if not reference.startswith("#") or found is None:
                raise ValueError(f"there is no {reference[:100]!r} in the schema")
            schema = found
        raise ValueError("its references lead to each other")

    @property
    def object(self) -> Mapping[str, Any]:
        """The schema of the object itself. Raises ValueError."""
        found = self.resolved(self.root)
        return found if isinstance(found, Mapping) else {}

    @property
    def properties(self) -> Mapping[str, Schema]:
        """The schemas of the arguments by their names. Raises ValueError."""
        return properties_of(self.object)

    def whole(self, schema: Schema) -> Schema:
        """Return the schema of an argument as one that stands alone."""
        if not isinstance(schema, Mapping):
            return schema
        return {**{name: self.root[name] for name in _DEFINITIONS if name in self.root}, **schema}

    def types(self, schema: Any) -> frozenset[str] | None:
        """Return the types of the values that can be valid; None for any. Raises ValueError."""
        schema = self.resolved(schema)
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._types:
            self._types[id(schema)] = None  # within itself
            self._types[id(schema)] = self._types_of(schema)
        return self._types[id(schema)]

    def _types_of(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        if (kinds := schema.get("type")) is not None:
            return frozenset({kinds} if isinstance(kinds, str) else map(str, kinds))
        if "const" in schema or "enum" in schema:
            return frozenset(map(type_of, [schema["const"]] if "const" in schema else schema["enum"]))
        members = next((schema[name] for name in ("anyOf", "oneOf") if name in schema), None)
        if members is None:
            return None
        each = [self.types(member) for member in members]
        return None if None in each else frozenset().union(*filter(None, each))

    def fitted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with the types of the schema.

        A parser of texts without quotes guesses them: `12` for a string is the number. Raises ValueError.
        """
        properties = self.properties
        return {name: self._fitted(value, properties.get(name, True)) for name, value in arguments.items()}

    def _fitted(self, value: Any, schema: Schema) -> Any:
        kinds = self.types(schema)
        kind = type_of(value)
        if kinds is None or kind in kinds or (kind == "integer" and "number" in kinds):
            return value
        if "string" in kinds:
            return json.dumps(value, ensure_ascii=False)
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return value


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Schema]:
    """Return the schemas of an object's properties by their names."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the properties that an object must have."""
    found = schema.get("required")
    return frozenset(filter(lambda name: isinstance(name, str), found)) if isinstance(found, list) else frozenset()


def unkept(schema: Mapping[str, Any], kept: Iterable[str]) -> Iterator[str]:
    """Yield the keywords of a schema that are not among those."""
    known = {*kept, *_ANNOTATIONS}
    yield from (name for name in schema if name not in known)
