"""The state and functions of Overlord that tests use although they are not public.

No other test module names a private attribute of the package: ``unit/test_private_accesses.py``
counts them. A renamed attribute is changed here, once. The module imports nothing of Overlord, since
worker processes of tests import it.
"""

from __future__ import annotations

import contextlib
import pkgutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import overlord as ov
    from overlord.cluster.launcher import Launcher
    from overlord.concurrency.event_loop import EventLoop
    from overlord.session.generation import Generation
    from overlord.session.running_job import RunningJob
    from overlord.transport.connection import Connection


# functions that tests replace


@dataclass(frozen=True)
class Seam:
    """A private attribute that a test replaces, to delay, observe or break a real run."""

    owner: str  # module, or module:class
    name: str

    @property
    def real(self) -> Any:
        """The attribute as it is now."""
        return getattr(pkgutil.resolve_name(self.owner), self.name)

    def replace(self, patch: Any, new: Any) -> None:
        """Replace the attribute until the ``MonkeyPatch`` is undone."""
        patch.setattr(pkgutil.resolve_name(self.owner), self.name, new)

    def assign(self, new: Any) -> None:
        """Replace the attribute for the rest of this process."""
        setattr(pkgutil.resolve_name(self.owner), self.name, new)


# the coordinator process, seen from the launcher
COORDINATOR_STARTS = Seam("overlord.cluster.launcher:Launcher", "_start_coordinator")
COORDINATOR_RESTARTS = Seam("overlord.cluster.launcher:Launcher", "_restart_coordinator")
COORDINATOR_READY = Seam("overlord.cluster.launcher:Launcher", "accept_calls")
COORDINATOR_WAITS = Seam("overlord.cluster.launcher:Launcher", "_note_awaited")
COORDINATOR_REPLACED = Seam("overlord.cluster.launcher:CoordinatorHeartbeat", "kill")
COORDINATOR_AWAITED = Seam("overlord.cluster.launcher:Launcher", "_wait_for_coordinator")
LAUNCHER_EXECUTES = Seam("overlord.cluster.launcher:Launcher", "_execute")
SESSION_RECEIVES = Seam("overlord.session.cluster_runtime:ClusterRuntime", "_received")
# workers, seen from the coordinator
WORKER_RESTARTS = Seam("overlord.cluster.worker_pool:WorkerPool", "_restart_loader")
WORKER_RESTARTED = Seam("overlord.cluster.worker_pool:WorkerPool", "_is_restarted")
# clients
QUEUE_CONNECTS = Seam("overlord.client.remote_queue:RemoteStepQueue", "_connect")
QUEUE_ASKS_AGAIN = Seam("overlord.client.remote_queue:RemoteStepQueue", "_reconnect_early")
RENDEZVOUS_STORE = Seam("overlord.session.rendezvous", "_store")
# storage
JOURNAL_WRITES = Seam("overlord.journal.storage:DirectoryStorage", "_write")
JOURNAL_SYNCS = Seam("overlord.journal.storage", "_sync_data")
LOCAL_FILES = Seam("overlord.sources.files", "_local")
FOOTER_READS = Seam("overlord.sources.parquet", "_footer_bytes")
# other functions
SESSION_STARTS = Seam("overlord.session.launch", "_start")
DRILL_STRIKES = Seam("overlord.drill.run", "_strike")
RAGGED_CHECK = Seam("overlord.transport.value_codec", "_ragged_problem")
# registries of the process
JOB_FILE_FUNCTIONS = Seam("overlord.jobfile.functions", "_functions")
COST_NAMES = Seam("overlord.planning.cost.models", "_REGISTERED")
BALANCE_NAMES = Seam("overlord.planning.balance.methods", "_METHODS")
SCHEDULE_NAMES = Seam("overlord.planning.schedule", "_registered")
RAY_VERSIONS_WARNED = Seam("overlord.ray.versions", "_warned")


# sessions


def running_job(session: ov.Session) -> RunningJob:
    """Return the state of a session."""
    return session.internals


def generation_of(session: ov.Session) -> Generation:
    """Return the current generation of a session."""
    return session.internals.generation


def runtime_of(session: ov.Session) -> Any:
    """Return the runtime of a session: local or cluster."""
    return session.internals.runtime


