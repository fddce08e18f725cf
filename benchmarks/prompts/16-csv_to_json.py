"""Convert tables between CSV and JSON."""

import csv
import io
import json


def _convert(text):
    """Turn a CSV field into an int, a float, a bool, None or a str."""
    if text == "":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def read_rows(stream, delimiter=","):
    """Yield one dictionary for every line of a CSV file."""
    reader = csv.DictReader(stream, delimiter=delimiter)
    for row in reader:
        yield {key.strip(): _convert(value) for key, value in row.items()}


def csv_to_json(text, indent=None):
    """Convert a CSV document to a JSON array of objects."""
    return json.dumps(list(read_rows(io.StringIO(text))), indent=indent)


def json_to_csv(text, fieldnames=None):
    """Convert a JSON array of objects to a CSV document.

    The columns are taken from the first object unless ``fieldnames`` is given.
    """
    rows = json.loads(text)