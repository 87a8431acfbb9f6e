"""`pipeline_step`: forward and backward of a batch through all stages, with the gradients of a single device.

A rank whose action raises continues with the order of actions without computing, and sends zeros of the agreed shapes.
No other rank therefore waits in vain, and all ranks learn of the failure at the end of the step.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from shardlib._plan.schedules import Action, order
from shardlib.engine import _torch
from shardlib.engine.data.gradients import Aside
from shardlib.engine.data.wrapper import OptimizerWrapper
from shardlib.engine.pipeline.batch import (
    Call,
    as_call,
    as_given,
    coincidences,
    joined,
    key_of,
    microbatch_sizes,
    places_of,
    refuse_unfit,
    rows,
    shown,
    split,
    tensors_by_place,
)
from shardlib.engine.pipeline.compute import Computation, Criterion, Losses, Microbatch
from shardlib.engine.pipeline.messages import Messages
from shardlib.engine.pipeline.route import StageBoundary
from shardlib.engine.pipeline.streams import Streams
from shardlib.engine.ranks import agree, lost
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.sharded import Sharded, record_of
from shardlib.engine.torn import refuse_torn
from shardlib.errors import InputError, LostRankError, ShardingError, StageError, check_flags, warn

__all__ = ["PipelineStep", "StepRun", "pipeline_step"]

Begin = Callable[[], tuple[float, float]]
Watch = Callable[[Action], AbstractContextManager[Any]]


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
    replicate: Collection[str | int] | None = None,
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
            of keyword arguments, or (tuple, mapping). Tensors whose leading dim has as many rows as that of the first
            tensor are split, all other values go with every microbatch.
        criterion: a function (output, microbatch) -> loss, called on the last stage. It returns the mean over the
            microbatch's rows, or a pair (sum, count). By default the loss in the output, a mean over rows.
        optimizer: the wrapper that unscales gradients, if the plan scales the loss.
        microbatches: the number of microbatches; by default that of the plan (`pipeline("1f1b", microbatches=8)`).
        microbatch_size: instead, the rows of each; the last one may have fewer.
        replicate: names of arguments of forward, or positions, that go with every microbatch whatever their shape, such
            as `("mask",)`; `"name.key"` of a value in a mapping. `()` says that all other tensors are as their shapes
            say. By default a tensor that may have as many rows by coincidence is warned of.
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
    check_flags("pipeline_step", InputError, return_outputs=return_outputs, forward_only=forward_only)
    train = not forward_only and torch.is_grad_enabled()
    step = StepRun(model, criterion, optimizer, train=train, keep_outputs=return_outputs or not train)
    return step.run(batch, microbatches, microbatch_size, replicate)


@lru_cache(maxsize=256)
def _mark(keys: Sequence[Hashable]) -> int:
    """Return a number for the keys of the microbatches, the same on every rank."""
    return zlib.crc32(repr([(key, len([*same])) for key, same in itertools.groupby(keys)]).encode())


# Of each model the arguments that were split into microbatches, or were not, with the rows of that step.
_split_before: WeakKeyDictionary[Sharded, dict[str, tuple[bool, int]]] = WeakKeyDictionary()


def _mark_of_values(call: Call) -> int | torch.Tensor:
    """Return a number of up to 52 bits for the values of a batch, the same on every rank that was given them.

    On an accelerator it is computed there, so that this rank does not wait for it.
    """
    tensors = sorted(agree.tensors_of(*call).items())
    if not any(tensor.device.type != "cpu" for _, tensor in tensors):
        return zlib.crc32(repr([(name, agree.fingerprint(tensor)) for name, tensor in tensors]).encode())
    return torch.stack([_sum_of_bytes(tensor) for _, tensor in tensors]).sum() >> 12 & (1 << 52) - 1


@torch.no_grad()
def _sum_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of the bytes of a tensor, eight at a time, with weights that depend on their place."""
    given = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = nn.functional.pad(given, (0, -len(given) % 8)).view(torch.int64)
    places = torch.arange(len(words), device=words.device)
    return ((words ^ words >> 29) * (2 * places * _MIXING + 1)).sum()


