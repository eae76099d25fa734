"""Adapters from microbatches to the batches of frameworks; see docs/frameworks.md.

``megatron.packed``, ``torchtitan.flat``, ``huggingface.flattened``.
"""

from __future__ import annotations

from overlord.torch.adapters import huggingface as huggingface
from overlord.torch.adapters import labels as labels
from overlord.torch.adapters import megatron as megatron
from overlord.torch.adapters import torchtitan as torchtitan

__all__ = ["huggingface", "labels", "megatron", "torchtitan"]
