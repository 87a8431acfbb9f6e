"""A short run of each host with its loggers. Importable on ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import wandb
from torch import nn

import shardlib as sl
from shardlib.monitor import Monitor
from tests.integrations import lightning_training as lit
from tests.integrations.accelerated import ProjectConfiguration, make, reset
from tests.integrations.trained import run

from accelerate.tracking import GeneralTracker, on_main_process  # isort: skip
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger  # isort: skip
from transformers.integrations import TensorBoardCallback  # isort: skip
from shardlib.integrations.lightning import ShardingMonitor, ShardlibStrategy  # isort: skip

RULES = {"up": "colwise", "down": "rowwise", "norm": None}


def by_transformers(folder: str) -> list[str]:
    """Return the names in the log history of two Trainers that report to TensorBoard: as asked for by an argument, and
    by a callback that is added when the trainer has been built."""
    sharding = "dp=2,tp=2 | zero(2)"
    asked = run(sharding, f"{folder}/asked", report_to=["tensorboard"], max_steps=2)
    added = run(sharding, f"{folder}/added", late=[TensorBoardCallback()], max_steps=2)
    return sorted({name for ran in (asked, added) for entry in ran.logs for name in entry})


class InMemory(GeneralTracker):
    """A tracker of the user's own."""

    name = "in memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.logged

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


def by_accelerate(
    folder: str, mesh: str = "dp=2,tp=2", tracker: str = "tensorboard"
) -> list[tuple[int | None, dict[str, Any]]]:
    """Return what a user's own tracker got on this rank, beside one of Accelerate's."""
    own = InMemory()
    project = ProjectConfiguration(folder, logging_dir=folder)
    shards = {"mesh": mesh, "transforms": "zero(2)", "rules": RULES}
    accelerator = make(shards, log_with=[own, tracker], project_config=project)
    accelerator.init_trackers("run")
    model = lit.Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.log_plan(model)

    def write(step: int, values: dict[str, float]) -> None:
        accelerator.log(values, step)

    with Monitor(accelerator.mesh, 2, every=2, write=write) as monitor:
        for _ in range(2):
            loss = nn.functional.mse_loss(model(torch.ones(3, 4)), torch.ones(3, 4))
            accelerator.backward(loss)
            optimizer.step()
            monitor.step(loss=loss, tokens=3)
    accelerator.end_training()
    reset()
    return own.logged


def by_lightning(folder: str, mesh: str = "dp=2,tp=2", loggers: Any = None) -> str:
    """Train with loggers, by default two; return the plan."""
    loggers = loggers or [
        TensorBoardLogger(folder, name="board", version=""),
        CSVLogger(folder, name="csv", version=""),
    ]
    strategy = ShardlibStrategy(mesh, RULES, transforms="zero(2)")
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    with lit.quietly():
        trainer = lit.Trainer(
            accelerator="cpu",
            devices=sl.MeshShape(mesh).world_size,
            strategy=strategy,
            logger=loggers,
            callbacks=[ShardingMonitor()],
            log_every_n_steps=2,
            max_steps=4,
            enable_checkpointing=False,
            **settings,
        )
        trainer.fit(lit.Lit(), lit.loader(16, 2, torch.float32))
    return str(sl.get_plan(strategy.sharded_module))


def to_wandb(host: str, folder: str) -> str:
    """Let a host report to W&B, offline; return the plan, if the host is Lightning."""
    os.makedirs(folder, exist_ok=True)
    with mock.patch.dict(os.environ, {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}):
        plan = ""
        if host == "transformers":
            run("dp=2 | zero(2)", folder, report_to=["wandb"], max_steps=2)
        elif host == "accelerate":
            by_accelerate(folder, "dp=2", "wandb")
        else:
            plan = by_lightning(folder, "dp=2", [WandbLogger(save_dir=folder, offline=True)])
        wandb.teardown()  # which also forgets the folder
    return plan


def alone(folder: str) -> str:
    """The monitor of a run without the strategy: what it says."""
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1}
    with lit.quietly():
        try:
            lit.Trainer(callbacks=[ShardingMonitor()], **settings).fit(lit.Lit(), lit.loader(4, 2, torch.float32))
        except sl.errors.InputError as error:
            return str(error)
    return "nothing"
