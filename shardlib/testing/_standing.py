"""Standings of ranks: module, collective, axis, shape and line, read from outside while a rank runs or hangs.

Nothing is recorded for it beforehand. Another thread of the rank reads the frames of the main thread (hooks of
autograd run there too, on CPU), and torch's flight recorder says which collective is under way.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import _current_frames
from types import FrameType, TracebackType
from typing import Any, Literal

from shardlib.errors import printable

__all__ = ["Standing", "State", "explain", "lost_a_peer", "of_main_thread", "of_traceback", "table"]

State = Literal["running", "waiting", "idle", "done", "raised", "died", "silent"]


@dataclass(frozen=True)
class Standing:
    """The standing of one rank when it was asked.

    Attributes:
        rank: the number of the rank in the pool.
        state: "waiting" in a collective, "running" between two, "done", "raised", "died"; "silent" where the process
            did not even answer, which then only has a `stack`.
        phase: "forward", "backward", or an empty string outside of both.
        module: its dotted name below the outermost module, or the class of that; empty outside of modules. A parameter
            may stand here in backward, where a hook was at work on one.
        collective: "all_reduce", ...; empty where the rank is in none.
        axis: the mesh axis that the collective goes along; "world" for the default group where no axis is known.
        shape, dtype: shape and dtype of the collective's first tensor.
        where: file, line and function of the innermost line that is neither torch's nor shardlib's.
        group: the ranks that take part in the collective.
        sequence: its number among the collectives of its group.
        stack: the whole stack as text.
        said: the message of the exception, if there was one.
    """

    rank: int
    state: State
    phase: str = ""
    module: str = ""
    collective: str = ""
    axis: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    where: str = ""
    group: tuple[int, ...] = ()
    sequence: int = 0
    stack: str = field(default="", repr=False)
    said: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (f"rank {self.rank}", *self._columns) if part)

    @property
    def _columns(self) -> tuple[str, ...]:
        module = f"{self.module} ({self.phase})" if self.module and self.phase else self.module or self.phase
        doing = f"{self.collective} over {self.axis}" if self.collective and self.axis else self.collective
        tensor = f"{self.dtype} {list(self.shape)}" if self.shape is not None else ""
        return (self._state_text, module, doing, tensor, self.where)

    @property
    def _state_text(self) -> str:
        if self.state == "raised":
            return f"raised {self.said}".rstrip()
        texts = {"done": "finished", "died": f"died: {self.said}", "silent": "does not answer", "idle": "not begun"}
        return texts.get(self.state, self.said)


# --- one rank, asked from inside -----------------------------------------------------------------------------------


def of_main_thread(rank: int, since_ns: int) -> Standing:
    """Return the standing of this process's main thread; called on another thread."""
    frame = _current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return Standing(rank, "silent")
    frames = _outer(frame)
    standing = _of_frames(rank, "running", frames, _pending(since_ns))
    return replace(standing, stack=_text(frames))


def of_traceback(rank: int, error: BaseException, since_ns: int) -> Standing:
    """Return the standing at an exception. A rank that lost a peer in a collective counts as waiting in it."""
    frames = list(_of_tb(error.__traceback__))
    if lost_a_peer(str(error)):
        return replace(_of_frames(rank, "waiting", frames, _last(since_ns)), said="lost a peer")
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    standing = _of_frames(rank, "raised", frames, None)
    return replace(standing, said=said if len(said) <= 100 else said[:97] + "...")


def lost_a_peer(text: str) -> bool:
    """Return whether an error of gloo only reports that another rank closed its connections."""
    return any(words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


_Frames = list[tuple[FrameType, int]]


def _outer(frame: FrameType | None) -> _Frames:
    """Return the frame and those around it, outermost first."""
    found: _Frames = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _text(frames: _Frames) -> str:
    """Format the stack inside the machinery that called the function."""
    inner = next((i for i in reversed(range(len(frames))) if frames[i][0].f_code.co_filename in _MACHINERY), -1)
    lines = traceback.StackSummary.extract(iter(frames[inner + 1 :])).format()
    return "".join(["Stack (most recent call last):\n", *lines])


def _of_tb(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _of_frames(rank: int, state: State, frames: _Frames, pending: dict[str, Any] | None) -> Standing:
    own = [(frame, line) for frame, line in frames if frame.f_code.co_filename not in _MACHINERY]
    phase, module = _module(own)
    known = Standing(rank, state, phase, module, where=_where(own))
    if pending is None:
        doing = _distributed_function(own)
        return replace(known, collective=doing, state="waiting" if doing and state == "running" else state)
    return replace(known, state="waiting", **pending)


# --- modules and lines ---------------------------------------------------------------------------------------------


def _module(frames: _Frames) -> tuple[str, str]:
    """Return the phase, and the innermost module or, in backward, parameter."""
    from torch import nn

    engine = _begin_of_backward(frames)
    stack = [m for frame, _ in frames[engine:] if (m := _called_module(frame)) is not None]
    if stack:
        return ("backward" if engine else "forward"), _named(stack[-1], stack[0], frames)
    if not engine:
        return "", ""
    for frame, _ in reversed(frames[engine:]):
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module | nn.Parameter) and (name := _named(value, None, frames)):
                return "backward", name
    return "backward", ""


def _begin_of_backward(frames: _Frames) -> int:
    """Return the index of the frame that runs autograd's engine, or 0."""
    return next((i for i, (f, _) in enumerate(frames) if f.f_code.co_name == "_engine_run_backward"), 0)


def _called_module(frame: FrameType) -> Any:
    from torch import nn

    if frame.f_code.co_name not in ("forward", "_call_impl") or not frame.f_code.co_varnames:
        return None
    module = frame.f_locals.get(frame.f_code.co_varnames[0])
    return module if isinstance(module, nn.Module) else None


def _named(value: Any, root: Any, frames: _Frames) -> str:
    """Return the name of a module or parameter below the outermost module, which a user's frame may hold."""
    from torch import nn

    roots = [root] if root is not None else _modules_at_hand(frames)
    for outermost in roots:
        for name, module in outermost.named_modules():
            if module is value:
                return name.replace("_orig_mod.", "") or type(value).__name__
            for own, parameter in module.named_parameters(recurse=False):
                if parameter is value:
                    return f"{name}.{own}".lstrip(".").replace("_orig_mod.", "")
    return type(value).__name__ if isinstance(value, nn.Module) else ""


def _modules_at_hand(frames: _Frames) -> list[Any]:
    """Return the modules that the frames hold, the one with the most submodules first."""
    from torch import nn

    held = {id(v): v for frame, _ in frames for v in list(frame.f_locals.values()) if isinstance(v, nn.Module)}
    return sorted(held.values(), key=lambda module: -sum(1 for _ in module.modules()))


def _where(frames: _Frames) -> str:
    """Return the user's innermost line, in short and with its text."""
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        if not _foreign(file):
            return f"{os.path.basename(file)}:{line} in {frame.f_code.co_name}"
    return ""


_PACKAGE = str(Path(__file__).resolve().parents[1])
_FOREIGN = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), sysconfig.get_path("platlib"), _PACKAGE)
_MACHINERY = tuple(str(Path(__file__).with_name(name)) for name in ("_pool.py", "_worker.py", "_carry.py"))


