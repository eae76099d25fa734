"""Detection of a lost head of a Ray cluster.

Ray's own calls wait for a lost head, some of them for an hour. So the head is pinged before each
call. A lost head may return: Ray allows it if its state is in an external store. Running actors
continue without it. Starts wait for it, with a deadline. This module does not import Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from overlord.errors import OverlordError
from overlord.ray.timeouts import TIMEOUTS


class Head:
    """The head of a cluster, whose state is determined by pings.

    ``ping`` returns once the head has answered, and raises if it does not answer within a few
    seconds. ``lost_after_s``: seconds without an answer after which ``wait`` raises; None:
    ``Timeouts.head_s``.
    """

    def __init__(
        self, address: str, ping: Callable[[], object], *, lost_after_s: float | None = None
    ):
        self.address, self._ping = address, ping
        self._lost_after_s = lost_after_s
        self._lost_since: float | None = None
        self._last_miss = 0.0  # time of the last failed ping

    def answers(self) -> bool:
        """Ping the head; return whether it answered."""
        asked = time.monotonic()
        try:
            self._ping()
        except Exception:
            # Long after the last failed ping, the head may have answered in between.
            if self._lost_since is None or asked - self._last_miss > self._deadline_s:
                self._lost_since = asked
            self._last_miss = time.monotonic()
            return False
        self._lost_since = None
        return True

    @property
    def _deadline_s(self) -> float:
        return TIMEOUTS.head_s if self._lost_after_s is None else self._lost_after_s

    def wait(self, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the head answers; return False if ``wanted`` returns False first.

        Raise ``OverlordError`` if the head has not answered for ``lost_after_s``.
        """
        while not self.answers():
            if not wanted():
                return False
            assert self._lost_since is not None
            if (for_s := time.monotonic() - self._lost_since) >= self._deadline_s:
                raise OverlordError(
                    f"Ray head at {self.address}: expected an answer, got none for "
                    f"{for_s:.0f} s; Ray starts no process without it: restart it, or resume "
                    "the job from its journal on another cluster or runtime"
                )
            time.sleep(TIMEOUTS.head_poll_s)
        return True
