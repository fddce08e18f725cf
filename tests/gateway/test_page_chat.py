"""The page at `/` as a place for conversations, in a real browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Request, Route, expect

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import PATIENT
from tests.e2e.processes import read_metric, wait_until_idle
from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.browser import CHROMIUM, open_with_token, origin_of
from tests.gateway.http_client import HttpClient

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: install the package chromium")

COARSE = 0.02  # the rounding of 16 bits
SECRET_NAME = "SPECD_TOKEN"
# What quoting has to keep.
AWKWARD = "def say():\n    print('it\\'s \"quoted\"', `x`, $HOME, \\\\, 'ü')\n"


async def say(page: Page, text: str) -> None:
    """Send a message, and wait for the end of its answer."""
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")
    await expect(page.locator("#state")).to_have_text(re.compile(r"^\d+ tokens, "))


def bodies_of(page: Page) -> list[dict[str, Any]]:
    """Return the list to which the page's requests for generations are added."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note)
    return bodies


async def turns_of(page: Page) -> list[str]:
    return await page.locator("#turns :is(.said, .answer)").all_text_contents()


async def test_a_conversation_is_sent_whole_and_is_kept_by_the_browser(page: Page, arranged_stack: Stack) -> None:
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await page.get_by_text("System message").click()
    await page.get_by_label("System message").fill("Be brief.")
    await page.locator("#k").fill("3")  # where the planner chooses, a slow machine may draft nothing
    await say(page, "hello")
    await say(page, "sunny")
    spoken = ["hello", SCRIPTS["hello"], "sunny", SCRIPTS["sunny"]]
    assert await turns_of(page) == spoken
    roles = ["user", "assistant", "user"]
    sent = [{"role": role, "content": text} for role, text in zip(roles, spoken, strict=False)]
    assert bodies[1]["messages"] == [{"role": "system", "content": "Be brief."}, *sent]

    await page.reload()
    await expect(page.locator("#answer")).to_have_text(SCRIPTS["sunny"])
    assert await turns_of(page) == spoken
    assert await page.locator("#answer .draft").count() > 0
    assert await page.get_by_label("System message").input_value() == "Be brief."
    await page.locator("#answer .token").first.hover()
    await expect(page.locator("#tip")).to_contain_text("log-probability")

    await page.get_by_role("button", name="New").click()
    assert await turns_of(page) == []
    await say(page, "think")
    assert "messages" in bodies[-1]
    assert bodies[-1]["messages"] == [{"role": "user", "content": "think"}]
    await page.get_by_label("History").select_option("hello")
    assert await turns_of(page) == spoken
    await page.get_by_role("button", name="Delete", exact=True).click()
    assert (await turns_of(page))[0] == "think"

    page.on("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Delete all").click()
    await expect(page.locator("#turns li")).to_have_count(0)
    assert await page.evaluate("localStorage.length") == 0


async def test_reasoning_is_folded_and_goes_back_to_the_model(page: Page, arranged_stack: Stack) -> None:
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await say(page, "think")
    fold = page.locator("#answer details")
    assert await fold.get_attribute("open") is None
    assert "The user greets." in (await fold.text_content() or "")
    assert await page.locator("#answer > p").all_text_contents() == ["Good day to you."]
    await say(page, "hello")
    answered = bodies[1]["messages"][1]
    assert answered["content"].strip() == "Good day to you."
    assert answered["reasoning_content"].strip() == "The user greets."


async def test_a_turn_is_edited_and_an_answer_is_asked_for_again(page: Page, arranged_stack: Stack) -> None:
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await say(page, "hello")
    await say(page, "think")
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator("#state")).to_have_text(re.compile(r"^\d+ tokens, "))
    assert [body["messages"] for body in bodies[1:]] == 2 * [bodies[1]["messages"]]
    assert await page.locator("#turns li").count() == 4

    await page.get_by_role("button", name="Edit").first.click()
    assert await page.get_by_label("Message", exact=True).input_value() == "hello"
    await page.keyboard.press("Escape")
    await expect(page.locator("#turns .replaced")).to_have_count(0)
    await page.get_by_role("button", name="Edit").first.click()
    await expect(page.locator("#turns .replaced")).to_have_count(4)
    await say(page, "sunny")
    assert await turns_of(page) == ["sunny", SCRIPTS["sunny"]]


