"""Kept sessions as bytes, for a file or a server."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from typing import Any

from coordinator.sessions.session_store import KeptSession
from specd.model_info import AdapterInfo
from specd.text.chat import Chat


def pack(session: KeptSession) -> bytes:
    """Return a session as its last turn has left it."""
    chat = session.chat
    value = {
        "created_at": session.created_at,
        "last_used_at": session.last_used_at,
        "num_turns": session.num_turns,
        "token_ids": b64encode(session.token_ids.tobytes()).decode(),
        "source": b64encode(session.source.tobytes()).decode(),
        "adapter": session.adapter and [session.adapter.name, session.adapter.fingerprint],
        "chat": chat
        and {
            "messages": [dict(message) for message in chat.messages],
            "tools": [dict(tool) for tool in chat.tools],
            "template_arguments": dict(chat.template_arguments),
            "special_tokens": {str(number): tokens for number, tokens in chat.special_tokens.items()},
        },
    }
    return json.dumps(value).encode()


def unpack(session_id: str, client: str, data: bytes) -> KeptSession:
    """Return the session in these bytes, which is not busy. Raises ValueError, TypeError or LookupError for others."""
    value = json.loads(data)
    return KeptSession(
        session_id,
        client,
        created_at=float(value["created_at"]),
        last_used_at=float(value["last_used_at"]),
        idle_since=0.0,
        token_ids=_tokens_from(value["token_ids"]),
        chat=_chat_from(value["chat"]),
        source=_tokens_from(value["source"]),
        adapter=_adapter_from(value.get("adapter")),  # an older version wrote none
        num_turns=int(value["num_turns"]),
        busy=False,
    )


def _tokens_from(text: str) -> array[int]:
    tokens = array("I")
    tokens.frombytes(b64decode(text, validate=True))
    return tokens


def _adapter_from(value: list[str] | None) -> AdapterInfo | None:
    if value is None:
        return None
    name, fingerprint = map(str, value)
    return AdapterInfo(name, fingerprint)


def _chat_from(value: dict[str, Any] | None) -> Chat | None:
    if value is None:
        return None
    placed = {
        int(number): tuple((int(position), int(token_id)) for position, token_id in tokens)
        for number, tokens in value["special_tokens"].items()
    }
    return Chat(
        tuple(map(dict, value["messages"])),
        tuple(map(dict, value["tools"])),
        dict(value["template_arguments"]),
        special_tokens=placed,
    )
