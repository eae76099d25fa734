"""The ``overlord`` command. Every subcommand is in the module of its name in this package.

Subcommands import heavy modules inside their bodies, so that ``overlord --help`` stays fast.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

import click

from overlord import __version__
from overlord.cli.common import FAILED, STOPPED, TERMINATED
from overlord.cli.demo import demo
from overlord.cli.drill import drill
from overlord.cli.explain import explain
from overlord.cli.init import init
from overlord.cli.inspect import inspect
from overlord.cli.journal import journal
from overlord.cli.partition import partition
from overlord.cli.plan import plan
from overlord.cli.preview import preview
from overlord.cli.profile import profile
from overlord.cli.run import run
from overlord.cli.serve import serve
from overlord.cli.simulate import simulate
from overlord.cli.spectra import spectra
from overlord.cli.status import status
from overlord.cli.stop import stop
from overlord.process.exit import exit_now

COMMANDS = (
    demo,
    init,
    run,
    serve,
    preview,
    inspect,
    plan,
    explain,
    profile,
    partition,
    simulate,
    spectra,
    drill,
    journal,
    status,
    stop,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="overlord")
def cli() -> None:
    """Overlord: one plan, one stream, every rank."""


for command in COMMANDS:
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line and exit with its code.

    After Ctrl-C or SIGTERM the process exits at once: a thread in the middle of a read must not
    delay the exit.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Latin-1 lacks the bars of tables; a replacement mark is better than no table.
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(prog_name="overlord", standalone_mode=False) or 0
    except click.ClickException as fault:
        fault.show()
        code = fault.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        click.echo("stopped", err=True)
        _exit_now(TERMINATED if isinstance(stop.__cause__ or stop, _Terminated) else STOPPED)
    except BrokenPipeError:  # the reader of a pipe exited, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_now(FAILED)
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """The exception of SIGTERM, which schedulers send.

    A command that a script started with ``&`` ignores Ctrl-C, and can be stopped only by SIGTERM.
    """


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _exit_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have closed its end
            stream.flush()
    exit_now(code)


if __name__ == "__main__":
    main()
