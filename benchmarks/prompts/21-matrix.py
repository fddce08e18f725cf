"""Dense matrices of numbers, without dependencies.

The class below favours clarity over speed. It is meant for small systems of
equations, for teaching, and for platforms on which numpy is not available.

    >>> a = Matrix([[1, 2], [3, 4]])
    >>> b = Matrix.identity(2)
    >>> a @ b == a
    True
    >>> a.trace()
    5
"""

import math
import numbers
import operator
import random


class MatrixError(Exception):
    """Base class of the exceptions raised in this module."""


class ShapeError(MatrixError):
    """Raised when the shapes of the operands do not fit together."""


class SingularError(MatrixError):
    """Raised when a matrix has no inverse."""


class Matrix:
    """A rectangular table of numbers.

    Args:
        rows: an iterable of rows, each of which is an iterable of numbers.
            All rows must have the same length.

    Raises:
        ShapeError: if the rows differ in length or there are none.
    """

    __slots__ = ("_rows", "_shape")

    def __init__(self, rows):
        self._rows = [list(row) for row in rows]
        if not self._rows:
            raise ShapeError("a matrix needs at least one row")
        width = len(self._rows[0])
        for row in self._rows:
            if len(row) != width:
                raise ShapeError("all rows must have the same length")
        self._shape = (len(self._rows), width)

    @classmethod
    def zeros(cls, height, width):
        """Return a matrix filled with zeros."""
        return cls([[0.0] * width for _ in range(height)])

    @classmethod
    def ones(cls, height, width):
        """Return a matrix filled with ones."""
        return cls([[1.0] * width for _ in range(height)])

    @classmethod
    def identity(cls, size):
        """Return a square matrix with ones on the diagonal."""
        result = cls.zeros(size, size)
        for i in range(size):
            result[i, i] = 1.0
        return result

    @classmethod
    def diagonal(cls, values):
        """Return a square matrix with the given values on the diagonal."""
        values = list(values)
        result = cls.zeros(len(values), len(values))
        for i, value in enumerate(values):
            result[i, i] = value
        return result

    @classmethod
    def random(cls, height, width, seed=None):
        """Return a matrix of uniform random numbers between 0 and 1."""
        rng = random.Random(seed)
        return cls([[rng.random() for _ in range(width)] for _ in range(height)])

    @property
    def shape(self):
        """The number of rows and the number of columns."""
        return self._shape

    @property
    def height(self):
        """The number of rows."""
        return self._shape[0]

    @property
    def width(self):
        """The number of columns."""
        return self._shape[1]

    @property
    def is_square(self):
        """Whether there are as many rows as columns."""
        return self.height == self.width

    @property
    def T(self):
        """The transposed matrix."""
        return Matrix(zip(*self._rows))

    def __getitem__(self, index):
        row, column = index
        return self._rows[row][column]

    def __setitem__(self, index, value):
        row, column = index
        self._rows[row][column] = value

    def __iter__(self):
        return iter(self._rows)

    def __eq__(self, other):
        if not isinstance(other, Matrix):
            return NotImplemented
        return self._rows == other._rows

    def __repr__(self):
        return f"{type(self).__name__}({self._rows!r})"

    def __str__(self):
        cells = [[f"{value:g}" for value in row] for row in self._rows]
        widths = [max(len(cell) for cell in column) for column in zip(*cells)]
        lines = []
        for row in cells:
            padded = [cell.rjust(width) for cell, width in zip(row, widths)]
            lines.append("[" + "  ".join(padded) + "]")
        return "\n".join(lines)

    def copy(self):
        """Return an independent copy."""
        return Matrix(self._rows)

    def row(self, index):
        """Return one row as a list."""
        return list(self._rows[index])

    def column(self, index):
        """Return one column as a list."""
        return [row[index] for row in self._rows]

    def map(self, function):
        """Apply a function to every element."""
        return Matrix([[function(value) for value in row] for row in self._rows])

    def _elementwise(self, other, function):
        """Combine two matrices of the same shape, or a matrix and a number."""
        if isinstance(other, numbers.Number):
            return self.map(lambda value: function(value, other))
        if not isinstance(other, Matrix):
            return NotImplemented
        if self.shape != other.shape:
            raise ShapeError(f"shapes {self.shape} and {other.shape} differ")
        return Matrix(
            [function(a, b) for a, b in zip(left, right)]
            for left, right in zip(self._rows, other._rows)
        )

    def __add__(self, other):
        return self._elementwise(other, operator.add)

    def __sub__(self, other):
        return self._elementwise(other, operator.sub)

    def __mul__(self, other):
        return self._elementwise(other, operator.mul)

    def __truediv__(self, other):
        return self._elementwise(other, operator.truediv)

    def __neg__(self):
        return self.map(operator.neg)

    def __abs__(self):
        return self.map(abs)

    def __matmul__(self, other):
        if not isinstance(other, Matrix):
            return NotImplemented
        if self.width != other.height:
            raise ShapeError(f"cannot multiply {self.shape} by {other.shape}")
        columns = list(zip(*other._rows))
        return Matrix(
            [sum(a * b for a, b in zip(row, column)) for column in columns]
            for row in self._rows
        )

    def trace(self):
        """Return the sum of the diagonal elements."""
        self._require_square()
        return sum(self[i, i] for i in range(self.height))

    def norm(self):
        """Return the Frobenius norm."""
        return math.sqrt(sum(value * value for row in self._rows for value in row))

    def _require_square(self):
        if not self.is_square:
            raise ShapeError(f"expected a square matrix, got shape {self.shape}")

    def decompose(self):
        """Factor the matrix into triangular matrices with partial pivoting.

        Returns:
            A tuple ``(lower, upper, order, sign)`` where ``order`` is the list
            of row numbers after the exchanges and ``sign`` is the sign of that
            permutation.

        Raises:
            ShapeError: if the matrix is not square.
            SingularError: if a pivot is zero.
        """
        self._require_square()
        size = self.height
        lower = Matrix.identity(size)
        upper = self.map(float)
        order = list(range(size))
        sign = 1
        for k in range(size):
            pivot = max(range(k, size), key=lambda i: abs(upper[i, k]))
            if upper[pivot, k] == 0:
                raise SingularError("the matrix is singular")
            if pivot != k: