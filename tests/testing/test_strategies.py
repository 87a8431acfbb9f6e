"""Strategies draw what they say, nothing that shardlib refuses, and every corner; they shrink towards the simplest."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import nn

import shardlib as sl
from shardlib.errors import InputError, PlanError
from shardlib.layout import Dim, Layout
from shardlib.testing import strategies
from shardlib.testing.equivalence import equivalent
from shardlib.testing.models import MLP, ConvNet, Numbers, Tokens, Transformer, batch_for
from shardlib.testing.strategies import Case, ModelFactory
from shardlib.testing.strategies._transforms import KINDS

_SEARCH = settings(max_examples=3000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def shrunk(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any]) -> Any:
    """The simplest value that hypothesis finds for a condition."""
    return find(strategy, condition, settings=_SEARCH)


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found = []

    @settings(_SEARCH, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# --- meshes ---------------------------------------------------------------------------------------------------------


@given(strategies.mesh_shapes(8, model_axes=("tp", "sp"), data_axes=("dp", "fsdp"), rows=6))
def test_meshes_have_as_many_ranks_as_allowed_and_data_ranks_that_share_the_rows(mesh: sl.MeshShape):
    assert 2 <= mesh.world_size <= 8
    assert 6 % math.prod(mesh[axis] for axis in mesh.data_axes) == 0


def test_every_mesh_can_be_drawn():
    every = set(drawn(strategies.mesh_shapes(), 300))
    assert {str(mesh) for mesh in every if 1 not in mesh.sizes} == {
        *("tp=2", "tp=3", "tp=4", "dp=2", "dp=3", "dp=4", "tp=2,dp=2", "dp=2,tp=2"),
    }
    assert any(1 in mesh.sizes for mesh in every)


@pytest.mark.parametrize(
    ("condition", "simplest"),
    [
        (lambda mesh: True, "tp=2"),
        (lambda mesh: mesh.data_axes, "dp=2"),
        (lambda mesh: len(mesh) > 1 and 1 not in mesh.sizes, "tp=2,sp=2"),
        (lambda mesh: mesh.world_size > 4 and len(mesh) == 1, "tp=5"),
        (lambda mesh: len(mesh) == 3 and 1 not in mesh.sizes, "tp=2,sp=2,dp=2"),
    ],
)
def test_meshes_shrink_towards_one_axis_of_two_ranks(condition: Any, simplest: str):
    assert str(shrunk(strategies.mesh_shapes(8, model_axes=("tp", "sp")), condition)) == simplest


# --- layouts --------------------------------------------------------------------------------------------------------


@st.composite
def _laid_out(draw: st.DrawFn, **options: Any) -> tuple[sl.MeshShape, tuple[int, ...], Layout]:
    mesh = draw(strategies.mesh_shapes(8, model_axes=("tp", "cp")))
    shape = draw(strategies.shapes(mesh))
    return mesh, shape, draw(strategies.layouts(shape, mesh, **options))


@given(_laid_out(partial=True))
def test_layouts_fit_their_tensors(case: tuple[sl.MeshShape, tuple[int, ...], Layout]):
    mesh, shape, layout = case
    assert layout.resolve(shape, mesh) == layout
    assert Layout.parse(layout.text) == layout


@given(_laid_out(uneven=False, fused=False))
def test_layouts_can_be_even_and_plain(case: tuple[sl.MeshShape, tuple[int, ...], Layout]):
    mesh, shape, layout = case
    assert not layout.uneven_dims(shape, mesh)
    assert not any(isinstance(dim, Dim) and dim.fused for dim in layout.dims)


CORNERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "two axes on a dim": lambda mesh, shape, layout: any(len(dim.axes) == 2 for dim in layout.dims),
    "in another order than the mesh's": lambda mesh, shape, layout: any(
        list(dim.axes) != sorted(dim.axes, key=mesh.names.index) for dim in layout.dims
    ),
    "a sharded factor of a fused dim": lambda mesh, shape, layout: any(
        dim.fused and dim.factors[0].size > 1 and not dim.factors[0].axes and dim.axes for dim in layout.dims
    ),
    "two factors of a dim split": lambda mesh, shape, layout: any(
        len([factor for factor in dim.factors if factor.axes]) == 2 for dim in layout.dims
    ),
    "uneven": lambda mesh, shape, layout: layout.uneven_dims(shape, mesh),
    "fewer elements than ranks": lambda mesh, shape, layout: any(
        0 < size < math.prod(mesh[axis] for axis in dim.axes) for size, dim in zip(shape, layout.dims, strict=True)
    ),
    "nothing to split": lambda mesh, shape, layout: 0 in shape and layout.axes,
    "a sum": lambda mesh, shape, layout: layout.partials and any(dim.axes for dim in layout.dims),
}


@functools.cache
def _many_layouts() -> list[tuple[sl.MeshShape, tuple[int, ...], Layout]]:
    return drawn(_laid_out(partial=True), 500)


@pytest.mark.parametrize("corner", CORNERS)
def test_layouts_reach_every_corner_often(corner: str):
    assert len([case for case in _many_layouts() if CORNERS[corner](*case)]) >= 5


@pytest.mark.parametrize(
    ("condition", "simplest"),
    [
        (lambda layout: True, "d0 d1 d2"),
        (lambda layout: layout.axes, "d0@tp d1 d2"),
        (lambda layout: "tp" in layout.axes, "d0@tp d1 d2"),
        (lambda layout: layout.axes_of(2), "d0 d1 d2@tp"),
        (lambda layout: len(layout.axes_of(0)) == 2, "d0@(dp,tp) d1 d2"),
        (lambda layout: layout.dims[1].fused, "d0 (d10=1 d11=6) d2"),
    ],
)
def test_layouts_shrink_towards_nothing_split(condition: Any, simplest: str):
    assert shrunk(strategies.layouts((4, 6, 5), "dp=2,tp=2"), condition).text == simplest


# --- rules ----------------------------------------------------------------------------------------------------------


class Awkward(nn.Module):
    """Tied layers, a module under two names, repeated blocks and one unlike them, an unknown module, names that match
    each other's patterns, a buffer, a parameter of the root, a module nobody calls, one called with other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 4)])
        self.again = self.more[0]
        self.scale = nn.Parameter(torch.ones(4))
        self.norm, self.unused = nn.BatchNorm1d(4), nn.Bilinear(2, 3, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.more[2](self.again(self.more[1](self.more[0](x)))) * self.scale
        return self.head(self.norm(self.more[1](x.flatten(0, 1)))).view(*ids.shape, 5)


MODELS: dict[str, tuple[nn.Module, Any]] = {
    "awkward": (Awkward(), torch.zeros(2, 3, dtype=torch.int64)),
    "one linear layer": (nn.Linear(4, 6), torch.ones(2, 4)),
    "layers of a sequence": (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)), torch.ones(2, 4)),
    "torch's own": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 3, 8)),
    "on meta": (nn.Linear(4, 6, device="meta"), torch.ones(2, 4)),
}


