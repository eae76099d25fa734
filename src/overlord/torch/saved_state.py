"""The state after a step, for code that delivers the step later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

State = dict[str, Any]


def state_after(client: Any) -> Callable[[], State]:
    """Return a function that returns the state after the last step of a client.

    The function exports the state when it is called. If the client has no ``mark`` method, the
    state is exported now.
    """
    if hasattr(client, "mark"):
        mark = client.mark()
        return lambda: client.state_dict(mark)
    state: State = client.state_dict()
    return lambda: state
