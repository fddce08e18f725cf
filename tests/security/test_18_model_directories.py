"""Check 18: directories that others wrote. A worker refuses them in one line, runs no code, and knows its own."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Stack
from tests.e2e.completions import complete
from tests.e2e.processes import complaint, eventually, run_specd
from tests.raw_client import RawClient
from tests.security.standing import standard_error_to


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a small model."""
    return Path(shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model"))


def set_in(name: str, **entries: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return change


def run_own_code(directory: Path) -> None:
    (directory / "own.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\n")
    set_in("config.json", model_file="own.py")(directory)


def pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")


def link_out(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("/etc/passwd")


def point_past_the_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    header[last]["data_offsets"][1] += 2**40
    header[last]["shape"] = [header[last]["shape"][0], 2**38]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def grow_the_tokenizer(directory: Path) -> None:
    os.truncate(directory / "tokenizer.json", 10**9)


def nest_the_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"a":' * 100_000)


def make_a_pipe(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "code of its own": (run_own_code, "which specd never runs"),
    "pickled weights": (pickle, "pickle"),
    "a link out": (link_out, "link out of"),
    "offsets past the file": (point_past_the_file, "not a valid safetensors file"),
    "a tokenizer of 1 GB": (grow_the_tokenizer, "1000000000 bytes"),
    "a config nested 100,000 deep": (nest_the_config, "nested too deeply"),
    "a pipe": (make_a_pipe, "config.json"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_refuses_it_in_one_line(case: str, directory: Path) -> None:
    change, why = CASES[case]
    change(directory)
    done = run_specd("target-worker", "--model", str(directory), "--listen", "127.0.0.1:0", "--metrics-listen", "")
    assert done.returncode != 0
    line = complaint(done.stderr)
    assert why in line
    assert str(directory) in line
    assert "Traceback" not in done.stderr
    assert not (directory / "ran").exists()


async def test_a_target_with_a_byte_swapped_between_the_samples_is_not_used_again(tmp_path: Path) -> None:
    """Same names, same sizes, and the same bytes wherever the quick fingerprint looks."""
    directory = Path(shutil.copytree(EMBEDDED_DRAFT, tmp_path / "target"))
    stack = Stack(
        target=str(directory),
        draft="",
        environment={"SPECD_LOG_FORMAT": "json", "SPECD_COORDINATOR_TARGET_RECOVERY_SECONDS": "5"},
    )
    log = tmp_path / "log"
    with standard_error_to(log):
        await stack.__aenter__()
    try:
        async with RawClient(stack.address) as client:
            before = (await client.model_info()).target
            assert len(before.whole_fingerprint) == 64
            expected = await complete(client, max_tokens=8)
            weights = directory / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[weights.stat().st_size // 15 + 100_000] ^= 1
            weights.write_bytes(content)

            process = stack.target.process
            assert process is not None
            process.kill()
            await eventually(lambda: "with other weights than before" in log.read_text())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in client.generate("import", max_tokens=3, num_draft_tokens=0):
                    raise AssertionError("a token came from other weights")
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE

            # The same bytes again, in a third life: the session continues.
            content[weights.stat().st_size // 15 + 100_000] ^= 1
            weights.write_bytes(content)
            process = stack.target.process
            assert process is not None
            process.kill()
            await eventually(lambda: log.read_text().count('"connected"') >= 2)
            assert (await complete(client, max_tokens=8)).token_ids == expected.token_ids
            assert (await client.model_info()).target.whole_fingerprint == before.whole_fingerprint
    finally:
        await stack.__aexit__()
