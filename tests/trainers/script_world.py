"""Run the script of a page on trainers, on one rank and on two, and record what it trained on.

    python -m tests.trainers.script_world docs/trainers/ddp.md OUT 1,2

One interpreter loads torch; each rank of each run is a fork of it. A run has a folder of its own
with the data of the page. The script is executed as it is on the page; ``Loader`` is replaced by a
subclass that records the items it delivers, balances by another strategy, and kills the process.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import overlord.torch.loader
from overlord.client.world import world_here
from overlord.hashing import digest
from overlord.torch.tensor_step import TensorStep

VOCABULARY = 97
KILL_AT = 5  # the step at which every rank is killed; scripts save after steps 2, 5, 8, ...
LIMIT_S = 400.0


@dataclass(frozen=True)
class Run:
    """One run of a script: its ranks, its strategy, and whether it is killed."""

    name: str
    ranks: int
    strategy: str = "llm_balance"
    killed: bool = False
    folder: str = ""


def runs(worlds: Sequence[int]) -> list[Run]:
    """Return the runs of a script on worlds of these numbers of ranks, in order."""
    found = []
    for n in worlds:
        found += [
            Run(f"{n}-balanced", n),
            Run(f"{n}-vanilla", n, "vanilla"),
            Run(f"{n}-killed", n, killed=True, folder=f"{n}-resumed"),
            Run(f"{n}-resumed", n),
        ]
    return found


def write_data(folder: Path) -> None:
    """Write documents of very different lengths for training and validation."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", 400), ("valid", 37)):
        chance = random.Random(name)
        lines = []
        for _ in range(rows):
            start, n = chance.randrange(VOCABULARY), chance.choice((2, 5, 9, 30, 60))
            tokens = [(start + 3 * k) % VOCABULARY for k in range(n)]
            lines.append(json.dumps({"tokens": tokens}))
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / "data" / f"{name}-pairs.jsonl").write_text("\n".join(pairs(name, rows)))
    write_tokenizer(folder / "assets")


