"""Mesh and Batch: the ranks by kind of parallelism, and the form of one global step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from os import environ
from typing import Any

import numpy as np

from overlord.batch_ramp import Ramp
from overlord.batch_rules import packing_problems, size_problems
from overlord.checks import is_int, names_arguments, one_of
from overlord.errors import JobError
from overlord.mesh_text import branches, ranks_text

# ----------------------------------------------------------------------------
# Mesh: the ranks of the trainer, arranged by kind of parallelism.
#
# Ranks are numbered with the outermost axis slowest. ``order`` names the axes from outermost to
# innermost, as a torch DeviceMesh does. The default is Megatron's: tp runs fastest, then cp, dp
# and pp. A *bucket* is a group of ranks that consumes the same microbatches. A *fetcher* is a
# rank that takes them from the loader, for itself and for the ranks to which the trainer
# broadcasts.

AXES = ("pp", "dp", "cp", "tp")
BUCKET_AXES = {"DP": ("dp",), "CP": ("dp", "cp"), "WORLD": AXES, "PP": ("pp",), "TP": ("tp",)}
# axes of a broadcast, as `broadcast_at` names them
BROADCASTS = ("TP", "CP", "PP", "DP")
MESH_DIMS = {axis: axis for axis in AXES} | dict.fromkeys(
    ("dp_replicate", "dp_shard", "ddp", "fsdp", "batch"), "dp"
)


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mesh:
    """Degrees of pipeline, data, context and tensor parallelism, and the order of ranks.

    Arguments
    ---------
    pp, dp, cp, tp: number of pipeline stages, data-parallel replicas, context-parallel ranks and
        tensor-parallel ranks. Default: 1 each.
    order: the axes from outermost to innermost. Default: ("pp", "dp", "cp", "tp"), as in Megatron.
    first_rank: the lowest rank. Default: 0. Only the mesh of one module may start at another rank:
        ``distribute(axis, on=ov.Mesh(dp=2, first_rank=2))`` is on ranks 2 and 3 of the job's mesh.
    vpp: model chunks of each pipeline stage (virtual stages). Default: 1. With more, every step has
        a multiple of pp microbatches, which the interleaved schedule needs.

    Arrays by rank have one entry for each rank of the mesh, from ``first_rank`` on.

    ``ov.ClientPlaceTree``, the name of the paper, is the same class.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    first_rank: int = 0
    vpp: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"place.{name}: expected a whole number of at least {least}, got {value!r}"
            for name, least in (*((axis, 1) for axis in (*AXES, "vpp")), ("first_rank", 0))
            for value in [getattr(self, name)]
            if not isinstance(value, int) or isinstance(value, bool) or value < least
        ]
        if not isinstance(self.order, (list, tuple)) or sorted(map(str, self.order)) != sorted(
            AXES
        ):
            problems.append(
                f"place.order: expected each of {', '.join(AXES)} once, got {self.order!r}"
            )
        if not problems and self.vpp > 1 and self.pp == 1:
            problems.append(f"place.vpp: expected 1 for pp=1, without stages, got {self.vpp}")
        if problems:
            raise JobError(problems, "place")
        object.__setattr__(self, "order", tuple(self.order))

    @staticmethod
    def from_device_mesh(mesh: Any) -> Mesh:
        """Return the mesh of a torch ``DeviceMesh`` with dimensions named pp, dp, cp, tp.

        torch is not imported.

        ``dp_replicate``, ``dp_shard``, ``ddp``, ``fsdp`` and ``batch`` are folded into dp, the
        outer one slowest. An ``fsdp`` that also shards over context parallelism (torchtitan's)
        hides it: pass a mesh with a dimension for cp. The order of ranks comes from ``mesh.mesh``
        if it exists, else from the order of the dimensions. Raise ``JobError`` for other dimension
        names, for ranks in another order, and for a mesh that lacks ranks of the job.
        """
        names, ranks = _mesh_of(mesh)
        axes = [MESH_DIMS[name] for name in names]
        degrees = {
            a: math.prod(n for n, axis in zip(ranks.shape, axes, strict=True) if axis == a)
            for a in AXES
        }
        by_axis = ranks.transpose(
            [i for a in AXES for i, axis in enumerate(axes) if axis == a]
        ).reshape([degrees[a] for a in AXES])
        for order in permutations(AXES):  # the default first: a mesh of one axis fits any order
            tree = Mesh(**degrees, order=order)
            if np.array_equal(by_axis, tree.grid()):
                return tree
        raise JobError(
            [
                f"expected ranks 0 to {ranks.size - 1} in an order of pp, dp, cp, tp, got another "
                f"order in {dict(zip(names, ranks.shape, strict=True))}; "
                "pass a mesh in row-major order, with adjacent dp dimensions"
            ],
            "from_device_mesh",
        )

    @staticmethod
    def from_env(env: Mapping[str, str] | None = None, *, world_size: int | None = None) -> Mesh:
        """Return the mesh of a job that torchrun started, from the environment.

        The variables are ``WORLD_SIZE``, and ``OVERLORD_PP``, ``OVERLORD_CP``, ``OVERLORD_TP``
        (default 1).

        dp is the rest of the world size; ``OVERLORD_DP`` may set it, and must then agree.
        ``OVERLORD_ORDER`` names the axes from outermost to innermost, as in ``pp-dp-cp-tp``.
        Without ``WORLD_SIZE`` the world size is the product of the degrees. Process groups are not
        read. If the launcher sets no ``WORLD_SIZE`` (``mp.spawn``, Lightning), pass ``world_size``.
        """
        env = environ if env is None else env
        if world_size is not None:
            env = _of_world(env, world_size)
        names = {"WORLD_SIZE": "", **{f"OVERLORD_{axis.upper()}": axis for axis in AXES}}
        given = {name: text for name in names if (text := str(env.get(name, "")).strip())}
        wrong = [
            f"{name}: expected a whole number of at least 1, got {v!r}"
            for name, v in given.items()
            if not v.isdecimal() or not int(v)
        ]
        if wrong:
            raise JobError(wrong, "from_env")
        degrees = {names[name]: int(value) for name, value in given.items()}
        world, left = degrees.pop("", None), math.prod(degrees.values())
        if world is not None and (world % left or ("dp" in degrees and world != left)):
            given_text = " x ".join(
                f"{name}={value}" for name, value in given.items() if name != "WORLD_SIZE"
            )
            raise JobError(
                [
                    f"WORLD_SIZE: expected {'' if 'dp' in degrees else 'a multiple of '}"
                    f"{given_text}, got {world}; change one of them"
                ],
                "from_env",
            )
        if world is not None:
            degrees.setdefault("dp", world // left)
        order = env.get("OVERLORD_ORDER", "").strip()
        return Mesh(**degrees, order=tuple(order.split("-")) if order else AXES)

    # Changes: a mesh is immutable, so each method returns a new one.

    def replace(self, **degrees: Any) -> Mesh:
        """Return the mesh with other degrees (``dp=4``), ``order``, ``first_rank`` or ``vpp``."""
        known = (*AXES, "order", "first_rank", "vpp")
        if unknown := [name for name in degrees if name not in known]:
            raise JobError([f"expected one of {', '.join(known)}, got {unknown[0]!r}"], "place")
        return replace(self, **degrees)

    def add_replicas(self, n: int = 1) -> Mesh:
        """Return the mesh with n more data-parallel replicas; its ranks are numbered anew."""
        return self._with_replicas(n, 1, "add_replicas")

    def remove_replicas(self, n: int = 1) -> Mesh:
        """Return the mesh with n fewer data-parallel replicas; its ranks are numbered anew.

        Raise ``JobError`` if no replica would remain.
        """
        return self._with_replicas(n, -1, "remove_replicas")

    def _with_replicas(self, n: int, sign: int, what: str) -> Mesh:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise JobError([f"expected a whole number of at least 0, got {n!r}"], what)
        if (dp := self.dp + sign * n) < 1:
            raise JobError(
                [f"expected at most {self.dp - 1} of the {self.dp} replicas of {self}, got {n}"],
                what,
            )
        return replace(self, dp=dp)

    # Ranks and coordinates.

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def count_multiple(self) -> int:
        """The number of which the microbatches of a step are a multiple: pp, if vpp is above 1."""
        return self.pp if self.vpp > 1 else 1

    def microbatch_count(self, least: int) -> int:
        """Return the smallest valid number of microbatches of at least ``least``."""
        return -(-least // self.count_multiple) * self.count_multiple

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in self.order)

    def grid(self) -> np.ndarray:
        """Return the ranks as an array with the axes [pp, dp, cp, tp]."""
        return (
            np.arange(self.first_rank, self.first_rank + self.world_size)
            .reshape(self._shape)
            .transpose([self.order.index(axis) for axis in AXES])
        )

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis; raise ``JobError`` for an invalid rank."""
        if problem := self.rank_problem(rank):
            raise JobError([problem], "place")
        at = np.unravel_index(rank - self.first_rank, self._shape)
        return {axis: int(i) for axis, i in zip(self.order, at, strict=True)}

    def along(self, axis: str) -> np.ndarray:
        """Return the coordinate of every rank on one axis: int64 [world_size]."""
        return np.unravel_index(np.arange(self.world_size), self._shape)[self.order.index(axis)]

    def rank_problem(self, rank: Any) -> str:
        """Return the problem of a rank number, as text; "" if it is valid."""
        if not isinstance(rank, (int, np.integer)):
            return f"expected a rank as a whole number, got {rank!r}"
        return (
            ""
            if _inside(rank - self.first_rank, self.world_size)
            else f"expected a rank from {self.first_rank} to "
            f"{self.first_rank + self.world_size - 1} of {self}, got {rank}"
        )

    def rank(self, **at: int) -> int:
        """Return the rank at these coordinates (default 0 each): the inverse of ``coords``."""
        wrong = [
            f"expected coordinates inside {self}, got {axis}={i!r}"
            for axis, i in at.items()
            if axis not in AXES or not _inside(i, getattr(self, axis))
        ]
        if wrong:
            raise JobError(wrong, "place")
        place = np.ravel_multi_index([at.get(axis, 0) for axis in self.order], self._shape)
        return self.first_rank + int(place)

    # Buckets.

    def buckets(self, axis: str = "DP") -> list[list[int]]:
        """Return the ranks of each bucket.

        ``DP``: one bucket per replica. ``CP``: every (dp, cp) pair. ``WORLD``: every rank, in rank
        order. ``PP`` and ``TP``: every stage, every tensor-parallel coordinate.
        """
        n = self.n_buckets(axis)
        if axis == "WORLD":
            return [[rank] for rank in range(self.first_rank, self.first_rank + n)]
        inner = [a for a in self.order if a not in BUCKET_AXES[axis]]
        moved = self.grid().transpose([AXES.index(a) for a in (*BUCKET_AXES[axis], *inner)])
        return moved.reshape(n, -1).tolist()

    def n_buckets(self, axis: str = "DP") -> int:
        """Return the number of buckets along an axis, without listing ranks."""
        if not isinstance(axis, str) or axis not in BUCKET_AXES:
            raise JobError([f"expected an axis of {', '.join(BUCKET_AXES)}, got {axis!r}"], "place")
        return math.prod(getattr(self, a) for a in BUCKET_AXES[axis])

    def bucket_of(self, axis: str = "DP") -> np.ndarray:
        """Return the bucket of every rank: int64 [world_size]."""
        buckets = np.array(self.buckets(axis)) - self.first_rank
        found = np.empty(self.world_size, np.int64)
        found[buckets] = np.arange(len(buckets))[:, None]
        return found

    # Fetchers.

    def served_by(self, broadcast: str | Sequence[str] = ()) -> np.ndarray:
        """Return the rank that fetches for each rank, which may be itself: int64 [world_size].

        The trainer broadcasts along these axes (``TP``, ``CP``, ``PP``, ``DP``; nested, in any
        order), from coordinate 0.
        """
        grid = self.grid()
        dims = {dim.lower() for dim in broadcast_dims(broadcast)}
        first = grid[tuple(slice(0, 1) if axis in dims else slice(None) for axis in AXES)]
        served = np.empty(self.world_size, np.int64)
        served[grid.ravel() - self.first_rank] = np.broadcast_to(first, grid.shape).ravel()
        return served

    def fetchers(self, broadcast: str | Sequence[str] = ()) -> list[int]:
        """Return the ranks that fetch when the trainer broadcasts along these axes."""
        served = self.served_by(broadcast)
        ranks = np.arange(self.first_rank, self.first_rank + len(served))
        return ranks[served == ranks].tolist()

    def seats(self, axis: str = "DP", broadcast: str | Sequence[str] = ()) -> np.ndarray:
        """Return the rank whose step queue serves each rank: int64 [world_size].

        It is the lowest rank of its bucket that has the same fetcher: the fetcher itself, unless
        the trainer broadcasts across buckets. Then the fetcher opens a client for each bucket.
        """
        served = self.served_by(broadcast) - self.first_rank
        group = self.bucket_of(axis) * self.world_size + served
        _, lowest, number = np.unique(group, return_index=True, return_inverse=True)
        return self.first_rank + lowest[number].astype(np.int64, copy=False)

    # Text.

    def __repr__(self) -> str:
        """Return the arguments under the class name of the paper: journals compare this text."""
        names = (*AXES, "order", *(("first_rank",) if self.first_rank else ()))
        names = (*names, *(("vpp",) if self.vpp > 1 else ()))
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"ClientPlaceTree({given})"

    def __format__(self, spec: str) -> str:
        """Return one line for messages, as in ``f"{mesh}"``; ``print(mesh)`` draws a tree."""
        first = f" from rank {self.first_rank}" if self.first_rank else ""
        degrees = "x".join(f"{axis}{getattr(self, axis)}" for axis in self.order)
        return format(degrees + first, spec)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Return a drawing with the ranks of every branch, shortened if there are many."""
        axes = [axis for axis in self.order if getattr(self, axis) > 1] or [self.order[-1]]
        ranks = np.arange(self.first_rank, self.first_rank + self.world_size)
        grid = ranks.reshape([getattr(self, axis) for axis in axes])
        count = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return "\n".join([f"{self}: {count}", *branches(axes, grid)])


ClientPlaceTree = Mesh  # the name of the paper


def _inside(i: Any, n: int) -> bool:
    return isinstance(i, (int, np.integer)) and 0 <= int(i) < n


def broadcast_dims(broadcast: str | Sequence[str]) -> tuple[str, ...]:
    """Return the axes of a broadcast, each once, in the order of ``BROADCASTS``.

    Raise ``JobError`` for an unknown axis.
    """
    dims = (
        tuple(broadcast)
        if isinstance(broadcast, Iterable) and not isinstance(broadcast, str)
        else (broadcast,)
    )
    unknown = [dim for dim in dims if dim not in BROADCASTS]
    if unknown:
        raise JobError(
            [f"expected broadcast axes of {', '.join(BROADCASTS)}, got {unknown[0]!r}"], "place"
        )
    return tuple(dim for dim in BROADCASTS if dim in dims)


def _of_world(env: Mapping[str, str], world_size: int) -> Mapping[str, str]:
    """Return the environment with ``WORLD_SIZE``; raise ``JobError`` if it has another value."""
    given_text = str(env.get("WORLD_SIZE", "")).strip()
    if given_text not in ("", str(world_size)):
        raise JobError(
            [
                f"world_size: expected WORLD_SIZE={given_text} of the environment, got "
                f"{world_size}; omit world_size"
            ],
            "from_env",
        )
    return {**env, "WORLD_SIZE": str(world_size)}


def _mesh_of(mesh: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the dimension names of a device mesh, and its ranks as an array.

    Raise ``JobError`` for missing, repeated or unknown names, and if it lacks ranks of the job.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise JobError(
            [
                "expected a mesh with names of its dimensions, got none; set mesh_dim_names, of "
                f"{', '.join(MESH_DIMS)}"
            ],
            "from_device_mesh",
        )
    unknown = [str(name) for name in names if name not in MESH_DIMS]
    if unknown:
        raise JobError(
            [f"expected mesh dimensions of {', '.join(MESH_DIMS)}, got {unknown[0]!r}"],
            "from_device_mesh",
        )
    if getattr(mesh, "mesh", None) is not None:
        ranks = np.asarray(mesh.mesh)
    else:
        shape = (
            tuple(mesh.shape)
            if hasattr(mesh, "shape")
            else tuple(mesh.size(i) for i in range(len(names)))
        )
        ranks = np.arange(math.prod(shape)).reshape(shape)
    if ranks.ndim != len(names) or len(set(names)) != len(names):
        raise JobError(
            [f"expected one name per dimension of {ranks.shape}, got {tuple(names)}"],
            "from_device_mesh",
        )
    if not np.array_equal(np.sort(ranks, axis=None), np.arange(ranks.size)):
        raise JobError(
            [
                f"expected the mesh of the whole job, ranks 0 to {ranks.size - 1}, got "
                f"ranks {ranks_text(ranks.ravel())}"
            ],
            "from_device_mesh",
        )
    return tuple(names), ranks


# ----------------------------------------------------------------------------
# Batch: the size and form of one global step, frozen and validated.

LAYOUTS = ("packed", "padded")


LABELS = ("shifted", "unshifted")


CP_SPLITS = ("zigzag", "zigzag_whole", "contiguous", "none")


PACKINGS = ("documents", "concat")


SHAPES = ("free", "fixed")


# fields of a Batch that decide how a step is sliced for the mesh, not which samples form it
NOT_THE_STREAM = ("cp_split", "sequence_parallel")
# fields that fingerprints contain only where they differ from their defaults
LATER_FIELDS = ("packing", "shape", "max_documents")
SIZES = ("samples", "tokens")  # fields of a Batch that may be ramps


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The size and form of one global step; its size is in ``samples`` or in ``tokens``.

    Arguments
    ---------
    samples: number of samples in a step, or a ramp (``ov.schedule.linear(64, 256, steps=1000)``);
        with packing="concat" the number of chunks. Default None: the size is given in ``tokens``.
    tokens: approximate number of tokens in a step, or a ramp; weights are then shares of tokens,
        not of samples. With packing="concat" the exact number, a multiple of ``context``. Default
        None: the size is given in ``samples``.
    microbatches: least number of microbatches per rank and step; a step that does not fit has
        more. Default 1.
    context: tokens of one microbatch of one bucket, before context-parallel slicing; also the
        length of the longest sample, unless ``Job.max_document`` is given. Required.
    layout: "packed" (documents one after another) or "padded" (one document per row). Default
        "packed".
    pad_multiple: every document is padded to a multiple of this many tokens, and ``context`` must
        be a multiple of it. Default 1: no padding.
    pad_id: token id of the padding. Default 0.
    labels: "shifted" (labels[i] is the token after i) or "unshifted". Default "shifted".
    cp_split: slicing of a microbatch over context-parallel ranks: "zigzag", "zigzag_whole",
        "contiguous" or "none" (every rank gets all of it). Not in the fingerprint. Default
        "zigzag".
    sequence_parallel: whether documents are padded so that tensor-parallel ranks can slice the
        sequence, too. Not in the fingerprint. Default False.
    packing: "documents" (whole samples fill a microbatch) or "concat" (the samples of a step are
        one stream of tokens, cut into chunks of ``context`` tokens, one for each microbatch).
        Default "documents".
    shape: "free", or "fixed": the arrays of every microbatch of every rank and step have the same
        shapes, and every step has the same number of microbatches. Default "free".
    max_documents: documents of a microbatch with shape="fixed", to which the arrays by document are
        padded. Default None: ``context``, which always suffices.
    """

    samples: Any = None  # a whole number or a Ramp; the batch of a step (``at``) has no ramps
    tokens: Any = None
    microbatches: int = 1
    context: int = 0
    layout: str = "packed"
    pad_multiple: int = 1
    pad_id: int = 0
    labels: str = "shifted"
    cp_split: str = "zigzag"
    sequence_parallel: bool = False
    packing: str = "documents"
    shape: str = "free"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise JobError(problems, "batch")

    def document_multiple(self, place: Mesh) -> int:
        """Return the number of tokens to a multiple of which every document is padded.

        The batch, context parallelism and sequence parallelism determine it. Pieces of a chunk are
        not padded.
        """
        return 1 if self.in_chunks else self.context_multiple(place)

    def context_multiple(self, place: Mesh) -> int:
        """Return the number of tokens of which ``context`` must be a multiple on a mesh."""
        pieces = (
            {"none": 1, "contiguous": place.cp}.get(self.cp_split, 2 * place.cp)
            if place.cp > 1
            else 1
        )
        return self.pad_multiple * pieces * (place.tp if self.sequence_parallel else 1)

    def at(self, step: int) -> Batch:
        """Return the batch of a step: itself, or a copy with the numbers of its ramps."""
        sizes: Any = {n: r.at(step) for n in SIZES if isinstance(r := getattr(self, n), Ramp)}
        return replace(self, **sizes) if sizes else self

    @property
    def in_chunks(self) -> bool:
        """Whether samples are cut into chunks of ``context`` tokens."""
        return self.packing == "concat"

    @property
    def mixes_tokens(self) -> bool:
        """Whether weights are shares of tokens, not of samples."""
        return self.in_chunks or self.tokens is not None

    @property
    def fixed(self) -> bool:
        """Whether all microbatches have the same shapes."""
        return self.shape == "fixed"

    @property
    def pads(self) -> bool:
        """Whether every microbatch has exactly ``context`` tokens, padding included."""
        return self.in_chunks or self.fixed

    @property
    def chunks(self) -> int:
        """The number of chunks of a step with packing="concat"."""
        return int(self.samples or (self.tokens or 0) // self.context)

    @property
    def tokens_of_chunks(self) -> int:
        """The tokens of a step with packing="concat"; 0 with packing="documents"."""
        return self.chunks * self.context if self.in_chunks else 0

    def least_microbatches(self, buckets: int) -> int:
        """Return the least number of microbatches of a step; with shape="fixed" the number."""
        chunks = -(-self.chunks // buckets) if self.in_chunks and self.fixed else 1
        return max(self.microbatches, chunks)

    @property
    def defers(self) -> bool:
        """Whether samples that do not fit wait for a later step, whatever ``Job.overflow`` is."""
        return self.fixed and not self.in_chunks

    @property
    def documents(self) -> int:
        """The length of arrays by document with shape="fixed"."""
        return self.max_documents or self.context

    def problems(self) -> list[str]:
        """Return every problem of the fields, as text."""
        found = size_problems(self)
        for name, least in (
            ("microbatches", 1),
            ("context", 1),
            ("pad_multiple", 1),
            ("pad_id", 0),
        ):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                found.append(
                    f"batch.{name}: expected a whole number of at least {least}, got {value!r}"
                )
        found += one_of("batch.layout", self.layout, LAYOUTS) + one_of(
            "batch.labels", self.labels, LABELS
        )
        found += one_of("batch.cp_split", self.cp_split, CP_SPLITS)
        if not isinstance(self.sequence_parallel, bool):
            found.append(
                f"batch.sequence_parallel: expected true or false, got {self.sequence_parallel!r}"
            )
        found += one_of("batch.packing", self.packing, PACKINGS)
        found += one_of("batch.shape", self.shape, SHAPES)
        if not found:
            found += packing_problems(self)
        if not found and self.context % self.pad_multiple:
            found.append(
                f"batch.context: expected a multiple of pad_multiple={self.pad_multiple}, "
                f"got {self.context}"
            )
        return found
