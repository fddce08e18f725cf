"""Simple filters for one dimensional signals."""

import numpy as np

__all__ = ["moving_average", "exponential_average", "normalize"]


def moving_average(x, window):
    """Average every ``window`` consecutive samples.

    Parameters
    ----------
    x : array_like, shape (n,)
        The input signal.
    window : int
        Number of samples to average over.

    Returns
    -------
    y : ndarray, shape (n - window + 1,)
        The smoothed signal.
    """
    x = np.asarray(x, dtype=float)
    if x.ndim != 1:
        raise ValueError("x must be one dimensional")
    if not 1 <= window <= x.size:
        raise ValueError("window must be between 1 and the length of x")
    total = np.cumsum(np.insert(x, 0, 0.0))
    return (total[window:] - total[:-window]) / window


def exponential_average(x, alpha):
    """Smooth a signal with exponentially decaying weights.

    Parameters
    ----------
    x : array_like, shape (n,)