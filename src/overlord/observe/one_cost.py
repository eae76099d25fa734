"""Plans of any strategy measured by one cost, so that their figures compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.planning.cost.comparison import measured
from overlord.planning.cost.models import of_model

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.plan.plan import LoadingPlan

SAME = 1e-9  # relative difference of two figures that counts as none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredPlan:
    """A plan with the costs of the job's model, and the name of that cost.

    A hybrid plan keeps its own costs, which include the transfers of rings.
    """

    plan: LoadingPlan
    cost: str
    own: str  # the imbalance by the strategy's own cost as text; "" if it does not differ


def by_model(job: Job, plan: LoadingPlan) -> MeasuredPlan:
    """Return a plan measured by the cost of the default strategy: that of the job's model."""
    if plan.tasks is not None:
        return MeasuredPlan(plan=plan, cost="the strategy's own, with transfers of rings", own="")
    name = "a 12B Llama" if job.model is None else job.model.title
    found = measured(plan, of_model(job.model))
    here, there = plan.imbalance(), found.imbalance()
    same = all(abs(here[k] - there[k]) <= SAME * there[k] for k in ("bucket", "microbatch"))
    own = f"by bucket {here['bucket']:.3f}, by microbatch {here['microbatch']:.3f}"
    return MeasuredPlan(
        plan=found, cost=f"FLOPs of {name}, for every strategy", own="" if same else own
    )
