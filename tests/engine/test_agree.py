"""What ranks send each other is data: all of it arrives, and nothing of it is run."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardlib.engine.ranks import agree
from shardlib.errors import InputError, ShardingError
from tests.house.source import modules


class _RunsWhenRead:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _value(rank: int) -> dict[Any, Any]:
    return {
        ("weight", rank): float("inf"),
        3: {"of": "a set", "sizes": torch.Size([2, rank])},
        "dtype": torch.bfloat16,
        "nothing": [None, (True, -(2**62))],
        "long": "é" * (1 + 1000 * rank),
        "names": {"a", "b"},
    }


def _exchange() -> list[Any]:
    rank = torch.distributed.get_rank()
    last = torch.full((2,), rank)[1:]
    with FakeTensorMode(), torch.device("meta"):
        values, tensors = agree.exchange(_value(rank)), agree.exchange(last)
        assert agree.of_first(_value(rank)) == _value(0)
    return [values, [int(tensor) for tensor in tensors]]


def test_values_of_all_ranks_arrive_in_their_order(ranks):
    for values, tensors in ranks(3).run(_exchange):
        assert values == [_value(rank) for rank in range(3)] and tensors == [0, 1, 2]


def _read_what_runs(path: str) -> str:
    value = _RunsWhenRead(path) if torch.distributed.get_rank() == 1 else "text"
    try:
        return str(agree.exchange(value))
    except ShardingError as error:
        return str(error)


def test_code_that_a_rank_sends_is_not_run(ranks, tmp_path: Path):
    for said in ranks(2).run(_read_what_runs, str(tmp_path / "made")):
        assert said == "Rank 1 of the group sent what no rank of shardlib sends; it was not read."
    assert not (tmp_path / "made").exists()


def _same_twice() -> list[torch.Tensor]:
    """Tensors of every layout, dtype and view that buffers have."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    return [
        dense,
        dense.to_sparse(),
        torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [2.0, 1.0, 2.0], (2, 2)),  # one element in two parts
        *(getattr(dense, f"to_sparse_{layout}")() for layout in ("csr", "csc")),
        *(getattr(dense, f"to_sparse_{layout}")((1, 1)) for layout in ("bsr", "bsc")),
        torch.complex(dense, dense).conj(),
        torch.complex(dense, dense).conj().imag,
        *(dense.to(dtype) for dtype in (torch.int16, torch.uint16, torch.uint64, torch.bool, torch.float8_e4m3fn)),
        dense[:0],
        dense[1, 0],
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_of_every_layout_and_dtype_have_a_checksum():
    with torch.sparse.check_sparse_tensor_invariants():
        marks, again = ([agree.fingerprint(tensor) for tensor in _same_twice()] for _ in range(2))
    assert marks == again
    assert marks[1] == marks[2] and len(set(marks)) == len(marks) - 1


def _compare_names() -> str:
    more = {"mask": torch.zeros(1)} if torch.distributed.get_rank() else {}
    try:
        agree.batches_agree((), {"x": torch.zeros(2), **more}, torch.distributed.group.WORLD, "tp")
    except InputError as error:
        return str(error)
    return ""


def test_names_that_some_ranks_lack_are_shown_on_all(ranks):
    shown = "  rank 0: [\"kwargs['x']\"]\n  rank 1: [\"kwargs['mask']\", \"kwargs['x']\"]"
    assert all(f"different batches:\n{shown}" in said for said in ranks(2).run(_compare_names))


def test_no_module_sends_pickles_that_are_run():
    """Torch's collectives of objects unpickle what they receive, from a socket that others may reach."""
    found = [
        f"{module}:{node.lineno}: {name}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := node.attr if isinstance(node, ast.Attribute) else node.id).endswith(("_object", "_object_list"))
        and name.startswith(("all_gather", "broadcast", "gather", "scatter", "send", "recv"))
    ]
    assert not found, "exchange values by shardlib.engine.ranks.agree.exchange:\n" + "\n".join(found)
