"""Tests and benchmarks use the public interface, or the accessors of ``tests/internals.py``."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import internals
from tests.internals import Seam

ROOT = Path(__file__).resolve().parents[2]
ACCESSORS = ROOT / "tests/internals.py"
# Names of Python, torch, torchtitan, Ray and Accelerate, and the methods of every named tuple.
OTHERS = {
    "_compiled_flex_attn",
    "_create_node_with_resources_and_labels",
    "_dynamo",
    "_exit",
    "_get_available_device_type",
    "_global_node",
    "_is_gil_enabled",
    "_make",
    "_new_shared",
    "_replace",
    "_reset_state",
    "_run_exitfuncs",
    "_shutdown_workers",
    "_sleep",
    "_utils",
}
# This table may only shrink. Functions are imported by name to be tested alone; classes are those
# that the simulation and the dry run replace a part of.
REMAINING = {
    ("benchmarks/journal.py", "session.internals"),
    ("benchmarks/recovery.py", "session.internals"),
    ("benchmarks/recovery.py", "session.internals.runtime._parts"),
    ("tests/torch/test_world.py", "_Board"),
    ("tests/unit/test_add_source.py", "_Rank"),
    ("tests/unit/test_connect.py", "_started"),
    ("tests/unit/test_graph_page.py", "_module"),
    ("tests/unit/test_payload_gather.py", "_fill_all"),
    ("tests/unit/test_profile.py", "_sum"),
    ("tests/unit/test_ray_private_folder.py", "_root"),
    ("tests/unit/test_report.py", "_ticks"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def is_own(node: ast.expr) -> bool:
    """Return whether an object is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def accesses(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes, imports and names in ``setattr`` or ``getattr`` calls."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attr) if not is_own(value):
                if is_private(attr) or attr == "internals":
                    yield ast.unparse(node)
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names if is_private(alias.name))
            case ast.Call(func=func, args=[owner, *_] as given) if not is_own(owner):
                if ast.unparse(func).endswith(("setattr", "getattr", "hasattr", "delattr")):
                    words = [a.value for a in given if isinstance(a, ast.Constant)]
                    named = [w.rpartition(".")[2] for w in words if isinstance(w, str)]
                    yield from (name for name in named if is_private(name))


@functools.cache
def found() -> set[tuple[str, str]]:
    paths = [p for folder in ("tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    return {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        if path != ACCESSORS
        for name in accesses(ast.parse(path.read_text()))
    }


def test_private_names_are_used_through_the_accessors_only() -> None:
    assert found() - REMAINING == set(), "use a public name, or an accessor of tests/internals.py"


def test_the_table_of_remaining_accesses_has_no_entry_that_is_gone() -> None:
    assert REMAINING - found() == set()


@pytest.mark.parametrize(
    "code",
    [
        "client._queue",
        "self.client._queue = 3",
        "patch.setattr(Client, '_queue', None)",
        "patch.setattr('overlord.client.client._queue', None)",
        "getattr(client, '_queue')",
        "from overlord.client.client import _queue",
    ],
)
def test_every_form_of_an_access_is_found(code: str) -> None:
    assert [name.rpartition(".")[2] for name in accesses(ast.parse(code))] == ["_queue"]


@pytest.mark.parametrize("code", ["self._queue", "super()._queue", "os._exit(1)", "x.__class__"])
def test_own_attributes_and_those_of_others_are_not_counted(code: str) -> None:
    assert list(accesses(ast.parse(code))) == []


SEAMS = {name: seam for name, seam in vars(internals).items() if isinstance(seam, Seam)}


@pytest.mark.parametrize("name", SEAMS)
def test_every_seam_names_an_attribute_that_exists(name: str) -> None:
    if ".ray." in SEAMS[name].owner and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    assert SEAMS[name].real is not None


def bases_of_the_package(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes of a module that have a base class of the package."""
    own = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overlord")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and own & {ast.unparse(base) for base in node.bases}:
            yield node


# The two interfaces that a simulated machine implements.
INTERFACES = {"Platform", "Connection"}


def replaced_constructors(tree: ast.Module) -> set[str]:
    """Return the subclasses of the package's classes that have a constructor of their own."""
    return {
        node.name
        for node in bases_of_the_package(tree)
        if not INTERFACES & {ast.unparse(base) for base in node.bases}
        and any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in node.body)
    }


def test_the_simulation_replaces_no_constructor_of_the_package() -> None:
    found = {
        (path.name, name)
        for path in (ROOT / "tests/simulation").rglob("*.py")
        for name in replaced_constructors(ast.parse(path.read_text()))
    }
    assert found == set(), "give the constructor a platform, an actor system or a storage"


def test_a_replaced_constructor_is_found() -> None:
    code = "from overlord.a import A\nclass B(A):\n    def __init__(self): ..."
    assert replaced_constructors(ast.parse(code)) == {"B"}
    assert replaced_constructors(ast.parse(code.replace("(A)", "(C)"))) == set()
    assert replaced_constructors(ast.parse(code.replace("__init__", "other"))) == set()
