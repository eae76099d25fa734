"""The reference stream: docs/stream.md as a plain, slow program that holds everything in memory.

It shares no code with the package (``overlord.job.job`` only describes the job), so that the two
implementations can be compared. Sections follow the page's headings. Reading of rows and ids is in
``reference_rows.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import count, islice
from math import ceil, fsum
from types import SimpleNamespace
from typing import Any

from overlord.job.job import Job, Source
from tests.reference_groups import Grouped, fitted, lost_of_group
from tests.reference_rows import DROPPED, FAILED, Chunk, chunk_sizes, read_chunks, transform

U = 2**40
MASK = 2**64 - 1
Id = tuple[str, int, int, int, int]  # source, epoch, file, row, part
Sample = tuple[Id, list[int]]
Reports = dict[int, dict[int, dict[str, float]]]  # step, rank, metric


def reference_stream(
    job: Job,
    quarantine: list[tuple[str, int, int, int]] | None = None,
    score: Callable[[int, Sample], float] | None = None,
    reports: Reports | None = None,
    joins: dict[str, int] | None = None,
    long: dict[str, list[int]] | None = None,
) -> Iterator[list[Sample]]:
    """Return the samples of each step in the order of the draw.

    `quarantine` receives (source, epoch, file, row), as far as the draw read. `score` is the
    preference of the strategy among look-ahead candidates. `reports` holds the reports of each step
    by rank. `joins` has the step of each source that was added in mid-run. `long` receives, by
    source, the tokens that each document lost to `on_long`. A truncated document loses them with
    its sample, a dropped one when the draw passes it.
    """
    mixer = Mixer(
        job,
        [] if quarantine is None else quarantine,
        reports or {},
        joins or {},
        {} if long is None else long,
    )
    for step in count():
        drawn: list[Sample] = []
        mixer.picks = 0
        over = mixer.enter(step)
        batch = mixer.job.batch
        total, parts = (
            batch.samples or batch.tokens or 0,
            batch.microbatches if job.mix_every == "microbatch" else 1,
        )
        while not drawn and any(mixer.weights(step)) and not over and not mixer.stop:
            for m in range(parts):
                drawn += mixer.draw(step, total // parts + (m < total % parts))
        if not drawn:
            return
        if job.look_ahead > 1:
            order = [i for i, _ in drawn]
            drawn = mixer.choose(step, order, score or (lambda _step, _sample: 0.0))
        for sample in drawn:  # tokens that its stage truncates do not count for a budget
            given = sum(len(tokens) for *_, tokens in pieces_in_stage(job, step, sample))
            mixer.streams[job.names.index(sample[0][0])].left += len(sample[1]) - given
        yield drawn


# Keyed hashes


def key64(*parts: str | int) -> int:
    return int.from_bytes(
        blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest(), "little"
    )


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def keyed_hash(key: int, *columns: int) -> int:
    for column in columns:
        key = mix64(key ^ column)
    return key


# One source


def samples(
    job: Job,
    source: Source,
    quarantine: list[tuple[str, int, int, int]],
    long: dict[str, list[int]],
) -> Iterator[Sample]:
    chunks, bad = read_chunks(job, source), 0
    for epoch in count() if source.epochs is None else range(ceil(source.epochs)):
        empty, rows = True, rows_in_order(job, source, chunks, epoch)
        if source.epochs is not None and source.epochs < epoch + 1:
            rows = part_of(rows, job, source, chunks, epoch)
            empty = not epoch
        for file, row, outcome in rows:
            if outcome == DROPPED:
                continue
            if outcome != FAILED and (lost := lost_tokens(outcome, job)):
                long.setdefault(source.name, []).append(lost)
                if job.on_long == "drop":
                    continue
            pieces = [] if outcome == FAILED else cut(outcome, job)
            if not pieces:
                quarantine.append((source.name, epoch, file, row))
                if (bad := bad + 1) >= source.max_bad:
                    raise ValueError(f"{source.name}: {bad} bad rows in a row")
                continue
            bad, empty = 0, False
            for part, tokens in enumerate(pieces):
                yield (source.name, epoch, file, row, part), tokens
        if empty:
            raise ValueError(f"{source.name}: epoch {epoch} has no sample")


def part_of(
    rows: Iterator[tuple[int, int, Any]], job: Job, source: Source, chunks: list[Chunk], epoch: int
) -> Iterator[tuple[int, int, Any]]:
    """Return the rows of the last epoch if `epochs` is not a whole number."""
    part = Fraction(source.epochs) % 1
    sizes = chunk_sizes(job, source)
    if sizes is None:
        n = sum(len(rows) for _, rows in chunks)
        return islice(rows, int(part * n + Fraction(1, 2)))
    order = list(range(len(chunks)))
    if source.shuffle:
        key = key64("chunks", job.seed, source.name, epoch)
        order.sort(key=lambda chunk: (keyed_hash(key, chunk), chunk))
    left, below, key = part * sum(sizes), {}, key64("part", job.seed, source.name, epoch)
    for chunk in order:  # the share of every chunk, as a threshold of the hash
        share = min(Fraction(1), left / sizes[chunk]) if sizes[chunk] else Fraction(left > 0)
        left -= share * sizes[chunk]
        below |= {(chunks[chunk][0], row): int(share * 2**64) for row, _ in chunks[chunk][1]}
    return (r for r in rows if keyed_hash(key, r[0], r[1]) < below[r[0], r[1]])


class WithinBudget:
    """A stream that ends before the sample that exceeds `max_tokens`; in chunks, inside it."""

    def __init__(self, stream: Iterator[Sample], source: Source, job: Job):
        self.stream, self.chunks = stream, job.batch.packing == "concat"
        self.left = float("inf") if source.max_tokens is None else source.max_tokens
        self.held: Sample | None = None  # the sample that exceeded it

    def __iter__(self) -> WithinBudget:
        return self

    def __next__(self) -> Sample:
        if self.left <= 0:
            raise StopIteration
        self.held = self.held or next(self.stream)
        sample, size = self.held, len(self.held[1])
        if size > self.left and not self.chunks:
            raise StopIteration
        self.left, self.held = self.left - size, None
        return sample


def rows_in_order(
    job: Job, source: Source, chunks: list[Chunk], epoch: int
) -> Iterator[tuple[int, int, Any]]:
    order, size = list(range(len(chunks))), 1
    if source.shuffle:
        key, size = key64("chunks", job.seed, source.name, epoch), job.shuffle_chunks
        order.sort(key=lambda chunk: (keyed_hash(key, chunk), chunk))
    key = key64("rows", job.seed, source.name, epoch)
    for g in range(0, len(order), size):
        group = [chunks[c] for c in order[g : g + size]]
        for t in range(0, max(len(rows) for _, rows in group), job.slice_rows):
            window = []
            for file, rows in group:
                part = rows[t : t + job.slice_rows]
                window += [
                    (file, row, outcome)
                    for (row, _), outcome in zip(part, transform(source, part), strict=True)
                ]
            if source.shuffle:
                window.sort(
                    key=lambda entry: (keyed_hash(key, entry[0], entry[1]), entry[0], entry[1])
                )
            yield from window


def longest(job: Job) -> int:
    """The tokens of the longest sample."""
    if job.max_document is not None:
        return job.max_document
    shared = job.strategy == "hdp_balance" or getattr(job.strategy, "hybrid", False)
    contexts = [stage_batch(job, stage).context for stage in job.stages] or [job.batch.context]
    return max(contexts) * (job.place.dp * job.place.cp if shared else 1)


def cut(tokens: Any, job: Job) -> list[list[int]]:
    context = longest(job)
    if isinstance(tokens, Grouped):
        whole = fitted(tokens, context, job.batch.context, job.on_long)
        return [] if whole is None else [[t for document in whole for t in document]]
    if len(tokens) <= context or job.on_long == "truncate":
        return [tokens[:context]] if tokens else []
    return (
        [tokens[at : at + context] for at in range(0, len(tokens), context)]
        if job.on_long == "split"
        else []
    )


def lost_tokens(outcome: Any, job: Job) -> int:
    context, length = longest(job), len(outcome)
    if isinstance(outcome, Grouped):
        return lost_of_group(outcome, context, job.batch.context, job.on_long)
    if length <= context or job.on_long not in ("truncate", "drop"):
        return 0
    return length if job.on_long == "drop" else length - context


# Stages


def stage_batch(job: Job, stage: Any) -> Any:
    batch = stage.batch or job.batch
    return batch if stage.context is None else replace(batch, context=stage.context)


def stage_of(job: Job, step: int) -> tuple[int, int]:
    """Return the number of the stage of a step, and its first step."""
    first = 0
    for k, stage in enumerate(job.stages):
        if stage.steps is None or step < first + stage.steps or k == len(job.stages) - 1:
            return k, first
        first += stage.steps
    return 0, 0


def number(size: Any, step: int) -> int | None:
    """Return the size of a step, by the arguments of its ramp."""
    if size is None or isinstance(size, int):
        return size
    given = size.parameters()
    if size.kind == "staged":
        return int(given["stages"][max(k for k in given["stages"] if k <= step)])
    way = Fraction(min(max(0, step - given.get("begin", 0)), given["steps"]), given["steps"])
    exact = given["start"] + (given["end"] - given["start"]) * way
    multiple = given.get("multiple", 1)
    return int(exact.numerator // exact.denominator // multiple * multiple)


def batch_of(job: Job, step: int) -> Any:
    """Return the batch of a step, without ramps."""
    batch, begun = job.batch, 0
    if job.stages:
        k, first = stage_of(job, step)
        batch = stage_batch(job, job.stages[k])
        begun = first if job.stages[k].batch is not None else 0
    sizes = {name: number(getattr(batch, name), step - begun) for name in ("samples", "tokens")}
    return replace(batch, **sizes)


def is_over(job: Job, step: int) -> bool:
    lengths = [stage.steps for stage in job.stages]
    all_known = bool(lengths) and None not in lengths
    return (isinstance(job.until, int) and step >= job.until) or (
        all_known and step >= sum(n or 0 for n in lengths)
    )


def pieces_in_stage(job: Job, step: int, sample: Sample) -> list[tuple[Id, int, list[int]]]:
    """Return the pieces of a drawn sample: its id, the place in the sample, and the tokens."""
    ident, tokens = sample
    context = batch_of(job, step).context
    if len(tokens) <= context:
        return [(ident, 0, tokens)]
    if job.on_long == "truncate":
        return [(ident, 0, tokens[:context])]
    return [(ident, at, tokens[at : at + context]) for at in range(0, len(tokens), context)]


# The draw


class Mixer:
    def __init__(
        self,
        job: Job,
        quarantine: list[tuple[str, int, int, int]],
        reports: Reports,
        joins: dict[str, int],
        long: dict[str, list[int]],
    ):
        self.whole_job, self.job = job, job
        self.mixture, self.reports, self.joins = copy.deepcopy(job.mixture), reports, joins
        self.mixtures = [copy.deepcopy(stage.mixture) for stage in job.stages]
        self.asked: tuple[int, Any] = (-1, None)  # the last step, and the mixture's result for it
        self.streams = [
            WithinBudget(samples(job, source, quarantine, long), source, job)
            for source in job.sources
        ]
        self.active = [True] * len(self.streams)
        self.owed = [0] * len(self.streams)
        self.picks = 0  # random picks made in this step
        self.stop = False  # until="first", and a source ran out
        # Look-ahead: [sample, steps that passed it over], in stream order.
        self.ahead: list[list[list[Any]]] = [[] for _ in self.streams]
        # The number of these that the step being drawn takes.
        self.spoken: list[int] = [0] * len(self.streams)

    def enter(self, step: int) -> bool:
        """Begin a step, with the batch of its stage; return whether the job is over."""
        job: Any = SimpleNamespace(
            **{f.name: getattr(self.whole_job, f.name) for f in fields(self.whole_job)}
        )
        job.batch = batch_of(self.whole_job, step)
        self.job = job
        return is_over(self.whole_job, step)

    def weights(self, step: int) -> list[int]:
        """Return the integer weights of the active sources, 0 for the others."""
        if self.asked[0] < step:
            assert self.job.mix_every != "epoch" or not callable(self.mixture), (
                "not in the reference"
            )
            feedback = averaged(self.reports.get(step - self.job.feedback_lag, {}))
            self.asked = (
                step,
                self.mixture(step, feedback) if callable(self.mixture) else self.mixture,
            )
            k, first = stage_of(self.whole_job, step)
            own = self.mixtures[k] if self.mixtures else None
            if own is not None:
                self.asked = (step, own(step - first, feedback) if callable(own) else own)
        given: Any = self.asked[1]
        if given is None:
            given = {source.name: source.weight for source in self.job.sources}
        own = {s.name: s.weight for s in self.job.sources if s.name in self.joins}
        shares = callable(self.mixture) or any(m is not None for m in self.mixtures)
        if shares and own:
            first = [s for s in self.job.sources if s.name not in own]
            said, total = sum(given.get(s.name, 0.0) for s in first), sum(s.weight for s in first)
            own = {n: w * (said / total) if said and total else w for n, w in own.items()}
        given = {n: w for n, w in {**own, **given}.items() if self.joins.get(n, 0) <= step}
        return whole(
            [
                given.get(s.name, 0) if on else 0
                for s, on in zip(self.job.sources, self.active, strict=True)
            ]
        )

    def draw(self, step: int, size: int) -> list[Sample]:
        taken: list[list[Sample]] = [[] for _ in self.streams]
        while any(weights := self.weights(step)):
            size = (self.take_samples if self.job.batch.samples else self.take_tokens)(
                weights, step, size, taken
            )
            if not size or self.stop:
                break
        places = [
            (Fraction(2 * k + 1, 2 * len(t)), i, s)
            for i, t in enumerate(taken)
            for k, s in enumerate(t)
        ]
        return [s for _, _, s in sorted(places, key=lambda p: p[:2])]

    def take_samples(self, weights: list[int], step: int, n: int, taken: list[list[Sample]]) -> int:
        counts = (
            self.random_counts(weights, step, n)
            if self.job.draw == "random"
            else self.exact_counts(weights, n)
        )
        missing = 0
        for i, wanted in enumerate(counts):
            got = (
                self.promised(i, wanted)
                if self.job.look_ahead > 1
                else list(islice(self.streams[i], wanted))
            )
            taken[i] += got
            if len(got) < wanted:
                missing += wanted - len(got)
                self.leave(i)
        return missing

    def promised(self, i: int, wanted: int) -> list[Any]:
        """Decide how many samples the source gives; which ones is decided when the step's counts
        are known.
        """
        self.fill(i, self.spoken[i] + wanted)
        got = min(wanted, len(self.ahead[i]) - self.spoken[i])
        self.spoken[i] += got
        return [(i, None)] * got

    def fill(self, i: int, n: int) -> None:
        self.ahead[i] += [
            [sample, 0] for sample in islice(self.streams[i], max(0, n - len(self.ahead[i])))
        ]

    def choose(
        self, step: int, order: list[int], score: Callable[[int, Sample], float]
    ) -> list[Sample]:
        """Choose the samples of a step; `order` names the source of each position."""
        chosen = []
        for i, n in enumerate(self.spoken):
            self.fill(i, self.job.look_ahead * n)
            front = list(enumerate(self.ahead[i][: self.job.look_ahead * n]))
            front.sort(
                key=lambda c: (c[1][1] < self.job.max_age, score(step, c[1][0]) if n else 0, c[0])
            )
            mine = sorted(at for at, _ in front[:n])
            chosen.append(iter([self.ahead[i][at][0] for at in mine]))
            for _, candidate in [c for c in front[n:] if c[0] < max(mine)]:
                candidate[1] += 1
            self.ahead[i] = [c for at, c in enumerate(self.ahead[i]) if at not in mine]
            self.spoken[i] = 0
        return [next(chosen[i]) for i in order]

    def take_tokens(self, weights: list[int], _step: int, n: int, taken: list[list[Sample]]) -> int:
        missing = 0
        for i, w in enumerate(weights):
            self.owed[i] = self.owed[i] + n * w if w else 0
            while self.owed[i] > 0:
                if (sample := next(self.streams[i], None)) is None:
                    missing += -(-self.owed[i] // U)
                    self.leave(i)
                else:
                    taken[i].append(sample)
                    self.owed[i] -= U * len(sample[1])
        return missing

    def leave(self, i: int) -> None:
        self.active[i], self.owed[i], self.stop = False, 0, self.job.until == "first"

    def exact_counts(self, weights: list[int], n: int) -> list[int]:
        owed = self.owed = [o + n * w if w else 0 for o, w in zip(self.owed, weights, strict=True)]
        counts = [max(0, o // U) for o in owed]
        if sum(counts) > n:
            due = [
                (Fraction(k * U - owed[i], weights[i]), i, k)
                for i, c in enumerate(counts)
                for k in range(1, c + 1)
            ]
            first = [i for _, i, _ in sorted(due)[:n]]
            counts = [first.count(i) for i in range(len(weights))]
        while (missing := n - sum(counts)) > 0:
            weighted = [i for i, w in enumerate(weights) if w]
            may = [i for i in weighted if owed[i] > U * counts[i]] or weighted
            for _, i in sorted(
                (Fraction(U * (counts[i] + 1) - owed[i], weights[i]), i) for i in may
            )[:missing]:
                counts[i] += 1
        self.owed = [o - U * c for o, c in zip(owed, counts, strict=True)]
        return counts

    def random_counts(self, weights: list[int], step: int, n: int) -> list[int]:
        counts, key = [0] * len(weights), key64("draw", self.job.seed)
        for j in range(self.picks, self.picks + n):
            point = keyed_hash(key, step, j) * U >> 64
            counts[next(i for i in range(len(weights)) if sum(weights[: i + 1]) > point)] += 1
        self.picks += n
        return counts


# Feedback


def averaged(ranks: dict[int, dict[str, float]]) -> dict[str, float]:
    out = {}
    for name in {name for said in ranks.values() for name in said}:
        kind, _, source = name.partition("/")
        values = [said[name] for said in ranks.values() if name in said]
        tokens: list[Any] = [
            said.get(f"tokens/{source}") for said in ranks.values() if name in said
        ]
        if kind == "tokens" and source:
            out[name] = fsum(values)
        elif source and None not in tokens and any(tokens):
            shares = [t / max(tokens) for t in tokens]
            out[name] = fsum(v * t for v, t in zip(values, shares, strict=True)) / fsum(shares)
        else:
            out[name] = fsum(values) / len(values)
    return out


def whole(weights: list[Any]) -> list[int]:
    """Return integers that sum to U, in proportion to the given real numbers; all 0 if those
    are.
    """
    exact = [Fraction(w) for w in weights]
    total = sum(exact)
    if not total:
        return [0] * len(exact)
    shares = [w / total * U for w in exact]
    out = [s.numerator // s.denominator for s in shares]
    by_remainder = sorted(range(len(out)), key=lambda i: (out[i] - shares[i], i))
    for i in by_remainder[: U - sum(out)]:
        out[i] += 1
    return out
