"""A trainer calls hooks in their order, and measures what one device would."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError, InputError, LaunchError, PlanError
from shardlib.trainer import (
    Accuracy,
    BaseSchedule,
    DistCoordinator,
    MultiTimer,
    NonPipelineSchedule,
    Trainer,
    get_dataloader,
    get_dist_logger,
    hooks,
    initialize,
    launch,
)
from shardlib.trainer._trainer import _progress
from tests.at_scale import plans_at_scale
from tests.engine.whole import whole

TOLERANCE = 1e-10
ROWS = 22  # of 22 examples, three ranks get eight each: two are given twice


def examples(count: int = ROWS) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(-1) > 0).long() + (x[:, 0] > 1).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


@plans_at_scale()
def began(
    config: dict[str, Any], *, rows: int, count: int = ROWS, tests: int = ROWS, **options: Any
) -> tuple[Trainer, Any, Any, Any]:
    """A trainer on all ranks, with data sets of so many examples in batches of so many rows for a data rank."""
    launch(config, dist.get_rank(), dist.get_world_size(), "localhost", 29500, verbose=False)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train = get_dataloader(examples(count), shuffle=True, batch_size=rows, **options)
    test = get_dataloader(examples(tests), batch_size=rows)
    engine, train, test, scheduler = initialize(
        model, optimizer, nn.CrossEntropyLoss(), train, test, scheduler, verbose=False
    )
    return Trainer(engine), train, test, scheduler


# --- metrics ---


class ByHand(hooks.BaseHook):
    """Losses of an epoch, each as often as its batch has examples."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.losses: list[float] = []

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.losses += [loss.item()] * len(label)


def measured(rows: int) -> dict[str, float]:
    trainer, train, test, scheduler = began({}, rows=rows)
    hook_list = [hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.LRSchedulerHook(scheduler, by_epoch=False)]
    by_hand = ByHand()
    more = [hooks.ThroughputHook(ignored_steps=1), by_hand]
    trainer.fit(train, epochs=2, test_dataloader=test, hooks=[*hook_list, *more])
    kept = trainer.states["metrics"]
    found = {
        f"{where} {name}": metric.get_accumulated_value() for where in kept for name, metric in kept[where].items()
    }
    assert found.pop("train Throughput") > 0 and found.pop("test Throughput") > 0
    trainer.evaluate(test, hooks=hook_list[:2])
    again = trainer.states["metrics"]["test"]
    assert again["Loss"].get_accumulated_value() == found["test Loss"]
    assert again["Accuracy"].get_accumulated_value() == found["test Accuracy"]
    assert trainer.predict(examples()[:4][0]).shape == (4, 3)
    if dist.get_world_size() == 1:
        assert found["train Loss"] == pytest.approx(sum(by_hand.losses) / ROWS, rel=TOLERANCE)
    return {**found, "steps": trainer.cur_step, "training": trainer.engine.training}


def test_losses_accuracies_and_rates_are_those_of_one_device(ranks):
    """Eleven examples a rank, in batches of 4, 4 and 3: a mean over batches would be another."""
    alone = ranks(1).run(measured, 8)[0]
    for found in ranks(2).run(measured, 4):
        assert found == pytest.approx(alone, rel=TOLERANCE)
    assert alone["steps"] == 6 and alone["training"]


def evaluated(rows: int, config: dict[str, Any], tests: int = ROWS) -> tuple[float, float]:
    trainer, _, test, _ = began(config, rows=rows, tests=tests)
    trainer.evaluate(test, hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy())])
    kept = trainer.states["metrics"]["test"]
    return kept["Loss"].get_accumulated_value(), kept["Accuracy"].get_accumulated_value()


def test_an_example_that_is_given_twice_counts_once(ranks):
    for rows in (4, 7):  # with 7, the last batch of a rank is one example, on two ranks one that does not count
        for found in ranks(3).run(evaluated, rows, {}):
            assert found == pytest.approx(on_one_device(ROWS), rel=TOLERANCE)


