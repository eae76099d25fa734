"""Record calls from one file of the package to another, in every Python process that imports this.

Python imports a module of this name at start-up. One byte of a shared file holds the number of the
current window; 0 means no window. Each process appends an edge to its own file when it first occurs
in a window.

Only functions call and are called. The bodies of modules and classes, and functions that they call,
run when a process imports a module; they are no part of a walk.
"""

import inspect
import mmap
import os
import sys
import threading

FOLDER = os.environ.get("OVERLORD_WALK", "")


def _install() -> None:
    package = os.path.join(os.environ["OVERLORD_WALK_SRC"], "overlord") + os.sep
    with open(os.path.join(FOLDER, "window"), "r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    names: dict[str, str] = {}
    seen: set[tuple[int, str, str]] = set()

    def name_of(path: str) -> str:
        known = names.get(path)
        if known is None:
            known = names[path] = path[len(package) :] if path.startswith(package) else ""
        return known

    def is_function(frame) -> bool:
        return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)

    def profile(frame, event, _):
        if event != "call" or not window[0]:
            return
        callee = name_of(frame.f_code.co_filename)
        if not callee or not is_function(frame):
            return
        back = frame.f_back
        while back is not None and not name_of(back.f_code.co_filename):
            back = back.f_back
        if back is not None and not is_function(back):
            return
        caller = name_of(back.f_code.co_filename) if back is not None else "(thread)"
        edge = (window[0], caller, callee)
        if caller != callee and edge not in seen:
            seen.add(edge)
            line = f"{window[0]} {caller} {callee}\n".encode()
            path = os.path.join(FOLDER, f"edges-{os.getpid()}")
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, line)
            os.close(file)

    threading.setprofile(profile)
    sys.setprofile(profile)


if FOLDER:
    _install()
