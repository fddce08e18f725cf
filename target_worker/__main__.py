"""`python -m target_worker` is `specd target-worker`."""

import sys

from specd.cli import main

main(["target-worker", *sys.argv[1:]])
