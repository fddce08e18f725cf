"""Linear layers whose weights lie in memory in the order in which a matrix product reads them.

A general matrix product copies its larger operand, piece by piece, into panels that its inner loop can run through
("packing": Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008). That pays where each panel
is then used for hundreds of rows. A decode or a verify has a few, and the copying takes most of its time. Weights never
change: here they become panels once, at load, and each panel is a product so small that OpenBLAS does not copy it.
On the embedded target one core is then faster than two were: a step with one token takes half of the time, with eight
six tenths (`benchmarks/cpu_steps.py`).

Also, the sums of each row are computed in the same order for any other rows: a token's products have the same bits in
every width and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from specd.worker.cpu import openblas
from specd.worker.cpu.streams import MOST_STREAMS, ROWS_FOR_ALL_STREAMS, STREAMS, can_share, share_out, spread
from specd.worker.cpu.undo import Undo, UnsuitableError

# OpenBLAS's kernel for small products computes 64 columns at a time if possible, and four rows.
_WIDTHS = (64, 32, 16)
_ROWS = 4
# The kernel computes products of up to 100^3 multiplications (kernel/x86_64/sgemm_small_kernel_permit_skylakex.c).
_LARGEST_PRODUCT = 100**3
_MOST_GROUPS = 64
# A layer with this many panels, such as the output layer, is shared out to the cores; with fewer, that takes longer.
_PANELS_FOR_ALL_STREAMS = 100


def pack(network: Module, vocabulary_rows: int) -> Iterator[Undo]:
    """Pack the weights of a network with this many logits.

    Raises UnsuitableError where packing would not be faster.
    """
    if not openblas.has_small_products():
        raise UnsuitableError(f"BLAS has no kernel for small products on this processor ({openblas.core() or 'none'})")
    if len(STREAMS.all) > MOST_STREAMS:
        # Measured on two threads. Where BLAS shares the copying among many threads, one core is hardly faster.
        raise UnsuitableError(f"BLAS has {len(STREAMS.all)} threads: packed weights need at most {MOST_STREAMS}")
    # Without a linear layer of this many rows, the embedding is the output layer; otherwise it only looks up rows.
    is_tied = all(part.weight.shape[0] != vocabulary_rows for part in network.modules() if type(part) is Linear)
    # A list of the layers themselves would keep the weights that are already packed.
    for part in [part for part in network.modules() if part.children()]:
        for name, child in part.children().items():
            if type(child) is Linear and _width(child.weight):
                setattr(part, name, PackedLinear(child.weight, child.get("bias")))
                yield partial(_unpack, part, name)
            elif type(child) is Embedding and _width(child.weight) and is_tied and len(child.weight) == vocabulary_rows:
                setattr(part, name, PackedEmbedding(child.weight))
                yield partial(_unpack, part, name)
            del child  # or its weight would stay while the next one is packed
    if not openblas.keeps_to_one_thread() and not any(_has_large_weight(part) for part in network.modules()):
        openblas.keep_to_one_thread()
        yield openblas.use_all_threads


def _unpack(part: Module, name: str) -> None:
    setattr(part, name, part[name].unpacked())


class PackedLinear(Module):
    """A linear layer: `weight` is [panels, inputs, width], where the usual one has [outputs, inputs].

    The last panel ends with columns of zeros if there are not enough outputs.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        """Pack a weight [outputs, inputs] with as many inputs as panels can have, or fewer."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_outputs, num_inputs = weight.shape
        width = _width(weight)
        padded = mx.pad(weight, [(0, -self.num_outputs % width), (0, 0)])
        self.weight = mx.contiguous(padded.reshape(-1, width, num_inputs).swapaxes(1, 2))
        if bias is not None:
            self.bias = bias
        # Evaluated now, because lazy arrays belong to this thread, and so that the plain weight can be freed.
        mx.eval(self.weight)
        self._whole = Panels(self.weight)
        self._shared = SharedPanels(self.weight) if len(self.weight) >= _PANELS_FOR_ALL_STREAMS else self._whole

    def unpacked(self) -> Linear:
        """Return the usual linear layer."""
        linear = Linear(1, 1, bias=False)
        linear.weight = _unpacked(self.weight, self.num_outputs)
        if "bias" in self:
            linear.bias = self.bias
        return linear

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., inputs] to [..., outputs]."""
        num_rows = x.size // x.shape[-1]
        shape = (*x.shape[:-1], self.num_outputs)
        if num_rows < ROWS_FOR_ALL_STREAMS:
            multiply = self._shared if can_share(num_rows) else self._whole
            output = from_panels(multiply(as_groups(x)), shape)
        else:
            output = spread_rows(
                x, lambda share: from_panels(self._whole(as_groups(share)), (len(share), self.num_outputs))
            )
            output = output.reshape(shape)
        return output + self.bias if "bias" in self else output


