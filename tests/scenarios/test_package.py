"""The built distribution in an environment that holds its declared dependencies and nothing
else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import overlord

pytest.importorskip("build", reason="python -m build is not installed: pip install -e '.[test]'")
pytest.importorskip(
    "hatchling", reason="the build backend is not installed: pip install -e '.[test]'"
)
from packaging.metadata import Metadata, parse_email
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NAME = f"overlord_data-{overlord.__version__}"


def run(*command: object, cwd: Path, **env: str) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**kept, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        out,
        ROOT,
        cwd=out,
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )
    return out


def required(built: Path) -> list[str]:
    """The distributions that the wheel declares without extras, and theirs."""
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        raw = parse_email(wheel.read(f"{NAME}.dist-info/METADATA"))[0]
    waiting = list(Metadata.from_raw(raw).requires_dist or [])
    found: dict[str, None] = {}
    while waiting:
        wanted = waiting.pop()
        if (
            wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        ) and wanted.name not in found:
            found[wanted.name] = None
            waiting += [Requirement(text) for text in metadata.requires(wanted.name) or []]
    return list(found)


def link_dependencies(names: list[str], folder: Path) -> None:
    """Link what is installed here of these distributions, so that nothing else can be imported."""
    folder.mkdir()
    for name in names:
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            at = folder / top
            if not at.exists():
                at.symlink_to(Path(str(metadata.distribution(name).locate_file(top))))


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh virtual environment with the wheel, without extras."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    wheel = built / f"{NAME}-py3-none-any.whl"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    link_dependencies(required(built), folder / "dependencies")
    (site,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
    (site / "dependencies.pth").write_text(f"{folder / 'dependencies'}\n")
    return programs


def test_the_wheel_holds_the_package_its_types_and_its_licence(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {
        "overlord/py.typed",
        "overlord/planning/graph/assets/graph.html",
        f"{NAME}.dist-info/licenses/LICENSE",
    } <= names
    assert {name.split("/")[0] for name in names} == {"overlord", f"{NAME}.dist-info"}
    assert {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")} <= names


def test_the_source_distribution_holds_what_both_commands_of_the_readme_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "pyproject.toml",
        "Makefile",
        "README.md",
        "LICENSE",
        "SECURITY.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ):
        assert wanted in names
    for folder in ("src", "tests", "benchmarks", "examples", "docs"):
        here = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*.py")}
        assert here - names == set()
    assert [name for name in names if name.startswith((".venv", "build/", ".git/"))] == []


def test_the_clean_environment_holds_no_extra(environment: Path, tmp_path: Path) -> None:
    tried = ("tokenizers", "zstandard", "torch", "ray", "PIL", "obstore", "numpy", "overlord")
    code = (
        f"from importlib.util import find_spec\nprint([name for name in {tried!r} if "
        "find_spec(name)])"
    )
    assert run(environment / "python", "-c", code, cwd=tmp_path) == "['numpy', 'overlord']\n"
    where = run(
        environment / "python", "-c", "import overlord; print(overlord.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(environment.parent))


@pytest.mark.timeout(250)
def test_the_demonstration_runs_from_the_wheel_without_extras(
    environment: Path, tmp_path: Path
) -> None:
    said = run(
        environment / "overlord",
        "demo",
        "--rows",
        "60",
        "--steps",
        "6",
        cwd=tmp_path,
        OVERLORD_CACHE=str(tmp_path / "cache"),
    )
    assert "pip install 'overlord-data[text,zstd]' adds both" in " ".join(said.split())
    assert (tmp_path / "overlord-demo" / "report.html").is_file()
    assert (
        run(environment / "overlord", "--version", cwd=tmp_path)
        == f"overlord, version {overlord.__version__}\n"
    )
