"""The imports of processes, and those that they must not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specd.settings import EMBEDDED_TARGET


def test_a_running_coordinator_has_no_mlx() -> None:
    code = "import coordinator.main, sys; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# What the servers alone need, and what takes longest of the rest.
OF_SERVERS = ("mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "numpy")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], (*OF_SERVERS, "grpc", "google.protobuf", "pydantic", "structlog", "rich")),
        (["up", "--listen", "nowhere"], (*OF_SERVERS, "grpc", "google.protobuf", "structlog")),
        (["health", "127.0.0.1:1"], OF_SERVERS),  # a container's health check is a new process every few seconds
    ],
)
def test_a_command_starts_without_what_takes_long_to_import(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys; from specd.cli import main\n"
        f"try: main({arguments})\n"
        f"except SystemExit: print('imported:', [m for m in {heavy} if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "imported: []"


def test_what_is_told_of_a_model_before_it_is_loaded_needs_no_mlx() -> None:
    heavy = ("mlx", "mlx_lm", "transformers", "huggingface_hub", "grpc")
    code = (
        f"import sys; from specd.worker.model.outline import outline_of; outline_of({EMBEDDED_TARGET!r}); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


CODE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from specd.text.chat import Chat, ChatTemplate
assert "transformers" not in sys.modules and "jinja2" not in sys.modules
template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
with ThreadPoolExecutor(8) as threads:
    prompts = set(threads.map(lambda i: template.render(Chat(({"role": "user", "content": "x"},))), range(64)))
print(prompts, sorted({m.split(".")[0] for m in sys.modules} & {"mlx", "mlx_lm", "torch"}))
"""


def test_threads_can_render_first_and_without_mlx() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "{'<s>x'} []"
