"""``spectra``: a table and a plot of the spectra of all weight matrices of a model.

A checkpoint on disk needs no model: ``checkpoint_spectra`` reads one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from overlord.checks import pip_install
from overlord.errors import JobError
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from overlord.torch.fused_projections import FusedRules
from overlord.torch.sharded_gram import Fetch, Ranks, each_spectrum
from overlord.torch.tail_exponent import DEGENERATE, Estimator
from overlord.torch.weight_matrices import (
    SKIP,
    Matrix,
    MatrixRules,
    checkpoint_matrices,
    model_matrices,
    named_parameters,
)

KINDS = 5  # most kinds of matrices in a plot, besides the mean
LABEL = 18  # most characters of the name of a kind
INDEX = "model.safetensors.index.json"
# dtypes that are measured; integers and 8-bit floats need scales, which are other tensors
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
STYLE = """
svg{--s0:#2f6fb4;--s1:#c2602b;--s2:#3a8f5c;--s3:#8a5bb5;--s4:#b08a1e;--s5:#5a6b7a;
--ink:#1b1f24;--soft:#6a727b;font:12px system-ui,sans-serif;max-width:60rem;background:#fff}
text{fill:var(--ink)}.tick,.label{fill:var(--soft)}.line,.leader{fill:none;stroke-width:2}
.bound{fill:none;stroke-width:2;stroke-dasharray:5 4}
.grid,.axis,.mark{stroke:var(--soft);stroke-opacity:.3}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Properties of the spectrum of one matrix.

    ``alpha``: the exponent of the tail. NaN: the matrix is too small or degenerate. Infinity: it
    has weights that are not finite.
    ``norm``: the largest singular value. ``stable_rank``: the squared Frobenius norm over the
    squared largest singular value.
    """

    name: str
    block: str
    rows: int
    cols: int
    eigenvalues: int
    alpha: float
    norm: float
    stable_rank: float


@dataclass(frozen=True, slots=True)
class Spectra:
    """The spectra of a model, in the order of its parameters."""

    rows: tuple[Spectrum, ...]
    estimator: str

    def __iter__(self) -> Iterator[Spectrum]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return self.table()

    @property
    def alphas(self) -> dict[str, float]:
        """The exponent of each matrix by its name."""
        return {row.name: row.alpha for row in self.rows}

    def blocks(self) -> dict[str, float]:
        """Return the mean exponent of every block; blocks without any exponent are left out."""
        values: dict[str, list[float]] = {}
        for row in self.rows:
            if row.block and np.isfinite(row.alpha):
                values.setdefault(row.block, []).append(row.alpha)
        return {block: float(np.mean(found)) for block, found in values.items()}

    def metrics(self) -> dict[str, float]:
        """Return the exponents of blocks as metrics, for ``client.report``."""
        return {f"alpha/{block}": alpha for block, alpha in self.blocks().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; a number that is not finite is None."""
        rows = [
            {k: _json_value(v) for k, v in asdict(row).items()} | {"shape": [row.rows, row.cols]}
            for row in self.rows
        ]
        return {"estimator": self.estimator, "matrices": rows, "blocks": self.blocks()}

    def cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the table as text, row by row, without the header."""
        return [
            (
                row.name,
                f"{row.rows}x{row.cols}",
                f"{row.eigenvalues}",
                _shown(row.alpha),
                _shown(row.norm),
                _shown(row.stable_rank),
            )
            for row in self.rows
        ]

    def table(self) -> str:
        """Return a table of all matrices as text."""
        head = (*HEAD,)
        cells = [head, *self.cells()]
        widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if k == 0 else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )

    def plot(self, path: str | Path | None = None) -> str:
        """Return a plot of the exponents by block as SVG text; write it if a path is given."""
        svg = _plot(self.rows, self.estimator)
        if path is not None:
            Path(path).write_text(svg, encoding="utf-8")
        return svg


HEAD = ("matrix", "shape", "eigenvalues", "alpha", "norm", "stable rank")


def spectra(
    model: nn.Module,
    *,
    estimator: str = "hill",
    skip: Sequence[str] = SKIP,
    fused: Mapping[str, tuple[int, ...]] | None = None,
    min_eigs: int = 50,
    process_group: Any = None,
) -> Spectra:
    """Measure the spectra of all weight matrices of a model.

    The arguments are those of ``TempBalance``. On several ranks every rank must call it. The work
    is spread over them, and all get the same result.
    """
    rules = MatrixRules(skip=_patterns(skip), fused=FusedRules(sizes=dict(fused or {})))
    matrices, parameters = model_matrices(model, rules), named_parameters(model)
    fit = Estimator(name=estimator, min_eigs=min_eigs)
    return measured(matrices, parameters.__getitem__, fit, Ranks.of(process_group))


def checkpoint_spectra(
    path: str | Path,
    *,
    estimator: str = "hill",
    skip: Sequence[str] = SKIP,
    fused: Mapping[str, tuple[int, ...]] | None = None,
    min_eigs: int = 50,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Spectra:
    """Measure the spectra of a checkpoint of safetensors: a file, an index, or a folder.

    Tensors are read one at a time. A config.json in the same folder gives the sizes of fused
    projections. ``progress`` is called with (matrices solved, total).
    """
    files, folder = _files(Path(path))
    rules = MatrixRules(skip=_patterns(skip), fused=FusedRules(sizes=dict(fused or {})))
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            opened = stack.enter_context(_open(file))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                found = opened.get_slice(name)
                if found.get_dtype() in FLOATS:
                    where[name], shapes[name] = opened, tuple(found.get_shape())
        matrices = checkpoint_matrices(shapes, rules, _config(folder))
        last: list[tuple[str, torch.Tensor]] = []

        def fetch(name: str) -> torch.Tensor:
            if not last or last[0][0] != name:
                last[:] = [(name, where[name].get_tensor(name))]
            return last[0][1]

        settings = Estimator(name=estimator, min_eigs=min_eigs)
        return measured(matrices, fetch, settings, progress=progress)


def measured(
    matrices: Sequence[Matrix],
    fetch: Fetch,
    estimator: Estimator,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Spectra:
    """Measure the spectra of matrices; ``fetch`` returns a parameter by its name.

    ``progress`` is called with (matrices solved by this rank, all matrices).
    """
    solved = 0
    ranks = ranks or Ranks()
    if not matrices:
        return Spectra((), estimator.name)
    found = np.zeros((3, len(matrices)))

    def keep(index: int, values: np.ndarray, tolerance: float) -> None:
        nonlocal solved
        solved += 1
        progress(solved, len(matrices))
        most = float(np.sqrt(max(values.max(), 0.0)))
        rank = float(values.sum() / values.max()) if values.max() > 0 else 0.0
        small = matrices[index].eigenvalues < estimator.min_eigs
        alpha = DEGENERATE if small else estimator.alpha(values, tolerance)
        found[:, index] = alpha, most, rank

    device = each_spectrum(matrices, fetch, keep, windows=estimator.takes_windows, ranks=ranks)
    alphas, norms, stable = ranks.merged(found.reshape(-1), device).reshape(3, -1).tolist()
    rows = tuple(
        Spectrum(
            name=m.name,
            block=m.block,
            rows=m.rows,
            cols=m.cols,
            eigenvalues=m.eigenvalues,
            alpha=alphas[i],
            norm=norms[i],
            stable_rank=stable[i],
        )
        for i, m in enumerate(matrices)
    )
    return Spectra(rows, estimator.name)


def _patterns(skip: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple; raise ``JobError`` for a single text, which has letters."""
    if isinstance(skip, str):
        raise JobError(
            [f'skip: expected a tuple of patterns, got {skip!r}; write ("{skip}",)'], "spectra"
        )
    return tuple(skip)


def _open(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as missing:
        raise ImportError(f"checkpoints need safetensors: {pip_install('spectra')}") from missing
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as fault:
        raise JobError(
            [
                f"{file}: expected a whole file of safetensors, got {fault}; copy it again if "
                "it is cut off, or convert it from its format"
            ],
            "spectra",
        ) from fault


def _files(path: Path) -> tuple[list[Path], Path]:
    """Return the files of a checkpoint and its folder; raise ``JobError`` if there are none."""
    if path.is_dir():
        index = path / INDEX
        if not index.is_file():
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise JobError(
                    [f"{path}: expected *.safetensors in the folder, got none; convert it first"],
                    "spectra",
                )
            return files, path
        path = index
    if not path.is_file():
        raise JobError(
            [f"{path}: expected a file or a folder, got nothing there; check the path"], "spectra"
        )
    if path.suffix == ".json":
        try:
            names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError, TypeError) as fault:
            raise JobError(
                [f"{path}: expected an index with weight_map, got {fault!r}; give the files"],
                "spectra",
            ) from fault
        files = [path.parent / name for name in sorted(set(names))]
        if lost := [file.name for file in files if not file.is_file()]:
            raise JobError(
                [
                    f"{path}: expected all {len(files)} files of the index in its folder, got none "
                    f"of {', '.join(lost[:3])}{', ..' * (len(lost) > 3)}; copy these files too"
                ],
                "spectra",
            )
        return files, path.parent
    return [path], path.parent


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _shown(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "-"


def _label(kind: str) -> str:
    """Return the last component of a name, at most ``LABEL`` characters."""
    return kind.rpartition(".")[2][:LABEL]


def _plot(rows: Sequence[Spectrum], estimator: str) -> str:
    """Return an SVG of the mean exponent by block, and of ``KINDS`` kinds that all blocks have.

    With fewer than two blocks: the exponent of every matrix.
    """
    usable = [row for row in rows if np.isfinite(row.alpha)]
    blocks = list(dict.fromkeys(row.block for row in usable if row.block))
    by_kind: dict[str, dict[str, float]] = {}
    for row in usable:
        kind = row.name.removeprefix(f"{row.block}.").replace(".weight", "")
        by_kind.setdefault(kind, {})[row.block] = row.alpha
    if len(blocks) > 1:
        means = [float(np.mean([r.alpha for r in usable if r.block == b])) for b in blocks]
        x_label = "block"
        kinds = [k for k, found in by_kind.items() if set(blocks) <= set(found)][:KINDS]
    else:
        means, kinds, x_label = [row.alpha for row in usable] or [1.0], [], "matrix"
    series = [
        PlotLine(
            label=_label(k), color=series_color(i), y=np.array([by_kind[k][b] for b in blocks])
        )
        for i, k in enumerate(kinds)
    ]
    mean = PlotLine(label="mean" if kinds else "alpha", color="var(--ink)", y=np.array(means))
    series.append(mean)
    values = np.concatenate([line.y for line in series])
    low, high = float(np.floor(values.min() * 2) / 2), float(np.ceil(values.max() * 2) / 2)
    drawn = lines(
        np.arange(len(means), dtype=np.float64),
        series,
        Axes(
            x_label=x_label,
            y_label=f"exponent alpha ({estimator})",
            y_from=low,
            y_to=max(high, low + 0.5),
            show=lambda v: f"{v:g}",
        ),
        about=f"Exponents of the spectra of {len(usable)} matrices",
    )
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "\n", f"\n<style>{STYLE}</style>\n", 1
    )
