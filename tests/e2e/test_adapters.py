"""Adapters through real processes: the text of each is mlx-lm's with the same adapter, for every k, fault and door."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from specd import AsyncClient
from specd.child import Child
from specd.errors import InvalidRequestError, NotFoundError, error_info
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import Resumption, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import LoadedModel, load
from tests.e2e.calls import error_of
from tests.e2e.completions import Completion, complete
from tests.e2e.faults import ENVIRONMENT, eventually, kill, scrape
from tests.e2e.processes import complaint, run_specd, start_specd
from tests.e2e.reference import sample_with_mlx_lm
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient
from tests.thorough import examples
from tests.worker.adapter_directories import QUERIES_AND_VALUES, adapted_by_mlx_lm, save_adapter

BASE = Path(EMBEDDED_TARGET).name
NAMES = ("", "sql", "org/chat")
PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def"
MAX_TOKENS = 40
SEED = 77


@dataclass(frozen=True)
class Adapted:
    """A stack with two adapters of the target, of which the draft has one too, and the target's directories by name."""

    stack: Stack
    directories: dict[str, str]


@pytest.fixture(scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    root = tmp_path_factory.mktemp("adapters")
    directories = {
        # Large enough for other texts, and small enough for texts that are no noise.
        "sql": save_adapter(root / "sql", EMBEDDED_TARGET, seed=1, keys=QUERIES_AND_VALUES, size=0.02),
        "org/chat": save_adapter(root / "chat", EMBEDDED_TARGET, seed=2, rank=4, size=0.005),
    }
    of_draft = save_adapter(root / "draft", EMBEDDED_DRAFT, seed=3, rank=2, size=0.005)
    options = {
        "target-worker": {"adapters": ",".join(f"{name}={path}" for name, path in directories.items())},
        "draft-worker": {"adapters": f"sql={of_draft}"},
    }
    async with Stack(
        target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=ENVIRONMENT, options=options
    ) as stack:
        yield Adapted(stack, directories)


async def are_ready(stack: Stack) -> bool:
    """Return whether the coordinator has both workers, also after a kill."""
    metrics = await scrape(stack.coordinator)
    return metrics["specd_draft_available"] == metrics["specd_target_available"] == 1


@pytest.fixture
async def client(adapted: Adapted) -> AsyncIterator[RawClient]:
    await eventually(lambda: are_ready(adapted.stack))
    async with RawClient(adapted.stack.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def reference(adapted: Adapted) -> Callable[[str, float], list[int]]:
    """The tokens of mlx-lm with an adapter of the target."""
    model = load(EMBEDDED_TARGET, blas="")
    prompt = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()).encode(PROMPT)

    @functools.cache
    def with_adapter(name: str) -> LoadedModel:
        return replace(model, network=adapted_by_mlx_lm(EMBEDDED_TARGET, adapted.directories.get(name, "")))

    @functools.cache
    def compute(name: str, temperature: float) -> list[int]:
        return sample_with_mlx_lm(with_adapter(name), prompt, MAX_TOKENS, temperature=temperature, seed=SEED)

    return compute


async def generate(client: RawClient, name: str, k: int, temperature: float = 0.0, **fields: Any) -> Completion:
    sampling = SamplingParameters(temperature=temperature, seed=SEED)
    options = {"max_tokens": MAX_TOKENS, "num_draft_tokens": k, "sampling": sampling, "model": name, **fields}
    return await complete(client, PROMPT, **options)


@pytest.mark.parametrize("temperature", examples([0.8, 0.0], 1))
async def test_every_k_gives_the_tokens_of_mlx_lm_with_the_same_adapter(
    client: RawClient, reference: Callable[[str, float], list[int]], temperature: float
) -> None:
    """Nine sessions at once: the base and two adapters, with 0, 3 and 8 draft tokens."""
    cases = [(name, k) for name in NAMES for k in (0, 3, 8)]
    completions = await asyncio.gather(*(generate(client, name, k, temperature) for name, k in cases))
    for (name, k), completion in zip(cases, completions, strict=True):
        assert completion.token_ids == reference(name, temperature), f"{name or 'base'}, k = {k}"
        assert completion.statistics.draft_fault == ""
        assert (completion.statistics.proposed_tokens > 0) == (k > 0)
    assert len({tuple(reference(name, temperature)) for name in NAMES}) == len(NAMES)  # they change the text
    named = await generate(client, BASE, 3, temperature)
    assert named.token_ids == reference("", temperature)


async def test_the_draft_proposes_with_its_adapter_of_the_same_name(adapted: Adapted, client: RawClient) -> None:
    """The draft's own adapter is another random one, so fewer of its tokens are accepted than of its base."""
    other = await generate(client, "org/chat", 4)  # of which it has none
    base = await generate(client, "", 4)
    own = await generate(client, "sql", 4)
    assert {each.statistics.draft_fault for each in (other, base, own)} == {""}
    assert base.statistics.accepted_tokens > own.statistics.accepted_tokens


async def test_a_killed_target_changes_nothing_in_the_texts(
    adapted: Adapted, client: RawClient, reference: Callable[[str, float], list[int]]
) -> None:
    """All sessions are replayed to the next life of the target, each with its own adapter."""
    num_messages = 0

    async def text_of(name: str) -> tuple[list[int], int]:
        nonlocal num_messages
        tokens: list[int] = []
        sampling = SamplingParameters(temperature=0.8, seed=SEED)
        async for response in client.generate(
            PROMPT, sampling=sampling, max_tokens=MAX_TOKENS, num_draft_tokens=2, model=name
        ):
            num_messages += 1
            if num_messages == 9:
                kill(adapted.stack.target)
            tokens += [token.id for token in response.tokens]
        return tokens, response.statistics.target_replays

    texts = await asyncio.gather(*map(text_of, NAMES))
    assert [tokens for tokens, _ in texts] == [reference(name, 0.8) for name in NAMES]
    assert sum(replays for _, replays in texts) >= 1


async def test_sessions_share_prefixes_with_those_of_their_adapter_alone(client: RawClient) -> None:
    prompt = "# a prompt of this test alone\n" + PROMPT
    reused = []
    for name in ("", "sql", "org/chat", "", "sql", "org/chat"):
        completion = await complete(client, prompt, max_tokens=2, num_draft_tokens=0, model=name)
        statistics = completion.statistics
        # The first token is that of every prompt.
        reused.append(statistics.target_reused_tokens > statistics.prompt_tokens / 2)
    assert reused == [False, False, False, True, True, True]


async def test_a_session_keeps_its_model(adapted: Adapted, client: RawClient) -> None:
    stop = StopConditions(ignore_eos=True)
    first = await generate(client, "sql", 3, stop=stop, max_tokens=8)
    session_id = first.last.session_id
    refused = await error_of(client.generate("\n", session_id=session_id, model=BASE, max_tokens=8))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "began with the model 'sql'" in (refused.details() or "")
    second = await complete(client, "\n", session_id=session_id, max_tokens=8, num_draft_tokens=3, stop=stop)

    # A new session of the adapter on the same tokens gives the same text, and one of the base another.
    prompt = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())
    tokens = [*prompt.encode(PROMPT), *first.token_ids, *prompt.encode("\n", add_special_tokens=False)]
    same = await complete(client, tokens, max_tokens=8, num_draft_tokens=0, stop=stop, model="sql")
    other = await complete(client, tokens, max_tokens=8, num_draft_tokens=0, stop=stop)
    assert second.token_ids == same.token_ids != other.token_ids


