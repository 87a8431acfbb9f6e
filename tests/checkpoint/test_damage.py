"""Damaged, foreign and hostile files: refused with CheckpointError, and the model is as it was."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shardlib import checkpoint
from shardlib.checkpoint import _random
from shardlib.checkpoint._manifest import MANIFEST, Manifest
from shardlib.errors import CheckpointError

_ALL = settings.default.max_examples


class Job:
    """A model in training, and a copy of all that loading could change."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3 + seed)
        for _ in range(1 + seed):
            self.model(torch.randn(5, 3)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, path: Path, **options: Any) -> None:
        extra = {"epoch": 3, "seen": torch.arange(5)}
        checkpoint.save(path, self.model, self.optimizer, lr_scheduler=self.scheduler, extra=extra, **options)

    def load(self, path: Path, **options: Any) -> Any:
        return checkpoint.load(path, self.model, self.optimizer, lr_scheduler=self.scheduler, **options)

    def state(self) -> str:
        """All of it, as text that is equal where all is equal, bit by bit."""
        tensors = [*self.model.state_dict().values()]
        tensors += [t for held in self.optimizer.state_dict()["state"].values() for t in held.values()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        values = [t.double().tolist() for t in tensors]
        return repr((values, groups, self.scheduler.state_dict(), torch.get_rng_state().sum()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    Job(0).save(path)
    return path


def _copy(whole: Path, folder: Path) -> Path:
    target = folder / "copy"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(whole, target)
    return target


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _refused_or_harmless(path: Path, whole: Path, **options: Any) -> str | None:
    """The refusal, which has changed nothing; or None, where what was loaded is what was saved."""
    torch.manual_seed(3)
    job = Job(1)
    before = job.state()
    try:
        job.load(path, **options)
    except CheckpointError as error:
        assert job.state() == before, "refused, and yet something was changed"
        return str(error)
    good = Job(1)
    good.load(whole)
    assert job.state() == good.state(), "wrong numbers in silence"
    return None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=2 * _ALL)
@given(at=st.floats(0, 1, exclude_max=True), which=st.integers(0, 99), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere(whole: Path, scratch: Path, at: float, which: int, bit: int):
    copy = _copy(whole, scratch)
    file = _files(copy)[which % len(_files(copy))]
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    file.write_bytes(data)
    _refused_or_harmless(copy, whole)


@settings(max_examples=_ALL)
@given(at=st.floats(0, 1, exclude_max=True), which=st.integers(0, 99))
@example(at=0.9999999999999998, which=2)
def test_a_file_that_ends_early_anywhere(whole: Path, scratch: Path, at: float, which: int):
    copy = _copy(whole, scratch)
    file = _files(copy)[which % len(_files(copy))]
    data = file.read_bytes()
    left, lost = data[: int(at * len(data))], data[int(at * len(data)) :]
    file.write_bytes(left)
    refused = _refused_or_harmless(copy, whole)
    if lost != b"\n":  # the last byte of the manifest, whose JSON is whole without it
        assert refused is not None and file.name in refused


@pytest.mark.parametrize("verify", ["read", "all", "none"])
def test_a_file_that_is_missing_or_longer(whole: Path, tmp_path: Path, verify: str):
    for n in range(len(_files(whole))):
        copy = _copy(whole, tmp_path)
        file = _files(copy)[n]
        with file.open("ab") as end:
            end.write(b"more")
        refused = _refused_or_harmless(copy, whole, verify=verify)
        assert refused is not None and file.name in refused, file
        file.unlink()
        assert _refused_or_harmless(copy, whole, verify=verify) is not None, file


def test_damage_where_nothing_is_read_is_found_by_looking_at_all(whole: Path, tmp_path: Path):
    copy = _copy(whole, tmp_path)
    file = next(copy.glob("optimizer/*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    checkpoint.load(copy, Job(1).model)
    with pytest.raises(CheckpointError, match=r"pieces-00000-000.safetensors\" is not what was saved"):
        checkpoint.load(copy, Job(1).model, verify="all")


def test_a_manifest_that_is_gone_is_said_to_be(whole: Path, tmp_path: Path):
    copy = _copy(whole, tmp_path)
    (copy / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"has files of a checkpoint but no shardlib.json"):
        Job(1).load(copy)


def test_pickles_are_not_read(tmp_path: Path):
    torch.save(Job(0).model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"Pickled files \(.bin, .pt, .distcp\) are never read"):
        checkpoint.load(tmp_path, Job(1).model)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        checkpoint.load(tmp_path / "pytorch_model.bin", Job(1).model)


# --- manifests that somebody wrote ----------------------------------------------------------------------------------


def _with_checksum(body: Any) -> str:
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return f'{{"shardlib_checkpoint":1,"crc32":"{zlib.crc32(text.encode()):08x}","body":{text}}}'


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _changed(body: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    body = json.loads(json.dumps(body))
    at = body
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return body


_HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 1 << 31, 1 << 62, 1 << 64, 10**40, -(1 << 63), 0.5, 1e308),
    *(
        "",
        "a",
        "..",
        "../up",
        "/etc/passwd",
        "values/../../up.safetensors",
        "model\0.safetensors",
        "x" * 5000,
        "\ud800",
    ),
    *([], [[]], [0], [-1], [1 << 62], {}, [[[[[[[[]]]]]]]]),
    *({"~": "tuple", "of": 3}, {"~": "tensor", "of": "no such"}, {"~": "tensor", "of": 3}, {"~": []}),
    *({"~": "dict", "of": [[[1], 2]]}, {"~": "os.system", "of": "true"}, {"~": 1}, {"~": {}, "of": 1}),
    *({"~": "counter", "of": [["a", "b"]]}, {"~": "float", "of": "1"}),
]


def _drop(at: Any, key: Any) -> None:
    del at[key]


def _set(value: Any) -> Callable[[Any, Any], None]:
    def change(at: Any, key: Any) -> None:
        at[key] = value

    return change


def _repeat(at: Any, key: Any) -> None:
    if isinstance(at, list):
        at.insert(0, at[key])
    else:
        at[f"{key}~"] = at[key]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_CHANGES = st.one_of(st.sampled_from(_HOSTILE).map(_set), _JSON.map(_set), st.just(_drop), st.just(_repeat))


@settings(max_examples=3 * _ALL)
@given(data=st.data())
def test_a_manifest_with_hostile_values_anywhere(whole: Path, scratch: Path, data: st.DataObject):
    copy = _copy(whole, scratch)
    body = json.loads((copy / MANIFEST).read_text())["body"]
    for _ in range(data.draw(st.integers(1, 2))):
        places = [path for path in _places(body) if path]
        body = _changed(body, data.draw(st.sampled_from(places)), data.draw(_CHANGES))
    (copy / MANIFEST).write_text(_with_checksum(body))
    job = Job(1)
    try:
        job.load(copy)
    except CheckpointError:
        return  # nothing else may come out


_DEEP = "[" * 100_000 + "]" * 100_000
_LONG = '{"shardlib_checkpoint":1,"crc32":"00000000","body":' + "9" * 5000 + "}"


@given(text=st.text() | _JSON.map(json.dumps))
@example(_DEEP)
@example('{"shardlib_checkpoint":1,"crc32":"0","body":' + _DEEP + "}")
@example(_LONG)
@example('{"a":1,"a":2}')
@example('{"shardlib_checkpoint":NaN}')
@example("")
@example("null")
@example('{"shardlib_checkpoint":true,"crc32":"","body":{}}')
def test_text_that_is_no_manifest(text: str):
    with pytest.raises(CheckpointError):
        Manifest.load(text)


@pytest.mark.parametrize("rest", ['"crc32":"x","body":3', '"content":[NaN]', '"content":' + "9" * 5000])
def test_a_newer_format_is_called_that(whole: Path, tmp_path: Path, rest: str):
    copy = _copy(whole, tmp_path)
    (copy / MANIFEST).write_text(f'{{"shardlib_checkpoint":2,{rest}}}')
    job = Job(1)
    with pytest.raises(CheckpointError) as caught:
        job.load(copy)
    assert (
        f'"{copy}" cannot be read: it was written by a newer shardlib, in format 2, and this one reads format 1. '
        "Update shardlib ("
    ) in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_sizes_are_looked_at_before_a_file_is_read(whole: Path, tmp_path: Path):
    copy = _copy(whole, tmp_path)
    foreign = tmp_path / "foreign" / "model.safetensors.index.json"
    foreign.parent.mkdir()
    foreign.touch()
    for file in (copy / MANIFEST, foreign):
        os.truncate(file, 1 << 40)  # of which the disk holds next to nothing
        with pytest.raises(
            CheckpointError, match=f"{file.name}.* has 1099511627776 bytes, and such a file has at most"
        ):
            checkpoint.load(file.parent, Job(1).model)
    assert checkpoint.save(copy, Job(0).model).done()  # over it


@pytest.mark.parametrize("length", [1 << 40, 100_000_001, 3000])
def test_a_header_that_lies_about_its_length(whole: Path, tmp_path: Path, length: int):
    copy = _copy(whole, tmp_path)
    file = next(copy.glob("*.safetensors"))
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    if length == 100_000_001:  # and has as many
        os.truncate(file, 1 << 30)
    reason = (
        rf"{file.name}\" cannot be read as safetensors: by its first bytes it has a header of {length} bytes; the file"
    )
    for path in (copy, file):
        if path == copy:
            body = json.loads((copy / MANIFEST).read_text())["body"]
            n = [entry[0] for entry in body["files"]].index(file.name)
            body["files"][n][1] = file.stat().st_size
            (copy / MANIFEST).write_text(_with_checksum(body))
        with pytest.raises(CheckpointError, match=reason):
            checkpoint.load(path, Job(1).model, verify="none")


_BAD: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a path that leads out": (("files", 0, 0), "../outside.safetensors", "names a file '../outside.safetensors'"),
    "an absolute path": (("files", 0, 0), "/etc/passwd", "names a file '/etc/passwd'"),
    "a negative slice": (("tensors", "model", "0.weight", 2, 0, 1, 0), -1, "holds -1, which is not a size"),
    "a huge shape": (("tensors", "model", "0.weight", 1, 0), 1 << 61, "elements from 4 to 2305843009213693952"),
    "overlapping pieces": (("tensors", "model", "0.weight", 2), [[0, [0, 0], [3, 3]], [0, [2, 0], [2, 3]]], "overlap"),
    "a missing piece": (("tensors", "model", "0.weight", 2), [[0, [0, 0], [3, 3]]], "from 3 to 4 of dim 0 are in no"),
    "a missing corner": (
        ("tensors", "model", "0.weight", 2),
        [[0, [0, 0], [2, 1]], [0, [2, 0], [2, 1]], [0, [0, 1], [2, 2]]],
        "1 shards of 4 are missing",
    ),
    "a file that is not listed": (("tensors", "model", "0.weight", 2, 0, 0), 7, "a shard is in file 7 of 3"),
    "an unknown dtype": (("tensors", "model", "0.weight", 0), "F4", "unknown dtype 'F4'"),
    "another dtype": (("tensors", "model", "0.weight", 0), "I32", 'torch.int32 in the checkpoint'),
    "a piece of another shape": (("tensors", "model", "0.weight", 1), [3, 4], "reach to 4 in dim 0, which has size 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", _BAD)
def test_a_hostile_manifest_is_refused_with_its_reason(whole: Path, tmp_path: Path, what: str):
    path, value, reason = _BAD[what]
    copy = _copy(whole, tmp_path)
    body = json.loads((copy / MANIFEST).read_text())["body"]
    (copy / MANIFEST).write_text(_with_checksum(_changed(body, path, _set(value))))
    job = Job(1)
    before = job.state()
    with pytest.raises(CheckpointError) as caught:
        job.load(copy)
    assert reason in str(caught.value)
    assert job.state() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("lr", value) for value in ("0.1", [0.1], None, True, {"~": "float", "of": "nan"}, 10**40, {})],
        *[("lr", {"~": "tensor", "of": "extra.seen"}), ("initial_lr", "0.1"), ("weight_decay", None)],
        *[("betas", value) for value in (0.9, [0.9], [0.9, "0.9"], [0.9, 0.9, 0.9], [0.9, None])],
        *[("amsgrad", value) for value in (1, 0.0, "False", None)],
        *[("params", []), ("param_names", ["a"])],
    ],
)
def test_an_option_of_another_type_is_refused(whole: Path, tmp_path: Path, key: str, value: Any):
    copy = _copy(whole, tmp_path)
    body = json.loads((copy / MANIFEST).read_text())["body"]
    body["state"]["optimizer"]["groups"][0]["options"][key] = value
    (copy / MANIFEST).write_text(_with_checksum(body))
    job = Job(1)
    before = job.state()
    with pytest.raises(CheckpointError, match=f'Option "{key}" of group 0 of the optimizer is .* in the checkpoint'):
        job.load(copy)
    assert job.state() == before


@pytest.mark.parametrize(
    ("key", "saved", "now", "loaded"),
    [
        ("lr", 1, 0.1, 1),
        ("lr", torch.tensor(0.25), 0.1, torch.tensor(0.25)),
        ("lr", 0.25, torch.tensor(0.1), torch.tensor(0.25)),
        ("lr", torch.tensor([0.25]), torch.tensor(0.1), torch.tensor(0.25)),
        ("mine", torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 2.0])),
        ("betas", [0.5, 0.75], (0.9, 0.99), [0.5, 0.75]),
        ("mine", None, None, None),
        ("mine", "text", None, "text"),
        ("mine", [1, 2, 3], [4], [1, 2, 3]),
        ("mine", {"a": 1}, {}, {"a": 1}),
        ("swa_lr", 0.5, None, 0.5),
    ],
)
def test_options_that_fit(tmp_path: Path, key: str, saved: Any, now: Any, loaded: Any):
    one, other = Job(0), Job(1)
    one.optimizer.param_groups[0][key] = saved
    one.save(tmp_path / "saved")
    other.optimizer.param_groups[0][key] = now
    other.load(tmp_path / "saved")
    assert repr(other.optimizer.param_groups[0][key]) == repr(loaded)


