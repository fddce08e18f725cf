"""Forms of texts that requests ask for: OpenAI's fields and vLLM's, as grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from gateway.fields import Array, JsonObject, SamplingFields, StrictModel, refuse_field
from gateway.http.errors import ApiError, invalid
from specd.client import Grammar
from specd.client.schema import schema_text

_MAX_CHOICES = 4096

# A JSON schema, as an object or as JSON text.
Schema = str | JsonObject
Choices = Annotated[Array[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MAX_CHOICES)]


class Form(StrictModel):
    """A part of a request that asks for a form. What is not known of it could change the text, so it is refused."""

    def check_known(self, place: str) -> None:
        """Raise ApiError for a field that is not known."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value is not False:
                raise refuse_field(f"{place}.{name[:100]}", "not supported: leave it out")


class NamedSchema(Form):
    """A JSON schema with its name. It is enforced with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    def schema_grammar(self, place: str) -> Grammar:
        """Return the grammar of the schema. Raises ApiError if the schema is missing."""
        self.check_known(place)
        if self.schema_ is None:
            raise _missing(f"{place}.schema")
        return _grammar_of(self.schema_)


class ResponseFormat(Form):
    """The form of the reply in chat completions and completions: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: NamedSchema | None = None

    def grammar(self, place: str) -> Grammar | None:
        """Return the grammar of the form, None of text. Raises ApiError."""
        if self.type != "json_schema":
            return _grammar_without_schema(self, self.type, place, has_schema=self.json_schema is not None)
        self.check_known(place)
        place = f"{place}.json_schema"
        if self.json_schema is None:
            raise _missing(place)
        return self.json_schema.schema_grammar(place)


class TextFormat(NamedSchema):
    """The form of the text of a response: `text`, `json_object`, or `json_schema` with its schema beside the type."""

    type: str = "text"

    def grammar(self, place: str) -> Grammar | None:
        """Return the grammar of the form, None of text. Raises ApiError."""
        if self.type != "json_schema":
            return _grammar_without_schema(self, self.type, place, has_schema=self.schema_ is not None)
        return self.schema_grammar(place)


class StructuredOutputs(Form):
    """One form, as vLLM names them."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = Field(None, description="In llguidance's dialect of Lark.")
    choice: Choices | None = None


class GrammarFields(SamplingFields):
    """The fields of all endpoints, with vLLM's for the form of a text."""

    guided_json: Schema | None = Field(None, description="A JSON schema.")
    guided_regex: str | None = Field(None, description="A regular expression of Rust that matches the whole text.")
    guided_grammar: str | None = Field(None, description="In llguidance's dialect of Lark.")
    guided_choice: Choices | None = Field(None, description="The texts to choose from.")
    structured_outputs: StructuredOutputs | None = Field(None, description="One of them, by vLLM's newer names.")

    def grammar_options(self, name: str, form: ResponseFormat | TextFormat | None) -> dict[str, Any]:
        """Return the options of a generation in the form that the fields ask for; `name` is the field with `form`.

        Raises ApiError for two forms.
        """
        grammar = form.grammar(name) if form is not None else None
        asked = {name: grammar} if grammar is not None else {}
        asked |= _asked("guided_", self.guided_json, self.guided_regex, self.guided_grammar, self.guided_choice)
        if (outputs := self.structured_outputs) is not None:
            outputs.check_known("structured_outputs")
            asked |= _asked("structured_outputs.", outputs.json_, outputs.regex, outputs.grammar, outputs.choice)
            if outputs.json_object:
                asked["structured_outputs.json_object"] = Grammar.json_object()
        if not asked:
            return {}
        first, *others = asked
        if others:
            raise invalid(f"{first} and {others[0]} are two forms of one text: leave one out", others[0])
        return {"grammar": asked[first], "grammar_field": first}


def _asked(
    prefix: str, schema: Schema | None, regex: str | None, lark: str | None, choice: Sequence[str] | None
) -> dict[str, Grammar]:
    """Return the grammars that are asked for, by the names of their fields."""
    asked: dict[str, Grammar] = {}
    if schema is not None:
        asked[f"{prefix}json"] = _grammar_of(schema)
    if regex is not None:
        asked[f"{prefix}regex"] = Grammar.regex(regex)
    if lark is not None:
        asked[f"{prefix}grammar"] = Grammar.lark(lark)
    if choice is not None:
        asked[f"{prefix}choice"] = Grammar.choice(choice)
    return asked


def _grammar_of(schema: Schema) -> Grammar:
    # The keys keep the client's order, in which the model writes the properties.
    return Grammar.json_schema(schema_text(schema))


def _grammar_without_schema(form: Form, kind: str, place: str, *, has_schema: bool) -> Grammar | None:
    if kind == "text":
        return None
    if kind != "json_object":
        raise refuse_field(place, f"{kind[:100]!r} is not known: send 'text', 'json_object' or 'json_schema'")
    form.check_known(place)
    if has_schema:
        raise invalid(f"{place} is of type 'json_object' and has a schema: send the type 'json_schema'", place)
    return Grammar.json_object()


def _missing(place: str) -> ApiError:
    return invalid(f"{place} is missing", place, "missing_required_parameter")
