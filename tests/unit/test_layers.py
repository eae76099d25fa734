"""Imports point downwards: every package imports only packages below it, lazy and typing imports
included.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "overlord"

# Packages from the bottom to the top. A package may import those listed for it, or, without a list,
# every package above its own line. "values" are the modules next to the packages.
LAYERS: dict[str, str | None] = {
    "values": "",
    "plan": "values",
    "messages": "values plan",
    "sources": "values",
    "job": "values plan sources",
    "planning": "values plan messages job",
    "scaling": "values job planning",
    "process": "values",
    "transport": "values plan messages",
    "concurrency": "values process transport",
    "rpc": "values messages transport concurrency process",
    "transforms": "values job sources process rpc",
    "loader": "values plan messages job sources transforms process concurrency",
    "constructor": "values plan messages job planning transforms process concurrency",
    "setup": None,
    "ray": None,
    "journal": None,
    "client": "values plan messages constructor transport",
    "serving": "values plan messages constructor transport concurrency process client rpc",
    "cluster": None,
    "observe": None,
    "session": None,
    "dryrun": None,
    "jobfile": None,
    "torch": None,
    "preview": None,
    "discovery": None,
    "facade": None,
    "drill": None,
    "demo": None,
    "cli": None,
}
FACADE = ("overlord", "overlord.__main__")
# Edges that the redesign has still to remove. This set may only shrink.
REMAINING: set[tuple[str, str]] = set()


def modules() -> dict[str, Path]:
    root = PACKAGE.parent
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


MODULES = modules()


def package_of(module: str) -> str:
    if module in FACADE:
        return "facade"
    parts = module.split(".")
    return parts[1] if (PACKAGE / parts[1]).is_dir() else "values"


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Modules of ours that any import statement names, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "overlord"
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its package"
            base = node.module or ""
            if base.split(".")[0] == "overlord":
                full = [f"{base}.{a.name}" for a in node.names]
                yield from ((node.lineno, name if name in MODULES else base) for name in full)


def allowed(package: str) -> set[str]:
    order = list(LAYERS)
    listed = LAYERS[package]
    if listed is None:
        return {package, *order[: order.index(package)]}
    return {package, *listed.split()}


def wrong_imports(module: str, tree: ast.AST) -> list[tuple[str, str, str]]:
    package = package_of(module)
    return [
        (package, package_of(name), f"{module}:{line} imports {name}")
        for line, name in imports_of(tree)
        if package_of(name) not in allowed(package)
    ]


@functools.cache
def found() -> list[tuple[str, str, str]]:
    return [
        edge
        for module, path in MODULES.items()
        if package_of(module) != "facade"
        for edge in wrong_imports(module, ast.parse(path.read_text()))
    ]


def test_every_import_points_downwards() -> None:
    assert [text for a, b, text in found() if (a, b) not in REMAINING] == []


def test_the_list_of_remaining_edges_holds_no_edge_that_is_gone() -> None:
    assert {(a, b) for a, b, _ in found()} >= REMAINING


def test_every_package_has_its_place() -> None:
    here = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert here == set(LAYERS) - {"values", "facade"}


def test_modules_next_to_the_packages_import_no_package() -> None:
    values = [m for m in MODULES if package_of(m) == "values"]
    edges = [e for m in values for e in wrong_imports(m, ast.parse(MODULES[m].read_text()))]
    assert edges == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("overlord.planning.draw", "from overlord.session.session import Session"),
        ("overlord.sources.index", "def f():\n    from overlord.loader import reader"),
        (
            "overlord.client.client",
            "if TYPE_CHECKING:\n    from overlord.session.session import Session",
        ),
        ("overlord.errors", "import overlord.plan.plan"),
    ],
)
def test_an_import_upwards_is_found_wherever_it_stands(module: str, text: str) -> None:
    assert len(wrong_imports(module, ast.parse(text))) == 1