@functools.cache
def _rule_sets(name: str, mesh: sl.MeshShape) -> st.SearchStrategy[sl.Rules]:
    """Made once for each mesh: making it runs the model."""
    model, batch = MODELS[name]
    return strategies.rule_sets(model, mesh, batch)


@st.composite
def _ruled(draw: st.DrawFn, name: str) -> tuple[sl.MeshShape, sl.Rules]:
    mesh = draw(strategies.mesh_shapes(8, model_axes=("tp", "sp")))
    return mesh, draw(_rule_sets(name, mesh))


@pytest.mark.parametrize("name", MODELS)
def test_rules_for_any_module_resolve_and_can_be_run(name: str):
    """A plan is refused before anything runs; what `shard_model` refuses beyond it is a fused dim over two axes, and an
    uneven one whose axes stand in another order than the mesh's."""
    model, _ = MODELS[name]
    for mesh, rules in drawn(_ruled(name), 60):
        for row in sl.plan(model, mesh, rules).rows:
            layout = row.compute.with_axes_dropped([axis for axis in mesh.names if mesh[axis] == 1])
            assert all(len(dim.axes) <= 1 for dim in layout.dims if dim.fused)
            uneven = layout.uneven_dims(row.global_shape, mesh)
            assert all(_in_order(layout.axes_of(dim), mesh) for dim in uneven)
        assert pickle.loads(pickle.dumps(rules)) == rules


def _in_order(axes: tuple[str, ...], mesh: sl.MeshShape) -> bool:
    return list(axes) == sorted(axes, key=mesh.names.index)


def test_rules_name_axes_of_a_dim_in_any_order_where_they_divide_it():
    """Axes of an activation divide the rows of each data rank: two of four."""
    found = drawn(strategies.rule_sets(nn.Linear(4, 8), "tp=2,sp=2", torch.ones(8, 4)), 100)
    assert any("@(sp,tp)" in str(rules.rules) for rules in found)
    assert any("@(sp,tp)" in str(rules.activations) for rules in found)
    shared = drawn(strategies.rule_sets(nn.Linear(3, 3), "tp=2,sp=2,dp=2", torch.ones(4, 3)), 100)
    assert not any("@(sp,tp)" in str(rules.activations) for rules in shared)