def _state_of_torch(left: int, following: int) -> torch.Tensor:
    state = torch.get_rng_state()
    state[8:12].view(torch.int32)[0] = left
    state[16:24].view(torch.int64)[0] = following
    return state


_RANDOM: dict[str, tuple[str, int, Any, str]] = {
    "numpy: words behind the last": ("numpy", 2, 625, "numpy's position is 625, which is not between 0 and 624"),
    "numpy: memory far away": ("numpy", 2, 1 << 30, "numpy's position is 1073741824"),
    "numpy: memory before": ("numpy", 2, -1, "numpy's position is -1"),
    "numpy: no position": ("numpy", 2, 1.0, "numpy's position is 1.0"),
    "numpy: fewer words": ("numpy", 1, torch.zeros(3, dtype=torch.int64), "IndexError"),
    "numpy: another generator": ("numpy", 0, "PCG64", "ValueError"),
    "numpy: a flag": ("numpy", 3, 7, "numpy's has_gauss is 7"),
    "numpy: no number": ("numpy", 4, "a", "numpy's next normal number is 'a'"),
    "Python: words behind the last": ("python", 1, torch.full((625,), 625), "ValueError: invalid state"),
    "Python: no number": ("python", 2, "a", "Python's next normal number is 'a'"),
    "torch: words behind the last": ("torch", -1, _state_of_torch(624, 624), "torch's next word is 624 with 624 left"),
    "torch: no words": ("torch", -1, torch.zeros(3, dtype=torch.uint8), "RuntimeError"),
}


