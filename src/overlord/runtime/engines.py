"""Where the cores of a session live: in this process, or in processes of this machine. The session does not see the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from overlord.client.client import Box
from overlord.messages import Report, StreamState
from overlord.planner.planner import Planner
from overlord.planner.spec import NewSource
from overlord.runtime.bootstrap import Blueprint
from overlord.runtime.host import KeptPlans
from overlord.runtime.local import Pump, ThreadExecutor
from overlord.runtime.options import n_workers
from overlord.runtime.written import Unwritten

if TYPE_CHECKING:
    from overlord.runtime.planned import FarPlanner, FarPlans
    from overlord.runtime.planneractor import Counted

RUNTIMES = ("local", "process")


class Engine(Protocol):
    """What a session needs of its cores. All but ``prepare_source`` and ``close`` run in the pump."""

    @property
    def planner(self) -> Planner | FarPlanner: ...
    @property
    def plans(self) -> KeptPlans | FarPlans: ...

    on_stage: list[Any]
    on_lost: list[Any]
    journal: Unwritten  # of the session: what is planned is written before anyone acts on it

    def attach(self, mailboxes: Mapping[int, Any]) -> None: ...
    def detach(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def consumed(self, ranks: Any, step: int) -> None: ...
    def event(self, event: Any) -> None: ...
    def report(self, report: Report) -> bool: ...
    def prepare_source(self, blueprint: Blueprint) -> Any: ...
    def drop_prepared(self, prepared: Any) -> None: ...
    def add_source(self, new: NewSource, prepared: Any, budget_bytes: int, joined: Callable[[], None] = ...) -> None: ...
    def inbox(self, rank: int, next_step: int) -> Box: ...
    def waiting_for(self, rank: int) -> str: ...
    def move(self, source: int, hosts: Sequence[str]) -> None: ...
    def kill(self, name: str) -> None: ...
    def figures(self) -> dict[str, Any]: ...
    def broke(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def make_engine(runtime: str, blueprint: Blueprint, state: StreamState | None, pump: Pump, generation: int = 0) -> Engine:
    """Cores at a state, ready to be pumped."""
    if runtime == "process" and blueprint.job.journal is not None and blueprint.options.failover and blueprint.options.constructors:
        from overlord.runtime.planned import PlannedEngine  # whose planner can be lost, since it can come back

        return PlannedEngine(blueprint, state, pump, generation)
    if runtime == "process":
        from overlord.runtime.direct import DirectHost
        from overlord.runtime.process import ProcessHost  # processes and sockets: for those who ask for them
        from overlord.runtime.process_control import ProcessControl

        return (ProcessHost if blueprint.options.constructors else DirectHost)(blueprint, state, ProcessControl(), pump, generation)
    executor = ThreadExecutor(n_workers(blueprint.options), pump)
    try:
        return blueprint.host(executor, state)
    except BaseException:
        executor.close()
        raise


def counted(host: Engine) -> Planner | Counted:
    """The planner's counts, of one moment."""
    return host.planner if isinstance(host.planner, Planner) else host.planner.counted()


def why_not(host: Engine) -> str:
    """What keeps a host from answering, in words; empty for one that can be asked."""
    return str(getattr(host, "absent", ""))
