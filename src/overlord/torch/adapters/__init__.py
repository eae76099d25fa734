"""Adapters from microbatches to the batches of frameworks.

The page 'What frameworks read' of the documentation lists their keys.


``megatron.packed``, ``megatron_chunks.iterators``, ``dynamic_cp.packed``, ``torchtitan.flat``,
``huggingface.flattened``.
"""

from __future__ import annotations

from overlord.torch.adapters import dynamic_cp as dynamic_cp
from overlord.torch.adapters import huggingface as huggingface
from overlord.torch.adapters import labels as labels
from overlord.torch.adapters import megatron as megatron
from overlord.torch.adapters import megatron_chunks as megatron_chunks
from overlord.torch.adapters import torchtitan as torchtitan

__all__ = ["dynamic_cp", "huggingface", "labels", "megatron", "megatron_chunks", "torchtitan"]
