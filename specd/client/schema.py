"""JSON schemas of texts, and the values of texts that keep them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specd.json_text import to_json

# As a dict, as JSON text, or as that of a pydantic class. The order of properties is the order in the text.
Schema = Mapping[str, Any] | str | type[BaseModel]


def schema_text(schema: Schema) -> str:
    """Return a schema as JSON text. Raises ValueError or TypeError for one that JSON does not have."""
    if isinstance(schema, str):
        return schema
    return to_json(dict(schema) if isinstance(schema, Mapping) else schema.model_json_schema())


def value_of(text: str, schema: Schema, reasoning_end: str = "") -> Any:
    """Return the value of a whole text that keeps a schema: an instance, if that is a pydantic class.

    The value begins behind `reasoning_end`, if the model reasoned. Raises ValueError if the class refuses the value.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        if not reasoning_end or reasoning_end not in text:
            raise
        text = text.partition(reasoning_end)[2]
        value = json.loads(text)
    return schema.model_validate_json(text) if isinstance(schema, type) else value
