"""One architecture after another on the warm pool, each within its time, into a file that a later run continues."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardlib import layouts
from shardlib._mesh_shape import MeshShape
from shardlib._plan import make_plan
from shardlib._plan.rows import Row
from shardlib.engine import record_collectives, shard_model
from shardlib.engine._torch import pytree
from shardlib.engine.feature.batchnorm import is_batch_norm
from shardlib.rules.foreign import has_tp_plan
from shardlib.testing._pool import HangError, RankDied, shared_pool
from shardlib.testing.census import _models
from shardlib.testing.census._inputs import NoInputs, rows_of
from shardlib.testing.census._models import Entry, TooLarge
from shardlib.testing.equivalence import Report, equivalent
from shardlib.testing.equivalence.case import as_call
from shardlib.testing.equivalence.train import cast

__all__ = ["MESHES", "MESHES_OF", "Engine", "Result", "read", "run", "sample", "write"]

Engine = Literal["torch", "jax"]
MESHES = ("tp=2", "dp=2,tp=2")
MESHES_OF: dict[str, tuple[str, ...]] = {"torch": MESHES, "jax": ("tp=1", *MESHES)}
_OF_TYPES = re.compile(r"dtype|[Ff]loat|without overflow")  # errors that may be those of code that takes no float64
_OTHERWISE = "torch.export's program, run by torch, computes otherwise"
_NOT_EXPORTED = re.compile(f"cannot be exported|cannot be compiled: its forward depends on values|{_OTHERWISE}")
_INSTALLED = re.compile(r"\S*/site-packages/")  # a folder of this machine
_BLOCK = re.compile(r".*?\.\d+\.")  # the start of a name, up to an element of a list


@dataclass(frozen=True)
class Result:
    """Result of one architecture.

    Attributes:
        library, name, cls: the architecture and the class that was taken for it.
        built: whether the tiny model was built and trained for a step on one device; `error` says why not.
        labels: the labels that it was trained by; "" if its outputs were.
        extra: which inputs it takes besides its main one; see `batch_of`.
        share: what divides the widths of its usual configuration; 0 where they have the census's own sizes.
        upcast: whether float64 was used where its code asks for float32: since the two do not go into one op, or since
            the rounding of float32 hides what is compared.
        inputs: the arguments that it was given.
        parameters: the number of its parameters.
        mixes: whether it compares the rows of a batch with each other, as contrastive models do, or keeps statistics of
            them: on one device, too, its halves do not make a batch, and only meshes without data axes are proved.
        trained: the share of its parameters that got a gradient.
        layout: "file NAME", "tp_plan", "tp_plan, proposed" where rules were proposed for what the plan leaves out, or
            "proposed".
        sharded: the share of the bytes of parameters in repeated blocks that is sharded over tp; of all parameters
            where no block repeats.
        collectives: the number of collectives of a training step, forward and backward, in the repeated block that
            has most, on tp=2; in the whole model where no block repeats. None where it is not proved, or where a
            second step fails.
        notes: remarks of the plan on tp=2.
        proved: for each mesh whether one training step was that of one device.
        error: why it was not built, or the first error.
        where: the first module that differs.
        gathered: ops that had no sharding rule for what they were given.
        seconds: wall time.
        engine: the engine that was compared with torch on one device.
    """

    library: str
    name: str
    cls: str
    built: bool = False
    labels: str = ""
    extra: str = ""
    share: int = 0
    upcast: bool = False
    inputs: tuple[str, ...] = ()
    parameters: int = 0
    trained: float = 0.0
    mixes: bool = False
    layout: str = ""
    sharded: float = 0.0
    collectives: int | None = None
    notes: tuple[str, ...] = ()
    proved: dict[str, bool] = field(default_factory=dict)
    error: str = ""
    where: str = ""
    gathered: tuple[str, ...] = ()
    seconds: float = 0.0
    engine: Engine = "torch"

    @property
    def status(self) -> str:
        """ "not built", "proved", "wrong" (numbers differ), "refused" (an error before there were numbers), or
        "not exported" (on JAX: `torch.export` refuses the model, or makes another one of it)."""
        if not self.built:
            return "not built"
        if self.proved and all(self.proved.values()):
            return "proved"
        if self.error.startswith("differs"):
            return "wrong"
        return "not exported" if self.engine == "jax" and _NOT_EXPORTED.search(self.error) else "refused"

    def __str__(self) -> str:
        line = f"{self.library} {self.name} ({self.cls}): {self.status}"
        if self.built:
            line += f", {self.layout or 'no layout'}, {self.sharded:.0%} of blocks sharded"
        told = f"; {self.error}" if self.error else ""
        return f"{line}{told} [{self.seconds:.1f} s]"


def run(
    chosen: Iterable[Entry],
    output: Path | None = None,
    *,
    meshes: Sequence[str] | None = None,
    seconds: float = 20.0,
    engine: Engine = "torch",
    report: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Prove architectures that do not stand in a file yet, and append a line for each; return the new results.

    Args:
        chosen: the architectures.
        output: a file of JSON lines; None keeps nothing.
        meshes: the meshes that each is proved on; by default those of the engine.
        seconds: the longest that building, and each mesh, may take; a hang counts as an error.
        engine: "jax" proves `shardlib.jax.compile_model`, on one device too. An error there ends an architecture's
            proof: the graph is the same on every mesh.
        report: called with each result when it is known.
    """
    meshes = MESHES_OF[engine] if meshes is None else meshes
    known = {(result.engine, result.library, result.name) for result in read(output)} if output else set()
    made = []
    for entry in chosen:
        if (engine, entry.library, entry.name) in known:
            continue
        begun = time.perf_counter()
        result = prove(entry, meshes, seconds, engine)
        result = dataclasses.replace(result, seconds=round(time.perf_counter() - begun, 1))
        made.append(result)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(_line(result))
        report(result)
    return made


