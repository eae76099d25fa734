"""CPU per token of the readers of Megatron and MDS datasets, next to the libraries' own loaders.

    python benchmarks/formats.py                     # every peer that is installed, about 5 minutes
    python benchmarks/formats.py --formats megatron --tokens 5_000_000 --pairs 2
    python benchmarks/formats.py --save

Both loaders read the same files in the same run, which the library's own writer made, in turns.

- Megatron: ``GPTDataset`` over each dataset and ``BlendedDataset`` with the weights, in a torch
  ``DataLoader`` without worker processes. A sample has ``seq_length`` ids; documents are cut.
- Streaming: ``StreamingDataset`` over the streams with their proportions, in a
  ``StreamingDataLoader`` without worker processes. A sample is one array of ``seq_length`` ids.
- Overlord: the same sources and weights on the local runtime, shuffled, with the strategy
  ``packed``, as many tokens a rank and step. One job delivers to all ranks; the peers run a loader
  in each rank, whose cost per token does not depend on their number.

Each cell is a fresh process. CPU is that of all threads of the process, divided by the delivered
tokens. It is measured from the first step after a warm-up to the last. Every array of a step
is touched. Loaders differ in what a step has: Megatron and Overlord deliver labels, positions and a
loss mask, Streaming ids alone; only Overlord keeps documents apart and accounts for every sample.

The peers need torch and megatron-core or a Streaming package in the same environment. Streaming
imports torchvision and transformers: where these are missing, empty modules take their place.
"""

from __future__ import annotations

import datetime
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
PEERS = {"megatron": "megatron.core", "mds": "streaming"}
WARM_UP = 20  # steps before the measured part
HEAD = ("format", "loader", "CPU us/ktok", "of Overlord's", "tokens/s", "cells")


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


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules that Streaming imports and this benchmark does not use."""

    NAMES = ("torchvision", "transformers")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def allow_missing() -> None:
    sys.meta_path.append(EmptyModules())  # last: an installed package is found before


# ----------------------------------------------------------------------------
# Loaders. Each yields the number of tokens of a step after touching its arrays.


def megatron_steps(folder: Path, seq_length: int, samples: int) -> Iterator[int]:
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
    n = 10**6 // seq_length * 100
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [n, 0, 0], lambda: True, config).build()[0]
    for step in torch.utils.data.DataLoader(dataset, batch_size=samples):
        for array in step.values():
            array.numpy()[..., -1].sum()
        yield int(step["tokens"].numel())


def mds_steps(folder: Path, seq_length: int, samples: int) -> Iterator[int]:
    allow_missing()
    from streaming import Stream, StreamingDataLoader, StreamingDataset

    streams = [Stream(local=str(folder / f"s{k}"), proportion=w) for k, w in enumerate(WEIGHTS)]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, batch_size=samples, num_canonical_nodes=1
    )
    while True:
        for step in StreamingDataLoader(dataset, batch_size=samples, num_workers=0):
            step["tokens"].numpy()[..., -1].sum()
            yield int(step["tokens"].numel())


def overlord_steps(
    folder: Path, format: str, seq_length: int, samples: int, ranks: int
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
        batch=ov.Batch(context=seq_length, **size),
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
                        np.asarray(array).ravel()[-1:].sum()
                    n += int(microbatch["cu_seqlens"][-1])
            yield n


def cell(
    loader: str, format: str, folder: Path, seq_length: int, samples: int, ranks: int, tokens: int
) -> None:
    """Print the CPU seconds, the wall-clock seconds and the tokens of a measured run."""
    steps = (
        overlord_steps(folder, format, seq_length, samples, ranks)
        if loader == "overlord"
        else {"megatron": megatron_steps, "mds": mds_steps}[format](folder, seq_length, samples)
    )
    for _ in range(WARM_UP if loader == "overlord" else WARM_UP * ranks):
        next(steps)
    cpu, wall, done = time.process_time(), time.perf_counter(), 0
    while done < tokens:
        done += next(steps)
    figures = time.process_time() - cpu, time.perf_counter() - wall, done
    print("\n" + json.dumps(figures), flush=True)
    os._exit(0)  # peers leave threads and shared memory behind, which are no part of the figure


# ----------------------------------------------------------------------------
# The run and its page.


def child(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def measured(format: str, folder: Path, options: dict[str, int], pairs: int) -> list[list[str]]:
    """Return rows of the table; the two loaders take turns."""
    found: dict[str, list[tuple[float, float]]] = {"overlord": [], format: []}
    words = [
        x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    for _ in range(pairs):
        for loader, figures in found.items():
            out = child(["--cell", f"{loader}/{format}", "--folder", str(folder), *words])
            cpu, wall, tokens = json.loads(out.strip().splitlines()[-1])
            figures.append((cpu / tokens * 1e9, tokens / wall))
            click.echo(f"{format}: {loader}: {figures[-1][0]:.2f} us/ktok", err=True)
    mine = statistics.median(cpu for cpu, _ in found["overlord"])
    names = {"overlord": "Overlord", "megatron": "Megatron", "mds": "Streaming"}
    return [
        [
            format,
            names[loader],
            f"{(cpu := statistics.median(c for c, _ in figures)):.2f}",
            "1" if loader == "overlord" else f"{cpu / mine:.2f}",
            f"{statistics.median(speed for _, speed in figures):,.0f}",
            ", ".join(f"{c:.2f}" for c, _ in figures),
        ]
        for loader, figures in found.items()
    ]


@click.command()
@click.option("--formats", default="megatron,mds", show_default=True, help="Formats to measure.")
@click.option("--tokens", default=40_000_000, show_default=True, help="Tokens of a measured cell.")
@click.option("--seq-length", default=4096, show_default=True, help="Tokens of a sample.")
@click.option("--samples", default=16, show_default=True, help="Samples of a rank and step.")
@click.option("--ranks", default=8, show_default=True, help="Data-parallel ranks.")
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
            cell(*one.split("/"), folder, seq_length, samples, ranks, tokens)  # type: ignore[arg-type]
        else:
            folder.mkdir(parents=True)
            {"megatron": write_megatron, "mds": write_mds}[str(write)](folder, tokens, seq_length)
        return
    from page import command_line, machine, markdown_table, save, shown_table, wide_console

    options = {"tokens": tokens, "seq_length": seq_length, "samples": samples, "ranks": ranks}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = folder or Path(temporary)
        for format in formats.split(","):
            if importlib.util.find_spec(PEERS[format].split(".")[0]) is None:
                click.echo(f"{format}: {PEERS[format]} is not installed here", err=True)
                continue
            if not (place := root / format).exists():
                child(
                    [
                        "--write",
                        format,
                        "--folder",
                        str(place),
                        "--tokens",
                        str(tokens),
                        "--seq-length",
                        str(seq_length),
                    ]
                )
            rows += measured(format, place, options, pairs)
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
