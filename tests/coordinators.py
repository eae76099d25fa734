"""The coordinator of a job in a thread of the test's process, with real workers.

A test that decides when a coordinator does something has its objects at hand there. The coordinator is
made of what its process would receive, and is called in the same way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import overlord as ov
from overlord.cluster.coordinator import Coordinator
from overlord.cluster.coordinator_actor import CoordinatorActor
from overlord.concurrency.event_loop import EventLoop, ThreadQueue
from overlord.errors import ActorLost
from overlord.process.code import pack_code, unpack_code
from overlord.rpc.actors import ActorHandle, ActorRecord
from overlord.session import runtime as session_runtime
from tests.internals import parts_of_coordinator, runtime_of
from tests.processes import launch, until


class NearActorSystem:
    """An actor system that builds coordinators here; it passes all else on to the real one."""

    def __init__(self, control: Any):
        self._control = control
        self._calls: dict[ActorRecord, ThreadQueue] = {}
        self.actors: dict[ActorRecord, CoordinatorActor] = {}
        self._ended: dict[ActorRecord, list[Callable[[ActorHandle, str], None]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def spawn(self, factory: Any, *args: Any, name: str, **where: Any) -> ActorHandle:
        if factory is not CoordinatorActor:
            return self._control.spawn(factory, *args, name=name, **where)
        record = ActorRecord(name)
        record.handle = ActorHandle(name, os.getpid(), record)
        self._calls[record] = ThreadQueue(1, "near-coordinator")
        self.actors[record] = factory(*unpack_code(pack_code(args, name)))
        self._ended[record] = []
        return record.handle

    def on_death(self, handle: ActorHandle, callback: Callable[[ActorHandle, str], None]) -> None:
        if handle.record not in self.actors:
            self._control.on_death(handle, callback)
        elif handle.alive:
            self._ended[handle.record].append(callback)
        else:
            callback(handle, handle.record.reason or "")

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        if handle.record in self.actors:
            self.call(handle, method, *args)
        else:
            self._control.tell(handle, method, *args)

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        actor, answer = self.actors.get(handle.record), Future[Any]()
        if actor is None:
            return self._control.call(handle, method, *args)
        if not handle.alive:
            answer.set_exception(ActorLost(handle.name, handle.record.reason or ""))
            return answer

        def settle(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(future.result())

        def act() -> None:
            try:
                value = getattr(actor, method)(*args)
            except BaseException as error:
                answer.set_exception(error)
            else:
                if isinstance(value, Future):
                    value.add_done_callback(settle)
                else:
                    answer.set_result(value)

        self._calls[handle.record].do(act)
        return answer

    def kill(self, handle: ActorHandle) -> None:
        if handle.record not in self.actors:
            self._control.kill(handle)
        elif handle.alive:
            self._end(handle, "killed by signal 9")

    def _end(self, handle: ActorHandle, reason: str) -> None:
        handle.record.reason = reason
        self.actors[handle.record].close()
        for callback in self._ended[handle.record]:
            callback(handle, reason)

    def shutdown(self, *timeout_s: float) -> None:
        for record in self.actors:
            if record.handle is not None and record.reason is None:
                self._ended[record].clear()
                self._end(record.handle, "shut down")
        self._control.shutdown(*timeout_s)
        for queue in self._calls.values():
            queue.close()


@contextlib.contextmanager
def coordinators_here() -> Iterator[None]:
    """Build the coordinators of the sessions that are launched in this block in this process."""
    real = session_runtime.start_actor_system

    def start(*given: Any) -> Any:
        control, machine = real(*given)
        return NearActorSystem(control), machine

    session_runtime.start_actor_system = start
    try:
        yield
    finally:
        session_runtime.start_actor_system = real


def coordinator_of(session: ov.Session) -> tuple[Coordinator, EventLoop]:
    """Return the coordinator of a session that was launched in ``coordinators_here``."""
    control: Any = runtime_of(session).actor_system
    *_, actor = control.actors.values()
    return until(lambda: parts_of_coordinator(actor))


def launch_here(job: ov.Job, **options: Any) -> ov.Session:
    """Launch a job with its coordinator in this process."""
    with coordinators_here():
        return launch(job, **options)
