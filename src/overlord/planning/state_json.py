"""Events, reports and fingerprints as the plain JSON of a saved state. Pure.

A state holds names and numbers only: nothing in it is ever executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from overlord.messages.control import AddSource, Report, SetMixture, Skip, SourceLost
from overlord.planning.mixture import Event

# keys by which a state is recognised
KEYS = ("version", "job", "fingerprint", "step", "cursors")


EACH = ("files", "transforms", "reading")  # parts of a fingerprint that every source has


def state_problem(saved: Any) -> str:
    """Return why a value is not a saved state of a job; an empty text if it has the form of one."""
    wanted = f"expected a mapping with {', '.join(KEYS)} and more, as state_dict() gives it, got"
    if not isinstance(saved, Mapping):
        return f"not an Overlord state: {wanted} {type(saved).__name__}"
    if missing := [key for key in KEYS if key not in saved]:
        keys = ", ".join(map(repr, list(saved)[:8])) or "no key"
        return f"not an Overlord state: {wanted} {keys}; it lacks {', '.join(missing)}"
    return ""


def event_out(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON."""
    if isinstance(event, SetMixture):
        return {"event": "set_mixture", "at": event.at, "weights": dict(event.weights)}
    if isinstance(event, AddSource):
        return {
            "event": "add_source",
            "at": event.at,
            "name": event.name,
            "fingerprint": event.fingerprint,
        }
    if isinstance(event, SourceLost):
        return {"event": "source_lost", "at": event.at, "name": event.name, "reason": event.reason}
    return {"event": "skip", "steps": list(event.steps)}


def event_in(saved: Mapping[str, Any]) -> Event:
    """Return the event of which ``event_out`` made ``saved``."""
    if saved["event"] == "set_mixture":
        return SetMixture(int(saved["at"]), {str(k): float(v) for k, v in saved["weights"].items()})
    if saved["event"] == "add_source":
        return AddSource(int(saved["at"]), str(saved["name"]), str(saved["fingerprint"]))
    if saved["event"] == "source_lost":
        return SourceLost(int(saved["at"]), str(saved["name"]), str(saved["reason"]))
    return Skip(tuple(int(s) for s in saved["steps"]))


def reports_out(reports: Sequence[Report]) -> dict[str, dict[str, dict[str, float]]]:
    """Return reports as plain JSON: metrics by step, rank and metric name."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for report in reports:
        out.setdefault(str(report.step), {})[str(report.rank)] = dict(report.metrics)
    return out


def reports_in(saved: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[Report, ...]:
    """Return the reports of which ``reports_out`` made ``saved``, sorted by step and rank."""
    return tuple(
        Report(int(step), int(rank), {str(name): float(value) for name, value in metrics.items()})
        for step, ranks in sorted(saved.items(), key=lambda item: int(item[0]))
        for rank, metrics in sorted(ranks.items(), key=lambda item: int(item[0]))
    )


def fingerprint_out(parts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the parts of a fingerprint, with the most frequent value of each part stored once.

    Hundreds of sources mostly differ in their files alone.
    """
    out = dict(parts)
    for part in EACH:
        own = [f"source {name}: {part}" for name in names]
        values = Counter(parts[key] for key in own if key in parts)
        if not values or values.total() < len(own):
            continue
        common, n = values.most_common(1)[0]
        if n > 1:
            out = {key: value for key, value in out.items() if key not in own or value != common}
            out[f"each source: {part}"] = common
    return out


def fingerprint_in(saved: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return all parts of a fingerprint that ``fingerprint_out`` shortened."""
    out = {
        part: value
        for part, value in saved.items()
        if part not in {f"each source: {one}" for one in EACH}
    }
    for part in EACH:
        if (common := saved.get(f"each source: {part}")) is not None:
            out = {f"source {name}: {part}": common for name in names} | out
    return out
