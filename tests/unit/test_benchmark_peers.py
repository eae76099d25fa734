"""Every loader that the throughput benchmark compares delivers the arrays of the bare loop.

A loader is tested where its pinned versions are installed, or where its environment has been built.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import corpus as corpora
import throughput
from corpus import N_WORDS as END  # the id that ends a document
from corpus import Corpus, Words, name_of, open_corpus, write_source
from peers import environments, runner
from peers.bare import microbatches as bare_microbatches
from peers.contract import DTYPES, check_microbatch
from peers.conversion import convert, converted
from peers.kernel import Encoder, SourceRows, arrays_of, next_fit
from peers.measure import descendants, pss_bytes
from peers.runner import CellFailed, Figures, conversion, run_cell
from peers.standing import MEASURES, ahead, described, ordered
from peers.sweep import CLOSE, sweep
from peers.table import DRIVER, LABELS, PEERS, RANK, Peer, peer_of, reason_against
from peers.work import Work

BENCHMARKS = Path(throughput.__file__).parent
N_SOURCES, CONTEXT, COUNT = 3, 1024, 48
LIMIT_S = 240.0
LOADERS = [label for label in LABELS if PEERS[peer_of(label)[0]].processes == RANK]
JOBS = ("null", "tokenized")
CELLS = [(label, job) for label in LOADERS for job in JOBS if reason_against(label, job) is None]
# Energon packs buffer by buffer, and Megatron has no order of its own.
IN_ORDER = ("nodes", "torch", "torch-numpy", "stateful", "grain", "streaming", "datasets")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A few sources of some dozen kB, with a tokenizer."""
    folder = tmp_path_factory.mktemp("data") / f"v{corpora.VERSION}-seed1"
    folder.mkdir()
    words = Words.invent(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "SOURCE_BYTES", 2**17)
        patch.setattr(corpora, "VOCABULARY", 400)
        for number in range(N_SOURCES):
            write_source(folder / name_of(number), words, number, 1)
        corpora.train_tokenizer(folder / "tokenizer.json", words, 1)
    return open_corpus(folder, N_SOURCES)


def work_of(tiny: Corpus, label: str, job: str, **more: Any) -> Work:
    peer, shuffled = peer_of(label)
    given = {
        "n_sources": N_SOURCES,
        "tokens": 2 * COUNT * CONTEXT,
        "context": CONTEXT,
        "ranks": 1,
        "microbatches": 2,
        "shuffle": shuffled,
    }
    return Work(peer, job, str(tiny.folder), **{**given, **more})


def interpreter(label: str) -> str:
    peer = PEERS[peer_of(label)[0]]
    found = environments.present(peer, environments.default_folder())
    if found is None or find_spec("torch") is None:
        pytest.skip(f"{', '.join(peer.pins) or 'torch'} is not installed")
    return found