def on_one_device(count: int) -> tuple[float, float]:
    x, y = examples(count)[:]
    model = network().eval()
    with torch.no_grad():
        output = model(x)
    return nn.functional.cross_entropy(output, y).item(), (output.argmax(-1) == y).double().mean().item()


def test_stages_and_tensor_ranks_count_each_example_once(ranks):
    """Of 21 examples, one of two data ranks is given one twice."""
    for parallel in ({"pipeline": 2}, {"tensor": {"size": 2, "rules": RULES}}):
        for found in ranks(4).run(evaluated, 4, {"parallel": parallel, "NUM_MICRO_BATCHES": 2}, 21):
            assert found == pytest.approx(on_one_device(21), rel=TOLERANCE)


# --- hooks ---


class Recording(hooks.BaseHook):
    """Writes down each call, with the trainer's numbers."""

    def __init__(self, name: str, priority: int, calls: list[str]) -> None:
        super().__init__(priority)
        self.name, self.calls = name, calls

    def __getattribute__(self, point: str) -> Any:
        found = super().__getattribute__(point)
        if not point.startswith(("before_", "after_")):
            return found

        def call(trainer: Trainer, *of_batch: Any) -> None:
            self.calls.append(f"{self.name} {point} {trainer.cur_epoch}.{trainer.cur_step}.{len(of_batch)}")
            found(trainer, *of_batch)

        return call


def in_order() -> tuple[list[str], tuple[Any, ...]]:
    calls: list[str] = []
    trainer, train, test, _ = began({}, rows=11)
    given = [Recording("late", 10, calls), Recording("b", 1, calls), Recording("a", 0, calls), Recording("c", 1, calls)]
    trainer.fit(train, epochs=5, max_steps=3, test_dataloader=test, test_interval=2, hooks=given)
    ends = trainer.cur_epoch, trainer.cur_step, trainer.max_epochs, trainer.max_steps, trainer.steps_per_epoch
    return calls, ends


def test_hooks_are_called_by_priority_at_every_point(ranks):
    calls, ends = ranks(1).run(in_order)[0]
    iteration = ["before_train_iter {}.0", "after_train_iter {}.3"]
    points = ["after_hook_is_attached 0.0.0", "before_train 0.0.0", "before_train_epoch 0.0.0"]
    points += [call.format(f"0.{step}") for step in (0, 1) for call in iteration]
    points += ["after_train_epoch 0.2.0", "before_test 0.2.0", "before_test_epoch 0.2.0"]
    points += 2 * ["before_test_iter 0.2.0", "after_test_iter 0.2.3"]
    points += ["after_test_epoch 0.2.0", "after_test 0.2.0", "before_train_epoch 1.2.0"]
    points += [call.format("1.2") for call in iteration]
    points += ["after_train_epoch 1.3.0", "after_train 2.3.0"]
    assert calls == [f"{name} {point}" for point in points for name in ("a", "b", "c", "late")]
    assert ends == (2, 3, 5, 3, 2)


def by_epoch() -> list[float]:
    trainer, train, _, scheduler = began({}, rows=11)
    rates: list[float] = []

    class Skipped(hooks.BaseHook):
        """As if the last step of the epoch had overflowed."""

        def after_train_epoch(self, trainer: Trainer) -> None:
            trainer.engine.optimizer.step_was_skipped = True

    class Rates(hooks.BaseHook):
        def after_train_epoch(self, trainer: Trainer) -> None:
            rates.append(trainer.states["metrics"]["train"]["LR"].get_accumulated_value())

    trainer.fit(train, epochs=4, hooks=[Rates(), hooks.LRSchedulerHook(scheduler, by_epoch=True), Skipped(0)])
    return rates


def test_an_epoch_has_passed_also_where_its_last_step_was_none(ranks):
    assert ranks(1).run(by_epoch) == [[0.05, 0.025, 0.025, 0.0125]]


