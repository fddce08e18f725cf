"""The environment variables of specd, and misspelt ones."""

from __future__ import annotations

import os
from difflib import get_close_matches

_PREFIX = "SPECD_"
# The first row is read by commands that call a coordinator, the second by all, the last name by supervised processes.
_OF_COMMANDS = frozenset(
    _PREFIX + name
    for name in (
        *("ADDRESS", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY"),
        *("CONFIG", "LOG_LEVEL", "LOG_FORMAT", "SUPERVISOR_FD"),
    )
)
# A cluster with a service called specd also sets variables that begin with SPECD_. They resemble none of these.
_CLOSENESS = 0.85


def misspelt_variables() -> dict[str, str]:
    """Return misspelt variables of the environment, each with the variable that was probably meant."""
    unknown = [name for name in os.environ if name.startswith(_PREFIX) and name not in _OF_COMMANDS]
    if not unknown:
        return {}  # before the settings are imported, which takes long
    known = {*_OF_COMMANDS, *_of_settings()}
    close = {name: get_close_matches(name, known, 1, _CLOSENESS) for name in unknown if name not in known}
    return {name: matches[0] for name, matches in close.items() if matches}


def _of_settings() -> set[str]:
    from specd.coordinator_settings import CoordinatorSettings
    from specd.gateway_settings import GatewaySettings
    from specd.settings import DraftWorkerSettings, TargetWorkerSettings
    from specd.up_settings import UpSettings

    classes = (UpSettings, CoordinatorSettings, TargetWorkerSettings, DraftWorkerSettings, GatewaySettings)
    return {cls.variable_of(name) for cls in classes for name in cls.model_fields}
