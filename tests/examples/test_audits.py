"""The examples of audits: what is wrong with each script is named, and the mended one is right."""

from __future__ import annotations

import runpy
import sys

import pytest

from shardlib.cli import main
from tests.house.source import ROOT
from tests.torchvision_on_cpu import let_torchvision_in

FOLDER = ROOT / "examples" / "audit"
SCRIPTS = {
    "train_torch": ("Model", "dp=2,tp=2", ("loss",), 'usually        "norm": SequenceParallel(),'),
    "train_accelerate": ("Model", "dp=2", (), "usually        loss * accelerator.num_processes,"),
    "train_lightning": (
        "build",
        "dp=2",
        ("loss", "accumulate"),
        "usually        fabric.no_backward_sync(model, enabled=",
    ),
    "train_transformers": (
        "build",
        "tp=2",
        (),
        'usually        the style "replicated_with_grad_allreduce" of "model.layers.*.self_attn.q_norm"',
    ),
}


@pytest.fixture(autouse=True)
def _torchvision(ranks: object) -> None:
    """Let transformers import it here and on the ranks."""
    let_torchvision_in()
    ranks(4).run(let_torchvision_in)  # type: ignore[operator]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_names_the_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    build, mesh, functions, line = SCRIPTS[name]
    monkeypatch.chdir(ROOT)
    script = f"examples/audit/{name}.py"
    options = [word for each in ("batch", *functions) for word in (f"--{each}", f"{script}:{each}")]
    assert main(["audit", f"{script}:{build}", "--sharded-by", f"{script}:shard", "--mesh", mesh, *options]) == 1
    printed = capsys.readouterr().out
    assert "The model does NOT compute what one device computes" in printed
    assert line in printed


# docs/how-to/audit-lightning.md audits the mended loop of Lightning too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name == "train_lightning")) for name in SCRIPTS]
)
def test_the_mended_script_is_right(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    script = str(FOLDER / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--mended"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.startswith("The model computes what one device computes")
    assert end.value.code == 0
