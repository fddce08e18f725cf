"""Short status lines for the terminal."""

import enum
import sys


class Status(enum.Enum):
    """Outcome of a build step."""

    PENDING = "pending"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


ICONS = {
    Status.PENDING: "⏳",
    Status.RUNNING: "🚀",
    Status.PASSED: "✅",
    Status.FAILED: "❌",
    Status.SKIPPED: "🙈",
}


def format_status(step, status, seconds=None):
    """Describe a build step in one line.

    >>> format_status("compile", Status.PASSED, 3.2)
    '✅ compile passed in 3.2s'
    >>> format_status("deploy", Status.RUNNING)
    '🚀 deploy running'
    """
    line = f"{ICONS[status]} {step} {status.value}"
    if seconds is not None: