"""``Session``: a running job. ``launch`` creates it, and closing it ends everything it started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from overlord.checks import did_you_mean
from overlord.client.client import Client
from overlord.errors import JobError
from overlord.job.job import Job, Source
from overlord.journal.write_ahead import JournalStart
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import StreamState
from overlord.plan.plan import LoadingPlan
from overlord.sample import Buffer
from overlord.serving.session_server import ServedAddress
from overlord.session import inspection
from overlord.session.events import whole_numbers
from overlord.session.reshard import reshard
from overlord.session.rewind import rewind_all, rewind_client
from overlord.session.running_job import RunningJob
from overlord.session.served_ranks import serve
from overlord.setup.prepared_job import PreparedJob

if TYPE_CHECKING:
    from overlord.observe.explanation import Explanation
    from overlord.planning.graph.dgraph import DGraph
    from overlord.sample import SampleId
    from overlord.scaling.profile import JobProfile


class Session:
    """A running job. Use it as a context manager, or call ``close``.

    ``resumed``: the step at which a job with a journal was resumed, and why; else None.
    ``internals``: the state of the session. It is not part of the public API.
    """

    def __init__(
        self,
        job: Job,
        prepared: PreparedJob,
        state: StreamState | None,
        runtime: str = "local",
        start: JournalStart | None = None,
    ):
        start = start or JournalStart()
        self.resumed = start.resumed
        self.internals = RunningJob(prepared, state, runtime, start)

    @property
    def job(self) -> Job:
        """The job, with the sources that were added and the current mesh."""
        return self.internals.job

    @property
    def taken(self) -> int:
        """The last step that all ranks took, in this run or an earlier one; -1 before the first."""
        generation = self.internals.generation
        return max(generation.acked_by_all, generation.start.step - 1)

    # clients

    def client(self, rank: int = 0) -> Client:
        """Return the client of one rank.

        Open the clients of all ranks of this process before you iterate the first one.
        """
        running = self.internals
        return running.open_client(
            rank, lambda rank, state, allow: rewind_client(running, rank, state, allow)
        )

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        ranks: Iterable[int] | None = None,
    ) -> ServedAddress:
        """Accept clients in other processes. Call this before the first step.

        Print the result and set it in the environment of the trainers. From now on all ranks (or
        ``ranks``) are expected, in this process or in others. Planning begins with the first client
        that connects. A missing rank blocks the others when the prefetch window is full. ``host``:
        the interface to listen on; the default is reachable from this machine only.
        """
        return serve(self.internals, host, port, token, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step that every client took, as plain JSON values.

        Without an open client it is the position of the client that closed last.
        """
        return self.internals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Rewind the whole session to a saved state: every client continues from there."""
        rewind_all(self.internals, state, allow)

    def reshard(
        self, place: ClientPlaceTree, at: int | None = None, *, timeout_s: float = 60.0
    ) -> int:
        """Continue on another mesh from the first step that no rank took; return that step.

        The samples of that step and of all later steps do not change. They are placed anew, never
        drawn anew.

        All ranks must be at the same step, as trainers are at a barrier. The call waits up to
        ``timeout_s`` for slower ranks, which must take their steps in another thread or process.
        ``at`` names the step. It is required if ranks are served to other processes: their last
        steps may not be recorded here yet. Clients of ranks that the new mesh has too continue;
        clients of other ranks raise an error. Open clients of new ranks before the next step is
        requested.
        """
        return reshard(self.internals, place, at, timeout_s)

    # events

    def set_mixture(self, weights: Mapping[str, float], at: int | None = None) -> int:
        """Use new weights from step ``at`` on; return that step.

        Default: the first step that is not planned yet.
        """
        return self.internals.events.set_mixture(weights, at)

    def skip(self, steps: Iterable[int]) -> None:
        """Draw and list these steps, but do not deliver them; step numbers do not shift."""
        self.internals.events.skip(steps)

    def add_source(
        self, source: Source, at: int | None = None, *, loaders: int | None = None
    ) -> int:
        """Add a source, drawn from step ``at`` on; return that step.

        Default: the first step that is not planned yet. The source gets its own ``weight`` next to
        the weights of the others, unless the mixture names it. Nothing else in the stream changes.
        ``loaders``: default as many as its measured cost requires. The source is indexed first. An
        error is raised as at launch, and then nothing has changed. To resume from a state saved
        after this, list the source last in ``Job.sources``: a state holds no code.
        """
        return self.internals.events.add_source(source, at, loaders)

    # processes

    def move(self, source: str, *hosts: str) -> None:
        """Read a source in other loader workers from now on; its loaders are distributed over them.

        ``metrics()["actors"]`` lists the workers. The stream does not change: the source is read
        again from the position of the draw.
        """
        running = self.internals
        running.refuse_closed()
        number = self._source_number(source, "move")
        if not hosts:
            raise JobError(
                [
                    "expected the loader worker to move to, got none; name one, as in "
                    "session.move('web', 'loader-worker/1')"
                ],
                "move",
            )
        running.loop.call(lambda: running.runtime.move(number, hosts), "the planner")

    def scale(self, source: str, hosts: int) -> bool:
        """Read a source in ``hosts`` loader workers from now on.

        New workers start in the background, and take over when they have buffered enough samples,
        or after a few seconds. False: nothing was changed. The source has that many workers, a
        worker is lost, another change is in progress, or the job has ended. The stream does not
        change.
        """
        running = self.internals
        running.refuse_closed()
        number = self._source_number(source, "scale")
        [n] = whole_numbers("scale", [hosts])
        return bool(running.loop.call(lambda: running.runtime.scale(number, n), "the planner"))

    def kill(self, name: str) -> None:
        """Kill a process of the job as a crash would, for drills.

        ``metrics()["actors"]`` lists the processes.
        """
        running = self.internals
        running.refuse_closed()
        running.loop.call(lambda: running.runtime.kill(name), "the event loop")

    def _source_number(self, name: str, what: str) -> int:
        names = self.job.names
        if name not in names:
            raise JobError([f"unknown source {name!r}{did_you_mean(name, names)}"], what)
        return names.index(name)

    # read-only queries

    def plan(self, step: int) -> LoadingPlan:
        """Return the plan of a recent step. At most 256 plans are kept, fewer of large steps."""
        return inspection.plan(self.internals, step)

    def graph(self, step: int) -> DGraph:
        """Return the graph of a planned step, with the loader of each sample.

        It also has the constructor of each bucket. Strategies see neither.
        """
        return inspection.graph(self.internals, step)

    def explain(self, what: int | str | SampleId) -> Explanation:
        """Explain a step by its number, or a sample by its id.

        A step: its rows, its weights and its placement. A sample: its position, and the reason.
        """
        return inspection.explain(self.internals, what)

    def summary_buffer(self) -> Buffer:
        """Return metadata of all samples that are ready and not drawn, per source in stream order.

        For experiments: ``DGraph.from_buffer(session.summary_buffer(), place).mix(weights)``. The
        contents depend on timing, so nothing in the stream may depend on them.
        """
        return inspection.summary_buffer(self.internals)

    def quarantine(self) -> list[dict[str, Any]]:
        """Return the rows that were left out of all plans so far, each with the reason.

        After them come samples with an image that could not be decoded. They were delivered without
        it, and the reason names the step. ``row`` is a row number or a byte offset, as ``row_unit``
        says. ``line`` is the line of that byte, if a local file has it within its first 256 MB.
        """
        return inspection.quarantine(self.internals)

    def profile(self) -> JobProfile:
        """Return the measured costs of sources, and save them for the next launch.

        Raise ``JobError`` for a job that was not launched with ``partition="auto"``.
        """
        return inspection.profile(self.internals)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of steps, mixture, memory, reads, transforms and workers."""
        return inspection.metrics(self.internals)

    # the end

    def close(self) -> None:
        """Stop everything. Idempotent; safe in a signal handler.

        After an interruption the remaining steps are still done, and a second call repeats the
        interrupted one.
        """
        self.internals.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running = self.internals
        state = "closed" if running.closed else f"{len(running.clients)} clients"
        return f"Session({self.job!r}, {running.kind}, {state})"
