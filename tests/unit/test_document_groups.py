"""Pair and Group over texts, ids and conversations: documents, losses, values, bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError, PlanError, TransformError
from overlord.plan.plan import LoadingPlan
from tests import chats
from tests.tokenizers_made import bpe

BOS, EOS = 4, 5


def delivered(rows: Any, *transforms: Any, **batch: Any) -> tuple[list[ov.Step], list[str]]:
    """Return all steps of a job of these rows, and the reasons of its quarantined rows."""
    given = {"samples": 2, "context": 512} | batch
    source = ov.Source.from_dataset("s", rows, transforms=transforms, epochs=1, shuffle=False)
    job = ov.Job(name="groups", sources=[source], batch=ov.Batch(**given), strategy="packed")
    with ov.launch(job) as session:
        steps = list(session.client(0))
        bad = [q["reason"].split("): ")[-1] for q in session.quarantine()]
    return steps, bad


def documents(steps: list[ov.Step]) -> list[tuple[int, list[int], list[int], list[float]]]:
    """Return the role, ids, labels and loss mask of every document, in order."""
    found = []
    for mb in (mb for step in steps for mb in step):
        bounds = mb["cu_seqlens"].tolist()
        for role, a, b in zip(mb["roles"].tolist(), bounds, bounds[1:], strict=False):
            columns = [mb[key][a:b].tolist() for key in ("tokens", "labels", "loss_mask")]
            found.append((role, *columns))
    return found


def test_texts_of_a_pair_follow_their_prompt_and_only_they_have_a_loss() -> None:
    tokenizer = bpe()
    rows = [{"prompt": "hello", "chosen": " world", "rejected": " lower low"}]
    pair, tokens = ov.Pair(prompt="prompt"), ov.Tokenize(tokenizer, bos=BOS, eos=EOS)
    steps, bad = delivered(rows, pair, tokens)
    assert not bad
    before = [BOS, *tokenizer.encode("hello", add_special_tokens=False).ids]
    for role, (text, found) in enumerate(
        zip((" world", " lower low"), documents(steps), strict=True)
    ):
        after = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
        no_loss = [-100] * (len(before) - 1)
        mask = [0.0] * (len(before) - 1) + [1.0] * len(after) + [0.0]
        assert found == (role, before + after, [*no_loss, *after, -100], mask)
    [mb] = steps[0]
    assert mb["prompt_lengths"].tolist() == [len(before)] * 2
    assert mb["group_ids"].tolist() == [0, 0]


def test_texts_without_a_prompt_are_whole_documents() -> None:
    steps, _ = delivered(
        [{"chosen": "hello", "rejected": "lower"}], ov.Pair(), ov.Tokenize(bpe(), bos=BOS, eos=EOS)
    )
    for (_, ids, labels, _), text in zip(documents(steps), ("hello", "lower"), strict=True):
        assert ids == [BOS, *bpe().encode(text, add_special_tokens=False).ids, EOS]
        assert labels == [*ids[1:], -100]
    assert steps[0][0]["prompt_lengths"].tolist() == [0, 0]


def test_a_group_has_a_role_and_a_value_for_each_response() -> None:
    rows = [
        {"prompt": [1, 2], "answers": [[3], [4, 5], [6]], "advantages": [0.5, -1, 2], "length": 7},
        {"prompt": [1], "answers": [[7]], "advantages": [0.0], "length": 8},
    ]
    values = {"advantages": "advantages", "level": "length"}
    steps, bad = delivered(rows, ov.Group("answers", prompt="prompt", values=values))
    assert not bad
    [mb] = steps[0]
    assert mb["roles"].tolist() == [0, 1, 2, 0]
    assert mb["group_ids"].tolist() == [0, 0, 0, 1]
    assert mb["advantages"].tolist() == [0.5, -1, 2, 0]
    assert mb["advantages"].dtype == np.float32
    assert mb["level"].tolist() == [7, 7, 7, 8]
    assert mb["prompt_lengths"].tolist() == [2, 2, 2, 1]


def chat(tmp_path: Path, **options: Any) -> ov.Chat:
    return ov.Chat(chats.write_folder(tmp_path / "chatml", "chatml"), date=chats.DAY, **options)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def trained_text(spec: ov.Chat, labels: list[int]) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(spec.tokenizer) / "tokenizer.json"))
    return tokenizer.decode([t for t in labels if t >= 0], skip_special_tokens=False)


HISTORY = [said("user", "hello"), said("assistant", "earlier"), said("user", "and?")]


@pytest.mark.parametrize("prompt", ["column", "common messages", "text"])
def test_conversations_have_a_loss_on_the_messages_after_their_prompt(
    tmp_path: Path, prompt: str
) -> None:
    spec = chat(tmp_path)
    good, worse = [said("assistant", "yes")], [said("assistant", "not at all")]
    if prompt == "column":
        row: dict[str, Any] = {"prompt": HISTORY, "chosen": good, "rejected": worse}
    elif prompt == "text":
        row = {"prompt": "and?", "chosen": "yes", "rejected": "not at all"}
    else:
        row = {"chosen": HISTORY + good, "rejected": HISTORY + worse}
    pair = ov.Pair(prompt=None if prompt == "common messages" else "prompt")
    steps, bad = delivered([row], pair, spec)
    assert not bad
    found = documents(steps)
    texts = [trained_text(spec, labels) for _, _, labels, _ in found]
    assert texts == ["yes<|im_end|>", "not at all<|im_end|>"]
    first, second = (ids for _, ids, _, _ in found)
    [n, m] = steps[0][0]["prompt_lengths"].tolist()
    assert n == m
    assert first[:n] == second[:n]
    whole = HISTORY if prompt != "text" else HISTORY[2:]
    encoder_rows = [{"messages": whole + good}]
    alone, _ = delivered(encoder_rows, spec)
    assert alone[0][0]["tokens"].tolist() == first


def test_a_group_of_conversations_shares_its_common_messages(tmp_path: Path) -> None:
    spec = chat(tmp_path)
    rows = [{"talks": [[*HISTORY, said("assistant", f"answer {k}")] for k in range(3)]}]
    steps, _ = delivered(rows, ov.Group("talks"), spec)
    texts = [trained_text(spec, labels) for _, _, labels, _ in documents(steps)]
    assert texts == [f"answer {k}<|im_end|>" for k in range(3)]


def test_roles_of_plain_samples_are_minus_one_and_their_values_are_nan() -> None:
    pairs = ov.Source.from_dataset(
        "pairs",
        [{"c": [1, 2], "r": [3], "margin": 1.0}] * 2,
        transforms=[ov.Pair("c", "r", values=["margin"])],
        epochs=1,
    )
    plain = ov.Source.from_dataset("plain", [{"tokens": [4, 5, 6]}] * 4, epochs=1)
    job = ov.Job(name="both", sources=[pairs, plain], batch=ov.Batch(samples=2, context=64))
    with ov.launch(job) as session:
        steps = list(session.client(0))
    for step in steps:
        for mb in step:
            single = mb["source_ids"] == 1
            assert (mb["roles"][single] == -1).all()
            assert np.isnan(mb["margin"][single]).all()
            assert (mb["margin"][~single] == 1).all()
            assert len(mb["roles"]) == len(mb["source_ids"]) == len(mb["group_ids"])
    assert any((mb["source_ids"] == 1).all() for step in steps for mb in step)


BAD = [
    ({"rejected": None}, "rejected is null or missing"),
    ({"rejected": "lost"}, "column 'rejected': expected lists of token ids"),
    ({"chosen": []}, "chosen: expected a response, got an empty one"),
    ({"chosen": [1, -2]}, "chosen holds an id below 0"),
    ({"prompt": None}, "prompt is null or missing"),
    ({"margin": float("nan")}, "margin is not finite"),
    ({"scores": [1.0]}, "scores: expected 2 numbers, one for each document, got [1.]"),
    ({"loss": [[1.0], [1.0, 1.0]]}, "chosen: expected 2 loss weights, one per token, got 1"),
    ({"loss": [[1.0, 1.0]]}, "loss: expected 2 lists of loss weights, got 1"),
]


@pytest.mark.parametrize(("fault", "reason"), BAD)
def test_a_bad_pair_is_quarantined_as_a_whole_with_its_reason(
    fault: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    good = {"prompt": [1], "chosen": [2, 3], "rejected": [4, 5], "margin": 0.5}
    good |= {"scores": [1.0, 2.0], "loss": [[1.0, 0.5], [1.0, 1.0]]}
    rows = [good, good | fault, good]
    transforms = [ov.Pair(prompt="prompt", values=["margin", "scores"]), ov.Tokens(loss="loss")]
    steps, bad = delivered(rows, *transforms)
    assert len(bad) == 1
    assert reason in bad[0]
    assert [role for role, *_ in documents(steps)] == [0, 1, 0, 1]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = ov.Source("s", str(tmp_path / "rows.jsonl"), transforms=transforms, epochs=1)
    job = ov.Job(name="lines", sources=[source], batch=ov.Batch(samples=2, context=512))
    with ov.launch(job) as session:
        assert sum(len({*mb["group_ids"].tolist()}) for s in session.client(0) for mb in s) == 2
        [entry] = session.quarantine()
    assert entry["path"].endswith("rows.jsonl")
    assert entry["row"] == len(json.dumps(good)) + 1


GROUPS = [
    ({"answers": []}, "answers: expected 2 responses, got 0"),
    ({"answers": ["one"]}, "answers: expected 2 responses, got 1"),
    ({"answers": ["one", None]}, "response 1: answers is null or missing"),
    ({"answers": ["one", ""]}, "answers, response 1: expected a response, got an empty one"),
    ({"answers": "one"}, "column 'answers': expected a list with one value for each response"),
    ({"answers": None}, "answers is null or missing"),
]


@pytest.mark.parametrize(("fault", "reason"), GROUPS)
def test_a_bad_group_is_quarantined_as_a_whole_with_its_reason(
    fault: dict[str, Any], reason: str
) -> None:
    good = {"answers": ["hello", "lower"]}
    steps, bad = delivered([good, fault, good], ov.Group("answers", size=2), ov.Tokenize(bpe()))
    assert len(bad) == 1
    assert reason in bad[0]
    assert [role for role, *_ in documents(steps)] == [0, 1, 0, 1]


def test_a_conversation_names_the_faulty_column_and_message(tmp_path: Path) -> None:
    rows = [
        {"chosen": [*HISTORY, said("assistant", "a")], "rejected": [*HISTORY, said("bot", "b")]},
        {"chosen": [*HISTORY, said("assistant", "a")], "rejected": [said("user", "b")]},
        {
            "chosen": [*HISTORY, said("assistant", "a")],
            "rejected": [*HISTORY, said("assistant", "b")],
        },
    ]
    _, bad = delivered(rows, ov.Pair(), chat(tmp_path))
    assert "rejected: message 3: expected a role of" in bad[0]
    assert "rejected: expected a message of the assistant with a loss, got none" in bad[1]
    assert len(bad) == 2


def test_a_prompt_that_leaves_no_room_for_a_response_is_quarantined() -> None:
    rows = [
        {"prompt": [1] * 40, "chosen": [2], "rejected": [3] * 9},
        {"prompt": [], "chosen": [2], "rejected": [3]},
    ]
    _, bad = delivered(rows, ov.Pair(prompt="prompt"), context=64)
    assert bad == [
        "document 0: expected a token of the response within 31 tokens, got a prompt of 40"
    ]


@pytest.mark.parametrize(
    ("transforms", "problem"),
    [
        (
            [ov.Pair(), ov.Select("chosen", "rejected")],
            "expected Tokenize, Tokens or Chat directly",
        ),
        ([ov.Pair(), ov.Tokens("ids")], "expected no column= after it, got 'ids'"),
        ([ov.Pair(), ov.Group("answers")], "expected no Group in the same source"),
        ([ov.Pair(), ov.Tokens(), ov.Tokens()], "expected one Tokenize, Tokens or Chat"),
        ([ov.Tokens(loss=("a", "b"))], "loss: expected one column, got ('a', 'b')"),
        ([ov.Group("answers"), ov.Tokens(loss=("a", "b"))], "loss: expected one column"),
        ([ov.FillInMiddle(), ov.Pair()], "expected no FillInMiddle in the same source"),
        (
            [ov.Pair(prompt="p"), ov.Tokenize("t.json", add_special_tokens=True)],
            "expected add_special_tokens=False after it with a prompt",
        ),
        ([ov.Pair(), ov.Chat("t", train_on="all")], 'expected train_on="assistant" or "last"'),
    ],
)
def test_transforms_that_cannot_follow_each_other_are_refused(
    transforms: list[Any], problem: str
) -> None:
    from overlord.transforms.pipeline import Pipeline

    with pytest.raises(TransformError) as error:
        Pipeline("s", transforms, seed=0, context=64, on_long="split")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ov.Pair("a", "a"), "rejected: expected another column than chosen, got 'a'"),
        (lambda: ov.Pair(values={"labels": "x"}), "values: expected a new name of letters"),
        (
            lambda: ov.Pair(values={"a": ("x", "y", "z")}),
            "values.a: expected a column or 2 columns",
        ),
        (lambda: ov.Pair(values=7), "values: expected names of columns"),
        (lambda: ov.Group(""), "column: expected a name"),
        (lambda: ov.Group("a", size=0), "size: expected a whole number of at least 1"),
        (lambda: ov.Group("a", values={"b": ("x", "y")}), "values.b: expected a column, got"),
        (lambda: ov.Group("a", prompt=3), "prompt: expected a name, got 3"),
    ],
)
def test_fields_are_checked_when_a_pair_or_group_is_made(make: Any, problem: str) -> None:
    with pytest.raises(JobError) as error:
        make()
    assert problem in str(error.value)


def job_of(**changes: Any) -> ov.Job:
    source = ov.Source.from_dataset("s", [{"c": [1], "r": [2]}], transforms=[ov.Pair("c", "r")])
    fields: dict[str, Any] = {"sources": [source], "batch": ov.Batch(samples=4, context=512)}
    return ov.Job(name="job", **fields | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"strategy": "hdp_balance"}, "strategy: expected one that places whole samples"),
        (
            {"batch": ov.Batch(samples=4, context=512, packing="concat")},
            "batch.packing: expected 'documents', since samples of source 's' have several",
        ),
        (
            {"batch": ov.Batch(samples=4, context=512, shape="fixed")},
            "batch.shape: expected 'free', since samples of source 's' have several documents",
        ),
        (
            {"strategy": "even", "batch": ov.Batch(samples=4, context=512, packing="concat")},
            "got 'even', which counts samples; use 'llm_balance'",
        ),
        ({"place": ov.Mesh(cp=8)}, "batch.context: expected room for 2 documents of source 's'"),
        (
            {"strategy": "even", "place": ov.Mesh(dp=3)},
            "batch.samples: expected a multiple of 3 (dp x microbatches)",
        ),
        (
            {"strategy": "even", "batch": ov.Batch(tokens=99, context=512)},
            "expected samples= with strategy 'even'",
        ),
        (
            {"strategy": "even", "overflow": "defer"},
            "overflow: expected 'grow' with strategy 'even'",
        ),
    ],
)
def test_jobs_that_cannot_place_pairs_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError) as error:
        job_of(**changes)
    assert problem in str(error.value)


def squared(columns: Any) -> Any:
    return columns["tokens"] * 1.0 * columns["tokens"]


def test_the_cost_of_a_sample_is_the_sum_over_its_documents() -> None:
    columns = {
        "pairs": {"tokens": [30, 12], "document_lengths": [[10, 20], [5, 7]]},
        "plain": {"tokens": [30]},
    }
    buffer = ov.Buffer.from_columns(columns, batch=ov.Batch(samples=3, context=64))
    graph = ov.DGraph.from_buffer(buffer, ov.Mesh(cp=2)).mix({"pairs": 1, "plain": 1})
    samples = list(zip(graph.buffer.source.tolist(), graph.buffer.row.tolist(), strict=True))
    documents_of = {(0, 0): [10, 20], (0, 1): [5, 7], (1, 0): [30]}
    assert (1, 0) in samples
    assert (0, 0) in samples
    found, own = graph.cost(squared).costs, graph.cost(lambda c: c["tokens"] + 100.0).costs
    assert found is not None
    assert own is not None
    for i, sample in enumerate(samples):
        lengths = documents_of[sample]
        assert found[i] == sum(n * n for n in lengths)
        assert own[i] == sum(n + 100 for n in lengths)
        assert graph.sizes()[i] == sum(-(-n // 4) * 4 for n in lengths)


def planned() -> LoadingPlan:
    rows = [{"c": [1] * (1 + k), "r": [2] * 3, "x": float(k)} for k in range(6)]
    source = ov.Source.from_dataset(
        "s", rows, transforms=[ov.Pair("c", "r", values=["x"])], epochs=1
    )
    job = ov.Job(name="j", sources=[source], batch=ov.Batch(samples=6, context=256))
    with ov.launch(job) as session:
        next(session.client(0))
        return session.plan(0)


def test_a_plan_keeps_its_documents_in_bytes_and_digest() -> None:
    plan = planned()
    assert plan.documents is not None
    again = LoadingPlan.from_bytes(plan.to_bytes())
    assert again.documents is not None
    assert again.digest() == plan.digest()
    assert again.documents.values("x").tolist() == plan.documents.values("x").tolist()
    data = plan.to_bytes()
    for cut in (b'"lengths": [["<i8", 12]', b'"columns": {"prompt_lengths"'):
        assert cut in data
    for damaged in (
        data.replace(b'"lengths": [["<i8", 12]', b'"lengths": [["<i8", 11]'),
        data.replace(b'"number": ["<i8", 6]', b'"number": null       '),
    ):
        with pytest.raises(PlanError):
            LoadingPlan.from_bytes(damaged)


def test_a_hook_gets_the_documents_of_every_sample() -> None:
    seen = []

    def look(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
        for m, documents_of in enumerate(assembly.documents):
            seen.append(
                [row.tolist() for row in (documents_of[i] for i in range(len(documents_of)))]
            )
            assert len(assembly.ids(m)) == len(documents_of)
        return assembly.default()

    source = ov.Source.from_dataset(
        "s", [{"c": [1, 2], "r": [3]}], transforms=[ov.Pair("c", "r")], epochs=1
    )
    job = ov.Job(
        name="hooked",
        sources=[source],
        batch=ov.Batch(samples=1, context=64),
        hooks=[ov.constructor_do_plan(look)],
    )
    with ov.launch(job) as session:
        [step] = session.client(0)
    assert seen == [[[1, 2], [3]]]
    assert step[0]["roles"].tolist() == [0, 1]


def test_specifications_are_told_apart_by_text_and_fingerprint() -> None:
    specs = [
        ov.Pair(),
        ov.Pair("a", "b"),
        ov.Pair(prompt="p"),
        ov.Pair(values=["x"]),
        ov.Pair(values={"x": ("x1", "x2")}),
        ov.Group("a"),
        ov.Group("a", size=4),
        ov.Group("a", values=["x"]),
    ]
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert len({repr(spec) for spec in specs}) == len(specs)
    for spec in specs:
        assert eval(repr(spec), {"Pair": ov.Pair, "Group": ov.Group}) == spec


def test_inspect_suggests_pairs_and_reports_documents_that_lose_tokens(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from overlord.cli.main import cli as main

    path = tmp_path / "prefs.jsonl"
    talk = [said("user", "hello"), said("assistant", "world")]
    kinds: dict[str, tuple[Any, Any, str]] = {
        "texts": ("hello", "lower", "- tokenize:"),
        "ids": ([1, 2, 3], [4] * 40, "- tokens: {}"),
        "talks": (talk, [*talk[:1], said("assistant", "low")], "- chat:"),
    }
    for chosen, rejected, encode in kinds.values():
        row = {"prompt": chosen, "chosen": chosen, "rejected": rejected}
        path.write_text("\n".join([json.dumps(row)] * 3))
        shown = CliRunner().invoke(main, ["inspect", str(path)]).output
        for text in ("- pair:", "chosen: chosen", "prompt: prompt", encode, "'Pairs and groups'"):
            assert text in shown
    path.write_text("\n".join([json.dumps({"chosen": [1] * 30, "rejected": [2] * 50})] * 4))
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: prefs\nsources:\n  prefs:\n    uri: prefs.jsonl\n    epochs: 1\n"
        "    transforms: [{pair: {}}]\nbatch: {samples: 2, context: 64}\n"
    )
    shown = " ".join(CliRunner().invoke(main, ["inspect", str(job)]).output.split())
    assert "tokens 80 / 80 / 80 (min / median / max) by sample of 2 documents" in shown
    assert "4 longer" in shown
    assert "72 of 320 tokens" in shown
    shown = " ".join(CliRunner().invoke(main, ["plan", str(job), "--step", "0"]).output.split())
    assert "0: 2 samples of 4 documents, 124 tokens" in shown


def test_explanations_name_the_documents_of_steps_and_samples() -> None:
    rows = [{"c": [1] * 4, "r": [2] * 6}]
    source = ov.Source.from_dataset("s", rows, transforms=[ov.Pair("c", "r")], epochs=1)
    job = ov.Job(name="j", sources=[source], batch=ov.Batch(samples=1, context=64))
    with ov.launch(job) as session:
        next(session.client(0))
        assert "1 samples of 2 documents, 10 tokens" in str(session.explain(0))
        assert "10: documents of 4, 6" in str(session.explain("s/e0/f0/r0"))
