"""Cells of the experiment, their records in one file of JSON lines, and the table and plot of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np

from overlord.observe.svg import Axes, PlotLine, lines, series_color
from page import markdown_table
from temperature.names import ARMS, BALANCED, EMBED, MEAN, UNIFORM

Record = dict[str, Any]
Done = Mapping[tuple[Any, ...], Record]

KEY = ("task", "fraction", "arm", "lr", "seed", "steps", "every", "tiny")
LEAST_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The grid of one task."""

    name: str
    fractions: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int
    every: int
    metric: str
    batch: int  # of a step, in units
    whole: int  # of all training data, in units
    unit: str
    seeded: str  # what differs between seeds
    held: str  # where validation and test are from


TASKS = {
    "llama": Task(
        name="llama",
        fractions=(0.01, 0.1, 1.0),
        rates=(2.5e-4, 5e-4, 1e-3, 2e-3),
        steps=300,
        every=100,
        metric="test loss, nats a byte",
        batch=32 * 512,
        whole=48 << 20,
        unit="bytes",
        seeded="the initial weights and the batches",
        held="1 MiB of text each, of other files than the training text but for one at each "
        "boundary. Texts of packages resemble each other",
    ),
    "burgers": Task(
        name="burgers",
        fractions=(0.025, 0.05, 0.1, 0.25),
        rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        steps=1500,
        every=100,
        metric="test nRMSE",
        batch=20,
        whole=1000,
        unit="samples",
        seeded="the samples of the training data, the initial weights and the batches",
        held="200 samples each, which are drawn independently",
    ),
}


