# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lm_eval[api]==0.4.13", "transformers>=5.7"]
# ///
"""lm-eval's local-completions against a gateway: `uv run lm_eval_client.py URL TOKENIZER DIRECTORY`.

DIRECTORY has the tasks. Prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, tokenizer, directory = sys.argv[1:]
found = simple_evaluate(
    model="local-completions",
    model_args={
        "base_url": f"{url}/completions",
        "model": "pycode",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "max_length": 512,
        "num_concurrent": 2,
    },
    tasks=["specd_lines", "specd_choices"],
    task_manager=TaskManager(include_path=directory, include_defaults=False),
    bootstrap_iters=0,
    log_samples=False,
)
assert found is not None
print(json.dumps(found["results"], default=str))
