"""`pipeline_step`: forward and backward of a batch through all stages, with the gradients of a single device."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib._plan.schedules import Action
from shardlib.engine import _torch, agree, lost
from shardlib.engine.gradients import Aside
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.pipeline.batch import (
    Call,
    as_call,
    as_given,
    joined,
    key_of,
    microbatch_sizes,
    refuse_unfit,
    rows,
    split,
)
from shardlib.engine.pipeline.route import StageBoundary
from shardlib.engine.pipeline.run import Criterion, Failure, Microbatch, Run
from shardlib.engine.pipeline.transport import Transport
from shardlib.engine.sharded import Sharded, record_of
from shardlib.engine.wrapper import OptimizerWrapper
from shardlib.errors import InputError, ShardingError, StageError

__all__ = ["PipelineStep", "pipeline_step"]


@dataclass(frozen=True)
class PipelineStep:
    """The result of a pipeline step.

    Attributes:
        loss: the mean over all rows, or all counted items, of all data ranks: a scalar with the same bits on every
            rank. None without a criterion, if the output has no loss.
        outputs: the model's output for the full batch of this data rank, on the ranks of the last stage; None on other
            ranks, and if outputs were not requested. Parts of an output that the last stage does not have are None.
        executed: the actions of this rank, in order.
    """

    loss: torch.Tensor | None
    outputs: Any = None
    executed: tuple[Action, ...] = field(default=(), repr=False)


def pipeline_step(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    *,
    optimizer: OptimizerWrapper | None = None,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    return_outputs: bool = False,
    forward_only: bool = False,
) -> PipelineStep:
    """Run forward and backward of a batch in microbatches through the stages of a model. All ranks must call it.

    Afterwards, `p.grad` is the gradient that one device computes from all examples of all data ranks: that of the mean
    loss over all rows, whatever the size of the microbatches; or, if the criterion returns counts, that of the sum of
    all losses divided by the sum of all counts. Clip gradients and step as usual. Inside of `shardlib.no_sync(model)`
    gradients are only accumulated.

    A model without stages runs its microbatches one after another.

    Args:
        model: the result of `shard_model`.
        batch: the batch of this data rank, the same on all stages: a tensor, a tuple of positional arguments, a mapping
            of keyword arguments, or (tuple, mapping). Tensors with the batch's leading dim are split, all other values
            go with every microbatch.
        criterion: a function (output, microbatch) -> loss, called on the last stage. It returns the mean over the
            microbatch's rows, or a pair (sum, count). By default the loss in the output, a mean over rows.
        optimizer: the wrapper that unscales gradients, if the plan scales the loss.
        microbatches: the number of microbatches; by default that of the plan (`pipeline("1f1b", microbatches=8)`).
        microbatch_size: instead, the rows of each; the last one may have fewer.
        return_outputs: keep the outputs of all microbatches, joined.
        forward_only: run without gradients, for evaluation after `model.eval()`. Outputs are kept.

    Returns:
        The loss and the outputs.

    Raises:
        InputError: the batch cannot be split, ranks of one pipeline have different batches, or a loss is invalid.
        PlanError: the forward cannot run on these stages; raised on all ranks.
        StageError: a stage has raised; raised on all ranks, with the stage and the error.

    Example:
        >>> import shardlib as sl
        >>> model = sl.shard_model(nn.Linear(4, 2), "dp=1", {"**": None})
        >>> def criterion(output, batch):
        ...     return output.square().mean()
        >>> step = pipeline_step(model, torch.ones(6, 4), criterion, microbatches=3)
        >>> step.loss.shape, model.weight.grad.shape
        (torch.Size([]), torch.Size([2, 4]))
    """
    record, train = record_of(model), not forward_only and torch.is_grad_enabled()
    if record.comparison is not None:
        record.comparison.before_forward((batch,), {})
    one = _Step(model, record, train=train)
    cut, failed = one.prepare(batch, microbatches, microbatch_size)
    meet = one.ask(cut, failed)
    if failed is not None:
        meet()
    run = Run(
        model,
        record,
        one.transport(cut),
        cut,
        criterion,
        begin=lambda: one.factors(meet(), optimizer),
        train=train,
        keep_outputs=return_outputs or not train,
        on_failure=one.leave_if_alone,
    )
    one.carry_out(run)
    loss = one.finish(run)
    outputs = joined([run.outputs[m] for m in sorted(run.outputs)], [p.rows for p in cut]) if run.outputs else None
    return PipelineStep(loss, outputs, tuple(run.executed))


def _prints(one: Microbatch) -> list[int]:
    return [agree.fingerprint(leaf) for leaf in _torch.leaves_of(one.call) if isinstance(leaf, torch.Tensor)]


@lru_cache(maxsize=256)
def _mark(keys: Sequence[Hashable]) -> int:
    """Return a number for the keys of the microbatches, the same on every rank."""
    return zlib.crc32(repr([(key, len([*same])) for key, same in itertools.groupby(keys)]).encode())


class _Step:
    """A step on this rank."""

    def __init__(self, model: nn.Module, record: Sharded, *, train: bool) -> None:
        self.model, self.record, self.pipeline, self.train = model, record, record.pipeline, train
        self.step_context, self.device = record.step_context, record.reducer.executor.device
        self.before: list[Aside] = []

    # --- before -------------------------------------------------------------------------------------------------------

    def prepare(
        self, batch: Any, microbatches: int | None, size: int | None
    ) -> tuple[list[Microbatch], Exception | None]:
        """Return the microbatches, or the error in making them, which all ranks are told of."""
        try:
            if microbatches is None and size is None:
                microbatches = self.record.plan.step.microbatches or None
            call = as_call(batch)
            self._refuse_elsewhere(call)
            return self._cut(call, batch, microbatch_sizes(rows(call), microbatches, size)), None
        except Exception as error:
            return [], error

    def _cut(self, call: Call, batch: Any, sizes: Sequence[int]) -> list[Microbatch]:
        cuts = split(call, sizes)
        known = {}  # microbatches of one batch with the same number of rows have the same key
        for count, cut in zip(sizes, cuts, strict=True):
            if count not in known:
                key = key_of(cut), self.model.training, self.train
                known[count] = key, self._boundaries(key, cut)
        return [Microbatch(cut, as_given(cut, batch), n, *known[n]) for n, cut in zip(sizes, cuts, strict=True)]

    def _boundaries(self, key: Hashable, call: Call) -> Sequence[StageBoundary | None]:
        if self.pipeline is None:
            refuse_unfit(self.model.forward, type(self.model).__name__, call)
            return [None]
        return self.pipeline.route.learn(key, *call, training=self.model.training)

    def _refuse_elsewhere(self, call: Call) -> None:
        for leaf in _torch.leaves_of(call):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != self.device.type:
                raise InputError(
                    f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on "
                    f'{self.device}. Move the batch first: batch.to("{self.device.type}").'
                )

    def ask(self, microbatches: Sequence[Microbatch], failed: Exception | None) -> Callable[[], float]:
        """Start to tell the other ranks what this rank is about to do, without waiting for their answers.

        Returns a function that waits for the answers, and returns the number of rows of all data ranks once the ranks
        are known to run the same step. The function raises `InputError` if ranks of one pipeline were given different
        batches, or if data ranks have different numbers of microbatches and modules communicate over data ranks.
        """
        mark = _mark(tuple(one.key for one in microbatches))
        if self.pipeline is not None and not self.step_context.compared and not self.step_context.is_dry:
            self.step_context.compared = True
            mark = zlib.crc32(repr([_prints(one) for one in microbatches]).encode(), mark)
        total = sum(one.rows for one in microbatches)
        numbers = [float(failed is not None), float(mark), float(total), float(len(microbatches))]
        answers = self._gather(numbers)
        return lambda: self._meet(answers(), failed)

    def _meet(self, every: Sequence[Sequence[float]], failed: Exception | None) -> float:
        if any(row[0] for row in every):
            raise self._not_begun(failed)
        first: dict[int, int] = {}  # the first rank of each data rank
        for rank, (row, place) in enumerate(zip(every, self.step_context.data_places, strict=True)):
            peer = first.setdefault(place, rank)
            if every[peer][1] != row[1]:
                raise InputError(
                    f"Ranks {peer} and {rank} work on the same examples, and were given different batches or "
                    "different numbers of microbatches. Pick the batch by the rank's place on the data axes alone, for "
                    'example with DistributedSampler(dataset, mesh["dp"].size(), mesh["dp"].get_local_rank()).'
                )
        counts = sorted({int(row[3]) for row in every})
        if len(counts) > 1 and self.record.meets_in_modules:
            raise InputError(
                f"Data ranks split their batches into {' and '.join(map(str, counts))} microbatches, but this model's "
                "modules communicate over all data ranks (stage 3, experts, or BatchNorm). Give all the same number: "
                "microbatches=."
            )
        return sum(every[rank][2] for rank in first.values())

    def _not_begun(self, failed: Exception | None) -> Exception:
        reports = self._reports(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            return failed
        rank, text = next((rank, text) for rank, text in enumerate(reports) if text is not None)
        return StageError(f"Rank {rank} could not begin this step, and no rank has: it raised {text}", rank=rank)

    def _reports(self, report: Any) -> list[Any]:
        """Return what each rank reports; in a dry run, what this one does."""
        step_context = self.step_context
        if step_context.everyone is None or step_context.is_dry:
            return [report]
        return agree.exchange(report, step_context.everyone, classes=[Action])

    @naming_lost_ranks("forward")
    def _gather(self, numbers: Sequence[float]) -> Callable[[], list[Sequence[float]]]:
        """Start to gather numbers of every rank; return a function that waits for them, in the order of the mesh.

        In a dry run, where other ranks do not exist, each row is this rank's.
        """
        if self.step_context.everyone is None:
            return lambda: [numbers]
        sent = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        every = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.step_context.everyone))]
        work = dist.all_gather(every, sent, group=self.step_context.everyone, async_op=True)

        @naming_lost_ranks("forward")
        def answers() -> list[Sequence[float]]:
            work.wait()
            return [numbers] * len(every) if self.step_context.is_dry else [each.tolist() for each in every]

        return answers

    def factors(self, total_rows: float, optimizer: OptimizerWrapper | None) -> tuple[float, float]:
        """Return the factors of the losses of a microbatch before backward: for mean losses, and for counted ones.

        Gradients are averaged over data ranks after backward, and the loss must be the mean over all rows. Counts are
        known only when all forwards have run; gradients are divided by them then.
        """
        wrapper = optimizer if isinstance(optimizer, OptimizerWrapper) else None
        if self.record.plan.step.scaler is not None and self.train and wrapper is None:
            raise ShardingError(
                "The plan scales the loss (precision), and only an OptimizerWrapper undoes that. Wrap the optimizer, "
                "and pass it: pipeline_step(model, batch, criterion, optimizer=opt)."
            )
        scaled = wrapper.backward_by_another() if wrapper is not None and self.train else 1.0
        return scaled * self.step_context.data_ranks / max(total_rows, 1.0), scaled

    def transport(self, microbatches: Sequence[Microbatch]) -> Transport | None:
        """Return the transport of this step's messages; None if there is one stage."""
        if self.pipeline is None:
            return None
        timetable = self.pipeline.timetable(tuple(one.key for one in microbatches), self.train)
        return Transport(self.pipeline.channels, timetable, self.device)

    # --- during -------------------------------------------------------------------------------------------------------

    def carry_out(self, run: Run) -> None:
        """Run all actions, and keep the gradients of this step apart from accumulated ones."""
        reducer = self.record.reducer
        for shared in self._shared():
            shared.put_prior_aside()
        self.before = reducer.put_gradients_aside() if self.train else []
        units = self.record.units
        with reducer.keep() if self.train else nullcontext(), units.step() if units is not None else nullcontext():
            try:
                run.carry_out(self._actions(run))
            except Exception as error:
                if run.refused is not None or isinstance(error, StageError):
                    self._give_up()
                raise

    def leave_if_alone(self, failure: Failure) -> None:
        """Leave the job if only this rank fails while others wait for it inside of modules.

        Raises:
            StageError: the others are told, and this job cannot continue.
        """
        if len(self.step_context.peers) == 1 or self.step_context.is_dry:
            return
        which = f"failed/{self.step_context.number}/{next(self.step_context.failures)}"
        if not lost.all_say(which, str(failure.action), self.step_context.peers):
            lost.leave()
            after = "Ranks waited for this one inside of modules and have been told; end them, and start the job again."
            raise _stage_error(dist.get_rank(), failure.action, failure.text, after) from failure.error

    def _actions(self, run: Run) -> Sequence[Action]:
        if run.transport is not None:
            return run.transport.timetable.own
        return [Action(kind, 0, m) for m in range(len(run.microbatches)) for kind in ("FB" if self.train else "F")]  # type: ignore[arg-type]

    def _shared(self) -> Sequence[Any]:
        return self.pipeline.shared if self.pipeline is not None and self.train else ()

    # --- after --------------------------------------------------------------------------------------------------------

    def finish(self, run: Run) -> torch.Tensor | None:
        """Reduce the gradients of all ranks and return the loss.

        Raises:
            StageError: a rank has failed.
        """
        losses, shared = run.losses, self._shared()
        if self.step_context.is_dry and run.failure is not None:
            raise run.failure.error
        reports_loss = losses.counted is not None and self.step_context.reports_loss
        numbers = [float(run.failure is not None), float(losses.counted is True), float(reports_loss)]
        numbers += [1.0, 1.0] if self.step_context.is_dry else losses.sums() if reports_loss else [0.0, 0.0]
        reducer = self.record.reducer
        numbers += [float(each.param_state is not None and reducer.has_gradient(each.param_state)) for each in shared]
        every = self._gather(numbers)()
        if any(row[0] for row in every):
            self._give_up()
            raise self._failed(run)
        with_loss = [row for row in every if row[2]]
        total, weight = (sum(row[column] for row in with_loss) for column in (3, 4))
        if with_loss and not weight:
            self._give_up()
            raise InputError("The counts of this step add up to zero on all ranks: there is nothing to learn from.")
        if self.train:
            counted = any(row[1] for row in every)
            present = [any(row[5 + i] for row in every) for i in range(len(shared))]
            self._finish_gradients(self.step_context.data_ranks / weight if counted else 1.0, present)
        wide = any(leaf.dtype is torch.float64 for leaf in self.record.reducer.leaves())
        dtype = torch.float64 if wide else torch.float32
        return torch.tensor(total / weight, dtype=dtype, device=self.device) if with_loss else None

    def _finish_gradients(self, scale: float, present: Sequence[bool]) -> None:
        reducer = self.record.reducer
        if scale != 1.0:
            reducer.multiply_gradients(scale)
        reducer.reduce_now(self.before)
        between = not reducer.enabled or reducer.is_between_passes()
        for shared, somewhere in zip(self._shared(), present, strict=True):
            if somewhere and not between:
                shared.sum_up()
            else:
                shared.put_prior_back()

    def _give_up(self) -> None:
        """Drop the gradients of a failed step; restore accumulated ones."""
        if self.train:
            self.record.reducer.put_gradients_aside()
            self.record.reducer.add_gradients(self.before)
            for shared in self._shared():
                shared.put_prior_back()

    def _failed(self, run: Run) -> Exception:
        """Return the error for the earliest failure of all ranks, the same on all ranks."""
        failure = run.failure
        reports = self._reports(None if failure is None else (failure.when, failure.action, failure.text))
        rank, (_, action, text) = min(
            ((r, t) for r, t in enumerate(reports) if t is not None), key=lambda each: each[1][0]
        )
        error = _stage_error(rank, action, text, "No rank has stepped; this step's gradients are dropped.")
        error.__cause__ = failure.error if failure is not None else None
        return error


def _stage_error(rank: int, action: Action, text: str, after: str) -> StageError:
    doing = "forward" if action.kind == "F" else "backward"
    return StageError(
        f"Stage {action.stage} on rank {rank} raised in the {doing} of microbatch {action.microbatch}: {text}\n{after}",
        rank=rank,
        stage=action.stage,
        microbatch=action.microbatch,
    )
