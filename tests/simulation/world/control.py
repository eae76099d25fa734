"""The control plane of the virtual world: the contract of ``docs/rpc.md``, with delays from the
seed and no codec in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from overlord.cluster.worker import WorkerConfig
from overlord.errors import ActorLost, DataStall, JobError
from overlord.rpc.actors import (
    NO_REPLY,
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    OnDeath,
    Somewhere,
)
from tests.simulation.world.net import Net, Wire
from tests.simulation.world.virtual import SimMachine
from tests.simulation.world.world import Process, World

START_S = 0.05  # median, until an actor's factory runs
KILLED = "killed by signal 9"
PREFIX = {
    "loader": "loader-worker/",
    "constructor": "constructor-worker/",
}  # of the names of a role


@dataclass(frozen=True, slots=True)
class Birth:
    """What awaits a process that is about to start."""

    late_s: float = 0.0
    dies: bool = False  # at a moment of its start, or just behind it

    def befalls(self, process: Process, takes_s: float) -> float:
        """When what it is to do begins."""
        takes_s += self.late_s
        if self.dies:
            process.world.at(takes_s * 1.5 * process.world.random.random(), process.kill, None)
        return takes_s


Births = dict[str, deque[Birth]]  # by role; each awaits one, in the order in which they start


@dataclass(slots=True, eq=False)
class Member:
    """An actor, whoever calls it."""

    process: Process
    master: SimControl  # whom it listens to: the last one it was sent to
    actor: Any = None
    before: deque[Callable[[], None]] = field(
        default_factory=deque
    )  # calls that came before it was there


class Family:
    """The actors of one launching process, by name. They end with it, and outlive whoever else
    calls them.
    """

    def __init__(self, owner: Process):
        self.members: dict[str, Member] = {}
        self.control: SimControl | None = None  # of the coordinator that counts
        owner.on_end.append(lambda: self._ended(owner))

    def _ended(self, owner: Process) -> None:
        for member in list(self.members.values()):
            owner.world.at(owner.world.delay(0.001), member.process.kill, None)

    def living(self) -> list[str]:
        return [name for name, member in sorted(self.members.items()) if member.process.alive]

    def processes(self) -> dict[str, Process]:
        return {
            name: member.process for name, member in self.members.items() if member.process.alive
        }

    def actor(self, name: str) -> Any:
        member = self.members.get(name)
        return member.actor if member is not None and member.process.alive else None


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An actor as one control plane knows it."""

    handle: ActorHandle
    member: Member
    # one way for all calls of a caller: they arrive as they were made
    there: Wire
    back: Wire

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def record(self) -> ActorRecord:
        return self.handle.record

    @property
    def process(self) -> Process:
        return self.member.process


