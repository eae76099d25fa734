"""Send the outputs of an encoder to the ranks that run the backbone, and gradients back.

    rows = encoder(pixels)  # the images that this rank encodes, of any sample
    exchange = ot.Exchange(rows, step.encoder[0])  # on every rank, also without images
    for m, mb in enumerate(step):
        embeddings = ot.place_rows(embed(mb["tokens"]), *exchange.microbatch(m))
        loss_of(embeddings, mb).backward()
    exchange.backward()  # on every rank: gradients return to the encoders

Each direction is one all-to-all. A plan that encodes before every microbatch has one exchange per
microbatch. ``ot.route(rows, step.encoder[m])`` returns its rows, and their gradient returns in the
``backward`` of the microbatch. A rank whose loss uses no rows must take part:
``ot.tied(loss, rows)``.

The first rank of a bucket receives the rows. If other ranks of the bucket hold tokens too (TP, CP),
``share_rows`` copies the rows to them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from overlord.errors import PlanError

log = logging.getLogger("overlord")

Group = Any  # a ProcessGroup, or None for all ranks
GRADIENTS = ("sum", "own")
# Ranks compare dtypes by their positions here.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_agreed: WeakKeyDictionary[Any, torch.dtype] = WeakKeyDictionary()  # by process group


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """Send rows to their ranks; backward sends each gradient to the rank that sent the row."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor,
        sends: list[int],
        gets: list[int],
        group: Group,
    ) -> torch.Tensor:
        ctx.sends, ctx.gets, ctx.group = sends, gets, group
        return _exchange(rows, sends, gets, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Return the gradients; the anchor has none.

        The anchor makes autograd call this on ranks without rows too.
        """
        back = _exchange(grads[0], ctx.gets, ctx.sends, ctx.group)
        return back, back.new_zeros(()), None, None, None


def _exchange(rows: torch.Tensor, sends: list[int], gets: list[int], group: Group) -> torch.Tensor:
    out = rows.new_empty((sum(gets), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), gets, sends, group=group)
    return out


def route(rows: torch.Tensor, maps: Any, group: Group = None, *, lens: Any = None) -> torch.Tensor:
    """Return the rows of this rank's image placeholders, in their order.

    All ranks of the plan call it, forward and backward. ``rows`` [n, width]: outputs of this rank's
    encoder, image after image; a rank without images gives 0 rows of the same width and dtype.
    ``maps``: one of ``step.encoder``. ``lens``: the number of rows of each image in ``rows``. Give
    it if truncation cut the placeholders of an image: only its first ``send_lens`` rows are sent.
    ``group`` must have all ranks of the plan, in their order.
    """
    sends, gets = (
        _field(maps, name).astype(np.int64).tolist() for name in ("send_splits", "recv_splits")
    )
    rows = _truncated(rows, maps, lens)
    if len(rows) != sum(sends):
        raise PlanError(
            f"route: expected the {sum(sends)} rows that the plan sends from this rank, "
            f"got {len(rows)}; give the encoder's "
            "rows in the order of item_ids, and lens= if it makes more than send_lens"
        )
    world = dist.get_world_size(group)
    if world != len(sends):
        raise PlanError(
            f"route: expected a group of the plan's {len(sends)} ranks, got a group of {world}; "
            "pass group="
        )
    _check_dtype(rows, world, group)
    rows = _in_sending_order(rows, _field(maps, "send_rows"))
    anchor = rows.new_zeros((), requires_grad=rows.is_floating_point() and torch.is_grad_enabled())
    received: torch.Tensor = _AllToAll.apply(rows, anchor, sends, gets, group)
    return received.index_select(0, _index(_field(maps, "recv_rows"), received.device))


def _check_dtype(rows: torch.Tensor, world: int, group: Group) -> None:
    """Check that all ranks send rows of one dtype.

    With different dtypes rows would be garbage, without an error. Ranks compare their dtypes in the
    first exchange of a group. A rank without rows that later changes its dtype only logs a warning:
    all ranks may have changed it.
    """
    key = dist.group.WORLD if group is None else group
    if (known := _agreed.get(key)) is not None:
        if not len(rows) and rows.dtype != known:
            log.warning(
                "dtype of rank %d, which sends no rows, changed to %s from %s; change it on all "
                "ranks",
                dist.get_rank(),
                rows.dtype,
                known,
            )
        _agreed[key] = rows.dtype
        return
    code = DTYPES.index(rows.dtype) if rows.dtype in DTYPES else len(DTYPES)
    mine = torch.tensor([code, *rows.shape[1:2]], device=rows.device)
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine, group=group)
    found = [
        f"rank {r}: {[*DTYPES, 'another'][c]}, width {width}"
        for r, (c, width) in enumerate(t.tolist() for t in every)
    ]
    if len({text.partition(":")[2] for text in found}) > 1:
        raise PlanError(
            "route: expected rows of one dtype and width on all ranks, also on ranks without "
            f"rows, got {'; '.join(found)}"
        )
    _agreed[key] = rows.dtype


def _truncated(rows: torch.Tensor, maps: Any, lens: Any) -> torch.Tensor:
    """Return the first ``send_lens`` rows of every image; all rows if ``lens`` is None."""
    if lens is None:
        return rows
    made, wanted = np.asarray(lens, np.int64), _field(maps, "send_lens").astype(np.int64)
    if made.shape != wanted.shape or (made < wanted).any() or made.sum() != len(rows):
        raise PlanError(
            f"route: expected lens= of {len(wanted)} images, each at least its send_lens, with a "
            f"sum of {len(rows)}, the number of rows, got {made.size} numbers with a sum of "
            f"{int(made.sum())}; give the number of rows that the encoder returned for each image"
        )
    if np.array_equal(made, wanted):
        return rows
    starts = np.cumsum(made) - made
    kept = np.repeat(starts - (np.cumsum(wanted) - wanted), wanted) + np.arange(int(wanted.sum()))
    return rows.index_select(0, _index(kept, rows.device))


def _in_sending_order(rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:
    """Return the rows by receiving rank: ranks that share a document share its images' rows."""
    if np.array_equal(order, np.arange(len(rows))):
        return rows
    return rows.index_select(0, _index(order, rows.device))


class Exchange:
    """One exchange whose rows several microbatches use.

    Each microbatch has a backward of its own. ``backward()`` sends the summed gradients to the
    encoders once.
    """

    def __init__(self, rows: torch.Tensor, maps: Any, group: Group = None, *, lens: Any = None):
        self._routed = route(rows, maps, group, lens=lens)
        self._needs_backward = self._routed.requires_grad
        # Gradients of all microbatches accumulate here.
        self.rows = self._routed.detach().requires_grad_(self._needs_backward)
        self._index = _field(maps, "image_token_index")
        counts, of = _field(maps, "out_lens"), _field(maps, "image_microbatch", "microbatches")
        self._microbatch = np.repeat(of, counts)

    def microbatch(self, m: int) -> tuple[torch.Tensor, np.ndarray]:
        """Return the rows of one microbatch and their positions in it, for ``place_rows``."""
        mine = np.flatnonzero(self._microbatch == m)
        return self.rows.index_select(0, _index(mine, self.rows.device)), self._index[mine]

    def backward(self) -> None:
        """Send gradients to the encoders; every rank calls this after its last microbatch.

        A second call does nothing.
        """
        if not self._needs_backward:
            return
        grad = self.rows.grad if self.rows.grad is not None else torch.zeros_like(self.rows)
        self._needs_backward = False
        self._routed.backward(grad)


def place_rows(
    embeddings: torch.Tensor, rows: torch.Tensor, index: Any, positions: Any = None
) -> torch.Tensor:
    """Return embeddings in which rows replace their placeholders; gradients reach both.

    ``embeddings``: [T, width], or [1, T, width]. ``index``: the token of the un-sliced microbatch
    that each row replaces. ``positions``: for a CP slice, the token of the un-sliced microbatch of
    each of its tokens (``constructor.rank_views.slice_index``); rows of other slices are ignored.
    """
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    at = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index, np.int64)
    if positions is not None:
        here = np.asarray(positions, np.int64)
        order = np.argsort(here, kind="stable")
        found = np.minimum(np.searchsorted(here[order], at), max(0, len(here) - 1))
        mine = np.flatnonzero(here[order[found]] == at) if len(here) else np.zeros(0, np.int64)
        rows, at = rows.index_select(0, _index(mine, rows.device)), order[found[mine]]
    if len(at) and int(at.max()) >= len(flat):
        raise PlanError(
            f"place_rows: expected index to be below {len(flat)}, the tokens of embeddings, got "
            f"{int(at.max())}; a CP slice needs positions="
        )
    return flat.index_copy(0, _index(at, flat.device), rows.to(flat.dtype)).reshape(
        embeddings.shape
    )


