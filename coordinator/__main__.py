"""`python -m coordinator` is `specd coordinator`."""

import sys

from specd.cli import main

main(["coordinator", *sys.argv[1:]])
