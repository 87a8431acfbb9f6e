"""What code reads of tensors is found from views on the meta device, and never is less than what it reads."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import InputError
from shardlib.layout._boxes import Box, full_box
from shardlib.weights._views import on_meta, reads_of, views_of

DIMS = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple]]:
    """Draw a shape, and steps that narrow, select, swap, split and flatten dims."""
    shape = draw(DIMS)
    tensor, steps = torch.empty(shape), []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "select", "transpose", "flatten", "split", "clone", "expand"]))
        dim = draw(st.integers(0, max(tensor.ndim - 1, 0)))
        match kind:
            case "narrow" if tensor.ndim:
                start = draw(st.integers(0, tensor.shape[dim] - 1))
                step = ("narrow", dim, start, draw(st.integers(1, tensor.shape[dim] - start)))
            case "select" if tensor.ndim:
                step = ("select", dim, draw(st.integers(0, tensor.shape[dim] - 1)))
            case "transpose" if tensor.ndim:
                step = ("transpose", dim, draw(st.integers(0, tensor.ndim - 1)))
            case "flatten" if tensor.is_contiguous() and tensor.ndim > 1:
                step = ("flatten", 0, 1)
            case "split" if tensor.ndim and tensor.shape[dim] % 2 == 0:
                step = ("unflatten", dim, (2, -1))
            case "clone":
                step = ("clone",)
            case "expand":
                step = ("expand", 2, *tensor.shape)
            case _:
                continue
        tensor = _stepped(tensor, step)
        steps.append(step)
    return shape, steps


def _stepped(tensor: torch.Tensor, step: tuple) -> torch.Tensor:
    return getattr(tensor, step[0])(*step[1:])


def _reached(tensor: torch.Tensor, steps: list[tuple]) -> torch.Tensor:
    for step in steps:
        tensor = _stepped(tensor, step)
    return tensor


def _elements(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> set[int]:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return {int(n) for box in boxes for n in numbers[box.slices].flatten()}


@given(views())
def test_what_a_loader_reads_is_in_the_boxes(drawn):
    shape, steps = drawn

    def load(weights):
        for _, tensor in weights:
            view = _reached(tensor, steps)
            torch.empty(view.shape, device="meta").copy_(view)

    boxes = reads_of(load, {"w": on_meta(shape, torch.float32)})[0]["w"].boxes
    read = {int(n) for n in _reached(torch.arange(torch.Size(shape).numel()).reshape(shape), steps).flatten()}
    assert read <= _elements(shape, boxes)
    if all(step[0] in ("narrow", "select", "transpose", "clone", "expand") for step in steps):
        assert read == _elements(shape, boxes)
    assert sum(box.numel for box in boxes) == len(_elements(shape, boxes))  # disjoint


@given(views())
def test_a_result_is_the_view_of_a_part_or_is_refused(drawn):
    shape, steps = drawn

    def convert(tensors):
        return {"new": _reached(tensors["w"], steps)}

    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    try:
        [view] = views_of(convert, {"w": on_meta(shape, torch.float32)})
    except InputError:
        assert any(step[0] in ("flatten", "unflatten", "expand") for step in steps)
        return
    assert torch.equal(view.of(numbers[view.box.slices].contiguous()), _reached(numbers, steps))
    for at in itertools.product(*map(range, view.shape)):
        box = view.in_source(Box(at, (1,) * len(at)))
        assert numbers[box.slices].item() == _reached(numbers, steps)[at].item()


def test_reads_of_several_tensors_and_dtypes():
    def load(weights):
        given = dict(weights)
        fused = torch.empty(6, 4, device="meta", dtype=torch.bfloat16)
        fused[:4].copy_(given["q"].narrow(0, 4, 4))
        fused[4:].copy_(given["k"][:2])
        torch.empty(4, device="meta").copy_(given["scale"] * 2)  # computed: all of it is read

    tensors = {
        "q": on_meta((8, 4), torch.float32),
        "k": on_meta((4, 4), torch.float32),
        "scale": on_meta((4,), torch.float64),
        "unused": on_meta((3,), torch.float32),
    }
    reads, _ = reads_of(load, tensors)
    assert {name: (read.boxes, read.dtype) for name, read in reads.items()} == {
        "q": ((Box((4, 0), (4, 4)),), torch.bfloat16),
        "k": ((Box((0, 0), (2, 4)),), torch.bfloat16),
        "scale": ((full_box((4,)),), torch.float64),
    }


def test_boxes_that_meet_are_read_as_one():
    def load(weights):
        for _, tensor in weights:
            torch.empty(3, device="meta").copy_(tensor[:3])
            torch.empty(3, device="meta").copy_(tensor[2:5])
            torch.empty(2, device="meta").copy_(tensor[6:])

    assert reads_of(load, {"w": on_meta((8,), torch.float32)})[0]["w"].boxes == (Box((0,), (5,)), Box((6,), (2,)))


def test_a_computed_tensor_is_refused():
    with pytest.raises(InputError, match='computes "sum" from others'):
        views_of(lambda t: {"sum": t["a"] + t["b"]}, {name: on_meta((2,), torch.float32) for name in "ab"})


def test_parameters_that_are_not_filled_are_told():
    into = {name: on_meta((6, 4), torch.bfloat16) for name in ("fused", "padded", "half", "none")}

    def load(weights):
        for name, tensor in weights:
            into["fused"][: len(tensor)].copy_(tensor)
            into["fused"][len(tensor) :].copy_(tensor[:2])
            into["half"][:3].copy_(tensor[:3])
            into["half"][:3].copy_(tensor[:3])  # twice the same
            into["padded"][:4].copy_(tensor)
            into["padded"][4:].fill_(0)
            assert name == "w"

    assert reads_of(load, {"w": on_meta((4, 4), torch.float32)}, into)[1] == ["half", "none"]