async def test_another_model_cannot_resume_a_generation(client: RawClient) -> None:
    stop = StopConditions(ignore_eos=True)
    begun = await generate(client, "sql", 0, max_tokens=6, stop=stop)
    resumption = Resumption(token_ids=begun.token_ids[:3], prompt_fingerprint=begun.responses[0].prompt_fingerprint)
    error = await error_of(client.generate(PROMPT, max_tokens=6, resumption=resumption, stop=stop))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).reason == "CANNOT_RESUME"
    rest = await generate(client, "sql", 0, max_tokens=6, resumption=resumption, stop=stop)
    assert [*begun.token_ids[:3], *rest.token_ids] == begun.token_ids


async def test_the_python_client_names_adapters_as_models(adapted: Adapted, client: RawClient) -> None:
    async with AsyncClient(adapted.stack.address) as own:
        models = await own.models()
        assert [(model.name, model.parent) for model in models] == [(BASE, ""), ("sql", BASE), ("org/chat", BASE)]
        assert len({model.fingerprint for model in models}) == 3
        stream = own.generate(PROMPT, model="sql", max_tokens=8)
        tokens = [token.id for token in (await stream.completion()).tokens]
        assert tokens == (await generate(client, "sql", 0, max_tokens=8)).token_ids
        with pytest.raises(NotFoundError, match=f"those that are served are '{BASE}', 'sql', 'org/chat'"):
            await own.generate(PROMPT, model="nosuch").completion()
        session = own.session()
        await session.generate(PROMPT, model="sql", max_tokens=4, ignore_eos=True).completion()
        with pytest.raises(InvalidRequestError, match="names 'org/chat'"):
            await session.generate("\n", model="org/chat", max_tokens=4).completion()


