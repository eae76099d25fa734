"""A small decoder in float64 (rotary positions, grouped queries), and a step of it: in one process
with a plain softmax over whole documents, or on rings and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import overlord.torch as ot
from overlord.torch import hdp
from tests.torch.ranks.hdp_plans import VOCABULARY, Plan, document, microbatches, valid_tokens

WIDTH, HEADS, KV_HEADS, HEAD, LAYERS = 12, 4, 2, 4, 3
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Grads = dict[str, torch.Tensor]


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rates = 100.0 ** -torch.linspace(0, 1, HEAD // 2, dtype=x.dtype)
    angle = positions.to(x.dtype)[:, None, None] * rates
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        h = self.norms[0](x)
        q = rotated(self.q(h).unflatten(-1, (HEADS, HEAD)), positions)
        k, v = self.kv(h).unflatten(-1, (2, KV_HEADS, HEAD)).unbind(1)
        x = x + self.out(attend(q, rotated(k, positions), v).flatten(1))
        return x + self.ffn(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        # DDP broadcasts buffers in forward unless it is told not to.
        self.register_buffer("seen", torch.zeros(1))
        self.double()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return x


def grads_of(model: nn.Module) -> Grads:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


# one process


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole document, by its definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD**0.5
    mask = torch.ones(len(q), len(q)).triu(1).bool()
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(mask, -torch.inf).softmax(-1), v)


def alone(plan: Plan) -> tuple[Grads, float]:
    """Gradients and loss of all documents, in one process without any of the code under test."""
    model, total = Decoder(), 0.0
    for i, n in enumerate(plan.lengths):
        tokens, labels = (torch.from_numpy(x) for x in document(i, n))
        logits = model.head(model(tokens, torch.arange(n), plain))
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss = loss / valid_tokens(plan)
        loss.backward()
        total += loss.item()
    return grads_of(model), total


# rings and stages

Wrap = Callable[[nn.Module], nn.Module]
Around = Callable[[Any], Any]  # a context for the forward of every microbatch


def on_rings(
    plan: Plan,
    *,
    pad: int = 0,
    wrap: Wrap | None = None,
    around: Around = lambda model: nullcontext(),
) -> tuple[Grads, float]:
    """Gradients of this rank's stage, summed over its ranks, and the loss of all. Rank s * columns
    + c is column c of stage s.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    columns = world // plan.stages
    stage, column = divmod(rank, columns)
    peers = [stage * columns + c for c in range(columns)]
    mbs = microbatches(plan, columns, column, pad)
    model, valid = Decoder(), valid_tokens(plan)
    trained = wrap(model) if wrap is not None else model
    with hdp.local_gradients(trained):
        if plan.stages == 1:
            losses = []
            for mb in mbs:
                attend = _attend(hdp.Ring.of(mb))
                with around(model):
                    hidden = trained(mb["tokens"], mb["position_ids"], attend)
                    loss = ot.token_loss(hidden, mb["labels"], valid, head=model.head, chunk=7)
                loss.backward()
                losses.append(loss.detach())
        else:
            losses = _pipeline(plan, model, peers, valid).run(mbs)
    hdp.sum_gradients(_parts(model, plan.stages)[stage], _columns(plan.stages))
    total = torch.tensor(sum(loss.item() for loss in losses), dtype=torch.float64)
    dist.all_reduce(total)
    return grads_of(model), total.item()


def _attend(ring: hdp.Ring) -> Attend:
    return lambda q, k, v: hdp.ring_attention(q, k, v, ring)


def _parts(model: Decoder, stages: int) -> list[list[nn.Parameter]]:
    """The parameters of every stage."""
    per = LAYERS // stages + (LAYERS % stages > 0)
    parts = [list(model.layers[s * per : (s + 1) * per].parameters()) for s in range(stages)]
    parts[0] = [*model.embed.parameters(), *parts[0]]
    parts[-1] += model.head.parameters()
    return parts


@cache
def _columns(stages: int) -> Any:
    """The ranks of this rank's stage: made once, since all ranks must make all groups."""
    columns = dist.get_world_size() // stages
    made = [dist.new_group(range(s * columns, (s + 1) * columns)) for s in range(stages)]
    return made[dist.get_rank() // columns]


def _pipeline(plan: Plan, model: Decoder, peers: Sequence[int], valid: int) -> hdp.Pipeline:
    columns, rank = len(peers), dist.get_rank()
    number, per = rank // columns, LAYERS // plan.stages + (LAYERS % plan.stages > 0)

    def forward(mb: Any, x: torch.Tensor | None) -> torch.Tensor:
        attend = _attend(hdp.Ring.of(mb, peers=peers))
        x = model.embed(mb["tokens"]) if x is None else x
        for layer in model.layers[number * per : (number + 1) * per]:
            x = layer(x, mb["position_ids"], attend)
        if number < plan.stages - 1:
            return x
        return ot.token_loss(x, mb["labels"], valid, head=model.head, chunk=7)

    stage = hdp.Stage(
        number=number, count=plan.stages, previous=rank - columns, following=rank + columns
    )
    return hdp.Pipeline(stage, forward, lambda mb: (len(mb["tokens"]), WIDTH), dtype=torch.float64)


def check_plan(plan: Plan, wanted: tuple[Grads, float] | None = None, **options: Any) -> Grads:
    """Compare a plan with one process; return the gradients of this rank's stage."""
    grads, loss = wanted if wanted is not None else alone(plan)
    found, total = on_rings(plan, **options)
    columns = dist.get_world_size() // plan.stages
    model = Decoder()
    mine = {id(p) for p in _parts(model, plan.stages)[dist.get_rank() // columns]}
    names = [name for name, p in model.named_parameters() if id(p) in mine]
    for name in names:
        scale = max(1e-3, float(grads[name].abs().max()))
        error = float((found[name] - grads[name]).abs().max()) / scale
        assert error < 1e-11, f"{plan}: gradient of {name} differs by {error:.3g}"
    assert abs(total - loss) < 1e-11 * max(1.0, abs(loss)), f"{plan}: loss {total}, not {loss}"
    return {name: found[name] for name in names}
