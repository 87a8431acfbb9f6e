"""Layout maps of Keras, configurations of MaxText and specs of JAX mean what their libraries say, and go back."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import InputError, LayoutError, MeshError, RuleError

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it once
jax = pytest.importorskip("jax")
keras = pytest.importorskip("keras")
P = jax.sharding.PartitionSpec


def _shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _layout_map(keys: dict[str, tuple[Any, ...]]) -> Any:
    made = keras.distribution.LayoutMap(None)
    for key, axes in keys.items():
        made[key] = axes
    return made


def _keras_says(layout_map: Any, path: str) -> Any:
    """The spec of a path, None where Keras replicates, or "refused"."""
    try:
        layout = layout_map[path]
    except ValueError:
        return "refused"
    return None if layout is None else P(*layout.axes, *[None] * (2 - len(layout.axes)))


PATHS = ["a/up/kernel", "a/up/bias", "a/up_1/kernel", "b/up/kernel", "up/kernel", "a/upXkernel"]
KEYS = ["a/up/kernel", "up/kernel", ".*up/kernel", "a/up.kernel", "a/[^/]*/kernel", r"a\/up/bias", "b|up/kernel", "a.*"]
AXES = [("tp",), (None, "tp"), ("dp", "tp"), ()]


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(AXES), min_size=1, max_size=4))
def test_keys_of_a_layout_map_match_what_they_match_in_keras(keys: dict[str, tuple[Any, ...]]):
    layout_map = _layout_map(keys)
    rules = sl.Rules.from_keras_layout_map(layout_map, unmatched="replicate")
    for path in PATHS:
        said = _keras_says(layout_map, path)
        alone = {path: _shape(8, 8)}
        rules_here = sl.Rules(rules.rules, unmatched="replicate", optional=tuple(rules.rules))
        if said == "refused":
            matching = [key for key in keys if re.fullmatch(key, path)]
            if len({tuple(P(*keys[key], *[None] * 2)[:2]) for key in matching}) > 1:
                with pytest.raises(RuleError, match="two layouts"):
                    rules_here.to_partition_specs(alone, "dp=2,tp=2")
            continue
        assert rules_here.to_partition_specs(alone, "dp=2,tp=2")[path] == (said or P(None, None)), path


def test_a_key_of_a_former_keras_matches_a_part_of_a_path():
    class Searched(dict):  # as keras.distribution.LayoutMap of Keras 3.0 looked paths up
        def __init__(self, device_mesh: Any) -> None:
            super().__init__()

        def __getitem__(self, path: str) -> Any:
            return next((layout for key, layout in self.items() if key == path or re.search(key, path)), None)

        def __setitem__(self, key: str, axes: tuple[Any, ...]) -> None:
            super().__setitem__(key, keras.distribution.TensorLayout(axes))

    layout_map = Searched(None)
    layout_map["up/ker"] = (None, "tp")
    rules = sl.Rules.from_keras_layout_map(layout_map)
    assert rules.to_partition_specs({"a/up/kernel": _shape(4, 4)}, "tp=2") == {"a/up/kernel": P(None, "tp")}


def test_a_key_that_names_a_layer_lays_out_no_variable():
    """In a pattern of rules it would lay out the layer's kernel and bias."""
    rules = sl.Rules.from_keras_layout_map(_layout_map({".*up": (None, "tp")}))
    with pytest.raises(RuleError, match=r'Rule "tensor re:\.\*up": .* matches nothing in a tree of arrays, which has'):
        rules.to_partition_specs({"a/up/kernel": _shape(4, 4)}, "tp=2")
    assert rules.explain("a.up.kernel") == '"a.up.kernel"\n  no rule matches'


