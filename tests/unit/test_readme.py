"""The pages for readers show what there is, and fit a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
LINKS = [(page, link) for page in PAGES for link in sorted(set(re.findall(r"\]\(([^):]+)\)", page.read_text())))]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_python_example_is_the_one_in_the_readme() -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "examples" / "generate.py").read_text()


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{page.relative_to(ROOT)}-{link}" for page, link in LINKS])
def test_links_lead_somewhere(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    assert target.exists()
    assert not anchor or anchor in anchors_of(target)


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120
