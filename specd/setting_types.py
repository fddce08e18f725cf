"""Types of settings: text that is checked, and what it stands for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from specd.addresses import (
    check_address,
    check_addresses,
    check_endpoint,
    check_optional_addresses,
    check_session_server,
    check_tcp_address,
)

# Maximum of draft tokens per round, on the wire and in a request.
MAX_NUM_DRAFT_TOKENS = 32


def _check_draft_tokens(value: str) -> str:
    if value != "auto" and not (re.fullmatch("[0-9]{1,4}", value) and int(value) <= MAX_NUM_DRAFT_TOKENS):
        raise ValueError(f"{value!r} is not a number of draft tokens: write 'auto' or 0 to {MAX_NUM_DRAFT_TOKENS}")
    return value


def _check_directories(value: str) -> str:
    names = [name.strip() for name in value.split(",") if name.strip() and value != "none"]
    for name in names:
        if not Path(name).expanduser().is_dir():
            raise ValueError(
                f"{name!r} is not a directory: name directories that hold models, with commas between them"
            )
    return ",".join(names)


Address = Annotated[str, AfterValidator(check_address)]
Addresses = Annotated[str, AfterValidator(check_addresses)]
OptionalAddress = Annotated[
    str, AfterValidator(lambda address: "" if address in {"", "none"} else check_address(address))
]
OptionalAddresses = Annotated[str, AfterValidator(check_optional_addresses)]
MetricsAddress = Annotated[str, AfterValidator(check_tcp_address)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
File = Annotated[str, AfterValidator(lambda path: "" if path == "none" else path)]
Directories = Annotated[str, AfterValidator(_check_directories)]
ModelOrNone = Annotated[str, AfterValidator(lambda name: "" if name == "none" else name)]
SessionServerUrl = Annotated[str, AfterValidator(check_session_server)]
Seconds = Annotated[float, Field(gt=0)]
# Flags and variables are text.
_Number = BeforeValidator(lambda value: int(value) if str(value).isdecimal() else value)
KvBits = Annotated[Literal[16, 8, 4], _Number]
KvGroupSize = Annotated[Literal[32, 64, 128], _Number]
DraftTokens = Annotated[str, BeforeValidator(str), AfterValidator(_check_draft_tokens)]
