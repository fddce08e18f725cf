#!/usr/bin/env python
"""Count the most frequent words in a set of text files."""

import argparse
import re
import sys
from collections import Counter

WORD = re.compile(r"[a-z']+")


def build_parser():
    """Create the command line parser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="text files to read")
    parser.add_argument(
        "-n", "--number", type=int, default=10, help="how many words to show"
    )
    parser.add_argument(
        "-m", "--min-length", type=int, default=1, help="ignore shorter words"
    )
    return parser


def count_words(lines, min_length):
    """Return a Counter of the words found in an iterable of lines."""
    counts = Counter()
    for line in lines:
        for word in WORD.findall(line.lower()):
            if len(word) >= min_length:
                counts[word] += 1
    return counts


def main(argv=None):
    args = build_parser().parse_args(argv)