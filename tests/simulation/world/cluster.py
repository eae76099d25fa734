"""A simulated cluster: the process runtime's own classes on a virtual clock, trainers that take
steps, and faults by script.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

from overlord.errors import JournalError, OverlordError
from overlord.messages.control import EncodedState, Report, SentReport, StreamState
from overlord.setup.options import Options
from overlord.transport.codec import decode_state
from tests.simulation.world.control import Births
from tests.simulation.world.disk import SimDisk
from tests.simulation.world.history import History
from tests.simulation.world.launched import Launched
from tests.simulation.world.memoization import Memory, prepared
from tests.simulation.world.net import Net
from tests.simulation.world.people import People
from tests.simulation.world.scenario import STEPS, Scenario, shown, tree_of
from tests.simulation.world.striking import Script
from tests.simulation.world.trainers import Trainer
from tests.simulation.world.virtual import SimMachine
from tests.simulation.world.world import World

log = logging.getLogger("overlord")

GIVE_UP_S = 300.0  # of virtual time without a step on any rank: far beyond what the checker allows
MAX_EVENTS = 100_000
LATE_REPORTS, LATE_S = (
    50,
    0.02,
)  # how often trainers repeat themselves after a fault, and how quickly


class Cluster:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, faults: bool = True, memory: Memory | None = None):
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.net = Net(self.world)
        self.history = History()
        job = scenario.job()
        # Nothing is measured: a run depends on its seed alone. ``layout.py`` places the loaders.
        self.blueprint = prepared(
            job, Options.of({"partition": "off", "watch_s": 0.0, **scenario.options}), memory
        )
        self.prefetch = self.blueprint.options.prefetch
        self.session = self.first = 0
        self.mesh, self._stop_at = (
            scenario.mesh,
            STEPS,
        )  # the first step that trainers do not take, since the mesh is about to change
        self.ranks = list(range(job.place.world_size))
        self.taken: dict[int, int] = {}
        self.states: dict[
            int, StreamState | EncodedState
        ] = {}  # behind each step, as its trainers would save it
        self._heard: dict[int, int] = {}  # how much had been said by people when it was saved
        self.trainers: dict[int, Trainer] = {}
        self.error: BaseException | None = None
        self.broken: BaseException | None = None
        self.disk = (
            SimDisk(self.world.random, store=scenario.outlives) if scenario.journal else None
        )
        self._client_numbers = itertools.count(1)
        self.births: Births = {}
        self.people = People(self, scenario.sayings)
        self.launched = Launched(self, None, 0)
        for rank in self.ranks:
            self.seat(rank, 0)
        self._quiet, self._launches = False, 0  # that failed since the last step
        self.script = Script(self, scenario.faults if faults else ())

    # trainers

    def seat(self, rank: int, next_step: int, kept: Sequence[SentReport] = ()) -> None:
        process = self.world.start(f"trainer/{rank}")
        self.trainers[rank] = Trainer(
            rank, SimMachine(self.world, self.net, process), self, next_step, kept
        )

    def where(self, rank: int, session: int) -> tuple[str, str]:
        if session != self.launched.session:
            raise OverlordError("the session was moved")
        return self.launched.address_for(rank)

    def took(self, rank: int, step: int, after: StreamState | EncodedState) -> None:
        self.taken[rank], self._launches = step, 0
        self.states[step], self._heard[step] = (
            after if not self.people.said else self._completed(after),
            self.people.said,
        )

    def reports(self, rank: int, step: int) -> Report | None:
        """What a trainer reports of a step, if anything."""
        if self.scenario.learns and step not in self.scenario.skipped:
            return self.launched.report(rank, step)
        return None

    def sent_report(self) -> None:
        self.launched.n_reports += 1

    def _count(self) -> None:
        """Nothing that is sent again, since its answer was lost, may count twice."""
        if (self.scenario.learns or self.scenario.sayings) and (
            words := self.launched.counted_twice()
        ):
            self.history.add(self.world.now, "twice", session=self.session, words=words)

    @property
    def feedback_lag(self) -> int:
        return self.blueprint.job.feedback_lag

    def next_client(self) -> int:
        """A number for a client, higher than that of any before it."""
        return next(self._client_numbers)

    def report_late(self) -> None:
        """Trainers repeat themselves while parts are lost: what comes too late for a plan must not
        count when it is made again.
        """

        def say() -> None:
            for rank, step in self.taken.items():
                if (old := step - self.feedback_lag) >= 0:
                    losses = enumerate(self.scenario.names)
                    late = Report(old, rank, {f"loss/{name}": 9.0 * (i % 2) for i, name in losses})
                    self.trainers[rank].report(late, in_time=False)

        for k in range(LATE_REPORTS if self.scenario.learns else 0):
            self.world.at(k * LATE_S, say, None)

    def failed(self, rank: int, error: Exception) -> bool:
        """Whether the job will be started again."""
        what = "error"
        if (
            isinstance(error, JournalError) and self.disk is not None and self.filled
        ):  # as promised: it stops, and says why
            what = "stopped"
            self.world.at(0.5, lambda session=self.session: self._when_there_is_room(session), None)  # type: ignore[misc]
        self.history.add(
            self.world.now,
            what,
            rank=rank,
            session=self.session,
            words=f"{type(error).__name__}: {error}",
        )
        return what == "stopped"

    def _when_there_is_room(self, session: int) -> None:
        """Whoever runs the job frees some space and starts it again."""
        if (
            session == self.session
            and self.disk is not None
            and (self.disk.full or not self.restart())
        ):
            self.world.at(0.5, lambda: self._when_there_is_room(session), None)

    @property
    def filled(self) -> bool:
        """Whether the disk was full once."""
        return self.history.fired["disk full", "planner"] > 0 or (
            self.disk is not None and self.disk.full
        )

    def not_launched(self, launched: Launched, error: Exception) -> None:
        """A part was lost before the job had begun: whoever launches it is told so, and does it
        again.
        """
        if self.launched is launched:
            self.history.add(
                self.world.now, "launch", session=self.session, words=f"failed: {error}"
            )
            self._launches += 1
            self.world.at(
                min(5.0, 0.5 * 2 ** (self._launches // 8)),
                lambda: self._launch_again(launched),
                None,
            )

    def _launch_again(self, launched: Launched) -> None:
        if self.launched is not launched:
            return
        # no planner can be had in the place of the one that was lost: the job has failed, and is
        # started again
        if launched.incarnation:
            self.restart(failed=True)
            return
        launched.end(killed=True)
        self.launched = launched.again()

    def resumed(self, launched: Launched, state: StreamState) -> None:
        """The journal says where the job goes on."""
        if not launched.told:
            launched.told = True
            for trainer in (
                self.trainers.values()
            ):  # the first launch failed when its journal was begun: those who wait for it go too
                trainer.gone = True
                trainer.process.kill()
            self.people.resumed(state)
            self._stand_at("restart", state)

    def broke(self, error: BaseException) -> None:
        """A core raised: never to be seen."""
        self.broken = error
        self.history.add(
            self.world.now,
            "error",
            session=self.session,
            words=f"the pump stopped: {type(error).__name__}: {error}",
        )

    # what happens to them

    def crash(self, rank: int, *, with_step: bool) -> bool:
        """A trainer dies and is started again; ``with_step``: just when it was handed a step,
        before it could say so.
        """
        trainer = self.trainers[rank]
        if with_step:
            trainer.crash_with_step = True
        trainer.process.on_end.append(
            lambda: self.world.at(self.world.delay(0.1), lambda: self._again(trainer), None)
        )
        if not with_step:
            trainer.process.kill()
        return True

    def _again(self, trainer: Trainer) -> None:
        if (
            self.trainers[trainer.rank] is trainer
            and trainer.rank in self.ranks
            and not trainer.gone
        ):
            next_step = self.taken.get(trainer.rank, self.first - 1) + 1
            self.seat(trainer.rank, next_step, trainer.kept_reports)

    def leave(self, rank: int) -> bool:
        """A trainer closes its client: nobody waits for it any more."""
        if (
            self.launched.host is None or self.trainers[rank].ended or self.scenario.learns
        ):  # what it would report is missed by the mixture
            return False
        self.ranks.remove(rank)
        self.trainers[rank].process.kill()
        self.history.add(self.world.now, "leave", rank=rank, session=self.session)
        self.launched.detach(rank)
        return True

    def rewind(self, which: int) -> bool:
        """All trainers load an older state: the first moves the session there, the others agree."""
        steps = [s for s in self.states if s <= self.slowest]
        if self.launched.host is None or not steps:
            return False
        step = sorted(steps)[-1 - which % min(5, len(steps))]
        state, said = self._saved(step), self._said_by(step)
        self._end_trainers()
        self.launched.end()
        self.session += 1
        self.people.stand_at(said)
        self._stand_at("rewind", state)
        self.launched = Launched(self, state, self.session, anew=True)
        return True

    def reshard(self, which: int) -> bool:
        """All trainers stop behind the last step that one of them was handed, and go on as another
        mesh. True once they do.
        """
        if self.launched.host is None or not self.taken:
            return False
        if self._stop_at == STEPS:
            self._stop_at = 1 + max(self.taken.get(rank, -1) for rank in self.ranks)
        if (
            self._stop_at >= STEPS
            or any(self.taken.get(rank, -1) + 1 != self._stop_at for rank in self.ranks)
            or not self._stop_at
        ):
            return False
        state = self._saved(self._stop_at - 1)
        self._end_trainers()
        self.launched.end()
        self.session += 1
        self.mesh = self.scenario.other_mesh(self.mesh, which)
        self.blueprint = self.blueprint.placed(tree_of(self.mesh))
        self.ranks = list(range(self.blueprint.job.place.world_size))
        self._stand_at("reshard", state)
        self.launched = Launched(self, state, self.session, anew=True)
        return True

    def holds(self, step: int) -> bool:
        """Whether trainers wait before a step: for another mesh, for what people say to be heard,
        or, before the last one, for faults that must strike in every run.
        """
        return (
            step >= self._stop_at
            or (step >= STEPS - 1 and self.script.owes)
            or self.people.holds(step)
        )

    def call_off(self) -> None:
        """The mesh stays what it is."""
        self._stop_at = STEPS
        self.release()

    def release(self) -> None:
        """What trainers waited with may be over."""
        for trainer in self.trainers.values():
            trainer.release()

    def restart(self, *, failed: bool = False) -> bool:
        """Everything is killed and the job is started again, from its journal: trainers ask it
        where they are.
        """
        if (self.launched.host is None and not failed) or self.disk is None:
            return False
        self._end_trainers()
        self.launched.end(killed=True)
        self.session += 1
        self.launched = Launched(self, None, self.session)
        return True

    def _saved(self, step: int) -> StreamState:
        """The state behind a step as a trainer saves it: with all that was said since it was
        planned. What people said when all had gone further is not in it: that is said again where
        trainers go back to it.
        """
        saved = _opened(self.states[step])
        late = self._completed(saved)
        return (
            late
            if step == self.slowest or not self.scenario.sayings
            else replace(late, events=saved.events)
        )

    def _said_by(self, step: int) -> int:
        """How much of what people say is in that."""
        return self.people.said if step == self.slowest else self._heard[step]

    def _completed(self, state: StreamState | EncodedState) -> StreamState:
        said = self.launched.said.values()  # trainers keep the promise of ``surely_in_time``
        return self.launched.log.completed(_opened(state), self.blueprint.job.names, reports=said)

    def _end_trainers(self) -> None:
        if self.scenario.learns:  # what a state lacks is known to the session that ends
            self.states = {step: self._saved(step) for step in self.states}
            self._heard = {step: self._said_by(step) for step in self.states}
        for trainer in self.trainers.values():
            trainer.gone = True
            trainer.process.kill()

    def _stand_at(self, what: str, state: StreamState) -> None:
        step = self.first = state.step
        self._stop_at = STEPS
        self.states = {s: after for s, after in self.states.items() if s < step}
        if step and self.scenario.sayings:  # what was said by now is in it, and nowhere else
            self.states[step - 1], self._heard[step - 1] = state, self.people.said
        self.taken = dict.fromkeys(self.ranks, step - 1)
        self.history.add(
            self.world.now,
            what,
            step=step,
            session=self.session,
            words=shown(self.mesh) if what == "reshard" else "",
        )
        for rank in self.ranks:
            self.seat(rank, step)

    def calm(self) -> None:
        if not self._quiet:
            self._quiet = True
            self.history.add(self.world.now, "calm")

    # running

    @property
    def slowest(self) -> int:
        return min((self.taken.get(rank, -1) for rank in self.ranks), default=STEPS)

    @property
    def over(self) -> bool:
        return self.broken is not None or all(self.trainers[rank].over for rank in self.ranks)

    def run(self) -> History:
        try:
            world, seen = self.world, self.history.events
            n, moved, at = -1, 0.0, -1
            while world.happened < MAX_EVENTS and world.now - moved <= GIVE_UP_S:
                if (
                    len(seen) != n
                ):  # nothing else says that a rank has moved on, or that all have ended
                    n, slowest = len(seen), self.slowest
                    if self.over:
                        break
                    if slowest != at:
                        moved, at = world.now, slowest
                        self.script.look()
                        self.people.look()
                        self._count()
                if not world.step():
                    break
        finally:
            self.world.close()
            self.blueprint.close()
        return self.history


def _opened(state: StreamState | EncodedState) -> StreamState:
    return decode_state(state) if isinstance(state, EncodedState) else state
