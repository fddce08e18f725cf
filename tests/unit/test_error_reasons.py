"""The reasons of errors: those of the protocol, of the docs and of the code are the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from specd.v1.errors_pb2 import ErrorReason

ROOT = Path(__file__).parents[2]
CLIENTS = {name.removeprefix("ERROR_REASON_") for name in dict(ErrorReason.items())} - {"UNSPECIFIED"}
# Between workers and coordinator, of a missing draft, and of a client about itself.
OTHERS = {
    *("BROKEN_DISTRIBUTION", "CACHE_TOO_SHORT", "EMPTY_TOKEN_IDS"),
    *("DRAFT_BROKEN", "DRAFT_CONTEXT_EXCEEDED", "DRAFT_FAILED", "DRAFT_LATE", "DRAFT_NOT_CONFIGURED"),
    *("DRAFT_UNAVAILABLE", "CLIENT_CLOSED", "UNAVAILABLE"),
}


def reasons_in_code() -> set[str]:
    """Return the reasons with which errors are made, and the constants that hold them."""
    found: set[str] = set()
    for folder in ("specd", "coordinator", "target_worker", "draft_worker"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                values: list[ast.expr] = []
                if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")).endswith(
                    "Error"
                ):
                    values = node.args[:1]
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    named = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    values = [node.value] if named == [node.value.value] else []
                found |= {
                    value.value
                    for value in values
                    if isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                    and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", value.value)
                }
    return found


def test_every_reason_of_the_code_is_in_the_protocol() -> None:
    found = reasons_in_code()
    assert len(found) > 25
    assert found <= CLIENTS | OTHERS


def test_the_docs_explain_every_reason() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    table = page[page.index("| status | reasons |") : page.index("## Faults")]
    assert set(re.findall(r"`([A-Z_]+)`", table)) - {"RESOURCE_EXHAUSTED"} >= CLIENTS
