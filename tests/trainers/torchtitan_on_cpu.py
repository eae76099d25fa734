"""Let torchtitan run on a CPU, in float64, and print its losses to the last digit.

torchtitan takes CUDA for granted where no accelerator is found, and compiles its attention. Nothing
that concerns data is changed.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as functional
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
properties = types.SimpleNamespace(total_memory=2**34, name="cpu")
for name, value in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: properties,
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
}.items():
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, value)

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, **more: Any) -> Any:
    """Return what flex attention returns, which has no backward on a CPU."""
    mask = flex.create_mask(block_mask.mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=more["enable_gqa"]
    )
    return out, flex.AuxOutput()


FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
distributed.set_pg_timeouts = lambda *_, **__: None  # its barrier names a device of CUDA
_divide = FSDPModule.set_gradient_divide_factor


def divide(self: Any, factor: float) -> None:
    """Set the factor, and sums alone, since gloo has no scaled sums."""
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = divide
_log, _log_validation = MetricsProcessor.log, MetricsProcessor.log_validation


def log(self: Any, step: int, loss: float, *args: Any, **more: Any) -> None:
    if dist.get_rank() == 0:
        print(f"step {step - 1}: loss {loss}")
    _log(self, step, loss, *args, **more)


def log_validation(self: Any, loss: float, step: int, **more: Any) -> None:
    if dist.get_rank() == 0:
        print(f"evaluation {step}: loss {loss}")
    _log_validation(self, loss, step, **more)


MetricsProcessor.log, MetricsProcessor.log_validation = log, log_validation
