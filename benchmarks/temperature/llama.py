"""A Llama of 20M parameters on bytes of real text: Python sources, documentation and licences of the
installed packages.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from temperature.arms import Rates
from temperature.training import Place, Training, kept, rates_of

Found = dict[str, Any]
SUFFIXES = (".py", ".md", ".rst", ".txt")
OUTER = ("embed", "head")
SIZES = {"hidden": 448, "ffn": 1216, "layers": 8, "heads": 7, "context": 512, "batch": 32}
TINY = {"hidden": 32, "ffn": 64, "layers": 2, "heads": 2, "context": 32, "batch": 4}
EVALUATED = 128  # sequences at once
TEXT, HELD = 48 << 20, 1 << 20  # bytes of training text, and each of validation and test


def text_bytes(folder: Path | None, size: int) -> np.ndarray:
    """The first bytes of all text files, in an order that is fixed by their names."""
    roots = [folder] if folder else [Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib")]
    files = sorted({p for root in roots for p in root.rglob("*") if p.suffix in SUFFIXES})
    order = np.random.default_rng(0).permutation(len(files))
    parts, have = [], 0
    for at in order:
        data = np.frombuffer(files[at].read_bytes(), np.uint8)
        parts.append(data)
        have += len(data)
        if have >= size:
            break
    joined = np.concatenate(parts)[:size]
    if len(joined) < size:
        raise SystemExit(f"text: expected {size:,} bytes, got {len(joined):,}; give another --text")
    return joined


@lru_cache(maxsize=1)
def text(folder: Path, source: Path | None, tiny: bool) -> tuple[np.ndarray, str]:
    """Return validation, test and training bytes, with their digest; read once and kept in a file."""
    held, whole = held_and_whole(tiny)
    size = whole + 2 * held
    name = "packages"
    if source is not None:
        name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    found = kept(folder / f"text-{size}-{name}.npz", lambda: {"bytes": text_bytes(source, size)})[
        "bytes"
    ]
    return found, hashlib.sha256(found.tobytes()).hexdigest()[:16]


def held_and_whole(tiny: bool) -> tuple[int, int]:
    return (1 << 14, 1 << 18) if tiny else (HELD, TEXT)


class Block(nn.Module):
    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        hidden, ffn = sizes["hidden"], sizes["ffn"]
        self.heads = sizes["heads"]
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        y, shape = _low(self.norm1(x)), (*x.shape[:2], self.heads, -1)
        q, k, v = (
            p(y).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(x.shape))
        y = _low(self.norm2(x))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _low(x: torch.Tensor) -> torch.Tensor:
    """Cast once for several layers, as autocast would for each."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of channels are complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        hidden, width = sizes["hidden"], sizes["hidden"] // sizes["heads"]
        self.embed = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes["layers"])])
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        angles = torch.outer(
            torch.arange(sizes["context"]), 10_000.0 ** -(torch.arange(0, width, 2) / width)
        )
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        return self.head(self.norm(x))


def prepared(cell: dict[str, Any], place: Place) -> tuple[Training, Rates, Callable[[], Found]]:
    """Return the training of a run, its rates, and what reads its losses afterwards."""
    tiny, device = cell["tiny"], place.device
    sizes, (held, whole) = TINY if tiny else SIZES, held_and_whole(tiny)
    read, digest = text(place.data, place.text, tiny)
    data = torch.from_numpy(read).to(device)
    rows = max(int(whole * cell["fraction"]), 2 * sizes["context"])
    training = data[2 * held : 2 * held + rows]
    torch.manual_seed(cell["seed"])
    model = Llama(sizes).to(device)
    rates = rates_of(cell, model, place, OUTER)
    drawn = torch.Generator().manual_seed(cell["seed"])  # the same batches for all arms of a seed
    window = torch.arange(sizes["context"] + 1, device=device)
    shape = (cell["steps"], sizes["batch"])
    starts = torch.randint(0, len(training) - len(window) + 1, shape, generator=drawn).to(device)
    fit = Training(
        model,
        rates,
        lambda at: _loss(model, training[at[:, None] + window].long()),
        starts,
        every=cell["every"],
        clip=1.0,
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )

    def losses() -> Found:
        return {
            "validation": _mean_loss(model, data[:held], sizes),
            "test": _mean_loss(model, data[held : 2 * held], sizes),
            "parameters": sum(p.numel() for p in model.parameters()),
            "data": digest,
        }

    return fit, rates, losses


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean over bytes, in nats."""
    kind = tokens.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def _mean_loss(model: nn.Module, data: torch.Tensor, sizes: dict[str, int]) -> float:
    length = sizes["context"] + 1
    rows = data[: len(data) // length * length].view(-1, length)
    losses = [_loss(model, part.long()).double() * len(part) for part in rows.split(EVALUATED)]
    return float(torch.stack(losses).sum() / len(rows))
