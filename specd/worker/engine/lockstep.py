"""Calls of one module for several sessions, side by side, that compute its linear layers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
from greenlet import getcurrent, greenlet
from mlx.nn.layers.base import Module


@dataclass(frozen=True, eq=False)
class _Question:
    """A call that has reached a linear layer, and waits for its output."""

    module: Module
    function: Callable[..., mx.array]
    rows: mx.array  # [1, n, size]


def in_lockstep(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of the calls. At each linear layer (`ask`), the calls wait for each other.

    A linear layer reads its weights for each product, so one product of all sessions' rows takes hardly longer than
    that of one session. The calls are greenlets: each has a stack of its own, and all run on this thread, as MLX needs.
    """
    running = [greenlet(call) for call in calls]
    answers = [each.switch() for each in running]
    while questions := {i: answer for i, answer in enumerate(answers) if isinstance(answer, _Question)}:
        for same in {id(question.module): question.module for question in questions.values()}.values():
            asking = [i for i, question in questions.items() if question.module is same]
            for i, output in zip(asking, _outputs([questions[i] for i in asking]), strict=True):
                answers[i] = running[i].switch(output)
    return answers


def ask(module: Module, function: Callable[..., mx.array], rows: mx.array) -> mx.array:
    """Return the output of a linear layer for rows [1, n, size]. For calls in lockstep."""
    waiting = getcurrent().parent
    assert waiting is not None
    output: mx.array = waiting.switch(_Question(module, function, rows))
    return output


def _outputs(questions: Sequence[_Question]) -> list[mx.array]:
    first = questions[0]
    ends = list(accumulate(question.rows.shape[1] for question in questions))
    together = first.function(first.module, mx.concatenate([question.rows for question in questions], axis=1))
    parts: list[mx.array] = mx.split(together, ends[:-1], axis=1)  # type: ignore[assignment]
    return parts
