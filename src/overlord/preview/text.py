"""A preview as text: one line of a document for each line, with the loss in the first column.

Colours and marks say the same, so that nothing is lost without a terminal. Text of data is made
printable: it cannot control the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlord.observe.terminal_text import one_line, printable
from overlord.preview.decoder import IDS, SPECIAL, UNKNOWN, Segment
from overlord.preview.preview import Preview, PreviewMicrobatch, PreviewSample

LEGEND = (
    "+ has a loss, - has none (a number: the weight of its loss); ⟦ ⟧ special token; ↵ line break. "
    "The first token of a document is never predicted. ? is decided by a label of an earlier step."
)
RANKS = 8  # most ranks of a microbatch that are named


def preview_view(preview: Preview, legend: bool = True) -> RenderableType:
    """Return the whole preview for a console; ``legend``: explain the marks first."""
    views: list[RenderableType] = [Text(LEGEND, "dim")] if legend else []
    for batch in preview.microbatches:
        views += [Text(""), Text(one_line(heading(preview, batch)), "bold")]
        for sample in batch.samples:
            views += _sample_views(sample)
        if batch.hidden_samples:
            views.append(Text(f"and {batch.hidden_samples} more samples (--samples)", "dim"))
    if preview.hidden_microbatches:
        more = f"and {preview.hidden_microbatches} more microbatches (--rank, --replicas)"
        views += [Text(""), Text(more, "dim")]
    return Group(*views)


def heading(preview: Preview, batch: PreviewMicrobatch) -> str:
    """Return a line about a microbatch: its place, samples, tokens and padding."""
    n = len({sample.sample for sample in batch.samples}) + batch.hidden_samples
    samples, tokens = f"{n} sample{'s' * (n != 1)}", f"{batch.tokens:,} tokens"
    if preview.source is not None:
        return f"source {preview.source}: the first {samples} of its stream, {tokens}"
    ranks = ", ".join(map(str, batch.ranks[:RANKS])) + ", ..." * (len(batch.ranks) > RANKS)
    padding = f" ({batch.padding:,} of padding)" if batch.padding else ""
    return (
        f"step {preview.step}, rank{'s' * (len(batch.ranks) > 1)} {ranks}, microbatch "
        f"{batch.microbatch}: {samples}, {tokens}{padding}"
    )


def _sample_views(sample: PreviewSample) -> Iterator[RenderableType]:
    yield Text(one_line(f"── {sample.sample}  {counts(sample)} ──"), "cyan")
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for loss, line in _lines(sample.segments):
        table.add_row(Text(mark(loss), _style(loss)), line)
    yield table
    if sample.hidden_tokens:
        yield Text(f"    ... {sample.hidden_tokens:,} more tokens (--tokens)", "dim")
    for n, image in enumerate(sample.images):
        yield Text(
            f"    image {n}: {image.width} x {image.height} pixels, {image.patches} patches, "
            f"{image.tokens} tokens, encoded by rank {image.rank}",
            "dim",
        )


def counts(sample: PreviewSample) -> str:
    """Return the numbers of tokens of a sample, as text."""
    begin = f"from token {sample.begin:,}: " if sample.begin else ""
    begin = f"{sample.role}: {begin}" if sample.role else begin
    return f"{begin}{sample.tokens:,} tokens, {sample.loss_tokens:,} with a loss"


def mark(loss: float) -> str:
    """Return the mark of a loss weight: +, -, the weight, or ? if an earlier step decides it."""
    return "?" if loss != loss else {0.0: "-", 1.0: "+"}.get(loss, f"{loss:g}")


def _style(loss: float) -> str:
    return "green" if loss > 0 else "dim"


def _lines(segments: Sequence[Segment]) -> Iterator[tuple[float, Text]]:
    """Yield (loss weight, text) of each line: a line ends at a line break or where the loss does.

    The first token, which has no loss, shares the line of its follower.
    """
    line, loss = Text(), None
    for k, segment in enumerate(segments):
        first = k == 0 and len(segment.ids) == 1 and len(segments) > 1 and not segment.loss
        weight = segments[1].loss if first else segment.loss
        if loss is not None and weight != loss and len(line):
            yield loss, line
            line = Text()
        loss = weight
        parts = display(segment).split("\n")
        for n, part in enumerate(parts):
            last = n == len(parts) - 1
            line.append(part + "↵" * (not last), _segment_style(segment))
            if not last:
                yield loss, line
                line = Text()
    if loss is not None and len(line):
        yield loss, line


def _segment_style(segment: Segment) -> str:
    return {SPECIAL: "magenta", UNKNOWN: "red"}.get(segment.kind, _style(segment.loss))


def display(segment: Segment) -> str:
    """Return the printable text of a run, with the marks of special tokens."""
    text = printable(segment.text)
    if segment.kind in (SPECIAL, UNKNOWN):
        return f"⟦{one_line(text)}{f' x {segment.count}' if segment.count > 1 else ''}⟧"
    return f"{text} " if segment.kind == IDS else text
