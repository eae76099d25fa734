"""The module search path of this process and of processes that Overlord starts.

The working directory is not in it unless requested. This is the first module that the package
imports. It needs only modules that Python has loaded by then.
"""

import os
import sys
from collections.abc import Iterable, Sequence

SAVED = "OVERLORD_SAVED_SETTINGS"  # original values of the settings below, for the started process
SETTINGS = ("PYTHONPATH", "PYTHONSAFEPATH")
# interpreter options with a value, in the same word or in the next one
WITH_VALUE = "cmWX"
LONG_WITH_VALUE = ("--check-hash-based-pycs",)  # the value is the next word


def module_started(given: Sequence[str]) -> str:
    """Return the module after ``-m`` in ``sys.orig_argv``; "" if there is none."""
    words = iter(given[1:])
    for word in words:
        if word in LONG_WITH_VALUE:
            next(words, "")
        elif not word.startswith("-") or word in ("-", "--"):
            return ""  # a script, or standard input
        elif not word.startswith("--") and (
            at := next((k for k, flag in enumerate(word) if flag in WITH_VALUE), 0)
        ):
            value = word[at + 1 :] or next(words, "")
            if word[at] in "cm":  # the rest belongs to the program
                return value if word[at] == "m" else ""
    return ""


def _leave_working_directory() -> None:
    """Remove the working directory, which ``python -m overlord`` has put first, from the path.

    If the package itself is in the working directory, move the directory to the end, for processes
    that import the package.
    """
    # argv is ["-m"] while Python imports the package of the module it starts
    if getattr(sys, "argv", [])[:1] != ["-m"] or sys.flags.safe_path:
        return
    # a user's package imports this one
    if module_started(getattr(sys, "orig_argv", [])).partition(".")[0] != __package__:
        return
    first = sys.path.pop(0)
    if os.path.realpath(first) == os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
        sys.path.append(first)


def entries() -> list[str]:
    """Return the module search path of this process.

    An empty entry is the working directory, as in an interactive Python.
    """
    return [path or os.getcwd() for path in sys.path]


def as_setting() -> str:
    """Return the search path as a PYTHONPATH, for a process that is started with ``-P``.

    Entries that contain the separator are left out.
    """
    return os.pathsep.join(path for path in entries() if os.pathsep not in path)


def settings() -> dict[str, str]:
    """Return variables for ``python -c`` that keep the working directory off the search path.

    The process calls ``restore_settings`` once it has started.
    """
    before = "\n".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ)
    return {"PYTHONPATH": as_setting(), "PYTHONSAFEPATH": "1", SAVED: before}


def restore_settings() -> None:
    """Restore the environment that ``settings()`` replaced, for children of this process."""
    saved = os.environ.pop(SAVED, None)
    if saved is None:
        return
    for name in SETTINGS:
        os.environ.pop(name, None)
    for line in filter(None, saved.split("\n")):
        name, _, value = line.partition("=")
        os.environ[name] = value


class FirstEntryPath(list[str]):
    """A list of paths whose ``extend`` accepts only the first directory of this process's path.

    Ray extends it, also by the working directory, and puts it first in the search path of its
    workers. The other entries of this process are sent with each actor, and come last.
    """

    def extend(self, paths: Iterable[str]) -> None:
        first = os.path.realpath(entries()[0]) if sys.path else None
        super().extend(path for path in paths if os.path.realpath(path) == first)


_leave_working_directory()
