"""LoRA by peft: adapters train to the numbers of one device under every plugin, and are saved for plain peft."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardlib as sl
from shardlib.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardlib.errors import CheckpointError, PlanError, RuleError, ShardingError
from shardlib.testing import assert_equivalent
from tests.families.transformer_models import build, text

peft: Any = importlib.import_module("peft")  # after transformers, which needs torchvision to have been imported so


# peft 0.21 asks transformers 5 by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
LAYERS = {
    LLAMA: ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    GPT2: ["c_attn", "c_proj", "c_fc"],
}
TOLERANCE = 1e-10


def config(model: str, **options: Any) -> Any:
    """Adapters whose second factor is not zero, so that both have gradients from the first step on."""
    kinds = {"target_modules": LAYERS[model], "fan_in_fan_out": model == GPT2, "init_lora_weights": False}
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **kinds, **options})


def adapted(model: str = LLAMA, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(build(model, "sdpa"), config(model, **options))


class Adapted:
    """A function that travels to ranks."""

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options

    def __call__(self) -> nn.Module:
        return adapted(self.model, **self.options)


def batch(step: int) -> Any:
    return text(step, use_cache=False)


def adamw(params: Any) -> torch.optim.Optimizer:
    # The gradient of a key's bias is zero in exact arithmetic; see `tests/families/test_transformers.py`.
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2, eps=1e-5)


def prove(model: Adapted, mesh: str, *transforms: Any, **options: Any) -> None:
    assert_equivalent(model, batch, mesh, transforms=transforms, optimizer=adamw, **{"steps": 2, **options})


STAGES = {"": (), "zero(1)": (sl.zero(1),), "zero(2)": (sl.zero(2),), "zero(3)": (sl.zero(3),), "fsdp": (sl.fsdp(),)}


@pytest.mark.covering
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", LAYERS)
def test_frozen_weights_and_adapters_on_data_ranks(model, stage):
    prove(Adapted(model), "dp=2", *STAGES[stage])


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "stage"), [("tp=2", ""), ("dp=2,tp=2", "zero(2)"), ("dp=2,tp=2", "zero(3)")])
@pytest.mark.parametrize("model", LAYERS)
def test_adapters_lie_as_their_layers_do(model, mesh, stage):
    prove(Adapted(model), mesh, *STAGES[stage])


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "stage"), [("dp=2,tp=2", "zero(2)"), ("dp=2", "zero(3)")])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        {"lora_dropout": 0.3, "modules_to_save": ["input_layernorm"]},
        {"use_rslora": True, "rank_pattern": {"o_proj": 3}},
        {"use_dora": True},
    ],
    ids=["one", "embeddings", "dropout and a norm", "rslora", "dora"],
)
def test_adapters_of_other_kinds(options, mesh, stage):
    prove(Adapted(LLAMA, **options), mesh, *STAGES[stage])


# --- rules ----------------------------------------------------------------------------------------------------------


def test_the_rules_of_a_layer_say_how_its_adapters_lie():
    rows = [row for row in sl.plan(adapted(), "tp=2").rows if "layers.0." in row.name and "lora" in row.name]
    assert {row.name.split("layers.0.")[1]: str(row.stored) for row in rows} == {
        "self_attn.q_proj.lora_A.default.weight": "rank in",
        "self_attn.q_proj.lora_B.default.weight": "(heads@tp head) rank",
        "self_attn.v_proj.lora_A.default.weight": "rank in",
        "self_attn.v_proj.lora_B.default.weight": "(kv_heads@tp head) rank",
        "self_attn.o_proj.lora_A.default.weight": "rank in@tp",
        "self_attn.o_proj.lora_B.default.weight": "out rank",
        "mlp.up_proj.lora_A.default.weight": "rank in",
        "mlp.up_proj.lora_B.default.weight": "ff@tp rank",
        "mlp.down_proj.lora_A.default.weight": "rank in@tp",
        "mlp.down_proj.lora_B.default.weight": "out rank",
    }


def test_no_rules_are_suggested_for_a_model_with_adapters():
    with pytest.raises(RuleError, match="before adapters are added"):
        sl.layouts.for_model(peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"])))


# --- boosted --------------------------------------------------------------------------------------------------------

PLUGINS: dict[str, Any] = {
    "ddp": lambda: TorchDDPPlugin(),
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", cpu_offload=True),
    "fsdp": lambda: TorchFSDPPlugin(),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "hybrid": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "hybrid, zero 3": lambda: HybridParallelPlugin(tp_size=2, zero_stage=3, precision="fp32"),
}
SIZE = {"hybrid, zero 3": 4}
STEPS = 4


def loss_of(model: nn.Module, step: int, index: int = 0, count: int = 1) -> torch.Tensor:
    ids = text(step)[1]["input_ids"].chunk(count)[index]
    return model(input_ids=ids).logits.sin().mean()


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in sl.full_state_dict(model).items() if "lora" in name}
    assert len(state) == 2 * len(LAYERS[LLAMA]) * 2
    return state


def alone() -> dict[str, torch.Tensor]:
    model = adapted().double()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return adapters(model)


def run(name: str, folder: str, first: int, last: int) -> dict[str, torch.Tensor]:
    """Steps of a boosted run, which goes on from what another has saved unless it begins; it leaves its own."""
    booster = Booster(plugin=PLUGINS[name]())
    assert booster.plugin.support_lora()
    torch.manual_seed(0)
    plain = build(LLAMA, "sdpa")
    if first:
        plain = plain.double()  # adapters are loaded in its dtype
        with pytest.raises(PlanError, match=r"lora_config with r=5, and the adapters in .* have 4"):
            booster.enable_lora(plain, f"{folder}/adapter", config(LLAMA, r=5))
        said = config(LLAMA, target_modules=set(LAYERS[LLAMA]))  # a LoRA configuration beside the folder says the same
        model = booster.enable_lora(plain, f"{folder}/adapter", said)
    else:
        model = booster.enable_lora(plain, lora_config=config(LLAMA))
    model = model.double()
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    if first:
        booster.load_optimizer(optimizer, f"{folder}/optimizer")
    shape = sl.get_plan(model).mesh
    place = shape.data_place(shape.coordinate(dist.get_rank()))
    for step in range(first, last):
        optimizer.zero_grad()
        booster.backward(loss_of(model, step, *place), optimizer)
        optimizer.step()
    booster.save_lora_as_pretrained(model, f"{folder}/adapter", use_safetensors=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    return adapters(model)


def assert_close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


PAIRS = [("ddp", "zero 2"), ("zero 1", "hybrid"), ("fsdp", "gemini"), ("hybrid, zero 3", "ddp")]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_one_plugin_goes_on_with_the_adapters_of_another_and_peft_loads_them(ranks, tmp_path, first, second):
    folder, want = str(tmp_path), alone()
    ranks(SIZE.get(first, 2)).run(run, first, folder, 0, 2)
    found = ranks(SIZE.get(second, 2)).run(run, second, folder, 2, STEPS)[0]
    assert_close(found, want)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(
        build(LLAMA, "sdpa").double(), f"{folder}/adapter", autocast_adapter_dtype=False
    )
    assert_close(adapters(loaded), want)
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and not any("bin" in name for name in files)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "optimizer"}  # nothing is left beside
    assert all(
        value.is_contiguous() for value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()
    )


def _in_stages(folder: str) -> None:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2, precision="fp32"))
    torch.manual_seed(0)
    model = booster.enable_lora(build(LLAMA, "sdpa"), lora_config=config(LLAMA)).double()
    model, optimizer, criterion, *_ = booster.boost(
        model, adamw(model.parameters()), lambda out, _: out.logits.sin().mean()
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = iter([{"input_ids": text(step)[1]["input_ids"]}])
        booster.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()
    booster.save_lora_as_pretrained(model, f"{folder}/adapter")


def test_stages_train_adapters_and_all_of_them_are_saved(ranks, tmp_path):
    ranks(4).run(_in_stages, str(tmp_path))
    plain = build(LLAMA, "sdpa").double()
    assert_close(
        adapters(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", autocast_adapter_dtype=False)), alone()
    )


def _lazily() -> list[str]:
    plugin, states = LowLevelZeroPlugin(stage=2, precision="fp32"), []
    for context in (nullcontext(), LazyInitContext()):
        torch.manual_seed(0)
        booster = Booster(plugin=plugin)
        with context:
            model = booster.enable_lora(build(LLAMA, "sdpa"), lora_config=config(LLAMA, init_lora_weights=True))
        states.append(sl.full_state_dict(booster.boost(model)[0]))
    eager, lazy = states
    return [name for name in eager if not torch.equal(eager[name], lazy[name])]


def test_adapters_of_a_model_built_without_memory_begin_as_they_would(ranks):
    assert ranks(2).run(_lazily) == [[], []]


def _in_few_bits(folder: str) -> None:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, zero_stage=2, precision="bf16"))
    model = booster.enable_lora(build(LLAMA, "sdpa"), lora_config=config(LLAMA))
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    before = loss_of(model, 0)
    booster.backward(before, optimizer)
    optimizer.step()
    assert loss_of(model, 0) < before
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    state = optimizer.state_dict()["state"]
    assert len(state) == 20 and all("lora" in name and "master_parameter" in held for name, held in state.items())
    booster.save_lora_as_pretrained(model, f"{folder}/adapter")


def test_adapters_have_a_copy_in_more_bits_and_frozen_weights_have_none(ranks, tmp_path):
    ranks(2).run(_in_few_bits, str(tmp_path))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 20 and all(value.dtype is torch.bfloat16 for value in saved.values())


def _refusals(folder: str) -> None:
    booster, lora = Booster(plugin=TorchDDPPlugin()), config(LLAMA)
    with pytest.raises(PlanError, match="quantize"):
        booster.enable_lora(build(LLAMA), lora_config=lora, quantize=True)
    with pytest.raises(PlanError, match="neither"):
        booster.enable_lora(build(LLAMA))
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        booster.enable_lora(build(LLAMA), folder, lora)
    with pytest.raises(PlanError, match=r"give a peft\.LoraConfig"):
        booster.enable_lora(build(LLAMA), lora_config={"r": 4})
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        booster.enable_lora(build(LLAMA), pretrained_dir=folder)
    with torch.device("meta"):
        empty = build(LLAMA)
    with pytest.raises(ShardingError, match="meta device"):
        booster.enable_lora(empty, lora_config=lora)
    model = build(LLAMA)
    booster.boost(model)
    with pytest.raises(ShardingError, match="before boost"):
        booster.enable_lora(model, lora_config=lora)
    with pytest.raises(ShardingError, match="no adapters"):
        booster.save_lora_as_pretrained(model, folder)
    model = booster.boost(booster.enable_lora(build(LLAMA), lora_config=lora))[0]
    if dist.get_rank() == 0:
        with open(f"{folder}/taken", "w") as file:
            file.write("here")
    dist.barrier()
    with pytest.raises(CheckpointError, match="taken"):
        booster.save_lora_as_pretrained(model, f"{folder}/taken")


def test_what_has_no_meaning_is_refused_on_every_rank(ranks, tmp_path):
    ranks(2).run(_refusals, str(tmp_path))
