"""The documents of a step as its ranks received them, put together from all their slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from overlord.client.client import Microbatch, Step
from overlord.constructor.rank_views import join
from overlord.mesh import Batch, Mesh
from overlord.plan.plan import LoadingPlan
from overlord.sample import SampleId


@dataclass(slots=True, kw_only=True, eq=False)
class Document:
    """One sample, or its piece in a chunk: tokens, and the weight of each as a label of the loss.

    The label of the first token of a later piece belongs to the piece before it. ``after`` is the
    weight of the label after the last token.
    """

    sample: SampleId
    tokens: np.ndarray  # int64
    loss: np.ndarray  # float32; 0: not predicted, or masked; NaN: unknown, in an earlier step
    begin: int = 0  # tokens of the sample before this piece
    role: int = -1  # position among the documents of its sample; -1: the sample is one document
    after: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class DocumentBatch:
    """The documents of one microbatch, and the ranks that train on it."""

    ranks: tuple[int, ...]
    microbatch: int
    tokens: int  # with padding
    documents: list[Document] = field(default_factory=list)

    @property
    def padding(self) -> int:
        """Tokens that belong to no document."""
        return self.tokens - sum(len(document.tokens) for document in self.documents)


def ranks_to_open(place: Mesh, whole: bool, first: int) -> list[int]:
    """Return the ranks whose steps show ``first`` replicas; ``whole``: all ranks.

    Ranks along tensor parallelism receive equal data.
    """
    every = range(place.first_rank, place.first_rank + place.world_size)
    if whole:
        return list(every)
    coords = {rank: place.coords(rank) for rank in every}
    return [rank for rank, at in coords.items() if at["dp"] < first and at["tp"] == 0]


def batches_of(
    plan: LoadingPlan, steps: Mapping[int, Step], place: Mesh, batch: Batch
) -> list[DocumentBatch]:
    """Return the microbatches of a step, by bucket; ``steps``: what the ranks received."""
    mesh = plan.main.on or place
    buckets = mesh.buckets(plan.main.axis)
    if plan.tasks is not None:
        return list(_ring_batches(buckets, steps, place, batch))
    found: list[DocumentBatch] = []
    for ranks in buckets:
        received = [rank for rank in ranks if rank in steps]
        if received:
            found += _bucket_batches(ranks, received, steps, place, batch)
    if batch.packing == "concat" and batch.labels == "shifted":
        _join_pieces([document for group in found for document in group.documents])
    return found


def _join_pieces(pieces: Sequence[Document]) -> None:
    """Set the weights of the first tokens of pieces from the pieces before them."""
    ends = {(p.sample, p.begin + len(p.tokens)): p.after for p in pieces}
    for piece in pieces:
        if piece.begin:
            piece.loss[0] = ends.get((piece.sample, piece.begin), np.nan)


def _stages(ranks: Sequence[int], place: Mesh) -> tuple[list[int], list[int]]:
    """Return the ranks of the first and of the last stage at coordinate 0 of tp, in cp order."""
    at = {rank: place.coords(rank) for rank in ranks}
    tp = min(coords["tp"] for coords in at.values())
    here = [rank for rank in ranks if at[rank]["tp"] == tp]
    ends = []
    for pick in (min, max):
        pp = pick(at[rank]["pp"] for rank in here)
        stage = [rank for rank in here if at[rank]["pp"] == pp]
        ends.append(sorted(stage, key=lambda rank: at[rank]["cp"]))
    return ends[0], ends[1]


def _bucket_batches(
    ranks: Sequence[int],
    received: Sequence[int],
    steps: Mapping[int, Step],
    place: Mesh,
    batch: Batch,
) -> Iterator[DocumentBatch]:
    first, last = _stages(received, place)
    for m in range(len(steps[first[0]])):
        head = [steps[rank][m] for rank in first]
        tail = [steps[rank][m] for rank in last]
        arrays = {**_whole(tail, batch), **_whole(head, batch)}
        if "tokens" in arrays and "loss_mask" in arrays:
            yield DocumentBatch(
                ranks=tuple(ranks),
                microbatch=m,
                tokens=arrays["tokens"].size,
                documents=list(_documents(head[0], arrays, batch)),
            )


def _whole(parts: Sequence[Microbatch], batch: Batch) -> dict[str, np.ndarray]:
    """Return the arrays of a microbatch from the slices of its context-parallel ranks."""
    if len(parts) == 1 or batch.cp_split == "none":
        return dict(parts[0])
    return join([dict(part) for part in parts], batch.cp_split)


def _documents(
    microbatch: Microbatch, arrays: Mapping[str, np.ndarray], batch: Batch
) -> Iterator[Document]:
    tokens, mask = arrays["tokens"], arrays["loss_mask"]
    pieces = zip(microbatch.samples, microbatch.begins.tolist(), _roles(microbatch), strict=True)
    for piece, begin, role in pieces:
        if tokens.ndim == 2:
            ids, weights = tokens[piece.offset, : piece.length], mask[piece.offset, : piece.length]
        else:
            inside = slice(piece.offset, piece.offset + piece.length)
            ids, weights = tokens[inside], mask[inside]
        positions = np.arange(len(ids))
        yield Document(
            sample=piece.sample,
            tokens=ids,
            loss=_of_tokens(weights, positions, len(ids), batch),
            begin=begin,
            role=role,
            after=float(weights[-1]),
        )


def _roles(microbatch: Microbatch) -> list[int]:
    """Return the role of each entry of ``samples``; -1 for samples of one document."""
    n = len(microbatch.samples)
    return microbatch["roles"].tolist()[:n] if "roles" in microbatch else [-1] * n


def _of_tokens(mask: np.ndarray, positions: np.ndarray, n: int, batch: Batch) -> np.ndarray:
    """Return the weight of every token as a label, from the mask at some positions of a document.

    With shifted labels the mask at a position is the weight of the next token.
    """
    loss = np.zeros(n + 1, np.float32)
    here = positions + (batch.labels == "shifted")
    loss[here[here < n]] = mask[here < n]
    return loss[:n]


def _ring_batches(
    buckets: Sequence[Sequence[int]], steps: Mapping[int, Step], place: Mesh, batch: Batch
) -> Iterator[DocumentBatch]:
    """Yield the tasks of a hybrid plan: the ranks of a ring have pieces of the same documents."""
    # By number of the microbatch, which several rings may share, and ring.
    found: dict[tuple[int, tuple[int, ...]], DocumentBatch] = {}
    for bucket in buckets:
        received = [rank for rank in bucket if rank in steps]
        if not received:
            continue
        first, last = _stages(received, place)
        for m in range(len(steps[first[0]])):
            head, tail = steps[first[0]][m], steps[last[0]][m]
            if not head.samples or "task_index" not in head:
                continue
            ring = tuple(r for b in head["cp_ranks"].tolist() for r in buckets[b])
            task = found.setdefault(
                (int(head["task_index"]), ring),
                DocumentBatch(ranks=ring, microbatch=m, tokens=0, documents=_blank(head)),
            )
            task.tokens += head["tokens"].size
            _add_pieces(task, head, tail, batch)
    yield from (found[k] for k in sorted(found))


def _blank(head: Microbatch) -> list[Document]:
    return [
        Document(
            sample=piece.sample,
            tokens=np.zeros(piece.length, np.int64),
            loss=np.zeros(piece.length, np.float32),
            role=role,
        )
        for piece, role in zip(head.samples, _roles(head), strict=True)
    ]


def _add_pieces(task: DocumentBatch, head: Microbatch, tail: Microbatch, batch: Batch) -> None:
    ends = head["cu_seqlens_local"].tolist()
    for document, a, b in zip(task.documents, ends, ends[1:], strict=False):
        n = len(document.tokens)
        positions = head["position_ids"][a:b]
        inside = positions < n
        document.tokens[positions[inside]] = head["tokens"][a:b][inside]
        document.loss += _of_tokens(tail["loss_mask"][a:b], positions, n, batch)
