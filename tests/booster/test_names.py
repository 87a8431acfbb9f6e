"""Names and behaviours on which ColossalAI's scripts rely, each a view of what is there."""

from __future__ import annotations

import logging
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as recompute

import shardlib as sl
from shardlib import booster as names
from shardlib.booster import (
    BoostedModule,
    Booster,
    DPPluginBase,
    GeminiPlugin,
    GeneralCheckpointIO,
    GradientCheckpointConfig,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ModelWrapper,
    MoeHybridParallelPlugin,
    OptimizerWrapper,
    PipelineGradientCheckpointConfig,
    PipelineStageManager,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    disable_existing_loggers,
    get_accelerator,
    get_current_device,
    get_dist_logger,
)
from shardlib.booster._options import met_keywords, say_once
from shardlib.booster._refusals import known_options
from shardlib.errors import CheckpointError, InputError, PlanError
from shardlib.optim import HybridAdam
from shardlib.testing.models import Tokens
from tests.booster.training import ROWS, VOCAB, gpt, loss_of
from tests.engine.whole import whole

# --- a plugin's sizes, groups and stages ------------------------------------------------------------------------------

# Plugin, then dp_size, tp_size, pp_size, and the groups of rank 3: dp, tp, pp.
ON_FOUR: dict[str, tuple[Any, tuple[int, int, int], tuple[list[int], list[int], list[int]]]] = {
    "ddp": (TorchDDPPlugin(), (4, 1, 1), ([0, 1, 2, 3], [3], [3])),
    "zero in groups": (LowLevelZeroPlugin(extra_dp_size=2), (4, 1, 1), ([0, 1, 2, 3], [3], [3])),
    "gemini": (GeminiPlugin(tp_size=2), (2, 2, 1), ([1, 3], [2, 3], [3])),
    "tp, pp": (HybridParallelPlugin(2, 2, num_microbatches=2), (1, 2, 2), ([3], [2, 3], [1, 3])),
    "pp outside": (
        HybridParallelPlugin(1, 2, num_microbatches=2, dp_outside=False),
        (2, 1, 2),
        ([2, 3], [3], [1, 3]),
    ),
    "2d": (HybridParallelPlugin(4, tensor_mode="2d"), (1, 4, 1), ([3], [0, 1, 2, 3], [3])),
    "experts": (MoeHybridParallelPlugin(tp_size=1, ep_size=2), (4, 1, 1), ([0, 1, 2, 3], [3], [3])),
}


def _sizes_and_groups(name: str) -> tuple[Any, Any, Any]:
    plugin = ON_FOUR[name][0]
    groups = [getattr(plugin, group) for group in ("dp_group", "tp_group", "pp_group")]
    made = Booster(plugin=plugin).mesh
    assert made is plugin.device_mesh() and plugin.dp_group is groups[0]
    for group in groups:
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        assert total == dist.get_world_size(group)
    manager = plugin.stage_manager
    stages = None if manager is None else (manager.is_first_stage(), manager.is_last_stage(), manager.get_next_rank())
    sizes = (plugin.dp_size, plugin.tp_size, plugin.pp_size)
    assert pickle.loads(pickle.dumps(plugin)).dp_size == plugin.dp_size
    mixed = plugin.mixed_dp_group
    assert dist.get_process_group_ranks(mixed) == dist.get_process_group_ranks(groups[0])
    assert dist.get_process_group_ranks(plugin.sp_group) == [dist.get_rank()]
    return sizes, tuple(map(plugin.pg_mesh.get_ranks_in_group, groups)), stages


def _groups_of_sequences() -> list[tuple[list[int], ...]]:
    split = {"enable_sequence_parallelism": True}
    own = HybridParallelPlugin(1, 1, sp_size=2, **split), HybridParallelPlugin(1, 1, sp_size=2, **RING, **split)
    plugins = [*own, HybridParallelPlugin(2, 1, **split), GeminiPlugin(tp_size=2, **split)]
    groups = [(plugin.sp_group, plugin.mixed_dp_group, plugin.dp_group) for plugin in plugins]
    return [tuple(map(dist.get_process_group_ranks, each)) for each in groups]