async def test_what_came_before_a_stop_stays(page: Page, arranged_stack: Stack) -> None:
    cancelled = read_metric(arranged_stack.coordinator, "specd_sessions_total", outcome="cancelled")
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await page.get_by_label("Most tokens").fill("1300")
    await page.get_by_label("Proposed by").select_option("none")
    await page.get_by_label("Message", exact=True).fill("count")
    await page.keyboard.press("Enter")
    await expect(page.locator("#answer")).to_contain_text("20 21 22")
    await page.keyboard.press("Escape")
    await expect(page.locator("#state")).to_have_text(re.compile(r"^stopped after \d+ tokens$"))
    part = (await turns_of(page))[1]
    assert SCRIPTS["count"].startswith(part)
    assert part != SCRIPTS["count"]
    await wait_until_idle(arranged_stack)
    assert read_metric(arranged_stack.coordinator, "specd_sessions_total", outcome="cancelled") == cancelled + 1
    await say(page, "hello")
    assert bodies[-1]["messages"][1] == {"role": "assistant", "content": part}
    assert await page.locator("#turns .note").first.text_content() == await page.locator(".note").first.text_content()
    await expect(page.locator("#turns .note").first).to_contain_text("stopped after")


async def test_a_refused_message_can_be_sent_again(page: Page, arranged_stack: Stack) -> None:
    await page.goto(origin_of(arranged_stack))
    await say(page, "hello")
    await page.get_by_label("Most tokens").fill("5000")
    await page.get_by_label("Message", exact=True).fill("sunny")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("context")
    assert await page.get_by_label("Message", exact=True).input_value() == "sunny"
    assert await turns_of(page) == ["hello", SCRIPTS["hello"]]


async def test_shift_and_enter_begins_a_line(page: Page, arranged_stack: Stack) -> None:
    await page.goto(origin_of(arranged_stack))
    await page.get_by_label("Message", exact=True).fill("hello")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("there")
    await page.keyboard.press("Enter")
    await expect(page.locator("#turns .said")).to_have_text("hello\nthere")


async def test_a_token_tells_its_source_and_its_probability(page: Page, arranged_stack: Stack) -> None:
    await page.goto(origin_of(arranged_stack))
    await page.locator("#k").fill("3")
    await say(page, "hello")
    tip = page.locator("#tip")
    await page.locator("#answer .target").first.hover()
    await expect(tip).to_contain_text('"Hel", token 1')
    await expect(tip).to_contain_text("source: the target itself")
    await expect(tip).to_have_text(re.compile(r"log-probability -?0\.000 \(100\.0 %\)"))
    await page.locator("#answer .draft").first.hover()
    await expect(tip).to_contain_text("source: draft model")

    await page.mouse.move(0, 0)
    await expect(tip).to_be_hidden()
    await page.locator("#answer").focus()
    await page.keyboard.press("ArrowRight")
    await page.keyboard.press("ArrowRight")
    await expect(tip).to_contain_text("token 2")
    await page.keyboard.press("ArrowLeft")
    await expect(tip).to_contain_text("token 1")
    await page.keyboard.press("Escape")
    await expect(tip).to_be_hidden()


async def test_parameters_are_sent(page: Page, arranged_stack: Stack) -> None:
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await page.get_by_text("More parameters").click()
    fields = {"Top p": 0.9, "Top k": 5, "Min p": 0.1, "Repetition penalty": 1.1, "Presence penalty": 0.5}
    for label, value in {**fields, "Frequency penalty": 0.25, "Temperature": 0.5, "Seed": 7}.items():
        await page.get_by_label(label, exact=True).fill(str(value))
    await page.get_by_label("Stop before").fill("help")
    await page.get_by_label("Log-probabilities").uncheck()
    await say(page, "hello")
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [bodies[0][name] for name in (*names, "temperature", "seed", "stop")] == [
        *(0.9, 5, 0.1, 1.1, 0.5, 0.25),
        *(0.5, 7, "help"),
    ]
    assert "logprobs" not in bodies[0]
    assert "help" not in (await turns_of(page))[1]