ONE_AXIS = sl.MeshShape("tp=2")  # on which fewest draws have them all


@functools.cache
def _rules_of_the_awkward() -> list[sl.Rules]:
    return drawn(_rule_sets("awkward", ONE_AXIS), 600)


def test_rules_name_every_parameter_buffer_and_border_that_can_be_laid_out():
    model, _ = MODELS["awkward"]
    split: set[str] = set()
    borders: set[tuple[str, str]] = set()
    for rules in _rules_of_the_awkward():
        found = rules.resolve(model, ONE_AXIS)
        split |= {name for name, tensor in found.tensors.items() if tensor.layout.axes}
        borders |= {place for place, border in found.borders.items() if border.rule and border.layout.axes}
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    assert split == {name for name, tensor in tensors.items() if tensor.ndim}
    called = {name for name, _ in model.named_modules() if name not in ("blocks", "more", "more.3", "unused")}
    without_input = {("", "input"), ("embed", "input")}  # ids
    of_two_shapes = {("more.1", "input"), ("more.1", "output")}
    assert borders == {(name, side) for name in called for side in ("input", "output")} - without_input - of_two_shapes


def test_rules_speak_of_modules_by_role_and_text_and_of_blocks_together_and_apart():
    keys: set[str] = set()
    values: set[str] = set()
    for rules in _rules_of_the_awkward():
        keys |= set(rules.rules)
        values |= {str(value) for value in rules.rules.values()}
    assert {"^blocks.*.0", "^blocks.0.0", "^blocks.1.0.weight", "^blocks.*.1.bias", "^embed.weight", "^scale"} <= keys
    assert not {"^more.*", "^embed", "^head"} & keys
    assert any("colwise" in value for value in values) and any("rowwise" in value for value in values)


def test_looking_at_a_model_changes_nothing():
    model, batch = MODELS["awkward"]
    before, state = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    strategies.rule_sets(model, "tp=2", batch)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("condition", "simplest"),
    [
        (lambda layouts: True, "Rules({}, unmatched='replicate')"),
        (lambda layouts: layouts["head.bias"].axes, """Rules({"^head.bias": "out@tp"}, unmatched='replicate')"""),
        (
            lambda layouts: layouts["blocks.0.0.weight"].axes_of(1),
            """Rules({"^blocks.*.0": "rowwise"}, unmatched='replicate')""",
        ),
    ],
)
def test_rules_shrink_towards_none(condition: Any, simplest: str):
    model, batch = MODELS["awkward"]

    def layouts(rules: sl.Rules) -> dict[str, Layout]:
        return {name: tensor.layout for name, tensor in rules.resolve(model, "tp=2").tensors.items()}

    found = shrunk(strategies.rule_sets(model, "tp=2", batch), lambda rules: condition(layouts(rules)))
    assert repr(found) == simplest


def test_what_is_left_out_is_what_is_refused(ranks):
    """A fused dim that two axes split inside: should torch come to gather it right, the strategies can draw it."""
    linear = ModelFactory(nn.Linear, (("in_features", 3), ("out_features", 8)))
    for inside in (True, False):
        found = shrunk(
            strategies.layouts((8,), "tp=2,sp=2"),
            lambda layout, inside=inside: (
                layout.dims[0].fused
                and len(layout.axes) == 2
                and any(factor.axes for factor in layout.dims[0].factors[1:]) is inside
            ),
        )
        rules = sl.Rules({"weight": f"{found.text} in"}, unmatched="replicate")
        if not inside:
            assert equivalent(linear, Numbers((2, 3)), "tp=2,sp=2", rules)
            continue
        with pytest.raises(PlanError, match="a fused dim sharded over several axes"):
            equivalent(linear, Numbers((2, 3)), "tp=2,sp=2", rules)


