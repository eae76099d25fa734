"""The page of results of `gpu/hdp.py`, from its JSON. Unfavourable results are first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.hdp_attention import NAMES
from gpu.hdp_offload import EARLIER, RISE
from gpu.hdp_steps import TARGET
from gpu.record import Row

COSINE, APART, FIT = 0.9999, 0.01, 0.05
K = 1024

CANNOT = """## What one GPU cannot show

- Transfers. Keys, values and their gradients are in the memory of this GPU already. Bandwidth and latency of a ring, inside a node or across nodes, are not measured.
- Overlap. On a cluster transfers compete with kernels for multiprocessors and memory bandwidth. A position can then be slower than here, and a hop that is too long shows.
- NCCL: whether changing sets of peers need new connections, what they cost, and what a transfer between ranks that arrive at different times does.
- Waits. The times of ranks are sums of pieces that ran one after another. *with waits* starts a ring when its last member is free, by these times. Differences between GPUs, network jitter and host noise of real ranks are not included.
- The rest of a step: other layers, embedding and loss, the sum of gradients over ranks, the optimizer, pipeline stages. One layer ran.
- Gradients of several processes. Positions here share one process; the tests with gloo ranks cover that on the CPU.
- Offload on nodes with several GPUs, which share host memory, its bandwidth and sometimes PCIe links. One GPU had them alone.
- Convergence and tokens per second of a training job.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def page(data: Row) -> str:
    """Return the page in Markdown."""
    note = (
        "**Tiny shapes: this shows that the program runs, and measures nothing.**\n\n"
        if data["tiny"]
        else ""
    )
    parts = [
        f"# Hybrid data parallelism on a GPU\n\n{data['date']}. {data['machine']}\n\n"
        f"    {data['command']}",
        note + _unfavourable(data),
        _correctness(data),
        _times(data),
        _steps(data),
        _offload(data),
        CANNOT.rstrip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(data: Row, part: str) -> list[Row]:
    return data["rows"].get(part, [])


def _cosine(row: Row) -> float:
    return min(float(row[f"{name} cosine"]) for name in NAMES[1:])


def _unfavourable(data: Row) -> str:
    """List targets that were missed, cells that failed, and cells that did not run."""
    found = [
        f"a: gradient cosine {_cosine(r):.6f} on a ring of {r['ring']}, {r['documents']} documents "
        f"of {r['tokens']} tokens; the target is above {COSINE}"
        for r in _rows(data, "a")
        if not _cosine(r) > COSINE
    ]
    found += [
        f"b: positions of a ring of {r['ring']} differ by {100 * r['apart']:.1f} %; the target is "
        f"{100 * APART:.0f} %"
        for r in _rows(data, "b equal")
        if r["apart"] > APART
    ]
    found += [
        f"b: the fit is {100 * r['error']:+.1f} % off for {r['documents']} documents of "
        f"{r['length']} tokens on {r['ring']} ranks"
        for r in _rows(data, "b")
        if abs(r.get("error", 0.0)) > FIT
    ]
    found += [
        f"b: a ring of {r['ring']} with {r['length']} tokens takes {1e3 * r['host_s']:.1f} ms of "
        f"the host to queue, the device {1e3 * r['seconds']:.1f} ms: alone it is bound by the host"
        for r in _rows(data, "b")
        if r.get("host_s", 0.0) > r["seconds"]
    ]
    found += [
        f"c: slowest over mean {r['over_mean']:.4f} for {_context(r)} on {r['ranks']} ranks, step "
        f"{r['seed']}; the target is {TARGET}"
        for r in _rows(data, "c")
        if r["way"] == "hdp" and r["over_mean"] > TARGET
    ]
    found += [
        f"d: {r['tokens']} tokens: {_risen(r)}, the formula says r = {r['r_max']:.2f}"
        for r in _rows(data, "d formula")
        if _contradicts(r)
    ]
    found += [f"failed: {e['name']}: {e['error']}" for e in data["errors"]]
    found += [f"not run: {n['name']} ({n['why']})" for n in data["not_run"]]
    done = {"a", "b", "c", "d"} - set(data["rows"])
    found += [f"no result of part {part}" for part in sorted(done)]
    head = "## Missed, failed and not run\n\n"
    return head + ("\n".join(f"- {line}" for line in found) or "Nothing.")


def _context(row: Row) -> str:
    n = row["context"]
    return f"{n // K}K" if n % K == 0 else str(n)


def _correctness(data: Row) -> str:
    rows = _rows(data, "a")
    if not rows:
        return ""
    head = ["documents", "tokens", "longest", "ring"]
    named = [*(f"{n} error" for n in NAMES), *(f"{n} cosine" for n in NAMES)]
    body = [
        [str(r[h]) for h in head]
        + [f"{r[n]:.2e}" if "error" in n else f"{r[n]:.7f}" for n in named]
        for r in rows
    ]
    worst = min(map(_cosine, rows))
    text = (
        "## Ring positions against flash attention over whole documents\n\n"
        f"bf16, {data['shapes']['layer']}. Errors are relative (norm of the difference over norm). "
        f"The lowest cosine of a gradient is {worst:.7f}; the target is above {COSINE}."
    )
    parts = [text, table([*head, *named], body)]
    exact = _rows(data, "a exact")
    if exact:
        parts += [
            "Both against attention in float32, where documents are short enough:",
            table(
                ["documents", "tokens", "way", *named],
                [
                    [str(r["documents"]), str(r["tokens"]), r["way"]]
                    + [f"{r[n]:.2e}" if "error" in n else f"{r[n]:.7f}" for n in named]
                    for r in exact
                ],
            ),
        ]
    return "\n\n".join(parts)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.2f}"


