"""The list of the models that are served, as clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.errors import ApiError
from gateway.served_models import ListedModel, not_found
from gateway.service import Service
from specd.client import ModelStatus

# The words of llama.cpp's router.
_VALUES = {"unloaded": "unloaded", "waiting": "loading", "loading": "loading", "ready": "loaded", "leaving": "unloaded"}


async def list_models(service: Service, _: Mapping[str, Any], caller: Requester) -> Answer:
    """List the models that are served. Raises ApiError: clients try their token with this."""
    models = await service.models.list(caller)
    return Answer(json={"object": "list", "data": [*map(describe, models)]})


async def show_model(service: Service, path: Mapping[str, Any], caller: Requester) -> Answer:
    """Describe a model. Raises ApiError if it is not served."""
    models = await service.models.list(caller)
    found = next((each for each in models if each.card.model_id == path["name"]), None)
    if found is None:
        raise not_found(path["name"], [each.card for each in models])
    return Answer(json=describe(found))


async def refuse_embeddings(service: Service, _: Mapping[str, Any], caller: Requester) -> Answer:
    """Raise the ApiError of a request for embeddings."""
    models = await service.models.list(caller)
    raise ApiError(
        404,
        "not_supported",
        f"{models[0].card.model_id!r} generates text, and specd has no embeddings: ask a server with a model for them",
    )


def describe(listed: ListedModel) -> dict[str, Any]:
    """Return a model as clients look for it: the context length has a name with each of them.

    A model that was never loaded has none, and one of several has a `status`.
    """
    model, status = listed.card, listed.status
    length = model.context_length
    lengths = {
        "max_model_len": length,
        "context_length": length,
        "meta": {"n_ctx": length, "n_ctx_train": length, "n_vocab": model.vocabulary_size},
    }
    shown: dict[str, Any] = {
        "id": model.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "specd",
        "root": model.parent or model.model_id,
        "parent": model.parent or None,
        **(lengths if length else {}),
        "specd": dict(model.details),
    }
    if status is not None:
        shown["status"] = status_of(status)
        shown["specd"] |= {
            "memory_bytes": status.memory_bytes,
            "pinned": status.pinned,
            "active_requests": status.active_requests,
        }
    return shown


def status_of(status: ModelStatus) -> dict[str, Any]:
    """Return the state of a model as llama.cpp's router shows it, with specd's own `stage` of a start."""
    shown: dict[str, Any] = {"value": _VALUES[status.state]}
    if (loading := status.loading) is not None and loading.process:
        shown["stage"] = loading.words
        if loading.total_bytes:
            progress = {loading.process: {"done": loading.done_bytes, "total": loading.total_bytes}}
            shown |= {"value": "downloading", "progress": progress}
    return shown
