"""`initialize`: an engine from plain objects and a config, by way of `Booster`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.booster import Booster, Config
from shardlib.errors import PlanError
from shardlib.trainer._context import global_context, remember
from shardlib.trainer._data import WholeSteps, check_place
from shardlib.trainer._engine import Engine
from shardlib.trainer._handlers import build_gradient_handlers
from shardlib.trainer._logger import get_dist_logger
from shardlib.trainer._schedule import build_schedule
from shardlib.trainer._settings import Settings, shape_of

__all__ = ["initialize"]


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Any = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    config: Mapping[str, Any] | str | Path | None = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Create an engine: shard the model in place as the config says, and rebind its optimizer and scheduler.

    The known keys are in docs/trainer.md; all others are yours, and readable in `global_context.config`.

    Args:
        model: a plain module. If ranks have built it with different values, all take rank 0's.
        optimizer: an optimizer of its parameters.
        criterion: any callable that returns a loss.
        train_dataloader: this rank's dataloader, as from `get_dataloader`.
        test_dataloader: likewise.
        lr_scheduler: a scheduler of the optimizer; it counts the steps that the optimizer takes.
        config: a dict or the path of a .py or .toml file; by default that of `launch` or a function like it.
        verbose: whether rank 0 logs the result.

    Returns:
        The engine; the train dataloader, under accumulation without the batches that do not fill a step; the test
        dataloader; the scheduler.

    Raises:
        PlanError: a config with unsupported settings.
        LaunchError: sizes that do not fit the number of ranks, before ranks communicate.
        InputError: a dataloader that divides examples in another way.
        ShardlibError: an error of `Booster.boost`, before any change.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> data = [(torch.ones(3, 4), torch.zeros(3, 2))] * 5
    >>> config = dict(gradient_accumulation=2, clip_grad_norm=1.0, BATCH_SIZE=3)
    >>> engine, loader, _, _ = initialize(model, optimizer, nn.MSELoss(), data, config=config, verbose=False)
    >>> len(loader)
    4
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"initialize was given a {type(model).__name__} as model; give a torch.nn.Module.")
    settings_from = global_context.config if config is None else Config.of(config)
    settings, shape = Settings.of(settings_from), shape_of(settings_from)
    place = shape.data_place(shape.coordinate(global_context.get_global_rank()))
    for what, loader in (("train_dataloader", train_dataloader), ("test_dataloader", test_dataloader)):
        check_place(loader, what, *place)
    booster = Booster(plugin=settings.plugin)
    model, boosted, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )
    handlers = build_gradient_handlers(settings.handlers, model, boosted)
    schedule = build_schedule(settings.schedule, staged=settings.plugin.pp_size > 1)
    engine = Engine(model, boosted, criterion, handlers, schedule=schedule, lr_scheduler=lr_scheduler)
    if isinstance(criterion, nn.Module):
        criterion.to(engine.device)
    for flag, value in settings.cudnn.items():
        setattr(torch.backends.cudnn, flag, value)
    remember(settings_from, booster.mesh)
    if settings.plugin.passes > 1 and train_dataloader is not None:
        train_dataloader = WholeSteps(train_dataloader, settings.plugin.passes)
    if verbose:
        get_dist_logger().info(_told(settings, booster), ranks=[0])
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _told(settings: Settings, booster: Booster) -> str:
    plugin = settings.plugin
    parts = [f"mesh {MeshShape.of(booster.mesh)} of {dist.get_world_size()} ranks"]
    parts += [f"{plugin.num_microbatches} microbatches"] if plugin.pp_size > 1 else []
    parts += [f"zero stage {plugin.zero_stage}"] if plugin.zero_stage else []
    parts += [repr(plugin.amp)] if plugin.amp is not None else []
    parts += [f"{plugin.passes} passes a step"] if plugin.passes > 1 else []
    parts += [f"gradients clipped to {plugin.max_norm:g}"] if plugin.max_norm else []
    return "training on " + ", ".join(parts)
