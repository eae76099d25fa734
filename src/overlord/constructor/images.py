"""Inputs of the image encoder of each rank: decoded pixels, and the routes of its outputs.

Decoding an image is a thousand times the work of packing its text. Images are therefore decoded
late, by the process that builds the step of the encoding rank, on all its CPU cores. Decoders
release the interpreter lock.

Keys of one exchange of one rank, which encodes n images of P patches in total and receives k parts
of images. A part is a whole image, or what a slice or piece has of it without a gap:

    pixel_values         [P, patch_dim]  float32, or the dtype of ov.Images
    grid_thw             int64 [n, 3]    patches of each image: frames, rows, columns
    image_cu_seqlens     int32 [n + 1]   where each image's patches begin
    item_ids             int64 [n]       number of each image in the plan's module "encoder"
    send_lens            int32 [n]       number of output rows to send of each image: its first ones
    send_rows            int64 [sent]    rows in sending order, numbers among these first rows
    send_splits          int32 [world]   number of rows for each rank
    recv_splits          int32 [world]   number of rows from each rank
    recv_perm            int64 [k]       position on arrival of each part, in the order of
                                         placeholders
    out_lens             int32 [k]       number of rows of each part
    recv_rows            int64 [rows]    received[recv_rows] is in the order of placeholders
    image_token_index    int64 [rows]    position of each of these rows in the flattened microbatch
    image_microbatch     int32 [k]       the microbatch of each part
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from overlord.constructor.exclusions import whole_documents
from overlord.constructor.pack import BatchArrays
from overlord.errors import DataStall, OverlordError, PlanError
from overlord.messages.control import EncoderPlan
from overlord.messages.data import DecodeFailures
from overlord.plan.module_ranks import bucket_by_rank
from overlord.process import resources
from overlord.sample import ranges

if TYPE_CHECKING:
    from overlord.constructor.build import StepDocuments
    from overlord.content import Scattered
    from overlord.job.job import Source

# seconds for the images of one step: far above any real step, below the timeout of a trainer
DECODE_S = 300.0
CHANNELS = 3
ALIGN = 64  # bytes; alignment of the pixels of each rank


@dataclass(frozen=True, slots=True)
class PixelForm:
    """Format of the pixels of a job, the same on every rank and in every step."""

    patch_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.patch_dim * np.dtype(self.dtype).itemsize

    @staticmethod
    def of(sources: Sequence[Source]) -> PixelForm | None:
        """Return the format that all sources with images share; None if there are no images.

        The job has checked that all sources have the same format.
        """
        specs = [
            t for source in sources for t in source.transforms if getattr(t, "kind", "") == "images"
        ]
        return PixelForm(CHANNELS * specs[0].patch ** 2, specs[0].dtype) if specs else None


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoder inputs of a step for some ranks.

    ``arrays``: by rank, one microbatch per exchange. ``failures``: images that were not decoded.
    ``excluded``: tokens that are not predicted (``exclusions.py``): placeholders, and all tokens of
    samples with such an image.
    """

    arrays: dict[int, BatchArrays]
    per: str
    failures: DecodeFailures | None
    excluded: np.ndarray  # int64 [n, 5]


_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()
cores = functools.cache(resources.cores)  # read in every step


