"""``overlord preview``: the decoded documents are those that ranks receive, with their losses."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import overlord as ov
from overlord.job.job import Job
from overlord.observe.terminal_text import one_line, printable
from overlord.preview.decoder import segments_of
from overlord.preview.page import preview_page
from overlord.preview.preview import Preview, PreviewRequest, preview_source, preview_step
from overlord.preview.text import preview_view
from overlord.transforms.tokenizer_content import TokenizerContent, content_of_object
from overlord.transforms.tokenizer_engines import Engine, load_engine
from tests import chats
from tests.corpus import write_rows
from tests.first_data import CHATS, IDS, TEXTS, images, tokenizer
from tests.tokenizers_made import OBJECTS
from tests.unit.test_cli import overlord

ALL = PreviewRequest(samples=10**6, tokens=10**6, replicas=10**6)


def quiet(what: str, done: float, of: float | None) -> None:
    """Ignore progress."""


def texts_job(folder: Path, **changes: Any) -> Job:
    """Two sources: texts with a tokenizer, and ids of a column with loss weights."""
    web = write_rows(folder / "web", "parquet", [{"text": t} for t in TEXTS])
    rows = [{"tokens": ids, "loss_mask": [k % 3 / 2 for k in range(len(ids))]} for ids in IDS]
    ids = write_rows(folder / "ids", "parquet", rows)
    fields: dict[str, Any] = {
        "name": "texts",
        "sources": [
            ov.Source("web", web, transforms=[ov.Tokenize(tokenizer(folder / "tok"))]),
            ov.Source("ids", ids, transforms=[ov.Tokens(loss="loss_mask")]),
        ],
        "batch": ov.Batch(samples=16, context=512),
        "seed": 4,
    }
    return ov.Job(**fields | changes)


def shown(preview: Preview) -> dict[str, tuple[list[int], list[float]]]:
    """Return ids and losses of each sample of a preview."""
    return {
        sample.sample: (
            [i for segment in sample.segments for i in segment.ids],
            [segment.loss for segment in sample.segments for _ in segment.ids],
        )
        for sample in preview.samples
    }


def received(job: Job, step: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return ids and losses of each sample as one rank receives it in a run."""
    alone = replace(
        job, place=ov.Mesh(), strategy="vanilla", batch=replace(job.batch, layout="packed")
    )
    with ov.launch(alone) as session:
        client = session.client(0)
        for _ in range(step):
            next(client)
        found = {}
        for microbatch in next(client):
            for sample, offset, n in microbatch.samples:
                mask = microbatch["loss_mask"][offset : offset + n]
                shifted = job.batch.labels == "shifted"
                loss = np.concatenate([[0.0], mask[: n - 1]]) if shifted else mask
                tokens = microbatch["tokens"][offset : offset + n]
                found[str(sample)] = (tokens.tolist(), loss.tolist())
    return found


MESHES = {
    "one rank": {},
    "dp": {"place": ov.Mesh(dp=3)},
    "cp": {"place": ov.Mesh(cp=2)},
    "cp contiguous": {"place": ov.Mesh(cp=4), "split": "contiguous"},
    "pp and tp": {"place": ov.Mesh(pp=2, tp=2)},
    "all": {"place": ov.Mesh(dp=2, cp=2, pp=2, tp=2), "split": "zigzag_whole"},
    "padded": {"place": ov.Mesh(dp=2, cp=2), "layout": "padded"},
    "unshifted": {"place": ov.Mesh(cp=2), "labels": "unshifted"},
}


@pytest.mark.parametrize("kind", MESHES)
def test_a_step_shows_every_document_with_the_loss_that_a_run_gives_it(
    kind: str, tmp_path: Path
) -> None:
    given_mesh = dict(MESHES[kind])
    place = given_mesh.pop("place", ov.Mesh())
    split = given_mesh.pop("split", "zigzag")
    batch = ov.Batch(samples=16, context=512, cp_split=split, **given_mesh)
    job = texts_job(tmp_path, place=place, batch=batch)
    found = preview_step(job, 2, ALL, quiet)
    assert shown(found) == received(job, 2)
    assert {rank for b in found.microbatches for rank in b.ranks} == set(range(place.world_size))


