"""Log messages of the library, and SHARDLIB_LOG."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import shardlib as sl

_SCRIPT = """
import torch, shardlib as sl
model = sl.shard_model(torch.nn.Linear(4, 4), "tp=1", {"**": None})
sl.save("run", model)
"""


def _run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_nothing_is_printed_unless_it_is_asked_for(tmp_path: Path):
    silent = _run(tmp_path)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    said = _run(tmp_path, SHARDLIB_LOG="info", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert "[shardlib rank 0] shard_model: Linear on tp=1 took " in said.stderr
    assert f'saving "{tmp_path}/run": write took ' in said.stderr and "write ..." not in said.stderr


def test_messages_go_to_the_logger(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="shardlib"):
        sl.shard_model(nn.Linear(4, 4), "tp=1", {"**": None})
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO"] * 2
    assert caplog.messages[0] == "shard_model: plan of Linear ..."
