"""Stages of an audit: what each rank compares, one after another, and the verdicts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape, taken_for_model_axes
from shardlib._plan import Plan
from shardlib.engine import _torch
from shardlib.engine.ranks import agree
from shardlib.errors import InputError
from shardlib.testing import _carry
from shardlib.testing.auditing import batches
from shardlib.testing.auditing.advice import advice_on
from shardlib.testing.auditing.foreign import (
    ChangedCode,
    RaisedAlone,
    call_shard,
    check_shard,
    first_line,
    modules_of,
    not_on_cpus,
    plan_of,
    save_checkpoint,
    wants,
)
from shardlib.testing.auditing.hosts import Host, NotOffered, NotReached
from shardlib.testing.auditing.libraries import libraries_redirected
from shardlib.testing.auditing.redirect import Collectives, Redirected, redirected
from shardlib.testing.auditing.report import AuditReport, Check
from shardlib.testing.auditing.runs import UNCLIPPED, ByRank, HostRun, StaleOptimizer, remade
from shardlib.testing.equivalence import measure, parts
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.compare import START, Key, Measured, Notes, limits, wrong
from shardlib.testing.equivalence.locate import Origin, of_norm, of_passes, of_tensor, of_update, values_before
from shardlib.testing.equivalence.report import differences
from shardlib.testing.equivalence.trace import clean
from shardlib.testing.equivalence.train import Run
from shardlib.testing.equivalence.twins import Twins, single_device

__all__ = ["Journal", "Subject", "run_on_rank"]

T = TypeVar("T")

_TOKENS = 6
_CLIP = 1.0
_LONG = 86400.0  # seconds: the caller's timeout comes first
_APART = 5.0  # seconds that a rank which raised waits for the others to come to the same end


@dataclass(frozen=True)
class Subject:
    """Arguments of an audit, apart from its functions."""

    mesh: MeshShape
    steps: int = 2
    strict: bool = False
    seed: int = 0

    def check(self, functions: Mapping[str, Any]) -> None:
        """Check the arguments of an audit."""
        check_shard(functions["shard"])
        self.case(functions)

    def case(self, functions: Mapping[str, Any]) -> Case:
        """Return the case that the stages are variants of: one backward pass."""
        return Case(
            functions["build"], functions["batch"], self.mesh, shard=_unused, loss=functions["loss"],
            optimizer=functions["optimizer"], split=functions["split"], steps=self.steps, seed=self.seed, rng="fast",
        )  # fmt: skip


def _unused(_model: nn.Module, _mesh: Any) -> nn.Module:
    raise AssertionError("an audit calls shard by itself")


@dataclass
class Journal:
    """Record of what the first rank has compared, in a file, for the process that waits for it."""

    folder: Path
    checks: list[Check] = field(default_factory=list)
    current: str = "starting the ranks"
    host: str = "code of your own"
    used: tuple[str, ...] = ()
    advice: tuple[str, ...] = ("torch",)
    layouts: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    begun: float = field(default_factory=time.time)

    @property
    def _file(self) -> Path:
        return self.folder / "journal"

    def write(self) -> None:
        if dist.get_rank() == 0:
            draft = self._file.with_suffix(".draft")
            draft.write_bytes(pickle.dumps(self))
            os.replace(draft, self._file)

    def read(self) -> Journal:
        return pickle.loads(self._file.read_bytes()) if self._file.exists() else self  # type: ignore[no-any-return]

    def report(self, subject: Subject) -> AuditReport:
        return AuditReport(
            subject.mesh, self.host, self.used, tuple(self.checks), self.layouts, self.plan, self.changed,
            self.warnings, subject.strict, time.time() - self.begun,
        )  # fmt: skip


def run_on_rank(subject: Subject, packed: bytes, folder: str) -> AuditReport:
    """Run an audit on this rank; every rank returns the same report."""
    journal = Journal(Path(folder))
    with redirected() as mode, warnings.catch_warnings(record=True) as heard, _quiet(), ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(libraries_redirected(mode))
        functions = _carry.load(packed)
        stages = _Stages(subject, functions, journal, stack, mode)
        try:
            for check in stages.checks():
                journal.checks.append(check)
                journal.changed = tuple(mode.notes)
                journal.warnings = tuple(dict.fromkeys(str(warning.message) for warning in heard))
                journal.write()
        finally:
            if stages.host is not None:
                stages.host.forget()
    return journal.report(subject)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch logs of slow redistributions, on each rank."""
    logger = logging.getLogger("torch.distributed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Stages:
    """The stages of an audit on this rank."""

    def __init__(
        self, subject: Subject, functions: Mapping[str, Any], journal: Journal, stack: ExitStack, mode: Redirected
    ) -> None:
        self.stack, self.mode = stack, mode
        self.subject, self.journal, self.functions = subject, journal, functions
        case = subject.case(functions)
        self.case = dataclasses.replace(case, batch=functools.cache(case.batch))  # the same for both runs
        self.control = dist.new_group(backend="gloo")
        self.host: Host | None = None
        self.start = nn.Module()  # the single device's model before training, once it is there
        self.full: tuple[dict[str, torch.Tensor], list[str]] | None = None
        self.stale = ""  # why the optimizer that `shard` returned is none of the model's
        self.weighted = False  # whether one device works as data ranks do
        self.parted = False  # whether the last check found ranks that differ in what they have in common
        self.clips = True  # whether the host's clipping works
        self.shares = 1  # the number of data ranks whose losses add up to one device's
        coordinate = subject.mesh.coordinate(dist.get_rank())
        self.rank_coordinate = parts.RankCoordinate(subject.mesh, coordinate)

    # The order of stages

    def checks(self) -> Iterator[Check]:
        yield from self._attempt("sharding", self._shard)
        if self.journal.checks:  # it raised, on some rank
            return
        yield from self._attempt("values after sharding", self._values)
        if self.journal.checks[-1].verdict in ("raised", "wrong") and not self._can_go_on():
            return
        yield from self._attempt("one backward pass", self._one_pass)
        if self.journal.checks[-1].name == "one backward pass":  # it raised
            return
        yield from self._attempt("gradient norm", self._norm)
        yield from self._attempt("activations", self._activations)
        yield from self._attempt("two passes in a step", lambda: self._pass("two passes in a step", 1, 2))
        yield from self._attempt("ragged labels", lambda: self._variant("ragged labels", batches.ragged))
        yield from self._attempt("unequal tokens", lambda: self._variant("unequal tokens", batches.unequal))
        yield from self._attempt("an empty expert", self._few_experts)
        yield from self._attempt("optimizer steps", self._steps)
        yield from self._attempt("evaluation", self._evaluation)
        yield from self._attempt("generation", self._generation)
        yield from self._attempt("save for one device", self._save)
        yield from self._attempt("save and go on", self._restore)

    def _attempt(self, name: str, work: Callable[[], Sequence[Check]]) -> Iterator[Check]:
        """Run a stage; if it raises on all ranks, that is its verdict. What raises on some alone is raised."""
        self.journal.current = name
        self.journal.write()
        found: Sequence[Check] = ()
        error: BaseException | None = None
        try:
            found = work()
        except NotOffered as reason:
            text = str(reason)
            found = [Check(name, reason.verdict, text, advice=self._advice(name, None, text))]
        except (InputError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # torch's CheckpointException is no Exception, and code may call sys.exit
            error = raised
        try:
            dist.barrier(self.control, async_op=True).wait(timedelta(seconds=_APART if error else _LONG))
        except RuntimeError:
            if error is not None:
                raise RaisedAlone(f"on rank {dist.get_rank()} alone: {first_line(error)}") from error
            raise
        mine = None if error is None else self._told(error)
        said = agree.exchange_unequal(mine, self.control) or [mine] * dist.get_world_size()
        if any(said):
            ranks = [rank for rank, text in enumerate(said) if text]
            where = "" if len(ranks) == len(said) else f"on rank {', '.join(map(str, ranks))} alone: "
            text = f"{where}{said[ranks[0]]}"
            if why := not_on_cpus(text):
                raise InputError(why)
            yield Check(name, "raised", text, advice=self._advice(name, None, text))
        else:
            yield from found

    def _told(self, error: BaseException) -> str:
        """Describe an exception, with the innermost module that was running."""
        running = modules_of(error)
        modules = () if self.host is None else self.sharded.module.named_modules()
        named = [clean(name) for name, module in modules if module in running and name]
        inner = max(named, key=len, default="")
        return f"{first_line(error)}{f', in {inner}' if inner else ''}"

    # Sharding

    def _shard(self) -> Sequence[Check]:
        self.single = self.mode.undropped_model(single_device(self.case))
        if not any(p.requires_grad for p in self.single.parameters()):
            raise InputError("build= made a model without a parameter that is trained: there is nothing to audit.")
        self._try_alone()
        self.start = _torch.copied(self.single)
        given = _torch.copied(self.single)
        folder = self.journal.folder / "checkpoint"
        if "folder" in wants(self.functions["shard"]).values():
            if dist.get_rank() == 0:
                save_checkpoint(self.single, folder)
            dist.barrier()
        _torch.seed_all(self.subject.seed)
        host = call_shard(self.functions["shard"], given, self.subject.mesh, folder)
        self.random = torch.get_rng_state()
        self.stack.enter_context(taken_for_model_axes(_axes_of(host)))
        self.sharded = HostRun(
            self.case, host, self.rank_coordinate, self.functions["clip"], self.functions["context"], self.shares
        )
        try:
            self.alone = Run(self.case, self.single, made=self._optimizer(host, self.single))
        except StaleOptimizer as stale:
            self.stale = str(stale)
            self.sharded.optimizer = self.case.train(host.model.parameters())
            self.alone = Run(self.case, self.single)
        self._refuse_changed_code()
        self.host = host
        self.sharded.find_cuts({**dict(self.start.named_parameters()), **dict(self.start.named_buffers())})
        ours = {n: t for n, t in self.sharded.tensors()[0].items() if isinstance(t, DTensor)}
        mine = dict(self.single.named_parameters())
        self.sharded.rows_of_one_device = {
            n: len(mine[n]) for n, t in ours.items() if n in mine and t.ndim and len(t) > len(mine[n])
        }
        self.journal.host, self.journal.used = host.title, tuple(host.used())
        self.journal.advice = host.advice
        self.journal.layouts = self.sharded.layouts()
        if not self.sharded.cut_by_hand and (plan := plan_of(host.module, self.subject.mesh)) is not None:
            # An audit computes in float64; the plan is of the dtype that models are built in.
            usual = {torch.float64: torch.float32, torch.complex128: torch.complex64}
            self.journal.plan = plan.map_rows(lambda row: row.replace(dtype=usual.get(row.dtype, row.dtype)))
        return []

    def _try_alone(self) -> None:
        """Check that the model and the loss work on one device.

        Raises:
            InputError: they do not, or the loss communicates between ranks.
        """
        run = Run(self.case, _torch.copied(self.single))
        try:
            with Collectives() as seen:
                whole = run.loss_of(self.case.batch(0))
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"The model fails on one device, before anything is sharded: {first_line(error)}. Give a batch that "
                "its forward takes, with the right dtypes (--example 2x16:float32), and a loss= for what it returns."
            ) from error
        if seen.names:
            raise InputError(
                f"loss= communicates between ranks ({seen.names[0]}), also where the model runs on one device: it "
                "would count what one device has once for each rank. Let shard= put that into the sharded model, and "
                "loss= be the loss of one device."
            )
        self.shares, self.before = self._shares_of(whole.item()), whole.item()

    def _refuse_changed_code(self) -> None:
        """Raise an error if one device computes something else since `shard` has run."""
        try:
            after = Run(self.case, _torch.copied(self.start)).loss_of(self.case.batch(0)).item()
        except Exception as error:
            said = first_line(error)
        else:
            if math.isclose(after, self.before, rel_tol=1e-9) or not math.isfinite(self.before):
                return
            said = f"its loss is {after:.6g}, and was {self.before:.6g}"
        raise ChangedCode(
            f"Since shard= has run, one device computes something else: {said}. It has replaced a function, or a "
            "method of a class, with which one device computes as well. Replace it in the instances that shard= is "
            "given, as in module.forward = types.MethodType(mine, module); or before build=, for both."
        )

    def _shares_of(self, whole: float) -> int:
        """Return the number of data ranks if the losses of their rows add up to the loss of all rows on one device: a
        sum, divided by the number of all tokens."""
        ranks = self.rank_coordinate.data[1]
        if ranks == 1:
            return 1
        runs = [Run(self.case, _torch.copied(self.single), (index, ranks)) for index in range(ranks)]
        try:
            of_rows = [run.loss_of(self.case.batch(0)).item() for run in runs]
        except InputError:
            raise
        except Exception:
            return 1  # the sharded model is given these rows as well, and the report has what it raises then
        return ranks if math.isclose(math.fsum(of_rows), whole, rel_tol=1e-9) else 1

    def _optimizer(self, host: Host, single: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer that `shard` made, for one device; None where it is the case's."""
        return None if self.case.optimizer or self.stale else remade(host, self.sharded, single)

    def _twins(self, case: Case, single: Run | None = None) -> Twins:
        runs = [single or self.alone, self.sharded]
        for run in runs:
            run.case = case
        return Twins(case, runs[0], self.sharded, None, self.rank_coordinate)

    def _can_go_on(self) -> bool:
        """Let one device start from the values that sharding has left, so that later checks tell of other mistakes;
        return whether that is possible."""
        if any(t.is_meta for tree in self.sharded.tensors() for t in tree.values()):
            return False
        try:
            self._take_over()
        except (NotReached, RuntimeError):
            return False
        self.start = _torch.copied(self.single)
        return True

    def _values(self) -> Sequence[Check]:
        name = "values after sharding"
        if said := self._names():
            return [Check(name, "wrong", said, advice=self._advice(name, None, said))]
        notes = Notes(self._twins(self.case))
        notes.tensors(START)
        check = self._judged(name, self.case, notes, locate=of_tensor)
        if check.verdict == "wrong" and self.parted:
            said = f"{check.said}; ranks differ between each other"
            return [dataclasses.replace(check, said=said, advice=self._advice(name, check.origin, said))]
        if check.verdict != "right":
            return [check]
        ours = {clean(n): p.requires_grad for n, p in self.sharded.module.named_parameters()}
        turned = {n: ours[n] for n, p in self.start.named_parameters() if n in ours and ours[n] != p.requires_grad}
        frozen, trained = [n for n in turned if not turned[n]], [n for n in turned if turned[n]]
        if frozen:
            said = f"{len(frozen)} are not trained any more (requires_grad): {_few(frozen)}"
            return [dataclasses.replace(check, verdict="wrong", said=said, advice=self._advice(name, None, said))]
        told = f"; {_few(trained)}: requires_grad, and not on one device" if trained else ""
        return [dataclasses.replace(check, said=f"{check.said}{told}")]

    def _names(self) -> str:
        """Describe tensors that sharding has lost, made anew, untied, or left without values."""
        mine, theirs = _names_of(self.start), _names_of(self.sharded.module)
        lost, new = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
        if len(lost) == len(mine):
            raise InputError(
                f"shard= returned another model: none of its {len(theirs)} tensors ({_few(new)}) has a name of the "
                f"model that build= makes ({_few(lost)}). Return the model that was given, sharded."
            )
        if lost:
            return f"{len(lost)} tensors are gone: {_few(lost)}" + (f"; new are {_few(new)}" if new else "")
        groups = [[n for n in mine if mine[n] == mark] for mark in dict.fromkeys(mine.values())]
        untied = [group for group in groups if len({theirs[n] for n in group}) > 1]
        if untied:
            return f"untied: {' and '.join(untied[0])} were one tensor, and are {len(untied[0])} now"
        empty = [n for tree in self.sharded.tensors() for n, t in tree.items() if t.is_meta]
        return f"{len(empty)} tensors have no values, on the meta device: {_few(empty)}" if empty else ""

    # Backward passes

    def _one_pass(self) -> Sequence[Check]:
        case = self._of_pass(0, 1)
        _, notes = self._passed(case)
        measured = notes.exchanged()
        limit = limits(case, measured)
        failed = wrong(measured, limit)
        weighted = bool(failed) and self._as_data_parallel(case, failed)
        self.weighted = weighted
        checks = []
        for kind, title in (("loss", "loss"), ("output", "outputs"), ("gradient", "gradients")):
            of_kind = {key: error for key, error in measured.errors.items() if key[1] == kind}
            bad = [key for key in failed if key[1] == kind]
            checks.append(self._check(title, measured, limit, of_kind, bad, weighted and bool(bad)))
        checks.append(_of_replicas(measured))
        self.measured, self.failed = measured, [] if weighted else failed
        if failed:
            title = next(check.name for check in checks if check.verdict in ("wrong", "weighted"))
            checks = self._with_origin(checks, of_passes(self._twins(case), measured, failed), title)
        if weighted:  # from here on, one device works as the data ranks do
            self.single = _torch.copied(self.start)
            optimizer = self._optimizer(self.sharded.host, self.single)
            self.alone = ByRank(self.case, self.single, self.rank_coordinate.data, optimizer)
            self.alone.forward_backward(0, 0)
        return checks

    def _with_origin(self, checks: list[Check], origin: Origin | None, title: str) -> list[Check]:
        """Give the origin to the check of that name."""
        advice = self._advice(title, origin)
        return [
            dataclasses.replace(check, origin=origin, advice=advice) if check.name == title else check
            for check in checks
        ]

    def _norm(self) -> Sequence[Check]:
        """Compare the norm that the host's clipping computes of the gradients that are there."""
        both = self._twins(dataclasses.replace(self._of_pass(0, 1), clip=UNCLIPPED))
        notes = Notes(both)
        mine: list[torch.Tensor] = [p.grad for p in self.single.parameters() if p.grad is not None]
        self.clips = False
        clip = self.functions["clip"]
        self._refuse_cut_by_hand(clip, "clip", self.sharded.host.clips)
        norm = self._by_host(self.sharded.host.clips, self.sharded.norm) if clip is None else self.sharded.norm()
        self.clips = True
        if norm is None:
            raise NotOffered(f"{self.journal.host} does not tell the norm")
        notes.norms(0, [nn.utils.get_total_norm(mine), norm])
        gradients_are_wrong = any(key[1] == "gradient" for key in self.failed)
        check = self._judged("gradient norm", both.case, notes, locate=None if gradients_are_wrong else of_norm)
        return [check]

    def _by_host(self, name: str, work: Callable[[], T]) -> T:
        """Use a means of the host; one that raises is not offered, whoever uses it in their training or not."""
        try:
            return work()
        except (Exception, CheckpointException) as error:
            raise NotOffered(f"{name} raises {first_line(error)}") from error

    def _activations(self) -> Sequence[Check]:
        """Compare values and gradients at the borders of all modules, of the same batch."""
        if self.failed or self.weighted:
            raise NotReached("the outcome differs already" if self.failed else "each rank's are those of its own rows")
        origin = of_passes(self._twins(self._of_pass(0, 1)), self.measured, [(0, "parameter", "")])
        if origin is None:
            modules = sum(1 for _ in self.single.modules())
            return [Check("activations", "right", _count(modules, "module"), modules)]
        advice = self._advice("activations", origin)
        return [Check("activations", "wrong", origin.what, origin=origin, advice=advice)]

    def _of_pass(self, first: int, count: int) -> Case:
        batch = self.case.batch
        return dataclasses.replace(self.case, batch=lambda index: batch(first + index), steps=1, accumulate=count)

    def _passed(self, case: Case, single: Run | None = None) -> tuple[Twins, Notes]:
        """Run the backward passes of a step both ways; return what was measured up to the gradients."""
        both = self._twins(case, single)
        notes = Notes(both)
        for run in both.runs:
            run.begin(0)
        for micro in range(case.accumulate):
            losses = [run.forward_backward(0, micro) for run in both.runs]
            suffix = f" of pass {micro}" if case.accumulate > 1 else ""
            notes.batch(micro)
            notes.loss(0, f"loss{suffix}", losses)
            notes.outputs(0, suffix)
        self._fill_gradients()
        notes.gradients(0)
        return both, notes

    def _fill_gradients(self) -> None:
        """Give one device zeros where it has no gradient and every rank has zeros: some reductions make them."""
        got, want = self.sharded.gradients(), self.alone.gradients()
        zero = {n for n, g in got.items() if g is not None and n in want and want[n] is None and not _largest(g)}
        common = set.intersection(*(set(names) for names in agree.exchange(sorted(zero))))
        for name, p in self.alone.tensors()[0].items():
            if name in common:
                p.grad = torch.zeros_like(p)

    def _pass(self, name: str, first: int, count: int) -> Sequence[Check]:
        if self.failed:
            raise NotReached("one pass differs already")
        case = self._of_pass(first, count)
        if (accumulate := self.functions["accumulate"]) is not None:
            return [self._judged(name, case, self._accumulated(case, accumulate), locate=of_tensor)]
        _, notes = self._passed(case)
        return [self._judged(name, case, notes, locate=None, passes=True)]

    def _accumulated(self, case: Case, accumulate: Callable[[Any, list[Any]], Any]) -> Notes:
        """Run the passes of a step by the user's own means; return what was measured of the gradients."""
        both = self._twins(case)
        for run in both.runs:
            run.begin(0)
        for micro in range(case.accumulate):
            self.alone.forward_backward(0, micro)
        with self.sharded.host.accumulating():
            accumulate(self.sharded.host.returned, self.sharded.parts_of(map(case.batch, range(case.accumulate))))
        notes = Notes(both)
        notes.gradients(0)
        return notes

    def _variant(self, name: str, change: Callable[[Any, int], Any]) -> Sequence[Check]:
        """Compare a backward pass of a batch that was changed."""
        if self.failed:
            raise NotReached("one pass differs already")
        changed = change(self.case.batch(3), self.rank_coordinate.data[1])
        case = dataclasses.replace(self.case, batch=lambda _: changed, steps=1)
        if not torch.isfinite(self._loss_alone(case)):
            raise NotOffered("the loss on one device is not finite with labels of -100")
        _, notes = self._passed(case)
        return [self._judged(name, case, notes, locate=None, passes=True)]

    def _few_experts(self) -> Sequence[Check]:
        """Compare batches of one token, each of another one, until some expert is left empty on some rank."""
        if not batches.has_experts(self.single):
            raise NotOffered("the model has no module of experts")
        for index in range(_TOKENS):
            change = functools.partial(batches.one_token, index=index)
            (check,) = self._variant("an empty expert", change)
            if check.verdict != "right":
                return [check]
        return [dataclasses.replace(check, said=f"{_TOKENS} batches of one token each, {check.said}")]

    def _loss_alone(self, case: Case) -> torch.Tensor:
        model = _torch.copied(self.start)
        alone = ByRank(case, model, self.rank_coordinate.data) if self.weighted else Run(case, model)
        return _by_one_device(lambda: alone.loss_of(case.batch(0)).detach())

    # Verdicts

    def _judged(
        self, name: str, case: Case, notes: Notes, *, locate: Callable[..., Origin | None] | None, passes: bool = False
    ) -> Check:
        measured = notes.exchanged()
        self.parted = bool(measured.replicas)
        limit = limits(case, measured)
        failed = wrong(measured, limit)
        if failed:
            weighted = passes and not self.weighted and self._as_data_parallel(case, failed)
        else:  # then the single device works as the data ranks do already
            weighted = passes and self.weighted
        check = self._check(name, measured, limit, measured.errors, failed, weighted)
        if check.verdict == "right" and measured.replicas:
            what, text = next(iter(measured.replicas.items()))
            return dataclasses.replace(check, verdict="wrong", said=f"{what}: {text}")
        if check.verdict == "weighted":
            return dataclasses.replace(check, advice=self._advice(name, None, check.said))
        if check.verdict != "wrong":
            return check
        both = self._twins(case)
        origin = of_passes(both, measured, failed) if passes else locate(both, failed[0], measured) if locate else None
        return dataclasses.replace(check, origin=origin, advice=self._advice(name, origin, check.said))

    def _check(
        self,
        name: str,
        measured: Measured,
        limit: Mapping[Key, float],
        errors: Mapping[Key, float],
        failed: Sequence[Key],
        weighted: bool,
    ) -> Check:
        if not failed and not weighted:
            return Check(name, "right", _count(len(errors), "value"), len(errors))
        bad = differences({key: errors[key] for key in failed if key in errors}, dict(limit), measured.alone)
        if weighted:
            said = "it is the mean of what data ranks compute of their own rows, as DDP has it"
            return Check(name, "weighted", said, len(errors), bad)
        first = bad[0]
        return Check(
            name, "wrong", f"{len(bad)} of {len(errors)}: {first.kind} {first.name}, off by {first.error:.2g}",
            len(errors), bad,
        )  # fmt: skip

    def _as_data_parallel(self, case: Case, failed: Sequence[Key]) -> bool:
        """Return whether the run equals the mean over data ranks of what one device computes from each one's rows."""
        if self.rank_coordinate.data[1] == 1:
            return False
        by_rank = ByRank(case, _torch.copied(self.start), self.rank_coordinate.data)
        _, notes = self._passed(case, by_rank)
        measured = notes.exchanged()
        limit = limits(case, measured)
        return not set(wrong(measured, limit)) - {key for key in failed if key[1] == "norm"}

    def _advice(self, name: str, origin: Origin | None, said: str = "") -> Any:
        return advice_on(self.journal.advice, self.journal.used, name, origin, said, self.start)

    # Steps, and what comes after them

    def _steps(self) -> Sequence[Check]:
        if self.stale:
            name = "optimizer steps"
            return [Check(name, "wrong", self.stale, advice=self._advice(name, None, self.stale))]
        if self.failed:
            raise NotReached("one pass differs already")
        case = dataclasses.replace(
            self.case,
            batch=lambda i: self.case.batch(5 + i),
            clip=_CLIP if self.clips and self.functions["clip"] is None else None,
        )
        both = self._twins(case)
        if not case.steps:
            raise NotOffered("no steps were asked for")
        self.full = None
        _copy(self.sharded.full_values(buffers=True), self.alone.tensors()[1])  # each forward has changed them
        compared = 0
        for step in range(case.steps):
            for run in both.runs:
                run.begin(step)
                run.forward_backward(step, 0)
            self._fill_gradients()
            for run in both.runs:
                run.clip()
            before = values_before(both)
            for run in both.runs:
                run.step()
            notes = Notes(both)
            notes.state(step)
            notes.tensors(step)
            measured = notes.exchanged()
            limit = limits(case, measured)
            failed = wrong(measured, limit)
            compared += len(measured.errors)
            if failed and all(key[1] == "buffer" and self._is_of_rank(key[2]) for key in failed):
                # Statistics of each rank's own rows, which some libraries take from the first rank: it has its own.
                first = self.rank_coordinate.data[0] == 0
                failed = [key for key in failed if first and notes.measured.errors.get(key, 0.0) > limit[key]]
                failed = list(dict.fromkeys(key for of_rank in agree.exchange(failed) for key in of_rank))
                failed = [key for key in failed if not self.sharded.host.is_of_rank(key[2])]
                if not failed:
                    continue
            if failed or measured.replicas:
                check = self._check("optimizer steps", measured, limit, measured.errors, failed, False)
                if not failed:
                    what, text = next(iter(measured.replicas.items()))
                    return [dataclasses.replace(check, verdict="wrong", said=f"{what}: {text}")]
                origin = of_update(both, failed, measured, before)
                return [dataclasses.replace(check, origin=origin, advice=self._advice("optimizer steps", origin))]
        said = f"{_count(case.steps, 'step')}, {_count(compared, 'value')}{self._left_out()}"
        return [Check("optimizer steps", "right", said, compared)]

    def _left_out(self) -> str:
        """Describe parameters with gradients that the optimizer does not have."""
        made = self.sharded.host.optimizer
        groups = self.sharded.optimizer.param_groups if made is None else self.sharded.host.groups()
        stepped = {id(p) for group in groups for p in group["params"]}
        every = [(clean(name), p) for name, p in self.sharded.module.named_parameters()]
        names = [name for name, p in every if p.requires_grad and id(p) not in stepped]
        return f"; the optimizer leaves out {_few(names)}" if names else ""

    def _take_over(self) -> None:
        """Give the single device the values of the sharded model.

        Raises:
            NotReached: ranks hold different ones.
        """
        self._refuse_parted()
        params, buffers = self.alone.tensors()
        _copy(self._full_values()[0], {**params, **buffers})

    def _refuse_parted(self) -> None:
        """Raise `NotReached` where ranks hold different values."""
        if parted := self._full_values()[1]:
            raise NotReached(f"ranks have parted: {_few(parted)} differ between them by now")

    def _full_values(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the sharded model's full values after its last step, and the names of those in which ranks differ.
        Collective after a step."""
        if self.full is None:
            full = self.sharded.full_values()
            marks = (
                agree.exchange_unequal({name: agree.fingerprint(tensor) for name, tensor in full.items()}, self.control)
                or []
            )
            parted = [name for name in full if len({of_rank.get(name) for of_rank in marks}) > 1]
            self.full = full, [name for name in parted if not self.sharded.host.is_of_rank(name)]
        return self.full

    def _is_of_rank(self, buffer: str) -> bool:
        return self.weighted or self.sharded.host.is_of_rank(buffer)

    def _refuse_cut_by_hand(self, own: Any, option: str, means: str) -> None:
        """Raise `NotOffered` where the library's means take local shards for whole tensors."""
        cut = self.sharded.cut_by_hand
        if own is None and cut and option not in self.sharded.host.knows_cuts:
            raise NotOffered(
                f"{_few(list(cut))}: plain tensors that were cut, which {means} takes for whole ones. Give --{option} "
                f"({option}=)"
            )

    def _statistics(self) -> list[str]:
        """Return buffers that hold statistics of each rank's own rows: a checkpoint has those of one rank."""
        return self._full_values()[1] if self.weighted else []

    def _evaluation(self) -> Sequence[Check]:
        self._take_over()
        case = dataclasses.replace(self.case, batch=lambda _: self.case.batch(7), steps=1)
        both = self._twins(case)
        notes = Notes(both)
        with torch.no_grad():
            for run in (self.alone, self.sharded):
                run.model.eval()
            alone = _by_one_device(lambda: self.alone.loss_of(case.batch(0)))
            losses = [alone, self.sharded.loss_of(case.batch(0))]
        for run in (self.alone, self.sharded):
            run.model.train()
        self.sharded.host.reshard()
        notes.batch(0)
        notes.loss(0, "loss", losses)
        notes.outputs(0, "")
        return [self._judged("evaluation", case, notes, locate=None)]

    def _generation(self) -> Sequence[Check]:
        ids = batches.token_ids(self.case.batch(8))
        if not hasattr(self.single, "generate") or ids is None:
            raise NotOffered("the model has no generate(), or its batch no input_ids")
        ids = ids[:, : max(1, ids.shape[1] // 2)]
        own = self.functions["generate"]
        generate = _greedy if own is None else own
        self.single.eval()
        self.sharded.module.eval()
        with torch.no_grad():
            alone = _by_one_device(lambda: generate(self.single, ids))
            draws = not torch.equal(alone, generate(self.single, ids))
            torch.set_rng_state(self.random)
            if own is None:
                here = self._by_host("generate", lambda: _greedy(self.sharded.module, ids))
            else:
                here = own(self.sharded.host.returned, ids)
        self.single.train()
        self.sharded.module.train()
        self.sharded.host.reshard()
        every = agree.exchange(here)
        apart = [rank for rank, tokens in enumerate(every) if not torch.equal(tokens, every[0])]
        if apart:
            said = f"rank {apart[0]} makes {every[apart[0]][0].tolist()}, rank 0 {every[0][0].tolist()}"
        elif not draws and not torch.equal(here, alone):
            said = f"other tokens than one device's: {here[0].tolist()}, where it has {alone[0].tolist()}"
        else:
            told = "; ranks draw the same, which one device need not" if draws else ""
            return [Check("generation", "right", f"{_count(alone.numel(), 'token')}{told}", alone.numel())]
        return [Check("generation", "wrong", said, alone.numel(), advice=self._advice("generation", None, said))]

    def _save(self) -> Sequence[Check]:
        assert self.host is not None
        if not self.weighted:  # else a checkpoint has the statistics of one rank, which are left out below
            self._refuse_parted()
        folder = self.journal.folder / "saved"
        folder.mkdir(exist_ok=True)
        save, load = self.functions["save"], self.functions["load"]
        self._refuse_cut_by_hand(save, "save", self.host.saves)
        if save is None:
            host = self.host
            self._by_host(host.saves, lambda: host.save(folder))
        else:
            save(self.host.returned, str(folder))
        dist.barrier()
        if save is not None and load is None and not self.host.reads(folder):
            raise NotOffered("load= does not say how one device reads what save= has saved")
        read = self.host.read(folder, lambda: single_device(self.case)) if load is None else self._read(load, folder)
        by = self.host.saves if save is None else save.__name__
        full = {name: tensor for name, tensor in self._full_values()[0].items() if name not in self._statistics()}
        kept = set(read.state_dict())  # whose parameters may have names of their own there
        got = {**dict(read.named_parameters()), **{n: b for n, b in read.named_buffers() if n in kept}}
        return [self._same("save for one device", full, got, by)]

    def _read(self, load: Callable[[str], Any], folder: Path) -> nn.Module:
        """Return the model that the user's own function loads, or whose state dict it loads."""
        made = load(str(folder))
        if isinstance(made, nn.Module):
            return made
        model = single_device(self.case)
        model.load_state_dict(made)
        return model

    def _restore(self) -> Sequence[Check]:
        host = self.host
        assert host is not None
        if self.stale:
            raise NotReached("the optimizer is none of this model's")
        if not self.weighted:
            self._refuse_parted()
        shard = self.functions["shard"]
        if "folder" in wants(shard).values():
            return [self._loaded_again(shard)]
        folder, skipped = self.journal.folder / "stored", self._statistics()
        self.sharded.begin(0)  # torch saves no state of an optimizer that has gradients and has not stepped
        self.sharded.host.reshard()
        before = {name: t.clone() for name, t in {**self.sharded.locals(), **self._local_state(self.sharded)}.items()}
        resume, by = self.functions["resume"], host.stores
        self._refuse_cut_by_hand(resume, "resume", by)
        if resume is None:
            self._by_host(host.stores, lambda: host.store(folder, self.sharded.optimizer))
            dist.barrier()
        else:
            folder, by = self.journal.folder / "saved", resume.__name__
        again = self.sharded
        if host.reshards:
            again = self._sharded_again(shard, folder)
            again.cut_by_hand = self.sharded.cut_by_hand
            again.begin(0)
            again.rows_of_one_device = self.sharded.rows_of_one_device
        else:
            self._spoil()
        if resume is None:
            self._by_host(host.stores, lambda: again.host.restore(folder, again.optimizer))
        else:
            resume(again.host.returned, str(folder))
        after = {**again.locals(), **self._local_state(again)}
        before = {name: tensor for name, tensor in before.items() if name not in skipped}
        return [self._same("save and go on", before, after, by)]

    def _sharded_again(self, shard: Callable[..., Any], folder: Path) -> HostRun:
        """Shard a model with other values."""
        other = self.mode.undropped_model(single_device(dataclasses.replace(self.case, seed=self.subject.seed + 1)))
        host = call_shard(shard, other, self.subject.mesh, folder)
        return HostRun(self.case, host, self.rank_coordinate)

    def _loaded_again(self, shard: Callable[..., Any]) -> Check:
        """Compare a model that is sharded from the folder that the sharded model was saved to."""
        saved = self.journal.folder / "saved"
        if not saved.exists() or not any(saved.iterdir()):
            raise NotReached("nothing was saved")
        if hasattr(self.start, "save_pretrained") and not (saved / "config.json").exists():
            raise NotOffered(f"{self.journal.host} saves no checkpoint that shard= could load")
        again = self._sharded_again(shard, saved)
        return self._same("save and go on", self.sharded.locals(), again.locals(), "the checkpoint that it saved")

    def _local_state(self, run: HostRun) -> dict[str, torch.Tensor]:
        return {name: parts.local(tensor) for name, tensor in run.state().items()}

    @torch.no_grad()
    def _spoil(self) -> None:
        """Change the values of the sharded model, for a checkpoint to bring them back."""
        for tensor in self.sharded.locals().values():
            if tensor.is_floating_point():
                tensor.add_(1)

    def _same(self, name: str, want: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], by: str) -> Check:
        """Compare values that nothing computes with: they must be equal on every rank."""
        # buffers that are not persistent, which checkpoints do not have
        left_out = {name for name, _ in self.start.named_buffers()} - set(self.start.state_dict())
        missing = [n for n in want if n not in got and n not in left_out]
        unlike = [n for n in got if n in want and n not in left_out and not _equal(want[n], got[n])]
        every = agree.exchange_unequal((missing, unlike), self.control) or [(missing, unlike)]
        missing = list(dict.fromkeys(n for each, _ in every for n in each))
        unlike = list(dict.fromkeys(n for _, each in every for n in each))
        if not missing and not unlike:
            return Check(name, "right", f"{_count(len(got), 'value')}, by {by}", len(got))
        said = (
            f"{len(missing)} are lost ({_few(missing)})"
            if missing
            else f"{len(unlike)} have other values ({_few(unlike)})"
        )
        return Check(name, "wrong", f"{said}, by {by}", len(want), advice=self._advice(name, None, said))


def _by_one_device(work: Callable[[], T]) -> T:
    """Run what one device has to do first; what it cannot do is not offered."""
    try:
        return work()
    except Exception as error:
        raise NotOffered(f"one device raises too: {first_line(error)}") from error


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], to: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the tensors of these names that have their shapes."""
    for name, tensor in to.items():
        if name in values and values[name].shape == tensor.shape:
            tensor.copy_(values[name])


def _largest(tensor: torch.Tensor) -> float:
    return measure.size(parts.local(tensor))


def _greedy(model: Any, ids: torch.Tensor) -> Any:
    return model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)


def _axes_of(host: Host) -> Iterator[str]:
    """Iterate over the names of the axes of all DTensors."""
    for tensor in itertools.chain(*(tree.values() for tree in host.tensors())):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            yield from mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim))


def _of_replicas(measured: Measured) -> Check:
    """Return the check of values that ranks have in common."""
    if not measured.replicas:
        return Check("bits of replicas", "right")
    what, text = next(iter(measured.replicas.items()))
    return Check("bits of replicas", "wrong", f"{len(measured.replicas)} differ: {what}: {text}")


def _names_of(model: nn.Module) -> dict[str, int]:
    """Return the name of every parameter and buffer, tied ones too, with a number for each tensor."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {clean(name): id(tensor) for name, tensor in tensors}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.detach(), b.detach().to(a.dtype)))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
