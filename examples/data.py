"""Real text that every machine has: the source files of Python's standard library, one token a byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_EVERY = 10  # one file in ten is never trained on


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes kept apart, both 1-d uint8 tensors."""

    train: Tensor
    validation: Tensor


def standard_library() -> Text:
    """The top-level modules of the running Python, in order of their names.

    The same interpreter gives the same bytes on every rank, so no rank has to send them to another.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if len(files) < VALIDATION_EVERY:
        raise FileNotFoundError(
            f"{folder} holds {len(files)} source files, too few to train on; run with a Python whose standard "
            "library is installed as source (not zipped)."
        )
    held_out = files[::VALIDATION_EVERY]
    return Text(train=_bytes([f for f in files if f not in held_out]), validation=_bytes(held_out))


def batch(
    tokens: Tensor, step: int, *, rows: int, context: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """The share of one data rank in the global batch of one step: ids and targets, each `(rows / ranks, context)`.

    The global batch, `rows` random windows of the text, depends on `step` alone; rank `rank` of `ranks` takes its
    own consecutive rows of it. Tensor-parallel ranks of one data rank pass the same `rank` and get the same rows.

    >>> text = torch.arange(100, dtype=torch.uint8)
    >>> whole, _ = batch(text, 7, rows=4, context=8)
    >>> halves = [batch(text, 7, rows=4, context=8, rank=r, ranks=2)[0] for r in range(2)]
    >>> torch.equal(torch.cat(halves), whole)
    True
    """
    if rows % ranks:
        raise ValueError(f"a global batch of {rows} rows cannot be shared by {ranks} data ranks; use a multiple")
    starts = torch.randint(len(tokens) - context, (rows,), generator=torch.Generator().manual_seed(step))
    mine = starts[rank * rows // ranks : (rank + 1) * rows // ranks]
    windows = tokens[mine[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _bytes(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
