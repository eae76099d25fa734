"""What people say in mid-run, ``session.set_mixture`` and ``session.skip``, on its way to the
planner of a simulated job.

The session's own code says it (``session/events.py``), the code of a runtime whose planner is
elsewhere asks and hears (``session/cluster_runtime.py``, ``event_outbox.py``, ``launcher.py``), and the
coordinator's own answers (``cluster/coordinator_actor.py``). What lies between them is the control
plane of the virtual world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from overlord.cluster.coordinator_actor import CoordinatorActor
from overlord.cluster.launcher import COORDINATOR_NAME, Launcher
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import DataStall, JournalError
from overlord.messages.control import SetMixture, Skip, StreamState
from overlord.session.cluster_runtime import ClusterRuntime
from overlord.session.events import EventTarget, UserEvents
from overlord.session.generation import Generation
from tests.simulation.world.control import SimControl
from tests.simulation.world.scenario import Saying
from tests.simulation.world.virtual import SimMachine
from tests.simulation.world.world import Process

if TYPE_CHECKING:
    from tests.simulation.world.cluster import Cluster
    from tests.simulation.world.launched import Launched

PATIENCE_S = (
    0.5,
    25.0,
)  # for a coordinator to answer, by seed: the second is that of ``cluster/launcher.py``
AGAIN_S = 0.3  # until what was given up is said again


class Elsewhere:
    """What a session needs of a planner that is elsewhere, as far as people say something to it.

    The launcher, the runtime and the coordinator's interface are the real ones; they are given a
    machine and a control plane of the virtual world. Only the start of a coordinator is simulated.
    """

    def __init__(self, launched: Launched):
        world, net, process = launched.world, launched.cluster.net, launched.process
        self._control = SimControl(world, net, process)
        self._launcher = Launcher(
            launched.blueprint,
            launched.session,
            self._control,
            SimMachine(world, net, process),
            ask_s=PATIENCE_S[launched.cluster.scenario.seed % 2],
        )
        self.runtime = ClusterRuntime(self._launcher, cast(EventLoop, _Here()), launched.session)

    def starts(self, process: Process) -> None:
        """Another planner. The one before it is not heard any more, also where it lives on."""
        if self._launcher.coordinator is not None:
            self._control.give_up(self._launcher.coordinator, "another takes its place")
        self._launcher.follow(self._control.meet(COORDINATOR_NAME, process))

    def is_there(self, actor: CoordinatorActor) -> None:
        """The coordinator answers from now on."""
        assert self._launcher.coordinator is not None
        self._control.seat(self._launcher.coordinator, actor)
        self._launcher.accept_calls()


class _Here:
    """The event loop of a session whose planner is elsewhere: what it is asked it does in its turn
    (``launched.py``), and may wait.
    """

    def call(self, call: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        return call()


class _Target:
    """A simulated session, as far as its users send events to it."""

    def __init__(self, launched: Launched, elsewhere: Elsewhere):
        self._launched = launched
        self.loop = _Here()
        self.lock = threading.RLock()
        runtime, prepared = cast(Any, elsewhere.runtime), launched.blueprint
        start = cast(StreamState, None)  # clients of the simulation know their steps themselves
        self.generation = Generation(0, prepared, runtime, start, "", launched.log, {})

    def refuse_closed(self) -> None:
        """Do nothing: nobody closes it."""

    def slowest_step(self) -> int:
        return self._launched.cluster.slowest + 1

    def next_event(self) -> int:
        return next(self._launched.event_numbers)


class Hand:
    """Sends the events of a user to a simulated session."""

    def __init__(self, launched: Launched, elsewhere: Elsewhere):
        target = _Target(launched, elsewhere)
        self._events = UserEvents(cast(EventTarget, target))
        target.generation.runtime.on_late += [self._events.note, launched.cluster.people.heard_late]

    def say(self, event: SetMixture | Skip) -> None:
        if isinstance(event, Skip):
            self._events.skip(event.steps)
        else:
            self._events.set_mixture(event.weights, event.at)


@dataclass(slots=True, eq=False)
class Errand:
    """What the event loop of the launching process does itself, in its turn, and waits for."""

    work: Callable[[], None]


class People:
    """Whoever changes the job: says one thing after the other, when all ranks have come so far, and
    again where that failed.

    Until it is known to have happened trainers do not come so near to its first step that a
    coordinator could plan it: as in a script that says it between two steps, and waits. ``said``:
    how many have happened; what is said again after a session was rewound, or everything killed,
    follows from where that goes on.
    """

    def __init__(self, cluster: Cluster, sayings: Sequence[Saying]):
        self._cluster, self._sayings = cluster, sayings
        self._held = [saying.first - cluster.scenario.room for saying in sayings]
        self.said = 0
        self.asked: list[SetMixture | Skip] = []  # with each call of a session, in any order
        self._busy: Launched | None = None  # it was told something, and has not answered

    def holds(self, step: int) -> bool:
        return any(step >= held for held in self._held[self.said :])

    def look(self) -> None:
        """Say what is due: called when the slowest rank has moved on, and when a session has
        begun.
        """
        if self.said == len(self._sayings):
            return
        launched, i = self._cluster.launched, self.said
        if (
            launched.begun
            and launched is not self._busy
            and self._have_taken(self._sayings[i].step)
        ):
            self._busy = launched
            self.asked.append(self._sayings[i].event)
            launched.say(self._sayings[i].event, lambda error: self._answered(launched, i, error))

    def _have_taken(self, step: int) -> bool:
        """All ranks, the steps up to this one that they are handed."""
        return self._cluster.scenario.skipped.issuperset(range(self._cluster.slowest + 1, step + 1))

    def stand_at(self, said: int) -> None:
        """Trainers have loaded a state, which was saved when so much had been said."""
        self.said = said

    def resumed(self, state: StreamState) -> None:
        """Everything was killed, and the journal says what has happened: also what was written, and
        nobody was told of.
        """
        while self.said < len(self._sayings) and self._is_in(state, self._sayings[self.said]):
            self._has_happened(self.said)

    def _is_in(self, state: StreamState, saying: Saying) -> bool:
        return (
            saying.event in state.events or saying.first < state.step
        )  # else that would not be planned

    def heard_late(self, event: SetMixture | Skip) -> None:
        """It was given up, and has happened."""
        if self.said < len(self._sayings) and self._sayings[self.said].event == event:
            self._has_happened(self.said)

    def _answered(self, launched: Launched, i: int, error: Exception | None) -> None:
        cluster = self._cluster
        if isinstance(error, DataStall):
            cluster.world.at(AGAIN_S, lambda: self._again(launched), None)
        elif isinstance(error, JournalError) and cluster.failed(-1, error):
            pass  # the job is started again when there is room, and what was written is known then
        else:
            if error is not None:
                words = f"{type(error).__name__}: {error}"
                cluster.history.add(
                    cluster.world.now,
                    "refused",
                    step=self._sayings[i].first,
                    session=cluster.session,
                    words=words,
                )
            self._has_happened(i)
            self._again(launched)

    def _again(self, launched: Launched) -> None:
        if self._busy is launched:
            self._busy = None
        self.look()

    def _has_happened(self, i: int) -> None:
        if self.said == i:
            self.said += 1
            cluster = self._cluster
            cluster.history.add(
                cluster.world.now, "said", session=cluster.session, words=str(self._sayings[i])
            )
            cluster.release()
