"""`check_layouts` on functions of JAX: what is found, on which line, and what is moved; beside what XLA compiles."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from tests.jax import gpts, on_devices, typed_functions

LIBRARIES = ("nnx", "equinox", "haiku")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_sums_twice_forward_whatever_library_it_is_of(library: str):
    """As XLA compiles it (Shoeybi et al., arXiv 1909.08053)."""
    report = on_devices.run(typed_functions.forward, library, "dp=128,tp=4")
    assert (report.findings, report.reshards, report.uneven) == ((), (), ())
    assert report.moved == {"sum": 2 * 2}
    by_rows = [dict(line.moved) for line in report.lines if line.moved]
    if library == "haiku":  # whose layers have names of their own in each block
        assert by_rows == [{"sum over tp": 1}] * 4
    else:  # the projection of attention, and the MLP's second layer
        assert by_rows == [{"sum over tp": 2}] * 2
    assert f" on 512 devices (dp=128,tp=4)\na call: {2 * 2} sums" in str(report)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_gradient_is_typed_and_its_parameters_are_summed_over_the_batch(library: str):
    """Backward, a block sums over tp once for each of the four kernels that are split by columns."""
    report = on_devices.run(typed_functions.gradient, library, "dp=128,tp=4")
    assert (report.findings, report.reshards) == ((), ())
    backward = [line for line in report.lines if line.backward]
    loss = "optax.softmax_cross_entropy"
    over_tp = sum(line.moved.get("sum over tp", 0) for line in backward if loss not in line.code)
    assert over_tp == 2 * 4 + 1  # the head's is one more
    assert sum(line.moved.get("sum over dp", 0) for line in backward) >= 2 * (4 + 2)  # at least the kernels


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "columns after columns": ({"down": "colwise"}, "and tp shards another dim of the other one"),
    "columns, then whole": ({"down": None}, "is sharded over tp in one operand only"),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", WRONG)
def test_what_layouts_leave_open_is_found_on_the_author_s_line(library: str, case: str):
    changes, words = WRONG[case]
    report = on_devices.run(typed_functions.forward, library, "dp=128,tp=4", changes)
    found = [finding for finding in report.findings if "down" in "".join(finding.operands)]
    assert len(found) == 2  # in each block
    assert len({finding.line for finding in found}) == 1
    for finding in found:
        assert words in finding.conflict
        assert finding.op == "dot_general"
        assert re.match(r"(nnx_gpt|tests/jax/gpts|gpts)\.py:\d+ in ", finding.line)
        assert "down" in finding.code
    text = str(report)
    assert ("more like it" in text) == (library != "haiku")  # its layers have names of their own, one for each
    assert "by a rule for" not in text


def test_the_number_of_a_line_is_that_of_the_file():
    report = on_devices.run(typed_functions.forward, "equinox", "dp=128,tp=4", WRONG["columns after columns"][0])
    number = int(re.findall(r":(\d+) in", report.findings[0].line)[0])
    assert inspect.getsource(gpts).splitlines()[number - 1].strip() == report.findings[0].code


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_contracted_dim_that_is_split_needlessly_costs_a_sum(library: str):
    """It has one answer, so it is no finding: the communications tell of it."""
    report = on_devices.run(typed_functions.forward, library, "dp=128,tp=4", {"query": "rowwise"})
    assert report.ok
    assert report.moved == {"sum": 2 * 2 + 2}
    assert sum(line.moved.get("sum over tp", 0) for line in report.lines if "query" in line.parameter) == 2


@pytest.mark.parametrize("library", ["equinox", "haiku"])
def test_one_axis_on_two_dims_of_a_sum_is_found(library: str):
    changes = {"embed": "vocab embed@tp", "position": "seq@tp embed"}
    report = on_devices.run(typed_functions.forward, library, "dp=128,tp=4", changes)
    assert "axis tp shards dim" in report.findings[0].conflict
    assert (report.findings[0].op, "position" in report.findings[0].code) == ("add", True)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("changes", [{}, {"out": None, "down": None, "query": None, "key": None, "value": None}])
def test_xla_compiles_the_collectives_that_are_typed(library: str, changes: dict[str, Any]):
    """By rules that are right, and where nothing is split but a column-parallel head."""
    if changes:
        changes = {**changes, "up": None, "query_proj": None, "key_proj": None, "value_proj": None}
    typed, compiled = on_devices.run(typed_functions.compiled, library, "dp=2,tp=4", changes)
    assert typed == compiled
    assert typed == ({} if changes else {"sum": 2 * 2})


# --- programs of programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", typed_functions.ALIKE)
def test_blocks_are_typed_alike_in_every_program_that_runs_them(way: str):
    wrong, found = on_devices.run(typed_functions.unlike_unrolled, way, False, x64=False)
    assert wrong == []
    assert found > 20


@pytest.mark.parametrize("way", [way for way in typed_functions.ALIKE if way != "checkpoint"])
def test_their_gradients_are_typed_alike(way: str):
    """But for `jax.checkpoint`, which sums again what it recomputes."""
    wrong, found = on_devices.run(typed_functions.unlike_unrolled, way, True, x64=False)
    assert wrong == []
    assert found > 90


SEEN: dict[str, tuple[dict[str, int], str, str]] = {
    "psum": ({"sum": 1}, "", ""),
    "psum of columns": ({"exchange": 1, "sum": 1}, "", ""),
    "all_gather": ({"gather": 1}, "", ""),
    "psum over one axis": ({"sum": 1}, "", ""),
    "constraint": ({"exchange": 1}, "", ""),
    "gradient of a sum": ({"sum": 2}, "", ""),
    "cond of two layouts": ({"gather": 1}, "branches return different layouts: dim 0 is sharded over tp", ""),
    "loop that turns its carry back": (
        {"gather": 1, "exchange": 3},
        "the carry of a loop changes: axis tp shards dim 0",
        "",
    ),
    "loop that turns its carry": ({"exchange": 3}, "the carry of a loop changes: axis dp shards dim 0", ""),
    "while": ({"sum": 1}, "", "takes a slice of a dim that is sharded"),
    "while of columns": ({}, "and tp shards another dim of the other one", "takes a slice of a dim that is sharded"),
    "switch": ({"sum": 2}, "", "takes a slice of a dim that is sharded"),
    "scan over a sharded dim": ({}, "", "loops over a dim that is sharded"),
    "labels": ({"sum": 5}, "", ""),
    "callback": ({}, "", "computes with unsharded operands"),
}


@pytest.mark.parametrize("name", typed_functions.PROGRAMS)
def test_what_runs_programs_is_typed_through(name: str):
    report = on_devices.run(typed_functions.program, name, x64=False)
    moved, conflict, reshard = SEEN[name]
    assert report.moved == moved
    assert all(conflict in finding.conflict for finding in report.findings)
    assert report.ok == (not conflict)
    assert {finding.conflict for finding in report.reshards} - {"takes a slice of a dim that is sharded"} <= {reshard}
    assert bool(reshard) <= bool(report.reshards)


def test_values_inside_a_shard_map_keep_the_axes_that_are_the_partitioner_s():
    gathered, summed = (
        on_devices.run(typed_functions.program, name, x64=False) for name in ("all_gather", "psum over one axis")
    )
    assert gathered.lines[-1].values == ("(256 64@tp)",)
    assert "(1 64@tp)" in next(line for line in summed.lines if "* 2.0" in line.code and not line.parameter).values


# --- arguments, errors, and the report as a value --------------------------------------------------------------------


def _arguments() -> dict[str, Any]:
    import jax

    shape = jax.ShapeDtypeStruct
    mesh = jax.sharding.AbstractMesh((4, 8), ("dp", "tp"))
    named = shape((256, 64), "float32", sharding=jax.NamedSharding(mesh, jax.P(None, "tp")))
    checked = typed_functions.of_mlp

    def product(p: Any, x: Any) -> Any:
        return x @ p["a"]

    return {
        "rows": checked(product).lines[-1].values,
        "named": checked(product, named, a=typed_functions.ROWS).lines[-1].values,
        "uneven": checked(lambda p, batch: batch["x"] @ p["a"], {"x": shape((6, 64), "float32")}).uneven,
        "number": checked(lambda p, x, n: x * n, shape((256, 64), "float32"), 3).uneven,
        "one device": dict(checked(product, a=typed_functions.ROWS, mesh="dp=4,tp=1").moved),
    }


def test_rows_are_divided_over_the_data_axes_where_an_argument_has_no_sharding():
    assert on_devices.run(_arguments, x64=False) == {
        "rows": ("(256@dp 64)",),
        "named": (),
        "uneven": ("example[1]['x']",),
        "number": (),
        "one device": {},
    }


def _on_a_mesh_of_devices() -> dict[str, Any]:
    """What functions that name a mesh of devices themselves move."""
    import jax

    import shardlib.jax as sj

    mesh = sj.make_mesh("dp=2,tp=4")
    summed = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "tp"),
        mesh=mesh,
        in_specs=(jax.P("dp", "tp"), jax.P("tp")),
        out_specs=jax.P("dp"),
    )
    rows = jax.NamedSharding(mesh, jax.P("dp"))
    functions = {
        "shard_map": (lambda p, x: summed(x, p["a"]), typed_functions.ROWS),
        "constraint": (lambda p, x: jax.lax.with_sharding_constraint(x @ p["a"], rows), typed_functions.COLUMNS),
        "jit": (lambda p, x: jax.jit(lambda h: h * 2, out_shardings=rows)(x @ p["a"]), typed_functions.COLUMNS),
        "device_put": (lambda p, x: jax.device_put(x @ p["a"], rows), typed_functions.COLUMNS),
    }
    return {
        name: dict(typed_functions.of_mlp(function, a=layout, mesh=mesh).moved)
        for name, (function, layout) in functions.items()
    }


def test_a_function_may_name_its_mesh_of_devices():
    found = on_devices.run(_on_a_mesh_of_devices, x64=False)
    gathered = {name: {"gather": 1} for name in ("constraint", "jit", "device_put")}
    assert found == {"shard_map": {"sum": 1}, **gathered}


def _gathered() -> dict[str, dict[str, int]]:
    """What transforms of the plan make of a function."""
    import jax

    import shardlib as sl
    import shardlib.jax as sj

    shape = jax.ShapeDtypeStruct
    params = {"a": shape((64, 64), "float32"), "b": shape((64, 64), "float32")}
    rules = {"a": typed_functions.COLUMNS, "b": typed_functions.ROWS}
    example = params, shape((256, 64), "float32")
    transforms: dict[str, Any] = {"nothing": (), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}
    return {
        name: dict(
            sj.check_layouts(lambda p, x: x @ p["a"] @ p["b"], "dp=4,tp=8", rules, transforms=t, example=example).moved
        )
        for name, t in transforms.items()
    }


def test_what_a_transform_gathers_is_counted():
    found = on_devices.run(_gathered, x64=False)
    assert found == {"nothing": {"sum": 1}, "zero(2)": {"sum": 1}, "zero(3)": {"gather": 2, "sum": 1}}


def _messages() -> list[str]:
    import jax

    import shardlib.jax as sj
    from shardlib.errors import ShardlibError

    def loss(params: Any, x: Any) -> Any:
        return (x @ params["a"]).sum()

    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    calls: list[tuple[Any, Any, Any]] = [
        (3, {"a": None}, ({"a": shape}, shape)),
        (loss, {"a": None}, {"a": shape}),
        (loss, {"a": None}, ({"a": shape},)),
        (loss, None, ({"a": shape}, shape)),
        (loss, {"a": "in out@tp"}, ({"a": jax.ShapeDtypeStruct((8, 6), "float32")}, shape)),
        (loss, {"up": None}, ({"a": shape}, shape)),
        (lambda p, x: x, {"a": None}, ({"a": shape}, {"x": shape, "act": "gelu"})),
    ]
    said = []
    for function, rules, example in calls:
        with pytest.raises(ShardlibError) as caught:
            sj.check_layouts(function, "dp=2,tp=4", rules, example=example)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_what_cannot_be_checked_is_refused():
    said = on_devices.run(_messages, x64=False)
    assert said[:4] == [
        "InputError: check_layouts was given 3; give a module of torch, or a function of JAX whose first argument is "
        "the tree of parameters: check_layouts(loss_fn, mesh, rules, example=(params, batch)).",
        "InputError: check_layouts was given a function and example=dict; give the tuple of its arguments, of which "
        "the first is the tree of parameters: example=(params, batch).",
        "InputError: check_layouts was given example= with 1 arguments, and _messages.<locals>.loss cannot be called "
        "with them: missing a required argument: 'x'. Give the tuple of its arguments, of which the first is the tree "
        "of parameters. Of a module of flax or equinox, give a function of its parameters that merges them into it.",
        "RuleError: check_layouts was given a function of JAX and no rules; only a module of torch has a layout file "
        'of its class. Give rules for the paths of its parameters, as in {"up.kernel": "in out@tp"}.',
    ]
    assert said[4].startswith('InputError: "a" of global shape (8, 6)')
    assert said[5].startswith("RuleError: ")
    assert said[6].startswith(
        "InputError: check_layouts was given 'gelu' as example[1]['act'], which is neither an array"
    )


def _dumps() -> list[str]:
    """Reports of one function: as it is, with lines above it, in more blocks, and with another layout."""
    import linecache

    import jax

    import shardlib.jax as sj

    source = "def f(params, x):\n    for w in params['w']:\n        x = x + jax.nn.relu(x @ w)\n    return x\n"
    dumps = []
    variants = [("", 2, "in out"), ("# a comment\n\n", 2, "in out"), ("", 3, "in out"), ("", 2, "in out@tp")]
    for number, (above, blocks, layout) in enumerate(variants):
        file = f"/somewhere/{number}/model.py"
        linecache.cache[file] = (0, None, (above + source).splitlines(keepends=True), file)
        made: dict[str, Any] = {"jax": jax, "__name__": "model"}
        exec(compile(above + source, file, "exec"), made)
        shape = jax.ShapeDtypeStruct((64, 64), "float32")
        example = {"w": [shape] * blocks}, shape
        dumps.append(sj.check_layouts(made["f"], "dp=4,tp=8", {"w.*": layout}, example=example).to_json())
    return dumps


def test_a_golden_file_changes_with_layouts_alone():
    first, moved_down, more_blocks, other = on_devices.run(_dumps, x64=False)
    assert first == moved_down == more_blocks
    read = json.loads(other)
    assert list(read) == ["version", "mesh", "moved", "findings", "reshards", "uneven", "lines"]
    assert read["findings"][0]["operands"] == ["(64@dp 64@tp)", "w.* (64 64@tp)"]
    assert read["findings"][0]["code"] == "x = x + jax.nn.relu(x @ w)"
    assert read["findings"][0]["at"] == "model.py in f"
    assert json.loads(first)["lines"] == [
        {"at": "model.py in f", "code": "x = x + jax.nn.relu(x @ w)", "parameter": "w.*", "values": ["(64@dp 64)"]},
        {"at": "model.py in f", "code": "x = x + jax.nn.relu(x @ w)", "values": ["(64@dp 64)"]},
    ]


def _model_dump() -> str:
    import torch

    import shardlib.jax as sj
    from tests.jax.typed import Blocks

    rules = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return sj.check_layouts(Blocks(), "dp=4,tp=8", rules, example=torch.empty(64, 64, 64, device="meta")).to_json()


def test_a_module_of_torch_has_a_golden_file_too():
    lines = json.loads(on_devices.run(_model_dump, x64=False))["lines"]
    down = [line for line in lines if line.get("moved")]
    assert [(line["module"], line["op"], line["parameter"]) for line in down] == [
        ("blocks.*.down", "linear", "blocks.*.down.weight")
    ]
    assert down[0]["moved"] == {"sum over tp": 2}
