"""`python -m specd` is the command `specd`."""

from specd.cli import main

main()
