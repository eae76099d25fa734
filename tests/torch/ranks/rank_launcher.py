"""Worlds of torch processes, from pytest: one start for many named checks, a hard deadline, all
that was said shown on failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 260.0  # for a whole world; nothing that goes well takes a quarter of it
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class World:
    """What a world of ranks did: of every check "ok", or what went wrong first."""

    code: int
    log: str
    ranks: dict[int, dict[str, str]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, check: str) -> str:
        said = [done.get(check, "") for done in self.ranks.values()]
        wrong = [words for words in said if words and not words.startswith("ok")]
        if wrong:
            return min(
                wrong, key=lambda words: "Connection" in words or "ActorLost" in words
            )  # not those who lost a peer by it
        return (
            "ok"
            if said and all(said)
            else f"it was not done on all ranks; exit codes {self.codes}\n{self.log[-6000:]}"
        )


def start(
    world: int, module: str, out: Path, *, seconds: float = SECONDS, torchrun: bool = False
) -> World:
    """Runs a module's checks on so many ranks, and waits for all of them."""
    environ = {
        **os.environ,
        **ONE_THREAD,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OVERLORD_CACHE": str(out / "cache"),
    }
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        environ.pop(name, None)
    program = [
        sys.executable,
        "-m",
        "tests.torch.ranks.start",
        str(world),
        module,
        str(out),
        str(seconds),
    ]
    if torchrun:
        program = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
            "-m",
            "tests.torch.ranks.start",
            module,
            str(out),
            str(seconds),
        ]
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=seconds + 10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: the ranks too
        log, _ = process.communicate()
    found = {
        int(p.stem.removeprefix("rank")): json.loads(p.read_text()) for p in out.glob("rank*.json")
    }
    said = json.loads((out / "codes.json").read_text()) if (out / "codes.json").exists() else {}
    codes = {int(rank): code for rank, code in said.items()}
    return World(process.returncode, log, {r: found.get(r, {}) for r in range(world)}, codes)


class Worlds:
    """Each world is started once, by the first test that asks for it: by forks, or, where its size
    is ``torchrun``, by that, with which every rank loads torch for itself.
    """

    def __init__(self, module: str, folder: Path, *, torchrun: int = 0):
        self._module, self._folder, self._torchrun, self._done = module, folder, torchrun, {}

    def __call__(self, world: int) -> World:
        if world not in self._done:
            out = self._folder / str(world)
            out.mkdir()
            self._done[world] = start(world, self._module, out, torchrun=world == self._torchrun)
        return self._done[world]

    def check(self, world: int, checks: Iterable[str]) -> None:
        """All in one test: were they shared out, every process that runs tests would start the
        world for its own.
        """
        wrong = {check: said for check in checks if (said := self(world)[check]) != "ok"}
        assert not wrong, "\n".join(f"{check}: {said}" for check, said in wrong.items())
