"""`python -m shardlib`: the commands of `shardlib`."""

from __future__ import annotations

import sys

from shardlib.cli import main

sys.exit(main())