def test_what_a_layout_map_does_not_say_is_refused():
    tree = {"up/kernel": _shape(4, 6), "up/bias": _shape(6)}
    rules = sl.Rules.from_keras_layout_map(_layout_map({"up/kernel": (None, "model")}))
    with pytest.raises(RuleError, match=r'1 parameter \(24 B\) match no rule: "up\.bias" \(6,\)'):
        rules.to_partition_specs(tree, "model=2")
    whole = sl.Rules.from_keras_layout_map(_layout_map({"up/kernel": (None, "model")}), unmatched="replicate")
    with pytest.raises(InputError, match=r'"up\.kernel" of global shape \(4, 6\) .* uneven shards in dim 1'):
        whole.to_partition_specs(tree, "model=4")
    with pytest.raises(RuleError, match='axis "model" is used twice'):
        sl.Rules.from_keras_layout_map(_layout_map({"k": ("model", "model")}))
    with pytest.raises(RuleError, match=r'mesh axes "rows", of which no kind is known.* kinds={"rows": "data"}'):
        sl.Rules.from_keras_layout_map(_layout_map({"k": ("rows",)}))
    with pytest.raises(RuleError, match=r'Key "a\(" of the layout map is not a regular expression'):
        sl.Rules.from_keras_layout_map(_layout_map({"a(": ("model",)}))
    for nothing in (_layout_map({}), {"k": ("model",)}, 3):
        with pytest.raises(RuleError, match=r"give a keras\.distribution\.LayoutMap"):
            sl.Rules.from_keras_layout_map(nothing)


@pytest.fixture
def model() -> Any:
    layers = [keras.Input((4,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")]
    return keras.Sequential(layers, name="mlp")


def test_rules_become_a_layout_map_and_come_back(model: Any):
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "tp"), devices=keras.distribution.list_devices()[:1])
    rules = sl.Rules({"up": "colwise", "down": "rowwise"})
    layout_map = rules.to_keras_layout_map(model.variables, mesh)
    assert {variable.path: layout_map[variable.path].axes for variable in model.variables} == {
        "mlp/up/kernel": (None, "tp"),
        "mlp/up/bias": ("tp",),
        "mlp/down/kernel": ("tp", None),
        "mlp/down/bias": (None,),
    }
    tree = {variable.path: variable.value for variable in model.variables}
    back = sl.Rules.from_keras_layout_map(layout_map)
    assert back.to_partition_specs(tree, "tp=2") == rules.to_partition_specs(tree, "tp=2")
    assert keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    assert sl.MeshShape("batch=2,sequence=2,expert=2").data_axes == ("batch", "expert")  # known before any conversion


def test_what_a_layout_map_cannot_say_is_refused(model: Any):
    mesh = keras.distribution.DeviceMesh((1, 1), ("dp", "tp"), devices=keras.distribution.list_devices()[:1])
    rules = sl.Rules({"up.kernel": "in out@(dp,tp)"}, unmatched="replicate")
    with pytest.raises(RuleError, match=r'"mlp/up/kernel" with .*\(\'dp\', \'tp\'\) in one dim, .* has one axis'):
        rules.to_keras_layout_map(model.variables, mesh)
    with pytest.raises(InputError, match=r"A mesh of Keras was given as str 'tp=1'"):
        rules.to_keras_layout_map(model.variables, "tp=1")
    with pytest.raises(InputError, match="A variable of Keras was given as int"):
        rules.to_keras_layout_map([3], mesh)


# --- specs ----------------------------------------------------------------------------------------------------------

entries = st.lists(st.sampled_from([None, "dp", "tp", ("dp", "tp"), ("tp",)]), max_size=3).filter(
    lambda each: len(list(itertools.chain(*(e if isinstance(e, tuple) else (e,) for e in each if e)))) <= 2
)


@given(entries)
def test_specs_go_there_and_back(each: list[Any]):
    axes = list(itertools.chain(*(e if isinstance(e, tuple) else (e,) for e in each if e)))
    spec = P(*each)
    if len({*axes}) < len(axes):
        with pytest.raises(RuleError, match="is used twice"):
            sl.Rules.from_partition_specs({"w": spec})
        return
    tree = {"a": [{"w": _shape(8, 8, 8)}]}
    expected = P(*(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in each), *[None] * (3 - len(each)))
    for given_form in ({"w": spec}, {"a/0/w": spec}, {"a": [{"w": spec}]}, {"^a.*.w": tuple(each)}):
        made = sl.Rules.from_partition_specs(given_form).to_partition_specs(tree, "dp=2,tp=2")
        assert made == {"a": [{"w": expected}]}, given_form
    assert sl.Rules.from_partition_specs(made).to_partition_specs(tree, "dp=2,tp=2") == made


def test_trees_of_specs_of_flax_are_read():
    from flax import linen, nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
            self.up = nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))

    with jax.set_mesh(jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))):
        state = nnx.eval_shape(lambda: nnx.state(Model(), nnx.Param))
    rules = sl.Rules.from_partition_specs(nnx.get_partition_spec(state))
    assert rules == sl.Rules({"^up.kernel": "_ _@tp ..."})
    assert nnx.to_pure_dict(rules.to_partition_specs(state, "tp=2")) == {"up": {"kernel": P(None, "tp")}}

    dense = linen.Dense(8, kernel_init=linen.with_partitioning(linen.initializers.ones, (None, "tp")))
    variables = jax.eval_shape(dense.init, jax.random.key(0), _shape(1, 4))
    rules = sl.Rules.from_partition_specs(linen.get_partition_spec(variables))
    assert rules == sl.Rules({"^params.kernel": "_ _@tp ...", "^params.bias": "..."})


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ({"w": P(P.UNCONSTRAINED)}, r'"w" is \(UNCONSTRAINED,\), with UNCONSTRAINED for a dim; give None'),
        ({"w": P(unreduced={"tp"})}, "unreduced or reduced axes"),
        ({"w": {"v": 3}}, r'The spec of "w\.v" was given as int 3; give a PartitionSpec'),
        ({"w": "tp"}, r"The spec of \"w\" was given as str 'tp'"),
        ({"w": ("a b",)}, r'mesh axes "a b", of which no kind is known'),
        ({3: P()}, "A key of the specs was given as 3"),
        ({"a/b": P(), "a.b": P()}, r'Two keys of the specs make the name "a\.b"'),
        ({"w": P("never_seen")}, r'kinds={"never_seen": "data"}'),
    ],
)
def test_what_is_no_spec_is_refused(specs: Any, said: str):
    with pytest.raises(RuleError, match=said):
        sl.Rules.from_partition_specs(specs)


