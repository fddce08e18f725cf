"""The only way into this package: replaces the layers of a network, and undoes replacements that change its logits.

A step describes hundreds of operations, and each takes Python microseconds. So RoPE, RMSNorm, masks and constants have
forms with fewer operations, which saves a quarter of a draft step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import structlog
from mlx.nn.layers.base import Module

from specd.worker.cpu import convolution, early_layers, norm, ops, packed_linear, packed_mlp, rotary
from specd.worker.cpu.undo import Undo, UnsuitableError

log = structlog.get_logger()


def optimize(network: Module, vocabulary_rows: int, agrees: Callable[[], bool]) -> None:
    """Replace layers with forms that are faster on this CPU, as long as the network computes the same.

    `agrees` returns whether the logits are still the same. If they are not, or if an error is raised, each optimisation
    is tried by itself, and undone if it is the cause. Weights are converted layer by layer, in both directions, so that
    there are never two copies of them. One line of the log lists the replacements, and the reasons for those left out.
    """
    optimizations: dict[str, Callable[[], Iterable[Undo]]] = {
        "attention": partial(ops.replace_attention, network),
        "swiglu": partial(ops.replace_swiglu, network),
        "norms": partial(norm.replace_norms, network),
        "convolutions": partial(convolution.replace_convolutions, network),
        "rotary embeddings": partial(rotary.replace_rotary, network),
        "packed weights": partial(packed_linear.pack, network, vocabulary_rows),
        "packed MLPs": partial(packed_mlp.pack_mlps, network),
        "early layers": partial(early_layers.start_layers_early, network),
    }
    outcomes = {name: _Outcome(replace) for name, replace in optimizations.items()}
    if fault := _fault(agrees):
        log.warning("the optimised network gives other logits: trying each optimisation by itself", fault=fault)
        for outcome in reversed(outcomes.values()):
            outcome.take_back(fault)
        for name, replace in optimizations.items():
            outcomes[name] = _Outcome(replace)
            if fault := _fault(agrees):
                outcomes[name].take_back(fault)
    log.info(
        "optimised for this CPU",
        replaced={name: len(outcome.undo) for name, outcome in outcomes.items() if outcome.undo},
        not_replaced={
            name: outcome.reason or "nothing found" for name, outcome in outcomes.items() if not outcome.undo
        },
    )


class _Outcome:
    """The replacements of an optimisation, or the reason why there are none."""

    def __init__(self, replace: Callable[[], Iterable[Undo]]) -> None:
        """Replace."""
        self.undo: list[Undo] = []
        self.reason = ""
        try:
            self.undo.extend(replace())
        except UnsuitableError as error:
            self.take_back(str(error))
        except Exception as error:  # a network or a newer mlx-lm can raise any error
            self.take_back(repr(error))

    def take_back(self, reason: str) -> None:
        """Undo the replacements."""
        while self.undo:
            self.undo.pop()()
        self.reason = self.reason or reason


def _fault(agrees: Callable[[], bool]) -> str:
    try:
        return "" if agrees() else "other logits"
    except Exception as error:
        return repr(error)
