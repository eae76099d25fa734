"""Tokenizers by path, folder, name and object: the same ids everywhere, and content as identity."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.errors import JobError, TransformError
from overlord.jobfile.yaml_file import read_job, write_job
from overlord.transforms import tokenizer_content
from overlord.transforms.base import RowIds
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.timeouts import Timeouts
from overlord.transforms.tokenize import Tokenize
from overlord.transforms.transform_process import TransformWorker
from tests.tokenizers_made import OBJECTS, bpe, encoding, fast, pieces, processor

TEXTS = ["hello world", "lower worlds é", "", "<s> hello"]


PLAIN = {
    "tokenizers": lambda t, text: t.encode(text, add_special_tokens=False).ids,
    "transformers": lambda t, text: t.encode(text, add_special_tokens=False),
    "tiktoken": lambda t, text: t.encode_ordinary(text),
    "sentencepiece": lambda t, text: t.encode(text, add_bos=False),
}


def pipeline(tokenizer: Any, **options: Any) -> Pipeline:
    return Pipeline(
        "web", [Tokenize(tokenizer, **options)], seed=0, context=1000, on_long="truncate"
    )


def ids_of(p: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text that has some."""
    table = pa.table({"text": texts})
    block = p.row_stage(p.slice_stage(table, RowIds(0, 0, np.arange(len(texts)))).table)
    return [block.tokens[i].tolist() for i in range(len(block))]


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_gives_its_own_ids_without_special_tokens(kind: str):
    thing = OBJECTS[kind]()
    wanted = [PLAIN[kind](thing, text) for text in TEXTS]
    assert ids_of(pipeline(thing), TEXTS) == [row for row in wanted if row]


@pytest.mark.parametrize("kind", OBJECTS)
def test_bos_and_eos_are_added_once_to_every_document(kind: str):
    thing = OBJECTS[kind]()
    bare = ids_of(pipeline(thing), ["hello world"])[0]
    assert ids_of(pipeline(thing, bos=7, eos=70_000), ["hello world"]) == [[7, *bare, 70_000]]


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_travels_as_its_content_and_works_in_another_process(kind: str):
    p = pipeline(OBJECTS[kind](), eos=1)
    spec = p.transforms[0]
    assert isinstance(spec, Tokenize)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec).startswith(f"Tokenize(<{'tokenizers' if kind == 'transformers' else kind} ")
    with TransformWorker(p) as worker:
        assert ids_of(worker, TEXTS) == ids_of(p, TEXTS)


@pytest.mark.parametrize("kind", OBJECTS)
def test_equal_content_has_one_fingerprint_and_other_content_another(kind: str):
    one, again = Tokenize(OBJECTS[kind]()), Tokenize(OBJECTS[kind]())
    assert one.fingerprint() == again.fingerprint()
    assert len({Tokenize(make()).fingerprint() for make in OBJECTS.values()}) == 4


def test_padding_and_truncation_of_an_object_change_neither_ids_nor_fingerprint():
    thing = bpe()
    before = Tokenize(thing)
    thing.enable_truncation(1)
    thing.enable_padding(length=9)
    assert Tokenize(thing).fingerprint() == before.fingerprint()
    assert thing.truncation is not None


def test_a_folder_a_file_and_the_object_of_it_are_one_tokenizer(tmp_path: Path):
    fast().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    assert ids_of(pipeline(tmp_path / "model"), TEXTS) == ids_of(pipeline(file), TEXTS)
    assert Tokenize(tmp_path / "model").fingerprint() == Tokenize(file).fingerprint()


def test_a_sentencepiece_model_is_found_by_its_suffix_and_in_a_folder(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(pieces())
    prints = {
        Tokenize(t).fingerprint() for t in (tmp_path, tmp_path / "tokenizer.model", processor())
    }
    assert len(prints) == 1


def test_tokens_by_name_are_those_of_the_vocabulary():
    assert ids_of(pipeline(encoding(), eos="<|end|>"), ["a"]) == [[97, 300]]
    assert ids_of(pipeline(processor(), bos="<s>"), ["hello"])[0][0] == processor().bos_id()
    for thing in (encoding(), processor()):
        with pytest.raises(TransformError, match=r"eos: expected a token of <\w+ \w+>, got '<no>'"):
            pipeline(thing, eos="<no>")


def test_text_like_a_special_token_is_plain_text_for_tiktoken():
    assert 300 not in ids_of(pipeline(encoding()), ["a<|end|>"])[0]


def test_a_template_that_adds_bos_refuses_another_bos():
    bare = ids_of(pipeline(fast()), ["hello"])[0]
    assert ids_of(pipeline(fast(), add_special_tokens=True), ["hello"]) == [[0, *bare]]
    assert ids_of(pipeline(fast(), add_special_tokens=True, eos="</s>"), ["hello"]) == [
        [0, *bare, 1]
    ]
    with pytest.raises(
        TransformError, match=r"bos: expected .*, got '<s>', .* added twice; remove bos"
    ):
        pipeline(fast(), add_special_tokens=True, bos="<s>")


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
def test_a_library_without_templates_refuses_add_special_tokens(kind: str):
    with pytest.raises(TransformError, match=r"which has none; set bos and eos"):
        pipeline(OBJECTS[kind](), add_special_tokens=True)


def test_what_is_not_a_tokenizer_is_refused_when_the_specification_is_made(tmp_path: Path):
    for thing in (3, b"x", object(), None):
        with pytest.raises(JobError, match="tokenizer: expected a path, a name"):
            Tokenize(thing)

    class Slow:
        def apply_chat_template(self) -> None: ...

    with pytest.raises(
        JobError, match=r"expected a fast tokenizer of transformers, got Slow; load"
    ):
        Tokenize(Slow())
    with pytest.raises(TransformError, match=r"expected one of tokenizer.json, .*, got none; save"):
        pipeline(tmp_path)
    (tmp_path / "a.model").write_bytes(b"nonsense")
    with pytest.raises(TransformError, match="expected a sentencepiece model, got"):
        pipeline(tmp_path / "a.model")


def test_a_name_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    file = tmp_path / "tokenizer.json"
    bpe().save(str(file))
    asked = []

    def cached(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name, revision))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert Tokenize("owner/cached@v1").fingerprint() == Tokenize(file).fingerprint()
    assert asked == [("owner/cached", "tokenizer.json", "v1")]


