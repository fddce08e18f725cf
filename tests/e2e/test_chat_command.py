"""`specd chat`: from a pipe and at a terminal, with a model that follows scripts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from specd.supervisor import Stack
from tests.e2e.processes import complaint, read_metric, run_specd
from tests.e2e.terminal import CTRL_C, CTRL_D, Terminal
from tests.gateway.arranged_model import SCRIPTS, save_arranged_model

GREEN = "\x1b[32m"


@pytest.fixture(scope="module")
async def arranged_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The model as target and as draft, which is right therefore."""
    model = save_arranged_model(tmp_path_factory.mktemp("models") / "arranged")
    async with Stack(target=model, draft=model) as running:
        yield running


def said_to(stack: Stack, lines: list[str], *options: str) -> str:
    """Return what a conversation of these lines shows."""
    done = run_specd("chat", "--address", stack.address, *options, stdin="".join(f"{x}\n" for x in lines).encode())
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def rows_of(shown: str) -> list[dict[str, list[str]]]:
    """Return each table of /stats, its values by row."""
    tables = shown.split("last answer  conversation")[1:]
    matches = (re.findall(r"^([a-z][a-z/ -]*?) {2,}(\S.*?) *$", table, re.MULTILINE) for table in tables)
    return [{name: values.split() for name, values in rows} for rows in matches]


def test_statistics_are_those_of_the_coordinator(arranged_stack: Stack) -> None:
    def counts() -> list[float]:
        names = ("proposed", "accepted")
        return [read_metric(arranged_stack.coordinator, f"specd_{name}_tokens_total") for name in names]

    before = counts()
    shown = said_to(arranged_stack, ["hello", "sunny", "/stats"], "--num-draft-tokens", "3")
    proposed, accepted = (now - then for now, then in zip(counts(), before, strict=True))
    (rows,) = rows_of(shown)
    lengths = [-(-len(SCRIPTS[name]) // 3) + 1 for name in ("hello", "sunny")]  # with the end token
    assert rows["answers"] == ["1", "2"]
    assert rows["generated tokens"] == [str(lengths[1]), str(sum(lengths))]
    # The conversation so far as the template writes it, a token for each character and one for the script.
    prompt = f"user: hello\nassistant: {SCRIPTS['hello']}\nuser: sunny\n"
    assert rows["prompt tokens"] == [str(len(prompt) + 1)]
    assert int(rows["reused prompt tokens"][0]) >= len("user: hello\n")
    assert accepted > 0
    assert rows["acceptance rate"][1] == f"{accepted / proposed:.1%}"
    assert float(rows["tokens/s"][0]) > 0
    assert f"{lengths[1]} tokens · " in shown


def test_a_conversation_begins_anew_and_leaves_nothing_behind(arranged_stack: Stack) -> None:
    shown = said_to(arranged_stack, ["/stats", "hello", "sunny", "/what", "/reset", "/stats", "hello", "/exit"])
    first, again = (match.start() for match in re.finditer(re.escape(SCRIPTS["hello"]), shown))
    reset = shown.index("> a new conversation")
    assert first < shown.index(SCRIPTS["sunny"]) < reset < again
    assert "no answer yet" in shown[:first]
    assert "no answer yet" in shown[reset:again]
    assert shown.count("/exit ends") == 2  # at the beginning, and after what is no command
    assert read_metric(arranged_stack.coordinator, "specd_kept_sessions") == 0


def test_a_system_message_comes_first(arranged_stack: Stack) -> None:
    (rows,) = rows_of(said_to(arranged_stack, ["hello", "/stats"], "--system", "Be brief."))
    assert rows["prompt tokens"] == [str(len("system: Be brief.\nuser: hello\n") + 1)]


def test_at_a_terminal_answers_are_coloured_and_ctrl_c_stops_one(arranged_stack: Stack) -> None:
    with Terminal("chat", "--address", arranged_stack.address, "--num-draft-tokens", "3") as terminal:
        terminal.wait_for("arranged.*Ctrl-C stops an answer")
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
        assert f"Hel{GREEN}lo!" in terminal.shown  # the first token is the target's own
        terminal.type("/stats\n")
        terminal.wait_for(r"answers +1 +1")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0

    with Terminal("chat", "--address", arranged_stack.address, "--num-draft-tokens", "0") as terminal:
        terminal.wait_for("> ")
        terminal.type("count\n")
        terminal.wait_for("0 1 2 3 4")
        terminal.type(CTRL_C)
        terminal.wait_for("stopped: the conversation does not keep this answer")
        assert "999" not in terminal.text
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
        assert GREEN not in terminal.shown.split("does not keep this answer")[-1]
        terminal.type("/stats\n")
        terminal.wait_for(r"answers +1 +1")
        terminal.wait_for(rf"prompt tokens +{len('user: hello') + 2}\s")
        terminal.type("/exit\n")
        assert terminal.exit_code() == 0


def test_a_model_without_a_template_is_refused(stack: Stack) -> None:
    done = run_specd("chat", "--address", stack.address, stdin=b"hello\n")
    assert done.returncode == 1
    assert "chat template" in complaint(done.stderr)


def test_a_model_without_a_template_is_refused_before_anything_is_said(stack: Stack) -> None:
    done = run_specd("chat", "--address", stack.address, stdin=b"hello\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pycode-47m-4bit cannot chat, because it has no chat template" in complaint(done.stderr)
    assert "complete a text with specd generate 'TEXT'" in complaint(done.stderr)
