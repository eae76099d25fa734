"""Decisions are made without clocks, files, threads or frameworks: looked up in a fresh
interpreter, and in the text of the files.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SRC / "overlord"

VALUES = (
    "batch_by_step",
    "batch_ramp",
    "batch_rules",
    "checks",
    "content",
    "documents",
    "errors",
    "given_columns",
    "hashing",
    "late_binding",
    "mesh",
    "mesh_text",
    "ring",
    "sample",
    "token_parts",
)
CORES = (
    "loader.loader",
    "loader.partial_epoch",
    "loader.samples",
    "constructor.assembler",
    "constructor.compact",
    "constructor.pack",
    "constructor.pieces",
    "constructor.exclusions",
    "constructor.rank_views",
    "constructor.runs",
    "constructor.sample_documents",
    "cluster.placement",
    "cluster.plan_router",
    "cluster.supervisor",
    "journal.checkpoint",
    "journal.replay",
    "ray.node_choice",
    "transforms.chat_messages",
    "transforms.chat_spans",
    "transforms.chat_text",
)
PURE_PACKAGES = ("job", "messages", "plan", "planning", "scaling")
PURE = sorted(
    [
        *VALUES,
        *CORES,
        *(
            ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
            for package in PURE_PACKAGES
            for p in (PACKAGE / package).rglob("*.py")
            if p.read_text()
        ),
    ]
)

# Not `threading`: numpy may bring it in. That our own files do not is what the look into their text
# is for.
IMPURE = (
    "pyarrow",
    "torch",
    "ray",
    "PIL",
    "tokenizers",
    "msgspec",
    "yaml",
    "asyncio",
    "socket",
    "multiprocessing",
    "subprocess",
)
# what a decision may need of the standard library: no clock, no disk, no chance, no threads
STANDARD = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "struct",
    "types",
    "typing",
}
# None of these opens anything but the page of a graph, which is written when asked for.
EXCEPTIONS = {
    "checks": {"inspect"},  # for the signature of a user's function, no more
    "job.job": {"os.PathLike", "overlord.sources.python_objects", "overlord.uris"},
    "job.source_uri": {"os.PathLike", "overlord.uris"},
    "mesh": {"os.environ"},  # what ``from_env`` reads when it is given nothing
    "planning.graph.page": {"html.escape", "importlib.resources.files", "os"},
    "planning.graph.page_data": {"base64.b64encode"},
    "ray.node_choice": {"re"},
}


def test_one_file_imports_ray() -> None:
    modules = [
        ".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")
    ]
    assert [m for m in modules if any(name.split(".")[0] == "ray" for name in imports_of(m))] == [
        "ray.ray_import"
    ]


def loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of the modules a fresh interpreter holds after running the code."""
    tail = f"\nimport json, sys\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code + tail],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def imports_of(module: str) -> list[str]:
    """Full names that a file imports anywhere, those for type checkers only left out."""
    path = PACKAGE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    for_checkers = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    ]
    skipped = {id(n) for top in for_checkers for n in ast.walk(top)}
    found: list[str] = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_allowed(module: str, name: str) -> bool:
    if name in EXCEPTIONS.get(module, ()) or name.rpartition(".")[0] in EXCEPTIONS.get(module, ()):
        return True
    if name.startswith("overlord."):
        return any(f"overlord.{p}" in (name, name.rpartition(".")[0]) for p in PURE)
    return name.partition(".")[0] in STANDARD | {"numpy"}


def test_pure_modules_bring_in_no_file_format_no_framework_and_no_thread():
    code = "import importlib\n" + "\n".join(
        f"importlib.import_module('overlord.{m}')" for m in PURE
    )
    assert loaded_after(code, IMPURE) == []


def test_the_look_into_a_fresh_interpreter_can_fail():
    assert loaded_after("import overlord.sources.parquet", ("pyarrow", "torch")) == ["pyarrow"]


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_only_numpy_pure_modules_and_what_has_no_effect(module: str):
    assert [name for name in imports_of(module) if not is_allowed(module, name)] == []


def test_the_look_into_the_text_can_fail():
    assert not is_allowed("job.job", "os.path")
    assert not is_allowed("loader.loader", "time")
    assert not is_allowed("loader.loader", "overlord.loader.reader.SourceReader")
    assert "time" in imports_of("loader.reader")


def test_importing_the_package_costs_a_trainer_nothing_it_does_not_use():
    heavy = ("numpy", "pyarrow", "torch", "tokenizers", "yaml", "msgspec")
    assert loaded_after("import overlord", heavy) == []
    assert loaded_after("import overlord\noverlord.Job", heavy) == ["numpy"]


def test_every_public_name_can_be_had():
    names = loaded_after(
        "import overlord\n[getattr(overlord, n) for n in overlord.__all__]",
        ("overlord", "torch", "ray"),
    )
    assert names == ["overlord"]


DANGEROUS = {
    "unpickling": r"\bpickle\.loads?\b|\bUnpickler\b|\bpickle\s+import\b|\.recv\(\)|allow_pickle\s*=\s*True|\bmarshal\b|\bshelve\b",
    "running text": r"(?<![\w.])(eval|exec|compile|__import__)\(",
    "unsafe YAML": r"yaml\.(load|load_all|unsafe_load|full_load)\(|yaml\.(Unsafe|Full)?Loader\b",
    "torch files": r"torch\.load\(",
    "a shell": r"os\.(system|popen)\(|shell\s*=\s*True",
}


@pytest.mark.parametrize("what", DANGEROUS)
def test_data_is_only_data(what: str):
    """Nothing read from a file or a pipe is executed: the words that would do it do not occur."""
    pattern = re.compile(DANGEROUS[what])
    lines = [
        (path, i, line)
        for path in sorted(PACKAGE.rglob("*.py"))
        for i, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert [
        f"{p.relative_to(SRC)}:{i}: {line.strip()}" for p, i, line in lines if pattern.search(line)
    ] == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("unpickling", "x = pickle.load(file)"),
        ("unpickling", "np.load(path, allow_pickle=True)"),
        ("running text", "y = eval(text)"),
        ("unsafe YAML", "yaml.load(text, Loader=yaml.Loader)"),
        ("torch files", "torch.load(path)"),
        ("a shell", "os.system(command)"),
    ],
)
def test_the_search_for_dangerous_words_finds_them(what: str, line: str):
    assert re.search(DANGEROUS[what], line)


@pytest.mark.parametrize(
    "core", ["planning.planner:Planner", "loader.loader:Loader", "constructor.assembler:Assembler"]
)
def test_the_cores_of_the_stream_receive_no_time(core: str):
    handle = pkgutil.resolve_name(f"overlord.{core}").handle
    assert list(inspect.signature(handle).parameters) == ["self", "event"]
