"""The documentation site: it builds, a browser opens it, it names everything, and its words are spelled."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

_BROWSERS = "chromium", "chromium-browser", "google-chrome", "chrome"
_PAGES = {
    "shardlib": ("sharding", "training", "transforms", "checkpoints", "errors"),
    "shardlib.optim": ("optimizers",),
    "shardlib.booster": ("boosters",),
    "shardlib.testing": ("testing",),
}
# Misspelled on purpose, in messages about what a user misspelled; and names.
_SPELLED = "paralel,froms,statics,modul"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    built = _run(sys.executable, "-m", "mkdocs", "build", "--site-dir", folder, NO_MKDOCS_2_WARNING="1")
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert [str(page) for page in sorted(pages) if not (site / page).is_file()] == []
    home = (site / "index.html").read_text()
    assert [str(page) for page in sorted(pages) if f'href="{page}"' not in home and page.name != "index.html"] == []
    assert not re.search(r'(?:src|href)="https?://(?!github\.com/shardlib)[^"]*\.(?:js|css|woff2?)"', home)


@pytest.mark.skipif(not any(map(shutil.which, _BROWSERS)), reason=f"none of {', '.join(_BROWSERS)} is installed")
@pytest.mark.parametrize(("page", "heading"), [("index.html", "shardlib"), ("reference/training.html", "Training")])
def test_a_browser_opens_it_without_a_network(site: Path, tmp_path: Path, page: str, heading: str):
    browser = next(filter(None, map(shutil.which, _BROWSERS)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    opened = _run(browser, *options, f"--user-data-dir={tmp_path}", (site / page).as_uri())
    assert re.search(rf"<h1[^>]*>{heading}", opened.stdout), opened.stderr
    assert re.search(r'<html[^>]*class="js', opened.stdout)  # its scripts ran


@pytest.mark.parametrize("module", _PAGES)
def test_the_reference_names_every_public_name(module: str):
    text = "\n".join((ROOT / "docs" / "reference" / f"{page}.md").read_text() for page in _PAGES[module])
    public = importlib.import_module(module)
    values = {name: getattr(public, name) for name in public.__all__}
    ours = [n for n, v in values.items() if inspect.ismodule(v) or v.__module__.startswith("shardlib")]
    assert [name for name in ours if f"::: {module}.{name}\n" not in text] == []


def test_pictures_are_what_the_code_draws():
    drawn = dict(runpy.run_path(str(ROOT / "docs/_site/pictures.py"))["pictures"]())
    kept = {path.name: path.read_text().rstrip("\n") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert kept == drawn


def test_words_are_spelled():
    texts = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "shardlib", "examples", "layouts"]
    found = _run(sys.executable, "-m", "codespell_lib", "--skip", "*.ipynb,*.gz,*.svg", "-L", _SPELLED, *texts)
    assert found.stdout == ""
