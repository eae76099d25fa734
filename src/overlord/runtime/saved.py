"""Events and reports as the plain JSON of a saved state. Names and numbers only: nothing in a state is ever executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlord.messages import AddSource, Report, SetMixture, Skip
from overlord.planner.events import Event


def event_out(event: Event) -> dict[str, Any]:
    if isinstance(event, SetMixture):
        return {"event": "set_mixture", "at": event.at, "weights": dict(event.weights)}
    if isinstance(event, AddSource):
        return {"event": "add_source", "at": event.at, "name": event.name, "fingerprint": event.fingerprint}
    return {"event": "skip", "steps": list(event.steps)}


def event_in(saved: Mapping[str, Any]) -> Event:
    if saved["event"] == "set_mixture":
        return SetMixture(int(saved["at"]), {str(k): float(v) for k, v in saved["weights"].items()})
    if saved["event"] == "add_source":
        return AddSource(int(saved["at"]), str(saved["name"]), str(saved["fingerprint"]))
    return Skip(tuple(int(s) for s in saved["steps"]))


def reports_out(reports: Sequence[Report]) -> dict[str, dict[str, dict[str, float]]]:
    """By step, rank and metric: what JSON has are texts for keys."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for report in reports:
        out.setdefault(str(report.step), {})[str(report.rank)] = dict(report.metrics)
    return out


def reports_in(saved: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[Report, ...]:
    return tuple(
        Report(int(step), int(rank), {str(name): float(value) for name, value in metrics.items()})
        for step, ranks in sorted(saved.items(), key=lambda item: int(item[0]))
        for rank, metrics in sorted(ranks.items(), key=lambda item: int(item[0]))
    )
