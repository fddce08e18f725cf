"""The version of specd that is installed."""

from importlib.metadata import version

__version__ = version("specd")
