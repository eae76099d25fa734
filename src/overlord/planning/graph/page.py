"""A step as one self-contained interactive page: no external address, no library; light and dark.

The page is ``assets/graph.html`` with its style, its scripts and the data of the step
(``page_data.py``) inserted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from overlord.errors import OverlordError
from overlord.planning.graph.page_data import PageStep, facts

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph

# in this order: each uses those before it
SCRIPTS = ("data.js", "chart.js", "flow.js", "panels.js", "main.js")


def write_page(
    graph: DGraph, path: str | os.PathLike[str], modules: Mapping[str, DGraph] | None = None
) -> None:
    """Write the page of a graph; ``modules`` are other graphs of the same samples.

    Raise ``PlanError`` for an incomplete graph, ``OverlordError`` if the file cannot be written.
    """
    text = page(step_of(graph, modules or {}))
    try:
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as fault:
        raise OverlordError(
            f"{os.fspath(path)}: the page cannot be written: {fault.strerror or fault}; "
            "give a path in a writable directory"
        ) from fault


def step_of(graph: DGraph, modules: Mapping[str, DGraph]) -> PageStep:
    """Return the data of a graph's step, for its page.

    A graph that was not planned is planned here; ``PlanError`` names a primitive that is missing.
    """
    if graph.bound is not None and not modules:
        return PageStep(
            plan=graph.bound.plan, place=graph.tree, edges=graph.edges(), loader=graph.bound.loader
        )
    return PageStep(plan=graph.plan(**modules), place=graph.tree, edges=graph.edges())


def page(step: PageStep) -> str:
    """Return the HTML page of a step as text."""
    assets = files("overlord.planning.graph") / "assets"
    text = (assets / "graph.html").read_text(encoding="utf-8")
    scripts = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "title": escape(
            f"Step {step.plan.step}: {len(step.plan):,} {step.plan.row_kind} on {step.place}"
        ),
        "style": (assets / "graph.css").read_text(encoding="utf-8"),
        "facts": in_script(facts(step)),
        "script": f'"use strict";\n(() => {{\n{scripts}}})();\n',
    }
    for name, part in parts.items():
        head, found, tail = text.partition(f"<!--{name}-->")
        assert found, f"graph.html has no place for {name}"
        text = head + part + tail
    return text


def in_script(value: Any) -> str:
    """Return a value as JSON text that is safe in a script element of HTML.

    The name of a source can neither end the element nor open a comment.
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
