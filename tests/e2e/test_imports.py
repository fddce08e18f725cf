"""What processes import, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys


def test_a_running_coordinator_has_no_mlx() -> None:
    code = "import coordinator.main, sys; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_command_line_starts_without_what_takes_long_to_import() -> None:
    """A container's health check is a new process every few seconds."""
    heavy = ("mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "numpy")
    code = f"import specd.cli.app, sys; print([m for m in {heavy} if m in sys.modules])"
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