# --- models, batches, transforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (
            strategies.transformers(dropout=True),
            {
                "tied": True,
                "kv_heads": 1,
                "fused": False,
                "dropout": 0.3,
                "norm": "rms",
                "position": "rotary",
                "bias": False,
            }
            | {"vocab": 7, "layers": 2, "heads": 3},
        ),
        (
            strategies.mlps(dropout=True),
            {"shared": "module", "buffers": True, "unused": True, "width": 7, "dropout": 0.3},
        ),
        (strategies.convnets(dropout=True), {"norm": "group", "kernel": 3, "channels": 5, "dropout": 0.3}),
    ],
)
def test_factories_reach_every_feature_and_travel(strategy: st.SearchStrategy[ModelFactory], arguments: dict[str, Any]):
    factories = drawn(strategy, 250)
    for factory in factories[:50]:
        assert pickle.loads(pickle.dumps(factory)) == factory
        model = factory()
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == sorted(
            factory.frozen, key=[n for n, _ in model.named_parameters()].index
        )
        ids = isinstance(model, Transformer)
        model(batch_for(model)(0) if ids else batch_for(model)(0).float())
    for name, value in arguments.items():
        assert any(dict(factory.arguments).get(name) == value for factory in factories), name
    assert any(factory.frozen and factory.thaw for factory in factories)
    assert any(len(factory.frozen) == 2 for factory in factories)


def test_thawed_parameters_are_trained_from_the_second_step_on():
    factory = ModelFactory(MLP, frozen=("up.bias", "scale"), thaw=True)
    model = factory()
    assert not model.up.bias.requires_grad
    factory.before_step(model, 1)
    assert model.up.bias.requires_grad and model.scale.requires_grad


@pytest.mark.parametrize(
    ("strategy", "condition", "simplest"),
    [
        (
            strategies.transformers(),
            lambda f: f.frozen,
            "Transformer(vocab=5, heads=2, head=2), frozen=('embed.weight',)",
        ),
        (
            strategies.transformers(),
            lambda f: dict(f.arguments).get("tied"),
            "Transformer(vocab=5, heads=2, head=2, tied=True)",
        ),
        (
            strategies.transformers(),
            lambda f: dict(f.arguments).get("kv_heads") == 2,
            "Transformer(vocab=5, heads=4, head=2, kv_heads=2)",
        ),
        (strategies.mlps(), lambda f: dict(f.arguments)["width"] > 2, "MLP(ins=1, width=3, outs=1)"),
        (
            strategies.convnets(),
            lambda f: dict(f.arguments).get("norm"),
            "ConvNet(channels=1, outs=1, kernel=1, norm='group')",
        ),
    ],
)
def test_models_shrink_towards_the_smallest(strategy: Any, condition: Any, simplest: str):
    assert repr(shrunk(strategy, condition)) == f"ModelFactory({simplest})"


@given(st.data(), strategies.mesh_shapes())
def test_data_ranks_share_the_rows_of_a_batch(data: st.DataObject, mesh: sl.MeshShape):
    for model in (Transformer(context=6), MLP(), ConvNet()):
        batch = data.draw(strategies.batches(model, mesh))
        assert len(batch(0)) % math.prod(mesh[axis] for axis in mesh.data_axes) == 0
        assert pickle.loads(pickle.dumps(batch)) == batch
        assert batch(0).shape[1] <= 6


def test_batches_shrink_towards_few_rows():
    assert shrunk(strategies.batches(Transformer(vocab=9)), lambda batch: True) == Tokens(rows=2, seq=1, vocab=9)
    assert shrunk(strategies.batches(MLP(), "dp=2"), lambda batch: True) == Numbers((2, 6))


def _double(plan: sl.Plan) -> sl.Plan:
    return plan


def test_registered_transforms_are_drawn_with_cases():
    before = strategies.cases()
    strategies.register_transforms(st.just(_double))
    try:
        assert shrunk(before, lambda case: _double in case.transforms).transforms == (_double,)
    finally:
        KINDS.pop()


# --- whole cases ----------------------------------------------------------------------------------------------------


@given(strategies.cases())
def test_a_case_is_a_value_and_the_arguments_of_equivalent(case: Case):
    assert pickle.loads(pickle.dumps(case)) == case
    assert {**case} == case.arguments()
    inspect.signature(equivalent).bind(**case)
    assert ("before_step" in case.arguments()) == (case.model.thaw)
    sl.plan(case.model(), case.mesh, case.rules, transforms=case.transforms)


@pytest.mark.deep
def test_a_minimal_case_is_one_axis_nothing_split_and_a_small_model():
    case = shrunk(strategies.cases(), lambda case: True)
    assert repr(case) == (
        'Case(model=ModelFactory(MLP(ins=1, width=1, outs=1)), batch=Numbers(shape=(2, 1)), mesh=MeshShape("tp=2"), '
        "rules=Rules({}, unmatched='replicate'), transforms=(), accumulate=1, no_sync=False, clip=None, rng='exact')"
    )


def _has_a_split_bias(case: Case) -> bool:
    rows = sl.plan(case.model(), case.mesh, case.rules).rows
    return any(row.name.endswith("proj.bias") and row.compute.axes for row in rows)


