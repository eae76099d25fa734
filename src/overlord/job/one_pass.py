"""Rules of a job that evaluates: one pass over every source, in the order of its files.

They make the samples of each step independent of the mesh, and leave no sample out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlord.job.job import Job

# fields with only one value that neither loses a sample nor depends on the mesh, and the reason
ONLY: dict[str, tuple[Any, str]] = {
    "mixture": (None, "weights of sources decide their order"),
    "draw": ("exact", "a random draw has no fixed order"),
    "mix_every": ("step", "a pass has one mixture"),
    "look_ahead": (1, "it chooses samples for the ranks of a mesh"),
    "overflow": ("grow", "samples that wait depend on the mesh"),
}


def one_pass(sources: Any) -> Any:
    """Return sources that are read once, unshuffled; other values are returned unchanged."""
    if not isinstance(sources, tuple):
        return sources
    return tuple(
        replace(s, epochs=1, shuffle=False) if hasattr(s, "shuffle") else s for s in sources
    )


def problems(job: Job) -> list[str]:
    """Return every reason why a job cannot evaluate, as text."""
    found = [
        f"{name}: expected {value!r} in an evaluation, got {given!r:.60}; {reason}"
        for name, (value, reason) in ONLY.items()
        if (given := getattr(job, name)) != value
    ]
    if job.until == "first":
        found.append(
            'until: expected "all" or a number of steps in an evaluation, got "first"; it would '
            "leave samples out"
        )
    for source in job.sources:
        if source.weight == 0:
            found.append(
                f"source {source.name!r}.weight: expected more than 0 in an evaluation, got 0; "
                "leave the source out"
            )
        if source.max_tokens is not None:
            found.append(
                f"source {source.name!r}.max_tokens: expected None in an evaluation, got "
                f"{source.max_tokens}; it would leave samples out; set until to a number of steps"
            )
        if source.on_lost != "fail":
            found.append(
                f"source {source.name!r}.on_lost: expected 'fail' in an evaluation, got "
                f"{source.on_lost!r}; metrics of a part of the data would go unnoticed"
            )
    if job.batch.defers:
        found.append(
            'batch.shape: expected "free" or packing="concat" in an evaluation, got "fixed" with '
            "whole documents; samples that wait depend on the mesh"
        )
    if job.hybrid and job.max_document is None:
        found.append(
            "max_document: expected a number in an evaluation by a strategy that splits samples, "
            "got None, which depends on the mesh; set max_document"
        )
    return found
