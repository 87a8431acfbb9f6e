"""A checkpoint is replaced while it is read: the old one or the new one is loaded, or an error says what happened."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import shardlib as sl
from shardlib import checkpoint
from shardlib.checkpoint import _files, _load, _paths
from shardlib.engine.apply import materialize
from shardlib.errors import CheckpointError

SAID = "was replaced while it was read. Load it again."
OLD, NEW, UNTOUCHED = 1.0, 2.0, 9.0


class Job:
    """A model and an optimizer that are filled with one number."""

    def __init__(self, value: float) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=value, momentum=0.9)
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(value)

    def _tensors(self) -> list[torch.Tensor]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*self.model.state_dict().values(), *momenta]

    def value(self) -> float:
        values = {float(v) for tensor in self._tensors() for v in tensor.flatten()}
        values.add(float(self.optimizer.param_groups[0]["lr"]))
        assert len(values) == 1, f"a mixture: {values}"
        return values.pop()


@contextmanager
def stepping(folder: Path, at: int, steps: Iterator[None], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """From the operation on files of that number on, another process takes a step before each of them."""
    done: list[str] = []
    busy = False

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if not busy and ("dir_fd" in kwargs or str(path).startswith((str(folder), "/dev/fd/"))):
                busy = True
                if len(done) >= at:
                    next(steps, None)
                done.append(name)
                busy = False
            return real(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "stat"), (os, "lstat"), (os, "open"), (io, "open"), (_files, "safe_open")):
            patch.setattr(module, name, wrapped(name, getattr(module, name)))
        yield done


def _at_once(path: Path) -> Iterator[None]:
    _paths.commit(path)
    yield


def _by_steps(path: Path) -> Iterator[None]:
    """As `commit` does it."""
    os.replace(path, path.with_name(f".{path.name}.previous"))
    yield
    os.replace(_paths.writing(path), path)
    yield
    shutil.rmtree(path.with_name(f".{path.name}.previous"))
    yield


def _there_and_back(path: Path) -> Iterator[None]:
    """Another checkpoint is at the path for one operation."""
    other, aside = _paths.writing(path), path.with_name("aside")
    os.rename(path, aside)
    os.rename(other, path)
    yield
    os.rename(path, other)
    os.rename(aside, path)
    yield


@pytest.mark.parametrize("replace", [_at_once, _by_steps, _there_and_back])
@pytest.mark.parametrize("verify", ["read", "none"])
def test_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str, replace: Any):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    for name, value in (("old", OLD), ("new", NEW)):
        job, extra = Job(value), {"number": torch.tensor(value)}
        checkpoint.save(tmp_path / name, job.model, job.optimizer, extra=extra, shard_mb=1e-6)
    outcomes = set()
    at = operations = 0
    while at <= operations:
        path = tmp_path / f"{at}" / "checkpoint"
        shutil.copytree(tmp_path / "old", path)
        shutil.copytree(tmp_path / "new", _paths.writing(path))
        job = Job(UNTOUCHED)
        with stepping(path.parent, at, replace(path), monkeypatch) as done:
            try:
                loaded = checkpoint.load(path, job.model, job.optimizer, verify=verify)
                assert loaded.extra == {"number": torch.tensor(job.value())}
            except CheckpointError as error:
                assert SAID in str(error), f"before operation {at}: {error}"
                assert job.value() == UNTOUCHED
        outcomes.add(job.value())
        at, operations = at + 1, len(done)
    assert at > 20 and outcomes == ({OLD, UNTOUCHED} if replace is _there_and_back else {OLD, NEW, UNTOUCHED})


def _filled(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _save_files(path: Path, value: float) -> None:
    """As others save a model: one file after the other is written anew."""
    path.mkdir(exist_ok=True)
    for name, tensor in _filled(value).state_dict().items():
        save_file({name: tensor}, path / f"{name}.safetensors")
        os.utime(path / f"{name}.safetensors", (value, value))
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"weight": "weight.safetensors", "bias": "bias.safetensors"}}'
    )


def _save(path: Path, value: float) -> None:
    checkpoint.save(path, _filled(value), shard_mb=1e-6)


def _load_while_rank_1_replaces(path: Path, replace: Callable[[], None], when: str) -> tuple[set[float], str]:
    """Rank 0 is done with that part of loading when rank 1 replaces the checkpoint, and then begins with it."""
    owner = _load if when == "opened" else _load._Work
    real = getattr(owner, when)

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            result = real(*args, **kwargs)
            dist.barrier()
            return result
        dist.barrier()
        replace()
        return real(*args, **kwargs)

    model, said = _filled(UNTOUCHED), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, when, in_turn)
        try:
            checkpoint.load(path, model)
        except CheckpointError as error:
            said = str(error)
    return {float(v) for parameter in model.parameters() for v in parameter.detach().flatten()}, said


@pytest.mark.parametrize(("manifest", "when"), [(True, "prepare"), (True, "read"), (False, "opened"), (False, "read")])
def test_ranks_do_not_read_different_ones(tmp_path: Path, manifest: bool, when: str, ranks):
    path = tmp_path / "checkpoint"
    if manifest:
        _save(path, OLD)
        _save(tmp_path / "new", NEW)
        (tmp_path / "new").rename(_paths.writing(path))
        replace = partial(_paths.commit, path)
    else:
        _save_files(path, OLD)
        replace = partial(_save_files, path, NEW)
    for held, said in ranks(2).run(_load_while_rank_1_replaces, path, replace, when):
        if (manifest, when) == (True, "read"):  # all files of the old one are open by then
            assert (held, said) == ({OLD}, "")
        else:
            assert SAID in said
            assert held == {UNTOUCHED} or when == "read"


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def test_a_model_is_not_sharded_with_values_of_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two files, the second is put in its place after the first has been opened."""
    path, new = tmp_path / "saved", tmp_path / "new"
    _save_files(path, OLD)
    _save_files(new, NEW)
    opened: list[str] = []

    def opening(file: str, **options: Any) -> Any:
        opened.append(file)
        if len(opened) == 2:
            for each in new.iterdir():
                os.replace(each, path / each.name)
        return safe_open(file, **options)

    monkeypatch.setattr(materialize, "safe_open", opening)
    with pytest.raises(CheckpointError, match=SAID):
        sl.shard_model(_on_meta(), "dp=1", {"**": None}, init=path)
    model = sl.shard_model(_on_meta(), "dp=1", {"**": None}, init=path)
    assert len(opened) == 4 and {float(v) for tensor in model.state_dict().values() for v in tensor.flatten()} == {NEW}


def _sharded_from(paths: list[str]) -> None:
    sl.shard_model(_on_meta(), "tp=2", {"^": "colwise"}, init=paths[dist.get_rank()])


def test_ranks_that_read_different_checkpoints_hear_of_it(tmp_path: Path, ranks: Any):
    paths = [str(tmp_path / name) for name in ("old", "new")]
    for path, value in zip(paths, (OLD, NEW), strict=True):
        checkpoint.save(path, _filled(value), weights="huggingface")
    ranks(2).run(_sharded_from, [paths[0], paths[0]])
    with pytest.raises(CheckpointError, match="The ranks read different checkpoints from"):
        ranks(2).run(_sharded_from, paths)
