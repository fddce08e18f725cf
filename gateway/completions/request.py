"""The request of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from gateway.fields import Array, Count, Defaults, T, TokenId, refuse_field
from gateway.generation import RequestedGeneration
from gateway.grammars import GrammarFields, ResponseFormat
from gateway.http.errors import invalid
from gateway.http.json_body import MAX_VALUES
from specd.sampling import MAX_TOP_LOG_PROBABILITIES

MAX_PROMPTS = 64
_DEFAULT_MAX_TOKENS = 16  # OpenAI's

TokenIds = Annotated[Array[TokenId], Field(min_length=1, max_length=MAX_VALUES)]
Prompts = Annotated[Array[T], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionFields(GrammarFields):
    """POST /v1/completions."""

    prompt: str | TokenIds | Prompts[str] | Prompts[TokenIds] = Field(
        description="A text or token ids, or several of them."
    )
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    echo: bool | None = Field(None, description="Return the prompt before the completion, in logprobs too.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBABILITIES)] | None = None
    suffix: str | None = Field(None, description="Refused unless empty: nothing fills in the middle here.")
    response_format: ResponseFormat | None = Field(None, description="Enforced, also without `strict`.")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_log_probabilities(cls, value: Any) -> Any:
        return None if value is False else value  # as in chat completions

    def _changing(self) -> Mapping[str, tuple[Any, ...]]:
        return {**super()._changing(), "add_special_tokens": (True,)}

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = self.prompt[0]
        return [self.prompt] if isinstance(first, int) else list(self.prompt)  # type: ignore[list-item,arg-type]

    def echoes_as_sent(self, prompt: str | list[int]) -> bool:
        """Return whether the completion begins with the text that was sent, and not with what its tokens say."""
        return bool(self.echo) and self.logprobs is None and isinstance(prompt, str)

    def generations(self, seed: int, defaults: Defaults) -> list[RequestedGeneration]:
        """Return the generation for each prompt. Raises ApiError for what cannot be kept."""
        defaults = replace(defaults, max_tokens=_DEFAULT_MAX_TOKENS)
        if self.suffix:
            raise refuse_field("suffix", "the model continues a text, and does not fill in its middle")
        if self.session_id and len(self.prompts) > 1:
            raise invalid(
                "session_id: a session continues with one answer, and there are several prompts: send one prompt",
                "session_id",
            )
        grammar = self.grammar_options("response_format", self.response_format)
        return [
            self.generation(
                prompt,
                seed,
                self.max_tokens,
                defaults,
                top_log_probabilities=self.logprobs,
                echo=bool(self.echo) and not self.echoes_as_sent(prompt),
                **grammar,
            )
            for prompt in self.prompts
        ]