def _foreign(file: str) -> bool:
    return file.startswith(("<", *(root + os.sep for root in _FOREIGN)))


# --- collectives ---------------------------------------------------------------------------------------------------


def _pending(since_ns: int) -> dict[str, Any] | None:
    """Describe the oldest pending collective of this call, for which later collectives wait too."""
    under_way = [entry for entry in _recorded(since_ns) if not entry["retired"]]
    return _described(under_way[0]) if under_way else None


def _last(since_ns: int) -> dict[str, Any] | None:
    recorded = _recorded(since_ns)
    return _described(recorded[-1]) if recorded else None


def _recorded(since_ns: int) -> list[dict[str, Any]]:
    from shardlib.engine._torch import recorded_collectives

    return [entry for entry in recorded_collectives() if entry["time_created_ns"] >= since_ns]


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    from shardlib.engine._torch import place_of_group

    name, purpose = entry["process_group"]
    group, axes = place_of_group(name)
    shapes, dtypes = entry["input_sizes"] or entry["output_sizes"], entry["input_dtypes"] or entry["output_dtypes"]
    return {
        "collective": entry["profiling_name"].removeprefix("gloo:"),
        "axis": "/".join(axes) or purpose.removeprefix("mesh_").replace("default_pg", "world").replace("undefined", ""),
        "shape": tuple(shapes[0]) if shapes else None,
        "dtype": _DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else "",
        "group": group,
        "sequence": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
    }


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def _distributed_function(frames: _Frames) -> str:
    """Return the function of torch.distributed that the innermost frames are in, such as `new_group`."""
    name = ""
    for frame, _ in reversed(frames):
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if not _foreign(frame.f_code.co_filename):
            break
        if file.endswith(("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")):
            name = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else name
    return name.lstrip("_")


# --- all ranks, as text -------------------------------------------------------------------------------------------


def table(standings: Iterable[Standing]) -> str:
    """Format one line per rank, in columns."""
    rows = [(f"rank {s.rank}", *map(printable, s._columns)) for s in sorted(standings, key=lambda s: s.rank)]
    used = [i for i in range(len(rows[0])) if any(row[i] for row in rows)] if rows else []
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    return "\n".join("  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows)


def explain(standings: Sequence[Standing]) -> str:
    """Explain a hang: for each group, the collective in which most of its ranks wait, and the ranks that are
    elsewhere."""
    by_rank = {s.rank: s for s in standings}
    lines: list[str] = []
    for group in dict.fromkeys(s.group for s in standings if s.group):
        sequences = [s.sequence for s in standings if s.group == group]
        sequence = max(sequences, key=lambda number: (sequences.count(number), number))
        inside = [s for s in standings if (s.group, s.sequence) == (group, sequence)]
        first = inside[0]
        present = [s.rank for s in inside]
        what = f"{first.collective} over {first.axis}" if first.axis else first.collective
        absent = [by_rank[rank] for rank in group if rank in by_rank and rank not in present]
        if absent:
            lines.append(f"{_ranks(present)} in {what}: " + "; ".join(_absence(s) for s in absent))
        lines += [
            f"rank {s.rank} entered {s.collective} {_tensor(s)} where rank {first.rank} entered "
            f"{first.collective} {_tensor(first)}"
            for s in inside
            if (s.collective, s.shape, s.dtype) != (first.collective, first.shape, first.dtype)
        ]
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"


def _absence(standing: Standing) -> str:
    if standing.state == "done":
        return f"rank {standing.rank} finished without it"
    if standing.state in ("raised", "died"):
        return f"rank {standing.rank} {standing._state_text}"
    over = f" over {standing.axis}" if standing.axis else ""
    elsewhere = f", it waits in {standing.collective}{over}" if standing.group else ""
    return f"rank {standing.rank} has not entered it{elsewhere}"


def _tensor(standing: Standing) -> str:
    return f"{standing.dtype} {list(standing.shape or ())}".strip()
