"""The loader's state in a checkpoint: inside torch's distributed checkpoint, or as a JSON file.

The state is small, the same on every rank and valid on any mesh, so it is stored once and every
rank loads the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlord.client.world import world_here
from overlord.errors import OverlordError, StateMismatch

KEY = "overlord"
FILE = "overlord.json"
REMEDY = "save and load the result of state_dict() unchanged"


class LoaderState:
    """A ``Stateful`` for ``torch.distributed.checkpoint``.

    ``dcp.save({"model": ..., "loader": ot.LoaderState(client)}, ...)``. ``loader``: an object with
    ``state_dict`` and ``load_state_dict``: a client, a ``DevicePrefetcher``, a ``Loader``.
    ``allow``: passed to its ``load_state_dict``. The state is one JSON string: DCP stores it once
    for all ranks, whatever its length, and loads it on each.
    """

    def __init__(self, loader: Any, allow: tuple[str, ...] = ()):
        self.loader, self.allow = loader, tuple(allow)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under one key.

        DCP calls it before loading too. Then there may be no state, because another rank has
        already loaded one and rewound the session. The result then has a placeholder, which raises
        the reason only if it is saved.
        """
        try:
            return {KEY: json.dumps(self.loader.state_dict(), sort_keys=True)}
        except OverlordError as fault:
            return {KEY: _NoState(fault)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of ``state_dict``; raise ``StateMismatch`` for anything else."""
        if not isinstance(state, Mapping) or not isinstance(text := state.get(KEY), str):
            found = (
                ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            )
            raise StateMismatch(
                {}, REMEDY, f"checkpoint: expected a string under {KEY!r}, got {found or 'no keys'}"
            )
        loaded = _parsed(text, "the checkpoint")
        if self.allow:
            self.loader.load_state_dict(loaded, self.allow)
        else:
            self.loader.load_state_dict(loaded)


class _NoState:
    """A placeholder for an unavailable state; pickling it raises the reason.

    Loading replaces it by a state.
    """

    def __init__(self, fault: OverlordError):
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        raise self.fault


def save_state(loader: Any, path: str | os.PathLike[str]) -> Path:
    """Write the state as JSON, atomically, and return the path of the file.

    ``path``: a file that ends in .json, or a folder for overlord.json. All ranks may call this:
    the state is the same, and only rank 0 writes it.
    """
    target = _file(path)
    if _rank_of(loader) == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        with open(partial, "w", encoding="utf-8") as out:
            json.dump(loader.state_dict(), out, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, target)
    return target


def _rank_of(loader: Any) -> int:
    """Return the rank of the loader, of its client, or of the process.

    Exactly one rank may write the file.
    """
    for holder in (loader, getattr(loader, "client", None)):
        if isinstance(rank := getattr(holder, "rank", None), int):
            return rank
    here = world_here("save_state")
    return 0 if here is None else here.rank


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state that ``save_state`` wrote to the same ``path``.

    Pass the state to ``client.load_state_dict`` or ``launch(job, resume=...)``.
    """
    target = _file(path)
    return _parsed(target.read_text(encoding="utf-8"), str(target))


def _file(path: str | os.PathLike[str]) -> Path:
    given = Path(path)
    return given if given.suffix == ".json" else given / FILE


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except ValueError as fault:
        raise StateMismatch({}, REMEDY, f"{where}: expected JSON, got: {fault}") from fault
    if not isinstance(state, dict):
        raise StateMismatch(
            {}, REMEDY, f"{where}: expected a mapping as JSON, got {type(state).__name__}"
        )
    return state
