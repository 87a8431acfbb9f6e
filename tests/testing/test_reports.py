"""What `docs/reports.md` says of reports on other libraries: each is done here again, small, and has a test."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.booster import Booster, GeminiPlugin, LazyInitContext, LowLevelZeroPlugin, TorchDDPPlugin
from shardlib.errors import PlanError, ShardingError
from shardlib.testing import assert_equivalent, shared_pool
from shardlib.testing.at_scale import at_scale
from shardlib.testing.models import Numbers
from tests.engine.mixture import Experts, Mixture
from tests.engine.mixture import Model as Mixtures
from tests.engine.whole import whole
from tests.families.transformer_models import build
from tests.house.source import ROOT
from tests.integrations.trained import fine_tunes

PAGE = ROOT / "docs" / "reports.md"
REPORTS: set[str] = set()  # that have a test

# Meshes and transforms of the kinds of sharding that the page names.
KINDS: dict[str, tuple[str, Any]] = {
    "replicate": ("dp=2", sl.replicate()),
    "zero(1)": ("dp=2", sl.zero(1)),
    "zero(2)": ("dp=2", sl.zero(2)),
    "zero(3)": ("dp=2", sl.zero(3)),
    "fsdp": ("fsdp=2", sl.fsdp()),
    "tp": ("tp=2", sl.replicate()),
    "hsdp": ("dp=2,fsdp=2", sl.hsdp(shard="fsdp", replicate="dp")),
}
DATA = ("replicate", "zero(1)", "zero(2)", "zero(3)", "fsdp")
RULES = sl.Rules({"up": "colwise", "down": "rowwise"}, unmatched="replicate")
EXPERTS = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")
BATCH = Numbers((8, 6, 8))


def about(*reports: str) -> Callable[[Any], Any]:
    """Mark a test as that of reports, which the page has to list."""
    REPORTS.update(reports)
    return lambda test: test


def rules_for(mesh: str) -> sl.Rules | dict[str, None]:
    return RULES if "tp" in mesh else {"**": None}


class Block(nn.Module):
    def __init__(self, embed: int = 16, ff: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(embed), nn.Linear(embed, ff), nn.Linear(ff, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def one_device(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def sharded(kind: str, make: Callable[[], nn.Module] = Net) -> nn.Module:
    mesh, transform = KINDS[kind]
    return sl.shard_model(one_device(make), mesh, rules_for(mesh), transforms=transform)


def part(batch: torch.Tensor, kind: str) -> torch.Tensor:
    """This rank's rows of a batch of two data ranks, or of one."""
    return batch if kind == "tp" else batch.chunk(2)[dist.get_rank()]


def differs(model: nn.Module, expected: nn.Module) -> float:
    """The largest difference between a sharded model's tensors and one device's, on any rank."""
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.state_dict().items())


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    return shared_pool(2).run(function, *args)


# --- ops and recomputation --------------------------------------------------------------------------------------------


