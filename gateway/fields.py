"""Fields of a request that all endpoints share."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gateway.calls.tool_choice import NO_TOOLS, ToolChoice
from gateway.generation import RequestedGeneration
from gateway.http.errors import ApiError, invalid
from gateway.model_choice import ModelChoice
from gateway.neutral import ignored_in
from specd.client import GenerationOptions
from specd.sampling import (
    LOWEST_TOP_P,
    MAX_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    TEMPERATURES,
)
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.text.chat import Chat
from specd.vocabulary import DraftSourceName
from specd.wrong_value import requirement

_UINT32 = 2**32 - 1
MAX_FIELDS = 128  # of each part of a request, unknown ones included
MAX_OBJECT_FIELDS = 4096  # of an object that goes to the chat template as it is
_MOST_SHOWN = 100

T = TypeVar("T")
# An array is refused at its first wrong item: there can be a million of them. Each field adds its `max_length`.
Array = Annotated[list[T], Field(fail_fast=True)]
JsonObject = Annotated[dict[str, Any], Field(max_length=MAX_OBJECT_FIELDS)]
TokenId = Annotated[int, Field(ge=0, le=_UINT32)]
Count = Annotated[int, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
# Numbers of JSON that no float32 has are refused here: there they would be 0, or infinite.
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


def _is_warm_or_zero(temperature: float) -> float:
    lowest, highest = TEMPERATURES
    if temperature != 0 and not lowest <= temperature <= highest:
        raise ValueError(f"it must be 0 (greedy) or in [{lowest:g}, {highest:g}]")
    return temperature


def _is_not_too_long(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"it has {len(biases)} entries, and the most is {MAX_LOGIT_BIASES}")
    return biases


Temperature = Annotated[float, AfterValidator(_is_warm_or_zero)]
# pydantic counts the entries of an object when it has looked at each.
Biases = Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_is_not_too_long)]


class StrictModel(BaseModel):
    """A part of a request: numbers are numbers, and what is not known is kept, to be named as ignored."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, json_schema_extra={"maxProperties": MAX_FIELDS})

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MAX_FIELDS:
            raise ValueError(f"it has {len(values)} fields, and the most is {MAX_FIELDS}")
        return values


class StreamOptions(StrictModel):
    """What else a stream has."""

    include_usage: bool | None = None


@dataclass(frozen=True)
class Defaults:
    """What holds where a request does not say: most tokens, and whether they are cut to the room in the context."""

    max_tokens: int
    cut_max_tokens: bool = False


