"""Seeded samplers of two length profiles after Figure 2 of the Overlord paper (arXiv 2504.09844).

    samples = draw("navit", 4096, seed=1, context=8192)
    buffer = samples.buffer(Batch(samples=4096, context=8192))  # a drawn step for strategies

``coyo``: 5 sources, a caption and one image per sample. The paper determines the text: 98.23 % of
samples hold at most 64 text tokens, the others 9.3 % of all text tokens. Its images, skewed up to
4096 patches, are an invented shape. ``navit``: 306 sources, about two images per sample, a tail to
32k tokens. The paper prints no numbers of it: all of it is invented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overlord.mesh import Batch
from overlord.sample import Buffer, Ragged

SHORT_TEXT = 64  # tokens; Figure 2 counts what is longer
SHORT_SHARE = 0.9823  # of coyo's samples
LONG_TEXT_TOKENS = 0.093  # of coyo's text tokens, in its other samples
LONGEST_IMAGE = 4096  # patches
LONGEST_NAVIT = 32_768  # tokens
SHAPES_SEED = 306  # the shapes of the sources do not depend on the seed of the samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Samples in the order of the stream, as arrays; an image token covers ``merge`` patches."""

    names: tuple[str, ...]
    source: np.ndarray  # int32
    text: np.ndarray  # int64: text tokens
    images: Ragged  # int64: patches of every image
    merge: int = 1

    def __len__(self) -> int:
        return len(self.source)

    def image_tokens(self) -> np.ndarray:
        """Return the number of image tokens of each sample."""
        return _row_sums(_tokens_of(self.images.values, self.merge), self.images.offsets)

    def tokens(self) -> np.ndarray:
        """Return the length of each sample in the backbone."""
        return self.text + self.image_tokens()

    def take(self, rows: np.ndarray) -> Samples:
        return replace(
            self, source=self.source[rows], text=self.text[rows], images=self.images.take(rows)
        )

    def cut(self, context: int) -> Samples:
        """Return the samples truncated to the context.

        The image that crosses it becomes smaller; later images and text are dropped.
        """
        values, before = _tokens_of(self.images.values, self.merge), self.images.offsets
        ends = np.concatenate([[0], np.cumsum(values)])
        ahead = ends[:-1] - np.repeat(ends[before[:-1]], self.images.lengths)
        kept = np.minimum(values, np.maximum(0, context - ahead))
        stays = kept > 0
        offsets = np.concatenate([[0], np.cumsum(_row_sums(stays.astype(np.int64), before))])
        images = Ragged(np.minimum(self.images.values, kept * self.merge)[stays], offsets)
        return replace(
            self, images=images, text=np.minimum(self.text, context - _row_sums(kept, before))
        )

    def buffer(self, batch: Batch, step: int = 0, images: bool = True) -> Buffer:
        """Return a drawn step of these samples in their order.

        Its columns are ``tokens`` and ``text``, and for every image ``image_patches`` and
        ``image_tokens``.
        """
        order = np.argsort(self.source, kind="stable")
        grouped, tokens = self.take(order), self.tokens()[order]
        ends = np.searchsorted(grouped.source, np.arange(len(self.names) + 1))
        columns: dict[str, dict[str, Any]] = {}
        for i, name in enumerate(self.names):
            a, b = int(ends[i]), int(ends[i + 1])
            columns[name] = {"tokens": tokens[a:b], "text": grouped.text[a:b]}
            if images:
                patches = grouped.images.slice(a, b).compact()
                columns[name] |= {
                    "image_patches": patches,
                    "image_tokens": Ragged(_tokens_of(patches.values, self.merge), patches.offsets),
                }
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return replace(Buffer.from_columns(columns, batch=batch, step=step).take(back), drawn=True)


def coyo(n: int, seed: int, source: np.ndarray | None = None) -> Samples:
    """Draw captions with one image each, from 5 sources whose images differ in size.

    ``source``: the source of each sample.
    """
    rng = np.random.default_rng([seed, 5])
    drawn = rng.choice(5, n, p=[0.35, 0.25, 0.2, 0.12, 0.08]).astype(np.int32)
    source = drawn if source is None else source
    body = np.clip(rng.lognormal(np.log(15.85), 0.7, n), 1, SHORT_TEXT).astype(
        np.int64
    )  # mean 19.4
    tail = SHORT_TEXT + 1 + np.minimum(rng.exponential(45.7, n), 1000).astype(np.int64)
    text = np.where(rng.random(n) < SHORT_SHARE, body, tail)
    larger = np.array([-0.45, -0.2, 0.1, 0.3, 0.55])[source]
    patches = np.clip(rng.lognormal(np.log(440) + larger, 0.97), 16, LONGEST_IMAGE).astype(np.int64)
    return Samples(
        names=tuple(f"coyo/{i}" for i in range(5)),
        source=source,
        text=text,
        images=Ragged(patches, np.arange(n + 1)),
    )


def navit(n: int, seed: int, source: np.ndarray | None = None) -> Samples:
    """Draw interleaved text and images from 306 sources.

    Captions, documents and plain text have lengths of their own.
    """
    shapes = np.random.default_rng(SHAPES_SEED)
    weight = 1 / np.sqrt(1 + np.arange(306))
    text_median, patches_median = (
        shapes.lognormal(np.log(330), 0.8, 306),
        shapes.lognormal(np.log(440), 0.4, 306),
    )
    images_mean = np.where(shapes.random(306) < 0.15, 0.0, shapes.lognormal(np.log(2.35), 0.5, 306))
    rng = np.random.default_rng([seed, 306])
    drawn = rng.choice(306, n, p=weight / weight.sum()).astype(np.int32)
    source = drawn if source is None else source
    text = np.clip(rng.lognormal(np.log(text_median)[source], 0.9), 4, LONGEST_NAVIT).astype(
        np.int64
    )
    count = rng.geometric(1 / (1 + images_mean[source])) - 1
    of_image = np.repeat(source, count)
    patches = np.clip(
        rng.lognormal(np.log(patches_median)[of_image], 0.7), 16, LONGEST_IMAGE
    ).astype(np.int64)
    names = tuple(f"navit/{i:03}" for i in range(306))
    images = Ragged(patches, np.concatenate([[0], np.cumsum(count)]))
    return Samples(names=names, source=source, text=text, images=images).cut(LONGEST_NAVIT)


PROFILES: dict[str, Callable[..., Samples]] = {"coyo": coyo, "navit": navit}


def draw(
    profile: str, n: int, *, seed: int, context: int, merge: int = 1, runs: int = 0
) -> Samples:
    """Draw ``n`` samples of a profile in stream order, none longer than the context.

    ``runs``: the number of readers that take turns, each with a source of its own, as if every rank
    read its own files.
    """
    sample = PROFILES[profile]
    mixed = sample(n, seed)
    if runs:
        mixed = sample(n, seed, np.resize(mixed.source[:runs], n))
    return replace(mixed, merge=merge).cut(context)


def _tokens_of(patches: np.ndarray, merge: int) -> np.ndarray:
    return -(-patches // merge)


def _row_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[offsets[1:]] - sums[offsets[:-1]]
