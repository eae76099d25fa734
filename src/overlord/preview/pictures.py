"""Pictures of the images that encoders received: the pixels of a step, as thumbnails."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlord.client.client import Step
from overlord.job.job import Job
from overlord.plan.plan import LoadingPlan
from overlord.sample import SampleId
from overlord.transforms.image_items import unpatchify
from overlord.transforms.images import Images

LARGEST = 192  # pixels of the long side of a thumbnail


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image as the encoder receives it: its size, and a thumbnail as PNG."""

    width: int
    height: int
    patches: int
    tokens: int
    rank: int  # the rank that encodes it
    png: bytes


def pictures_of(
    plan: LoadingPlan, steps: Mapping[int, Step], job: Job
) -> dict[SampleId, list[Picture]]:
    """Return the pictures of each sample, in their order in the sample."""
    if "encoder" not in plan.modules:
        return {}
    owners = plan.modules["encoder"].sample
    specs = {source.name: _spec(source.transforms) for source in job.sources}
    found: dict[SampleId, dict[int, Picture]] = {}
    for rank, step in steps.items():
        for exchange in step.encoder:
            ends = exchange["image_cu_seqlens"].tolist()
            items = exchange["item_ids"].tolist()
            for item, grid, a, b in zip(
                items, exchange["grid_thw"].tolist(), ends, ends[1:], strict=False
            ):
                sample = plan.sample_id(int(owners[item]))
                spec = specs[sample.source]
                if spec is not None:
                    pixels = exchange["pixel_values"][a:b]
                    found.setdefault(sample, {})[item] = _picture(pixels, grid, spec, rank)
    return {sample: [items[k] for k in sorted(items)] for sample, items in found.items()}


def _spec(transforms: object) -> Images | None:
    assert isinstance(transforms, tuple)
    return next((t for t in transforms if isinstance(t, Images)), None)


def _picture(pixels: np.ndarray, grid: list[int], spec: Images, rank: int) -> Picture:
    t, h, w = grid
    image = unpatchify(pixels, (t, h, w), spec.patch, spec.merge, spec.mean, spec.std)
    return Picture(
        width=w * spec.patch,
        height=h * spec.patch,
        patches=t * h * w,
        tokens=t * h * w // spec.merge**2,
        rank=rank,
        png=_thumbnail(image),
    )


def _thumbnail(image: np.ndarray) -> bytes:
    from PIL import Image  # an extra, which a job with images has

    small = Image.fromarray(image)
    small.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    small.save(out, "PNG")
    return out.getvalue()
