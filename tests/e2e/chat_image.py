"""Draws a conversation of `specd chat` on a real terminal into docs/images: python -m tests.e2e.chat_image."""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specd.supervisor import Stack
from tests.e2e.terminal import ALT_ENTER, CTRL_C, TAB, Terminal
from tests.gateway.arranged_model import save_arranged_model

_IMAGE = Path(__file__).parents[2] / "docs" / "images" / "chat.svg"
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they would be loaded from elsewhere
_WIDTH = 100
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OTHERS = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-ln-z]|\].*?\x07)")


async def draw() -> None:
    """Talk with a model that follows scripts, and draw the terminal."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_arranged_model(Path(directory) / "arranged")
        async with Stack(target=model, draft=model, environment={"SPECD_LOG_LEVEL": "error"}) as stack:
            shown = await asyncio.to_thread(talk, stack.address, directory)
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(shown)))
    _IMAGE.write_text(_FONTS.sub("", console.export_svg(title="specd chat")))


def talk(address: str, directory: str) -> list[str]:
    """Return the lines on the terminal, in their colours."""
    command = ("chat", "--address", address, "--num-draft-tokens", "3", "--no-history")
    with Terminal(*command, XDG_STATE_HOME=directory) as terminal:
        terminal.wait_for(">")
        for typed, expected in (
            ("sunny in Zürich?", "21 °C"),
            (f"hello {ALT_ENTER}and a second line", "today"),
            (f"/st{TAB}", "acceptance length"),
            ("/help", "paste"),
            ("/undo", "second line"),
        ):
            terminal.type(typed)
            terminal.wait_for(typed[-4:].strip() if TAB not in typed else "ats")
            terminal.type("\r")
            terminal.wait_for(expected)
            terminal.wait_for(">")
        terminal.type(CTRL_C)  # it deletes the message, which is there to be edited
        terminal.type("/exit\r")
        terminal.exit_code()
        return drawn(terminal.shown)


def drawn(output: str) -> list[str]:
    """Return the lines that a terminal shows after an output, with their colours."""
    rows: list[list[tuple[str, str]]] = [[]]
    row = column = 0
    style = ""
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\].*?\x07|[^\x1b]", output):
        count = int(part[2:-1] or 1) if re.fullmatch(r"\x1b\[\d*[A-D]", part) else 1
        if _COLOURS.fullmatch(part):
            style = part if part in {"\x1b[0m", "\x1b[m"} else style + part
        elif part == "\n":
            row += 1
        elif part == "\r":
            column = 0
        elif part == "\b" or (part.endswith("D") and _OTHERS.fullmatch(part)):
            column = max(column - count, 0)
        elif _OTHERS.fullmatch(part):
            row = max(row - count, 0) if part.endswith("A") else row + count if part.endswith("B") else row
            column += count if part.endswith("C") else 0
            if part.endswith(("K", "J")) and row < len(rows):
                del rows[row][column:]
                if part.endswith("J"):
                    del rows[row + 1 :]
        else:
            rows += [[] for _ in range(row + 1 - len(rows))]
            line = rows[row]
            line += [(" ", "")] * (column + 1 - len(line))
            line[column] = (part, style)
            column += 1
    return ["".join(f"{style}{character}\x1b[0m" for character, style in line) for line in rows]


if __name__ == "__main__":
    asyncio.run(draw())
