"""Several models behind one gateway, loaded on demand: `small` and one of `coder` and `answerer` fit at a time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI
from playwright.async_api import Page, expect

from specd.client import AsyncClient
from specd.model_processes import ModelPlan, ModelPlans
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_TARGET
from specd.supervisor import Stack
from specd.worker_group import WorkerModels
from tests.e2e.faults import PATIENT
from tests.e2e.processes import read_metric
from tests.gateway.browser import CHROMIUM, origin_of
from tests.gateway.http_client import HttpClient
from tests.worker.models import save_chat_target

NAMES = ["coder", "small", "answerer", "broken"]
OTHER = {"coder": "answerer", "answerer": "coder"}
CODE: dict[str, Any] = {"prompt": "def area(width, height):\n", "max_tokens": 8, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": CODE,
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": CHAT,
}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that chats."""
    return save_chat_target(tmp_path_factory.mktemp("models") / "pycode")


def plans_of(coder: str, **changes: WorkerModels) -> ModelPlans:
    workers = {
        "coder": WorkerModels(coder, EMBEDDED_DRAFT, name="coder"),
        "small": WorkerModels(EMBEDDED_DRAFT, "", name="small"),
        "answerer": WorkerModels(EMBEDDED_T5_TARGET, "", name="answerer"),
        "broken": WorkerModels(str(Path(coder) / "missing"), "", name="broken"),
        **changes,
    }
    num_bytes = {"coder": 200, "small": 100, "answerer": 150, "broken": 1}
    return ModelPlans(tuple(ModelPlan(workers[name], num_bytes=num_bytes[name]) for name in NAMES), budget_bytes=301)


