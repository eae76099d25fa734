"""The entries of a journal, from which the state after any step can be restored. Pure.

Checkpoints are differential (the Overlord paper, section 6.1). The whole state is written rarely,
as a *snapshot*; every plan holds only its changes to the state. A snapshot and the plans since give
the state after each of them, bit for bit, without reading any data. A snapshot is stored as a
change from the empty state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from overlord.messages.control import Cursor, EventId, PlannedStep, Report, StreamState
from overlord.planning.mixture import Event, with_added_sources
from overlord.planning.state_json import (
    event_in,
    event_out,
    fingerprint_out,
    reports_in,
    reports_out,
)

# ----------------------------------------------------------------------------
# Compact tables of integers: each column is stored in the smallest integer type that holds it.
#
# The entry of each plan has such a table.

ZERO = "0"  # the form of a column of zeros, which takes no bytes
FORMS: dict[str, np.dtype[Any]] = {
    "b": np.dtype("<i1"),
    "h": np.dtype("<i2"),
    "i": np.dtype("<i4"),
    "q": np.dtype("<i8"),
}
_LIMITS = [(form, np.iinfo(dtype).min, np.iinfo(dtype).max) for form, dtype in FORMS.items()]


def packed(table: np.ndarray) -> list[Any]:
    """Return an int64 table [rows, columns] as a text of one letter per column, and all bytes.

    The letter of a column is its form in ``FORMS``, or ``ZERO``, which takes no bytes.
    """
    if not len(table):
        return [ZERO * table.shape[1], b""]
    low, high = table.min(axis=0).tolist(), table.max(axis=0).tolist()
    form = "".join(map(_form, low, high))
    return [
        form,
        b"".join(table[:, k].astype(FORMS[f]).tobytes() for k, f in enumerate(form) if f != ZERO),
    ]


def _form(low: int, high: int) -> str:
    return (
        ZERO
        if low == high == 0
        else next(form for form, least, most in _LIMITS if least <= low and high <= most)
    )


def unpacked(saved: Sequence[Any], rows: int) -> np.ndarray:
    """Return the int64 table of ``rows`` rows that ``packed`` encoded.

    Raise ValueError for an unknown form, or another number of bytes.
    """
    form, data = saved
    if unknown := set(form) - {ZERO, *FORMS}:
        raise ValueError(
            f"expected columns of forms in {ZERO}{''.join(FORMS)}, got {sorted(unknown)[0]!r:.10}"
        )
    wanted = sum(FORMS[f].itemsize for f in form if f != ZERO) * rows
    if len(data) != wanted:
        raise ValueError(
            f"expected {wanted} bytes for {rows} rows of {form!r:.40}, got {len(data)}"
        )
    table, at = np.zeros((rows, len(form)), np.int64), 0
    for k, f in enumerate(form):
        if f != ZERO:
            table[:, k] = np.frombuffer(data, FORMS[f], rows, at)
            at += rows * FORMS[f].itemsize
    return table


SNAPSHOT, PLAN, EVENT, REPORT, ACKED, REWIND, BACK, JOB = (
    "snapshot",
    "plan",
    "event",
    "report",
    "acked",
    "rewind",
    "back",
    "job",
)
KINDS = (SNAPSHOT, PLAN, EVENT, REPORT, ACKED, REWIND, BACK, JOB)
MOST_SOURCES = 2**20  # an entry with more is refused before memory is allocated for it
MOST_AGES = 2**26  # the same for ages of look-ahead samples
N_CURSOR = len(Cursor())

Body = dict[str, Any]  # texts, whole numbers, bytes, lists and dicts of them


# ----------------------------------------------------------------------------
# Entries of a journal: their contents, and the changes of a state.


@dataclass(frozen=True, slots=True)
class Entry:
    """The decoded content of a record.

    ``number`` is a step. ``where`` is the segment and byte of an entry that was read.
    """

    kind: str
    number: int
    body: Body
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The rule for the next snapshot, by the bytes of the plans since the last one.

    A snapshot is due when these plans have ``ratio`` times its bytes. So snapshots add 1/``ratio``
    to the bytes written, whatever the number of sources. A replay of the plans costs at most
    ``ratio`` times as much as reading the snapshot. ``most_bytes`` and ``most_plans`` bound the
    plans that a restart holds in memory and replays.
    """

    ratio: int = 64
    most_bytes: int = 2**23
    most_plans: int = 1024

    def due(self, snapshot_bytes: int, bytes_since: int, plans_since: int) -> bool:
        return plans_since >= self.most_plans or bytes_since >= min(
            self.ratio * snapshot_bytes, self.most_bytes
        )