async def test_over_http_the_model_names_the_adapter(adapted: Adapted, client: RawClient) -> None:
    async with HttpClient(adapted.stack) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
            (BASE, BASE, None),
            ("sql", BASE, BASE),
            ("org/chat", BASE, BASE),
        ]
        assert (await http.get("/v1/models/org/chat")).json() == listed[2]
        fingerprints = set()
        for name in (BASE, "sql", "org/chat"):
            body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            reply = (await http.post("/v1/completions", body)).json()
            expected = await generate(client, "" if name == BASE else name, 0, max_tokens=12)
            assert reply["choices"][0]["text"] == expected.text
            assert reply["model"] == name
            fingerprints.add(reply["system_fingerprint"])
        assert len(fingerprints) == 3
        unknown = await http.post("/v1/completions", {"model": "nosuch", "prompt": PROMPT})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'sql', 'org/chat'" in unknown.json()["error"]["message"]
        # A session keeps its model, also if only the coordinator knows it.
        body = {"model": "sql", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
        session_id = (await http.post("/v1/completions", body)).json()["session_id"]
        other = await http.post("/v1/completions", {"model": BASE, "prompt": "\n", "session_id": session_id})
        assert other.status_code == 400
        assert "began with the model 'sql'" in other.json()["error"]["message"]


@pytest.mark.thorough
async def test_a_target_with_a_draft_of_its_own(
    adapted: Adapted, client: RawClient, reference: Callable[[str, float], list[int]]
) -> None:
    """The draft has no adapters, and proposes for the sessions of all of them."""
    adapters = ",".join(f"{name}={path}" for name, path in adapted.directories.items())
    options = {"target-worker": {"adapters": adapters, "self-draft": EMBEDDED_DRAFT}}
    async with (
        Stack(target=EMBEDDED_TARGET, draft="", environment=ENVIRONMENT, options=options) as stack,
        RawClient(stack.address) as own,
    ):
        completions = await asyncio.gather(*(generate(own, name, 4, 0.8) for name in NAMES))
    for name, completion in zip(NAMES, completions, strict=True):
        assert completion.token_ids == reference(name, 0.8)
        assert completion.statistics.proposed_tokens > 0


@pytest.mark.thorough
async def test_a_target_with_other_adapters_is_refused(adapted: Adapted, client: RawClient, tmp_path: Path) -> None:
    """One has an adapter of the same name with other weights, so no session may move to it."""
    other = save_adapter(tmp_path / "sql", EMBEDDED_TARGET, seed=9, keys=QUERIES_AND_VALUES)
    adapters = f"sql={other},org/chat={adapted.directories['org/chat']}"
    flags = ("--adapters", adapters, "--listen", f"unix:{tmp_path}/other", "--metrics-listen", "none")
    worker = Child("target-worker", [sys.executable, "-m", "specd", "target-worker", *flags], ENVIRONMENT)
    await worker.start()
    try:
        addresses = ",".join((adapted.stack.target.facts["address"], worker.facts["address"]))
        options = (f"--target={addresses}", "--draft=none", f"--listen=unix:{tmp_path}/coordinator")
        async with start_specd("coordinator", *options, "--metrics-listen", "none") as coordinator:
            event = await coordinator.next_event("refused a worker")
            assert "with other adapters" in event["error"]
    finally:
        await worker.stop()


# -- Starts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target-worker", "--adapters", "sql=/nowhere"], "the adapter sql: /nowhere is not a directory"),
        (["draft-worker", "--adapters", "sql"], "'sql' is not an adapter: write NAME=DIR"),
        (["target-worker", "--adapters", "a b=/tmp"], "'a b' is not a name of an adapter"),
        (["target-worker", "--adapters", "a=/tmp,a=/tmp"], "two adapters have the name 'a'"),
        (["target-worker", "--adapters", f"{BASE}=/tmp"], f"the adapter {BASE} has the name of its model"),
        (["target-worker", "--ranks", "2", "--adapters", "a=/tmp"], "adapters are set for a model in several ranks"),
        (["up", "--target-adapters", "sql=/nowhere"], "the adapter sql: /nowhere is not a directory"),
        (["up", "--target-ranks", "2", "--target-adapters", "a=/tmp"], "--target-ranks 2 and --target-adapters"),
        (["up", "--draft", "none", "--draft-adapters", "a=/tmp"], "--draft-adapters needs a draft worker"),
    ],
)
def test_a_start_is_refused_at_once(arguments: list[str], message: str, tmp_path: Path) -> None:
    quiet = [] if arguments[0] == "up" else ["--metrics-listen", "none"]
    done = run_specd(*arguments, "--listen", f"unix:{tmp_path}/s", *quiet)
    assert done.returncode == 2
    assert message in complaint(done.stderr)