class TopK(Block):
    """Takes the largest along the dim that is split, and along one that is not, and trains through both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        largest, where = h.topk(5, -1)
        kept = torch.zeros_like(h).scatter(-1, where, largest)
        return x + self.down(kept + h.topk(2, 1).values.sum(1, keepdim=True))


@about("pytorch/pytorch#178582", "pytorch/torchtitan#2801")
def test_topk_of_an_activation_goes_back():
    assert_equivalent(lambda: Net(TopK), BATCH, "tp=2", RULES, steps=1)


class Leaky(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.down(self.up(self.norm(x)).relu()))


@about("pytorch/pytorch#193671")
def test_noise_of_a_recomputed_activation_is_drawn():
    recomputed = sl.checkpoint_activations()
    assert_equivalent(lambda: Net(Leaky), BATCH, "tp=2", RULES, transforms=recomputed, rng="fast", steps=1)


# --- attention over a split sequence ----------------------------------------------------------------------------------


def _token_ids(step: int) -> dict[str, Any]:
    ids = torch.randint(67, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@about("huggingface/diffusers#14265", "huggingface/accelerate#4177")
@pytest.mark.parametrize("mode", ["sequence", "ulysses", "ring", "gather"])
def test_windows_of_attention_over_a_split_sequence(mode: str):
    def make() -> nn.Module:
        return build("MistralForCausalLM", "sdpa", sliding_window=5)

    assert_equivalent(make, _token_ids, "tp=2", sl.layouts.load("llama", mode=mode), steps=1)


def _weighted_tokens(mode: str) -> float:
    ids, weights = _token_ids(0)["input_ids"], Numbers((2, 12))(1)
    one = one_device(lambda: build("LlamaForCausalLM"))
    model = one_device(lambda: build("LlamaForCausalLM"))
    model = sl.shard_model(model, "tp=2", sl.layouts.load("llama", mode=mode))
    for each in (model, one):
        logits = each(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        (losses * weights[:, 1:].flatten()).mean().backward()
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max(float((whole(p.grad) - q.grad).abs().max()) for p, q in pairs)


@about("modelscope/ms-swift#10035")
def test_weights_of_tokens_beside_a_split_sequence():
    assert max(on_ranks(_weighted_tokens, "ulysses")) < 1e-12


# --- experts ----------------------------------------------------------------------------------------------------------


@about("huggingface/transformers#48687")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_router_of_experts_on_other_ranks(implementation: str):
    def make() -> nn.Module:
        model = build("MixtralForCausalLM")
        model.set_experts_implementation(implementation)
        return model

    assert_equivalent(make, _token_ids, "ep=2", steps=1)


def _decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.3)


@about("huggingface/transformers#48205", "NVIDIA-NeMo/Automodel#2995")
def test_experts_that_nobody_asks_decay_and_the_router_trains():
    def make() -> nn.Module:
        return Mixtures(favourites=(0, 1))

    assert_equivalent(make, Numbers((8, 3, 4)), "ep=2", EXPERTS, optimizer=_decaying, transforms=sl.zero(1))


@about("NVIDIA/Megatron-LM#6660", "NVIDIA/Megatron-LM#6470")
def test_passes_of_experts_that_no_rank_shares():
    given: dict[str, Any] = {"accumulate": 3, "clip": 0.1, "steps": 1, "transforms": sl.fsdp()}
    assert_equivalent(Mixtures, Numbers((6, 3, 4)), "fsdp=1,ep=2", EXPERTS, **given)


def _saves_experts(folder: str) -> tuple[float, list[int]]:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 8), Mixture(), Mixture())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Mixture(), Mixture())
    model = sl.shard_model(model, "fsdp=2,ep=2", EXPERTS, transforms=sl.fsdp())
    sl.save(folder, model)
    alone = nn.Sequential(nn.Linear(4, 8), Mixture(), Mixture())
    sl.load(folder, alone)
    return differs(alone, one), [len(module.up) for module in alone.modules() if isinstance(module, Experts)]


@about("modelscope/twinkle#116")
def test_a_checkpoint_has_the_experts_of_all_ranks(tmp_path: Path):
    for difference, experts in shared_pool(4).run(_saves_experts, str(tmp_path / "run")):
        assert difference == 0 and min(experts) > 1


class Balanced(Block):
    """Counts the tokens of each expert, and prefers experts that had few, by a bias that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 8), nn.Parameter(torch.randn(8, 16) / 4)
        self.register_buffer("bias", torch.zeros(8))
        self.register_buffer("counts", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        with torch.no_grad():
            self.counts.add_(nn.functional.one_hot(chosen, 8).sum((0, 1, 2)))
        return x + torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen)) @ self.experts

    @torch.no_grad()
    def balance(self, *, over_ranks: bool) -> None:
        counts = self.counts.clone()
        if over_ranks:
            dist.all_reduce(counts)
        self.bias.add_((counts.mean() - counts).sign(), alpha=0.01)
        self.counts.zero_()


def _balances(kind: str) -> float:
    model, one = sharded(kind, lambda: Net(Balanced)), one_device(lambda: Net(Balanced))
    for each in (model, one):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        ranks = each is model and kind != "tp"
        for step in range(2):
            for index in (0, 1):
                batch = BATCH(2 * step + index)
                (each(part(batch, kind) if ranks else batch).square().mean() / 2).backward()
            for module in each.modules():
                if isinstance(module, Balanced):
                    module.balance(over_ranks=ranks)
            optimizer.step()
            optimizer.zero_grad()
    return differs(model, one)


