"""`specd shell-completion`: the scripts in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from specd.cli.app import COMMANDS
from tests.e2e.processes import run_specd

# Each runs a script, and prints what it offers for words, of which the last is being typed.
IN_SHELL = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _specd; printf "%s\\n" "${COMPREPLY[@]}"',
    # The list that `_describe` gets, of which it shows those that fit.
    "zsh": (
        'compdef() { :; }; _describe() { print -rl -- ${(P)2}; }; source "$1"; shift; '
        'words=("$@"); CURRENT=$#; _specd | sed "s/:.*//" | grep -e "^${@[-1]}"'
    ),
    "fish": 'source $argv[1]; complete -C (string join " " -- $argv[2..]) | string replace -r "\\t.*" ""',
}
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=shell)) for shell in IN_SHELL
]


@pytest.fixture(scope="module", params=SHELLS)
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A shell, and the script for it."""
    shell = request.param
    done = run_specd("shell-completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path_factory.mktemp("scripts") / shell
    path.write_text(done.stdout)
    return shell, path


def offered(script: tuple[str, Path], *words: str) -> set[str]:
    """Return what a shell offers for `specd` and these words."""
    shell, path = script
    arguments = [shell, "-c", IN_SHELL[shell], *([] if shell == "fish" else [shell]), str(path), "specd", *words]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=path.parent, check=False)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_commands_and_options_are_offered(script: tuple[str, Path]) -> None:
    assert set(COMMANDS) <= offered(script, "")
    assert offered(script, "ch") >= {"chat"}
    assert offered(script, "chat", "--h") == {"--help", "--history"}
    assert offered(script, "chat", "--no-h") == {"--no-history"}
    assert {"list", "show", "pull", "rm"} <= offered(script, "models", "")
    assert offered(script, "models", "pull", "--rev") == {"--revision"}
    assert offered(script, "coordinator", "--session-b") == {"--session-budget-tokens"}
    assert offered(script, "--log-level", "debug", "target-worker", "--mod") >= {"--model"}
    assert offered(script, "generate", "--acceptance", "") == {"coupled", "rejection"}
    assert "--system" not in offered(script, "generate", "--s")


def test_an_unknown_shell_is_refused() -> None:
    done = run_specd("shell-completion", "csh")
    assert done.returncode == 2
    assert "csh" in done.stderr
