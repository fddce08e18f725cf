"""lm-eval, in an environment of its own: it reads the log-probabilities of prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from specd.settings import EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.worker.model.loader import load
from tests.clients.programs import install, program, run, url_of

SCRIPT = Path(__file__).parent / "lm_eval_client.py"
LINES = ["def area(r):\n    return 3.14 * r * r\n", "import os\nimport sys\n", "größe = '\N{SNOWMAN}'\n"]
CHOICES = [
    {"question": "import numpy as", "choices": [" np", " elephant"], "answer": 0},
    {"question": "for i in", "choices": [" yesterday", " range"], "answer": 1},
]
TASKS = {
    "specd_lines": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "specd_choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tasks and what they ask."""
    directory = tmp_path_factory.mktemp("tasks")
    for name, documents in (("specd_lines", [{"text": line} for line in LINES]), ("specd_choices", CHOICES)):
        data = directory / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
        (directory / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{TASKS[name]}"
        )
    return directory


async def test_lm_eval_gets_what_the_model_says_of_a_text(stack: Stack, tasks: Path) -> None:
    uv = program("uv")
    await install(uv, "sync", "--quiet", "--script", SCRIPT, directory=tasks)
    output = await run(
        *(uv, "run", "--quiet", "--offline", "--script", SCRIPT, url_of(stack), EMBEDDED_TARGET, tasks),
        directory=tasks,
        variables={"HF_HOME": str(tasks / "cache")},
    )
    found = json.loads(output.splitlines()[-1])
    lines = found["specd_lines"]["bits_per_byte,none"]
    num_bytes = sum(len(line.encode()) for line in LINES)
    assert lines == pytest.approx(-sum(map(log_likelihood, LINES)) / math.log(2) / num_bytes, rel=1e-3)
    assert found["specd_choices"]["acc,none"] == 1


def log_likelihood(text: str) -> float:
    """Return the natural logarithm of the probability of a text after the token that begins one."""
    token_ids = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()).encode(text)
    rows = load(EMBEDDED_TARGET, blas="").network(mx.array([token_ids]))[0].astype(mx.float32)
    values = np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))
    return float(sum(values[i, token_id] for i, token_id in enumerate(token_ids[1:])))
