"""`python -m shardlib.testing.census --table FILE --jax FILE --torchax FILE`: print the page of models for results."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlib.testing.census._page import page

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="the file of results")
parser.add_argument("--jax", type=Path, required=True, metavar="FILE", help="the file of results on JAX")
parser.add_argument("--torchax", type=Path, required=True, metavar="FILE", help="the file of results on torchax")

if __name__ == "__main__":
    options = parser.parse_args()
    print(page(options.table, options.jax, options.torchax), end="")
