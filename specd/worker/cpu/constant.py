"""A constant that is kept in the shapes that it is used in."""

from __future__ import annotations

import mlx.core as mx

# Rounds need fewer; the chunks of prompts have any number of rows.
_MOST_SHAPES = 128


class Constant:
    """A constant operand for arrays of any shape.

    MLX broadcasts an operand by an operation of its own, which takes about as long as the one on a few rows that it is
    for. Here that is done once for each shape. Broadcast arrays take no memory.
    """

    def __init__(self, value: mx.array | float) -> None:
        self._value = value if isinstance(value, mx.array) else mx.array(value)
        mx.eval(self._value)  # lazy arrays belong to a thread
        self._of_shape: dict[tuple[int, ...], mx.array] = {}

    def of(self, shape: tuple[int, ...]) -> mx.array:
        """Return it in a shape that it can be broadcast to."""
        constant = self._of_shape.get(shape)
        if constant is None:
            constant = mx.broadcast_to(self._value, shape)
            mx.async_eval(constant)
            if len(self._of_shape) >= _MOST_SHAPES:
                self._of_shape.clear()
            self._of_shape[shape] = constant
        return constant
