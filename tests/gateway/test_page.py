"""The page at `/` in a real browser."""

from __future__ import annotations

import io
import os
import re
import signal
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from playwright.async_api import Browser, Page, expect
from playwright.async_api import Error as BrowserError

from specd.supervisor import Stack
from tests.e2e.faults import eventually
from tests.e2e.processes import read_metric, wait_until_idle
from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.browser import CHROMIUM, open_with_token, origin_of
from tests.gateway.http_client import HttpClient
from tests.thorough import examples

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: install the package chromium")

PROMPT = "class Vector:\n    def __init__(self, x, y):\n"
SOURCES = ("draft", "lookup", "target")
# What the policy forbids of it.
FETCH_FROM_ELSEWHERE = """() => new Promise((resolve) => {
    addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
    fetch("http://127.0.0.1:1/").catch(() => setTimeout(() => resolve("nothing"), 2000));
})"""


def counters_of(stack: Stack) -> list[float]:
    names = ("rounds", "proposed_tokens", "accepted_tokens")
    return [read_metric(stack.coordinator, f"specd_{name}_total") for name in names]


async def test_tokens_come_in_the_colours_of_their_sources(
    page: Page, guarded_stack: Stack, token: tuple[str, Path]
) -> None:
    await open_with_token(page, guarded_stack, token[0])
    await expect(page.locator("#model")).to_contain_text("pycode-47m-4bit (float32) with draft pycode-3.6m-8bit")
    await page.get_by_label("Text to continue").fill(PROMPT)
    await page.get_by_label("Most tokens").fill("48")
    await page.locator("#k").fill("4")
    before = counters_of(guarded_stack)
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_text("48 tokens")).to_be_visible()
    rounds, proposed, accepted = (now - then for now, then in zip(counters_of(guarded_stack), before, strict=True))

    async with HttpClient(guarded_stack) as http:
        body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}
        answer = await http.post("/v1/completions", body, authorization=f"Bearer {token[0]}")
    (choice,) = answer.json()["choices"]
    assert await page.locator("#answer").text_content() == PROMPT + choice["text"]
    counts = {source: int(await page.locator(f"#{source}-tokens").inner_text()) for source in SOURCES}
    assert sum(counts.values()) == 48
    assert counts["draft"] > 0
    assert counts["target"] > 0
    colours = set()
    for source in SOURCES:
        spans = page.locator(f"#answer .{source}")
        assert (await spans.count() > 0) == (counts[source] > 0)
        legend = page.locator(f"#legend .{source}")
        colours.add(await legend.evaluate("element => getComputedStyle(element).color"))
    assert len(colours) == 3

    await expect(page.locator("#state")).to_have_text(
        re.compile(r"^48 tokens, [\d.]+ a second, [\d.]+ times as fast as the target alone$")
    )
    assert await page.locator("#k-bars .rejected").count() == rounds - 1  # the first computes the prompt
    assert await page.locator("#acceptance-line").evaluate("line => line.points.length") > 1
    said = f"{100 * accepted / proposed:.1f} % of {proposed:.0f} proposed tokens accepted"
    assert await page.get_by_role("img", name=said).count() == 1
    assert accepted == counts["draft"] + counts["lookup"]

    await page.get_by_role("button", name="Same with target alone").click()
    await expect(page.get_by_text("the same text by the target alone, 48 tokens")).to_be_visible()
    await expect(page.get_by_text("target alone, measured")).to_be_visible()
    assert await page.locator("#answer .draft").count() > 0  # still there to be looked at


async def test_an_answer_comes_in_bit_by_bit_and_can_be_stopped(
    page: Page, guarded_stack: Stack, token: tuple[str, Path]
) -> None:
    cancelled = read_metric(guarded_stack.coordinator, "specd_sessions_total", outcome="cancelled")
    await open_with_token(page, guarded_stack, token[0])
    await page.get_by_label("Most tokens").fill("1900")
    await page.get_by_role("button", name="Generate").click()
    await expect(page.locator("#rate")).to_have_text(re.compile(r"^[\d.]+$"))
    await expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
    await page.keyboard.press("Escape")
    await expect(page.get_by_text(re.compile(r"^stopped after \d+ tokens$"))).to_be_visible()
    await expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    await wait_until_idle(guarded_stack)
    assert read_metric(guarded_stack.coordinator, "specd_sessions_total", outcome="cancelled") == cancelled + 1


@pytest.mark.thorough
async def test_errors_are_said_in_words(page: Page, guarded_stack: Stack, token: tuple[str, Path]) -> None:
    await page.goto(origin_of(guarded_stack))
    await page.get_by_label("Token", exact=True).fill("specd_wrong")
    await page.keyboard.press("Enter")
    await expect(page.locator("#model")).to_contain_text("the token is unknown")
    await expect(page.get_by_role("button", name="Generate")).to_be_disabled()

    await open_with_token(page, guarded_stack, token[0])
    await page.get_by_label("Text to continue").fill("x = 1\n" * 2000)
    await page.get_by_role("button", name="Generate").click()
    await expect(page.get_by_role("alert")).to_contain_text("context")
    await expect(page.locator("#answer")).to_have_text("")  # and not the prompt, as if it were an answer

    # The coordinator dies in the middle, and comes back: the answer continues, and the next one is refused until then.
    await page.get_by_label("Text to continue").fill(PROMPT)
    await page.get_by_label("Most tokens").fill("400")
    generate = page.get_by_role("button", name="Generate")
    await generate.click()
    await expect(page.locator("#answer .target").first).to_be_attached()
    await expect(page.get_by_role("alert")).to_be_hidden()
    os.kill(guarded_stack.coordinator.pid, signal.SIGKILL)
    await expect(page.locator("#state")).to_contain_text("400 tokens, ")
    await expect(page.get_by_role("alert")).to_be_hidden()
    assert (await page.locator("#answer").inner_text()).startswith(PROMPT)
    os.kill(guarded_stack.coordinator.pid, signal.SIGKILL)
    await generate.click()
    await expect(page.get_by_role("alert")).to_contain_text("the coordinator cannot be reached")
    await expect(generate).to_be_enabled()
    async with HttpClient(guarded_stack) as http:

        async def is_back() -> bool:
            return (await http.get("/health")).status_code == 200

        await eventually(is_back)
    await page.get_by_label("Most tokens").fill("8")
    await generate.click()
    await expect(page.locator("#state")).to_contain_text("8 tokens, ")