# entries


def snapshot(state: StreamState, acked: int, applied: Sequence[EventId] = ()) -> Entry:
    """Return an entry with the whole state; its number is the next step of the state.

    ``applied``: the last applied event of each origin. The entries of these events may be pruned.
    """
    ids = {"applied": [list(one) for one in applied]} if applied else {}
    return Entry(SNAPSHOT, state.step, {"acked": acked, **ids, **changes(None, state)})


def rewind(state: StreamState, floor: int = 0) -> Entry:
    """Return a snapshot that restarts the stream: earlier plans no longer count.

    ``floor`` is the first step that events may still change. It is above the state's step if some
    ranks have already received steps that are replanned.
    """
    return Entry(
        REWIND,
        state.step,
        {"acked": state.step - 1, "floor": max(floor, state.step), **changes(None, state)},
    )


def plan(stage: PlannedStep, before: StreamState, acked: int) -> Entry:
    """Return the entry of a planned step: its digest, and its changes to the state.

    ``acked`` is the last step that all ranks had acknowledged when the plan was made.
    """
    assert isinstance(stage.after, StreamState)
    body = {
        "digest": stage.digest,
        "skipped": stage.skipped,
        "acked": acked,
        **changes(before, stage.after),
    }
    return Entry(PLAN, stage.plan.step, body)


def event(applied: Event, step: int, event_id: EventId) -> Entry:
    """Return the entry of an event; ``step`` is the first step without a plan at the time."""
    return Entry(EVENT, step, event_out(applied) | {"id": list(event_id)})


def report(received: Report, event_id: EventId) -> Entry:
    body = {"rank": received.rank, "metrics": dict(received.metrics), "id": list(event_id)}
    return Entry(REPORT, received.step, body)


def ids_of(entry: Entry) -> list[EventId]:
    """Return the applied events that an entry names; none in a journal of an older version."""
    ids = [entry.body["id"]] if "id" in entry.body else entry.body.get("applied", [])
    return [EventId(str(launch), str(origin), int(n)) for launch, origin, n in ids]


def acked(step: int) -> Entry:
    """Return the entry of a step that all ranks acknowledged, if no later plan records it."""
    return Entry(ACKED, step, {})


def rollback(step: int, generation: int, reason: str) -> Entry:
    """Return the entry of a rollback after a worker was lost.

    All steps after ``step`` are replanned with the same plans. A replay ignores the entry; it is
    for people who read the journal.
    """
    return Entry(BACK, step, {"generation": generation, "reason": reason})


def job(
    step: int,
    names: Sequence[str],
    fingerprint: Mapping[str, str],
    place: str,
    stages: Sequence[tuple[int, str | int]] = (),
) -> Entry:
    """Return the entry that identifies the job of a stream.

    It is written before the first snapshot of a segment, and when a source is added. ``place``
    identifies mesh, ``sync`` and model. With another of them the same samples have other slots, so
    plans have other digests. ``stages``: first step and name of every stage, for readers.
    """
    body: dict[str, Any] = {
        "names": list(names),
        "fingerprint": fingerprint_out(fingerprint, names),
        "place": place,
    }
    if stages:
        body["stages"] = [[first, name] for first, name in stages]
    return Entry(JOB, step, body)


def event_of(entry: Entry) -> Event:
    return event_in(entry.body)


def report_of(entry: Entry) -> Report:
    metrics = {str(name): float(value) for name, value in entry.body["metrics"].items()}
    return Report(entry.number, int(entry.body["rank"]), metrics)


# states


