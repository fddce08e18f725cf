"""A target that drafts with a head, through the service: two processes, no draft model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_HEAD, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED, ACCEPTANCE_METHOD_REJECTION
from specd.vocabulary import OWN_HEAD
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT, is_whole
from tests.e2e.processes import PATIENCE_SECONDS, start_specd
from tests.e2e.self_drafting import FIELDS, ask, assert_sessions_go_together, assert_survives_a_kill
from tests.raw_client import RawClient
from tests.thorough import examples
from tests.worker import assistant_files, dflash_forms, test_eagle3
from tests.worker.families import save_family
from tests.worker.head_files import converted, embed, raw_head, save_apart, save_bigram, save_repository, save_target


def _included(directory: Path, family: str) -> str:
    directory.symlink_to(EMBEDDED_TARGET)
    return EMBEDDED_HEAD


def _with_exact_head(directory: Path, family: str) -> str:
    save_bigram(directory, family)
    return OWN_HEAD


def _with_random_head(directory: Path, family: str) -> str:
    target = save_target(directory, family)
    embed(directory, converted(raw_head(target.text)), "mlx")
    return OWN_HEAD


def _with_eagle(directory: Path, family: str) -> str:
    save_family(directory, family)
    return test_eagle3.save(directory.parent / "eagle", test_eagle3.FORMS["the authors'"])


def _with_block_drafter(directory: Path, family: str) -> str:
    save_family(directory, family)
    form = dflash_forms.FORMS["DFlash 2"]
    return save_repository(directory.parent / "dflash", form.config, dflash_forms.weights(form))


def _with_assistant(directory: Path, family: str) -> str:
    save_family(directory, family)
    config = assistant_files.FORMS["E4B"].config
    return save_repository(directory.parent / "assistant", config, assistant_files.assistant_tensors(config))


# Each saves a target of a family in a directory, and returns the name of its head.
HEADS = {
    "qwen3_5, exact": _with_exact_head,
    "pycode, included": _included,
    "qwen3, EAGLE-3": _with_eagle,
    "qwen3_5, DFlash 2": _with_block_drafter,
    "gemma4_text, its assistant": _with_assistant,
    "qwen3_5_moe, random": _with_random_head,
    "qwen3_next, exact": _with_exact_head,
}


@pytest.fixture(scope="module", params=examples(HEADS, 2))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    family = request.param.partition(",")[0]
    directory = tmp_path_factory.mktemp("models") / family
    options = {"target-worker": {"self_draft": HEADS[request.param](directory, family)}}
    async with Stack(target=str(directory), draft="", environment=ENVIRONMENT, options=options) as running:
        running.is_exact = request.param.endswith("exact")  # type: ignore[attr-defined]
        running.is_trained = request.param.endswith("included")  # type: ignore[attr-defined]
        yield running


@pytest.fixture(scope="module")
async def client(stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(stack.address) as connected:
        yield connected


async def test_the_head_is_known(stack: Stack, client: RawClient) -> None:
    info = await client.model_info()
    assert (info.draft.name, info.draft_fault) == (f"{info.target.name} (head)", "")
    assert await is_whole(stack)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", [ACCEPTANCE_METHOD_COUPLED, ACCEPTANCE_METHOD_REJECTION])
async def test_texts_are_those_of_the_target_alone(
    stack: Stack, client: RawClient, prompts: list[str], temperature: float, acceptance: int
) -> None:
    """And an exact head gives k + 1 tokens a round, and a trained one a part of the first ones."""
    sampling = {"temperature": temperature, "acceptance": acceptance}
    num_first = num_first_accepted = 0
    for number, k in ((1, 1), (2, 4), (3, 8)):
        drafted = await ask(client, prompts[number], k, **sampling)
        statistics = drafted.statistics
        assert statistics.proposed_tokens > 0
        if stack.is_exact:  # type: ignore[attr-defined]
            assert statistics.accepted_tokens >= 0.98 * statistics.proposed_tokens
        num_first += statistics.proposed_by_position[0]
        num_first_accepted += statistics.accepted_by_position[0]
        if acceptance == ACCEPTANCE_METHOD_COUPLED or temperature == 0:
            assert drafted.token_ids == (await ask(client, prompts[number], 0, **sampling)).token_ids
    if stack.is_trained:  # type: ignore[attr-defined]
        assert num_first_accepted >= 0.3 * num_first


@pytest.mark.parametrize("temperature", examples([1.0, 0.0], 1))
async def test_sessions_go_together(client: RawClient, prompts: list[str], temperature: float) -> None:
    await assert_sessions_go_together(client, prompts[1:7], temperature)


@pytest.mark.parametrize(("kill_in_round", "temperature"), examples([(3, 1.0), (6, 0.0)], 1))
async def test_a_killed_target_changes_nothing_and_drafts_again(
    stack: Stack, client: RawClient, prompts: list[str], kill_in_round: int, temperature: float
) -> None:
    await assert_survives_a_kill(
        stack, client, prompts[2], kill_in_round=kill_in_round, temperature=temperature, num_draft_tokens=2
    )


async def test_up_with_a_target_alone_uses_its_head(tmp_path: Path) -> None:
    save_bigram(tmp_path / "bigram", "qwen3_5")
    address = f"unix:{tmp_path}/coordinator"
    options = ("--target", str(tmp_path / "bigram"), "--no-metrics", "--listen", address)
    async with asyncio.timeout(PATIENCE_SECONDS), start_specd("up", *options) as up:
        event = await up.next_event("ready", process="coordinator")
        assert event["draft"].endswith("bigram (head)")
        async with RawClient(address) as client:
            completion = await complete(client, "def add(a, b):", num_draft_tokens=4, **FIELDS)
            assert completion.statistics.accepted_tokens > 30


@pytest.mark.parametrize("place", examples(["the head's directory", "none"], 1))
async def test_a_head_apart_is_named_or_left_out(tmp_path: Path, place: str) -> None:
    target = save_target(tmp_path / "target", "qwen3_5")
    apart = save_apart(tmp_path / "head", converted(raw_head(target.text)), target.text)
    options = {"target-worker": {"self_draft": apart if place != "none" else "none"}}
    running = Stack(target=str(target.directory), draft="", environment=ENVIRONMENT, options=options)
    async with running as stack, RawClient(stack.address) as client:
        info = await client.model_info()
        assert info.draft.name == ("" if place == "none" else "target (head)")
        plain = await ask(client, "x = 1", 0, temperature=1.0)
        assert (await ask(client, "x = 1", None, temperature=1.0)).token_ids == plain.token_ids