@about("pytorch/torchtitan#3686")
@pytest.mark.parametrize("kind", ["zero(3)", "tp"])
def test_a_bias_of_experts_that_counts_move(kind: str):
    assert max(on_ranks(_balances, kind)) < 1e-12


# --- data ranks -------------------------------------------------------------------------------------------------------


@about("verl-project/verl#7493")
def test_shards_over_an_axis_of_one_rank_are_reduced_over_the_other():
    transforms = (at_scale, sl.hsdp(shard="fsdp", replicate="dp"))
    assert_equivalent(Net, BATCH, "dp=2,fsdp=1", {"**": None}, transforms=transforms, accumulate=2, steps=1)


@about("NVIDIA/Megatron-LM#3693", "ByteDance-Seed/VeOmni#862")
def test_gradients_and_their_norm_over_replicas_of_shards():
    given: dict[str, Any] = {"transforms": (at_scale, KINDS["hsdp"][1]), "accumulate": 2, "clip": 0.1, "steps": 1}
    assert_equivalent(Net, BATCH, "dp=2,fsdp=2", {"**": None}, **given)


PLUGINS: dict[str, Callable[[], Any]] = {
    "replicate": TorchDDPPlugin,
    "zero(2)": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "zero(3)": lambda: GeminiPlugin(precision="fp32"),
}


def _trains_what_is_inside(plugin: str) -> float:
    one, inner = one_device().float(), one_device().float()
    for model in (inner, one):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = BATCH(0).float()
        if model is one:
            model(rows).square().mean().backward()
        else:
            booster = Booster(plugin=PLUGINS[plugin]())
            boosted, optimizer, *_ = booster.boost(model, optimizer)
            booster.backward(boosted.unwrap()(part(rows, "dp")).square().mean(), optimizer)
        optimizer.step()
    return differs(inner, one)


@about("jingyaogong/minimind#853")
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_model_inside_of_a_boosted_one_trains(plugin: str):
    assert max(on_ranks(_trains_what_is_inside, plugin)) < 1e-6


def _clips_what_is_infinite(kind: str) -> list[str]:
    found = []
    for clip in (sl.clip_grad_norm_, nn.utils.clip_grad_norm_):
        model = sharded(kind)
        rows = part(BATCH(0), kind).clone()
        if kind == "tp" or dist.get_rank() == 1:
            rows[0, 0, 0] = float("inf")
        model(rows).square().mean().backward()
        with pytest.raises((RuntimeError, ShardingError)) as raised:
            clip(list(model.parameters()), 1.0, error_if_nonfinite=True)
        found.append(str(raised.value)[:36])
    return found


@about("Lightning-AI/pytorch-lightning#21928")
@pytest.mark.parametrize("kind", ["replicate", "zero(1)", "zero(3)", "fsdp", "tp"])
def test_a_norm_that_is_not_finite_on_one_rank_raises_on_all(kind: str):
    ours, torchs = "The norm of order 2 of all gradients", "The total norm of order 2.0 for grad"
    assert on_ranks(_clips_what_is_infinite, kind) == [[ours, torchs]] * 2


# --- optimizers -------------------------------------------------------------------------------------------------------


def _matrices() -> nn.Module:
    model = Net()
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    return model


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.requires_grad], lr=1e-2)


@about("deepspeedai/DeepSpeed#8090", "deepspeedai/DeepSpeed#8600")
@pytest.mark.parametrize("kind", ["zero(1)", "zero(2)", "zero(3)"])
def test_muon_takes_the_mean_of_whole_matrices_once_a_step(kind: str):
    mesh, transform = KINDS[kind]
    given: dict[str, Any] = {"transforms": (at_scale, transform), "optimizer": _muon, "accumulate": 2}
    assert_equivalent(_matrices, BATCH, mesh, {"**": None}, **given)


