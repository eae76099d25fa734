"""CPU per token of the readers of Megatron and MDS datasets, next to the libraries' own loaders.

    python benchmarks/formats.py                     # every peer that is installed, about 5 minutes
    python benchmarks/formats.py --formats megatron --tokens 20_000_000 --pairs 2
    python benchmarks/formats.py --save

Both loaders read the same files in the same run, which the library's own writer made, in turns.

- Megatron: ``GPTDataset`` over each dataset and ``BlendedDataset`` with the weights, in a torch
  ``DataLoader`` without worker processes. A sample has ``seq_length`` ids; documents are cut.
- Streaming: ``StreamingDataset`` over the streams with their proportions, in a
  ``StreamingDataLoader`` without worker processes. A sample is one array of ``seq_length`` ids.
- Overlord: the same sources and weights on the local runtime, shuffled, with the strategy
  ``packed`` and documents of at most ``seq_length`` ids, as many tokens a rank and step. One job
  delivers to all ranks; the peers run a loader in each rank, whose cost per token does not depend
  on their number.

A step of a rank has ``samples`` times ``seq_length`` tokens in 1 microbatch or several, as many for
both loaders: a peer's batch is a microbatch of Overlord.

Each cell is a fresh process, without threads of OpenMP. CPU is that of all its threads, divided by
the delivered tokens. "Steps" is from the first step after a warm-up to the last. "Whole" is the
whole process, with imports, indexes and the launch. The caches of indexes on both sides are filled
by a cell before. An element of every array of a step is used. Loaders differ in what a step has:
Megatron and Overlord deliver labels, positions and a loss mask, Streaming ids alone; only Overlord
keeps documents apart and accounts for every sample.

The peers need torch and megatron-core or a Streaming package in the same environment. Streaming
imports torchvision and transformers: where these are missing, empty modules take their place.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import click
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from peers.absent import allow_missing  # noqa: E402

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
PEERS = {"megatron": "megatron.core", "mds": "streaming"}
CORPUS = 40_000_000  # tokens that are written at most; longer cells read them again
WARM_UP = 20  # steps before the measured part
HEAD = (
    "format",
    "loader",
    "microbatches",
    "steps: us/ktok",
    "of the peer's",
    "whole: us/ktok",
    "of the peer's",
    "tokens/s",
    "steps of each cell",
)
NAMES = {"overlord": "Overlord", "megatron": "Megatron", "mds": "Streaming"}


# ----------------------------------------------------------------------------
# Corpora, written by the libraries that read them.


def lengths(tokens: int, seed: int) -> np.ndarray:
    """Lengths of documents as in web text: a mean of 600 ids, a few of them very long."""
    rng, mean = np.random.default_rng(seed), 600
    found = np.exp(rng.normal(np.log(mean) - 0.5, 1.0, 2 * tokens // mean)).astype(np.int64) + 1
    return found[: int(np.searchsorted(np.cumsum(found), tokens)) + 1]


def write_megatron(folder: Path, tokens: int, seq_length: int) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for k in range(len(WEIGHTS)):
        sizes = lengths(tokens // len(WEIGHTS), k)
        ids = np.random.default_rng(k).integers(0, 50_000, int(sizes.sum()))
        builder = IndexedDatasetBuilder(str(folder / f"s{k}.bin"), dtype=np.uint16)
        for part in np.split(ids, np.cumsum(sizes)[:-1]):
            builder.add_document(torch.from_numpy(part), [len(part)])
        builder.finalize(str(folder / f"s{k}.idx"))


def write_mds(folder: Path, tokens: int, seq_length: int) -> None:
    allow_missing()
    from streaming import MDSWriter

    for k in range(len(WEIGHTS)):
        rng = np.random.default_rng(k)
        with MDSWriter(out=str(folder / f"s{k}"), columns={"tokens": "ndarray:int32"}) as out:
            for _ in range(tokens // len(WEIGHTS) // seq_length):
                out.write({"tokens": rng.integers(0, 50_000, seq_length, np.int32)})


class Shape(NamedTuple):
    """The form of a step: ids of a sample, samples of a rank, ranks, microbatches of a rank."""

    seq_length: int
    samples: int
    ranks: int
    microbatches: int


# ----------------------------------------------------------------------------
# Loaders. Each yields the number of tokens of a step after touching its arrays.


def megatron_steps(folder: Path, seq_length: int, samples: int, tokens: int) -> Iterator[int]:
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, pad, vocab_size = 50_000, 50_001, 50_002
        unique_identifiers: ClassVar = {"class": "none"}

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([str(folder / f"s{k}") for k in range(len(WEIGHTS))], list(WEIGHTS)),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    n = 2 * tokens // seq_length
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [n, 0, 0], lambda: True, config).build()[0]
    for step in torch.utils.data.DataLoader(dataset, batch_size=samples):
        for array in step.values():
            array.numpy().item(-1)
        yield int(step["tokens"].numel())


def mds_steps(folder: Path, seq_length: int, samples: int, tokens: int) -> Iterator[int]:
    allow_missing()
    from streaming import Stream, StreamingDataLoader, StreamingDataset

    streams = [Stream(local=str(folder / f"s{k}"), proportion=w) for k, w in enumerate(WEIGHTS)]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, batch_size=samples, num_canonical_nodes=1
    )
    while True:
        for step in StreamingDataLoader(dataset, batch_size=samples, num_workers=0):
            step["tokens"].numpy().item(-1)
            yield int(step["tokens"].numel())


def overlord_steps(
    folder: Path, format: str, seq_length: int, samples: int, ranks: int, microbatches: int
) -> Iterator[int]:
    import overlord as ov

    end = ".bin" if format == "megatron" else ""
    size = (
        {"tokens": seq_length * samples * ranks}
        if format == "megatron"
        else {"samples": samples * ranks}
    )
    job = ov.Job(
        name="formats",
        sources=[
            ov.Source(f"s{k}", str(folder / f"s{k}{end}"), transforms=[ov.Tokens()], weight=w)
            for k, w in enumerate(WEIGHTS)
        ],
        batch=ov.Batch(context=seq_length * samples // microbatches, **size),
        max_document=seq_length,
        place=ov.Mesh(dp=ranks),
        strategy="packed",
        until=10**6,
    )
    with ov.launch(job) as session:
        clients = [session.client(rank) for rank in range(ranks)]
        while True:
            n = 0
            for client in clients:
                for microbatch in next(client):
                    for array in microbatch.values():
                        array.item(-1)
                    n += int(microbatch["cu_seqlens"][-1])
            yield n


def cell(loader: str, format: str, folder: Path, shape: Shape, tokens: int) -> None:
    """Print CPU and wall-clock seconds of the steps, their tokens, and CPU and tokens of all."""
    length, samples, ranks, parts = shape
    if loader == "overlord":
        steps, warm_up = overlord_steps(folder, format, length, samples, ranks, parts), WARM_UP
    else:
        made = {"megatron": megatron_steps, "mds": mds_steps}[format]
        warm_up = WARM_UP * ranks * parts
        steps = made(folder, length, samples // parts, tokens + warm_up * length * samples // parts)
    before = sum(next(steps) for _ in range(warm_up))
    cpu, wall, done = time.process_time(), time.perf_counter(), 0
    while done < tokens:
        done += next(steps)
    end = time.process_time()
    figures = end - cpu, time.perf_counter() - wall, done, end, before + done
    print("\n" + json.dumps(figures), flush=True)
    os._exit(0)  # peers leave threads and shared memory behind, which are no part of the figure


# ----------------------------------------------------------------------------
# The run and its page.


def child(words: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, __file__, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},  # as torchrun sets it
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


class Cell(NamedTuple):
    """The cost of a cell, in microseconds of CPU per thousand tokens, and its speed."""

    steps: float
    whole: float
    speed: float


def measured(format: str, folder: Path, words: list[str], pairs: int, parts: int) -> list[list]:
    """Return rows of the table; the two loaders take turns after a cell that fills caches."""
    found: dict[str, list[Cell]] = {"overlord": [], format: []}
    for k in range(pairs + 1):
        for loader, cells in found.items():
            given = [*words, "--microbatches", str(parts), "--folder", str(folder)]
            out = child(["--cell", f"{loader}/{format}", *given])
            cpu, wall, tokens, all_cpu, all_tokens = json.loads(out.strip().splitlines()[-1])
            if not k:
                continue
            cells.append(Cell(cpu / tokens * 1e9, all_cpu / all_tokens * 1e9, tokens / wall))
            one = cells[-1]
            shown = f"{one.steps:.2f} us/ktok, whole {one.whole:.2f} us/ktok"
            click.echo(f"{format}: {loader}: {parts} microbatches: {shown}", err=True)
    middle = {
        loader: Cell(*map(statistics.median, zip(*cells, strict=True)))
        for loader, cells in found.items()
    }
    return [
        [
            format,
            NAMES[loader],
            str(parts),
            f"{mine.steps:.2f}",
            f"{mine.steps / middle[format].steps:.2f}",
            f"{mine.whole:.2f}",
            f"{mine.whole / middle[format].whole:.2f}",
            f"{mine.speed:,.0f}",
            ", ".join(f"{one.steps:.2f}" for one in found[loader]),
        ]
        for loader, mine in middle.items()
    ]


@click.command()
@click.option("--formats", default="megatron,mds", show_default=True, help="Formats to measure.")
@click.option("--tokens", default=200_000_000, show_default=True, help="Tokens of a measured cell.")
@click.option("--seq-length", default=4096, show_default=True, help="Tokens of a sample.")
@click.option("--samples", default=16, show_default=True, help="Samples of a rank and step.")
@click.option("--ranks", default=8, show_default=True, help="Data-parallel ranks.")
@click.option("--microbatches", default="1,16", show_default=True, help="Of a rank and step.")
@click.option("--pairs", default=3, show_default=True, help="Cells of each loader, in turns.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of the corpora.")
@click.option("--save", "saves", is_flag=True, help="Write a page into benchmarks/results.")
@click.option("--cell", "one", hidden=True)
@click.option("--write", hidden=True)
def main(
    formats: str,
    tokens: int,
    seq_length: int,
    samples: int,
    ranks: int,
    microbatches: str,
    pairs: int,
    folder: Path | None,
    saves: bool,
    one: str | None,
    write: str | None,
) -> None:
    """Measure the CPU per token of two formats, next to the libraries that define them."""
    if one is not None or write is not None:
        assert folder is not None
        if one is not None:
            loader, format = one.split("/")
            cell(
                loader, format, folder, Shape(seq_length, samples, ranks, int(microbatches)), tokens
            )
        else:
            folder.mkdir(parents=True)
            writers = {"megatron": write_megatron, "mds": write_mds}
            writers[str(write)](folder, min(tokens, CORPUS), seq_length)
        return
    from page import command_line, machine, markdown_table, save, shown_table, wide_console

    words = ["--tokens", str(tokens), "--seq-length", str(seq_length)]
    words += ["--samples", str(samples), "--ranks", str(ranks)]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = folder or Path(temporary)
        for format in formats.split(","):
            if importlib.util.find_spec(PEERS[format].split(".")[0]) is None:
                click.echo(f"{format}: {PEERS[format]} is not installed here", err=True)
                continue
            if not (place := root / format).exists():
                child(["--write", format, "--folder", str(place), *words])
            for parts in map(int, microbatches.split(",")):
                rows += measured(format, place, words, pairs, parts)
    wide_console().print(shown_table("formats", HEAD, rows))
    if saves and rows:
        day = datetime.date.today()
        text = (
            f"# CPU of the readers of other libraries' datasets, {day}\n\n"
            f"`{command_line('benchmarks/formats.py')}` on {machine()}\n\n"
            f"{markdown_table(HEAD, rows)}\n"
        )
        click.echo(f"wrote {save(f'{day}-formats', text, {})}")


if __name__ == "__main__":
    main()
