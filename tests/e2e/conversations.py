"""Forty short conversations with a model that chats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conversation:
    """The user's messages, turn after turn, and the stop strings of the replies."""

    turns: tuple[str, ...]
    system: str = ""
    stop: tuple[str, ...] = ()


def _of(*turns: str, system: str = "", stop: tuple[str, ...] = ()) -> Conversation:
    return Conversation(turns, system, stop)


_BASH = "You answer with one line of bash and nothing else."
_PIRATE = "You are a pirate. Speak like one."
_CODE = """\
def mean(values):
    return sum(values) / len(values)
"""
_RECORDS = """\
name,city,age
Ada,London,36
Grace,New York,85
Linus,Helsinki,54"""

CONVERSATIONS = (
    # Facts, and questions that only the turns before explain.
    _of("What is the capital of France?", "And of Italy?", "Which of the two is larger?"),
    _of("Who wrote Romeo and Juliet?", "Name two other plays by the same author."),
    _of("Why is the sky blue?", "Explain it to a five-year-old.", "Now in one word."),
    _of("What is 17 + 25?", "Multiply that by 2.", "Is the result even?"),
    _of("My name is Zoë and I live in Zürich.", "What is my name?", "Where do I live?"),
    _of("Name a planet.", "Another one.", "Another one.", "Another one."),
    _of("How many legs does a spider have?", "And three spiders?"),
    _of("What does HTTP stand for?", "And the S in HTTPS?"),
    # Code.
    _of("Write a Python function that adds two numbers.", "Add type hints.", "Now write a test for it."),
    _of(f"Add a docstring to this function:\n\n```python\n{_CODE}```", "Make it return 0 for an empty list."),
    _of("Write a SQL query that counts the rows of a table named users.", "Only those older than 30."),
    _of("How do I reverse a string in Python?", "And a list?", stop=("```",)),
    _of("List the files of a directory.", "With hidden ones.", "Sorted by size.", system=_BASH),
    _of("Write a regular expression for an e-mail address.", "Explain its first character."),
    _of("What does `x = x or []` do?", "Why is a mutable default a problem?"),
    _of("Write hello world in C.", "In Rust.", "In Haskell."),
    # Lists and formats.
    _of("List three fruits.", "As a JSON array.", "As a Markdown table."),
    _of("Count from 1 to 10.", "Now backwards.", stop=("7",)),
    _of("Write the alphabet, one letter a line.", "Again, in upper case.", stop=("\n\n", "h")),
    _of(f"Repeat this table:\n\n{_RECORDS}", "Sort it by age.", "Drop the column city."),
    _of("Give me a recipe for pancakes as a numbered list.", "How long does it take?", stop=("4.",)),
    _of("Write a haiku about the sea.", "Another one about mountains."),
    _of("Name five colours, separated by commas.", "Say them again.", "Say them again."),
    _of('Answer only with {"ok": true}.', "Again.", stop=("}",)),
    # Roles.
    _of("Where is the treasure?", "How deep?", "Thank you.", system=_PIRATE),
    _of("Hello!", "How are you?", "Goodbye.", system="You are a polite butler."),
    _of("I feel tired.", "It is three in the morning.", system="You are a doctor. Ask one question at a time."),
    _of("Tell me a joke.", "I did not get it.", system="You never laugh."),
    _of("Summarise: The cat sat on the mat. The dog sat on the cat.", "Who is below?", system="Be brief."),
    _of("Continue: Once upon a time", "And then?", "The end?", system="You tell stories for children."),
    # Letters beyond ASCII.
    _of("Translate 'good morning' to German.", "To French.", "To Japanese."),
    _of("Was heißt 'Straße' auf Englisch?", "Und 'Mädchen'?"),
    _of("¿Dónde está la biblioteca?", "Repítelo, por favor."),
    _of("Repeat: 日本語のテキスト", "Now repeat: привет мир", "Now: שלום עולם"),
    _of("Answer with an emoji: how is the weather? 🌦️", "And tomorrow? 👩‍🚀👍🏽", "Repeat: 🇨🇭🇫🇷"),
    _of("What is “typographic” — quotes, dashes… — about?", "Write é as one and as two code points: é, e\u0301."),
    _of("∑ and ∫: what do they mean?", "And ∀x∈ℝ?"),
    # Odd inputs.
    _of("ok", "ok", "ok", "ok"),
    _of("    indented\n\n\n\tand a tab\n", "a  b   c    d", "\r\nrow\r\nrow"),
    _of("the " * 120 + "end", "How many words was that?", "SHOUT THE ANSWER!!!"),
)
