"""Are ops on the JAX engine right? PyTorch's database of ops on one device, values and gradients beside torch's.

    python -m shardlib.testing.jax_ops

prints for each op whether it is right, or why it is refused, or what was wrong. Of ops that draw random numbers, shapes
and dtypes are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from shardlib.testing._jax_devices import on_devices
from shardlib.testing._pool import RankError
from shardlib.testing.ops import Finding, Verdict, database, print_verdict

__all__ = ["check_ops"]

_AT_ONCE = 8  # ops that JAX compiles in one program


def check_ops(
    names: Sequence[str], *, count: int = 6, dtype: torch.dtype | None = None, timeout: float = 600.0
) -> list[Verdict]:
    """Check ops of the database, by some samples of each, in a process that is kept for JAX."""
    from shardlib.testing._jax_ops import check  # which imports JAX

    try:
        return on_devices(1, check, list(names), count, dtype, timeout=timeout)
    except RankError as error:
        if len(names) == 1:
            return [Verdict(names[0], (Finding("hung", (), str(error)),))]
    return [verdict for name in names for verdict in check_ops([name], count=count, dtype=dtype, timeout=timeout)]


def main(argv: Sequence[str] | None = None) -> int:
    """Check ops and print the table; the exit code is 1 when one is wrong, crashed or hung."""
    parser = argparse.ArgumentParser(prog="python -m shardlib.testing.jax_ops", description=__doc__)
    parser.add_argument("--only", help="ops whose name begins so")
    parser.add_argument("--every", type=int, default=1, help="take one of so many ops")
    parser.add_argument("--samples", type=int, default=6, help="samples per op")
    parser.add_argument("--dtype", help='"float32", "bfloat16", ...; float64 where an op takes it unless given')
    parser.add_argument("--show", type=int, default=3, help="failures shown per op")
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    names, counts = database(options.only)[:: options.every], Counter[str]()
    for start in range(0, len(names), _AT_ONCE):
        for verdict in check_ops(names[start : start + _AT_ONCE], count=options.samples, dtype=dtype):
            counts[verdict.kind] += 1
            print_verdict(verdict, options.show)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if {"wrong", "crashed", "hung"} & counts.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
