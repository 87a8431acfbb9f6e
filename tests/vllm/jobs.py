"""Scripts that run beside an engine, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.house.source import ROOT

__all__ = ["TWO_RANKS", "run"]

TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(*words: object) -> str:
    """Run Python with these words, and return what it prints.

    Raises:
        AssertionError: it fails.
    """
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
