"""Let DeepSpeed build its operator for CPUs before ranks need it: the first build takes minutes."""

from __future__ import annotations

from deepspeed.comm.torch import build_shm_op

build_shm_op()
