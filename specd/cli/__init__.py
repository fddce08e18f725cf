"""The command `specd`."""

from specd.cli.app import main

__all__ = ["main"]
