"""Schedules of a pipeline: the order of each rank's actions, the rank of each stage, and the idle time.

    gpipe           every forward, then every backward (Huang et al., "GPipe", 2019)
    1f1b            one forward, one backward (Narayanan et al., "PipeDream", 2019; "Megatron-LM", 2021, section 2.2)
    interleaved     1f1b with several stages on each rank (Narayanan et al., 2021, section 2.2)
    interleaved-zb  the same, with the backward of weights moved into the bubble (Qi et al., "Zero Bubble", 2023, ZB-H1)
    zbv             zero bubble with two stages on each rank, the second ones in reverse (Qi et al., 2023, section 6)

The orders of the last three are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Literal, NamedTuple

from shardlib.errors import PlanError, nearest

__all__ = [
    "SCHEDULES",
    "Action",
    "Timed",
    "bubble",
    "check_schedule",
    "default_schedule",
    "in_flight",
    "order",
    "rank_of_stage",
    "splits_backward",
    "steady_count",
    "timeline",
]

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """The work of a rank on one microbatch of one stage: "F" forward, "B" backward, or the halves of a backward: "I",
    of the stage's inputs, and "W", of its weights.

    >>> print(Action("F", 1, 0))
    1F0
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


def default_schedule(ranks: int, stages: int) -> str:
    """Return the schedule used where none is named.

    >>> default_schedule(2, 2), default_schedule(2, 4)
    ('1f1b', 'interleaved')
    """
    return "1f1b" if ranks == stages else "interleaved"