RING = {"sequence_parallelism_mode": "ring_attn"}


def test_groups_that_split_sequences_are_those_of_the_mesh(ranks):
    own, along_tp = ([2, 3], [0, 1, 2, 3], [1, 3]), ([2, 3], [1, 3], [1, 3])
    assert ranks(4).run(_groups_of_sequences)[3] == [own, own, along_tp, along_tp]


def test_what_a_plugin_has_not_is_said():
    plugin = HybridParallelPlugin(1, 1)
    for name, said in (("shard_config", r"shardlib\.get_plan\(model\)"), ("logger", "get_dist_logger")):
        assert not hasattr(plugin, name)
        with pytest.raises(InputError, match=said):
            getattr(plugin, name)
    with pytest.raises(AttributeError, match="no attribute 'shard_confi'"):
        _ = plugin.shard_confi


@pytest.mark.parametrize("name", ON_FOUR)
def test_sizes_groups_and_stages_are_those_of_the_mesh(ranks, name):
    _, sizes, groups = ON_FOUR[name]
    found = ranks(4).run(_sizes_and_groups, name)
    assert [each[0] for each in found] == [sizes] * 4
    assert found[3][1] == groups
    assert found[3][2] == (None if sizes[2] == 1 else (False, True, groups[2][0]))
    assert found[0][2] == (None if sizes[2] == 1 else (True, False, 2))


def test_the_last_stage_of_a_model_is_on_the_first_rank_of_a_zbv_pipeline():
    shape = sl.MeshShape("pp=2")
    plain, interleaved = PipelineStageManager(shape, 0), PipelineStageManager(shape, 0, num_model_chunks=2)
    zbv = PipelineStageManager(shape, 0, num_model_chunks=2, use_zbv=True)
    assert [m.is_last_stage() for m in (plain, interleaved, zbv)] == [False, False, True]
    assert [m.is_last_stage(ignore_chunk=True) for m in (plain, interleaved, zbv)] == [False] * 3
    assert [m.is_interleave for m in (plain, interleaved, zbv)] == [False, True, True]
    assert (plain.get_rank(), plain.get_prev_rank(), plain.get_next_rank(), plain.num_stages) == (0, 1, 1, 2)
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, pp_style="zbv", num_model_chunks=2)
    assert plugin.pp_size == 2 and plugin.zero_stage == 0  # without any rank


class OfOwn(DPPluginBase):
    def transforms(self, model: nn.Module) -> Any:
        return (sl.zero(1),)


def test_plugins_have_the_bases_that_scripts_name():
    data = (TorchDDPPlugin(), LowLevelZeroPlugin(), TorchFSDPPlugin(), GeminiPlugin(), OfOwn())
    assert all(isinstance(plugin, DPPluginBase) for plugin in data)
    assert not isinstance(HybridParallelPlugin(1), DPPluginBase) and issubclass(DPPluginBase, Plugin)
    assert OfOwn().mesh_shape() == sl.MeshShape(dp=-1) and OfOwn().dp_size == 1
    assert len(OfOwn().prepare_dataloader(list(range(8)), batch_size=4)) == 2


# --- what boost returns -----------------------------------------------------------------------------------------------