def _times(data: Row) -> str:
    rows, linear = _rows(data, "b"), _rows(data, "b linear")
    if not rows and not linear:
        return ""
    text = (
        "## Time of a ring position\n\n"
        f"One layer, forward and backward, bf16: {data['shapes']['layer']}. *attention*: "
        "`ring_attention` of one position, transfers by reference. *layer*: with the linear part of "
        "its tokens, measured apart. *fit*: `ov.cost.fit` by ring size. *host*: time to queue the "
        "piece; TFLOP/s count 3.5 times the products of a causal forward."
    )
    head = ["documents", "of tokens", "ring", "attention ms", "TFLOP/s", "runs", "host ms"]
    body = [
        [
            str(r["documents"]),
            str(r["length"]),
            str(r["ring"]),
            _ms(r["seconds"]),
            f"{r['tflops']:.0f}",
            str(r["times"]),
            _ms(r.get("host_s")),
            _ms(r.get("layer_s")),
            _ms(r.get("fit_s")),
            f"{100 * r['error']:+.1f}" if "error" in r else "",
        ]
        for r in sorted(rows, key=lambda r: (r["ring"], r["length"], r["documents"]))
    ]
    parts = [text, table([*head, "layer ms", "fit ms", "error %"], body)]
    if linear:
        parts += [
            "### Linear part of a layer",
            table(
                ["tokens", "ms", "us a token"],
                [
                    [str(r["tokens"]), _ms(r["seconds"]), f"{1e6 * r['seconds'] / r['tokens']:.3f}"]
                    for r in linear
                ],
            ),
        ]
    parts += [*_fitted(data), *_equal(data)]
    return "\n\n".join(parts)


def _fitted(data: Row) -> list[str]:
    sizes = data.get("costs", {}).get("fitted")
    if not sizes:
        return ["No fit was possible: steps were planned with the costs of an earlier measurement."]
    body = [
        [
            str(f["ranks"]),
            f"{f['linear']:.4g}",
            f"{f['square']:.4g}",
            f"{f['constant']:.3g}",
            str(f["measurements"]),
            f"{100 * f['worst_error']:.1f}",
        ]
        for f in sizes
    ]
    return [
        "### The fitted costs\n\n`t(s, d) = (linear s + square s^2) / d + constant`, seconds.",
        table(["ring", "linear", "square", "constant", "measurements", "worst error %"], body),
    ]


def _equal(data: Row) -> list[str]:
    rows = _rows(data, "b equal")
    if not rows:
        return []
    return [
        "### All positions of a ring\n\nMedian of five runs each, in random order; (slowest - "
        f"fastest) / mean. The target is {100 * APART:.0f} %. The last column shows whether time "
        "depends on the position.",
        table(
            ["tokens", "ring", "fastest ms", "slowest ms", "apart %", "ms by position"],
            [
                [
                    str(r["tokens"]),
                    str(r["ring"]),
                    _ms(min(r["seconds"])),
                    _ms(max(r["seconds"])),
                    f"{100 * r['apart']:.2f}",
                    " ".join(map(_ms, r["seconds"])),
                ]
                for r in rows
            ],
        ),
    ]


