"""Prompts, and the tokens of the sessions that they begin or continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.sessions.session_store import KeptSession
from specd.errors import InvalidRequestError
from specd.text.chat import Chat
from specd.text.tokenizer import Tokenizer

# Text, token ids, or a conversation; None continues a session from where it ended.
Prompt = str | Sequence[int] | Chat | None


@dataclass(frozen=True)
class EncodedPrompt:
    """All tokens that a generation starts from, and the conversation that they are, if they are one."""

    token_ids: list[int]
    chat: Chat | None = None


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, session: KeptSession) -> EncodedPrompt:
    """Return the tokens of a session with a prompt after them; of a new one, those of the prompt.

    A conversation is written anew by the template with all its messages, because templates do not write parts of one,
    and some leave out of earlier replies what they keep in the last. It can take a second for a megabyte.

    Raises InvalidRequestError when the prompt is of another kind than the session, and what the template raises.
    """
    before = list(session.token_ids)
    if isinstance(prompt, Chat):
        if before and session.chat is None:
            raise _contradiction(session, "text or token_ids", "chat")
        if not prompt.messages:
            raise InvalidRequestError("EMPTY_PROMPT", "the conversation has nothing new: set `messages`")
        chat = session.chat.followed_by(prompt) if session.chat is not None else prompt
        return EncodedPrompt(tokenizer.encode_chat(chat), chat)
    if not prompt:  # and not its encoding, which can be a special token
        going_on = replace(session.chat, continue_final_message=True) if session.chat is not None else None
        return EncodedPrompt(before, going_on)
    if session.chat is not None:
        raise _contradiction(session, "chat", "text or token_ids")
    if isinstance(prompt, str):
        return EncodedPrompt([*before, *tokenizer.encode(prompt, add_special_tokens=not before)])
    return EncodedPrompt([*before, *prompt])


def _contradiction(session: KeptSession, was: str, now: str) -> InvalidRequestError:
    return InvalidRequestError(
        "CONTRADICTION", f"session {session.session_id} began with {was}, and the request has {now}: use the same"
    )
