"""Sources that have left the job whose state is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlord.messages.control import SourceLost
from overlord.planning.state_json import event_in
from overlord.sources.index import RemovedSource


def left_behind(saved: Mapping[str, Any], shuffle_chunks: int) -> dict[str, RemovedSource]:
    """Sources that have left by the step of a saved state: their storage was given up."""
    try:
        gone = [
            e
            for e in map(event_in, saved["events"])
            if isinstance(e, SourceLost) and e.at <= saved["step"]
        ]
        groups = {e.name: int(saved["cursors"][e.name][1]) + 1 for e in gone}
        return {
            e.name: RemovedSource(
                saved["fingerprint"][f"source {e.name}: files"], groups[e.name] * shuffle_chunks
            )
            for e in gone
        }
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
    ):  # no state at all: to be said by ``restore``
        return {}