def arrays(work: Work, python: str, folder: Path) -> list[dict[str, np.ndarray]]:
    """Return the first microbatches of a loader."""
    program = Path(__file__).parent / "benchmark_arrays.py"
    command = [python, str(program), json.dumps(asdict(work)), str(COUNT), str(folder / "a.npz")]
    settings = {"PYTHONPATH": str(BENCHMARKS), "CELL_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(folder / "a.npz")
    return [{name: found[f"{i}/{name}"] for name in DTYPES} for i in range(COUNT)]


def documents(microbatch: dict[str, np.ndarray]) -> list[np.ndarray]:
    return np.split(microbatch["tokens"], microbatch["cu_seqlens"][1:-1])


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name in DTYPES:
        assert found[name].dtype == np.asarray(wanted[name]).dtype, name
        assert np.array_equal(found[name], wanted[name]), name


@pytest.mark.parametrize(("label", "job"), CELLS)
def test_a_loader_delivers_the_arrays_that_the_bare_loop_makes_of_its_documents(
    tiny: Corpus, tmp_path: Path, label: str, job: str
) -> None:
    work = work_of(tiny, label, job)
    found = arrays(work, interpreter(label), tmp_path)
    encode = Encoder(tiny, job, CONTEXT)
    rows = [
        {ids.astype(np.int64).tobytes() for ids in encode(list(SourceRows(s, work.column, 0, 1)))}
        for s in tiny.sources
    ]
    ramp = np.arange(CONTEXT, dtype=np.int64)
    for microbatch in found:
        check_microbatch(microbatch, CONTEXT, N_SOURCES)
        parts, sources = documents(microbatch), microbatch["source_ids"].tolist()
        assert_equal(microbatch, arrays_of(parts, sources, ramp))
        if work.peer != "megatron":
            assert all(d.tobytes() in rows[s] for d, s in zip(parts, sources, strict=True))
    assert len({source for m in found for source in m["source_ids"].tolist()}) > 1, "a mixture"


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("label", IN_ORDER)
def test_a_loader_in_order_delivers_one_source_as_the_bare_loop_does(
    tiny: Corpus, tmp_path: Path, label: str, job: str
) -> None:
    work = work_of(tiny, label, job, n_sources=1)
    wanted = islice(bare_microbatches(open_corpus(tiny.folder, 1), work), COUNT)
    for found, bare in zip(arrays(work, interpreter(label), tmp_path), wanted, strict=True):
        assert_equal(found, bare)


def test_megatron_delivers_pieces_of_documents_with_their_end(tiny: Corpus, tmp_path: Path) -> None:
    work = work_of(tiny, "megatron-shuffled", "null")
    text = [
        b"".join(
            np.append(row, END).astype(np.int64).tobytes() for row in SourceRows(s, "tokens", 0, 1)
        )
        for s in tiny.sources
    ]
    for microbatch in arrays(work, interpreter("megatron-shuffled"), tmp_path):
        parts, sources = documents(microbatch), microbatch["source_ids"].tolist()
        assert all(d.tobytes() in text[s] for d, s in zip(parts, sources, strict=True))
        assert all(d[-1] == END for d in parts[:-1]), "only the last one is cut"
        assert len(microbatch["tokens"]) == CONTEXT


def shared_segments(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that processes and their descendants have mapped."""
    found = set()
    for pid in {below for top in pids for below in descendants(top)}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= set(
                re.findall(r"/dev/shm/psm_\w+$", Path(f"/proc/{pid}/maps").read_text(), re.M)
            )
    return found


def test_a_killed_cell_leaves_no_shared_memory(
    tiny: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(tiny, "grain", "null", workers=1, python=interpreter("grain"))
    made: set[str] = set()

    def look(pids: Iterable[int]) -> int:
        made.update(shared_segments(pids := list(pids)))
        return pss_bytes(pids)

    monkeypatch.setattr(runner, "pss_bytes", look)
    conversion(work, LIMIT_S)
    run_cell(work, LIMIT_S)
    assert made, "its workers send arrays through shared memory"
    assert not [path for path in made if Path(path).exists()]


def test_ray_data_is_a_cell_like_the_others(tiny: Corpus) -> None:
    pytest.importorskip("ray")
    work = work_of(tiny, "ray-data", "null", ranks=2, tokens=200_000, trainer=False)
    found = run_cell(work, LIMIT_S)
    assert found.tokens >= 200_000
    assert found.processes > 2 + 1 + 1, "driver, ranks, and Ray's own"
    assert 0 < found.idle_pss_mb < found.pss_mb, "only the imports of ranks are left out"
    assert 0 < found.startup_cpu_s < found.cpu_s


def test_every_loader_and_its_format_is_in_the_folder_of_peers() -> None:
    for name, peer in PEERS.items():
        assert (BENCHMARKS / (peer.module.replace(".", "/") + ".py")).exists(), name
        assert all("==" in pin for pin in peer.pins), name
    assert {name for name, p in PEERS.items() if p.processes == DRIVER} == {
        "ray-data",
        "ray-data-list",
    }
    assert peer_of("grain-shuffled") == ("grain", True)
    assert peer_of("overlord-shuffled") == ("overlord-shuffled", True)
    assert peer_of("grain") == ("grain", False)


def test_the_smallest_number_of_workers_that_keeps_pace_is_taken() -> None:
    speeds = {0: 1.0, 1: 2.0, 2: CLOSE * 4.0, 4: 5.0}
    found = sweep(4.0, [4, 2, 1, 0], lambda n: speeds[n])
    assert found.chosen == 2
    assert list(found.speeds) == [0, 1, 2], "no more are tried than needed"
    assert found.keeps_pace(2)


def test_of_numbers_that_do_not_keep_pace_the_fastest_is_taken() -> None:
    found = sweep(10.0, [0, 1, 2], {0: 1.0, 1: 3.0, 2: 2.0}.__getitem__)
    assert found.chosen == 1
    assert not found.keeps_pace(1)
    assert len(found.speeds) == 3


def figures(peer: str, cpu: float, wall: float, **given: Any) -> Figures:
    zero = dict.fromkeys(Figures.__dataclass_fields__, 1) | {"job": "null", "n_sources": 5}
    times = {"steady_cpu_s": cpu, "cpu_s": cpu, "steady_wall_s": wall, "wall_s": wall}
    return Figures(
        **(zero | times | {"peer": peer, "tokens": 10**6, "steady_tokens": 10**6} | given)
    )


def test_loaders_that_are_ahead_of_overlord_come_first() -> None:
    runs = {
        "bare": [figures("bare", 1.0, 1.0)],
        "overlord": [figures("overlord", 2.0, 2.0)],
        "overlord-shuffled": [figures("overlord-shuffled", 9.0, 9.0)],
        "slow": [figures("slow", 3.0, 3.0)],
        "grain": [figures("grain", 3.0, 1.0)],
        "nodes": [figures("nodes", 1.5, 1.5)],
        "grain-shuffled": [figures("grain-shuffled", 9.5, 9.5, pss_mb=0.5)],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "slow", Peer(module="slow"))
        assert ordered(runs) == [
            "bare",
            "nodes",
            "grain",
            "grain-shuffled",
            "overlord",
            "overlord-shuffled",
            "slow",
        ]
        assert ahead(runs, "slow") == {}
    assert described(ahead(runs, "grain")) == "overlord: Mtok/s, whole Mtok/s"
    assert described(ahead(runs, "grain-shuffled")) == (
        "overlord-shuffled: MB over imports, MB with imports"
    )
    assert described({"overlord": list(MEASURES)}) == "overlord: all"


def test_the_program_sweeps_measures_and_lists_what_it_leaves_out(
    tiny: Corpus, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    words = ["--sources", "2", "--jobs", "null", "--ranks", "1", "--pairs", "1", "--workers", "0,1"]
    # Enough for the bare loop to take several ticks of the clock of CPU time.
    words += ["--tokens", "null=8M", "--peers", "bare,overlord,torch-numpy,megatron"]
    words += ["--data", str(tiny.folder.parent), "--envs", str(tmp_path / "envs")]
    words += ["--json", str(tmp_path / "runs.json")]
    done = CliRunner().invoke(throughput.main, words)
    assert done.exit_code == 0, done.output
    assert PEERS["megatron"].unable["in order"] in done.output
    assert not (tmp_path / "envs").exists(), "a loader that cannot do the job is not installed"
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["peer"] for run in runs] == ["bare", "overlord", "bare", "torch-numpy", "bare"]
    assert runs[3]["workers"] in (0, 1)
    assert all(run["tokens"] >= 8e6 for run in runs)


def test_a_run_is_longer_than_its_first_step(tiny: Corpus) -> None:
    plan = throughput.Plan(
        labels=["bare"],
        jobs=["null"],
        amount=throughput.Amount({"null": 1000}),
        pairs=1,
        ranks=3,
        workers=(0,),
        seed=1,
        limit_s=1.0,
        idle_s=0.0,
        envs=Path("nowhere"),
        pace=None,
    )
    work = plan.work("grain-shuffled", "null", tiny, 2, short=True)
    assert work.tokens == throughput.LEAST_STEPS * 3 * work.microbatches * work.context
    assert (work.peer, work.shuffle, work.workers, work.label) == (
        "grain",
        True,
        2,
        "grain-shuffled",
    )
    assert plan.counts("ray-data") == [1], "Ray Data packs in at least one actor"


def test_a_page_lists_loaders_without_a_row_with_the_reason() -> None:
    bare = figures("bare", 1.0, 1.0)
    made = [throughput.Setting(job, 5, [bare, bare]) for job in JOBS]
    made[0].failed["grain"] = "not installed: no network"
    for setting in made:
        setting.failed["megatron"] = "it shuffles"
    text = throughput.markdown(made, 1, "2026-01-01", [["nodes", "torchdata 0.11.0", ""]])
    assert "| grain | null 5 | not installed: no network |" in text
    assert "| megatron | everywhere | it shuffles |" in text
    assert "| nodes | torchdata 0.11.0 |  |" in text


def test_a_loader_that_pip_cannot_install_is_missing_with_the_error_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    peer = Peer(module="none", pins=("no-such-loader==1.0",))
    assert environments.present(peer, tmp_path) is None
    with pytest.raises(environments.NotInstallable, match="no-such-loader"):
        environments.interpreter_of(peer, tmp_path)
    assert environments.present(peer, tmp_path) is None


def test_an_interrupted_conversion_is_done_again_and_a_complete_one_is_not(tiny: Corpus) -> None:
    class Writer:
        FORMAT = "test"

        def __init__(self, fails_at: int | None = None):
            self.fails_at, self.wrote = fails_at, []

        def write_source(self, folder: Path, source: Any, number: int, column: str) -> None:
            (folder / "rows").write_text(source.name)
            if number == self.fails_at:
                raise OSError("no space left")
            self.wrote.append(number)

    broken, whole, again = Writer(fails_at=1), Writer(), Writer()
    with pytest.raises(OSError, match="no space"):
        convert(tiny, broken, "tokens")
    assert not converted(tiny, "test", "tokens", tiny.sources[1]).exists()
    convert(tiny, whole, "tokens")
    convert(tiny, again, "tokens")
    assert (broken.wrote, whole.wrote, again.wrote) == ([0], [1, 2], [])
    for source in tiny.sources:
        assert (converted(tiny, "test", "tokens", source) / "rows").read_text() == source.name


def test_next_fit_opens_a_microbatch_where_a_document_does_not_fit() -> None:
    assert next_fit([5, 5, 1, 9, 2], 10) == [0, 2, 4]


def test_a_cell_whose_interpreter_lacks_the_loader_fails_with_the_reason(tiny: Corpus) -> None:
    if environments.has_pins(PEERS["grain"]):
        pytest.skip("Grain is installed here")
    with pytest.raises(CellFailed, match="No module named 'grain'"):
        run_cell(work_of(tiny, "grain", "null"), LIMIT_S)
