"""The feeds of a training loop: each is opened anew and gives steps of tensors on the device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import overlord as ov
import overlord_side
from corpus import Corpus
from peers.work import Work

HERE = Path(__file__).resolve().parents[1]
INTS = (
    "tokens",
    "position_ids",
    "labels",
    "cu_seqlens",
)  # what this model takes; max_seqlen stays on the host


@dataclass(frozen=True, slots=True, eq=False)
class Fed:
    """One step on the device."""

    microbatches: list[Mapping[str, Any]]
    valid_tokens: int
    tokens: int
    waited_s: float = 0.0  # so far, because no step was ready


Feed = Callable[[], AbstractContextManager[Iterator[Fed]]]
Made = Callable[[Corpus, Work, int, int, torch.device], Feed]


def resident(corpus: Corpus, work: Work, ranks: int, steps: int, device: torch.device) -> Feed:
    """Return a feed whose steps are all on the device before the first is requested.

    They are the steps of Overlord's stream, so the work is the same, without a loader.
    """
    with ov.launch(overlord_side.make_job(corpus, work), runtime="local") as session:
        held = [_on_device(step, device) for step in islice(session.client(rank=0), steps)]

    @contextmanager
    def opened() -> Iterator[Iterator[Fed]]:
        yield iter(held)

    return opened


def _on_device(step: ov.Step, device: torch.device) -> Fed:
    mbs = [
        {
            **{k: torch.from_numpy(mb[k].copy()).to(device) for k in INTS},
            "max_seqlen": int(mb["max_seqlen"]),
        }
        for mb in step
    ]
    return Fed(mbs, step.global_valid_tokens, sum(int(mb["cu_seqlens"][-1]) for mb in step))


def overlord(runtime: str) -> Made:
    """Return a feed with a client of this rank alone, through the prefetcher."""

    def made(corpus: Corpus, work: Work, ranks: int, steps: int, device: torch.device) -> Feed:
        @contextmanager
        def opened() -> Iterator[Iterator[Fed]]:
            with ov.launch(overlord_side.make_job(corpus, work), runtime=runtime) as session:
                yield prefetched(session.client(rank=0), device)

        return opened

    return made


def prefetched(client: Any, device: torch.device) -> Iterator[Fed]:
    """Yield steps that overlord.torch copies to the device in the background."""
    import overlord.torch as ot

    with contextlib.closing(ot.DevicePrefetcher(client, device)) as steps:
        for step in steps:
            microbatches = list(step)
            yield Fed(
                microbatches,
                step.global_valid_tokens,
                sum(len(mb["tokens"]) for mb in microbatches),
                steps.waited_s,
            )


def whole_node(corpus: Corpus, work: Work, ranks: int, steps: int, device: torch.device) -> Feed:
    """Return a feed of one rank, while the process runtime serves all ranks of a node.

    The other ranks are light processes that take their steps.
    """

    @contextmanager
    def opened() -> Iterator[Iterator[Fed]]:
        job = overlord_side.make_job(corpus, replace(work, ranks=ranks))
        with ov.launch(job, runtime="process") as session:
            served = session.serve()
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            others = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "gpu.takes",
                        json.dumps([served.address, served.token, rank]),
                    ],
                    env=environment,
                    cwd=HERE,
                )
                for rank in range(1, ranks)
            ]
            try:
                yield prefetched(session.client(rank=0), device)
            finally:
                for other in others:
                    other.kill()
                    other.wait()

    return opened


def dataloader(workers: bool) -> Made:
    """Return a feed by torch's DataLoader over the same sources, pinned.

    ``workers``: with the workers of the job, else in the loop itself.
    """

    def made(corpus: Corpus, work: Work, ranks: int, steps: int, device: torch.device) -> Feed:
        @contextmanager
        def opened() -> Iterator[Iterator[Fed]]:
            yield _dealt(
                _torch_microbatches(corpus, replace(work, peer="torch"), workers, device),
                work.microbatches,
                device,
            )

        return opened

    return made


def _torch_microbatches(
    corpus: Corpus, work: Work, workers: bool, device: torch.device
) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    from peers.kernel import mixed_microbatches
    from peers.torch_loader import Packed

    if not workers:
        return (
            {k: torch.as_tensor(v) for k, v in mb.items()}
            for mb in mixed_microbatches(corpus, work)
        )
    pinned = {"pin_memory": True} if device.type == "cuda" else {}
    return iter(
        DataLoader(
            Packed(corpus, work),
            batch_size=None,
            num_workers=work.workers,
            prefetch_factor=work.microbatches,
            **pinned,
        )
    )


def _dealt(stream: Iterator[Any], each: int, device: torch.device) -> Iterator[Fed]:
    """Yield steps of ``n`` microbatches each, copied in order."""
    while True:
        held = list(islice(stream, each))
        mbs = [
            {
                **{k: mb[k].to(device, non_blocking=True) for k in INTS},
                "max_seqlen": int(mb["max_seqlen"]),
            }
            for mb in held
        ]
        tokens = sum(len(mb["tokens"]) for mb in mbs)
        yield Fed(mbs, tokens, tokens)


FEEDS: dict[str, Made] = {
    "resident": resident,
    "overlord-local": overlord("local"),
    "overlord-process": overlord("process"),
    "overlord-node": whole_node,
    "torch": dataloader(True),
    "torch-no-worker": dataloader(False),
}
