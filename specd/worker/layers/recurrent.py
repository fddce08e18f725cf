"""The cache of a layer with a recurrent state: a state space, a linear attention or a short convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from specd.cache_footprint import CacheFootprint
from specd.worker.layers.owned import owned
from specd.worker.layers.products import Products, making

# Passes with more tokens than this are prefills, into which no session is rewound.
MOST_TOKENS = 40
# Tokens between two kept states; the latest is also kept. A rewind to a position between them computes again.
_SPACING = 8
# States that are kept longer, for sessions with the same beginning: at the ends of a prompt's chunks, and at positions
# this far apart.
_MOST_CHECKPOINTS = 4
_CHECKPOINT_SPACING = 256

_State = tuple[mx.array | None, ...]


@dataclass(frozen=True, eq=False)
class _Call:
    """A call `function(module, *args, **options)`, with a _Place instead of the cache, and its products."""

    module: Module
    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    products: Products


@dataclass(frozen=True)
class _Place:
    """Stands for the cache in an argument, as a part of it or as the whole; a copy inserts its own cache there."""

    of_parts: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class _Pass:
    """The calls of a pass over the tokens from `begin` on, and the state before them, if it is kept.

    It is immutable, so that copies of a cache share it.
    """

    begin: int
    num_tokens: int
    before: _State | None
    calls: tuple[_Call, ...] = ()

    @property
    def arguments(self) -> list[mx.array]:
        """The arrays among the arguments, and the products."""
        every = chain.from_iterable((*call.args, *call.options.values()) for call in self.calls)
        products = [output for call in self.calls for _, output in call.products.made]
        return [*(arg for arg in every if isinstance(arg, mx.array)), *products]


class _Scratch:
    """Keys and values for a module that has attention beside its state. Recomputed ones are not used."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class RecurrentCache(ArraysCache):
    """The state after the last token, and earlier states and arguments for rewinds.

    A state cannot forget a token. So the modules that update it record their arguments here, and a rewind sets an
    earlier state and calls them again with the tokens up to the position. That is lazy: only the operations that lead
    to the state are computed, together with the next pass (checkpointing and recomputation; Chen et al., arXiv
    1604.06174). The outputs of linear layers and convolutions are known from the first call (`products.py`), so only
    the recurrence is computed again. Arrays of a state are replaced and never written to, so keeping one costs its
    memory only, and the prefix cache shares them.

    Invariants: passes follow one another up to `offset`; the first has its state.
    """

    def __init__(self, size: int) -> None:
        """Begin empty, with this many arrays."""
        super().__init__(size)
        self.cache: Any  # list[mx.array | None]
        self.offset = 0
        self._passes: list[_Pass] = []
        self._checkpoints: list[tuple[int, _State]] = [(0, tuple(self.cache))]

    def __setitem__(self, index: int, array: mx.array) -> None:
        """Store a copy of an array of the state: modules mostly pass a slice of an array for all tokens of a pass."""
        self.cache[index] = owned(array)

    def record(
        self, module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], n: int
    ) -> Products:
        """Record the arguments of the call by which a module is about to update the state, with n tokens.

        Returns the object for the products of the call. A module's second call begins the next pass.
        """
        if not self._passes or any(call.module is module for call in self._passes[-1].calls):
            self._begin(n)
        if n > MOST_TOKENS:
            args, options = (), {}  # not kept, because they can be as large as a chunk of a prompt
        named = {name: self._without_caches(arg) for name, arg in options.items()}
        call = _Call(module, function, tuple(map(self._without_caches, args)), named, Products(n))
        self._passes[-1] = replace(self._passes[-1], calls=(*self._passes[-1].calls, call))
        return call.products if n <= MOST_TOKENS else Products(n)

    def _begin(self, num_tokens: int) -> None:
        state = tuple(self.cache)
        if self._passes and self._passes[-1].num_tokens > MOST_TOKENS:
            self._passes.clear()
            self._keep(self.offset, state)
        self._passes.append(_Pass(self.offset, num_tokens, state))
        self.offset += num_tokens
        self._thin_out()

    def _thin_out(self) -> None:
        """Drop states close to others, and passes that are too old for a rewind."""
        kept = [i for i, each in enumerate(self._passes) if each.before is not None]
        if len(kept) > 2 and self._passes[kept[-2]].begin - self._passes[kept[-3]].begin < _SPACING:
            dropped = kept.pop(-2)
            self._passes[dropped] = replace(self._passes[dropped], before=None)
        latest = self._passes[-1].begin
        far = [i for i in kept if self._passes[i].begin <= latest - MOST_TOKENS]
        for i in far[:-1]:
            if self._passes[i].begin >= self._checkpoints[-1][0] + _CHECKPOINT_SPACING:
                self._keep(self._passes[i].begin, self._passes[i].before or ())
        del self._passes[: far[-1] if far else 0]

    def _keep(self, position: int, state: _State) -> None:
        """Add a checkpoint. If there are too many, drop the one that leaves the smallest gap, but not an end."""
        self._checkpoints.append((position, state))
        if len(self._checkpoints) > _MOST_CHECKPOINTS + 1:
            positions = [at for at, _ in self._checkpoints]
            gaps = [positions[i + 1] - positions[i - 1] for i in range(1, len(positions) - 1)]
            del self._checkpoints[1 + gaps.index(min(gaps))]

    def serves(self, position: int) -> int:
        if position == self.offset:
            return position
        if self._passes and position >= self._passes[0].begin:
            latest = self._passes[-1]
            return position if latest.num_tokens <= MOST_TOKENS else min(position, latest.begin)
        return max(at for at, _ in self._checkpoints if at <= position)

    def rewind(self, position: int) -> None:
        if position == self.offset:
            return
        if not self._passes or position < self._passes[0].begin:
            self._checkpoints = [each for each in self._checkpoints if each[0] <= position]
            assert self._checkpoints[-1][0] == position
            self.cache, self._passes, self.offset = list(self._checkpoints[-1][1]), [], position
            return
        passes = [each for each in self._passes if each.begin < position]
        later = self._passes[len(passes)] if len(passes) < len(self._passes) else None
        if later is not None and later.begin == position and later.before is not None:
            self.cache, self._passes = list(later.before), passes
        else:
            first = max(i for i, each in enumerate(passes) if each.before is not None)
            self.cache, self._passes = list(passes[first].before or ()), passes[:first]
            for each in passes[first:]:
                self._passes.append(self._again(each, min(position - each.begin, each.num_tokens)))
        self._checkpoints = [each for each in self._checkpoints if each[0] <= position]
        self.offset = position

    def _again(self, earlier: _Pass, num_tokens: int) -> _Pass:
        """Update the state with the first tokens of an earlier pass."""
        calls = []
        for call in earlier.calls:
            args = tuple(_first(arg, earlier.num_tokens, num_tokens) for arg in call.args)
            options = {name: _first(arg, earlier.num_tokens, num_tokens) for name, arg in call.options.items()}
            calls.append(_Call(call.module, call.function, args, options, Products(num_tokens, call.products.made)))
            named = {name: self._with_caches(arg, earlier.begin) for name, arg in options.items()}
            with making(calls[-1].products):
                call.function(call.module, *(self._with_caches(arg, earlier.begin) for arg in args), **named)
        shorter = _Pass(earlier.begin, num_tokens, earlier.before, tuple(calls))
        if num_tokens < earlier.num_tokens:
            # The state depends on all kept arrays, because one that stayed lazy would keep the longer arrays.
            self.cache = [array if array is None else mx.depends(array, shorter.arguments) for array in self.cache]
        return shorter

    def _without_caches(self, arg: Any) -> Any:
        """Return an argument without caches, and without a mask, which only attention beside the state reads."""
        if arg is self:
            return _Place()
        if isinstance(arg, mx.array) and arg.dtype == mx.bool_:
            return None
        parts = getattr(arg, "caches", ())
        return _Place(tuple(part is self for part in parts)) if parts else arg

    def _with_caches(self, arg: Any, position: int) -> Any:
        if isinstance(arg, _Place):
            return [self if own else _Scratch(position) for own in arg.of_parts] if arg.of_parts else self
        return arg

    def copy(self, position: int) -> RecurrentCache:
        """Return a copy that shares the states, which are never written to."""
        copy = RecurrentCache(len(self.cache))
        copy.cache, copy.offset = list(self.cache), self.offset
        copy._passes, copy._checkpoints = list(self._passes), list(self._checkpoints)
        copy.rewind(position)
        mx.eval(copy.arrays)
        return copy

    @property
    def footprint(self) -> CacheFootprint:
        """The memory of a session that keeps the most states and arguments."""
        latest = self._passes[-1:]
        states = -(-MOST_TOKENS // _SPACING) + _MOST_CHECKPOINTS + 3  # with the first, the latest and the present one
        arguments = sum(array.nbytes // each.num_tokens for each in latest for array in each.arguments)
        # Also the arguments of a pass that begins before all these tokens, and of the running pass.
        return CacheFootprint({1: states * sum(array.nbytes for array in self.rows) + 3 * MOST_TOKENS * arguments})

    @property
    def rows(self) -> Sequence[mx.array]:
        return [array for array in self.cache if array is not None]

    @property
    def arrays(self) -> Sequence[mx.array]:
        states = [self.cache, *(each.before or () for each in self._passes), *(state for _, state in self._checkpoints)]
        arguments = chain.from_iterable(each.arguments for each in self._passes)
        return [*(array for array in chain.from_iterable(states) if array is not None), *arguments]


def _first(arg: Any, of: int, num_tokens: int) -> Any:
    """Return the first tokens of an argument, if it is an array [1, of, …]."""
    if num_tokens < of and isinstance(arg, mx.array) and arg.ndim > 1 and arg.shape[1] == of:
        return owned(arg[:, :num_tokens])
    return arg
