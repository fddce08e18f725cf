"""Running stacks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from specd.rpc.channel import open_channel
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.draft_pb2_grpc import DraftServiceStub
from specd.v1.session_pb2_grpc import SessionServiceStub
from specd.v1.target_pb2 import VerifyRequest
from specd.v1.target_pb2_grpc import TargetServiceStub
from specd.worker.cpu.openblas import load_blas
from tests.e2e.calls import Worker, responses_to
from tests.e2e.completions import MAX_TOKENS, Completion, complete
from tests.e2e.faults import ENVIRONMENT, PATIENT, Undisturbed, eventually, is_whole, undisturbed_by
from tests.e2e.pace import at_the_pace_of_tests
from tests.e2e.processes import draft_of, wait_until_idle
from tests.raw_client import RawClient
from tests.thorough import examples

# Before any test imports MLX, with which some compute what the processes must give. One thread, because the processes
# want the other cores: threads that share a product wait for each other, and take longer than one.
load_blas(num_threads=1)

DRAFT_KINDS = ("random", "always right", "always wrong")


@pytest.fixture(scope="session")
async def stack() -> AsyncIterator[Stack]:
    """The three processes on the embedded pair, for tests that leave them as they found them."""
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=PATIENT) as running:
        yield running


@pytest.fixture(scope="session")
async def client(stack: Stack) -> AsyncIterator[RawClient]:
    """A client of `stack`."""
    async with RawClient(stack.address) as connected:
        yield connected


@pytest.fixture(scope="module", params=examples(DRAFT_KINDS, 1))
async def odd_client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RawClient]:
    """A client of a stack with a draft that is not the usual one; its `draft_kind` names the kind."""
    from tests.worker.models import save_odd_draft

    draft = save_odd_draft(request.param, tmp_path_factory.mktemp("drafts") / "draft")
    async with (
        Stack(target=EMBEDDED_TARGET, draft=draft, environment=PATIENT) as stack,
        RawClient(stack.address) as client,
    ):
        client.draft_kind = request.param  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
async def unharmed(stack: Stack, client: RawClient) -> AsyncIterator[None]:
    """After the module, the processes are still the same, hold no session, and serve the next request."""
    pids = [child.pid for child in stack.children]
    yield
    await wait_until_idle(stack)
    responses = await responses_to(client.generate("import", max_tokens=3))
    assert responses[-1].statistics.generated_tokens == 3
    assert [child.pid for child in stack.children] == pids


@pytest.fixture(scope="session")
def sessions(client: RawClient) -> SessionServiceStub:
    """The sessions that `stack` keeps."""
    return SessionServiceStub(client.channel)


@pytest.fixture(scope="session")
async def target_service(stack: Stack) -> AsyncIterator[TargetServiceStub]:
    """The target worker of `stack`."""
    async with open_channel(stack.target.facts["address"]) as channel:
        yield TargetServiceStub(channel)


@pytest.fixture(scope="session")
async def draft_service(stack: Stack) -> AsyncIterator[DraftServiceStub]:
    """The draft worker of `stack`."""
    async with open_channel(draft_of(stack).facts["address"]) as channel:
        yield DraftServiceStub(channel)


@pytest.fixture(params=["draft", "target"])
def worker(
    request: pytest.FixtureRequest, stack: Stack, draft_service: DraftServiceStub, target_service: TargetServiceStub
) -> Worker:
    """Each of the workers of `stack`."""
    return {
        "draft": Worker(draft_of(stack), draft_service.Propose, ProposeRequest),
        "target": Worker(stack.target, target_service.Verify, VerifyRequest),
    }[request.param]


@pytest.fixture(scope="session")
async def token_ids(client: RawClient) -> list[int]:
    """64 tokens of a text that the models know how to continue."""
    responses = await responses_to(client.generate("class Stack:\n    def", max_tokens=64))
    generated = [token.id for response in responses for token in response.tokens]
    assert len(generated) == 64
    return generated


@pytest.fixture(scope="session")
async def greedy(client: RawClient) -> Completion:
    """The text of the target alone, with default options."""
    completion = await complete(client, max_tokens=MAX_TOKENS, num_draft_tokens=0)
    assert len(completion.tokens) == MAX_TOKENS
    return completion


@pytest.fixture(scope="session")
async def stack_to_harm() -> AsyncIterator[Stack]:
    async with at_the_pace_of_tests(
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=ENVIRONMENT)
    ) as running:
        yield running


@pytest.fixture
async def harmed_stack(stack_to_harm: Stack) -> Stack:
    """A stack that tests harm, whole again after what the test before did to it."""
    await eventually(lambda: is_whole(stack_to_harm))
    return stack_to_harm


@pytest.fixture(scope="session")
async def harmed_client(stack_to_harm: Stack) -> AsyncIterator[RawClient]:
    """A client of `harmed_stack`."""
    async with RawClient(stack_to_harm.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def undisturbed(harmed_client: RawClient) -> Undisturbed:
    """The completion of a prompt by the target alone, without faults; computed once."""
    return undisturbed_by(harmed_client)