def decode_pool() -> Executor:
    """Return the shared thread pool of this process for decoding.

    A worker builds several steps at a time, on the same CPU cores.
    """
    with _lock:
        # A forked process inherits the pool object, but not its threads.
        if (executor := _pools.get(os.getpid())) is None:
            _pools.clear()
            _keep_freed_memory()
            executor = _pools[os.getpid()] = ThreadPoolExecutor(
                cores(), thread_name_prefix="overlord-decode"
            )
        return executor


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, by freeing one block of 31 MiB.

    Decoding allocates and frees some megabytes per image. By default glibc returns them to the
    system and gets them again page by page, a fifth of the work. Once a block of some size was
    freed, glibc keeps twice as much.
    """
    np.empty(31 * 2**20, np.uint8)


def encoder_inputs(
    staged: StepDocuments,
    ranks: Sequence[int],
    form: PixelForm,
    allocate: Callable[[int], np.ndarray],
    decoders: Executor | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Encoded:
    """Build the encoder arrays of these ranks, one microbatch per exchange.

    An image that cannot be decoded has zeros for pixels. ``stopped`` returns True if the result is
    no longer needed; the call then raises ``OverlordError``.
    """
    e = staged.stage.encoding
    assert e is not None, "no encoding was planned"
    assert staged.items is not None, "no images were staged"
    number = {rank: i for i, rank in enumerate(e.ranks.tolist())}
    groups = np.concatenate(
        [np.arange(number[rank] * e.n_slots, (number[rank] + 1) * e.n_slots) for rank in ranks]
    )
    rows = ranges(e.bounds[groups], e.bounds[groups + 1] - e.bounds[groups])
    grids = _grids(staged.items, e.at[rows], form, staged.plan.step)
    of_rank = np.concatenate(
        [
            [0],
            np.cumsum(
                [e.bounds[i + e.n_slots] - e.bounds[i] for i in groups[:: e.n_slots].tolist()]
            ),
        ]
    ).tolist()
    pixels, bad = _decoded(
        staged, e.at[rows], grids.prod(axis=1), of_rank, form, allocate, decoders, stopped
    )
    received = _receive_rows(e)
    arrays = {
        rank: _rank_arrays(e, number[rank], grids[of_rank[k] : of_rank[k + 1]], pixels[k], received)
        for k, rank in enumerate(ranks)
    }
    failures, undecoded = _failures(staged, rows, bad)
    return Encoded(arrays, e.per, failures, np.concatenate((e.placeholders, undecoded)))


def _grids(items: Scattered, at: np.ndarray, form: PixelForm, step: int) -> np.ndarray:
    """Return the patch grid (frames, rows, columns) of each image: int64 [n, 3].

    Raise ``PlanError`` if an image does not have the format of the job.
    """
    from overlord.transforms.image_items import BadImage, item_grid, item_shape

    grids = np.zeros((len(at), 3), np.int64)
    for k, i in enumerate(at.tolist()):
        try:
            _, dim, dtype = item_shape(items[i])
            grids[k] = item_grid(items[i])
        except BadImage as fault:  # not a user's file: a loader made it
            raise PlanError(
                f"expected a valid image item, got: {fault}", step, "this is a bug: report it"
            ) from fault
        if (dim, np.dtype(dtype)) != (form.patch_dim, np.dtype(form.dtype)):
            problem = (
                f"expected images of {form.patch_dim} {form.dtype} per patch, got {dim} "
                f"{np.dtype(dtype)}"
            )
            raise PlanError(problem, step, "this is a bug: report it")
    return grids


def _decoded(
    staged: StepDocuments,
    at: np.ndarray,
    patches: np.ndarray,
    of_rank: list[int],
    form: PixelForm,
    allocate: Callable[[int], np.ndarray],
    decoders: Executor | None,
    stopped: Callable[[], bool],
) -> tuple[list[np.ndarray], list[tuple[int, str]]]:
    """Return the pixels of each rank as views of one allocation, and failed images with reasons."""
    assert staged.items is not None
    sizes = [int(patches[a:b].sum()) * form.row_bytes for a, b in pairwise(of_rank)]
    starts = np.concatenate([[0], np.cumsum([-(-n // ALIGN) * ALIGN for n in sizes])]).tolist()
    piece = allocate(starts[-1]) if starts[-1] else np.zeros(0, np.uint8)
    made = [
        piece[s : s + n].view(form.dtype).reshape(-1, form.patch_dim)
        for s, n in zip(starts, sizes, strict=False)
    ]
    before, outs = np.concatenate([[0], np.cumsum(patches)]).tolist(), []
    for k, (a, b) in enumerate(pairwise(of_rank)):
        outs += [made[k][before[i] - before[a] : before[i + 1] - before[a]] for i in range(a, b)]
    bad = _fill_all(
        [staged.items[i] for i in at.tolist()], outs, decoders, stopped, staged.plan.step
    )
    for array in made:
        array.flags.writeable = False
    return made, bad


def _fill_all(
    items: list[np.ndarray],
    outs: list[np.ndarray],
    decoders: Executor | None,
    stopped: Callable[[], bool],
    step: int,
) -> list[tuple[int, str]]:
    """Decode every item into its output array, in this thread and in the pool.

    Return the number and the reason of each failed item. Raise ``DataStall`` after ``DECODE_S``,
    and ``OverlordError`` if ``stopped``.
    """
    from overlord.transforms.image_items import BadImage, fill

    # The largest image comes first: the last one to finish determines the duration.
    todo = deque(sorted(range(len(items)), key=lambda i: -outs[i].size))
    bad: list[tuple[int, str]] = []

    def work() -> None:
        while not stopped():
            try:
                i = todo.popleft()
            except IndexError:
                return
            try:
                fill(items[i], outs[i])
            except BadImage as fault:
                outs[i][:] = 0
                bad.append((i, str(fault)))

    helpers: list[Future[None]] = []
    if decoders is not None:
        helpers = [decoders.submit(work) for _ in range(min(cores(), len(items)) - 1)]
    work()
    # A helper that has not started is cancelled: another step's work is ahead of it.
    begun = [helper for helper in helpers if not helper.cancel()]
    if wait(begun, DECODE_S).not_done:
        raise DataStall(f"the images of step {step} to be decoded", DECODE_S, step)
    for helper in begun:
        helper.result()
    if todo:
        raise OverlordError(f"step {step}: stopped while its images were being decoded")
    return sorted(bad)


def _failures(
    staged: StepDocuments, rows: np.ndarray, bad: list[tuple[int, str]]
) -> tuple[DecodeFailures | None, np.ndarray]:
    """Return the failures for the quarantine, and the samples to exclude from the loss.

    A sample is excluded if the bucket that encodes its image also trains on the sample, alone;
    other buckets are not notified. The rule is by bucket and not by process: the stream must not
    depend on processes.
    """
    e = staged.stage.encoding
    assert e is not None
    if not bad:
        return None, np.zeros((0, 5), np.int64)
    failed = rows[[i for i, _ in bad]]
    main, place = staged.plan.main, staged.plan.place
    assert place is not None
    encoder = np.repeat(np.repeat(e.ranks, e.n_slots), np.diff(e.bounds))[failed]
    own = bucket_by_rank(place, main.on, main.axis)[encoder] == e.home[failed, 0]
    outcome = {
        True: "its sample is excluded from the loss",
        False: "its sample is in the loss, on another replica",
    }
    reasons = tuple(
        f"step {staged.plan.step}, image {int(e.number[row])}: {reason}; pixels are zero, "
        f"{outcome[bool(here)]}"
        for (_, reason), row, here in zip(bad, failed.tolist(), own.tolist(), strict=True)
    )
    return DecodeFailures(staged.plan.step, e.ids[failed], reasons), whole_documents(
        np.unique(e.home[failed[own]], axis=0)
    )


def _receive_rows(e: EncoderPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``recv_rows`` and ``image_token_index`` of all exchanges, and the bounds of each."""
    counts = np.diff(e.recv_bounds)
    lens = e.out_lens.astype(np.int64)
    arrival = np.repeat(e.recv_bounds[:-1], counts) + e.recv_perm
    arriving = np.empty_like(lens)
    arriving[arrival] = lens
    before = np.concatenate([[0], np.cumsum(arriving)])
    bounds = before[e.recv_bounds]
    rows = ranges(before[arrival] - np.repeat(bounds[:-1], counts), lens)
    return rows, ranges(e.position, lens), bounds


