"""`specd top` over a live coordinator."""

from __future__ import annotations

import asyncio
import re
import subprocess

from specd.client.client import Client
from specd.supervisor import Stack
from tests.e2e.processes import complaint, draft_of, read_metric, run_specd
from tests.e2e.terminal import CTRL_C, Terminal

PROMPT = "class Vector:\n    def __init__(self, x, y):\n"


def test_a_frame_has_the_numbers_of_the_metrics(stack: Stack) -> None:
    with Client(stack.address) as client:
        client.generate(PROMPT, max_tokens=96).completion()
    done = run_specd("top", stack.coordinator.facts["metrics_address"], "--once", "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("specd top  pycode-47m-4bit with draft pycode-3.6m-8bit")

    def since_start(name: str) -> str:
        (line,) = (line for line in lines if name in line)
        return line.split(name)[1].split("  ")[-1].strip()

    def counter(name: str, **labels: str) -> float:
        return read_metric(stack.coordinator, f"specd_{name}", **labels)

    for name, source in (("draft model", "draft"), ("look-up", "lookup")):
        proposed = counter("proposed_tokens_by_source_total", source=source)
        accepted = counter("accepted_tokens_by_source_total", source=source)
        assert since_start(name) == (f"{accepted / proposed:.1%}" if proposed else "-")
    rounds = counter("round_draft_tokens_count")
    assert since_start("proposed a round") == f"{counter('round_draft_tokens_sum') / rounds:.2f}"
    gained = counter("generated_tokens_total") / counter("rounds_total")
    assert since_start("gained a round") == f"{gained:.2f}"
    for stage in ("draft", "verify", "queue", "wire", "coordinator"):
        sums = [counter(f"round_stage_seconds_{what}", stage=stage) for what in ("sum", "count")]
        assert re.search(rf"\b{stage} .* {1000 * sums[0] / sums[1]:.1f} ms *$", done.stdout, re.MULTILINE)
    prompts = counter("prompt_tokens_total")
    for worker in ("target", "draft"):
        reused = counter("reused_prompt_tokens_total", worker=worker)
        assert since_start(f"prompt found by {worker}") == f"{reused / prompts:.1%}"
    assert re.search(rf"sessions +running +0 of {counter('max_sessions'):.0f} *$", done.stdout, re.MULTILINE)


async def test_it_goes_on_until_ctrl_c_and_says_when_the_coordinator_is_gone(harmed_stack: Stack) -> None:
    await asyncio.to_thread(watch_and_kill, harmed_stack)


def watch_and_kill(harmed_stack: Stack) -> None:
    address = harmed_stack.coordinator.facts["metrics_address"]
    with Terminal("top", address, "--interval", "0.2") as terminal, Client(harmed_stack.address) as client:
        terminal.wait_for(r"running +0 of")
        for _ in client.generate(PROMPT, max_tokens=200, ignore_eos=True):
            pass
        terminal.wait_for(r"running +1 of")
        terminal.wait_for(r"tokens/s +\d+\.\d +[▁▂▃▄▅▆▇█]+")
        terminal.wait_for(r"draft model +\d+\.\d%")
        process = harmed_stack.coordinator.process
        assert process is not None
        process.kill()
        terminal.wait_for(f"the metrics at {address} cannot be read")
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 0
        assert "\x1b[?1049l" in terminal.shown  # the screen is restored


def test_q_ends_it(stack: Stack) -> None:
    address = stack.coordinator.facts["metrics_address"]
    with Terminal("top", address, "--interval", "60", COLUMNS="60", LINES="24") as terminal:
        terminal.wait_for("prompt found by draft")
        terminal.type("q")
        assert terminal.exit_code() == 0
        assert "\x1b[?1049l" in terminal.shown


def test_it_looks_on_the_host_of_the_address_that_commands_share() -> None:
    done = run_specd("top", "--once", SPECD_ADDRESS="127.255.255.254:1")
    assert done.returncode == 1
    assert "the metrics at 127.255.255.254:9464 cannot be read" in complaint(done.stderr)


def test_what_is_wrong_is_said(stack: Stack) -> None:
    def refused(*arguments: str) -> tuple[int, str]:
        done: subprocess.CompletedProcess[str] = run_specd("top", *arguments)
        return done.returncode, complaint(done.stderr)

    code, words = refused("127.0.0.1:1")
    assert code == 1
    assert "the metrics at 127.0.0.1:1 cannot be read: " in words
    address = draft_of(stack).facts["metrics_address"]
    code, words = refused(address)
    assert code == 1
    assert f"the process at {address} is not a coordinator" in words
    code, words = refused(stack.coordinator.facts["metrics_address"])
    assert code == 2
    assert "add --once" in words
