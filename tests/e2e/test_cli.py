"""The command line, at a terminal and in scripts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from specd.coordinator_settings import CoordinatorSettings
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET, DraftWorkerSettings, Settings, TargetWorkerSettings
from specd.supervisor import Stack
from specd.up_settings import UpSettings
from specd.version import __version__
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    RunningSpecd,
    complaint,
    environment,
    eventually,
    processes_mentioning,
    run_specd,
    start_specd,
)
from tests.e2e.readme_demo import README, block_in, shortened, without_numbers
from tests.raw_client import RawClient
from tests.thorough import examples

PROMPT = "def fibonacci(n):"


# -- Help


def test_help_lists_the_commands() -> None:
    done = run_specd("--help")
    assert done.returncode == 0
    for command in ("draft-worker", "target-worker", "coordinator", "up", "generate", "chat", "top", "health", "demo"):
        assert re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE)
    for variable in ("SPECD_CONFIG", "SPECD_LOG_LEVEL", "SPECD_LOG_FORMAT"):
        assert f"[{variable}]" in done.stdout


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("draft-worker", DraftWorkerSettings),
        ("target-worker", TargetWorkerSettings),
        ("coordinator", CoordinatorSettings),
        ("up", UpSettings),
    ],
)
def test_help_shows_every_setting_with_its_variable_and_default(command: str, settings: type[Settings]) -> None:
    # The tests of this floor set it for themselves, after the defaults here were read.
    threads = str(TargetWorkerSettings.model_fields["blas_threads"].default)
    done = run_specd(command, "--help", OPENBLAS_NUM_THREADS=threads)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for name, field in settings.model_fields.items():
        default = Path(field.default).name if field.default in (EMBEDDED_DRAFT, EMBEDDED_TARGET) else field.default
        variable = settings.variable_of(name)
        assert f"--{name.replace('_', '-')}" in text
        assert f"[{variable}] (default: {default if default != '' else 'none'})" in text


def test_help_of_generate() -> None:
    done = run_specd("generate", "--help")
    assert done.returncode == 0
    for expected in ("--num-draft-tokens", "--max-tokens", "--json", "SPECD_ADDRESS", "127.0.0.1:50051"):
        assert expected in done.stdout


@pytest.mark.parametrize("command", [[], ["up"], ["generate"]])
def test_help_says_what_exit_codes_mean(command: list[str]) -> None:
    assert "Exit codes: 0: success. 1: a call" in run_specd(*command, "--help").stdout


def test_version() -> None:
    assert run_specd("--version").stdout.strip() == f"specd {__version__}"


@pytest.mark.parametrize(
    "arguments", [["nosuch"], ["coordinator", "--nosuch"], ["generate"], ["generate", "a", "-k", "x"]]
)
def test_wrong_usage_is_explained(arguments: list[str]) -> None:
    done = run_specd(*arguments)
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


# -- specd generate


def test_generate_prints_the_text_and_then_its_numbers(stack: Stack) -> None:
    texts = []
    for k in ("0", "4"):
        done = run_specd("generate", PROMPT, "-k", k, "-n", "24", "--address", stack.address)
        assert done.returncode == 0, done.stderr
        assert re.search(r"24 tokens · [\d.]+ tokens/s · .* rounds", done.stderr)
        assert ("acceptance rate" in done.stderr) == (k == "4")
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert texts[0].strip()


def test_one_token_has_no_speed_and_no_plural(stack: Stack) -> None:
    done = run_specd("generate", PROMPT, "-n", "1", "--address", stack.address)
    assert re.match(r"1 token · first after \d+ ms · 1 round · session ", done.stderr)


def test_generate_reads_standard_input(stack: Stack) -> None:
    options = ["-n", "8", "--address", stack.address]
    from_argument = run_specd("generate", "größe = 'ü'\r\n", *options)
    from_stdin = run_specd("generate", "-", *options, stdin="größe = 'ü'\r\n".encode())
    assert from_stdin.returncode == 0
    assert from_stdin.stdout == from_argument.stdout != ""


def test_generate_as_json(stack: Stack) -> None:
    done = run_specd("generate", PROMPT, "-n", "24", "--json", SPECD_ADDRESS=stack.address)
    messages = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 0
    assert done.stderr == ""
    assert sum(len(message["tokens"]) for message in messages) == 24
    assert len({message["session_id"] for message in messages}) == 1
    assert all("statistics" not in message for message in messages[:-1])
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert messages[-1]["statistics"]["generated_tokens"] == 24
    assert messages[-1]["statistics"]["rounds"] == len(messages)


def test_generate_without_a_coordinator() -> None:
    done = run_specd("generate", PROMPT, "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no coordinator answers at 127.0.0.1:1" in complaint(done.stderr)
    assert "specd up" in complaint(done.stderr)


def test_generate_says_what_the_coordinator_refuses(stack: Stack) -> None:
    done = run_specd("generate", PROMPT, "-n", "3000", "--address", stack.address)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "INVALID_ARGUMENT" in complaint(done.stderr)
    assert "max_tokens 3000" in complaint(done.stderr)


@pytest.mark.parametrize(
    ("option", "value"), examples([("-k", "33"), ("-n", "0"), ("-k", str(2**32)), ("-n", str(2**32))], 2)
)
def test_generate_refuses_numbers_out_of_range(option: str, value: str) -> None:
    done = run_specd("generate", PROMPT, option, value)
    assert done.returncode == 2
    assert f"'{option}'" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_refuses_bytes_that_are_no_text() -> None:
    done = run_specd("generate", "-", stdin=b"x = \xff")
    assert done.returncode == 2
    assert "not UTF-8" in complaint(done.stderr)
    assert "position 4" in complaint(done.stderr)


# -- specd health


def test_health_of_a_process_that_serves(stack: Stack) -> None:
    done = run_specd("health", stack.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{stack.address} SERVING\n", "")
    worker = stack.target.facts["address"]
    done = run_specd("health", "--service", "specd.v1.TargetService", SPECD_ADDRESS=worker)
    assert (done.returncode, done.stdout) == (0, f"{worker} SERVING\n")


def test_health_of_a_service_that_is_not_there(stack: Stack) -> None:
    done = run_specd("health", stack.address, "--service", "specd.v1.TargetService")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no service 'specd.v1.TargetService': leave out --service" in complaint(done.stderr)


async def test_health_of_a_process_that_does_not_serve_yet(directory: Path) -> None:
    address = f"unix:{directory / 'coordinator'}"
    absent = f"unix:{directory / 'target'}"
    options = ("--target", absent, "--draft", "none", "--listen", address, "--metrics-listen", "none")
    async with start_specd("coordinator", *options):
        await eventually((directory / "coordinator").exists)
        done = await asyncio.to_thread(run_specd, "health", address)
        assert (done.returncode, done.stdout) == (1, f"{address} NOT_SERVING\n")


# -- specd up


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of the sockets of a test's processes. Processes that a failing test leaves running end here."""
    yield tmp_path
    for pid in processes_mentioning(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


async def up(running: RunningSpecd) -> str:
    """Wait until `specd up` is ready; return the address that it names."""
    line = await running.next_line(lambda line: "specd is ready at " in line)
    matched = re.search(r"specd is ready at (127\.0\.0\.1:\d+): (\S+) with draft (\S+)", line)
    assert matched is not None, line
    assert (matched[2], matched[3]) == (EMBEDDED_TARGET, EMBEDDED_DRAFT)
    return matched[1]


def says_that_it_ended(name: str, line: str) -> bool:
    return "a process ended" in line and f'"name": "{name}"' in line


async def completion(address: str) -> list[int]:
    async with asyncio.timeout(PATIENCE_SECONDS), RawClient(address) as client:
        return [token.id async for response in client.generate(PROMPT, max_tokens=16) for token in response.tokens]


def workers_of(directory: Path) -> dict[str, int]:
    """Return the process ids of the three processes whose sockets are in a directory, by name."""
    names = ("draft-worker", "target-worker", "coordinator")
    commands = processes_mentioning(str(directory))
    return {name: pid for pid, command in commands.items() for name in names if f"-m specd {name} " in command}


def assert_nothing_left(directory: Path) -> None:
    """Assert that no process with sockets in a directory runs, and that the sockets are gone."""
    assert processes_mentioning(str(directory)) == {}
    assert list(directory.glob("specd-*")) == []


UP = ["up", "--listen", "127.0.0.1:0", "--no-metrics"]


@pytest.mark.parametrize("number", examples([signal.SIGINT, signal.SIGTERM], 1))
async def test_up_serves_until_a_signal(directory: Path, number: signal.Signals) -> None:
    async with start_specd(*UP, TMPDIR=str(directory)) as running:
        address = await up(running)
        assert f"specd generate --address {address}" in await running.next_line(lambda line: "try:" in line)
        assert len(await completion(address)) == 16
        assert set(workers_of(directory)) == {"draft-worker", "target-worker", "coordinator"}

        assert await running.stop(number) == 0

        assert_nothing_left(directory)
        log = "".join(running.lines)
        assert "Traceback" not in log
        assert "a process ended" not in log
        assert "second signal" not in log


async def test_a_signal_while_up_starts_leaves_nothing(directory: Path) -> None:
    async with start_specd(*UP, TMPDIR=str(directory)) as running:
        await running.next_event("waiting for a worker")
        assert await running.stop(signal.SIGINT) == 0
        assert_nothing_left(directory)
        assert "Traceback" not in "".join(running.lines)


async def test_up_restarts_a_killed_process_and_takes_all_with_it_when_it_is_killed_itself(directory: Path) -> None:
    async with start_specd(*UP, TMPDIR=str(directory)) as running:
        address = await up(running)
        before = await completion(address)
        for name in ("draft-worker", "target-worker", "coordinator"):
            pid = workers_of(directory)[name]
            os.kill(pid, signal.SIGKILL)
            await running.next_line(partial(says_that_it_ended, name))
            await running.next_event("ready", process=name)
            assert workers_of(directory)[name] != pid
            assert await completion(address) == before

        running.process.kill()
        await eventually(lambda: processes_mentioning(str(directory)) == {})


def up_that_loses_its_reader(directory: Path) -> subprocess.Popen[bytes]:
    """Start `specd up`, and close its standard error when it is ready."""
    command = [sys.executable, "-m", "specd", *UP]
    up = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(TMPDIR=str(directory)))
    assert up.stderr is not None
    with up.stderr as log:
        assert any(b"specd is ready at" in line for line in log)
    return up


