"""The reference stream of shape="fixed": docs/stream.md, "Fixed shapes", as a plain, slow program.

It shares no code with the package. A step has the samples that best fit packs into its microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any

from overlord.job.job import Job
from tests.reference import Mixer, Sample, U


def reference_fixed(
    job: Job, quarantine: list[tuple[str, int, int, int]] | None = None
) -> Iterator[list[Sample]]:
    """Return the samples of each step in the order of the draw."""
    mixer = Mixer(job, [] if quarantine is None else quarantine, {}, {}, {})
    for step in count():
        if mixer.enter(step):
            return
        if job.until == "first" and not all(mixer.active):
            return
        mixer.picks = 0
        counts = drawn(mixer, step)
        if not any(counts):
            return
        candidates = []
        for i, n in enumerate(counts):
            mixer.fill(i, job.look_ahead * n)
            front = mixer.ahead[i][: job.look_ahead * n]
            candidates += [(Fraction(2 * k + 1, 2 * n), i, k, c) for k, c in enumerate(front)]
        candidates.sort(key=lambda c: c[:3])
        by_age = sorted(range(len(candidates)), key=lambda j: -candidates[j][3][1])
        n = longest(mixer.job, [len(candidates[j][3][0][1]) for j in by_age])
        chosen = [candidates[j] for j in sorted(by_age[:n])]
        left = list(counts)
        for i in range(len(counts)):
            mine = {k for _, j, k, _ in chosen if j == i}
            left[i] -= len(mine)
            for k, entry in enumerate(mixer.ahead[i][: job.look_ahead * counts[i]]):
                passed = job.look_ahead == 1 or k < max(mine, default=-1)
                entry[1] += k not in mine and passed
            mixer.ahead[i] = [c for k, c in enumerate(mixer.ahead[i]) if k not in mine]
            mixer.active[i] = mixer.active[i] or left[i] > 0
        if any(left):
            weights = mixer.weights(step)
            mixer.owed = [
                o + n * U - sum(left) * w for o, n, w in zip(mixer.owed, left, weights, strict=True)
            ]
        yield [entry[0] for *_, entry in chosen]


def drawn(mixer: Mixer, step: int) -> list[int]:
    """Return how many samples each source should give to a step."""
    counts = [0] * len(mixer.streams)
    missing = mixer.job.batch.samples or 0
    while missing and any(weights := mixer.weights(step)):
        asked = (
            mixer.random_counts(weights, step, missing)
            if mixer.job.draw == "random"
            else mixer.exact_counts(weights, missing)
        )
        missing = 0
        for i, wanted in enumerate(asked):
            mixer.fill(i, counts[i] + wanted)
            got = min(wanted, len(mixer.ahead[i]) - counts[i])
            counts[i] += got
            if got < wanted:
                missing += wanted - got
                mixer.leave(i)
        if mixer.stop:
            break
    return counts


def longest(job: Job, lengths: list[int]) -> int:
    """Return how many samples of a list fit, as far as a search from above finds it."""
    batch, bins = job.batch, job.place.dp * job.batch.microbatches
    least = -(-batch.context // (batch.max_documents or batch.context))
    sizes: list[int] = [max(n, least) for n in lengths]
    most = max(n for n in range(len(sizes) + 1) if sum(sizes[:n]) <= bins * batch.context)
    n, above, step = most, most + 1, max(1, most // 64)
    while n > 1 and not best_fit(sizes[:n], bins, batch.context):
        above, n, step = n, max(1, n - step), 2 * step
    while above - n > 1:
        half = (n + above) // 2
        if best_fit(sizes[:half], bins, batch.context):
            n = half
        else:
            above = half
    return n


def best_fit(sizes: list[int], bins: int, context: int) -> bool:
    """Return whether all sizes fit, placed by falling size into the fullest bin with room."""
    room: list[Any] = [context] * bins
    for size in sorted(sizes, reverse=True):
        fits = [r for r in room if r >= size]
        if not fits:
            return False
        room[room.index(min(fits))] -= size
    return True
