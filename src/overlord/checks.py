"""Checks that validators share: names, numbers, extras, and the signatures of user functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

from overlord.errors import JobError, OverlordError, SourceError

T = TypeVar("T")

# ----------------------------------------------------------------------------
# Suggestions for wrong names, and checks of numbers.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint, to be appended to an error: the closest known name, or the first 20 names."""
    names = sorted(set(known))
    close = difflib.get_close_matches(str(name), names, n=1)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names[:20])}{more}"


def names_arguments(cls: type[T]) -> type[T]:
    """Let the constructor of a class name the closest argument for one that it does not have.

    The error is a ``TypeError``, as Python's own, which names no other argument.
    """
    init = cls.__init__
    known = list(inspect.signature(cls).parameters)

    @wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{cls.__name__}: unexpected argument {name!r}{did_you_mean(name, known)}"
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def one_of(name: str, value: Any, known: Sequence[str]) -> list[str]:
    return [] if value in known else [f"{name}: expected one of {', '.join(known)}, got {value!r}"]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ----------------------------------------------------------------------------
# User functions: checks of their signatures, and the location of errors raised in them.

_PACKAGE = __file__.rpartition("/")[0] + "/"
_LIBRARY = str(inspect.__file__).rpartition("/")[0] + "/"  # Python's own
_INSTALLED = ("/site-packages/", "/dist-packages/")


def signature_problem(fn: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Return the reason why a function does not accept these arguments, or an empty text.

    A function whose signature Python cannot read is accepted.
    """
    try:
        return _signature_problem(fn, tuple(arguments))
    except TypeError:  # not hashable
        return _signature_problem.__wrapped__(fn, tuple(arguments))


@lru_cache(maxsize=64)
def _signature_problem(fn: Callable[..., Any], arguments: tuple[str, ...]) -> str:
    """Return the problem of a signature, cached, since cost functions are checked at every step."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # functions written in C, mostly
        return ""
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(fn, "__name__", None) or type(fn).__name__
        return f"expected a function of ({', '.join(arguments)}), got {name}{signature}"
    return ""


def where_raised(error: BaseException) -> str:
    """Return the location of the user code that raised an error, or an empty text.

    The form is `` (at FILE:LINE, in FUNCTION)``. The location is the innermost frame outside of
    this package, Python's library and installed packages. Without such a frame it is the outermost
    one outside of this package. The quarantine and other processes get this text, not tracebacks.
    """
    outside, trace = list[str](), error.__traceback__
    own = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((_PACKAGE, "<frozen")):
            outside.append(f" (at {code.co_filename}:{trace.tb_lineno}, in {code.co_name})")
            if not code.co_filename.startswith(_LIBRARY) and not any(
                part in code.co_filename for part in _INSTALLED
            ):
                own = outside[-1]
        trace = trace.tb_next
    return own or next(iter(outside), "")


def describe_error(error: BaseException) -> str:
    """Return type and text of an error, and the location in user code that raised it, if any."""
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}{where_raised(error)}"


def checked_function(fn: Any, where: str, arguments: Sequence[str]) -> Any:
    """Return ``fn`` if it can be called with these arguments; raise ``JobError`` otherwise.

    ``where`` is the location that the error names.
    """
    if (
        problem := signature_problem(fn, arguments)
        if callable(fn)
        else f"expected a function, got {fn!r}"
    ):
        raise JobError([problem], where)
    return fn


def name_of(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def shown_name(thing: Any) -> str:
    """Return a text as it is, and the name of anything else, or its ``repr`` if it has none."""
    return thing if isinstance(thing, str) else getattr(thing, "__name__", repr(thing))


def as_exception(error: BaseException, source: str = "") -> Exception:
    """Return ``error``, or an error with its text if it would end a program or a loop.

    ``StopIteration``, ``SystemExit`` and ``KeyboardInterrupt`` would. They are replaced by a
    ``SourceError`` of ``source``, or by an ``OverlordError`` if ``source`` is empty.
    """
    # a StopIteration that leaves an iterator would look like the end of the data
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    what = describe_error(error)
    return (
        SourceError(source, what, remedy="a transform must not end the program")
        if source
        else OverlordError(what)
    )


# ----------------------------------------------------------------------------
# The name of the distribution and its extras, for errors that suggest an installation.

# the import name is `overlord`; that name on PyPI belongs to another project
DISTRIBUTION = "overlord-data"


def pip_install(*extras: str) -> str:
    """Return the command that installs these extras of the distribution."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