def _steps(data: Row) -> str:
    rows = _rows(data, "c")
    if not rows:
        return ""
    hybrid = {_key(r): r for r in rows if r["way"] == "hdp"}
    body = []
    for r in sorted(rows, key=lambda r: (*_key(r), r["way"] != "hdp")):
        ours = hybrid[_key(r)]
        ran = r["executed"] > 0
        body.append(
            [
                _context(r),
                str(r["ranks"]),
                f"{r['slots']} x {r['capacity']}",
                str(r["seed"]),
                r["way"],
                str(r["documents"]),
                str(r["tasks"]),
                str(r["largest"]),
                f"{r['executed']} of {r['members']}" if ran else "none, by the fit",
                str(r["passes"]),
                f"{1e3 * r['slowest_s']:.1f}",
                f"{r['over_mean']:.4f}",
                f"{1e3 * r['with_waits_s']:.1f}" if ran else "",
                f"{r['slowest_s'] / ours['slowest_s']:.2f}",
                " ".join(f"{x:.3f}" for x in r["single_passes"]) if ran else "",
                f"{r['fit_over_mean']:.4f}" if ran else "",
                f"{r['measured_over_fit']:.3f}" if ran else "",
                f"{100 * r['misfit']:.1f}" if ran else "",
                f"{100 * r['drift']:.1f}" if r["passes"] > 1 else "",
                " to ".join(f"{r['clock_mhz'][i]:.0f}" for i in (0, 2)) if "clock_mhz" in r else "",
            ]
        )
    head = [
        "context",
        "ranks",
        "tokens a rank",
        "step",
        "plan",
        "documents",
        "tasks",
        "largest ring",
        "executed",
        "passes",
        "slowest rank ms",
        "slowest over mean",
        "with waits ms",
        "x hdp",
        "single passes",
        "by the fit",
        "measured over fit",
        "misfit %",
        "drift %",
        "MHz",
    ]
    means = [r["over_mean"] for r in hybrid.values()]
    text = (
        "## Steps executed rank by rank\n\n"
        "Files of a Linux source tree, cut at the context. One layer, forward and backward, without "
        "a network. Plans use costs without transfers, fitted to part b and to the tasks of another "
        "step of the same capacity (below). "
        f"Slowest over mean of the hybrid plans: {np.mean(means):.4f} on average, {max(means):.4f} "
        f"at worst; the target is {TARGET}."
    )
    notes = (
        "*executed*: positions of rings that ran, of all positions; each with its real documents. "
        "A position that did not run counts the mean of its ring. *static*: packs of the context on "
        "rings of context / capacity ranks, which here are all ranks, so its ranks are equal by "
        "construction and its time is what counts. *whole samples*: each document on one rank "
        "(LPT), memory aside; its times are those of the fitted cost, extrapolated for documents "
        "longer than the longest on one rank above. *by the fit*: slowest over mean by the fitted "
        "cost. *single passes*: slowest over mean of each pass by itself, that is with its noise. "
        "*measured over fit*: sum over all positions. *misfit*: mean difference of a task from the "
        "fit, weighted by time, apart from that factor. *drift*: of the sum of all pieces between "
        "passes. *MHz*: lowest and highest clock while the case ran."
    )
    return "\n\n".join([text, table(head, body), notes, *_refits(data)])


def _refits(data: Row) -> list[str]:
    rows = _rows(data, "c fit")
    if not rows:
        return ["No fit to tasks of other steps was possible: plans use the costs of part b."]
    body = [
        [
            str(r["capacity"]),
            _context(r),
            str(r["ranks"]),
            str(r["seed"]),
            str(r["tasks"]),
            f"{r['measured_over_before']:.3f}",
            f"{100 * r['misfit_before']:.1f}",
            f"{r['measured_over_after']:.3f}",
            f"{100 * r['misfit_after']:.1f}",
        ]
        for r in rows
    ]
    head = ["capacity", "context", "ranks", "step", "tasks", "measured over part b", "misfit %"]
    text = (
        "### Fits to the tasks of other steps\n\nOne pass, four positions of each ring. The fit of "
        "part b before, and the fit to both after."
    )
    return [text, table([*head, "measured over both", "misfit %"], body)]