def changes(before: StreamState | None, after: StreamState) -> Body:
    """Return the changes from ``before`` to ``after``; None is the empty state.

    Numbers are stored as differences, which are small.
    """
    n, full = len(after.active), before is None
    before = _empty(n, tuple(after.counts)) if before is None else with_added_sources(before, n)
    body: Body = {"step": after.step, "sources": n, "mix": [after.mix_step, after.mix_epoch]}
    if full or tuple(after.counts) != tuple(before.counts):
        body["counts"] = list(after.counts)
        before = replace(before, counts=_counted(before, tuple(after.counts)))
    if not (_fits(after.owed) and _fits(before.owed)):
        body["owed"] = list(after.owed)
    delta = _table(after) - _table(before)
    touched = delta.any(axis=1)
    if not touched.all():
        body["rows"], delta = np.packbits(touched).tobytes(), delta[touched]
    body["columns"] = packed(delta)
    if after.active != before.active:
        body["active"] = np.packbits(np.array(after.active, bool)).tobytes()
    if after.events != before.events:
        body["events"] = [event_out(e) for e in after.events]
    if after.weights != before.weights:
        body["weights"] = list(after.weights)
    if after.schedule != before.schedule:
        body["schedule"] = json.dumps(after.schedule)
    if after.ahead or before.ahead:
        body["ahead"] = _ages_out(after.ahead)
    if after.cut:
        body["cut"] = list(after.cut)
    if after.reports != before.reports:
        body["reports"] = _reports_out(before.reports, after.reports)
    return body


def changed(before: StreamState | None, body: Body) -> StreamState:
    """Return the state after the changes in ``body``, which ``changes`` created.

    Raise ValueError, TypeError or KeyError if the body does not fit ``before``.
    """
    n = _whole(body["sources"], MOST_SOURCES)
    before = _empty(n, ()) if before is None else with_added_sources(before, n)
    if len(before.active) != n:
        raise ValueError(f"expected {len(before.active)} sources, got {n}")
    counts = (
        _counted(before, tuple(map(str, body["counts"]))) if "counts" in body else before.counts
    )
    before = replace(before, counts=counts)
    rows, table = _rows(body, n), _table(before)
    delta = unpacked(body["columns"], len(rows))
    if delta.shape[1] != table.shape[1]:
        raise ValueError(f"expected {table.shape[1]} columns, got {delta.shape[1]}")
    table[rows] += delta
    reports = (
        before.reports if "reports" not in body else _reports_in(before.reports, body["reports"])
    )
    mix_step, mix_epoch = body["mix"]
    return StreamState(
        step=_whole(body["step"]),
        cursors=np.ascontiguousarray(table[:, :N_CURSOR]),
        owed=tuple(map(int, body["owed"]))
        if "owed" in body
        else tuple(table[:, N_CURSOR].tolist()),
        active=tuple(_flags(body["active"], n).tolist()) if "active" in body else before.active,
        events=tuple(map(event_in, body["events"])) if "events" in body else before.events,
        mix_step=_whole(mix_step),
        mix_epoch=_whole(mix_epoch),
        ahead=_ages_in(body["ahead"], n) if "ahead" in body else (),
        cut=_cut_in(body["cut"], n) if "cut" in body else (),
        counts={
            name: np.ascontiguousarray(table[:, N_CURSOR + 1 + k]) for k, name in enumerate(counts)
        },
        weights=tuple(map(float, body["weights"])) if "weights" in body else before.weights,
        schedule=json.loads(body["schedule"]) if "schedule" in body else before.schedule,
        reports=reports,
    )


def with_report(state: StreamState, received: Report) -> StreamState:
    """Return the state with a report that later plans may use.

    It replaces an earlier report of the same rank and step.
    """
    known = {(r.step, r.rank): r for r in state.reports}
    known[received.step, received.rank] = received
    return replace(state, reports=tuple(known[key] for key in sorted(known)))


