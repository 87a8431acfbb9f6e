"""Schedules: forward, loss and backward of one batch, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from shardlib.engine import pipeline_step
from shardlib.errors import InputError, PlanError
from shardlib.trainer._registry import Registry

__all__ = [
    "SCHEDULE",
    "BaseSchedule",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "build_schedule",
    "check_schedule",
    "register_schedule",
    "rows_of",
]

Result = tuple[Any, Any, Any]
C = TypeVar("C", bound=type)

SCHEDULE = Registry("schedule")
"""Schedules by name; `SCHEDULE.register_module` is ColossalAI's spelling of the decorator below."""


def register_schedule(name: str | None = None) -> Callable[[C], C]:
    """Decorate a class so that a config may name it, as in `schedule=dict(type="Twice")`.

    Args:
        name: by default that of the class.

    >>> @register_schedule("twice")
    ... class Twice(NonPipelineSchedule):
    ...     def forward_backward_step(self, engine, data_iter, *args, **kwargs):
    ...         super().forward_backward_step(engine, data_iter, *args, **kwargs)
    ...         return super().forward_backward_step(engine, data_iter, *args, **kwargs)
    """
    return SCHEDULE.register_module(name=name)


def check_schedule(described: Any, *, staged: bool) -> Mapping[str, Any] | None:
    """Check the `schedule` of a config, before anything is built.

    Raises:
        PlanError: not a dict with a registered `type`; one that is not a schedule, or none for stages, if the model
            has stages.
    """
    if described is None:
        return None
    if not isinstance(described, Mapping) or "type" not in described:
        raise PlanError(f'The config says schedule={described!r}; give a dict, such as schedule=dict(type="Mine").')
    cls = SCHEDULE.get_module(described["type"])
    wanted = PipelineSchedule if staged else BaseSchedule
    if not (isinstance(cls, type) and issubclass(cls, wanted)):
        raise PlanError(
            f'The config names the schedule "{described["type"]}", and {cls!r} is not a subclass of {wanted.__name__}'
            f"{', which a model in stages needs' if staged else ''}."
        )
    if cls.forward_backward_step is BaseSchedule.forward_backward_step:
        raise PlanError(f'The schedule "{described["type"]}" has no forward_backward_step of its own; write one.')
    return dict(described)


def build_schedule(described: Mapping[str, Any] | None, *, staged: bool) -> BaseSchedule:
    """Build the schedule that a config names, or the default."""
    if described is None:
        return PipelineSchedule() if staged else NonPipelineSchedule()
    options = {key: value for key, value in described.items() if key != "type"}
    return SCHEDULE.get_module(described["type"])(**options)


class BaseSchedule:
    """The treatment of one batch by an engine. Your own is a subclass with a `forward_backward_step`.

    Args:
        data_process_func: converts a batch to `(data, label)`; by default a batch is such a pair.

    Attributes:
        batch_size: the number of examples of the last batch on this rank, without repeated ones.
        repeated: the number of examples at the end of the next batch that are repeated and not counted; for evaluation.
        has_output: whether this rank has outputs: in a pipeline, ranks of the last stage have.

    >>> schedule = NonPipelineSchedule(lambda batch: (batch["x"], batch["y"]))
    >>> schedule.load_batch(iter([{"x": torch.ones(3, 2), "y": torch.zeros(3)}]), torch.device("cpu"))[1]
    tensor([0., 0., 0.])
    >>> schedule.batch_size
    3
    """

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func
        self.batch_size = 0
        self.repeated = 0
        self.has_output = True

    def load_batch(self, data_iter: Iterator[Any], device: torch.device) -> tuple[Any, Any]:
        """Load the next batch as data and label on a device.

        Raises:
            InputError: the batch is not such a pair.
        """
        batch = next(data_iter)
        if self.data_process_func is not None:
            batch = self.data_process_func(batch)
        elif isinstance(batch, Mapping):
            batch = batch, None  # as Hugging Face's collators make it: labels are among the model's arguments
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise InputError(
                f"A batch is a {type(batch).__name__}{length}; give pairs (data, label), dicts of a model's arguments, "
                "or a data_process_func that makes pairs: initialize(...), then engine.schedule.data_process_func = ..."
            )
        data, label = _to_device(batch[0], device), _to_device(batch[1], device)
        self.batch_size = rows_of(data)
        return data, label

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        """Run forward, and backward unless `forward_only`, of an `Engine`'s next batch; `(output, label, loss)`."""
        raise NotImplementedError

    def _without_repeated(self, output: Any, label: Any) -> tuple[Any, Any]:
        rows, kept = self.batch_size, self.batch_size - self.repeated
        self.batch_size = kept
        return _part(output, rows, slice(kept)), _part(label, rows, slice(kept))

    def _loss(self, engine: Any, output: Any, label: Any) -> Any:
        if self.batch_size == 0:  # nothing here counts
            return torch.zeros((), device=engine.device)
        if engine.criterion is not None:
            return _called_criterion(engine.criterion, output, label)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise InputError(
                f"The engine has no criterion, and the model's output, a {type(output).__name__}, has no loss. Give "
                "initialize a criterion, or the model its labels."
            )
        return loss


