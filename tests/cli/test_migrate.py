"""`shardlib migrate`: what it rewrites, what it leaves and says, and that what it wrote runs."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlib.cli import main
from shardlib.cli.rewrite import rewrite
from tests.house.source import ROOT

SCRIPT = '''\
"""Fine-tune."""
import torch, colossalai
from colossalai.booster import Booster  # the door
from colossalai.booster.plugin import (
    LowLevelZeroPlugin,
    TorchDDPPlugin as DDP,
)
try:
    from colossalai.nn.optimizer import HybridAdam
except ImportError:
    HybridAdam = torch.optim.AdamW


def train(steps):
    from colossalai.cluster import DistCoordinator

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    criterion = torch.nn.MSELoss()
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)
    losses = []
    for _ in range(steps):
        loss = criterion(model(torch.ones(2, 4)), torch.zeros(2, 2))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, DistCoordinator().world_size
'''


def _offered() -> Iterator[tuple[str, str]]:
    """Every module of ours and name that scripts are sent to."""
    tables: list[Any] = [tomllib.loads((ROOT / "shardlib/cli/migrate.toml").read_text())]
    while tables:
        for key, value in tables.pop().items():
            if isinstance(value, list):
                yield from ((key, name) for name in value)
            elif key != "refused":
                tables.append(value)


def test_scripts_are_sent_to_names_that_are_there():
    offered = list(_offered())
    assert len(offered) > 100
    assert [f"{module}.{name}" for module, name in offered if not hasattr(importlib.import_module(module), name)] == []


def _trained(source: str) -> Any:
    scope: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, "script.py", "exec"), scope)
    return scope["train"](4)


def test_what_it_wrote_trains_and_other_lines_are_kept(ranks: Callable):
    after = rewrite(SCRIPT)
    assert not after.remarks and "colossalai" not in after.text.replace(" as colossalai", "")
    told = [line for line in SCRIPT.splitlines() if "colossalai" not in line and "Plugin" not in line]
    kept = iter(after.text.splitlines())
    assert [line for line in told if line not in kept] == []  # each, in this order
    assert "Booster  # the door" in after.text and "TorchDDPPlugin as DDP" in after.text
    assert rewrite(after.text).text == after.text
    (losses, world), other = ranks(2).run(_trained, after.text)
    assert world == 2 and losses == other[0] and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from colossalai.shardformer import ShardConfig", "colossalai.shardformer.ShardConfig: "),
        ("from colossalai.inference import InferenceEngine", "has nothing for serving"),
        ("from colossalai.booster import *", "*"),
        ("from fairscale.optim.oss import OSS", "transforms=[shardlib.zero(1)]"),
        ("from colossalai.booster import Bosster", "colossalai.booster.Bosster"),
    ],
)
def test_what_is_left_is_named_with_its_line_and_advice(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    path.write_text(f"import os\n\n{line}\n")
    assert main(["migrate", str(path)]) == 1
    out, err = capsys.readouterr()
    assert f"{path}:3: " in err and said in err and "1 line is left to you." in err
    assert line not in out.replace("\n+", "\n-") and path.read_text() == f"import os\n\n{line}\n"


def test_files_are_written_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "deep").mkdir()
    script, other = tmp_path / "deep" / "train.py", tmp_path / "own.py"
    script.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    other.write_text("import torch\n")
    assert main(["migrate", str(tmp_path)]) == 0 and b"import Booster" in script.read_bytes()
    out, err = capsys.readouterr()
    assert "+from shardlib.booster import Booster" in out and "1 of 2 files changes." in err
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    assert script.read_bytes() == rewrite(SCRIPT).text.replace("\n", "\r\n").encode()
    assert other.read_text() == "import torch\n" and sorted(path.name for path in tmp_path.rglob("*.py")) == [
        "own.py",
        "train.py",
    ]
    capsys.readouterr()
    assert main(["migrate", str(script), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [{"file": str(script), "changes": False, "remarks": []}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "There is no file or folder"),
        (b"from colossalai import\n", "is not Python that can be read: line 1"),
        (b"# \xff\n", "is not UTF-8: byte 2 is 0xff"),
    ],
)
def test_what_cannot_be_read_is_said(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    assert main(["migrate", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_is_searched_for_files_and_each_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("train.py", ".git/hook.py", "env/lib/seen.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import colossalai\ncolossalai.launch()\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "same.py").symlink_to("train.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "train.py").chmod(0o750)
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    assert capsys.readouterr().err.endswith('train.py" was written.\n')
    assert (tmp_path / "train.py").read_text() == "import shardlib.booster as colossalai\ncolossalai.launch()\n"
    assert (tmp_path / "train.py").stat().st_mode & 0o777 == 0o750 and (tmp_path / "same.py").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", ".git", "env", "same.py", "gone.py"}


def test_the_document_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    text = (ROOT / "docs/migrating.md").read_text()
    shown = text.split("    $ shardlib migrate train.py\n")[1].split("\n\n")[0]
    lines = [line[4:] for line in shown.splitlines()]
    script = [line[1:] for line in lines[3:] if line[0] in " -"]
    (tmp_path / "train.py").write_text("\n".join(script) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", "train.py"]) == 1
    out, err = capfd.readouterr()
    assert (out + err).splitlines() == lines
