"""The process that measures a target and its possible drafts for `--draft auto` and `specd pair`.

It reads one line of JSON from standard input, the request, and writes a line of JSON to standard output for each model
that it has measured. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from specd.launch import start_logging
from specd.user_cache import taking_turns

_TURN_SECONDS = 8.0


def main() -> None:
    """Measure the models of one request."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to standard error
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    start_logging("pair-trial")

    from specd.worker.cpu.openblas import load_blas

    threads = request["threads"]
    blas = load_blas(max(threads.values()))

    # MLX comes in here, after its BLAS.
    from specd.bench.pair_measurement import measure_pairs

    # Workers that start on this machine measure their steps in turns, too.
    with taking_turns("calibration", timeout_seconds=_TURN_SECONDS):
        for answer in measure_pairs(request, blas):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