@pytest.mark.parametrize("what", _RANDOM)
def test_a_hostile_random_state_is_refused_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    kind, at, value, reason = _RANDOM[what]
    states = _random.states() | _random.python_states()  # one state, as in checkpoints of earlier versions
    if at < 0:
        states[kind] = value
    else:
        states[kind][at] = value
    with monkeypatch.context() as patch:
        patch.setattr(_random, "states", lambda: states)
        Job(0).save(tmp_path / "saved")
    job = Job(1)
    before = job.state()
    with pytest.raises(CheckpointError, match="the random states cannot be used: .*" + reason):
        job.load(tmp_path / "saved")
    assert job.state() == before
    job.load(tmp_path / "saved", random=False)


@pytest.mark.parametrize(
    "index",
    [
        *("", "[]", _DEEP, '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'),
        *('{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "missing"}}'),
    ],
)
def test_a_hostile_index_of_a_foreign_checkpoint(tmp_path: Path, index: str):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path, Job(1).model)


@given(data=st.binary(max_size=200))
@example(b"\xff" * 8 + b"{}")
@example((1 << 40).to_bytes(8, "little") + b"{}")
@example((2).to_bytes(8, "little") + b"{}")
def test_bytes_that_are_no_safetensors(scratch: Path, data: bytes):
    (scratch / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        checkpoint.load(scratch / "model.safetensors", Job(1).model)
