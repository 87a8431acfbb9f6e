"""What is asked for wrongly is refused: whole messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardlib.errors import ShardlibError
from shardlib.trainer import (
    GRADIENT_HANDLER,
    BaseOpHook,
    DistCoordinator,
    Engine,
    MultiTimer,
    ParallelMode,
    Registry,
    Timer,
    Trainer,
    get_dist_logger,
    gpc,
    hooks,
    initialize,
    launch,
)


def engine(criterion: Any = None, config: dict[str, Any] | None = None) -> Engine:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    made, *_ = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, config=config or {}, verbose=False
    )
    return made


def fit(*given: hooks.BaseHook, data: Any = (), epochs: int = 1, **options: Any) -> None:
    Trainer(engine(**options)).fit(list(data), epochs, hooks=given)


def twice_registered() -> None:
    registry = Registry("schedule")
    registry.register_module(BaseOpHook, name="mine")
    registry.register_module(Timer, name="mine")


BATCH = (torch.ones(3, 2), torch.ones(3))
COLUMNS = {"parallel": {"tensor": {"size": 2, "rules": {"0": "colwise", "1": "rowwise"}}}}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an engine of a plain optimizer": (
        lambda: Engine(nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], lr=0.1)),  # type: ignore[arg-type]
        "Engine was given a SGD as optimizer; initialize(model, optimizer, criterion) makes an engine of plain ones.",
    ),
    "gradients of another shape": (
        lambda: engine().backward_by_grad(torch.ones(2, 3), torch.ones(3)),
        "backward_by_grad was given tensors of shapes [(2, 3)] and gradients of [(3,)].",
    ),
    "no hook of modules": (
        lambda: engine().add_hook(hooks.LossHook()),  # type: ignore[arg-type]
        "add_hook was given a LossHook; give a subclass of BaseOpHook.",
    ),
    "a trainer of a model": (
        lambda: Trainer(nn.Linear(2, 2)),  # type: ignore[arg-type]
        "Trainer was given a Linear; give the engine that initialize returns.",
    ),
    "epochs": (lambda: fit(epochs=-1), "epochs=-1 was given; give an integer from 0 up."),
    "no loss": (
        lambda: fit(data=[BATCH]),
        "The engine has no criterion, and the model's output, a Tensor, has no loss. Give initialize a criterion, or "
        "the model its labels.",
    ),
    "training without a loss": (
        lambda: engine().execute_schedule(iter([BATCH]), return_loss=False),
        "return_loss=False was given for training; backward needs a loss. Give forward_only=True.",
    ),
    "times of a timer that is off": (
        lambda: Trainer(engine(), timer=MultiTimer(on=False)).fit([], 1, hooks=[hooks.ThroughputHook()]),
        "ThroughputHook needs times, and the trainer's timer is off; give Trainer a MultiTimer().",
    ),
    "a name twice": (
        twice_registered,
        'A schedule "mine" is registered already: shardlib.trainer._ophooks.BaseOpHook. Give yours another name, as in '
        'register_module(name="...").',
    ),
    "a name that nobody registered": (
        lambda: Registry("schedule").get_module("mine"),
        'There is no schedule "mine"; registered are none.',
    ),
    "a timer that was not started": (
        lambda: Timer().stop(),
        "A timer was stopped that was not started. Call start() first.",
    ),
    "no timer": (lambda: MultiTimer().get_timer("step"), 'There is no timer "step"; there are none.'),
    "no history": (
        lambda: Timer().get_history_mean(),
        "A timer without history has no mean. Stop it with keep_in_history=True.",
    ),
    "a logger without a name": (
        lambda: get_dist_logger(""),
        "A logger was asked for by the name ''; give a word such as \"train\".",
    ),
    "a level": (
        lambda: get_dist_logger("levels").set_level("INFORM"),
        "level='INFORM' was given; give one of DEBUG, INFO, WARNING, ERROR. Did you mean \"INFO\"?",
    ),
    "a mode": (
        lambda: gpc.get_world_size("tensr"),
        "There is no mode 'tensr'; give a ParallelMode (GLOBAL, DATA, MODEL, PIPELINE, TENSOR, PARALLEL_1D, SEQUENCE, "
        'SEQUENCE_DP) or an axis of mesh "dp=1,tp=1". Did you mean "tensor"?',
    ),
    "a group that there is not": (
        lambda: (engine(), gpc.get_group(ParallelMode.PIPELINE)),
        'Mesh "dp=1,tp=1" has no axis of mode PIPELINE; ask is_initialized(mode) before.',
    ),
    "another model to save": (
        lambda: fit(
            hooks.SaveCheckpointHook(checkpoint_dir="nowhere", model=nn.Linear(2, 2)),
            data=[(BATCH[0],) * 2],
            criterion=nn.MSELoss(),
        ),
        "SaveCheckpointHook was given another model than the engine's; leave model out.",
    ),
    "an example of several outputs": (
        lambda: fit(data=[(1, 2, 3)], criterion=nn.MSELoss()),
        "A batch is a tuple of 3; give pairs (data, label), dicts of a model's arguments, or a data_process_func that "
        "makes pairs: initialize(...), then engine.schedule.data_process_func = ...",
    ),
}


def said(name: str) -> str:
    launch({}, 0, 1, "localhost", 29500, verbose=False)
    with pytest.raises(ShardlibError) as refused:
        REFUSED[name][0]()
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_asked_for_wrongly_is_refused(ranks, name):
    assert ranks(1).run(said, name) == [REFUSED[name][1]]


STAGES = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
OF_TWO: list[Callable[[], Any]] = [
    lambda: engine(config=STAGES)(torch.ones(2, 2)),
    lambda: engine(config=COLUMNS).add_hook(BaseOpHook()),
    lambda: DistCoordinator().local_rank,
]


def of_two() -> list[str]:
    messages = []
    os.environ.pop("LOCAL_RANK")  # each call of a worker sets it anew
    for wrong in OF_TWO:
        with pytest.raises(ShardlibError) as refused:
            wrong()
        messages.append(str(refused.value))
    return messages


def test_what_two_ranks_cannot_do_is_refused(ranks):
    assert ranks(2).run(of_two)[0] == [
        "The model is split into pipeline stages, none of which runs alone. Call engine.execute_schedule(data_iter), "
        "with forward_only=True to evaluate, or let a Trainer do it.",
        'add_hook: blocks on mesh "dp=1,tp=2" are compiled, and would not call it. Register torch\'s own module hooks '
        "before initialize.",
        "The number of this rank on its machine is not known. Start ranks by torchrun, which sets LOCAL_RANK, or give "
        "launch(local_rank=...).",
    ]


def test_a_decorated_class_may_be_defined_anew():
    made = [GRADIENT_HANDLER.register_module(type("Anew", (), {"__module__": "a_notebook"})) for _ in range(2)]
    assert GRADIENT_HANDLER.get_module("Anew") is made[1]
