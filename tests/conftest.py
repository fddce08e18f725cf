"""What the tests share: prompts, models made on the spot, and running stacks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from specd.client import Client
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker.blas import load_blas

if TYPE_CHECKING:
    from coordinator.tokenizer import Tokenizer
    from specd.worker.model import LoadedModel

# Before any test imports MLX.
load_blas(num_threads=2)

# The same examples in every run, so that what fails, fails for everyone. `make explore` looks for others.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("suite")

PROMPTS = sorted((Path(__file__).parents[1] / "benchmarks" / "prompts").glob("*.py"))
# All the short prompts, and every other of the long ones, whose prefill takes most of the time.
TWENTY_PROMPTS = [*PROMPTS[:16], *PROMPTS[16::2]]


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """The code prompts: 16 short ones, 4 of 500 tokens and more, 4 of 1500 and more."""
    return [path.read_text() for path in PROMPTS]


@pytest.fixture(scope="session")
async def stack() -> AsyncIterator[Stack]:
    """The three processes on the embedded pair, for tests that leave them as they found them."""
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT) as running:
        yield running


@pytest.fixture(scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    """A client of `stack`."""
    async with Client(stack.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    """The embedded target in this process, with the same weights in the same precision, and without a prefix cache."""
    from specd.worker.model import load

    return load(EMBEDDED_TARGET, blas="")


@pytest.fixture(scope="session")
def tokenizer(target: LoadedModel) -> Tokenizer:
    """The tokenizer of the embedded pair."""
    from coordinator.tokenizer import Tokenizer

    return Tokenizer(target.tokenizer_json)


@pytest.fixture(scope="module")
async def ahead_client() -> AsyncIterator[Client]:
    """A client of a stack whose draft always goes ahead, whatever that costs."""
    always = {"SPECD_COORDINATOR_DRAFT_AHEAD": "always"}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=always) as stack,
        Client(stack.address) as client,
    ):
        yield client


@pytest.fixture(scope="module", params=["random", "always right", "always wrong"])
async def odd_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a stack with a draft that is not the usual one; its `draft_kind` says which."""
    from tests.models import save_odd_draft

    draft = save_odd_draft(request.param, tmp_path_factory.mktemp("drafts") / "draft")
    async with Stack(target=EMBEDDED_TARGET, draft=draft) as stack, Client(stack.address) as client:
        client.draft_kind = request.param  # type: ignore[attr-defined]
        yield client