class Again(nn.Module):
    """A block that recomputes itself if it is told to, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gradient_checkpointing = True
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return (
            recompute.checkpoint(self.linear, x, use_reentrant=False) if self.gradient_checkpointing else self.linear(x)
        )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Again(), Again()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _recomputed_by_the_plan() -> list[int]:
    plugin = HybridParallelPlugin(1, 1, precision="fp32", gradient_checkpoint_config=GradientCheckpointConfig(0.5))
    model = Booster(plugin=plugin).boost(Stack())[0]
    model(torch.ones(2, 2)).sum().backward()
    assert not any(block.gradient_checkpointing for block in model.blocks)
    return [block.runs for block in model.blocks]


class Around(nn.Module):
    """A model with a module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def _boosted(folder: str) -> None:
    plugin = HybridParallelPlugin(1, 1, num_microbatches=4, microbatch_size=1, precision="fp32", max_norm=0.25)
    booster, model = Booster(plugin=plugin), gpt()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert model.module is model and isinstance(model, ModelWrapper) and isinstance(optimizer, OptimizerWrapper)
    around = Booster(plugin=TorchDDPPlugin()).boost(Around())[0]
    assert isinstance(around, BoostedModule) and type(around.module) is nn.Linear and around.unwrap() is around

    assert optimizer.get_grad_norm() is None
    mine = Tokens(ROWS, 5, VOCAB)(0).chunk(2)[dist.get_rank()]
    booster.backward(loss_of(model, mine), optimizer)
    norm = sl.booster.get_grad_norm(model).item()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:  # any rank may ask alone
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-6) and norm > 0.25
        with pytest.raises(InputError, match=r"order 2\.0"):
            optimizer.get_grad_norm(norm_type=1.0)
    booster.backward(loss_of(model, mine), optimizer)
    assert optimizer.clip_grad_by_norm(1.0, norm_type=float("inf")).item() == optimizer.get_grad_norm()

    measuring = Booster(plugin=LowLevelZeroPlugin(initial_scale=8, max_norm=float("inf")))
    line = nn.Linear(2, 1)
    line, steps, *_ = measuring.boost(line, torch.optim.SGD(line.parameters(), lr=1.0))
    measuring.backward(line(torch.full((4, 2), 4.0)).mean(), steps)
    steps.step()
    assert steps.get_grad_norm() == pytest.approx((4.0**2 + 4.0**2 + 1) ** 0.5)

    io = booster.checkpoint_io
    assert isinstance(io, GeneralCheckpointIO)
    io.save_model(model, f"{folder}/model.pt", use_async=True)
    io._sync_d2h()
    io._sync_io()
    before = sl.full_state_dict(model)
    with torch.no_grad():
        model.head.weight.zero_()
    booster.load_model(model, f"{folder}/model.pt", low_cpu_mem_mode=False, num_threads=8)
    after = sl.full_state_dict(model)
    assert all(torch.equal(whole(after[name]), whole(value)) for name, value in before.items())


def test_a_boosted_model_and_its_optimizer_have_the_names_of_wrappers(ranks, tmp_path):
    ranks(2).run(_boosted, str(tmp_path))


def test_the_plan_recomputes_in_the_place_of_the_model(ranks):
    assert ranks(2).run(_recomputed_by_the_plan) == [[2, 1]] * 2


def test_a_model_that_is_not_boosted_is_saved_by_a_general_checkpoint_io(tmp_path):
    io, model, other = GeneralCheckpointIO(), nn.Linear(2, 3), nn.Linear(2, 3)
    io.save_model(model, tmp_path / "model.bin")
    io.load_model(other, tmp_path / "model.bin")
    assert torch.equal(model.weight, other.weight)


# --- Adam's classes ---------------------------------------------------------------------------------------------------

ADAMS: dict[str, Any] = {
    "HybridAdam": lambda params: HybridAdam(params, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "HybridAdam as Adam": lambda params: HybridAdam(params, lr=1e-2, weight_decay=0.1, eps=1e-4, adamw_mode=False),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "Adam without decay": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4),
    "HybridAdam without decay": lambda params: HybridAdam(params, lr=1e-2, eps=1e-4),
    "HybridAdam uncorrected": lambda params: HybridAdam(params, lr=1e-2, eps=1e-4, bias_correction=False),
}


class Training:
    def __init__(self, plugin: Plugin, adam: str) -> None:
        self.booster = Booster(plugin=plugin)
        model = gpt(torch.float64)
        self.model, self.optimizer, *_ = self.booster.boost(model, ADAMS[adam](model.parameters()))

    def step(self, step: int) -> None:
        mine = Tokens(ROWS, 5, VOCAB)(step).chunk(2)[dist.get_rank()]
        self.optimizer.zero_grad()
        self.booster.backward(loss_of(self.model, mine), self.optimizer)
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(value) for name, value in sl.full_state_dict(self.model).items()}


