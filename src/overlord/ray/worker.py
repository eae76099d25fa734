"""The inside of an actor that Ray started: it connects to its launcher and executes its calls.

Ray starts the process and reports its end. Calls do not pass through Ray. A call by connection
costs a tenth, nothing is pickled, and the code is the same as between processes of one machine.
This module does not import Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.concurrency.platform import INTERFACE, NODE
from overlord.rpc.actor_process import CallConnection, LaunchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLaunchSpec(LaunchSpec):
    """The launch of an actor by Ray, with the surroundings of the launching program.

    ``environ``, ``directory`` and ``path`` are those of the launching program.
    """

    environ: Mapping[str, str] | None = None  # None: another machine, which has its own
    directory: str = ""
    path: tuple[str, ...] = ()  # sys.path


class ActorBody:
    """The base of the Ray actor class: its one method runs as long as the actor lives."""

    def serve(
        self, spec: RayLaunchSpec, interface: str, code: bytes, output: Mapping[str, Any]
    ) -> int | None:
        """Serve calls until the exit is requested (return None) or the actor exits (its exit code).

        Return 1 if the actor failed to start or to close. ``code`` returns factory and arguments.
        ``output`` names the log files of the process, for the report of its end.
        """
        adopt_environment(spec, interface)
        calls = CallConnection.open(spec, {"machine": this_machine(), "output": output})
        try:
            # It is connected: from now on a failure or a suspension is detected.
            return calls.serve(spec.name, code)
        finally:
            calls.close()
            sys.stdout.flush()
            sys.stderr.flush()


def this_machine() -> str:
    """Return an id that is equal for processes that can signal each other by pid.

    The id is empty if the system does not report it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return ""


def adopt_environment(spec: RayLaunchSpec, interface: str) -> None:
    """Replace environment, directory and module path by those of the launching program.

    The environment of a Ray worker is from the start of the cluster. On another machine it stays,
    and only the module path is extended.
    """
    if spec.environ is not None:
        for key in [
            k
            for k in os.environ
            if k not in spec.environ and k != NODE and not k.startswith("RAY_")
        ]:
            del os.environ[key]
        os.environ.update({k: v for k, v in spec.environ.items() if not k.startswith("RAY_")})
        os.chdir(spec.directory)
    sys.path.extend(p for p in spec.path if p not in sys.path)
    if interface:  # unless the start of the node set one
        os.environ.setdefault(INTERFACE, interface)
