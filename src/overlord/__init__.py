"""The public names of Overlord: one plan, one stream, every rank.

A module is imported at the first use of one of its names, so that ``import overlord`` stays fast.
"""

from __future__ import annotations

from overlord import import_path  # isort: skip  # noqa: F401 - before any import that could find a file of the working directory

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlord import late_binding
from overlord.version import __version__

_ERRORS = (
    "OverlordError",
    "JobError",
    "SourceError",
    "StorageError",
    "TransformError",
    "PlanError",
    "StateMismatch",
    "DataStall",
    "ActorLost",
    "JournalError",
    "JournalTaken",
    "FrameError",
    "LinkRefused",
)
_HOME = {
    "Job": "overlord.job.job",
    "Source": "overlord.job.job",
    "Model": "overlord.job.model",
    "Stage": "overlord.job.stages",
    "evaluation": "overlord.job.evaluation",
    "Batch": "overlord.mesh",
    "Mesh": "overlord.mesh",
    "ClientPlaceTree": "overlord.mesh",
    "SampleId": "overlord.sample",
    "Buffer": "overlord.sample",
    "Ragged": "overlord.sample",
    "LoadingPlan": "overlord.plan.plan",
    "plan_raw": "overlord.planning.strategies",
    "loader_do_plan": "overlord.job.hooks",
    "constructor_do_plan": "overlord.job.hooks",
    "Popped": "overlord.job.hooks",
    "Candidates": "overlord.job.consumption",
    "Assembly": "overlord.job.hooks",
    "DGraph": "overlord.planning.graph.dgraph",
    "hold_long": "overlord.planning.selection",
    "Routes": "overlord.plan.routes",
    "Route": "overlord.plan.routes",
    "register_schedule": "overlord.planning.schedule",
    "register_balance": "overlord.planning.balance.balance",
    "register_cost": "overlord.planning.cost",
    "Tokenize": "overlord.transforms.tokenize",
    "Chat": "overlord.transforms.chat",
    "FillInMiddle": "overlord.transforms.fill_in_middle",
    "Pair": "overlord.transforms.document_groups",
    "Group": "overlord.transforms.document_groups",
    "Images": "overlord.transforms.images",
    "Tokens": "overlord.transforms.base",
    "Map": "overlord.transforms.base",
    "Filter": "overlord.transforms.base",
    "Select": "overlord.transforms.base",
    "Meta": "overlord.transforms.base",
    "register_function": "overlord.jobfile.functions",
    "Factory": "overlord.sources.python_objects",
    "launch": "overlord.session.launch",
    "MemoryLimits": "overlord.setup.options",
    "RayPlacement": "overlord.setup.options",
    "Session": "overlord.session.session",
    "connect": "overlord.client.connect",
    "join": "overlord.session.rendezvous",
    "Client": "overlord.client.client",
    "Step": "overlord.client.client",
    "Microbatch": "overlord.client.client",
    "simulate": "overlord.dryrun.virtual_run",
    "Explanation": "overlord.observe.explanation",
    **dict.fromkeys(_ERRORS, "overlord.errors"),
}
_MODULES = {
    "cost": "overlord.planning.cost",
    "schedule": "overlord.planning.schedule",
    "strategy": "overlord.planning.strategies",
    "torch": "overlord.torch",
}

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'overlord' has no attribute {name!r}")
    globals()[name] = value
    return value


def _read_job(path: Any) -> Any:
    from overlord.jobfile.yaml_file import read_job  # imports PyYAML

    return read_job(path)


def _write_job(job: Any) -> str:
    from overlord.jobfile.yaml_file import write_job  # imports PyYAML

    return write_job(job)


def _read_model(config: Any, changes: Any) -> Any:
    from overlord.jobfile.model_file import read_model

    return read_model(config, changes)


def _measured(plan: Any, cost: Any) -> Any:
    from overlord.planning.cost.comparison import measured

    return measured(plan, cost)


late_binding.bind("read_job", _read_job)
late_binding.bind("write_job", _write_job)
late_binding.bind("read_model", _read_model)
late_binding.bind("measured", _measured)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from overlord.client.client import Client as Client
    from overlord.client.client import Microbatch as Microbatch
    from overlord.client.client import Step as Step
    from overlord.client.connect import connect as connect
    from overlord.dryrun.virtual_run import simulate as simulate
    from overlord.errors import ActorLost as ActorLost
    from overlord.errors import DataStall as DataStall
    from overlord.errors import FrameError as FrameError
    from overlord.errors import JobError as JobError
    from overlord.errors import JournalError as JournalError
    from overlord.errors import JournalTaken as JournalTaken
    from overlord.errors import LinkRefused as LinkRefused
    from overlord.errors import OverlordError as OverlordError
    from overlord.errors import PlanError as PlanError
    from overlord.errors import SourceError as SourceError
    from overlord.errors import StateMismatch as StateMismatch
    from overlord.errors import StorageError as StorageError
    from overlord.errors import TransformError as TransformError
    from overlord.job.consumption import Candidates as Candidates
    from overlord.job.evaluation import evaluation as evaluation
    from overlord.job.hooks import Assembly as Assembly
    from overlord.job.hooks import Popped as Popped
    from overlord.job.hooks import constructor_do_plan as constructor_do_plan
    from overlord.job.hooks import loader_do_plan as loader_do_plan
    from overlord.job.job import Job as Job
    from overlord.job.job import Source as Source
    from overlord.job.model import Model as Model
    from overlord.job.stages import Stage as Stage
    from overlord.jobfile.functions import register_function as register_function
    from overlord.mesh import Batch as Batch
    from overlord.mesh import ClientPlaceTree as ClientPlaceTree
    from overlord.mesh import Mesh as Mesh
    from overlord.observe.explanation import Explanation as Explanation
    from overlord.plan.plan import LoadingPlan as LoadingPlan
    from overlord.plan.routes import Route as Route
    from overlord.plan.routes import Routes as Routes
    from overlord.planning import cost as cost
    from overlord.planning import schedule as schedule
    from overlord.planning import strategies as strategy  # noqa: F401
    from overlord.planning.balance.balance import register_balance as register_balance
    from overlord.planning.cost import register_cost as register_cost
    from overlord.planning.graph.dgraph import DGraph as DGraph
    from overlord.planning.schedule import register_schedule as register_schedule
    from overlord.planning.selection import hold_long as hold_long
    from overlord.planning.strategies import plan_raw as plan_raw
    from overlord.sample import Buffer as Buffer
    from overlord.sample import Ragged as Ragged
    from overlord.sample import SampleId as SampleId
    from overlord.session.launch import launch as launch
    from overlord.session.rendezvous import join as join
    from overlord.session.session import Session as Session
    from overlord.setup.options import MemoryLimits as MemoryLimits
    from overlord.setup.options import RayPlacement as RayPlacement
    from overlord.sources.python_objects import Factory as Factory
    from overlord.transforms.base import Filter as Filter
    from overlord.transforms.base import Map as Map
    from overlord.transforms.base import Meta as Meta
    from overlord.transforms.base import Select as Select
    from overlord.transforms.base import Tokens as Tokens
    from overlord.transforms.chat import Chat as Chat
    from overlord.transforms.document_groups import Group as Group
    from overlord.transforms.document_groups import Pair as Pair
    from overlord.transforms.fill_in_middle import FillInMiddle as FillInMiddle
    from overlord.transforms.images import Images as Images
    from overlord.transforms.tokenize import Tokenize as Tokenize
