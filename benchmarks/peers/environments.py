"""Interpreters of the compared loaders.

A loader whose pinned versions the running interpreter has is run by it. Each other one has an
environment of its own, which shares all other packages with the running interpreter. Environments
are kept. Without network, set ``PIP_NO_INDEX=1`` and ``PIP_FIND_LINKS`` to a folder of wheels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from peers.table import Peer

LIMIT_S = 1200.0
MARK = "pins.txt"  # in a complete environment


class NotInstallable(RuntimeError):
    """pip could not install a loader; the message has pip's error."""


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "overlord-benchmark-peers"


def has_pins(peer: Peer) -> bool:
    """Return whether the running interpreter has the pinned versions of a loader."""
    return all(installed(*pin.split("==")) for pin in peer.pins)


def installed(name: str, version: str) -> bool:
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def present(peer: Peer, envs: Path) -> str | None:
    """Return the interpreter that has a loader, or None."""
    if has_pins(peer):
        return sys.executable
    mark = envs / peer.distribution / MARK
    there = mark.exists() and mark.read_text() == "\n".join(peer.pins)
    return str(mark.parent / "bin" / "python") if there else None


def interpreter_of(peer: Peer, envs: Path) -> str:
    """Return the interpreter that has a loader; build its environment if there is none yet."""
    if (found := present(peer, envs)) is not None:
        return found
    folder = envs / peer.distribution
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
    (own,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("-packages")]
    (own / "shared.pth").write_text("\n".join(shared))
    # The version of torch is held: no loader may bring another build.
    held = [f"torch=={metadata.version('torch').partition('+')[0]}"] if _has_torch() else []
    how = ["--only-binary", ":all:", *([] if peer.requirements else ["--no-deps"])]
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", *how, *held, *peer.pins)
    (folder / MARK).write_text("\n".join(peer.pins))
    return str(python)


def version_in(python: str, distribution: str) -> str:
    """Return the version of a distribution that an interpreter has."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _has_torch() -> bool:
    try:
        return bool(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        said = errors[-1] if errors else done.stderr[-500:] or f"exit code {done.returncode}"
        raise NotInstallable(said)