class NonPipelineSchedule(BaseSchedule):
    """Forward, loss and backward of one batch at a time, with all modules.

    >>> NonPipelineSchedule().batch_size
    0
    """

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        if not forward_only and not return_loss:
            raise InputError("return_loss=False was given for training; backward needs a loss. Give forward_only=True.")
        data, label = self.load_batch(data_iter, engine.device)
        with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
            output = _called(engine, data)
            if forward_only and self.repeated:
                output, label = self._without_repeated(output, label)
            loss = self._loss(engine, output, label) if return_loss else None
        if not forward_only:
            engine.backward(loss)
        return (output, label, loss) if return_output_label else (None, None, loss)


class PipelineSchedule(BaseSchedule):
    """Forward, loss and backward of one batch in microbatches, through the stages of a pipeline.

    In training the loss is that of all data ranks, on every rank. Outputs, and in evaluation losses, are on the ranks
    of the last stage; others have None.

    Args:
        num_microbatches: the number of microbatches; by default the config's.
        data_process_func: see `BaseSchedule`.

    >>> PipelineSchedule(num_microbatches=4).num_microbatches
    4
    """

    def __init__(
        self,
        num_microbatches: int | None = None,
        data_process_func: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        super().__init__(data_process_func)
        self.num_microbatches = num_microbatches

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:
        data, label = self.load_batch(data_iter, engine.device)
        data = tuple(data) if isinstance(data, list) else data
        if forward_only:
            return self._evaluate(engine, data, label, return_loss, return_output_label)
        done = pipeline_step(
            engine.model,
            data,
            None if engine.criterion is None else _OfMicrobatches(engine.criterion, label, self.batch_size),
            optimizer=engine.optimizer,
            microbatches=self.num_microbatches,
            return_outputs=return_output_label,
        )
        return (done.outputs, label, done.loss) if return_output_label else (None, None, done.loss)

    def _evaluate(self, engine: Any, data: Any, label: Any, return_loss: bool, return_output_label: bool) -> Result:
        """Evaluate the model; the loss is computed from the outputs, without padded rows."""
        done = pipeline_step(engine.model, data, microbatches=self.num_microbatches, forward_only=True)
        output, self.has_output = done.outputs, done.outputs is not None
        if self.has_output and self.repeated:
            output, label = self._without_repeated(output, label)
        loss = self._loss(engine, output, label) if return_loss and self.has_output else None
        return (output, label, loss) if return_output_label else (None, None, loss)


class _OfMicrobatches:
    """A criterion of (output, label) for microbatches, which come in the order of the batch's rows."""

    def __init__(self, criterion: Callable[..., Any], label: Any, rows: int) -> None:
        self.criterion, self.label, self.rows, self.taken = criterion, label, rows, 0

    def __call__(self, output: Any, microbatch: Any) -> Any:
        begin, self.taken = self.taken, self.taken + rows_of(microbatch)
        return _called_criterion(self.criterion, output, _part(self.label, self.rows, slice(begin, self.taken)))


def rows_of(data: Any) -> int:
    """Return the number of examples: the first dim of the first tensor.

    >>> rows_of({"ids": torch.zeros(4, 7), "mask": [torch.zeros(4)]}), rows_of(3)
    (4, 0)
    """
    if isinstance(data, torch.Tensor):
        return int(data.shape[0]) if data.ndim else 0
    inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple | list) else ()
    return next((rows for value in inside if (rows := rows_of(value))), 0)


def _called(engine: Any, data: Any) -> Any:
    if isinstance(data, Mapping):
        return engine(**data)
    return engine(*data) if isinstance(data, tuple | list) else engine(data)


def _called_criterion(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    outputs = output if isinstance(output, tuple | list) else (output,)
    if isinstance(label, Mapping):
        return criterion(*outputs, **label)
    labels = label if isinstance(label, tuple | list) else () if label is None else (label,)
    return criterion(*outputs, *labels)


def _mapped(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(value, change) for value in data))
    return type(data)(_mapped(value, change) for value in data) if isinstance(data, tuple | list) else data


def _to_device(data: Any, device: torch.device) -> Any:
    return _mapped(data, lambda tensor: tensor.to(device, non_blocking=True))


def _part(data: Any, rows: int, part: slice) -> Any:
    """Take some rows of all tensors that have a row for each example."""
    return _mapped(data, lambda tensor: tensor[part] if tensor.ndim and tensor.shape[0] == rows else tensor)
