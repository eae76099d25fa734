"""Where the cores of a session live: in this process, or in processes of this machine. The session does not see the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from overlord.client.client import Box
from overlord.messages import StreamState
from overlord.planner.planner import Planner
from overlord.planner.spec import NewSource
from overlord.runtime.bootstrap import Blueprint
from overlord.runtime.host import KeptPlans
from overlord.runtime.local import Pump, ThreadExecutor
from overlord.runtime.options import n_workers

RUNTIMES = ("local", "process")


class Engine(Protocol):
    """What a session needs of its cores. All but ``prepare_source`` and ``close`` run in the pump."""

    planner: Planner
    plans: KeptPlans
    on_stage: list[Any]

    def attach(self, mailboxes: Mapping[int, Any]) -> None: ...
    def detach(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def consumed(self, ranks: Any, step: int) -> None: ...
    def event(self, event: Any) -> None: ...
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
