"""A plan measured by one cost, whatever cost its strategy used. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from overlord.errors import PlanError
from overlord.plan.plan import LoadingPlan
from overlord.planning.cost.models import CostFn, checked_costs
from overlord.planning.document_nodes import summed


def measured(plan: LoadingPlan, cost: CostFn | str) -> LoadingPlan:
    """Return the plan with the costs of its samples by ``cost``; no sample changes its place.

    The function receives the tokens of the samples, which a plan keeps. Raise ``PlanError`` for a
    hybrid plan: its costs include the transfers of rings.
    """
    if plan.tasks is not None:
        raise PlanError(
            "imbalance(cost=): expected a plan of whole samples, got one with rings of ranks, "
            "whose costs include their transfers",
            plan.step,
            "leave out cost=",
        )
    lengths = None if plan.documents is None else plan.documents.lengths
    try:
        costs = summed(partial(checked_costs, cost), {"tokens": plan.tokens}, lengths, len(plan))
    except PlanError as e:
        raise PlanError(f"imbalance(cost=): {e.problem}", plan.step, e.remedy) from None
    main = replace(plan.main, cost=costs[plan.main.sample])
    return replace(plan, modules={**plan.modules, "backbone": main})
