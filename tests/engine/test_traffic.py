"""What ranks send in a training step is what the plan says: counted where tensors enter the process group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.engine import fakes
from shardlib.engine.apply import apply_plan, record_of
from shardlib.engine.data.gradients import ORDER_BITS
from shardlib.engine.ranks.transport import Sent as Call
from shardlib.optim import Lamb
from shardlib.testing.models import Transformer, rules_for
from shardlib.transforms import Transform, fsdp, hsdp, replicate, zero
from tests.engine.host import elsewhere
from tests.engine.mixture import Model

SIZES: dict[str, Any] = {"vocab": 8, "heads": 2, "head": 4, "layers": 3, "bias": True}
UNEVEN = {**SIZES, "vocab": 7}
TRANSFORMS = (
    replicate(),
    zero(1),
    zero(2),
    zero(3),
    fsdp(),
    fsdp(reshard_after_forward=True),
    fsdp(reshard_after_forward=False),
)


def _build(sizes: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    return Transformer(**sizes)


def _sent(mesh: str, transform: Transform, sizes: dict[str, Any], bucket_mb: float) -> int:
    """Bytes that this rank sends over dp in its third step."""
    model = _build(sizes)
    made = sl.shard_model(model, mesh, rules_for(model), transforms=(transform,), compile=None, bucket_mb=bucket_mb)
    optimizer = torch.optim.AdamW(made.parameters())
    ids = torch.randint(SIZES["vocab"] - 1, (2, 5), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        made(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with sl.engine.record_collectives(made, mesh=sl.mesh(mesh)) as log:
        step()
    return sum(one.sent for one in log.collectives if one.axes == ("dp",))


@pytest.mark.covering
@pytest.mark.parametrize("sizes", [SIZES, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=4", "dp=2,tp=2", "tp=2,dp=2", "dp=3"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_what_is_sent_is_what_the_plan_says(ranks, transform: Transform, mesh: str, sizes: dict[str, Any]):
    """Buckets are so small that units are gathered each by itself."""
    _check_bytes(ranks, transform, mesh, sizes, bucket_mb=1e-3)


@pytest.mark.covering
@pytest.mark.parametrize("transport", ["point-to-point", "collectives"])
@pytest.mark.parametrize("transform", TRANSFORMS[1:], ids=repr)
def test_one_bucket_sends_as_much(ranks, monkeypatch, transform: Transform, transport: str):
    """By collectives too, which pad what is uneven."""
    monkeypatch.setenv("SHARDLIB_TRANSPORT", transport)
    sizes = SIZES if transport == "collectives" else UNEVEN
    _check_bytes(ranks, transform, "dp=2,tp=2", sizes, bucket_mb=25)


def _check_bytes(ranks, transform: Transform, mesh: str, sizes: dict[str, Any], *, bucket_mb: float) -> None:
    """Uneven shards that go straight to their owners are not padded; what is reduced whole has as much room on every
    rank as on the one that has most of it.

    Ranks' parts differ in size: the plan gives the mean over ranks, each tensor's rounded up to whole bytes.
    """
    shape = sl.MeshShape(mesh)
    model = _build(sizes)
    plan = sl.plan(model, mesh, rules_for(model), transforms=(transform,))
    planned = plan.traffic()
    measured = ranks(shape.world_size).run(_sent, mesh, transform, sizes, bucket_mb)
    others = shape["dp"] - 1
    flags = 4 * (len([*model.parameters()]) + 2 * ORDER_BITS)  # bytes; they travel with the last gradients
    beside = others * flags
    if transform == replicate():
        beside = Fraction(2 * others, shape["dp"]) * (flags + _padding(plan))
    missing = sum(each.bytes for each in planned) + beside - Fraction(sum(measured), len(measured))
    rounded_up = sum(each.tensors for each in planned) if shape["dp"] == 3 else 0
    assert 0 <= missing <= rounded_up


def _padding(plan: sl.Plan) -> Fraction:
    """By how much the largest parts over model axes are larger than the mean ones."""
    tp = plan.mesh.only(plan.mesh.model_axes).world_size if plan.mesh.model_axes else 1
    whole = (row.dtype.itemsize * math.prod(row.global_shape) for row in plan.rows if row.compute.axes)
    largest = (row.local_bytes(plan.mesh, phase="compute") for row in plan.rows if row.compute.axes)
    return sum(largest) - Fraction(sum(whole), tp)


# --- one to one -------------------------------------------------------------------------------------------------------

Sent = Counter[tuple[str, str, str, tuple[str, ...]]]


Shape = tuple[int, ...]


def _no_state(shape: Shape) -> list[Shape]:
    return []


def _two_like_it(shape: Shape) -> list[Shape]:
    return [shape, shape]


def _rows_and_columns(shape: Shape) -> list[Shape]:
    """Those of Adafactor, beside its count of steps."""
    return [(), *([(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])] if len(shape) > 1 else [shape])]


@dataclass(frozen=True)
class Kind:
    """An optimizer, and what is to be told to the plan of it."""

    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    needs: Any = "elementwise"
    state: Callable[[Shape], list[Shape]] = _no_state


def _planned(model: torch.nn.Module, kind: Kind) -> Sent:
    """Each collective and copy of each movement of this rank, as often as a step has it."""
    pipeline = record_of(model).pipeline
    rank = None if pipeline is None else pipeline.stages.index
    planned: Sent = Counter()
    for one in sl.get_plan(model).movements(pipeline_rank=rank, optimizer=kind.needs, state=kind.state):
        for each in one.collectives:
            planned[one.name, one.purpose, each.kind, each.axes] += one.times if each.kind != "slice" else 0
    return +planned


def _recorded(
    model: torch.nn.Module,
    rules: sl.Rules,
    mesh: str,
    transforms: tuple[Transform, ...],
    batch: torch.Tensor,
    bucket_mb: float = 25,
    kind: Kind = Kind(),
) -> tuple[Sent, Sent]:
    """What the plan of this rank lists, and which of it was carried in a step, after a first one."""
    made = sl.shard_model(model, mesh, rules, transforms=transforms, compile=None, bucket_mb=bucket_mb)
    optimizer = kind.make(made.parameters())
    record = record_of(made)

    def step() -> None:
        for _ in range(record.plan.step.accumulate):
            if record.pipeline is not None:
                sl.pipeline_step(made, batch, lambda out, _batch: out.square().mean())
            else:
                made(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with record.reducer.executor.recording() as log:
        step()
    return _planned(made, kind), _carried(log, made)


def _carried(log: list[Call], model: torch.nn.Module) -> Sent:
    """The movements in calls of transports and in copies, by canonical names."""
    pipeline = record_of(model).pipeline
    names = {} if pipeline is None else pipeline.stages.names
    if pipeline is None:  # a tensor that stages share may have a unit of its own on each
        listed = {one.name: one.unit for one in sl.get_plan(model).movements()}
        assert all(listed[one.name] == one.unit for each in log for one in each.carries)
    return Counter(
        (names.get(one.name, one.name), one.purpose, each.kind, each.axes) for each in log for one in each.carries
    )


def _of_a_transformer(
    mesh: str,
    transforms: tuple[Transform, ...],
    sizes: dict[str, Any],
    bucket_mb: float,
    *,
    stages: bool = False,
    sequence: bool = False,
    kind: Kind = Kind(),
) -> tuple[Sent, Sent]:
    model = _build(sizes)
    rules = rules_for(model, sequence=sequence)
    batch = torch.randint(6, (4, 6), generator=torch.Generator().manual_seed(0))
    rules = rules.with_stages(sl.rules.Balanced()) if stages else rules
    return _recorded(model, rules, mesh, transforms, batch, bucket_mb, kind)


ALL: tuple[Transform, ...] = (*TRANSFORMS, zero(1, overlap=True), zero(2, only="blocks.*"), zero(3, only="*.mlp.*"))
MESHES: dict[str, tuple[Transform, ...]] = {
    **dict.fromkeys(("dp=2", "dp=3", "dp=4", "dp=2,tp=2", "tp=2,dp=2"), ALL),
    "dp=2,fsdp=2": (*ALL, hsdp(shard="fsdp", replicate="dp"), zero(2, axis="fsdp")),
}


@given(data=st.data())
def test_each_movement_is_sent_once_for_each_time_that_the_plan_lists_it(ranks, data: st.DataObject):
    """The transports name what they carry; nothing is sent twice, or besides."""
    mesh = data.draw(st.sampled_from(sorted(MESHES)), "mesh")
    transforms = [data.draw(st.sampled_from(MESHES[mesh]), "transform")]
    if (passes := data.draw(st.integers(1, 3), "passes")) > 1:
        transforms.append(sl.accumulate(passes))
    if data.draw(st.booleans(), "low precision"):
        transforms.append(sl.precision("bf16", reduce=data.draw(st.sampled_from(["float32", "bfloat16"]), "reduce")))
    sizes = {**data.draw(st.sampled_from([SIZES, UNEVEN]), "sizes"), "tied": data.draw(st.booleans(), "tied")}
    bucket_mb = data.draw(st.sampled_from([1e-4, 1e-3, 25]), "bucket_mb")
    found = ranks(sl.MeshShape(mesh).world_size).run(_of_a_transformer, mesh, tuple(transforms), sizes, bucket_mb)
    for planned, sent in found:
        assert sent == planned


@pytest.mark.covering
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("dp=2,pp=2", (zero(1), sl.pipeline("1f1b", 2))),
        ("dp=2,pp=2", (zero(3), sl.pipeline("gpipe", 2))),
        ("dp=2,pp=2", (fsdp(), sl.accumulate(2), sl.pipeline("1f1b", 2))),
        ("pp=2,dp=2", (zero(3), sl.pipeline("1f1b", 2), sl.checkpoint_activations())),
    ],
    ids=str,
)
def test_so_is_each_of_a_stage_of_a_pipeline(ranks, mesh: str, transforms: tuple[Transform, ...], tied: bool):
    """A tensor of two stages is summed over both, once a step."""
    sizes = {**SIZES, "layers": 4, "tied": tied}
    for planned, sent in ranks.run(_of_a_transformer, mesh, transforms, sizes, 1e-3, stages=True):
        assert sent == planned
        assert tied == any(purpose == "gradients, stages" for _, purpose, *_ in planned)


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("tp=2", ()),
        ("dp=2,tp=2", ()),
        ("tp=2,dp=2", (zero(1), sl.accumulate(2))),
        ("dp=2,tp=2", (zero(2), sl.precision("bf16", reduce="float32"))),
        ("dp=2,tp=2", (zero(3),)),
    ],
    ids=str,
)
def test_so_is_each_of_gradients_that_are_partial_over_a_model_axis(ranks, mesh: str, transforms: Any):
    """As those of norms are, where activations are split over the sequence."""
    count = sl.MeshShape(mesh).world_size
    for planned, sent in ranks(count).run(_of_a_transformer, mesh, transforms, SIZES, 1e-3, sequence=True):
        assert sent == planned
        assert any(purpose == "gradients" and "tp" in axes for _, purpose, _, axes in planned)


def test_a_dry_run_finds_what_gradients_are_partial_over_before_a_step():
    """The norms' and the biases' of row-parallel layers, on a mesh of any size."""
    model = _build(SIZES)
    rules, ids = rules_for(model, sequence=True), torch.zeros(4, 8, dtype=torch.int64)
    made = sl.plan(model, "dp=8,tp=4", rules, transforms=(zero(1),), example=ids)
    partial = {row.name for row in made.rows if row.partial == ("tp",)}
    assert {f"blocks.{i}.norm2.weight" for i in range(3)} <= partial
    with fakes.fake_world(made, "cpu") as mesh:
        fake = fakes.fake_copy(model, "cpu")
        apply_plan(fake, made.replace(report=None), mesh, check=False)
        with record_of(fake).reducer.executor.recording() as log:
            fakes.run_step(fake, (torch.zeros(4, 8, dtype=torch.int64),), {})
        planned = Counter({key: n for key, n in _planned(fake, Kind()).items() if key[1] == "gradients"})
        assert _carried(log, fake) == planned, "known from the first step on"


LAMB = Kind(Lamb, "per_tensor", _two_like_it)
ADAFACTOR = Kind(torch.optim.Adafactor, "per_tensor", _rows_and_columns)


class Unregistered(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


UNKNOWN = Kind(Unregistered, "unknown")


@pytest.mark.parametrize(
    ("mesh", "transforms", "kind"),
    [
        ("dp=2", (zero(1),), LAMB),
        ("dp=2,tp=2", (zero(2), sl.precision("bf16")), LAMB),
        ("dp=2,tp=2", (zero(3),), ADAFACTOR),
        ("dp=2,tp=2", (), LAMB),
        ("dp=2", (), LAMB),
        ("dp=2", (zero(1),), UNKNOWN),
        ("dp=2", (zero(2),), UNKNOWN),
    ],
    ids=["zero1", "low precision", "zero3", "model axes", "nothing split", "unknown", "unknown, zero2"],
)
def test_so_is_each_of_optimizers_that_need_full_tensors(ranks, mesh: str, transforms: Any, kind: Kind):
    count = sl.MeshShape(mesh).world_size
    for planned, sent in ranks(count).run(_of_a_transformer, mesh, transforms, SIZES, 1e-3, kind=kind):
        assert sent == planned


def _of_experts(transforms: tuple[Transform, ...]) -> tuple[Sent, Sent]:
    rules = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")
    torch.manual_seed(0)
    return _recorded(Model(), rules, "dp=2,ep=2", transforms, torch.randn(3, 5, 4))


@pytest.mark.parametrize("transforms", [(), (zero(1),), (zero(2), sl.accumulate(2))], ids=str)
def test_so_is_each_of_experts(ranks, transforms: tuple[Transform, ...]):
    for planned, sent in ranks.run(_of_experts, transforms):
        assert sent == planned


def _with_state_on_the_host(transforms: tuple[Transform, ...], kind: Kind) -> tuple[Sent, Sent]:
    with elsewhere():
        return _of_a_transformer("dp=2", transforms, SIZES, 1e-3, kind=kind)


@pytest.mark.parametrize(
    "transforms",
    [
        (sl.offload("state"),),
        (zero(1), sl.offload("state")),
        (zero(2), sl.precision("bf16"), sl.offload("state")),
        (zero(3), sl.offload("all")),
        (fsdp(), sl.accumulate(2), sl.offload("all")),
        (fsdp(), sl.offload("state")),
    ],
    ids=str,
)
def test_so_is_each_of_what_lies_on_the_host(ranks, transforms: tuple[Transform, ...]):
    """Copies between host and device too."""
    for planned, sent in ranks(2).run(_with_state_on_the_host, transforms, Kind()):
        assert sent == planned
        assert any(each == "copy" for _, _, each, _ in planned)


@pytest.mark.parametrize("transforms", [(zero(1), sl.offload("state")), (zero(3), sl.offload("all"))], ids=str)
def test_so_is_each_of_full_tensors_on_the_host(ranks, transforms: tuple[Transform, ...]):
    """A rank copies what it sends, and what it receives: all ranks together make the copies of the list."""
    (planned, first), (_, second) = ranks(2).run(_with_state_on_the_host, transforms, LAMB)
    assert {*first, *second} == {*planned}
    for sent in (first, second):
        assert {key: n for key, n in sent.items() if key[2] != "copy"} == {
            key: n for key, n in planned.items() if key[2] != "copy"
        }
