"""Whether the head of a cluster answers. Ray's own calls wait for one that is gone, some of them
for an hour: so it is asked first.

A head that went away may come back: Ray allows it where its state is kept in an external store.
What runs goes on without it; what is to be started waits for it, but not for ever. Nothing of Ray
is imported in this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from overlord.errors import OverlordError

PATIENCE_S = 60.0  # as long as Ray's own nodes wait for their head before they end
LOOK_S = 0.5


class Head:
    """``ping`` returns when the head has answered, and raises when it has not within a second or
    two.
    """

    def __init__(
        self, address: str, ping: Callable[[], object], *, patience_s: float | None = None
    ):
        self.address, self._ping = address, ping
        self._patience_s = patience_s
        self._missed_since: float | None = None
        self._missed_at = 0.0  # the last time

    def answers(self) -> bool:
        asked = time.monotonic()
        try:
            self._ping()
        except Exception:
            if (
                self._missed_since is None or asked - self._missed_at > self._patience
            ):  # it may have been there: nobody has asked
                self._missed_since = asked
            self._missed_at = time.monotonic()
            return False
        self._missed_since = None
        return True

    @property
    def _patience(self) -> float:
        return PATIENCE_S if self._patience_s is None else self._patience_s

    def wait(self, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Until it answers, or nobody wants it any more (False). One that has been missed for too
        long is not waited for again.
        """
        while not self.answers():
            if not wanted():
                return False
            assert self._missed_since is not None
            if (for_s := time.monotonic() - self._missed_since) >= self._patience:
                raise OverlordError(
                    f"the head of the Ray cluster at {self.address} has answered nothing "
                    f"for {for_s:.0f} s, and without it Ray starts no "
                    "process: bring it back, or resume the job from its journal on "
                    "another cluster or runtime"
                )
            time.sleep(LOOK_S)
        return True