def read(file: Path) -> list[Result]:
    """Return the results in a file; none if there is no file."""
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [_result(line) for line in lines if "name" in line]


def _result(line: Mapping[str, Any]) -> Result:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return Result(**fields)


def write(file: Path, results: Iterable[Result], **facts: Any) -> None:
    """Write results sorted by library and name, after a line of `facts` (date, versions)."""
    ordered = sorted(results, key=lambda result: (result.library, result.name))
    head = [json.dumps(facts) + "\n"] if facts else []
    file.write_text("".join(head + [_line(result) for result in ordered]), encoding="utf-8")


def _line(result: Result) -> str:
    return json.dumps(dataclasses.asdict(result)) + "\n"


def sample(chosen: Sequence[Entry], count: int, seed: int = 0) -> list[Entry]:
    """Draw some architectures, the same for the same seed."""
    return random.Random(seed).sample(list(chosen), min(count, len(chosen)))


def prove(entry: Entry, meshes: Sequence[str], seconds: float, engine: Engine = "torch") -> Result:
    """Return the result of one architecture; an error, crash or hang is part of it."""
    if engine == "jax":
        return _prove_on_jax(entry, meshes, seconds)
    result = Result(entry.library, entry.name, entry.cls)
    try:
        result = shared_pool(1).run(_alone, entry, meshes[0], timeout=seconds)[0]
    except Exception as error:
        return dataclasses.replace(result, error=_said(error))
    for mesh in meshes if result.built and not result.error else ():
        if result.mixes and MeshShape.of(mesh).data_ranks > 1:
            continue
        tried = _on_mesh(entry, result, mesh, seconds)
        if tried.status == "wrong" and not result.error:
            tried = _looked_into(entry, result, tried, mesh, seconds)
        result = tried
    return _counted(entry, result, meshes[0], seconds) if result.status == "proved" else result


def _prove_on_jax(entry: Entry, meshes: Sequence[str], seconds: float) -> Result:
    """Prove on the JAX engine, where a mesh holds global arrays: no model tells a batch from its halves."""
    result = Result(entry.library, entry.name, entry.cls, engine="jax")
    planned = next((mesh for mesh in meshes if MeshShape.of(mesh).world_size > 1), meshes[0])
    try:
        result = dataclasses.replace(shared_pool(1).run(_alone, entry, planned, timeout=seconds)[0], engine="jax")
    except Exception as error:
        return dataclasses.replace(result, error=_said(error))
    for mesh in meshes:
        if not result.built or result.error:
            break
        tried = _on_mesh(entry, result, mesh, seconds)
        if tried.status == "wrong" and not result.upcast:
            again = _on_mesh(entry, dataclasses.replace(result, upcast=True), mesh, seconds)
            tried = again if again.proved.get(mesh) else tried
        if tried.status == "wrong" and not _exported_alike(entry, result, seconds):
            tried = dataclasses.replace(tried, error=f"{mesh}: {_OTHERWISE} than the model does")
        result = tried
    return result


def _exported_alike(entry: Entry, result: Result, seconds: float) -> bool:
    """Return whether a model's exported program, run by torch, gives the model's own loss."""
    try:
        return shared_pool(1).run(_same_loss, entry, result, timeout=seconds)[0]  # type: ignore[no-any-return]
    except Exception:
        return True


def _same_loss(entry: Entry, result: Result) -> bool:
    """Compare losses. Some code asks whether it is exported, and then masks or casts in another way."""
    entry = dataclasses.replace(entry, share=result.share)
    torch.manual_seed(0)
    model = _Lossy(_models.build(entry).double(), upcast_loss)
    batch = cast(_models.batch(entry, result.labels, result.extra, 0), torch.float64)
    program = torch.export.export(model, (batch,), strict=False).module()
    loss, exported = model(batch), program(batch)
    return torch.allclose(loss, exported, 1e-9, 1e-11)


