"""An extension of mkdocstrings: examples that stand in a docstring without a heading are shown as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(
    r"(?:^>>> .*\n(?:^(?!\s*$).*(?:\n|\Z))*)(?:\n?^>>> .*\n?(?:^(?!\s*$).*(?:\n|\Z))*)*", re.MULTILINE
)


class Doctests(Extension):
    """Fences each paragraph that begins with `>>>`."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object, when it has been read."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