class Panels:
    """The products of rows with panels of a weight [..., panels, inputs, width]."""

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight
        self._of_groups: dict[int, mx.array] = {}
        mx.eval(self.weight)

    def __call__(self, groups: mx.array) -> mx.array:
        """Multiply rows in groups [..., 1 or panels, n, inputs], or with one more dimension for the groups.

        Returns the products in panels, [..., panels, n, width], or with that dimension.
        """
        if groups.ndim == self.weight.ndim:
            return groups @ self.weight
        products: mx.array = groups @ self._for_groups(groups.shape[-3])
        return products

    def _for_groups(self, count: int) -> mx.array:
        """Return the weight once for each group, without a copy. MLX would broadcast it again for every product."""
        if count not in self._of_groups:
            *panels, num_inputs, width = self.weight.shape
            weight: mx.array = mx.broadcast_to(self.weight[..., None, :, :], (*panels, count, num_inputs, width))
            mx.eval(weight)  # lazy arrays belong to a thread
            if len(self._of_groups) >= _MOST_GROUPS:
                self._of_groups.clear()  # bounded, because chunks of prompts have many numbers of groups
            self._of_groups[count] = weight
        return self._of_groups[count]


class SharedPanels:
    """The same as Panels, with some of the panels on each of our streams; the bits are the same."""

    def __init__(self, weight: mx.array) -> None:
        count = len(STREAMS.all)
        self._parts = [Panels(part) for part in mx.split(weight, [len(weight) * i // count for i in range(1, count)])]

    def __call__(self, groups: mx.array) -> mx.array:
        """Multiply rows in groups; returns the products in panels, [panels, ..., width]."""
        return mx.concatenate(share_out([partial(part, groups) for part in self._parts]))


def as_groups(x: mx.array) -> mx.array:
    """Group the n rows of x [..., inputs] for products with panels.

    Returns [1, n, inputs] or [1, groups, 4, inputs].
    """
    num_inputs = x.shape[-1]
    n = x.size // num_inputs
    if n <= _ROWS:
        return x.reshape(1, n, num_inputs)
    # All rows are multiplied with one panel, which stays in the core's cache, before the next.
    padded = mx.pad(x.reshape(n, num_inputs), [(0, -n % _ROWS), (0, 0)]) if n % _ROWS else x
    return padded.reshape(1, -1, _ROWS, num_inputs)


def from_panels(panels: mx.array, shape: Sequence[int]) -> mx.array:
    """Return the products of groups with panels, [panels, ..., width], in this shape, [..., outputs], unpadded."""
    if panels.ndim > 3:
        rows = panels.transpose(1, 2, 0, 3)
    else:
        rows = panels if panels.shape[1] == 1 else panels.swapaxes(0, 1)
    if rows.size != math.prod(shape):
        num_rows, num_outputs = math.prod(shape[:-1]), shape[-1]
        rows = rows.reshape(-1, len(panels) * panels.shape[-1])[:num_rows, :num_outputs]
    return rows.reshape(shape)


def spread_rows(x: mx.array, compute: Callable[[mx.array], mx.array]) -> mx.array:
    """Return `compute` of the n rows of x [..., inputs], [n, outputs]; each stream computes a share of the rows."""
    rows = x.reshape(-1, x.shape[-1])
    return spread(len(rows), lambda share: compute(rows[share]), axis=0, multiple=_ROWS)


class PackedEmbedding(Module):
    """An embedding that is also the output layer, with the weights of both in a packed linear layer."""

    def __init__(self, weight: mx.array) -> None:
        """Pack a weight [tokens, size]."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = PackedLinear(weight)

    @property
    def weight(self) -> mx.array:
        """The weight [tokens, size].

        A network that reads it multiplies by it in every pass, so this weight is kept and the packed one is freed.
        """
        if "linear" in self:
            self.embedding = self.unpacked()
            del self["linear"]
        weight: mx.array = self.embedding.weight
        return weight

    def unpacked(self) -> Embedding:
        """Return the usual embedding."""
        if "linear" not in self:
            return self.embedding
        embedding = Embedding(1, 1)
        embedding.weight = _unpacked(self.linear.weight, self.linear.num_outputs)
        return embedding

    def __call__(self, token_ids: mx.array) -> mx.array:
        """Return the embeddings [..., size] of token ids [...]."""
        embeddings: mx.array
        if "linear" not in self:
            embeddings = self.embedding(token_ids)
            return embeddings
        width = self.linear.weight.shape[-1]
        embeddings = self.linear.weight[token_ids // width, :, token_ids % width]
        return embeddings

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits [..., tokens] of x [..., size]."""
        logits: mx.array = self.linear(x) if "linear" in self else self.embedding.as_linear(x)
        return logits


def _unpacked(panels: mx.array, num_outputs: int) -> mx.array:
    weight = mx.contiguous(panels.swapaxes(1, 2).reshape(-1, panels.shape[1])[:num_outputs])
    mx.eval(weight)
    return weight


def _has_large_weight(part: Module) -> bool:
    """Return whether a layer has a matrix that is not packed, so that BLAS should share out its products."""
    return type(part) not in {PackedLinear, Embedding} and "weight" in part and part.weight.ndim > 1


def _width(weight: mx.array) -> int:
    """Return the width of panels of a weight [outputs, inputs], or 0 if there are too many inputs."""
    return next((width for width in _WIDTHS if _ROWS * width * weight.shape[1] <= _LARGEST_PRODUCT), 0)
