# Written by `make client` from async_session.py: change that one.
"""A session, turn by turn, in a thread of the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from specd.client.options import GenerationOptions
from specd.client.protocol.chats import Messages, chat_of
from specd.client.resuming.generation import Turn
from specd.client.resuming.history import SessionHistory
from specd.client.stream import Stream
from specd.errors import SpecdError

Start = Callable[[Turn, GenerationOptions], Stream]


class ClientSession:
    """Turns that share their caches, as a context manager: of texts, or of a conversation.

    A turn counts once it has finished. The next one may begin then.
    """

    def __init__(self, start: Start, delete: Callable[[str], Any], session_id: str = "") -> None:
        self._start = start
        self._delete = delete
        self._history = SessionHistory(session_id)

    def __enter__(self) -> ClientSession:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(SpecdError):  # it is gone, or goes when it has been idle for long enough
            self.delete()

    @property
    def session_id(self) -> str:
        """Its id; empty before the first turn has finished, and another one after it had to be restored."""
        return self._history.session_id

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The messages of a conversation, replies included; of a session that began here."""
        return self._history.chat.messages if self._history.chat is not None else ()

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of a session of texts, prompts and completions; of a session that began here."""
        return self._history.token_ids

    def generate(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GenerationOptions]) -> Stream:
        """Return the stream of the next turn, which continues the session's tokens and the prompt.

        Without a prompt the session goes on from where it ended.
        """
        return self._start(self._history.turn(prompt, options), options)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Return the stream of the answer to new messages, after the session's own; see `Client.chat`."""
        chat = chat_of(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
        )
        return self._start(self._history.turn(chat, options), options)

    def delete(self) -> None:
        """Let the coordinator forget the session. Raises SpecdError."""
        if self.session_id:
            self._delete(self.session_id)
