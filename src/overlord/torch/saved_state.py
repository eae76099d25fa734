"""Where a stream stood when a step was handed out, for those who hand it on later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

State = dict[str, Any]


def state_behind(client: Any) -> Callable[[], State]:
    """The state behind the last step of a client, made when it is asked for; of a client that has
    no marks, made at once.
    """
    if hasattr(client, "mark"):
        mark = client.mark()
        return lambda: client.state_dict(mark)
    state: State = client.state_dict()
    return lambda: state