def _adams(folder: str) -> None:
    zero = LowLevelZeroPlugin(stage=2, precision="fp32")
    pairs = [("HybridAdam", "AdamW"), ("AdamW", "HybridAdam"), ("HybridAdam as Adam", "Adam")]
    for saved, other in [*pairs, ("Adam without decay", "HybridAdam without decay")]:
        first, second = Training(zero, saved), Training(TorchDDPPlugin(), other)
        flag = second.optimizer.param_groups[0]["decoupled_weight_decay"]
        first.step(0)
        first.booster.save_model(first.model, f"{folder}/{saved}.pt")
        first.booster.save_optimizer(first.optimizer, f"{folder}/{saved}")
        second.booster.load_model(second.model, f"{folder}/{saved}.pt")
        second.booster.load_optimizer(second.optimizer, f"{folder}/{saved}")
        group = second.optimizer.param_groups[0]
        assert group["decoupled_weight_decay"] is flag and ("bias_correction" in group) == other.startswith("Hybrid")
        first.step(1)
        second.step(1)
        for name, value in first.weights().items():
            torch.testing.assert_close(second.weights()[name], value, rtol=1e-10, atol=1e-10)
    with pytest.raises(
        CheckpointError, match="saved by HybridAdam and loaded into Adam, has decoupled_weight_decay=True"
    ):
        adam = Training(zero, "Adam")
        adam.booster.load_optimizer(adam.optimizer, f"{folder}/HybridAdam")
    with pytest.raises(CheckpointError, match=r"has bias_correction=True in the checkpoint and False here"):
        uncorrected = Training(zero, "HybridAdam uncorrected")
        uncorrected.booster.load_optimizer(uncorrected.optimizer, f"{folder}/AdamW")


def test_adams_classes_go_on_from_each_other_where_the_update_is_the_same(ranks, tmp_path):
    ranks(2).run(_adams, str(tmp_path))


# --- requests that are met --------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "shardlib"]
    say_once.cache_clear()


REQUESTS = [(kind, name) for kind in known_options() for name in met_keywords(kind)]


@pytest.mark.parametrize(("kind", "name"), REQUESTS, ids=lambda each: getattr(each, "__name__", each))
def test_a_request_for_speed_or_memory_changes_nothing_and_is_said_once(said, kind, name):
    (default,) = [option.default for option in fields(kind) if option.name == name]
    needed = {"ep_size": 1} if kind is MoeHybridParallelPlugin else {}
    value = not default if isinstance(default, bool) else 7
    plain, asked, _ = kind(**needed), kind(**needed, **{name: value}), kind(**needed, **{name: value})
    model = gpt()
    assert repr(asked.transforms(model)) == repr(plain.transforms(model))
    if isinstance(plain, Plugin):
        assert asked.mesh_shape() == plain.mesh_shape() and asked.bucket_mb() == plain.bucket_mb()
        assert repr(asked.rules(model)) == repr(plain.rules(model))
    (message,) = said()
    assert message == f"{kind.__name__}({name}={value}): {met_keywords(kind)[name]}"


def test_host_memory_is_pinned_whether_asked_or_not():
    plain, asked = (GeminiPlugin(offload_optim_frac=1.0, pin_memory=pin) for pin in (False, True))
    assert repr(asked.transforms(gpt())) == repr(plain.transforms(gpt()))


def test_microbatches_are_not_used_without_stages():
    plugin = HybridParallelPlugin(1, 1, num_microbatches=4, microbatch_size=2)
    assert plugin.transforms(gpt())[-1] == HybridParallelPlugin(1, 1).transforms(gpt())[-1]


