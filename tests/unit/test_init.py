"""``overlord init``: what it finds in data, and that the job that it writes runs unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.cli.demo import demo
from overlord.discovery.column_roles import roles_of
from overlord.discovery.data_groups import divide, stem_of, unique_names, usable
from overlord.discovery.tokenizer_search import DEMO
from overlord.jobfile.yaml_file import read_job
from overlord.mesh import Batch
from overlord.planning.predicted_gain import drawn_buffer, predict_gain
from overlord.planning.strategies import STRATEGIES
from tests.corpus import write_megatron, write_rows
from tests.first_data import CHATS, DATA, IDS, TEXTS, images, tokenizer
from tests.unit.test_cli import overlord


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without a cache of the Hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def init(*args: str | Path) -> dict[str, Any]:
    result = overlord("init", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def failed(*args: str | Path) -> str:
    result = overlord("init", *args)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def sources(result: dict[str, Any]) -> dict[str, str]:
    return {source["name"]: source["format"] for source in result["sources"]}


# Every format: from data to a run.


@pytest.mark.parametrize("kind", DATA)
def test_the_job_written_for_a_format_runs_and_previews_unchanged(kind: str, home: Path) -> None:
    DATA[kind](home / "data")
    model = "vision" if kind.startswith("images") else "qwen"
    tokenizer(home / "tok", model)
    result = overlord("init", "data")
    assert result.exit_code == 0, result.output
    assert "wrote job.yaml" in result.stdout
    documents = 2 if kind.startswith("pairs") else 1
    assert result.stdout.count(" with a loss ──") == 3 * documents
    run = overlord("run", "job.yaml", "--steps", "5", "--json")
    assert run.exit_code == 0, run.output
    end = json.loads(run.stdout.splitlines()[-1])
    assert end["steps"] == 5
    assert not end["quarantine"]
    preview = overlord("preview", "job.yaml", "--step", "2")
    assert preview.exit_code == 0, preview.output
    assert "step 2, rank 0, microbatch 0" in preview.stdout


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "arrow", "tar", "mds", "txt"])
def test_the_estimate_of_tokens_is_that_of_all_rows(kind: str, home: Path) -> None:
    DATA[kind](home / "data")
    found = init("data", "--tokenizer", tokenizer(home / "tok"))["sources"][0]
    job = read_job("job.yaml")
    whole = ov.evaluation([*job.sources], batch=ov.Batch(samples=48, context=4096))
    with ov.launch(whole) as session:
        [step] = session.client(0)
        true = int(session.plan(0).tokens.sum())
    assert len(step) >= 1
    assert found["tokens"] == pytest.approx(true, rel=0.15)
    assert found["rows"] == pytest.approx(48, rel=0.15)


def test_every_path_of_the_job_file_is_relative_to_it_where_it_is_below(home: Path) -> None:
    DATA["parquet"](home / "data")
    tokenizer(home / "data" / "tok")
    (home / "jobs").mkdir()
    init("data", "--out", "job.yaml")
    init("data", "--out", "jobs/job.yaml")
    near, far = (yaml.safe_load(Path(p).read_text()) for p in ("job.yaml", "jobs/job.yaml"))
    assert near["sources"]["data"]["uri"] == "data"
    assert far["sources"]["data"]["uri"] == str(home / "data")
    assert read_job("jobs/job.yaml").sources == read_job("job.yaml").sources


# Folders.


def test_each_subfolder_becomes_a_source_and_formats_may_differ(home: Path) -> None:
    for name, kind in (("web", "parquet"), ("code", "jsonl"), ("ids", "megatron"), ("t", "txt.gz")):
        DATA[kind](home / "corpus" / "data" / name)
    found = init("corpus", "--tokenizer", tokenizer(home / "tok"))
    assert sources(found) == {"code": "jsonl", "ids": "megatron", "t": "lines", "web": "parquet"}
    weights = {s["name"]: s["weight"] for s in found["sources"]}
    tokens = {s["name"]: s["tokens"] for s in found["sources"]}
    total = sum(tokens.values())
    assert weights == {n: pytest.approx(t / total, abs=0.001) for n, t in tokens.items()}
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


def test_formats_of_one_folder_become_sources_of_their_own(home: Path) -> None:
    write_rows(home / "mix", "parquet", [{"text": t} for t in TEXTS])
    write_rows(home / "mix", "jsonl", [{"text": t} for t in TEXTS])
    (home / "mix" / "README.txt").write_text("About the data.")
    (home / "mix" / "metadata.csv").write_text("a,b\n1,2\n")
    found = init("mix", "--tokenizer", tokenizer(home / "tok"))
    assert sources(found) == {"mix-jsonl": "jsonl", "mix-parquet": "parquet"}
    assert sorted(Path(p).name for p in found["ignored"]) == ["README.txt", "metadata.csv"]
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


def test_files_with_names_of_their_own_become_sources_and_held_out_ones_weigh_nothing(
    home: Path,
) -> None:
    folder = home / "set"
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_rows(folder / name, "parquet", [{"text": t} for t in TEXTS], files=1)
        os.replace(folder / name / "part-00000.parquet", folder / f"{name}.parquet")
        (folder / name).rmdir()
    found = init("set", "--tokenizer", tokenizer(home / "tok"))
    assert {s["name"]: s["weight"] for s in found["sources"]} == {"test": 0.0, "train": 1.0}
    assert "the data are for evaluation" in Path("job.yaml").read_text()
    [train] = [s for s in found["sources"] if s["name"] == "train"]
    assert train["uri"].endswith("set/train-0000*.parquet")
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


def test_equal_names_of_different_folders_are_told_apart(home: Path) -> None:
    for above in ("en", "de"):
        DATA["parquet"](home / above / "web")
    found = init("en/web", "de/web", "--tokenizer", tokenizer(home / "tok"))
    assert sorted(sources(found)) == ["de-web", "web"]


def test_the_halves_of_other_tools_are_no_data(home: Path) -> None:
    DATA["parquet"](home / "data")
    (home / "data" / "pytorch_model.bin").write_bytes(b"\0" * 64)
    found = init("data", "--tokenizer", tokenizer(home / "tok"))
    assert sources(found) == {"data": "parquet"}
    [reason] = found["ignored"].values()
    assert "a Megatron dataset needs pytorch_model.idx next to it" in reason


def test_each_prefix_of_megatron_data_is_a_source(home: Path) -> None:
    (home / "meg").mkdir()
    for name in ("wiki_text_document", "code_text_document"):
        write_megatron(home / "meg" / f"{name}.bin", [[ids] for ids in IDS])
    assert sources(init("meg")) == {"code": "megatron", "wiki": "megatron"}
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


SHARDS = st.lists(
    st.tuples(
        st.sampled_from(["", "web/", "code/deep/", "a b/"]),
        st.sampled_from(["part", "train", "x"]),
        st.integers(0, 3),
        st.sampled_from([".parquet", ".jsonl", ".jsonl.gz", ".bin", ".idx", ".txt", ".csv", ".md"]),
    ),
    min_size=1,
    max_size=24,
)


@given(SHARDS)
def test_every_data_file_is_in_one_source_or_ignored(
    parts: list[tuple[str, str, int, str]],
) -> None:
    paths = sorted({f"/d/{folder}{name}-{n:05}{end}" for folder, name, n, end in parts})
    ignored: dict[str, str] = {}
    data = usable(paths, ignored)
    groups = divide("/d", "d", data) if data else []
    inside = [path for group in groups for path in group.files]
    assert sorted(inside + list(ignored)) == [p for p in paths if not p.endswith(".md")]
    assert len(set(unique_names(groups))) == len(groups)
    assert all(path.startswith(f"{group.folder}/") for group in groups for path in group.files)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("part-00000.parquet", ""),
        ("000017.tar", ""),
        ("train-00000-of-00010.parquet", "train"),
        ("c4-train.00000-of-01024.json.gz", "c4-train"),
        ("web_0001.jsonl.zst", "web"),
        ("books.jsonl", "books"),
        ("data.csv", ""),
    ],
)
def test_numbers_of_shards_do_not_count_as_names(name: str, stem: str) -> None:
    assert stem_of(f"/d/{name}", "") == stem


# Faults.


def test_an_empty_folder_is_an_error_that_names_it(home: Path) -> None:
    (home / "empty" / "below").mkdir(parents=True)
    assert "empty: expected data files, got none; known formats" in failed("empty")
    assert not Path("job.yaml").exists()


def test_a_path_that_is_missing_is_an_error(home: Path) -> None:
    DATA["parquet"](home / "data")
    assert "no such file or directory" in failed("dta")


def test_a_source_that_cannot_be_read_is_left_out_and_named(home: Path) -> None:
    DATA["parquet"](home / "data" / "good")
    bad = home / "data" / "bad"
    bad.mkdir()
    (bad / "a.parquet").write_bytes(b"PAR1 no footer")
    (home / "data" / "gone").mkdir()
    (home / "data" / "gone" / "a.jsonl").symlink_to("/nowhere")
    result = overlord("init", "data", "--tokenizer", tokenizer(home / "tok"))
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "warning: left out bad:" in said
    assert "expected a file, got a dangling link" in said
    assert "# Left out:" in Path("job.yaml").read_text()
    assert [s.name for s in read_job("job.yaml").sources] == ["good"]
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


def test_if_no_source_can_be_read_all_reasons_are_given_and_nothing_is_written(home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / "a.parquet").write_bytes(b"PAR1 no footer")
    (home / "data" / "b.jsonl").write_text("not json\n")
    said = failed("data")
    assert "a: source 'a'" in said
    assert "expected rows, got none that can be read" in said
    assert not Path("job.yaml").exists()


def test_an_existing_job_file_is_replaced_only_by_force(home: Path) -> None:
    DATA["megatron"](home / "data")
    Path("job.yaml").write_text("mine")
    assert "expected no file, got one; --force replaces it" in failed("data")
    assert Path("job.yaml").read_text() == "mine"
    init("data", "--force")
    assert read_job("job.yaml").names == ("wiki",)
    assert sorted(os.listdir(home)) == ["data", "job.yaml"]


# Tokenizers.


def test_without_a_tokenizer_text_is_refused_with_the_places_searched(home: Path) -> None:
    DATA["parquet"](home / "data")
    said = failed("data")
    assert "expected a tokenizer for the text of data, got none in the given paths" in said
    assert "the cache of the Hugging Face Hub; give one: --tokenizer PATH" in said
    assert "data that hold token ids already need none" in said
    assert not Path("job.yaml").exists()


def test_of_several_tokenizers_none_is_guessed(home: Path) -> None:
    DATA["parquet"](home / "data")
    tokenizer(home / "data" / "one")
    tokenizer(home / "data" / "two", "gemma")
    said = failed("data")
    assert "expected one tokenizer for the text of data, got 2 in the given paths" in said
    assert "data/one" in said
    assert "data/two; choose one with --tokenizer" in said
    init("data", "--tokenizer", "data/two")
    tokenizer(home / "data" / "two")  # equal contents are one tokenizer
    init("data", "--force")


def test_the_tokenizer_of_the_demo_is_not_a_candidate_for_other_data(home: Path) -> None:
    DATA["parquet"](home / "data")
    tokenizer(home / "own")
    tokenizer(home / DEMO, "gemma")
    assert init("data")["tokenizer"]["name"] == str(home / "own")
    assert [str(o.default) for o in demo.params if o.name == "out"] == [DEMO]


@pytest.mark.parametrize("place", ["data/tok", "tok", "hub"])
def test_a_tokenizer_is_found_in_the_paths_next_to_them_and_in_the_cache(
    place: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DATA["parquet"](home / "in" / "data")
    if place == "hub":
        snapshot = home.parent / "hub" / "hub" / "models--own--er" / "snapshots" / "abc"
        tokenizer(snapshot)
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
        monkeypatch.setattr(
            "huggingface_hub.constants.HF_HUB_CACHE", str(home.parent / "hub" / "hub")
        )
        monkeypatch.setenv("HF_HUB_CACHE", str(home.parent / "hub" / "hub"))
    else:
        tokenizer(home / "in" / place)
    found = init("in/data")
    wanted = "own/er" if place == "hub" else str(home / "in" / place)
    assert found["tokenizer"]["name"] == wanted
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


def test_a_tokenizer_without_a_template_does_not_do_for_conversations(home: Path) -> None:
    DATA["chat jsonl"](home / "data")
    folder = Path(tokenizer(home / "tok"))
    (folder / "tokenizer_config.json").unlink()
    said = failed("data")
    assert "expected a tokenizer with a chat template for the column 'conversations'" in said


def test_images_need_a_token_and_one_may_be_given(home: Path) -> None:
    images(home / "data")
    tokenizer(home / "tok")
    assert "expected a token for images in the tokenizer" in failed("data")
    init("data", "--image-token", "<|endoftext|>")
    text = Path("job.yaml").read_text()
    assert "column: jpg" in text
    assert "strategy: vlm_hybrid" in text


# Columns.


@pytest.mark.parametrize(
    ("row", "role", "column"),
    [
        ({"id": 1, "text": "a long text to train on"}, "text", "text"),
        ({"title": "t", "body": "b", "content": "c"}, "text", "content"),
        ({"url": "http://a.b/c?d=e", "story": "x" * 90}, "text", "story"),
        ({"text": "x" * 50, "input_ids": [1, 2]}, "tokens", "input_ids"),
        ({"text": "x" * 50, "messages": CHATS[0]}, "messages", "messages"),
        ({"dialog": [{"from": "human", "value": "hi"}]}, "messages", "dialog"),
        ({"txt": b"a caption", "__key__": "0"}, "text", "txt"),
    ],
)
def test_the_role_of_a_column_follows_from_name_and_values(
    row: dict[str, Any], role: str, column: str
) -> None:
    found = roles_of([row, row])
    assert getattr(found, role) == column
    assert not found.problem


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p" * 40, "completion": "c" * 90}, "expected messages, got the columns"),
        ({"label": 3, "name": "short"}, "expected a column of text, messages or token ids"),
        ({"tokens": [1, 2], "labels": [-100, 2]}, "expected token ids alone, got 'labels'"),
        ({"text": None}, "got none with a value"),
    ],
)
def test_columns_whose_use_does_not_follow_are_refused(row: dict[str, Any], problem: str) -> None:
    assert problem in roles_of([row]).problem


def test_a_column_of_loss_weights_is_used(home: Path) -> None:
    rows = [{"tokens": ids, "loss_mask": [0] + [1] * (len(ids) - 1)} for ids in IDS]
    write_rows(home / "data", "parquet", rows)
    init("data")
    assert "- tokens: {column: tokens, loss: loss_mask}" in Path("job.yaml").read_text()
    assert overlord("run", "job.yaml", "--steps", "5").exit_code == 0


# The predicted gain.


LENGTHS = st.lists(st.integers(1, 6000), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_the_gain_is_what_the_strategies_give_on_the_drawn_documents(
    lengths: list[int], seed: int
) -> None:
    batch = Batch(tokens=3500, microbatches=4, context=1024)
    given_lengths, weights = {"web": np.array(lengths)}, {"web": 1.0}
    [found] = predict_gain(given_lengths, weights, batch, (8,), seed)
    random, times = np.random.default_rng([seed, 8]), []
    for _ in range(4):
        whole = Batch(tokens=8 * 3500, microbatches=4, context=1024)
        buffer = drawn_buffer(given_lengths, weights, whole, random)
        tokens = np.asarray(buffer.meta["tokens"])
        assert tokens.max() <= 1024
        plans = [STRATEGIES[n](buffer, ov.Mesh(dp=8)) for n in ("packed", "llm_balance")]
        assert all(sorted(plan.tokens) == sorted(tokens) for plan in plans)
        times.append([plan.imbalance()["microbatch"] for plan in plans])
    assert [found.unplanned, found.planned] == pytest.approx(np.mean(times, axis=0))


def test_documents_of_one_length_gain_nothing_and_skewed_ones_gain_much() -> None:
    batch = Batch(tokens=4096, microbatches=4, context=1024)
    draw = np.random.default_rng(3)
    skewed = np.minimum(8000, (20 / draw.random(3000)).astype(int) + 1)
    same, many = (
        predict_gain({"web": lengths}, {"web": 1.0}, batch, (8, 64))
        for lengths in (np.full(9, 1024), skewed)
    )
    assert [gain.gain for gain in same] == [0, 0]
    assert all(gain.gain > 0.1 for gain in many)


def test_the_gain_printed_is_that_of_the_sampled_lengths(home: Path) -> None:
    DATA["tokens parquet"](home / "data")
    found = init("data")
    lengths = {"data": np.array([len(ids) for ids in IDS])}
    batch = Batch(tokens=found["batch_tokens"], microbatches=4, context=found["context"])
    wanted = predict_gain(lengths, {"data": 1.0}, batch, (8, 64, 512))
    assert [g["gain"] for g in found["gain"]] == pytest.approx([g.gain for g in wanted])


# The terminal.


def test_text_of_data_cannot_control_the_terminal(home: Path) -> None:
    rows = [{"text": f"\x1b]0;owned\x07 \x1b[2J {text}", "\x1b[31mcol": "x"} for text in TEXTS]
    write_rows(home / "data\x1b[2J", "jsonl", rows)
    folder = tokenizer(home / "tok")
    results: list[Result] = [overlord("init", "data\x1b[2J", "--tokenizer", folder)]
    results += [overlord("preview", "job.yaml"), overlord("inspect", "data\x1b[2J")]
    for result in results:
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert "\x07" not in result.output
    assert "\\x1b]0;owned\\x07" in results[0].stdout
    assert "\x1b" not in Path("job.yaml").read_text()


def test_an_empty_conversation_hides_no_column_and_ids_of_another_name_have_a_remedy(
    home: Path,
) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    write_rows(home / "data" / "talk", "jsonl", [{"talk": []}, *[{"talk": said}] * 9])
    write_rows(home / "data" / "ids", "parquet", [{"Doc IDs": [k, 1]} for k in range(9)])
    tokenizer(home / "tok", "qwen")
    result = overlord("init", "data")
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((home / "job.yaml").read_text())["sources"]
    assert list(written) == ["talk"]
    assert written["talk"]["transforms"][0]["chat"]["messages"] == "talk"
    remedy = "if 'Doc IDs' holds token ids, add the source with {tokens: {column: Doc IDs}}"
    assert remedy in " ".join(result.stderr.split())
    described = " ".join(overlord("inspect", str(home / "data" / "ids")).stdout.split())
    assert "if 'Doc IDs' holds token ids: ov.Tokens('Doc IDs')" in described
