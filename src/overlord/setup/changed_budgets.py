"""Resume with other budgets: sources that had left may have samples again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from overlord.errors import StateMismatch
from overlord.job.job import Job, Source
from overlord.loader.samples import SourceOrder
from overlord.messages.control import StreamState
from overlord.planning.mixture import lost_sources

_EPOCHS = re.compile(r"epochs ([0-9.e+-]+)(?:,|$)")


def with_changed_budgets(
    state: StreamState,
    job: Job,
    orders: Sequence[SourceOrder],
    changed: Mapping[str, tuple[str, str]],
) -> StreamState:
    """Return a saved state for a job whose budgets may differ from those of the saved one.

    ``changed``: differences of the fingerprint that are permitted. A source whose reading changed
    is active again, unless it was lost. The next draw finds out whether it has samples left. Raise
    ``StateMismatch`` if a changed part of an epoch would lose rows.
    """
    lost = {event.name for event in lost_sources(state.events)}
    active = list(state.active)
    for i, (source, order) in enumerate(zip(job.sources, orders, strict=True)):
        if (pair := changed.get(f"source {source.name}: reading")) is None:
            continue
        _check_part(source, order, pair, int(state.cursors[i, 0]))
        active[i] = active[i] or source.name not in lost
    return replace(state, active=tuple(active))


def _check_part(source: Source, order: SourceOrder, pair: tuple[str, str], epoch: int) -> None:
    """Refuse another part of the epoch that the stream is in, unless the rows are counted.

    Where rows are not counted, the rows of an epoch's part are not the first rows of a larger one.
    """
    found = [_EPOCHS.search(text) for text in pair]
    then, now = (float(m[1]) if m else None for m in found)
    parts = {math.floor(n) for n in (then, now) if n is not None and not n.is_integer()}
    if then == now or epoch not in parts or order.rows_known:
        return
    raise StateMismatch(
        {f"source {source.name}: reading": pair},
        f"resume with {pair[0].partition(',')[0]}; to draw more of the source, list its files as "
        "another source",
        f"source {source.name!r} is inside the epoch of which it gives a part, and the number of "
        "its rows is unknown before reading",
    )
