"""Names, versions and errors of the command line: all that `--help`, `--version` and completion need, without torch."""

from __future__ import annotations

import argparse
import importlib.metadata

from shardlib.errors import ShardlibError

__all__ = ["FORMS", "MISSING", "UsageError", "cause_of", "positive", "version"]

FORMS = (
    "module:factory, file.py:factory or package.module.Class (called without arguments), a Hugging Face folder or "
    "config.json, a .safetensors file, its .index.json, or a folder that holds one, or a name such as llama-3-70b"
)
MISSING = "not installed"


class UsageError(ShardlibError):
    """The command line names something that is not there."""


def positive(text: str) -> int:
    """Read an option that is a number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of 1 or more')
    return int(text)


def version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def cause_of(error: BaseException) -> str:
    """Describe in one line what began a failed import, and what to do where that is known.

    >>> try:
    ...     raise ImportError("no such model") from RuntimeError("operator torchvision::nms does not exist")
    ... except ImportError as error:
    ...     print(cause_of(error).partition(". ")[0])
    RuntimeError: operator torchvision::nms does not exist
    """
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
    if "torchvision" not in said:
        return said
    return (
        f"{said}. This torchvision was built for another torch. Install both from one index, as in `pip install "
        "--index-url https://download.pytorch.org/whl/cpu torch torchvision`, or uninstall torchvision"
    )
