"""The transform that splits nothing: plain data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib._mesh_shape import MeshShape
from shardlib._plan import PHASES, Plan, Row
from shardlib.transforms._choose import Names, as_names, chosen
from shardlib.transforms._transform import Transform

__all__ = ["Replicate", "replicate"]


def replicate(only: Names = None) -> Transform:
    """Replicate parameters over all data axes, as `DistributedDataParallel` does.

    Without a pattern this is the identity transform. With one, data axes that shard these parameters, by an earlier
    transform or by a rule, are removed.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(64, 64), "dp=4", {"weight": "out in", "bias": "out"}) | sl.zero(1) | replicate("bias")
    >>> str(made["weight"].state), str(made["bias"].state)
    ('out@dp in', 'out')
    """
    return Replicate(as_names(only))


@dataclass(frozen=True, repr=False)
class Replicate(Transform):
    """The transform that `replicate` returns."""

    call: ClassVar[str] = "replicate"
    only: str | tuple[str, ...] | None = None

    def __call__(self, plan: Plan) -> Plan:
        if self.only is None:
            return plan
        names = chosen(plan, self.only, self)
        return plan.map_rows(lambda row: _replicated(row, plan.mesh) if row.name in names else row)


def _replicated(row: Row, mesh: MeshShape) -> Row:
    data = [axis for axis in mesh.data_axes if axis not in row.compute.axes]
    layouts = {phase: row.layouts[phase].with_axes_dropped(data) for phase in PHASES if phase in row.layouts}
    return row.replace(**layouts, reshard=True)
