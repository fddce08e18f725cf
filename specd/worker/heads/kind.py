"""A kind of head that has a repository of its own, with a configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specd.worker.heads.head import Head

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class HeadKind:
    """How a head is made from its configuration, and the names of its tensors.

    `renamed` returns the tensors of the repository by the names within the head, without those that it does not need.
    `make` takes the configuration, the target's network and these names, and makes a head with random weights. It
    raises ValueError for a head that cannot be used.
    """

    make: Callable[[Mapping[str, Any], Any, Collection[str]], Head]
    renamed: Callable[[Tensors], Tensors]
