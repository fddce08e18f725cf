"""`specd up --models`: several models, of which those that are used are loaded."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from rich.console import Console

from specd.addresses import from_here
from specd.cli.model_file import of_one_model, read_model_file
from specd.cli.model_plans import plans_of
from specd.cli.pairs.memory import in_gigabytes
from specd.cli.preflight import Preflight
from specd.cli.running_stack import new_stack, run_stack
from specd.launch import start_logging
from specd.model_info import short_name_of
from specd.model_processes import ModelPlans
from specd.settings import DEFAULT_ADDRESS
from specd.startup_error import StartupError
from specd.up_settings import UpSettings

if TYPE_CHECKING:
    from specd.supervisor import Stack

log = structlog.get_logger()


def up_models(settings: UpSettings) -> None:
    """Serve the models of a file until a signal. Raises StartupError."""
    of_one = {*of_one_model(), "canary_draft", "canary_share"}
    if given := [name for name in UpSettings.model_fields if name in of_one & settings.model_fields_set]:
        flag = given[0].replace("_", "-")
        raise StartupError(f"wrong settings: --models and --{flag} contradict each other: leave out one")
    preflight = Preflight(settings)
    preflight.check_services()
    start_logging("up")
    path = Path(settings.models)
    plans = plans_of(read_model_file(path), settings)
    asyncio.run(_up(settings, preflight, path, plans))


async def _up(settings: UpSettings, preflight: Preflight, path: Path, plans: ModelPlans) -> None:
    stack = new_stack(settings, preflight, models=plans)
    renewing: set[asyncio.Task[None]] = set()
    turn = asyncio.Lock()

    async def renew() -> None:
        """Serve the models of the file as it is now. A wrong file changes nothing."""
        async with turn:
            try:
                # Beside the event loop, because it may download and measure.
                changed = await asyncio.to_thread(lambda: plans_of(read_model_file(path), settings))
                assert stack.models is not None
                stack.models.replace(changed)
            except StartupError as error:
                log.error("the models stay as they are", reason=str(error))
                return
            except Exception:
                log.exception("the models stay as they are")
                return
        log.info("the file of models was read again", models=[plan.name for plan in changed.plans])

    def on_hangup() -> None:
        task = asyncio.ensure_future(renew())
        renewing.add(task)
        task.add_done_callback(renewing.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    await run_stack(stack, lambda: _say(stack, settings, plans))


def _say(stack: Stack, settings: UpSettings, plans: ModelPlans) -> None:
    """Print the models, the addresses and a command to try."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    budget = f" (budget {in_gigabytes(plans.budget_bytes)})" if plans.budget_bytes is not None else ""
    console.print(f"[bold green]specd is ready[/] at [bold]{stack.address}[/]{budget}")
    for plan in plans.plans:
        draft = f" with {short_name_of(plan.workers.draft)}" if plan.workers.draft else ""
        pinned = ", pinned" if plan.pinned else ""
        words = f"{short_name_of(plan.workers.target)}{draft}, {in_gigabytes(plan.num_bytes)}{pinned}"
        console.print(f"  {plan.name}: {words}", markup=False)
    if stack.gateway is not None:
        console.print(f"  OpenAI's API: {stack.gateway.facts['url']}/v1, page: {stack.gateway.facts['url']}/")
    address = f" --address {from_here(stack.address)}" if from_here(stack.address) != DEFAULT_ADDRESS else ""
    console.print(f"  try: specd generate{address} --model {plans.plans[0].name} 'Once upon a time'", markup=False)
