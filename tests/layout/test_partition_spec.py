"""Layouts and JAX partition specs say the same: XLA's own index maps are our slices."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Layout
from shardlib.testing._jax_devices import on_devices
from tests.layout.cases import plain_layouts

# The one marker of tests that need the jax extra; wherever jax is installed they run.
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax: pip install shardlib[jax]")

MESHES = {"dp=2,tp=2,cp=2": (8, 16), "dp=3,tp=2,cp=1": (12, 6), "tp=4,dp=2,cp=1": (8, 24)}
EVERY_ORDER = [
    (spec, global_shape, layout.text)
    for spec, global_shape in MESHES.items()
    for layout in plain_layouts(MeshShape(spec).names, len(global_shape))
]
CASES = [*EVERY_ORDER, ("dp=2,tp=2,cp=2", (8, 16), "(heads=4@(tp,dp) head) embed@cp")]


def _index_maps(cases: list[tuple[str, tuple[int, ...], tuple[Any, ...]]]) -> list[list[list[tuple[int, int]]]]:
    """For each case what XLA gives each device, as bounds of each dim; in a process with devices."""
    import jax
    import numpy
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    def maps(spec: str, global_shape: tuple[int, ...], entries: tuple[Any, ...]) -> list[list[tuple[int, int]]]:
        shape = MeshShape(spec)
        devices = numpy.array(jax.devices()[: shape.world_size]).reshape(shape.sizes)
        mesh = Mesh(devices, shape.names, axis_types=(AxisType.Auto,) * len(shape))
        found = NamedSharding(mesh, PartitionSpec(*entries)).devices_indices_map(global_shape)
        bounds = [[at.indices(n) for at, n in zip(found[d], global_shape, strict=True)] for d in devices.flat]
        return [[(start, stop) for start, stop, _ in each] for each in bounds]

    return [maps(*case) for case in cases]


@needs_jax
def test_index_maps_of_jax_are_our_slices_for_every_order_of_axes():
    assert len(EVERY_ORDER) == 3 * 49
    specs = [(spec, shape, tuple(Layout.parse(text).partition_spec())) for spec, shape, text in CASES]
    for (spec, global_shape, text), maps in zip(CASES, on_devices(8, _index_maps, specs), strict=True):
        mesh, layout = MeshShape(spec), Layout.parse(text)
        for rank, index in enumerate(maps):
            held = layout.local_slices(global_shape, mesh, mesh.coordinate(rank))
            assert index == [(part.start, part.stop) for (part,) in held], (spec, text, rank)


@needs_jax
def test_layout_to_partition_spec_and_back_is_the_identity():
    for _, global_shape, text in CASES:
        layout = Layout.parse(text)
        back = Layout.from_partition_spec(layout.partition_spec(), len(global_shape))
        assert list(map(back.axes_of, range(2))) == list(map(layout.axes_of, range(2))), text


@needs_jax
def test_forms_of_partition_specs():
    from jax.sharding import PartitionSpec as P

    assert Layout.parse("batch@(dp,fsdp) seq embed@tp").partition_spec() == P(("dp", "fsdp"), None, "tp")
    assert Layout.parse("").partition_spec() == P()
    assert str(Layout.from_partition_spec(P(("fsdp", "tp")), 3)) == "_@(fsdp,tp) _ _"
    assert str(Layout.from_partition_spec(P(None, "tp"), 2, dim_names=["vocab", "embed"])) == "vocab embed@tp"


@needs_jax
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            lambda P: P("tp", None),
            "P('tp', None) for a tensor of 1 dims: it has 2 entries. Give no more entries than the tensor has dims.",
        ),
        (
            lambda P: P(P.UNCONSTRAINED),
            "P(UNCONSTRAINED,) for a tensor of 1 dims: dim 0 is left to the compiler. Name its axes, or None.",
        ),
        (
            lambda P: P("dp", unreduced={"tp"}),
            "P('dp', unreduced={'tp'}) for a tensor of 1 dims: it has unreduced or reduced axes. Give a spec whose "
            "axes all shard dims.",
        ),
        (
            lambda P: P("dp", reduced={"tp"}),
            "P('dp', reduced={'tp'}) for a tensor of 1 dims: it has unreduced or reduced axes. Give a spec whose axes "
            "all shard dims.",
        ),
    ],
    ids=["long", "open", "unreduced", "reduced"],
)
def test_what_of_jax_is_no_layout_is_refused(spec: Callable[[Any], Any], message: str):
    from jax.sharding import PartitionSpec

    with pytest.raises(LayoutError) as caught:
        Layout.from_partition_spec(spec(PartitionSpec), 1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "(3 heads=2@tp head) embed",
            'Layout "(3 heads@tp head) embed" as a PartitionSpec: the fused dim "3 heads head" is sharded inside its '
            "outermost factor. Keep that dim replicated in JAX and shard its factors after unfusing, or store the "
            "factors as dims.",
        ),
        (
            "a b + sum@tp",
            'Layout "a b + sum@tp" as a PartitionSpec: a pending sum over "tp" has no form there. Reduce first; '
            "with_axes_dropped forgets it.",
        ),
        (
            "... a@tp",
            'Layout "... a@tp" as a PartitionSpec: "..." leaves the number of dims open. Call with_ndim first.',
        ),
        (
            "a@tp?",
            'Layout "a@tp?" as a PartitionSpec: dim "a" is still open ("?"). Call layout.resolve(global_shape, mesh) '
            "first.",
        ),
    ],
)
def test_what_jax_cannot_say_is_refused(text: str, problem: str):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).partition_spec()
    assert str(caught.value) == problem
