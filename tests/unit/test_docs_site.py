"""The documentation site: it builds without warnings, needs no network, and has all of the API."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import overlord as ov
import overlord.torch as ot

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
EXTERNAL = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*"https?://')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_pages_load_nothing_from_a_network(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    outside = {
        match[0] for page in pages for match in EXTERNAL.finditer(page.read_text(encoding="utf-8"))
    }
    assert outside == set()


def test_links_of_built_pages_lead_to_built_pages(site: Path):
    broken = []
    for page in [site / "index.html", *site.glob("[a-qs-z]*/**/*.html")]:
        for target in re.findall(
            r'href="([^"#:]+\.(?:html|md|ipynb))(?:#[^"]*)?"', page.read_text()
        ):
            if not (page.parent / target).exists():
                broken.append((str(page.relative_to(site)), target))
    assert broken == []


def test_the_reference_has_every_public_name(site: Path):
    pages = "".join(p.read_text() for p in (site / "reference" / "api").glob("*.html"))
    modules = {"__version__", "cost", "schedule", "strategy", "torch"}
    names = {n for n in ov.__all__ if n not in modules}
    shown = set(re.findall(r'id="overlord\.(?:[\w.]+\.)?(\w+)"', pages))
    aliases = {"ClientPlaceTree", "register_schedule", "register_cost", "simulate", "Explanation"}
    assert sorted(names - shown - aliases) == []
    assert sorted(set(ot.__all__) - shown - {"adapters", "hdp", "recipes"}) == []


def pages_of(entry: object) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    match entry:
        case str():
            yield entry
        case dict():
            for value in entry.values():
                yield from pages_of(value)
        case list():
            for value in entry:
                yield from pages_of(value)


def test_every_page_is_in_the_navigation():
    listed = set(pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]))
    pages = {
        str(page.relative_to(DOCS))
        for suffix in ("md", "ipynb")
        for page in DOCS.rglob(f"*.{suffix}")
        if page.parent.name != "decisions"
    }
    assert listed == pages


def titles_of(entry: object) -> Iterator[str]:
    """Yield the titles of a part of the navigation."""
    match entry:
        case dict():
            for title, value in entry.items():
                yield title
                yield from titles_of(value)
        case list():
            for value in entry:
                yield from titles_of(value)


def texts_of_the_package() -> Iterator[tuple[str, str]]:
    """Yield the file and each text of the package that is neither a comment nor a docstring."""
    for path in sorted((ROOT / "src" / "overlord").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in docstrings:
                yield path.name, text


def test_messages_cite_pages_by_their_titles_in_the_navigation():
    """Users of the package have no file of ``docs``."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    titles, texts = set(titles_of(navigation)), list(texts_of_the_package())
    assert [found for found in texts if re.search(r"docs/\w+|\b\w+\.md\b", found[1])] == []
    cited = [
        title
        for _, text in texts
        for match in re.findall(r"[Dd]ocumentation[^:.]*: '([^']+)'|the page '([^']+)'", text)
        for title in match
        if title
    ]
    assert len(cited) >= 10
    assert [title for title in cited if title not in titles] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_print_what_they_show(notebook: Path, tmp_path: Path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    shown, run = (nbformat.read(notebook, 4) for _ in range(2))
    nbclient.NotebookClient(run, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    for before, after in zip(shown.cells, run.cells, strict=True):
        assert printed(before) == printed(after), before["source"]


def printed(cell: dict) -> str:
    """Return the text that a cell prints, without its log."""
    return "".join(o["text"] for o in cell.get("outputs", []) if o.get("name") == "stdout")


def test_messages_on_the_page_of_errors_are_those_of_the_package():
    page = (DOCS / "reference" / "errors-by-message.md").read_text()
    joined = "".join(p.read_text() for p in (ROOT / "src" / "overlord").rglob("*.py"))
    texts = re.sub(r"""["']\s*\n\s*f?["']""", "", joined)
    parts = [
        part
        for row in re.findall(r"^\| (.*?) \| ", page, re.MULTILINE)
        for part in re.findall(r"`([^`]+)`", row)
        if " " in part
    ]
    assert len(parts) > 30
    assert [part for part in parts if part not in texts] == []