def grid(task: Task, tiny: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the fractions and rates of a task."""
    return (task.fractions, task.rates) if not tiny else (task.fractions[-2:], (1e-3,))


def _settings(task: Task, tiny: bool) -> Record:
    steps, every = (8, 2) if tiny else (task.steps, task.every)
    return {"task": task.name, "steps": steps, "every": every, "tiny": tiny}


def cells(task: Task, tiny: bool, done: Done, seeds: int = LEAST_SEEDS) -> Iterator[Record]:
    """Yield all runs of a task that are known: all rates of seed 0, then the others at few rates.

    Further seeds of an arm follow when its rate is chosen, and the arm at the mean multiplier
    follows its balanced twin.
    """
    fractions, rates = grid(task, tiny)
    settings = _settings(task, tiny)
    for seed in range(seeds):
        for fraction in fractions:
            for arm in ARMS:
                base = settings | {"fraction": fraction, "arm": arm, "seed": seed}
                for lr in rates if seed == 0 else later_rates(base, rates, done):
                    cell = base | {"lr": lr}
                    mean = mean_multiplier(cell, rates, done) if arm == MEAN else None
                    if arm != MEAN:
                        yield cell
                    elif mean is not None:
                        yield cell | {"mean": mean}


def later_rates(cell: Record, rates: Sequence[float], done: Done) -> list[float]:
    """Return the rates of further seeds that are known: the arm's own, and that of the uniform arm.

    At the latter, arms differ in nothing but their multipliers.
    """
    found = [chosen(cell | {"arm": arm}, rates, done) for arm in (cell["arm"], UNIFORM)]
    return sorted({lr for lr in found if lr is not None})


def by_seed(tasks: Sequence[Task], tiny: bool, done: Done, seeds: int) -> Iterator[Record]:
    """Yield all known runs of several tasks: a seed is complete for all of them before the next."""
    of_tasks = (cells(task, tiny, done, seeds) for task in tasks)
    return merge(*of_tasks, key=lambda cell: cell["seed"])


def left(task: Task, tiny: bool, done: Done, seeds: int = LEAST_SEEDS) -> tuple[int, int]:
    """Return how many runs are certainly left, and how many at most.

    Until all rates of seed 0 have run, it is open at which rates further seeds run.
    """
    fractions, rates = grid(task, tiny)
    fewest = most = 0
    for fraction in fractions:
        for arm in ARMS:
            base = _settings(task, tiny) | {"fraction": fraction, "arm": arm}
            first = sum(key(base | {"seed": 0, "lr": lr}) not in done for lr in rates)
            later = later_rates(base, rates, done)
            if all(chosen(base | {"arm": a}, rates, done) is not None for a in (arm, UNIFORM)):
                runs = [base | {"seed": s, "lr": lr} for s in range(1, seeds) for lr in later]
                lacking = atmost = sum(key(run) not in done for run in runs)
            else:
                different = min(len(rates), 1 if arm == UNIFORM else 2)
                lacking, atmost = 0, (seeds - 1) * different
            fewest, most = fewest + first + lacking, most + first + atmost
    return fewest, most


def chosen(cell: Record, rates: Sequence[float], done: Done) -> float | None:
    """Return the rate of an arm with the best validation value of seed 0; None before all have run."""
    found = [done.get(key(cell | {"seed": 0, "lr": lr})) for lr in rates]
    runs = [r for r in found if r is not None]
    return float(min(runs, key=score)["lr"]) if len(runs) == len(rates) else None


def score(record: Record) -> float:
    """Return the validation value; one that is not finite is the worst."""
    return record["validation"] if math.isfinite(record["validation"]) else math.inf


def key(record: Record) -> tuple[Any, ...]:
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


def mean_multiplier(cell: Record, rates: Sequence[float], done: Done) -> float | None:
    """Return the mean multiplier of the balanced twin; None before it has run.

    The twin has the same settings. If no balanced run has this rate, it is the one of the same seed
    and data at its own rate.
    """
    twin = cell | {"arm": BALANCED}
    if cell["seed"] > 0:
        own, uniform = (chosen(cell | {"arm": arm}, rates, done) for arm in (BALANCED, UNIFORM))
        if own is None or uniform is None:
            return None
        twin["lr"] = cell["lr"] if cell["lr"] == uniform else own
    found = done.get(key(twin))
    return None if found is None else float(found["mean_multiplier"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm at one fraction, at the rate with the best validation value of seed 0."""

    task: str
    fraction: float
    arm: str
    lr: float
    tried: int  # rates of seed 0
    seeds: tuple[int, ...]
    test: np.ndarray  # by seed
    gain: np.ndarray  # in percent over uniform, by common seed; positive is better
    common: tuple[int, ...]  # seeds that uniform has too
    same: dict[int, float]  # by seed, the gain with this arm at the uniform arm's rate
    first: dict[float, Record]  # by rate, the runs of seed 0

    @property
    def error(self) -> float:
        return standard_error(self.test)


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def rows(records: Iterable[Record], task: str, tiny: bool = False) -> list[Row]:
    """Choose the rate of every arm on validation of seed 0, and compare tests by seed."""
    runs = [r for r in records if r["task"] == task and "test" in r and r["tiny"] == tiny]
    made: list[Row] = []
    for fraction in sorted({r["fraction"] for r in runs}):
        of_arm = {
            arm: [r for r in runs if r["fraction"] == fraction and r["arm"] == arm] for arm in ARMS
        }
        best = {arm: _best(found) for arm, found in of_arm.items()}
        base_lr, base, _ = best[UNIFORM]
        for arm, (lr, values, tried) in best.items():
            if not values:
                continue
            common = sorted(set(values) & set(base))
            there = {r["seed"]: r["test"] for r in of_arm[arm] if r["lr"] == base_lr}
            seeds = tuple(sorted(values))
            made.append(
                Row(
                    task=task,
                    fraction=fraction,
                    arm=arm,
                    lr=lr,
                    tried=tried,
                    seeds=seeds,
                    test=np.array([values[s] for s in seeds]),
                    gain=np.array([100 * (1 - values[s] / base[s]) for s in common]),
                    common=tuple(common),
                    same={s: 100 * (1 - there[s] / base[s]) for s in sorted(there) if s in base},
                    first={r["lr"]: r for r in of_arm[arm] if r["seed"] == 0},
                )
            )
    return made


def _best(runs: Sequence[Record]) -> tuple[float, dict[int, float], int]:
    """Return the best rate of seed 0, the test values at it by seed, and how many rates ran."""
    first = [r for r in runs if r["seed"] == 0]
    if not first:
        return math.nan, {}, 0
    lr = min(first, key=score)["lr"]
    return lr, {r["seed"]: r["test"] for r in runs if r["lr"] == lr}, len(first)


def missing(records: Iterable[Record], task: Task, tiny: bool, seeds: int) -> list[str]:
    """Return what has not run, a line for each amount of data."""
    runs = [r for r in records if "test" in r]
    fractions, rates = grid(task, tiny)
    lines = []
    for fraction in fractions:
        words = []
        base, _, _ = _best([r for r in runs if r["fraction"] == fraction and r["arm"] == UNIFORM])
        for arm in ARMS:
            mine = [r for r in runs if r["fraction"] == fraction and r["arm"] == arm]
            _, values, tried = _best(mine)
            lacking = [f"seed {s}" for s in range(1, seeds) if s not in values]
            there = {r["seed"] for r in mine if r["lr"] == base}
            lacking += [
                f"seed {s} at the uniform arm's rate"
                for s in range(1, seeds)
                if s in values and s not in there
            ]
            if tried < len(rates):
                lacking.insert(0, f"{len(rates) - tried} of {len(rates)} rates")
            words += [f"{arm} ({', '.join(lacking)})"] * bool(lacking)
        lines += [f"{fraction:.1%}: {'; '.join(words)}"] * bool(words)
    return lines


HEAD = ("data", "arm", "rate", "seeds", "test", "gain, %", "gain at the uniform arm's rate, %")
WIDE = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)  # Student's t of 95 % by freedom
SHORT = {MEAN: "mean rate", EMBED: "embed, head"}  # in plots
COLORS = (0, 5, 2, 4, 1)  # of series, without two alike