class SimControl:
    """Actors of one process of the world, its owner."""

    def __init__(self, world: World, net: Net, owner: Process, family: Family | None = None):
        self._world, self._net, self._owner = world, net, owner
        self._family = family or Family(owner)
        self._family.control = self
        self._names: dict[str, Known] = {}
        self._known: dict[ActorHandle, Known] = {}
        self._closed = False
        self.births: Births = {}
        # whoever is killed while it is cut off or stopped lives on, as on another machine
        self.outlive = False

    def processes(self) -> dict[str, Process]:
        return self._family.processes()

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Mapping[str, float] | None = None,
        node: Somewhere = None,
    ) -> ActorHandle:
        if self._family.control is not self:
            raise ActorLost(
                name, "another planner has taken over: nobody starts anything for this one"
            )
        if name in self._names:
            raise JobError(
                ["the name is taken by a living actor; kill that first, or take another name"],
                f"actor {name!r}",
            )
        process = self._world.start(name)
        member = self._family.members[name] = Member(process, self)
        machine = SimMachine(self._world, self._net, process)
        given = [replace(a, machine=machine) if isinstance(a, WorkerConfig) else a for a in args]
        known = self._meet(name, member)
        takes_s = self._world.delay(START_S)
        for role, prefix in PREFIX.items():
            if name.startswith(prefix) and (births := self.births.get(role)):
                takes_s = births.popleft().befalls(process, takes_s)
        self._world.at(takes_s, lambda: self._begin(known, factory, given), process)
        return known.handle

    def adopt(self, name: str) -> ActorHandle:
        """An actor that was started for another caller: from now on it listens to this one."""
        member = self._family.members[name]
        member.master = self
        known = self._meet(name, member)
        if not member.process.alive:
            self._world.at(0.0, lambda: self._over(known, KILLED), self._owner)
        return known.handle

    def meet(self, name: str, process: Process) -> ActorHandle:
        """A process that others start: calls wait until ``seat`` says who is in it."""
        return self._meet(name, Member(process, self)).handle

    def seat(self, handle: ActorHandle, actor: Any) -> None:
        member = self._mine(handle).member
        member.actor = actor
        while member.before:
            member.before.popleft()()

    def give_up(self, handle: ActorHandle, reason: str) -> None:
        """Whoever waits for it is told that it is lost, whether or not it is."""
        self._over(self._mine(handle), reason)

    def _meet(self, name: str, member: Member) -> Known:
        there, back = (
            self._net.wire(self._owner, member.process),
            self._net.wire(member.process, self._owner),
        )
        record = ActorRecord(name)
        record.handle = ActorHandle(name, None, record)
        known = self._names[name] = self._known[record.handle] = Known(
            record.handle, member, there, back
        )
        member.process.on_end.append(lambda: self._ended(known))
        return known

    def _begin(self, known: Known, factory: Callable[..., Any], args: list[Any]) -> None:
        try:
            known.member.actor = factory(*args)
        except Exception as fault:
            words, raised = f"{type(fault).__name__}: {fault}", fault
            self._world.at(
                self._world.delay(0.001),
                lambda: self._over(known, words, fault=raised),
                self._owner,
            )
            known.process.kill()
            return
        while known.member.before:
            known.member.before.popleft()()

    def _ended(self, known: Known) -> None:
        if not self._closed:
            self._world.at(self._world.delay(0.005), lambda: self._over(known, KILLED), self._owner)

    def _over(
        self, known: Known, reason: str, fault: BaseException | None = None, quiet: bool = False
    ) -> None:
        if self._names.get(known.name) is known:
            del self._names[known.name]
        known.record.mark_ended(reason, fault=fault, quiet=quiet)

    # calls

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        known = self._mine(handle)
        number, answer = known.record.open_call(method)
        if not answer.done():
            self._send(known, number, method, args)
        return answer

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        known = self._mine(handle)
        if known.record.reason is None:
            self._send(known, NO_REPLY, method, args)

    def _send(self, known: Known, number: int, method: str, args: tuple[Any, ...]) -> None:
        known.there.send(lambda: self._take(known, number, method, args))

    def _take(self, known: Known, number: int, method: str, args: tuple[Any, ...]) -> None:
        member = known.member
        if member.master is not self:
            return  # the caller was given up, and does not know
        if member.actor is None:
            member.before.append(lambda: self._take(known, number, method, args))
            return
        try:
            value = getattr(member.actor, method)(*args)
        except Exception as error:
            self._answer(known, number, False, error)
            return
        if isinstance(value, Future):
            value.add_done_callback(
                lambda f: self._answer(
                    known, number, f.exception() is None, f.exception() or f.result()
                )
            )
        else:
            self._answer(known, number, True, value)

    def _answer(self, known: Known, number: int, ok: bool, value: Any) -> None:
        if number != NO_REPLY and known.process.alive:
            known.back.send(lambda: known.record.complete_call(number, ok, value))

    def get(self, future: Future[Any], timeout_s: float) -> Any:
        if not future.done() and self._world.fiber is not None:
            self._world.wait(timeout_s, lambda wake: future.add_done_callback(lambda _: wake()))
        if not future.done():
            raise DataStall(f"actor {getattr(future, 'actor', '')!r} to answer", timeout_s)
        return future.result()

    def wait(
        self, futures: Sequence[Future[Any]], timeout_s: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        if not any(f.done() for f in futures) and self._world.fiber is not None:

            def register(wake: Callable[[], None]) -> None:
                for future in futures:
                    future.add_done_callback(lambda _: wake())

            self._world.wait(timeout_s, register)
        return [f for f in futures if f.done()], [f for f in futures if not f.done()]

    def lookup(self, name: str) -> ActorHandle:
        known = self._names.get(name)
        if known is None:
            raise ActorLost(name, "there is no actor of this name")
        return known.handle

    def kill(self, handle: ActorHandle) -> None:
        """The name is free at once. On another machine, cut off or stopped, who is killed does not
        notice.
        """
        known = self._mine(handle)
        process = known.process
        if self._family.control is not self:
            return
        if self.outlive and process.alive and (process.stopped or process in self._net.cut):
            self._world.at(0.0, lambda: self._over(known, KILLED), self._owner)
        elif process.alive:
            process.kill()
        if self._names.get(known.name) is known:
            del self._names[known.name]

    def kill_all(self, handles: Sequence[ActorHandle]) -> None:
        for handle in handles:
            self.kill(handle)

    def on_death(self, handle: ActorHandle, callback: OnDeath) -> None:
        handle.record.on_end(lambda reason: callback(handle, reason))

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        self._closed = True
        for known in list(self._names.values()):
            self._over(known, SHUT_DOWN, quiet=True)
            self._world.at(0.0, known.process.kill, None)

    def _mine(self, handle: ActorHandle) -> Known:
        return self._known[handle]
