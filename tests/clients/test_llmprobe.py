"""llmprobe, which checks shapes and promises of OpenAI's API: all that is claimed of it holds."""

from __future__ import annotations

import json
from pathlib import Path

from specd.supervisor import Stack
from tests.clients.programs import NODE, run, url_of

# llmprobe follows Open Responses, which ends a stream with [DONE] and has other names for events of reasoning. Ours are
# OpenAI's: tests/gateway/test_shapes.py checks them with the types of its client.
AS_OPENAI = "responses-streaming"
OF_OPEN_RESPONSES = {"stream never sent the terminal `data: [DONE]` sentinel", "<root>: Invalid input"}
_STRUCTURED = ("structured-outputs", "structured-markers")
# llmprobe counts the cached tokens of a message among its input tokens, which Anthropic has apart. And in a form, the
# scripted model writes anything, perhaps without an end, because the bytes of its tokens are not their text.
NOT_CLAIMED = {
    "messages-usage",
    *(f"{api}-tool-stream-reassembly" for api in ("chat", "responses", "messages")),
    *(f"{api}-{form}" for api in ("chat", "responses") for form in ("json-mode", *_STRUCTURED)),
}
# What docs/http.md claims, as llmprobe names it.
CLAIMED = {
    *("models", "chat", "responses", "completions", "streaming", "usage", "stream-usage", "finish-reasons", "errors"),
    *("limits", "logprobs", "reasoning", "seed", "sampling", "max-tokens-alias", "n-choices"),
}


async def test_all_that_is_claimed_conforms(node: str, arranged_stack: Stack, tmp_path: Path) -> None:
    probe = NODE / "node_modules" / "llmprobe" / "bin" / "dist" / "llmprobe.mjs"
    # With a HOME of its own: it keeps what it finds there. What is not claimed fails, and so it ends with 1.
    # To a file, because it exits before a pipe has taken a long report.
    command = [node, str(probe), url_of(arranged_stack), "--json", "--no-bench", "--no-save"]
    to_file = ["sh", "-c", 'exec "$@" > report.json', "sh", *command]
    await run(*to_file, directory=tmp_path, exit_code=1, variables={"HOME": str(tmp_path)})
    report = json.loads((tmp_path / "report.json").read_text())
    failures = {
        result["id"]: [failure["message"] for failure in result["failures"]]
        for result in report["conformance"]["results"]
        if result["outcome"] == "fail"
    }
    assert set(failures.pop(AS_OPENAI)) <= OF_OPEN_RESPONSES
    assert failures.keys() <= NOT_CLAIMED, failures
    supported = {entry["id"] for entry in report["coverage"]["entries"] if entry["supported"]}
    # How many assertions it makes depends on what the model says, so they are not counted.
    assert supported >= CLAIMED
