"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "human_bytes", "human_count"]


def human_bytes(n: int) -> str:
    """Format a number with three digits and a binary unit.

    >>> human_bytes(999), human_bytes(811_706_777_600)
    ('999 B', '756 GiB')
    """
    return _three_digits(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_count(n: int) -> str:
    """Format a number with three digits and a decimal unit.

    >>> human_count(405_853_388_800)
    '406 G'
    """
    return _three_digits(n, 1000, ("", "k", "M", "G", "T")).rstrip()


def _three_digits(n: int, step: int, units: Sequence[str]) -> str:
    value, power = float(n), 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Format rows as aligned columns, the first `left` of them to the left.

    >>> print(aligned([["a", "bytes"], ["total", "12"]], left=1))
    a      bytes
    total     12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
