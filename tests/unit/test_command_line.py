"""The list of commands, which is there before any of them is imported."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from specd.cli.app import COMMANDS


@pytest.mark.parametrize("name", [name for name, (module, _) in COMMANDS.items() if module])
def test_the_list_says_of_a_command_what_its_own_help_says(name: str) -> None:
    module, summary = COMMANDS[name]
    help_text = inspect.getdoc(getattr(import_module(module), name.replace("-", "_"))) or ""
    assert help_text.startswith(summary)