def check_schedule(name: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        PlanError: an unknown name.
    """
    if name not in SCHEDULES:
        listed = ", ".join(f'"{known}"' for known in SCHEDULES)
        raise PlanError(f'"{name}" is not a schedule; the schedules are {listed}.{nearest(name, SCHEDULES)}')


def splits_backward(name: str) -> bool:
    """Return whether the backward of weights is separate from that of inputs."""
    return name in ("interleaved-zb", "zbv")


def rank_of_stage(name: str, ranks: int, stage: int) -> int:
    """Return the rank of the pipeline axis that runs a stage: in turn, or, for "zbv", down and up again.

    >>> [rank_of_stage("interleaved", 2, stage) for stage in range(4)], [rank_of_stage("zbv", 2, s) for s in range(4)]
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    turn, rank = divmod(stage, ranks)
    return ranks - 1 - rank if name == "zbv" and turn % 2 else rank


@cache
def order(name: str, ranks: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank, in its order.

    Raises:
        PlanError: an unknown name, or numbers for which the schedule has no order.

    >>> [" ".join(map(str, actions)) for actions in order("1f1b", 2, 2, 3)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    check_schedule(name)
    if microbatches < 1:
        raise PlanError(f"A pipeline was given {microbatches} microbatches; give one at least.")
    if ranks == 1 and stages == 1:
        return (tuple(Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "B")),)  # type: ignore[arg-type]
    most = {"gpipe": ranks, "1f1b": ranks, "zbv": 2 * ranks}.get(name)
    if (most is not None and stages != most) or stages % ranks:
        raise PlanError(
            f'The schedule "{name}" runs {f"{most // ranks} stage" if most else "equally many stages"}'
            f"{'s' * bool(most and most > ranks)} on each of {ranks} ranks, and there are {stages} stages. "
            + ('Use "interleaved", or split' if name in ("gpipe", "1f1b") else "Split")
            + f" the model into {most or 'a multiple of ' + str(ranks)} stages."
        )
    made = SCHEDULES[name](ranks, stages, microbatches)
    return tuple(tuple(actions) for actions in made)


def _gpipe(ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    every = range(microbatches)
    return [[*(Action("F", r, m) for m in every), *(Action("B", r, m) for m in every)] for r in range(ranks)]


def _1f1b(ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    """Return actions by which a rank holds as many microbatches as there are stages from its own to the last one."""
    made = []
    for r in range(ranks):
        ahead = min(microbatches, ranks - r)
        actions = [Action("F", r, m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action("B", r, m))
            if m + ahead < microbatches:
                actions.append(Action("F", r, m + ahead))
        made.append(actions)
    return made


def _of_torch(kind: str) -> Callable[[int, int, int], list[list[Action]]]:
    def made(ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
        from torch.distributed.pipelining import schedules  # it imports the tracer, which few need

        stage = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, stage_index=0, submod=None)
        try:
            schedule = getattr(schedules, kind)([stage] * (stages // ranks), microbatches)
        except ValueError as error:
            raise PlanError(f"{error} Choose another number of microbatches, or another schedule.") from None
        return [_compute(schedule.pipeline_order[rank]) for rank in range(ranks)]

    return made


def _compute(actions: Sequence[object]) -> list[Action]:
    """Convert torch's actions; gaps in which a rank waits are left out."""
    return [
        Action(a.computation_type.value, a.stage_index, a.microbatch_index)  # type: ignore[attr-defined]
        for a in actions
        if a is not None
    ]


SCHEDULES: Mapping[str, Callable[[int, int, int], list[list[Action]]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _of_torch("ScheduleInterleaved1F1B"),
    "interleaved-zb": _of_torch("ScheduleInterleavedZeroBubble"),
    "zbv": _of_torch("ScheduleZBVZeroBubble"),
}

# A backward costs two forwards, each half of it one: what matrix products cost.
COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def timeline(
    actions: Sequence[Sequence[Action]],
    costs: Mapping[str, float] | Callable[[Action], float] = COSTS,
    *,
    sending: float = 0,
) -> tuple[tuple[Timed, ...], ...]:
    """Return the time of each action: it starts as soon as its rank is free and its inputs exist.

    A forward needs the one of the stage before, a backward that of the stage after it, and its own forward.

    Args:
        actions: of each rank, in its order.
        costs: the time of an action, by its kind or by a function.
        sending: the time of a message from one stage to another, during which both ranks go on.

    Raises:
        PlanError: orders in which ranks wait for each other.

    >>> [[each.start for each in rank] for rank in timeline(order("gpipe", 2, 2, 2), {"F": 1, "B": 1})]
    [[0, 1, 4, 5], [1, 2, 3, 4]]
    """
    ends: dict[tuple[str, int, int], float] = {}
    cost = costs if callable(costs) else lambda action: costs[action.kind]
    last = max((action.stage for rank in actions for action in rank), default=0)
    made: list[list[Timed]] = [[] for _ in actions]
    while any(len(done) < len(todo) for done, todo in zip(made, actions, strict=True)):
        before = sum(map(len, made))
        for done, todo in zip(made, actions, strict=True):
            while len(done) < len(todo):
                action = todo[len(done)]
                arrived = _arrival(action, ends, last, sending)
                if arrived is None:
                    break
                start = max(arrived, done[-1].end if done else 0)
                done.append(Timed(action, start, start + cost(action)))
                for kind in "IB" if action.kind in "IB" else action.kind:
                    ends[kind, action.stage, action.microbatch] = done[-1].end
        if sum(map(len, made)) == before:
            waiting = ", ".join(
                str(todo[len(done)]) for done, todo in zip(made, actions, strict=True) if todo[len(done) :]
            )
            raise PlanError(f"The order of this schedule can never be carried out: {waiting} wait for each other.")
    return tuple(map(tuple, made))


def _arrival(action: Action, ends: Mapping[tuple[str, int, int], float], last: int, sending: float) -> float | None:
    """Return when the inputs of an action are there; None while one of them is not computed."""
    needs = _needs(action, last)
    if any(key not in ends for key in needs):
        return None
    return max((ends[key] + sending * (key[1] != action.stage) for key in needs), default=0)


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    kind, stage, m = action
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("I", stage, m)]
    return [("F", stage, m), *([("I", stage + 1, m)] if stage < last else [])]


def steady_count(name: str, ranks: int, microbatches: int) -> int:
    """Return so many microbatches that further ones repeat the steady state: they hold no more activations, and each
    takes what it takes the busiest rank.

    >>> steady_count("1f1b", 4, 8), steady_count("1f1b", 4, 101), steady_count("gpipe", 4, 101)
    (8, 17, 101)
    """
    most = 4 * ranks
    return microbatches if microbatches <= most or name == "gpipe" else most + microbatches % ranks


def bubble(timed: Sequence[Sequence[Timed]]) -> float:
    """Return the fraction of all ranks' time that is idle.

    >>> bubble(timeline(order("1f1b", 4, 4, 8))) == 3 / (8 + 3)
    True
    """
    length = max((each.end for rank in timed for each in rank), default=0.0)
    busy = sum(each.end - each.start for rank in timed for each in rank)
    return 1 - busy / (length * len(timed)) if length else 0.0


def in_flight(actions: Sequence[Action]) -> int:
    """Return the most microbatches whose activations a rank holds at one time, counted for each of its stages.

    >>> [in_flight(rank) for rank in order("1f1b", 4, 4, 8)], [in_flight(rank) for rank in order("gpipe", 2, 2, 8)]
    ([4, 3, 2, 1], [8, 8])
    """
    count = most = 0
    for action in actions:
        count += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, count)
    return most
