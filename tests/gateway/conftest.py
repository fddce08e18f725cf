"""Running stacks with a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Stack
from tests.e2e.faults import PATIENT
from tests.gateway.arranged_model import save_arranged_model
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient
from tests.worker.models import save_chat_target


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The embedded pair with a chat template, and a gateway in front of it."""
    target = save_chat_target(tmp_path_factory.mktemp("models") / "pycode")
    async with Stack(target=target, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=PATIENT) as running:
        yield running


@pytest.fixture(scope="session")
async def grpc_client(stack: Stack) -> AsyncIterator[RawClient]:
    """A client of the coordinator of `stack`."""
    async with RawClient(stack.address) as connected:
        yield connected


@pytest.fixture(scope="session")
async def http(stack: Stack) -> AsyncIterator[HttpClient]:
    """A client of the gateway of `stack` that sees everything."""
    async with HttpClient(stack) as connected:
        yield connected


@pytest.fixture(scope="session")
async def openai(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """openai-python, which needs another address and no more."""
    assert stack.gateway is not None
    async with AsyncOpenAI(base_url=f"http://{stack.gateway.facts['address']}/v1", api_key="none") as connected:
        yield connected


@pytest.fixture(scope="session")
async def arranged_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A model that follows scripts, and a gateway in front of it."""
    model = save_arranged_model(tmp_path_factory.mktemp("models") / "arranged")
    async with Stack(target=model, draft=model, http="127.0.0.1:0", environment=PATIENT) as running:
        yield running


@pytest.fixture(scope="session")
async def arranged(arranged_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """openai-python for the model that follows scripts."""
    assert arranged_stack.gateway is not None
    address = arranged_stack.gateway.facts["address"]
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="session")
async def arranged_http(arranged_stack: Stack) -> AsyncIterator[HttpClient]:
    """A client of its gateway that sees everything."""
    async with HttpClient(arranged_stack) as connected:
        yield connected
