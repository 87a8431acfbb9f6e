"""What rules mean for a model: layouts, notes, borders, and the laws that tie the forms of a rule together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardlib.errors import RuleError
from shardlib.layout import Layout
from shardlib.rules import Rules, register_dims
from tests.rules.zoo import TINY_RULES, TINY_SIZES, ConvNet, Scale, Tiny, Transposed, on_meta

register_dims(Transposed, weight="in out", bias="out", output="out", contracted=("in",))


def tiny() -> nn.Module:
    return on_meta(Tiny)


def texts(rules: Rules | Mapping[str, Any], model: nn.Module, mesh: str = "tp=2") -> dict[str, str]:
    """The layout of every tensor, without sizes."""
    return {name: str(t.layout) for name, t in Rules.of(rules).resolve(model, mesh).tensors.items()}


def placements(rules: Rules, model: nn.Module, mesh: str = "tp=2") -> dict[str, Any]:
    return {name: t.layout.placements(mesh) for name, t in rules.resolve(model, mesh).tensors.items()}


def notes(rules: Rules, model: nn.Module, mesh: str = "tp=2") -> dict[str, str]:
    return {name: tensor.note for name, tensor in rules.resolve(model, mesh).tensors.items()}


def test_a_whole_model() -> None:
    resolution = Rules(TINY_RULES, sizes=TINY_SIZES).resolve(tiny(), "dp=2,tp=2")
    table = [
        (t.name, t.layout.text, t.rule, t.note)
        for t in resolution.tensors.values()
        if not t.name.startswith("blocks.1")
    ]
    assert table == [
        ("mask", "_ _", None, "replicated: buffer"),
        ("embed.weight", "vocab@tp embed", "embed", "row-parallel (vocab dim)"),
        ("blocks.0.norm.weight", "_", "norm", "replicated"),
        ("blocks.0.norm.bias", "_", "norm", "replicated"),
        ("blocks.0.attn.qkv.weight", "(qkv=3 heads=4@tp head=4) in", "attn.qkv", "column-parallel (out dim)"),
        ("blocks.0.attn.qkv.bias", "(qkv=3 heads=4@tp head=4)", "attn.qkv", "column-parallel (out dim)"),
        ("blocks.0.attn.proj.weight", "out in@tp", "attn.proj", "row-parallel (in dim)"),
        ("blocks.0.attn.proj.bias", "out", "attn.proj", "replicated; added once after the reduction"),
        ("blocks.0.mlp.up.weight", "out@tp in", "mlp.up", "column-parallel (out dim)"),
        ("blocks.0.mlp.up.bias", "out@tp", "mlp.up", "column-parallel (out dim)"),
        ("blocks.0.mlp.down.weight", "out in@tp", "mlp.down", "row-parallel (in dim)"),
        ("blocks.0.mlp.down.bias", "out", "mlp.down", "replicated; added once after the reduction"),
    ]


def test_what_is_known_about_each_tensor() -> None:
    tensors = Rules(TINY_RULES, sizes=TINY_SIZES).resolve(tiny(), "tp=2").tensors
    embed, mask = tensors["embed.weight"], tensors["mask"]
    assert embed.tied == ("embed.weight", "head.weight")
    assert (embed.kind, embed.global_shape, embed.dtype, embed.requires_grad) == (
        "parameter",
        (32, 16),
        torch.float32,
        True,
    )
    assert embed.global_bytes == 32 * 16 * 4
    assert (mask.kind, mask.persistent, mask.tied) == ("buffer", False, ("mask",))
    assert embed.persistent and "head.weight" not in tensors


def test_borders_follow_from_layouts() -> None:
    borders = Rules(TINY_RULES, sizes=TINY_SIZES).resolve(tiny(), "dp=2,tp=2").borders
    whole = Layout.parse("...")
    summed = "sum over tp of a row-parallel output"
    assert [(b.module, b.side, b.layout, b.rule, b.reason) for b in borders.values() if "blocks.1" not in b.module] == [
        ("embed", "output", whole, None, summed),
        ("blocks.0.norm", "output", None, None, "its gradient is reduced here"),
        ("blocks.0.attn.proj", "output", whole, None, summed),
        ("blocks.0.mlp.down", "output", whole, None, summed),
    ]


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=1", "fsdp=4"])
def test_no_border_where_no_model_axis_splits(mesh: str) -> None:
    assert Rules(TINY_RULES, sizes=TINY_SIZES).resolve(tiny(), mesh).borders == {}


def test_an_axis_of_size_one_leaves_no_sum() -> None:
    resolution = Rules(TINY_RULES, sizes=TINY_SIZES).resolve(tiny(), "cp=2,tp=1")
    assert resolution.borders["blocks.0.attn.proj", "output"].reason == "its gradient is reduced here"
    assert resolution.tensors["blocks.0.attn.proj.bias"].note == "replicated"


def test_a_border_that_is_asked_for_replaces_the_derived_one() -> None:
    rules = Rules(
        {**TINY_RULES, "attn.proj.output": "batch@dp seq@tp embed", "blocks.*.input": Shard(1)}, sizes=TINY_SIZES
    )
    borders = rules.resolve(tiny(), "dp=2,tp=2").borders
    asked = borders["blocks.0.attn.proj", "output"]
    assert (str(asked.layout), asked.rule, asked.reason) == (
        "batch@dp seq@tp embed",
        "attn.proj.output",
        "set by the rule",
    )
    assert borders["blocks.1", "input"].layout.placements("dp=2,tp=2", ndim=3) == (Replicate(), Shard(1))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("^output", "batch seq vocab@tp", "batch seq vocab@tp"),
        ("^.output", Shard(0), None),
        ("blocks.0.mlp.output", Shard(-1), "... _@tp"),
        ("blocks.0.mlp.output", Shard(1), "_ _@tp ..."),
        ("blocks.0.mlp.output", Replicate(), "..."),
        ("blocks.0.mlp.output", None, "..."),
        ("blocks.0.mlp.output", {"dp": Shard(0), "tp": Shard(1)}, "_@dp _@tp ..."),
        ("blocks.0.mlp.output", {"tp": Shard(0), "dp": Shard(0)}, "_@(tp,dp) ..."),
        (r"re:blocks\.0\.mlp\.output", "b s e@tp", "b s e@tp"),
    ],
)
def test_forms_of_a_border(key: str, value: Any, expected: str | None) -> None:
    rules = {**TINY_RULES, key: value}
    if expected is None:
        with pytest.raises(RuleError, match="empty segment"):
            Rules(rules, sizes=TINY_SIZES)
        return
    borders = Rules(rules, sizes=TINY_SIZES).resolve(tiny(), "dp=2,tp=2").borders
    assert [str(border.layout) for border in borders.values() if border.rule == key] == [expected]


def test_sizes_of_an_activation_come_from_the_module_it_leaves() -> None:
    rules = Rules({**TINY_RULES, "attn.qkv.output": "b s (qkv heads@tp head)"}, sizes=TINY_SIZES)
    border = rules.resolve(tiny(), "tp=2").borders["blocks.0.attn.qkv", "output"]
    assert border.layout.text == "b s (qkv=3 heads=4@tp head)"


def test_module_rules_read_the_modules_dims() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "t": Transposed(8, 8), "e": nn.Embedding(8, 8)})
    wanted = {
        "colwise": {"a.weight": "out@tp in", "a.bias": "out@tp", "t.weight": "in out@tp", "e.weight": "vocab embed@tp"},
        "rowwise": {"a.weight": "out in@tp", "a.bias": "out", "t.weight": "in@tp out", "e.weight": "vocab@tp embed"},
        Shard(0): {"a.weight": "out@tp in", "a.bias": "out@tp", "t.weight": "in@tp out", "t.bias": "out"},
        Shard(-1): {"a.weight": "out in@tp", "a.bias": "out", "t.weight": "in out@tp", "t.bias": "out@tp"},
        "in@tp": {"a.weight": "out in@tp", "t.weight": "in@tp out"},
        "ff@tp": {"a.weight": "ff@tp in", "a.bias": "ff@tp", "t.weight": "in ff@tp", "e.weight": "vocab ff@tp"},
        "x@tp y": {"a.weight": "x@tp y", "a.bias": "x@tp", "t.weight": "x@tp y", "t.bias": "y"},
        "... y@tp": {"a.weight": "_ y@tp", "a.bias": "_", "t.bias": "y@tp"},
    }
    for value, layouts in wanted.items():
        found = texts({"^*": value} if value != "in@tp" else {"[at]": value, "e": None}, model)
        assert {name: found[name] for name in layouts} == layouts, value


def test_a_text_may_name_a_dim_of_the_module() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(8, 8)})
    assert texts({"e": "vocab@tp"}, model) == {"e.weight": "vocab@tp embed"}


def test_dims_without_a_name_follow_only_where_all_dims_are_the_same() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = (nn.Parameter(torch.empty(4, 6)) for _ in range(2))

    register_dims(Mixed, weight="_ out", gate="_ in")
    model = nn.ModuleDict({"mixed": Mixed(), "norm": nn.LayerNorm((4, 6))})
    assert texts({"mixed": "a@tp out", "norm": "a@tp embed"}, model) == {
        "mixed.weight": "a@tp out",
        "mixed.gate": "_ in",
        "norm.weight": "a@tp embed",
        "norm.bias": "a@tp embed",
    }


def test_running_statistics_follow_the_channels() -> None:
    model = on_meta(ConvNet)
    found = texts({"conv1": "colwise", "bn1": "colwise", "conv2": "rowwise", "depthwise": "channels@tp"}, model)
    assert found == {
        "conv1.weight": "out@tp in _ _",
        "conv1.bias": "out@tp",
        "bn1.weight": "channel@tp",
        "bn1.bias": "channel@tp",
        "bn1.running_mean": "channel@tp",
        "bn1.running_var": "channel@tp",
        "bn1.num_batches_tracked": "",
        "conv2.weight": "out in@tp _ _",
        "depthwise.weight": "channels@tp in_per_group _ _",
        "depthwise.bias": "channels@tp",
    }


def test_heads_of_torchs_attention_are_split_inside_q_k_and_v() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4)})
    for value in ("colwise", "heads@tp"):
        rules = Rules({"attn": value, "attn.out_proj": "rowwise"})
        assert placements(rules, model) == {
            "attn.in_proj_weight": (_StridedShard(0, split_factor=3),),
            "attn.in_proj_bias": (_StridedShard(0, split_factor=3),),
            "attn.out_proj.weight": (Shard(1),),
            "attn.out_proj.bias": (Replicate(),),
        }


def test_raw_parameters_of_any_rank() -> None:
    model = nn.ModuleDict({"scale": Scale(), "rnn": nn.LSTM(4, 6), "norm": nn.LayerNorm((3, 4))})
    rules = {"gain": "rows@tp (two ff)", "shift": Shard(-1), "weight_*": "(gates ff@tp) _", "bias_*": "(gates ff@tp)"}
    found = texts(Rules({**rules, "norm.*": "... _@tp"}, sizes={"two": 2, "gates": 4}), model)
    assert (found["scale.gain"], found["scale.shift"]) == ("rows@tp (two ff)", "_@tp")
    assert (found["rnn.weight_hh_l0"], found["rnn.bias_hh_l0"]) == ("(gates ff@tp) _", "(gates ff@tp)")
    assert found["norm.weight"] == "_ _@tp"


def test_the_root_is_named_by_a_caret() -> None:
    assert texts({"^": "colwise"}, nn.Linear(4, 4)) == {"weight": "out@tp in", "bias": "out@tp"}


def test_everything_under_a_module_is_named_by_two_stars() -> None:
    assert set(texts({"**": None}, tiny()).values()) == {"_", "_ _"}


def test_axes_may_be_given_by_dim_name() -> None:
    by_name = Rules(
        {"embed": "vocab embed", "attn.qkv": "(qkv heads head)", "mlp.up": "ff", "blocks.*.output": "batch seq embed"},
        axes={"heads": "tp", "ff": ("fsdp", "tp"), "vocab": "tp?", "batch": "dp"},
        sizes=TINY_SIZES,
        unmatched="replicate",
    )
    resolution = by_name.resolve(tiny(), "dp=2,fsdp=2,tp=2")
    found = {name: str(tensor.layout) for name, tensor in resolution.tensors.items()}
    assert found["embed.weight"] == "vocab@tp embed"
    assert found["blocks.0.attn.qkv.bias"] == "(qkv heads@tp head)"
    assert found["blocks.0.mlp.up.weight"] == "ff@(fsdp,tp) in"
    assert str(resolution.borders["blocks.0", "output"].layout) == "batch@dp seq embed"


def test_an_axis_in_the_text_wins_over_the_axis_of_the_name() -> None:
    rules = Rules({"0": "ff@fsdp", "1": "ff"}, axes={"ff": "tp"})
    found = texts(rules, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "fsdp=2,tp=2")
    assert (found["0.bias"], found["1.bias"]) == ("ff@fsdp", "ff@tp")


def test_an_axis_that_the_mesh_lacks_splits_nothing() -> None:
    rules = Rules(TINY_RULES, sizes=TINY_SIZES)
    assert all(tensor.layout.axes == frozenset() for tensor in rules.resolve(tiny(), "dp=2").tensors.values())
    assert notes(rules, tiny(), "dp=2")["blocks.0.mlp.up.weight"] == "replicated: the mesh has no tp"


def test_a_question_mark_splits_where_it_divides() -> None:
    rules = Rules({"0": "(kv head)"}, axes={"kv": "tp?"}, sizes={"head": 4})
    model = nn.Sequential(nn.Linear(4, 8))
    assert (texts(rules, model)["0.weight"], notes(rules, model)["0.weight"]) == (
        "(kv@tp head) in",
        "column-parallel (out dim)",
    )
    assert (texts(rules, model, "tp=4")["0.weight"], notes(rules, model, "tp=4")["0.weight"]) == (
        "(kv head) in",
        "replicated: does not divide",
    )


def test_uneven_dims_are_said() -> None:
    assert notes(Rules({"0": "colwise"}), nn.Sequential(nn.Linear(4, 65)))["0.weight"] == (
        "column-parallel (out dim); uneven"
    )


def test_sizes_are_looked_up_on_the_nearest_module_around() -> None:
    model = nn.ModuleDict({"a": on_meta(Tiny, 16, 4, 8), "b": on_meta(Tiny, 16, 2, 8)})
    rules = Rules({"attn.qkv": "(qkv heads@tp head)"}, sizes=TINY_SIZES, unmatched="replicate")
    tensors = rules.resolve(model, "tp=2").tensors
    assert tensors["a.blocks.0.attn.qkv.bias"].layout.text == "(qkv=3 heads=4@tp head=4)"
    assert tensors["b.blocks.0.attn.qkv.bias"].layout.text == "(qkv=3 heads=2@tp head=8)"


def test_a_module_registered_twice_may_be_named_either_way() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": shared})
    resolution = Rules({"second": "rowwise"}).resolve(model, "tp=2")
    assert resolution.tensors["first.weight"].tied == ("first.weight", "second.weight")
    assert resolution.tensors["first.weight"].layout.axes_of(1) == ("tp",)
    assert list(resolution.borders) == [("first", "output")]


def test_tied_parameters_take_the_layout_of_the_one_that_has_a_rule() -> None:
    rules = Rules({"head": "vocab@tp"}, unmatched="replicate")
    resolution = rules.resolve(tiny(), "tp=2")
    assert str(resolution.tensors["embed.weight"].layout) == "vocab@tp in"
    assert resolution.borders["embed", "output"].reason == "sum over tp of a row-parallel output"


def test_a_data_axis_stores_split_and_leaves_no_sum() -> None:
    resolution = Rules({"0": {"fsdp": Shard(1)}}).resolve(nn.Sequential(nn.Linear(4, 4)), "fsdp=2,tp=2")
    assert str(resolution.tensors["0.weight"].layout) == "out in@fsdp"
    assert resolution.tensors["0.weight"].note == "stored in shards (in dim)"
    assert resolution.borders["0", "output"].reason == "its gradient is reduced here"


def test_an_override_wins_over_rules_before_it() -> None:
    rules = Rules({"mlp.*": "colwise", "blocks.0.mlp.up": None, "norm": None}, override=("blocks.0.mlp.up",))
    found = texts(Rules({**rules.rules, "attn.*": None, "embed": None}, override=rules.override), tiny())
    assert (found["blocks.0.mlp.up.weight"], found["blocks.1.mlp.up.weight"]) == ("_ _", "out@tp in")


def test_rules_that_agree_are_no_conflict() -> None:
    rules = Rules({"mlp.up": "ff@tp", "blocks.0.mlp.up": "colwise"}, unmatched="replicate")
    assert rules.resolve(tiny(), "tp=2").tensors["blocks.0.mlp.up.weight"].rule == "mlp.up"


def test_optional_rules_may_match_nothing_and_unmatched_may_replicate() -> None:
    rules = Rules({"lm_head": "colwise"}, optional=("lm_head",), unmatched="replicate")
    resolution = rules.resolve(tiny(), "tp=2")
    assert resolution.unmatched_bytes == sum(p.numel() * 4 for p in tiny().parameters())
    assert notes(rules, tiny())["embed.weight"] == "replicated: unmatched"


def test_placements_per_mesh_axis() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    mesh = "dp=2,fsdp=2,tp=2"
    assert texts({"0": (Replicate(), Shard(0), Shard(0))}, model, mesh)["0.weight"] == "out@(fsdp,tp) in"
    assert texts({"0": [Shard(1)]}, model, mesh)["0.weight"] == "out in@tp"


def test_a_module_whose_name_is_output() -> None:
    model = nn.ModuleDict({"output": nn.Linear(4, 4), "mlp": nn.ModuleDict({"output": nn.Linear(4, 4)})})
    assert texts({"output": "colwise"}, model)["mlp.output.weight"] == "out@tp in"
    assert texts({"^output": "colwise", "mlp.output": "rowwise"}, model)["mlp.output.weight"] == "out in@tp"
    forced = Rules({"output": "colwise"}, activations={"mlp.output": "b e@tp"}).resolve(model, "tp=2")
    assert str(forced.borders["mlp", "output"].layout) == "b e@tp"


# Laws.

LINEAR = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])})
AXES = st.sampled_from(["", "@tp", "@fsdp", "@(fsdp,tp)", "@(tp,fsdp)"])
MESHES = st.sampled_from(["fsdp=2,tp=2", "tp=2,fsdp=2", "dp=2,fsdp=3,tp=4"])
PLAIN = st.sampled_from(["x", "(two x)", "(x two)", "(two x three)"])


@st.composite
def two_dims(draw: st.DrawFn) -> tuple[str, dict[str, str | tuple[str, ...]], dict[str, int]]:
    """A text of two dims without axes, and which axes split its factors."""
    first, second = draw(PLAIN), draw(PLAIN).replace("x", "y").replace("two", "four").replace("three", "one_more")
    axes = draw(st.permutations(["tp", "fsdp"])), draw(st.integers(0, 2))
    given_axes = axes[0][: axes[1]]
    names = draw(st.permutations(["x", "y"]))
    together = draw(st.booleans()) and len(given_axes) == 2
    uses = {names[0]: tuple(given_axes)} if together else dict(zip(names, given_axes, strict=False))
    sizes = {name: 2 for name in ("two", "three", "four", "one_more") if name in f"{first} {second}"}
    return f"{first} {second}", uses, sizes


def inline(text: str, uses: Mapping[str, Any]) -> str:
    for name, use in uses.items():
        axes = use if isinstance(use, str) else f"({','.join(use)})" if use else ""
        text = " ".join(
            part.replace(name, f"{name}@{axes}") if part.strip("()") == name and axes else part for part in text.split()
        )
    return text


@given(two_dims(), MESHES)
def test_axes_by_name_mean_the_same_as_axes_in_the_text(case: tuple, mesh: str) -> None:
    text, uses, sizes = case
    by_name = Rules({"a.0": text, "a.1": None}, axes=uses, sizes=sizes)
    in_text = Rules({"a.0": inline(text, uses), "a.1": None}, sizes=sizes)
    assert outcome(by_name, mesh) == outcome(in_text, mesh)


@given(two_dims(), MESHES)
def test_a_module_rule_is_its_parameter_rules(case: tuple, mesh: str) -> None:
    text, uses, sizes = case
    full = inline(text, uses)
    first = Layout(Layout.parse(full).dims[:1])
    by_module = Rules({"a.0": full, "a.1": None}, sizes=sizes)
    by_parameter = Rules({"a.0.weight": full, "a.0.bias": first, "a.1": None}, sizes=sizes)
    assert outcome(by_module, mesh) == outcome(by_parameter, mesh)


@given(st.permutations(["a.0", "a.*", "a.1.weight"]), MESHES)
def test_without_overrides_the_order_of_rules_does_not_matter(keys: list[str], mesh: str) -> None:
    values = {"a.0": "colwise", "a.*": Shard(0), "a.1.weight": "out@tp in"}
    assert outcome(Rules({key: values[key] for key in keys}), mesh) == outcome(Rules(values), mesh)


def test_rules_are_keys_of_a_dict_in_any_order():
    one = Rules({"a.0": "(heads@tp out) in", "a.1": Shard(1)}, sizes={"heads": 2})
    other = Rules({"a.1": Shard(1), "a.0": "(heads@tp out) in"}, sizes={"heads": 2})
    assert {one: "found"}[other] == "found" and hash(one) != hash(Rules({"a.0": "colwise"}))


@given(st.sampled_from([0, 1, -1, -2]), MESHES)
def test_a_placement_is_the_text_that_splits_that_dim(dim: int, mesh: str) -> None:
    text = "out@tp in" if dim % 2 == 0 else "out in@tp"
    assert outcome(Rules({"a.*": Shard(dim)}), mesh) == outcome(Rules({"a.*": text}), mesh)


def outcome(rules: Rules, mesh: str) -> Any:
    """Placements of every tensor, or that the rules were refused."""
    try:
        return placements(rules, LINEAR, mesh), {k: b.layout for k, b in rules.resolve(LINEAR, mesh).borders.items()}
    except RuleError:
        return "refused"


def test_the_laws_are_about_something() -> None:
    assert outcome(Rules({"a.*": "(two x@tp) y"}, sizes={"two": 2}), "tp=2,fsdp=2") != "refused"
