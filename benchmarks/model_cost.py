"""Imbalance by a job's own model, compared with a balance by the 12B Llama that is assumed.

    python benchmarks/model_cost.py           # planning only: seconds
    python benchmarks/model_cost.py --save    # writes the page to benchmarks/results

Every plan is weighed by the FLOPs of the model that trains. Both plans have the same samples.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own modules

import click

from overlord.job.model import Model
from overlord.mesh import Batch, Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import llm_balance
from page import command_line, context_name, markdown_table, save, shown_table, wide_console
from profiles import draw

# Shapes of published models, as in their config.json.
MODELS = (
    Model(1152, 26, 4, 1, 256, 6912, 262_144, window=512, global_layers=4, name="Gemma 3 1B"),
    Model(2560, 34, 8, 4, 256, 10_240, 262_208, window=1024, global_layers=5, name="Gemma 3 4B"),
    Model(1024, 28, 16, 8, 128, 3072, 151_936, name="Qwen3 0.6B"),
    replace(
        Model(2048, 48, 32, 4, 128, 6144, 151_936, 128, active_experts=8, expert_ffn=768),
        name="Qwen3 30B-A3B",
    ),
    Model(4096, 32, 32, 8, 128, 14_336, 128_256, name="Llama 3 8B"),
    Model(8192, 80, 64, 8, 128, 28_672, 128_256, name="Llama 3 70B"),
)
PER_RANK, MICROBATCHES = 16, 4
HEAD = ("model", "ranks meet", "context", "assumed 12B", "own model", "bound", "step time saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the profile of its samples, and the point at which ranks wait for each other."""

    model: Model
    profile: str
    context: int
    sync: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Slowest over mean rank, as means over the seeds."""

    assumed: float
    own: float
    bound: float

    @property
    def saved(self) -> float:
        return 1 - self.own / self.assumed


def weighed(plan: LoadingPlan, model: Model) -> LoadingPlan:
    """Return a plan whose costs are the FLOPs of a model."""
    own = model.flops(plan.tokens[plan.main.sample])
    return replace(plan, modules={"backbone": replace(plan.main, cost=own)})


def measure(case: Case, ranks: int, seeds: int) -> Outcome:
    """Return the imbalance of both plans of the same samples, weighed by the case's model."""
    found: dict[str, list[float]] = {"assumed": [], "own": [], "bound": []}
    batch = Batch(samples=ranks * PER_RANK, context=case.context, microbatches=MICROBATCHES)
    for seed in range(seeds):
        samples = draw(case.profile, batch.samples or 1, seed=seed, context=case.context)
        buffer = replace(samples.buffer(batch, images=False), sync=case.sync)
        for name, model in (("assumed", None), ("own", case.model)):
            plan = llm_balance(replace(buffer, model=model), Mesh(dp=ranks))
            imbalance = weighed(plan, case.model).imbalance()
            found[name].append(imbalance["bucket" if case.sync == "step" else "microbatch"])
        found["bound"].append(imbalance["bound" if case.sync == "step" else "slot_bound"])
    return Outcome(**{name: statistics.fmean(values) for name, values in found.items()})


def rows(ranks: int, seeds: int, profile: str, context: int) -> list[list[str]]:
    """Return a row for each model and point at which ranks meet."""
    found = []
    for model in MODELS:
        for sync in ("step", "microbatch"):
            case = Case(model=model, profile=profile, context=context, sync=sync)
            o = measure(case, ranks, seeds)
            found.append(
                [
                    model.name,
                    f"once a {sync}" if sync == "step" else "every microbatch",
                    context_name(context),
                    f"{o.assumed:.3f}",
                    f"{o.own:.3f}",
                    f"{o.bound:.3f}",
                    f"{o.saved:.1%}",
                ]
            )
    return found


def equal_at(model: Model) -> str:
    """Return the length at which attention of all tokens costs as much as the rest."""
    return f"{model.per_token / (model.full_layers * model.per_pair):,.0f}"


@click.command(help=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
@click.option("--ranks", type=click.IntRange(2), default=64, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--profile", default="navit", show_default=True)
@click.option("--contexts", default="16384,32768", show_default=True)
@click.option("--save", "saves", is_flag=True, help="Writes the page to benchmarks/results.")
def main(ranks: int, seeds: int, profile: str, contexts: str, saves: bool) -> None:
    console = wide_console()
    for model in MODELS:
        console.print(f"{model.name}: attention equals the rest at {equal_at(model)} tokens")
    table = [row for c in contexts.split(",") for row in rows(ranks, seeds, profile, int(c))]
    console.print(shown_table("Imbalance by model", HEAD, table))
    if saves:
        shows = (
            f"Profile {profile}, {ranks} ranks, {PER_RANK} samples a rank, mean over {seeds} "
            "seeds. Slowest over mean rank, weighed by the FLOPs of the model in the row. "
            "Planning only: nothing was trained."
        )
        console.print(f"wrote {page(shows, table)}")


def page(shows: str, table: list[list[str]]) -> Path:
    """Write the dated page of the results, and return its path."""
    today, command = date.today().isoformat(), command_line("benchmarks/model_cost.py")
    title = f"# Balance by the model of the job, {today}"
    return save(
        f"{today}-model-cost",
        f"{title}\n\n`{command}`\n\n{shows}\n\n{markdown_table(HEAD, table)}\n",
        {},
    )


if __name__ == "__main__":
    main()
