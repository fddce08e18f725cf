"""`python -m draft_worker` is `specd draft-worker`."""

import sys

from specd.cli import main

main(["draft-worker", *sys.argv[1:]])