class SamplingFields(StrictModel):
    """How tokens are chosen and proposed, and what ends a reply. null is the same as leaving a field out."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The model's id, or an adapter's; without it, the model itself."
    )
    refuse_unloaded: bool | None = Field(
        None, description="Answer 503 if the model is not loaded, which then begins to load, and do not wait for it."
    )
    temperature: Temperature | None = Field(
        None, description="0 is greedy, else from 0.01 to 100. Default 1, as OpenAI."
    )
    top_p: float | None = Field(None, ge=0, le=1, description="0 is greedy.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="The same seed gives the same tokens.")
    n: int | None = Field(None, ge=1, description="Choices; each has its own noise.")
    stop: StopString | Annotated[Array[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: Biases | None = Field(None, description="By token id, from -100 to 100.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # specd's own.
    top_k: Annotated[int, Field(ge=-1, le=_UINT32)] | None = Field(None, description="0 and -1: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    penalty_context_size: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="How many tokens the penalties look at; 0, the default, all."
    )
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Array[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_NUM_DRAFT_TOKENS)] | None = Field(
        None, description="Draft tokens a round; 0 is the target alone."
    )
    draft_source: DraftSourceName | None = None
    acceptance: Literal["coupled", "rejection"] | None = None
    lenience: float | None = Field(None, ge=0, le=1)
    token_sources: bool | None = Field(
        None, description="Return the tokens, and who said each first; in a stream also what each round proposed."
    )
    session_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Continue this session.")

    cut_max_tokens: bool | None = Field(
        None,
        description="Generate what the context has room for if that is less than the most tokens that are asked for.",
    )

    @property
    def model_choice(self) -> ModelChoice:
        """The model that is to answer."""
        return ModelChoice(self.model or "", self.session_id or "", bool(self.refuse_unloaded))

    def ignored(self) -> list[str]:
        """Return the names of the fields that do nothing here. Raises ApiError for one that would change the text."""
        return ignored_in(self.model_extra or {}, self._changing())

    def _changing(self) -> Mapping[str, tuple[Any, ...]]:
        """Return the neutral values of fields that the endpoint does not have, and that would change the text."""
        count = self.n or 1
        return {"best_of": (1, count)}

    def generation(
        self,
        prompt: str | Sequence[int] | Chat,
        seed: int,
        max_tokens: int | None,
        defaults: Defaults,
        *,
        max_tokens_field: str = "max_tokens",
        grammar_field: str = "",
        tools: ToolChoice = NO_TOOLS,
        **more: Any,
    ) -> RequestedGeneration:
        """Return the generation that the fields ask for, of `max_tokens` if the client says. Raises ApiError.

        `more` are options that only some endpoints have.
        """
        options: dict[str, Any] = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        options |= {
            "seed": seed,
            "max_tokens": max_tokens or defaults.max_tokens,
            "cut_max_tokens": max_tokens is None
            or (defaults.cut_max_tokens if self.cut_max_tokens is None else self.cut_max_tokens),
            "temperature": options.get("temperature", 1.0),
            "top_k": max(self.top_k or 0, 0),
            # All penalties look at the whole text, as OpenAI's do; without it, gRPC's look at 20 tokens.
            "penalty_context_size": self.penalty_context_size or 0,
            "logit_bias": _biases(self.logit_bias or {}),
            **more,
        }
        if self.top_p is not None and self.top_p < LOWEST_TOP_P:  # below what the likeliest token has
            options |= {"temperature": 0.0, "top_p": None}
        return RequestedGeneration(
            prompt,
            cast(GenerationOptions, options),
            self.session_id or "",
            max_tokens_field=max_tokens_field,
            grammar_field=grammar_field,
            tools=tools,
            is_max_tokens_given=max_tokens is not None,
        )


# The fields that are options of specd's client under the same name.
_OPTIONS = sorted(GenerationOptions.__annotations__.keys() & SamplingFields.model_fields.keys())

FieldsT = TypeVar("FieldsT", bound=StrictModel)


def validated(cls: type[FieldsT], body: Mapping[str, Any]) -> FieldsT:
    """Return the fields of a request. Raises ApiError, which names the first wrong one with its value."""
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        # Of a union, the member that got furthest says most: to its end, to a part of it, or past its type.
        first = max(
            error.errors(include_url=False),
            key=lambda problem: (
                problem["type"] == "too_long",
                len(problem["loc"]),
                not problem["type"].endswith("_type"),
            ),
        )
        param = _name(first["loc"])
        if first["type"] == "missing":
            raise invalid(f"{param} is missing", param, "missing_required_parameter") from error
        raise invalid(
            f"{param or 'the body'}: {requirement(first)} (got {_shown(first['input'])})", param or None
        ) from error


def _name(location: Iterable[int | str]) -> str:
    """Return where a problem is, as a client would write it: `messages[0].content`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    # pydantic names the members of unions, which are no fields: `str`, `list[...]`, `function-after[...]`.
    name = "".join(part for part in parts if re.fullmatch(r"\[\d+\]|\.[a-z_]\w*", part) and part != ".str").lstrip(".")
    return name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}…"  # a key of logit_bias can be long


def _shown(value: Any) -> str:
    """Return the beginning of a value, without writing all of it."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxlong = shortened.maxother = _MOST_SHOWN
    shown = shortened.repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= _UINT32):
            raise invalid(f"logit_bias has the key {name[:100]!r}: it must be a token id", "logit_bias")
    return {int(name): bias for name, bias in biases.items()}


def refuse_field(name: str, why: str) -> ApiError:
    """Return the error of a field that the gateway knows and cannot do."""
    return invalid(f"{name}: {why}", name, "unsupported_parameter")