def tied(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with a backward that includes the exchange of ``rows``.

    Use it on ranks that do not use rows in their loss.
    """
    return value + rows[:0].sum().to(value.dtype)


class _Share(torch.autograd.Function):  # type: ignore[misc]
    """Broadcast the rows of the first rank; backward sums gradients or takes those of one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor,
        n: int,
        first: int,
        sums: bool,
        group: Group,
    ) -> torch.Tensor:
        ctx.n, ctx.first, ctx.sums, ctx.group, ctx.had = n, first, sums, group, len(rows)
        shared = (
            rows.contiguous().clone()
            if dist.get_rank() == first
            else rows.new_empty((n, *rows.shape[1:]))
        )
        if n:
            dist.broadcast(shared, first, group=group)
        return shared

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = grads[0].contiguous().clone()
        if ctx.n and ctx.sums:
            dist.all_reduce(grad, group=ctx.group)
        mine = grad if dist.get_rank() == ctx.first else grad.new_zeros((ctx.had, *grad.shape[1:]))
        return mine, grad.new_zeros(()), None, None, None, None


def share_rows(
    rows: torch.Tensor, index: Any, group: Group, *, gradients: str = "sum"
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the rows and positions of the group's first rank, on all of its ranks.

    For TP and CP, whose ranks embed tokens of the same bucket. Other ranks give ``rows`` of the
    same width and dtype; its values and ``index`` are ignored there. ``gradients``: ``"sum"`` if
    each rank uses the rows for other tokens (CP). ``"own"`` if all compute the same, and the
    gradient of the first rank is complete already (TP, whose layers sum it).
    """
    if gradients not in GRADIENTS:
        raise PlanError(
            f"share_rows: gradients: expected one of {', '.join(GRADIENTS)}, got {gradients!r}"
        )
    first = dist.get_global_rank(group, 0) if group is not None else 0
    counts = torch.tensor(
        [len(rows), len(index) if dist.get_rank() == first else 0], device=rows.device
    )
    dist.broadcast(counts, first, group=group)
    count, indexed = counts.tolist()
    if count != indexed:  # raise on all ranks: otherwise the others would wait for the first
        raise PlanError(
            f"share_rows: expected a position for each row on rank {first}, got {count} rows "
            f"and {indexed} positions in index"
        )
    places = torch.empty(count, dtype=torch.int64, device=rows.device)
    if dist.get_rank() == first:
        places = _index(np.asarray(index, np.int64), rows.device)
    if len(places):
        dist.broadcast(places, first, group=group)
    anchor = rows.new_zeros((), requires_grad=torch.is_grad_enabled())
    shared: torch.Tensor = _Share.apply(rows, anchor, count, first, gradients == "sum", group)
    return shared, places.cpu().numpy()


def _field(maps: Any, *names: str) -> np.ndarray:
    """Return the first of the named arrays that ``maps`` has.

    ``maps`` is one of ``step.encoder``, or the result of ``plan.routes().for_rank()``.
    """
    for name in names:
        if isinstance(maps, Mapping) and name in maps:
            found = maps[name]
            return found.cpu().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        if not isinstance(maps, Mapping) and hasattr(maps, name):
            return np.asarray(getattr(maps, name))
    has = ", ".join(maps) if isinstance(maps, Mapping) else type(maps).__name__
    raise PlanError(
        f"route: expected {names[0]!r} in the maps, got {has}; give one of step.encoder, "
        "or plan.routes().for_rank(rank, slot)"
    )


def _index(index: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(index, np.int64), device=device)