def test_a_name_of_tiktoken_is_the_encoding_that_it_names(monkeypatch: pytest.MonkeyPatch):
    from tiktoken import registry

    registry.list_encoding_names()  # fills the table
    known = registry.ENCODING_CONSTRUCTORS
    made = encoding()
    parts = {name: getattr(made, f"_{name}") for name in ("pat_str", "mergeable_ranks")}
    special = {"special_tokens": {"<|end|>": 300}}
    monkeypatch.setitem(known, "own", lambda: {"name": "own", **parts, **special})
    assert Tokenize("tiktoken:own").fingerprint() == Tokenize(made).fingerprint()
    assert ids_of(pipeline("tiktoken:own"), TEXTS) == ids_of(pipeline(made), TEXTS)


@pytest.mark.parametrize("name", ["owner/absent", "tiktoken:cl100k_base"])
def test_a_download_that_hangs_ends_with_a_remedy(name: str, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    import tiktoken

    monkeypatch.setattr(tokenizer_content, "TIMEOUTS", Timeouts(download_s=0.1))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    for library, call in ((huggingface_hub, "hf_hub_download"), (tiktoken, "get_encoding")):
        monkeypatch.setattr(library, call, lambda *a, **k: time.sleep(2))
    with pytest.raises(
        TransformError, match=r"expected the download to end within 0 s, got no end; fetch it where"
    ):
        pipeline(name)


def test_an_unknown_encoding_of_tiktoken_lists_the_known_ones():
    with pytest.raises(TransformError, match=r"unknown encoding; known: .*cl100k_base"):
        pipeline("tiktoken:nope")


def test_job_files_take_names_paths_and_folders(tmp_path: Path):
    fast().save_pretrained(tmp_path / "model")
    for given, wanted in (
        ("gpt2", "gpt2"),
        ("owner/name@main", "owner/name@main"),
        ("tiktoken:cl100k_base", "tiktoken:cl100k_base"),
        ("model", str(tmp_path / "model")),
        ("t.json", str(tmp_path / "t.json")),
        ("sub/x.json", str(tmp_path / "sub/x.json")),
    ):
        path = tmp_path / "job.yaml"
        path.write_text(
            "name: a\nbatch: {samples: 2, context: 8}\n"
            f"sources: {{a: {{uri: x.jsonl, transforms: [{{tokenize: {{tokenizer: '{given}'}}}}]}}}}\n"
        )
        job = read_job(path)
        assert job.sources[0].transforms[0].tokenizer == wanted
        path.write_text(write_job(job))
        assert read_job(path).sources[0].transforms == job.sources[0].transforms


def test_an_object_cannot_be_written_to_a_job_file():
    source = ov.Source("a", "x.jsonl", transforms=[Tokenize(encoding())])
    job = ov.Job(name="a", sources=[source], batch=ov.Batch(samples=2, context=8))
    with pytest.raises(
        JobError, match=r"expected a tokenizer by path or name, got an object; save"
    ):
        write_job(job)


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_job_resumes_with_an_equal_object_and_refuses_another(kind: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n{"text": "lower"}\n' * 10)

    def job(eos: int) -> ov.Job:
        transforms = [Tokenize(OBJECTS[kind](), eos=eos)]
        source = ov.Source("a", str(tmp_path / "a.jsonl"), transforms=transforms)
        batch = ov.Batch(samples=2, context=64)
        return ov.Job(name="a", sources=[source], batch=batch, until=6)

    def rows(client: Any) -> list[list[tuple[str, list[int]]]]:
        return [
            [
                (str(p.sample), m["tokens"][p.offset : p.offset + p.length].tolist())
                for m in step
                for p in m.samples
            ]
            for step in client
        ]

    with ov.launch(job(1)) as session:
        wanted = rows(session.client(0))
    with ov.launch(job(1)) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
    with ov.launch(job(1), resume=state) as session:
        assert rows(session.client(0)) == wanted[1:]
    with pytest.raises(ov.StateMismatch):
        ov.launch(job(2), resume=state)