# -- Commands


async def copied(page: Page, name: str) -> str:
    """Return what a button copies."""
    await page.get_by_role("button", name=name).click()
    await expect(page.locator("#state")).to_have_text("copied")
    return str(await page.evaluate("navigator.clipboard.readText()"))


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPECD_", "OPENAI_"))}
    return subprocess.run(
        arguments, env={**environment, **variables}, capture_output=True, text=True, timeout=120, check=False
    )


async def test_a_request_is_copied_as_commands_that_give_its_text(
    page: Page, guarded_stack: Stack, token: tuple[str, Path]
) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_with_token(page, guarded_stack, token[0])
    await page.get_by_label("Text to continue").fill(AWKWARD)
    await page.get_by_label("Most tokens").fill("24")
    await page.get_by_label("Temperature").fill("0.7")
    await page.get_by_label("Seed").fill("5")
    await page.locator("#k").fill("2")
    await page.get_by_role("button", name="Generate").click()
    await expect(page.locator("#state")).to_contain_text("a second")
    shown = await page.locator("#answer").text_content()
    curl, python = await copied(page, "Copy as curl"), await copied(page, "Copy as Python")
    assert token[0] not in curl + python
    done = run(["bash", "-c", curl], **{SECRET_NAME: token[0]})
    assert done.returncode == 0, done.stderr
    assert AWKWARD + json.loads(done.stdout)["choices"][0]["text"] == shown
    assert "the token is unknown" in run(["bash", "-c", curl], **{SECRET_NAME: "specd_wrong"}).stdout
    done = run([sys.executable, "-c", python], **{SECRET_NAME: token[0]})
    assert AWKWARD + done.stdout == shown, done.stderr
    assert token[0] not in await page.evaluate("JSON.stringify(localStorage)")


async def test_a_conversation_is_copied_as_commands(page: Page, arranged_stack: Stack) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.goto(origin_of(arranged_stack))
    await say(page, "hello")
    await say(page, "sunny it's")
    curl, python = await copied(page, "Copy as curl"), await copied(page, "Copy as Python")
    assert "authorization" not in curl
    assert SECRET_NAME not in python
    done = run(["bash", "-c", curl])
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == SCRIPTS["sunny"], done.stderr
    assert run([sys.executable, "-c", python]).stdout == SCRIPTS["sunny"]
    assert json.dumps(SCRIPTS["hello"]) in python


async def test_without_a_clipboard_the_text_is_there_to_be_copied(page: Page, arranged_stack: Stack) -> None:
    await page.add_init_script("delete Navigator.prototype.clipboard")
    await page.goto(origin_of(arranged_stack))
    await page.get_by_label("Message", exact=True).fill("hello")
    await page.get_by_role("button", name="Copy as curl").click()
    assert "curl -sS http://127.0.0.1" in await page.get_by_label("Text to copy").input_value()
    await page.get_by_role("button", name="Close").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)


# -- Near ties