@pytest.mark.deep
def test_a_minimal_case_keeps_what_a_failure_needs_and_nothing_else():
    """A failure of a split bias shrinks to a transformer with one; all else is as simple as it can be."""
    case = shrunk(strategies.cases(), _has_a_split_bias)
    assert str(case.mesh) == "tp=2"
    assert case.model == ModelFactory(Transformer, (("vocab", 5), ("heads", 2), ("head", 2)))
    assert len(case.rules.rules) == 1 and not case.rules.activations
    assert (case.accumulate, case.no_sync, case.clip, case.transforms) == (1, False, None, ())


def _forgets_a_sum(case: Case) -> bool:
    """Data ranks that accumulate, without the split of anything."""
    return bool(case.mesh.data_axes) and case.accumulate == 2


def test_a_minimal_case_of_data_ranks_has_no_model_axis():
    case = shrunk(strategies.cases(), _forgets_a_sum)
    assert str(case.mesh) == "dp=2"
    assert repr(case.model) == "ModelFactory(MLP(ins=1, width=1, outs=1))"
    assert (case.rules.rules, case.transforms, case.clip, case.rng) == ({}, (), None, "exact")


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def test_cases_of_a_model_of_ones_own():
    found = drawn(strategies.cases(_model, Numbers((6, 6)), max_world=4), 200)
    assert {case.model for case in found} == {_model}
    assert {math.prod(case.mesh[axis] for axis in case.mesh.data_axes) for case in found} == {1, 2, 3}
    assert any(case.rules.activations for case in found)
    assert any(key.startswith("^2") for case in found for key in case.rules.rules)


def test_dropout_is_drawn_on_every_kind_of_mesh_exact_where_data_ranks_draw_each_their_own():
    with_dropout = [c for c in drawn(strategies.cases(), 200) if dict(c.model.arguments).get("dropout")]
    on_data_ranks = [c for c in with_dropout if math.prod(c.mesh[axis] for axis in c.mesh.data_axes) > 1]
    assert len(on_data_ranks) >= 5
    assert {case.rng for case in on_data_ranks} == {"exact"}
    assert {case.rng for case in with_dropout} == {"exact", "fast"}


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: strategies.mesh_shapes(0), "mesh_shapes(max_world=0): give an integer from 1 up."),
        (
            lambda: strategies.mesh_shapes(1),
            "mesh_shapes(1, model_axes=('tp',), data_axes=('dp',), rows=None): there is no such mesh. Give at least "
            "one axis, each once, at least two ranks, and rows that some number of data ranks divides.",
        ),
        (
            lambda: strategies.mesh_shapes(model_axes="tp"),
            "mesh_shapes(model_axes='tp'): give a sequence of names, as in model_axes=(\"tp\",).",
        ),
        (
            lambda: strategies.mesh_shapes(model_axes=("dp",)),
            "mesh_shapes(model_axes=('dp',)): \"dp\" is a data axis; give it as data_axes.",
        ),
        (lambda: strategies.shapes("tp=2", max_dims=0), "shapes(max_dims=0): give an integer from 1 up."),
        (
            lambda: strategies.layouts((4, -1), "tp=2"),
            "layouts((4, -1)): -1 is not a size of a dim; give integers from 0 up.",
        ),
        (
            lambda: strategies.layouts((4,), "tp=2", axes=["dp"]),
            'layouts(axes=(\'dp\',)): mesh "tp=2" has no axis "dp".',
        ),
        (
            lambda: strategies.layouts((4, 4), "tp=2", dims=["out"]),
            "layouts((4, 4), dims=('out',)): give one name for each of the 2 dims.",
        ),
        (lambda: strategies.rule_sets(MLP, "tp=2"), "rule_sets() was given a type; give a torch.nn.Module."),
        (
            lambda: strategies.cases(MLP()),
            "cases() was given a MLP; give a function that makes one, as in `lambda: MyModel()`: each rank makes its "
            "own.",
        ),
        (
            lambda: strategies.cases(MLP),
            "cases() was given a model without a batch; give a function from the step to a batch, as in `lambda step: "
            "torch.randn(8, 16)`.",
        ),
        (
            lambda: strategies.cases(3),
            "cases() was given model=3; give a function that makes one, or a strategy of such.",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(call: Any, message: str):
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value) == message


def test_a_condition_that_no_case_meets_is_not_met():
    with pytest.raises(NoSuchExample):
        find(strategies.mesh_shapes(), lambda mesh: mesh.world_size > 4, settings=settings(_SEARCH, max_examples=200))
