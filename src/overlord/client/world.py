"""The rank and world size of this process, from ``torch.distributed`` or the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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


def refuse_partial_mesh(client: Any, where: str) -> None:
    """Raise ``JobError`` if a client has a part of a mesh whose other ranks no process trains.

    ``client``: a client, or an object with a ``client``, as a ``DevicePrefetcher``.
    """
    client = getattr(client, "client", client)
    size = getattr(client, "world_size", None) or 1
    here = world_here(where)
    missing: Sequence[int] = ()
    if here is not None and 1 < size != here.size:
        got = f"a client of rank {client.rank} of a mesh of {size}"
        problem = f"expected a mesh of the {here.size} ranks of {here.named}, got {got}"
    elif missing := getattr(client, "missing_ranks", tuple)():
        listed = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        problem = (
            f"expected a client for each of the {size} ranks of the mesh, got one of rank "
            f"{client.rank} and none of {listed}: their samples would be left out"
        )
    else:
        return
    raise JobError(
        [
            f"{problem}; on every rank write overlord.torch.Loader(job), under torchrun. For all "
            "ranks in one process: session.client(rank) of each before the first step"
        ],
        where,
    )


def _whole(name: str, where: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise JobError([f"{name}: expected a whole number, got {text!r}"], where)
    return int(text)
