"""A Fourier neural operator on Burgers' equation, with data from a spectral solver in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from temperature.arms import Rates
from temperature.training import Place, Training, kept, rates_of

Found = dict[str, Any]

TRAIN, HELD = 1000, 200  # samples of training, and each of validation and test
POINTS, VISCOSITY, END = 128, 0.01, 1.0
SIZES = {"width": 64, "modes": 16, "layers": 4, "batch": 20}
TINY = {"width": 12, "modes": 6, "layers": 2, "batch": 4}
OUTER = ("lift", "project")


def initial(count: int, points: int, seed: int) -> np.ndarray:
    """Gaussian random fields with a decaying spectrum, periodic on [0, 1)."""
    rng = np.random.default_rng(seed)
    modes = np.fft.rfftfreq(points, 1 / points)
    decay = 49.0 * ((2 * np.pi * modes) ** 2 + 49.0) ** -1.25
    noise = rng.standard_normal((count, len(modes), 2)) @ np.array([1, 1j])
    noise[:, 0] = 0
    return np.fft.irfft(noise * decay * points, points)


def solved(
    u: np.ndarray, viscosity: float = VISCOSITY, end: float = END, steps: int = 1000
) -> np.ndarray:
    """u_t + u u_x = viscosity u_xx until ``end``: exact diffusion, fourth-order steps for the rest."""
    points = u.shape[-1]
    modes = 2 * np.pi * np.fft.rfftfreq(points, 1 / points)
    dt = end / steps
    kept = np.arange(len(modes)) <= points // 3  # no aliasing of the square
    half, whole = np.exp(-viscosity * modes**2 * dt / 2), np.exp(-viscosity * modes**2 * dt)

    def slope(v: np.ndarray) -> np.ndarray:
        return -0.5j * modes * kept * np.fft.rfft(np.fft.irfft(v, points) ** 2)

    v = np.fft.rfft(u)
    for _ in range(steps):
        a = slope(v)
        b = slope(half * (v + dt / 2 * a))
        c = slope(half * v + dt / 2 * b)
        d = slope(whole * v + dt * half * c)
        v = whole * v + dt / 6 * (whole * a + 2 * half * (b + c) + d)
    return np.fft.irfft(v, points)


def dataset(folder: Path, tiny: bool) -> tuple[np.ndarray, np.ndarray]:
    """Initial and final states: validation, test, then training; made once and kept."""
    count = (TRAIN if not tiny else 40) + 2 * (HELD if not tiny else 8)
    points, steps = (POINTS, 1000) if not tiny else (32, 400)

    def make() -> dict[str, np.ndarray]:
        start = initial(count, points, 0)
        return {"start": start, "end": solved(start, steps=steps)}

    found = kept(folder / f"burgers-{count}-{points}.npz", make)
    return found["start"], found["end"]


class Spectral(nn.Module):
    def __init__(self, width: int, modes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(x)
        kept = torch.einsum("bik,iok->bok", found[..., : self.weight.shape[-1]], self.weight)
        return torch.fft.irfft(kept, n=x.shape[-1])


class Layer(nn.Module):
    def __init__(self, width: int, modes: int):
        super().__init__()
        self.spectral, self.skip = Spectral(width, modes), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.spectral(x) + self.skip(x))


class Operator(nn.Module):
    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        width = sizes["width"]
        self.lift = nn.Conv1d(2, width, 1)
        self.layers = nn.ModuleList([Layer(width, sizes["modes"]) for _ in range(sizes["layers"])])
        self.project = nn.Sequential(nn.Conv1d(width, 128, 1), nn.GELU(), nn.Conv1d(128, 1, 1))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        place = torch.linspace(0, 1, u.shape[-1], device=u.device).expand_as(u)
        x = self.lift(torch.stack([u, place], dim=1))
        for layer in self.layers:
            x = layer(x)
        return self.project(x)[:, 0]


def prepared(cell: dict[str, Any], place: Place) -> tuple[Training, Rates, Callable[[], Found]]:
    """Return the training of a run, its rates, and what reads its errors afterwards."""
    sizes, held = (TINY, 8) if cell["tiny"] else (SIZES, HELD)
    arrays = dataset(place.data, cell["tiny"])
    start, end = (torch.from_numpy(a).float().to(place.device) for a in arrays)
    whole = len(start) - 2 * held
    count = max(2, round(whole * cell["fraction"]))
    drawn = torch.Generator().manual_seed(cell["seed"])
    # another subset for every seed; the same one, and the same batches, for all arms of a seed
    chosen = 2 * held + torch.randperm(whole, generator=drawn)[:count]
    batches = chosen[torch.randint(0, count, (cell["steps"], sizes["batch"]), generator=drawn)]
    torch.manual_seed(cell["seed"])
    model = Operator(sizes).to(place.device)
    rates = rates_of(cell, model, place, OUTER)
    training = Training(
        model,
        rates,
        lambda rows: _error(model(start[rows]), end[rows]),
        batches.to(place.device),
        every=cell["every"],
        weight_decay=1e-4,
    )

    @torch.no_grad()
    def errors() -> Found:
        found = model(start[: 2 * held])
        values = [float(_error(found[a:b], end[a:b])) for a, b in ((0, held), (held, 2 * held))]
        parameters = sum(p.numel() for p in model.parameters())
        return {"validation": values[0], "test": values[1], "parameters": parameters}

    return training, rates, errors


def _error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return root mean squares relative to the solution's, by sample."""
    return ((found - wanted).pow(2).mean(1) / wanted.pow(2).mean(1)).sqrt().mean()
