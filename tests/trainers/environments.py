"""Run the tests of every trainer in an environment of its own, and write the table of versions.

    python -m tests.trainers.environments [--envs FOLDER] [NAME ...]

An environment holds one trainer with its pins. Everything else comes from the environment of the
test suite, whose versions are pinned too. Environments are kept; rows of others stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
ENVS = ROOT / "build" / "trainers"
LIMIT_S = 3600.0
# Installed before a distribution that has no wheel: its build finds them in the environment.
BUILD = ("setuptools==80.9.0", "wheel==0.45.1")
CPU = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # builds of DeepSpeed
BEGIN, END = "<!-- trainers: written by make trainers -->", "<!-- end of trainers -->"
HEAD = "| trainer | version | Python | torch | tested on | ranks | result |\n|---|---|---|---|---|---|---|"
ROW = re.compile(r"^\| \[([\w .-]+)\]\(.*\|$", re.MULTILINE)


@dataclass(frozen=True)
class Trainer:
    """One trainer: its page, its distribution, its tests, and the pins of its environment."""

    page: str
    distribution: str
    test: str
    ranks: str = "1, 2"
    pins: tuple[str, ...] = ()  # none: the environment of the test suite has it
    built: bool = False  # whether the distribution has no wheel and is built here


LIGHT, HEAVY = "tests/trainers/test_light.py", "tests/trainers/test_heavy.py"
TRAINERS = {
    "Hugging Face Trainer": Trainer("huggingface", "transformers", f"{LIGHT}::test_huggingface"),
    "Accelerate": Trainer("accelerate", "accelerate", f"{LIGHT}::test_accelerate"),
    "DDP": Trainer("ddp", "torch", f"{LIGHT}::test_torch[ddp.md]"),
    "FSDP2 with DCP": Trainer("fsdp2", "torch", f"{LIGHT}::test_torch[fsdp2.md]"),
    "Lightning": Trainer("lightning", "lightning", f"{LIGHT}::test_lightning"),
    "Ray Train": Trainer("ray-train", "ray", "tests/trainers/test_ray.py"),
    "TRL SFTTrainer": Trainer(
        "trl", "trl", f"{HEAVY}::test_trl", pins=("trl==1.16.0", "datasets==5.2.0")
    ),
    "TRL DPOTrainer": Trainer(
        "trl-dpo", "trl", "tests/trainers/test_dpo.py", pins=("trl==1.16.0", "datasets==5.2.0")
    ),
    "torchtitan": Trainer(
        "torchtitan",
        "torchtitan",
        f"{HEAVY}::test_torchtitan",
        pins=("torchtitan==0.3.0", "triton==3.9.0"),
    ),
    "Megatron-Core": Trainer(
        "megatron",
        "megatron-core",
        f"{HEAVY}::test_megatron",
        ranks="8 (TP 2, PP 2, DP 2)",
        pins=("megatron-core==0.16.1",),
    ),
    "DeepSpeed": Trainer(
        "deepspeed",
        "deepspeed",
        f"{HEAVY}::test_deepspeed",
        pins=("deepspeed==0.19.8", "ninja==1.13.2"),
        built=True,
    ),
}


def environment(envs: Path, trainer: Trainer) -> Path:
    """Build the environment of a trainer, unless it is there; return its Python."""
    if not trainer.pins:
        return Path(sys.executable)
    folder, wanted = envs / trainer.distribution, "\n".join(trainer.pins)
    python, mark = folder / "bin" / "python", folder / ".pins"
    if not mark.exists() or mark.read_text() != wanted:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
        held = f"torch=={version_in(Path(sys.executable), 'torch').partition('+')[0]}"
        how = ["--no-build-isolation"] if trainer.built else ["--only-binary", ":all:"]
        install = [str(python), "-m", "pip", "install", "-q"]
        if trainer.built:
            subprocess.run([*install, *BUILD], check=True)
        command = [*install, *how, held, *trainer.pins]
        subprocess.run(command, check=True, env=os.environ | CPU)
        mark.write_text(wanted)
    return python


def version_in(python: Path, distribution: str) -> str:
    """Return the version of a distribution in an environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def tested(envs: Path, name: str) -> str:
    """Test one trainer in its environment; return its row."""
    trainer = TRAINERS[name]
    python, logs = environment(envs, trainer), ROOT / "build" / "trainers-logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OVERLORD_CACHE": str(ROOT / "build" / "cache"),
    }
    with (logs / f"{trainer.page}.log").open("w") as out:
        code = subprocess.run(
            [str(python), "-m", "pytest", "-q", trainer.test],
            cwd=ROOT,
            env=settings,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        ).returncode
    result = "passed" if code == 0 else f"failed, exit code {code}"
    cells = (
        f"[{name}](trainers/{trainer.page}.md)",
        version_in(python, trainer.distribution).partition("+")[0],
        ".".join(map(str, sys.version_info[:3])),
        version_in(python, "torch").partition("+")[0],
        date.today().isoformat(),
        trainer.ranks,
        result,
    )
    return f"| {' | '.join(cells)} |"


def known(page: str) -> dict[str, str]:
    """Return the rows of a page by trainer."""
    block = page[page.index(BEGIN) : page.index(END)]
    return {found[1]: found[0] for found in ROW.finditer(block)}


def written(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with these rows, in the order of ``TRAINERS``."""
    table = "\n".join([BEGIN, HEAD, *(rows[name] for name in TRAINERS if name in rows), END])
    return page[: page.index(BEGIN)] + table + page[page.index(END) + len(END) :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"pages: {json.dumps([*_pages()])}")
    parser.add_argument("--envs", type=Path, default=ENVS)
    args, failed = parser.parse_args(), False
    for name in [_pages()[page] for page in args.names] or list(TRAINERS):
        row = tested(args.envs, name)
        print(row, flush=True)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, {**known(page), name: row}), encoding="utf-8")
        failed = failed or "failed" in row
    sys.exit(1 if failed else 0)


def _pages() -> dict[str, str]:
    return {trainer.page: name for name, trainer in TRAINERS.items()}


if __name__ == "__main__":
    main()