def samples_of(body: Body) -> np.ndarray:
    """Return the number of samples of each source in the step of a plan: int64 [sources]."""
    n = _whole(body["sources"], MOST_SOURCES)
    rows = _rows(body, n)
    out, table = np.zeros(n, np.int64), unpacked(body["columns"], len(rows))
    if table.shape[1] > N_CURSOR + 1:  # the counts begin with samples
        out[rows] = table[:, N_CURSOR + 1]
    return out


def _empty(n: int, counts: tuple[str, ...]) -> StreamState:
    zeros = {name: np.zeros(n, np.int64) for name in counts}
    return StreamState(
        step=0,
        cursors=np.zeros((n, N_CURSOR), np.int64),
        owed=(0,) * n,
        active=(True,) * n,
        counts=zeros,
    )


def _counted(state: StreamState, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: state.counts.get(name, np.zeros(len(state.active), np.int64)) for name in names}


def _fits(owed: Sequence[int]) -> bool:
    """Return whether the numbers of owed samples or tokens fit into 64 bits.

    After a change of weights, numbers of tokens may not fit.
    """
    return not owed or (min(owed) >= -(2**63) and max(owed) < 2**63)


def _table(state: StreamState) -> np.ndarray:
    """Return the integers of every source as a table: cursor, owed samples, counts.

    Differences of tables may overflow; adding them wraps around to the same values.
    """
    owed = (
        np.array(state.owed, np.int64) if _fits(state.owed) else np.zeros(len(state.owed), np.int64)
    )
    return np.column_stack([state.cursors, owed, *state.counts.values()]).astype(
        np.int64, copy=False
    )


def _cut_in(cut: Any, n: int) -> tuple[int, ...]:
    if not isinstance(cut, list) or len(cut) != n:
        raise ValueError(f"expected the cut of {n} sources, got {cut!r:.40}")
    return tuple(map(_whole, cut))


def _ages_out(ahead: Sequence[np.ndarray]) -> list[Any]:
    """Return the ages of look-ahead samples as tables: counts by source, then all ages."""
    if not ahead:
        return []
    lengths = np.array([len(a) for a in ahead], np.int64)
    return [packed(lengths[:, None]), packed(np.concatenate(ahead).astype(np.int64)[:, None])]


def _ages_in(saved: Sequence[Any], n: int) -> tuple[np.ndarray, ...]:
    if not saved:
        return ()
    lengths = unpacked(saved[0], n)[:, 0]
    if (lengths < 0).any() or lengths.sum() > MOST_AGES:
        raise ValueError(
            f"expected 0 to {MOST_AGES} ages in all, and at least 0 of each source, got "
            f"{lengths.sum()} and {lengths.min()}"
        )
    values = unpacked(saved[1], int(lengths.sum()))[:, 0].astype(np.int32)
    return tuple(np.split(values, np.cumsum(lengths)[:-1]))


def _reports_out(before: Sequence[Report], after: Sequence[Report]) -> list[Any]:
    """Return the change of the reports from ``before`` to ``after``.

    If only the oldest reports were dropped, it is the step of the first remaining report. Otherwise
    it is 0 and all reports.
    """
    first = after[0].step if after else (before[-1].step + 1 if before else 0)
    if tuple(r for r in before if r.step >= first) == tuple(after):
        return [first]
    return [0, reports_out(after)]


def _reports_in(before: Sequence[Report], saved: Sequence[Any]) -> tuple[Report, ...]:
    if len(saved) > 1:
        return reports_in(saved[1])
    return tuple(r for r in before if r.step >= int(saved[0]))


def _flags(data: bytes, n: int) -> np.ndarray:
    if len(data) != (n + 7) // 8:
        raise ValueError(f"expected a bit for each of {n} sources, got {len(data)} bytes")
    return np.unpackbits(np.frombuffer(data, np.uint8))[:n].astype(bool)


def _rows(body: Body, n: int) -> np.ndarray:
    """Return the indices of the sources whose rows changed; ``n`` is the number of sources."""
    return np.flatnonzero(_flags(body["rows"], n)) if "rows" in body else np.arange(n)


def _whole(value: Any, most: int = 2**63 - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"expected a whole number from 0 to {most}, got {value!r:.40}")
    return value
