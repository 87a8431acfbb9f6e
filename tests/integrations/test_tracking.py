"""Each host's loggers get the plan once, and throughput: TensorBoard, W&B, a CSV file, a tracker of the user's own."""

from __future__ import annotations

import csv
import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from tests.integrations.tracked import alone, by_accelerate, by_lightning, by_transformers, to_wandb

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # isort: skip

NUMBERS = {"memory", "parameter", "gradient", "state", "buffer", "sent"}


def board(folder: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the scalars and texts of the only run in a folder."""
    (file,) = folder.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(file))
    read.Reload()
    tags: Any = read.Tags()
    scalars = {tag: [event.value for event in read.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return scalars, texts


def offline(folder: Path) -> dict[str, list[Any]]:
    """Return the history of W&B's only run in a folder."""
    (file,) = folder.rglob("*.wandb")
    history: defaultdict[str, list[Any]] = defaultdict(list)
    for record in _records(file.read_bytes()):
        for item in Record.FromString(record).history.item:
            history["/".join(item.nested_key) or item.key].append(json.loads(item.value_json))
    return history


def _records(data: bytes) -> Iterator[bytes]:
    """Read LevelDB's log format, after a header of seven bytes.

    A record may have several parts, each in one block of 32 KiB: checksum, length, kind (1 is all of a record, 4 its
    last part), bytes. What is left of a block is zeros if it has no room for these numbers.
    """
    at, record = 7, b""
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def assert_has_plan(scalars: dict[str, list[float]], prefix: str = "") -> None:
    found = {name: scalars[f"{prefix}plan/{name}_bytes"] for name in NUMBERS}
    assert all(len(values) == 1 and values[0] > 0 for name, values in found.items() if name != "buffer")
    (total,) = found.pop("memory")
    assert total == sum(found[name][0] for name in ("parameter", "gradient", "state", "buffer"))
    assert sum(values[0] for name, values in scalars.items() if "plan/sent_bytes/" in name) == found["sent"][0]


def assert_page(folder: Path) -> None:
    assert "Plan on dp=2,tp=2 (4 ranks) after zero(2)" in (folder / "plan.html").read_text()


def test_a_trainer_of_transformers_reports_to_tensorboard_and_keeps_its_log_history(tmp_path: Path, ranks):
    for names in ranks(4).run(by_transformers, str(tmp_path)):
        assert names == ["grad_norm", "learning_rate", "loss"]
    for folder in (tmp_path / "asked", tmp_path / "added"):
        scalars, texts = board(folder)
        assert_has_plan(scalars, "train/")
        assert "Plan on dp=2,tp=2" in texts["train/plan/text_summary"]
        assert scalars["train/train_samples_per_second"][0] > 0
        assert_page(folder)


def test_trackers_of_accelerate_get_the_plan_and_throughput(tmp_path: Path, ranks):
    first, *others = ranks(4).run(by_accelerate, str(tmp_path))
    (step, numbers), (last, rates) = first
    assert others == [[], [], []] and (step, last) == (0, 2)
    assert_has_plan({name: [value] for name, value in numbers.items()})
    assert rates["tokens_per_second"] == pytest.approx(2 * 3 * rates["steps_per_second"])
    scalars, texts = board(tmp_path)
    assert_has_plan(scalars)
    assert "Plan on dp=2,tp=2" in texts["plan/text_summary"] and "loss" in scalars
    assert_page(tmp_path)


def test_loggers_of_lightning_get_the_plan_and_throughput(tmp_path: Path, ranks):
    plan, *_ = ranks(4).run(by_lightning, str(tmp_path))
    scalars, texts = board(tmp_path)
    assert_has_plan(scalars)
    assert texts["plan/text_summary"] == f"```text\n{plan}\n```"
    rates = zip(scalars["samples_per_second"], scalars["steps_per_second"], strict=True)
    assert [rate / steps for rate, steps in rates] == pytest.approx([2 * 2] * 2, rel=1e-5)
    with open(tmp_path / "csv" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["plan/memory_bytes"] for row in rows if row["plan/memory_bytes"]] == [
        str(scalars["plan/memory_bytes"][0])
    ]
    assert_page(tmp_path / "board")


def test_every_host_reports_to_wandb(tmp_path: Path, ranks):
    plans, by_host = {}, {}
    for host in ("transformers", "accelerate", "lightning"):
        plans[host], _ = ranks(2).run(to_wandb, host, str(tmp_path / host))
        by_host[host] = offline(tmp_path / host)
        assert_has_plan(by_host[host], "train/" if host == "transformers" else "")
    for (text,) in (by_host["transformers"]["train/plan"], by_host["accelerate"]["plan"]):
        assert "Plan on dp=2 (2 ranks) after zero(2)" in text
    (table,) = by_host["lightning"]["plan/path"]
    (file,) = (tmp_path / "lightning").rglob(Path(table).name)
    assert json.loads(file.read_text())["data"] == [[f"```text\n{plans['lightning']}\n```"]]
    assert "loss" in by_host["accelerate"] and by_host["lightning"]["samples_per_second"][0] > 0


def test_a_monitor_without_the_strategy_is_refused(ranks):
    (said,) = ranks(1).run(alone, "")
    assert "Write Trainer(strategy=ShardlibStrategy(...))" in said