def _key(row: Row) -> tuple[int, int, int]:
    return row["context"], row["ranks"], row["seed"]


def _risen(row: Row) -> str:
    first = row["first ratio that rises"]
    return "no ratio rises" if first is None else f"the time rises at ratio {first}"


def _contradicts(row: Row) -> bool:
    """Return whether the measured ratios exclude the ratio of the formula."""
    ratios = sorted(float(r) for r in row["rise"])
    first, most = row["first ratio that rises"], min(1.0, row["r_max"])
    if first is None:
        return most < ratios[-1]
    free = max((r for r in ratios if r < first), default=0.0)
    return not free <= most <= first


def _offload(data: Row) -> str:
    rows, told = _rows(data, "d"), _rows(data, "d formula")
    copied = _rows(data, "d bandwidth")
    if not rows and not copied:
        return ""
    parts = [
        "## Offload\n\n"
        f"Layers of {data['shapes']['offload']}, one document, forward and backward, bf16. The "
        "first and the last layer stay. Memory is the peak, weights and gradients included."
    ]
    parts += [
        f"Pinned memory, copies of {c['bytes'] / 2**30:.3g} GiB: {c['out'] / 1e9:.1f} GB/s to the host, "
        f"{c['back'] / 1e9:.1f} to the device, {c['each of both'] / 1e9:.1f} each if both run."
        for c in copied
    ]
    if told:
        parts += [_formula(told)]
    zero = {r["tokens"]: r["seconds"] for r in rows if r["ratio"] == 0.0}
    line = {(t["tokens"], float(r)): x for t in told for r, x in t["timeline"].items()}
    body = [
        [
            str(r["tokens"]),
            str(r["layers"]),
            f"{r['ratio']:.2f}",
            str(r["times"]),
            f"{1e3 * r['seconds']:.1f}",
            _percent(r["seconds"] / zero[r["tokens"]] - 1 if r["tokens"] in zero else None),
            _percent(line.get((r["tokens"], r["ratio"]))),
            f"{1e3 * r['forward_s']:.1f}",
            f"{r['peak_gb']:.1f}",
            f"{r['offloaded_bytes'] / 1e9:.1f}",
        ]
        for r in sorted(rows, key=lambda r: (r["tokens"], r["ratio"]))
    ]
    head = [
        "tokens",
        "layers",
        "ratio",
        "runs",
        "step ms",
        "rise %",
        "timeline rise %",
        "forward ms",
        "peak GB",
        "on the host GB",
    ]
    return "\n\n".join([*parts, "### Steps by ratio", table(head, body)])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}"


def _ratio(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _formula(told: Sequence[Row]) -> str:
    text = (
        "### The ratio that is hidden\n\n"
        "`r_max(s) = B forward(s) / activations(s)` of one layer, with the measured bandwidth, "
        "forward and bytes. *earlier*: "
        f"{EARLIER[0]} + {EARLIER[1]:.3g} s, derived before at an assumed 53 GB/s. *timeline*: a "
        "model of both copy directions for this few layers. The last layer, which stays, "
        "gives copies time, so the ratio is larger than in a deep model. *measured*: the "
        f"first ratio of the table below whose step takes over {100 * RISE:.0f} % longer than "
        "without offload. What stays on the device is copied there once in each direction, which "
        "also takes time."
    )
    body = [
        [
            str(r["tokens"]),
            f"{r['bytes a token and layer'] / 1e3:.0f}",
            _ms(r["forward_s"]),
            _ms(r["backward_s"]),
            f"{r['r_max']:.2f}",
            f"{r['earlier r_max']:.2f}",
            _ratio(r["timeline rises at"]),
            _ratio(r["first ratio that rises"]),
        ]
        for r in told
    ]
    head = [
        "tokens",
        "KB a token and layer",
        "forward ms",
        "backward ms",
        "r_max",
        "earlier",
        "timeline rises at",
        "measured rises at",
    ]
    return f"{text}\n\n{table(head, body)}"
