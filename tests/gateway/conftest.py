"""Running stacks with a gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from playwright.async_api import Browser, Page

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker.cpu.openblas import load_blas
from tests.e2e.faults import PATIENT
from tests.e2e.guarded import write_token
from tests.e2e.processes import PATIENCE_SECONDS
from tests.gateway.browser import chromium
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient

# Before any test imports MLX, so that the tests of processes can run in any order.
load_blas(num_threads=1)


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The embedded pair with a chat template, and a gateway in front of it."""
    from tests.worker.models import save_chat_target

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
    from tests.gateway.arranged_model import save_arranged_model

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


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A token, and the file that a coordinator knows it from."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    return write_token(path, "somebody"), path


@pytest.fixture(scope="module")
async def guarded_stack(token: tuple[str, Path]) -> AsyncIterator[Stack]:
    """The embedded pair, which completes code, for those who have a token."""
    environment = {"SPECD_COORDINATOR_TOKENS": str(token[1])}
    async with Stack(
        target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=environment
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A new page, which neither loads anything from elsewhere nor does what its policy forbids."""
    async with await browser.new_context(color_scheme="light") as context:
        opened = await context.new_page()
        opened.set_default_timeout(1000 * PATIENCE_SECONDS)
        wrong: list[str] = []
        requested: set[str] = set()
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        opened.on("request", lambda request: requested.add(request.url))
        yield opened
        origin = re.match(r"http://[^/]+/", opened.url)
        assert origin is not None
        assert not [url for url in requested if not url.startswith(origin[0])]
        assert not wrong
