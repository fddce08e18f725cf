"""The model of a request: the one that it names, or that its session has."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.models.served_model import ServedModel
from specd.errors import InvalidRequestError, NotFoundError

_MOST_CHARACTERS = 200  # of a client's text in an error


async def choose_model(models: Sequence[ServedModel], name: str, client: str = "", session_id: str = "") -> ServedModel:
    """Return the model that a request names, by its own name or by one of its adapters', without one the first.

    A session keeps its model. Raises NotFoundError (MODEL_NOT_FOUND), InvalidRequestError (CONTRADICTION) and
    UnavailableError (SESSION_SERVER).
    """
    own = await model_of_session(models, session_id, client) if session_id and len(models) > 1 else None
    if not name:
        return own or models[0]
    if not models[0].name:
        return models[0]  # the only one, which knows its names itself
    found = next((each for each in models if name in (each.name, *each.entry.adapters)), None)
    if found is None:
        served = ", ".join(repr(each) for model in models for each in (model.name, *model.entry.adapters))
        raise NotFoundError(
            "MODEL_NOT_FOUND",
            f"model is {name[:_MOST_CHARACTERS]!r}: those that are served are {served} (ListModels)",
        )
    if own is not None and own is not found:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"session {session_id} began with the model {own.name!r}, and the request names {name!r}: leave model "
            "out, or begin a new session",
        )
    return found


async def model_of_session(models: Sequence[ServedModel], session_id: str, client: str) -> ServedModel | None:
    """Return the model that has a session of a client. Raises UnavailableError (SESSION_SERVER)."""
    for model in models:
        await model.sessions.keeper.refresh(client, session_id)
        if model.sessions.store.peek(session_id, client) is not None:
            return model
    return None
