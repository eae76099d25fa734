"""The weight matrices of a model or a checkpoint: where each is stored, and which block it is in.

Fused projections (qkv, gate and up) are several matrices of one parameter: the spectrum of a stack
is not the mean of its parts. A stack of experts is one matrix for each expert. A convolution is one
matrix for each kernel position, with one pooled spectrum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from overlord.torch.fused_projections import Fused, FusedRules, Ranges
from overlord.torch.tail_exponent import window_starts

log = logging.getLogger(__name__)

SKIP = ("*embed*", "wte", "wpe", "lm_head", "head")
# components that module wrappers add to parameter names
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
NESTED_BLOCKS = frozenset({"layers", "blocks"})
EIG_WEIGHT = 10  # cost of an eigenvalue problem of size k, in units of k^3 multiply-adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter: the layer's matrix is ``W + scale * B A``.

    ``a``, ``b``: the names of the parameters A and B.
    """

    a: str
    b: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The axes of a parameter that are rows and columns of its matrices; other axes stack them."""

    rows: int = 0
    cols: int = 1
    groups: int = 1  # groups of a convolution: the rows of a group use only its own inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix, or the stack of matrices of a convolution."""

    name: str
    parameter: str
    block: str  # the path of the numbered block; empty outside of blocks
    shape: tuple[int, ...]  # of the whole parameter, un-sharded
    layout: Layout = Layout()
    select: tuple[tuple[int, Ranges], ...] = ()  # (axis of the parameter, selected ranges)
    adapters: tuple[Adapter, ...] = ()
    is_complex: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """The lengths of the axes after the selection."""
        chosen = {axis: sum(stop - start for start, stop in r) for axis, r in self.select}
        return tuple(chosen.get(axis, size) for axis, size in enumerate(self.shape))

    @property
    def rows(self) -> int:
        return self.extents[self.layout.rows] // self.layout.groups

    @property
    def cols(self) -> int:
        return self.extents[self.layout.cols]

    @property
    def stack(self) -> int:
        """The number of matrices whose spectra are pooled."""
        return self.layout.groups * math.prod(
            size
            for axis, size in enumerate(self.extents)
            if axis not in (self.layout.rows, self.layout.cols)
        )

    @property
    def small(self) -> int:
        return min(self.rows, self.cols)

    @property
    def eigenvalues(self) -> int:
        return self.small * self.stack

    def cost(self, windows: bool = False) -> int:
        """Return the cost of the spectrum in multiply-adds; ``windows``: over square windows."""
        k, m = self.small, max(self.rows, self.cols)
        problems = len(window_starts(m, k)) if windows else 1
        length = problems * k if windows else m
        return self.stack * (length * k * k + EIG_WEIGHT * problems * k**3)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the parameters that training changes: adapters if there are any."""
        return tuple(n for a in self.adapters for n in (a.a, a.b)) or (self.parameter,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRules:
    """The rules that select the parameters to measure.

    ``skip``: patterns of names to leave out; they match a component of the name or the whole name.
    """

    skip: tuple[str, ...] = SKIP
    fused: FusedRules = field(default_factory=FusedRules)

    def skips(self, name: str) -> bool:
        """Return whether a pattern of ``skip`` matches the name."""
        parts = name.split(".")
        return any(
            fnmatchcase(name, pattern) or any(fnmatchcase(part, pattern) for part in parts)
            for pattern in self.skip
        )


def clean(name: str) -> str:
    """Return the name of a parameter without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def block_of(name: str) -> str:
    """Return the path of the numbered block of a parameter; empty if it is in none.

    It is the deepest ``layers.<n>`` or ``blocks.<n>``, else the path up to the first number. The
    whole path counts: block 0 of an encoder and block 0 of a decoder are different blocks.
    """
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    nested = [i for i in numbered if i and parts[i - 1] in NESTED_BLOCKS]
    last = nested[-1] if nested else numbered[0] if numbered else -1
    return ".".join(parts[: last + 1])


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their clean names, each once."""
    return {clean(name): p for name, p in bare(model).named_parameters()}


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside data-parallel and compiled wrappers."""
    inner = model
    while True:
        if (compiled := getattr(inner, "_orig_mod", None)) is not None:
            inner = compiled
        elif isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        else:
            return inner


def model_matrices(model: nn.Module, rules: MatrixRules | None = None) -> list[Matrix]:
    """Return the matrices of a model in the order of its parameters.

    Embeddings are left out, also output layers with tied weights, and parameters that ``rules``
    skip. A parameter that several modules share is listed once.
    """
    rules, inner = rules or MatrixRules(), bare(model)
    modules = [(clean(name), module) for name, module in inner.named_modules()]
    adapters = dict(_adapters(modules))
    taken = {id(p) for p in _embeddings(inner)}
    hidden = {n for found in adapters.values() for a in found for n in (a.a, a.b)}
    configs = {name: module.config for name, module in modules if hasattr(module, "config")}
    matrices: list[Matrix] = []
    for path, module in modules:
        for leaf, parameter in module.named_parameters(path, recurse=False):
            name = clean(leaf)
            if id(parameter) in taken or name in hidden or rules.skips(name):
                continue
            taken.add(id(parameter))
            layout = _layout(name, parameter, module)
            if layout is None:
                continue
            shape = tuple(parameter.shape)
            matrix = Matrix(
                name=name,
                parameter=name,
                block=block_of(name),
                shape=shape,
                layout=layout,
                adapters=adapters.get(name, ()) if len(shape) == 2 else (),
                is_complex=parameter.is_complex(),
            )
            fused = rules.fused.parts(name, shape, _nearest(configs, path), _gates(module))
            matrices += _expanded(matrix, fused)
    return matrices


