"""`specd up` at a terminal: the progress of the models, the addresses, and a stop at any time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import processes_mentioning
from tests.e2e.terminal import CTRL_C, Terminal
from tests.thorough import examples

UP = ("up", "--listen", "127.0.0.1:0", "--no-metrics")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of the sockets of a test's processes. Processes that a failing test leaves running end here."""
    yield tmp_path
    for pid in processes_mentioning(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_it_says_in_a_few_lines_what_is_served_and_where(directory: Path) -> None:
    with Terminal(*UP, "--http", "127.0.0.1:0", TMPDIR=str(directory), XDG_CACHE_HOME=str(directory)) as terminal:
        # A first start, which calibrates.
        for stage in ("starting", "loading", "calibrating", "ready"):
            terminal.wait_for(rf"(target|draft) +pycode-\S+ +{stage}")
        terminal.wait_for("try +specd generate --address .*\n")
        model, draft, address, page, command = terminal.screen
        assert re.match(r"model +pycode-47m-4bit \(float32, cpu", model)
        assert re.match(r"draft +pycode-3\.6m-8bit and look-up$", draft)
        where = re.match(r"address +(127\.0\.0\.1:\d+)$", address)
        assert where is not None
        assert re.match(r"page +http://127\.0\.0\.1:\d+/$", page)
        assert command.endswith(f"specd generate --address {where[1]} 'def fibonacci(n):'")
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0
        assert terminal.screen[5:] == ["^C"]
    assert processes_mentioning(str(directory)) == {}


@pytest.mark.thorough
def test_warnings_stay_and_the_rest_comes_when_it_is_asked_for(directory: Path) -> None:
    variables = {"TMPDIR": str(directory), "SPECD_LOG_LEVEL": "info"}
    with Terminal(*UP, **variables) as terminal:
        terminal.wait_for("loading")
        terminal.wait_for("specd is ready at")
        assert "━" not in terminal.shown
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0
    with Terminal(*UP, TMPDIR=str(directory)) as terminal:
        terminal.wait_for("try +specd")
        (worker,) = (pid for pid, command in processes_mentioning(str(directory)).items() if "target-worker" in command)
        os.kill(worker, signal.SIGKILL)
        terminal.wait_for("a process ended, restarting it")
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0


def test_metrics_go_elsewhere_where_another_has_their_port(directory: Path) -> None:
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # something has it, which does as well
            held.enter_context(socket.create_server(("127.0.0.1", 9464)))
        terminal = held.enter_context(Terminal("up", "--listen", "127.0.0.1:0", TMPDIR=str(directory)))
        terminal.wait_for("try +specd")
        (line,) = (line for line in terminal.screen if line.startswith("metrics"))
        assert re.search(r"coordinator 127\.0\.0\.1:\d+.*: the default ports are in use", line)
        assert len(terminal.screen) == 6
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0


@pytest.mark.parametrize("seconds", examples([0.3, 1.2, 4.0, 0.1, 0.2, 0.5, 0.8, 2.0], 3))
def test_ctrl_c_leaves_no_traceback_at_any_time(directory: Path, seconds: float) -> None:
    # Python runs it when it has started, before which Ctrl-C is its own affair.
    (directory / "sitecustomize.py").write_text(
        "import os, pathlib, sys; sys.orig_argv[1] == '-m' and pathlib.Path(os.environ['STARTED']).touch()"
    )
    started = directory / "started"
    with Terminal(*UP, TMPDIR=str(directory), PYTHONPATH=str(directory), STARTED=str(started)) as terminal:
        while not started.exists():
            time.sleep(0.01)
        time.sleep(seconds)
        terminal.type(CTRL_C)
        # pty.spawn's parent has the same interpreter, and the code of a signal as Python gives it on.
        assert terminal.exit_code() in {0, 256 - signal.SIGINT}
        assert "Traceback" not in terminal.text
        assert "KeyboardInterrupt" not in terminal.text
    assert processes_mentioning(str(directory)) == {}
