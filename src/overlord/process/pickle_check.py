"""Check that code can be sent to another process, before any process is started.

The error names the object that cannot be sent.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any, TypeVar

from overlord.errors import JobError

T = TypeVar("T")

REMEDY = "use functions of a module, not lambdas or local functions, or runtime='local'"


def sendable(value: T, where: str) -> T:
    """Return the value; raise ``JobError`` if another process cannot receive it.

    ``where`` names the owner of the value, for the error.
    """
    try:
        _CheckingPickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
        return value
    except Exception as fault:  # pickle raises PicklingError, AttributeError or TypeError
        raise JobError([f"cannot be sent to another process: {fault}; {REMEDY}"], where) from fault


class _CheckingPickler(pickle.Pickler):
    """A pickler that rejects objects that only this process has.

    Such an object is sent by name, and the receiver would not find the name.
    """

    def reducer_override(self, found: Any) -> Any:
        if (
            isinstance(found, FunctionType | type)
            and found.__module__ == "__main__"
            and not hasattr(sys.modules["__main__"], "__file__")
        ):
            raise pickle.PicklingError(
                f"{found.__qualname__} was defined in a notebook, at a prompt or by -c, "
                "where no other process finds it"
            )
        return NotImplemented