@pytest.fixture(scope="module")
async def several(coder: str) -> AsyncIterator[Stack]:
    async with Stack(models=plans_of(coder), http="127.0.0.1:0", environment=PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
async def http(several: Stack) -> AsyncIterator[HttpClient]:
    async with HttpClient(several) as connected:
        yield connected


@pytest.fixture(scope="module")
async def client(several: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(several.address) as connected:
        yield connected


async def states_of(client: AsyncClient) -> dict[str, str]:
    return {status.name: status.state for status in await client.statuses()}


async def unload(client: AsyncClient, name: str) -> None:
    """Unload a model by loading the one that needs its memory."""
    await client.describe(OTHER[name], timeout_seconds=None)
    assert (await states_of(client))[name] == "unloaded"


async def streamed(http: HttpClient, path: str, body: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the comments of a stream and its events."""
    response = await http.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n")
    comments = [line for line in lines if line.startswith(":")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    return comments, [json.loads(each) for each in data]


def check_comments(comments: list[str], name: str) -> None:
    assert comments
    assert all(comment.startswith(f": loading {name}") for comment in comments)
    assert any(f"worker {name}: " in comment for comment in comments)


# -- The list


async def test_the_list_has_all_models_and_loads_none(http: HttpClient, client: AsyncClient) -> None:
    before = await states_of(client)
    listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert list(listed) == NAMES
    assert listed["broken"]["status"] == {"value": "unloaded"}
    assert "context_length" not in listed["broken"]
    assert listed["small"]["specd"]["memory_bytes"] == 100
    assert (await http.get("/v1/models/broken")).json()["id"] == "broken"
    assert await states_of(client) == before

    await client.describe("small", timeout_seconds=None)
    small = (await http.get("/v1/models/small")).json()
    assert small["status"] == {"value": "loaded"}
    assert small["context_length"] == small["meta"]["n_ctx"] > 0
    assert small["specd"]["chat"] is False
    assert "lookup" in small["specd"]["sources"]


@pytest.mark.thorough
async def test_the_list_keeps_what_is_known_of_an_unloaded_model(http: HttpClient, client: AsyncClient) -> None:
    await http.post("/v1/completions", {**CODE, "model": "coder"})
    await unload(client, "coder")
    coder = (await http.get("/v1/models/coder")).json()
    assert coder["status"] == {"value": "unloaded"}
    assert coder["specd"]["draft"] == "pycode-3.6m-8bit"
    assert coder["specd"]["chat"] is True
    assert (await states_of(client))["coder"] == "unloaded"


async def test_the_gateway_is_healthy_without_a_loaded_model(http: HttpClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/"])
async def test_an_unknown_name_is_answered_with_those_that_are_there(http: HttpClient, path: str) -> None:
    if path.startswith("/v1/models"):
        refused = await http.get(path + "other")
    else:
        refused = await http.post(path, {**CODE, "model": "other", "stream": True})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert refused.json()["error"]["param"] == "model"
    assert refused.json()["error"]["message"] == (
        "there is no model 'other' here: those that are served are 'coder', 'small', 'answerer', 'broken'"
    )


# -- Requests that wait


async def test_the_field_chooses_the_model(http: HttpClient, client: AsyncClient) -> None:
    texts = {}
    for name in ("coder", "small"):
        answer = (await http.post("/v1/completions", {**CODE, "model": name})).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
        alone = await client.generate(CODE["prompt"], model=name, max_tokens=8).completion()
        assert alone.text == texts[name]
    default = (await http.post("/v1/completions", CODE)).json()
    assert (default["model"], default["choices"][0]["text"]) == ("coder", texts["coder"])


async def test_a_whole_answer_waits_for_its_model(http: HttpClient, client: AsyncClient) -> None:
    await unload(client, "coder")
    answer = await http.post("/v1/completions", {**CODE, "model": "coder"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


async def test_streams_say_how_far_their_model_is(http: HttpClient, client: AsyncClient) -> None:
    await unload(client, "coder")
    replies = await asyncio.gather(*(streamed(http, path, {**body, "model": "coder"}) for path, body in BODIES.items()))
    for comments, events in replies:
        check_comments(comments, "coder")
        assert not any("error" in event for event in events[:1])
        assert len(events) > 1
    again, _ = await streamed(http, "/v1/completions", {**CODE, "model": "coder"})
    assert again == []


@pytest.mark.thorough
async def test_a_stream_of_a_model_that_is_known_says_how_far_it_is(http: HttpClient, client: AsyncClient) -> None:
    """The gateway has described it a moment ago, and asks for the generation at once."""
    await http.post("/v1/completions", {**CODE, "model": "coder"})
    await unload(client, "coder")
    comments, events = await streamed(http, "/v1/completions", {**CODE, "model": "coder"})
    assert any(comment.startswith(": loading coder, ") for comment in comments)
    assert events[-1]["choices"][0]["finish_reason"]


@pytest.mark.thorough
async def test_clients_of_others_read_a_stream_that_waits(several: Stack, client: AsyncClient) -> None:
    assert several.gateway is not None
    url = f"http://{several.gateway.facts['address']}"
    await unload(client, "coder")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        stream = await openai.chat.completions.create(
            model="coder", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
        )
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason
        await unload(client, "coder")
        responding = await openai.responses.create(model="coder", input="hello", max_output_tokens=16, stream=True)
        types = [event.type async for event in responding]
        assert types[0] == "response.created"
    await unload(client, "coder")
    async with (
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic,
        anthropic.messages.stream(
            model="coder", messages=[{"role": "user", "content": "hello"}], max_tokens=8
        ) as messages,
    ):
        assert (await messages.get_final_message()).usage.output_tokens > 0


async def test_tokens_are_counted_by_the_model(http: HttpClient) -> None:
    counts = {}
    for name in ("coder", "answerer"):
        tokens = (await http.post("/tokenize", {"model": name, "prompt": "def area(width):"})).json()["tokens"]
        counts[name] = (await http.post("/detokenize", {"model": name, "tokens": tokens})).json()["content"]
    assert counts["coder"].endswith("def area(width):")
    assert counts["answerer"] == "<pad>"  # which begins an answer
    counted = await http.post("/v1/messages/count_tokens", {"model": "coder", "messages": CHAT["messages"]})
    assert counted.json()["input_tokens"] > 0


async def test_a_session_keeps_its_model(http: HttpClient) -> None:
    first = (await http.post("/v1/completions", {**CODE, "model": "small"})).json()
    assert first["model"] == "small"
    following = {**CODE, "prompt": "\n", "session_id": first["session_id"]}
    assert (await http.post("/v1/completions", following)).json()["model"] == "small"
    refused = await http.post("/v1/completions", {**following, "model": "coder"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "contradiction")


# -- Requests that do not wait


@pytest.mark.thorough
async def test_requests_that_do_not_wait_are_refused_at_once(http: HttpClient, client: AsyncClient) -> None:
    await unload(client, "coder")
    bodies = {**BODIES, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
    for path, body in bodies.items():
        for refusal, headers in (({"refuse_unloaded": True}, {}), ({}, {"x_specd_refuse_unloaded": "1"})):
            for stream in ({}, {"stream": True}) if path in BODIES else ({},):
                refused = await http.post(path, {**body, "model": "coder", **refusal, **stream}, **headers)
                assert refused.status_code == 503, refused.text
                assert int(refused.headers["retry-after"]) > 0
                error = refused.json()["error"]
                assert error["message"] == "the model 'coder' is not loaded: it begins to load"
                assert error.get("code", "model_loading") == "model_loading"
    assert (await states_of(client))["coder"] in {"waiting", "loading"}
    for path, body in BODIES.items():
        waited = await http.post(path, {**body, "model": "coder"})
        assert waited.status_code == 200, waited.text
        loaded = await http.post(path, {**body, "model": "coder", "refuse_unloaded": True})
        assert loaded.status_code == 200, loaded.text


async def test_a_model_that_is_known_refuses_as_well(http: HttpClient, client: AsyncClient) -> None:
    await http.post("/v1/completions", {**CODE, "model": "coder"})
    await unload(client, "coder")
    refused = await http.post("/v1/completions", {**CODE, "model": "coder", "refuse_unloaded": True, "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")


async def test_a_wrong_header_is_refused(http: HttpClient) -> None:
    refused = await http.post("/v1/completions", {**CODE, "model": "small"}, x_specd_refuse_unloaded="perhaps")
    assert refused.status_code == 400
    assert "x-specd-refuse-unloaded is 'perhaps'" in refused.json()["error"]["message"]


# -- Models that cannot be loaded


@pytest.mark.thorough
async def test_a_whole_answer_of_a_broken_model_is_an_error(http: HttpClient) -> None:
    refused = await http.post("/v1/completions", {**CODE, "model": "broken"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")


async def test_streams_of_a_broken_model_end_with_an_error(http: HttpClient) -> None:
    replies = await asyncio.gather(
        *(streamed(http, path, {**body, "model": "broken"}) for path, body in BODIES.items())
    )
    for path, (comments, events) in zip(BODIES, replies, strict=True):
        assert comments[0] == ": loading broken"
        assert len(events) == 1
        if path == "/v1/messages":
            assert (events[0]["type"], events[0]["error"]["type"]) == ("error", "overloaded_error")
        else:
            assert events[0]["error"]["code"] == "model_not_loaded"


async def test_openais_client_raises_the_error_of_a_broken_model(several: Stack) -> None:
    assert several.gateway is not None
    url = f"http://{several.gateway.facts['address']}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        with pytest.raises(APIStatusError) as raised:
            await openai.completions.create(model="broken", prompt="x")
        assert raised.value.status_code == 503


# -- A model that is replaced


@pytest.mark.thorough
async def test_a_model_that_was_replaced_is_noticed(several: Stack, http: HttpClient, coder: str) -> None:
    before = (await http.post("/v1/completions", {**CODE, "model": "small"})).json()
    assert several.models is not None
    several.models.replace(plans_of(coder, small=WorkerModels(coder, "", name="small")))
    async with AsyncClient(several.address) as client:
        while not (await client.describe("small", timeout_seconds=None)).chat_template:
            pass
    model = (await http.get("/v1/models/small")).json()
    assert model["specd"]["chat"] is True
    after = (await http.post("/v1/completions", {**CODE, "model": "small"})).json()
    assert after["system_fingerprint"] != before["system_fingerprint"]
    # The one before has left, and the metrics of the name are not its own.
    assert read_metric(several.coordinator, "specd_target_available", model="small") == 1


# -- The page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: install the package chromium")
@pytest.mark.thorough
async def test_the_page_loads_the_chosen_model(page: Page, coder: str) -> None:
    plans = plans_of(coder)
    chosen = [plan for plan in plans.plans if plan.name in {"coder", "small"}]
    async with (
        Stack(
            models=ModelPlans((chosen[1], chosen[0]), budget_bytes=200), http="127.0.0.1:0", environment=PATIENT
        ) as stack,
        HttpClient(stack) as http,
    ):
        said = await states_said(page)
        await page.goto(origin_of(stack))
        chooser = page.get_by_role("combobox", name="Model", exact=True)
        options = chooser.locator("option")
        await expect(options).to_have_text(["small (not loaded)", "coder (not loaded)"])
        await expect(page.locator("#model")).to_have_text("small, which has not been loaded yet")

        # A text for a model of which the page knows the name alone.
        await page.get_by_label("Text to continue").fill("def area(width):")
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state")).to_have_text(re.compile(r"^\d+ tokens, "))
        await expect(options).to_have_text(["small", "coder (not loaded)"])
        assert "loading small …" in said

        # The choice of such a model loads it, and shows its kind.
        await chooser.select_option("coder")
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        await expect(page.locator("#model")).to_have_text(re.compile(r"^coder \(float32\) with draft "))
        assert any("worker coder: " in each for each in said)
        await expect(options).to_have_text(["small (not loaded)", "coder"])

        # A known one is loaded by the message itself.
        await http.post("/v1/completions", {**CODE, "model": "small"})
        await expect(options).to_have_text(["small", "coder (not loaded)"])
        del said[:]
        await page.get_by_label("Message", exact=True).fill("hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_have_text(re.compile(r"^\d+ tokens, "))
        assert any(each.startswith("loading coder, ") for each in said)
        assert said.index("generating …", 1) > 0


async def states_said(page: Page) -> list[str]:
    """Return the list to which the texts of the page's state are added as they come."""
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)

    await page.expose_function("noteState", note)
    await page.add_init_script(
        """addEventListener("DOMContentLoaded", () => {
          const state = document.getElementById("state");
          const note = () => noteState(state.textContent);
          new MutationObserver(note).observe(state, { childList: true, characterData: true, subtree: true });
        });"""
    )
    return said
