"""A conversation that can lose its last turn, and change its model and its system message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specd.client.client import Client
from specd.client.options import GenerationOptions
from specd.client.protocol.service import ModelStatus
from specd.client.session import ClientSession
from specd.client.stream import Stream
from specd.errors import SpecdError


class RewindableChat:
    """The messages of a conversation, and the session that has its tokens.

    A session only grows. After a change of earlier messages a new session gets the whole conversation, and the workers'
    prefix caches have most of it.
    """

    def __init__(self, client: Client, system: str, options: GenerationOptions) -> None:
        self._client = client
        self._options = options
        self._session: ClientSession = client.session()
        self._turns: list[tuple[str, str]] = []
        self._said = ""
        self.system = system

    @property
    def model(self) -> str:
        """The name of the model that answers; empty for the service's only one."""
        return self._options.get("model", "")

    @property
    def num_turns(self) -> int:
        """Number of answered messages."""
        return len(self._turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for said, answered in self._turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
        return messages

    def ask(self, said: str) -> Stream:
        """Return the stream of the answer to a message. Call `keep` at its end, or the turn is not kept."""
        self._said = said
        user: Mapping[str, Any] = {"role": "user", "content": said}
        new = [user] if self._session.messages else [*self.messages, user]
        return self._session.chat(new, **self._options)

    def keep(self) -> None:
        """Keep the last turn; its stream must have ended."""
        self._turns.append((self._said, str(self._session.messages[-1]["content"])))

    def undo(self) -> str | None:
        """Forget the last turn, and return its message; None without one."""
        if not self._turns:
            return None
        said, _ = self._turns.pop()
        self._begin_session()
        return said

    def set_system(self, text: str) -> None:
        """Change the system message of the whole conversation; empty for none."""
        self.system = text
        self._begin_session()

    def set_model(self, name: str) -> None:
        """Let another model continue the conversation."""
        self._options = {**self._options, "model": name}
        self._begin_session()

    def clear(self) -> None:
        """Forget all turns, and keep the system message."""
        self._turns.clear()
        self._begin_session()

    def close(self) -> None:
        """Let the coordinator forget the session."""
        with self._session:  # leaving the context deletes it
            pass

    def save(self, path: Path) -> None:
        """Write the conversation to a new file: as JSON for a name that ends in .json, otherwise as Markdown.

        Raises OSError, FileExistsError for a file that is there already.
        """
        if path.suffix == ".json":
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"## {each['role']}\n\n{each['content'].strip()}\n" for each in self.messages)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)

    def _begin_session(self) -> None:
        self.close()
        self._session = self._client.session()


def statuses_of(client: Client) -> tuple[ModelStatus, ...]:
    """Return the states of several models; none for one alone, or if the coordinator does not list them."""
    try:
        return client.statuses()
    except SpecdError:
        return ()


def names_of_models(client: Client) -> list[str]:
    """Return the names of the models that a request can name; empty if the coordinator does not list them."""
    try:
        return [model.public_name for model in client.models()]
    except SpecdError:
        return []