_MIXING = -0x61C8864680B583EB  # odd, as 2 ** 64 divided by the golden ratio


@dataclass(frozen=True)
class Failure:
    """The error that an action raised, and when."""

    action: Action
    error: Exception
    when: float

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


class StepRun:
    """A step on this rank. For arguments see `pipeline_step`.

    Args:
        model: the result of `shard_model`.
        criterion: (output, batch) -> loss.
        optimizer: the wrapper that unscales gradients.
        train: whether to run backward.
        keep_outputs: whether to return the outputs of the last stage.
        watch: returns a context for each action, in which it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: OptimizerWrapper | None = None,
        *,
        train: bool = True,
        keep_outputs: bool = False,
        watch: Watch = lambda _action: nullcontext(),
    ) -> None:
        refuse_torn("pipeline_step", model)
        self.model, self.criterion, self.optimizer, self.watch = model, criterion, optimizer, watch
        self.train, self.keep_outputs = train, keep_outputs
        self.record = record = record_of(model)
        self.pipeline, self.reducer, self.device = record.pipeline, record.reducer, record.reducer.executor.device
        self.everyone, self.is_dry = record.reducer.group_of_all(), not record.has_values
        self.shared = self.pipeline.shared if self.pipeline is not None and train else ()
        self.before: list[Aside] = []
        self.executed: list[Action] = []
        self.failure: Failure | None = None
        self.mark_of_values: int | torch.Tensor = 0
        shape = record.plan.mesh
        coordinate = dict(zip(record.mesh.mesh_dim_names or (), record.mesh.get_coordinate() or (), strict=True))
        self.data_ranks, self.data_rank = shape.data_ranks, shape.data_place(coordinate)[0]
        self.reports_loss = all(coordinate[axis] == 0 for axis in shape.model_axes)
        # The axes over which modules communicate.
        among = shape.names if record.meets_in_modules else shape.model_axes
        self.module_axes = tuple(axis for axis in among if shape[axis] > 1)

    def run(
        self,
        batch: Any,
        microbatches: int | None = None,
        size: int | None = None,
        replicate: Collection[str | int] | None = None,
    ) -> PipelineStep:
        """Run the step; `size` is the number of rows of a microbatch."""
        if self.record.comparison is not None:
            self.record.comparison.before_forward((batch,), {})
        streams = None if self.pipeline is None or self.is_dry else Streams(self.device)
        cut, failed = self._prepare(batch, microbatches, size, replicate)
        if streams is not None:
            streams.restore()  # boundaries are found by running forward
        meet = self._ask(cut, failed)
        if failed is not None:
            meet()
        begin = cache(lambda: self._factors(meet()))
        messages, actions = None, [a for a in order("gpipe", 1, 1, len(cut))[0] if self.train or a.kind == "F"]
        if self.pipeline is not None:
            timetable = self.pipeline.timetable(tuple(one.key for one in cut), self.train)
            messages, actions = Messages(self.pipeline.channels, timetable, self.device), [*timetable.own]
        computation = Computation(
            self.model, self.record, cut, self.criterion, begin, self.train, self.keep_outputs, streams
        )
        for shared in filter(None, self.shared):
            shared.set_accumulated_aside()
        self.before = self.reducer.put_gradients_aside() if self.train else []
        units = self.record.units
        with (
            self.reducer.keep() if self.train else nullcontext(),
            units.step() if units is not None else nullcontext(),
            streams.step() if streams is not None else nullcontext(),
        ):
            try:
                self._carry_out(actions, computation, messages, begin)
            except Exception:
                self._give_up()
                raise
        loss = self._finish(computation.losses, streams)
        kept = [computation.outputs[m] for m in sorted(computation.outputs)]
        return PipelineStep(loss, joined(kept, [p.rows for p in cut]) if kept else None, tuple(self.executed))

    # --- before -------------------------------------------------------------------------------------------------------

    def _prepare(
        self, batch: Any, microbatches: int | None, size: int | None, replicate: Collection[str | int] | None
    ) -> tuple[list[Microbatch], Exception | None]:
        """Return the microbatches, or the error in making them, which all ranks are told of."""
        try:
            if microbatches is None and size is None:
                microbatches = self.record.plan.step.microbatches or None
            call = as_call(batch)
            self._refuse_elsewhere(call)
            if self.pipeline is not None and not self.is_dry:
                self.mark_of_values = _mark_of_values(call)
            forward = self.model.forward if self.pipeline is None else self.pipeline.stages.skeleton.forward
            refuse_unfit(forward, type(self.model).__name__, call)
            replicated = places_of(forward, call, (replicate,) if isinstance(replicate, str) else replicate or ())
            tensors = [*tensors_by_place(call, replicated)]
            sizes = microbatch_sizes(rows([tensor for _, tensor in tensors] or batch), microbatches, size)
            if replicate is None and len(sizes) > 1:
                self._question(tensors)
            return self._cut(call, batch, split(call, sizes, replicated), sizes), None
        except Exception as error:
            return [], error

    def _question(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Warn of tensors that may have as many rows as the batch by coincidence.

        Raises:
            InputError: one has, since it had another number of rows than another batch.
        """
        count, seen = len(tensors[0][1]), _split_before.setdefault(self.record, {})
        for place, tensor in tensors:
            splits, before = len(tensor) == count, seen.setdefault(place, (len(tensor) == count, count))
            if splits != before[0]:
                raise InputError(
                    f'The batch has {count} rows, and "{shown(place)}" of shape {tuple(tensor.shape)} would '
                    f"{'' if splits else 'not '}be split into microbatches; in a step of {before[1]} rows it was "
                    f"{'not ' if splits else ''}split. Name it if it is not a part of the examples, "
                    f'replicate=("{shown(place)}",); if shapes say it in every step, replicate=().'
                )
        for place, tensor, why in coincidences(tensors):
            warn(
                f'The batch has {count} rows, and "{shown(place)}" of shape {tuple(tensor.shape)} is split into '
                f"microbatches as one of its examples, but {why}. If it is not a part of the examples, call "
                f'pipeline_step(..., replicate=("{shown(place)}",)); if it is, replicate=().'
            )

    def _cut(self, call: Call, batch: Any, cuts: Sequence[Call], sizes: Sequence[int]) -> list[Microbatch]:
        known = dict[int, Any]()
        for count, cut in zip(sizes, cuts, strict=True):
            if count not in known:  # microbatches of one batch with the same number of rows have the same key
                key = key_of(cut), self.model.training, self.train
                known[count] = key, self._boundaries(key, cut)
        return [Microbatch(cut, as_given(cut, batch), n, *known[n]) for n, cut in zip(sizes, cuts, strict=True)]

    def _boundaries(self, key: Hashable, call: Call) -> Sequence[StageBoundary | None]:
        if self.pipeline is None:
            return [None]
        return self.pipeline.route.learn(self.model, key, *call)

    def _refuse_elsewhere(self, call: Call) -> None:
        for leaf in _torch.leaves_of(call):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != self.device.type:
                raise InputError(
                    f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on "
                    f'{self.device}. Move the batch first: batch.to("{self.device.type}").'
                )

    def _ask(self, microbatches: Sequence[Microbatch], failed: Exception | None) -> Callable[[], float]:
        """Start to tell the other ranks what this rank is about to do, without waiting for their answers.

        Returns a function that waits for the answers, and returns the number of rows of all data ranks once the ranks
        are known to run the same step. The function raises `InputError` if ranks of one pipeline were given different
        batches, or if data ranks have different numbers of microbatches and modules communicate over data ranks.
        """
        mark, total = _mark(tuple(one.key for one in microbatches)), sum(one.rows for one in microbatches)
        numbers = [failed is not None, self.data_rank, mark, total, len(microbatches)]
        answers = self._gather(numbers, self.mark_of_values)
        return lambda: self._meet(answers(), failed)

    def _meet(self, every: Sequence[Sequence[float]], failed: Exception | None) -> float:
        if any(row[0] for row in every):
            raise self._not_begun(failed)
        first: dict[float, int] = {}  # the first rank of each data rank
        for rank, (_, data_rank, mark, *_, values) in enumerate(every):
            peer = first.setdefault(data_rank, rank)
            if (every[peer][2], every[peer][-1]) != (mark, values):
                raise InputError(
                    f"Ranks {peer} and {rank} work on the same examples, and were given different batches or "
                    "different numbers of microbatches. Pick the batch by the rank's place on the data axes alone, for "
                    'example with DistributedSampler(dataset, mesh["dp"].size(), mesh["dp"].get_local_rank()); and let '
                    "whatever draws it draw the same on these ranks."
                )
        counts = sorted({int(row[4]) for row in every})
        if len(counts) > 1 and self.record.meets_in_modules:
            raise InputError(
                f"Data ranks split their batches into {' and '.join(map(str, counts))} microbatches, but this model's "
                "modules communicate over all data ranks (stage 3, experts, or BatchNorm). Give all the same number: "
                "microbatches=."
            )
        return sum(every[rank][3] for rank in first.values())

    def _not_begun(self, failed: Exception | None) -> Exception:
        reports = self._reports(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            return failed
        rank, text = next((rank, text) for rank, text in enumerate(reports) if text is not None)
        return StageError(f"Rank {rank} could not begin this step, and no rank has: it raised {text}", rank=rank)

    def _reports(self, report: Any) -> list[Any]:
        """Return what each rank reports; in a dry run, what this one does."""
        if self.everyone is None or self.is_dry:
            return [report]
        return agree.exchange(report, self.everyone, classes=[Action])

    @naming_lost_ranks("forward")
    def _gather(
        self, numbers: Sequence[float], last: float | torch.Tensor = 0.0
    ) -> Callable[[], list[Sequence[float]]]:
        """Start to gather numbers of every rank; return a function that waits for them, in the order of the mesh.

        `last` is a further number, which may still be computed on the device. In a dry run, where other ranks do not
        exist, each row is this rank's.
        """
        if self.everyone is None:
            return lambda: [[*numbers, 0.0]]
        sent = torch.tensor([*numbers, 0.0], dtype=torch.float64, device=self.device)
        if not self.is_dry:
            sent[-1] = last
        every = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.everyone))]
        work = dist.all_gather(every, sent, group=self.everyone, async_op=True)

        @naming_lost_ranks("forward")
        def answers() -> list[Sequence[float]]:
            work.wait()
            return [[*numbers, 0.0]] * len(every) if self.is_dry else [each.tolist() for each in every]

        return answers

    def _factors(self, total_rows: float) -> tuple[float, float]:
        """Return the factors of the losses of a microbatch before backward: for mean losses, and for counted ones.

        Gradients are averaged over data ranks after backward, and the loss must be the mean over all rows. Counts are
        known only when all forwards have run; gradients are divided by them then.
        """
        wrapper = self.optimizer if isinstance(self.optimizer, OptimizerWrapper) else None
        if self.record.plan.step.scaler is not None and self.train and wrapper is None:
            raise ShardingError(
                "The plan scales the loss (precision), and only an OptimizerWrapper undoes that. Wrap the optimizer, "
                "and pass it: pipeline_step(model, batch, criterion, optimizer=opt)."
            )
        scaled = wrapper.backward_by_another() if wrapper is not None and self.train else 1.0
        return scaled * self.data_ranks / max(total_rows, 1.0), scaled

    # --- during -------------------------------------------------------------------------------------------------------

    def _carry_out(
        self, actions: Sequence[Action], computation: Computation, messages: Messages | None, begin: Begin
    ) -> None:
        """Run all actions, also after a failure.

        A rank whose first action needs no other rank computes it before `begin` waits for the others.

        Raises:
            LostRankError: another rank is lost.
            StageError: only this rank has failed, and others wait for it inside of their modules.
        """
        early = messages is not None and actions[0].stage == 0 and not self.module_axes
        for number, action in enumerate(actions):
            if number or not early:
                begin()
                if messages is not None:
                    messages.expect(actions[number:])
            with self.watch(action):
                self._act(action, computation, messages, begin)
        if messages is not None:
            naming_lost_ranks("backward")(messages.finish)()

    def _act(self, action: Action, computation: Computation, messages: Messages | None, begin: Begin) -> None:
        named = naming_lost_ranks("forward" if action.kind == "F" else "backward")
        received = [] if messages is None else named(messages.receive)(action)
        made = None
        if self.failure is None:
            try:
                made = named(computation.run)(action, received)
                self.executed.append(action)
            except LostRankError:
                raise
            except Exception as error:
                self.failure = Failure(action, error, time.time())
                computation.drop()
                self._leave_if_alone(self.failure)
        named(begin)()
        if messages is not None:
            named(messages.send)(action, made)

    def _leave_if_alone(self, failure: Failure) -> None:
        """Leave the job if only this rank fails while others wait for it inside of modules.

        Raises:
            StageError: the others are told, and this job cannot continue.
        """
        if not self.module_axes or self.is_dry:
            return
        if not lost.all_say("failed", str(failure.action), self.record.mesh[self.module_axes].mesh.flatten().tolist()):
            lost.leave()
            after = "Ranks waited for this one inside of modules and have been told; end them, and start the job again."
            raise _stage_error(dist.get_rank(), failure.action, failure.text, after) from failure.error

    # --- after --------------------------------------------------------------------------------------------------------

    def _finish(self, losses: Losses, streams: Streams | None) -> torch.Tensor | None:
        """Reduce the gradients of all ranks and return the loss.

        Raises:
            StageError: a rank has failed.
        """
        if self.is_dry and self.failure is not None:
            raise self.failure.error
        reports_loss = losses.counted is not None and self.reports_loss
        sums = [1.0, 1.0] if self.is_dry else losses.sums() if reports_loss else [0.0, 0.0]
        here = [one is not None and self.reducer.has_gradient(one.param_state) for one in self.shared]
        drew = streams is not None and streams.drew
        wide = any(leaf.dtype is torch.float64 for leaf in self.reducer.leaves())
        said = [self.failure is not None, losses.counted is True, reports_loss, *sums, drew, wide]
        every = self._gather([*said, *here])()
        if streams is not None and any(row[5] for row in every):
            streams.advance()
        if any(row[0] for row in every):
            self._give_up()
            raise self._failed()
        with_loss = [row for row in every if row[2]]
        total, weight = (sum(row[column] for row in with_loss) for column in (3, 4))
        if with_loss and not weight:
            self._give_up()
            raise InputError("The counts of this step add up to zero on all ranks: there is nothing to learn from.")
        if self.train:
            counted = any(row[1] for row in every)
            present = [any(row[len(said) + i] for row in every) for i in range(len(self.shared))]
            self._finish_gradients(self.data_ranks / weight if counted else 1.0, present)
        dtype = torch.float64 if any(row[6] for row in every) else torch.float32
        return torch.tensor(total / weight, dtype=dtype, device=self.device) if with_loss else None

    def _finish_gradients(self, scale: float, present: Sequence[bool]) -> None:
        if scale != 1.0:
            self.reducer.multiply_gradients(scale)
        self.reducer.reduce_now(self.before)
        between = not self.reducer.enabled or self.reducer.is_between_passes()
        for shared, somewhere in zip(self.shared, present, strict=True):
            if shared is not None:
                shared.sum_up() if somewhere and not between else shared.add_accumulated()

    def _give_up(self) -> None:
        """Drop the gradients of a failed step; restore accumulated ones."""
        if self.train:
            self.reducer.put_gradients_aside()
            self.reducer.add_gradients(self.before)
            for shared in filter(None, self.shared):
                shared.add_accumulated()

    def _failed(self) -> Exception:
        """Return the error for the earliest failure of all ranks, the same on all ranks."""
        failure = self.failure
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
