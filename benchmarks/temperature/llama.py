"""A Llama of 20M parameters on bytes of real text: Python sources, documentation and licences of the
installed packages.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from temperature.arms import Rates

SUFFIXES = (".py", ".md", ".rst", ".txt")
OUTER = ("embed", "head")
SIZES = {"hidden": 448, "ffn": 1216, "layers": 8, "heads": 7, "context": 512, "batch": 32}
TINY = {"hidden": 32, "ffn": 64, "layers": 2, "heads": 2, "context": 32, "batch": 4}
TEXT, HELD = 48 << 20, 2 << 20  # bytes of training text, and each of validation and test


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
        y, shape = self.norm1(x), (*x.shape[:2], self.heads, -1)
        q, k, v = (
            p(y).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


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


def train(
    cell: dict[str, Any], device: torch.device, tiny: bool, text: Path | None
) -> dict[str, Any]:
    """One run; losses are means over bytes, in nats."""
    sizes = TINY if tiny else SIZES
    held, whole = (HELD, TEXT) if not tiny else (1 << 14, 1 << 18)
    read = text_bytes(text, whole + 2 * held)
    data = torch.from_numpy(read).to(device)
    rows = max(int(whole * cell["fraction"]), 2 * sizes["context"])
    validation, test, training = (
        data[:held],
        data[held : 2 * held],
        data[2 * held : 2 * held + rows],
    )
    torch.manual_seed(cell["seed"])
    model = Llama(sizes).to(device)
    steps = cell["steps"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cell["lr"], weight_decay=0.1, betas=(0.9, 0.95)
    )
    rates = Rates(
        cell["arm"],
        model,
        optimizer,
        schedule(optimizer, steps),
        every=cell["every"],
        seed=cell["seed"],
        mean=cell.get("mean", 1.0),
        outer=OUTER,
        min_eigs=8 if tiny else 50,
    )
    drawn = torch.Generator().manual_seed(cell["seed"])  # the same batches for all arms of a seed
    window = torch.arange(sizes["context"] + 1, device=device)
    for _ in range(steps):
        starts = torch.randint(
            0, len(training) - len(window) + 1, (sizes["batch"],), generator=drawn
        ).to(device)
        loss = _loss(model, training[starts[:, None] + window].long(), device)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    return {
        "validation": _mean_loss(model, validation, sizes, device),
        "test": _mean_loss(model, test, sizes, device),
        "mean_multiplier": rates.mean,
        "alphas": rates.alphas,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": hashlib.sha256(read.tobytes()).hexdigest()[:16],
    }


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    warm = max(1, steps // 20)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=warm)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[warm])


def _loss(model: nn.Module, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def _mean_loss(
    model: nn.Module, data: torch.Tensor, sizes: dict[str, int], device: torch.device
) -> float:
    length = sizes["context"] + 1
    rows = data[: len(data) // length * length].view(-1, length)
    batches = rows.split(sizes["batch"])
    losses = [float(_loss(model, rows.long(), device)) * len(rows) for rows in batches]
    return sum(losses) / sum(map(len, batches))
