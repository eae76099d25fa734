"""Code that crosses to another process at its start: factories, and functions and classes of users.

Definitions of an importable module cross by their names. Lambdas, inner functions, and definitions
of the program's main file or of a notebook cross by value, with the variables that they use. The
other process has a copy of these variables. Later messages contain no code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Set
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from overlord.errors import JobError

REMEDY = (
    "create it in the function that uses it, or as a variable of a module; with runtime='local' "
    "nothing is sent"
)
MAX_DEPTH = 30  # parts of parts that the search for the cause of a refusal opens

T = TypeVar("T")


def pack_code(value: Any, where: str) -> bytes:
    """Return a value as bytes for ``unpack_code`` in a process that is being started.

    Raise ``JobError`` if it cannot be sent. The error names the object, and its path from the owner
    ``where``.
    """
    try:
        return _dump(value)
    except Exception as fault:  # PicklingError, TypeError, or any error of a class of the user
        path, part, cause = _cause(value, fault)
        problem = f"{_title(part)} cannot be sent to another process: {_line(cause)}; {REMEDY}"
        raise JobError([f"{path.lstrip('. ')}: {problem}" if path else problem], where) from fault


def _dump(value: Any) -> bytes:
    import cloudpickle  # imported for jobs with processes only

    packed: bytes = cloudpickle.dumps(value)
    return packed


def unpack_code(packed: bytes) -> Any:
    """Return the value of ``pack_code``.

    This executes code: use it only for what arrived with the start of this process.
    """
    import cloudpickle

    return cloudpickle.loads(packed)


def build_code(packed: bytes) -> Any:
    """Return what a packed factory makes of its packed arguments."""
    factory, args = unpack_code(packed)
    return factory(*args)


def sendable(value: T, where: str) -> T:
    """Return the value; raise the ``JobError`` of ``pack_code`` if it cannot be sent."""
    pack_code(value, where)
    return value


# ----------------------------------------------------------------------------
# The search for the innermost part that cannot be sent.


def _cause(value: Any, fault: Exception) -> tuple[str, Any, Exception]:
    """Return path and object of the innermost part that cannot be sent, and its error."""
    path, seen = "", {id(value)}
    for _ in range(MAX_DEPTH):
        for step, part in _parts(value):
            if id(part) not in seen and (found := _fault_of(part)) is not None:
                seen.add(id(part))
                path, value, fault = path + step, part, found
                break
        else:
            break
    return path, value, fault


def _fault_of(part: Any) -> Exception | None:
    try:
        _dump(part)
    except Exception as fault:
        return fault
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that cross with a value, each with its step of the path."""
    match value:
        case FunctionType():
            yield from _variables(value)
        case MethodType():
            yield ".__self__", value.__self__
        case functools.partial():
            yield ".func", value.func
            yield from ((f" argument {i}", part) for i, part in enumerate(value.args))
            yield from ((f" argument {name!r}", part) for name, part in value.keywords.items())
        case Mapping():
            yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
        case list() | tuple() | Set():
            yield from ((f"[{i}]", part) for i, part in enumerate(value))
        case _ if not isinstance(value, ModuleType):
            yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function that is sent by value: closure, globals and defaults."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    yield from ((f" variable {name!r}", _content(cell)) for name, cell in cells)
    used = (name for name in code.co_names if name in function.__globals__)
    yield from ((f" global {name!r}", function.__globals__[name]) for name in used)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((" default", part) for part in defaults)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not set yet
        return None


def _attributes(value: Any) -> dict[str, Any]:
    names = [
        name
        for cls in type(value).__mro__
        for slots in [cls.__dict__.get("__slots__", ())]
        for name in ([slots] if isinstance(slots, str) else slots)
    ]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found | dict(getattr(value, "__dict__", {}))


def _title(part: Any) -> str:
    """Return name or type of an object: its ``repr`` may be an error, or long."""
    if isinstance(part, (FunctionType, type)):
        return f"{part.__module__}.{part.__qualname__}"
    return f"an object of {type(part).__module__}.{type(part).__qualname__}"


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())[:300] or type(fault).__name__
