"""A request with the fields and headers of Claude Code, with shorter texts. It is written by hand."""

from __future__ import annotations

from typing import Any

BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05"
)
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": BETAS,
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.177 (external, cli)",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
_CACHED = {"cache_control": {"type": "ephemeral"}}
# The names of its tools, with the names and types of their arguments; those with a question mark are optional.
_TOOLS = {
    "Task": ("description: string", "prompt: string", "subagent_type: string", "run_in_background?: boolean"),
    "TaskOutput": ("task_id: string", "block?: boolean", "timeout?: number"),
    "Bash": ("command: string", "timeout?: number", "description?: string", "run_in_background?: boolean"),
    "Glob": ("pattern: string", "path?: string"),
    "Grep": ("pattern: string", "path?: string", "glob?: string", "-i?: boolean", "-A?: number", "head_limit?: number"),
    "ExitPlanMode": (),
    "Read": ("file_path: string", "offset?: number", "limit?: number"),
    "Edit": ("file_path: string", "old_string: string", "new_string: string", "replace_all?: boolean"),
    "Write": ("file_path: string", "content: string"),
    "NotebookEdit": ("notebook_path: string", "cell_id?: string", "new_source: string"),
    "WebFetch": ("url: string", "prompt: string"),
    "TodoWrite": ("todos: array",),
    "WebSearch": ("query: string", "allowed_domains?: array"),
    "KillShell": ("shell_id: string",),
    "AskUserQuestion": ("questions: array",),
    "Skill": ("skill: string", "args?: string"),
    "mcp__files__list_directory": ("path: string",),
}


def request_of(text: str, *turns: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request that says a text to the model, and has more turns behind it."""
    reminder = "<system-reminder>\nAs you answer, you can use this context: today is Saturday.\n</system-reminder>\n"
    return {
        "model": "arranged",
        "messages": [
            {"role": "user", "content": [_text(text), _text(reminder, **_CACHED)]},
            *turns,
        ],
        "system": [
            _text("x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"),
            _text("You are Claude Code, Anthropic's official CLI for Claude.", **_CACHED),
            _text("You are an interactive agent that helps users with software tasks.\n# Tone\nBe brief.", **_CACHED),
        ],
        "tools": [_tool(name, arguments) for name, arguments in _TOOLS.items()],
        "metadata": {"user_id": "user_0_account__session_0"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }


def _text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _tool(name: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for argument in arguments:
        key, kind = argument.replace("?", "").split(": ")
        properties[key] = {"type": kind, "description": "An argument."}
        if kind == "array":
            properties[key]["items"] = {"type": "object", "properties": {}, "additionalProperties": True}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": [argument.split(": ")[0] for argument in arguments if "?" not in argument],
        "additionalProperties": False,
    }
    return {"name": name, "description": "A tool of Claude Code.\n\nUsage:\n- Use it.", "input_schema": schema}
