"""The pictures of docs/primitives, drawn by the package from plans that it makes here: python
docs/img/primitives.py

The lengths are whole numbers from a seeded generator, so every run draws the same; the tests
compare the files with what this draws.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from drawing import Drawing  # noqa: E402
from hybrid_map import split  # noqa: E402

import overlord as ov  # noqa: E402
from overlord.observe import svg  # noqa: E402
from overlord.observe.svg import WIDTH, Panel, PlotLine, series_color  # noqa: E402
from page import plot_file  # noqa: E402

LLM, VIT = ov.cost.llama_12b, ov.cost.vit_1b
MESH = ov.Mesh(pp=2, dp=2, cp=2, tp=2)
MORE_STYLE = ".wanted { fill: none; stroke-width: 1.5; stroke-dasharray: 5 4; } </style>"
# Milliseconds of four layers of llama_12b, forward and backward, on one H200: tokens of a
# microbatch, length of its documents.
MEASURED = {
    (4096, 64): 42.8,
    (4096, 4096): 50.0,
    (8192, 512): 87.6,
    (8192, 8192): 112.2,
    (16384, 2048): 183.0,
    (16384, 16384): 276.0,
}


def lengths(n: int, seed: int, least: int = 64, most: int = 4096) -> np.ndarray:
    """Skewed: half as many samples of twice the length."""
    return np.clip(least * 1000 // np.random.default_rng(seed).integers(1, 1000, n), least, most)


def buffer(
    samples: int, microbatches: int, context: int, most: int, seed: int = 3, **sources: int
) -> ov.Buffer:
    columns = {
        name: {"tokens": lengths(n, seed + i, most=most)}
        for i, (name, n) in enumerate(sources.items())
    }
    return ov.Buffer.from_columns(
        columns, batch=ov.Batch(samples=samples, microbatches=microbatches, context=context)
    )


# the mesh


def branches(to: Drawing, tree: ov.Mesh, left: float, wide: float, top: float) -> None:
    """The axes above the ranks, as the tree nests them."""
    n = tree.world_size
    for level, axis in enumerate(tree.order):
        each = n // int(np.prod([getattr(tree, a) for a in tree.order[: level + 1]]))
        y = top + level * 36
        for k in range(n // each):
            x = left + (k + 0.5) * each * wide
            if level:
                up = (
                    left
                    + (k * each // (each * getattr(tree, axis)) + 0.5)
                    * each
                    * getattr(tree, axis)
                    * wide
                )
                to.line(up, y - 22, x, y - 11)
            to.text(x, y, f"{axis} {k % getattr(tree, axis)}", "label", "middle")


def place() -> str:
    to, left, wide = (
        Drawing(390, "16 ranks as a tree of pp, dp, cp and tp, and the buckets of every axis"),
        150.0,
        43.0,
    )
    branches(to, MESH, left, wide, 24)
    rows = [
        ("rank", np.arange(16)),
        *((f'buckets("{a}")', MESH.bucket_of(a)) for a in ("DP", "CP", "WORLD", "PP", "TP")),
    ]
    for k, (name, of) in enumerate(rows):
        y = 150 + k * 40
        to.text(left - 14, y + 18, name, "name", "end")
        for rank in range(16):
            color, fill = ("var(--muted)", 0.0) if k == 0 else (series_color(int(of[rank])), 0.28)
            to.cell(left + rank * wide + 1.5, y, wide - 3, 28, str(of[rank]), color, fill)
    return to.done()


def broadcast_at() -> str:
    to, left, wide = Drawing(374, "which of 16 ranks fetch under nested broadcasts"), 190.0, 41.0
    branches(to, MESH, left, wide, 24)
    for k, dims in enumerate(((), ("TP",), ("TP", "CP"), ("TP", "CP", "PP"))):
        y, served = 150 + k * 54, MESH.served_by(dims)
        n = len(MESH.fetchers(dims))
        to.text(
            left - 14,
            y + 12,
            f"broadcast_at({', '.join(dims)})" if dims else "no broadcast",
            "name",
            "end",
        )
        to.text(left - 14, y + 27, f"{n} of 16 ranks fetch", "tick", "end")
        group = np.cumsum(served == np.arange(16)) - 1  # of the fetchers
        for rank in range(16):
            x, color = (
                left + rank * wide,
                series_color(int(group[served[rank]])) if dims else "var(--s0)",
            )
            fetches = served[rank] == rank
            to.cell(x + 1.5, y, wide - 3, 26, str(rank), color, 0.55 if fetches else 0.1)
            if not fetches:
                start, end = left + (served[rank] + 0.5) * wide, x + wide / 2
                deep = y + 38 + (end - start) / 40
                to.path(
                    f"M{start:.1f} {y + 27}C{start:.1f} {deep:.1f} {end:.1f} {deep:.1f} "
                    f"{end:.1f} {y + 28}",
                    color,
                )
    return to.done()


# plans


def tracks(
    to: Drawing, plan: ov.LoadingPlan, left: float, top: float, wide: float, gap: float = 8
) -> None:
    """Every microbatch as a track as long as its capacity, its documents as segments in the colour
    of their source.
    """
    a = plan.main
    each = (wide - gap * (a.n_microbatches - 1)) / a.n_microbatches
    filled = np.zeros((a.n_buckets, a.n_microbatches))
    for i in a.order().tolist():
        b, m = int(a.bucket[i]), int(a.microbatch[i])
        x, y, w = (
            left + m * (each + gap) + filled[b, m],
            top + b * 40,
            each * int(a.size[i]) / a.capacity,
        )
        color = series_color(int(plan.source[a.sample[i]]))
        says = (
            f"{plan.sample_id(int(a.sample[i]))}: {a.size[i]} tokens, bucket {b}, microbatch "
            f"{m}, slot {a.slot[i]}"
        )
        to.box(x + 0.6, y + 2, max(1.0, w - 1.2), 24, color, 0.35, says)
        filled[b, m] += w
    for b in range(a.n_buckets):
        for m in range(a.n_microbatches):
            to.box(left + m * (each + gap), top + b * 40, each, 28, "var(--faint)")


def dgraph() -> str:
    given = buffer(16, 2, 1024, 1024, web=14, code=10, books=6)
    graph = ov.DGraph.from_buffer(given, ov.Mesh(dp=3), meta="tokens").mix(
        {"web": 0.5, "code": 0.3, "books": 0.2}
    )
    graph = graph.distribute("DP").cost("llama_12b").balance("greedy")
    plan = graph.plan()
    to = Drawing(
        330, "candidates of three sources, the primitives, and the microbatches that they end in"
    )
    to.text(20, 20, "candidates in the buffer, those drawn filled", "label")
    taken = {str(plan.sample_id(i)) for i in range(len(plan))}
    for s, name in enumerate(given.names):
        base = 120 + s * 90
        to.text(58, base - 3, name, "name", "end")
        for k, i in enumerate(np.flatnonzero(given.source == s).tolist()):
            tall = 10 + 56 * int(given.meta["tokens"][i]) / 1024
            to.box(
                70 + k * 14,
                base - tall,
                10,
                tall,
                series_color(s),
                0.5 if str(given[i]) in taken else 0.0,
                str(given[i]),
            )
        to.line(66, base + 0.5, 270, base + 0.5)
    states = ["buffered", *(e.after for e in graph.edges()), "planned"]
    for k, (edge, state) in enumerate(
        zip([*(e.what for e in graph.edges()), "plan()"], states, strict=False)
    ):
        to.text(300, 30 + k * 58, state, "name")
        to.arrow(306, 38 + k * 58, 306, 74 + k * 58)
        to.text(318, 60 + k * 58, edge.partition(": two")[0].replace("'", ""), "tick")
    to.text(300, 30 + 5 * 58, states[-1], "name")
    to.text(520, 20, "buckets x microbatches, each of 1,024 tokens", "label")
    tracks(to, plan, 580, 60, 262)
    for b in range(3):
        to.text(570, 78 + b * 40, f"bucket {b}", "tick", "end")
    return to.done()


def plan() -> str:
    found = ov.strategy.llm_balance(
        _mixed(buffer(40, 3, 1536, 1400, web=30, code=20, books=10, seed=11), 4), ov.Mesh(dp=4)
    )
    about = found.summary()["modules"]["backbone"]
    to = Drawing(
        252,
        "the plan of one step: four buckets of three microbatches and the samples in their slots",
    )
    for m in range(found.n_microbatches):
        to.text(
            110 + (m + 0.5) * 590 / found.n_microbatches, 24, f"microbatch {m}", "label", "middle"
        )
    to.text(724, 24, "cost / mean", "label")
    tracks(to, found, 110, 38, 580)
    for b, load in enumerate(about["by_bucket"]):
        to.text(98, 56 + b * 40, f"bucket {b}", "name", "end")
        to.text(724, 56 + b * 40, f"{load:.3f}", "name")
    for s, name in enumerate(found.names):
        to.box(110 + s * 90, 206, 14, 12, series_color(s), 0.35)
        to.text(130 + s * 90, 216, name, "name")
    peak, i = about["peak"], about["imbalance"]
    to.text(
        110,
        240,
        f"fill {found.fill():.0%} · fullest microbatch {peak['tokens_per_rank']:,} of "
        f"1,536 tokens · digest {found.digest()[:16]}...",
        "tick",
    )
    to.text(
        WIDTH - 20,
        216,
        f"imbalance {i['bucket']:.3f} by bucket, {i['microbatch']:.3f} by microbatch",
        "tick",
        "end",
    )
    return to.done()


def _mixed(given: ov.Buffer, dp: int) -> ov.Buffer:
    weights = {
        name: float(n) for name, n in zip(given.names, np.bincount(given.source), strict=True)
    }
    return ov.DGraph.from_buffer(given, ov.Mesh(dp=dp)).mix(weights).buffer


def balance() -> str:
    drawn = _mixed(buffer(160, 4, 4096, 2600, text=160, seed=21), 8)
    graph = ov.DGraph.from_buffer(drawn, ov.Mesh(dp=8)).mix().distribute("DP").cost(LLM)
    ways: list[tuple[str, dict[str, Any]]] = [
        ('"none"', {"method": "none"}),
        ('"greedy", "iteration"', {"method": "greedy", "objective": "iteration"}),
        ('"greedy", "microbatch"', {"method": "greedy", "objective": "microbatch"}),
    ]
    panels, mean, bound = [], 1.0, 1.0
    for k, (name, how) in enumerate(ways):
        found = graph.balance(**how).plan()
        i, loads = found.imbalance(), found.loads()
        mean, bound = float(loads.sum()) / 8, i["bound"]
        panels.append(
            Panel(
                label=name,
                note=f"{i['bucket']:.3f} / {i['microbatch']:.3f}",
                color=series_color(k),
                stacks=loads,
            )
        )
    about = (
        "cost of every rank in microbatches: dealt out in turn, balanced for the step, "
        "balanced for every microbatch"
    )
    return svg.bars(
        panels,
        about=about,
        bar_name="rank",
        y_label="cost over the mean rank, stacked by microbatch; below: by bucket / by microbatch",
        mean=mean,
        bound=bound,
        bound_label=f"bound {bound:.3f}",
    )


def distribute() -> str:
    place = ov.Mesh(dp=2, cp=2, tp=2)
    drawn = _mixed(buffer(120, 2, 8192, 1400, text=120, seed=5), 2)
    panels, mean = [], 1.0
    for k, (axis, note) in enumerate(
        (
            ("DP", "2 replicas of 4 ranks"),
            ("CP", "4 pairs of dp and cp, 2 ranks each"),
            ("WORLD", "8 ranks"),
        )
    ):
        loads = (
            ov.DGraph.from_buffer(drawn, place)
            .mix()
            .distribute(axis)
            .cost(LLM)
            .balance("greedy")
            .plan()
            .loads()
        )
        mean = float(loads.sum(axis=1).mean()) if axis == "DP" else mean
        panels.append(
            Panel(label=f'distribute("{axis}")', note=note, color=series_color(k), stacks=loads)
        )
    return svg.bars(
        panels,
        about="the same samples over the buckets of three axes",
        bar_name="bucket",
        y_label="cost of a bucket, stacked by microbatch",
        mean=mean,
        bound=1.0,
        bound_label="half of the step",
    )


def modules() -> str:
    """Rows of the encoder's output, from the rank that encodes to the rank that holds the
    sample.
    """
    chance, place = np.random.default_rng(4), ov.Mesh(dp=4, tp=2)
    patches = [
        lengths(int(k), 100 + i, 64, 2048).tolist() for i, k in enumerate(chance.integers(0, 4, 48))
    ]
    tokens = [
        sum(p) // 4 + int(n) for p, n in zip(patches, chance.integers(50, 900, 48), strict=True)
    ]
    given = ov.Buffer.from_columns(
        {"photos": {"image_patches": patches, "tokens": tokens}},
        batch=ov.Batch(samples=48, microbatches=2, context=8192),
    )
    drawn = ov.DGraph.from_buffer(given, place).mix({"photos": 1}).buffer
    to = Drawing(
        392,
        "rows that every rank sends to every other: images left in their replica, images "
        "balanced over all ranks",
    )
    for k, (name, joint) in enumerate(
        (
            ("joint=True: images stay in their replica", True),
            ("joint=False: images over all ranks", False),
        )
    ):
        found = ov.strategy.vlm(merge=2, joint=joint)(drawn, place)
        routes = found.routes("encoder")
        _matrix(to, routes, found.loads("encoder").sum(axis=1), 70 + k * 430)
        i, b = found.imbalance("encoder")["bucket"], found.imbalance()["bucket"]
        to.text(70 + k * 430, 20, name, "name")
        to.text(70 + k * 430, 372, f"slowest over mean: encoder {i:.3f}, backbone {b:.3f}", "tick")
    return to.done()


def _matrix(to: Drawing, routes: ov.Routes, loads: np.ndarray, left: float) -> None:
    rows = np.zeros((8, 8), np.int64)
    np.add.at(rows, (routes.encoder, routes.parts.owner), routes.out)
    to.text(left, 44, "to the rank that holds the sample", "label")
    to.text(left + 8 * 33 + 8, 44, "encodes", "label")
    for e in range(8):
        y = 72 + e * 34
        to.text(left - 8, y + 19, f"rank {e}", "tick", "end")
        to.text(left + e * 33 + 16, 64, str(e), "tick", "middle")
        for o in range(8):
            shade = 0.75 * rows[e, o] / rows.max()
            color = "var(--s0)" if rows[e, o] else "var(--grid)"
            to.box(
                left + o * 33,
                y,
                31,
                30,
                color,
                float(shade),
                f"rank {e} sends {rows[e, o]} rows to rank {o}",
            )
            if rows[e, o]:
                to.text(left + o * 33 + 15.5, y + 19, str(rows[e, o]), "name", "middle")
        to.box(
            left + 8 * 33 + 8,
            y + 8,
            44 * loads[e] / loads.mean(),
            14,
            "var(--s1)",
            0.5,
            f"{loads[e] / loads.mean():.3f} of the mean",
        )
    to.line(left + 8 * 33 + 52, 68, left + 8 * 33 + 52, 342, "mark")
    to.text(left + 8 * 33 + 52, 358, "mean", "tick", "middle")


# over steps


def cost() -> str:
    x = np.arange(512, 32_769, 256)
    measured = ov.cost.fit(
        [[length] * (tokens // length) for tokens, length in MEASURED],
        [ms / 1000 for ms in MEASURED.values()],
    )
    shown = (
        ("tokens", ov.cost.tokens),
        ("llama_12b", LLM),
        ("tmoe_25b", ov.cost.tmoe_25b),
        ("mixtral_8x7b", ov.cost.mixtral_8x7b),
        (
            "window of 4k",
            ov.cost.transformer(hidden=4608, layers=45, heads=36, window=4096, vocab=128_256),
        ),
        ("measured", measured),
    )
    series = []
    for k, (name, fn) in enumerate(shown):
        each = fn({"tokens": x}) / x
        series.append(PlotLine(label=name, color=series_color(k), y=each / each[0]))
    return svg.lines(
        x,
        series,
        svg.Axes(
            x_label="tokens of the document",
            y_label="cost of one token, 1 at 512",
            y_from=0.8,
            y_to=2.4,
            show=lambda v: f"{v:g}",
            x_ticks=[(k * 4096, f"{4 * k}k") for k in range(1, 9)],
        ),
        about="cost of one token by the length of its document",
    )


def rows_of(seed: int, most: int) -> Callable[[int], Iterator[dict[str, Any]]]:
    return lambda shard: ({"tokens": [1] * int(n)} for n in lengths(3000, seed, 16, most))


def launched(mixture: Any, names: tuple[str, ...], most: int, **given: Any) -> ov.Job:
    sources = [
        ov.Source(
            name, ov.Factory(rows_of(40 + i, most), fingerprint=f"{i}"), transforms=[ov.Tokens()]
        )
        for i, name in enumerate(names)
    ]
    return ov.Job(
        name="picture",
        sources=sources,
        mixture=mixture,
        batch=ov.Batch(samples=32, context=1024),
        **given,
    )


def mix() -> str:
    schedule = ov.schedule.cosine(
        {"web": 0.8, "code": 0.2}, {"web": 0.35, "code": 0.35, "books": 0.3}, steps=40, begin=10
    )
    names, steps = ("web", "code", "books"), 80
    wanted, found = np.zeros((3, steps)), np.zeros((3, steps))
    with (
        tempfile.TemporaryDirectory() as tmp,
        ov.launch(launched(schedule, names, 1024, until=steps), cache_dir=tmp) as session,
    ):
        session.set_mixture({"web": 0.2, "code": 0.2, "books": 0.6}, at=65)
        for step in session.client():
            for i, share in enumerate(session.plan(step.step).summary()["sources"].values()):
                wanted[i, step.step], found[i, step.step] = share["wanted"], share["samples_share"]
    series = [
        PlotLine(label=n, color=series_color(i), y=found[i], wanted=wanted[i])
        for i, n in enumerate(names)
    ]
    return svg.lines(
        np.arange(steps),
        series,
        svg.Axes(
            x_label="step",
            y_label="share of the step's 32 samples; dashed: wanted",
            y_from=0.0,
            y_to=1.0,
            show=lambda v: f"{v:.0%}",
        ),
        about="shares of three sources over 80 steps, as expected and as drawn",
        marks=[(10, "cosine begins"), (50, "and ends"), (65, "set_mixture")],
    )


def look_ahead() -> str:
    schedule, steps = ov.schedule.length_warmup(start=32, end=1024, steps=24), 36
    to = Drawing(
        330, "lengths of the samples of 36 steps under a length warm-up, below the rising limit"
    )
    left, right, top, bottom = 60, 30, 34, 44
    to.text(
        12, 18, "tokens of each sample of a step; dashed: what the schedule wants at most", "label"
    )
    for power in range(4, 11):
        y = top + (10 - power) * (330 - top - bottom) / 6
        to.line(left, y, WIDTH - right, y, "grid")
        to.text(left - 8, y + 4, f"{2**power:,}", "tick", "end")
    wide = (WIDTH - left - right) / steps
    at = lambda tokens: top + (10 - np.log2(tokens)) * (330 - top - bottom) / 6  # noqa: E731
    dots: list[str] = []
    with tempfile.TemporaryDirectory() as tmp:
        job = launched(schedule, ("web",), 1024, look_ahead=4, max_age=24, until=steps)
        with ov.launch(job, cache_dir=tmp) as session:
            for step in session.client():
                for k, n in enumerate(np.sort(session.plan(step.step).tokens).tolist()):
                    dots.append(
                        f"M{left + (step.step + 0.1 + 0.8 * k / 32) * wide:.1f} {at(n):.1f}h.1"
                    )
    to.parts.append(
        '<path style="stroke:var(--s0);stroke-width:3.4;stroke-linecap:round" '
        f'd="{"".join(dots)}"/>'
    )
    to.line(left + 24 * wide, top, left + 24 * wide, 330 - bottom, "mark")
    to.text(left + 24 * wide + 6, top - 8, "no limit from step 24 on", "tick")
    limit = [(left + (s + 0.5) * wide, float(at(schedule.threshold(s)))) for s in range(24)]
    to.parts.append(f'<path class="bound" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in limit)}"/>')
    for s in range(0, steps, 4):
        to.text(left + (s + 0.5) * wide, 330 - bottom + 18, str(s), "tick", "middle")
    to.text((left + WIDTH - right) / 2, 326, "step", "label", "middle")
    return to.done()


# the low level, and one sample


def low_level() -> str:
    to = Drawing(300, "where the low-level hooks stand on the way of a step")
    boxes = (("files", 20), ("loaders", 180), ("constructors", 430), ("clients", 700))
    for name, x in boxes:
        to.cell(x, 170, 130, 40, name, "var(--muted)", 0.08)
    for x0, x1 in ((150, 180), (310, 430), (560, 700)):
        to.arrow(x0, 190, x1 - 2, 190)
    to.cell(305, 40, 130, 40, "planner", "var(--muted)", 0.08)
    to.arrow(250, 168, 330, 82)
    to.arrow(400, 82, 480, 168)
    to.text(250, 128, "metadata", "tick", "end")
    to.text(480, 128, "LoadingPlan", "tick")
    for name, note, x, y in (
        ("plan_raw", "arrays in, bucket and microbatch out", 540, 47),
        ("summary_buffer", "what the planner sees", 90, 47),
        ("loader_do_plan", "tokens of one source's samples", 297, 240),
        ("constructor_do_plan", "microbatches of one bucket", 560, 240),
    ):
        to.cell(x, y, 142, 26, name, "var(--s0)", 0.3)
        to.text(x + 71, y + 42, note, "tick", "middle")
    to.arrow(540, 60, 438, 60)
    to.arrow(305, 60, 235, 60)
    to.arrow(368, 240, 368, 194)
    to.arrow(631, 240, 631, 194)
    return to.done()


def explain() -> str:
    job = launched(None, ("web", "code"), 1024, place=ov.Mesh(dp=4), until=3)
    with tempfile.TemporaryDirectory() as tmp, ov.launch(job, cache_dir=tmp) as session:
        for _ in session.client():
            pass
        chosen = session.plan(2)
        said = session.explain(
            chosen.sample_id(int(np.argsort(-chosen.main.cost, kind="stable")[6]))
        ).to_dict()
    (at,) = said["placed"]
    to = Drawing(190, f"the way of sample {said['sample']}")
    facts = (
        (said["sample"], f"{said['row_unit']} {said['row']} of file 0", f"{said['tokens']} tokens"),
        (said["loader"], "read it", ""),
        (
            f"step {said['step']}",
            f"drawn as number {said['position']}",
            f"of {said['of_samples']} samples",
        ),
        (
            f"bucket {at['bucket']}",
            f"microbatch {at['microbatch']}, slot {at['slot']}",
            f"{at['share']:.1%} of its cost",
        ),
        (f"rank {at['ranks'][0]}", at["constructor"], "builds its batch"),
    )
    for k, (head, *rest) in enumerate(facts):
        x = 16 + k * 170
        to.cell(x, 40, 146, 34, head, series_color(k), 0.25)
        for j, words in enumerate(rest):
            to.text(x + 73, 96 + j * 17, words, "tick", "middle")
        if k:
            to.arrow(x - 22, 57, x - 3, 57)
    why, _, by = at["why"].partition("; ")
    to.text(16, 20, "session.explain(sample)", "label")
    for j, words in enumerate((why, by.partition(": ")[0])):
        to.text(16, 152 + j * 22, words, "name")
    return to.done()


PICTURES: dict[str, Callable[[], str]] = {
    fn.__name__: fn
    for fn in (
        place,
        broadcast_at,
        dgraph,
        mix,
        look_ahead,
        distribute,
        cost,
        balance,
        split,
        plan,
        modules,
        low_level,
        explain,
    )
}


def main(folder: str = str(ROOT / "docs" / "img" / "primitives")) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (out / f"{name}.svg").write_text(
            plot_file(draw()).replace("</style>", MORE_STYLE), encoding="utf-8"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
