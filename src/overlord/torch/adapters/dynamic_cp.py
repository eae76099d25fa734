"""Batches of Megatron-Core with dynamic context parallelism, from pieces of hybrid plans.

Megatron has process groups for aligned blocks of 2^i ranks of the axis dp x cp, and finds the group
of a microbatch by its size, ``local_cp_size``. So plans need ``groups="power_of_two"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlord.torch.adapters import thd
from overlord.torch.microbatch_info import SHIFTED


def packed(mb: Mapping[str, Any], *, given: str | None = None) -> dict[str, torch.Tensor]:
    """Return what ``megatron.packed`` returns, always with ``local_cp_size``.

    Without ``cp_ranks`` the ring has one rank. ``given``: the job's ``Batch.labels``; None: the
    labels are shifted.
    """
    return thd.packed(mb, "dynamic_cp.packed", given or SHIFTED, dynamic=True)