def test_kinds_are_registered_once():
    rules = sl.Rules.from_partition_specs({"w": P("rows_of_a_test")}, kinds={"rows_of_a_test": "data"})
    assert sl.MeshShape("rows_of_a_test=2").data_axes == ("rows_of_a_test",)
    assert rules.to_partition_specs({"w": _shape(2)}, "rows_of_a_test=2") == {"w": P("rows_of_a_test")}
    with pytest.raises(MeshError, match="already is a data axis"):
        sl.Rules.from_partition_specs({"w": P("rows_of_a_test")}, kinds={"rows_of_a_test": "model"})


def test_layouts_without_a_spec_are_refused():
    tree = {"w": _shape(6, 4)}
    with pytest.raises(LayoutError, match="sharded inside its outermost factor"):
        sl.Rules({"w": "(three heads@tp) embed"}, sizes={"three": 3}).to_partition_specs(tree, "tp=2")
    with pytest.raises(InputError, match="uneven shards in dim 0"):
        sl.Rules({"w": "out@tp in"}).to_partition_specs(tree, "tp=4")


def test_a_name_with_wildcards_is_taken_as_it_is():
    rules = sl.Rules.from_partition_specs({"a": {"w[0]": P("tp")}})
    tree = {"a": {"w[0]": _shape(4)}}
    assert rules.to_partition_specs(tree, "tp=2") == {"a": {"w[0]": P("tp")}}


# --- MaxText --------------------------------------------------------------------------------------------------------

BASE = """
mesh_axes: ['data', 'stage', 'fsdp', 'tensor']
logical_axis_rules: [
    ['mlp', ['fsdp', 'tensor']],
    ['embed', ['fsdp']],
    ['embed', ['tensor']],
    ['norm', ['tensor']],
    ['layers', 'stage'],
    ['lost', 'expert'],
]
"""


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "base.yml").write_text(BASE)
    (tmp_path / "models" / "small.yml").write_text("logical_axis_rules: [['norm', 'fsdp']]")
    (tmp_path / "models" / "whole.yml").write_text("base_config: base.yml\nlogical_axis_rules: [['embed', []]]")
    (tmp_path / "models" / "own.yml").write_text(
        "override_logical_axis_rules: True\nmesh_axes: ['fsdp']\nlogical_axis_rules: [['norm', 'fsdp']]"
    )
    (tmp_path / "empty.yml").write_text("base_emb_dim: 4")
    (tmp_path / "broken.yml").write_text("a: [")
    (tmp_path / "orphan.yml").write_text("base_config: missing.yml")
    return tmp_path


