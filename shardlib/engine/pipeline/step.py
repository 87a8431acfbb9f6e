"""`pipeline_step`: a batch through all stages and back, with the gradients of one device at its end."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib._mesh import MeshShape
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
    refuse_unfit,
    rows,
    sizes_of_parts,
    split,
)
from shardlib.engine.pipeline.route import Gate
from shardlib.engine.pipeline.run import Criterion, Failure, Part, Run
from shardlib.engine.pipeline.transport import Transport
from shardlib.engine.sharded import Sharded, record_of
from shardlib.engine.wrapper import OptimizerWrapper
from shardlib.errors import InputError, ShardingError, StageError

__all__ = ["PipelineStep", "pipeline_step", "run_step"]


@dataclass(frozen=True)
class PipelineStep:
    """What a step of a pipeline gave.

    Attributes:
        loss: the mean over all rows, or all that was counted, of all data ranks: a scalar with the same bits on every
            rank. None without a criterion, where the output has no loss.
        outputs: the model's output for this data rank's whole batch, on the ranks of the last stage; None on others,
            and where they were not asked for. What the last stage does not know of an output is None in it.
        executed: what this rank did, in its order.
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
    """Forward and backward of a batch, in microbatches that run through the stages of a model. All ranks call it.

    When it returns, gradients are those of one device on the whole batch of all data ranks: of the mean loss over all
    rows, whatever their number in a microbatch; or, where the criterion counts, of the sum of all losses over the sum
    of all counts. Clip and step then as usual. Inside of `shardlib.no_sync(model)` gradients are only added up.

    A model without stages runs its microbatches one after another.

    Args:
        model: what `shard_model` returned.
        batch: this data rank's, the same on all stages: a tensor, a tuple of positional arguments, a mapping of keyword
            arguments, or (tuple, mapping). Tensors with the batch's leading dim are cut, all else goes with every
            microbatch.
        criterion: a function (output, microbatch) -> loss, called where the last stage is: the mean over the
            microbatch's rows, or a pair (sum, count). By default the loss that the output carries, a mean over rows.
        optimizer: where the plan scales the loss, the wrapper that undoes it.
        microbatches: how many; by default what the plan says (`pipeline("1f1b", microbatches=8)`).
        microbatch_size: instead, the rows of each; the last one may have fewer.
        return_outputs: keep the outputs of all microbatches, joined.
        forward_only: without gradients; for evaluation, after `model.eval()`. Outputs are kept.

    Returns:
        The loss and the outputs.

    Raises:
        InputError: a batch that cannot be cut, ranks of one pipeline with different batches, losses that are none.
        PlanError: a forward that cannot run on these stages; on all ranks.
        StageError: a stage has raised; on all ranks, with where and why.

    Example:
        >>> import shardlib as sl
        >>> model = sl.shard_model(nn.Linear(4, 2), "dp=1", {"**": None})
        >>> def criterion(output, batch):
        ...     return output.square().mean()
        >>> step = pipeline_step(model, torch.ones(6, 4), criterion, microbatches=3)
        >>> step.loss.shape, model.weight.grad.shape
        (torch.Size([]), torch.Size([2, 4]))
    """
    return run_step(
        model,
        batch,
        criterion,
        optimizer=optimizer,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        return_outputs=return_outputs,
        forward_only=forward_only,
    )


