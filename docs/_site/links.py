"""A hook of mkdocs: links from pages to files of the repository that are not pages lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\()(\.\./[^)\s#]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite what leads out of docs/: `../layouts` on a page becomes a URL."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def url(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[0] if path.startswith("docs/") else f"{match[1]}{config.repo_url}/blob/main/{path}"

    return _LINK.sub(url, markdown)