def test_rings_of_a_hybrid_plan_show_whole_documents(tmp_path: Path) -> None:
    rows = [{"tokens": list(range(1, 30 + 160 * (k % 4 == 0)))} for k in range(24)]
    source = ov.Source("long", write_rows(tmp_path / "d", "jsonl", rows), transforms=[ov.Tokens()])
    job = ov.Job(
        name="rings",
        sources=[source],
        batch=ov.Batch(samples=8, context=64, layout="packed"),
        place=ov.Mesh(dp=4),
        strategy="hdp_balance",
    )
    found = preview_step(job, 1, ALL, quiet)
    long = [sample for sample in found.samples if sample.tokens > 64]
    assert long
    for sample in found.samples:
        ids, loss = shown(found)[sample.sample]
        assert ids == list(range(1, sample.tokens + 1))
        assert loss == [0.0] + [1.0] * (sample.tokens - 1)
    assert max(len(batch.ranks) for batch in found.microbatches) > 1


def test_chunks_show_the_pieces_of_documents_which_tile_them(tmp_path: Path) -> None:
    batch = ov.Batch(samples=6, context=48, packing="concat", shape="fixed")
    job = texts_job(tmp_path, batch=batch, place=ov.Mesh(dp=2), max_document=4096)
    tokens: dict[str, dict[int, int]] = {}
    loss: dict[str, dict[int, float]] = {}
    later = 0
    for step in range(6):
        found = preview_step(job, step, ALL, quiet)
        assert [sum(s.tokens for s in b.samples) for b in found.microbatches] == [48] * 6
        for sample in found.samples:
            later += sample.begin > 0
            ids = [i for segment in sample.segments for i in segment.ids]
            weights = [segment.loss for segment in sample.segments for _ in segment.ids]
            tokens.setdefault(sample.sample, {}).update(enumerate(ids, sample.begin))
            known = {k: w for k, w in enumerate(weights, sample.begin) if w == w}
            loss.setdefault(sample.sample, {}).update(known)
    assert later > 3
    whole = replace(job, batch=ov.Batch(samples=40, context=4096), place=ov.Mesh())
    wanted = received(whole, 0) | received(whole, 1)
    for sample, given_ids in tokens.items():
        ids, weights = wanted[sample]
        assert [given_ids[k] for k in range(len(given_ids))] == ids[: len(given_ids)]
        assert loss[sample] == {k: weights[k] for k in loss[sample]}
        unknown = set(given_ids) - set(loss[sample])
        assert len(unknown) <= 2, "the first token of a piece whose predecessor is in another step"


def test_a_source_shows_the_first_samples_of_its_stream(tmp_path: Path) -> None:
    job = texts_job(tmp_path, place=ov.Mesh(dp=2))
    found = preview_source(job, "ids", PreviewRequest(samples=5), quiet)
    with ov.launch(
        replace(job, mixture={"ids": 1.0}, place=ov.Mesh(), strategy="vanilla")
    ) as session:
        first = next(session.client(0))
        wanted = [str(piece.sample) for microbatch in first for piece in microbatch.samples][:5]
    assert [sample.sample for sample in found.samples] == wanted


def test_a_step_of_a_job_with_a_journal_is_the_one_that_was_run(tmp_path: Path) -> None:
    job = texts_job(tmp_path, journal=str(tmp_path / "journal"))
    with ov.launch(job) as session:
        client = session.client(0)
        for _ in range(3):
            next(client)
        wanted = {str(p.sample) for microbatch in next(client) for p in microbatch.samples}
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    before = sorted(p.name for p in (tmp_path / "journal").iterdir())
    args = ("preview", tmp_path / "job.yaml", "--step", "3", "--samples", "99", "--json")
    document = json.loads(overlord(*args).stdout)
    found = {s["sample"] for batch in document["microbatches"] for s in batch["samples"]}
    assert found == wanted
    assert sorted(p.name for p in (tmp_path / "journal").iterdir()) == before


# Text.


def chat_job(folder: Path, model: str = "qwen", **options: Any) -> Job:
    path = write_rows(folder / "chat", "jsonl", [{"messages": m} for m in CHATS])
    chat = ov.Chat(tokenizer(folder / "tok", model), **options)
    source = ov.Source("chat", path, transforms=[chat])
    return ov.Job(name="sft", sources=[source], batch=ov.Batch(samples=4, context=256))