def run_step(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None,
    *,
    optimizer: OptimizerWrapper | None = None,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    return_outputs: bool = False,
    forward_only: bool = False,
    watched: Callable[[Action], AbstractContextManager[None]] | None = None,
) -> PipelineStep:
    """`pipeline_step`, each of whose actions runs inside of what `watched` gives for it."""
    record, train = record_of(model), not forward_only and torch.is_grad_enabled()
    one = _Step(model, record, train=train)
    parts, gates, failed = one.prepare(batch, microbatches, microbatch_size)
    meet = one.ask(parts, failed)
    if failed is not None:
        meet()
    run = Run(
        model,
        record.pipeline.route if record.pipeline is not None else None,
        one.transport(parts),
        parts,
        gates,
        criterion,
        record.reducer,
        begin=lambda: one.factors(meet(), optimizer),
        early=one.standing.computes_early,
        train=train,
        keep_outputs=return_outputs or not train,
        watched=watched,
        on_failure=one.leave_if_alone,
    )
    one.carry_out(run)
    loss = one.finish(run)
    outputs = joined([run.outputs[m] for m in sorted(run.outputs)], [p.rows for p in parts]) if run.outputs else None
    return PipelineStep(loss, outputs, tuple(run.executed))


def _prints(part: Part) -> list[int]:
    return [agree.fingerprint(leaf) for leaf in _torch.leaves_of(part.call) if isinstance(leaf, torch.Tensor)]


@lru_cache(maxsize=256)
def _mark(keys: Sequence[Hashable]) -> int:
    """A number for the kinds of microbatches, the same on every rank."""
    return zlib.crc32(repr([(key, len([*alike])) for key, alike in itertools.groupby(keys)]).encode())


@cache
def _data_places(shape: MeshShape) -> tuple[int, ...]:
    """Of each rank, its place among the data ranks."""
    return tuple(shape.data_place(shape.coordinate(rank))[0] for rank in range(shape.world_size))