def loop_of(session: ov.Session) -> EventLoop:
    """Return the event loop of a session."""
    return session.internals.loop


def journal_writer_of(session: ov.Session) -> Any:
    """Return the thread object that appends to the journal of a session."""
    return session.internals.journal._writer  # type: ignore[union-attr]


def pending_appends(session: ov.Session) -> int:
    """Return how many appends to the journal are not written yet."""
    return len(journal_writer_of(session)._orders)


def join_writer(writer: Any, timeout_s: float) -> None:
    """Wait for the end of a journal's append thread."""
    assert writer._thread is not None
    writer._thread.join(timeout_s)


def snapshot_every(journal: Any, plans: int) -> None:
    """Set the number of plans between two snapshots of a journal."""
    journal._interval = plans


def user_events_of(session: ov.Session) -> list[Any]:
    """Return the events that a session keeps for states."""
    return session.internals.generation.events._events


def resume_by_journal(*given: Any) -> Any:
    """Return prepared job, state and journal start of a resumed job."""
    from overlord.session import resume

    return resume._by_journal(*given)


# launcher and coordinator


def launcher_of(where: Any) -> Launcher:
    """Return the launcher of a session, or of its runtime."""
    runtime = where.internals.runtime if hasattr(where, "internals") else where
    return runtime._launcher


def constructor_addresses(runtime: Any) -> list[str]:
    """Return the known addresses of the constructor workers of a cluster runtime."""
    return list(runtime._known.values())


def is_ready(launcher: Launcher) -> bool:
    """Return whether the coordinator process answers."""
    return launcher._ready


def incarnation_of(launcher: Launcher) -> int:
    """Return how many times the coordinator process was replaced."""
    return launcher._incarnation


def lease_id_of(launcher: Launcher, name: str) -> Any:
    """Return the id by which the coordinator knows the current worker of a name."""
    return launcher.workers._leases[name]


def is_closed(runtime: Any) -> bool:
    return runtime._closed


def forget_addresses(runtime: Any) -> None:
    """Let a cluster runtime ask its workers again for their addresses."""
    runtime._outside.clear(), runtime._calls.clear()


def parts_of_coordinator(actor: Any) -> Any:
    """Return coordinator and event loop of a coordinator actor; None while it starts."""
    return (actor._coordinator, actor._event_loop) if hasattr(actor, "_coordinator") else None


def worker_starter_of(coordinator: Any) -> Any:
    """Return the object with which a coordinator starts workers."""
    return coordinator.pool._starter


def heartbeats_by(recovery: Any, now: Callable[[], float]) -> Callable[[], None]:
    """Replace the clock of a recovery manager; return the function of one heartbeat."""
    recovery._now = now
    return recovery._beat


def starting_workers(launcher: Launcher) -> list[Any]:
    """Return the handles of workers that the startup watchdog watches."""
    return list(launcher.workers.watchdog._starting)


def unanswered_row(reporter: Any, loader: int) -> dict[str, Any]:
    """Return the metrics of a loader whose worker does not answer."""
    return reporter._unanswered(loader)


def stop_heartbeats_by(heartbeat: Any, clock: Any) -> None:
    """Let a clock of a test decide when the heartbeats of a coordinator stop."""
    heartbeat._stop = clock


# clients


def set_stall(
    client: ov.Client,
    *,
    warn_s: float | None = None,
    limit_s: float | None = None,
    on_stall: Callable[[str, float], None] | None = None,
) -> None:
    """Change the deadlines of a client that is in use."""
    if warn_s is not None:
        client._warn_s = warn_s
    if limit_s is not None:
        client._limit_s = limit_s
    if on_stall is not None:
        client._on_stall = on_stall


@contextlib.contextmanager
def stall_limit(client: ov.Client, seconds: float) -> Iterator[None]:
    """Change the deadline of a client for a block."""
    before, client._limit_s = client._limit_s, seconds
    try:
        yield
    finally:
        client._limit_s = before


def connection_of(queue: Any) -> Any:
    """Return the connection of a step queue to its constructor; None while there is none."""
    return getattr(queue, "_remote", queue)._link


def drop_connection(queue: Any) -> None:
    """Close the connection of a step queue as the death of its process does."""
    queue._drop_link("it died")


