"""The model that is to answer a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelChoice:
    """The name of a model, or the session that has one; without both, it is the coordinator's default one.

    With `refuses_unloaded`, the request fails at once if the model is not loaded, and does not wait for it.
    """

    name: str = ""
    session_id: str = ""
    refuses_unloaded: bool = False
