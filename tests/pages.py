"""Documents as their readers follow them: the files that a page shows, then its shell lines, in an empty folder.

A page's Python blocks are one script, `train.py`; a block of any language with a title, as ```` ```python
title="model.py" ````, is a part of the file of that name. A block of `sh` is lines to type, and a block of `text` right
after it is what they print: each `...` there stands for anything. Where a page says nothing, four ranks run `train.py`.

Most lines run in this process and on its ranks, as if they were typed: with their arguments, output and exit code.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.cli import main
from shardlib.testing import shared_pool
from tests.house.source import ROOT
from tests.main_on_ranks import forget, imports_of, run_script
from tests.scripts import run_shell
from tests.torchvision_on_cpu import let_torchvision_in

# What their libraries need is in the environment of `make test-hosts`, and `tests/audit/hosts` follows them there.
OF_HOSTS = ("how-to/audit-deepspeed.md", "how-to/audit-torchtitan.md")
# The same of `make test-vllm`, and `tests/vllm`.
OF_VLLM = ("how-to/vllm.md", "how-to/reinforcement-learning.md")

_FENCED = re.compile(r"^```(\w*)(?: +title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HERE = (
    "plan",
    "check",
    "explain",
    "init",
    "migrate",
    "prove",
    "audit",
    "tune",
    "doctor",
    "calibrate",
)  # on this process, and the ranks that it has
_RANKS = 4  # that a line has at most
_EXITS = re.compile(r"#.*exit code (\d+)")


class Lines(NamedTuple):
    """Shell lines, and what they print where the page shows it."""

    lines: tuple[str, ...]
    printed: str | None = None


class Page(NamedTuple):
    """Files that a reader of a page writes, and the lines that they type then."""

    files: dict[str, str]
    shell: list[Lines]


def read_page(document: Path) -> Page:
    """Take a page apart."""
    files: dict[str, list[str]] = defaultdict(list)
    shell: list[Lines] = []
    follows = False  # whether the block before was of shell lines
    for language, title, body in _FENCED.findall(document.read_text()):
        if title or language == "python":
            files[title or "train.py"].append(body)
        elif language == "sh":
            shell.append(Lines(tuple(line.strip() for line in body.splitlines() if line.strip())))
        elif language == "text" and follows:
            shell[-1] = shell[-1]._replace(printed=body)
        follows = language == "sh" and not title
    if "train.py" in files and not any("train.py" in line for block in shell for line in block.lines):
        shell.append(Lines(("torchrun --nproc_per_node 4 train.py",)))
    return Page({name: "\n".join(bodies) for name, bodies in files.items()}, shell)


def follow(page: Page, folder: Path, *, anew: bool = False) -> None:
    """Write a page's files into a folder and type its lines there; what they print is what the page shows.

    `folder` is where this process is, and its ranks with it. Lines that run anew have no part of this process: they are
    given to a shell.
    """
    for name, body in page.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)
    for block in page.shell:
        typing = partial(run_shell, library=ROOT) if anew else _type
        printed = "".join(typing(line, folder) for line in block.lines)
        if block.printed is not None:
            assert _shows(block.printed, printed), (
                f"{block.lines} printed\n{printed}\nand the page shows\n{block.printed}"
            )


def _shows(shown: str, printed: str) -> bool:
    """Return whether the printed text contains what a page shows, however words are spaced.

    >>> _shows("loss ...", "loss 0.5"), _shows("b\\nc", "a\\nb  c\\nd"), _shows("a d", "a b d")
    (True, True, False)
    >>> _shows("It is done.", "It is done.\\nBye"), _shows("... c ... a", "a b c"), _shows("It is done.", "It is done")
    (True, False, False)
    """
    want, got = (" ".join(text.split()) for text in (shown, printed))
    at = 0
    for part in want.split("..."):
        found = got.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _type(line: str, folder: Path) -> str:
    """Return what a line prints. It ends well, or as its remark says: `# exit code 1`.

    Where it ends badly, its ranks are torchrun's own and not those of the pool.
    """
    expected = int(said[1]) if (said := _EXITS.search(line)) else 0
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun" and not expected:
        return _torchrun(words[1:], folder)
    if run := _in_this_process(words, folder):
        code, printed = _run_here(run, folder)
        assert code == expected, f"{line}: exit code {code}\n{printed}"
        return printed
    if expected:
        line = f"code=0; {line.partition('#')[0]} 2>&1 || code=$?; test $code = {expected}"
    return run_shell(line, folder, library=ROOT)


def _in_this_process(words: list[str], folder: Path) -> Callable[[], Any] | None:
    """Return how to run a line without a new process, which would import everything again; None where it needs one."""
    scripts = [(folder / word).read_text() for word in words[1:] if word.endswith(".py")]
    if {">", "|"} & set(words) or any(map(_needs_a_process, scripts)):
        return None
    if words[0] == "shardlib" and words[1] in _HERE:
        return partial(main, words[1:])
    if words[0] == "pytest":
        words = ["python", "-m", *words]
    if words[:2] == ["python", "-m"]:
        return partial(_as_main, words[2:], partial(runpy.run_module, alter_sys=True))
    if words[0] == "python":
        return partial(_as_main, words[1:], runpy.run_path)
    return None


def _needs_a_process(script: str) -> bool:
    """Return whether a script uses JAX, whose devices are a process's, or the plugin, which counts its ranks and ends
    them."""
    return "import jax" in script or "mark.shardlib" in script


def _as_main(words: list[str], run: Callable[..., Any]) -> None:
    before, sys.argv = sys.argv, words
    try:
        with redirect_stderr(StringIO()):  # where progress is drawn
            run(words[0], run_name="__main__")
    finally:
        sys.argv = before


def _run_here(run: Callable[[], Any], folder: Path) -> tuple[int, str]:
    """Return the exit code and what is printed; what it imports from the folder is forgotten here and on ranks."""
    let_torchvision_in()  # transformers imports it by the way
    ranks = shared_pool(_RANKS)
    ranks.run(let_torchvision_in)
    printed = StringIO()
    with imports_of(folder), redirect_stdout(printed), redirect_stderr(printed):
        try:
            code = run()
        except SystemExit as end:
            code = end.code
    ranks.run(forget, folder)
    return int(code or 0), printed.getvalue()


def _torchrun(words: list[str], folder: Path) -> str:
    assert words[0] == "--nproc_per_node", f"torchrun {shlex.join(words)}: the number of processes comes first here"
    printed = run_script(folder / words[2], *words[3:], processes=int(words[1]))
    return printed.out + printed.err
