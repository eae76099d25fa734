"""What a session that serves offers: ``serve``, and the boxes of ranks whose clients are in other
processes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from overlord.client.client import LocalStepQueue, StepQueue
from overlord.errors import JobError, OverlordError
from overlord.serving.control_server import RemoteClient
from overlord.serving.session_server import ServedAddress, SessionServer
from overlord.serving.step_publisher import PublishedQueue

if TYPE_CHECKING:
    from overlord.session.session import Session


class ServingMethods:
    """The part of ``Session`` that serves."""

    _serving: SessionServer | None

    def serve(  # type: ignore[misc]
        self: Session,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        ranks: Iterable[int] | None = None,
    ) -> ServedAddress:
        """Let clients in other processes connect; print the result, and set it in their
        environment. Call it before the first step.

        From here on all ranks (or ``ranks``) are expected, in this process or in others: planning
        begins with the first that connects, and one that is missing holds up the others when the
        prefetch window is full. ``host``: of which interface; the default can be reached from this
        machine only.
        """
        self._refuse_closed()
        with self._moving:  # one at a time; the session's lock is held for moments only
            with self._lock:
                if self._serving is not None:
                    return self._serving.again(host, port, token, ranks)
                wanted = self._to_serve(ranks)
                token = secrets.token_urlsafe(24) if token is None else token
                self._refuse_to_serve(host, token)
            if hasattr(self._host, "listen"):
                self._host.listen(host, token)
            with self._lock:
                wanted = self._to_serve(wanted)
                serving = self._serving = SessionServer(
                    self, host=host, port=port, token=token, ranks=wanted
                )
                serving.furnish(self._host, listen=False)
                for rank in wanted:
                    self._inboxes[rank] = (self._generation, self._new_box(rank))
                    self._clients[rank] = RemoteClient(
                        rank, self._inboxes[rank][1], self._start_state
                    )  # type: ignore[assignment]
                return serving.served

    def _to_serve(self: Session, ranks: Iterable[int] | None) -> list[int]:  # type: ignore[misc]
        """Under the lock: those of them that have no client here."""
        if self._begun:
            raise OverlordError(
                "serve: the first step was asked for already; call serve() before "
                "iterating a client"
            )
        return sorted(set(_ranks(self.job.place, ranks)) - set(self._clients))

    def _refuse_to_serve(self: Session, host: str, token: Any) -> None:  # type: ignore[misc]
        if not isinstance(token, str) or not token:
            raise JobError(
                ["token: expected a text that is not empty, or None for one that is made up"],
                "serve",
            )

    def _new_box(self: Session, rank: int) -> Any:  # type: ignore[misc]
        """Where a rank's steps go; under the lock."""
        if self._serving is not None and (
            rank not in self._clients or isinstance(self._clients[rank], RemoteClient)
        ):
            return self._serving.box(rank, self._generation)
        return self._host.inbox(rank, self._start_state.step)

    def _take_seat(self: Session, rank: int) -> StepQueue | None:  # type: ignore[misc]
        """Under the lock: a client of this process takes a seat that nobody has taken yet, with all
        that is kept for it.
        """
        seat = self._clients.get(rank)
        if not isinstance(seat, RemoteClient):
            return None
        if seat.peer:
            raise OverlordError(
                f"rank {rank} is served to a client of another process, {seat.peer}; open "
                "the clients of this process before serve()"
            )
        inbox: StepQueue = self._host.inbox(rank, seat._state.step)
        if isinstance(seat._inbox, PublishedQueue) and isinstance(inbox, LocalStepQueue):
            seat._inbox.hand_over(inbox)
        del self._clients[rank]
        return inbox

    def _constructor_address(self: Session, rank: int) -> tuple[str, str]:  # type: ignore[misc]
        """Where the steps of a connected rank come from, and the token it takes there; empty: the
        one it came with.
        """
        assert self._serving is not None
        if hasattr(self._host, "outside"):
            found: tuple[str, str] = self._host.outside(rank)
            return found
        return self._serving.served.address, ""


def _ranks(place: Any, ranks: Iterable[int] | None) -> list[int]:
    wanted = list(range(place.world_size) if ranks is None else ranks)
    if problems := [problem for rank in wanted if (problem := place.rank_problem(rank))]:
        raise JobError(problems, "serve")
    return wanted
