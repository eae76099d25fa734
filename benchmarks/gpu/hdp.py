"""Hybrid data parallelism on one GPU: correctness, times of ring positions, steps and offload.

    python benchmarks/gpu/hdp.py --json hdp.json --save      # one H200: at most nine minutes
    python benchmarks/gpu/hdp.py page --json hdp.json --save # the page again, without a GPU
    python benchmarks/gpu/hdp.py --device cpu --tiny         # a smoke test, no measurement

Ring positions run one after another on one device, without a network. benchmarks/README.md explains
the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # before torch: pieces of many sizes, no stalls
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # its own modules, also when started from elsewhere

import torch

from gpu import hdp_attention, hdp_offload, hdp_steps
from gpu.hdp_page import page
from gpu.record import Record, Row
from gpu.rings import LLAMA_8B, LLAMA_12B, TINY, Bench
from gpu.timing import default_folder, device_of, machine
from hybrid.lengths import LINUX
from hybrid.measure import MODEL
from measured.pages import tagged, this_machine


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="shapes that a laptop runs: a look, no measurement"
    )
    parser.add_argument("--budget", type=float, default=525.0, help="seconds of the whole program")
    parser.add_argument("--parts", default="abcd", help="which parts run")
    parser.add_argument(
        "--lengths",
        type=Path,
        default=LINUX,
        help="bytes of the files of a code tree, .npy or .npz",
    )
    parser.add_argument("--json", type=Path, help="results, written after every cell")
    parser.add_argument("--save", action="store_true", help="write the page")
    parser.add_argument("--out", type=Path, default=default_folder(), help="folder of the page")
    return parser


def run(given: argparse.Namespace) -> Row:
    """Run all parts within the budget; return the results."""
    device = device_of(given.device)
    cuda = device.type == "cuda"
    words = " ".join(["python benchmarks/gpu/hdp.py", *_without_files(sys.argv[1:])])
    card = torch.cuda.get_device_name() if cuda else ""
    record = Record(
        given.json,
        given.budget,
        date=date.today().isoformat(),
        command=words,
        machine=machine(device),
        tag="H200" if "H200" in card else this_machine(),
        tiny=given.tiny,
        limit_s=given.budget,
        shapes={"layer": str(TINY if given.tiny else LLAMA_8B), "offload": str(LLAMA_12B)},
    )
    if "d" in given.parts:  # first: it needs little time, and steps take all that is left
        hdp_offload.offloading(record, device, tiny=given.tiny)
    if cuda:
        torch.cuda.empty_cache()
    record.attempt("abc, rings", _rings, record, given, device)
    record.about(machine=machine(device), wall_s=record.now())
    return record.data


def _rings(record: Record, given: argparse.Namespace, device: torch.device) -> None:
    """Run the parts that need ring positions; their memory is free afterwards."""
    shape = TINY if given.tiny else LLAMA_8B
    grid = hdp_attention.SMALL if given.tiny else hdp_attention.REAL
    if "a" in given.parts:
        hdp_attention.correctness(record, shape, grid, device)
    if not {"b", "c"} & set(given.parts):
        return
    bench = Bench(shape, grid.whole, grid.local, device)
    costs = MODEL
    if "b" in given.parts:
        costs = hdp_attention.times(record, bench, grid, 0.0 if given.tiny else 3.0)
    if "c" in given.parts:
        cases = hdp_steps.SMALL if given.tiny else hdp_steps.CASES
        hdp_steps.steps(record, bench, cases, costs, given.lengths)


def _without_files(words: Sequence[str]) -> list[str]:
    kept = list(words)
    for where in ("--json", "--out", "--lengths"):
        if where in kept:
            at = kept.index(where)
            del kept[at : at + 2]
    return kept


def save(data: Row, folder: Path) -> Path:
    """Write the dated page of these results into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    name, text = tagged(f"{data['date']}-gpu-hdp", page(data), data["tag"], folder)
    path = folder / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    return path


def main(words: Sequence[str] | None = None) -> Row:
    given = arguments().parse_args(words)
    if given.what == "page":
        if given.json is None:
            raise SystemExit("page: expected --json FILE with results, got none; run this first")
        data = json.loads(given.json.read_text(encoding="utf-8"))
    else:
        data = run(given)
    print(page(data))
    if given.save:
        print(f"saved {save(data, given.out)}")
    return data


if __name__ == "__main__":
    main()
