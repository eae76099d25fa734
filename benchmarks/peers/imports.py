"""The imports of every rank of every loader, so that memory after imports is comparable.

Imports count for no loader: what is imported late is imported before the clock starts.
"""

from __future__ import annotations

from importlib.util import find_spec


def as_a_trainer() -> None:
    """Import torch, which every trainer holds, with one thread; without torch no loader has it."""
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def import_late() -> None:
    """Convert an array: pyarrow imports pandas, where it is installed, at the first conversion."""
    import pyarrow

    pyarrow.array([1]).to_numpy()
