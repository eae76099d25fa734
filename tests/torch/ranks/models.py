"""A tiny decoder in float64, whole or cut along PP, CP and TP, and a loop that trains it on the
steps of a client.

Every piece is cut from the same parameters, so what a rank computes can be compared with the
unsplit model to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, gelu

import overlord as ov
from overlord.constructor.rank_views import slice_index
from tests.torch.ranks.meshes import gathered, group_along, same, sum_all, summed

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 40, 8, 2, 4, 64
COLUMNS = ("q", "k", "v", "up")  # cut by columns along tp; "out" and "down" by rows
ROWS = ("out", "down")

Params = dict[str, torch.Tensor]


def parameters(seed: int = 0, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> Params:
    made = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64) * 0.3

    params = {
        "embed": of(vocabulary, WIDTH),
        "position": of(CONTEXT, WIDTH),
        "head": of(WIDTH, vocabulary),
    }
    for i in range(layers):
        sizes = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "out": WIDTH, "up": 2 * WIDTH}
        params |= {f"{i}.{name}": of(WIDTH, size) for name, size in sizes.items()} | {
            f"{i}.down": of(2 * WIDTH, WIDTH)
        }
    return params


@dataclass
class Cut:
    """What one rank has of the model: which stage, which slice, which columns."""

    place: ov.ClientPlaceTree = field(default_factory=ov.ClientPlaceTree)
    rank: int = 0
    split: str = "zigzag"
    layers: int = LAYERS

    def __post_init__(self) -> None:
        self.at = self.place.coords(self.rank)
        here = self.place.world_size > 1
        self.tp, self.cp = (
            group_along(self.place, axis) if here else None for axis in ("tp", "cp")
        )
        self.sums = group_along(self.place, "dp", "cp") if here else None
        per = self.layers // self.place.pp
        self.mine = range(self.at["pp"] * per, (self.at["pp"] + 1) * per)

    @property
    def first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def last(self) -> bool:
        return self.at["pp"] == self.place.pp - 1

    def neighbour(self, by: int) -> int:
        return self.place.rank(**{**self.at, "pp": self.at["pp"] + by})

    def of(self, whole: Params) -> Params:
        """This rank's part of the parameters (or of their gradients)."""
        found = {}
        for name, value in whole.items():
            layer, _, kind = name.partition(".")
            if (name in ("embed", "position") and not self.first) or (
                name == "head" and not self.last
            ):
                continue
            if kind and int(layer) not in self.mine:
                continue
            found[name] = self._piece(kind, value)
        return found

    def _piece(self, kind: str, value: torch.Tensor) -> torch.Tensor:
        if kind not in (*COLUMNS, *ROWS):
            return value
        return value.chunk(self.place.tp, dim=1 if kind in COLUMNS else 0)[
            self.at["tp"]
        ].contiguous()


def embedded(p: Params, mb: Any) -> torch.Tensor:
    return p["embed"][_long(mb["tokens"])] + p["position"][_long(mb["position_ids"])]


def layers_of(p: Params, cut: Cut, mb: Any, x: torch.Tensor) -> torch.Tensor:
    mask = _mask(cut, mb, len(x))
    for i in cut.mine:
        x = x + _attention(p, i, cut, same(_norm(x), cut.tp) if cut.tp else _norm(x), mask)
        h = same(_norm(x), cut.tp) if cut.tp else _norm(x)
        y = gelu(h @ p[f"{i}.up"]) @ p[f"{i}.down"]
        x = x + (summed(y, cut.tp) if cut.tp else y)
    return x


def loss_of(p: Params, x: torch.Tensor, mb: Any, valid: int) -> torch.Tensor:
    logits = _norm(x) @ p["head"]
    return cross_entropy(logits, _long(mb["labels"]), ignore_index=-100, reduction="sum") / valid


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def _mask(cut: Cut, mb: Any, n: int) -> torch.Tensor:
    """[own tokens, tokens of all slices]: the same document, and not later."""
    ends = np.asarray(mb["cu_seqlens_padded"])
    slices = [np.arange(int(ends[-1]))]
    if n != int(ends[-1]):
        slices = [slice_index(ends, cut.place.cp, r, cut.split) for r in range(cut.place.cp)]
    mine, all_ = slices[cut.at["cp"] if len(slices) > 1 else 0], np.concatenate(slices)
    document = np.searchsorted(ends, np.arange(int(ends[-1])), side="right")
    assert len(mine) == n
    seen = (document[mine][:, None] == document[all_][None]) & (mine[:, None] >= all_[None])
    return torch.from_numpy(seen)


def _attention(p: Params, i: int, cut: Cut, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    heads = HEADS // cut.place.tp
    q, k, v = ((x @ p[f"{i}.{name}"]).view(len(x), heads, -1) for name in ("q", "k", "v"))
    if mask.shape[1] != len(x):
        k, v = gathered(k, cut.cp), gathered(v, cut.cp)
    scores = torch.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    y = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1) @ p[f"{i}.out"]
    return summed(y, cut.tp) if cut.tp else y


def _long(array: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=torch.int64)


@dataclass
class Run:
    """What some steps of training did on this rank: gradients over all ranks that share its
    parameters, and the samples of each step.
    """

    grads: list[Params] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[list[str]] = field(
        default_factory=list
    )  # of this rank, in the order of its slots
    params: Params = field(default_factory=dict)


def train(client: Any, cut: Cut, steps: int, *, seed: int = 0, rate: float = 0.1) -> Run:
    """A few steps of plain descent, with a backward for every microbatch; the gradient is summed
    over tokens, never averaged.
    """
    params = {
        name: value.requires_grad_() for name, value in cut.of(parameters(seed, cut.layers)).items()
    }
    done = Run()
    for _ in range(steps):
        step = next(client)
        loss = sum(
            (microbatch(params, cut, mb, step.global_valid_tokens) for mb in step),
            torch.zeros((), dtype=torch.float64),
        )
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()
        }
        if cut.sums is not None:
            sum_all((*grads.values(), loss), cut.sums)
        done.grads.append({name: g.clone() for name, g in grads.items()})
        done.losses.append(float(loss))
        done.samples.append([str(piece.sample) for mb in step for piece in mb.samples])
        with torch.no_grad():
            for name, p in params.items():
                p -= rate * grads[name]
                p.grad = None
    done.params = {name: p.detach() for name, p in params.items()}
    return done


def microbatch(
    params: Params,
    cut: Cut,
    mb: Any,
    valid: int,
    put: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """Forward and backward of one microbatch through all stages; the loss on the last one, else 0.
    ``put``: what is done to embeddings.
    """
    given = put(embedded(params, mb)) if cut.first else _received(cut, -1, mb).requires_grad_()
    x = layers_of(params, cut, mb, given)
    loss = torch.zeros((), dtype=torch.float64)
    if cut.last:
        loss = loss_of(params, x, mb, valid)
        loss.backward()
    else:
        dist.send(x.detach().contiguous(), cut.neighbour(1))
        x.backward(_received(cut, 1, mb))
    if not cut.first:
        assert given.grad is not None
        dist.send(given.grad.contiguous(), cut.neighbour(-1))
    return loss.detach()


def _received(cut: Cut, by: int, mb: Any) -> torch.Tensor:
    n = int(mb["cu_seqlens_padded"][-1]) // (cut.place.cp if cut.split != "none" else 1)
    x = torch.empty(n, WIDTH, dtype=torch.float64)
    dist.recv(x, cut.neighbour(by))
    return x
