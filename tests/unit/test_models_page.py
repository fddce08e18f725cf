"""docs/models.md lists the forms of each family's replies that the gateway's tables have."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.reply.forms import CHANNELS, REASONING, TOOLS
from tests.reply_columns import columns_of, forms_of_no_family

PAGE = (next(p for p in Path(__file__).parents if (p / "pyproject.toml").is_file()) / "docs" / "models.md").read_text()
# By family, the cells of its row; a pipe in code has a backslash before it.
ROWS = {cells[1]: cells[2:-1] for line in PAGE.splitlines() if len(cells := re.split(r" ?(?<!\\)\| ?", line)) == 7}


def test_the_page_has_the_forms_of_each_family() -> None:
    assert len(ROWS) > 100
    for family, (*_, reasoning, tools) in ROWS.items():
        if family not in {"family", "---"}:
            assert (reasoning, tools) == columns_of(family), f"{family}: write the page again with `make models`"


def test_the_page_has_every_form_and_every_family_of_a_form() -> None:
    of_forms = [*(f.families for f in CHANNELS), *(f.families for f in REASONING), *(f.families for f in TOOLS)]
    families = {family for families in of_forms for family in families}
    assert families - ROWS.keys() == {"muse_spark"}  # which needs kernels that a CPU has not
    assert all(form in " ".join(PAGE.split()) for forms in forms_of_no_family() for form in forms)