def described(task: Task) -> str:
    """Return in words what a run of a task does."""
    epochs = ", ".join(
        f"{_rounded(task.steps * task.batch / (task.whole * f))} ({f:.1%})" for f in task.fractions
    )
    return (
        f"{task.steps:,} steps of {task.batch:,} {task.unit}, of {task.whole:,} in all. Epochs by amount "
        f"of data: {epochs}. Spectra are measured every {task.every} steps: multipliers of balanced, "
        f"permuted and reversed act from step {task.every} on, those of other arms from the first. "
        f"Rates: {', '.join(f'{lr:g}' for lr in task.rates)}. Seeds differ in {task.seeded}; all arms of "
        f"a seed share them. Validation and test: {task.held}.\n"
    )


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def shown_gain(values: np.ndarray) -> str:
    """Return a mean and its standard error; of one value alone there is none."""
    if not len(values):
        return "-"
    error = f" ± {standard_error(values):.2f}" if len(values) > 1 else ""
    return f"{values.mean():+.2f}{error}"


def table(made: Sequence[Row], task: Task | None = None, tiny: bool = False) -> str:
    """Return the rows as Markdown.

    A rate from an incomplete grid is marked, and one at an edge of the grid.
    """
    rates = grid(task, tiny)[1] if task else ()
    shown = []
    for row in made:
        mark = f" (of {row.tried})" if row.tried < len(rates) else ""
        if len(rates) > 1 and row.lr in (min(rates), max(rates)):
            mark += ", lower edge" if row.lr == min(rates) else ", upper edge"
        error = f" ± {row.error:.4f}" if len(row.test) > 1 else ""
        same = shown_gain(_values(row.same))
        if len(row.same) < len(row.seeds):
            same += f" ({len(row.same)} of {len(row.seeds)} seeds)"
        shown.append(
            (
                f"{row.fraction:.1%}",
                row.arm,
                f"{row.lr:g}{mark}",
                f"{len(row.seeds)}",
                f"{row.test.mean():.4f}{error}",
                "" if row.arm == UNIFORM else shown_gain(row.gain),
                "" if row.arm == UNIFORM else same,
            )
        )
    return markdown_table(HEAD, shown)


def _values(by_seed: Mapping[int, float]) -> np.ndarray:
    return np.array(list(by_seed.values()), dtype=float)


def beyond_chance(made: Sequence[Row]) -> str:
    """Return in words how many gains differ from zero, and how many would by chance."""
    words = []
    for name, gains in (
        ("their own rate", [r.gain for r in made if r.arm != UNIFORM]),
        ("the uniform arm's rate", [_values(r.same) for r in made if r.arm != UNIFORM]),
    ):
        tested = [g for g in gains if 1 < len(g) <= len(WIDE)]
        apart = [g for g in tested if abs(g.mean()) > WIDE[len(g) - 1] * standard_error(g)]
        above = sum(g.mean() > 0 for g in apart)
        if tested:
            words.append(
                f"at {name}, of {len(tested)} gains {above} are above zero and {len(apart) - above} "
                f"below, and about {0.05 * len(tested):.1f} would be by chance"
            )
    if not words:
        return ""
    return (
        f"By a 95 % interval of Student's t (of 3 seeds {WIDE[2]:.1f} standard errors): "
        f"{'; '.join(words)}.\n"
    )


