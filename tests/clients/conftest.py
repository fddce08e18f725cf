"""Running stacks for clients that others have written."""

from __future__ import annotations

from tests.gateway.conftest import arranged_stack, stack

__all__ = ["arranged_stack", "stack"]