def test_a_config_of_gradient_checkpointing_names_blocks_of_each_stage():
    def recomputed(config: GradientCheckpointConfig, stages: str | None) -> tuple[str, ...]:
        plugin = HybridParallelPlugin(
            1,
            1 if stages is None else 2,
            num_microbatches=2,
            precision="fp32",
            gradient_checkpoint_config=config,
            custom_policy=None if stages is None else sl.Rules({"**": None}, stages=stages),
        )
        model = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(5)))
        shape = plugin.mesh_shape().resolve(1 if stages is None else 2)
        return sl.plan(model, shape, plugin.rules(model), transforms=plugin.transforms(model)).step.recompute

    assert recomputed(GradientCheckpointConfig(0.5), None) == ("^0.0", "^0.1")
    assert recomputed(GradientCheckpointConfig(), None) == ()
    assert recomputed(PipelineGradientCheckpointConfig(0.5), "0.0-1 | 0.2-4") == ("^0.0", "^0.2")
    by_stage = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[0, 3])
    assert recomputed(by_stage, "0.0-1 | 0.2-4") == ("^0.2", "^0.3", "^0.4")
    with pytest.raises(PlanError, match=r"\[0, 3\], and the stages have \[5\] blocks"):
        recomputed(by_stage, None)
    with pytest.raises(InputError, match="from 0 to 1"):
        GradientCheckpointConfig(1.5)


# --- loggers and devices ----------------------------------------------------------------------------------------------


def test_a_logger_writes_on_the_ranks_that_are_named_and_to_files(caplog, tmp_path):
    logger = get_dist_logger("a training")
    assert logger is get_dist_logger("a training") and logger.rank == 0
    logger.log_to_file(tmp_path / "logs", suffix="first")
    logger.info("all")
    logger.warning("first", ranks=[0])
    logger.error("second", ranks=[1])
    logger.debug("below INFO")
    logger.set_level("ERROR")
    logger.warning("below ERROR")
    assert [record.getMessage() for record in caplog.records] == ["all", "first"]
    assert caplog.records[0].filename == "test_names.py"  # the place of the call
    written = (tmp_path / "logs" / "rank_0_first.log").read_text()
    assert written == "a training - INFO: all\na training - WARNING: first\n"
    with pytest.raises(InputError, match='Did you mean "INFO"'):
        logger.set_level("INF")


def test_existing_loggers_are_silenced_but_for_shardlibs():
    other = logging.getLogger("of another library")
    other.setLevel(logging.DEBUG)
    disable_existing_loggers(include=["a third"])
    assert other.level == logging.DEBUG
    before = {name: logging.getLogger(name).level for name in list(logging.Logger.manager.loggerDict)}
    try:
        get_dist_logger().set_level("INFO")
        disable_existing_loggers()
        assert other.level == logging.WARNING and logging.getLogger("shardlib").level == logging.INFO
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def test_an_accelerator_has_the_names_of_torchs_module():
    accelerator = get_accelerator()
    assert get_current_device() == accelerator.get_current_device() == torch.device("cpu")
    assert (accelerator.name, accelerator.communication_backend, accelerator.is_synchronous) == ("cpu", "gloo", True)
    assert accelerator.is_available() and accelerator.device_count() == torch.cpu.device_count()
    model = nn.Linear(1, 1)
    assert accelerator.set_to_device(model) is model and accelerator.set_to_device([model, model]) == [model, model]
    accelerator.manual_seed(3)
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(3)))
    accelerator.empty_cache()
    with accelerator.autocast(dtype=torch.bfloat16):
        assert model(torch.ones(1, 1)).dtype == torch.bfloat16
    assert not hasattr(accelerator, "max_memory_allocated") and pickle.loads(pickle.dumps(accelerator)) == accelerator
    with pytest.raises(InputError, match=r"torch\.cpu\.max_memory_allocated, which torch does not have"):
        accelerator.max_memory_allocated()


def test_the_device_is_the_one_that_was_launched_on(monkeypatch):
    job = names.Launched(0, 1, 0, "localhost", 29500, "nccl", torch.device("cuda", 0), 1024, names.Config({}))
    monkeypatch.setattr("shardlib.booster._accelerator.launched", lambda: job)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)
    assert get_current_device() == torch.device("cuda", 3)