def _overflows(kind: str) -> tuple[float, float]:
    model, one = sharded(kind, _matrices), one_device(_matrices)
    scales = []
    for each in (model, one):
        optimizer, scaler = _muon(each.parameters()), torch.amp.GradScaler("cpu")
        for step in range(3):
            batch = BATCH(step)
            batch[-1, 0, 0] = float("inf") if step == 0 else 1.0  # of the last data rank
            rows = part(batch, kind) if each is model else batch
            scaler.scale(each(rows).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return differs(model, one), scales[0] / scales[1]


@about("deepspeedai/DeepSpeed#8432")
@pytest.mark.parametrize("kind", ["zero(2)", "zero(3)", "tp"])
def test_muon_forgets_a_step_that_overflowed(kind: str):
    for difference, scale in on_ranks(_overflows, kind):
        assert difference < 1e-10 and scale == 1


def _matrices_of(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.ndim >= 2]


def _chooses(kind: str) -> tuple[list[str], list[str]]:
    mesh, transform = KINDS[kind]
    with LazyInitContext():
        model = Net()
    return _matrices_of(model), _matrices_of(sl.shard_model(model, mesh, rules_for(mesh), transforms=transform))


@about("deepspeedai/DeepSpeed#8438")
@pytest.mark.parametrize("kind", ["zero(3)", "tp"])
def test_matrices_of_a_model_without_memory_are_matrices(kind: str):
    assert on_ranks(_chooses, kind) == [(_matrices_of(Net()),) * 2] * 2


# --- checkpoints and first values -------------------------------------------------------------------------------------


def _saves_and_loads(kind: str, folder: str) -> float:
    model, one = sharded(kind), one_device()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, one)]
    for step in range(3):
        for each, optimizer in zip((model, one), optimizers, strict=True):
            rows = part(BATCH(step), kind) if each is model else BATCH(step)
            each(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sl.save(f"{folder}/{step}", model, optimizers[0])
        sl.load(f"{folder}/0", model, optimizers[0])
        sl.load(f"{folder}/{step}", model, optimizers[0])
    return differs(model, one)


@about("huggingface/accelerate#3896")
@pytest.mark.parametrize("kind", ["zero(1)", "fsdp"])
def test_what_was_just_saved_is_loaded_and_training_goes_on(kind: str, tmp_path: Path):
    assert max(on_ranks(_saves_and_loads, kind, str(tmp_path))) < 1e-12


def _weights_of_the_first_rank(kind: str) -> str:
    mesh, transform = KINDS[kind]
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Net()
    with pytest.raises(ShardingError) as raised:
        sl.shard_model(model, mesh, rules_for(mesh), transforms=transform)
    return str(raised.value)


@about("axolotl-ai-cloud/axolotl#3476")
@pytest.mark.parametrize("kind", ["replicate", "zero(3)", "tp"])
def test_weights_on_the_first_rank_alone_are_refused(kind: str):
    for message in on_ranks(_weights_of_the_first_rank, kind):
        assert "  rank 0: 22\n  rank 1: 0\nNo rank sends its values to the others." in message


def _receives(kind: str) -> float:
    model, source = sharded(kind, lambda: Net(Balanced)), one_device(lambda: Net(Balanced))
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(1.0)
    state = source.state_dict() if dist.get_rank() == 0 else {}
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(model, state, options=options)
    return differs(model, source)


@about("axolotl-ai-cloud/axolotl#3446")
@pytest.mark.parametrize("kind", ["zero(3)", "tp"])
def test_buffers_travel_with_the_weights_of_the_first_rank(kind: str):
    assert on_ranks(_receives, kind) == [0, 0]


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapted(model: str = "LlamaForCausalLM", **options: Any) -> nn.Module:
    peft: Any = importlib.import_module("peft")
    made = build(model)
    if model == "MixtralForCausalLM":
        made.set_experts_implementation("eager")
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **options})
    return peft.get_peft_model(made, config)  # type: ignore[no-any-return]


@about("modelscope/mcore-bridge#173")
def test_adapters_of_layers_over_a_split_sequence():
    def make() -> nn.Module:
        return _adapted(target_modules="all-linear")

    assert_equivalent(make, _token_ids, "tp=2", sl.layouts.load("llama", mode="sequence"), steps=1)


