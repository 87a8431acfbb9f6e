"""The file form: a round trip that loses nothing, and errors that name file and line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardlib.errors import RuleError
from shardlib.layout import Layout
from shardlib.rules import Rules

FOLDER = Path(__file__).parents[2] / "layouts"
PLACEMENTS = st.one_of(
    st.integers(-3, 3).map(Shard),
    st.just(Replicate()),
    st.builds(_StridedShard, st.integers(0, 2), split_factor=st.integers(2, 4)),
)
TEXTS = st.sampled_from(["vocab@tp embed", "(qkv heads@(fsdp,tp) head) embed", "... ff@tp?", "heads", "(two=2 ff) _"])
VALUES = st.one_of(
    TEXTS,
    TEXTS.map(Layout.parse),
    st.sampled_from(["colwise", "rowwise", "replicate", None, "Shard(1)"]),
    PLACEMENTS,
    st.dictionaries(st.sampled_from(["tp", "fsdp", "ep"]), PLACEMENTS, min_size=1),
    st.lists(PLACEMENTS, min_size=1, max_size=3).map(tuple),
)
# Any text without dots, globs and brackets is a segment; TOML must keep the odd ones too.
SEGMENTS = st.text(st.characters(exclude_characters=".*?[]^", exclude_categories=["Cs"]), min_size=1, max_size=6)
KEYS = st.lists(SEGMENTS | st.sampled_from(["*", "attn", "w[13]"]), min_size=1, max_size=3).map(".".join)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def rule_sets(draw: st.DrawFn) -> Rules:
    rules: dict[str, Any] = draw(
        st.dictionaries(KEYS.filter(lambda key: not key.startswith("re:")), VALUES, max_size=4)
    )
    rules["always"] = "heads vocab (a b)"
    activations = draw(st.dictionaries(KEYS.map(lambda key: f"^{key}.output"), VALUES, max_size=2))
    used = st.lists(st.sampled_from([*rules, *activations]), max_size=2)
    names = st.sampled_from(["heads", "vocab", "a", "b"])
    axes = st.sampled_from(["tp", "tp?", ("fsdp", "tp"), ["fsdp"], None, ()])
    return Rules(
        rules,
        activations=activations,
        axes=draw(st.dictionaries(names, axes)),
        sizes=draw(st.dictionaries(names, st.integers(1, 9) | st.sampled_from(["n_head", "config.n_head"]))),
        unmatched=draw(st.sampled_from(["error", "replicate"])),
        optional=draw(used),
        override=draw(used),
        axis=draw(st.sampled_from(["tp", "model"])),
        description=draw(WORDS),
        models=draw(st.lists(WORDS, max_size=2)),
        notes=draw(st.dictionaries(st.sampled_from([*rules]), WORDS, max_size=2)),
    )


@given(rule_sets())
def test_reading_what_was_written_gives_the_same_rules(rules: Rules) -> None:
    text = rules.to_toml()
    again, parsed = Rules.from_toml(text), tomllib.loads(text)
    assert again == rules
    assert list(again.rules) == list(parsed["params"]) == list(rules.rules)
    assert parsed.get("description", "") == rules.description


def test_texts_that_toml_wants_escaped() -> None:
    rules = Rules({"a\x7f": None, 'b"\\': None, "é😀": None}, description="\x00\x1f\x7f\n\t", notes={"é😀": "\x7f\x00"})
    assert Rules.from_toml(rules.to_toml()) == rules


def test_what_is_written() -> None:
    rules = Rules(
        {
            "embed": "vocab",
            "attn.qkv": "(qkv heads head)",
            "mlp": {"tp": Shard(0), "fsdp": Shard(1)},
            "up": (Replicate(), Shard(0)),
        },
        activations={"blocks.*.output": Shard(1)},
        axes={"vocab": ("fsdp", "tp"), "heads": "tp"},
        sizes={"qkv": 3, "heads": "n_head"},
        unmatched="replicate",
        optional=["up"],
        description='All "forms"',
        models=["gpt.GPT"],
        notes={"embed": "guess: a table"},
    )
    assert rules.to_toml() == (
        'description = "All \\"forms\\""\nmodels = ["gpt.GPT"]\nunmatched = "replicate"\noptional = '
        '["up"]\n\n[axes]\nvocab = ["fsdp", "tp"]\nheads = "tp"\n\n[sizes]\nqkv = 3\nheads = "n_head"\n\n[params]\n# '
        'guess: a table\nembed = "vocab"\n"attn.qkv" = "(qkv heads head)"\nmlp = { tp = "Shard(0)", fsdp = "Shard(1)" '
        '}\nup = ["Replicate()", "Shard(0)"]\n\n[activations]\n"blocks.*.output" = "Shard(1)"\n'
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_layout_file_keeps_its_meaning_when_rewritten(path: Path) -> None:
    rules = Rules.from_toml(path)
    assert Rules.from_toml(rules.to_toml()) == rules
    assert rules.description
    assert rules.models or path.stem == "unet"  # which is found by the modules of a model alone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'a = "1"\n[params]\n"x" = colwise\n',
            '{file}, line 3: this is not valid TOML: Invalid value. The line is `"x" = colwise`. Texts stand in '
            'double quotes, and so do keys with dots, as in "attn.qkv" = "(qkv heads@tp head)".',
        ),
        (
            "[params",
            "{file}, line 1: this is not valid TOML: Expected ']' at the end of a table declaration. The line is "
            '`[params`. Texts stand in double quotes, and so do keys with dots, as in "attn.qkv" = "(qkv heads@tp '
            'head)".',
        ),
        (
            '[parms]\nx = "colwise"',
            '{file}: "parms" is not a key of a layout file, which may have "description", "models", "axis", "stages", '
            '"unmatched", "optional", "override", "axes", "sizes", "params", "activations", "modes". Correct it, or '
            'move it into [params] if it is a pattern. Did you mean "params"?',
        ),
        ('models = "GPT"', "{file}: \"models\" is 'GPT'; write a list of texts."),
        ('params = "x"', "{file}: \"params\" is 'x'; write a section, [params]."),
        (
            '[params]\nup = "colwize"',
            '{file}: Rule "up": "colwize" is not a role; there are "colwise", "rowwise", "replicate". Did you mean '
            '"colwise"? For a dim that is called "colwize" choose another name.',
        ),
        (
            'optional = ["dwon"]\n[params]\ndown = "rowwise"',
            '{file}: optional names "dwon", which is not a key of the rules; they have "down". Write the key as it '
            'stands in the rules. Did you mean "down"?',
        ),
    ],
)
def test_errors_name_the_file(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    for source in (file, str(file)):
        with pytest.raises(RuleError) as caught:
            Rules.from_toml(source)
        assert str(caught.value) == said.replace("{file}", str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as caught:
        Rules.from_toml(tmp_path / "none.toml")
    assert str(caught.value) == (
        f'Rules cannot be read from "{tmp_path / "none.toml"}": No such file or directory. Give the path of a TOML '
        "file."
    )


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_bytes('description = "é"'.encode("latin-1"))
    with pytest.raises(RuleError) as caught:
        Rules.from_toml(tmp_path / "old.toml")
    assert str(caught.value) == (
        f'"{tmp_path / "old.toml"}" is not UTF-8 text, as TOML must be. Save it in that encoding.'
    )
