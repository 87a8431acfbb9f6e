"""Quantities as people write them, "80GB", "3.35TB/s", "400Gb/s", "989TFLOP/s", "5us", and as numbers of base units."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Literal, get_args

from shardlib.errors import PlanError

__all__ = ["Unit", "parse_quantity", "spell_quantity"]

Unit = Literal["B", "B/s", "FLOP/s", "s"]

_EXAMPLES: dict[Unit, str] = {
    "B": '"80GB" or "64GiB"',
    "B/s": '"3.35TB/s", or "400Gb/s" for bits',
    "FLOP/s": '"989TFLOP/s"',
    "s": '"5us"',
}
_POWERS = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SMALL = {"": 0, "m": -3, "u": -6, "µ": -6, "n": -9}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*?)(B/s|b/s|B|FLOP/s|s)")


def parse_quantity(given: Any, unit: Unit) -> float:
    """Return a quantity in its base unit: bytes, bytes/s, operations/s or seconds. A number is in it already.

    Raises:
        PlanError: a text that cannot be read, another unit, or a number that is negative or not finite.

    >>> parse_quantity("3.35TB/s", "B/s"), parse_quantity("400Gb/s", "B/s"), parse_quantity("5us", "s")
    (3350000000000.0, 50000000000.0, 5e-06)
    >>> parse_quantity("64GiB", "B")
    68719476736.0
    """
    number = _number(given, unit)
    if number is None or not number.is_finite() or number < 0:
        raise PlanError(f"{given!r} was given; give a quantity such as {_EXAMPLES[unit]}.")
    return float(number)


def _number(given: Any, unit: Unit) -> Decimal | None:
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Decimal(repr(given))
    found = _QUANTITY.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        return None
    number, prefix, of = Decimal(found[1]), found[2], found[3]
    if of.replace("b", "B") != unit or (of.startswith("b") and unit != "B/s"):
        return None
    if prefix in _BINARY and unit in ("B", "B/s"):
        number *= 2 ** _BINARY[prefix]
    elif (powers := _SMALL if unit == "s" else _POWERS).get(prefix) is not None:
        number = number.scaleb(powers[prefix])
    else:
        return None
    return number / 8 if of.startswith("b") else number


def spell_quantity(value: float, unit: Unit, digits: int | None = None) -> str:
    """Write a quantity with the largest unit in which it is at least 1, exactly, or with some significant digits.

    >>> spell_quantity(3.35e12, "B/s"), spell_quantity(80_000_000_000, "B"), spell_quantity(2.5e-06, "s")
    ('3.35TB/s', '80GB', '2.5us')
    >>> spell_quantity(989.4e12, "FLOP/s", digits=3)
    '989TFLOP/s'
    """
    assert unit in get_args(Unit)
    number = Decimal(repr(value)) if digits is None else Decimal(f"{value:.{digits - 1}e}")
    powers = {name: power for name, power in (_SMALL if unit == "s" else _POWERS).items() if name != "µ"}
    ascending = sorted(powers, key=powers.__getitem__)
    fitting = [name for name in ascending if number >= Decimal(1).scaleb(powers[name])]
    prefix = fitting[-1] if fitting else ascending[0] if number else ""
    text = f"{number.scaleb(-powers[prefix]):f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text}{prefix}{unit}"
