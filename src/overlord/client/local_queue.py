"""The queue of a client in the launching process, with its constructor in another process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from overlord.client.remote_queue import RemoteStepQueue
from overlord.constructor.build import BucketBatch
from overlord.errors import OverlordError
from overlord.messages.client import StepInfo


class LaunchedStepQueue:
    """A ``RemoteStepQueue`` that connects when the first step is requested.

    ``where`` returns address and token of the constructor. ``siblings``: connected queues of all
    ranks of this process, which reconnect each other.
    """

    def __init__(
        self,
        rank: int,
        where: Callable[[], tuple[str, str]],
        *,
        next_step: int,
        generation: int,
        prefetch: int,
        siblings: list[RemoteStepQueue],
    ):
        self._rank, self._where, self._next, self._generation, self._prefetch = (
            rank,
            where,
            next_step,
            generation,
            prefetch,
        )
        self._remote: RemoteStepQueue | None = None
        self._over: BaseException | None = None
        self._siblings = siblings

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        if self._over is not None:
            raise self._over
        return self._connected().get(timeout_s)

    def _connected(self) -> RemoteStepQueue:
        """Connect at the first call. The address is requested then, since it may change."""
        if self._remote is None:
            self._remote = RemoteStepQueue(
                rank=self._rank,
                address="",
                token="",
                where=lambda generation: self._where(),
                next_step=self._next,
                generation=self._generation,
                prefetch=self._prefetch,
                siblings=lambda queue: list(self._siblings),
            )
            self._siblings.append(self._remote)
            if self._over is not None:  # by another thread meanwhile
                self._remote.end(self._over)
        return self._remote

    @property
    def trouble(self) -> str:
        """Describe the fault of the connection; empty while it works."""
        return "" if self._remote is None else self._remote.trouble

    def ack(self, step: int) -> None:
        if self._remote is not None:
            self._remote.ack(step)

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(f"rank {self._rank} is served by its constructor worker")

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._over = error
        if self._remote is not None:
            with suppress(ValueError):
                self._siblings.remove(self._remote)
            self._remote.end(error, drop=drop)

    def __len__(self) -> int:
        return 0 if self._remote is None else len(self._remote)
