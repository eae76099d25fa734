"""Starts the ranks of a world: one interpreter that has torch loaded already, and a fork for each
rank, with torchrun's environment.

    python -m tests.torch.ranks.start 8 tests.torch.ranks.checks_broadcast /tmp/somewhere 60

Ranks do the checks of a module one after another; what became of each is written down by rank. A
rank on which one fails ends at once, so the others find their links broken and nobody waits.
``torchrun`` starts the same with ``RANK`` set already. A module that says ``WITHOUT_ENVIRONMENT``
gets a process group by a file and no variables, as ``mp.spawn`` with ``init_method`` and Lightning
have it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# What ranks import when they join, train and read. sympy comes with the second.
LOADED = (
    "overlord.torch",
    "torch.fx.experimental.symbolic_shapes",
    "overlord.setup.job_agreement",
    "overlord.session.runtime",
    "overlord.session.rendezvous",
    "overlord.cluster.loader_worker",
    "overlord.session.session",
    "pyarrow",
)
BEFORE_S = 5.0  # the deadline a rank says where it hangs


def run_rank(module: str, out: Path, seconds: float, rank: int, world: int) -> int:
    """All checks of the module, on this rank."""
    faulthandler.dump_traceback_later(max(1.0, seconds - BEFORE_S))
    torch.set_num_threads(1)
    done, imported = {}, importlib.import_module(module)
    checks = imported.CHECKS
    by_file = (
        {"init_method": f"file://{out}/store", "rank": rank, "world_size": world}
        if without_environment(module)
        else {}
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds), **by_file)
    failed = 0
    for name, check in checks.items():
        start = time.monotonic()
        try:
            check(out)
            dist.barrier()
            done[name] = f"ok {time.monotonic() - start:.2f}"
        except BaseException:
            done[name] = f"rank {rank}: {traceback.format_exc()}"
            failed = 1
        (out / f"rank{rank}.json").write_text(json.dumps(done))
        if failed:
            sys.stderr.write(done[name])
            sys.stderr.flush()
            os._exit(1)  # whatever its clients have open ends with it
    if not getattr(imported, "GIVES_UP_BROADCASTS", False):
        dist.destroy_process_group()
    return 0


def without_environment(module: str) -> bool:
    return getattr(importlib.import_module(module), "WITHOUT_ENVIRONMENT", False)


def _free_port() -> socket.socket:
    """One that nobody else is given while this is bound to it; rank 0 can listen there all the
    same.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    return probe


def _fork(rank: int, world: int, port: int, module: str, out: Path, seconds: float) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        where = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_PORT": port,
        }
        if not without_environment(module):
            os.environ.update(
                {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
            )
        code = run_rank(module, out, seconds, rank, world)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    sys.stdout.flush()
    import atexit

    atexit._run_exitfuncs()
    os._exit(code)


def main(world: int, module: str, out: Path, seconds: float) -> int:
    for name in (module, *LOADED):  # once, for all
        importlib.import_module(name)
    deadline, port = time.monotonic() + seconds, _free_port()
    pids = {
        _fork(rank, world, port.getsockname()[1], module, out, seconds): rank
        for rank in range(world)
    }
    codes: dict[int, int] = {}
    while pids and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif not pid:
            time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (out / "codes.json").write_text(json.dumps(codes))
    return int(bool(pids) or any(codes.values()))


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        sys.exit(
            run_rank(
                sys.argv[1],
                Path(sys.argv[2]),
                float(sys.argv[3]),
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
            )
        )
    sys.exit(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