def connect_at(queue: Any, acked: int, until: Callable[[Callable[[], bool]], Any]) -> None:
    """Connect a step queue whose previous constructor knew ``acked`` as its last step."""
    queue._acked_before = acked

    def is_connected() -> bool:
        queue._retry_connection(1.0)
        return queue._link is not None or queue._ended

    with queue._read_lock:
        until(is_connected)


def receive(queue: Any, message: Any) -> None:
    """Let a step queue handle a message as if it had arrived."""
    queue._handle_message(message)


def forget_control(client: ov.Client) -> None:
    """Drop the reference of a client to its session, as the death of its process does."""
    client._asking = None  # type: ignore[attr-defined]


def control_connection_of(client: ov.Client) -> Connection:
    """Return the connection of a remote client to the control server."""
    return client._waiting_for.__self__._control._link  # type: ignore[attr-defined]


def sever(connection: Any) -> None:
    """Break a connection below both of its ends."""
    connection._sock.shutdown(socket.SHUT_RDWR)


def pretend_fork(steps: Any, offset: int) -> None:
    """Change the process id that an iterator was created in."""
    steps._pid += offset


# transport


def pending_handshakes(server: Any) -> int:
    """Return the number of connections whose handshake is not complete."""
    return len(server._pending)


def replace_receiver(server: Any, make: Callable[[Any], Callable[[Any, Any], None]]) -> None:
    """Replace the function that receives the messages of a server by one that wraps it."""
    server._on_message = make(server._on_message)


def serve_clients(worker: Any, token: str, **where: Any) -> Any:
    """Return a further server of a constructor worker."""
    return worker._serve(token, **where)


def send_raw(data: bytes) -> None:
    """Send bytes that are not a frame on the first connection of this worker process."""
    from overlord.rpc import process_launcher

    process_launcher._open_connections[0]._connection._sock.send(data)


def socket_to_actor(handle: Any) -> socket.socket:
    """Return this side's socket of the connection to an actor that has connected."""
    return handle.record.inbound.connection._sock


def has_waiter(pool: Any) -> bool:
    """Return whether a caller waits for memory of a shared-memory pool."""
    return bool(pool._waiting)


def release_flags(lease: Any) -> Any:
    """Return the memory in which a peer marks segments as released."""
    return lease._map


# torch


def count_join() -> None:
    """Count a call of ``join``, as if this rank had made it."""
    from overlord.session.rendezvous import _calls

    next(_calls)


def broadcast_of(client: Any) -> Any:
    """Return the frame broadcast of a joined client."""
    return client._frames


def frames_under_way(client: Any) -> int:
    """Return how many frames other ranks have not received yet."""
    return len(client._frames._sent)


def broadcast_closed(client: Any) -> bool:
    return client._frames._closed


def broadcast_limit(client: Any, seconds: float | None = None) -> float:
    """Return the deadline of a broadcast; with ``seconds``, set another one."""
    before = client._frames._limit_s
    if seconds is not None:
        client._frames._limit_s = seconds
    return before


def on_departure(client: Any, call: Callable[[Any], None]) -> None:
    """Replace the check for departed ranks, between two waits of a broadcast."""
    client._frames._departed = call


def departed_ranks(client: Any) -> int:
    """Return how many ranks have left, by the store of the rendezvous."""
    board = client._leave.__self__._board
    return board._store.add(f"{board._key}/left", 0)


def broadcast_error(broadcast: Any, error: Exception, at: int) -> Exception:
    """Return the error of a broadcast that torch ended with ``error``."""
    return broadcast._lost(error, at)


def wait_for_broadcast(broadcast: Any, work: Any, words: str) -> None:
    """Wait for the work of torch as a broadcast does."""
    broadcast._wait(work, words)


# cores


def acked_steps(planner: Any) -> Mapping[int, int]:
    """Return the last acknowledged step of every attached rank."""
    return planner._consumed


def waits_for_samples(planner: Any) -> bool:
    """Return whether the open step lacks samples."""
    return bool(planner._waiting)


def source_of_loader(planner: Any, loader: int) -> int:
    return planner._demand.source_of[loader]


def end_planner(planner: Any, end: Any) -> None:
    """Set the end of the job that a previous planner found."""
    planner._ended = end


def completed_state(history: Any, state: Any, names: Any) -> Any:
    """Return a state with the events of a plan history."""
    return history._log.completed(state, names)


