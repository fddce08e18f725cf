"""Check 15: parameters at and beyond their edges, at both doors: each is refused by name, and others notice nothing.

The limits of every field are in tests/unit/test_validation.py and test_sampling.py. Here a client sends what is beyond
them to real processes, while another one generates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from specd.errors import error_info
from specd.v1.generation_pb2 import GenerateRequest, StopConditions
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from tests.e2e.calls import VOCABULARY_SIZE, error_of, responses_to
from tests.security.http_door import HttpAnswer, HttpDoor
from tests.security.owners import Owner, stack_with_owners
from tests.security.standing import is_expected, standard_error_to

NAN, INF = float("nan"), float("inf")
LARGEST_UINT32 = 2**32 - 1
# What tells a client how to do better.
REMEDIES = ("must ", "at most", "the most is", "should ", "ends at", "send ", "set ")


@dataclass(frozen=True)
class Doors:
    """A coordinator and a gateway, one client that stays within the limits, and one that does not."""

    quiet: Owner
    hostile: Owner
    http: HttpDoor
    hostile_token: str
    undisturbed: list[int]

    async def post(self, **fields: Any) -> HttpAnswer:
        """Ask for a completion at the HTTP door, as the hostile client."""
        body = json.dumps({"prompt": "import", "max_tokens": 4, **fields}).replace("Infinity", "1e999")
        return await self.http.post("/v1/completions", body.encode(), f"authorization: Bearer {self.hostile_token}")


async def generated(owner: Owner) -> list[int]:
    """Return the sampled tokens of a client that minds its own business."""
    sampling = SamplingParameters(temperature=0.8, seed=7)
    call = owner.generation.Generate(GenerateRequest(text="class Stack:\n    def", max_tokens=64, sampling=sampling))
    return [token.id for response in await responses_to(call) for token in response.tokens]


@pytest.fixture(scope="module")
async def doors(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Doors]:
    """The processes; at the end they are the same, and have logged no error of their own."""
    directory = tmp_path_factory.mktemp("extremes")
    log = directory / "log"
    with standard_error_to(log):
        context = stack_with_owners(directory, {"quiet": {}, "hostile": {}}, http="127.0.0.1:0")
        stack, owners = await context.__aenter__()
    try:
        pids = [child.pid for child in stack.children]
        assert stack.gateway is not None
        yield Doors(
            owners["quiet"],
            owners["hostile"],
            HttpDoor(stack.gateway.facts["address"]),
            owners["hostile"].token,
            await generated(owners["quiet"]),
        )
        assert [child.pid for child in stack.children] == pids
        assert [line for line in log.read_text().splitlines() if not is_expected(line)] == []
    finally:
        await context.__aexit__(None, None, None)


@asynccontextmanager
async def another_generates(doors: Doors) -> AsyncIterator[None]:
    """Let the quiet client generate within the context; it gets the same tokens as without disturbance."""
    over = asyncio.Event()

    async def generate() -> list[list[int]]:
        each = [await generated(doors.quiet)]
        while not over.is_set():
            each.append(await generated(doors.quiet))
        return each

    generating = asyncio.ensure_future(generate())
    try:
        yield
    finally:
        over.set()
        tokens = await generating
    assert tokens == [doors.undisturbed] * len(tokens)


def sampled(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="import", max_tokens=4, sampling=SamplingParameters(**fields))


def stopping(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="import", max_tokens=4, stop=StopConditions(**fields))


def other(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": "import", "max_tokens": 4, **fields})


# Requests by the field and the value that the message must name.
GRPC: dict[tuple[str, str], GenerateRequest] = {
    **{("temperature", f"{value:g}"): sampled(temperature=value) for value in (-1, 3e38, 1e-30, NAN, INF, -INF)},
    **{("top_p", f"{value:g}"): sampled(top_p=value) for value in (-1, 0, 1e-30, 2, 3e38, NAN, INF, -INF)},
    **{("min_p", f"{value:g}"): sampled(min_p=value) for value in (-1, 2, 3e38, NAN, INF, -INF)},
    **{
        (f"{kind}_penalty", f"{value:g}"): sampled(**{f"{kind}_penalty": value})
        for kind in ("repetition", "presence", "frequency")
        for value in (-1e30, 3e38, NAN, INF, -INF)
    },
    **{
        ("lenience", f"{value:g}"): sampled(lenience=value, acceptance=ACCEPTANCE_METHOD_REJECTION)
        for value in (-1, 2, NAN, INF)
    },
    **{
        ("logit_bias of token 5", f"{value:g}"): sampled(logit_bias={5: value}) for value in (101, 3e38, NAN, INF, -INF)
    },
    ("logit_bias", str(LARGEST_UINT32)): sampled(logit_bias={LARGEST_UINT32: 1}),
    ("logit_bias", "60000"): sampled(logit_bias=dict.fromkeys(range(60_000), 1.0)),
    ("penalty_context_size", str(2**31)): sampled(penalty_context_size=2**31),
    ("acceptance", "77"): sampled(acceptance=77),
    ("draft_source", "77"): other(draft_source=77),
    ("max_tokens", "0"): other(max_tokens=0),
    ("max_tokens", str(LARGEST_UINT32)): other(max_tokens=LARGEST_UINT32),
    ("num_draft_tokens", str(LARGEST_UINT32)): other(num_draft_tokens=LARGEST_UINT32),
    ("top_log_probabilities", str(LARGEST_UINT32)): other(top_log_probabilities=LARGEST_UINT32),
    ("min_tokens", str(LARGEST_UINT32)): stopping(min_tokens=LARGEST_UINT32),
    ("stop.token_ids", str(LARGEST_UINT32)): stopping(token_ids=[LARGEST_UINT32]),
    ("stop.token_ids", "1000000"): stopping(token_ids=[5] * 1_000_000),
    ("stop.strings", "200000"): stopping(strings=["x"] * 200_000),
    ("stop.strings", "3000000"): stopping(strings=["x" * 3_000_000]),
    ("stop.strings", "0 characters"): stopping(strings=[""]),
    ("prompt", "1000000"): other(token_ids={"ids": [5] * 1_000_000}, text=None),
    ("prediction", "1000000"): other(prediction_token_ids={"ids": [5] * 1_000_000}),
}


async def test_a_call_with_an_extreme_value_is_refused_by_name(doors: Doors) -> None:
    wrong = []
    async with another_generates(doors):
        for (field, value), request in GRPC.items():
            error = await error_of(doors.hostile.generation.Generate(request))
            said = error.details() or ""
            named = field.split(".")[0] in said and value in said and any(remedy in said for remedy in REMEDIES)
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not error_info(error).reason or not named:
                wrong.append(f"{field} {value}: {error.code()} {said[:300]}")
    assert not wrong, "\n".join(wrong)


async def test_a_million_biases_are_too_long_for_a_request(doors: Doors) -> None:
    request = sampled(logit_bias=dict.fromkeys(range(1_000_000), 1.0))
    async with another_generates(doors):
        error = await error_of(doors.hostile.generation.Generate(request))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(request.ByteSize()) in (error.details() or "")


# JSON has numbers that no float32 has: 1e300 is infinite there, and 1e-300 is 0. It has no infinity, but `post` sends
# 1e999 for it.
HTTP: list[tuple[str, Any, str]] = [
    *(("temperature", value, f"{value:g}") for value in (-1, 1e300, 1e-300, 0.001, INF, -INF)),
    *(("top_p", value, f"{value:g}") for value in (-1, 1e300, INF)),
    *(("min_p", value, f"{value:g}") for value in (-1, 1e300, INF)),
    *(
        (f"{kind}_penalty", value, f"{value:g}")
        for kind in ("repetition", "presence", "frequency")
        for value in (-1e300, 1e300, INF, -INF)
    ),
    *(("logit_bias", {"5": value}, f"{value:g}") for value in (1e300, INF, -INF)),
    ("logit_bias", {str(VOCABULARY_SIZE): 1}, str(VOCABULARY_SIZE)),
    ("logit_bias", {str(2**64): 1}, str(2**64)),
    ("logit_bias", {"-1": 1}, "-1"),
    ("logit_bias", {str(i): 1 for i in range(60_000)}, "1024"),
    ("top_k", -2, "-2"),
    ("top_k", 2**64, str(2**64)),
    ("seed", 2**64, str(2**64)),
    ("seed", -(2**63) - 1, str(-(2**63) - 1)),
    ("seed", 1.5, "1.5"),
    ("max_tokens", -1, "-1"),
    ("max_tokens", 2**32 - 1, str(2**32 - 1)),
    ("max_tokens", 2**64, str(2**64)),
    ("num_draft_tokens", -1, "-1"),
    ("num_draft_tokens", 10**9, "1000000000"),
    ("min_tokens", 2**31, str(2**31)),
    ("stop", ["x"] * 60_000, "64"),
    ("stop", ["x" * 3_000_000], "256"),
    ("stop", [""], "1"),
    ("stop_token_ids", [2**31], str(2**31)),
    ("penalty_context_size", 2**31, str(2**31)),
]


async def test_a_body_with_an_extreme_value_is_refused_by_name(doors: Doors) -> None:
    wrong = []
    async with another_generates(doors):
        for field, value, shown in HTTP:
            answer = await doors.post(**{field: value})
            said = json.loads(answer.body).get("error", {}).get("message", "")
            names = {field, field.replace("stop_", "stop.")}  # the latter where only the coordinator can tell
            named = any(name in said for name in names) and shown in said and any(word in said for word in REMEDIES)
            if answer.status != 400 or not named:
                wrong.append(f"{field} {shown}: {answer.status} {said[:300]}")
    assert not wrong, "\n".join(wrong)


async def test_a_literal_that_is_no_json_is_refused(doors: Doors) -> None:
    for value in (NAN, INF):  # as Python's json writes them
        answer = await doors.http.post("/v1/completions", json.dumps({"prompt": "x", "top_p": value}).encode())
        assert answer.status == 400


# At the edges, and within: these are served, at both doors.
ALLOWED: list[dict[str, Any]] = [
    {"seed": 2**64 - 1, "temperature": 100, "top_k": LARGEST_UINT32},
    {"seed": 0, "temperature": 0.01, "top_p": 1e-6, "min_p": 1},
    {"temperature": 1, "repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
    {"temperature": 1, "repetition_penalty": 10, "presence_penalty": 2, "penalty_context_size": 2**31 - 1},
    {"temperature": 1, "logit_bias": dict.fromkeys(range(1024), -100.0)},
    {"temperature": -0.0},
]


@pytest.mark.parametrize("fields", ALLOWED, ids=",".join)
async def test_a_value_at_its_edge_is_served(doors: Doors, fields: dict[str, Any]) -> None:
    async with another_generates(doors):
        responses = await responses_to(doors.hostile.generation.Generate(sampled(**fields)))
        biases = {str(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()}
        answer = await doors.post(**{**fields, "logit_bias": biases})
    assert sum(len(response.tokens) for response in responses) == 4
    assert answer.status == 200
    (choice,) = json.loads(answer.body)["choices"]
    if "seed" in fields:  # of the same seed, at both doors
        assert choice["text"] == "".join(response.text for response in responses)
