"""Spectra of weight matrices by Gram matrices, of whole and of sharded weights.

The eigenvalues of ``W^T W`` are the squared singular values of W, at a fraction of the cost of an
SVD. A matrix that is sharded along its long side is never gathered: the Gram matrix is the sum of
those of its shards. One rank solves each eigenvalue problem; the work is spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.errors import JobError
from overlord.torch.fused_projections import Ranges
from overlord.torch.tail_exponent import DEGENERATE, Estimator, window_starts
from overlord.torch.weight_matrices import Matrix, stacked, take

Fetch = Callable[[str], torch.Tensor]
Reduce = Callable[[int, np.ndarray, float], None]
EXACT = 1024  # the largest side of Gram matrices in float64 on the CPU
BATCH_BYTES = 256 << 20  # Gram matrices of one size that are solved at once


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Return a context that disables gradients, autocast and TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def shares(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that solves each problem: largest first, each to the least loaded rank."""
    loads, owner = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        owner[i] = rank
        loads[rank] += costs[i]
    return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share the work. All of them have the same matrices."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @staticmethod
    def of(group: Any = None) -> Ranks:
        """Return the ranks of a process group; None: all ranks.

        Without process groups return a single rank. Raise ``JobError`` if this rank is not in the
        group.
        """
        if not dist.is_available() or not dist.is_initialized():
            return Ranks()
        rank = dist.get_rank(group)
        if rank < 0:
            raise JobError(
                [
                    f"process_group: expected a group with this rank, {dist.get_rank()}, got one "
                    "without it; give the group of the ranks that hold the same model"
                ],
                "spectra",
            )
        return Ranks(rank=rank, size=dist.get_world_size(group), group=group)

    def reduce_to(self, owner: int, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks into the owner's."""
        if self.size > 1:
            at = owner if self.group is None else dist.get_global_rank(self.group, owner)
            dist.reduce(tensor, dst=at, group=self.group)

    def merged(self, values: np.ndarray, device: torch.device) -> np.ndarray:
        """Return the sum of float64 vectors over ranks, equal in every bit on all of them.

        Each entry is nonzero on one rank only, so the order of the sum has no effect.
        """
        if self.size == 1:
            return values
        at = device if dist.get_backend(self.group) != "gloo" else torch.device("cpu")
        tensor = torch.from_numpy(values.copy()).to(at)
        dist.all_reduce(tensor, group=self.group)
        return tensor.cpu().numpy()


def exponents(
    matrices: Sequence[Matrix], fetch: Fetch, estimator: Estimator, ranks: Ranks | None = None
) -> np.ndarray:
    """Return the exponent of every matrix, the same on every rank; NaN if it has none.

    ``fetch`` returns a parameter by its name; it may be a ``DTensor``. Every rank must call this
    with the same matrices.
    """
    ranks, found = ranks or Ranks(), np.zeros(len(matrices))

    def keep(index: int, eigenvalues: np.ndarray, tolerance: float) -> None:
        found[index] = estimator.alpha(eigenvalues, tolerance)

    usable = [i for i, m in enumerate(matrices) if m.eigenvalues >= estimator.min_eigs]
    chosen = [matrices[i] for i in usable]
    if not chosen:
        return np.full(len(matrices), DEGENERATE)
    device = each_spectrum(
        chosen,
        fetch,
        lambda i, values, tolerance: keep(usable[i], values, tolerance),
        windows=estimator.takes_windows,
        ranks=ranks,
    )
    found = ranks.merged(found, device)
    found[sorted(set(range(len(matrices))) - set(usable))] = DEGENERATE
    return found


def each_spectrum(
    matrices: Sequence[Matrix],
    fetch: Fetch,
    keep: Reduce,
    *,
    windows: bool = False,
    ranks: Ranks | None = None,
) -> torch.device:
    """Call ``keep`` for each matrix that this rank solves; return the device of the weights.

    ``keep`` receives the index, the eigenvalues and their tolerance. All ranks must call this with
    the same matrices.
    """
    ranks = ranks or Ranks()
    owner, solver = shares([m.cost(windows) for m in matrices], ranks.size), _Solver(keep)
    device = torch.device("cpu")
    gathered: tuple[str, torch.Tensor] | None = None
    for i, matrix in enumerate(matrices):
        weight, mine = fetch(matrix.parameter), owner[i] == ranks.rank
        device = weight.device
        with full_precision(device):
            shard = shard_of(weight, matrix, ranks)
            if shard is not None:
                gram = _partial_gram(shard, matrix, windows)
                ranks.reduce_to(owner[i], gram)
                if mine:
                    solver.add(i, gram)
                continue
            if _is_sharded(weight) and (gathered is None or gathered[0] != matrix.parameter):
                gathered = (matrix.parameter, weight.full_tensor())
            whole = gathered[1] if gathered and gathered[0] == matrix.parameter else weight
            whole = _adapted(whole, matrix, fetch)
            if mine:
                solver.add(i, whole_gram(whole, matrix, windows))
    with full_precision(device):
        solver.flush()
    return device


def _is_sharded(weight: torch.Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def _adapted(whole: torch.Tensor, matrix: Matrix, fetch: Fetch) -> torch.Tensor:
    """Return the weight plus its low-rank adapters; all ranks take part if those are sharded."""
    for adapter in matrix.adapters:
        b, a = (_whole(fetch(name)) for name in (adapter.b, adapter.a))
        update = adapter.scale * (b.float() @ a.float())
        whole = whole.float() + update.to(whole.device)
    return whole


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if _is_sharded(weight) else weight


def whole_gram(whole: torch.Tensor, matrix: Matrix, windows: bool) -> torch.Tensor:
    """Return the Gram matrices of a matrix in an un-sharded parameter: [problems, k, k]."""
    stack = stacked(whole.detach(), matrix)
    rows, cols = stack.shape[-2:]
    tall = stack if rows >= cols else stack.mT
    if not windows:
        return _gram(tall)
    long, short = tall.shape[-2:]
    starts = window_starts(long, short)
    return torch.cat([_gram(tall[:, at : at + short]) for at in starts])


def _gram(tall: torch.Tensor) -> torch.Tensor:
    side = tall.shape[-1]
    exact = tall.device.type == "cpu" and side <= EXACT
    if tall.is_complex():
        tall = tall.to(torch.complex128 if exact else torch.complex64)
    else:
        tall = tall.to(torch.float64 if exact else torch.float32)
    return tall.mH @ tall


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's part of a matrix that is sharded along one axis."""

    local: torch.Tensor
    axis: int
    ranges: Ranges  # of the axis in the whole parameter; the local tensor holds them in order
    counts: bool  # False on all but one of the ranks that hold the same part


def shard_of(weight: torch.Tensor, matrix: Matrix, ranks: Ranks) -> Shard | None:
    """Return this rank's shard if its Gram matrix is a term of the whole matrix's, else None.

    That holds if the weight is sharded along the axis that the Gram matrix sums over, or between
    the experts of a stack.
    """
    if not _is_sharded(weight) or matrix.is_complex or matrix.adapters:
        return None
    mesh, placements = weight.device_mesh, weight.placements
    sharded = [p for p in placements if not p.is_replicate()]
    axes = {getattr(p, "dim", -1) for p in sharded}
    plain = all(type(p).__name__ == "Shard" for p in sharded)
    if len(axes) != 1 or not plain or mesh.size() != ranks.size or matrix.layout.groups > 1:
        return None
    axis = axes.pop() % len(matrix.shape)
    rows, cols = matrix.layout.rows, matrix.layout.cols
    summed = {rows} if matrix.rows > matrix.cols else {cols}
    summed = {rows, cols} if matrix.rows == matrix.cols else summed
    one_expert = axis not in (rows, cols) and dict(matrix.select).get(axis) is not None
    if axis not in summed and not one_expert:
        return None
    coordinate = mesh.get_coordinate()
    start, length, counts = 0, matrix.shape[axis], True
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            counts = counts and coordinate[dim] == 0
            continue
        each = -(-length // mesh.size(dim))
        first = min(coordinate[dim] * each, length)
        start, length = start + first, min(first + each, length) - first
    local = weight.to_local().detach()
    return Shard(local=local, axis=axis, ranges=((start, start + length),), counts=counts)


def _partial_gram(shard: Shard, matrix: Matrix, windows: bool) -> torch.Tensor:
    """Return this rank's term of the Gram matrices."""
    rows, cols = matrix.layout.rows, matrix.layout.cols
    if shard.axis in (rows, cols):
        long_axis = shard.axis
    else:
        long_axis = rows if matrix.rows >= matrix.cols else cols
    chosen = dict(matrix.select)
    whole = chosen.get(long_axis, ((0, matrix.shape[long_axis]),))
    long = matrix.extents[long_axis]
    starts = window_starts(long, matrix.small) if windows else [0]
    length = matrix.small if windows else long
    terms = []
    for at in starts:
        ranges = dict(chosen) | {long_axis: between(whole, at, at + length)}
        local = shard.local
        for axis, wanted in ranges.items():
            if axis == shard.axis:
                wanted = within(wanted, shard.ranges[0])
            local = take(local, axis, wanted)
        terms.append(_terms(local, matrix, long_axis, shard.counts))
    return torch.cat(terms)


def _terms(local: torch.Tensor, matrix: Matrix, long_axis: int, counts: bool) -> torch.Tensor:
    rows, cols = matrix.layout.rows, matrix.layout.cols
    others = [axis for axis in range(local.ndim) if axis not in (rows, cols)]
    short_axis = cols if long_axis == rows else rows
    moved = local.permute(*others, long_axis, short_axis)
    tall = moved.reshape(-1, *moved.shape[-2:]) if moved.numel() else moved.new_zeros(0, 0, 0)
    if counts and len(tall):
        return _gram(tall).contiguous()
    empty = local.new_zeros(matrix.stack, 1, local.shape[short_axis])
    return _gram(empty).contiguous()


def between(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the part of concatenated ranges from position ``start`` up to, excluding, ``stop``."""
    out, at = [], 0
    for low, high in ranges:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            out.append((low + first, low + last))
        at += high - low
    return tuple(out)


def within(ranges: Ranges, shard: tuple[int, int]) -> Ranges:
    """Return the parts of ranges inside a shard, relative to the shard's start."""
    clipped = ((max(a, shard[0]), min(b, shard[1])) for a, b in ranges)
    return tuple((a - shard[0], b - shard[0]) for a, b in clipped if a < b)


@dataclass(slots=True)
class _Solver:
    """Batches of eigenvalue problems of equal size, dtype and device, each solved by one call."""

    keep: Reduce
    waiting: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = field(
        default_factory=dict
    )

    def add(self, index: int, gram: torch.Tensor) -> None:
        key = (gram.shape[-1], gram.dtype, gram.device)
        batch = self.waiting.setdefault(key, [])
        batch.append((index, gram))
        if sum(g.numel() * g.element_size() for _, g in batch) >= BATCH_BYTES:
            self._solve(self.waiting.pop(key))

    def flush(self) -> None:
        while self.waiting:
            self._solve(self.waiting.popitem()[1])

    def _solve(self, batch: list[tuple[int, torch.Tensor]]) -> None:
        grams = torch.cat([gram for _, gram in batch]) if len(batch) > 1 else batch[0][1]
        # the solver does not converge on values that are not finite
        finite = torch.isfinite(grams).all(dim=-1).all(dim=-1)
        safe = torch.where(finite[:, None, None], grams, torch.zeros_like(grams))
        values = torch.linalg.eigvalsh(safe)
        values = torch.where(finite[:, None], values, torch.full_like(values, float("nan")))
        pieces = values.double().cpu().numpy()
        tolerance = grams.shape[-1] * float(torch.finfo(values.dtype).eps)
        at = 0
        for index, gram in batch:
            self.keep(index, pieces[at : at + len(gram)].reshape(-1), tolerance)
            at += len(gram)
