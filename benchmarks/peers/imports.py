"""The imports of every rank of every loader, so that memory after imports is comparable."""

from __future__ import annotations

from importlib.util import find_spec


def as_a_trainer() -> None:
    """Import torch, which every trainer holds, with one thread; without torch no loader has it."""
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
