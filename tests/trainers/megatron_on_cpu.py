"""Let Megatron-Core run on a CPU: tensors that it creates on CUDA are created on the CPU.

Its states of random numbers are those of CUDA too; the model of the page draws none.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Replace the device CUDA by the CPU in every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device", "")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
OnCpu().__enter__()

from megatron.core import tensor_parallel  # noqa: E402

tensor_parallel.model_parallel_cuda_manual_seed = torch.manual_seed
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
