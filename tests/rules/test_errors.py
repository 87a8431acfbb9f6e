"""Nothing is silent: each unclear rule is refused, and its message is tested whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardlib.errors import RuleError
from shardlib.rules import Rules
from tests.rules.zoo import MLP, TINY_RULES, TINY_SIZES, Scale, Tiny, on_meta


def message(act: Callable[[], Any]) -> str:
    with pytest.raises(RuleError) as caught:
        act()
    return str(caught.value)


def refused(change: dict[Any, Any], mesh: str = "tp=2", **options: Any) -> str:
    """The message when one rule is added to those of `Tiny`, or changed."""
    rules = Rules({**TINY_RULES, **change}, **{"sizes": TINY_SIZES, **options})
    return message(lambda: rules.resolve(on_meta(Tiny), mesh))


def refused_for(module: nn.Module, value: Any, mesh: str = "tp=2") -> str:
    """The message when one module, called "m", is given one rule."""
    return message(lambda: Rules({"m": value}).resolve(nn.ModuleDict({"m": module}), mesh))


# Rules that say nothing.

MLP_HAS = 'MLP, which has "up.weight" (64, 16), "up.bias" (64,), "down.weight" (16, 64), "down.bias" (16,).'


@pytest.mark.parametrize(
    ("key", "end"),
    [
        ("dwn", ' Correct the pattern, remove the rule, or list it in optional=(...). Did you mean "down"?'),
        (
            "^up.wieght",
            ' Correct the pattern, remove the rule, or list it in optional=(...). Did you mean "up.weight"?',
        ),
        ("re:x", " Correct the pattern, remove the rule, or list it in optional=(...)."),
        (
            "dwn.output",
            " A key that ends in .input or .output names an activation of a module. Correct the pattern, remove the "
            'rule, or list it in optional=(...). Did you mean "down.output"?',
        ),
    ],
)
def test_a_rule_that_matches_nothing(key: str, end: str) -> None:
    rules = Rules({key: None}, unmatched="replicate")
    said = message(lambda: rules.resolve(on_meta(MLP, 16), "tp=2"))
    assert said == f'Rule "{key}": "replicate" matches nothing in {MLP_HAS}{end}'


def test_repeated_blocks_are_folded_and_long_lists_cut() -> None:
    assert refused({"blocks.*.atn.qkv": "colwise"}) == (
        'Rule "blocks.*.atn.qkv": "colwise" matches nothing in Tiny, which has "mask" (8, 8), "embed.weight" (32, '
        '16), "head.weight" (32, 16), "blocks.*.norm.weight" (16,) x2, "blocks.*.norm.bias" (16,) x2, '
        '"blocks.*.attn.qkv.weight" (48, 16) x2, "blocks.*.attn.qkv.bias" (48,) x2, "blocks.*.attn.proj.weight" (16, '
        '16) x2, "blocks.*.attn.proj.bias" (16,) x2, "blocks.*.mlp.up.weight" (64, 16) x2, "blocks.*.mlp.up.bias" '
        '(64,) x2, "blocks.*.mlp.down.weight" (16, 64) x2, and 1 more. Correct the pattern, remove the rule, or list '
        'it in optional=(...). Did you mean "blocks.*.attn.qkv"?'
    )


def test_a_module_without_parameters_of_its_own() -> None:
    assert refused({"blocks.*.mlp": "colwise"}) == (
        'Rule "blocks.*.mlp": "colwise" names module "blocks.0.mlp" (MLP), which has no parameters of its own; inside '
        'it are "blocks.0.mlp.up.weight" (64, 16), "blocks.0.mlp.up.bias" (64,), "blocks.0.mlp.down.weight" (16, 64), '
        '"blocks.0.mlp.down.bias" (16,). Name what is inside; "blocks.*.mlp.**" names all of it.'
    )


def test_the_root_has_no_parameters_of_its_own() -> None:
    assert message(lambda: Rules({"^": "colwise"}).resolve(nn.ModuleDict({"m": nn.Linear(2, 4)}), "tp=2")) == (
        'Rule "^": "colwise" names module "" (ModuleDict), which has no parameters of its own; inside it are '
        '"m.weight" (4, 2), "m.bias" (4,). Name what is inside; "^.**" names all of it.'
    )


def test_parameters_without_a_rule() -> None:
    rules = Rules({"embed": None, "attn.*": None, "mlp.down": None})
    assert message(lambda: rules.resolve(on_meta(Tiny), "tp=2")) == (
        '8 parameters (8.8 KiB) match no rule: "blocks.*.norm.weight" (16,) x2, "blocks.*.norm.bias" (16,) x2, '
        '"blocks.*.mlp.up.weight" (64, 16) x2, "blocks.*.mlp.up.bias" (64,) x2. Give each a rule ("replicate" keeps a '
        'full copy on every rank), or pass Rules(..., unmatched="replicate").'
    )


# Rules that disagree.


def test_two_rules_that_disagree() -> None:
    assert refused({"blocks.0.mlp.up": "rowwise"}) == (
        '"blocks.0.mlp.up.weight", global shape (64, 16), is given two layouts: rule "mlp.up": "colwise" gives "out@tp '
        'in"; rule "blocks.0.mlp.up": "rowwise" gives "out in@tp". Narrow one of the patterns, or let the later rule '
        'win with override=("blocks.0.mlp.up",).'
    )


@pytest.mark.parametrize("key", ["*", "**"])
def test_a_rule_for_all_beside_others(key: str) -> None:
    assert refused({key: None}).endswith(
        f'; rule "{key}": "replicate" gives "_ _". "{key}" matches every tensor: leave it out, and replicate what no '
        'rule matches by Rules(..., unmatched="replicate").'
    )


def test_a_rule_after_one_for_all_may_win() -> None:
    rules = Rules({"*": None, "mlp.up": "colwise"})
    assert message(lambda: rules.resolve(on_meta(Tiny), "tp=2")).endswith(
        'Narrow one of the patterns, or let the later rule win with override=("mlp.up",).'
    )


def test_a_split_inside_of_pieces_is_not_a_plain_split() -> None:
    assert refused({"attn.qkv.bias": "features@tp"}) == (
        '"blocks.0.attn.qkv.bias", global shape (48,), is given two layouts: rule "attn.qkv": "(qkv heads@tp head)" '
        'gives "(qkv heads@tp head)"; rule "attn.qkv.bias": "features@tp" gives "features@tp". Narrow one of the '
        'patterns, or let the later rule win with override=("attn.qkv.bias",).'
    )


def test_an_override_must_come_later() -> None:
    rules = Rules({"blocks.0.mlp.up": "rowwise", **TINY_RULES}, sizes=TINY_SIZES, override=("blocks.0.mlp.up",))
    assert message(lambda: rules.resolve(on_meta(Tiny), "tp=2")) == (
        '"blocks.0.mlp.up.weight", global shape (64, 16), is given two layouts: rule "blocks.0.mlp.up": "rowwise" '
        'gives "out in@tp"; rule "mlp.up": "colwise" gives "out@tp in". Narrow one of the patterns, or let the later '
        'rule win with override=("mlp.up",).'
    )


@pytest.mark.parametrize("override", [(), ("embed",)])
def test_tied_parameters_told_two_things(override: tuple[str, ...]) -> None:
    assert refused({"head": "rowwise"}, override=override) == (
        '"embed.weight" and "head.weight" are tied: one tensor, global shape (32, 16), given two layouts. For the '
        'first, rule "embed": "rowwise" gives "vocab@tp embed"; for the second, rule "head": "rowwise" gives "out '
        'in@tp". '
        "Give both the same layout, or give a rule to one of them only."
    )


def test_one_rule_may_not_tell_tied_parameters_two_things_even_as_an_override() -> None:
    rules = Rules({"re:(embed|head)": "rowwise"}, override=("re:(embed|head)",), unmatched="replicate")
    assert message(lambda: rules.resolve(on_meta(Tiny), "tp=2")) == (
        '"embed.weight" and "head.weight" are tied: one tensor, global shape (32, 16), given two layouts. For the '
        'first, rule "re:(embed|head)": "rowwise" gives "vocab@tp embed"; for the second, rule "re:(embed|head)": '
        '"rowwise" gives "out in@tp". Give both the same layout, or give a rule to one of them only.'
    )


def test_a_border_told_two_things() -> None:
    assert refused({"mlp.output": Shard(0), "blocks.0.mlp.output": Shard(1)}) == (
        'The output of module "blocks.0.mlp" is given two layouts: rule "mlp.output" gives "_@tp ..."; rule '
        '"blocks.0.mlp.output" gives "_ _@tp ...". Narrow one of the patterns, or let the later rule win with '
        'override=("blocks.0.mlp.output",).'
    )


@pytest.mark.parametrize(("value", "spelled"), [(Shard(1), "Shard(1)"), (None, '"replicate"')])
def test_a_key_that_can_be_read_two_ways(value: Any, spelled: str) -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"output": nn.Linear(4, 4)})})
    assert message(lambda: Rules({"mlp.output": value}).resolve(model, "tp=2")) == (
        f'Rule "mlp.output": {spelled} is ambiguous: it names the output of module "mlp", and also the module '
        f'"mlp.output". For the parameters name them, as in "mlp.output.weight"; for the activation put the rule into '
        "activations={...} instead."
    )


# Axes.


@pytest.mark.parametrize(
    ("change", "mesh", "options", "said"),
    [
        (
            {"mlp.up": "ff@tpp"},
            "tp=2",
            {},
            'Rule "mlp.up": "ff@tpp": axis "tpp" is neither on the mesh, which has "tp", nor declared by the rules, '
            'which have "tp". Correct the name; if a mesh may lack the axis, declare it, as in axes={"name of a dim": '
            '"tpp"}. Did you mean "tp"?',
        ),
        (
            {"mlp.up": {"ep": Shard(0)}, "mlp.down": "embed ff"},
            "dp=2,tp=2",
            {"axes": {"ff": "cp"}},
            'Rule "mlp.up": {"ep": Shard(0)}: axis "ep" is neither on the mesh, which has "dp", "tp", nor declared by '
            'the rules, which have "cp", "tp". Correct the name; if a mesh may lack the axis, declare it, as in '
            'axes={"name of a dim": "ep"}.',
        ),
        (
            {"mlp.output": "batch@dp seq embed"},
            "tp=2",
            {},
            'Rule "mlp.output": "batch@dp seq embed": axis "dp" is neither on the mesh, which has "tp", nor declared '
            'by the rules, which have "tp". Correct the name; if a mesh may lack the axis, declare it, as in '
            'axes={"name of a dim": "dp"}.',
        ),
        (
            {"mlp.up": "ff@pp"},
            "pp=2,tp=2",
            {},
            'Rule "mlp.up": "ff@pp": "pp" is a pipeline axis, which divides the list of modules, not a tensor. Use one '
            'of "tp".',
        ),
        (
            {"mlp.up": "ff embed@tp"},
            "tp=2",
            {"axes": {"ff": "tp"}},
            'Rule "mlp.up": "ff embed@tp", with the axes that the rule set gives its dims: Layout "ff@tp embed@tp": '
            'axis "tp" is used twice. Each axis shards one dim of a tensor or is reduced over, once; drop one of the '
            "two, or use another axis of the mesh.",
        ),
    ],
)
def test_axes(change: dict[str, Any], mesh: str, options: dict[str, Any], said: str) -> None:
    assert refused(change, mesh, **options) == said


# Layouts that do not fit.


@pytest.mark.parametrize(
    ("change", "mesh", "options", "said"),
    [
        (
            {"mlp.up": Shard(2)},
            "tp=2",
            {},
            'Rule "mlp.up": Shard(2): dim 2 is out of range for "blocks.0.mlp.up.weight", global shape (64, 16). Use '
            "a dim from -2 to 1, or name the dims in a text.",
        ),
        (
            {},
            "tp=8",
            {},
            'Rule "attn.qkv": "(qkv heads@tp head)", for "blocks.0.attn.qkv.weight": Layout "(qkv heads@tp head) in" '
            'for a tensor of global shape (48, 16) on mesh "tp=8": factor "heads" of size 4 does not divide over '
            'tp=8. Factors of a fused dim must divide: use axes whose sizes divide 4, or write "heads@tp?" to shard it '
            "only where it divides.",
        ),
        (
            {},
            "tp=2",
            {"sizes": {"qkv": 5, "heads": 4}},
            'Rule "attn.qkv": "(qkv heads@tp head)", for "blocks.0.attn.qkv.weight": Layout "(qkv heads@tp head) in" '
            'for a tensor of global shape (48, 16) on mesh "tp=2": dim 0 "qkv heads head" of size 48 is not a '
            'multiple of 5 x 4 = 20. Correct the sizes given, so that "head" can be inferred.',
        ),
        (
            {},
            "tp=2",
            {"sizes": {"qkv": 3, "heads": "config.n_head"}},
            'Rule "attn.qkv": "(qkv heads@tp head)": the size of "heads" is given as the attribute "config.n_head", '
            'which none of the modules around "blocks.0.attn.qkv" has (Linear, Attention, Block, ModuleList, Tiny). '
            "Name an attribute of one of them, or give the number.",
        ),
        (
            {},
            "tp=2",
            {"sizes": {"qkv": 3, "heads": "training"}},
            'Rule "attn.qkv": "(qkv heads@tp head)": the size of "heads" is given as the attribute "training", which '
            "on Linear is True. Name an attribute that is a positive int, or give the number.",
        ),
        (
            {"mlp.up": "a b@tp c"},
            "tp=2",
            {},
            'Rule "mlp.up": "a b@tp c": it names 3 dims, but for module "blocks.0.mlp.up" a text names its output '
            'features ("out") or all 2 dims of its weight, "out in". Write that, or name a parameter.',
        ),
        (
            {"mlp.up": "in out@tp"},
            "tp=2",
            {},
            'Rule "mlp.up": "in out@tp": it names the dims "in out", but the weight of module "blocks.0.mlp.up" is '
            'stored as "out in". Write them in that order.',
        ),
        (
            {"norm": "colwise"},
            "tp=2",
            {},
            'Rule "norm": "colwise" shards the output features of "blocks.0.norm", whose dims are weight "*lead '
            'embed", bias "*lead embed"; none of them is. Name a dim in a text, as in "dim@tp", or use "replicate".',
        ),
        (
            {"mlp.up": (Shard(0),) * 3},
            "dp=2,tp=2",
            {},
            'Rule "mlp.up": (Shard(0), Shard(0), Shard(0)) gives 3 placements, but mesh "dp=2,tp=2" has 2 axes, 1 of '
            "them model axes. Give one per axis, or {axis: placement}.",
        ),
        (
            {"mlp.output": "colwise"},
            "tp=2",
            {},
            'Rule "mlp.output": "colwise": "colwise" is a role of a module, but this key names an activation. Give the '
            'activation a layout as text, as in "batch seq embed@tp", or placements.',
        ),
        (
            {"mlp.output": {"dp": Shard(0), "tp": Shard(-1)}},
            "dp=2,tp=2",
            {},
            'Rule "mlp.output": {"dp": Shard(0), "tp": Shard(-1)}: these placements cannot be read for an activation '
            "whose number of dims is not known. Count all dims from the front or all from the back, or give its layout "
            'as text, as in "batch seq@tp embed".',
        ),
    ],
)
def test_fit(change: dict[str, Any], mesh: str, options: dict[str, Any], said: str) -> None:
    assert refused(change, mesh, **options) == said


@pytest.mark.parametrize(
    ("module", "value", "said"),
    [
        (
            Scale(),
            "colwise",
            'Rule "m": "colwise" names module "m" (Scale), and what the dims of its tensors mean is not known: '
            '"gain" (4, 8), "shift" (8,). Name the parameters in the rule instead, or tell once with '
            'shardlib.rules.register_dims(Scale, gain="... ...", shift="...").',
        ),
        (
            nn.Conv2d(4, 4, 3, groups=4),
            "rowwise",
            'Rule "m": "rowwise" shards the dim that is summed over of "m", whose dims are weight "out in_per_group '
            '*kernel", bias "out"; none of them is. Name a dim in a text, as in "dim@tp", or use "replicate".',
        ),
        (
            nn.Bilinear(4, 4, 3),
            "rowwise",
            'Rule "m": "rowwise" shards the dim that is summed over of "m", whose dims are weight "out in1 in2", bias '
            '"out"; several are: "in1" and "in2". Name a dim in a text, as in "dim@tp", or use "replicate".',
        ),
        (
            nn.LayerNorm((3, 4)),
            "a@tp",
            'Rule "m": "a@tp": it names 1 dim, but for module "m" a text names all 2 dims of its weight, "_ embed". '
            "Write that, or name a parameter.",
        ),
        (
            nn.MultiheadAttention(8, 2),
            Shard(0),
            'Rule "m": Shard(0): this dim of "m.in_proj_weight" is fused from "(qkv heads head)", and Shard(0) '
            'would not shard its factors alike. Use "colwise", or shard a factor in a text, as in "heads@tp".',
        ),
        (
            nn.Linear(8, 12),
            {"fsdp": Shard(0), "tp": _StridedShard(0, split_factor=3)},
            'Rule "m": {"fsdp": Shard(0), "tp": _StridedShard(0, split_factor=3)}: two axes on one dim of '
            '"m.weight", one '
            'of them strided, have no clear order. Write the layout as text, as in "(qkv heads@(fsdp,tp) head) embed".',
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules(module: nn.Module, value: Any, said: str) -> None:
    assert refused_for(module, value, "fsdp=2,tp=2") == said


def test_a_role_for_a_raw_parameter() -> None:
    rules = Rules({"gain": "colwise"}, unmatched="replicate")
    assert message(lambda: rules.resolve(nn.ModuleDict({"m": Scale()}), "tp=2")) == (
        'Rule "gain": "colwise" gives a role to "m.gain", global shape (4, 8), whose dims are not known. Name its '
        'dims in a text, as in "out@tp in", or give a placement such as Shard(0).'
    )


# What can be refused without a model.

WRITE = (
    'Write a layout as text ("vocab@tp embed"; one name alone is the output features of a module), one of "colwise", '
    '"rowwise", "replicate", a placement such as Shard(1), {axis: placement}, a Layout, or None to replicate.'
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "colwize",
            'Rule "up": "colwize" is not a role; there are "colwise", "rowwise", "replicate". Did you mean "colwise"? '
            'For a dim that is called "colwize" choose another name.',
        ),
        (
            "row",
            'Rule "up": "row" is not a role; there are "colwise", "rowwise", "replicate". Did you mean "rowwise"? '
            'For a dim that is called "row" choose another name.',
        ),
        (3, f'Rule "up": 3 is a int, which is not a layout. {WRITE}'),
        (
            Partial(),
            'Rule "up": Partial(sum) is not a placement that a tensor can be stored in. Give Shard(dim) or '
            "Replicate().",
        ),
        (
            {"tp": "x"},
            'Rule "up": "x" is not a placement that a tensor can be stored in. Give Shard(dim) or Replicate().',
        ),
        (
            "Shard()",
            'Rule "up": "Shard()" is not a placement. Write "Shard(0)", "Replicate()" or "_StridedShard(0, '
            'split_factor=3)".',
        ),
        (
            "ff@tp embed@tp",
            'Rule "up": Layout "ff@tp embed@tp": axis "tp" is used twice. Each axis shards one dim of a tensor or is '
            "reduced over, once; drop one of the two, or use another axis of the mesh.",
        ),
        (
            "a@tp b + sum@dp",
            'Rule "up": "a@tp b + sum@dp" says more than how the dims are sharded. Leave out what follows "+" or ":"; '
            "sums follow from the layouts, dtype and memory are given by transforms.",
        ),
    ],
    ids=str,
)
def test_values(value: Any, said: str) -> None:
    assert message(lambda: Rules({"up": value})) == said


@pytest.mark.parametrize(
    ("rules", "options", "said"),
    [
        (
            {"mlp.up": "colwise"},
            {"optional": ("mlp.dwn",)},
            'optional names "mlp.dwn", which is not a key of the rules; they have "mlp.up". Write the key as it stands '
            'in the rules. Did you mean "mlp.up"?',
        ),
        (
            {"up": "colwise"},
            {"override": "up"},
            "override was given as 'up'; give a list of texts, as in override=(\"lm_head\",).",
        ),
        ({}, {"unmatched": "ignore"}, 'unmatched is \'ignore\'; give "error" or "replicate".'),
        (
            {"up": "ff"},
            {"axes": {"ff": "t p"}},
            'axes gives dim "ff" the axis \'t p\', which is not an axis name. Give one, as in "tp" (or "tp?" to shard '
            'only where it divides), or several, as in ("fsdp", "tp").',
        ),
        (
            {"up": "ff"},
            {"axes": {"ff": 3}},
            'axes gives dim "ff" 3; give an axis, as in "tp", or several, as in ("fsdp", "tp").',
        ),
        (
            {"up": "(two heads)"},
            {"axes": {"head": "tp"}},
            'axes names "head", which no layout of these rules mentions; they mention "two", "heads". Correct the '
            'name, or leave it out. Did you mean "heads"?',
        ),
        (
            {"up": "ff"},
            {"sizes": {"fff": 2}},
            'sizes names "fff", which no layout of these rules mentions; they mention "ff". Correct the name, or '
            'leave it out. Did you mean "ff"?',
        ),
        (
            {"up": "ff"},
            {"sizes": {"ff": 0}},
            'sizes gives "ff" the size 0. Give a positive number, or the path of an attribute of the model, as in '
            '"config.n_head".',
        ),
        (
            {},
            {"activations": {"mlp.up": "a b"}},
            'Rule "mlp.up": "a b" is in activations and does not name the input or output of a module. End the key in '
            '".input" or ".output", or move the rule to the parameters.',
        ),
        (
            {"a.output": "a b"},
            {"activations": {"a.output": "a b"}},
            'Rule "a.output" stands in rules and in activations. Keep one of them.',
        ),
        (
            ["a"],
            {},
            'rules was given as list [\'a\']; give a mapping with text as keys, as in Rules({"mlp.up": "colwise"}).',
        ),
    ],
)
def test_options(rules: Any, options: dict[str, Any], said: str) -> None:
    assert message(lambda: Rules(rules, **options)) == said
