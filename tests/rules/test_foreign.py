"""Rules read from plans that others wrote."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardlib.errors import RuleError
from shardlib.rules import Rules
from shardlib.rules.foreign import _REFUSED, _STYLES
from tests.families.transformer_models import small
from tests.rules.zoo import MLP, Scale, on_meta


def carrying(plan: dict[str, str], **modules: nn.Module) -> nn.Module:
    model = nn.ModuleDict(modules)
    model._tp_plan = plan
    return model


def layouts_of(model: nn.Module, mesh: str = "tp=2") -> dict[str, str]:
    return {name: str(t.layout) for name, t in Rules.from_tp_plan(model).resolve(model, mesh).tensors.items()}


def borders_of(rules: Rules, model: nn.Module) -> dict[tuple[str, str], str]:
    asked = rules.resolve(model, "tp=2").borders.items()
    return {key: str(border.layout) for key, border in asked if border.rule is not None}


def test_llama() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(small("LlamaForCausalLM"))
    found = layouts_of(model)
    assert {re.sub(r"layers\.\d+", "layers.*", name): layout for name, layout in found.items()} == {
        "model.embed_tokens.weight": "vocab@tp embed",
        "model.layers.*.self_attn.q_proj.weight": "(heads@tp head_dim) in",
        "model.layers.*.self_attn.k_proj.weight": "(heads@tp head_dim) in",
        "model.layers.*.self_attn.v_proj.weight": "(heads@tp head_dim) in",
        "model.layers.*.self_attn.o_proj.weight": "out in@tp",
        "model.layers.*.mlp.gate_proj.weight": "out@tp in",
        "model.layers.*.mlp.up_proj.weight": "out@tp in",
        "model.layers.*.mlp.down_proj.weight": "out in@tp",
        "model.layers.*.input_layernorm.weight": "_",
        "model.layers.*.post_attention_layernorm.weight": "_",
        "model.norm.weight": "_",
        "model.rotary_emb.inv_freq": "_",
        "model.rotary_emb.original_inv_freq": "_",
        "lm_head.weight": "out@tp in",
    }
    assert borders_of(Rules.from_tp_plan(model), model) == {("lm_head", "output"): "..."}


def test_key_and_value_heads_fewer_than_ranks_are_replicated() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(small("LlamaForCausalLM"))
    tensors = Rules.from_tp_plan(model).resolve(model, "tp=4").tensors
    assert str(tensors["model.layers.0.self_attn.q_proj.weight"].layout) == "(heads@tp head_dim) in"
    assert str(tensors["model.layers.0.self_attn.k_proj.weight"].layout) == "(heads head_dim) in"


def test_a_base_model_reads_the_plan_of_its_config() -> None:
    model = nn.ModuleDict({"mlp": MLP(8)})
    model.config = SimpleNamespace(base_model_tp_plan={"mlp.up": "colwise"})
    assert layouts_of(model)["mlp.up.weight"] == "out@tp in"
    outer = nn.ModuleDict({"model": model})
    outer.config, outer.base_model_prefix = model.config, "model"
    assert layouts_of(outer)["model.mlp.up.weight"] == "out@tp in"


class Attention(nn.Module):
    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(8, 8)


STYLES: list[tuple[str, nn.Module, str, dict[str, str], dict[tuple[str, str], str]]] = [
    ("colwise", nn.Linear(8, 8), "m", {"m.weight": "out@tp in", "m.bias": "out@tp"}, {}),
    ("colwise", Attention(), "m.k_proj", {"m.k_proj.weight": "(heads@tp head_dim) in"}, {}),
    ("colwise", Scale(), "m.gain", {"m.gain": "_@tp _"}, {}),
    ("colwise", Scale(), "m.shift", {"m.shift": "_@tp"}, {}),
    ("colwise_gather_output", nn.Linear(8, 8), "m", {"m.weight": "out@tp in"}, {("m", "output"): "..."}),
    ("colwise_rep", nn.Linear(8, 8), "m", {"m.weight": "out@tp in"}, {("m", "output"): "..."}),
    ("rowwise", nn.Linear(8, 8), "m", {"m.weight": "out in@tp", "m.bias": "out"}, {}),
    ("rowwise_split_input", nn.Linear(8, 8), "m", {"m.weight": "out in@tp"}, {}),
    ("rowwise", Scale(), "m.gain", {"m.gain": "_ _@tp"}, {}),
    ("embedding_rowwise", nn.Embedding(8, 8), "m", {"m.weight": "vocab@tp embed"}, {}),
    ("embedding_colwise", nn.Embedding(8, 8), "m", {"m.weight": "vocab embed@tp"}, {("m", "output"): "..."}),
    (
        "packed_colwise",
        nn.Linear(8, 8),
        "m",
        {"m.weight": "(packed features@tp) in", "m.bias": "(packed features@tp)"},
        {},
    ),
    ("packed_colwise", Scale(), "m.gain", {"m.gain": "(packed features@tp) _"}, {}),
    ("packed_rowwise", Scale(), "m.gain", {"m.gain": "_ (packed features@tp)"}, {}),
    ("packed_rowwise", Scale(), "m.shift", {"m.shift": "_"}, {}),
    ("grouped_gemm", Scale(), "m.gain", {"m.gain": "_@tp _"}, {}),
    ("replicate", nn.Linear(8, 8), "m", {"m.weight": "_ _"}, {}),
    ("replicate", nn.LayerNorm(8, elementwise_affine=False), "m", {}, {}),
    ("replicated_with_grad_allreduce", nn.LayerNorm(8), "m", {"m.weight": "_"}, {}),
    ("mla_kv_a_proj", nn.Linear(8, 8), "m", {"m.weight": "_ _"}, {}),
    ("all_reduce", nn.Linear(8, 8), "m", {"m.weight": "_ _"}, {("m", "output"): "..."}),
    ("moe_tp_experts", Scale(), "m", {"m.gain": "_ _"}, {("m", "output"): "..."}),
    ("ep_dispatch_experts", Scale(), "m", {"m.gain": "_ _"}, {("m", "output"): "..."}),
    ("moe_identity_expert", nn.Identity(), "m", {}, {}),
    ("local_params", Scale(), "m", {"m.gain": "_ _"}, {}),
    (
        "sequence_parallel",
        nn.LayerNorm(8),
        "m",
        {"m.weight": "_"},
        {("m", "input"): "_ _@tp ...", ("m", "output"): "_ _@tp ..."},
    ),
]


class PackedColwiseParallel:
    """diffusers' style of that name."""

    def __init__(self, blocks: list[int] | None = None) -> None:
        self.blocks = blocks


