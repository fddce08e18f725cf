"""MLPs with packed weights. Their hidden units are shared out to the cores."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.cpu.packed_linear import PackedLinear, Panels, as_groups, from_panels, spread_rows
from specd.worker.cpu.streams import ROWS_FOR_ALL_STREAMS, STREAMS, can_share, share_out
from specd.worker.cpu.undo import Undo

_GATED = {"gate_proj", "up_proj", "down_proj"}


def pack_mlps(network: Module) -> Iterator[Undo]:
    """Replace each gated MLP with packed layers by one that has a part for each of our streams.

    Other MLPs stay as they are.
    """
    for parent in list(network.modules()):
        for name, child in parent.children().items():
            if isinstance(child, Module) and set(child.children()) == _GATED and _is_packed(child):
                packed = PackedMLP(child, len(STREAMS.all))
                if _do_the_same(child, packed):
                    setattr(parent, name, packed)
                    yield partial(setattr, parent, name, child)


class PackedMLP(Module):
    """A gated MLP that keeps its hidden units in panels, and in parts.

    Hidden units do not depend on each other, so each stream computes some of them, and one sum joins the streams: the
    tensor parallelism of Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3. The layers between the products are
    the model's own, which must compute the units one by one. One stream that computes all parts gives the same bits.
    """

    plain: Module

    def __init__(self, mlp: Module, most_parts: int) -> None:
        """Compute an MLP in at most this many parts of equal size."""
        super().__init__()  # type: ignore[no-untyped-call]
        gate, up, down = (mlp[name].weight for name in ("gate_proj", "up_proj", "down_proj"))
        num_parts = next(parts for parts in range(most_parts, 0, -1) if len(gate) % parts == 0)
        self.num_outputs: int = mlp["down_proj"].num_outputs
        # The MLP itself, with the same memory. It is no child, so that a walk over the network finds each weight once.
        object.__setattr__(self, "plain", mlp)
        self.whole = _with(mlp, gate, up, down, num_parts)
        self.parts = [
            _with(mlp, *some, 1)
            for some in zip(
                mx.split(gate, num_parts), mx.split(up, num_parts), mx.split(down, num_parts, 1), strict=True
            )
        ]

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., inputs] to [..., outputs]."""
        num_rows = x.size // x.shape[-1]
        shape = (*x.shape[:-1], self.num_outputs)
        if num_rows >= ROWS_FOR_ALL_STREAMS and len(self.parts) < len(STREAMS.all):
            # The units cannot be divided evenly, but the rows can.
            output = spread_rows(x, lambda share: from_panels(self.whole(as_groups(share)), (len(share), shape[-1])))
            return output.reshape(shape)
        compute = self.in_parts if can_share(num_rows) else self.whole
        return from_panels(compute(as_groups(x)), shape)

    def in_parts(self, groups: mx.array) -> mx.array:
        """Map groups to panels, as `whole` does, every part on a stream of its own."""
        # Computed once, and not for each product that repeats them.
        repeated = mx.broadcast_to(groups, (len(self.parts[0].gate_proj.weight), *groups.shape[1:]))
        products: list[mx.array] = share_out([partial(part, repeated) for part in self.parts])
        return sum(products[1:], start=products[0])


class _FromPanels:
    """The product of hidden units in panels with other panels, part by part, and the sum."""

    def __init__(self, weight: mx.array, num_parts: int) -> None:
        panels, num_inputs, width = weight.shape
        self._num_parts = num_parts
        if num_parts > 1:
            weight = weight.reshape(panels, num_parts, num_inputs // num_parts, width).swapaxes(0, 1)
        self._panels = Panels(weight)

    def __call__(self, hidden: mx.array) -> mx.array:
        *rows, width = hidden.shape[1:]
        num_inputs = len(hidden) * width
        if self._num_parts == 1:
            return self._panels(from_panels(hidden, (1, *rows, num_inputs)))
        parts = hidden.reshape(self._num_parts, -1, *rows, width)
        groups = parts.transpose(0, 2, 3, 1, 4) if len(rows) > 1 else parts.swapaxes(1, 2)
        return self._panels(groups.reshape(self._num_parts, 1, *rows, num_inputs // self._num_parts)).sum(axis=0)


def _with(mlp: Module, gate: mx.array, up: mx.array, down: mx.array, num_parts: int) -> Module:
    """Return the MLP with these panels, from panels to panels; it has no memory of its own."""
    copied = copy.copy(mlp)
    copied.gate_proj, copied.up_proj, copied.down_proj = Panels(gate), Panels(up), _FromPanels(down, num_parts)
    return copied


def _is_packed(mlp: Module) -> bool:
    gate, up, down = (mlp[name] for name in ("gate_proj", "up_proj", "down_proj"))
    if not all(type(layer) is PackedLinear and "bias" not in layer for layer in (gate, up, down)):
        return False
    panels, _, width = gate.weight.shape
    return bool(panels * width == down.weight.shape[1])  # else some hidden units are only padding


def _do_the_same(mlp: Module, packed: PackedMLP) -> bool:
    """Return whether the two agree, for few rows and for more: a model may have any layers between the products."""
    try:
        for num_rows in (1, 5):
            x = mx.random.normal((1, num_rows, mlp["gate_proj"].weight.shape[1]), key=mx.random.key(num_rows))
            expected = mlp(x)
            for compute in (packed.whole, packed.in_parts):
                difference = mx.max(mx.abs(from_panels(compute(as_groups(x)), expected.shape) - expected))
                if not difference <= 1e-3 * mx.max(mx.abs(expected)):
                    return False
    except Exception:  # a model can raise any error on units in panels
        return False
    return True
