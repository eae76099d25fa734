"""Helpers for trainers: ``from overlord.torch import recipes``, then ``recipes.ddp.syncing``.

Each module serves one trainer and is imported at its first use. The documentation has a
complete script for each, under 'Trainers'.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = [
    "accelerate",
    "ddp",
    "deepspeed",
    "fsdp2",
    "huggingface",
    "lightning",
    "megatron",
    "ray_train",
    "torchtitan",
]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'overlord.torch.recipes' has no attribute {name!r}")
    return import_module(f"overlord.torch.recipes.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
