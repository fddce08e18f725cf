"""Settings of adapters: low-rank layers beside a worker's model, which requests choose by name."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

# A name is one word in a request, as of a model: it needs no escapes in JSON, in a path of a URL or in a log.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MOST_CHARACTERS = 128
_MOST_ADAPTERS = 64


def split_adapters(text: str) -> dict[str, str]:
    """Return directories by name, of NAME=DIR with commas between them. Raises ValueError."""
    directories: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, directory = (each.strip() for each in part.partition("="))
        if not (equals and directory):
            raise ValueError(f"{part!r} is not an adapter: write NAME=DIR, with commas between adapters")
        if not _NAME.fullmatch(name) or len(name) > _MOST_CHARACTERS:
            raise ValueError(
                f"{name[:_MOST_CHARACTERS]!r} is not a name of an adapter: write NAME or OWNER/NAME, of letters, "
                f"digits, '_', '.' and '-', with at most {_MOST_CHARACTERS} characters"
            )
        if name in directories:
            raise ValueError(f"two adapters have the name {name!r}: give each one its own")
        directories[name] = directory
    if len(directories) > _MOST_ADAPTERS:
        raise ValueError(f"{len(directories)} adapters are given: the most is {_MOST_ADAPTERS}")
    return directories


def _check(text: str) -> str:
    text = "" if text == "none" else text
    split_adapters(text)
    return text


Adapters = Annotated[str, AfterValidator(_check)]


class AdapterSettings(BaseModel):
    """The adapters of a worker."""

    adapters: Adapters = Field(
        "",
        description="LoRA adapters of mlx-lm for the model, NAME=DIR with commas between them. A request chooses one "
        "by naming it as its model.",
    )
