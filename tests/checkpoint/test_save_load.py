"""What belongs to training besides tensors, what does not fit, folders of checkpoints, saving in the background."""

from __future__ import annotations

import collections
import gc
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib import checkpoint
from shardlib.checkpoint import _save
from shardlib.checkpoint._values import decode, encode
from shardlib.errors import CheckpointError
from shardlib.testing import shared_pool
from shardlib.testing.models import MLP
from tests.logged import progress_logged

_RULES = sl.Rules({"up": "colwise", "down": "rowwise"}, unmatched="replicate")

# --- progress -------------------------------------------------------------------------------------------------------


def _logged(path: str) -> list[str]:
    model = sl.shard_model(nn.Linear(40, 60, bias=False, dtype=torch.float64), "tp=2", {"**": "colwise"})
    with progress_logged() as lines:
        sl.save(path, model, random=False)
        sl.load(path, model, random=False)
    return lines


def test_each_rank_logs_the_bytes_that_it_writes_and_reads(tmp_path: Path):
    for lines in shared_pool(2).run(_logged, str(tmp_path / "step")):
        saving, verifying, loading = lines
        nbytes = "9.6 kB"  # 60 / 2 * 40 elements of eight bytes
        assert (saving, loading) == (f'saving "step": {nbytes}', f'loading "step": {nbytes}')
        assert verifying.startswith('verifying "step": 9.')  # a file, with its header


# --- values ---------------------------------------------------------------------------------------------------------

_KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.just("~") | st.tuples(st.integers())
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=_VALUES)
def test_values_come_back_as_they_were(value: Any):
    import json

    made = json.loads(json.dumps(encode(value, "value", lambda name, tensor: None), allow_nan=False))
    back = decode(made, lambda name: torch.zeros(0))
    assert repr(back) == repr(value)


def test_counters_tensors_and_numbers_of_numpy_come_back():
    held: dict[str, torch.Tensor] = {}
    value = {"counts": collections.Counter({3: 2}), "t": [torch.arange(3)], "n": np.float64(0.1), "nan": float("nan")}
    back = decode(encode(value, "v", held.__setitem__), held.__getitem__)
    assert back["counts"] == value["counts"] and type(back["counts"]) is collections.Counter
    assert torch.equal(back["t"][0], torch.arange(3)) and list(held) == ["v.t.0"]
    assert back["n"] == 0.1 and back["nan"] != back["nan"]


