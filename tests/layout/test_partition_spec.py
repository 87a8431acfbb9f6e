"""Layouts and JAX partition specs say the same: XLA's own index maps are our slices.

JAX runs in a process of its own, which may be told before the import how many devices to pretend.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Layout
from tests.layout.cases import plain_layouts

# The one marker of tests that need the jax extra; wherever jax is installed they run.
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax: pip install shardlib[jax]")

MESHES = {"dp=2,tp=2,cp=2": (8, 16), "dp=3,tp=2,cp=1": (12, 6), "tp=4,dp=2,cp=1": (8, 24)}

PROGRAM = """
import json, sys
import jax, numpy
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Layout

def bounds(index, n):
    start, stop, step = index.indices(n)
    assert step == 1
    return [start, stop]

def index_maps(spec, global_shape, text):
    shape = MeshShape(spec)
    devices = numpy.array(jax.devices()[:shape.world_size]).reshape(shape.sizes)
    mesh = Mesh(devices, shape.names, axis_types=(AxisType.Auto,) * len(shape))
    found = NamedSharding(mesh, Layout.parse(text).partition_spec()).devices_indices_map(tuple(global_shape))
    return [[bounds(i, n) for i, n in zip(found[d], global_shape)] for d in devices.flat]

def there_and_back(spec, global_shape, text):
    return Layout.from_partition_spec(Layout.parse(text).partition_spec(), len(global_shape)).text

def answer(form):
    try:
        return form()
    except LayoutError as error:
        return str(error)

cases = json.load(sys.stdin)
print(json.dumps({
    "maps": [index_maps(*case) for case in cases],
    "back": [there_and_back(*case) for case in cases],
    "forms": [answer(form) for form in [
        lambda: repr(tuple(Layout.parse("batch@(dp,fsdp) seq embed@tp").partition_spec())),
        lambda: repr(tuple(Layout.parse("").partition_spec())),
        lambda: Layout.from_partition_spec(P(("fsdp", "tp")), 3).text,
        lambda: Layout.from_partition_spec(P(None, "tp"), 2, dim_names=["vocab", "embed"]).text,
        lambda: Layout.from_partition_spec(P("tp", None), 1).text,
        lambda: Layout.from_partition_spec(P(P.UNCONSTRAINED), 1).text,
        lambda: Layout.from_partition_spec(P("dp", unreduced={"tp"}), 1).text,
    ]],
}))
"""

EVERY_ORDER = [
    (spec, global_shape, layout.text)
    for spec, global_shape in MESHES.items()
    for layout in plain_layouts(MeshShape(spec).names, len(global_shape))
]
CASES = [*EVERY_ORDER, ("dp=2,tp=2,cp=2", (8, 16), "(heads=4@(tp,dp) head) embed@cp")]


@pytest.fixture(scope="module")
def jax_says() -> Any:
    """What JAX answers, on eight pretended CPU devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(CASES), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_jax
def test_index_maps_of_jax_are_our_slices_for_every_order_of_axes(jax_says: Any):
    assert len(EVERY_ORDER) == 3 * 49
    for (spec, global_shape, text), maps in zip(CASES, jax_says["maps"], strict=True):
        mesh, layout = MeshShape(spec), Layout.parse(text)
        for rank, index in enumerate(maps):
            held = layout.local_slices(global_shape, mesh, mesh.coordinate(rank))
            assert index == [[part.start, part.stop] for (part,) in held], (spec, text, rank)


@needs_jax
def test_layout_to_partition_spec_and_back_is_the_identity(jax_says: Any):
    for (spec, _, text), back in zip(CASES, jax_says["back"], strict=True):
        assert [dim.axes for dim in Layout.parse(back).dims] == [dim.axes for dim in Layout.parse(text).dims], spec


@needs_jax
def test_forms_of_partition_specs(jax_says: Any):
    assert jax_says["forms"] == [
        "(('dp', 'fsdp'), None, 'tp')",
        "()",
        "_@(fsdp,tp) _ _",
        "vocab embed@tp",
        "P('tp', None) for a tensor of 1 dims: it has 2 entries. Give no more entries than the tensor has dims.",
        "P(UNCONSTRAINED,) for a tensor of 1 dims: dim 0 is left to the compiler. Name its axes, or None.",
        "P('dp', unreduced={'tp'}) for a tensor of 1 dims: it has unreduced or reduced axes. Give a spec of "
        "split axes alone.",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "(3 heads=2@tp head) embed",
            'Layout "(3 heads@tp head) embed" as a PartitionSpec: the fused dim "3 heads head" is split inside its '
            "outermost factor. Keep that dim whole in JAX and split its factors after unfusing, or store the factors "
            "as "
            "dims.",
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