def pairs(name: str, rows: int) -> Iterator[str]:
    """Yield lines of pairs of very different lengths: the chosen response counts up by 3."""
    chance = random.Random(name)
    for _ in range(rows):
        start = chance.randrange(VOCABULARY)
        ids = {"prompt": [start]}
        for column, by in (("chosen", 3), ("rejected", -3)):
            n = chance.choice((2, 5, 9, 30, 60))
            ids[column] = [(start + by * k) % VOCABULARY for k in range(1, n)]
        yield json.dumps(ids)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer, for trainers that load one though the data has token ids."""
    from tokenizers import Tokenizer, models

    folder.mkdir(exist_ok=True)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens = {"pad_token": "w0", "eos_token": "w1", "bos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | tokens))


def script_of(page: Path) -> str:
    """Return the script of a page: its first block of Python, on the lines of the page."""
    text = page.read_text()
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None, page
    return "\n" * text[: found.start(1)].count("\n") + found[1]


def on_ranks(source: str, ranks: int) -> str:
    """Return the script for a number of ranks, where it names one: ``DEVICES = 2``."""
    return re.sub(r"^DEVICES = \d+$", f"DEVICES = {ranks}", source, flags=re.MULTILINE)


# in a rank


class RecordingLoader(overlord.torch.loader.Loader):
    """A loader that writes a digest of each item, and kills the process where it is told to."""

    def __init__(self, job: Any, *args: Any, **options: Any):
        given = job
        if hasattr(job, "strategy") and not job.evaluation:
            job = replace(job, strategy=os.environ["TRAINERS_STRATEGY"])
        super().__init__(job, *args, **options)
        self._evaluates, self._out = getattr(given, "evaluation", False), None

    def __iter__(self) -> Iterator[Any]:
        return self._recorded(super().__iter__())

    def _recorded(self, items: Iterator[Any]) -> Iterator[Any]:
        here = world_here("recording")
        rank = 0 if here is None else here.rank
        path = Path(os.environ["TRAINERS_OUT"], f"{'valid' if self._evaluates else 'train'}-{rank}")
        step = None
        for item in items:
            killed = os.environ.get("TRAINERS_KILL") == "1" and not self._evaluates
            step = getattr(item, "step", None)
            with open(path, "a") as out:
                print(json.dumps([step, digest_of(item)]), file=out)
            seen = len(path.read_text().splitlines())
            per_step = self.job.batch.microbatches if self.microbatches else 1
            if killed and seen > KILL_AT * per_step:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def digest_of(item: Any) -> str:
    """Return a digest of the tokens of a step, of a microbatch, or of what a transform made."""
    if isinstance(item, TensorStep):
        return digest(repr([digest_of(mb) for mb in item]))
    if isinstance(item, tuple):
        item = item[0]
    keys = [key for key in ("tokens", "input_ids", "input", "labels") if key in item]
    assert keys, "a stage has tokens or labels"
    return digest(repr([item[key].flatten().tolist() for key in keys]))


def run_script(source: str, page: Path) -> None:
    """Execute a script as ``__main__`` with a recording loader, in float64 by default."""
    overlord.torch.loader.Loader = RecordingLoader  # type: ignore[misc]
    torch.set_default_dtype(getattr(torch, os.environ.get("TRAINERS_DTYPE", "float64")))
    torch.set_num_threads(1)
    scope = {"__name__": "__main__", "__file__": str(page)}
    exec(compile(source, str(page), "exec"), scope)


def _fork(source: str, page: Path, run: Run, rank: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.chdir(folder)
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in where.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE=str(run.ranks))
        os.environ.update(TRAINERS_STRATEGY=run.strategy, TRAINERS_KILL=str(int(run.killed)))
        os.environ["TRAINERS_OUT"] = str(folder / ("killed" if run.killed else "out"))
        log = os.open(folder / f"{run.name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(LIMIT_S - 10.0)
        run_script(source, page)
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    sys.stdout.flush()
    import atexit

    if code == 0:
        atexit._run_exitfuncs()
    os._exit(code)


def execute(source: str, page: Path, run: Run, out: Path) -> list[int]:
    """Execute one run and return the exit codes of its ranks."""
    folder = out / (run.folder or run.name)
    write_data(folder)
    (folder / "out").mkdir(exist_ok=True)
    (folder / "killed").mkdir(exist_ok=True)
    with socket.socket() as port:
        # Nobody else is given a port that is bound; rank 0 can listen there all the same.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        n = port.getsockname()[1]
        return _wait({_fork(source, page, run, r, n, folder): r for r in range(run.ranks)})


def _wait(pids: dict[int, int]) -> list[int]:
    """Wait for the ranks, whose numbers are given by process; kill them at the limit."""
    codes, deadline = [-1] * len(pids), time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif not pid:
            time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def ended_as_expected(run: Run, codes: Sequence[int]) -> bool:
    """Return whether all ranks ended well, or, of a killed world, one by the kill and none well.

    Where ranks wait for each other, some fail by the loss of one before they kill themselves.
    """
    if not run.killed:
        return list(codes) == [0] * run.ranks
    return -signal.SIGKILL in codes and all(code not in (0, -1) for code in codes)


def main(page: Path, out: Path, worlds: list[int], loaded: list[str]) -> int:
    """Execute all runs of a page; write the exit codes of each."""
    for name in loaded:
        importlib.import_module(name)
    codes = {}
    for run in runs(worlds):
        codes[run.name] = execute(on_ranks(script_of(page), run.ranks), page, run, out)
        if not ended_as_expected(run, codes[run.name]):
            break
    (out / "codes.json").write_text(json.dumps(codes))
    return 0


if __name__ == "__main__":
    sizes = [int(n) for n in sys.argv[3].split(",")]
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sizes, sys.argv[4:]))
