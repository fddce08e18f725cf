"""Markdown on the page, in a real browser: what it becomes, hostile texts, and texts that come bit by bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from playwright.async_api import Page, expect

from specd.supervisor import Stack
from tests.e2e.processes import PATIENCE_SECONDS
from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.browser import CHROMIUM, origin_of
from tests.thorough import examples

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: install the package chromium")

# Returns the HTML of a text that comes in these parts, drawn after each.
RENDER = """async (parts) => {
    const { Answer } = await import("/answer.js");
    const element = document.createElement("div");
    const answer = new Answer(element, () => "target", () => "");
    answer.show(true);
    for (const text of parts) {
        answer.tokens.add({ text, source: "target" });
        answer.draw();
    }
    return element.innerHTML.replaceAll(/<span class="token target">(.*?)<\\/span>/gs, "$1");
}"""
CASES = {
    "plain text\nin two lines": "<p>plain text\nin two lines</p>",
    "**bold** *it* ~~gone~~ `a*b*c`": ("<p><strong>bold</strong> <em>it</em> <del>gone</del> <code>a*b*c</code></p>"),
    "***both***": "<p><strong><em>both</em></strong></p>",
    "snake_case_name, 2 * 3 * 4, \\*not\\*": "<p>snake_case_name, 2 * 3 * 4, *not*</p>",
    "__init__ and **open": "<p><strong>init</strong> and **open</p>",
    "``a ` b`` and `open": "<p><code>a ` b</code> and `open</p>",
    "# One\n### Three ###": "<h3>One</h3><h5>Three</h5>",
    "#hashtag": "<p>#hashtag</p>",
    "> said\n> **so**": "<blockquote><p>said\n<strong>so</strong></p></blockquote>",
    "- a\n- b\n  - c\n\n- d": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
    "3. x\n4. y": '<ol start="3"><li><p>x</p></li><li><p>y</p></li></ol>',
    "above\n\n---\nbelow": "<p>above</p><hr><p>below</p>",
    "1986. A year": '<ol start="1986"><li><p>A year</p></li></ol>',
    "<b>bold</b> &amp;": "<p>&lt;b&gt;bold&lt;/b&gt; &amp;amp;</p>",
    r"\(x_1\)": r"<p>\(x_1\)</p>",
}
BAR = '<div class="bar-of-code"><span>{}</span><button type="button" class="copy-code">Copy code</button></div>'
CODE = {
    "```py\nif a < b:\n    **c**\n```\nend": ("py", "if a &lt; b:\n    **c**\n", "<p>end</p>"),
    "~~~\n```\n~~~": ("", "```\n", ""),
    "```c++\nopen *fence*": ("c++", "open *fence*\n", ""),
    "    indented\n      more": ("", "indented\n  more\n", ""),
}
ADDRESS = 'title="{0}" rel="noopener noreferrer nofollow" target="_blank"'
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](/v1/models)",
    "[x](//example.org)",
    "![x](javascript:alert(1))",
    "<a href='javascript:alert(1)'>x</a>",
    "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
    "| <img src=x onerror=alert(1)> |\n|---|\n| [x](javascript:1) |",
    "[a]: javascript:alert(1)\n[a]",
    '[x](https://example.org "><img src=x onerror=alert(1)>")',
)


async def rendered(page: Page, *parts: str) -> str:
    return str(await page.evaluate(RENDER, list(parts)))


@pytest.fixture
async def opened(page: Page, arranged_stack: Stack) -> Page:
    await page.goto(origin_of(arranged_stack))
    return page


async def test_markdown_becomes_elements(opened: Page) -> None:
    for text, html in CASES.items():
        assert await rendered(opened, text) == html, text
    for text, (language, code, rest) in CODE.items():
        shown = f'<div class="code">{BAR.format(language)}<pre tabindex="0"><code>{code}</code></pre></div>{rest}'
        assert await rendered(opened, text) == shown, text
    table = await rendered(opened, "a | b\n--|:-:\n`1` | x \\| y\n\nend")
    assert table == (
        '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>'
        "<td><code>1</code></td><td>x | y</td></tr></tbody></table></div><p>end</p>"
    )


async def test_addresses_become_links_and_images_too(opened: Page) -> None:
    first = "https://example.org/a_b_c"
    link = f'<a href="{first}" {ADDRESS.format(first)}>'
    assert await rendered(opened, f"[the *docs*]({first})") == f"<p>{link}the *docs*</a></p>"
    assert await rendered(opened, f"see {first}.") == f"<p>see {link}{first}</a>.</p>"
    assert await rendered(opened, f"![seen]({first})") == f"<p>{link}seen</a></p>"
    mail = "mailto:a@example.org"
    assert await rendered(opened, f"[mail]({mail})") == f'<p><a href="{mail}" {ADDRESS.format(mail)}>mail</a></p>'
    wiki = "https://example.org/x_(y)"
    assert await rendered(opened, f"([x]({wiki}))") == f'<p>(<a href="{wiki}" {ADDRESS.format(wiki)}>x</a>)</p>'


# Returns what in an answer could do something, and its text.
LOOK = """async (text) => {
    const { Answer } = await import("/answer.js");
    const element = document.createElement("div");
    document.body.append(element);
    const answer = new Answer(element, () => "target", () => "");
    answer.tokens.add({ text, source: "target" });
    answer.show(true);
    const all = [...element.querySelectorAll("*")];
    const links = all.flatMap((each) => (each.href ? [new URL(each.href).origin] : []));
    const names = [...new Set(all.flatMap((each) => each.getAttributeNames()))];
    const shown = { tags: [...new Set(all.map((each) => each.localName))], names, links };
    element.remove();
    return shown;
}"""


@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_text_stays_text(opened: Page, text: str) -> None:
    opened.on("dialog", lambda _: pytest.fail("a script ran"))
    shown: dict[str, Any] = await opened.evaluate(LOOK, text)
    harmless = {"p", "span", "code", "pre", "div", "button", "table", "thead", "tbody", "tr", "th", "td", "a"}
    assert set(shown["tags"]) <= harmless
    assert set(shown["names"]) <= {"class", "type", "tabindex", "href", "title", "rel", "target"}
    assert set(shown["links"]) <= {"https://example.org"}


async def test_a_text_that_comes_bit_by_bit_is_the_same_as_at_once(opened: Page) -> None:
    texts = [*CASES, *CODE, *HOSTILE, SCRIPTS["markdown"], "\n\n".join([*CASES, *CODE]), "a\n\n" * 20]
    choose = random.Random(0)
    for text in texts:
        ends = sorted(choose.sample(range(1, len(text)), k=min(len(text) - 1, 40)))
        parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        whole, in_parts = await rendered(opened, text), await rendered(opened, *parts)
        assert in_parts == whole, parts
        assert in_parts


UNITS = ["[", "``a`", "> ", "[a](", "| ", "***a", "*a ", "`", "**", "_a", "- ", "~~a ", "h", "\\", "![", "#", "* "]


@pytest.mark.parametrize("unit", examples(UNITS, 6))
async def test_no_text_takes_long(opened: Page, unit: str) -> None:
    """The deepest nesting would exhaust the stack, and a search from each mark to the end the patience."""
    for text in (unit * (50_000 // len(unit)) + " end", (unit + "x\n") * 3000 + " end"):
        assert await asyncio.wait_for(rendered(opened, text), PATIENCE_SECONDS)


async def test_markdown_can_be_turned_off(opened: Page) -> None:
    await opened.get_by_label("Message", exact=True).fill("markdown")
    await opened.keyboard.press("Enter")
    await expect(opened.locator("#state")).to_contain_text("a second")
    assert await opened.locator("#answer table").count() == 1
    assert await opened.locator("#answer img").count() == 0
    await opened.get_by_role("checkbox", name="Markdown").uncheck()
    assert await opened.locator("#answer").text_content() == SCRIPTS["markdown"]
    assert await opened.locator("#answer table").count() == 0


async def test_code_is_copied_as_it_is(opened: Page) -> None:
    await opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await opened.get_by_label("Message", exact=True).fill("markdown")
    await opened.keyboard.press("Enter")
    await expect(opened.locator("#state")).to_contain_text("a second")
    await opened.get_by_role("button", name="Copy code").click()
    await expect(opened.locator("#state")).to_have_text("copied")
    code = await opened.evaluate("navigator.clipboard.readText()")
    assert code == "def add(a, b):\n    return a + b  # <b>\n"
