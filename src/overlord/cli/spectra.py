"""``overlord spectra``: print the spectra of the weight matrices of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from overlord.cli.common import (
    UNUSABLE,
    debug_option,
    fail,
    json_option,
    make_console,
    print_json,
    run_guarded,
)
from overlord.errors import JobError

ESTIMATORS = ("hill", "farms", "ks", "published")


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT.SAFETENSORS", type=click.Path(path_type=Path))
@click.option(
    "--estimator",
    type=click.Choice(ESTIMATORS),
    default="hill",
    show_default=True,
    help="How the exponent of the tail is computed; farms ignores the aspect ratio.",
)
@click.option(
    "--skip",
    metavar="PATTERN",
    multiple=True,
    help="Leave out tensors whose name, or a component of it, matches. May be given several "
    "times; it replaces the defaults (embeddings and output layers).",
)
@click.option(
    "--min-eigs",
    type=click.IntRange(min=2),
    default=50,
    show_default=True,
    help="Matrices with fewer eigenvalues have no exponent.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.SVG",
    help="Also write a plot of the exponents by block.",
)
@json_option
@debug_option
def spectra(
    checkpoint: Path,
    estimator: str,
    skip: tuple[str, ...],
    min_eigs: int,
    plot: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Print the spectra of the weight matrices of a checkpoint.

    CHECKPOINT.SAFETENSORS is a file of safetensors, an index of several, or a folder. Tensors are
    read one at a time. No code of the checkpoint is executed.
    """

    def act() -> None:
        from overlord.observe.progress_bars import progress_bar

        if plot is not None and not plot.absolute().parent.is_dir():
            raise JobError(
                [
                    f"--plot: expected a file in a folder that exists, got {plot}; make the folder "
                    "first"
                ],
                "spectra",
            )
        try:
            from overlord.torch.weight_matrices import SKIP
            from overlord.torch.weight_spectra import HEAD, checkpoint_spectra

            with progress_bar(make_console(stderr=True), "solved matrices") as advance:
                found = checkpoint_spectra(
                    checkpoint,
                    estimator=estimator,
                    skip=skip or SKIP,
                    min_eigs=min_eigs,
                    progress=advance,
                )
        except ImportError as missing:
            fail(missing, debug, UNUSABLE, _remedy(missing))
        if plot is not None:
            found.plot(plot)
        if as_json:
            print_json(found.to_dict())
            return
        from overlord.observe.tables import grid

        console = make_console()
        console.print(grid(HEAD, found.cells()))
        for block, alpha in found.blocks().items():
            console.print(f"{block}: mean alpha {alpha:.3f}", markup=False)
        if plot is not None:
            console.print(f"wrote {plot}", markup=False)

    run_guarded(act, debug)


def _remedy(missing: ImportError) -> str:
    from overlord.checks import pip_install

    text = str(missing)
    return text if "pip install" in text else f"spectra needs torch: {pip_install('spectra')}"
