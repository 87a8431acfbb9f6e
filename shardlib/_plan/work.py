"""The value `Work`: what one pass of a model computes, sends and keeps on one rank, block by block.

A dry run records it (`shardlib.engine.work`). It does not depend on the depth of the model, on the data axes, on ZeRO
stages or on the stages of a pipeline: what these change is arithmetic on it (`timing.py`, `activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardlib._plan.report import Recorded

__all__ = ["Kernel", "Part", "Pass", "Work"]


@dataclass(frozen=True)
class Kernel:
    """One op of a pass.

    Attributes:
        op: its name, as in "aten.mm".
        flops: floating-point operations of matrix products, convolutions and attention.
        bytes: bytes that it reads and writes.
        dtype: the name of the dtype of its result.
    """

    op: str
    flops: int
    bytes: int
    dtype: str


@dataclass(frozen=True)
class Pass:
    """Forward or backward of a part of a model.

    Attributes:
        kernels: the ops, in order.
        fused: the same where ops without products that follow each other are one kernel, as a compiler makes them: it
            reads what other kernels wrote, and writes what is still alive after it.
        collectives: of activations, in order. Those of parameters and gradients are movements of the plan.
        left: bytes alive at the end that were not at the beginning; negative where more is freed.
        peak: the most bytes alive at one time, beyond those at the beginning.
    """

    kernels: tuple[Kernel, ...] = ()
    fused: tuple[Kernel, ...] = ()
    collectives: tuple[Recorded, ...] = ()
    left: int = 0
    peak: int = 0

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.kernels)


@dataclass(frozen=True)
class Part:
    """A block, or all that runs before the first block or after the last one."""

    forward: Pass = Pass()
    backward: Pass = Pass()


@dataclass(frozen=True)
class Work:
    """Forward and backward of one microbatch on the rank with the largest shards.

    Attributes:
        before, after: what runs before the first block, and after the last one; all of it is in `after` for a model
            without repeated blocks.
        kinds: the different blocks of the model.
        order: the kind of each block of the model.
        partial: the model axes over which gradients are partial sums, by name of the parameter.
        boundary: bytes that a block gives to the next one.
        tokens: elements of its first tensor of integers, of all ranks that share the microbatch; 0 if it has none.
    """

    before: Part
    after: Part
    kinds: tuple[Part, ...] = ()
    order: tuple[int, ...] = ()
    partial: tuple[tuple[str, tuple[str, ...]], ...] = ()
    boundary: int = 0
    tokens: int = 0

    def parts(self) -> Iterator[Part]:
        """Iterate over all parts of the model in the order of forward."""
        yield self.before
        for kind in self.order:
            yield self.kinds[kind]
        yield self.after

    @property
    def flops(self) -> int:
        """Floating-point operations of forward."""
        return sum(part.forward.flops for part in self.parts())
