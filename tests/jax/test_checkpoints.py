"""Each device reads its piece of a checkpoint, and the arrays are those that whole tensors would have given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError
from tests.jax import on_devices


def _check(name: str, folder: Path) -> None:
    from tests.jax import checkpoints

    checkpoints.CHECKS[name](folder)


def _refused(folder: Path) -> dict[str, str]:
    from tests.jax import checkpoints

    return checkpoints.refused(folder)


def _saved_by_orbax(folder: Path) -> None:
    from tests.jax import checkpoints

    checkpoints.saved_by_orbax(folder)


@pytest.mark.parametrize(
    "name", ["tensors in parts padded and tied", "buffers and frozen parameters", "orbax on another mesh"]
)
def test_arrays_are_those_of_whole_tensors(name: str, tmp_path: Path):
    on_devices.run(_check, name, tmp_path)


def _hugging_face(name: str, folder: Path) -> None:
    from tests.jax import checkpoints

    checkpoints.hugging_face(name, folder)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_what_save_pretrained_wrote_is_read(name: str, tmp_path: Path):
    on_devices.run(_hugging_face, name, tmp_path, x64=False)


def test_what_does_not_fit_is_said_at_once(tmp_path: Path):
    found = on_devices.run(_refused, tmp_path)
    assert found["all"] == (
        f'CheckpointError: The checkpoint "{tmp_path}" does not fit:\n'
        '  not in the checkpoint: a.weight. Did you mean "a.wieght"?\n'
        '  only in the checkpoint: a.wieght. Did you mean "a.weight"?\n'
        '  "b" has shape (2,) in the checkpoint, and (3,) here\n'
        '  "c" is torch.float32 in the checkpoint, and torch.float64 here; cast=True converts\n'
        "names= says what tensors are called here (None leaves one out), transpose= how dims stand there."
    )
    assert 'a tree with int at "a"; give what compile_model returned' in found["leaf"]
    assert "meta device, and position are in no checkpoint" in found["meta"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8)])
        self.head = nn.Linear(8, 3, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))
        self.double()


def _called(name: str) -> str | None:
    if not name.startswith("params.") or name.endswith("half"):
        return None
    return name.removeprefix("params.").replace("kernel", "weight")


def _loads(folder: Path) -> list[tuple[str, int]]:
    """On ranks of torch: what each read, and that it is right."""
    from shardlib.checkpoint import _orbax

    seen: list[tuple[str, int]] = []
    original = _orbax.OrbaxReaders.read

    def read(self, file, name, dtype, shape, part):
        seen.append((name, part.numel))
        return original(self, file, name, dtype, shape, part)

    rules = sl.Rules({"layers.0": "colwise", "head": "rowwise", "scale": None})
    model = sl.shard_model(_Net(), "dp=2,tp=2", rules, transforms=[sl.zero(3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_orbax.OrbaxReaders, "read", read)
        sl.load(folder, model, names=_called, transpose={"kernel": (1, 0)})
    state = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in
             model.state_dict().items()}  # fmt: skip
    assert torch.equal(state["layers.0.weight"], torch.arange(32.0, dtype=torch.float64).view(4, 8).T)
    assert torch.equal(state["head.weight"], torch.arange(24.0, dtype=torch.float64).view(8, 3).T)
    assert torch.equal(state["layers.0.bias"], torch.arange(8.0, dtype=torch.float64)) and state["scale"] == 3
    return seen


def test_ranks_of_torch_read_their_slices_of_what_orbax_wrote(tmp_path: Path, ranks):
    on_devices.run(_saved_by_orbax, tmp_path)
    for seen in ranks(4).run(_loads, tmp_path / "ocdbt"):
        assert ("params.layers.0.kernel", 8) in seen, "a quarter of 32 elements"
        assert all(size <= 12 for _, size in seen)
    for wrong, text in (
        ({"names": _called}, 'names= calls 2 kernels of "'),
        ({"names": 3}, "names= was given as int; give a function"),
        ({"names": _called, "transpose": {"kernle": (1, 0)}}, 'transpose= names "kernle", which matches none of the 6'),
        ({"names": _called, "transpose": {"kernel": (1, 1)}}, "the dims (1, 1); it has shape (8, 3)"),
        (
            {"names": _called, "transpose": {"kernel": (1, 0), "head.*": (0, 1)}},
            "two orders of dims: (1, 0)",
        ),
    ):
        with pytest.raises(CheckpointError) as raised:
            sl.load(tmp_path / "ocdbt", _Net(), **wrong)  # type: ignore[arg-type]
        assert text in str(raised.value)
    with pytest.raises(CheckpointError, match=r"is a folder of 1 checkpoints of orbax: 3. Give the path of one"):
        sl.load(tmp_path / "steps", _Net())
    (tmp_path / "ocdbt" / "_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot be read as what orbax writes: KeyError: 'tree_metadata'"):
        sl.load(tmp_path / "ocdbt", _Net())
