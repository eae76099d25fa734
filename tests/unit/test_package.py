"""The distribution: one name in the metadata, the errors and the documentation; licence, types and
version inside it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import overlord
from overlord.checks import DISTRIBUTION, pip_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(
            p
            for folder in ("src", "docs", "examples", "benchmarks", "tests")
            for p in (ROOT / folder).rglob("*")
            if p.is_file()
        ),
    ]
    if path.suffix in (".md", ".py", ".toml", "") and path != Path(__file__)
)
OTHER_PACKAGE = re.compile(
    r"pip install [^\n`]*?(?<![-\w/.])['\"]?overlord(?!-data)\b|(?<![-\w])overlord\\?\[[a-z]"
)


def names_the_other_package(text: str) -> list[str]:
    return [found.group() for found in OTHER_PACKAGE.finditer(text)]


def test_no_text_suggests_the_package_of_another_project() -> None:
    found = {
        str(path.relative_to(ROOT)): names_the_other_package(path.read_text(encoding="utf-8"))
        for path in TEXTS
    }
    assert len(found) > 500
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install overlord",
        "pip install 'overlord[ray]'",
        "needs overlord[zstd]",
        r"match='overlord\[image\]'",
    ],
)
def test_a_suggestion_of_the_other_package_is_found(text: str) -> None:
    assert names_the_other_package(text)


@pytest.mark.parametrize(
    "text",
    ["pip install overlord-data", "pip install 'overlord-data[ray]'", "pip install -e '.[text]'"],
)
def test_a_suggestion_of_this_distribution_is_left_alone(text: str) -> None:
    assert names_the_other_package(text) == []


def test_code_suggests_installations_through_one_helper() -> None:
    """The text is written once, so that it cannot drift from the metadata."""
    written = re.compile(r"""["'{ ]pip install '""")
    modules = [
        p
        for p in sorted((ROOT / "src").rglob("*.py"))
        if written.search(p.read_text(encoding="utf-8"))
    ]
    assert modules == [ROOT / "src" / "overlord" / "checks.py"]


def test_every_extra_that_the_code_suggests_exists() -> None:
    calls = [
        found
        for path in (ROOT / "src").rglob("*.py")
        for found in re.findall(r"pip_install\(([\"'][^)]*)\)", path.read_text(encoding="utf-8"))
    ]
    extras = {extra for call in calls for extra in re.findall(r"\w+", call)}
    assert len(extras) >= 6
    assert extras - set(PROJECT["optional-dependencies"]) == set()
    assert pip_install("text", "zstd") == "pip install 'overlord-data[text,zstd]'"


def test_the_metadata_names_the_distribution_its_licence_and_its_paper() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "overlord-data"
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert PROJECT["urls"]["Paper"] == "https://arxiv.org/abs/2504.09844"
    assert PROJECT["keywords"]
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "src" / "overlord" / "py.typed").is_file()
    assert (ROOT / "SECURITY.md").is_file()
    assert PROJECT["dynamic"] == ["version"], "the version is written once, in overlord/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", overlord.__version__)


def test_make_ray_runs_scenarios_that_exist() -> None:
    rows = re.findall(r"^ON_RAY \S+ (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    names = " ".join(rows).split()
    assert len(names) > 20
    assert [n for n in names if not (ROOT / f"tests/scenarios/test_{n}.py").is_file()] == []
