"""Every row of every sharding rule is true: for each call that functions make, proved by brute force in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardlib.engine._torch import schema_of
from shardlib.engine.ops._rows import Call, Meta, Row, rule_of
from shardlib.testing._prove import AtenCall, Claim, calls_of, claims, disprove
from shardlib.testing.ops import Sample, database, samples_of
from tests.engine.ops.cases import CASES
from tests.engine.ops.corners import CORNERS

# PyTorch warns of how some of its own samples call it.
pytestmark = pytest.mark.filterwarnings("ignore")

R, P, S = Replicate(), Partial(), Shard


def _false(samples: Sequence[Sample], sizes: tuple[int, ...]) -> list[str]:
    """Claims that do not hold, with the reason."""
    found = []
    for call in calls_of(sample.outcome for sample in samples):
        for claim in claims(call, sizes):
            if (why := disprove(claim)) is not None:
                found.append(f"{call.op} on {[tuple(t.shape) for t in call.tensors]}, {claim.row}: {why}")
    return found


def test_rows_for_what_models_are_made_of():
    assert _false(list(CASES.values()), (2,)) == []


def test_rows_for_what_else_ops_are_asked_to_do():
    assert _false(list(CORNERS.values()), (2,)) == []


@pytest.mark.deep
def test_rows_on_an_axis_of_three():
    assert _false([*CASES.values(), *CORNERS.values()], (3,)) == []


@pytest.mark.deep
@pytest.mark.parametrize("part", range(20))
def test_rows_for_pytorchs_ops(part: int):
    """Numbers stand for slices of the database, which takes seconds to import."""
    assert [false for name in database()[part::20] for false in _false(samples_of(name), (2, 3))] == []


@pytest.mark.parametrize("kernel", ["flash_attention_for_cpu", "efficient_attention", "flash_attention"])
def test_attention_with_dropout_is_not_split(kernel: str):
    """Each rank's kernel would draw by local index from the same state: its heads would share the masks of others."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    operand, names = Meta((2, 4, 6, 8), torch.float16), ("query", "key", "value")
    outputs = (operand, *[None] * (len(schema_of(op).returns) - 1))
    rule = rule_of(op)
    assert rule is not None

    def rows(dropout: float) -> list[Row]:
        values = {argument.name: argument.default_value for argument in schema_of(op).arguments}
        return list(rule.rows(Call(op, values | {"dropout_p": dropout}, names, (operand,) * 3, outputs, size=2)))

    assert rows(0.1) == []
    assert len(rows(0.0)) > 1


_ADD, _SUM, _EXP = torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList, torch.ops.aten.exp.default
_X = torch.arange(12, dtype=torch.float64).view(4, 3) / 5 - 1


@pytest.mark.parametrize(
    ("call", "row"),
    [
        pytest.param(AtenCall(_EXP, (_X,), {}), Row((P,), (P,)), id="not linear"),
        pytest.param(AtenCall(_ADD, (_X, _X), {}), Row((P,), (P, R)), id="added on every rank"),
        pytest.param(AtenCall(_SUM, (_X, [0]), {}), Row((R,), (S(0),)), id="sum not done"),
        pytest.param(AtenCall(_SUM, (_X, [0]), {}), Row((S(0),), (S(0),)), id="dim that is gone"),
    ],
)
def test_a_false_row_is_found(call: AtenCall, row: Row):
    why = disprove(Claim(call, row, 2))
    assert why is not None and "raised" not in why