async def test_processes_whose_log_nobody_reads_any_more_still_end(directory: Path) -> None:
    """As when a terminal closes on `specd up 2>&1 | tee log`."""
    up = up_that_loses_its_reader(directory)
    assert len(workers_of(directory)) == 3

    up.kill()
    up.wait()
    await eventually(lambda: workers_of(directory) == {})


def test_up_with_its_port_in_use_leaves_nothing(stack: Stack, directory: Path) -> None:
    done = run_specd("up", "--listen", stack.address, "--no-metrics", TMPDIR=str(directory))
    assert done.returncode == 2
    assert f"cannot listen at {stack.address}" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(directory)


# -- specd demo


def test_demo(directory: Path) -> None:
    done = run_specd("demo", TMPDIR=str(directory))
    assert done.returncode == 0, done.stderr
    assert re.search(r"tokens/s +\d+\.\d +\d+\.\d", done.stdout)
    assert re.search(r"acceptance rate +\d+\.\d%", done.stdout)
    assert re.search(r"mean acceptance length +\d+\.\d\d +1\.00", done.stdout)
    assert re.search(r"rounds +\d+ +54", done.stdout)
    assert "the same tokens" in done.stdout
    assert "NOT" not in done.stdout
    shown = shortened(done.stdout, done.stderr)
    assert without_numbers(block_in(README.read_text())) == without_numbers(shown)  # else: make readme-demo
    assert_nothing_left(directory)


