"""What a config may say, and what is said of the rest: whole messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardlib.booster import Config
from shardlib.errors import InputError, LaunchError, PlanError, ShardlibError
from shardlib.rules import registered_tensor_modes
from shardlib.trainer import get_dataloader, initialize
from shardlib.trainer._settings import EnginePlugin, Settings

MODEL = nn.Linear(2, 2)

MEANT: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "()"),
    "user's own": ({"BATCH_SIZE": 3, "NUM_MICRO_BATCHES": 4, "model": {"depth": 2}}, "()"),
    "parallel": ({"parallel": {"pipeline": {"size": 1}, "tensor": 1, "data": None}}, "()"),
    "zero": ({"zero": {"stage": 2, "cpu_offload": True}}, "(zero(2), offload())"),
    "accumulation": ({"gradient_accumulation": 4}, "(accumulate(4),)"),
    "torch": ({"fp16": {"mode": "TORCH"}}, '(precision("fp16", scaler=LossScale()),)'),
    "naive": (
        {"fp16": {"mode": "naive", "hysteresis": 3}, "zero": {"stage": 1}},
        '(zero(1), precision("fp16_naive", scaler=LossScale(growth_interval=1000, hysteresis=3)))',
    ),
    "apex": ({"fp16": {"mode": "apex", "opt_level": "O0"}}, "()"),
    "older zero": (
        {"zero": {"model_config": {"tensor_placement_policy": "cpu"}, "optimizer_config": {"min_scale": 2}}},
        '(zero(3), precision("fp16_naive", scaler=LossScale(growth_interval=1000, min_scale=2.0, hysteresis=2)), '
        'offload("all"))',
    ),
}


@pytest.mark.parametrize("name", MEANT)
def test_a_config_is_a_recipe(name):
    config, transforms = MEANT[name]
    settings = Settings.of(Config(config))
    assert repr(settings.plugin.transforms(MODEL)) == transforms
    assert settings.handlers == () and settings.cudnn == {}


def test_numbers_and_flags_are_read():
    config = {
        "clip_grad_norm": 0.5,
        "cudnn_benchmark": True,
        "gradient_handler": [{"type": "ZeROGradientHandler"}],
        "torch_ddp": {"bucket_cap_mb": 50, "find_unused_parameters": True},
    }
    settings = Settings.of(Config(config))
    assert settings.plugin == settings.plugin and settings.plugin.max_norm == 0.5
    assert settings.plugin.bucket_mb() == 50
    assert settings.cudnn == {"benchmark": True}
    assert [one["type"] for one in settings.handlers] == ["ZeROGradientHandler"]
    assert isinstance(settings.plugin, EnginePlugin)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stages": (
        {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4},
        "The config says parallel.pipeline=2 and parallel.tensor=1, which takes a multiple of 2 ranks, and 1 is "
        "running. Start as many, as in `torchrun --nproc_per_node 2`, or change a size.",
    ),
    "no microbatches": (
        {"parallel": {"pipeline": 2}},
        "The config says parallel.pipeline and no NUM_MICRO_BATCHES; give the number of microbatches of a batch.",
    ),
    "no dict": (
        {"parallel": 2},
        "The config says parallel=2; give a dict, such as dict(tensor=dict(size=2, mode='1d')).",
    ),
    "a slip": (
        {"parallel": {"tensr": 2}},
        'The config has parallel.tensr; known are pipeline, tensor, data. Did you mean "tensor"?',
    ),
    "no size": (
        {"parallel": {"tensor": {"size": "two"}}},
        "The config says parallel.tensor={'size': 'two'}; give a number of ranks from 1 up, or dict(size=...).",
    ),
    "a mode": (
        {"parallel": {"tensor": {"size": 1, "mode": "sideways"}}},
        "The config says parallel.tensor.mode='sideways'; it is '1d', None or a tensor mode. No tensor mode is called "
        '"sideways"; there are {modes}. Register one with '
        "@shardlib.rules.register_tensor_mode('sideways'), in a module that is imported before.",
    ),
    "depth": (
        {"parallel": {"tensor": {"size": 1, "mode": "1d", "depth": 2}}},
        "The config has parallel.tensor.depth; known are size, mode, rules.",
    ),
    "more than pipeline": (
        {"parallel": {"pipeline": {"size": 1, "chunks": 2}}},
        "The config has parallel.pipeline.chunks; known are size.",
    ),
    "too many": (
        {"parallel": {"tensor": 2}},
        "The config says parallel.pipeline=1 and parallel.tensor=2, which takes a multiple of 2 ranks, and 1 is "
        "running. Start as many, as in `torchrun --nproc_per_node 2`, or change a size.",
    ),
    "data": (
        {"parallel": {"data": 2}},
        "The config says parallel.data=2; with parallel.pipeline=1 and parallel.tensor=1, 1 ranks leave 1. Leave data "
        "out, or change a size.",
    ),
    "zero": ({"zero": 2}, "The config says zero=2; give a dict, such as dict(stage=1)."),
    "stage": ({"zero": {"stage": 4}}, "The config says zero.stage=4; give 0, 1, 2 or 3."),
    "a slip in zero": (
        {"zero": {"stge": 1}},
        "The config has zero.stge; known are stage, cpu_offload, overlap_allgather, communication_dtype, "
        'bucket_size_in_m, model_config, optimizer_config. Did you mean "stage"?',
    ),
    "both zeros": (
        {"zero": {"stage": 3, "model_config": {}}},
        "The config says zero.stage=3 and zero.model_config; give one of them.",
    ),
    "fp16 twice": (
        {"zero": {"model_config": {}}, "fp16": {"mode": "naive"}},
        "The config has fp16 and a zero without a stage, which trains in float16 by itself. Say zero=dict(stage=3) "
        "with fp16=dict(mode=AMP_TYPE.NAIVE), or leave fp16 out.",
    ),
    "placement": (
        {"zero": {"model_config": {"tensor_placement_policy": "auto"}}},
        "The config says zero.model_config.tensor_placement_policy='auto': nothing is chosen for you; give 'cuda' to "
        "keep all on the device, or 'cpu' to keep it in host memory between uses.",
    ),
    "predivide": (
        {"zero": {"model_config": {"gradient_predivide_factor": 2.0}}},
        "zero.model_config(gradient_predivide_factor=2.0): gradients are summed and then divided, in one place. (Leave "
        "it out, or give 1.0.)",
    ),
    "margin": (
        {"zero": {"optimizer_config": {"gpu_margin_mem_ratio": 0.8}}},
        "zero.optimizer_config(gpu_margin_mem_ratio=0.8): state is placed where its parameters are. (Leave it out, or "
        "give 0.0.)",
    ),
    "no mode": (
        {"fp16": {"init_scale": 8}},
        "The config says fp16={'init_scale': 8}; give a dict with a mode, such as dict(mode=AMP_TYPE.TORCH).",
    ),
    "another mode": (
        {"fp16": {"mode": "torhc"}},
        "The config's fp16: mode='torhc' was given; the modes are apex, torch, naive. Did you mean \"torch\"?",
    ),
    "an option": (
        {"fp16": {"mode": "torch", "scale": 8}},
        'The config\'s fp16: FP16TorchMixedPrecision has no keyword "scale"; it has init_scale, growth_factor, '
        'backoff_factor, growth_interval. Did you mean "init_scale"?',
    ),
    "passes": (
        {"gradient_accumulation": 0},
        "The config says gradient_accumulation=0; give an integer from 1 up.",
    ),
    "clip": ({"clip_grad_norm": -1}, "The config says clip_grad_norm=-1; give a number from 0 up."),
    "handlers": (
        {"gradient_handler": {"type": "Mine"}},
        "The config says gradient_handler={'type': 'Mine'}; give a list with a dict for each, such as "
        '[dict(type="MyGradientHandler")].',
    ),
    "a handler": (
        {"gradient_handler": [{"type": "ZeroGradientHandler"}]},
        'The config names a gradient handler "ZeroGradientHandler", which is not registered. Put '
        "@GRADIENT_HANDLER.register_module over its class, in a module that is imported before initialize. Did you "
        'mean "ZeROGradientHandler"?',
    ),
    "ddp": (
        {"torch_ddp": {"broadcast_buffers": False}},
        "The config's torch_ddp: TorchDDPPlugin(broadcast_buffers=False): buffers are equal on all ranks, "
        "because BatchNorm uses all examples. (Leave it out, or give True.)",
    ),
    "ddp and zero": (
        {"torch_ddp": {"bucket_cap_mb": 1}, "zero": {"stage": 1}},
        "The config has torch_ddp and zero; leave torch_ddp out: zero reduces gradients in its own way.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name):
    config, message = WRONG[name]
    with pytest.raises(LaunchError if name in ("stages", "too many", "data") else PlanError) as refused:
        initialize(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1), config=config)
    modes = ", ".join(map(repr, registered_tensor_modes()))  # other tests may have registered some
    assert str(refused.value) == message.replace("{modes}", modes)


def other_place() -> str:
    """A loader that was made before anybody knew of tensor parallelism."""
    from shardlib.trainer import launch

    rank = torch.distributed.get_rank()
    launch({}, rank, 2, "localhost", 29500, verbose=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"parallel": {"tensor": {"size": 2, "rules": {"0": "colwise", "1": "rowwise"}}}}
    loader = get_dataloader(range(8), batch_size=2)
    with pytest.raises(InputError) as refused:
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), None, loader, config=config)
    return str(refused.value)


def test_a_loader_of_other_data_ranks_is_refused(ranks):
    assert ranks(2).run(other_place) == [
        f"train_dataloader was made for data rank {rank} of 2, and this one is 0 of 1. Give the config to launch, "
        "before get_dataloader: launch_from_torch(config)."
        for rank in (0, 1)
    ]


def test_what_is_no_model_is_refused():
    with pytest.raises(ShardlibError) as refused:
        initialize("model", None)  # type: ignore[arg-type]
    assert str(refused.value) == "initialize was given a str as model; give a torch.nn.Module."
