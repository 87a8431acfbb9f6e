"""Every shell line of README.md runs as it stands there, in a fresh clone."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT
from tests.pages import read_page
from tests.scripts import fresh_clone, run_shell, shell_blocks

# What makes the long ones short. tests/examples runs these scripts with the options of README.md by default.
_FEWER = {
    "booster_resnet": "--epochs 1 --images 32 --batch-size 16 --size 8",
    "booster_vit_amp": "--epochs 1 --layers 1 --width 32",
    "booster_llama_hybrid": "--steps 2 --layers 1 --width 32 --context 16 --rows 4",
}


# Runs lines as the shell would, each by the command that the shell would find, all in one process: one import of torch.
_IN_ONE_PROCESS = """
import runpy, shlex, shutil, sys
for line in sys.stdin.read().splitlines():
    sys.argv = shlex.split(line, comments=True)
    try:
        runpy.run_path(shutil.which(sys.argv[0]), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def _scripts() -> Iterator[Any]:
    """Lines that belong together, as one script; those of torchrun one by one.

    Lines on files that the page itself writes are not for a clone: test_documents.py types them.
    """
    own = tuple(read_page(ROOT / "README.md").files)
    for block in shell_blocks(ROOT / "README.md"):
        if any(line.endswith(own) for line in block):
            continue
        lines, command = "\n".join(block), block[0].partition(" ")[0]
        if command == "shardlib":
            assert all(line.startswith("shardlib ") for line in block)
            once = f"{shlex.quote(sys.executable)} -c {shlex.quote(_IN_ONE_PROCESS)} <<'LINES'\n{lines}\nLINES"
            yield pytest.param(once, id=command)
            yield pytest.param(lines, id=f"{command} by the shell", marks=pytest.mark.deep)
            continue
        if command != "torchrun":
            yield pytest.param(lines, id=command)
            continue
        for line in block:
            (name,) = [name for name in _FEWER if name in line]
            yield pytest.param(f"{line.partition('#')[0]} {_FEWER[name]}", id=name, marks=pytest.mark.deep)


@pytest.mark.parametrize("script", list(_scripts()))
def test_shell_lines_run_in_a_fresh_clone(script: str, tmp_path: Path):
    # `make` makes environments, and tests that run the suite would not end: that the targets are there has to do.
    run_shell(re.sub(r"^make ", "make --dry-run ", script, flags=re.MULTILINE), fresh_clone(tmp_path))