def without_scheduler() -> tuple[int, list[list[float]]]:
    """The scheduler is built on the optimizer and not given to `initialize`; what comes first in each epoch."""
    launch({"gradient_accumulation": 3}, 0, 1, "localhost", 29500, verbose=False)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    engine, train, _, _ = initialize(
        model, optimizer, nn.CrossEntropyLoss(), get_dataloader(examples(), shuffle=True, batch_size=3), verbose=False
    )
    orders: list[list[float]] = []

    class Inputs(hooks.BaseHook):
        def before_train_epoch(self, trainer: Trainer) -> None:
            orders.append([])

    model.register_forward_pre_hook(lambda module, args: orders[-1].extend(args[0][:, 0].tolist()))
    Trainer(engine).fit(train, epochs=2, hooks=[Inputs(), hooks.LRSchedulerHook(scheduler, by_epoch=False)])
    return scheduler.last_epoch, orders


def test_a_scheduler_of_steps_waits_for_them_and_epochs_have_orders_of_their_own(ranks):
    steps, (first, second) = ranks(1).run(without_scheduler)[0]
    assert steps == 4  # two epochs of six batches of the eight, three to a step
    assert len(set(first)) == len(set(second)) == 18 and first != second


# --- checkpoints ---

SAVED = {"gradient_accumulation": 2, "zero": {"stage": 2}}
RULES = {"0": "colwise", "1": None, "3": "rowwise"}
RESUMED = {
    "gradient_accumulation": 2,
    "zero": {"stage": 1},
    "parallel": {"tensor": {"size": 2, "rules": RULES}},
}
COUNT = 48  # 8 a batch, 6 batches an epoch, 3 steps


