"""Facts of hybrid plans as text: the bound of the imbalance, and the host memory of offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from overlord.plan import summary

if TYPE_CHECKING:
    from overlord.plan.plan import LoadingPlan


def limit(plan: LoadingPlan, found: Mapping[str, float], module: str = "backbone") -> str:
    """Return the lower bound of a module's imbalance as text; ``found``: of ``imbalance``."""
    if plan.tasks is None or module != "backbone":
        return f"no placement can go below {found['bound']:.3f}"
    if not found["bound"]:
        return "no bound is known without a cost of rings"
    return (
        f"no choice of rings can go below {found['bound']:.3f} by the model, transfers of the "
        "longest sample included"
    )


def host_memory(plan: LoadingPlan) -> str:
    """Return the pinned memory that offload needs as text; empty for a plan without offload."""
    host = summary.host_memory(plan)
    if not host:
        return ""
    ratio = f"offload ratio up to {host['largest_ratio']:.2f}"
    if host["by_rank"] is None:
        return f"{ratio}; unknown and not checked: give offload_bytes and host_memory"
    rank, node = (f"{n / 1e9:.4g} GB" for n in (max(host["by_rank"]), host["largest_node"]))
    checked = "not checked: give host_memory, the bytes of a node"
    if host["limit"] is not None:
        checked = f"limit {host['limit'] / 1e9:.4g} GB a node"
    return f"{ratio}; at most {rank} pinned by a rank and {node} on a node; {checked}"
