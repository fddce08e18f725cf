"""Trials of a target and its drafts, in a process of their own that frees all memory when it ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specd.cli.pairs.candidates import Candidate
from specd.cli.pairs.record import PairRecord
from specd.pair_worth import DraftTrial, TargetTrial
from specd.startup_error import StartupError
from specd.vocabulary import OWN_HEAD

_COMMAND = (sys.executable, "-m", "specd.bench.pair_trial")


def tried(
    record: PairRecord,
    target_directory: str,
    candidates: Sequence[Candidate],
    threads: Mapping[str, int],
    tell: Callable[[str], object] = lambda _: None,
) -> PairRecord:
    """Return a record with the trials of these candidates added, and the target's own if the record has none.

    `tell` gets the name of each model that is measured next. Raises StartupError if the target cannot be measured. A
    draft that ends the process, which a worker would not survive either, has a trial with a failure.
    """
    waiting = list(candidates)
    while waiting or not record.target:
        request = {
            "target": target_directory,
            "heads": {each.key: each.directory or OWN_HEAD for each in waiting if each.is_head},
            "drafts": {each.key: each.directory for each in waiting if not each.is_head},
            "threads": dict(threads),
            "known": record.target or None,
        }
        before = len(waiting)
        record, waiting, code = _run(request, record, waiting, tell)
        if not record.target:
            raise StartupError(f"the trial of the target has failed (exit code {code}): see the messages above")
        if waiting and code:
            ended, *waiting = waiting
            failed = DraftTrial(failure=f"its trial has ended the process (exit code {code})")
            record = replace(record, drafts={**record.drafts, ended.key: failed})
        elif len(waiting) == before and before:
            raise StartupError("the trial has ended without a result: see the messages above")
    return record


def _run(
    request: Mapping[str, Any], record: PairRecord, waiting: list[Candidate], tell: Callable[[str], object]
) -> tuple[PairRecord, list[Candidate], int]:
    """Run one process; return the record with its answers, the candidates without one, and the exit code."""
    tell("the target" if not record.target else waiting[0].name)
    started = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process alone, and the trial ends with it
    )
    with started as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the exit code says more
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()  # it stays open: the process ends with it
        for line in process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "target" in answer:
                TargetTrial.restored(answer["target"])
                record = replace(record, target=answer["target"])
            else:
                trial = DraftTrial.restored(answer["trial"])
                record = replace(record, drafts={**record.drafts, answer["draft"]: trial})
                waiting = [each for each in waiting if each.key != answer["draft"]]
            if waiting:
                tell(waiting[0].name)
    return record, waiting, process.returncode
