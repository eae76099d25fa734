"""Code that is to go to another process: what cannot is told by name, before anything is
started.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any, TypeVar

from overlord.errors import JobError

T = TypeVar("T")

REMEDY = "use functions of a module, not lambdas or inner functions, or runtime='local'"


def sendable(value: T, where: str) -> T:
    """The value as it is; ``JobError`` if another process could not have it. ``where``: whose it
    is, for the error.
    """
    try:
        _Sieve(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
        return value
    except Exception as fault:  # pickle raises PicklingError, AttributeError or TypeError
        raise JobError([f"cannot be sent to another process: {fault}; {REMEDY}"], where) from fault


class _Sieve(pickle.Pickler):
    """Pickles, but finds what only this process has: it goes by name, and the name is missed only
    where it arrives.
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
