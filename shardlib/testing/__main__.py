"""`python -m shardlib.testing mutants`: does the proof find mistakes?"""

from __future__ import annotations

import sys

from shardlib.testing.mutants import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
