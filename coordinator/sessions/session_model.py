"""The model of a session: the target, or the target with one of its adapters."""

from __future__ import annotations

from coordinator.sessions.session_store import KeptSession
from specd.errors import InvalidRequestError, NotFoundError
from specd.model_info import ModelInfo

_MOST_CHARACTERS = 200  # of a client's text in an error


def models_of(target: ModelInfo) -> list[ModelInfo]:
    """Return the models that a request can name: the target, then the target with each adapter."""
    return [target, *map(target.with_adapter, target.adapters)]


def find_model(target: ModelInfo, name: str) -> ModelInfo:
    """Return the model of this name, the target for "". Raises NotFoundError (MODEL_NOT_FOUND)."""
    models = {model.public_name: model for model in models_of(target)}
    if name and name not in models:
        served = ", ".join(map(repr, models))
        which = f"the one that is served is {served}" if len(models) == 1 else f"those that are served are {served}"
        raise NotFoundError("MODEL_NOT_FOUND", f"model is {name[:_MOST_CHARACTERS]!r}: {which} (ListModels)")
    return models[name] if name else target


def model_for(target: ModelInfo, name: str, session: KeptSession) -> ModelInfo:
    """Return the model for the next turn of a session, which a request names or leaves out.

    A session keeps the model of its first turn, because its tokens are those of that model. Raises NotFoundError
    (MODEL_NOT_FOUND) if that is no longer served, and InvalidRequestError if the request names another one.
    """
    asked = find_model(target, name)
    if not session.num_turns:
        return asked
    adapter = session.adapter
    if adapter is not None and adapter not in target.adapters:
        raise NotFoundError(
            "MODEL_NOT_FOUND",
            f"session {session.session_id} began with the adapter {adapter.name!r}, which is not served any more, or "
            "has other weights now: begin a new session",
        )
    model = target if adapter is None else target.with_adapter(adapter)
    if name and asked != model:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"session {session.session_id} began with the model {model.public_name!r}, and the request names "
            f"{name!r}: leave model out, or begin a new session",
        )
    return model
