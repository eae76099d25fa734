"""Actors of Ray: create, kill and describe them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

from overlord.concurrency.platform import NODE
from overlord.ray.nodes import here, node_here
from overlord.ray.placement import RayPlace
from overlord.ray.ray_import import (
    NodeAffinitySchedulingStrategy,
    exceptions,
    ray,
    ray_state,
    ray_worker,
)
from overlord.ray.worker import ActorBody, RayLaunchSpec
from overlord.ray.worker_logs import WorkerOutput

DIED = "its process died silently: it was killed, crashed or ran out of memory"
GONE = "it is gone with its node, or before Ray could report how"
UNAVAILABLE = "it cannot be reached: its process is suspended, or its node is unreachable"


class RayActor(ActorBody):
    """An actor in a process of Ray."""

    def begin(self, spec: RayLaunchSpec, multi_machine: bool, code: bytes) -> int | None:
        """Serve the calls of the actor until it ends; return its exit code.

        The code is unpacked once the module path is set up.
        """
        os.environ[NODE] = node_here()
        worker = ray_worker.global_worker
        output = WorkerOutput.to_hello(
            here(), (worker.get_err_file_path(), worker.get_out_file_path())
        )
        return self.serve(spec, here() if multi_machine else "", code, output)


def actor_of(place: RayPlace, **named: str) -> Any:
    """Return the Ray class of an actor at this place.

    Raise ``TypeError`` or ``ValueError`` for options that Ray rejects.
    """
    options = place.options() | named
    if place.node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node_id=place.node, soft=False
        )
    return _ray_class().options(**options)


@functools.cache
def _ray_class() -> Any:
    """Return the one Ray class of all actors.

    It is created once, since Ray writes every actor class to its head and waits for that.
    """
    return ray.remote(RayActor)


def has_process(actor: Any) -> bool:
    """Return whether Ray has started a process for an actor."""
    return bool(ray_state.actors(actor._actor_id.hex()).get("Address", {}).get("Port"))


def kill(actor: Any) -> None:
    """Request that Ray kills an actor; ignore errors, as the actor or the cluster may be gone."""
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            ray.kill(actor, no_restart=True)


def end_process(actor: Any, pid: int) -> None:
    """Kill an actor. ``pid`` is its process if it runs on this machine, else 0.

    Ray requests the exit of a process and waits five seconds for a suspended one. It needs its head
    for that. So a local process is also killed by its pid.
    """
    kill(actor)
    with contextlib.suppress(OSError):
        # Another process may have the same pid by now.
        if pid and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)


def reason_of(error: BaseException) -> str:
    """Return the reason of an actor's death in one line; Ray's error has a paragraph."""
    if isinstance(error, exceptions.RayTaskError):
        return f"its process could not start it: {type(error.cause).__name__}: {error.cause}"
    if isinstance(error, exceptions.ActorUnavailableError):
        return UNAVAILABLE
    text = " ".join(" ".join(str(error).strip().splitlines()[-1:]).split())
    # Ray reports nothing else of a signal, a crash or os._exit.
    if "unexpectedly exits with a connection error" in text:
        return DIED
    if "never ran" in text:  # Ray's text for an actor that did run, when its node is gone
        return GONE
    return (
        "its process died: "
        f"{textwrap.shorten(text, 300, placeholder=' ...') or type(error).__name__}"
    )
