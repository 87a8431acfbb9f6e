"""`shardlib doctor`, and `shardlib check -i` as ColossalAI's users type it: what it says of this machine."""

from __future__ import annotations

import json
import os
import platform
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardlib.cli import environment, main


def test_the_report_says_what_is_so(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version()
    assert facts["torch"]["version"] == torch.__version__
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["backends"]["gloo"] is dist.is_gloo_available()
    assert facts["backends"]["nccl"] is dist.is_nccl_available()
    assert facts["threads"]["OMP_NUM_THREADS"] == "3"
    assert facts["threads"]["cores"] == os.cpu_count()
    assert len(facts["devices"]) == torch.accelerator.device_count()
    assert facts["ranks_can_meet"]["127.0.0.1"] is True


def test_for_people_each_fact_has_a_line(capsys):
    assert main(["check", "--installed"]) == 0
    out = capsys.readouterr().out
    assert f"python            {platform.python_version()}\n" in out
    assert f"torch             version: {torch.__version__}\n" in out
    assert "ranks_can_meet    127.0.0.1: yes\n" in out


def _refuse(*_where: object, **_how: object) -> None:
    raise dist.DistNetworkError("no way in\nand much else")


def test_a_package_that_is_not_there_and_a_place_where_nobody_can_meet(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(dist, "TCPStore", _refuse)
    monkeypatch.setattr(environment, "version", lambda name: "not installed" if name == "peft" else "1.0")
    monkeypatch.setattr(environment, "_PYTHON", (3, 10))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    facts = environment.environment()
    assert facts["packages"] == {"no-such-package": "1.0"}
    assert facts["features"]["LoRA"] == "needs peft: pip install peft"
    assert set(facts["features"].values()) == {facts["features"]["LoRA"], "ready"}
    assert f"Python {platform.python_version()} is not tested; 3.10 is." in facts["known"]
    assert any(text.startswith("OMP_NUM_THREADS is not set") for text in facts["known"])
    assert facts["ranks_can_meet"] == dict.fromkeys(("127.0.0.1", "::1", "localhost"), "no way in")


def test_what_cannot_be_imported_is_not_ready(monkeypatch):
    def refuse(name: str) -> None:
        if name.startswith("transformers"):
            raise ImportError("Could not import module") from RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(environment.importlib, "import_module", refuse)
    features = environment.environment()["features"]
    assert features["LoRA"] == "ready"
    assert features["models of transformers"] == (
        "installed, and `import transformers.models.llama.modeling_llama` fails: RuntimeError: operator "
        "torchvision::nms does not exist. This torchvision was built for another torch. Install both from one index, "
        "as in `pip install --index-url https://download.pytorch.org/whl/cpu torch torchvision`, or uninstall "
        "torchvision."
    )


def test_devices_are_told_with_name_and_memory(monkeypatch):
    seen = types.SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    one = types.SimpleNamespace(name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch, "accelerator", seen)
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: types.SimpleNamespace(get_device_properties=lambda i: one)
    )
    facts = environment.environment()
    assert facts["devices"][1] == {"type": "cuda", "index": 1, "name": "H100", "memory_gib": 80.0}
    assert "devices           type cuda, index 0, name H100, memory_gib 80.0\n" in environment.text(facts)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["check"], "`shardlib check` needs a model to check; -i alone says what is installed."),
        (
            ["check", "-i", "torch.nn:Identity"],
            "`shardlib check -i` tells of this machine and takes nothing else but --json.",
        ),
    ],
)
def test_a_model_or_the_machine_and_not_both(capsys, typed: list[str], message: str):
    assert main(typed) == 2
    assert capsys.readouterr().err == f"shardlib: {message}\n"
