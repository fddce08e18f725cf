"""Conversations, and the prompts that a model's own chat template makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from specd.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_ROLE_CHARACTERS = 64  # of a message
# A template's error can quote the whole conversation, and a gRPC status has room for a few kilobytes.
_MAX_ERROR_CHARACTERS = 500
_EXACT_INTEGERS = 2**53  # beyond this, a double does not identify the integer
# The usual order of a tool's keys, which models saw in training: these first, the others in alphabetical order.
_FIRST_KEYS = {"type": 0, "name": 1, "description": 2}


# A special token in a text that leaves it out: the number of characters before it, and its id.
PlacedToken = tuple[int, int]


@dataclass(frozen=True)
class Reply:
    """A model's reply: the text, and the special tokens in it, in order."""

    text: str
    special_tokens: tuple[PlacedToken, ...] = ()

    @classmethod
    def of(cls, text: str, special_tokens: Sequence[PlacedToken], *, ends_with_token: bool) -> Reply:
        """Return the reply with a text and its special tokens.

        The last token is not part of the reply if it ended the generation, nor are tokens behind the end of the text.
        """
        within = special_tokens[: len(special_tokens) - ends_with_token]
        return cls(text, tuple(token for token in within if token[0] <= len(text)))


@dataclass(frozen=True)
class Chat:
    """A conversation, or what is new in one; the fields are those of the message `Chat` in generation.proto.

    `special_tokens` are the special tokens in the contents of messages, by the number of the message. Only a model's
    replies have them: a name of one in a content is text.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    special_tokens: Mapping[int, tuple[PlacedToken, ...]] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """The approximate memory of the conversation, which a template need not read in full."""
        return _num_characters((self.messages, self.tools, self.template_arguments))

    def replied(self, reply: Reply) -> Chat:
        """Return this conversation with the reply to it, or the rest of its last message."""
        number = len(self.messages) - self.continue_final_message
        last = self.messages[number] if self.continue_final_message else {"role": "assistant", "content": ""}
        begun = last.get("content") or ""
        said = (*self.messages[:number], {**last, "content": begun + reply.text})
        new = [(len(begun) + position, token_id) for position, token_id in reply.special_tokens]
        special_tokens = {**self.special_tokens}
        if new:
            special_tokens[number] = (*special_tokens.get(number, ()), *new)
        return replace(self, messages=said, continue_final_message=False, special_tokens=special_tokens)

    def followed_by(self, new: Chat) -> Chat:
        """Return this conversation followed by a new part.

        Tools stay unless there are new ones, and template arguments unless they are set again.
        """
        return Chat(
            messages=(*self.messages, *new.messages),
            tools=new.tools or self.tools,
            template_arguments={**self.template_arguments, **new.template_arguments},
            continue_final_message=new.continue_final_message,
            special_tokens={
                **self.special_tokens,
                **{len(self.messages) + number: tokens for number, tokens in new.special_tokens.items()},
            },
        )

    def without_special_tokens(self) -> Chat:
        """Return this conversation with the text of its replies alone."""
        return replace(self, special_tokens={})


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template in the Jinja dialect of Hugging Face transformers, which renders it in its sandbox.

    `special_tokens` are the model's, by their names in the template; `source` is "" without a template.
    """

    source: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    model_name: str = ""

    def render(self, chat: Chat) -> str:
        """Return the prompt for the assistant's next message, or for the rest of the last one.

        The first call takes half a second, to import transformers. Raises InvalidRequestError when there is no template
        (NO_CHAT_TEMPLATE), there are no messages (EMPTY_PROMPT), a template argument is invalid (OUT_OF_RANGE), or the
        template fails (CHAT_TEMPLATE_FAILED).
        """
        self.check(chat)
        if taken := sorted(chat.template_arguments.keys() & self._reserved):
            raise InvalidRequestError(
                "OUT_OF_RANGE", f"template_arguments has {', '.join(taken)}: not a variable for the template"
            )

        from jinja2 import TemplateError

        try:
            prompt = self._renderer.apply_chat_template(
                [dict(message) for message in chat.messages],
                tools=[dict(tool) for tool in chat.tools] or None,
                add_generation_prompt=not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **{**self.special_tokens, **chat.template_arguments},
            )
        except Exception as error:  # a template can raise any error on an unsuitable conversation
            why = str(error) if isinstance(error, (TemplateError, ValueError)) else repr(error)
            failed = f"the chat template of {self._model} failed"
            raise InvalidRequestError(
                "CHAT_TEMPLATE_FAILED", f"{failed}: {why[:_MAX_ERROR_CHARACTERS]}", for_log=failed
            ) from error
        return cast(str, prompt)

    def check(self, chat: Chat) -> None:
        """Raise InvalidRequestError where there is no template (NO_CHAT_TEMPLATE) or no message (EMPTY_PROMPT)."""
        if not self.source:
            raise InvalidRequestError(
                "NO_CHAT_TEMPLATE", f"{self._model} has no chat template: send the prompt as `text` or `token_ids`"
            )
        if not chat.messages:
            raise InvalidRequestError("EMPTY_PROMPT", "the conversation is empty: set `messages`")

    @property
    def _model(self) -> str:
        return f"the model {self.model_name}".rstrip()

    @cached_property
    def _renderer(self) -> PreTrainedTokenizerFast:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast  # late, because it takes half a second and not all need it

        # It only renders, so an empty vocabulary is enough, and the model's own is not copied.
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()), chat_template=self.source)

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names of transformers' variables and of ours; `documents` is for clients, and some templates read it."""
        parameters = inspect.signature(self._renderer.apply_chat_template).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        return frozenset({*named, "self", "messages", "conversations"} - {"documents"})


def _num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _num_characters(value[key]) for key in value)
    if isinstance(value, Sequence):
        return sum(map(_num_characters, value))
    return 1 + value.bit_length() // 8 if isinstance(value, int) else 1


def plain(value: Any) -> Any:
    """Turn what is in a protobuf Struct into plain values, with whole numbers as int and keys in a fixed order.

    A Struct has only doubles, and a template would write `"maxItems": 5.0`. It has no order either: the same tool would
    make another prompt each time. Clients that want theirs send JSON text. Takes a Struct, a ListValue, or what
    json_format.MessageToDict makes of them.
    """
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (_FIRST_KEYS.get(key, len(_FIRST_KEYS)), key))
        return {key: plain(value[key]) for key in keys}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_INTEGERS:
        return int(value)
    return value
