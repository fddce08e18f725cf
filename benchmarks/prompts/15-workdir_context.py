"""Context managers that change the process state for a while."""

import contextlib
import os
import shutil
import sys
import tempfile
import time


@contextlib.contextmanager
def working_directory(path):
    """Change the current directory and restore it afterwards."""
    previous = os.getcwd()
    os.chdir(path)
    try:
        yield path
    finally:
        os.chdir(previous)


@contextlib.contextmanager
def temporary_directory(prefix="tmp"):
    """Create a directory that is deleted at the end of the block."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def environment(**variables):
    """Set environment variables for the duration of the block.

    A value of None removes the variable.
    """
    saved = {name: os.environ.get(name) for name in variables}
    try:
        for name, value in variables.items():