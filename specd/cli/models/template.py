"""Facts in a model's chat template: whether the model chats, and whether the gateway reads its calls of tools."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from specd.startup_error import StartupError
from specd.worker.model.files import read_object

_DEFAULT = "default"


class Tools(Enum):
    """The treatment of calls of tools: as calls, as a part of the text, or none without tools in the template."""

    READ = "read"
    TEXT = "text"
    NONE = "none"


def template_of(directory: Path) -> str:
    """Return the chat template of the model in a directory, "" without one. Raises StartupError for broken JSON."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (directory / name).is_file() and (text := _text(read_object(directory / name).get("chat_template"))):
            return text
    return ""


def tools_of(template: str, directory: Path) -> Tools:
    """Return what the gateway does with tools of a model with this template. Raises StartupError for broken JSON."""
    from gateway.reply.format import detect_format  # the one place that knows the forms of calls

    if not template:
        return Tools.NONE
    if detect_format(template, _special_tokens(directory)).reads_calls:
        return Tools.READ
    return Tools.TEXT if "tools" in template else Tools.NONE


def _text(template: Any) -> str:
    """Return the template that conversations use, where there can be several by name."""
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict) and each.get("name") == _DEFAULT]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else ""


def _special_tokens(directory: Path) -> dict[int, str]:
    """Return the special tokens in the tokenizer's config, by id: tokenizer.json takes long to read."""
    path = directory / "tokenizer_config.json"
    try:
        added = read_object(path).get("added_tokens_decoder") if path.is_file() else None
    except StartupError:
        return {}
    if not isinstance(added, dict):
        return {}
    return {
        int(number): str(each.get("content"))
        for number, each in added.items()
        if number.isdecimal() and isinstance(each, dict) and each.get("special")
    }
