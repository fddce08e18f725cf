"""Small models of a family that can be downloaded as drafts, for the families that docs/serving.md names."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Patterns of the last part of a target's name, and the repository of its family's smallest model.
_SIBLINGS = (
    (r"Qwen3-(?:1\.7B|4B|8B|14B|32B)(?:-\w+)?", "mlx-community/Qwen3-0.6B-4bit"),
    (r"SmolLM2-(?:360M|1\.7B)-Instruct(?:-\w+)?", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    (r"flan-t5-(?:base|large|xl|xxl)", "google/flan-t5-small"),
)


def siblings_of(name: str, here: Iterable[str]) -> list[str]:
    """Return the repositories that suit a target by its name, without the models that are on this machine."""
    short = name.rpartition("/")[2]
    known = set(here)
    return [draft for pattern, draft in _SIBLINGS if re.fullmatch(pattern, short, re.IGNORECASE) and draft not in known]
