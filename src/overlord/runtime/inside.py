"""The box of a client that lives in the launching process while its constructor does not: linked when the first step is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from overlord.client.remote import RemoteInbox
from overlord.constructor.builder import Bucket
from overlord.errors import OverlordError
from overlord.messages import Told

LOOK_S = 0.5  # without a step: then those beside it are seen to


class InsideBox:
    """As a connected client's, but for the front door: whoever is here can ask without one.

    One thread may take the steps of several ranks in turn. When their constructor is lost and they live on what they have, it is the first
    that waits for the next step, and the others ask for nothing any more: nobody would tell the new constructor what they have taken.
    So whoever waits looks after those ``beside`` it, too."""

    def __init__(
        self, rank: int, where: Callable[[], tuple[str, str]], *, next_step: int, generation: int, prefetch: int, beside: list[InsideBox]
    ):
        self._rank, self._where, self._next, self._generation, self._prefetch = rank, where, next_step, generation, prefetch
        self._remote: RemoteInbox | None = None
        self._over: BaseException | None = None
        self._beside = beside  # all boxes of one engine, and this one
        beside.append(self)

    def get(self, timeout_s: float) -> tuple[Told, Bucket] | None:
        if self._over is not None:
            raise self._over
        deadline, linked = time.monotonic() + timeout_s, self._linked()
        while True:
            left = deadline - time.monotonic()
            if (got := linked.get(max(0.0, min(left, LOOK_S)))) is not None or left <= LOOK_S:
                return got
            for box in list(self._beside):
                if box is not self and box._remote is not None:
                    with suppress(OverlordError):  # it is told when it asks
                        box._remote.look_around()

    def _linked(self) -> RemoteInbox:
        """It asks for the address itself, and again: a constructor may just be replaced."""
        if self._remote is None:
            self._remote = RemoteInbox(
                rank=self._rank, address="", token="", where=lambda generation: self._where(), next_step=self._next,
                generation=self._generation, prefetch=self._prefetch,
            )  # fmt: skip
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

    def put(self, told: Told, bucket: Bucket) -> None:
        raise OverlordError(f"rank {self._rank} is served by its constructor host")

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._over = error
        with suppress(ValueError):
            self._beside.remove(self)
        if self._remote is not None:
            self._remote.end(error, drop=drop)

    def __len__(self) -> int:
        return 0 if self._remote is None else len(self._remote)
