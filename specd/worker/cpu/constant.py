"""A constant operand, kept in the shapes in which it is used."""

from __future__ import annotations

import mlx.core as mx

# Rounds need fewer; the chunks of prompts have any number of rows.
_MOST_SHAPES = 128


class Constant:
    """A constant operand for arrays of any shape.

    MLX broadcasts an operand by an operation of its own, which takes about as long as a computation on a few rows. Here
    each shape is broadcast once. Broadcast arrays take no memory.
    """

    def __init__(self, value: mx.array | float) -> None:
        self._value = value if isinstance(value, mx.array) else mx.array(value)
        mx.eval(self._value)  # lazy arrays belong to a thread
        self._of_shape: dict[tuple[int, ...], mx.array] = {}

    def of(self, shape: tuple[int, ...]) -> mx.array:
        """Return the constant in a shape to which it can be broadcast."""
        constant = self._of_shape.get(shape)
        if constant is None:
            constant = mx.broadcast_to(self._value, shape)
            mx.async_eval(constant)
            if len(self._of_shape) >= _MOST_SHAPES:
                self._of_shape.clear()
            self._of_shape[shape] = constant
        return constant