def _send_rows(
    e: EncoderPlan, items: np.ndarray, parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``send_rows`` of some exchanges, whose bounds are given, and the bounds of each."""
    lens = e.send_lens[items[0] : items[-1]].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lens)])  # rows of the items before each
    number, first, count = e.sent[parts[0] : parts[-1]].T
    exchange = np.repeat(np.arange(len(parts) - 1), np.diff(parts))
    begin = items[:-1] - items[0]
    rows = ranges(before[begin[exchange] + number] - before[begin[exchange]] + first, count)
    return rows, np.concatenate([[0], np.cumsum(count)])[parts - parts[0]]


def _rank_arrays(
    e: EncoderPlan,
    i: int,
    grids: np.ndarray,
    pixels: np.ndarray,
    received: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> BatchArrays:
    """Return the encoder arrays of rank number ``i``, one microbatch per exchange."""
    s = e.n_slots
    sent, parts, got, rows = (
        bounds[i * s : (i + 1) * s + 1]
        for bounds in (e.bounds, e.sent_bounds, e.recv_bounds, received[2])
    )
    a, b, c, d = (int(x) for x in (sent[0], sent[-1], got[0], got[-1]))
    f, g = int(rows[0]), int(rows[-1])
    items, here = sent - a, np.diff(sent)
    patches = np.concatenate([[0], np.cumsum(grids.prod(axis=1))])
    sums = patches[ranges(items[:-1], here + 1)] - np.repeat(patches[items[:-1]], here + 1)
    world, (send_rows, of_sent) = e.send_splits.shape[1], _send_rows(e, sent, parts)
    splits, of_items, of_received, of_rows = np.arange(s + 1) * world, items, got - c, rows - f
    columns: list[tuple[str, np.ndarray, np.ndarray]] = [
        ("pixel_values", pixels, patches[items]),
        ("grid_thw", grids, of_items),
        ("image_cu_seqlens", sums.astype(np.int32), items + np.arange(s + 1)),
        ("item_ids", e.item[a:b], of_items),
        ("send_lens", e.send_lens[a:b], of_items),
        ("send_rows", send_rows, of_sent),
        ("send_splits", e.send_splits[i * s : (i + 1) * s].reshape(-1), splits),
        ("recv_splits", e.recv_splits[i * s : (i + 1) * s].reshape(-1), splits),
        ("recv_perm", e.recv_perm[c:d], of_received),
        ("out_lens", e.out_lens[c:d], of_received),
        ("recv_rows", received[0][f:g], of_rows),
        ("image_token_index", received[1][f:g], of_rows),
        ("image_microbatch", e.microbatch[c:d], of_received),
    ]
    arrays = {name: _read_only(array) for name, array, _ in columns}
    return BatchArrays(arrays, [starts.tolist() for _, _, starts in columns])


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
