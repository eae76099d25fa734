"""Sources that were removed from a job before the state that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlord.messages.control import SourceLost
from overlord.planning.state_json import event_in
from overlord.sources.index import RemovedSource


def removed_before(saved: Mapping[str, Any], shuffle_chunks: int) -> dict[str, RemovedSource]:
    """Return the sources that were removed before the step of a saved state."""
    try:
        lost = [
            e
            for e in map(event_in, saved["events"])
            if isinstance(e, SourceLost) and e.at <= saved["step"]
        ]
        groups = {e.name: int(saved["cursors"][e.name][1]) + 1 for e in lost}
        return {
            e.name: RemovedSource(
                saved["fingerprint"][f"source {e.name}: files"], groups[e.name] * shuffle_chunks
            )
            for e in lost
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return {}  # not a state: ``restore`` raises the error
