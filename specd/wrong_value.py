"""Wrong values in words, from pydantic's errors."""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_BYTES = "it must be a number of bytes, such as 512MiB or 8GiB"
# Where pydantic's own words speak of its parser.
_REQUIREMENTS = {
    "byte_size": _BYTES,
    "byte_size_unit": _BYTES,
    "bool_parsing": "it must be true or false",
    "int_parsing": "it must be a whole number",
    "float_parsing": "it must be a number",
    "json_invalid": "it is not JSON",
}
_OWN = "value_error"  # raised by a validator of ours


def requirement(problem: ErrorDetails) -> str:
    """Return what a value must be, such as "it must be greater than 0"; our validators say it in their words."""
    if known := _REQUIREMENTS.get(problem["type"]):
        return known
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be", 1)
    return re.sub(r" after validation(?=, not )", "", message)


def wrong_value(name: str, problem: ErrorDetails) -> str:
    """Return a sentence with the name of a value, the value, and what it must be."""
    if problem["type"] == _OWN:
        return f"{name}: {requirement(problem)}"  # it has the value
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name} is {problem['input']!r}: {requirement(problem)}"


def wrong_argument(error: ValidationError, least: float | None, most: float | None) -> str:
    """Return what is wrong with the value of an option, which is `least` to `most`, where these are known."""
    problem = error.errors()[0]
    while isinstance(inner := problem.get("ctx", {}).get("error"), ValidationError):  # of an option that is repeated
        problem = inner.errors()[0]
    if problem["type"] == _OWN:
        return requirement(problem)
    needed = requirement(problem).removeprefix("it must be ")
    if least is not None:
        needed = f"{least:g} or more" if most is None else f"{least} to {most}"
    return f"it is {problem['input']}, but it must be {needed}"