class PackedRowwiseParallel(PackedColwiseParallel):
    pass


def with_blocks(blocks: list[int]) -> nn.Linear:
    linear = nn.Linear(32, 32)
    linear._tp_packed_row_blocks = blocks
    return linear


BLOCKS: list[tuple[Any, nn.Module, dict[str, str]]] = [
    (PackedColwiseParallel([1, 1]), nn.Linear(8, 32), {"m.weight": "(parts2 features@tp) in"}),
    (
        PackedColwiseParallel([8, 8, 8, 16, 16]),
        nn.Linear(8, 56),
        {"m.weight": "(parts7 features@tp) in", "m.bias": "(parts7 features@tp)"},
    ),
    (PackedRowwiseParallel(), with_blocks([8, 24]), {"m.weight": "_ (parts4 features@tp)", "m.bias": "_"}),
    (PackedRowwiseParallel([5]), nn.Linear(8, 8), {"m.weight": "out in@tp", "m.bias": "out"}),
]


@pytest.mark.parametrize(("style", "module", "layouts"), BLOCKS)
def test_blocks_of_diffusers_are_split_each_for_itself(style: Any, module: nn.Module, layouts: dict[str, str]) -> None:
    model = carrying({"m": style}, m=module)
    tensors = Rules.from_tp_plan(model).resolve(model, "tp=2").tensors
    assert {name: str(tensors[name].layout) for name in layouts} == layouts


# Of what a module gives, or of who computes it, but not of how its parameters lie.
NO_RULE = {"all_reduce", "moe_tp_experts", "ep_dispatch_experts", "local_params"}


@pytest.mark.parametrize(("style", "module", "key", "layouts", "borders"), STYLES, ids=lambda each: str(each)[:24])
def test_styles(style: str, module: nn.Module, key: str, layouts: dict, borders: dict) -> None:
    model = carrying({key: style}, m=module)
    tensors = Rules.from_tp_plan(model).resolve(model, "tp=2").tensors
    assert {name: str(tensors[name].layout) for name in layouts} == layouts
    assert all((tensors[name].rule is None) is (style in NO_RULE) for name in layouts)
    assert borders_of(Rules.from_tp_plan(model), model) == borders


def test_every_style_that_transformers_plans_use_is_known() -> None:
    folder = Path(transformers.__file__).parent / "models"
    used = set()
    for file in folder.glob("*/configuration_*.py"):
        for plan in re.findall(r"base_model_[te]p_plan = \{(.*?)\}", file.read_text(), re.DOTALL):
            used |= set(re.findall(r'": "(\w+)"', plan))
    assert len(used) > 8
    assert used <= {*_STYLES, *_REFUSED}


