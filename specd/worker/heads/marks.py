"""Marks in a configuration that tell the kind of a head with a repository of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EAGLE_3 = "EAGLE-3"
DFLASH = "DFlash"
GEMMA_ASSISTANT = "Gemma 4 assistant"


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the kind of head in a repository of its own; None for an MTP head, or for no head."""
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    if config.get("speculators_model_type") == "eagle3" or "eagle3" in architectures:
        return EAGLE_3
    if config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"):
        return GEMMA_ASSISTANT
    marks = f"{architectures} {config.get('speculators_model_type')}"
    if "dflash_config" in config or "dflash" in marks or "dspark" in marks:
        return DFLASH
    return None
