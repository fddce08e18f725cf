"""A value that is kept in the shapes that it is taken in."""

from __future__ import annotations

import mlx.core as mx

# Rounds have fewer.
_MOST_SHAPES = 128


class Constant:
    """A value that operations take with arrays of any shape.

    What has another shape than its partner is repeated by an operation more, which takes about as long as the one that
    it is for. Here that is done once for each shape, which takes no memory.
    """

    def __init__(self, value: mx.array | float) -> None:
        self._value = value if isinstance(value, mx.array) else mx.array(value)  # which would copy it
        mx.eval(self._value)  # what is not evaluated belongs to a thread
        self._of_shape: dict[tuple[int, ...], mx.array] = {}

    def of(self, shape: tuple[int, ...]) -> mx.array:
        """Return it in a shape."""
        constant = self._of_shape.get(shape)
        if constant is None:
            constant = mx.broadcast_to(self._value, shape)
            mx.async_eval(constant)
            if len(self._of_shape) >= _MOST_SHAPES:
                self._of_shape.clear()  # prefills have any number of rows
            self._of_shape[shape] = constant
        return constant
