"""`audit` and `assert_audit`: their arguments, and the ranks on which they run."""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardlib._log import erase_bar
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import InputError, MeshError, ShardlibError
from shardlib.testing import _carry
from shardlib.testing._pool import HangError, RankDied, RankError, shared_pool
from shardlib.testing._standing import explain, table
from shardlib.testing.auditing.advice import advice_on
from shardlib.testing.auditing.foreign import ChangedCode, first_line
from shardlib.testing.auditing.report import AuditError, AuditReport, Check
from shardlib.testing.auditing.stages import Journal, Subject, run_on_rank

__all__ = ["assert_audit", "audit"]

_MOST_RANKS = 64


def audit(
    build: Callable[[], nn.Module],
    shard: Callable[..., Any],
    mesh: MeshLike,
    batch: Callable[[int], Any],
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    split: Callable[[Any, int, int], Any] | None = None,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    accumulate: Callable[[Any, list[Any]], Any] | None = None,
    clip: Callable[[Any], torch.Tensor] | None = None,
    generate: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    save: Callable[[Any, str], Any] | None = None,
    load: Callable[[str], Any] | None = None,
    resume: Callable[[Any, str], Any] | None = None,
    steps: int = 2,
    strict: bool = False,
    seed: int = 0,
    timeout: float = 120.0,
    show: Callable[[Check], None] | None = None,
) -> AuditReport:
    """Compare a model that other code shards with one device, in all that a training run does.

    Runs on warm CPU processes over gloo, in float64, also code that says `cuda`, `nccl` or `bfloat16`. The page "Audit"
    of the documents lists what is compared, and which libraries are known.

    Args:
        build: makes the model for one device. Called on every rank with the same seed.
        shard: your code, as it is: takes the model, and if it has such parameters a `mesh`, or the `folder` of a
            checkpoint instead of the model. It returns the sharded model, or a tuple with what else trains it: an
            optimizer, an `Accelerator`, a `Fabric`, an engine of DeepSpeed.
        mesh: the mesh, such as "dp=2,tp=2", in the order in which `shard` numbers ranks. Its data axes share the rows
            of a batch.
        batch: makes the global batch of a pass, from a number: a tensor, a tuple of positional arguments, a mapping of
            keyword arguments, or (tuple, mapping). The same on every rank.
        loss: (model, batch) -> scalar, a mean over rows or tokens; or a sum over those of a rank, divided by the number
            of all, whose values over data ranks then have to add up. By default the `loss` of the model's output, else
            a mean of all its elements.
        optimizer: from parameters to an optimizer; by default the one that `shard` returns, else AdamW.
        split: (batch, index, count) -> the part of one data rank; rows of dim 0 by default.
        context: makes what forward and backward of the sharded model run in, such as `loss_parallel`.
        accumulate: (made, batches): your own backward passes of a step, of this rank's part of each batch. `made` is
            what `shard` returned, here and below.
        clip: (made) -> norm: your own clipping of gradients, instead of the library's.
        generate: (made, ids) -> tokens: your own generation, instead of a greedy `model.generate`. It is called with
            the model on one device, too.
        save: (made, folder): your own saving, called on every rank, instead of the library's.
        load: (folder) -> the state dict, or the model, that one device loads from what `save` has saved; by default
            as the library loads.
        resume: (made, folder): loads what `save` has saved into a model that was sharded again.
        steps: optimizer steps after which parameters, buffers and state are compared.
        strict: count "weighted" as a difference: a mean of the ranks' means where they have unequal numbers of tokens.
        seed: the seed of the weights.
        timeout: seconds after which ranks that do not answer are abandoned.
        show: called with each check as soon as it is made.

    Returns:
        A report, which is true if nothing differs, and prints as text. What `shard` raises is in it, too.

    Raises:
        InputError, MeshError: arguments of which nothing can be compared.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> def build():
        ...     return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> def shard(model, mesh):
        ...     return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> report = audit(build, shard, "tp=2", lambda step: torch.randn(4, 8))
        >>> report.ok, report["gradients"].verdict
        (True, 'right')
    """
    if multiprocessing.current_process().daemon:
        raise InputError(
            "audit() was called on a rank of an audit: the file with build= or shard= calls it when it is imported. "
            'Put the call under `if __name__ == "__main__":`.'
        )
    shape = MeshShape.of(mesh)
    if -1 in shape.sizes:
        raise MeshError(f'audit() was given mesh "{shape}"; give every size, for as many ranks to be started.')
    if shape.world_size > _MOST_RANKS:
        raise MeshError(
            f'audit() was given mesh "{shape}", of {shape.world_size} ranks, each of which is a process on this '
            "machine. Give a smaller mesh with the same axes; a dry audit (--dry, dry_audit) takes any size."
        )
    if not timeout > 0:
        raise InputError(f"audit() was given timeout={timeout!r}; give seconds above zero.")
    subject = Subject(shape, steps=steps, strict=strict, seed=seed)
    functions = {
        "build": build, "shard": shard, "batch": batch, "loss": loss, "optimizer": optimizer, "split": split,
        "context": context, "accumulate": accumulate, "clip": clip, "generate": generate,
        "save": save, "load": load, "resume": resume,
    }  # fmt: skip
    with _in_our_words():
        subject.check(functions)
    packed = _packed(functions)
    with tempfile.TemporaryDirectory(prefix="shardlib-audit-") as folder:
        try:
            pool = shared_pool(shape.world_size)
            with _in_our_words(), _told(Path(folder), show):
                return pool.run(run_on_rank, subject, packed, folder, timeout=timeout)[0]  # type: ignore[no-any-return]
        except ShardlibError as error:
            erase_bar()
            if isinstance(error, ChangedCode):
                pool.close()  # the next audit has processes whose code is as it was
            if not isinstance(error, RankError):
                raise
            report = _interrupted(subject, Path(folder), error)
        except Exception as error:
            report = _interrupted(subject, Path(folder), error)
        if show is not None:
            show(report.checks[-1])
        return report