def _experts_with_adapters() -> nn.Module:
    return _adapted("MixtralForCausalLM", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


@about("huggingface/peft#3080")
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_adapters_of_experts(mesh: str):
    assert_equivalent(_experts_with_adapters, _token_ids, mesh, steps=1)


def _refused_adapters(mesh: str, transform: Any) -> str:
    with pytest.raises((PlanError, ShardingError)) as raised:
        model = sl.shard_model(_experts_with_adapters(), mesh, transforms=transform)
        model(**_token_ids(dist.get_rank()))
    return str(raised.value)


@pytest.mark.parametrize(
    ("mesh", "transform", "expected"),
    [
        ("dp=2", sl.zero(3), "is stored in shards and was written to while its unit"),
        ("ep=2", sl.replicate(), "and peft adapts it by target_parameters"),
    ],
    ids=str,
)
def test_adapters_of_experts_that_no_rank_has_are_refused(mesh: str, transform: Any, expected: str):
    for message in on_ranks(_refused_adapters, mesh, transform):
        assert expected in message


@about("huggingface/peft#2946")
@pytest.mark.parametrize(("mesh", "transform"), [("dp=2", sl.zero(3)), ("tp=2", sl.replicate())], ids=str)
def test_rows_of_an_embedding_that_are_trained(mesh: str, transform: Any):
    def make() -> nn.Module:
        return _adapted(trainable_token_indices={"embed_tokens": [1, 5, 66]})

    assert_equivalent(make, _token_ids, mesh, transforms=transform, steps=1)


def _casts(kind: str) -> str:
    mesh, transform = KINDS[kind]
    weight = sl.shard_model(Net(), mesh, rules_for(mesh), transforms=transform).blocks[0].up.weight
    try:
        weight.data = weight.data.double()
    except ShardingError as error:
        return str(error)[:20]
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return f"{weight.dtype} {local.dtype}"


@about("huggingface/peft#3614")
@pytest.mark.parametrize("kind", ["replicate", "zero(1)", "zero(3)", "tp"])
def test_data_of_another_dtype(kind: str):
    refused = kind in ("zero(3)", "tp")
    assert on_ranks(_casts, kind) == ["data of global shape" if refused else "torch.float64 torch.float64"] * 2


def _adapts_afterwards(kind: str) -> str:
    peft: Any = importlib.import_module("peft")
    model = sharded(kind)
    with pytest.raises(ShardingError) as raised:
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["up"]), model)
        model(part(BATCH(0), kind))
    return str(raised.value)


@about("huggingface/transformers#48873")
@pytest.mark.parametrize("kind", ["replicate", "zero(3)", "tp"])
def test_an_adapter_of_a_sharded_layer_is_refused(kind: str):
    for message in on_ranks(_adapts_afterwards, kind):
        assert "is part of a model that shard_model has sharded" in message and "before shard_model" in message


def _thaws(kind: str) -> float:
    mesh, transform = KINDS[kind]
    torch.manual_seed(0)
    one = _adapted().double()
    torch.manual_seed(0)
    model = sl.shard_model(_adapted().double(), mesh, transforms=transform)
    ids = _token_ids(0)["input_ids"]
    for each in (model, one):
        for name, param in each.named_parameters():
            if "down_proj" in name or "norm" in name:
                param.requires_grad_(True)
        optimizer = torch.optim.SGD([param for param in each.parameters() if param.requires_grad], lr=0.1)
        rows = part(ids, kind) if each is model else ids
        each(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
    return differs(model, one)


@about("axolotl-ai-cloud/axolotl#3977")
@pytest.mark.parametrize("kind", ["zero(3)", "tp"])
def test_weights_that_are_thawed_beside_adapters_train_on_all_ranks(kind: str):
    assert max(on_ranks(_thaws, kind)) < 1e-10


# --- trainers ---------------------------------------------------------------------------------------------------------


@about("huggingface/trl#7100")
def test_tokens_that_two_ranks_split_count_once(tmp_path: Path):
    alone = fine_tunes(None, str(tmp_path / "alone"), "SFTTrainer", "LlamaForCausalLM")
    for ran in on_ranks(fine_tunes, "tp=2", str(tmp_path / "split"), "SFTTrainer", "LlamaForCausalLM"):
        assert [entry["num_tokens"] for entry in ran.logs] == [entry["num_tokens"] for entry in alone.logs]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_lists_these_reports_and_no_other():
    rows = re.findall(r"^\| \[([^]]+)\]\(https://github\.com/([^)]+)\)", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == REPORTS
    for name, address in rows:
        owner, _, number = name.partition("#")
        assert address == f"{owner}/issues/{number}"
