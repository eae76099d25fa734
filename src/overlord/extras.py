"""The name of the distribution and its extras, for errors that suggest an installation."""

from __future__ import annotations

# the import name is `overlord`; that name on PyPI belongs to another project
DISTRIBUTION = "overlord-data"


def pip_install(*extras: str) -> str:
    """Return the command that installs these extras of the distribution."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
