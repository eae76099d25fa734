"""Appends beside whoever has something to write: a disk takes milliseconds, a store takes many, and
neither is to hold up the rest.

What waits together is written together, with one sync; in order, always. After an error nothing
more is written, and whatever it was it is told: who waits for an append would wait for ever. What
cannot be removed is no such error: it is not read any more, and only takes room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlord.errors import JournalError
from overlord.journal.log import JournalLog
from overlord.journal.record import Record

log = logging.getLogger("overlord")

WAIT_S = 600.0  # for one append: a store is tried for long, and a disk that takes longer is lost


@dataclass(frozen=True, slots=True)
class _Order:
    records: Sequence[Record]
    rolls: bool = False  # they begin a new segment
    before: int | None = None  # then what has lower numbers goes
    anew: bool = False  # they begin a new segment, and all before it goes


class AppendThread:
    """One log's writer. ``told`` is called, in a thread of its own, when something became durable
    or failed; without it everything is written at once, by the caller.
    """

    def __init__(self, log: JournalLog, told: Callable[[], None] | None = None):
        self._log, self._told = log, told
        self._orders: deque[_Order] = deque()
        self._given = self.done = 0  # orders; ``done``: so many are durable
        self.failed: JournalError | None = None
        self.unpruned = ""  # what could not be removed at the last pruning, why, and what to do
        self.appends, self.seconds = 0, 0.0
        self._changed = threading.Condition(threading.RLock())
        self._closed = self._ended = False  # ended: its thread has
        self._late = (
            False  # it is closed, and its thread has still to write: then that one closes the log
        )
        self._thread: threading.Thread | None = None
        self._sweeping: threading.Thread | None = None

    def put(
        self,
        records: Sequence[Record],
        *,
        rolls: bool = False,
        before: int | None = None,
        anew: bool = False,
    ) -> int:
        """Have records written, then segments pruned; returns the number by which to ask whether it
        is done.
        """
        order = _Order(records, rolls or anew, before, anew)
        with self._changed:
            if self.failed is not None:
                raise self.failed
            self._given += 1
            if self._told is None:
                self._write([order])
                self._sweep([order])
                return self._given
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="overlord-journal", daemon=True
                )
                self._thread.start()
            self._orders.append(order)
            self._changed.notify_all()
            return self._given

    def wait(self, number: int, timeout_s: float = WAIT_S) -> None:
        """Until that is durable; if it cannot be, why."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.done >= number or self.failed is not None, timeout_s
            )
            if self.failed is not None and self.done < number:
                raise self.failed
            if self.done < number:
                raise JournalError(
                    self._log.shown,
                    f"an append took longer than {timeout_s:g} s",
                    "look at the disk or the store, then resume",
                )

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            with self._changed:
                self._ended = True
                if self._late:
                    self._log.close()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._closed)
                if not self._orders:
                    return
                orders = [self._orders.popleft()]
                while self._orders and not self._orders[0].rolls and orders[-1].before is None:
                    orders.append(self._orders.popleft())
            try:
                self._write(orders)
            except JournalError:
                return
            finally:
                self._say()
            self._sweep(orders)

    def _say(self) -> None:
        if self._told is not None:
            self._told()

    def _write(self, orders: Sequence[_Order]) -> None:
        start = time.perf_counter()
        try:
            if orders[0].rolls:
                self._log.roll()
            self._log.append(
                [record for order in orders for record in order.records], anew=orders[0].anew
            )
            with self._changed:
                self.appends, self.done = self.appends + 1, self.done + len(orders)
                self._changed.notify_all()
            if (before := orders[-1].before) is not None:
                self._log.give_up(before)
        except Exception as error:
            failed = error if isinstance(error, JournalError) else self._unforeseen(error)
            with self._changed:
                self.failed = failed
                self._changed.notify_all()
            raise failed from failed.__cause__
        finally:
            self.seconds += time.perf_counter() - start

    def _sweep(self, orders: Sequence[_Order]) -> None:
        """After a pruning: what nobody wants any more goes, when all who wait were told. A place
        may take writes and refuse removals.
        """
        if orders[-1].before is None and not orders[0].anew:
            return
        if not self._log.removes_slowly or self._thread is None:
            self._sweep_now()
        elif (
            self._sweeping is None or not self._sweeping.is_alive()
        ):  # plans must not wait for a store that does not answer
            self._sweeping = threading.Thread(
                target=self._sweep_now, name="overlord-journal-sweep", daemon=True
            )
            self._sweeping.start()

    def _sweep_now(self) -> None:
        start, said = time.perf_counter(), self.unpruned
        try:
            self._log.sweep()
            self.unpruned = ""
        except Exception as error:
            where = error.path if isinstance(error, JournalError) else self._log.shown
            why = (
                error.problem
                if isinstance(error, JournalError)
                else f"{type(error).__name__}: {error}"
            )
            self.unpruned = (
                f"journal {where}: {self._log.doomed} segments that are not expected any "
                f"more stay: {why}; let the job remove them (in a "
                "store: DeleteObject). It goes on, the journal grows, and the next "
                "pruning tries again"
            )
        if self.unpruned and not said:
            log.warning("%s", self.unpruned)
        self.seconds += time.perf_counter() - start

    def _unforeseen(self, error: Exception) -> JournalError:
        """What no place has words for: no memory, a fault of our own."""
        log.error("journal %s: an append failed", self._log.shown, exc_info=error)
        what = f"expected an append, got {type(error).__name__}: {error}"
        remedy = (
            "nothing is written any more, and all that was acknowledged is kept: mend that, "
            "and resume; the log has where it was raised"
        )
        failed = JournalError(self._log.shown, what, remedy)
        failed.__cause__ = error
        return failed

    def close(self, timeout_s: float) -> bool:
        """Write what waits, and stop; whether that was done in time. Then the log is still open;
        else it is closed when that is done, so that this process, too, can open the journal again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._sweeping is not None:
                self._sweeping.join(
                    timeout_s
                )  # what it does not come to is left to the next pruning
            with self._changed:
                self._late = not self._ended
            return not self._late
        return True