def test_an_entry_that_matches_nothing_becomes_optional() -> None:
    rules = Rules.from_tp_plan(carrying({"m": "colwise", "dense.*.up": "colwise"}, m=nn.Linear(8, 8)))
    assert rules.optional == ("^dense.*.up",)
    assert rules.notes["^dense.*.up"] == 'tp_plan: "colwise"; nothing in this model is called so'


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {},
            "ModuleDict carries no tp_plan (looked at _tp_plan and config.base_model_tp_plan). Write rules for it, "
            "load a layout file, or let shardlib.rules.suggest(model) propose some.",
        ),
        (
            {"m": "ep_router"},
            'tp_plan gives "m" the style "ep_router", which rewrites the router\'s choice of experts per rank and is '
            "not a layout. Write rules for this model instead.",
        ),
        (
            {"m": "colwize"},
            'tp_plan gives "m" the style "colwize", which is not known; known are '
            + ", ".join(f'"{style}"' for style in _STYLES)
            + '. Write rules for this model instead. Did you mean "colwise"?',
        ),
    ],
)
def test_plans_that_cannot_be_read(plan: dict[str, str], said: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rules.from_tp_plan(carrying(plan, m=nn.Linear(8, 8)))
    assert str(caught.value) == said


# torch.


def test_a_parallelize_plan() -> None:
    plan = {
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }
    rules = Rules.from_parallelize_plan(plan)
    block = nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
    model = nn.ModuleDict({"embed": nn.Embedding(8, 8), "blocks": nn.ModuleList([block]), "head": nn.Linear(8, 8)})
    found = {name: str(t.layout) for name, t in rules.resolve(model, "tp=2").tensors.items()}
    assert found == {
        "embed.weight": "vocab@tp embed",
        "blocks.0.norm.weight": "_",
        "blocks.0.norm.bias": "_",
        "blocks.0.up.weight": "out@tp in",
        "blocks.0.up.bias": "out@tp",
        "blocks.0.down.weight": "out in@tp",
        "blocks.0.down.bias": "out",
        "head.weight": "out@tp in",
        "head.bias": "out@tp",
    }
    assert borders_of(rules, model) == {
        ("", "output"): "...",
        ("blocks.0", "input"): "...",
        ("blocks.0.norm", "input"): "_ _@tp ...",
        ("blocks.0.norm", "output"): "_ _@tp ...",
        ("blocks.0.up", "input"): "...",
        ("blocks.0.down", "output"): "_ _@tp ...",
        ("head", "output"): "...",
    }


def test_a_plan_for_another_axis() -> None:
    rules = Rules.from_parallelize_plan({"up": ColwiseParallel()}, axis="model")
    assert str(rules.resolve(on_meta(MLP, 8), "model=2").tensors["up.weight"].layout) == "out@model in"


BOTH = PrepareModuleInputOutput(
    input_layouts=(Shard(1),),
    desired_input_layouts=(Replicate(),),
    output_layouts=Replicate(),
    desired_output_layouts=Shard(1),
)


def test_input_and_output_in_one() -> None:
    assert Rules.from_parallelize_plan({"a": BOTH}).activations.keys() == {"^a.input", "^a.output"}


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (
            "colwise",
            'The plan gives "a" \'colwise\'; known are torch\'s own "ColwiseParallel", "RowwiseParallel", '
            '"SequenceParallel", "PrepareModuleInputOutput", "PrepareModuleInput", "PrepareModuleOutput". Write a '
            "rule for it instead.",
        ),
        (
            PrepareModuleInput(
                input_layouts=(Shard(1), Shard(0)), desired_input_layouts=(Replicate(), Shard(0)), use_local_output=True
            ),
            'The plan wants the inputs of "a" as Replicate(), Shard(dim=0); the input and the output of a module have '
            "one layout each, replicated or sharded. Give layouts to the modules that these tensors come from or go to "
            "instead.",
        ),
        (
            ColwiseParallel(output_layouts=Partial()),
            'The plan wants the outputs of "a" as Partial(sum); the input and the output of a module have one layout '
            "each, replicated or sharded. Give layouts to the modules that these tensors come from or go to instead.",
        ),
    ],
    ids=["no style", "two layouts", "partial"],
)
def test_plans_of_torch_that_cannot_be_read(style: Any, said: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rules.from_parallelize_plan({"a": style})
    assert str(caught.value) == said
