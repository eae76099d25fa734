"""A thread that appends to the journal, so that the event loop does not wait for storage.

An append takes milliseconds on a disk and longer in a store. Appends that wait at the same time are
written together, in order, with one sync. After an error nothing more is written, and every waiting
caller receives that error. A segment that cannot be removed is not such an error: it is no longer
read, and only takes space.
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
from overlord.journal.timeouts import TIMEOUTS

log = logging.getLogger("overlord")


@dataclass(frozen=True, slots=True)
class _Order:
    """Records that are appended together, and the pruning after them."""

    records: Sequence[Record]
    rolls: bool = False  # the records begin a new segment
    before: int | None = None  # afterwards, records with lower numbers are pruned
    anew: bool = False  # the records begin a new segment, and all segments before it are pruned


class AppendThread:
    """The writer of one log.

    ``on_change`` is called in the writer's thread whenever an append became durable or failed.
    Without it there is no thread: the caller writes.
    """

    def __init__(self, log: JournalLog, on_change: Callable[[], None] | None = None):
        self._log, self._on_change = log, on_change
        self._orders: deque[_Order] = deque()
        self._given = self.done = 0  # orders accepted, and orders that are durable
        self.failed: JournalError | None = None
        self.unpruned = ""  # segments that the last pruning could not remove, why, and the remedy
        self.appends, self.seconds = 0, 0.0
        self._changed = threading.Condition(threading.RLock())
        self._closed = self._ended = False  # ended: the thread has exited
        self._late = False  # closed while the thread still writes: the thread then closes the log
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
        """Queue records to be written, then segments to be pruned.

        Return the order's number, for ``wait`` and for comparison with ``done``.
        """
        order = _Order(records, rolls or anew, before, anew)
        with self._changed:
            if self.failed is not None:
                raise self.failed
            self._given += 1
            if self._on_change is None:
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

    def wait(self, number: int, timeout_s: float = TIMEOUTS.append_s) -> None:
        """Wait until an order is durable; raise the error of an append that failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.done >= number or self.failed is not None, timeout_s
            )
            if self.failed is not None and self.done < number:
                raise self.failed
            if self.done < number:
                raise JournalError(
                    self._log.shown,
                    f"expected an append within {timeout_s:g} s, got none",
                    "check the disk or the store, then resume",
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
                self._notify()
            self._sweep(orders)

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()

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
        """Remove pruned segments, after all waiting callers were notified.

        A storage may accept writes and refuse removals.
        """
        if orders[-1].before is None and not orders[0].anew:
            return
        if not self._log.removes_slowly or self._thread is None:
            self._sweep_now()
        elif self._sweeping is None or not self._sweeping.is_alive():
            # In a thread of its own: plans must not wait for a store that does not answer.
            self._sweeping = threading.Thread(
                target=self._sweep_now, name="overlord-journal-sweep", daemon=True
            )
            self._sweeping.start()

    def _sweep_now(self) -> None:
        start, before = time.perf_counter(), self.unpruned
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
                f"journal {where}: {self._log.doomed} pruned segments stay: {why}; "
                "let the job remove them (in a store: DeleteObject). The job continues, the "
                "journal grows, and the next pruning tries again"
            )
        if self.unpruned and not before:
            log.warning("%s", self.unpruned)
        self.seconds += time.perf_counter() - start

    def _unforeseen(self, error: Exception) -> JournalError:
        """Return the error of an append that failed outside the storage, as for lack of memory."""
        log.error("journal %s: an append failed", self._log.shown, exc_info=error)
        what = f"expected an append, got {type(error).__name__}: {error}"
        remedy = (
            "nothing is written any more, and all that was acknowledged is kept: fix the cause, "
            "and resume; the log has the traceback"
        )
        failed = JournalError(self._log.shown, what, remedy)
        failed.__cause__ = error
        return failed

    def close(self, timeout_s: float) -> bool:
        """Write the queued orders and stop; return whether that finished in time.

        If it did, the log is still open. If not, the thread closes the log when it finishes, so
        that this process can open the journal again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._sweeping is not None:
                self._sweeping.join(timeout_s)  # the next pruning removes what is left
            with self._changed:
                self._late = not self._ended
            return not self._late
        return True