class _Step:
    """A step on this rank."""

    def __init__(self, model: nn.Module, record: Sharded, *, train: bool) -> None:
        self.model, self.record, self.pipeline, self.train = model, record, record.pipeline, train
        self.standing, self.device = record.standing, record.reducer.executor.device
        self.before: list[Aside] = []

    @property
    def reducing(self) -> bool:
        return self.train and self.record.reducer.enabled

    # --- before -------------------------------------------------------------------------------------------------------

    def prepare(
        self, batch: Any, microbatches: int | None, size: int | None
    ) -> tuple[list[Part], list[Sequence[Gate | None]], Exception | None]:
        """Microbatches and their ways; or what keeps them from being made, which all ranks then hear of."""
        try:
            if microbatches is None and size is None:
                microbatches = self.record.plan.step.microbatches or None
            call = as_call(batch)
            self._refuse_elsewhere(call)
            parts = self._parts(call, batch, sizes_of_parts(rows(call), microbatches, size))
            if self.pipeline is None:
                refuse_unfit(self.model.forward, type(self.model).__name__, call)
                return parts, [[None]] * len(parts), None
            return parts, [self._gates(part) for part in parts], None
        except Exception as error:
            return [], [], error

    def _gates(self, part: Part) -> Sequence[Gate | None]:
        assert self.pipeline is not None
        return self.pipeline.route.learn(part.key, *part.call, training=self.model.training)

    def _parts(self, call: Call, batch: Any, sizes: Sequence[int]) -> list[Part]:
        cuts = split(call, sizes)
        keys = {}  # microbatches of one batch that have as many rows are alike
        for count, cut in zip(sizes, cuts, strict=True):
            if count not in keys:
                keys[count] = key_of(cut), self.model.training, self.train
        return [Part(cut, as_given(cut, batch), n, keys[n]) for n, cut in zip(sizes, cuts, strict=True)]

    def _refuse_elsewhere(self, call: Call) -> None:
        for leaf in _torch.leaves_of(call):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != self.device.type:
                raise InputError(
                    f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on "
                    f'{self.device}. Move the batch first: batch.to("{self.device.type}").'
                )

    def ask(self, parts: Sequence[Part], failed: Exception | None) -> Callable[[], float]:
        """Tell the other ranks what this one is about to do, and let them answer later.

        Returns a function: of the rows of all data ranks' batches, once ranks know that they are about to do the same.
        It raises:
            InputError: ranks of one pipeline that were given different batches; data ranks with other numbers of
                microbatches, where modules wait for all data ranks.
        """
        mark = _mark(tuple(part.key for part in parts))
        if self.pipeline is not None and not self.standing.compared and not self.standing.is_dry:
            self.standing.compared = True
            mark = zlib.crc32(repr([_prints(part) for part in parts]).encode(), mark)
        numbers = [float(failed is not None), float(mark), float(sum(part.rows for part in parts)), float(len(parts))]
        answers = self._asked(numbers)
        return lambda: self._meet(answers(), failed)

    def _meet(self, every: Sequence[Sequence[float]], failed: Exception | None) -> float:
        if any(row[0] for row in every):
            raise self._not_begun(failed)
        first: dict[int, int] = {}  # by place on the data axes, the first rank there
        for rank, (row, place) in enumerate(zip(every, _data_places(self.standing.shape), strict=True)):
            mate = first.setdefault(place, rank)
            if every[mate][1] != row[1]:
                raise InputError(
                    f"Ranks {mate} and {rank} work on the same examples, and were given different batches or "
                    "different numbers of microbatches. Pick the batch by the rank's place on the data axes alone, for "
                    'example with DistributedSampler(dataset, mesh["dp"].size(), mesh["dp"].get_local_rank()).'
                )
        counts = sorted({int(row[3]) for row in every})
        if len(counts) > 1 and self.record.meets_in_modules:
            raise InputError(
                f"Data ranks cut their batches into {' and '.join(map(str, counts))} microbatches, and this model's "
                "modules wait for all data ranks (stage 3, experts, or BatchNorm). Give all the same number: "
                "microbatches=."
            )
        return sum(every[rank][2] for rank in first.values())

    def _not_begun(self, failed: Exception | None) -> Exception:
        mine = None if failed is None else f"{type(failed).__name__}: {failed}"
        standing = self.standing
        told = [mine] if standing.everyone is None or standing.is_dry else agree.exchange(mine, standing.everyone)
        if failed is not None:
            return failed
        rank, text = next((rank, text) for rank, text in enumerate(told) if text is not None)
        return StageError(f"Rank {rank} could not begin this step, and no rank has: it raised {text}", rank=rank)

    @naming_lost_ranks("forward")
    def _asked(self, mine: Sequence[float]) -> Callable[[], list[Sequence[float]]]:
        """What waits for every rank's numbers, in the order of the mesh.

        In a dry run, where others are imagined, all are this one's.
        """
        if self.standing.everyone is None:
            return lambda: [mine]
        sent = torch.tensor(mine, dtype=torch.float64, device=self.device)
        every = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.standing.everyone))]
        work = dist.all_gather(every, sent, group=self.standing.everyone, async_op=True)

        @naming_lost_ranks("forward")
        def answers() -> list[Sequence[float]]:
            work.wait()
            return [mine] * len(every) if self.standing.is_dry else [each.tolist() for each in every]

        return answers

    def factors(self, total_rows: float, optimizer: OptimizerWrapper | None) -> tuple[float, float]:
        """What the sum of a microbatch's losses is multiplied with before backward: of means, of counted ones.

        Gradients are averaged over data ranks after backward, and the loss is to be the mean over all rows. Counts are
        known when all forwards are over, and divided by then.
        """
        wrapper = optimizer if isinstance(optimizer, OptimizerWrapper) else None
        if self.record.plan.step.scaler is not None and self.train and wrapper is None:
            raise ShardingError(
                "The plan scales the loss (precision), and only an OptimizerWrapper undoes that. Wrap the optimizer, "
                "and pass it: pipeline_step(model, batch, criterion, optimizer=opt)."
            )
        scaled = wrapper.backward_by_another() if wrapper is not None and self.train else 1.0
        return scaled * self.standing.data_ranks / max(total_rows, 1.0), scaled

    def transport(self, parts: Sequence[Part]) -> Transport | None:
        """Of this step's messages; None where there is one stage."""
        if self.pipeline is None:
            return None
        timetable = self.pipeline.timetable(tuple(part.key for part in parts), self.train)
        return Transport(self.pipeline.channels, timetable, self.device)

    # --- during -------------------------------------------------------------------------------------------------------

    def carry_out(self, run: Run) -> None:
        """All actions, with this step's gradients apart from earlier ones."""
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
        """Where ranks wait for each other inside of modules, those of one that raises alone would wait in vain.

        Raises:
            StageError: they are told so, and this job cannot go on.
        """
        if len(self.standing.mates) == 1 or self.standing.is_dry:
            return
        which = f"failed/{self.standing.number}/{next(self.standing.failures)}"
        if not lost.all_say(which, str(failure.action), self.standing.mates):
            lost.leave()
            after = "Ranks waited for this one inside of modules and have been told; end them, and start the job again."
            raise _stage_error(dist.get_rank(), failure.action, failure.text, after) from failure.error

    def _actions(self, run: Run) -> Sequence[Action]:
        if run.transport is not None:
            return run.transport.timetable.own
        return [Action(kind, 0, m) for m in range(len(run.parts)) for kind in ("FB" if self.train else "F")]  # type: ignore[arg-type]

    def _shared(self) -> Sequence[Any]:
        return self.pipeline.shared if self.pipeline is not None and self.train else ()

    # --- after --------------------------------------------------------------------------------------------------------

    def finish(self, run: Run) -> torch.Tensor | None:
        """Gradients of all ranks together; the loss.

        Raises:
            StageError: a rank has failed.
        """
        losses, shared = run.losses, self._shared()
        if self.standing.is_dry and run.failure is not None:
            raise run.failure.error
        speaks = losses.counted is not None and self.standing.speaks
        mine = [float(run.failure is not None), float(losses.counted is True), float(speaks)]
        mine += [1.0, 1.0] if self.standing.is_dry else losses.sums() if speaks else [0.0, 0.0]
        reducer = self.record.reducer
        mine += [float(each.held is not None and reducer.has_gradient(each.held)) for each in shared]
        every = self._asked(mine)()
        if any(row[0] for row in every):
            self._give_up()
            raise self._failed(run)
        speakers = [row for row in every if row[2]]
        total, weight = (sum(row[column] for row in speakers) for column in (3, 4))
        if speakers and not weight:
            self._give_up()
            raise InputError("The counts of this step add up to zero on all ranks: there is nothing to learn from.")
        if self.train:
            counted = any(row[1] for row in every)
            present = [any(row[5 + i] for row in every) for i in range(len(shared))]
            self._settle(self.standing.data_ranks / weight if counted else 1.0, present)
        wide = any(leaf.dtype is torch.float64 for leaf in self.record.reducer.leaves())
        dtype = torch.float64 if wide else torch.float32
        return torch.tensor(total / weight, dtype=dtype, device=self.device) if speakers else None

    def _settle(self, scale: float, present: Sequence[bool]) -> None:
        reducer = self.record.reducer
        if scale != 1.0:
            reducer.multiply_gradients(scale)
        reducer.reduce_now(self.before)
        between = not self.reducing or reducer.is_between_passes()
        for shared, somewhere in zip(self._shared(), present, strict=True):
            if somewhere and not between:
                shared.sum_up()
            else:
                shared.put_prior_back()

    def _give_up(self) -> None:
        """The gradients of a step that failed are worth nothing; earlier ones stay."""
        if self.train:
            self.record.reducer.put_gradients_aside()
            self.record.reducer.add_gradients(self.before)
            for shared in self._shared():
                shared.put_prior_back()

    def _failed(self, run: Run) -> Exception:
        """The first failure of all, the same on all ranks."""
        failure = run.failure
        mine = None if failure is None else (failure.when, failure.action, failure.text)
        told = agree.exchange(mine, self.standing.everyone) if self.standing.everyone is not None else [mine]
        rank, (_, action, text) = min(
            ((r, t) for r, t in enumerate(told) if t is not None), key=lambda each: each[1][0]
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
