"""Functions and values on their way to ranks and back.

What a rank can import travels as its name. What it cannot - lambdas, closures, everything of `__main__` and of test
files that are not on `sys.path` - travels by value, with cloudpickle.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["dump", "dump_call", "load", "name_of", "why_not", "without_main"]

try:
    import cloudpickle
except ImportError:  # the extra `testing` brings it; without it everything travels by name
    cloudpickle = None


def load(data: bytes) -> Any:
    return pickle.loads(data)


def dump(value: Any, *, by_value_module: str = "") -> bytes:
    """Serialize a value to bytes for `load`, here or on a rank. Functions of the module `by_value_module` go by
    value."""
    if cloudpickle is None:
        return pickle.dumps(value)
    buffer = io.BytesIO()
    pickler = _pickler(buffer, by_value_module)
    try:
        pickler.dump(value)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Let a process that is started inside not run the script of this one again, as multiprocessing would.

    So that a script needs no `if __name__ == "__main__":`. What of `__main__` the process needs travels by value, if
    cloudpickle is there.
    """
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {}
    if cloudpickle is not None:
        kept = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        main.update(kept)


def dump_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, by_value: bool = False
) -> bytes:
    """Serialize a call; `by_value` sends the function with the changes that were made to its module here.

    Raises:
        TypeError: one of the three cannot be sent; the message says which argument.
    """
    try:
        return dump((fn, tuple(args), dict(kwargs)), by_value_module=fn.__module__ if by_value else "")
    except Exception as error:
        raise TypeError(_culprit(fn, args, kwargs, error)) from error


def _culprit(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    named = {"the function itself": fn}
    named |= {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f'argument "{name}"': value for name, value in kwargs.items()}
    for what, value in named.items():
        if reason := why_not(value):
            kind = "" if value is fn else f", a {type(value).__name__},"
            return (
                f"{name_of(fn)} cannot be sent to the ranks: {what}{kind} cannot be pickled ({reason}). "
                "Make it inside of the function, on each rank, or give it __getstate__ and __setstate__."
            )
    return f"{name_of(fn)} cannot be sent to the ranks with its arguments: {error}"


def why_not(value: Any) -> str:
    """Return why a value cannot be sent, or an empty string."""
    try:
        dump(value)
    except Exception as error:
        hint = "; install cloudpickle to send functions by value" if cloudpickle is None else ""
        return f"{type(error).__name__}: {error}{hint}"
    return ""


def name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _pickler(buffer: io.BytesIO, by_value_module: str) -> Any:
    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined, misc]
        """Sends by value what the ranks cannot import."""

        by_value: list[ModuleType] = []  # noqa: RUF012  one class a pickler

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, FunctionType | type):
                module = sys.modules.get(getattr(value, "__module__", None) or "")
                if module is None or module in self.by_value:
                    pass
                elif module.__name__ == by_value_module or not _importable(module):
                    cloudpickle.register_pickle_by_value(module)
                    self.by_value.append(module)
            return super().reducer_override(value)

    return Pickler(buffer)


def _importable(module: ModuleType) -> bool:
    """Return whether a rank, with this process's `sys.path`, imports the same module by its name."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":
        return True  # cloudpickle sends it by value by itself
    return file is None or _found(module.__name__, file, tuple(sys.path))


@lru_cache(maxsize=4096)
def _found(name: str, file: str, path: tuple[str, ...]) -> bool:
    """Look a module up afresh, one package after another: `find_spec` would only say that it is imported here."""
    search, origin = None, None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        dotted = ".".join(parts[:end])
        spec = next((s for finder in sys.meta_path if (s := finder.find_spec(dotted, search)) is not None), None)
        if spec is None:
            return False
        search, origin = spec.submodule_search_locations, spec.origin
    return origin == file
