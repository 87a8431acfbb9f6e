"""Command lines as a reader types them: what the documents say to type, and running it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.house.source import ROOT

_FENCED = re.compile(r"^```(\w*)(?: +title=\"[^\"]+\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
_STANDS_IN = ROOT / "tests/house/bin"  # for commands of SLURM
_SHELLS = "sh", "bash", "shell", "console"


def shell_blocks(document: Path) -> list[list[str]]:
    """The lines of each block that is indented, or fenced as a shell's."""
    text = document.read_text()
    fenced = [body for language, body in _FENCED.findall(text) if language in _SHELLS]
    blocks = fenced + _INDENTED.findall(_FENCED.sub("", text))
    return [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]


def readme_line(script: str) -> str:
    """The line of README.md that starts a script of examples/."""
    (line,) = [line for block in shell_blocks(ROOT / "README.md") for line in block if f"/{script}.py" in line]
    return line.partition("#")[0].strip()


def fresh_clone(folder: Path) -> Path:
    """A copy of the files that git tracks, or would if they were added: what is not committed yet counts."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # one that was deleted is listed until that is committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def run_shell(script: str, folder: Path, library: Path | None = None) -> str:
    """Run lines in a folder of the repository, with this environment's commands and stand-ins for SLURM's; what they
    print.

    `library`: the repository, for a folder elsewhere.
    torchrun looks for a free port here, since other tests run at the same time.
    """
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), str(_STANDS_IN), os.environ["PATH"])),
        "PYTHONPATH": f"{library or folder}/tests/at_start{os.pathsep}{library or folder}",
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",
    }
    command = ["bash", "-e", "-u", "-o", "pipefail", "-c", script]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{script}\n{run.stdout}{run.stderr}"
    return run.stdout
