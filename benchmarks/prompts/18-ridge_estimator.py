"""Linear regression with an L2 penalty."""

import numbers

import numpy as np

from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y


class SimpleRidge(RegressorMixin, BaseEstimator):
    """Least squares regression with a penalty on the size of the weights.

    Parameters
    ----------
    alpha : float, default=1.0
        Strength of the penalty. Must be non-negative.

    fit_intercept : bool, default=True
        Whether to fit a constant term, which is not penalized.

    solver : {"cholesky", "svd"}, default="cholesky"
        The method used to solve the normal equations.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
        The estimated weights.

    intercept_ : float
        The constant term, 0.0 if ``fit_intercept=False``.

    n_features_in_ : int
        Number of features seen during fit.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.array([[0.0], [1.0], [2.0]])
    >>> y = np.array([1.0, 3.0, 5.0])
    >>> model = SimpleRidge(alpha=0.0).fit(X, y)
    >>> model.predict([[3.0]])
    array([7.])
    """

    def __init__(self, alpha=1.0, fit_intercept=True, solver="cholesky"):
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.solver = solver

    def _check_params(self):
        """Check the values given to the constructor."""
        if not isinstance(self.alpha, numbers.Real) or self.alpha < 0:
            raise ValueError(
                "alpha must be a non-negative number, got %r" % (self.alpha,)
            )
        if self.solver not in ("cholesky", "svd"):
            raise ValueError(
                "solver must be 'cholesky' or 'svd', got %r" % (self.solver,)
            )

    def fit(self, X, y, sample_weight=None):
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.

        y : array-like of shape (n_samples,)
            Target values.

        sample_weight : array-like of shape (n_samples,), default=None
            Individual weights for each sample.

        Returns
        -------
        self : object
            The fitted estimator.
        """
        self._check_params()
        X, y = check_X_y(X, y, y_numeric=True)
        self.n_features_in_ = X.shape[1]

        if self.fit_intercept:
            X_offset = np.average(X, axis=0, weights=sample_weight)
            y_offset = np.average(y, weights=sample_weight)
            X = X - X_offset
            y = y - y_offset

        if sample_weight is not None:
            scale = np.sqrt(np.asarray(sample_weight, dtype=float))
            X = X * scale[:, np.newaxis]
            y = y * scale

        if self.solver == "cholesky":