"""The session interface for clients in other processes, and the dispatch of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from overlord.client.client import State
from overlord.errors import OverlordError
from overlord.messages.control import SentReport
from overlord.serving.step_publisher import MOVED, PublishedQueue, encoded

# requests of ranks whose steps another rank fetches
BROADCAST_CALLS = ("why", "export", "report", "refused")


class SessionApi(Protocol):
    """The session interface that the server calls.

    ``took``: generation and number of the last step that a client took.
    """

    @property
    def generation(self) -> int: ...

    @property
    def report_settings(self) -> dict[str, Any]:
        """The values ``feedback_lag``, ``learns`` and ``uses_reports`` of the job."""

    def admit(self, rank: int) -> None:
        """Raise if the rank cannot be served. Runs on: server thread, so it must not block."""

    def admit_broadcast(self, rank: int) -> None:
        """Raise unless another rank fetches the steps of this one. Runs on: server thread."""

    def connected(self, rank: int, peer: str) -> None: ...
    def disconnected(self, rank: int) -> None: ...

    def acked(self, rank: int, step: int, queue: PublishedQueue | None = None) -> None:
        """Record that a client took a step. ``queue``: its queue, maybe of an older generation."""

    def start(self, rank: int) -> dict[str, Any]:
        """Begin to plan, and return the position at which the rank starts."""

    def where(self, rank: int, generation: Any) -> dict[str, Any]:
        """Return the position of the rank, with the address of its constructor.

        Raise ``DataStall`` while that constructor is restarted.
        """

    def why(self, rank: int) -> str:
        """Describe what the rank waits for."""

    def export(
        self, rank: int, generation: Any, state: State, reports: Sequence[SentReport]
    ) -> dict[str, Any]:
        """Return a state as plain values. ``reports``: those that the client keeps."""

    def rewind(
        self, rank: int, state: Mapping[str, Any], allow: tuple[str, ...], took: tuple[int, int]
    ) -> dict[str, Any]:
        """Rewind the rank, and return its new position."""

    def report(
        self, rank: int, reports: Sequence[SentReport], queue: PublishedQueue | None = None
    ) -> None:
        """Receive reports, each maybe again. ``queue``: as in ``acked``; None: of a rank without.

        Ranks whose steps another rank fetches have no queue.
        """

    def refused(self) -> None:
        """Count a report that the client itself refused."""

    def crashed(self, rank: int, took: tuple[int, int], reports: Sequence[SentReport]) -> None:
        """Record the last step and the reports of a client that failed; it may reconnect."""

    def detach(self, rank: int, took: tuple[int, int], reports: Sequence[SentReport]) -> None:
        """Close the rank: no further step is kept for it. ``reports``: those that it kept."""


def call(api: SessionApi, rank: int, request: Mapping[str, Any], *, broadcast: bool = False) -> Any:
    """Execute the request of a client and return the result; raise if it is refused.

    ``broadcast``: the request is of a rank whose steps another rank fetches. Such a rank may send
    only ``BROADCAST_CALLS``. It has no queue, so its generation is compared with the current one.
    """
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: api.start(rank),
        "where": lambda: api.where(rank, request.get("generation")),
        "why": lambda: api.why(rank),
        "export": lambda: api.export(
            rank, request.get("generation"), request["state"], request.get("reports", ())
        ),
        "rewind": lambda: api.rewind(rank, request["state"], request["allow"], request["took"]),
        "report": lambda: api.report(rank, request["reports"]),
        "refused": api.refused,
        "detach": lambda: api.detach(rank, request["took"], request.get("reports", ())),
        "crashed": lambda: api.crashed(rank, request["took"], request.get("reports", ())),
    }
    # other ranks send reports with their acknowledgements
    known = [*BROADCAST_CALLS] if broadcast else [name for name in calls if name != "report"]
    if (name := request["ask"]) not in known:
        raise OverlordError(
            f"rank {rank}: expected a request of {', '.join(known)}, got {name!r:.60}; run the "
            "same version in all processes"
        )
    if broadcast and request.get("generation", api.generation) != api.generation:
        raise OverlordError(f"rank {rank}: {MOVED}")
    return calls[name]()


def position(state: State, generation: int, constructor: tuple[str, str]) -> dict[str, Any]:
    """Return the message with a client's state, generation, constructor address and token."""
    return {
        "state": encoded(state),
        "generation": generation,
        "constructor": constructor[0],
        "token": constructor[1],
    }
