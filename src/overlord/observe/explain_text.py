"""Explanations as text: tables that fit a terminal, with right-aligned numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from overlord.observe.explanation import (
    ModulePlacement,
    SampleExplanation,
    SourceShare,
    StepExplanation,
)
from overlord.planning.graph.page_data import spans

if TYPE_CHECKING:
    from overlord.observe.explanation import Explanation

SOURCES = 24  # sources of a step that are listed
FILES = 3  # files of a source that are listed


def text(explained: Explanation) -> str:
    """Return an explanation as text for a terminal."""
    if isinstance(explained, StepExplanation):
        return _step(explained)
    assert isinstance(explained, SampleExplanation)
    return _sample(explained)


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, last_left: bool = False
) -> list[str]:
    """Return the lines of a table: ``left`` columns of text, then columns of numbers.

    ``last_left``: the last column is text too.
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    lines = []
    words = {*range(left), *([len(head) - 1] if last_left else [])}
    for row in cells:
        padded = (
            c.ljust(w) if k in words else c.rjust(w)
            for k, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def name_value_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each name and its value, with both columns aligned."""
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]


def _step(e: StepExplanation) -> str:
    status = "skipped: planned and not delivered" if e.skipped else "planned"
    lines = name_value_lines(
        [
            ("step", f"{e.step} ({status})"),
            (
                "holds",
                f"{e.samples:,} {e.rows}{of_documents(e.samples, e.documents)}, {e.tokens:,} "
                f"tokens; digest {e.digest}",
            ),
            *([("stage", e.stage_words)] if e.stage_words else []),
            ("weights", e.weights_from),
            *(
                ("" if k else "strategy", what)
                for k, what in enumerate(e.trail or ("not recorded",))
            ),
            *([("model", e.model)] if e.model else []),
        ]
    )
    shown = sorted(sorted(e.sources, key=lambda s: -s.samples)[:SOURCES], key=e.sources.index)
    head = ("source", "weight", f"wanted {e.unit}", "realised", e.rows, "tokens", "from")
    rows = [
        (
            s.name,
            f"{s.weight:g}",
            f"{s.wanted:.2%}",
            f"{s.realised:.2%}",
            f"{s.samples:,}",
            f"{s.tokens:,}",
            _from(s),
        )
        for s in shown
    ]
    lines += ["", *columns(head, rows, last_left=True)]
    if rest := len(e.sources) - len(shown):
        lines.append(
            f"and {rest} more sources with "
            f"{sum(s.samples for s in e.sources) - sum(s.samples for s in shown):,} "
            f"{e.rows}"
        )
    for m in e.modules:
        lines += ["", *_module(m, e)]
    return "\n".join(lines)


def of_documents(samples: int, documents: int) -> str:
    """Return the number of documents as text; empty if every sample is one."""
    return "" if samples == documents else f" of {documents:,} documents"


def _of_lengths(documents: tuple[int, ...]) -> str:
    if not documents:
        return ""
    listed = ", ".join(f"{n:,}" for n in documents[:8])
    return f": documents of {listed}{', ...' if len(documents) > 8 else ''}"


def time_over_mean(sync: str, imbalance: Mapping[str, float]) -> float:
    """Return the step time over the mean rank's time: an imbalance chosen by ``Job.sync``."""
    return imbalance["bucket" if sync == "step" else "microbatch"]


def waits(sync: str, imbalance: Mapping[str, float]) -> str:
    """Describe when ranks wait for each other, and the resulting time of the step."""
    when = "once per step" if sync == "step" else "after every microbatch"
    return (
        f"ranks wait for each other {when} (sync: {sync}): the step takes "
        f"{time_over_mean(sync, imbalance):.3f} times the mean rank's time"
    )


def _from(source: SourceShare) -> str:
    """Return the files with the most samples as text, without their folders."""
    most = sorted(source.files, key=lambda f: -f.samples)[:FILES]
    words = [
        f"f{f.file} {f.path.rpartition('/')[2] or f.path} {f.unit}s {f.first}-{f.last} "
        f"({f.samples})"
        for f in most
    ]
    more = [f"{len(source.files) - len(most)} more files"] if len(source.files) > len(most) else []
    return ", ".join([*words, *more]) or "no file"


def _module(m: ModulePlacement, e: StepExplanation) -> list[str]:
    i = m.imbalance
    room = f" of {m.capacity:,} tokens" if m.capacity else ""
    filled = f", {e.fill:.0%} filled" if m.name == "backbone" and m.capacity else ""
    bound = m.limit + (f" ({i['slot_bound']:.3f} by microbatch)" if "slot_bound" in i else "")
    alone = m.dearest and m.dearest[0].share * m.slowest_over_mean >= 1.0
    why = (
        "its most expensive item alone costs more than the mean bucket"
        if alone
        else f"{m.slowest_items:,} items, the most expensive of them:"
    )
    lines = name_value_lines(
        [
            (
                m.name,
                f"{m.items:,} items in {m.buckets:,} buckets ({m.axis}) x "
                f"{m.microbatches} microbatches{room}{filled}",
            ),
            (
                "imbalance",
                f"{i['bucket']:.3f} by bucket, {i['microbatch']:.3f} by microbatch; {bound}",
            ),
            *([("waits", waits(e.sync, i))] if m.name == "backbone" else []),
            (
                "slowest",
                f"bucket {m.slowest} (ranks {spans(m.slowest_ranks)}), "
                f"{m.slowest_over_mean:.3f} times the mean: {why}",
            ),
            (
                "peak",
                f"{m.peak_tokens:,} tokens in microbatch {m.peak_at[1]} of bucket {m.peak_at[0]}",
            ),
            *([("host memory", m.host_memory)] if m.host_memory else []),
        ]
    )
    rows = [
        (f"  {d.sample}", f"{d.tokens:,}", f"{d.cost:.4g}", f"{d.share:.1%}") for d in m.dearest
    ]
    return (
        [*lines, *columns(("  most expensive", "tokens", "cost", "of bucket"), rows)]
        if rows
        else lines
    )


def _sample(e: SampleExplanation) -> str:
    rows = [
        ("sample", e.sample),
        ("status", e.words),
        ("from", f"{e.path or 'no file'}, {e.row_unit} {e.row:,}"),
    ]
    if e.step is not None:
        drawn = f"number {e.position:,} of {e.of_samples:,} of step {e.step}, counted from 0" + (
            f"; sub-draw {e.substep}" if e.substep is not None else ""
        )
        rows += [
            ("drawn", drawn),
            ("tokens", f"{e.tokens:,}{_of_lengths(e.documents)}"),
            *([("loader", e.loader)] if e.loader else []),
        ]
    for p in e.placed:
        rows += [
            (
                p.module,
                f"bucket {p.bucket}, microbatch {p.microbatch}, slot {p.slot}; ranks "
                f"{spans(p.ranks)}, {p.constructor}",
            ),
            ("", f"size {p.size:,}, cost {p.cost:.4g}: {p.share:.1%} of its bucket"),
            ("why", p.why),
        ]
    rows += [("" if i else "pieces", text) for i, text in enumerate(e.pieces)]
    return "\n".join(name_value_lines(rows))
