"""One job with every input: datasets of other libraries, tables and texts, tokenizers of every
library as objects and by name, and fill in the middle. One stream on every runtime, after a resume
and a kill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import overlord as ov
from tests.corpus import write_rows, write_texts
from tests.processes import WAIT_S, WORKER_RUNTIME, workers_of
from tests.store_jobs import ROWS, delivered
from tests.tokenizers_made import OBJECTS, bpe, fast, pieces

pytestmark = pytest.mark.timeout(200)
HUB = "owner/tiny"
TEXTS = 24  # rows of each source


def hub_cache(root: Path, name: str) -> None:
    """Write the cache of a model, as a download lays it out."""
    model = root / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    bpe().save(str(model / "snapshots" / commit / "tokenizer.json"))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Tokenizers of every kind: paths, a folder, a name and objects."""
    root = tmp_path_factory.mktemp("tokenizers")
    bpe().save(str(root / "tokenizer.json"))
    (root / "spm.model").write_bytes(pieces())
    fast().save_pretrained(root / "model")
    found: dict[str, Any] = {kind: make() for kind, make in OBJECTS.items()}
    found |= {"path": str(root / "tokenizer.json"), "spm": str(root / "spm.model")}
    found["folder"] = str(root / "model")
    hub = Path(os.environ["HF_HUB_CACHE"])
    hub_cache(hub, HUB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(hub))  # if the import was before the variable
        yield found | {"name": HUB}


@pytest.fixture(scope="module")
def every_input(named: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ov.Job:
    root = tmp_path_factory.mktemp("inputs")
    sources = []
    for format in ("megatron", "megatron.modes", "mds", "mds.zstd"):
        glob = write_rows(root / format, format, ROWS[:TEXTS])
        name = format.replace(".", "-")
        sources.append(ov.Source(name, glob, transforms=[ov.Tokens("tokens")], epochs=1))
    formats = ("csv", "tsv.gz", "lines", "paragraphs.zst", "text", "lines.zst", "csv", "paragraphs")
    for (kind, tokenizer), format in zip(named.items(), formats, strict=False):
        texts = [f"hello {k} {'lower ' * (k % 5)}world" for k in range(TEXTS)]
        files = TEXTS if format == "text" else 2
        glob = write_texts(root / kind, format, texts, files)
        fim = ov.FillInMiddle(0.5, 0.5, prefix=1, suffix=2, middle=3)
        chain = [fim, ov.Tokenize(tokenizer, bos=4, eos=5)]
        format = format.partition(".")[0]
        sources.append(ov.Source(kind, glob, format=format, transforms=chain, epochs=1))
    batch = ov.Batch(samples=32, context=128, microbatches=2)
    return ov.Job(name="inputs", sources=sources, batch=batch, seed=7, slice_rows=8)


@pytest.fixture(scope="module")
def wanted(every_input: ov.Job) -> list[Any]:
    with ov.launch(every_input, stall_limit_s=WAIT_S) as session:
        found = delivered(session.client(0))
        assert session.quarantine() == []
    return found


def test_a_local_run_has_every_row_once(
    every_input: ov.Job, named: dict[str, Any], wanted: list[Any]
) -> None:
    drawn = [sample for step in wanted for sample, _ in step]
    assert len(set(drawn)) == len(drawn)
    count = {source.name: 0 for source in every_input.sources}
    for sample in drawn:
        count[sample[0]] += 1
    assert count == dict.fromkeys(count, TEXTS)
    texts = [ids for step in wanted for sample, ids in step if sample[0] in named]
    assert all((ids[0], ids[-1]) == (4, 5) for ids in texts)
    rearranged = [ids for ids in texts if ids[1] in (1, 2)]
    assert 0 < len(rearranged) < len(texts)
    assert all({1, 2, 3} <= set(ids) for ids in rearranged)


@pytest.mark.parametrize("runtime", [WORKER_RUNTIME, "simulated"])
def test_every_runtime_delivers_the_stream(
    every_input: ov.Job, wanted: list[Any], runtime: str
) -> None:
    if runtime == "simulated":
        done = ov.simulate(every_input, seed=1)
        assert done.error is None
        assert delivered(done.steps[0]) == wanted
        return
    with ov.launch(every_input, runtime=runtime, stall_limit_s=WAIT_S, hosts=2) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        state = client.state_dict()
        session.kill(next(name for name in workers_of(session) if name.startswith("loader")))
        got += list(client)
        assert session.quarantine() == []
    assert delivered(got) == wanted
    with ov.launch(every_input, resume=state, stall_limit_s=WAIT_S) as session:
        assert delivered(session.client(0)) == wanted[2:]


def test_a_job_file_with_tokenizers_by_path_and_name_has_the_stream_of_the_job(
    every_input: ov.Job, named: dict[str, Any], tmp_path: Path
) -> None:
    kinds = [kind for kind in named if kind not in OBJECTS]
    sources = [source for source in every_input.sources if source.name in kinds]
    job = ov.Job(name="inputs", sources=sources, batch=every_input.batch, seed=7, slice_rows=8)
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    streams = []
    for made in (job, ov.Job.from_yaml(tmp_path / "job.yaml")):
        with ov.launch(made, stall_limit_s=WAIT_S) as session:
            streams.append(delivered(session.client(0)))
    assert streams[0] == streams[1]
    assert sum(map(len, streams[0])) == TEXTS * len(kinds)
