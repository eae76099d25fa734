"""Batches of torchtitan: ``({"input", "positions", ...}, labels)`` with shifted labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from overlord.errors import JobError
from overlord.torch.adapters.labels import converted, need, refuse_weights
from overlord.torch.microbatch_info import IGNORE, SHIFTED
from overlord.torch.tensor_step import as_tensor

IMAGE_KEYS = ("pixel_values", "grid_thw")


def flat(
    mb: Mapping[str, Any],
    *,
    tokens: int | None = None,
    given: str | None = None,
    batched: bool = True,
    weighted: bool = False,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return one batch of torchtitan's trainer: [1, T] as release 0.3.0 reads it.

    A document begins where ``positions`` is 0. ``tokens``: pad to this length, for compiled models
    and CUDA graphs. Padding has input 0, label -100 and the positions of one more document, as in
    torchtitan's collator. ``batched=False``: [T], and patches of all images in one row, as its
    development branch reads them. Its trainer slices for CP itself (``Batch(cp_split="none")``).
    ``given``: the job's ``Batch.labels``; None: detect the convention from the labels.
    ``weighted``: the caller weighs the losses by ``mb["loss_mask"]``. Without it, weights other
    than 0 and 1 are refused.
    """
    facts = need(mb, ("tokens", "position_ids", "labels", "loss_mask"), "torchtitan.flat")
    if not weighted:
        refuse_weights(facts, "torchtitan.flat")
    labels, _ = converted(mb, SHIFTED, given)
    ids, positions = as_tensor(mb["tokens"]), as_tensor(mb["position_ids"])
    if tokens is not None:
        more = tokens - len(ids)
        if more < 0:
            raise JobError(
                [
                    f"tokens: expected at least the {len(ids)} of the microbatch, got "
                    f"{tokens}; give Batch.context"
                ],
                "torchtitan.flat",
            )
        ids, labels = F.pad(ids, (0, more)), F.pad(labels, (0, more), value=IGNORE)
        positions = torch.cat(
            (positions, torch.arange(more, dtype=positions.dtype, device=positions.device))
        )
    images = {key: as_tensor(mb[key]) for key in IMAGE_KEYS if key in mb}
    if not batched:
        return {"input": ids, "positions": positions, **images}, labels
    if len(images) == len(IMAGE_KEYS):
        images["pixel_values"] = _by_image(images["pixel_values"], images["grid_thw"])
    return {"input": ids[None], "positions": positions[None], **images}, labels[None]


def _by_image(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Return patches by image, [images, patches of the largest image, patch_dim].

    Smaller images are padded with zeros.
    """
    sizes = grid.prod(-1).tolist()
    if not sizes:
        return pixels.new_zeros((0, 0, pixels.shape[-1]))
    return torch.nn.utils.rnn.pad_sequence(pixels.split(sizes), batch_first=True)
