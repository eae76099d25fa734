"""Pages of the site for files that documentation links to outside ``docs``.

The pages of ``docs`` link to examples, tests, benchmarks and pages at the root of the repository.
These hooks add each of them to the site, so that it is complete without the repository. A linked
folder, also one of ``docs``, becomes a page that lists its files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "repository"  # of the site, for files outside docs
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
SHOWN = (".py", ".md", ".ipynb")  # files that the page of a folder lists
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def _target(page: Path, link: str) -> Path | None:
    """Return the file outside docs to which a link of a page leads, if it does."""
    if re.match(r"[a-z]+:", link):
        return None
    path = Path(os.path.normpath(page.parent / link))
    outside = not path.is_relative_to(DOCS) and path.is_relative_to(ROOT)
    listed = path.is_dir() and not (path / "README.md").exists()
    return path if (outside or listed) and path.exists() else None


def _name(path: Path) -> str:
    """Return the name of a file's page within the site."""
    if path.is_relative_to(DOCS):
        return f"{path.relative_to(DOCS).as_posix()}/index.md"
    inside = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{FOLDER}/{inside}/index.md"
    if path.suffix == ".md" or path.suffix in (".svg", ".png"):
        return f"{FOLDER}/{inside}"
    return f"{FOLDER}/{inside}.md"


def _text(path: Path) -> str:
    """Return the Markdown of a file's page."""
    inside = path.relative_to(ROOT).as_posix()
    hidden = "---\nsearch: {exclude: true}\n---\n"  # the search finds documentation, not code
    if path.is_dir():
        rows = sorted(p for p in path.iterdir() if p.suffix in SHOWN and p.is_file())
        lines = [f"- [{p.name}]({p.name})" for p in rows if p.name != "__init__.py"]
        return f"{hidden}# {inside}\n\n" + "\n".join(lines) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return hidden + text
    language = LANGUAGES.get(path.suffix, "text")
    return f"{hidden}# {inside}\n\n````{language}\n{text}````\n"


def _links(page: Path, text: str) -> list[Path]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = (_target(page, match[2]) for match in LINK.finditer(prose))
    return [path for path in found if path is not None]


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add a page for each file outside docs to which a page links, also indirectly."""
    open_pages = [
        (Path(f.abs_src_path), None) for f in files.documentation_pages() if f.abs_src_path
    ]
    seen: set[Path] = set()
    while open_pages:
        page, text = open_pages.pop()
        for path in _links(page, page.read_text(encoding="utf-8") if text is None else text):
            if path in seen:
                continue
            seen.add(path)
            if path.suffix in (".svg", ".png"):
                files.append(File.generated(config, _name(path), content=path.read_bytes()))
                continue
            body = _text(path)
            files.append(File.generated(config, _name(path), content=body))
            where = path / "index.md" if path.is_dir() else path
            open_pages.append((where, body))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links to files outside docs to their pages in the site."""
    name = page.file.src_uri
    inside = name.removeprefix(f"{FOLDER}/")
    if name.startswith(f"{FOLDER}/"):
        where = ROOT / (inside if (ROOT / inside).exists() else inside.removesuffix(".md"))
    else:
        where = DOCS / name

    def rewritten(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[2]):
            return match[0]
        path = Path(os.path.normpath(where.parent / match[2]))
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]
        at = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else _name(path)
        if path.is_relative_to(DOCS) and path.is_dir():
            at += "/index.md"
        return f"{match[1]}{os.path.relpath(at, Path(name).parent)}{match[3] or ''})"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Point links of notebooks to pages; the plugin keeps their names of files."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'(href="(?![a-z]+:)[^"#]*)\.(?:md|ipynb)(#[^"]*)?"', r'\1.html\2"', html)
