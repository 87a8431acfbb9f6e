"""Logical axes mean what flax says that they mean, and rules go there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.layout import Dim, Layout

WORDS = ("embed", "mlp", "kv-1", "_x", "class")
AXES = ("dp", "fsdp", "tp")


def _axes_of(layout: Layout) -> list[tuple[str, ...]]:
    return [dim.axes for dim in layout.dims if isinstance(dim, Dim)]


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    root = nn.Module()
    for name, shape in shapes.items():
        *parents, last = name.split(".")
        module = root
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(last, nn.Parameter(torch.empty(shape, device="meta")))
    return root


pairs = st.lists(
    st.tuples(
        st.sampled_from(WORDS),
        st.none() | st.sampled_from(AXES) | st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple),
    ),
    max_size=8,
)
names = st.lists(st.sampled_from(WORDS), unique=True, max_size=4).flatmap(
    lambda words: st.tuples(*(st.sampled_from((word, None)) for word in words))
)


@given(names, pairs)
@example(("embed", "mlp"), [("mlp", "tp"), ("embed", "tp"), ("embed", "dp")])  # the pairs' order, not the dims'
@example(("embed",), [("embed", None), ("embed", "tp")])  # None settles it
def test_pairs_mean_what_flax_says(names: tuple[str | None, ...], pairs: list[tuple[str, Any]]):
    import flax.linen as linen

    spec = linen.logical_to_mesh_axes(names, pairs)
    rules = sl.Rules.from_logical_axes({"x": names}, pairs)
    layout = rules.resolve(_tensors({"x": (8,) * len(names)}), "dp=2,fsdp=2,tp=2").tensors["x"].layout
    assert layout.partition_spec() == type(spec)(*(entry or None for entry in spec))


@st.composite
def _layouts(draw: st.DrawFn) -> str:
    left, words = (list(draw(st.permutations(each))) for each in (AXES, ("out", "in", "out_tp", "tp")))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        axes = [left.pop() for _ in range(draw(st.integers(0, min(2, len(left)))))]
        word = words.pop() if draw(st.booleans()) else "_"
        dims.append(word + (f"@({','.join(axes)})" if axes else ""))
    return " ".join(dims)


@given(st.lists(_layouts(), min_size=1, max_size=4))
def test_rules_go_to_logical_axes_and_back(layouts: list[str]):
    """Names that mean other axes in other tensors, that look like those made of others, or are none."""
    import flax.linen as linen

    given = {f"block.{at}.weight": layout for at, layout in enumerate(layouts)}
    model = _tensors({name: (8,) * len(layout.split()) for name, layout in given.items()})
    mesh = "dp=2,fsdp=2,tp=2"
    rules = sl.Rules(given)
    axes = rules.to_logical_axes(model, mesh)
    back = sl.Rules.from_logical_axes(*axes).resolve(model, mesh).tensors
    for name, tensor in rules.resolve(model, mesh).tensors.items():
        assert _axes_of(back[name].layout) == _axes_of(tensor.layout), axes
        names = axes.names["block"][name.split(".")[1]]["weight"]
        assert linen.logical_to_mesh_axes(names, axes.rules) == tensor.layout.partition_spec(), axes


def test_a_layout_file_goes_there_and_back():
    from shardlib.testing import models

    model = models.Transformer(vocab=16, heads=4, head=4, layers=1, tied=True, fused=False)
    rules, mesh = models.rules_for(model), "dp=2,tp=2"
    back = sl.Rules.from_logical_axes(*rules.to_logical_axes(model, mesh))
    before, after = (each.resolve(model, mesh).tensors for each in (rules, back))
    assert {n: _axes_of(t.layout) for n, t in before.items()} == {n: _axes_of(t.layout) for n, t in after.items()}
    assert any("tp" in axes for t in after.values() for axes in _axes_of(t.layout))


def test_boxes_of_flax_and_specs_of_names_are_read():
    import flax.linen as linen
    import jax

    boxed = linen.with_logical_partitioning(linen.initializers.ones, ("embed", "mlp"))
    model = linen.Dense(8, kernel_init=boxed)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.numpy.ones((2, 4))))
    pairs = [("embed", "fsdp"), ("mlp", "tp")]
    rules = sl.Rules.from_logical_axes(variables["params"], pairs)
    assert rules == sl.Rules({"^bias": "...", "^kernel": "embed@fsdp mlp@tp"})
    specs = linen.get_partition_spec(variables["params"])
    assert sl.Rules.from_logical_axes(specs, pairs) == sl.Rules({"^bias": "...", "^kernel": "embed@fsdp mlp@tp ..."})


class _Box:
    """As flax's: with an array that has a dim more than there are names."""

    names = ("embed",)
    value = torch.empty(2, 3)


def _all_fused(layers: int) -> Any:
    rules = sl.Rules({"weight": "(qkv heads@tp head) embed", "bias": None}, sizes={"qkv": 3, "heads": 4})
    return rules.to_logical_axes(nn.Sequential(*(nn.Linear(4, 24) for _ in range(layers))), "tp=2")


def _fused() -> Any:
    rules = sl.Rules({"weight": "(qkv heads@tp head) embed", "bias": "replicate"}, sizes={"qkv": 3, "heads": 4})
    return rules.to_logical_axes(nn.Linear(4, 24), "tp=2")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sl.Rules.from_logical_axes({"kernel": (1, 2)}, []),
            'The logical axes of "kernel" were given as (1, 2); give a tuple with a name, or None, for each dim, or '
            "flax's box of one (nn.with_logical_partitioning makes it).",
        ),
        (
            lambda: sl.Rules.from_logical_axes({"a": [{"kernel": "embed"}]}, []),
            'The logical axes of "a.0.kernel" were given as \'embed\'; give a tuple',
        ),
        (
            lambda: sl.Rules.from_logical_axes({"square": ("mlp", "mlp")}, [("mlp", "tp")]),
            "The logical axes of \"square\" are ('mlp', 'mlp'), with \"mlp\" twice, and a rule for it could mean "
            "either dim. Call one of them something else, or None.",
        ),
        (
            lambda: sl.Rules.from_logical_axes({"kernel": _Box()}, []),
            "The logical axes of \"kernel\" are ('embed',), and its box holds an array of shape (2, 3); give",
        ),
        (lambda: sl.Rules.from_logical_axes(("embed",), []), "Logical axes were given as tuple ('embed',); give a"),
        (
            lambda: sl.Rules.from_logical_axes({}, {"mlp": "tp"}),
            "The rules for logical axes were given as {'mlp': 'tp'}; give a list of pairs",
        ),
        (lambda: sl.Rules.from_logical_axes({}, ("mlp", "tp")), "were given as ('mlp', 'tp'); give a list of pairs"),
        (
            lambda: sl.Rules.from_logical_axes({}, [("mlp", ("tp", "tp"))]),
            "A rule for logical axes was given as ('mlp', ('tp', 'tp')); give a pair of a logical name and a mesh axis",
        ),
        (lambda: sl.Rules.from_logical_axes({}, [("mlp", 3)]), "A rule for logical axes was given as ('mlp', 3)"),
        (lambda: _all_fused(8), '\n  "7.weight": "(qkv heads@tp head) embed"\nShard the whole dim'),
        (lambda: _all_fused(10), '\n  "7.weight": "(qkv heads@tp head) embed"\n  and 2 more\nShard'),
        (_fused, '1 tensors have a fused dim of which one factor is sharded, but a logical axis names a whole dim:\n'),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(call: Any, message: str):
    with pytest.raises(RuleError) as raised:
        call()
    assert message in str(raised.value)
