"""Stream a completion from a running specd: python examples/generate.py [ADDRESS]."""

import sys

from specd import Client

with Client(*sys.argv[1:]) as client:
    stream = client.generate("def fibonacci(n):", max_tokens=64)
    for text in stream.texts():
        print(text, end="", flush=True)

statistics = stream.completion().statistics
print(f"\n{statistics.accepted_tokens} of {statistics.proposed_tokens} proposed tokens were accepted")
