"""Saving: the state of a job becomes a folder that is complete or absent."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import os
import platform
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._progress import Progress
from shardlib.checkpoint import _paths, _random
from shardlib.checkpoint._files import Entry, bytes_of, check_name, dtype_name, sync_folder, write_bytes, write_tensors
from shardlib.checkpoint._items import Item, elsewhere, model_items, tied_names
from shardlib.checkpoint._manifest import MANIFEST, File, Manifest, Piece, Saved
from shardlib.checkpoint._optimizer import describe, joined, known, optimizer_items
from shardlib.checkpoint._peers import Lost, Peers, peers
from shardlib.checkpoint._share import Source, agreed, file_groups, packed, sources, turns, written_by
from shardlib.checkpoint._values import encode
from shardlib.engine.sharded import records_of
from shardlib.engine.torn import refuse_torn
from shardlib.errors import CheckpointError, check_flags, nearest, short_traceback, warn
from shardlib.layout._boxes import Box, full_box

__all__ = [
    "Saving",
    "check_objects",
    "check_options",
    "peers_after_saving",
    "save",
    "shardlib_version",
    "wait_for_saving",
]

WEIGHTS = ("pieces", "huggingface", "file", "none")
HF_INDEX = "model.safetensors.index.json"


class Saving:
    """A checkpoint that is being written, or was; what `save` returns.

    Attributes:
        path: the path of the checkpoint.
        failed: whether saving has ended without a checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = save(folder + "/first", nn.Linear(2, 2), background=True)
    ...     saving.wait() == saving.path, saving.done()
    (True, True)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.failed = False

    def done(self) -> bool:
        """Return whether saving has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its path.

        Raises:
            CheckpointError: it was not saved; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
        if (failure := self._taken()) is not None:
            raise failure
        return self.path

    def _taken(self) -> BaseException | None:
        """Return the failure of a save that has ended, if no call has raised it yet."""
        failure, self._failure = self._failure, None
        return failure

    def _begin(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(work,), name="shardlib-save")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failure, self.failed = error, True


_last: list[Saving] = []


def wait_for_saving() -> None:
    """Wait for a checkpoint that is still being written in the background.

    Raises:
        CheckpointError: it was not saved, and no call has raised this yet.
    """
    if (failure := _joined()) is not None:
        raise failure


def _joined() -> BaseException | None:
    """Wait for a checkpoint that is still being written, and return why it failed, if no call has raised this yet."""
    failure: BaseException | None = None
    while _last:
        if (thread := _last[0]._thread) is not None:
            thread.join()  # before it is forgotten: an interrupt may end the waiting, and not the thread
        failure = _last.pop(0)._taken()
    return failure


def peers_after_saving(call: str, doing: str, timeout: float | None) -> Peers:
    """Wait for a checkpoint that is still being written in the background, and return the ranks of this job.

    Raises:
        CheckpointError: it was not saved, and a rank has not raised this yet; on every rank, since the others would
            wait for that one. Or the ranks did not come.
    """
    failure = _joined()
    if isinstance(failure, Lost):
        raise failure
    everyone = peers(call, doing, timeout)
    everyone.raise_together(failure)
    return everyone


@short_traceback
def save(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    random: bool = True,
    weights: str = "pieces",
    variant: str | None = None,
    shard_mb: float = 5000,
    background: bool = False,
    timeout: float | None = None,
) -> Saving:
    """Save a model, sharded or not, and what belongs to its training. Collective: every rank calls it.

    The folder appears at `path` when it is complete, or not at all. Each tensor is written once, by the ranks that hold
    its shards.

    A checkpoint that is at `path` already is replaced once the new one is complete; if saving fails, it is still there.
    Files in its folder that shardlib did not write, such as a tokenizer's, are kept. A folder that is neither empty nor
    a checkpoint is refused. With `weights="file"`, a file at `path` is replaced.

    Args:
        path: a folder that all ranks see, the same on every rank. Its parent is created if needed. A link to a folder
            stays one, and what it points to is replaced.
        model: parameters and persistent buffers are saved by their names, tied ones once.
        optimizer: its groups and state, by the names of parameters. Needs the model. Between the passes of a step of
            `accumulate(n)`, the gradients so far are not saved: a warning says so, and a run that loads the checkpoint
            begins this step anew.
        lr_scheduler: anything with `state_dict()` and `load_state_dict()`, such as a `torch.optim.lr_scheduler`.
        dataloader: the same; every rank's state is saved, equal ones once.
        extra: numbers, text, lists, dicts and tensors of your own; rank 0's are saved.
        random: save the random states of torch, Python and numpy of every rank.
        weights: "pieces": ranks write their local shards; "huggingface": each tensor is written in full, so that
            `from_pretrained(path)` reads the folder; "file": a model alone becomes one safetensors file at `path`,
            written by rank 0; "none": the model only names the optimizer's parameters. No rank holds more than one full
            tensor at a time.
        variant: with "huggingface", a word in the names of files, as in `from_pretrained(path, variant=...)`.
        shard_mb: the largest size of a file, in megabytes.
        background: copy the state, and write it while training continues. The next save waits for this one.
        timeout: seconds that ranks wait for each other in each phase; a lost rank is named then at the latest. By
            default those of the mesh, half an hour unless `mesh(timeout=)` says otherwise.

    Returns:
        A `Saving`; with `background`, `wait()` and the next save raise a failure.

    Raises:
        CheckpointError: the reason why it was not saved, on every rank: ranks gave different paths or options, what
            is at `path` is not a checkpoint, a file cannot be written, not all ranks called it. A checkpoint at `path`
            is still there.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = save(folder + "/first", model, extra={"step": 7})
        ...     sorted(os.listdir(done.path))
        ['pieces-00000-000.safetensors', 'shardlib.json', 'values']
    """
    target = _paths.given(path, "save")
    check_flags("save", CheckpointError, background=background, random=random)
    everyone = peers_after_saving("sl.save", f'saving "{target}"', timeout)
    everyone.run("check arguments", lambda: _check(target, model, optimizer, weights, shard_mb, variant))
    everyone.compare(
        path=str(target),
        weights=weights,
        variant=variant,
        shard_mb=shard_mb,
        background=background,
        random=random,
        model=_is_given(model),
        optimizer=_is_given(optimizer),
        dataloader=_is_given(dataloader),
    )
    if weights == "file":
        others = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader, "extra": extra}
        everyone.run("check arguments", lambda: _check_file(model, others))
        random = False
    if optimizer is not None:
        _warn_between_passes(model)
    state = _State.of(everyone, model, optimizer, lr_scheduler, dataloader, extra, random=random)
    shared = agreed(everyone.run("collect", lambda: _items(model, optimizer, weights, everyone.size)), everyone)
    followed = Path(everyone.first("follow links", lambda: str(_paths.followed(target))))
    job = _Job(followed, everyone, shared, turns(shared), state, weights, int(shard_mb * 2**20), variant)
    saving = Saving(target)
    if background:
        everyone.run("copy", job.copy)
        saving._begin(job.carry_out)
        _last.append(saving)
    else:
        job.carry_out()
    return saving


def check_options(call: str, options: Mapping[str, Any], *others: str) -> None:
    """Check the names of options that a later `save` will get.

    Raises:
        CheckpointError: `save` has no such option, nor has `call` itself, whose options are `others`.
    """
    of_save = [name for name, each in inspect.signature(save).parameters.items() if each.kind is each.KEYWORD_ONLY]
    for name, value in options.items():
        if name not in of_save:
            raise CheckpointError(
                f"{call}({name}={value!r}) was given, which is no option.{nearest(name, [*others, *of_save])} Options "
                f"are {', '.join([*others, *of_save])}."
            )


def _is_given(value: Any) -> str:
    return "None" if value is None else "an object"


def _check(target: Path, model: Any, optimizer: Any, weights: str, shard_mb: float, variant: str | None) -> None:
    _paths.check_replaceable(target)
    if weights not in WEIGHTS:
        raise CheckpointError(f"weights={weights!r} was given; give one of {WEIGHTS}.{nearest(str(weights), WEIGHTS)}")
    if not isinstance(shard_mb, Real) or not 0 < shard_mb < math.inf:
        raise CheckpointError(f"shard_mb={shard_mb!r} was given; give a positive number of megabytes.")
    if variant is not None and (weights != "huggingface" or not re.fullmatch("[A-Za-z0-9_-]{1,64}", str(variant))):
        raise CheckpointError(
            f'variant={variant!r} was given with weights="{weights}"; give a word of letters, digits, "_" and "-", and '
            'weights="huggingface", whose files have it in their names.'
        )
    check_objects(model, optimizer)
    refuse_torn("save", model)


def _warn_between_passes(model: Any) -> None:
    for record in records_of(model.parameters()):
        if record.reducer.is_between_passes():
            warn(
                f"sl.save was called between the {record.reducer.passes} backward passes of a step (accumulate), and "
                "the gradients so far are not saved: a run that loads this checkpoint begins the step anew. Save after "
                "an optimizer.step() after which optimizer.step_was_skipped is False."
            )
            return


def check_objects(model: Any, optimizer: Any) -> None:
    """Check that a model and an optimizer are what they should be, and that the optimizer comes with its model."""
    if model is not None and not isinstance(model, nn.Module):
        raise CheckpointError(
            f"model= was given as {type(model).__name__}; give the nn.Module itself. Tensors of your own go to extra=."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise CheckpointError(
            f"optimizer= was given as {type(optimizer).__name__}, which has no param_groups. Give an optimizer."
        )
    if optimizer is not None and model is None:
        raise CheckpointError("An optimizer was given without its model, whose names its state is saved by. Give both.")


def _check_file(model: Any, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if model is None or given:
        raise CheckpointError(
            f'weights="file" writes one file with the tensors of a model, and was given '
            f"{'no model' if model is None else ', '.join(given) + ' too'}. Save to a folder, with another weights=."
        )


def _items(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, weights: str, size: int) -> list[Item]:
    if model is None:
        return []
    items = list(model_items(model, size)) if weights != "none" else []
    if optimizer is not None:
        items += optimizer_items(optimizer, known(model), size)
    for item in items:
        dtype_name(item.dtype, item.name)
        check_name(item.name)
    return items


# --- state beside tensors of the model and optimizer -----------------------------------------------------------------


@dataclass
class _State:
    """JSON for the manifest, and the tensors in it that this rank writes."""

    state: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    config: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        everyone: Peers,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        dataloader: Any,
        extra: Any,
        *,
        random: bool,
    ) -> _State:
        made = cls()
        everyone.run("collect state", lambda: made._of_first_rank(everyone, model, optimizer, lr_scheduler, extra))
        if optimizer is not None and elsewhere(model):
            reported = everyone.exchange("join optimizers", made.state["optimizer"])
            made.state["optimizer"] = everyone.run("join optimizers", lambda: joined(reported))
        if dataloader is not None:
            made._of_each_rank(everyone, "dataloader", lambda: _state_dict("dataloader", dataloader))
        if random:
            # Apart: ranks with exact random numbers have one state of torch, and nothing seeds those of Python alike.
            made._of_each_rank(everyone, "random", _random.states)
            made._of_each_rank(everyone, "python_random", _random.python_states)
        return made

    def _of_first_rank(self, everyone: Peers, model: Any, optimizer: Any, lr_scheduler: Any, extra: Any) -> None:
        """Describe what rank 0 writes. All ranks run this, so that all find a value that cannot be saved."""
        if model is not None:
            self.tied, self.config = tied_names(model), _config(model)
        if optimizer is not None:
            self.state["optimizer"] = describe(optimizer, known(model), self._put)
        if lr_scheduler is not None:
            state = encode(_state_dict("lr_scheduler", lr_scheduler), "lr_scheduler", self._put)
            self.state["lr_scheduler"] = {"class": type(lr_scheduler).__name__, "state": state}
        if extra is not None:
            self.state["extra"] = encode(extra, "extra", self._put)
        self.about = _about(everyone, model)
        if everyone.rank:
            self.tensors.clear()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        _add(self.tensors, name, tensor.clone())

    def _of_each_rank(self, everyone: Peers, what: str, get: Callable[[], Any]) -> None:
        """Describe every rank's state; ranks with equal states share the copy of the first of them."""
        held: dict[str, torch.Tensor] = {}

        def mark() -> tuple[Any, int]:
            neutral: dict[str, torch.Tensor] = {}
            value = get()
            text = json.dumps(encode(value, what, neutral.__setitem__))
            crc = zlib.crc32(text.encode())
            for tensor in neutral.values():
                crc = zlib.crc32(bytes(_raw(tensor)), crc)
            own = encode(value, f"{what}.{everyone.rank}", partial(_add, held))
            return own, crc

        own, crc = everyone.run(f"collect {what}", mark)
        marks = everyone.exchange(f"compare {what}", crc)
        owners = [marks.index(each) for each in marks]
        writes = owners[everyone.rank] == everyone.rank
        states = everyone.exchange(f"exchange {what}", own if writes else None)
        self.state[what] = {"owners": owners, "states": {str(r): s for r, s in enumerate(states) if s is not None}}
        if writes:
            for name, tensor in held.items():
                self._put(name, tensor)


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Add a tensor of a value to those that are written, if a file can hold it under its name."""
    dtype_name(tensor.dtype, name)
    check_name(name)
    if name in tensors:
        raise CheckpointError(
            f'two tensors of a value are called "{name}": keys that differ become one name, such as 1 and "1", or '
            '"a.b" and "a" with "b" in it. Give one of them another key.'
        )
    tensors[name] = tensor


def _raw(tensor: torch.Tensor) -> Any:
    return bytes_of(tensor).numpy()


def _state_dict(what: str, of: Any) -> Any:
    if not callable(getattr(of, "state_dict", None)) or not callable(getattr(of, "load_state_dict", None)):
        raise CheckpointError(
            f"{what}= was given a {type(of).__name__}, which has no state_dict() and load_state_dict(). Give an object "
            "with both, or keep its position in extra=."
        )
    return of.state_dict()


def _config(model: nn.Module) -> dict[str, str]:
    """Return the configuration files that Hugging Face keeps beside weights, where the model has them."""
    found: dict[str, Any] = {
        "config.json": getattr(model, "config", None),
        "generation_config.json": getattr(model, "generation_config", None),
    }
    return {name: value.to_json_string() for name, value in found.items() if hasattr(value, "to_json_string")}


def shardlib_version() -> str:
    try:
        return importlib.metadata.version("shardlib")
    except importlib.metadata.PackageNotFoundError:  # run from its folder, not installed
        return "unknown"


def _about(everyone: Peers, model: Any) -> dict[str, Any]:
    from shardlib.engine import apply

    plan = apply.get_plan(model) if model is not None and apply.is_sharded(model) else None
    return {
        "shardlib": shardlib_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": everyone.size,
        "mesh": str(plan.mesh if plan is not None else MeshShape(dp=everyone.size)),
        "transforms": list(plan.transforms) if plan is not None else [],
    }


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    target: Path
    everyone: Peers
    items: Sequence[Item]
    turns: Sequence[int]
    state: _State
    weights: str
    limit: int
    variant: str | None

    def copy(self) -> None:
        """Copy the tensors that this rank will write or send to host memory, so that training may change them."""
        rank = self.everyone.rank
        gathers = {i for target, group in self._groups() if target == rank for i in group}
        self.items = [
            replace(item, local=_on_host(item.local))
            if rank in item.rank_mesh.ranks and (i in gathers or written_by(item, turn, rank))
            else item
            for i, (item, turn) in enumerate(zip(self.items, self.turns, strict=True))
        ]

    def carry_out(self) -> None:
        everyone, folder = self.everyone, _paths.writing(self.target)
        with ExitStack() as claim:
            everyone.run("prepare", lambda: self._begin(claim) if everyone.rank == 0 else None)
            try:
                written = everyone.gather("write", lambda: self._write(folder))
            except BaseException:
                if self._groups():
                    everyone.renew()
                raise
            everyone.run("write manifest", lambda: self._finish(folder, written) if everyone.rank == 0 else None)
            everyone.run("put in place", lambda: self._end(claim) if everyone.rank == 0 else None)

    def _begin(self, claim: ExitStack) -> None:
        claim.enter_context(_paths.claimed(self.target))
        (_paths.begin_file if self.weights == "file" else _paths.begin)(self.target)

    def _end(self, claim: ExitStack) -> None:
        if self.weights == "file":
            _paths.commit_file(self.target, "model.safetensors")
        else:
            _paths.commit(self.target)
        claim.close()

    def _groups(self) -> list[tuple[int, list[int]]]:
        """Return files of full tensors: the writer of each, and the indices of its items."""
        if self.weights not in ("huggingface", "file"):
            return []
        of_model = [i for i, item in enumerate(self.items) if item.section == "model"]
        limit = self.limit if self.weights == "huggingface" else math.inf
        groups = file_groups([self.items[i] for i in of_model], limit, self.everyone.size)
        return [(rank, _in_file_order(self.items, [of_model[i] for i in group])) for rank, group in groups]

    def _write(self, folder: Path) -> list[Any]:
        """Write this rank's files; of each: path, size, checksum, and the pieces in it."""
        files = [(f"pieces-{self.everyone.rank:05d}-{n:03d}", "model", e) for n, e in enumerate(self._pieces("model"))]
        files += [
            (f"optimizer/pieces-{self.everyone.rank:05d}-{n:03d}", "optimizer", entries)
            for n, entries in enumerate(self._pieces("optimizer"))
        ]
        if values := self._values():
            files.append((f"values/rank-{self.everyone.rank:05d}", "values", values))
        groups = self._groups()
        rounds = _Rounds(self.everyone, self.items, self.turns, groups)
        for n, (rank, group) in enumerate(groups):
            if rank == self.everyone.rank:
                name = f"model.{self.variant}" if self.variant else "model"
                name += f"-{n + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
                files.append((name, "model", [rounds.entry(i) for i in group]))
        nbytes = sum(entry.nbytes for _, _, entries in files for entry in entries)
        try:
            with Progress(f'saving "{self.target.name}"', unit="bytes", total=nbytes) as progress:
                reported = [
                    self._write_file(folder, f"{name}.safetensors", section, entries, progress.advance)
                    for name, section, entries in files
                ]
                rounds.finish()
        except BaseException:
            if groups:
                self.everyone.stop_sending()
            raise
        return reported

    def _write_file(
        self, folder: Path, name: str, section: str, entries: Sequence[Entry], advance: Callable[[int], None]
    ) -> list[Any]:
        path = folder / name
        if path.parent != folder:
            path.parent.mkdir(exist_ok=True)
        reported = write_tensors(path, entries, advance)
        sync_folder(path.parent)
        return [
            name,
            reported["bytes"],
            reported["crc32"],
            section,
            [[e.name, e.box.offsets, e.box.sizes, _dtype(e), self._shapes.get((section, e.name))] for e in entries],
        ]

    def _pieces(self, section: str) -> list[list[Entry]]:
        """Return the entries of a section that this rank writes, by file."""
        if section == "model" and self.weights != "pieces":
            return []
        entries = [
            Entry(item.name, item.dtype, part.box, partial(part.of, item.local))
            for item, turn in zip(self.items, self.turns, strict=True)
            if item.section == section
            for part in written_by(item, turn, self.everyone.rank)
        ]
        files = packed([(entry.name, entry.box, entry.nbytes) for entry in entries], self.limit)
        return [
            sorted((e for e, at in zip(entries, files, strict=True) if at == n), key=lambda e: -e.dtype.itemsize)
            for n in range(max(files, default=-1) + 1)
        ]

    def _values(self) -> list[Entry]:
        tensors = sorted(self.state.tensors.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
        return [Entry(name, t.dtype, full_box(tuple(t.shape)), partial(_itself, t)) for name, t in tensors]

    def _finish(self, folder: Path, written: Sequence[Any]) -> None:
        manifest = self._manifest([file for of_rank in written for file in of_rank])
        for file in manifest.files:
            if not (folder / file.path).is_file() or (folder / file.path).stat().st_size != file.nbytes:
                raise CheckpointError(
                    f'"{folder / file.path}" was written by another rank and is not here in full. Save to a folder '
                    "that all ranks share."
                )
        if self.weights == "huggingface":
            for name, text in self.state.config.items():
                write_bytes(folder / name, text.encode())
            if len([file for file in manifest.files if "/" not in file.path]) > 1:
                index = HF_INDEX.replace(".json", f".{self.variant}.json" if self.variant else ".json")
                write_bytes(folder / index, _hf_index(manifest).encode())
        write_bytes(folder / MANIFEST, manifest.dump().encode())
        sync_folder(folder)

    @cached_property
    def _shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Global shapes of the tensors that this rank writes pieces of."""
        return {(item.section, item.name): item.shape for item in self.items}

    def _manifest(self, files: Sequence[Any]) -> Manifest:
        tensors: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "values": {}}
        for n, (_, _, _, section, entries) in enumerate(files):
            for name, offsets, sizes, dtype, shape in entries:
                box = Box(tuple(offsets), tuple(sizes))
                whole = box.sizes if shape is None else tuple(shape)
                tensors[section].setdefault(name, (whole, getattr(torch, dtype), []))[2].append(Piece(n, box))
        saved = {
            section: {name: Saved(shape, kind, tuple(pieces)) for name, (shape, kind, pieces) in named.items()}
            for section, named in tensors.items()
        }
        listed = tuple(File(name, nbytes, crc) for name, nbytes, crc, _, _ in files)
        return Manifest(listed, saved, self.state.tied, self.state.about, self.state.state)


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _in_file_order(items: Sequence[Item], numbers: list[int]) -> list[int]:
    """Order items by dtype, widest first, so that every tensor is aligned."""
    return sorted(numbers, key=lambda i: -items[i].dtype.itemsize)


def _hf_index(manifest: Manifest) -> str:
    model = manifest.tensors["model"]
    size = sum(math.prod(saved.shape) * saved.dtype.itemsize for saved in model.values())
    names = {name: manifest.files[saved.pieces[0].file].path for name, saved in sorted(model.items())}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Rounds:
    """Whole tensors put together by the ranks that write them.

    In round r every writer has its r-th tensor. All ranks send what others need of a round before they receive for it,
    and wait for the messages of the round before, so that no two ranks wait for each other.
    """

    def __init__(
        self, everyone: Peers, items: Sequence[Item], turns: Sequence[int], groups: Sequence[tuple[int, list[int]]]
    ) -> None:
        self._everyone, self._items, self._turns = everyone, items, turns
        self._by_writer: dict[int, list[int]] = {}
        for rank, group in groups:
            self._by_writer.setdefault(rank, []).extend(group)
        self._round = 0
        self._sent: list[Callable[[], None]] = []

    def entry(self, i: int) -> Entry:
        """Return the i-th item in full, as an entry of a file of this rank."""
        item = self._items[i]
        return Entry(item.name, item.dtype, full_box(item.shape), partial(self._gathered, i))

    def _gathered(self, i: int) -> torch.Tensor:
        self._send_round()
        item = self._items[i]
        full = torch.empty(item.shape, dtype=item.dtype)
        for source in sources(item, self._turns[i], self._everyone.rank):
            full[source.part.box.slices] = self._part(item, source)
        return full

    def _part(self, item: Item, source: Source) -> torch.Tensor:
        if source.rank == self._everyone.rank:
            return source.part.of(item.local)
        buffer = torch.empty(source.part.box.sizes, dtype=item.dtype)
        self._everyone.receive(buffer, source.rank)
        return buffer

    def _send_round(self) -> None:
        before, self._sent = self._sent, []
        for target, numbers in self._by_writer.items():
            if target != self._everyone.rank and self._round < len(numbers):
                self._send(target, numbers[self._round])
        self._round += 1
        self._await(before)

    def _send(self, target: int, i: int) -> None:
        item = self._items[i]
        for source in sources(item, self._turns[i], target):
            if source.rank == self._everyone.rank:
                part = bytes_of(source.part.of(item.local))
                self._sent.append(self._everyone.send(part, target))

    def _await(self, sent: Sequence[Callable[[], None]]) -> None:
        for wait in sent:
            wait()

    def finish(self) -> None:
        """Take part in the rounds in which this rank writes nothing more."""
        while self._round < max(map(len, self._by_writer.values()), default=0):
            self._send_round()
        self._await(self._sent)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, which is freed after the save.

    Pinned memory goes back to torch's cache of it then, from which the next save takes it.
    """
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return room.copy_(tensor)
