"""`python -m shardlib.testing.census --table FILE`: print the page of models for a file of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlib.testing.census._page import page

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="the file of results")

if __name__ == "__main__":
    print(page(parser.parse_args().table), end="")
