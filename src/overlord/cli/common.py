"""What the commands share: options with one meaning everywhere, how errors are shown, how a job
file is read.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from overlord.errors import JobError, OverlordError
from overlord.user_code import told

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job.job import Job

NOT_HERE = {
    "address": "has an option of its own, --address",
    "on_stall": "is a function, which cannot be named here",
    "progress": "is a function, which cannot be named here",
}
FAILED, UNUSABLE, STOPPED, TERMINATED = (
    1,
    2,
    130,
    143,
)  # exit codes: found failures; the job cannot run; Ctrl-C; SIGTERM

job_file = click.argument(
    "job_yaml", metavar="JOB.YAML", type=click.Path(dir_okay=False, path_type=Path)
)
imports = click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="Import a module first: one that registers the functions which the job file names. "
    "It is looked for in the working directory, "
    "after all other places; without --import nothing there is imported. May be given "
    "several times.",
)
where = click.option(
    "--runtime",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Where loaders and constructors live: local, process, ray.",
)
resuming = click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="STATE.JSON|auto",
    help="Go on from a saved state; auto: behind the last step that all ranks took, as the "
    "job's journal says.",
)
saving = click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="STATE.JSON",
    help="Write the state at the end, also after Ctrl-C or SIGTERM.",
)
allowing = click.option(
    "--allow",
    metavar="PART",
    multiple=True,
    help="A part in which a resumed state may differ from the job, as the error names it.",
)
launching = click.option(
    "--option",
    "-o",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of launch, as in -o prefetch=8 or -o 'loaders={web: 3}'; docs/jobs.md "
    "lists them. May be given several times.",
)
debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def read_job(path: Path, modules: tuple[str, ...]) -> Job:
    from importlib import import_module

    from overlord.jobfile.yaml_file import read_job as read_file  # it imports PyYAML

    if modules and (here := os.getcwd()) not in sys.path:
        sys.path.append(
            here
            # after all others: no file there takes the place of a library; worker processes look
            # there,
            # too
        )
    for name in modules:
        try:
            import_module(name)
        except ImportError as fault:
            problem = (
                f"cannot import {name!r}: {fault}; it is looked for in PYTHONPATH and, last, "
                "in the working directory"
            )
            raise JobError([problem], "--import") from fault
    return read_file(path)


def read_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Options of ``launch`` by name; values are YAML, as in a job file. Names and values are judged
    by ``launch``.
    """

    import yaml

    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise JobError([f"expected NAME=VALUE, as in prefetch=8, got {word!r}"], "--option")
        if name in NOT_HERE:
            raise JobError([f"{name}: {NOT_HERE[name]}"], "--option")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as fault:
            raise JobError(
                [f"{name}: {value!r} cannot be read as YAML: {fault}"], "--option"
            ) from fault
    return found


def screen(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width; 80 would break rows of tables
    return console


def guarded(act: Callable[[], None], debug: bool) -> None:
    """Runs a command; what goes wrong is one block of text and an exit code."""
    try:
        act()
    except OverlordError as fault:
        code = [note for note in getattr(fault, "__notes__", ()) if note.startswith("raised by")]
        fail(fault, debug, UNUSABLE, "\n".join([str(fault), *code]))
    except (KeyboardInterrupt, click.ClickException, SystemExit):
        raise
    except BrokenPipeError:
        raise
    except Exception as fault:
        said = "\n".join([told(fault), *getattr(fault, "__notes__", ())])
        words = (
            f"{said}\nThis is not an error that Overlord knows; --debug shows where it comes from."
        )
        fail(fault, debug, FAILED, words)


def fail(fault: Exception, debug: bool, code: int, words: str) -> NoReturn:
    if debug:
        traceback.print_exception(fault)
    error(words)
    sys.exit(code)


def error(words: str, more: str = "") -> None:
    click.echo(
        click.style("error: ", fg="red", bold=True) + words + (f"\n{more}" if more else ""),
        err=True,
    )


def note(words: str) -> None:
    """Print what a reader of the result must know, apart from the result."""
    click.echo(f"note: {words}", err=True)
