"""Every shell line of README.md runs as it stands there, in a fresh clone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT
from tests.scripts import fresh_clone, run_shell, shell_blocks

# What makes the long ones short. tests/examples runs these scripts with the options of README.md by default.
_FEWER = {
    "booster_resnet": "--epochs 1 --images 32 --batch-size 16 --size 8",
    "booster_vit_amp": "--epochs 1 --layers 1 --width 32",
    "booster_llama_hybrid": "--steps 2 --layers 1 --width 32 --context 16 --rows 4",
}


def _scripts() -> Iterator[Any]:
    """Lines that belong together, as one script; those of torchrun one by one."""
    for block in shell_blocks(ROOT / "README.md"):
        if not block[0].startswith("torchrun"):
            yield pytest.param("\n".join(block), id=block[0].partition(" ")[0])
            continue
        for line in block:
            (name,) = [name for name in _FEWER if name in line]
            yield pytest.param(f"{line.partition('#')[0]} {_FEWER[name]}", id=name, marks=pytest.mark.deep)


@pytest.mark.parametrize("script", list(_scripts()))
def test_shell_lines_run_in_a_fresh_clone(script: str, tmp_path: Path):
    # `make` makes environments, and tests that run the suite would not end: that the targets are there has to do.
    run_shell(re.sub(r"^make ", "make --dry-run ", script, flags=re.MULTILINE), fresh_clone(tmp_path))
