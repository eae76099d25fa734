"""Overlord: one plan, one stream, every rank. The public names, and nothing heavy at import.

Names are loaded when first used, so that ``import overlord`` costs a trainer nothing it does not use.
"""

from __future__ import annotations

from overlord import importpath  # isort: skip  # noqa: F401 - before any import that could find a file of the working directory

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ERRORS = (
    "OverlordError", "JobError", "SourceError", "StorageError", "TransformError", "PlanError", "StateMismatch", "DataStall", "ActorLost",
    "JournalError", "JournalTaken", "FrameError", "LinkRefused",
)  # fmt: skip
_HOME = {
    "Job": "overlord.job", "Source": "overlord.job", "Batch": "overlord.job",
    "ClientPlaceTree": "overlord.placetree",
    "SampleId": "overlord.sample", "Buffer": "overlord.sample", "Ragged": "overlord.sample",
    "LoadingPlan": "overlord.plan",
    "plan_raw": "overlord.hooks", "loader_do_plan": "overlord.hooks", "constructor_do_plan": "overlord.hooks",
    "Popped": "overlord.hooks", "Assembly": "overlord.hooks",
    "DGraph": "overlord.planner.dgraph",
    "hold_long": "overlord.planner.choose",
    "Routes": "overlord.planner.routes", "Route": "overlord.planner.routes",
    "register_schedule": "overlord.planner.schedule",
    "register_balance": "overlord.planner.balance", "register_cost": "overlord.planner.cost",
    "Tokenize": "overlord.transforms.text", "Images": "overlord.transforms.images",
    "Tokens": "overlord.transforms.base", "Map": "overlord.transforms.base", "Filter": "overlord.transforms.base",
    "Select": "overlord.transforms.base", "Meta": "overlord.transforms.base",
    "register_function": "overlord.jobfile",
    "Factory": "overlord.sources.dataset",
    "launch": "overlord.runtime.launch", "Session": "overlord.runtime.session",
    "connect": "overlord.client.connect", "join": "overlord.runtime.join",
    "Client": "overlord.client.client", "Step": "overlord.client.step", "Microbatch": "overlord.client.step",
    "simulate": "overlord.simulation.engine",
    "Explanation": "overlord.observe.explain",
    **dict.fromkeys(_ERRORS, "overlord.errors"),
}  # fmt: skip
_MODULES = {"cost": "overlord.planner.cost", "schedule": "overlord.planner.schedule", "strategy": "overlord.planner.strategy"}

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


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from overlord.client.client import Client as Client
    from overlord.client.connect import connect as connect
    from overlord.client.step import Microbatch as Microbatch
    from overlord.client.step import Step as Step
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
    from overlord.hooks import Assembly as Assembly
    from overlord.hooks import Popped as Popped
    from overlord.hooks import constructor_do_plan as constructor_do_plan
    from overlord.hooks import loader_do_plan as loader_do_plan
    from overlord.hooks import plan_raw as plan_raw
    from overlord.job import Batch as Batch
    from overlord.job import Job as Job
    from overlord.job import Source as Source
    from overlord.jobfile import register_function as register_function
    from overlord.observe.explain import Explanation as Explanation
    from overlord.placetree import ClientPlaceTree as ClientPlaceTree
    from overlord.plan import LoadingPlan as LoadingPlan
    from overlord.planner import cost as cost
    from overlord.planner import schedule as schedule
    from overlord.planner import strategy as strategy
    from overlord.planner.balance import register_balance as register_balance
    from overlord.planner.choose import hold_long as hold_long
    from overlord.planner.cost import register_cost as register_cost
    from overlord.planner.dgraph import DGraph as DGraph
    from overlord.planner.routes import Route as Route
    from overlord.planner.routes import Routes as Routes
    from overlord.planner.schedule import register_schedule as register_schedule
    from overlord.runtime.join import join as join
    from overlord.runtime.launch import launch as launch
    from overlord.runtime.session import Session as Session
    from overlord.sample import Buffer as Buffer
    from overlord.sample import Ragged as Ragged
    from overlord.sample import SampleId as SampleId
    from overlord.simulation.engine import simulate as simulate
    from overlord.sources.dataset import Factory as Factory
    from overlord.transforms.base import Filter as Filter
    from overlord.transforms.base import Map as Map
    from overlord.transforms.base import Meta as Meta
    from overlord.transforms.base import Select as Select
    from overlord.transforms.base import Tokens as Tokens
    from overlord.transforms.images import Images as Images
    from overlord.transforms.text import Tokenize as Tokenize
