"""Rules for a plain model say how the adapters of peft lie in it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from shardlib.rules import Rules
from tests.rules.zoo import TINY_RULES, TINY_SIZES, Block, Tiny
from tests.torchvision_on_cpu import import_torchvision

import_torchvision()  # peft imports transformers, which imports it by the way
peft: Any = importlib.import_module("peft")

LAYERS = ["embed", "qkv", "attn.proj", "up", "down"]


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "target_modules": LAYERS, **options}))  # type: ignore[no-any-return]


def texts(rules: Rules, model: nn.Module) -> dict[str, tuple[str, str | None, str]]:
    found = rules.resolve(model, "dp=2,tp=2")
    return {t.name.removeprefix("base_model.model."): (t.layout.text, t.rule, t.note) for t in found.tensors.values()}


RULES = Rules(TINY_RULES, sizes=TINY_SIZES)
HEADS = "(qkv=3 heads=4@tp head=4)"
WHOLE, COLUMNS, ROWS = "replicated", "column-parallel (out dim)", "row-parallel (in dim)"


def test_factors_of_each_layer() -> None:
    found = texts(RULES, adapted(Tiny()))
    assert {name: row for name, row in found.items() if "lora" in name and "blocks.1" not in name} == {
        "embed.lora_embedding_A.default": ("_ _", "embed", WHOLE),
        "embed.lora_embedding_B.default": ("_ _", "embed", WHOLE),
        "blocks.0.attn.qkv.lora_A.default.weight": ("rank in", "attn.qkv", WHOLE),
        "blocks.0.attn.qkv.lora_B.default.weight": (f"{HEADS} rank", "attn.qkv", COLUMNS),
        "blocks.0.attn.proj.lora_A.default.weight": ("rank in@tp", "attn.proj", ROWS),
        "blocks.0.attn.proj.lora_B.default.weight": ("out rank", "attn.proj", WHOLE),
        "blocks.0.mlp.up.lora_A.default.weight": ("rank in", "mlp.up", WHOLE),
        "blocks.0.mlp.up.lora_B.default.weight": ("out@tp rank", "mlp.up", COLUMNS),
        "blocks.0.mlp.down.lora_A.default.weight": ("rank in@tp", "mlp.down", ROWS),
        "blocks.0.mlp.down.lora_B.default.weight": ("out rank", "mlp.down", WHOLE),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["norm", "proj"], "target_modules": ["up"]},
        {"lora_bias": True, "target_modules": ["up"]},
    ],
    ids=["lora", "dora", "copies", "bias"],
)
def test_a_model_with_adapters_lies_as_it_did_without(options: dict[str, Any]) -> None:
    """The same layout by the same rule, for each tensor of the plain model and for each copy that is trained of it."""
    plain = texts(RULES, Tiny())
    model = adapted(Tiny(), **options)
    found = texts(RULES, model)
    saved = options.get("modules_to_save", [])
    for name, row in plain.items():
        owner, _, attribute = name.rpartition(".")
        places = {name: (owner,), f"{owner}.base_layer.{attribute}": ()}
        if owner.split(".")[-1] in saved:
            places = {f"{owner}.{inner}.{attribute}": () for inner in ("original_module", "modules_to_save.default")}
            assert places.keys() <= found.keys()
        there = places.keys() & found.keys()
        assert there and all(found.pop(place) == row for place in there), name
    assert found and all(".lora_" in name for name in found)


def test_names_are_those_of_the_plain_model() -> None:
    """Where they begin at the root, name a parameter or are matched as a whole; and so are those of borders."""
    rules = Rules(
        {"^blocks.*.attn.qkv.weight": "out@tp in", r"re:blocks[.]\d[.]mlp[.]up": "colwise"},
        activations={"^blocks.*.mlp.up.output": "batch ff@tp"},
        unmatched="replicate",
    )
    found = rules.resolve(adapted(Tiny()), "tp=2")
    layouts = {name: tensor.layout.text for name, tensor in found.tensors.items() if "@tp" in tensor.layout.text}
    before = "base_model.model.blocks"
    assert layouts == {
        f"{before}.{block}.{rest}": layout
        for block in "01"
        for rest, layout in {
            "attn.qkv.base_layer.weight": "out@tp in",
            "attn.qkv.lora_B.default.weight": "out@tp rank",
            "mlp.up.base_layer.weight": "out@tp in",
            "mlp.up.base_layer.bias": "out@tp",
            "mlp.up.lora_B.default.weight": "out@tp rank",
        }.items()
    }
    assert found.tensors[f"{before}.0.attn.qkv.base_layer.bias"].rule is None
    assert [place for place, border in found.borders.items() if border.rule] == [
        (f"{before}.{block}.mlp.up", "output") for block in "01"
    ]


def test_several_adapters_of_one_layer() -> None:
    model = adapted(Block(16, 4), target_modules=["up"])
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["up", "proj"]))  # type: ignore[operator]
    rules = Rules({"mlp.up": "colwise", "attn.proj": "rowwise"}, unmatched="replicate")
    found = {name: text for name, (text, *_) in texts(rules, model).items() if "lora" in name}
    assert found == {
        "attn.proj.lora_A.second.weight": "rank in@tp",
        "attn.proj.lora_B.second.weight": "out rank",
        "mlp.up.lora_A.default.weight": "rank in",
        "mlp.up.lora_A.second.weight": "rank in",
        "mlp.up.lora_B.default.weight": "out@tp rank",
        "mlp.up.lora_B.second.weight": "out@tp rank",
    }


def test_a_rule_that_names_a_factor_comes_first() -> None:
    found = texts(Rules({**TINY_RULES, "up.lora_B.default": None}, sizes=TINY_SIZES), adapted(Tiny()))
    assert found["blocks.0.mlp.up.lora_B.default.weight"] == ("_ _", "up.lora_B.default", WHOLE)
    assert found["blocks.0.mlp.up.base_layer.weight"][0] == "out@tp in"
    assert found["blocks.0.attn.qkv.lora_B.default.weight"][0] == f"{HEADS} rank"


def test_a_layer_whose_rank_has_a_name_already() -> None:
    found = texts(Rules({"up": "rank@tp in"}, unmatched="replicate"), adapted(Block(16, 4), target_modules=["up"]))
    assert found["mlp.up.lora_B.default.weight"][0] == "rank@tp _"


def test_adapters_where_peft_did_not_wrap_the_model() -> None:
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up"]), Block(16, 4))
    found = texts(Rules({"^mlp.up": "colwise"}, unmatched="replicate"), model)
    assert {name: row[0] for name, row in found.items() if "up" in name} == {
        "mlp.up.base_layer.weight": "out@tp in",
        "mlp.up.base_layer.bias": "out@tp",
        "mlp.up.lora_A.default.weight": "rank in",
        "mlp.up.lora_B.default.weight": "out@tp rank",
    }


def test_an_embedding_of_which_peft_trains_some_rows() -> None:
    """Its layer lies as it did, and the rows that are trained are replicated."""
    plain = texts(RULES, Tiny())
    model = adapted(Tiny(), target_modules=["up"], trainable_token_indices={"embed": [1, 3]})
    found = texts(RULES, model)
    assert found["embed.token_adapter.base_layer.weight"] == plain["embed.weight"]
    assert found["embed.token_adapter.trainable_tokens_delta.default"] == ("_ _", "embed", WHOLE)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.up, self.experts.down = (nn.Parameter(torch.zeros(4, *size)) for size in ((6, 8), (8, 6)))


def test_factors_of_parameters_of_a_module_are_replicated() -> None:
    """peft wraps the module once for each of its parameters."""
    rules = Rules({"experts.up": "expert ff@tp embed", "experts.down": "expert embed ff@tp"})
    options: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.up", "experts.down"]}
    found = texts(rules, adapted(Mixed(), **options))
    assert found["experts.base_layer.base_layer.up"][:2] == ("expert ff@tp embed", "experts.up")
    factors = {name: layout for name, (layout, _, _) in found.items() if ".lora_" in name}
    assert len(factors) == 4 and set(factors.values()) == {"_ _"}