class _Lossy(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


def _counted(entry: Entry, result: Result, mesh: str, seconds: float) -> Result:
    """Count the collectives of a step on a mesh; leave the field empty where a second step of the model fails."""
    try:
        pool = shared_pool(MeshShape.of(mesh).world_size)
        return dataclasses.replace(result, collectives=pool.run(_collectives, entry, result, mesh, timeout=seconds)[0])
    except Exception:
        return result


def _collectives(entry: Entry, result: Result, mesh: str) -> int:
    entry, loss = dataclasses.replace(entry, share=result.share), upcast_loss if result.upcast else mean_loss
    model = _models.build(entry).double()
    batch = cast(_models.batch(entry, result.labels, result.extra, 0), torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shard_model(model, mesh, layouts.for_model(model), compile=None)
        loss(model, batch).backward()  # where ranks agree on the order of gradients
        with record_collectives(model) as recorded:
            loss(model, batch).backward()
    return most_in_a_block(each.module for each in recorded.collectives)


def _looked_into(entry: Entry, result: Result, wrong: Result, mesh: str, seconds: float) -> Result:
    """Return the result where a difference is the model's own: it mixes rows, or rounds to float32 on the way."""
    if MeshShape.of(mesh).data_ranks > 1 and _mixes(entry, result, seconds):
        return dataclasses.replace(result, mixes=True)
    again = result if result.upcast else _on_mesh(entry, dataclasses.replace(result, upcast=True), mesh, seconds)
    return again if again.proved.get(mesh) else wrong


def _mixes(entry: Entry, result: Result, seconds: float) -> bool:
    """Return whether a model tells a batch from its halves on one device: data ranks then compute something else."""
    try:
        return shared_pool(1).run(_told_apart, entry, result, timeout=seconds)[0]  # type: ignore[no-any-return]
    except Exception:
        return False


def _told_apart(entry: Entry, result: Result) -> bool:
    """Compare outputs and buffers after a batch with those after its halves.

    Normalization by statistics of the batch is off here: shardlib takes them over all data ranks.
    """
    entry = dataclasses.replace(entry, share=result.share)
    batch = cast(_models.batch(entry, result.labels, result.extra, 0), torch.float64)
    seen = []
    for part in (batch, rows_of(batch, 0, 2), rows_of(batch, 1, 2)):
        torch.manual_seed(0)
        model = _models.build(entry).double()
        for module in model.modules():
            if is_batch_norm(module):
                module.eval()
        with upcasting() if result.upcast else contextlib.nullcontext():
            output = _run(model, part)
        leaves = [x.detach() for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        seen.append((leaves, [buffer for _, buffer in model.named_buffers()]))
    (whole, after), (first, after_first), (second, after_second) = seen
    parts_fit = all(map(_fits, whole, first, second)) and len(whole) == len(first) == len(second)
    return not (parts_fit and all(map(_fits, after, after_first, after_second)))


def _fits(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether a tensor of a batch is one without rows, the rows of its halves, or their mean."""
    made = [first] if torch.equal(first, second) else []
    made += [torch.cat([first, second])] if first.ndim else []
    made += [(first + second) / 2] if first.is_floating_point() and first.shape == second.shape else []
    return any(whole.shape == each.shape and torch.allclose(whole, each, 1e-9, 1e-11) for each in made)


def _on_mesh(entry: Entry, result: Result, mesh: str, seconds: float) -> Result:
    entry = dataclasses.replace(entry, share=result.share)
    try:
        report = equivalent(
            functools.partial(_models.build, entry),
            functools.partial(_models.batch, entry, result.labels, result.extra),
            mesh,
            loss=upcast_loss if result.upcast else mean_loss,
            split=rows_of if result.engine == "torch" else None,
            steps=1,
            timeout=seconds,
            engine=result.engine,
        )
    except Exception as error:
        said = result.error or f"{mesh}: {_said(error)}"
        return dataclasses.replace(result, proved={**result.proved, mesh: False}, error=said)
    where = result.where or ("" if report.ok or report.origin is None else report.origin.module)
    return dataclasses.replace(
        result,
        proved={**result.proved, mesh: report.ok},
        error=result.error or ("" if report.ok else f"differs on {mesh}: {_difference(report)}"),
        where=where,
        gathered=tuple(sorted({*result.gathered, *report.gathered})),
    )


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss in the model's output, or means over everything but the features, which have their own weights:
    also where an output has no dim of rows."""
    return _mean_of(_run(model, batch))


def upcast_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return `mean_loss` of a model whose code asks for float32: it is given float64."""
    with upcasting():
        return mean_loss(model, batch)


@contextlib.contextmanager
def upcasting() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Upcast():
            yield
    finally:
        torch.set_default_dtype(default)


class _Upcast(TorchFunctionMode):
    """Inside the block, torch functions that are asked for float32 make float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def _run(model: nn.Module, batch: Any) -> Any:
    args, kwargs = as_call(batch)
    return model(*args, **kwargs)


def _mean_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.ndim == 0 else loss.mean()
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    found = [_weighted_mean(leaf) for leaf in tensors if leaf.is_floating_point() and leaf.requires_grad]
    if not found:
        raise NoInputs("its output has no tensor to train by")
    return torch.stack(found).sum()


def _weighted_mean(output: torch.Tensor) -> torch.Tensor:
    if not output.ndim:
        return output  # a mean over rows, as data ranks average it
    features = output.shape[-1]
    weight = torch.linspace(0.5, 1.5, features, dtype=output.dtype, device=output.device)
    return (output.square() * weight + output.sin()).mean()


def _difference(report: Report) -> str:
    if report.origin is not None:
        return report.origin.what
    first = next(iter(report.failures), None)
    return str(first) if first else next(iter((*report.replicas.values(), *report.layouts.values())))


def _said(error: Exception) -> str:
    """Return an error in one line, without the files of a traceback inside it: they are those of this machine."""
    name = "" if isinstance(error, NoInputs | TooLarge) else f"{type(error).__name__}: "
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback (", 'File "'))]
    kept = lines[:1] if isinstance(error, HangError | RankDied) else lines[:3]
    return f"{name}{_INSTALLED.sub('', ' '.join(kept))}"[:300]


def _alone(entry: Entry, mesh: str) -> Result:
    """Build a model on one rank, train it for a step, and plan it."""
    try:
        model, result = _trained(entry)
    except Exception as error:
        return Result(entry.library, entry.name, entry.cls, error=_said(error))
    try:
        return _planned(result, model, mesh)
    except Exception as error:
        return dataclasses.replace(result, proved={mesh: False}, error=f"{mesh}: {_said(error)}")


def _trained(entry: Entry) -> tuple[nn.Module, Result]:
    """Build a model and train it for a step: with its main input alone if that is enough, and by labels or else by its
    outputs. The first error is raised."""
    first: Exception | None = None
    library = _models.LIBRARIES[entry.library]
    ways = itertools.product((False, True), library.shares, library.extras, dict.fromkeys((entry.labels, "")))
    of_types = False
    for upcast, share, extra, labels in ways:
        if upcast and not of_types:
            break
        entry = dataclasses.replace(entry, share=share)
        torch.manual_seed(0)
        try:
            model = _models.build(entry).double()
            batch = _models.batch(entry, labels, extra, 0)
            loss = (upcast_loss if upcast else mean_loss)(model, cast(batch, torch.float64))
            loss.backward()
            if found := {str(p.dtype) for p in model.parameters() if p.is_floating_point()} - {"torch.float64"}:
                raise TypeError(f"its forward makes parameters {' and '.join(found)}, which were torch.float64")
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss on one device is {loss.item()}")
        except Exception as error:
            first = first or error
            of_types = of_types or _OF_TYPES.search(str(error)) is not None
            continue
        count = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.grad is not None)
        return model, Result(
            entry.library, entry.name, entry.cls, True, labels, extra, share, upcast, tuple(batch),
            count, round(trained / max(count, 1), 3),
        )  # fmt: skip
    assert first is not None
    raise first


def _planned(result: Result, model: nn.Module, mesh: str) -> Result:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        rules = layouts.for_model(model)
    proposed = any(issubclass(warning.category, layouts.SuggestedLayoutWarning) for warning in heard)
    own = ["tp_plan"] if has_tp_plan(model) else []
    file = next((name for name in layouts.available() if layouts.load(name) == rules), None)
    made = make_plan(model, mesh, rules)
    rows = [row for row in made.rows if row.kind == "parameter"]
    rows = [row for row in rows if _BLOCK.match(row.name)] or rows
    total = sum(_bytes(row) for row in rows)
    split = sum(_bytes(row) for row in rows if row.local_shape(made.mesh) != row.global_shape)
    return dataclasses.replace(
        result,
        layout=f"file {file}" if file else ", ".join(own + ["proposed"] * proposed),
        sharded=round(split / max(total, 1), 3),
        notes=tuple(made.notes),
    )


def most_in_a_block(modules: Iterable[str]) -> int:
    """Return how many of some modules, each counted, are in the repeated block that has most; all without blocks.

    >>> most_in_a_block(["embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.mlp", "head"])
    2
    """
    counts = Counter(block[0] if (block := _BLOCK.match(f"{module}.")) else "" for module in modules)
    outside = counts.pop("", 0)
    return max(counts.values(), default=outside)


def _bytes(row: Row) -> int:
    return math.prod(row.global_shape) * row.dtype.itemsize
