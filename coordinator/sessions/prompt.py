"""Prompts, and the tokens of the sessions that they begin or continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.sessions.session_store import KeptSession
from specd.errors import InvalidRequestError, about
from specd.model_info import ModelInfo
from specd.text.chat import Chat
from specd.text.literals import Literals
from specd.text.tokenizer import Tokenizer

# Text, token ids, or a conversation; None continues a session from its end.
Prompt = str | Sequence[int] | Chat | None

# Parts of a long prompt that are encoded first: the short one is enough for dense text, the longer one for sparse text.
_CHARACTERS_PER_TOKEN = (8, 32)

# The start of an answer, or a prediction of it: text, token ids, or none.
AnswerStart = str | Sequence[int] | None


@dataclass(frozen=True)
class EncodedPrompt:
    """All tokens from which a generation starts, with their conversation, or the source that they answer."""

    token_ids: list[int]
    chat: Chat | None = None
    source: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)


def whole_conversation(prompt: Chat, session: KeptSession) -> Chat:
    """Return a session's conversation with its new messages.

    The template writes all messages again, because templates do not write parts of a conversation, and some leave out
    parts of earlier replies. Raises InvalidRequestError if the session is not a conversation.
    """
    if session.num_turns and session.chat is None:  # and the request does not restore it
        raise _contradiction(session, "text or token_ids", "chat")
    if not prompt.messages:
        raise InvalidRequestError("EMPTY_PROMPT", "the conversation has nothing new: set `messages`")
    return session.chat.followed_by(prompt) if session.chat is not None else prompt


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int] | None, session: KeptSession) -> EncodedPrompt:
    """Return the tokens of a session, if there is one, followed by those of a prompt.

    It can take a second for a megabyte. Raises InvalidRequestError when the session is a conversation.
    """
    before = list(session.token_ids)
    if not prompt:  # not the encoded prompt, which can have a special token
        going_on = replace(session.chat, continue_final_message=True) if session.chat is not None else None
        return EncodedPrompt(before, going_on)
    if session.chat is not None:
        raise _contradiction(session, "chat", "text or token_ids")
    if isinstance(prompt, str):
        return EncodedPrompt([*before, *tokenizer.encode(prompt, add_special_tokens=not before)])
    return EncodedPrompt([*before, *prompt])


def check_beginning(tokenizer: Tokenizer, prompt: Prompt, context_length: int) -> None:
    """Raise InvalidRequestError for a long prompt with a beginning that already exceeds the context.

    It reads the text of a conversation before a template writes it several times.
    """
    if isinstance(prompt, Chat):
        texts = [content for message in prompt.messages if isinstance(content := message.get("content"), str)]
    else:
        texts = [prompt] if isinstance(prompt, str) else []
    text = "".join(texts)
    encode = partial(_encoded, tokenizer, is_said=isinstance(prompt, Chat))
    check_length(text, len(text), encode=encode, context_length=context_length)


def check_length(
    beginning: str, num_characters: int, *, encode: Callable[[str], list[int]], context_length: int
) -> None:
    """Raise InvalidRequestError for a long text with a beginning that already exceeds the context.

    Encoding takes 20 times the memory of a text. So only a part of a text that is far longer than the context is
    encoded first, at most `beginning_characters`. The last tokens of the part can differ from those of the whole text,
    so the part must have half as many tokens again as the context.
    """
    for characters_per_token in _CHARACTERS_PER_TOKEN:
        most = characters_per_token * context_length
        if num_characters < 2 * most:
            return
        num_tokens = len(encode(beginning[:most]))
        if num_tokens > context_length + context_length // 2:
            # LiteLLM and others recognise the error by these words.
            maximum = f"this model's maximum context length is {context_length} tokens"
            raise InvalidRequestError(
                "CONTEXT_EXCEEDED",
                f"the prompt has more than {num_tokens} tokens, but {maximum}: send at most {context_length - 1}",
                metadata=about("prompt", f"more than {num_tokens}", context_length - 1),
            )


def beginning_characters(context_length: int) -> int:
    """Return how many characters of a text `check_length` reads at most."""
    return max(_CHARACTERS_PER_TOKEN) * context_length


def _encoded(tokenizer: Tokenizer, text: str, *, is_said: bool) -> list[int]:
    if not is_said:
        return tokenizer.encode(text)
    literals = Literals(tokenizer)
    (message,) = literals.hidden_in(Chat(({"content": text},))).messages
    return literals.encode(message["content"])


def encode_source(
    tokenizer: Tokenizer, prompt: Prompt, answer: AnswerStart, session: KeptSession, model: ModelInfo
) -> EncodedPrompt:
    """Return the same for a model with an encoder: a prompt is the source, and the tokens are those of the answer.

    Raises InvalidRequestError for a conversation, or a second source of a session.
    """
    if isinstance(prompt, Chat):
        raise InvalidRequestError(
            "NO_CHAT_TEMPLATE",
            f"{model.short_name} answers a source and holds no conversation: set `text` or `token_ids`",
        )
    if prompt and session.source:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"session {session.session_id} has a source already, and the request has another: leave the prompt out, or "
            "begin a new session",
        )
    start = [model.decoder_start_token_id] if model.decoder_start_token_id is not None else []
    before = list(session.token_ids) or start
    source = tokenizer.encode(prompt) if prompt and isinstance(prompt, str) else list(prompt or session.source)
    return EncodedPrompt([*before, *encode_answer(tokenizer, answer)], source=source)


def encode_answer(tokenizer: Tokenizer, answer: AnswerStart) -> list[int]:
    """Return the tokens of the start of an answer, or of a prediction."""
    return tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else list(answer or ())


def _contradiction(session: KeptSession, was: str, now: str) -> InvalidRequestError:
    return InvalidRequestError(
        "CONTRADICTION", f"session {session.session_id} began with {was}, and the request has {now}: use the same"
    )
