"""The command `specd up`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from specd.addresses import from_here
from specd.launch import check_servers_are_installed, settings_options, start_logging
from specd.model_info import short_name_of
from specd.settings import DEFAULT_ADDRESS, LogSettings, load_settings
from specd.up_settings import UpSettings

if TYPE_CHECKING:
    from rich.console import Console

    from specd.child import Child
    from specd.cli.auto_draft import AutoDraft
    from specd.cli.preflight import Preflight
    from specd.supervisor import Stack


@settings_options(UpSettings)
def up(settings: UpSettings) -> None:
    """Start the workers, the coordinator and, with --http, the gateway; restart processes that end; Ctrl-C stops.

    On a terminal it shows the progress of the models, then their addresses; --log-level info shows all other events.
    """
    check_servers_are_installed()
    if settings.models:
        from specd.cli.up_models import up_models

        up_models(settings)
        return
    is_brief = _is_brief()

    from specd.cli.auto_draft import AutoDraft

    draft = AutoDraft(settings)
    preflight = _checked(draft.settings)
    start_logging("up")
    assert preflight.target is not None
    if draft.is_open and draft.measure(preflight.target, _new_console() if is_brief else None):
        preflight = _checked(draft.settings)
    asyncio.run(_up(preflight, draft, is_brief))


def _checked(settings: UpSettings) -> Preflight:
    from specd.cli.preflight import Preflight

    preflight = Preflight(settings)
    preflight.check(before_download=lambda: start_logging("up"))
    return preflight


def _new_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def _is_brief() -> bool:
    """Return whether to be brief: on a terminal, unless the user has set a more verbose log level.

    Also sets the log level of all processes.
    """
    log = load_settings(LogSettings, {})
    if not sys.stderr.isatty() or ("log_level" in log.model_fields_set and log.log_level in {"debug", "info"}):
        return False
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if log.log_format == "auto":
        os.environ["SPECD_LOG_FORMAT"] = "pretty"  # the processes log into a pipe, so "auto" would choose JSON
    return True


async def _up(preflight: Preflight, auto: AutoDraft, is_brief: bool) -> None:
    from specd.cli.progress import StartProgress
    from specd.cli.running_stack import new_stack, run_stack
    from specd.worker_group import target_names

    settings = preflight.settings
    console = _new_console()
    draft = settings.draft_worker_model
    models = {
        **dict.fromkeys(target_names(settings.targets), settings.target),
        **({"draft-worker": draft} if draft else {}),
    }
    progress = StartProgress(console, models) if is_brief else None
    stack = new_stack(
        settings,
        preflight,
        target=settings.target,
        draft=draft,
        canary_draft=settings.canary_draft,
        num_targets=settings.targets,
        num_ranks=settings.target_ranks,
        on_line=progress.write if progress else None,
        on_progress=progress.show if progress else None,
    )

    def say() -> None:
        if progress is not None:
            _say_where(stack, preflight, auto, console)
        else:
            _say_all(stack, preflight, console)

    await run_stack(stack, say, progress)


def _say_where(stack: Stack, preflight: Preflight, auto: AutoDraft, console: Console) -> None:
    """Print the models, the addresses and a command to try, in a few lines."""
    target = stack.target.facts
    number = f" in {len(stack.targets)} processes" if len(stack.targets) > 1 else ""
    draft = short_name_of(stack.draft.facts["model"] if stack.draft else target.get("draft", ""))
    assert preflight.coordinator is not None
    sources = [*([draft] if draft else []), *preflight.settings.source_names(preflight.coordinator)]
    page = f"{stack.gateway.facts['url']}/" if stack.gateway else "none; --http 127.0.0.1:8080 adds it and OpenAI's API"
    for name, value in (
        ("model", f"{short_name_of(target['model'])} ({target['precision']}, {target['device']}){number}"),
        ("adapter", target.get("adapters", "")),
        ("draft", (" and ".join(sources) or "none") + _chosen(auto)),
        ("address", stack.address),
        ("page", page),
        ("metrics", _other_metrics(stack, preflight)),
        ("try", _command_to_try(stack, preflight)),
    ):
        if value:
            console.print(f"[bold]{name:8}[/]", end="")
            console.print(value, markup=False)


def _chosen(auto: AutoDraft) -> str:
    """Return how the draft was chosen, in words; "" if there was no choice."""
    if auto.choice is None or not auto.choice.ranked:
        return ""
    return f" ({auto.choice.in_words}; specd pair {auto.settings.target})"


def _other_metrics(stack: Stack, preflight: Preflight) -> str:
    """Return the metrics addresses that are not the default ones, in words; "" if all are."""
    moved = [child for child in stack.children if child.name in preflight.moved]
    words = [f"{_metrics_of(moved)}: the default ports are in use"] if moved else []
    others = [child for child in stack.targets[1:] if child.facts["metrics_address"]]
    return "; ".join([*words, *([_metrics_of(others)] if others else [])])


def _metrics_of(children: list[Child]) -> str:
    return ", ".join(f"{child.name} {child.facts['metrics_address']}" for child in children)


def _say_all(stack: Stack, preflight: Preflight, console: Console) -> None:
    """Print the same for a log, with the addresses of metrics."""
    facts = stack.coordinator.facts
    console.print(
        f"[bold green]specd is ready[/] at [bold]{stack.address}[/]: {facts['target']} with draft {facts['draft']}"
    )
    if stack.gateway is not None:
        url = stack.gateway.facts["url"]
        console.print(f"  OpenAI's API: {url}/v1, page: {url}/")
    for child in stack.children:
        if child.facts.get("metrics_url"):  # a draft on trial may not be there yet
            is_moved = ", because its default port is in use" if child.name in preflight.moved else ""
            console.print(f"  metrics of the {child.name}: {child.facts['metrics_url']}{is_moved}")
    console.print(f"  try: {_command_to_try(stack, preflight)}", markup=False)


def _command_to_try(stack: Stack, preflight: Preflight) -> str:
    """Return a command that suits the model and reaches the coordinator."""
    assert preflight.target is not None
    assert preflight.coordinator is not None
    command = "specd chat" if preflight.target.has_template else "specd generate"
    if (address := from_here(stack.address)) != DEFAULT_ADDRESS:
        command += f" --address {address}"
    if preflight.coordinator.tls_cert and not address.startswith("unix:"):
        command += f" --tls-ca {preflight.coordinator.tls_ca or 'CA'}"
        if preflight.coordinator.tls_ca and not preflight.coordinator.tokens:
            command += " --tls-cert CERT --tls-key KEY"
    if preflight.coordinator.tokens:
        command += " --token TOKEN"
    if preflight.target.has_encoder:
        return f"{command} 'translate English to German: Good morning'"
    return command if preflight.target.has_template else f"{command} 'def fibonacci(n):'"
