"""POST /tokenize and /detokenize, as vLLM and llama.cpp have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.chat.messages import MAX_MESSAGES, Message, checked_chat, template_messages
from gateway.chat.request import MAX_TOOLS, Tool
from gateway.fields import Array, JsonObject, StrictModel, TokenId, validated
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.errors import invalid
from gateway.http.long_bodies import beside_loop
from gateway.model_choice import ModelChoice
from gateway.neutral import ignored_in
from gateway.served_model import ModelCard
from gateway.service import Service
from gateway.wording import to_api_error
from specd.errors import SpecdError
from specd.text.chat import Chat

_MAX_TOKENS = 2**20
_Name = Annotated[str, Field(max_length=1024)]


class TokenizeFields(StrictModel):
    """POST /tokenize."""

    model: _Name | None = None
    refuse_unloaded: bool | None = Field(None, description="Answer 503 if the model is not loaded.")
    prompt: str | None = Field(None, description="A text; vLLM's name. Special tokens are added, unless refused.")
    content: str | None = Field(None, description="A text; llama.cpp's name. No special tokens are added.")
    messages: Annotated[Array[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Array[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: bool | None = Field(None, description="vLLM's name.")
    add_special: bool | None = Field(None, description="llama.cpp's name.")

    def asked(self) -> str | Chat:
        """Return the text or the conversation. Raises ApiError unless the request has one of them."""
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            shown = f"the request has {' and '.join(given)}" if given else "prompt is missing"
            raise invalid(f"{shown}: send prompt, content or messages", given[-1] if given else "prompt")
        if self.messages is None:
            return self.prompt or self.content or ""
        return checked_chat(
            template_messages(self.messages),
            [tool.as_written for tool in self.tools or []],
            self.chat_template_kwargs or {},
            continue_final_message=bool(self.continue_final_message),
        )

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text gets the special tokens that the tokenizer adds."""
        chosen = self.add_special_tokens if self.add_special_tokens is not None else self.add_special
        return self.content is None if chosen is None else chosen


class DetokenizeFields(StrictModel):
    """POST /detokenize."""

    model: _Name | None = None
    refuse_unloaded: bool | None = Field(None, description="Answer 503 if the model is not loaded.")
    tokens: Annotated[Array[TokenId], Field(max_length=_MAX_TOKENS)]

    def check(self, model: ModelCard) -> None:
        """Raise ApiError for more tokens than the model's context has, or for one that is not in its vocabulary."""
        if len(self.tokens) > model.context_length:
            raise invalid(f"tokens has {len(self.tokens)} entries: send at most {model.context_length}", "tokens")
        if max(self.tokens, default=0) >= model.vocabulary_size:
            last = model.vocabulary_size - 1
            raise invalid(f"tokens has {max(self.tokens)}, but the model's vocabulary ends at {last}", "tokens")


async def tokenize(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Return the tokens of a text or a conversation. Raises ApiError."""
    fields = await beside_loop(validated, TokenizeFields, body)
    asked = await beside_loop(fields.asked)
    choice = ModelChoice(fields.model or "", refuses_unloaded=bool(fields.refuse_unloaded))
    served = await service.models.named(choice, caller)
    ignored = ignored_in(fields.model_extra or {}, {})
    if not asked:
        return Answer(json=_tokenized([], served.model.context_length), ignored=ignored)
    count = await service.count(
        asked, choice, caller, return_token_ids=True, add_special_tokens=fields.adds_special_tokens
    )
    return Answer(json=_tokenized(list(count.token_ids), served.model.context_length), ignored=ignored)


async def detokenize(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Return the text of tokens. Raises ApiError."""
    fields = await beside_loop(validated, DetokenizeFields, body)
    choice = ModelChoice(fields.model or "", refuses_unloaded=bool(fields.refuse_unloaded))
    fields.check((await service.models.named(choice, caller)).model)
    try:
        text = await service.client.detokenize(fields.tokens, model=choice.name, token=caller.token)
    except SpecdError as error:
        raise to_api_error(error) from error
    # The text by both names.
    return Answer(json={"prompt": text, "content": text}, ignored=ignored_in(fields.model_extra or {}, {}))


def _tokenized(token_ids: list[int], context_length: int) -> dict[str, Any]:
    return {"count": len(token_ids), "max_model_len": context_length, "tokens": token_ids}
