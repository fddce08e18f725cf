"""`specd chat`: from a pipe and at a terminal, with a model that follows scripts."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.e2e.processes import complaint, read_metric, run_specd
from tests.e2e.terminal import ALT_ENTER, CTRL_C, CTRL_D, TAB, UP, Terminal
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
    assert shown.count("/exit ends") == 2  # at the beginning, and for an unknown command
    assert read_metric(arranged_stack.coordinator, "specd_kept_sessions") == 0


def test_a_system_message_comes_first(arranged_stack: Stack) -> None:
    (rows,) = rows_of(said_to(arranged_stack, ["hello", "/stats"], "--system", "Be brief."))
    assert rows["prompt tokens"] == [str(len("system: Be brief.\nuser: hello\n") + 1)]


def test_at_a_terminal_answers_are_coloured_and_ctrl_c_stops_one(arranged_stack: Stack, tmp_path: Path) -> None:
    with talking(arranged_stack, tmp_path, "--num-draft-tokens", "3") as terminal:
        terminal.wait_for("arranged.*Ctrl-C stops an answer")
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
        assert f"Hel{GREEN}lo!" in terminal.shown  # the first token is the target's own
        terminal.type("/stats\n")
        terminal.wait_for(r"answers +1 +1")
        terminal.wait_for(">")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0

    with talking(arranged_stack, tmp_path, "--num-draft-tokens", "0") as terminal:
        terminal.wait_for(">")
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


def test_the_last_turn_is_forgotten_and_the_others_stay(arranged_stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = [
        "/undo",
        "hello",
        "think",
        "/undo",
        "sunny",
        "/stats",
        f"/save {path}",
        f"/save {path}",
        "/save",
        "/save /no/x",
    ]
    shown = said_to(arranged_stack, lines, "--system", "Be brief.")
    assert "no answer yet" in shown.splitlines()[2]
    assert "forgot the last answer, and its message:\nthink\n" in shown
    kept = ["hello", SCRIPTS["hello"], "sunny", SCRIPTS["sunny"]]
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, kept, strict=True)]
    assert json.loads(path.read_text()) == [{"role": "system", "content": "Be brief."}, *messages]
    (rows,) = rows_of(shown)
    assert rows["answers"] == ["1", "2"]
    prompt = f"system: Be brief.\nuser: hello\nassistant: {SCRIPTS['hello']}\nuser: sunny\n"
    assert rows["prompt tokens"] == [str(len(prompt) + 1)]
    assert int(rows["reused prompt tokens"][0]) >= len("system: Be brief.\nuser: hello\n")  # in spite of a new session
    assert f"saved 5 messages to {path}" in shown
    assert f"{path} is there already: name a new file" in shown
    assert "/save needs the name of a file" in shown
    assert "cannot write /no/x: No such file or directory" in shown
    assert read_metric(arranged_stack.coordinator, "specd_kept_sessions") == 0


def test_the_system_message_changes_and_a_conversation_is_saved_as_markdown(
    arranged_stack: Stack, tmp_path: Path
) -> None:
    path = tmp_path / "talk.md"
    lines = [
        "/system",
        "hello",
        "/system Be brief.",
        "/system",
        "sunny",
        "/stats",
        f"/save {path}",
        "/system -",
        "/system",
    ]
    shown = said_to(arranged_stack, lines)
    assert shown.count("no system message") == 3
    assert "> Be brief.\n" in shown
    (rows,) = rows_of(shown)
    prompt = f"system: Be brief.\nuser: hello\nassistant: {SCRIPTS['hello']}\nuser: sunny\n"
    assert rows["prompt tokens"] == [str(len(prompt) + 1)]
    sections = ["Be brief.", "hello", SCRIPTS["hello"], "sunny", SCRIPTS["sunny"]]
    names = ["system", "user", "assistant", "user", "assistant"]
    assert path.read_text() == "\n".join(f"## {name}\n\n{text}\n" for name, text in zip(names, sections, strict=True))


def test_models_are_listed_and_chosen(arranged_stack: Stack) -> None:
    name = "arranged"
    shown = said_to(arranged_stack, ["/model", "hello", f"/model {name}", "sunny", "/model other", "/stats", "/model"])
    assert shown.count(f"> * {name}") == 2
    assert f"{name} continues the conversation" in shown
    assert f"there is no model 'other' here: the coordinator serves {name}" in shown
    assert rows_of(shown)[0]["answers"] == ["1", "2"]


def test_a_message_can_begin_with_a_slash_and_an_unknown_command_is_no_message(arranged_stack: Stack) -> None:
    shown = said_to(arranged_stack, ["/etc/hosts", "//etc/hosts", "/stats", "/help"])
    assert "there is no command /etc/hosts." in shown
    (rows,) = rows_of(shown)
    assert rows["prompt tokens"] == [str(len("user: /etc/hosts\n") + 1)]
    for command in ("/model [NAME]", "/system [TEXT]", "/undo", "/save FILE"):
        assert f"{command} " in shown


def talking(stack: Stack, state: Path, *options: str) -> Terminal:
    return Terminal("chat", "--address", stack.address, *options, XDG_STATE_HOME=str(state))


def enter(terminal: Terminal, typed: str, expected: str) -> None:
    """Type a line, and wait for its answer and for the next prompt. What is typed before it, no editor reads."""
    terminal.type(typed + "\n")
    terminal.wait_for(expected)
    terminal.wait_for(">")


def test_lines_are_edited_kept_and_completed(arranged_stack: Stack, tmp_path: Path) -> None:
    history = tmp_path / "specd" / "chat-history"
    with talking(arranged_stack, tmp_path) as terminal:
        terminal.wait_for(">")
        enter(terminal, "helo\x02l", re.escape(SCRIPTS["hello"]))  # Ctrl-B goes back by a character
        terminal.type(f"/st{TAB}")
        terminal.wait_for("ats")  # the rest of it
        enter(terminal, "", r"answers +1 +1")
        terminal.type(f"/model arr{TAB}")
        terminal.wait_for("anged")
        enter(terminal, "", "arranged continues the conversation")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert re.findall(r"^\+(.*)$", history.read_text(), re.MULTILINE) == ["hello", "/stats", "/model arranged"]

    with talking(arranged_stack, tmp_path) as terminal:
        terminal.wait_for(">")
        enter(terminal, 3 * UP, re.escape(SCRIPTS["hello"]))  # the first line of the conversation before
        enter(terminal, "/undo", "forgot the last answer, and its message:\r\nhello")
        enter(terminal, "\x15sunny", re.escape(SCRIPTS["sunny"]))  # Ctrl-U deletes the message, which is there again
        terminal.type("/exit\n")
        assert terminal.exit_code() == 0


def test_a_paste_of_several_lines_is_one_message(arranged_stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with talking(arranged_stack, tmp_path, "--no-history") as terminal:
        terminal.wait_for(">")
        terminal.paste("hello\nand a second line\n    indented\n")
        enter(terminal, "", re.escape(SCRIPTS["hello"]))
        enter(terminal, f"sunny {ALT_ENTER}too", re.escape(SCRIPTS["sunny"]))
        enter(terminal, f"/save {path}", "saved 4 messages")
        terminal.type("something" + CTRL_C)  # it deletes the line
        terminal.type(CTRL_C)  # and ends
        assert terminal.exit_code() == 0
    said = [each["content"] for each in json.loads(path.read_text()) if each["role"] == "user"]
    assert said == ["hello\nand a second line\n    indented", "sunny \ntoo"]
    assert not (tmp_path / "specd").exists()


def test_a_history_that_cannot_be_written_is_no_reason_to_fail(arranged_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "specd").write_text("a file where a directory would be")
    with talking(arranged_stack, tmp_path) as terminal:
        terminal.wait_for(">")
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
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