def fitted(config: dict[str, Any], folder: str | None, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    data_ranks = dist.get_world_size() // (2 if "parallel" in config else 1)
    trainer, train, _, scheduler = began(config, rows=8 // data_ranks, count=COUNT)
    hook_list = [hooks.LossHook(), hooks.LRSchedulerHook(scheduler, by_epoch=options.pop("by_epoch", False))]
    saving = {key: options.pop(key) for key in ("interval", "save_by_iter", "resume") if key in options}
    if folder is not None:
        hook_list.append(hooks.SaveCheckpointHook(checkpoint_dir=folder, **saving))
    trainer.fit(train, hooks=hook_list, **options)
    state = {name: whole(value).clone() for name, value in sl.full_state_dict(trainer.engine.model).items()}
    return state, [trainer.cur_epoch, trainer.cur_step, scheduler.get_last_lr()[0]]


@pytest.mark.parametrize(
    ("saving", "steps"),
    [
        ({"interval": 3, "save_by_iter": True}, [4, 6, 10]),  # after the third batch its step is waited for
        ({"interval": 1}, [6]),  # the second epoch ends in the midst of a step
        ({"interval": 6, "save_by_iter": True, "by_epoch": True}, [6]),
    ],
    ids=["by batches", "by epochs", "by batches, at the end of an epoch"],
)
def test_training_goes_on_from_a_checkpoint_on_other_ranks(ranks, tmp_path, saving, steps):
    by_epoch = {"by_epoch": saving.get("by_epoch", False)}
    straight, ends = ranks(1).run(fitted, SAVED, None, epochs=3, **by_epoch)[0]
    ranks(2).run(fitted, SAVED, str(tmp_path), epochs=3, max_steps=11, **saving)
    assert sl.Checkpoints(tmp_path).steps() == steps
    for resumed, there in ranks(4).run(fitted, RESUMED, str(tmp_path), epochs=3, resume=True, interval=100, **by_epoch):
        assert there == ends
        for name, value in straight.items():
            torch.testing.assert_close(resumed[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def fitted_twice(folder: str) -> tuple[int, bool]:
    trainer, train, *_ = began({}, rows=11)
    hook = hooks.SaveCheckpointHook(interval=2, checkpoint_dir=folder, resume=True)
    trainer.fit(train, epochs=3, hooks=[hook])
    before = [param.clone() for param in trainer.engine.model.parameters()]
    trainer.fit(train, epochs=3, hooks=[hook])
    same = all(torch.equal(a, b) for a, b in zip(before, trainer.engine.model.parameters(), strict=True))
    return trainer.cur_step, same


def test_a_trainer_that_has_trained_goes_on_from_where_it_is(ranks, tmp_path):
    assert ranks(1).run(fitted_twice, str(tmp_path)) == [(6, True)]


# --- what is wrong ---


def no_pair() -> str:
    trainer, *_ = began({}, rows=4)
    with pytest.raises(InputError) as refused:
        trainer.fit([torch.ones(2, 6, dtype=torch.float64)], epochs=1)
    return str(refused.value)


class Short(list[Any]):
    def __len__(self) -> int:
        return 3


def ends_early() -> str:
    trainer, *_ = began({}, rows=4)
    with pytest.raises(InputError) as refused:
        trainer.fit(Short([tuple(examples()[:4])]), epochs=1)
    return str(refused.value)


def a_part() -> str:
    trainer, _, test, _ = began({}, rows=4)
    with pytest.raises(InputError) as refused:
        trainer.evaluate(test, hooks=[hooks.AccuracyHook(lambda output, label: 0.5)])
    return str(refused.value)


def a_class() -> str:
    trainer, train, *_ = began({}, rows=4)
    with pytest.raises(PlanError) as refused:
        trainer.fit(train, epochs=1, hooks=[hooks.LossHook])
    return str(refused.value)


def no_folder() -> str:
    with pytest.raises(CheckpointError) as refused:
        hooks.SaveCheckpointHook()
    return str(refused.value)


def no_length() -> str:
    trainer, *_ = began({}, rows=4)
    with pytest.raises(InputError) as refused:
        trainer.fit(iter([]), epochs=1)
    return str(refused.value)


def no_interval() -> str:
    with pytest.raises(PlanError) as refused:
        hooks.LogMetricByEpochHook(get_dist_logger(), interval=0)
    return str(refused.value)


MESSAGES = {
    no_pair: "A batch is a Tensor; give pairs (data, label), dicts of a model's arguments, or a data_process_func that "
    "makes pairs: initialize(...), then engine.schedule.data_process_func = ...",
    ends_early: "Epoch 1 / Train: the dataloader has given 1 batches, and its length is 3. Give it the length that it "
    "has.",
    a_part: "accuracy_func says 0.5 of 4 examples; it must return the number of right examples, not their fraction: ("
    "output.argmax(-1) == label).sum(), or with their number where that is not the batch's, as a pair.",
    a_class: "hooks has LossHook, a class; give instances of subclasses of BaseHook, such as LossHook().",
    no_folder: "SaveCheckpointHook was given no checkpoint_dir; give a folder that all ranks see.",
    no_length: "The list_iterator has no length, so the end of an epoch is not known. Give one with a length, or write "
    "the loop yourself with the engine.",
    no_interval: "interval=0 was given; give an integer from 1 up.",
}


@pytest.mark.parametrize("wrong", MESSAGES, ids=lambda wrong: wrong.__name__)
def test_what_is_wrong_is_said(ranks, wrong):
    assert ranks(1).run(wrong) == [MESSAGES[wrong]]


# --- the small things ---


def logged(folder: str) -> list[str]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    trainer, train, test, _ = began({}, rows=11)
    logger = get_dist_logger("in a test")
    logger.log_to_file(folder, mode="w")
    timer = trainer.timer
    hook_list = [
        hooks.LogMetricByEpochHook(logger, interval=2),
        hooks.LogTimingByEpochHook(timer, logger),
        hooks.LogMemoryByEpochHook(logger, report_cpu=True),
        hooks.LogMetricByStepHook(),
        hooks.LossHook(),
    ]
    trainer.fit(train, epochs=2, test_dataloader=test, hooks=hook_list)
    logger.warning("from all")
    logger.close()
    assert (list(root.handlers), root.level) == before
    assert trainer.states["step_metrics"].keys() == {"Loss"}
    return Path(folder, f"rank_{dist.get_rank()}.log").read_text().splitlines()


def test_logs_have_the_rank_and_leave_the_root_logger_alone(ranks, tmp_path):
    first, second = ranks(2).run(logged, str(tmp_path))
    assert [line.partition("] ")[2] for line in second] == ["WARNING rank 1 of 2: from all"]
    texts = [line.partition("rank 0 of 2: ")[2] for line in first]
    heads = [text.partition(": ")[0] for text in texts]
    both = ["[Epoch {} / Train]", "[Epoch {} / Test]"]
    first_epoch = [head.format(1) for head in both for _ in range(2)]
    second_epoch = [head.format(2) for head in both for _ in range(3)]
    assert heads[:-1] == ["[Epoch 1 / Before training]", *first_epoch, *second_epoch]
    assert texts[5].startswith("[Epoch 2 / Train]: Loss = 1.") and "Train-epoch: last = " in texts[6]
    assert texts[-1] == "from all"


def test_a_bar_of_the_trainer_is_there_from_the_beginning_if_it_was_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("shardlib._progress.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "120")
    for shown in (True, False):
        with _progress("Epoch 1 / Train", 3, 1, shown=shown) as progress:
            progress.advance(numbers={"Loss": "0.5"})
            progress.advance(numbers={"Loss": "0.25"})
        said = capsys.readouterr().err
        if shown:
            assert "Epoch 1 / Train" in said and "1/3 steps" in said and "3/3 steps" in said and "Loss = 0.25" in said
        else:
            assert said == ""


def coordinated(folder: str) -> list[Any]:
    coordinator, file = DistCoordinator(), Path(folder, "made")

    @coordinator.on_master_only()
    def name() -> str:
        return "master"

    with coordinator.priority_execution(executor_rank=1):
        found = file.exists()
        file.touch()
    coordinator.block_all()
    return [found, name(), coordinator.is_master(), coordinator.is_last_process(), coordinator.rank]


def test_a_coordinator_lets_one_rank_go_first(ranks, tmp_path):
    assert ranks(2).run(coordinated, str(tmp_path)) == [[True, "master", True, False, 0], [False, None, False, True, 1]]


class TwoHeads(BaseSchedule):
    """A schedule of one's own."""

    def forward_backward_step(self, engine: Any, data_iter: Any, forward_only: bool = False, **options: Any) -> Any:
        data, label = self.load_batch(data_iter, engine.device)
        output = engine(data)
        loss = engine.criterion(output, label) + engine.criterion(-output, label)
        if not forward_only:
            engine.backward(loss)
        return output, label, loss


def own_schedule() -> tuple[int, float]:
    trainer, train, *_ = began({}, rows=4)
    trainer = Trainer(trainer.engine, schedule=TwoHeads())
    trainer.fit(train, epochs=1, hooks=[hooks.LossHook()])
    return trainer.cur_step, trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()


def test_a_schedule_and_a_data_process_func_of_ones_own(ranks):
    (steps, loss), _ = ranks(2).run(own_schedule)
    assert steps == 3 and loss > 0
    assert ranks(1).run(own_data) == [3]


def own_data() -> int:
    trainer, *_ = began({}, rows=4)
    batches = [{"x": examples()[:4][0], "y": examples()[:4][1], "id": i} for i in range(3)]
    schedule = NonPipelineSchedule(data_process_func=lambda batch: (batch["x"], batch["y"]))
    trainer = Trainer(trainer.engine, timer=MultiTimer(on=False), schedule=schedule)
    trainer.fit(batches, epochs=1)
    return trainer.cur_step


def tensorboard(folder: str) -> list[str]:
    trainer, train, test, _ = began({}, rows=11)
    trainer.fit(
        train, epochs=2, test_dataloader=test, hooks=[hooks.LossHook(), hooks.TensorboardHook(folder, ranks=[1])]
    )
    return sorted(os.listdir(folder))


def test_numbers_go_to_tensorboard_from_the_ranks_that_are_named(ranks, tmp_path):
    ranks(2).run(tensorboard, str(tmp_path))
    assert os.listdir(tmp_path) == ["rank_1"]
    events = EventAccumulator(str(tmp_path / "rank_1"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["Loss/test/epoch", "Loss/train/epoch", "Loss/train/step"]
    assert [event.step for event in events.Scalars("Loss/train/epoch")] == [0, 1]


def test_without_tensorboard_its_hook_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(LaunchError) as refused:
        hooks.TensorboardHook(tmp_path)
    assert str(refused.value) == (
        "TensorboardHook needs the package tensorboard, which is not installed: pip install 'shardlib[tensorboard]'."
    )
