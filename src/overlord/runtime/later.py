"""What the interface names and this version does not do: refused in words, never ignored. Here alone, to be emptied.

``Job`` and ``Source`` have theirs in ``_not_yet`` and ``problems``, since those are checked when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from overlord.errors import OverlordError

if TYPE_CHECKING:
    from overlord.placetree import ClientPlaceTree

RUNTIMES = ("ray",)
# Launch options: the value that says what is done today, and what that is.
OPTIONS: Mapping[str, tuple[Any, str]] = {
    "partition": (None, "every source has one loader, or as many as loaders= gives it"),
    "autoscale": (False, "the number of loaders stays as it is at launch"),
    "shadows": ("none", "no loader has a stand-by"),
}


def option_problems(options: object) -> list[str]:
    """Options set to something else than what is done."""
    given = {name: (getattr(options, name), today, what) for name, (today, what) in OPTIONS.items()}
    return [
        f"{name}: {value!r} is not available in this version; {what}: leave the option out, or say {today!r}"
        for name, (value, today, what) in given.items()
        if value is not today and not (type(value) is type(today) and value == today)
    ]


def not_available(what: str, instead: str) -> OverlordError:
    return OverlordError(f"{what} is not available in this version; {instead}")


class LaterMethods:
    """Methods of ``Session`` that are still to come: there, so that who calls them is told what to do instead."""

    __slots__ = ()

    def reshard(self, place: ClientPlaceTree, at: int | None = None) -> NoReturn:
        """Not available in this version."""
        raise not_available("reshard", "save session.state_dict(), close, and launch the job with the new place and resume=state")
