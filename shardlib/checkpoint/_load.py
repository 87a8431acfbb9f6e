"""Loading: each rank reads the slices that it holds, whatever mesh, rules and transforms they were saved on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._progress import Progress
from shardlib.checkpoint import _paths, _random
from shardlib.checkpoint._items import Item, elsewhere, model_items, tied_names
from shardlib.checkpoint._manifest import MANIFEST, Manifest, Piece, Saved
from shardlib.checkpoint._opened import Names, Opened, found, opened
from shardlib.checkpoint._optimizer import groups_for, known, make_state, master_items
from shardlib.checkpoint._peers import Peers, described
from shardlib.checkpoint._permuted import Reading, Transpose
from shardlib.checkpoint._save import check_objects, peers_after_saving
from shardlib.checkpoint._values import decode
from shardlib.engine.torn import mend, refuse_torn
from shardlib.errors import CheckpointError, MeshError, nearest, short_traceback
from shardlib.layout._boxes import Box, full_box

__all__ = ["Loaded", "load"]

VERIFY = ("read", "all", "none")


@dataclass(frozen=True)
class Loaded:
    """The result of loading that is not in the model or optimizer.

    Attributes:
        path: the folder of the checkpoint.
        extra: the `extra` that was passed to `save`.
        about: origin of the checkpoint: versions, mesh, transforms, number of ranks. Empty for a foreign one.
        notes: state that could not be restored, in words: random streams that the saved mesh did not have.
        missing, unexpected: names that only the model has, or only the checkpoint, with `strict=False`.

    >>> import tempfile
    >>> from shardlib.checkpoint._save import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder + "/first", nn.Linear(2, 2, bias=False)).path
    ...     loaded = load(path, nn.Linear(2, 2), strict=False)
    >>> loaded.missing, loaded.about["mesh"]
    (('bias',), 'dp=1')
    """

    path: Path
    extra: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@short_traceback
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    random: bool = True,
    weights: bool = True,
    strict: bool = True,
    cast: bool = False,
    verify: str = "read",
    names: Names = None,
    transpose: Transpose | None = None,
    timeout: float | None = None,
) -> Loaded:
    """Load a checkpoint into a model, sharded or not, on any mesh, and into its training state. Collective.

    Reads checkpoints of `save`, and, for a model alone, plain Hugging Face checkpoints (a safetensors file, or a folder
    of them) and those of orbax. Nothing is unpickled. All checks precede all changes.

    Args:
        path: a checkpoint.
        model: the model whose tensors are overwritten, in place.
        optimizer: receives the saved state and the options of its groups. Needs the model.
        lr_scheduler: its `load_state_dict` is called, after the optimizer's.
        dataloader: its `load_state_dict` is called with this rank's state.
        random: restore the random states, if they were saved.
        weights: False: the model's tensors are not changed; the model only names the optimizer's parameters.
        strict: raise if a name is only in the model or only in the checkpoint; else load the common names and report
            the others.
        cast: convert dtypes that differ; else raise.
        names: the model's names for tensors of a foreign checkpoint that differ: a function of the checkpoint's name,
            or a mapping from it (other names are kept); None leaves a tensor out. A path in a tree of orbax is a name
            with dots, "params.layers.0.kernel".
        transpose: permutations of dims for tensors of a foreign checkpoint, by patterns of their names there, as in
            rules; dims are as for `Tensor.permute`: `{"kernel": (1, 0)}` for flax's Dense,
            `(3, 2, 0, 1)` for its two-dimensional Conv.
        verify: the files whose checksums are compared: those that are read ("read"; each by one rank), "all", or
            "none".
        timeout: seconds that ranks wait for each other in each phase; by default those of the mesh.

    Raises:
        CheckpointError: the checkpoint is damaged, does not fit, or was replaced by another while it was read; on every
            rank, with the reason.

    Example:
        >>> import tempfile
        >>> from shardlib.checkpoint._save import save
        >>> first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(folder + "/first", first, extra={"step": 7})
        ...     loaded = load(folder + "/first", second)
        >>> loaded.extra, torch.equal(first.weight, second.weight)
        ({'step': 7}, True)
    """
    given = _paths.given(path, "load")
    everyone = peers_after_saving("sl.load", f'loading "{given}"', timeout)
    everyone.run("check arguments", lambda: _check(model, optimizer, verify))
    everyone.compare(path=str(given), weights=weights, strict=strict, cast=cast, random=random, verify=verify)
    folder, text = everyone.first("read manifest", lambda: found(given))
    with ExitStack() as keep:
        source = everyone.run("read manifest", lambda: opened(keep, Path(str(folder)), text, model, names, transpose))
        readers = keep.enter_context(source.readers())
        work = _Work(source, everyone, model, optimizer, weights, strict, cast, verify, readers)
        everyone.run("compare", work.compare)
        everyone.run("verify", lambda: source.reading(work.verify))
        everyone.run("prepare", lambda: source.reading(lambda: work.prepare(lr_scheduler, dataloader, random=random)))
        everyone.run("read", work.read)
    everyone.run("restore", work.restore)
    return work.report()


def _check(model: Any, optimizer: Any, verify: str) -> None:
    if verify not in VERIFY:
        raise CheckpointError(f"verify={verify!r} was given; give one of {VERIFY}.{nearest(str(verify), VERIFY)}")
    check_objects(model, optimizer)
    refuse_torn("load", model, unless="transfer")


# --- matching of tensors
# -----------------------------------------------------------------------------------------------


@dataclass
class _Work:
    """The work of one rank: the saved tensors to read into each item, and the functions to call at the end."""

    source: Opened
    everyone: Peers
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    weights: bool
    strict: bool
    cast: bool
    check_files: str
    readers: Reading
    into: list[tuple[Item, list[Saved]]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: Any = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    bytes_to_read: int = 0

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    # Before anything is changed.

    def compare(self) -> None:
        """Match saved tensors with items, or raise."""
        if self.model is None:
            return
        saved = self.manifest.tensors["model"]
        names = {group[0]: group for group in tied_names(self.model)}
        used: set[str] = set()
        for item in model_items(self.model, self.everyone.size):
            found = self.source.names_of(names.get(item.name, (item.name,)))
            used.update(found)
            if found:
                self.into.append((item, [replace(saved[name], key=saved[name].key or name) for name in found]))
                self.aliases[item.name] = found[0]
            else:
                self.missing.append(item.name)
        if not self.weights:
            self.into, self.missing = [], []
            return
        theirs = elsewhere(self.model)
        self.unexpected = [name for name in saved if name not in used and name not in theirs]
        self._refuse_names()
        self._refuse_kinds(self.into)
        self._fill_masters(self.model)

    def _fill_masters(self, model: nn.Module) -> None:
        """Fill the master copies that optimizers step on with the digits that rounding removes from a parameter."""
        saved = {item.name: (item.dtype, several) for item, several in self.into}
        for name, param_state, master in master_items(model):
            if name not in saved:
                continue
            stored, several = saved[name]
            wider = several[0].dtype.is_floating_point and several[0].dtype.itemsize > stored.itemsize
            if wider:
                self.into.append((master, several))
            self.at_end.append(partial(param_state.keep_master, master.local if wider else None))

    def _refuse_names(self) -> None:
        if (self.missing or self.unexpected) and (self.strict or not self.into):
            lines = [f'the checkpoint "{self.source.folder}" does not fit the model by its names.']
            if self.missing:
                lines.append(
                    f"  not in the checkpoint: {_listed(self.missing)}.{nearest(self.missing[0], self.unexpected)}"
                )
            if self.unexpected:
                lines.append(
                    f"  not in the model: {_listed(self.unexpected)}.{nearest(self.unexpected[0], self.missing)}"
                )
            lines.append("Load a checkpoint of this model" + (", or pass strict=False." if self.into else "."))
            raise CheckpointError("\n".join(lines))

    def _refuse_kinds(self, into: Sequence[tuple[Item, list[Saved]]]) -> None:
        shapes = [
            f'  "{item.name}" has shape {saved.shape} in the checkpoint, and global shape {item.shape} here'
            for item, several in into
            for saved in several
            if saved.shape != item.shape
        ]
        dtypes = [
            f'  "{item.name}" has {saved.dtype} in the checkpoint, and {item.dtype} here'
            for item, several in into
            for saved in several
            if saved.dtype != item.dtype
        ]
        if shapes:
            raise CheckpointError(
                f"{len(shapes)} tensors have other shapes than in the checkpoint:\n"
                + _few(shapes)
                + "\nLoad a checkpoint "
                "of the same model configuration."
            )
        if dtypes and not self.cast:
            raise CheckpointError(
                f"{len(dtypes)} tensors have other dtypes than in the checkpoint:\n"
                + _few(dtypes)
                + "\nPass cast=True to "
                "convert them, or convert the model first."
            )

    def verify(self) -> None:
        """Verify sizes and checksums of files; each file is verified by one rank."""
        wanted = [
            file
            for n, file in enumerate(self.manifest.files)
            if n in self._files_to_read() or self.check_files == "all" or elsewhere(self.model)
        ]
        mine = wanted[self.everyone.rank :: self.everyone.size]
        self.source.check_all(mine, checksums=self.check_files != "none")

    def _files_to_read(self) -> set[int]:
        read = [saved for _, several in self.into for saved in several]
        read += self.manifest.tensors["values"].values()
        if self.optimizer is not None:
            read += self.manifest.tensors["optimizer"].values()
        return {piece.file for saved in read for piece in saved.pieces}

    def prepare(self, lr_scheduler: Any, dataloader: Any, *, random: bool) -> None:
        """Read everything except the model's tensors, and prepare to restore it."""
        try:
            if self.optimizer is not None:
                self._prepare_optimizer(self.optimizer)
            if lr_scheduler is not None:
                self._prepare_scheduler(lr_scheduler)
            if dataloader is not None:
                state = self._of_rank("dataloader", must=True)
                self.at_end.append(partial(_load_state, "dataloader", dataloader, state))
            for what in ("random", "python_random") if random else ():
                if what in self.manifest.state and (state := self._of_rank(what, must=False)) is not None:
                    self.at_end.append(_random.restoring(state))
            self.extra = decode(self.manifest.state.get("extra"), self._value)
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f'"{self.source.folder / MANIFEST}" does not hold what shardlib writes: {described(error)}. Use '
                "another checkpoint."
            ) from error
        files = set()
        for saved, piece, common in self._reads():
            files.add(piece.file)
            self.bytes_to_read += common.numel * saved.dtype.itemsize
        # Open the files that `read` reads, so that all of them belong to one checkpoint even if it is replaced
        # meanwhile.
        for number in sorted(files):
            self.readers.open(self.manifest.files[number].path)

    def _reads(self) -> Iterator[tuple[Saved, Piece, Box]]:
        """Iterate over what this rank reads of the items: a saved tensor, its piece, and the box in both."""
        for item, several in self.into:
            for part in item.parts(self.everyone.rank):
                for saved in several:
                    for piece in saved.pieces:
                        if (common := part.box.meet(piece.box)) is not None:
                            yield saved, piece, common

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.model is not None
        saved = self._state("optimizer", "an optimizer")
        of, tensors = known(self.model), self.manifest.tensors["optimizer"]
        options = groups_for(optimizer, of, saved, self.aliases, self._value)
        items, state = make_state(
            optimizer, of, tensors, saved["values"], self.aliases, self._value, self.everyone.size
        )
        into = [(item, [tensors[name]]) for name, item in items]
        self._refuse_kinds(into)
        self.into += into
        self.at_end.append(partial(_restore_optimizer, optimizer, options, state))
        for name, kept in getattr(optimizer, "stateful", {}).items():
            if name in saved:
                self.at_end.append(
                    partial(_load_state, f'"{name}" of optimizer', kept, decode(saved[name], self._value))
                )

    def _prepare_scheduler(self, lr_scheduler: Any) -> None:
        saved = self._state("lr_scheduler", "a learning rate scheduler")
        if saved["class"] != type(lr_scheduler).__name__:
            raise CheckpointError(
                f"the checkpoint holds the state of {saved['class']}, and is loaded into "
                f"{type(lr_scheduler).__name__}. Use the same scheduler, or load without it."
            )
        state = decode(saved["state"], self._value)
        self.at_end.append(partial(_load_state, "lr_scheduler", lr_scheduler, state))

    def _state(self, key: str, what: str) -> Any:
        if key not in self.manifest.state:
            raise CheckpointError(
                f'the checkpoint "{self.source.folder}" holds no state of {what}. Load without it, or '
                "another checkpoint."
            )
        return self.manifest.state[key]

    def _value(self, name: str) -> torch.Tensor:
        saved = self.manifest.tensors["values"].get(name)
        if saved is None or len(saved.pieces) != 1:
            raise CheckpointError(f'the tensor "{name[:80]}" of a saved value is not in the checkpoint.')
        return self._read(name, saved, 0, full_box(saved.shape)).clone()

    def _of_rank(self, what: str, *, must: bool) -> Any:
        """Return the state that was saved for the rank that corresponds to this one."""
        saved = self._state(what, f"a {what}")
        owners, states = saved["owners"], saved["states"]
        saved_rank, note = _saved_rank_for(self.everyone, self._mesh(), str(self.manifest.about.get("mesh")), owners)
        if note and must:
            raise CheckpointError(
                f"the {what} was at different positions on {len(set(owners))} ranks when it was saved, on mesh "
                f'"{self.manifest.about.get("mesh")}"; now the mesh is "{self._mesh()}", and no position is right. '
                f"Load with {what}=None, or use one whose state does not depend on the rank."
            )
        if note:
            self.notes.append(f"{what}: {note}")
        return None if saved_rank is None else decode(states[str(owners[saved_rank])], self._value)

    def _mesh(self) -> MeshShape:
        from shardlib.engine import apply

        if self.model is not None and apply.is_sharded(self.model):
            return apply.get_plan(self.model).mesh
        return MeshShape(dp=self.everyone.size)

    # The change.

    def read(self) -> None:
        """Read this rank's slices into its tensors."""
        with Progress(f'loading "{self.source.folder.name}"', unit="bytes", total=self.bytes_to_read) as progress:
            fill = partial(self._fill_all, progress.advance)
            if self.source.foreign:  # others may write into files that are open
                self.source.reading(fill)
            else:
                fill()

    @torch.no_grad()
    def _fill_all(self, advance: Callable[[int], None]) -> None:
        for item, several in self.into:
            self._fill(item, several, advance)

    def _fill(self, item: Item, several: Sequence[Saved], advance: Callable[[int], None]) -> None:
        for part in item.parts(self.everyone.rank):
            target = part.of(item.local)
            for n, piece in enumerate(several[0].pieces):
                if (common := part.box.meet(piece.box)) is None:
                    continue
                values = self._read(item.name, several[0], n, common.within(piece.box))
                target[common.within(part.box).slices] = values.to(item.dtype)
                advance(values.nbytes)
            for other in several[1:]:
                self._compare(item, part.box, target, other, advance)

    def _compare(
        self, item: Item, box: Box, values: torch.Tensor, other: Saved, advance: Callable[[int], None]
    ) -> None:
        """Check that saved tensors are equal whose names are tied in the model."""
        for n, piece in enumerate(other.pieces):
            if (common := box.meet(piece.box)) is None:
                continue
            read = self._read(item.name, other, n, common.within(piece.box))
            advance(read.nbytes)
            if not torch.equal(_bits(read.to(item.dtype)), _bits(values[common.within(box).slices].cpu())):
                raise CheckpointError(
                    f'"{item.name}" and the names tied to it are one tensor in the model, and different ones in the '
                    "checkpoint. Untie them in the model, or load another checkpoint."
                )

    def _read(self, name: str, saved: Saved, n: int, part: Box) -> torch.Tensor:
        return self.source.read_piece(self.readers, name, saved, n, part)

    def restore(self) -> None:
        for call in self.at_end:
            call()
        if self.model is not None and self.weights and not self.missing:
            mend(self.model)

    def report(self) -> Loaded:
        about = self.manifest.about
        missing, unexpected = tuple(self.missing), tuple(self.unexpected)
        return Loaded(self.source.folder, self.extra, about, tuple(self.notes), missing, unexpected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _saved_rank_for(everyone: Peers, mesh: MeshShape, saved: str, owners: list[int]) -> tuple[int | None, str]:
    """Return the saved rank whose state this rank takes, or None, and a note about it."""
    if len(set(owners)) == 1:
        return 0, ""
    if saved == str(mesh) and len(owners) == everyone.size:
        return everyone.rank, ""
    try:
        before = MeshShape(saved)
    except MeshError:
        return None, f'the mesh "{saved}" on which it was saved is unknown here; each rank keeps its own'
    index, count = mesh.data_place(mesh.coordinate(everyone.rank))
    ranks = [rank for rank in range(len(owners)) if before.data_place(before.coordinate(rank))[0] == index]
    if before.data_ranks == count:
        return ranks[0], ""
    note = f"saved for {before.data_ranks} data ranks, and there are {count}"
    return (ranks[0], note) if ranks else (None, note + "; this rank had no counterpart and keeps its own")


def _restore_optimizer(optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]], state: Any) -> None:
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.copy_(torch.as_tensor(value).reshape(now.shape))
            else:
                group[key] = value
    optimizer.state.clear()
    optimizer.state.update(state)


def _load_state(what: str, into: Any, state: Any) -> None:
    try:
        into.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"the state of {what}= was refused by its load_state_dict: {described(error)}. Use the same kind of object "
            "as when it was saved."
        ) from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _few(lines: Sequence[str]) -> str:
    return "\n".join([*lines[:8], *([f"  and {len(lines) - 8} more"] if len(lines) > 8 else [])])
