"""The waits of a training loop that Overlord feeds, compared with batches already on the device.

    python benchmarks/gpu/train.py                          # one H200: under four minutes
    python benchmarks/gpu/train.py --device cpu --tiny      # a smoke test, no measurement

The model is like Llama. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # before torch: microbatches of many sizes, no stalls
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # its own modules, also when started from elsewhere

import numpy as np
import torch

from corpus import Corpus, Words, make_corpus, name_of, open_corpus, write_source
from gpu.feeds import FEEDS, Fed, Feed
from gpu.model import LLAMA_12B, TINY, Llama, Packed, Shape, made
from gpu.timing import default_folder, device_of, machine, save, settle, table
from page import command_line
from peers.measure import cpu_seconds
from peers.work import Work

TARGET = 0.01  # of the step time, waiting for data
VOCABULARY = 40_960  # above every id of both jobs
SOURCES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The counted steps of one feed, without those that warm up."""

    feed: str
    first_step_s: float  # from opening the loader
    step_s: list[float]
    wait_s: list[float]
    # of the wait: no step was on the device yet, as the prefetcher tells it; the rest is handing
    # over
    not_ready_s: float
    idle_s: list[float]  # of the device, between steps
    tokens: list[int]
    cpu_s: float  # of all processes, over the counted steps

    @property
    def wait_share(self) -> float:
        return sum(self.wait_s) / sum(self.step_s)

    @property
    def speed(self) -> float:
        return sum(self.tokens) / sum(self.step_s)


class Trainer:
    """Model and optimizer; a step runs all microbatches and the optimizer, and reads the loss."""

    def __init__(self, shape: Shape, context: int, device: torch.device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self.model = device, made(Llama(shape, context, VOCABULARY), device, dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, fused=device.type == "cuda"
        )
        self.marks: list[tuple[Any, Any]] = []  # where the device began and ended each step

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def idle(self, steps: int) -> list[float]:
        """Return the idle seconds of the device before each of the last steps but the first."""
        settle(self.device)
        mine = self.marks[-steps:]
        if self.device.type != "cuda":
            return [begin - end for (_, end), (begin, _) in pairwise(mine)]
        return [end.elapsed_time(begin) / 1e3 for (_, end), (begin, _) in pairwise(mine)]

    def step(self, fed: Fed) -> float:
        begin = self._mark()
        total = torch.zeros((), device=self.device)
        for mb in fed.microbatches:
            bounds = mb["cu_seqlens"]
            lengths = tuple(bounds.diff().tolist()) if bounds.device.type == "cpu" else ()
            packed = Packed(bounds, mb["position_ids"], lengths, int(mb["max_seqlen"]))
            loss = self.model(mb["tokens"], mb["labels"], packed) / fed.valid_tokens
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.marks.append((begin, self._mark()))
        return float(total)  # every step, as one that logs its loss: whatever waits shows


def run(trainer: Trainer, feed: Feed, name: str, steps: int, warm: int) -> Figures:
    """Take ``warm + steps`` steps of a feed, and record the time before and after each delivery."""
    waits, times, tokens, losses = [], [], [], []
    opened, first, cpu, late = time.perf_counter(), 0.0, 0.0, 0.0
    fed: Fed | None = None
    with feed() as stream:
        for number in range(warm + steps):
            if number == warm:
                cpu, late = cpu_seconds(os.getpid()), fed.waited_s if fed is not None else 0.0
            start = time.perf_counter()
            fed = next(stream)
            handed = time.perf_counter()
            first = first or handed - opened
            losses.append(trainer.step(fed))
            if number >= warm:
                waits.append(handed - start)
                times.append(time.perf_counter() - start)
                tokens.append(fed.tokens)
        cpu, late = cpu_seconds(os.getpid()) - cpu, fed.waited_s - late
    assert np.isfinite(losses).all(), f"{name}: the loss is no number"
    return Figures(
        feed=name,
        first_step_s=first,
        step_s=times,
        wait_s=waits,
        not_ready_s=late,
        idle_s=trainer.idle(steps),
        tokens=tokens,
        cpu_s=cpu,
    )


HEAD = (
    "feed",
    "steps",
    "ms a step",
    "ktok/s",
    "wait ms a step",
    "median",
    "longest",
    "not ready ms",
    "wait, % of the step",
    "under 1 %",
    "device idle ms",
    "x resident",
    "CPU s a step",
    "first step s",
)


def rows_of(found: Sequence[Figures]) -> list[list[str]]:
    resident, rows = [f for f in found if f.feed == "resident"], []
    base = float(np.mean([f.speed for f in resident])) if resident else 0.0
    for f in found:
        wait = np.array(f.wait_s) * 1e3
        same = (
            bool(resident) and f.tokens == resident[0].tokens
        )  # else it is compared by its tokens alone
        over = f"{base / f.speed:.4f}{'' if same else ' *'}" if resident else ""
        held = "" if f.feed == "resident" else "met" if f.wait_share < TARGET else "**missed**"
        rows.append(
            [
                f.feed,
                str(len(f.step_s)),
                f"{1e3 * np.mean(f.step_s):.1f}",
                f"{f.speed / 1e3:.1f}",
                f"{wait.mean():.3f}",
                f"{np.median(wait):.3f}",
                f"{wait.max():.2f}",
                f"{1e3 * f.not_ready_s / len(wait):.3f}",
                f"{100 * f.wait_share:.3f}",
                held,
                f"{1e3 * np.mean(f.idle_s):.2f}",
                over,
                f"{f.cpu_s / len(f.step_s):.2f}",
                f"{f.first_step_s:.2f}",
            ]
        )
    return rows


NOTES = """`wait`: from asking for a step to having it, in the loop; `not ready` is the part of it in which no step was on the device yet,
the rest is handing over. Every step ends with a look at its loss, so nothing is queued beyond it. `device idle`: from the last work of a
step to the first of the next. `x resident`: time for a token over that with all batches on the device beforehand, the mean of its
runs; `resident` and Overlord have the same steps, those with a star have others of the same data. CPU: all processes, the trainer's
own included."""


def page(found: Sequence[Figures], work: Work, shape: Shape, device: torch.device) -> str:
    what = (
        f"{shape}, vocabulary {VOCABULARY:,}, bf16, AdamW. Job `{work.job}`: "
        f"{work.n_sources} Parquet sources, context {work.context:,}, "
        f"{work.microbatches} microbatches a step of each of {work.ranks} rank(s)."
    )
    head = (
        f"# Training loop on a GPU\n\n{machine(device)}\n\n    "
        f"{command_line('benchmarks/gpu/train.py')}\n\n{what}\n\n"
    )
    return f"{head}{table(HEAD, rows_of(found))}\n\n{NOTES}\n"


def data(folder: Path, job: str, n_sources: int) -> Corpus:
    """Return the corpus of benchmarks/corpus.py; the tokenizer only if it is needed."""
    if job == "tokenized":
        return make_corpus(folder, n_sources, 1, lambda *_: None)
    words: Words | None = None
    for number in range(n_sources):
        if not (folder / name_of(number) / "done.json").exists():
            words = words or Words.invent(1)
            folder.mkdir(parents=True, exist_ok=True)
            write_source(folder / name_of(number), words, number, 1)
    return open_corpus(folder, n_sources)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model and steps that a laptop runs: a look, no measurement",
    )
    parser.add_argument(
        "--job",
        choices=("tokenized", "null"),
        help="default: tokenized where the package tokenizers is there",
    )
    parser.add_argument("--layers", type=int, default=LLAMA_12B.layers)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=4, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=48, help="that are counted, of each feed")
    parser.add_argument("--warm", type=int, default=8, help="that are not, before them")
    parser.add_argument("--workers", type=int, default=4, help="of torch's DataLoader")
    parser.add_argument(
        "--ranks",
        type=int,
        default=8,
        help="of the feed overlord-node: this one trains, the others only take",
    )
    parser.add_argument(
        "--feeds",
        default=",".join([*FEEDS, "resident"]),
        help="with commas; resident first and last, since clocks drift",
    )
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir()) / "overlord-benchmark-gpu"
    )
    parser.add_argument(
        "--out", type=Path, default=default_folder(), help="folder of the page and of all figures"
    )
    return parser


