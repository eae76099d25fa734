"""Cells of the experiment, their records in one file of JSON lines, and the table and plot of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overlord.observe.svg import Axes, PlotLine, lines, series_color
from page import markdown_table
from temperature.arms import ARMS, BALANCED, UNIFORM

KEY = ("task", "fraction", "arm", "lr", "seed", "steps", "every", "tiny")
LEAST_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The grid of one task."""

    name: str
    fractions: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int
    steps: int
    every: int
    metric: str


TASKS = {
    "llama": Task(
        name="llama",
        fractions=(0.01, 0.1, 1.0),
        rates=(5e-4, 1e-3, 2e-3),
        seeds=3,
        steps=600,
        every=100,
        metric="test loss, nats a byte",
    ),
    "burgers": Task(
        name="burgers",
        fractions=(0.025, 0.05, 0.1, 0.25),
        rates=(5e-4, 1e-3, 2e-3),
        seeds=5,
        steps=1500,
        every=100,
        metric="test nRMSE",
    ),
}


def cells(task: Task, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield all runs of a task, seed by seed, so that a stopped round has whole comparisons."""
    steps, every = (8, 2) if tiny else (task.steps, task.every)
    fractions, rates = (task.fractions, task.rates) if not tiny else (task.fractions[-2:], (1e-3,))
    for seed in range(task.seeds if not tiny else LEAST_SEEDS):
        for fraction in fractions:
            for lr in rates:
                for arm in ARMS:
                    yield {
                        "task": task.name,
                        "fraction": fraction,
                        "arm": arm,
                        "lr": lr,
                        "seed": seed,
                        "steps": steps,
                        "every": every,
                        "tiny": tiny,
                    }


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)


class Records:
    """A file of JSON lines; the last line may be cut off by a crash and is then ignored."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def done(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Runs that finished, by their key."""
        return {key(r): r for r in self.read() if "test" in r}

    def append(self, record: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as out:
            if out.tell() and _last_byte(self._path) != b"\n":
                out.write(b"\n")  # after a line that was cut off
            out.write(json.dumps(record).encode() + b"\n")


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1)


def mean_multiplier(
    cell: dict[str, Any], done: dict[tuple[Any, ...], dict[str, Any]]
) -> float | None:
    """The mean multiplier of the balanced run with the same settings; None before it has run."""
    twin = done.get(key(cell | {"arm": BALANCED}))
    return None if twin is None else float(twin["mean_multiplier"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm at one fraction, at the rate with the best mean validation value."""

    task: str
    fraction: float
    arm: str
    lr: float
    seeds: tuple[int, ...]
    test: np.ndarray  # by seed
    gain: np.ndarray  # in percent over uniform, by common seed; positive is better

    @property
    def error(self) -> float:
        return standard_error(self.test)


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def rows(records: Iterable[dict[str, Any]], task: str, tiny: bool = False) -> list[Row]:
    """Choose the rate of every arm on validation, and compare tests by seed."""
    runs = [r for r in records if r["task"] == task and "test" in r and r["tiny"] == tiny]
    made: list[Row] = []
    for fraction in sorted({r["fraction"] for r in runs}):
        best: dict[str, dict[int, float]] = {}
        rate: dict[str, float] = {}
        for arm in ARMS:
            found = _best([r for r in runs if r["fraction"] == fraction and r["arm"] == arm])
            if found is not None:
                rate[arm], best[arm] = found
        base = best.get(UNIFORM, {})
        for arm, values in best.items():
            common = sorted(set(values) & set(base))
            gain = [100 * (1 - values[s] / base[s]) for s in common]
            seeds = tuple(sorted(values))
            made.append(
                Row(
                    task=task,
                    fraction=fraction,
                    arm=arm,
                    lr=rate[arm],
                    seeds=seeds,
                    test=np.array([values[s] for s in seeds]),
                    gain=np.array(gain),
                )
            )
    return made


def _best(runs: Sequence[dict[str, Any]]) -> tuple[float, dict[int, float]] | None:
    """The rate with the best mean validation value over the seeds that all rates have."""
    rates = sorted({r["lr"] for r in runs})
    by_rate = {lr: {r["seed"]: r for r in runs if r["lr"] == lr} for lr in rates}
    seeds = set.intersection(*(set(found) for found in by_rate.values())) if by_rate else set()
    if not seeds:
        return None

    def score(lr: float) -> float:
        values = [by_rate[lr][s]["validation"] for s in seeds]
        return float(np.mean(values)) if np.isfinite(values).all() else math.inf

    lr = min(rates, key=score)
    return lr, {s: by_rate[lr][s]["test"] for s in sorted(seeds)}


HEAD = ("data", "arm", "rate", "seeds", "test", "gain over uniform, %")


def table(made: Sequence[Row]) -> str:
    shown = []
    for row in made:
        gain = f"{row.gain.mean():+.2f} ± {standard_error(row.gain):.2f}" if len(row.gain) else "-"
        shown.append(
            (
                f"{row.fraction:.1%}",
                row.arm,
                f"{row.lr:g}",
                f"{len(row.seeds)}",
                f"{row.test.mean():.4f} ± {row.error:.4f}",
                "" if row.arm == UNIFORM else gain,
            )
        )
    return markdown_table(HEAD, shown)


def plot(made: Sequence[Row], about: str) -> str:
    """Gains over uniform by the amount of data, one line for each other arm."""
    fractions = sorted({r.fraction for r in made})
    series = []
    for i, arm in enumerate(a for a in ARMS if a != UNIFORM):
        found = {r.fraction: float(r.gain.mean()) for r in made if r.arm == arm and len(r.gain)}
        if set(found) == set(fractions):
            y = np.array([found[f] for f in fractions])
            series.append(PlotLine(label=arm, color=series_color(i), y=y))
    if not series or len(fractions) < 2:
        return ""
    values = np.concatenate([s.y for s in series] + [np.zeros(1)])
    pad = max(0.1, 0.1 * float(values.max() - values.min()))
    x = np.log10(np.array(fractions))
    return lines(
        x,
        series,
        Axes(
            x_label="share of the training data",
            y_label="gain over a uniform rate, %",
            y_from=float(values.min()) - pad,
            y_to=float(values.max()) + pad,
            show=lambda v: f"{v:g}",
            x_ticks=[(float(a), f"{f:g}") for a, f in zip(x, fractions, strict=True)],
        ),
        about=about,
    )
