"""A tiny vision model on rings: pixels and pieces come from ``ot.join``, rows by one exchange a step.

Gradients of encoder and decoder equal one process with whole documents to 1e-11, in float64.
"""

from __future__ import annotations

import functools
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import overlord as ov
import overlord.torch as ot
from overlord.planning.strategies import hdp
from overlord.torch import hdp as rings
from tests.images import IMAGES, PLACEHOLDER, picture
from tests.torch.ranks.hdp_decoder import WIDTH, Decoder, Grads, grads_of, plain
from tests.torch.ranks.hdp_plans import VOCABULARY
from tests.worlds import Rows

CONTEXT, STEPS, LONGEST, MERGED, TOLERANCE = 24, 3, 72, 4, 1e-11
MARK = 8  # a token of the text that an image replaces


class Vision(nn.Module):
    """The decoder, and an encoder that makes a row of four patches."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.patch = nn.Linear(3 * IMAGES["patch"] ** 2, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.double()

    def encoded(self, maps: Any) -> torch.Tensor:
        pixels = torch.tensor(np.asarray(maps["pixel_values"]), dtype=torch.float64)
        return self.out(torch.tanh(self.patch(pixels)).view(-1, MERGED, WIDTH).mean(1))

    def embedded(self, tokens: torch.Tensor, rows: torch.Tensor, index: Any) -> torch.Tensor:
        return ot.place_rows(self.decoder.embed(tokens), rows, index)

    def hidden(self, x: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        for layer in self.decoder.layers:
            x = layer(x, positions, attend)
        return x


@functools.cache
def documents() -> list[dict[str, Any]]:
    """Texts of none to three images among other tokens; some are longer than a rank."""
    rng, rows = random.Random(4), []
    for i in range(60):
        words = [rng.randrange(MARK + 1, VOCABULARY) for _ in range(rng.choice((2, 9, 30)))]
        n = rng.choice((0, 0, 1, 1, 2, 3))
        for _ in range(n):
            words.insert(rng.randrange(len(words) + 1), MARK)
        rows.append({"tokens": words, "images": [picture(10 * i + k) for k in range(n)]})
    return rows


def job(place: ov.Mesh, strategy: Any, **changes: Any) -> ov.Job:
    images = ov.Images("images", **{**IMAGES, "max_pixels": 80 * 48}, at="marker", marker=MARK)
    source = ov.Source("seen", Rows(documents()), transforms=[ov.Tokens(), images])
    settings: dict[str, Any] = {
        "name": "seen",
        "sources": [source],
        "place": place,
        "batch": ov.Batch(samples=7, context=CONTEXT),
        "strategy": strategy,
        "seed": 5,
        "until": STEPS,
        "max_document": min(LONGEST, CONTEXT * place.dp * place.cp),
    }
    return ov.Job(**{**settings, **changes})


@functools.cache
def alone(longest: int) -> list[tuple[Grads, float, int]]:
    """Gradients, loss and images of every step in one process, from whole documents."""
    batch = ov.Batch(samples=7, context=longest)
    found = []
    with ov.launch(job(ov.Mesh(), "packed", batch=batch, max_document=None)) as session:
        for step in session.client(0):
            model, total, images = Vision(), 0.0, 0
            for mb, maps in zip(step, step.encoder, strict=True):
                rows = model.encoded(maps)[maps["send_rows"]][maps["recv_rows"]]
                x = model.embedded(tensor(mb["tokens"]), rows, maps["image_token_index"])
                images += len(maps["item_ids"])
                loss = torch.zeros((), dtype=torch.float64)
                for a, b in pairwise(mb["cu_seqlens_padded"].tolist()):
                    hidden = model.hidden(x[a:b], torch.arange(b - a), plain)
                    logits, labels = model.decoder.head(hidden), tensor(mb["labels"][a:b])
                    loss = loss + nn.functional.cross_entropy(
                        logits, labels, ignore_index=-100, reduction="sum"
                    )
                loss = loss / step.global_valid_tokens
                loss.backward()
                total += loss.item()
            found.append((grads_of(model), total, images))
    assert len(found) == STEPS
    return found


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def train(made: ov.Job) -> None:
    """Train on a job, and compare every step; some image must be cut between ranks."""
    wanted, cut = alone(made.document_limit), 0
    with ot.join(made, stall_limit_s=30.0) as client:
        for step, (grads, loss, images) in zip(client, wanted, strict=True):
            model, total = Vision(), torch.zeros((), dtype=torch.float64)
            [maps] = step.encoder
            exchange = ot.Exchange(model.encoded(maps), maps)
            seen = torch.tensor([len(maps["item_ids"]), len(maps["out_lens"])])
            for m, mb in enumerate(step):
                around = rings.Ring.of(mb)
                rows, index = exchange.microbatch(m)
                assert (mb["tokens"][index] == PLACEHOLDER).all()
                assert (mb["tokens"] == PLACEHOLDER).sum() == len(index)
                hidden = model.hidden(
                    model.embedded(tensor(mb["tokens"]), rows, index),
                    tensor(mb["position_ids"]),
                    functools.partial(rings.ring_attention, ring=around),
                )
                piece = ot.token_loss(
                    hidden, tensor(mb["labels"]), step.global_valid_tokens, head=model.decoder.head
                )
                piece.backward()
                total += piece.detach()
            exchange.backward()
            rings.sum_gradients(model)
            dist.all_reduce(total)
            dist.all_reduce(seen)
            assert seen[0] == images > 0, "every image is encoded once"
            cut += int(seen[1]) - images
            for name, found in grads_of(model).items():
                scale = max(1e-3, float(grads[name].abs().max()))
                error = float((found - grads[name]).abs().max()) / scale
                assert error < TOLERANCE, f"{made}: gradient of {name} differs by {error:.3g}"
                assert float(grads[name].abs().max()) > 1e-9 or "seen" in name
            assert abs(total.item() - loss) < TOLERANCE * max(1.0, abs(loss))
    assert cut > 0 or dist.get_world_size() == 1, "no image was cut between ranks"


def images_on_any_ring(out: Path) -> None:
    train(job(ov.Mesh(dp=dist.get_world_size()), "hdp_balance", sync="step"))


def images_on_padded_rings_of_powers_of_two(out: Path) -> None:
    world = dist.get_world_size()
    cp = 2 if world % 2 == 0 else 1
    train(job(ov.Mesh(dp=world // cp, cp=cp), hdp(groups="power_of_two")))


CHECKS: dict[str, Any] = {
    check.__name__: check for check in (images_on_any_ring, images_on_padded_rings_of_powers_of_two)
}