NAMES = {"wi": ("embed", "layers", "mlp"), "scale": ("norm",)}


def test_axes_that_the_mesh_lacks_are_left_out_after_the_pairs_are_applied(configs: Path):
    """`embed` gets tensor where `mlp` has no fsdp to give: mlp keeps both, though the mesh has no tensor."""
    rules = sl.Rules.from_maxtext(configs / "base.yml", NAMES, "fsdp=4")
    assert rules == sl.Rules({"^wi": "embed layers mlp@fsdp", "^scale": "norm"})
    rules = sl.Rules.from_maxtext(str(configs / "base.yml"), NAMES, "data=2,tensor=2")
    assert rules == sl.Rules({"^wi": "embed layers mlp@tensor", "^scale": "norm@tensor"})


def test_files_are_merged_as_maxtext_merges_them(configs: Path):
    def of(*files: str) -> Any:
        return sl.Rules.from_maxtext([configs / file for file in files], {"x": ("embed",), "n": ("norm",)}, "fsdp=2")

    assert of("base.yml", "models/small.yml") == sl.Rules({"^x": "embed@fsdp", "^n": "norm@fsdp"})
    assert of("models/whole.yml") == sl.Rules({"^x": "embed", "^n": "norm"})
    assert of("base.yml", "models/own.yml") == sl.Rules({"^x": "embed", "^n": "norm@fsdp"})


def test_an_axis_that_the_configuration_does_not_have_is_refused(configs: Path):
    with pytest.raises(RuleError, match=r'"lost" of "x" gets the axes "expert", and "expert" is not in the mesh_axes'):
        sl.Rules.from_maxtext(configs / "base.yml", {"x": ("lost",)}, "fsdp=2")
    with pytest.raises(RuleError, match=r'Mesh "tp=2" has the axes "tp", and the configuration has mesh_axes "data"'):
        sl.Rules.from_maxtext(configs / "base.yml", NAMES, "tp=2")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("empty.yml", "without logical_axis_rules"),
        ("broken.yml", "cannot be read as a configuration of MaxText"),
        ("missing.yml", "cannot be read as a configuration of MaxText"),
        ("orphan.yml", 'has base_config "missing.yml", which is not beside it'),
    ],
)
def test_a_file_without_rules_is_refused(configs: Path, file: str, said: str):
    with pytest.raises(RuleError, match=said):
        sl.Rules.from_maxtext(configs / file, NAMES, "fsdp=2")


def test_what_is_no_configuration_is_refused():
    with pytest.raises(RuleError, match="A configuration of MaxText was given as int 3"):
        sl.Rules.from_maxtext(3, NAMES, "fsdp=2")


# --- kernels of three dims ------------------------------------------------------------------------------------------


def _attention(query: tuple[int, ...], joined: tuple[int, ...]) -> Any:
    kernels = dict.fromkeys(("query", "key", "value"), query) | {"attention_output": joined}
    return {"attention": {name: {"kernel": _shape(*shape)} for name, shape in kernels.items()}}


def test_heads_are_split_where_flax_and_keras_have_them():
    rules = sl.Rules({"query": "colwise", "attention_output": "rowwise"}, unmatched="replicate")
    made = rules.to_partition_specs(_attention((6, 4, 2), (4, 2, 6)), "tp=2")["attention"]
    assert made["query"]["kernel"] == P(None, "tp", None)
    assert made["attention_output"]["kernel"] == P("tp", None, None)


def test_a_kernel_whose_dims_are_not_known_has_no_role():
    """KerasHub's Gemma has heads in front; a layer of einsum is no convolution."""
    rules = sl.Rules({"query": "colwise"}, unmatched="replicate")
    with pytest.raises(
        RuleError, match=r'module "attention\.query" \(a tree of arrays\), .* with their dims in a text'
    ):
        rules.to_partition_specs(_attention((4, 6, 2), (4, 2, 6)), "tp=2")
    with pytest.raises(RuleError, match="is not known"):
        sl.Rules({"project": "colwise"}).to_partition_specs({"project": {"kernel": _shape(6, 4, 2)}}, "tp=2")
    made = sl.Rules({"conv": "colwise"}).to_partition_specs({"conv": {"kernel": _shape(3, 4, 2)}}, "tp=2")
    assert made == {"conv": {"kernel": P(None, None, "tp")}}