def checkpoint_matrices(
    shapes: Mapping[str, Sequence[int]],
    rules: MatrixRules | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Matrix]:
    """Return the matrices of a checkpoint by the names and shapes of its tensors.

    ``config``: the model's config.json, for the sizes of fused projections. A tensor of three axes
    is a stack of experts if its name contains ``expert``, else a convolution.
    """
    rules = rules or MatrixRules()
    matrices: list[Matrix] = []
    for name, given in shapes.items():
        shape = tuple(given)
        if rules.skips(name) or not 2 <= len(shape) <= 5 or min(shape) < 1:
            continue
        if name.endswith("bias"):  # biases of experts have two axes: one row for each expert
            continue
        experts = len(shape) == 3 and "expert" in name
        matrix = Matrix(
            name=name,
            parameter=name,
            block=block_of(name),
            shape=shape,
            layout=Layout(rows=1, cols=2) if experts else Layout(),
        )
        matrices += _expanded(matrix, rules.fused.parts(name, shape, config, 0))
    return matrices


def _expanded(matrix: Matrix, fused: Fused) -> Iterator[Matrix]:
    """Yield a matrix for each fused part of each expert; the matrix itself if there are neither.

    Warn if the parameter looks fused and its parts are unknown.
    """
    experts: list[tuple[str, tuple[tuple[int, Ranges], ...]]] = [("", ())]
    if len(matrix.shape) == 3 and matrix.layout.rows == 1:
        experts = [(f"[{e}]", ((0, ((e, e + 1),)),)) for e in range(matrix.shape[0])]
    parts: list[tuple[str, tuple[tuple[int, Ranges], ...]]] = [("", ())]
    if fused.parts:
        parts = [(f"[{label}]", ((fused.axis, ranges),)) for label, ranges in fused.parts]
    elif fused.doubt:
        log.warning("%s: %s", matrix.name, fused.doubt)
    for expert, at in experts:
        for part, rows in parts:
            yield Matrix(
                name=f"{matrix.name}{expert}{part}",
                parameter=matrix.parameter,
                block=matrix.block,
                shape=matrix.shape,
                layout=matrix.layout,
                select=at + rows,
                adapters=matrix.adapters,
                is_complex=matrix.is_complex,
            )


def _layout(name: str, parameter: nn.Parameter, module: nn.Module) -> Layout | None:
    """Return how a parameter holds matrices; None if it holds none."""
    if not (parameter.is_floating_point() or parameter.is_complex()) or name.endswith("bias"):
        return None
    if isinstance(module, CONVOLUTIONS):
        return Layout(groups=module.groups) if parameter.ndim > 2 else None
    if parameter.ndim == 2:
        return Layout()
    if parameter.ndim == 3 and "expert" in name:
        return Layout(rows=1, cols=2)
    # spectral convolutions, as in Fourier neural operators: [in, out, modes, ...]
    return Layout() if parameter.is_complex() and parameter.ndim > 2 else None


def _embeddings(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight


def _gates(module: nn.Module) -> int:
    """Return how many matrices a recurrent or attention module stacks; 0 for other modules."""
    if isinstance(module, nn.RNNBase):
        return {nn.LSTM: 4, nn.GRU: 3}.get(type(module), 0)
    return 3 if isinstance(module, nn.MultiheadAttention) else 0


def _adapters(
    modules: Sequence[tuple[str, nn.Module]],
) -> Iterator[tuple[str, tuple[Adapter, ...]]]:
    """Yield the LoRA adapters of each adapted layer, by the name of its base weight."""
    for path, module in modules:
        lora_a, lora_b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        base, scaling = getattr(module, "base_layer", None), getattr(module, "scaling", {})
        if isinstance(lora_a, nn.ModuleDict) and isinstance(lora_b, nn.ModuleDict) and base:
            prefix = f"{path}." if path else ""
            yield (
                f"{prefix}base_layer.weight",
                tuple(
                    Adapter(
                        a=f"{prefix}lora_A.{key}.weight",
                        b=f"{prefix}lora_B.{key}.weight",
                        scale=float(scaling.get(key, 1.0)),
                    )
                    for key in lora_a
                ),
            )


def _nearest(configs: Mapping[str, Any], path: str) -> Any:
    """Return the config of a module or of its nearest ancestor; None if no ancestor has one."""
    parts = path.split(".") if path else []
    for n in range(len(parts), -1, -1):
        if (found := configs.get(".".join(parts[:n]))) is not None:
            return found
    return None


def stacked(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return the matrices of an un-sharded parameter as [stack, rows, cols]."""
    for axis, ranges in matrix.select:
        tensor = take(tensor, axis, ranges)
    rows, cols = matrix.layout.rows, matrix.layout.cols
    others = [axis for axis in range(tensor.ndim) if axis not in (rows, cols)]
    moved = tensor.permute(*others, rows, cols)
    flat = moved.reshape(-1, *moved.shape[-2:])
    if matrix.layout.groups == 1:
        return flat
    return flat.reshape(-1, flat.shape[-2] // matrix.layout.groups, flat.shape[-1])


def take(tensor: torch.Tensor, axis: int, ranges: Ranges) -> torch.Tensor:
    """Return ranges of an axis, concatenated; a single range is a view."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor.narrow(axis, start, stop - start)
    index = torch.cat([torch.arange(*r, device=tensor.device) for r in ranges] or [_none(tensor)])
    return tensor.index_select(axis, index)


def _none(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=tensor.device)