def other_choices(made: Sequence[Row]) -> str:
    """Return in words on what the choice of another rate than the uniform arm's rests."""
    base = {r.fraction: r.lr for r in made if r.arm == UNIFORM}
    words = []
    for row in made:
        other = row.first.get(base.get(row.fraction, math.nan))
        if other is not None and row.lr != other["lr"]:
            mine, theirs = score(row.first[row.lr]), score(other)
            words.append(
                f"{row.arm} at {row.fraction:.1%}: {mine:.4f} at {row.lr:g}, {theirs:.4f} at "
                f"{other['lr']:g}, {100 * (1 - mine / theirs):.1f} % apart"
            )
    if not words:
        return ""
    return (
        "Where an arm chose another rate than the uniform arm, its gain is also one of rates. Validation "
        f"of seed 0 at both: {'; '.join(words)}.\n"
    )


def first_seed(made: Sequence[Row]) -> str:
    """Return test values of seed 0 at every rate as Markdown."""
    rates = sorted({lr for row in made for lr in row.first})
    shown = [
        (
            f"{row.fraction:.1%}",
            row.arm,
            *(f"{row.first[lr]['test']:.4f}" if lr in row.first else "-" for lr in rates),
        )
        for row in made
    ]
    return markdown_table(("data", "arm", *(f"{lr:g}" for lr in rates)), shown)


def trend(made: Sequence[Row]) -> str:
    """Return in words by how much gains are larger with the least data than with the most."""
    fractions = sorted({r.fraction for r in made})
    own = {(r.arm, r.fraction): dict(zip(r.common, r.gain, strict=True)) for r in made}
    same = {(r.arm, r.fraction): r.same for r in made}
    words = []
    for name, gains in (("at their own rate", own), ("at the uniform arm's rate", same)):
        found = []
        for arm in (a for a in ARMS if a != UNIFORM):
            least = gains.get((arm, fractions[0]), {})
            most = gains.get((arm, fractions[-1]), {})
            common = sorted(set(least) & set(most))
            if len(fractions) > 1 and common:
                apart = np.array([least[s] - most[s] for s in common])
                found.append(
                    f"{arm} {shown_gain(apart)} ({len(common)} seed{'s' * (len(common) > 1)})"
                )
        words += [f"{name}: {'; '.join(found)}"] * bool(found)
    if not words:
        return ""
    return (
        f"The claim is that gains grow as data shrinks. Gain at {fractions[0]:.1%} of the data minus "
        f"gain at {fractions[-1]:.1%}, in points, by seed, {'. And '.join(words)}. Losses that shrink are "
        "no gains that grow: the claim needs a positive gain with the least data too.\n"
    )


def plot(made: Sequence[Row], about: str, same: bool = False) -> str:
    """Gains over uniform by the amount of data, one line for each other arm, with standard errors.

    ``same``: all arms at the uniform arm's rate; no plot if that is the rate of all.
    """
    base = {r.fraction: r.lr for r in made if r.arm == UNIFORM}
    if same and all(r.lr == base.get(r.fraction) for r in made):
        return ""
    fractions = sorted({r.fraction for r in made})
    arms, series = [a for a in ARMS if a != UNIFORM], []
    for i, arm in enumerate(arms):
        gains = {r.fraction: _values(r.same) if same else r.gain for r in made if r.arm == arm}
        found = {fraction: values for fraction, values in gains.items() if len(values)}
        if set(found) == set(fractions):
            y = np.array([found[f].mean() for f in fractions])
            error = np.nan_to_num([standard_error(found[f]) for f in fractions])
            color, label = series_color(COLORS[i]), SHORT.get(arm, arm)
            shift = 3.0 * (i - (len(arms) - 1) / 2)
            series.append(PlotLine(label=label, color=color, y=y, error=error, shift=shift))
    if not series or len(fractions) < 2:
        return ""
    ends = [s.y + sign * s.error for s in series for sign in (-1, 1) if s.error is not None]
    values = np.concatenate([*ends, np.zeros(1)])
    if not np.isfinite(values).all():
        return ""
    pad = max(0.1, 0.1 * float(values.max() - values.min()))
    x = np.log10(np.array(fractions))
    none = PlotLine(label=UNIFORM, color="var(--ink)", y=np.zeros(len(x)), kind="bound")
    rate = "all at the uniform arm's rate" if same else "each arm at its own rate"
    return lines(
        x,
        [*series, none],
        Axes(
            x_label="share of the training data; bars: standard error over seeds; without one it is one seed",
            y_label=f"gain over the uniform arm, %; {rate}",
            y_from=float(values.min()) - pad,
            y_to=float(values.max()) + pad,
            show=lambda v: f"{v:g}",
            x_ticks=[(float(a), f"{100 * f:g} %") for a, f in zip(x, fractions, strict=True)],
        ),
        about=about,
    )