async def test_a_chat_model_is_asked_in_its_template_and_its_text_is_no_markup(
    page: Page, arranged_stack: Stack
) -> None:
    await page.goto(origin_of(arranged_stack))
    await page.get_by_label("Message", exact=True).fill("markup")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("#state")).to_contain_text("a second")
    assert await page.locator("#answer").text_content() == SCRIPTS["markup"]
    assert await page.locator("#answer b, #answer img").count() == 0
    assert await page.title() == "specd"


async def test_the_browser_would_let_no_text_become_markup(browser: Browser, arranged_stack: Stack) -> None:
    async with await browser.new_context() as context:
        page = await context.new_page()
        response = await page.goto(origin_of(arranged_stack))
        assert response is not None
        policy = response.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        with pytest.raises(BrowserError, match="TrustedHTML"):
            await page.evaluate("document.body.innerHTML = '<b>bold</b>'")
        assert await page.evaluate(FETCH_FROM_ELSEWHERE) == "connect-src"


async def test_it_is_used_with_the_keyboard_alone_and_everything_has_a_name(page: Page, arranged_stack: Stack) -> None:
    await page.goto(origin_of(arranged_stack))
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    reached = []
    for _ in range(18):
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached == [
        *("token", "theme", "conversation", "new", "delete", "delete-all", "markdown"),
        *("System message", "prompt", "max-tokens", "temperature", "seed", "draft-source", "k", "More parameters"),
        *("generate", "copy-curl", "copy-python"),
    ]
    debugger = await page.context.new_cdp_session(page)
    tree = (await debugger.send("Accessibility.getFullAXTree"))["nodes"]
    names = [(node["role"]["value"], node["name"]["value"]) for node in tree if "name" in node]
    for role, count in {"textbox": 2, "spinbutton": 4, "combobox": 2, "checkbox": 1, "button": 10, "image": 2}.items():
        named = [name for its_role, name in names if its_role == role]
        assert len(named) == len(set(named) - {""}) == count, (role, named)

    await page.get_by_label("Message", exact=True).fill("hello")
    await page.keyboard.press("Enter")
    await expect(page.locator("#answer")).to_have_text(SCRIPTS["hello"])
    await expect(page.get_by_role("status").filter(has_text="a second")).to_be_visible()


async def test_it_is_light_or_dark_as_the_system_is_or_as_it_is_told(page: Page, arranged_stack: Stack) -> None:
    async def background() -> str:
        return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))

    await page.goto(origin_of(arranged_stack))
    light = await background()
    await page.emulate_media(color_scheme="dark")
    dark = await background()
    assert light != dark
    await page.get_by_role("button", name="Light or dark").click()
    assert await background() == light
    await page.get_by_role("button", name="Light or dark").click()
    assert await background() == dark


SHOW_AS_TOKEN = """([source, text, font]) => {
    const token = Object.assign(document.createElement("span"), { className: source, textContent: text });
    document.getElementById("answer").style.fontFamily = font;
    document.getElementById("answer").replaceChildren(token);
}"""


async def picture_of(page: Page, *shown: str) -> Image.Image:
    """Return how the page shows a token, with the lines around it."""
    await page.evaluate(SHOW_AS_TOKEN, list(shown))
    box = await page.locator("#answer span").bounding_box()
    assert box is not None
    clip = {"x": box["x"], "y": box["y"] - 6, "width": 32, "height": box["height"] + 12}
    return Image.open(io.BytesIO(await page.screenshot(clip=clip))).convert("L")  # type: ignore[arg-type]


@pytest.mark.parametrize("font", examples(["monospace", "DejaVu Sans Mono", "Liberation Mono"], 1))
@pytest.mark.parametrize("kind", ["draft source source-0", "lookup source source-1", "target", "target near-tie"])
async def test_underscores_are_seen(page: Page, guarded_stack: Stack, kind: str, font: str) -> None:
    await page.goto(origin_of(guarded_stack))
    underscores, spaces = [await picture_of(page, kind, 4 * character, font) for character in ("_", "\u00a0")]
    assert max(ImageChops.difference(underscores, spaces).tobytes()) > 64  # of 255 shades


@pytest.mark.parametrize("width", [390, 360])
async def test_it_fits_a_phone(page: Page, guarded_stack: Stack, token: tuple[str, Path], width: int) -> None:
    await page.set_viewport_size({"width": width, "height": 844})
    await open_with_token(page, guarded_stack, token[0])
    await expect(page.locator("#model")).to_contain_text("pycode-47m-4bit (float32) with draft pycode-3.6m-8bit")
    model, header = [await page.locator(selector).bounding_box() for selector in ("#model", "header")]
    assert model is not None
    assert header is not None
    assert model["height"] < 50  # two lines
    assert header["height"] < 844 / 5
    assert await page.evaluate("document.documentElement.scrollWidth") == width
