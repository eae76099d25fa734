"""The box of a client that lives in the launching process while its constructor does not: linked
when the first step is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from overlord.client.remote_queue import RemoteStepQueue
from overlord.constructor.build import BucketBatch
from overlord.errors import OverlordError
from overlord.messages.client import StepInfo


class LaunchedStepQueue:
    """As a connected client's, but for the front door: whoever is here can ask without one.
    ``beside``: the links of all boxes of one engine, which look after each other.
    """

    def __init__(
        self,
        rank: int,
        where: Callable[[], tuple[str, str]],
        *,
        next_step: int,
        generation: int,
        prefetch: int,
        beside: list[RemoteStepQueue],
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
        self._beside = beside

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        if self._over is not None:
            raise self._over
        return self._linked().get(timeout_s)

    def _linked(self) -> RemoteStepQueue:
        """It asks for the address itself, and again: a constructor may just be replaced."""
        if self._remote is None:
            self._remote = RemoteStepQueue(
                rank=self._rank,
                address="",
                token="",
                where=lambda generation: self._where(),
                next_step=self._next,
                generation=self._generation,
                prefetch=self._prefetch,
                beside=lambda box: list(self._beside),
            )
            self._beside.append(self._remote)
            if self._over is not None:  # meanwhile, by another thread
                self._remote.end(self._over)
        return self._remote

    @property
    def trouble(self) -> str:
        """What is wrong with the link, in words; empty while it holds."""
        return "" if self._remote is None else self._remote.trouble

    def took(self, step: int) -> None:
        if self._remote is not None:
            self._remote.took(step)

    def put(self, told: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(f"rank {self._rank} is served by its constructor host")

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._over = error
        if self._remote is not None:
            with suppress(ValueError):
                self._beside.remove(self._remote)
            self._remote.end(error, drop=drop)

    def __len__(self) -> int:
        return 0 if self._remote is None else len(self._remote)
