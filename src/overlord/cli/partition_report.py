"""The text of ``overlord partition``: chosen numbers of loaders and workers, and the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from overlord.observe.tables import grid, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.scaling.partition import Partition

SHOWN = 40  # most sources in the table, and most workers in the list


def partition_document(
    made: Partition, tokens: float, measured: int, demand: float | None, shortfall: str
) -> dict[str, Any]:
    """Return the partition as a JSON document; ``tokens``, ``measured``: as in the view.

    ``demand``: tokens per second that trainers take; ``shortfall``: the reason why it is not met.
    """
    return {
        "cores": made.resources.cores,
        "loading_cores": made.loading_cores,
        "memory_bytes": made.memory,
        "samples_per_s": made.rate,
        "tokens_per_s": made.tokens_per_s(tokens),
        "bound": made.bound,
        "measured_sources": measured,
        "demand": demand,
        "shortfall": shortfall,
        "sources": [
            {
                "name": s.source,
                "reason": s.reason,
                "cluster": s.cluster,
                "level": s.level,
                "work": s.work,
                "loaders": s.loaders,
                "workers": s.actors,
            }
            for s in made.shares
        ],
        "workers": made.hosting.reasons,
    }


def partition_view(made: Partition, tokens: float, measured: int) -> RenderableType:
    """Return the partition and its reasons as text.

    ``tokens``: mean tokens of a sample. ``measured``: number of sources whose cost was measured.
    """
    r, h, n = made.resources, made.hosting, len(made.shares)
    memory = "" if r.memory_bytes is None else f" of {size(r.memory_bytes)}"
    other = r.beside_s / made.sample_s if made.sample_s else 0.0
    facts = [
        f"{n} sources on {r.cores} CPU cores: {made.loading_cores} for loading, the rest for "
        "constructors and planner "
        f"({other:.0%} of the work)",
        f"{sum(h.loaders)} loaders in {h.n_hosts} workers of {h.threads} threads; a loader "
        f"of level 1 is worth {made.block:.3g} cores",
        f"memory of loader workers: {size(made.memory)}{memory}",
        f"predicted: {made.rate:,.0f} samples/s, {made.tokens_per_s(tokens):,.0f} "
        f"tokens/s; limited by {made.bound}",
        f"costs: {measured} of {n} sources measured, {n - measured} estimated from their index",
    ]
    order = sorted(made.shares, key=lambda s: (-s.work, s.source))
    head = ("source", "reason", "cluster", "level", "work", "loaders", "workers")
    rows = [
        (
            s.source,
            s.reason,
            f"{s.cluster}",
            f"{s.level:,.1f}",
            f"{s.work:.1%}",
            f"{s.loaders}",
            f"{s.actors}",
        )
        for s in order[:SHOWN]
    ]
    shown: list[RenderableType] = [*(Text(f) for f in facts), Text(""), grid(head, rows, 2)]
    if len(order) > SHOWN:
        shown.append(
            Text(
                f"and {len(order) - SHOWN} with less work, "
                f"{sum(s.loaders for s in order[SHOWN:])} loaders in all",
                "dim",
            )
        )
    return Group(
        *shown, Text(""), *(Text(f"worker {k:<3} {why}") for k, why in enumerate(h.reasons[:SHOWN]))
    )