def assert_audit(*args: Any, **kwargs: Any) -> AuditReport:
    """Run `audit`, and raise an error with its report where anything differs.

    Raises:
        AuditError: an AssertionError.
    """
    __tracebackhide__ = True
    report = audit(*args, **kwargs)
    if not report:
        raise AuditError(report)
    return report


def _packed(functions: dict[str, Any]) -> bytes:
    """Pack functions for the ranks, which unpack them where imports are redirected."""
    for name, function in functions.items():
        if reason := _carry.why_not(function):
            told = getattr(function, "__qualname__", function)
            raise InputError(
                f"audit() was given {name}={told}, which cannot be sent to the ranks ({reason}). It is pickled with "
                "everything that it captures: make that inside of the function instead."
            )
    return _carry.dump(functions)


def _interrupted(subject: Subject, folder: Path, error: BaseException) -> AuditReport:
    """Return what had been compared when ranks hung, died or raised apart."""
    journal = Journal(folder).read()
    said = {HangError: "the ranks hang", RankDied: "a rank died"}.get(type(error)) or first_line(error)  # type: ignore[arg-type]
    advice = advice_on(journal.advice, journal.used, journal.current, None, said)
    failed = Check(journal.current, "raised", "\n".join([said, *_where(error)]), advice=advice)
    return dataclasses.replace(
        journal.report(subject), checks=(*journal.checks, failed), seconds=time.time() - journal.begun
    )


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Let errors of what an audit shares with `equivalent` name the audit and its arguments."""
    try:
        yield
    except InputError as error:
        told = str(error).replace("equivalent()", "audit()").replace("model=", "build=")
        if told == str(error):
            raise
        raise InputError(told) from error


def _where(error: BaseException) -> Iterator[str]:
    """Iterate over the lines that say where the ranks stood."""
    if isinstance(error, RankError) and error.standing:
        yield from table(error.standing).splitlines()
        yield from explain(error.standing).splitlines()


@contextmanager
def _told(folder: Path, show: Callable[[Check], None] | None) -> Iterator[None]:
    """Call `show` with each check of the journal, as it is written."""
    if show is None:
        yield
        return
    done, shown = threading.Event(), 0

    def tell() -> None:
        nonlocal shown
        for check in Journal(folder).read().checks[shown:]:
            shown += 1
            show(check)

    def watch() -> None:
        while not done.wait(0.1):
            tell()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        tell()
