"""Extra handlers and formatters for the standard logging package."""

import json
import logging
import time

__all__ = ["JsonFormatter", "MemoryHandler", "configure"]

DEFAULT_FORMAT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Format each record as one JSON object on a single line.

    :param fields: names of the record attributes to include
    :param sort_keys: whether the keys are written in alphabetical order
    """

    def __init__(self, fields=("levelname", "name", "message"), sort_keys=False):
        super().__init__()
        self.fields = tuple(fields)
        self.sort_keys = sort_keys

    def format(self, record):
        record.message = record.getMessage()
        data = {"time": self.format_time(record)}
        for field in self.fields:
            data[field] = getattr(record, field, None)
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        return json.dumps(data, sort_keys=self.sort_keys, default=str)

    def format_time(self, record):
        """Return the creation time of a record in ISO 8601 format."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return "%s.%03dZ" % (stamp, record.msecs)


class MemoryHandler(logging.Handler):
    """Keep the most recent records in memory.

    :param capacity: how many records to keep
    :param level: the lowest level to keep
    """

    def __init__(self, capacity=1000, level=logging.NOTSET):
        super().__init__(level)
        self.capacity = capacity
        self.records = []

    def emit(self, record):
        self.records.append(record)
        if len(self.records) > self.capacity:
            del self.records[0]

    def messages(self, level=logging.NOTSET):
        """Return the formatted messages at or above a level."""
        return [
            self.format(record)
            for record in self.records
            if record.levelno >= level
        ]

    def clear(self):
        """Forget all records."""
        self.records = []


def configure(level="INFO", json_output=False, filename=None):
    """Set up the root logger.

    :param level: name of the lowest level to log
    :param json_output: write JSON lines instead of text
    :param filename: also write the messages to this file
    """
    if json_output:
        formatter = JsonFormatter()
    else: