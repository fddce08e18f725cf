"""Greetings in several languages.

Names may hold accents (José, Zoë) or characters such as 李明.
"""

GREETINGS = {
    "en": "Good morning, {name}!",
    "fr": "Bonjour {name}, ça va bien ?",
    "de": "Schönen guten Tag, {name}!",
    "ja": "おはようございます、{name}さん",
    "zh": "早上好，{name}!",
}


class UnknownLanguage(LookupError):
    """Raised for a language without a greeting."""


def greet(name, language="en"):
    """Return the greeting for a name.

    >>> greet("李明", "de")
    'Schönen guten Tag, 李明!'
    """
    try:
        template = GREETINGS[language]
    except KeyError: