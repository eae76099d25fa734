"""Predictions as tables, plots and sentences; every row names its assumptions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from endtoend.plans import STRATEGIES, Prediction
from endtoend.setups import MEASURED_KAPPA, Setup
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from page import context_name

PAPER = {4096: 1.71, 8192: 2.63, 16384: 3.09}  # its mean gain of hybrid over vanilla, section 7.3
PAPER_HIGHEST = 4.54  # and "average 1.77"
Key = tuple[Setup, str, int, str, str]  # setup, profile, context, encoder, backbone


def speed_table(predictions: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Return tokens per second and GPU by model pair, with the zero-attention control."""
    head = [
        "sync",
        "assumptions",
        "profile",
        "models",
        "context",
        *STRATEGIES,
        "ours was",
        "ours / vanilla",
        "ours / packed",
        "of ideal",
    ]
    head += ["ours / vanilla, kappa 0", "ours / packed, kappa 0"]
    control = {_key(p): p for p in predictions if p.pair.kappa == 0}
    rows = []
    for p in (p for p in predictions if p.pair.kappa == 1):
        row = [p.setup.sync, str(p.setup), p.profile, str(p.pair), context_name(p.context)]
        row += [f"{p.speed[s]:,.0f}" for s in STRATEGIES] + [
            p.chosen,
            f"{p.gain():.2f}",
            f"{p.gain(over='packed'):.2f}",
        ]
        row += [f"{p.speed['ours'] / p.ideal:.2f}"]
        zero = control.get(_key(p))
        rows.append(
            row
            + ([f"{zero.gain():.2f}", f"{zero.gain(over='packed'):.2f}"] if zero else ["-", "-"])
        )
    return head, rows


def sweep_table(predictions: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Return means over the model pairs by context, and the best pair.

    It has a row per assumption set and profile.
    """
    contexts = sorted({p.context for p in predictions})
    head = [
        "set",
        "sync",
        "assumptions",
        "profile",
        "packed / vanilla",
        "backbone / vanilla",
        "both levels / vanilla",
        "hybrid / vanilla",
    ]
    head += ["ours / vanilla", "best pair", "ideal / vanilla", "ours / packed"]
    head += [
        "kappa 0: ours / vanilla",
        "kappa 0: ours / packed",
        f"kappa {MEASURED_KAPPA}: ours / vanilla",
    ]
    rows, numbers = [], set_numbers(predictions)
    for setup, profile in dict.fromkeys((p.setup, p.profile) for p in predictions):
        mine = [p for p in predictions if (p.setup, p.profile) == (setup, profile)]

        def across(
            pick: Callable[[Prediction], float], kappa: float = 1.0, mine: list[Prediction] = mine
        ) -> str:
            return " / ".join(
                _mean([p for p in mine if p.context == c and p.pair.kappa == kappa], pick)
                for c in contexts
            )

        row = [str(numbers[setup]), setup.sync, str(setup), profile]
        row += [across(lambda p, s=s: p.gain(s)) for s in STRATEGIES[1:]]
        row += [
            f"{max((p.gain() for p in mine if p.pair.kappa == 1), default=0.0):.2f}",
            across(lambda p: p.ideal / p.speed["vanilla"]),
        ]
        row += [across(lambda p: p.gain(over="packed"))]
        row += [
            across(lambda p: p.gain(), 0.0),
            across(lambda p: p.gain(over="packed"), 0.0),
            across(lambda p: p.gain(), MEASURED_KAPPA),
        ]
        rows.append(row)
    return head, rows


def findings(predictions: Sequence[Prediction]) -> list[str]:
    """Return sentences about the result, with the numbers of this run."""
    one = [p for p in predictions if p.pair.kappa == 1]
    full = [p for p in one if p.setup.filled]
    weak = [p for p in one if not p.setup.filled]
    said = []
    if full:
        parts = [
            ("without a pipeline", [p for p in full if p.setup.pp == 1]),
            ("with 1F1B", [p for p in full if p.setup.pp > 1]),
        ]
        ranges = [
            (where, _by_cell(mine, lambda p: p.gain(over="packed")))
            for where, mine in parts
            if mine
        ]
        said.append(
            "- **Against a good baseline** (token packing that fills every microbatch): "
            + ", ".join(f"{min(gains):.2f} to {max(gains):.2f} {where}" for where, gains in ranges)
            + " (means over the model pairs)."
        )
    if weak:
        best, gains = max(weak, key=lambda p: p.gain()), _by_cell(weak, lambda p: p.gain())
        said.append(
            f"- **Against `vanilla`** (a fixed number of samples a rank) {min(gains):.2f} "
            f"to {max(gains):.2f}; the best single pair has "
            f"{best.gain():.2f} ({best.pair}, {best.profile} "
            f"{context_name(best.context)}; {best.setup.sync}, {best.setup})."
        )
        high = dict.fromkeys(p.setup for p in weak if p.gain() >= PAPER_HIGHEST)
        if high:
            sets = "; ".join(f"{s.sync}, {s}" for s in high)
            said.append(
                f"- **The paper's {PAPER_HIGHEST}** and more is reached by single model "
                f"pairs in {len(high)} sets: {sets}."
            )
        said += _causes(weak)
    zero = {_key(p): p for p in predictions if p.pair.kappa == 0}
    both = [(p.gain(), zero[_key(p)].gain()) for p in weak if _key(p) in zero]
    if both:
        share = statistics.fmean((z - 1) / (g - 1) for g, z in both if g > 1.05)
        said.append(
            "- **Attention is not the cause**: with attention free (kappa 0) "
            f"{100 * share:.0f} % of the gain over `vanilla` remains."
        )
    return said


def _causes(weak: Sequence[Prediction]) -> list[str]:
    """Return the gain of each weakness of `vanilla`: two sets that differ in it alone.

    A gain is the mean over profiles, pairs and contexts.
    """
    said = []
    base = Setup(sync="microbatch", per_rank=16)
    pipeline = Setup(sync="1F1B", tp=4, pp=4, encoder="own group once")
    for what, first, other in (
        ("few samples a rank (72 to 16)", Setup(sync="microbatch"), base),
        (
            "waiting after every microbatch instead of once a step",
            Setup(sync="iteration", per_rank=16),
            base,
        ),
        ("more ranks (64 to 256)", base, Setup(sync="microbatch", per_rank=16, ranks=256)),
        (
            "every rank reading one source",
            base,
            Setup(sync="microbatch", per_rank=16, one_source=True),
        ),
        (
            "the encoder replicated over TP=4",
            base,
            Setup(sync="microbatch", per_rank=16, tp=4, encoder="replicated"),
        ),
        (
            "1F1B: the encoder before every microbatch instead of once a step",
            pipeline,
            Setup(sync="1F1B", tp=4, pp=4),
        ),
        (
            "1F1B: the encoder on the first stage alone",
            pipeline,
            Setup(sync="1F1B", tp=4, pp=4, encoder="stage 0"),
        ),
        (
            "1F1B: the encoder replicated over the first stage",
            pipeline,
            Setup(sync="1F1B", tp=4, pp=4, encoder="replicated"),
        ),
    ):
        a, b = ([p.gain() for p in weak if p.setup == setup] for setup in (first, other))
        if a and b:
            said.append(
                f"  - {what}: the gain over `vanilla` goes from {statistics.fmean(a):.2f} "
                f"to {statistics.fmean(b):.2f}."
            )
    return (
        ["- **Where large gains come from**, one weakness of `vanilla` at a time (means):", *said]
        if said
        else []
    )


def plot(predictions: Sequence[Prediction], profile: str) -> str:
    """Return a plot of the mean gain over `vanilla` by assumption set, in increasing order."""
    one = [p for p in predictions if p.pair.kappa == 1 and p.profile == profile]
    setups = sorted(
        dict.fromkeys(p.setup for p in one),
        key=lambda s: statistics.fmean(p.gain() for p in one if p.setup == s),
    )
    x = np.arange(1, len(setups) + 1, dtype=float)

    def series(strategy: str) -> np.ndarray:
        return np.array(
            [statistics.fmean(p.gain(strategy) for p in one if p.setup == s) for s in setups]
        )

    drawn = [
        PlotLine(label=s, color=series_color(i), y=series(s))
        for i, s in enumerate(("packed", "backbone", "both levels", "hybrid", "ours"))
    ]
    most, least = (f(float(f(line.y)) for line in drawn) for f in (max, min))
    numbers = set_numbers(predictions)
    return lines(
        x,
        drawn,
        Axes(
            y_label="tokens/s over vanilla",
            x_label=f"assumption set, by its number in the table ({profile}; mean over model pairs "
            "and contexts)",
            y_from=min(0.5, least),
            y_to=most * 1.05,
            show=lambda v: f"{v:.1f}",
            x_ticks=[(float(v), str(numbers[s])) for v, s in zip(x, setups, strict=True)],
        ),
        about=f"Predicted gain over vanilla by assumption set, {profile}",
        height=340,
    )


def set_numbers(predictions: Sequence[Prediction]) -> dict[Setup, int]:
    return {setup: i + 1 for i, setup in enumerate(dict.fromkeys(p.setup for p in predictions))}


def _mean(found: Sequence[Prediction], pick: Callable[[Prediction], float]) -> str:
    return f"{statistics.fmean(map(pick, found)):.2f}" if found else "-"


def _by_cell(found: Sequence[Prediction], pick: Callable[[Prediction], float]) -> list[float]:
    """Return the means over the model pairs by cell."""
    cells: dict[tuple[Setup, str, int], list[float]] = {}
    for p in found:
        cells.setdefault((p.setup, p.profile, p.context), []).append(pick(p))
    return [statistics.fmean(values) for values in cells.values()]


def _key(p: Prediction) -> Key:
    return p.setup, p.profile, p.context, p.pair.encoder, p.pair.backbone
