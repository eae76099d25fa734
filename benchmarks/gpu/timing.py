"""Times of pieces of work on a device, and the description of that device.

On a GPU the pieces are queued and timed by events. So the time of Python does not count as long as
the queue is not empty.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import numpy as np
import torch

from measured.pages import RESULTS, tagged, this_machine

AHEAD = 24  # pieces that are queued before the first is waited for
QUEUE_S = (
    0.02  # of the host: pieces that are queued while the device is held; it queues ~1000 kernels
)
HELD = 1.5  # seconds that the device is held for each second that the host needs to queue
CYCLES = 1.9e9  # of the device in a second
Work = Callable[[], None]


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device here: --device cpu --tiny shows that the program runs, and "
            "measures nothing"
        )
    if name == "cpu":
        torch.set_num_threads(
            1
        )  # nothing is measured there, and models so small only wait for their threads
    return torch.device(name)


def settle(device: torch.device) -> None:
    """Wait until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hold(device: torch.device, seconds: float) -> None:
    """Let the device wait, so that the host queues what follows before it starts."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES))


def seconds_of(
    pieces: Iterable[Work], device: torch.device, host_s: np.ndarray | None = None
) -> np.ndarray:
    """Return the seconds of every piece, executed one after another.

    ``host_s``: seconds that the host needs to queue each piece. The device then waits until a group
    of pieces is queued, so no piece includes time of the host.
    """
    if device.type != "cuda":
        return np.array([_host_seconds(piece) for piece in pieces])
    works, found = list(pieces), np.zeros(0)
    for group in groups_of(len(works), host_s):
        if host_s is not None:
            hold(device, HELD * float(host_s[group].sum()))
        found = np.concatenate((found, _elapsed([_queued(work) for work in works[group]])))
    return found


def groups_of(pieces: int, host_s: np.ndarray | None) -> list[slice]:
    """Return consecutive groups of at most AHEAD pieces that the host queues in QUEUE_S."""
    if host_s is None:
        return [slice(i, min(i + AHEAD, pieces)) for i in range(0, pieces, AHEAD)]
    found, first, spent = [], 0, 0.0
    for i, seconds in enumerate(host_s.tolist()):
        if i > first and (spent + seconds > QUEUE_S or i - first == AHEAD):
            found.append(slice(first, i))
            first, spent = i, 0.0
        spent += seconds
    return [*found, slice(first, pieces)] if pieces else []


def _queued(piece: Work) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    piece()
    end.record()
    return start, end


def host_seconds(pieces: Sequence[Work], device: torch.device, run: np.ndarray) -> np.ndarray:
    """Run the pieces that ``run`` marks once, as a warm-up; return the seconds to queue each.

    Others count as 0: a long piece hides the time to queue it.
    """
    found = np.zeros(len(pieces))
    for i in np.flatnonzero(run).tolist():
        settle(device)
        found[i] = _host_seconds(pieces[i])
    settle(device)
    return found


def _host_seconds(piece: Work) -> float:
    start = time.perf_counter()
    piece()
    return time.perf_counter() - start


def _elapsed(queued: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in queued]


def all_seconds(
    pieces: Sequence[Work],
    device: torch.device,
    *,
    passes: int,
    seed: int = 0,
    host_s: np.ndarray | None = None,
) -> np.ndarray:
    """Return [passes, pieces] seconds; each pass has a new random order.

    So a GPU that gets warmer slows all pieces equally. ``host_s``: as for ``seconds_of``.
    """
    drawn, found = np.random.default_rng(seed), np.empty((passes, len(pieces)))
    for p in range(passes):
        order = drawn.permutation(len(pieces))
        held = None if host_s is None else host_s[order]
        found[p, order] = seconds_of([pieces[i] for i in order], device, held)
    return found


def median_seconds(
    pieces: Sequence[Work], device: torch.device, *, passes: int, seed: int = 0
) -> np.ndarray:
    """Return the median seconds of each piece."""
    return np.median(all_seconds(pieces, device, passes=passes, seed=seed), axis=0)


def warm_up(pieces: Sequence[Work], device: torch.device, least_s: float) -> None:
    """Run every piece once, then repeat until the clocks of the device are stable."""
    start = time.perf_counter()
    for piece in pieces:
        piece()
    settle(device)
    while time.perf_counter() - start < least_s:
        for piece in pieces:
            piece()
        settle(device)


def machine(device: torch.device) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    where = f"{len(os.sched_getaffinity(0))} CPUs ({cpu})"
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        where = f"{card.name} ({card.total_memory / 2**30:.0f} GiB), {where}"
    running = f" {clocks()}" if device.type == "cuda" else ""
    return (
        f"{where}, Python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{np.__version__}.{running}"
    )


def clocks() -> str:
    """Return the current clocks of the GPU, if its tool is installed.

    Power limits change the clock by percents.
    """
    try:
        asked = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu",
            "--format=csv,noheader",
        ]
        said = (
            subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
            .stdout.strip()
            .splitlines()[0]
        )
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
    return "Clock, its maximum, power, its limit and temperature at the end: " + said + "."


@contextmanager
def clock_log(device: torch.device, every_s: float = 0.2) -> Iterator[list[float]]:
    """Collect the clock of the multiprocessors in MHz; the list is filled when the context ends.

    It is empty without a GPU or without its tool.
    """
    found: list[float] = []
    if device.type != "cuda":
        yield found
        return
    words = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        tool = subprocess.Popen(
            [*words, f"--loop-ms={int(1000 * every_s)}"], stdout=subprocess.PIPE, text=True
        )
    except OSError:
        yield found
        return
    try:
        yield found
    finally:
        tool.terminate()
        with suppress(subprocess.TimeoutExpired):
            said = tool.communicate(timeout=5)[0]
            found += [float(line) for line in said.split() if line.replace(".", "").isdigit()]
        tool.kill()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def save(name: str, text: str, folder: Path, prefix: str = "gpu-") -> Path:
    """Write the dated page into a folder; ``prefix`` is that of programs in this one."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = (
        "H200"
        if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
        else this_machine()
    )
    name, text = tagged(f"{date.today().isoformat()}-{prefix}{name}", text, machine, folder)
    path = folder / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    return path


def default_folder() -> Path:
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
