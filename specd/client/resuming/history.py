"""What a client remembers of a session, to restore it where the coordinator has lost it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specd.client.events import Completion
from specd.client.options import GenerationOptions
from specd.client.protocol.wire import Prompt, set_chat, to_request
from specd.client.resuming.generation import ResumableGeneration, Turn
from specd.text.chat import Chat
from specd.v1 import generation_pb2

Keep = Callable[[ResumableGeneration, Completion], None]


class SessionHistory:
    """The turns of a session: their tokens, and of a conversation its messages, too.

    Of a session that began elsewhere nothing is known, so it cannot be restored.
    """

    def __init__(self, session_id: str = "") -> None:
        self.session_id = session_id
        self.token_ids: tuple[int, ...] = ()
        self.chat: Chat | None = None
        self._source: tuple[int, ...] = ()
        self._model = ""  # which the first turn names, for a session that is restored
        self._is_known = not session_id

    def turn(self, prompt: Prompt, options: GenerationOptions) -> Turn:
        """Return the next turn: a text, new messages, or None to go on from the end. Raises what `to_request` does."""
        request = to_request(prompt, options, session_id=self.session_id)
        if self.session_id:
            request.model = request.model or self._model
        else:
            self._model = request.model
        restored = None
        if self.session_id and self._is_known:
            restored = generation_pb2.GenerateRequest()
            restored.CopyFrom(request)
            restored.session_id = ""
            restored.return_prompt_token_ids = True
            restored.resumption.session_token_ids.extend(self.token_ids)
        request.return_prompt_token_ids = True
        if (whole := self._conversation(prompt)) is not None:
            if restored is not None:
                set_chat(restored, whole)
            return Turn(request, restored, self._keep_conversation(whole))
        if restored is not None and self._source and restored.WhichOneof("prompt") is None:
            restored.token_ids.ids.extend(self._source)
        return Turn(request, restored, self._keep_tokens)

    def _conversation(self, prompt: Prompt) -> Chat | None:
        """Return the conversation with this turn, if it is one."""
        if isinstance(prompt, Chat):
            return self.chat.followed_by(prompt) if self.chat is not None else prompt
        return replace(self.chat, continue_final_message=True) if self.chat is not None else None

    def _keep_conversation(self, whole: Chat) -> Keep:
        def keep(generation: ResumableGeneration, completion: Completion) -> None:
            self.session_id = completion.session_id
            self.token_ids = (*generation.prompt_token_ids, *completion.token_ids)
            self.chat = whole.replied(completion.reply)

        return keep

    def _keep_tokens(self, generation: ResumableGeneration, completion: Completion) -> None:
        self.session_id = completion.session_id
        self.token_ids = (*generation.prompt_token_ids, *completion.token_ids)
        self._source = generation.source_token_ids
        self._is_known = True