def loader_budget(loader: Any) -> int:
    """Return the bytes that a loader may hold ready."""
    return loader._budget


def kept_announcements(replay: Any) -> int:
    return len(replay._announcements)


def kept_blocks(buffer: Any) -> list[Any]:
    """Return the blocks of a sample buffer that a rollback may need."""
    return list(buffer._kept)


def unpopped_bytes(buffer: Any) -> int:
    """Return the bytes of samples that were not popped yet."""
    return sum(block.nbytes for block in buffer._blocks) - (
        buffer._blocks[0].slice(0, buffer._taken).nbytes if buffer._taken else 0
    )


def open_window(reader: Any) -> Any:
    """Return the window that a reader has open; None without one."""
    return reader._window


def cached_orders(order: Any) -> int:
    """Return the number of epochs whose chunk order is cached."""
    return len(order._orders)


def has_step(assembler: Any, step: int) -> bool:
    return assembler._steps.get(step) is not None


def loader_service_of(worker: Any) -> Any:
    """Return the loader service of a loader worker."""
    return worker._loading


def worker_loop_of(worker: Any) -> EventLoop:
    """Return the event loop of a worker."""
    return worker._event_loop


def early_payload(gatherer: Any) -> Mapping[int, Any]:
    """Return payload that arrived before its plan, by loader worker."""
    return gatherer._early


def payload_holders(service: Any) -> Mapping[int, Any]:
    """Return the buckets that still need the payload of a step, by step."""
    return service._holders


def planned_and_built(service: Any) -> tuple[int, int]:
    """Return the numbers of steps and of buckets that a constructor service holds."""
    return len(service._staged), len(service._built)


def built_bucket(service: Any, step: int, bucket: int) -> Any:
    return service._built[step, bucket][1]


def pooled_buffers(pool: Any) -> list[Any]:
    """Return the buffers that a pool keeps."""
    return list(pool._buffers)


def collection_sizes(runtime: Any, prepared: Any, executor: Any) -> dict[str, int]:
    """Return the lengths of all collections that live as long as a local runtime."""
    planner, service = runtime.planner, runtime.building
    streams = planner._streams
    return {
        "staged": len(service._staged),
        "holders": len(service._holders),
        "built": len(service._built),
        "queue": len(runtime.commands.queue),
        "plans": len(runtime.plans),
        "buffers": len(runtime.slabs._buffers),
        "buffer bytes": runtime.slabs.nbytes,
        "chunks": len(prepared.handles._chunks),
        "outstanding": len(planner._outstanding),
        "events": len(planner.state().events),
        "segments": sum(len(s._segments) for s in streams),
        "shards": sum(len(s._announced) for s in streams),
        "lasts": sum(len(s._lasts) for s in streams),
        "blocks": sum(len(h.buffer._blocks) for h in runtime.loading.slots.values()),
        "assembling": sum(len(a._steps) for a in runtime.assemblers),
        "timers": len(executor._events),
    }


def run_inline_below(executor: Any, seconds: float) -> None:
    """Let an executor run work that took less than this on the event loop."""
    executor._inline_s = executor._inline_read_s = seconds


def replace_format(chunks: Any, make: Callable[[Any], Any]) -> None:
    """Replace the format of a chunk reader."""
    chunks._format = make(chunks._format)


def cached_runs(file: Any) -> int:
    """Return the bytes that a range file keeps."""
    return sum(len(run.data) for run in file._runs)


def forget_store_clients() -> None:
    """Empty the cache of the clients of object stores."""
    from overlord.sources import object_store

    object_store._connect.cache_clear()


def store_key(store: Any, path: str) -> str:
    return store._key(path)


def store_client(store: Any) -> Any:
    return store._client()


# Ray


def cluster_users(cluster: Any) -> int:
    """Return how many sessions hold the cluster."""
    return cluster._users


def without_users(cluster: Any, patch: Any) -> None:
    """Let the cluster look as if every session had released it."""
    patch.setattr(cluster, "_users", 0)


def cluster_lock(cluster: Any) -> threading.Lock:
    """Return the lock that is held while Ray is asked."""
    return cluster._lock


def opened_at(connection: Any, address: str) -> Any:
    """Return a connection to Ray as if it had been opened."""
    connection._address = address
    return connection
