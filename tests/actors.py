"""Actors for the tests of actor systems. The module does not import pytest: every process of a test
imports it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from overlord.errors import SourceError
from overlord.rpc.peers import RpcEndpoint
from overlord.transforms.base import Map, RowIds
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.transform_process import TransformWorker
from overlord.transport.codec import register


class Strange(Exception):
    """An exception that the codec does not know."""


class OnlyThere(NamedTuple):
    number: int


class Worker:
    """An actor with the methods that tests call."""

    def __init__(self, closed: str = "") -> None:
        self.log: list[Any] = []
        self._closed, self._promise = closed, Future[Any]()

    def echo(self, value: Any) -> Any:
        return value

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def has(self, module: str) -> bool:
        return module in sys.modules

    def note(self, value: Any) -> None:
        self.log.append(value)

    def notes(self) -> list[Any]:
        return self.log

    def pid(self) -> int:
        return os.getpid()

    def environ(self, key: str) -> str | None:
        return os.environ.get(key)

    def write_into(self, value: Any) -> None:
        value[0] = 1

    def flags(self, value: dict[str, Any]) -> list[bool]:
        return [bool(array.flags.writeable) for array in value["arrays"]]

    def total(self, arrays: list[np.ndarray]) -> int:
        return int(sum(a.sum() for a in arrays))

    def zeros(self, n: int) -> np.ndarray:
        return np.zeros(n, np.uint8)

    def fail(self, kind: str) -> None:
        match kind:
            case "ours":
                raise SourceError("web", "a problem", "a.parquet", "do this")
            case "key":
                raise KeyError("a", 3)
            case "file":
                open("/no/such/file")  # noqa: SIM115
            case "time":
                raise TimeoutError("my own")
            case "noted":
                error = ValueError("with notes")
                error.add_note("first")
                raise error
            case "strange":
                raise Strange("seen nowhere else")

    def unsendable(self) -> Any:
        return {"a": [object()]}

    def words(self, n: int) -> list[str]:
        return ["a" * 1000] * n

    def only_there(self) -> Any:
        """Return a record that is registered in this process and not at the receiver."""
        register(OnlyThere)
        return OnlyThere(1)

    def promise(self) -> Future[Any]:
        return self._promise

    def keep(self, value: Any) -> None:
        self._promise.set_result(value)

    def break_promise(self) -> None:
        self._promise.set_exception(SourceError("web", "no more"))

    def later(self, value: Any) -> Future[Any]:
        done: Future[Any] = Future()
        threading.Timer(0.05, done.set_result, (value,)).start()
        return done

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def wait_for(self, path: str) -> None:
        until_there(path)

    def busy(self) -> None:
        while True:
            pass

    def hold_the_lock(self) -> int:
        return sum(range(10**12))  # one C function: no other thread runs meanwhile

    def leave(self, code: int) -> None:
        raise SystemExit(code)

    def transforms(self) -> list[int]:
        """Start a grandchild; return its pid and that of its parent."""
        self.worker = TransformWorker(
            Pipeline("web", [Map(shout)], seed=0, context=8, on_long="truncate")
        )
        pid = self.worker.pid or 0
        return [pid, int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])]

    def transform_for_ever(self) -> None:
        table = pa.table({"text": ["for ever"]})
        ids = RowIds(0, 0, np.zeros(1, np.int64))
        threading.Thread(target=self.worker.slice_stage, args=(table, ids), daemon=True).start()

    def close(self) -> None:
        if self._closed == "fail":
            raise OSError("cannot close")
        if self._closed == "never":
            self.busy()
        if self._closed:
            Path(self._closed).write_text("closed")


class Sent:
    """An actor that is started here and called from another process."""

    def __init__(self, name: str, factory: Any, args: Any) -> None:
        self._sibling = RpcEndpoint(name, factory(*args))

    def meet(self, address: str, token: str, lease_id: int) -> None:
        self._sibling.redirect(address, token, lease_id)


def shout(batch: Any) -> Any:
    while True:
        pass


def broken(problem: str) -> Worker:
    raise SourceError("web", problem)


def when_allowed(path: str) -> Worker:
    """Build the actor once the file exists."""
    until_there(path)
    return Worker()


def name_when_allowed(name: str, path: str) -> str:
    """Return the name once the file exists."""
    until_there(path)
    return name


def until_there(path: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        time.sleep(0.01)
