"""Text and JSON views of a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import JournalError, OverlordError
from overlord.journal.checkpoint import (
    ACKED,
    BACK,
    EVENT,
    JOB,
    KINDS,
    PLAN,
    REPORT,
    REWIND,
    SNAPSHOT,
    Entry,
    samples_of,
)
from overlord.journal.record import BYTES, Record
from overlord.journal.segments import Reading, SegmentData
from overlord.journal.verify import JournalReport
from overlord.observe.stage_text import stage_name
from overlord.sample import Ragged

if TYPE_CHECKING:
    from rich.console import RenderableType

# Most levels of nesting, items of a list and characters of a text that `outline` keeps.
DEEP, MANY, LONG = 4, 12, 60


def journal_document(report: JournalReport, reading: Reading, last: int | None) -> dict[str, Any]:
    """Return a journal's report and its ``last`` records (None: all) as a JSON document."""
    whole = {f.name: getattr(report, f.name) for f in fields(report)}
    descriptions = _descriptions(reading)
    listed = [
        {
            "segment": segment.name,
            "byte": placed.start,
            **_line(placed.record),
            "said": descriptions.get(id(placed.record), ""),
            "body": outline(_body(placed.record)),
        }
        for segment, placed in _last_records(reading, last)
    ]
    return {**whole, "list": listed}


def journal_view(
    report: JournalReport, reading: Reading, last: int | None, width: int
) -> RenderableType:
    """Return a table of the ``last`` records (None: all), one line per record."""
    from rich.console import Group
    from rich.text import Text

    from overlord.observe.tables import grid, size

    shown, descriptions = _last_records(reading, last), _descriptions(reading)
    rows = [
        [
            str(r.number),
            r.kind,
            size(len(r.data)),
            segment.name.removesuffix(".ovj").lstrip("0") or "0",
            str(placed.start),
            _shortened(r, descriptions.get(id(r), ""), width),
        ]
        for segment, placed in shown
        for r in [placed.record]
    ]
    table = grid(["number", "kind", "body", "segment", "byte", "what"], rows, 6)
    head = (
        f"job {report.job!r}: {report.records} records in {report.segments} segments, "
        f"{size(report.nbytes)}; generation "
        f"{report.generation}, by {report.writer or 'nobody'}"
    )
    left_out = [Text(f"left out: {cut}") for cut in report.cuts]
    more = (
        [Text(f"the last {len(shown)} are shown")]
        if last is not None and len(shown) < report.records
        else []
    )
    return Group(Text(head), *left_out, table, *more)


def _last_records(reading: Reading, last: int | None) -> list[tuple[SegmentData, Any]]:
    """Return the ``last`` records (None: all), including internal records of the log.

    Each record is returned with its segment; void segments are left out.
    """
    found = [
        (segment, placed)
        for segment in reading.parts
        if not segment.void
        for placed in segment.records
    ]
    return found if last is None else found[len(found) - min(last, len(found)) :]


def _descriptions(reading: Reading) -> dict[int, str]:
    """Return a description of each record that a job wrote, by the id of the record object.

    Internal records of the log, and records that cannot be decoded, have no description.
    """
    names: tuple[str, ...] = ()
    stages: list[tuple[int, Any]] = []
    found = {}
    for segment in reading.parts:
        for placed in segment.records if not segment.void else ():
            record = placed.record
            if record.kind not in KINDS or not isinstance(body := _body(record), Mapping):
                continue
            try:
                if record.kind == JOB:
                    names = tuple(map(str, body["names"]))
                    stages = [(int(first), name) for first, name in body.get("stages", ())]
                entry = Entry(record.kind, record.number, dict(body))
                found[id(record)] = describe(entry, names, stages)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                continue
    return found


def describe(entry: Entry, names: tuple[str, ...], stages: Sequence[tuple[int, Any]] = ()) -> str:
    """Return one record of a job as a line of text; ``stages``: their first steps and names."""
    body, step = entry.body, entry.number
    if entry.kind == PLAN:
        given = samples_of(body).tolist()
        each = ", ".join(f"{_name(names, i)} {n}" for i, n in enumerate(given) if n)
        skipped = ", skipped" if body["skipped"] else ""
        started = [name for first, name in stages if first <= step]
        stage = f"stage {stage_name(started[-1])}, " if started else ""
        return (
            f"{stage}{sum(given)} samples{skipped}, digest {body['digest'][:12]}, "
            f"acked {_step(body['acked'])}: {each}"
        )
    if entry.kind in (SNAPSHOT, REWIND):
        rewound = "rewound: " if entry.kind == REWIND else ""
        return (
            f"{rewound}the state before step {step}, of {body['sources']} sources; "
            f"acked {_step(body['acked'])}"
        )
    if entry.kind == EVENT:
        return ", ".join(f"{key} {value}" for key, value in body.items() if key != "id")
    if entry.kind == REPORT:
        return f"rank {body['rank']}: " + ", ".join(
            f"{name} {value:g}" for name, value in body["metrics"].items()
        )
    if entry.kind == ACKED:
        return f"acked {_step(step)}"
    if entry.kind == BACK:
        target = f"step {step}" if step >= 0 else "the beginning"
        return f"rolled back to {target}: {body['reason']}"
    return f"{len(body['names'])} sources: {', '.join(body['names'])}; {body['place']}"


def _step(step: int) -> str:
    """Return an acknowledged step as text; a negative number is ``none``."""
    return f"step {step}" if step >= 0 else "none"


def _name(names: tuple[str, ...], i: int) -> str:
    return names[i] if i < len(names) else f"source {i}"


def replay_faults(reading: Reading) -> tuple[str, ...]:
    """Replay the records of a job; return the reasons why it cannot be resumed.

    Steps must be in order, and every snapshot must equal the state after the preceding plans.
    """
    if reading.faults or not any(record.kind == JOB for record in reading.records):
        return ()
    from overlord.journal.job_journal import entries
    from overlord.journal.replay import Recovered

    try:
        found = Recovered.of(entries(reading.records), checking=True)
        if not found.empty:
            found.state(found.acked)
    except OverlordError as error:
        return (str(error),)
    return ()


def _line(record: Record) -> dict[str, Any]:
    return {"number": record.number, "kind": record.kind, "bytes": len(record.data)}


def _shortened(record: Record, description: str, width: int) -> str:
    text = description or json.dumps(outline(_body(record)), default=str)
    room = max(20, width - 60)
    return text if len(text) <= room else text[: room - 3] + "..."


def _body(record: Record) -> Any:
    if record.form == BYTES:
        return record.data
    try:
        return record.body
    except JournalError as error:
        return {"cannot be decoded": error.problem}


def outline(value: Any, deep: int = DEEP) -> Any:
    """Return a value as short JSON values: arrays as type and size, long lists and texts cut.

    ``deep``: levels of nesting that are kept; deeper values become the name of their type.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= LONG else value[:LONG] + "..."
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Ragged):
        return f"{value.values.dtype}[{len(value.offsets) - 1} rows]"
    if deep == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): outline(item, deep - 1) for key, item in value.items()}
    if is_dataclass(value):
        return {
            type(value).__name__: {
                f.name: outline(getattr(value, f.name), deep - 1) for f in fields(value)
            }
        }
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - MANY} more"] if len(value) > MANY else []
        return [outline(item, deep - 1) for item in value[:MANY]] + more
    return type(value).__name__
