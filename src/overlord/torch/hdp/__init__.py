"""Hybrid data parallelism: documents that any number of ranks share.

The page 'Hybrid data parallelism' of the documentation is a guide.

hdp.startup_barrier(group, device)  # once
for step in client:
    with hdp.local_gradients(model):
        for mb in step:  # counts differ by rank
            ring = hdp.Ring.of(mb, group)
            hidden = model(mb, lambda q, k, v: hdp.ring_attention(q, k, v, ring))
            ot.token_loss(hidden, mb["labels"], step.global_valid_tokens, head=head).backward()
    hdp.sum_gradients(model, group)
    optimizer.step()
"""

from __future__ import annotations

from overlord.torch.hdp.attention import ring_attention as ring_attention
from overlord.torch.hdp.gradients import local_gradients as local_gradients
from overlord.torch.hdp.gradients import startup_barrier as startup_barrier
from overlord.torch.hdp.gradients import sum_gradients as sum_gradients
from overlord.torch.hdp.layout import RingLayout as RingLayout
from overlord.torch.hdp.pipeline import Pipeline as Pipeline
from overlord.torch.hdp.pipeline import Stage as Stage
from overlord.torch.hdp.ring import Ring as Ring

__all__ = [
    "Pipeline",
    "Ring",
    "RingLayout",
    "Stage",
    "local_gradients",
    "ring_attention",
    "startup_barrier",
    "sum_gradients",
]
