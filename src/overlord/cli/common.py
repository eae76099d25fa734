"""Options, error output and job loading that all commands share."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from overlord.checks import describe_error
from overlord.errors import JobError, OverlordError
from overlord.observe.terminal_text import printable
from overlord.uris import is_uri

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job.job import Job

# Launch options that --option refuses, each with the reason.
REFUSED_OPTIONS = {
    "address": "expected as --address HOST:PORT, got --option",
    "on_stall": "expected in a program, since it is a function, got --option",
    "progress": "expected in a program, since it is a function, got --option",
}
# Exit codes. FAILED: failures were found, or an unexpected error; UNUSABLE: the job cannot run, or
# the command lacks a package; STOPPED: Ctrl-C; TERMINATED: SIGTERM.
FAILED, UNUSABLE, STOPPED, TERMINATED = 1, 2, 130, 143


def _refuse_directory(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    if path.is_dir():
        raise click.BadParameter(
            f"expected a job file, got the directory {path}; `overlord init {path}` writes a job "
            "file for the data in it"
        )
    return path


job_argument = click.argument(
    "job_yaml", metavar="JOB.YAML", type=click.Path(path_type=Path), callback=_refuse_directory
)
import_option = click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="Import a module first: one that registers the functions that the job file names. "
    "The working directory is searched last, and only with --import. "
    "May be given several times.",
)
runtime_option = click.option(
    "--runtime",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Where loaders and constructors run: local, process, ray.",
)
resume_option = click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="STATE.JSON|auto",
    help="Continue from a saved state; auto: after the last step that all ranks took, "
    "according to the job's journal.",
)
save_option = click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="STATE.JSON",
    help="Write the state at the end, also after Ctrl-C or SIGTERM.",
)
allow_option = click.option(
    "--allow",
    metavar="FIELD",
    multiple=True,
    help="A field in which a resumed state may differ from the job, as the error names it. "
    "May be given several times.",
)
launch_option = click.option(
    "--option",
    "-o",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of launch, as in -o prefetch=8 or -o 'loaders={web: 3}'; the page 'Job "
    "file and options' of the documentation lists them. May be given several times.",
)
address_option = click.option(
    "--address",
    metavar="HOST:PORT",
    envvar="OVERLORD_CLUSTER",
    help="With Ray: the head of a cluster. Default: OVERLORD_CLUSTER.",
)
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON on stdout instead of text; the page 'Command line' of the documentation "
    "shows its form.",
)


def read_job(path: Path, modules: tuple[str, ...]) -> Job:
    """Import ``modules``, then read the job file; raise ``JobError`` if an import fails."""
    from overlord.jobfile.yaml_file import read_job as read_file  # imports PyYAML

    if modules and (here := os.getcwd()) not in sys.path:
        # At the end, so that no file there replaces a library; worker processes search it too.
        sys.path.append(here)
    for name in modules:
        try:
            import_module(name)
        except ImportError as fault:
            problem = (
                f"cannot import {name!r}: {fault}; put it into a folder of PYTHONPATH or into the "
                "working directory, which is searched last"
            )
            raise JobError([problem], "--import") from fault
    return read_file(path)


def read_options(given: tuple[str, ...]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as options of ``launch``; values are YAML, as in a job file.

    Raise ``JobError`` for malformed and refused ones; ``launch`` validates the others.
    """

    import yaml

    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise JobError([f"expected NAME=VALUE, as in prefetch=8, got {text!r}"], "--option")
        if name in REFUSED_OPTIONS:
            raise JobError([f"{name}: {REFUSED_OPTIONS[name]}"], "--option")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as fault:
            raise JobError(
                [f"{name}: expected YAML, got {value!r}: {fault}"], "--option"
            ) from fault
    return found


def make_console(stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; without terminal and COLUMNS it has 120 columns."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width; 80 would break rows of tables
    return console


def run_guarded(act: Callable[[], None], debug: bool) -> None:
    """Run the body of a command; print an error as one block of text, and exit with its code.

    An ``OverlordError`` exits with ``UNUSABLE``, an unexpected one with ``FAILED``.
    """
    try:
        act()
    except OverlordError as fault:
        places = ("raised by", "byte ")  # of user code, of data
        notes = [note for note in getattr(fault, "__notes__", ()) if note.startswith(places)]
        fail(fault, debug, UNUSABLE, "\n".join([str(fault), *notes]))
    except (KeyboardInterrupt, click.ClickException, SystemExit):
        raise
    except BrokenPipeError:
        raise
    except Exception as fault:
        described = "\n".join([describe_error(fault), *getattr(fault, "__notes__", ())])
        text = f"{described}\nThis error is unexpected; --debug shows its traceback."
        fail(fault, debug, FAILED, text)


def fail(fault: Exception, debug: bool, code: int, text: str) -> NoReturn:
    """Print an error and exit with ``code``; with ``debug`` print its traceback too."""
    if debug:
        traceback.print_exception(fault)
    error(text)
    sys.exit(code)


def error(text: str, more: str = "") -> None:
    """Print an error to stderr; ``more``: further lines."""
    shown = printable(text + (f"\n{more}" if more else ""))
    click.echo(click.style("error: ", fg="red", bold=True) + shown, err=True)


def warning(text: str) -> None:
    """Print a warning to stderr."""
    click.echo(click.style("warning: ", fg="yellow", bold=True) + printable(text), err=True)


def note(text: str) -> None:
    """Print a remark about the result to stderr."""
    click.echo(f"note: {printable(text)}", err=True)


def print_json(value: Any) -> None:
    """Print a value as one JSON document on stdout."""
    from overlord.observe.json_text import json_document  # imports numpy

    click.echo(json_document(value))


def print_json_line(value: Any) -> None:
    """Print a value as one line of JSON on stdout, at once."""
    from overlord.observe.json_text import json_line  # imports numpy

    click.echo(json_line(value))
    sys.stdout.flush()


POSITION = "to keep the position in an object store, set Job.journal"


def check_writable(path: Path, where: str = "state", remedy: str = POSITION) -> None:
    """Raise ``JobError`` for a URI or a missing folder, before the work instead of after it."""
    refuse_uri(path, where, remedy)
    if not path.absolute().parent.is_dir():
        raise JobError([f"expected a folder, got none at {path.absolute().parent}"], str(path))


def refuse_uri(path: Path, where: str = "state", remedy: str = POSITION) -> None:
    """Raise ``JobError`` for a URI, without repeating it: it may hold a secret."""
    if is_uri(str(path)):
        raise JobError([f"expected a file on this machine, got a URI; {remedy}"], where)
