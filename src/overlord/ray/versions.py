"""The versions of Ray that this package is tested with.

This module does not import Ray. ``make ray-versions`` runs the scenarios with each of them and
writes the table of ``docs/ray.md``.
"""

from __future__ import annotations

import logging
import re

from overlord.checks import pip_install
from overlord.errors import JobError

log = logging.getLogger("overlord")

# One release of every minor version. Older ones lack parts of token authentication: ``has_token``
# of 2.52 takes no mode.
TESTED = ("2.53.0", "2.54.1", "2.55.1", "2.56.1", "2.57.1", "2.58.1", "2.59.0", "2.60.0")
_warned: set[str] = set()  # one warning per version and process


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


FIRST, LAST = minor(TESTED[0]), minor(TESTED[-1])
RANGE = f"ray>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"  # as pip writes it


def check_version(version: str) -> None:
    """Refuse a version that is known to fail, and warn once about one that was not tested."""
    if minor(version) < FIRST:
        problem = (
            f"runtime: 'ray' expected Ray {_version_text(FIRST)} to {_version_text(LAST)}, got "
            f"{version}; {pip_install('ray')}"
        )
        raise JobError([problem], "launch")
    if minor(version) not in {minor(tested) for tested in TESTED} and version not in _warned:
        _warned.add(version)
        log.warning(
            "Ray %s was not tested with this package: expected %s to %s. If something breaks, %s",
            version,
            _version_text(FIRST),
            _version_text(LAST),
            pip_install("ray"),
        )


def _version_text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