@pytest.mark.thorough
def test_demo_of_the_head_needs_no_draft_worker(directory: Path) -> None:
    done = run_specd("demo", "--pair", "head", TMPDIR=str(directory))
    assert done.returncode == 0, done.stderr
    assert "starting target worker and coordinator" in done.stderr
    rounds, alone = map(int, re.findall(r"rounds +(\d+) +(\d+)", done.stdout)[0])
    assert rounds < 0.6 * alone
    assert "the same tokens" in done.stdout


@pytest.mark.thorough
def test_demo_of_the_t5s_has_an_answer_that_pays(directory: Path) -> None:
    done = run_specd("demo", "--pair", "t5", TMPDIR=str(directory))
    assert done.returncode == 0, done.stderr
    (tokens,) = set(re.findall(r"generated tokens +(\d+) +(\d+)", done.stdout)[0])
    rounds, alone = map(int, re.findall(r"rounds +(\d+) +(\d+)", done.stdout)[0])
    assert alone == int(tokens) > 60
    assert rounds < 0.6 * alone  # how fast that is, depends on the machine
    assert "the same tokens" in done.stdout


@pytest.mark.thorough
def test_bench_measures_all_contenders_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ("-k", "2", "--num-prompts", "1", "-n", "8", "--json", str(file))
    # It starts a stack, and loads each contender: on a busy machine, that takes a minute.
    done = run_specd("bench", *arguments, timeout_seconds=2 * PATIENCE_SECONDS, COLUMNS="160")

    assert done.returncode == 0, done.stderr
    assert "all contenders gave the same tokens" in done.stdout
    report = json.loads(file.read_text())
    names = ["specd, target alone", "specd, k = 2", "specd, adaptive", "mlx-lm, target alone", "mlx-lm, k = 2"]
    assert [result["name"] for result in report["results"]] == names
    assert all(result["tokens_per_second"] > 0 for result in report["results"])
    assert report["same_tokens"] is True
    assert report["samples"]["specd, k = 2"][0]["token_ids"] == 8


def test_bench_refuses_a_directory_without_prompts(tmp_path: Path) -> None:
    done = run_specd("bench", "--prompts", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in complaint(done.stderr)