@pytest.fixture(scope="module")
async def coarse_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The embedded pair, with the rounding of 16 bits in the costs that an earlier start has kept."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {**PATIENT, "SPECD_CALIBRATION_SECONDS": "0.2", "XDG_CACHE_HOME": str(cache)}
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment):
        pass
    for path in (cache / "specd").glob("step-costs-*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "logit_rounding": COARSE}))
    async with Stack(
        target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=environment
    ) as running:
        yield running


@pytest.mark.thorough
async def test_near_ties_are_marked(page: Page, coarse_stack: Stack) -> None:
    prompt = "class Stack:\n    def"
    async with HttpClient(coarse_stack) as http:
        body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "token_sources": True}
        answer = (await http.post("/v1/completions", body)).json()
    near = [token for token in answer["choices"][0]["tokens"] if token.get("near_tie")]
    assert 0 < len(near) == answer["timings"]["near_ties"] < 48
    assert min(token["margin"] for token in near) == pytest.approx(answer["timings"]["smallest_margin"])

    await page.goto(origin_of(coarse_stack))
    await page.get_by_label("Text to continue").fill(prompt)
    await page.get_by_label("Most tokens").fill("64")
    await page.get_by_role("button", name="Generate").click()
    await expect(page.locator("#state")).to_contain_text("64 tokens, ")
    marked = page.locator("#answer .near-tie")
    assert await marked.all_text_contents() == [token["text"] for token in near if token["text"]]
    await marked.first.hover()
    await expect(page.locator("#tip")).to_contain_text("near tie: rounding could have chosen another token")
    assert await page.locator("#answer .token:not(.near-tie)").count() > 0


# -- Several models, small screens, and what a browser has kept


async def test_several_models_are_offered_and_one_is_not(page: Page, arranged_stack: Stack) -> None:
    bodies = bodies_of(page)
    await page.goto(origin_of(arranged_stack))
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    chooser = page.get_by_role("combobox", name="Model", exact=True)
    await expect(chooser).to_have_count(0)

    async def with_another(route: Route) -> None:
        response = await route.fetch()
        models = await response.json()
        models["data"].append({**models["data"][0], "id": "adapter"})
        await route.fulfill(json=models)

    await page.route("**/v1/models", with_another)
    await page.reload()
    await expect(chooser).to_be_visible()
    assert await chooser.locator("option").all_text_contents() == ["arranged", "adapter"]
    await say(page, "hello")
    await chooser.select_option("adapter")
    await expect(page.locator("#model")).to_contain_text("adapter (float32)")
    await page.get_by_label("Message", exact=True).fill("sunny")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("there is no model 'adapter'")  # the gateway has but one
    await page.unroute_all(behavior="wait")
    assert [body["model"] for body in bodies] == ["arranged", "adapter"]
    assert await turns_of(page) == ["hello", SCRIPTS["hello"]]


async def test_a_conversation_fits_a_phone(page: Page, arranged_stack: Stack) -> None:
    await page.set_viewport_size({"width": 360, "height": 740})
    await page.goto(origin_of(arranged_stack))
    await say(page, "markdown")
    await page.get_by_label("Message", exact=True).fill("hello " + "x" * 300)
    await page.keyboard.press("Enter")
    await expect(page.locator("#state")).to_contain_text("a second")
    await page.get_by_text("More parameters").click()
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
    await page.locator("#answer .token").last.hover()
    box = await page.locator("#tip").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


FILL = """() => {
    const turns = [{ role: "user", content: "x".repeat(150000) }];
    const many = Array.from({ length: 30 }, (_, id) => ({ id: String(id), system: "", turns }));
    localStorage.setItem("specd-conversations", JSON.stringify(many));
}"""


async def test_old_conversations_make_room(page: Page, arranged_stack: Stack) -> None:
    await page.goto(origin_of(arranged_stack))
    await page.evaluate(FILL)
    await page.reload()
    await page.get_by_role("button", name="New").click()
    await say(page, "hello")
    kept = json.loads(await page.evaluate("localStorage.getItem('specd-conversations')"))
    assert kept[0]["turns"][0]["content"] == "hello"
    assert [each["id"] for each in kept[1:]] == [str(number) for number in range(13)]


@pytest.mark.parametrize("kept", ["{", '"x"', '[{"id": 1}]', '[{"id": "1", "system": "", "turns": [{"role": "x"}]}]'])
async def test_what_is_kept_may_be_anything(page: Page, arranged_stack: Stack, kept: str) -> None:
    await page.goto(origin_of(arranged_stack))
    await page.evaluate("kept => localStorage.setItem('specd-conversations', kept)", kept)
    await page.reload()
    await say(page, "hello")
    assert await turns_of(page) == ["hello", SCRIPTS["hello"]]