@pytest.mark.parametrize("value", [object(), print, {1, 2}, b"bytes", 1j, torch.float32, Path("x")])
def test_what_json_cannot_say_is_refused_with_its_place(tmp_path: Path, value: Any):
    with pytest.raises(CheckpointError, match=r'"extra.a.1" is a .*, which cannot be saved'):
        checkpoint.save(tmp_path / "saved", nn.Linear(2, 2), extra={"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def _called(name: str) -> nn.Module:
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    return model


@pytest.mark.parametrize("weights", ["pieces", "huggingface", "file"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("__metadata__", "which safetensors keeps for itself"), ("\ud800", "which is not Unicode text")],
)
def test_names_that_a_file_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path, name: str, reason: str, weights: str
):
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.save(tmp_path / "saved", _called(name), weights=weights)
    assert list(tmp_path.iterdir()) == []


def test_keys_of_tensors_that_a_file_cannot_hold_are_refused(tmp_path: Path):
    one = torch.ones(1)
    for extra, reason in [
        ({"\ud800": one}, r"'extra.\\ud800', which is not Unicode text"),
        ({1: one, "1": one}, 'two tensors of a value are called "extra.1"'),
        ({"a.b": one, "a": {"b": one}}, 'two tensors of a value are called "extra.a.b"'),
    ]:
        with pytest.raises(CheckpointError, match=reason):
            checkpoint.save(tmp_path / "saved", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_text_that_no_file_holds_comes_back(tmp_path: Path):
    checkpoint.save(tmp_path / "saved", extra={"\ud800": "\udfff"})
    assert checkpoint.load(tmp_path / "saved").extra == {"\ud800": "\udfff"}


# --- training besides tensors ---------------------------------------------------------------------------------------


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    of = torch.optim.lr_scheduler
    return [
        of.StepLR(optimizer, 2),
        of.MultiStepLR(optimizer, [2, 2, 5]),
        of.CosineAnnealingLR(optimizer, 9),
        of.OneCycleLR(optimizer, 0.1, total_steps=20),
        of.ReduceLROnPlateau(optimizer, patience=1),
        of.SequentialLR(optimizer, [of.ConstantLR(optimizer), of.ExponentialLR(optimizer, 0.9)], [3]),
        of.LambdaLR(optimizer, lambda step: 0.9**step),
    ]


@pytest.mark.parametrize("which", range(7))
def test_schedulers(tmp_path: Path, which: int):
    rates = []
    for resumed in (False, True):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = _schedulers(optimizer)[which]
        if resumed:
            checkpoint.load(tmp_path / "saved", model, optimizer, lr_scheduler=scheduler)
        found = []
        for step in range(4 if resumed else 8):
            if not resumed and step == 4:
                checkpoint.save(tmp_path / "saved", model, optimizer, lr_scheduler=scheduler)
            optimizer.step()
            scheduler.step(*([1.0] if which == 4 else []))
            found.append(optimizer.param_groups[0]["lr"])
        rates.append(found)
    assert rates[0][4:] == rates[1]


def test_another_scheduler_or_optimizer_is_refused(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint.save(tmp_path / "saved", model, optimizer, lr_scheduler=_schedulers(optimizer)[0])
    with pytest.raises(CheckpointError, match="holds the state of StepLR, and is loaded into MultiStepLR"):
        checkpoint.load(tmp_path / "saved", model, lr_scheduler=_schedulers(optimizer)[1])
    with pytest.raises(CheckpointError, match="holds the state of SGD, and is loaded into Adam"):
        checkpoint.load(tmp_path / "saved", model, torch.optim.Adam(model.parameters()))
    checkpoint.save(tmp_path / "bare", model)
    with pytest.raises(CheckpointError, match="holds no state of an optimizer"):
        checkpoint.load(tmp_path / "bare", model, optimizer)


def test_groups_by_name_however_they_are_cut(tmp_path: Path):
    def made(names: list[list[str]], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MLP()
        params = dict(model.named_parameters())
        groups = [{"params": [params[name] for name in group]} for group in names]
        return model, torch.optim.AdamW(groups, **options)

    model, optimizer = made([["up.weight", "up.bias"], ["down.weight"], ["down.bias"]], lr=0.3)
    optimizer.param_groups[0]["weight_decay"] = 0.7
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    other, theirs = made([["down.bias", "down.weight"], ["up.weight"], ["up.bias"]], lr=0.1)
    checkpoint.load(tmp_path / "saved", other, theirs)
    assert [(g["lr"], g["weight_decay"]) for g in theirs.param_groups] == [(0.3, 0.01), (0.3, 0.7), (0.3, 0.7)]
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert all(torch.equal(v, theirs.state[q][k]) for k, v in optimizer.state[p].items()), name
    mixed = made([["up.weight", "down.weight"], ["up.bias", "down.bias"]])
    with pytest.raises(CheckpointError, match="joins parameters that were saved with different options"):
        checkpoint.load(tmp_path / "saved", *mixed)
    with pytest.raises(CheckpointError, match=r'It had "down.bias" in addition'):
        checkpoint.load(tmp_path / "saved", *made([["up.weight", "up.bias", "down.weight"]]))


def test_random_states_go_on(tmp_path: Path):
    checkpoint.save(tmp_path / "saved", nn.Linear(2, 2))

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    want = draw()
    assert draw() != want
    checkpoint.load(tmp_path / "saved")
    assert draw() == want


class Position:
    """A dataloader as far as checkpoints go: it knows where it is."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert torch.equal(state["order"], torch.arange(self.at))


def _dataloader(path: str, mesh: str, save: bool) -> tuple[int, tuple[str, ...]] | str:
    torch.manual_seed(3)
    model = sl.shard_model(MLP(), mesh, _RULES, compile=None)
    place = sl.get_plan(model).mesh.data_place(sl.get_plan(model).mesh.coordinate(dist.get_rank()))[0]
    loader = Position(10 + place if save else 0)
    if save:
        checkpoint.save(path, model, dataloader=loader)
        return loader.at, ()
    try:
        notes = checkpoint.load(path, model, dataloader=loader).notes
    except CheckpointError as error:
        return str(error)
    return loader.at, notes


def test_a_dataloader_goes_on_where_its_data_rank_was(tmp_path: Path):
    path = str(tmp_path / "saved")
    pool = shared_pool(4)
    pool.run(_dataloader, path, "dp=2,tp=2", True)
    assert pool.run(_dataloader, path, "dp=2,tp=2", False) == [(10, ()), (10, ()), (11, ()), (11, ())]
    assert pool(2).run(_dataloader, path, "dp=2,tp=1", False) == [(10, ()), (11, ())]
    refused = pool(1).run(_dataloader, path, "dp=1,tp=1", False)[0]
    assert "the dataloader was at different positions on 2 ranks" in refused


def _notes(path: str, mesh: str) -> tuple[str, ...]:
    model = sl.shard_model(MLP(), mesh, _RULES, compile=None)
    return checkpoint.load(path, model).notes


def test_random_streams_that_were_not_saved_are_told(tmp_path: Path):
    path = str(tmp_path / "saved")
    pool = shared_pool(4)
    pool(2).run(_dataloader, path, "dp=2,tp=1", True)
    told = pool.run(_notes, path, "dp=4,tp=1")
    assert told[0] == ("random: saved for 2 data ranks, and there are 4",)
    assert told[3] == (told[0][0] + "; this rank had no counterpart and keeps its own",)


def _exact_numbers(path: str, mesh: str, save: bool) -> tuple[list[float], float, tuple[str, ...]]:
    """Return what this rank draws after it has saved or loaded; nothing seeds Python alike, as under torchrun."""
    before = random.getstate()
    random.seed(10 * dist.get_rank() + save)
    torch.manual_seed(7 + save)
    model = sl.shard_model(MLP(), mesh, _RULES, compile=None, rng="exact")
    if save:
        checkpoint.save(path, model)
    notes = () if save else checkpoint.load(path, model).notes
    drawn = torch.rand(3).tolist(), random.random()
    random.setstate(before)
    return *drawn, notes


def test_exact_random_numbers_go_on_where_ranks_are_added(tmp_path: Path):
    path = str(tmp_path / "saved")
    pool = shared_pool(4)
    saved = pool(2).run(_exact_numbers, path, "dp=2,tp=1", True)
    loaded = pool.run(_exact_numbers, path, "dp=4,tp=1", False)
    assert [drawn for drawn, _, _ in loaded] == [saved[0][0]] * 4
    assert [drawn for _, drawn, _ in loaded[:2]] == [drawn for _, drawn, _ in saved]
    note = "python_random: saved for 2 data ranks, and there are 4"
    assert loaded[0][2] == (note,) and loaded[3][2] == (note + "; this rank had no counterpart and keeps its own",)


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_names_are_listed_at_once_with_the_nearest(tmp_path: Path):
    checkpoint.save(tmp_path / "saved", nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)}))
    other = nn.ModuleDict({"atn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "saved", other)
    assert '  not in the checkpoint: "atn.weight", "atn.bias". Did you mean "attn.weight"?' in str(caught.value)
    assert '  not in the model: "attn.bias", "attn.weight". Did you mean "atn.bias"?' in str(caught.value)
    loaded = checkpoint.load(tmp_path / "saved", other, strict=False)
    assert loaded.missing == ("atn.weight", "atn.bias") and loaded.unexpected == ("attn.bias", "attn.weight")
    with pytest.raises(CheckpointError, match="does not fit the model by its names"):
        checkpoint.load(tmp_path / "saved", nn.BatchNorm1d(2), strict=False)


def test_shapes_and_dtypes(tmp_path: Path):
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "saved", model)
    with pytest.raises(
        CheckpointError, match=r'"weight" has shape \(2, 3\) in the checkpoint, and global shape \(2, 4\)'
    ):
        checkpoint.load(tmp_path / "saved", nn.Linear(4, 2))
    double = nn.Linear(3, 2).double()
    with pytest.raises(CheckpointError, match=r"and torch.float64 here\n.*\nPass cast=True"):
        checkpoint.load(tmp_path / "saved", double)
    checkpoint.load(tmp_path / "saved", double, cast=True)
    assert torch.equal(double.weight.float(), model.weight)


def test_no_checkpoint_there(tmp_path: Path):
    checkpoint.save(tmp_path / "best", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r'there is nothing at ".*/bset". Did you mean "best"?'):
        checkpoint.load(tmp_path / "bset", nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it holds neither shardlib.json, nor safetensors"):
        checkpoint.load(tmp_path / "empty", nn.Linear(2, 2))


def test_tied_names(tmp_path: Path):
    def made(tied: bool) -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    tied, apart = made(True), made(False)
    checkpoint.save(tmp_path / "tied", tied)
    checkpoint.load(tmp_path / "tied", apart)
    assert torch.equal(apart["a"].weight, tied["a"].weight) and torch.equal(apart["b"].weight, tied["a"].weight)
    checkpoint.save(tmp_path / "equal", apart)
    checkpoint.load(tmp_path / "equal", made(True))
    checkpoint.save(tmp_path / "apart", made(False))
    with pytest.raises(CheckpointError, match=r'"a.weight" and the names tied to it are one tensor in the model'):
        checkpoint.load(tmp_path / "apart", made(True))


def test_wrong_arguments(tmp_path: Path):
    model = nn.Linear(2, 2)
    for options, told in [
        ({"weights": "hugingface"}, 'Did you mean "huggingface"'),
        ({"shard_mb": 0}, "give a positive number of megabytes"),
        ({"lr_scheduler": 3}, "which has no state_dict"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            checkpoint.save(tmp_path / "saved", model, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="given without its model"):
        checkpoint.save(tmp_path / "saved", None, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match=r"\(group 0, place 0\) that the model does not have"):
        checkpoint.save(tmp_path / "saved", model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(CheckpointError, match="on the meta device"):
        checkpoint.save(tmp_path / "saved", nn.Linear(2, 2, device="meta"))


class _Conjugate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("values", torch.tensor([1 + 2j, 3 - 4j]).conj())
        self.register_buffer("negative", torch.tensor([1 + 2j, 3 - 4j]).conj().imag)


@pytest.mark.parametrize("weights", ["pieces", "huggingface"])
def test_views_that_conjugate_or_negate(tmp_path: Path, weights: str):
    for background in (False, True):
        model = _Conjugate()
        checkpoint.save(tmp_path / "saved", model, weights=weights, background=background)
        for buffer in model.buffers():
            buffer.zero_()
        checkpoint.load(tmp_path / "saved", model, verify="all")
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), _Conjugate().buffers(), strict=True))


def test_a_sparse_buffer_is_refused_with_a_way_out(tmp_path: Path):
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r'"adjacency" is a sparse tensor .*persistent=False'):
        checkpoint.save(tmp_path / "saved", model)


def test_wrong_paths_and_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = tmp_path / "run"
    checkpoint.Checkpoints(run).save(3, model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "text.safetensors").write_text("not tensors at all")
    monkeypatch.chdir(run)
    wrong: list[tuple[Any, str]] = [
        (lambda: checkpoint.save(model, run), "save was given a Linear as path. Give the path first"),  # type: ignore
        (lambda: checkpoint.load(None, model), "load was given a NoneType as path"),  # type: ignore
        (lambda: checkpoint.Checkpoints(None), r"as path. Give the path first: Checkpoints\(folder\)"),  # type: ignore
        (lambda: checkpoint.Checkpoints("s3://bucket"), "Give a path in a file system that all ranks see"),
        (lambda: checkpoint.save(run / "a", model, background="no"), "background='no'.*True or False"),  # type: ignore
        (lambda: checkpoint.save(run / "a", model, random=None), "random=None.*True or False"),  # type: ignore
        (lambda: checkpoint.save("s3://bucket/run", model), "Give a path in a file system that all ranks see"),
        (lambda: checkpoint.save(run, model), "is the working directory, or holds it"),
        (lambda: checkpoint.save("/", model), '"/" is the working directory, or holds it'),
        (lambda: checkpoint.save(run / "a", model.state_dict()), "model= was given as OrderedDict"),  # type: ignore
        (lambda: checkpoint.save(run / "a", model, scheduler), "optimizer= was given as StepLR"),
        (lambda: checkpoint.save(run / "a", model, shard_mb="5GB"), "give a positive number"),  # type: ignore
        (lambda: checkpoint.save(run / "a", model, shard_mb=float("inf")), "give a positive number"),
        (lambda: checkpoint.load(run, model), "It holds 1 checkpoints, step-000003: give the path of one."),
        (lambda: checkpoint.load(run / "step-000003" / "shardlib.json", model), 'Give its folder, ".*step-000003"'),
        (lambda: checkpoint.load(tmp_path / "model.pt", model), "It looks like what torch.save writes"),
        (lambda: checkpoint.load(tmp_path / "text.safetensors", model), "It is another kind of file, or damaged"),
        (lambda: checkpoint.Checkpoints(run).load(model, step="3"), "no checkpoint of step '3'"),  # type: ignore
    ]
    for call, told in wrong:
        with pytest.raises(CheckpointError, match=told):
            call()
    assert sorted(entry.name for entry in run.iterdir()) == ["step-000003"]


# --- folders and background -----------------------------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=2)
    assert checkpoints.latest() is None
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        checkpoints.load(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        checkpoints.load(nn.Linear(2, 2), step=5, missing_ok=True)
    assert checkpoints.load(nn.Linear(2, 2), missing_ok=True) is None
    for step in (5, 40, 1_000_000):
        checkpoints.save(step, nn.Linear(2, 2), extra=step)
    assert checkpoints.steps() == [40, 1_000_000] and checkpoints.latest() == tmp_path / "step-1000000"
    assert checkpoints.load().extra == 1_000_000 and checkpoints.load(step=40).extra == 40
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*; there are 40, 1000000"):
        checkpoints.load(step=5)
    (tmp_path / ".step-2000000.writing").mkdir()  # what a crash leaves
    assert checkpoints.latest() == tmp_path / "step-1000000"


def test_what_training_changes_meanwhile_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    write = _save.write_tensors

    def waits(*args: Any) -> Any:
        assert go_on.wait(30)
        return write(*args)

    monkeypatch.setattr(_save, "write_tensors", waits)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    want = [t.clone() for t in (model.weight, optimizer.state[model.weight]["momentum_buffer"])]
    saving = checkpoint.save(tmp_path / "saved", model, optimizer, background=True)
    assert not saving.done() and not (tmp_path / "saved").exists()
    optimizer.step()
    go_on.set()
    assert saving.wait() == tmp_path / "saved" and saving.done()
    checkpoint.load(tmp_path / "saved", model, optimizer)
    got = [model.weight, optimizer.state[model.weight]["momentum_buffer"]]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_error_in_the_background_is_raised_by_wait_or_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_tensors", fails)
        for tell in (lambda saving: saving.wait(), lambda saving: checkpoint.save(tmp_path / "next", nn.Linear(2, 2))):
            saving = checkpoint.save(tmp_path / "saved", nn.Linear(2, 2), background=True)
            with pytest.raises(CheckpointError, match="No space left on device"):
                tell(saving)
    checkpoint.save(tmp_path / "next", nn.Linear(2, 2))


def _in_turn(path: str, weights: str) -> list[float]:
    torch.manual_seed(0)
    model = sl.shard_model(MLP(), "dp=2,tp=2", _RULES, compile=None)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        checkpoint.save(f"{path}/{value}", model, background=True, weights=weights, shard_mb=1e-4)
    found = []
    for value in (1.0, 2.0, 3.0):
        checkpoint.load(f"{path}/{value}", model)
        found += {float(v) for t in sl.full_state_dict(model).values() for v in t.flatten()}
    return found


@pytest.mark.parametrize("weights", ["pieces", "huggingface"])
def test_background_saves_of_ranks_follow_each_other(tmp_path: Path, weights: str):
    assert shared_pool(4).run(_in_turn, str(tmp_path), weights) == [[1.0, 2.0, 3.0]] * 4


def test_nothing_here_can_unpickle():
    for file in Path(checkpoint.__file__).parent.glob("*.py"):
        text = file.read_text()
        for word in ("import pickle", "torch.load", "allow_pickle", "object_list", "gather_object", "eval(", "exec("):
            assert word not in text, f"{file.name}: {word}"


def _differently(folder: str) -> list[str]:
    rank, said = dist.get_rank(), []
    model = sl.shard_model(nn.Linear(4, 4), "dp=2", {"**": None}, transforms=sl.fsdp())
    for call in (
        lambda: sl.save(f"{folder}/{rank}", model),
        lambda: sl.save(f"{folder}/0", model, weights=("pieces", "huggingface")[rank]),
        lambda: sl.save(f"{folder}/0", model, background=rank == 0),
        lambda: sl.save(f"{folder}/0", model, dataloader=model if rank else None),
        lambda: sl.load(f"{folder}/{rank}", model),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        said.append(str(caught.value).partition("ranks gave ")[2])
    return said


def test_ranks_that_give_different_paths_or_options(ranks, tmp_path: Path):
    """All of them hear it, before anything is written."""
    said = ranks(2).run(_differently, str(tmp_path))
    assert said[0] == said[1]
    end = "\nGive the same on every rank. Nothing was written or changed."
    assert said[0] == [
        f"different values of path.\n  rank 0: '{tmp_path}/0'\n  rank 1: '{tmp_path}/1'{end}",
        f"different values of weights.\n  rank 0: 'pieces'\n  rank 1: 'huggingface'{end}",
        f"different values of background.\n  rank 0: True\n  rank 1: False{end}",
        f"different values of dataloader.\n  rank 0: 'None'\n  rank 1: 'an object'{end}",
        f"different values of path.\n  rank 0: '{tmp_path}/0'\n  rank 1: '{tmp_path}/1'{end}",
    ]
    assert list(tmp_path.iterdir()) == []


# --- folders of steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_goes_back_keeps_what_it_saves_and_goes_on_from_there(tmp_path: Path, background: bool):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(30, extra="left")
    with pytest.warns(UserWarning, match=r"Step 20 was saved, .* of a run that was left. They are called left-000030 "):
        saved = checkpoints.save(20, extra="new", background=background)
        assert checkpoints.load().extra == "new"
    assert checkpoints.steps() == [20] and saved.wait() == tmp_path / "step-000020" == checkpoints.latest()
    assert checkpoint.load(tmp_path / "left-000030").extra == "left"
    checkpoints.save(30, extra="new")
    assert checkpoints.steps() == [30] and checkpoints.load().extra == "new"


def test_a_save_that_fails_after_going_back_changes_no_other_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=1)
    for step in (20, 30):
        checkpoint.save(checkpoints.path(step), extra=step)
    with monkeypatch.context() as patch:
        patch.setattr(_save._paths, "commit", _raise(OSError(28, "No space left on device")))
        checkpoints.save(20, extra="new", background=True)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.load()
    assert checkpoints.load().extra == 30 and checkpoints.load(step=20).extra == 20


def _raise(error: BaseException) -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fails


def test_a_save_removes_what_crashes_have_left_of_other_steps(tmp_path: Path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=1)
    for name in (".removed-000005", ".step-000007.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_text("large")
    checkpoints.save(10)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000010"]


def test_unknown_options_of_checkpoints_are_refused_at_once(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r'^Checkpoints\(keep=2\) was given, .* Did you mean "keep_last"\?'):
        checkpoint.Checkpoints(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match='Did you mean "weights"'):
        checkpoint.Checkpoints(tmp_path, weight="file")


def test_copies_of_a_save_in_the_background_are_freed_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copies, copy = [], torch.Tensor.copy_

    def watched(room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        copies.append(weakref.ref(room))
        return copy(room, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", watched)
        saving = checkpoint.save(tmp_path / "saved", nn.Linear(2, 2), background=True)
    saving.wait()
    gc.collect()
    assert len(copies) == 2 and [copy() for copy in copies] == [None, None]


def _one_rank_hears_of_a_failure(folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_save, "write_tensors", _raise(OSError(28, "No space left on device")))
        saving = checkpoint.save(f"{folder}/first", nn.Linear(2, 2), background=True)
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match="No space left"):
                saving.wait()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(f"{folder}/second", nn.Linear(2, 2), timeout=20)
    checkpoint.save(f"{folder}/second", nn.Linear(2, 2))
    return str(caught.value)


def test_a_failure_that_one_rank_has_raised_before_is_raised_on_all_by_the_next_save(ranks, tmp_path: Path):
    for said in ranks(2).run(_one_rank_hears_of_a_failure, str(tmp_path)):
        assert said.startswith(f'Saving "{tmp_path}/first" failed (on rank 0): [Errno 28] No space left on device')
