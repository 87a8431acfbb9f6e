"""The time of a training step on a cluster, from a plan and the record of its work. Pure arithmetic.

Two queues are simulated, as the engine has them: one of computation and one of communication. Parameters of the next
unit are gathered while this one computes, gradients of a unit are reduced behind its backward, and what is sent for
activations waits. A pipeline is its real schedule (`schedules.timeline`), with the seconds of each stage as costs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shardlib._plan.activations import Peak, peak_of
from shardlib._plan.cluster import Cluster
from shardlib._plan.parts import Links, Message, Parts, PlanPart, StageShape, parts_of, schedule_of, shapes_of
from shardlib._plan.quantities import spell_quantity
from shardlib._plan.readable import aligned
from shardlib._plan.schedules import Action, order, splits_backward, steady_count, timeline
from shardlib._plan.table import PlanTable
from shardlib._plan.work import Kernel, Part, Pass, Work

__all__ = ["Span", "StepTime", "kernel_time", "price", "time_of"]


@dataclass(frozen=True)
class Span:
    """Something that a rank does, on one of its streams: "compute" or "communication"."""

    stream: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of one training step, on the rank that works longest.

    Attributes:
        compute: forward, backward and what is computed again.
        exposed: communication that nothing hides: pairs of what is sent and seconds.
        hidden: communication behind computation.
        bubble: waiting for other stages of the pipeline.
        optimizer: the update of an element-wise optimizer, from the bytes that it reads and writes.
        copies: between device and host.
        flops: operations of the model's forward and backward on one device, the mean of all ranks, without those that
            are computed again.
        peak_rate: operations a second of a device that its vendor promises.
        tokens: in a step, of all ranks; 0 where the example has none.
        memory: the most bytes of a device.
        spans: what that rank does in forward and backward; in a pipeline, in a step.
    """

    compute: float
    exposed: tuple[tuple[str, float], ...]
    hidden: float
    bubble: float
    optimizer: float
    copies: float
    flops: float
    peak_rate: float
    tokens: int
    memory: Peak
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)

    @property
    def communication(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(seconds for _, seconds in self.exposed)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.communication + self.bubble + self.optimizer + self.copies

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the operations of the model over what the device could do in the time (Chowdhery et
        al., "PaLM", 2022, appendix B)."""
        return self.flops / (self.seconds * self.peak_rate) if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """Return a readable table."""
        rows = [["", "time", "share"]]
        parts = [
            ("compute", self.compute),
            *((f"exposed: {what}", seconds) for what, seconds in self.exposed),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
            ("host copies", self.copies),
        ]
        total = self.seconds
        rows += [[what, _shown(each), f"{each / total:.1%}"] for what, each in parts if each > 0]
        rows.append(["step", _shown(total), ""])
        tail = f"{_shown(self.hidden)} of communication behind computation; MFU {self.mfu:.1%}"
        if self.tokens:
            tail += f"; {self.tokens_per_second:,.0f} tokens/s"
        return "\n".join([aligned(rows, left=1), tail, f"memory at the peak: {self.memory}"])


def _shown(seconds: float) -> str:
    return spell_quantity(seconds, "s", digits=3)


def time_of(
    plan: PlanTable,
    work: Work,
    cluster: Cluster,
    examples: Sequence[int],
    *,
    state_tensors: int = 2,
    compiled: bool = False,
) -> StepTime:
    """Return the predicted time of a step of a plan.

    Args:
        plan: the plan.
        work: the record of one microbatch.
        cluster: the machines.
        examples: the index of the block in the plan's rows that stands for each kind.
        state_tensors: tensors of optimizer state for each parameter.
        compiled: whether ops that follow each other are fused.
    """
    parts = parts_of(plan, work, examples, state_tensors=state_tensors)
    shapes = shapes_of(plan, work)
    return price(plan, work, cluster, parts, shapes, peak_of(plan, work, parts, shapes), compiled=compiled)


# --- one pass ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """Seconds of one part.

    Attributes:
        name: of the part.
        forward, backward: computation.
        sent: of activations, in forward and in backward.
        gather, again: of parameters, before forward and before backward.
        reduce: of gradients.
    """

    name: str
    forward: float
    backward: float
    sent: tuple[float, float]
    gather: float
    again: float
    reduce: float


@dataclass(frozen=True)
class _Ran:
    """A pass over the parts of a stage.

    Attributes:
        seconds: from its begin to the end of its last computation.
        tail: communication after it.
        compute, sent: of `seconds`; the rest of it is waiting for parameters.
        communication: that of parameters and gradients, hidden or not.
    """

    seconds: float
    tail: float
    compute: float
    sent: float
    communication: float
    spans: tuple[Span, ...] = ()

    @property
    def whole(self) -> float:
        return self.seconds + self.tail

    def with_overlap(self, overlap: float) -> _Ran:
        """Return the pass where only a part of communication can hide behind computation."""
        if overlap >= 1:
            return self
        serial = self.compute + self.sent + self.communication
        return replace(self, seconds=overlap * self.whole + (1 - overlap) * serial - self.tail)


def _run(parts: Sequence[_Times], *, backward: bool, reduces: bool) -> _Ran:
    """Simulate the two queues of a pass."""
    computed = gathered = began = compute = sent = communication = 0.0
    spans: list[Span] = []
    for part in reversed(parts) if backward else parts:
        gather = part.again if backward else part.gather
        work = part.backward if backward else part.forward
        waits = part.sent[backward]
        if gather:
            issued = max(gathered, began)  # while the part before it computes
            gathered = issued + gather
            spans.append(Span("communication", f"gather {part.name}", issued, gathered))
        began = max(computed, gathered) if gather else computed
        computed = began + work + waits
        spans.append(Span("compute", f"{'backward' if backward else 'forward'} {part.name}", began, computed))
        compute, sent, communication = compute + work, sent + waits, communication + gather
        if reduces and part.reduce:
            issued = max(gathered, computed)
            gathered = issued + part.reduce
            communication += part.reduce
            spans.append(Span("communication", f"reduce {part.name}", issued, gathered))
    return _Ran(computed, max(gathered - computed, 0.0), compute, sent, communication, tuple(spans))


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """Passes of a stage. The first forward gathers all parameters, the last backward reduces all gradients."""

    shape: StageShape
    first: _Ran
    forward: _Ran
    backward: _Ran
    last: _Ran
    step: float
    copies: float
    stepped: float


def price(
    plan: PlanTable,
    work: Work,
    cluster: Cluster,
    parts: Parts,
    shapes: Sequence[StageShape],
    memory: Peak,
    *,
    compiled: bool = False,
) -> StepTime:
    """Return the time of a step, given the parts of a plan, its stages and the peak of its memory."""
    links = Links(cluster, plan.mesh)
    before, after, kinds = parts
    times = (
        _times("before", work.before, before, cluster, links, compiled=compiled),
        _times("after", work.after, after, cluster, links, compiled=compiled),
        tuple(
            _times("block", mine, its, cluster, links, compiled=compiled)
            for mine, its in zip(work.kinds, kinds, strict=True)
        ),
    )
    known: dict[tuple[object, ...], _Stage] = {}
    stages = []
    for shape in shapes:
        key = (tuple(sorted(Counter(shape.kinds).items())), shape.before, shape.after)
        if key not in known:
            known[key] = _stage(shape, times, parts, cluster, links, pipelined=len(shapes) > 1)
        stages.append(replace(known[key], shape=shape))
    passes = plan.step.accumulate
    made = _pipelined(plan, work, links, stages) if len(stages) > 1 else _single(stages[0], passes)
    slowest = made.stage
    _, ranks, microbatches = schedule_of(plan, shapes)
    microbatches = microbatches if len(stages) > 1 else 1
    flops = 3.0 * passes * microbatches * work.flops / ranks
    return StepTime(
        compute=made.compute,
        exposed=tuple((what, seconds) for what, seconds in made.exposed if seconds > 0),
        hidden=made.hidden,
        bubble=made.bubble,
        optimizer=slowest.stepped,
        copies=slowest.copies,
        flops=flops,
        peak_rate=_peak_rate(work, cluster),
        tokens=work.tokens * passes * microbatches * plan.mesh.data_ranks,
        memory=memory,
        spans=made.spans,
    )


@dataclass(frozen=True)
class _Made:
    compute: float
    exposed: tuple[tuple[str, float], ...]
    hidden: float
    bubble: float
    stage: _Stage
    spans: tuple[Span, ...]


def _single(stage: _Stage, passes: int) -> _Made:
    backward = passes - 1
    compute = passes * stage.forward.compute + backward * stage.backward.compute + stage.last.compute
    sent = passes * stage.forward.sent + backward * stage.backward.sent + stage.last.sent
    runs = [(stage.forward, passes), (stage.backward, backward), (stage.last, 1)]
    whole = sum(count * run.whole for run, count in runs)
    data = whole - compute - sent
    total = sum(count * run.communication for run, count in runs)
    spans = stage.forward.spans + tuple(
        Span(each.stream, each.name, each.start + stage.forward.seconds, each.end + stage.forward.seconds)
        for each in stage.last.spans
    )
    exposed = (("activations", sent), ("parameters and gradients", data), ("updated parameters", stage.step))
    return _Made(compute, exposed, max(total - data, 0.0), 0.0, stage, spans)


def _pipelined(plan: PlanTable, work: Work, links: Links, stages: Sequence[_Stage]) -> _Made:
    shapes = [one.shape for one in stages]
    schedule, ranks, count = schedule_of(plan, shapes)
    passes = plan.step.accumulate
    split = splits_backward(schedule)

    def cost(action: Action) -> float:
        one = stages[action.stage]
        if action.kind == "F":
            return one.forward.whole
        return one.backward.whole / 2 if split else one.backward.whole

    few = steady_count(schedule, ranks, count)
    sending = links.seconds(Message("send", plan.mesh.pipeline_axes, work.boundary))
    timed = timeline(order(schedule, ranks, len(stages), few), cost, sending=sending)
    owned = [[one for one in stages if one.shape.rank == rank] for rank in range(ranks)]
    busy = [sum(one.forward.whole + one.backward.whole for one in own) for own in owned]
    more = (count - few) * max(busy)  # in the steady state a microbatch takes what the busiest rank takes
    extra = [
        sum(one.first.whole - one.forward.whole + one.last.whole - one.backward.whole for one in own) for own in owned
    ]
    ends = [
        passes * (timed[rank][-1].end + more + extra[rank]) + sum(one.step + one.stepped + one.copies for one in own)
        for rank, own in enumerate(owned)
    ]
    rank = max(range(ranks), key=ends.__getitem__)
    own, times = owned[rank], count * passes
    compute = times * sum(one.forward.compute + one.backward.compute for one in own)
    sent = times * sum(one.forward.sent + one.backward.sent for one in own)
    data = times * busy[rank] + passes * extra[rank] - compute - sent
    total = sum(
        passes * (one.first.communication + one.last.communication)
        + (times - passes) * (one.forward.communication + one.backward.communication)
        for one in own
    )
    bubble = passes * (timed[rank][-1].end + more) - times * busy[rank]
    exposed = (
        ("activations", sent),
        ("parameters and gradients", max(data, 0.0)),
        ("updated parameters", sum(one.step for one in own)),
    )
    spans = tuple(Span("compute", str(each.action), each.start, each.end) for each in timed[rank])
    merged = replace(own[0], copies=sum(one.copies for one in own), stepped=sum(one.stepped for one in own))
    return _Made(compute, exposed, max(total - data, 0.0), max(bubble, 0.0), merged, spans)


def _stage(
    shape: StageShape,
    times: tuple[_Times, _Times, tuple[_Times, ...]],
    parts: Parts,
    cluster: Cluster,
    links: Links,
    *,
    pipelined: bool,
) -> _Stage:
    own, its = shape.parts(*times), shape.parts(*parts)
    each_pass = any(part.every_pass for part in its) and not pipelined
    staying = [replace(one, gather=one.gather if part.resharded else 0.0) for one, part in zip(own, its, strict=True)]
    first = _run(own, backward=False, reduces=False)
    forward = _run(staying, backward=False, reduces=False) if pipelined else first
    backward = _run(own, backward=True, reduces=each_pass)
    last = _run(own, backward=True, reduces=True)
    messages = [message for part in its for message in part.stepped]
    stepped = cluster.launch + sum(_stepping(part, cluster) for part in its)
    first, forward, backward, last = (run.with_overlap(cluster.overlap) for run in (first, forward, backward, last))
    copied = sum(links.seconds(message) for message in messages if message.kind == "copy")
    sent = sum(links.seconds(message) for message in messages if message.kind != "copy")
    return _Stage(shape, first, forward, backward, last, sent, copied, stepped)


def _stepping(part: PlanPart, cluster: Cluster) -> float:
    """Return the seconds of an element-wise optimizer. Where state is in host memory, the host steps it: no faster than
    its memory is reached."""
    on_host = part.held.host > part.held.state
    rate = cluster.host_bandwidth if on_host else cluster.memory_bandwidth
    return part.held.stepped / rate.sustained


def _times(name: str, work: Part, part: PlanPart, cluster: Cluster, links: Links, *, compiled: bool) -> _Times:
    return _Times(
        name,
        _compute(work.forward.fused if compiled else work.forward.kernels, cluster),
        _compute(work.backward.fused if compiled else work.backward.kernels, cluster),
        (_sent(work.forward, links), _sent(work.backward, links)),
        _seconds(part.forward, links),
        _seconds(part.backward, links),
        _seconds(part.reduced, links),
    )


def _seconds(messages: Iterable[Message], links: Links) -> float:
    return sum(map(links.seconds, messages))


def _sent(run: Pass, links: Links) -> float:
    return sum(map(links.of_record, run.collectives))


@functools.lru_cache(maxsize=4096)
def _compute(kernels: tuple[Kernel, ...], cluster: Cluster) -> float:
    return sum(kernel_time(kernel, cluster) for kernel in kernels)


def kernel_time(kernel: Kernel, cluster: Cluster) -> float:
    """Return the seconds of one call of a kernel: its roofline, or the floor of a launch.

    Raises:
        PlanError: the cluster has no rate of products for its dtype.
    """
    if kernel.flops:
        return cluster.product_time(kernel.flops, kernel.bytes, kernel.dtype)
    return cluster.memory_time(kernel.bytes)


def _peak_rate(work: Work, cluster: Cluster) -> float:
    """Return the promised rate of the dtype in which most products are computed."""
    by_dtype = Counter[str]()
    for part in (work.before, work.after, *work.kinds):
        for kernel in part.forward.kernels:
            by_dtype[kernel.dtype] += kernel.flops
    products = dict(cluster.products)
    dtype = max(by_dtype, key=by_dtype.__getitem__, default="float32")
    return products[dtype].peak if dtype in products else max(rate.peak for rate in products.values())