def as_text(preview: Preview, terminal: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=terminal, highlight=False).print(
        preview_view(preview)
    )
    return out.getvalue()


def test_a_conversation_shows_which_turns_have_a_loss(tmp_path: Path) -> None:
    found = preview_source(chat_job(tmp_path), "chat", PreviewRequest(samples=1), quiet)
    [sample] = found.samples
    trained = "".join(s.text for s in sample.segments if s.loss)
    assert re.fullmatch(r"(<think>\s+</think>\s+)?\d+<\|im_end\|>", trained)
    lines = [line.rstrip() for line in as_text(found).splitlines()]
    assert "- ⟦<|im_start|>⟧user↵" in lines
    assert "- ⟦<|im_start|>⟧assistant↵" in lines
    assert any(re.fullmatch(r"\+ \d+⟦<\|im_end\|>⟧", line) for line in lines)


def test_both_responses_of_a_pair_are_shown_with_their_roles(tmp_path: Path) -> None:
    rows = [
        {"prompt": text, "chosen": " yes", "rejected": f" no {k}"} for k, text in enumerate(TEXTS)
    ]
    path = write_rows(tmp_path / "prefs", "jsonl", rows)
    transforms = [ov.Pair(prompt="prompt"), ov.Tokenize(tokenizer(tmp_path / "tok"))]
    job = ov.Job(
        name="dpo",
        sources=[ov.Source("prefs", path, transforms=transforms)],
        batch=ov.Batch(samples=6, context=1024),
        place=ov.Mesh(dp=2, cp=2),
    )
    alone = preview_source(job, "prefs", PreviewRequest(samples=2), quiet)
    for found in (alone, preview_step(job, 1, ALL, quiet)):
        roles = [sample.role for sample in found.samples]
        assert roles == ["chosen", "rejected"] * (len(roles) // 2)
        for sample in found.samples:
            trained = "".join(s.text for s in sample.segments if s.loss)
            assert re.fullmatch(" yes" if sample.role == "chosen" else r" no \d+", trained)
    assert len(alone.samples) == 4
    assert "rejected: " in as_text(alone)


def test_a_step_of_a_later_stage_has_the_batch_of_that_stage(tmp_path: Path) -> None:
    long = ov.Stage(2, name="long", batch=ov.Batch(samples=4, context=1024))
    job = texts_job(tmp_path, stages=[ov.Stage(3, name="short"), long])
    steps = [preview_step(job, step, ALL, quiet) for step in (2, 3)]
    assert [len(found.samples) for found in steps] == [16, 4]
    assert len(preview_source(job, "web", PreviewRequest(samples=2), quiet).samples) == 2


def test_fill_in_the_middle_shows_its_marks(tmp_path: Path) -> None:
    web = write_rows(tmp_path / "web", "parquet", [{"text": t} for t in TEXTS])
    marks = {"prefix": "<|im_start|>", "suffix": "<|endoftext|>", "middle": 9000}
    transforms = [ov.FillInMiddle(1.0, 0.0, **marks), ov.Tokenize(tokenizer(tmp_path / "tok"))]
    job = ov.Job(
        name="fim",
        sources=[ov.Source("web", web, transforms=transforms)],
        batch=ov.Batch(samples=4, context=512),
    )
    text = as_text(preview_source(job, "web", PreviewRequest(samples=1), quiet))
    assert re.search(r"⟦<\|im_start\|>⟧[^⟦]*⟦<\|endoftext\|>⟧[^⟦]*⟦id 9000⟧", text)


def test_ids_are_numbers_until_a_tokenizer_is_named(tmp_path: Path) -> None:
    job = texts_job(tmp_path)
    plain = preview_source(job, "ids", PreviewRequest(samples=1), quiet)
    assert plain.notes == ("source 'ids' has token ids and no tokenizer; --tokenizer decodes them",)
    assert {segment.kind for segment in plain.samples[0].segments} == {"ids"}
    named = PreviewRequest(samples=1, tokenizer=str(tmp_path / "tok"))
    assert {s.kind for s in preview_source(job, "ids", named, quiet).samples[0].segments} != {"ids"}


def test_weights_other_than_one_are_shown_as_numbers(tmp_path: Path) -> None:
    text = as_text(preview_source(texts_job(tmp_path), "ids", PreviewRequest(samples=1), quiet))
    assert re.search(r"^\s*0\.5 \d+", text, re.MULTILINE)


def test_long_samples_are_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    job = texts_job(tmp_path)
    cut = preview_source(job, "web", PreviewRequest(samples=1, tokens=5), quiet).samples[0]
    whole = preview_source(job, "web", PreviewRequest(samples=1), quiet).samples[0]
    assert sum(len(segment.ids) for segment in cut.segments) == 5
    assert cut.hidden_tokens == whole.tokens - 5
    assert (cut.tokens, cut.loss_tokens) == (whole.tokens, whole.loss_tokens)


def engines() -> dict[str, Engine]:
    made: dict[str, Engine] = {}
    for name, make in OBJECTS.items():
        content = content_of_object(make())
        assert content is not None
        made[name] = load_engine(content, name, "")
    for model in ("qwen", "mistral"):
        data = TokenizerContent("tokenizers", chats.tokenizer_json(model).encode())
        made[model] = load_engine(data, model, "")
    return made


ENGINES = engines()
TEXT = st.text(st.sampled_from("helo wrds\n é日😀\x1b"), min_size=1, max_size=30)


@given(st.sampled_from(sorted(ENGINES)), TEXT, st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_runs_of_a_document_join_to_its_decoded_text(
    name: str, text: str, losses: list[bool]
) -> None:
    engine = ENGINES[name]
    [ids] = engine.encode([text], False)
    loss = np.array([losses[k % 8] for k in range(len(ids))], np.float32)
    found = segments_of(np.array(ids, np.int64), loss, engine)
    assert [i for segment in found for i in segment.ids] == ids
    assert [s.loss for s in found for _ in s.ids] == loss.tolist()
    # Where a run ends inside a character, that character is a mark on both sides.
    if all(segment.kind == "text" for segment in found) and "�" not in "".join(
        segment.text for segment in found
    ):
        assert "".join(segment.text for segment in found) == engine.decode(ids)


@pytest.mark.parametrize("name", ENGINES)
def test_special_and_unknown_ids_are_told_apart_from_text(name: str) -> None:
    engine = ENGINES[name]
    special = next(i for i in range(engine.top + 1) if engine.special_token(i) is not None)
    ids = np.array([special] * 5 + [engine.top + 1000, special])
    found = segments_of(ids, np.ones(len(ids)), engine)
    assert [(s.kind, s.count) for s in found] == [("special", 5), ("unknown", 1), ("special", 1)]
    assert found[1].text == f"id {engine.top + 1000}"


# Safety.


@given(st.text(st.characters(codec="utf-8", exclude_categories=[]), max_size=60))
def test_printable_text_has_no_character_that_controls_a_terminal(text: str) -> None:
    import unicodedata

    allowed = {"\n", "\t", "\u200c", "\u200d"}
    for found in (printable(text), one_line(text)):
        bad = {c for c in found if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - allowed
        assert not bad
        assert not set(found) & set(
            "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"
        )
    assert not set(one_line(text)) & {"\n", "\t"}
    plain = [c for c in text if c.isalnum() or c in " .,"]
    if len(plain) == len(text):
        assert printable(text) == text


class Tags(HTMLParser):
    """The tags, links and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_holds_hostile_text_as_text_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    hostile = "</span><script>alert(1)</script><img src=http://x/y onerror=a()> \x1b[2J \u202e"
    web = write_rows(tmp_path / "web", "jsonl", [{"text": hostile}] * 4)
    job = ov.Job(
        name="<b>job",
        sources=[ov.Source("w<i>", web, transforms=[ov.Tokenize(tokenizer(tmp_path / "tok"))])],
        batch=ov.Batch(samples=2, context=256),
    )
    found = preview_source(job, "w<i>", ALL, quiet)
    page = preview_page(found)
    tags = Tags()
    tags.feed(page)
    assert not {"script", "link", "iframe", "b>job", "i"} & set(tags.tags)
    assert tags.links == []
    assert "alert(1)" in tags.text
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "url(" not in page
    colours = as_text(found, terminal=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", colours).count("\x1b") == 0


# Images.


def image_job(folder: Path, **changes: Any) -> Job:
    images(folder / "pictures")
    transforms = [
        ov.Tokenize(tokenizer(folder / "tok", "vision"), text="txt"),
        ov.Images("jpg", placeholder=3, min_pixels=784, max_pixels=6272),
    ]
    source = ov.Source("pictures", str(folder / "pictures"), transforms=transforms)
    fields: dict[str, Any] = {
        "name": "vlm",
        "sources": [source],
        "batch": ov.Batch(samples=6, context=512),
        "strategy": "vlm_hybrid",
    }
    return ov.Job(**fields | changes)


def original(folder: Path, key: int) -> np.ndarray:
    from tests.pictures import jpeg

    return np.asarray(Image.open(io.BytesIO(jpeg(60, 80, key))).convert("RGB"))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_thumbnails_show_the_pictures_of_each_sample(dtype: str, tmp_path: Path) -> None:
    job = image_job(tmp_path)
    spec = replace(job.sources[0].transforms[1], dtype=dtype)
    job = replace(
        job, sources=[replace(job.sources[0], transforms=[job.sources[0].transforms[0], spec])]
    )
    found = preview_source(job, "pictures", PreviewRequest(samples=12), quiet)
    assert len(found.samples) == 12
    originals = [original(tmp_path, k).mean(axis=(0, 1)) for k in range(12)]
    for sample in found.samples:
        [picture] = sample.images
        image = Image.open(io.BytesIO(picture.png))
        assert image.size == (picture.width, picture.height)
        colour = np.asarray(image.convert("RGB")).mean(axis=(0, 1))
        text = "".join(s.text for s in sample.segments if s.kind == "text")
        key = TEXTS.index(text.strip())
        nearest = int(np.argmin([np.abs(colour - mean).sum() for mean in originals]))
        assert nearest == key
        placeholders = [s for s in sample.segments if 3 in s.ids]
        assert sum(len(s.ids) for s in placeholders) == picture.tokens
        assert not any(s.loss for s in placeholders)


@pytest.mark.parametrize("place", [ov.Mesh(dp=2), ov.Mesh(dp=2, pp=2)], ids=str)
def test_images_of_a_step_come_with_their_samples_whoever_encodes_them(
    place: ov.Mesh, tmp_path: Path
) -> None:
    found = preview_step(image_job(tmp_path, place=place), 1, ALL, quiet)
    assert len(found.samples) == 6
    assert all(len(sample.images) == 1 for sample in found.samples)
    tags = Tags()
    tags.feed(preview_page(found))
    assert len(tags.links) == 6
    for link in tags.links:
        head, data = link.split(",", 1)
        assert head == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).format == "PNG"


# The command.


def test_the_command_writes_a_page_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(texts_job(tmp_path, place=ov.Mesh(dp=2)).to_yaml())
    path, page = tmp_path / "job.yaml", tmp_path / "p.html"
    result = overlord("preview", path, "--step", "0", "--rank", "1", "--html", page)
    assert result.exit_code == 0, result.output
    assert f"wrote {page}" in result.stdout.replace("\n", "")
    assert "step 0, rank 1, microbatch 0" in result.stdout
    assert "rank 0" not in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
    for args, said in (
        (("--source", "wbe"), "unknown source 'wbe'; did you mean 'web'?"),
        (("--step", "0", "--rank", "7"), "--rank"),
        (("--rank", "1"), "--rank needs --step N"),
        (("--source", "web", "--step", "1"), "give either --source NAME or --step N"),
        (("--html", "s3://a/b.html"), "--html: expected a file on this machine, got a URI"),
        (("--source", "ids", "--tokenizer", str(tmp_path / "none.json")), "none.json"),
    ):
        failed = overlord("preview", path, *args)
        assert failed.exit_code == 2, failed.output
        assert said in " ".join(failed.stderr.split())


def test_a_step_after_the_end_of_the_job_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(texts_job(tmp_path, until=3).to_yaml())
    failed = overlord("preview", path, "--step", "3")
    assert failed.exit_code == 2
    assert "expected a step below 3, where the job ends, got 3" in " ".join(failed.stderr.split())
