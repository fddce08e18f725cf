"""A completion compared with the same completion by the target alone, for `specd demo`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specd.cli.completion import LEGEND, print_tokens
from specd.client.async_client import AsyncClient
from specd.client.events import Delta

# The model's answer has this many tokens before it repeats itself.
DEMO_PROMPT = '''\
class Config:
    """Settings in a dictionary."""

    def __init__(self, values=None):
        self._values = dict(values or {})

    def __getitem__(self, key):
        return self._values[key]

    def __setitem__(self, key, value):
        self._values[key] = value

    def __delitem__(self, key):
'''
DEMO_TOKENS = 54

# Its answer is long for these models, and half of it comes from the draft and the source. The code need not work.
DEMO_SOURCE = '''\
implement: def __init__(self, host, port, user, password, database, timeout=None, charset="utf8", ssl=None):
    """Create a connection to the database server."""
'''


async def show_comparison(address: str, prompt: str, *, max_tokens: int) -> None:
    """Stream a completion, generate it again with the target alone, and print the numbers of both."""
    console = Console(highlight=False, soft_wrap=True)
    async with AsyncClient(address) as client:
        is_source = (await client.describe()).target.has_encoder
        console.print(Text(prompt, style="dim"), end="\n" if is_source else "")
        stream = client.generate(prompt, max_tokens=max_tokens)
        async for event in stream:
            if isinstance(event, Delta):
                print_tokens(console, event.tokens)
        speculative = await stream.completion()
        console.print("\n")
        console.print(LEGEND)
        console.print("the same again with the target alone …", style="dim")
        alone = await client.generate(prompt, max_tokens=max_tokens, num_draft_tokens=0).completion()

    fast, slow = speculative.statistics, alone.statistics
    table = Table("", "speculative", "target alone", box=None, pad_edge=False, header_style="bold")
    table.add_row("tokens/s", f"{fast.tokens_per_second:.1f}", f"{slow.tokens_per_second:.1f}")
    table.add_row("generated tokens", str(fast.generated_tokens), str(slow.generated_tokens))
    table.add_row("rounds", str(fast.rounds), str(slow.rounds))
    table.add_row("acceptance rate", f"{fast.acceptance_rate:.1%}", "")
    table.add_row("mean acceptance length", f"{fast.round_averages.tokens:.2f}", f"{slow.round_averages.tokens:.2f}")
    table.add_row(
        "time to first token",
        f"{fast.time_to_first_token_seconds * 1000:.0f} ms",
        f"{slow.time_to_first_token_seconds * 1000:.0f} ms",
    )
    console.print(table)
    same = speculative.token_ids == alone.token_ids
    speedup = fast.tokens_per_second / slow.tokens_per_second
    console.print(f"[bold]{speedup:.2f} times as fast[/], {'the same' if same else '[red]NOT the same[/]'} tokens")