def has_tokenizers() -> bool:
    try:
        import tokenizers  # noqa: F401, only whether it is there
    except ImportError:
        return False
    return True


def main(words: Sequence[str] | None = None) -> list[Figures]:
    given = arguments().parse_args(words)
    device, began = device_of(given.device), time.perf_counter()
    shape = TINY if given.tiny else Shape(**{**asdict(LLAMA_12B), "layers": given.layers})
    steps, warm, n_sources = (3, 1, 2) if given.tiny else (given.steps, given.warm, SOURCES)
    job = given.job or ("tokenized" if has_tokenizers() and not given.tiny else "null")
    corpus = data(given.data / job, job, n_sources)
    size: dict[str, int] = (
        {"context": 256, "microbatches": 2}
        if given.tiny
        else {"context": given.context, "microbatches": given.microbatches}
    )
    work = Work(
        "overlord-shuffled",
        job,
        str(corpus.folder),
        n_sources,
        0,
        ranks=1,
        workers=given.workers,
        **size,
    )
    trainer, found = Trainer(shape, work.context, device), []
    for name in given.feeds.split(","):
        feed = FEEDS[name](corpus, work, given.ranks, warm + steps, device)
        if not found:
            run(
                trainer, FEEDS["resident"](corpus, work, given.ranks, 2, device), "warming up", 1, 1
            )
        found.append(run(trainer, feed, name, steps, warm))
        settle(device)
        print(f"{time.perf_counter() - began:6.1f} s  {' | '.join(rows_of(found)[-1])}", flush=True)
    text = page(found, work, shape, device)
    print(text)
    if not given.tiny or "--out" in (words or sys.argv):
        print(f"saved {save('train', text, given.out)}")
        (given.out / "gpu-train.json").write_text(json.dumps([asdict(f) for f in found]))
    return found


if __name__ == "__main__":
    main()
