"""The configuration of a job: a dict whose keys are attributes too, from Python, TOML or a dict.

Users may add any keys. A misspelt known key is refused, since it would silently do nothing.
"""

from __future__ import annotations

import difflib
import inspect
import runpy
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardlib.errors import LaunchError, nearest

__all__ = ["Config", "Section"]

# What engines read. Only these are guarded against slips of the pen: the capitals below are as likely to be names that
# a user gave to something else (`hidden_size`, `num_epochs`).
_READ = (
    "parallel",
    "fp16",
    "zero",
    "gradient_accumulation",
    "clip_grad_norm",
    "gradient_handler",
    "torch_ddp",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "NUM_MICRO_BATCHES",
)
_KNOWN = frozenset(_READ) | {
    "TENSOR_SHAPE",
    "SEQ_LENGTH",
    "GLOBAL_BATCH_SIZE",
    "HIDDEN_SIZE",
    "BATCH_SIZE",
    "NUM_EPOCHS",
}
_BY_LETTERS = MappingProxyType({key.lower().replace("_", ""): key for key in _READ})
# A typo leaves a key this similar and at most so many letters apart; below that length, words are close by chance
# (fp8).
_ALIKE, _APART, _LONG = 0.85, 2, 8


class Section(dict[str, Any]):
    """A dict whose keys are attributes, and whose dicts are sections too, in lists as well.

    >>> section = Section(tensor={"size": 2}, stages=[{"layers": 3}])
    >>> section.tensor.size, section["tensor"]["size"], section.stages[0].layers
    (2, 2, 3)
    >>> section.tensor.mode = "1d"
    >>> section
    {'tensor': {'size': 2, 'mode': '1d'}, 'stages': [{'layers': 3}]}
    """

    def __init__(self, given: Mapping[str, Any] | None = None, /, **keys: Any) -> None:
        super().__init__()
        self.update(given or {}, **keys)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise LaunchError(
                f"A config has names as keys, and {key!r} is of type {type(key).__name__}; write it as text."
            )
        super().__setitem__(key, _nested(value))

    def __getattr__(self, name: str) -> Any:
        # AttributeError and no error of ours: hasattr, copy and pickle ask in this way.
        if name not in self:
            raise AttributeError(f'The config has no key "{name}"; it has {_listed(self)}.{nearest(name, self)}')
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise LaunchError(f'"{name}" is what dicts call a method of theirs; write config["{name}"] for such a key.')
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]

    def update(self, given: Any = (), /, **keys: Any) -> None:
        """Update as a dict does."""
        for key, value in dict(given, **keys).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Set a default as a dict does."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, given: Any) -> Section:  # type: ignore[override,misc]
        self.update(given)
        return self

    def copy(self) -> Section:
        """Copy as a dict does; sections inside are copied too."""
        return type(self)(self)


class Config(Section):
    """The configuration of a job: the keys that engines know, and any of the user's own.

    Raises:
        LaunchError: a key that is a misspelt known one, which would do nothing.

    >>> config = Config(parallel={"tensor": {"size": 2, "mode": "1d"}}, BATCH_SIZE=32, my_own=1)
    >>> config.parallel.tensor.size, config.BATCH_SIZE, config.my_own
    (2, 32, 1)
    >>> Config(paralel={"pipeline": 2})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardlib.errors.LaunchError: The config has a key "paralel", which nothing reads. Did you mean "parallel"? ...
    """

    def __setitem__(self, key: str, value: Any) -> None:
        meant = _meant(key) if isinstance(key, str) else None
        if meant:
            raise LaunchError(
                f'The config has a key "{key}", which nothing reads. Did you mean "{meant}"? If it is a key of your '
                f"own, give it a name that cannot be taken for that one."
            )
        super().__setitem__(key, value)

    @classmethod
    def of(cls, given: Mapping[str, Any] | str | Path | None) -> Config:
        """Return a config from a dict, the path of a file, or None.

        >>> Config.of({"zero": {}}).zero, Config.of(None)
        ({}, {})
        """
        if isinstance(given, Config):
            return given
        if given is None or isinstance(given, Mapping):
            return cls(given)
        if isinstance(given, str | Path):
            return cls.from_file(given)
        raise LaunchError(
            f"config was given as {type(given).__name__}; give a dict, the path of a .py or .toml file, or nothing."
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read the keys of a TOML file, or the global names of a Python file.

        A Python file is run as `python path` runs it, with its folder on `sys.path`: do not run files that you do not
        trust. Its global names become keys, except modules, functions, classes, and names that begin with an
        underscore.

        Raises:
            LaunchError: no such file, another kind of file, one that cannot be read or does not run.
        """
        path = Path(path)
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise LaunchError(f'The config "{path}" is neither a .py nor a .toml file; give one of these, or a dict.')
        if not path.is_file():
            raise LaunchError(f'There is no config file "{path}" (looked for from {Path.cwd()}).')
        try:
            return cls(reader(path))
        except LaunchError as fault:
            raise LaunchError(f'"{path}": {fault}') from None


def _from_python(path: Path) -> dict[str, Any]:
    try:
        with _importing_from(path.resolve().parent):
            names = runpy.run_path(str(path), run_name="config")
    except Exception as fault:
        raise LaunchError(f"it does not run: {type(fault).__name__}: {fault}{_line(fault, path)}.") from fault
    return {name: value for name, value in names.items() if not name.startswith("_") and _is_setting(value)}


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise LaunchError(f"it is not valid TOML: {fault}.") from None


_READERS = MappingProxyType({".py": _from_python, ".toml": _from_toml})


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _is_setting(value: object) -> bool:
    """Return whether a value is neither code nor a `from __future__` feature."""
    code = inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)
    return not code and type(value).__module__ != "__future__"


def _line(fault: Exception, path: Path) -> str:
    """Return the line of the user's file that failed: the innermost that was running."""
    where, found = fault.__traceback__, fault.lineno if isinstance(fault, SyntaxError) else None
    while where is not None:
        if where.tb_frame.f_code.co_filename == str(path):
            found = where.tb_lineno
        where = where.tb_next
    return f" (line {found})" if found else ""


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, Section):
        return Section(value)
    if type(value) in (list, tuple):
        return type(value)(map(_nested, value))
    return Section(value) if type(value) is Section else value


def _meant(key: str) -> str | None:
    """Return the known key that differs from this one by case, underscores or a typo only.

    >>> [_meant(key) for key in ("paralel", "FP16", "NUM_MICROBATCHES", "gradient_acumulation")]
    ['parallel', 'fp16', 'NUM_MICRO_BATCHES', 'gradient_accumulation']
    >>> [_meant(key) for key in ("parallel", "fp8", "bf16", "torch_fsdp", "hidden_size", "clip_grad_norm_type")]
    [None, None, None, None, None, None]
    """
    if key in _KNOWN:
        return None
    letters = key.lower().replace("_", "").replace("-", "")
    if letters in _BY_LETTERS:
        return _BY_LETTERS[letters]
    long = {known.lower(): known for known in _READ if len(known) >= _LONG}
    close = difflib.get_close_matches(key.lower(), long, n=1, cutoff=_ALIKE)
    return long[close[0]] if close and _edits(key.lower(), close[0]) <= _APART else None


def _edits(a: str, b: str) -> int:
    """Return the number of letters to insert, delete or replace between two words (Levenshtein's distance)."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        last, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(row[j - 1] + 1, last[j] + 1, last[j - 1] + (letter != other)))
    return row[-1]


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"
