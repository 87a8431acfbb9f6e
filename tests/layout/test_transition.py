"""The price of getting from one layout to another."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Collective, Layout, cost, transition
from tests.layout.cases import Case, axis_lists, cases, fused_dims, meshes, plain_dims, thorough


def steps(src: str, dst: str, global_shape: tuple[int, ...], mesh: str) -> list[str]:
    found = transition(Layout.parse(src), Layout.parse(dst), global_shape, torch.float32, mesh)
    return [str(step) for step in found]


@pytest.mark.parametrize(
    ("src", "dst", "mesh", "expected"),
    [
        # One axis of four, 8 x 8 floats, 256 bytes: what a ring sends.
        ("a b", "a b", "dp=4", []),
        ("a b", "a@dp b", "dp=4", ["slice(dp): 0 bytes"]),
        ("a@dp b", "a b", "dp=4", ["all_gather(dp): 192 bytes"]),
        ("a@dp b", "a b@dp", "dp=4", ["all_to_all(dp): 48 bytes"]),
        ("a b + sum@dp", "a b", "dp=4", ["all_reduce(dp): 384 bytes"]),
        ("a b + sum@dp", "a@dp b", "dp=4", ["reduce_scatter(dp): 192 bytes"]),
        ("a b + sum@dp", "a b + sum@dp", "dp=4", []),
        ("a b", "a b + sum@dp", "dp=4", ["slice(dp): 0 bytes"]),
        ("a b + max@dp", "a b + sum@dp", "dp=4", ["all_reduce(dp): 384 bytes", "slice(dp): 0 bytes"]),
        # Two axes: reduce on what tp leaves; reduce over both at once; slice before reducing.
        ("a@tp b + sum@dp", "a@tp b", "dp=4,tp=2", ["all_reduce(dp): 192 bytes"]),
        ("a@tp b + sum@dp", "a@(tp,dp) b", "dp=4,tp=2", ["reduce_scatter(dp): 96 bytes"]),
        ("a b + sum@(dp,tp)", "a b", "dp=4,tp=2", ["all_reduce(dp,tp): 448 bytes"]),
        ("a b + sum@(dp,tp)", "a@tp b", "dp=4,tp=2", ["reduce_scatter(tp): 128 bytes", "all_reduce(dp): 192 bytes"]),
        ("a b + sum@dp", "a b@tp", "dp=4,tp=2", ["slice(tp): 0 bytes", "all_reduce(dp): 192 bytes"]),
        ("a@dp b", "a b@tp", "dp=4,tp=2", ["slice(tp): 0 bytes", "all_gather(dp): 96 bytes"]),
        # What splits inside can be gathered alone; what splits outside cannot.
        ("a@(tp,fsdp) b", "a@tp b", "fsdp=4,tp=2", ["all_gather(fsdp): 96 bytes"]),
        ("a@(fsdp,tp) b", "a@tp b", "fsdp=2,tp=2", ["all_to_all(fsdp,tp): 96 bytes"]),
        ("a@(dp,tp) b", "a@(tp,dp) b", "dp=2,tp=2", ["all_to_all(dp,tp): 32 bytes"]),
        # How a split is written does not matter, where it falls does.
        ("(heads=4@tp 2) b", "a@tp b", "tp=4", []),
        ("(2 heads=4@tp) b", "a@tp b", "tp=4", ["all_to_all(tp): 48 bytes"]),
        ("(2 heads=4@(tp,fsdp)) b", "(2 heads=4@tp) b", "fsdp=2,tp=2", ["all_gather(fsdp): 64 bytes"]),
        # Axes of one rank are not mentioned.
        ("a@dp b + sum@tp", "a b@dp", "dp=1,tp=1", []),
        # Memory: whichever is on the host is copied.
        ("a@dp b : host", "a b", "dp=4", ["copy(): 64 bytes", "all_gather(dp): 192 bytes"]),
        ("a@dp b", "a@dp b : host", "dp=4", ["copy(): 64 bytes"]),
        ("a b + sum@dp", "a@dp b : host", "dp=4", ["reduce_scatter(dp): 192 bytes", "copy(): 64 bytes"]),
    ],
)
def test_known_transitions(src: str, dst: str, mesh: str, expected: list[str]):
    assert steps(src, dst, (8, 8), mesh) == expected


def test_the_stages_of_zero():
    """replicate / zero(1) / zero(2) / zero(3): what one rank of four sends for 64 floats."""
    whole, partial, shard = "w", "w + sum@dp", "w@dp"
    assert steps(partial, whole, (64,), "dp=4") == ["all_reduce(dp): 384 bytes"]
    assert steps(partial, shard, (64,), "dp=4") == ["reduce_scatter(dp): 192 bytes"]
    assert steps(shard, whole, (64,), "dp=4") == ["all_gather(dp): 192 bytes"]


def test_a_split_across_the_boundaries_of_another_is_an_exchange():
    # dp halves would cut the second of the three blocks that tp splits inside.
    assert steps("(3 a=4@tp)", "a@dp", (12,), "dp=2,tp=2") == ["all_to_all(tp): 12 bytes"]
    assert steps("(2 a=6@tp)", "a@dp", (12,), "dp=2,tp=2") == ["slice(dp): 0 bytes", "all_gather(tp): 12 bytes"]


def test_bytes_are_averaged_over_ranks_and_rounded_up():
    assert steps("a@tp", "a", (5,), "tp=2") == ["all_gather(tp): 10 bytes"]
    assert steps("a@tp", "a", (4,), "tp=3") == ["all_gather(tp): 11 bytes"]


def test_cost_counts_the_network_alone():
    assert cost([Collective("copy", (), 5), Collective("all_gather", ("dp",), 7)]) == 7
    assert cost([]) == 0


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(LayoutError) as caught:
        steps("a b", "a@cp b", (8, 8), "tp=2")
    assert str(caught.value) == (
        'Layout "a@cp b" for a tensor of global shape (8, 8) on mesh "tp=2": axis "cp" is not on the mesh, which has '
        '"tp". Use one of these, or add the axis to the mesh.'
    )


@st.composite
def layouts_of_one_tensor(draw: st.DrawFn, count: int) -> tuple[MeshShape, tuple[int, ...], list[Layout]]:
    """Layouts of one tensor, each with its own splits: plain and uneven, or the same factors split in other ways."""
    mesh = draw(meshes())
    ndim = draw(st.integers(1, 2))
    base = [draw(_dim_choice(mesh, f"d{dim}")) for dim in range(ndim)]
    layouts = [Layout(tuple(draw(_split_again(mesh, base)))) for _ in range(count)]
    return mesh, tuple(size for _, size in base), layouts


@st.composite
def _dim_choice(draw: st.DrawFn, mesh: MeshShape, name: str):
    kind = draw(st.sampled_from(["uneven", "even", "fused"]))
    return draw((fused_dims if kind == "fused" else plain_dims)(mesh, mesh.names, name, kind))


@st.composite
def _split_again(draw: st.DrawFn, mesh: MeshShape, base: list):
    held = draw(axis_lists(mesh, len(base)))
    dims = []
    for (dim, _), axes in zip(base, held, strict=True):
        factors = list(dim.without(mesh.names).factors)
        for axis in axes:
            at = draw(st.integers(0, len(factors) - 1))
            pieces = math.prod(mesh[other] for other in (*factors[at].axes, axis))
            if len(factors) == 1 or factors[at].size % pieces == 0:
                factors[at] = type(factors[at])(factors[at].name, (*factors[at].axes, axis), factors[at].size)
        dims.append(type(dim)(tuple(factors)))
    return dims


def price(src: Layout, dst: Layout, global_shape: tuple[int, ...], mesh: MeshShape) -> int:
    return cost(transition(src, dst, global_shape, torch.float32, mesh))


@given(cases(partial=True))
def test_staying_costs_nothing(case: Case):
    assert transition(case.layout, case.layout, case.global_shape, torch.float32, case.mesh) == ()


@given(cases())
def test_splitting_what_is_whole_costs_nothing(case: Case):
    whole = case.layout.with_axes_dropped(case.mesh.names)
    assert price(whole, case.layout, case.global_shape, case.mesh) == 0


@thorough
@given(layouts_of_one_tensor(2))
def test_a_transition_sends_what_ranks_need_and_lack(drawn):
    """Against sets of element numbers, counted one by one."""
    mesh, shape, (src, dst) = drawn
    full = torch.arange(math.prod(shape)).reshape(shape)
    lacking = 0
    for rank in range(mesh.world_size):
        holds, needs = (set(layout.take(full, mesh, mesh.coordinate(rank)).flatten().tolist()) for layout in (src, dst))
        lacking += len(needs - holds)
    assert price(src, dst, shape, mesh) == math.ceil(Fraction(4 * lacking, mesh.world_size))


@thorough
@given(layouts_of_one_tensor(3))
def test_a_detour_is_never_cheaper(drawn):
    mesh, shape, (a, b, c) = drawn
    assert price(a, c, shape, mesh) <= price(a, b, shape, mesh) + price(b, c, shape, mesh)


@thorough
@given(layouts_of_one_tensor(2), st.data())
def test_a_reduction_costs_no_more_than_reducing_first_and_moving_then(drawn, data: st.DataObject):
    """For each axis that is pending: reduced into a copy on every rank, or scattered inside some dim."""
    mesh, shape, (a, c) = drawn
    pending = data.draw(st.sets(st.sampled_from(mesh.names), min_size=1))
    reduced = a = a.with_axes_dropped(pending)
    for axis in pending:
        target = data.draw(st.integers(-1, len(shape) - 1))
        if target >= 0 and (len(reduced.dims[target].factors) == 1):
            reduced = reduced.with_axes(target, (*reduced.axes_of(target), axis))
    a = Layout(a.dims, tuple((axis, "sum") for axis in pending))
    # Each collective of the direct way rounds up to a byte.
    direct = transition(a, c, shape, torch.float32, mesh)
    assert cost(direct) <= price(a, reduced, shape, mesh) + price(reduced, c, shape, mesh) + len(direct)
