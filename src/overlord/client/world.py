"""The rank and world size of this process, from ``torch.distributed`` or the environment."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from overlord.errors import JobError

START_GROUP = (
    "call torch.distributed.init_process_group() before, or start the processes with torchrun"
)


class World(NamedTuple):
    """The rank and world size of a process; ``named``: the origin of the size, for error texts."""

    rank: int
    size: int
    named: str


def process_groups() -> Any:
    """Return ``torch.distributed`` if this process has initialised it, else None.

    It never imports torch.
    """
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def world_here(where: str) -> World | None:
    """Return the rank and world size of this process; None if it is not part of a distributed job.

    The process group has precedence over ``RANK`` and ``WORLD_SIZE``: some launchers (``mp.spawn``,
    Lightning) set no ``RANK`` and initialise a group. ``where``: the caller, for error texts. Raise
    ``JobError`` if only one of the variables is set.
    """
    if (dist := process_groups()) is not None:
        return World(dist.get_rank(), dist.get_world_size(), "the process group")
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if len(given) == 2:
        return World(_whole("RANK", where), _whole("WORLD_SIZE", where), "WORLD_SIZE")
    if given and given not in ({"WORLD_SIZE": "1"}, {"RANK": "0"}):
        (name, value), missing = (
            next(iter(given.items())),
            "RANK" if "WORLD_SIZE" in given else "WORLD_SIZE",
        )
        raise JobError(
            [f"{missing}: expected a whole number with {name}={value}, got nothing; {START_GROUP}"],
            where,
        )
    return None


def _whole(name: str, where: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise JobError([f"{name}: expected a whole number, got {text!r}"], where)
    return int(text)
