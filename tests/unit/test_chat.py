"""Conversations as a transform: forms of messages, files of templates, bad rows, identity."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ov
from overlord.errors import JobError, TransformError
from overlord.jobfile.yaml_file import read_job, write_job
from overlord.sources.tables import column_of
from overlord.transforms.base import Block
from overlord.transforms.chat_encoder import build_chat_encoder
from overlord.transforms.chat_messages import BadConversation, conversation
from overlord.transforms.pipeline import Pipeline
from tests import chats
from tests.pictures import png
from tests.unit.test_cli import overlord

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "fine"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {model: chats.write_folder(root / model, model) for model in chats.MODELS}


def block(rows: pa.Table | list[dict[str, Any]], *transforms: Any, **options: Any) -> Block:
    """Return the samples of rows."""
    table = rows
    if isinstance(rows, list):
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        table = pa.table({name: column_of(values)[0] for name, values in columns.items()})
    options = {"seed": 0, "context": 4096, "on_long": "split", **options}
    return Pipeline("chats", transforms, **options).row_stage(table)


def job(where: Any, *transforms: Any, **options: Any) -> ov.Job:
    source = (
        ov.Source("chats", where, transforms=transforms, epochs=1)
        if isinstance(where, str)
        else ov.Source.from_dataset("chats", where, transforms=transforms, epochs=1, max_bad=99)
    )
    return ov.Job(name="sft", sources=[source], batch=ov.Batch(samples=4, context=256), **options)


# Forms of conversations.


def test_sharegpt_and_openai_forms_give_the_same_conversation():
    sharegpt = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "add", "weight": 0},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two", "weight": 0.5},
    ]
    openai = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "weight": 0.5, "name": None},
    ]
    assert conversation(sharegpt) == conversation(openai)
    assert conversation(openai).weights == {2: 1, 4: 0.5}


def test_arguments_and_tools_as_json_text_are_those_of_mappings(folders):
    encoder = build_chat_encoder(ov.Chat(folders["qwen"], tools="tools"))
    text_call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    texts = {
        encoder.render(
            [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}], tools
        )[0]
        for call in (CALL, text_call)
        for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)])
    }
    assert len(texts) == 1
    assert '"arguments": {"a": 1}}' in texts.pop()


def test_tools_of_a_row_and_constant_tools_give_the_same_text(folders):
    given = build_chat_encoder(ov.Chat(folders["qwen"], tools="tools")).render(TALK, [TOOL])
    constant = build_chat_encoder(ov.Chat(folders["qwen"], tools=[TOOL])).render(TALK)
    assert given == constant
    assert "<tools>" in given[0]


def test_parts_of_text_are_joined_for_templates_that_take_only_text(folders):
    parts = [{**TALK[0], "content": [{"type": "text", "text": "hello"}] * 2}, TALK[1]]
    joined = [{**TALK[0], "content": "hellohello"}, TALK[1]]
    for model in ("chatml", "llama3", "qwen"):
        encoder = build_chat_encoder(ov.Chat(folders[model], date=chats.DAY))
        assert encoder.render(parts) == encoder.render(joined)
    # A template that writes parts itself decides how.
    encoder = build_chat_encoder(ov.Chat(folders["gemma"]))
    spaced = [{**TALK[0], "content": [{"type": "text", "text": " hello "}] * 2}, TALK[1]]
    assert "hellohello<" in encoder.render(spaced)[0]


def test_texts_become_parts_for_templates_that_take_only_parts(folders):
    text = chats.template("vision").replace("message.content is string", "false")
    encoder = build_chat_encoder(ov.Chat(folders["vision"], template=text))
    given = build_chat_encoder(ov.Chat(folders["vision"]))
    assert encoder.render(TALK) == given.render(TALK)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "expected a list of messages, got null"),
        ("text", "expected a list of messages, got str"),
        ([], "expected at least one message, got none"),
        ([3], "message 0: expected a mapping with role and content, got int"),
        ([{"role": "narrator", "content": "x"}], "expected a role of system, developer, user"),
        ([{"role": ["user"], "content": "x"}], "expected a role of system, developer, user"),
        (
            [{"content": "x"}],
            "expected a role of system, developer, user, assistant, tool, got None",
        ),
        ([{"from": "narrator", "value": "x"}], "expected a role of human, user, gpt"),
        ([{"from": 3, "value": "x"}], "expected a role of human, user, gpt"),
        (
            [TALK[0], {"role": "assistant", "content": ""}],
            "message 1: expected content or tool calls",
        ),
        ([{"role": "user"}], "expected content of the role user, got none"),
        ([{"role": "user", "content": 3}], "expected content as text or a list of parts, got int"),
        ([{"role": "user", "content": []}], "expected content of the role user, got none"),
        ([{"role": "user", "content": ["x"]}], "expected parts of type text or image, got 'x'"),
        (
            [{"role": "user", "content": [{"type": "video"}]}],
            "expected parts of type text or image",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "expected parts of type text or image"),
        ([{**TALK[1], "tool_calls": "x"}], "expected a list of tool calls, got str"),
        ([{**TALK[1], "tool_calls": [{}]}], "expected the name of a function in a tool call"),
        ([{**TALK[1], "tool_calls": [{"function": 1}]}], "expected the name of a function"),
        ([{**TALK[1], "tool_calls": [{"name": "f", "arguments": "{"}]}], "a tool call as JSON"),
        ([{**TALK[1], "tool_calls": [{"name": "f", "arguments": "3"}]}], "as a mapping, got int"),
        ([{**TALK[1], "tool_calls": [{"name": "f", "arguments": {"a": None}}]}], "without nulls"),
        ([{**TALK[1], "weight": -1}], "expected a weight of at least 0, got -1"),
        ([{**TALK[1], "weight": float("nan")}], "expected a weight of at least 0, got nan"),
        ([{**TALK[1], "weight": "1"}], "expected a weight of at least 0, got '1'"),
        ([{**TALK[0], "weight": 1}], "expected the weight 0 for the role user, got 1"),
        ([{"from": "function_call", "value": "{"}], "expected a function_call as JSON"),
    ],
)
def test_a_row_that_is_no_conversation_has_its_reason(messages, reason):
    with pytest.raises(BadConversation) as fault:
        conversation(copy.deepcopy(messages))
    assert reason in str(fault.value)


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        (3, "expected a list of tools, got int"),
        ([3], "expected tools as mappings, got int"),
        ("{", "expected tools as JSON"),
        ([{"name": "f", "parameters": None}], "expected a tool without nulls"),
    ],
)
def test_tools_that_cannot_be_read_have_a_reason(tools, reason):
    with pytest.raises(BadConversation, match=reason):
        conversation(TALK, tools)
    assert conversation(TALK, []).tools is None
    assert conversation(TALK, '[{"name": "f", "parameters": null}]').tools is not None


# Rows of files.


def test_rows_of_parquet_give_the_ids_and_weights_of_transformers(folders, tmp_path: Path):
    rows = [
        {"messages": [*TALK, {"role": "user", "content": f"how are {k} you"}, TALK[1]]}
        for k in range(9)
    ] + [{"messages": [TALK[0], {**TALK[1], "tool_calls": None, "name": "n"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = block(pq.read_table(tmp_path / "a.parquet"), ov.Chat(folders["qwen"]))
    assert made.weights is not None
    for i, row in enumerate(rows):
        ids, mask = chats.reference("qwen", row["messages"])
        assert (made.tokens[i].tolist(), made.weights[i].tolist()) == (ids, mask)
    assert made.meta["tokens"].tolist() == made.tokens.lengths.tolist()


def test_bad_rows_are_quarantined_with_file_row_and_reason_and_the_others_are_delivered(
    folders, tmp_path: Path
):
    rows: list[dict[str, Any]] = [{"messages": TALK} for _ in range(12)]
    bad = {
        1: ({"messages": []}, "expected at least one message"),
        3: ({"messages": [{"role": "bard", "content": "x"}]}, "expected a role"),
        4: ({}, "expected a list of messages, got null"),
        5: ({"messages": "text"}, "expected lists of messages, got string"),
        7: ({"messages": [TALK[0]]}, "expected a message of the assistant with a loss, got none"),
        9: ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "with a loss, got none"),
        10: ({"messages": [TALK[0], TALK[0], TALK[1]]}, "user and assistant must alternate"),
    }
    for at, (row, _) in bad.items():
        rows[at] = row
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    with ov.launch(job(str(path), ov.Chat(folders["mistral"])), check=True) as session:
        samples = [s for step in session.client(0) for mb in step for s, _, _ in mb.samples]
        found = {q["row"]: q for q in session.quarantine()}
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    assert sorted(s.row for s in samples) == [starts[i] for i in range(12) if i not in bad]
    assert sorted(found) == [starts[i] for i in bad]
    for at, (_, reason) in bad.items():
        assert reason in found[starts[at]]["reason"]
        assert found[starts[at]]["path"] == str(path)


def test_a_tool_message_that_the_template_refuses_is_quarantined(folders):
    text = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no call') }}{% endif %}"
    chat = ov.Chat(folders["chatml"], template=text + chats.template("chatml"))
    made = block([{"messages": [*TALK, {"role": "tool", "content": "2"}]}], chat)
    assert [reason.rpartition(": ")[2] for _, reason in made.bad] == ["no call"]


def test_a_column_that_is_no_list_is_refused_as_a_whole(folders):
    chat = ov.Chat(folders["chatml"])
    pipeline = Pipeline("chats", [chat], seed=0, context=64, on_long="split")
    with ov.launch(job([{"messages": "x"}] * 3 + [{"messages": TALK}], chat)) as session:
        list(session.client(0))
        assert len(session.quarantine()) == 3
    assert pipeline.columns == ("messages",)


def test_no_token_has_a_special_token_twice_and_none_is_added(folders):
    made = block([{"messages": TALK}], ov.Chat(folders["llama3"], date=chats.DAY))
    tokenizer = chats.of_transformers("llama3")
    assert np.count_nonzero(made.tokens[0] == tokenizer.bos_token_id) == 1


def test_long_conversations_are_split_with_their_weights(folders):
    whole = block([{"messages": TALK}], ov.Chat(folders["chatml"]))
    split = block([{"messages": TALK}], ov.Chat(folders["chatml"]), context=5)
    assert whole.weights is not None
    assert split.weights is not None
    assert len(split) > 1
    assert split.tokens.values.tolist() == whole.tokens.values.tolist()
    assert split.weights.values.tolist() == whole.weights.values.tolist()


def test_images_of_messages_become_placeholders_without_a_loss(folders):
    placeholder = json.loads(chats.tokenizer_json("vision"))["added_tokens"]
    pad = next(t["id"] for t in placeholder if t["content"] == "<|image_pad|>")
    parts = [{"type": "image"}, {"type": "text", "text": "what"}, {"type": "image_url"}]
    rows = [
        {
            "messages": [{"role": "user", "content": parts}, TALK[1]],
            "images": [png(56, 56), png(56, 112)],
        },
        {"messages": TALK, "images": []},
        {"messages": [{"role": "user", "content": parts}, TALK[1]], "images": [png(56, 56)]},
    ]
    chat = ov.Chat(folders["vision"])
    images = ov.Images(placeholder=pad, at="marker", min_pixels=1)
    made = block(rows, chat, images)
    assert [i for i, _ in made.bad] == [2]
    ids, weights = made.tokens[0], made.weights[0] if made.weights is not None else None
    assert np.count_nonzero(ids == pad) == 4 + 8
    assert weights is not None
    assert not weights[ids == pad].any()
    plain = block([{"messages": TALK}], chat)
    assert plain.weights is not None
    assert weights.sum() == plain.weights.values.sum()


# Templates and tokenizers.


def test_templates_are_found_in_every_place_of_transformers(folders, tmp_path: Path):
    text, other = chats.template("chatml"), chats.template("qwen")
    config = {"eos_token": {"content": "</s>"}, "bos_token": None}

    def rendered(files: dict[str, str], tools: Any = None, **options: Any) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "tokenizer.json").write_text(chats.tokenizer_json("chatml"))
        for name, content in files.items():
            (folder / name).write_text(content)
        chat = ov.Chat(str(folder / "tokenizer.json"), tools="tools", **options)
        return build_chat_encoder(chat).render(TALK, tools)[0]

    wanted = build_chat_encoder(ov.Chat(folders["chatml"])).render(TALK)[0]
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": other}]
    config_of = {"tokenizer_config.json": json.dumps({**config, "chat_template": named})}
    assert rendered({"tokenizer_config.json": json.dumps({"chat_template": text})}) == wanted
    assert rendered({"chat_template.json": json.dumps({"chat_template": text})}) == wanted
    assert rendered({"chat_template.jinja": text, **config_of}) == wanted
    assert rendered(config_of) == wanted
    assert "<tools>" in rendered(config_of, [TOOL])
    files = {"chat_template.jinja": text, "additional_chat_templates/tool_use.jinja": other}
    assert "<tools>" in rendered(files, [TOOL])
    assert "<tools>" in rendered(config_of, [TOOL], template="tool_use")
    with pytest.raises(TransformError, match=r"\(default, tool_use\), got 'none'"):
        rendered(config_of, template="none")
    with pytest.raises(TransformError, match="with a chat template"):
        rendered({"tokenizer_config.json": "{}"})
    with pytest.raises(TransformError, match="expected JSON in"):
        rendered({"tokenizer_config.json": "{"})
    with pytest.raises(TransformError, match="could not read the template file"):
        rendered({}, template=str(tmp_path / "none.jinja"))
    with pytest.raises(TransformError, match="expected a Jinja template, got: TemplateSyntax"):
        rendered({}, template="{% for %}")


def test_an_object_of_transformers_is_its_files(folders):
    from transformers import AutoTokenizer

    thing = AutoTokenizer.from_pretrained(folders["qwen"])
    by_object, by_path = (build_chat_encoder(ov.Chat(t)) for t in (thing, folders["qwen"]))
    assert by_object.render(TALK) == by_path.render(TALK)
    assert pickle.loads(pickle.dumps(ov.Chat(thing))) == ov.Chat(thing)


def test_a_template_with_special_tokens_of_unknown_value_is_refused(folders, tmp_path: Path):
    from tokenizers import Tokenizer

    thing = Tokenizer.from_str(chats.tokenizer_json("mistral"))
    text = chats.template("mistral")
    with pytest.raises(TransformError, match="expected the value of bos_token"):
        build_chat_encoder(ov.Chat(thing, template=text))
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    made = build_chat_encoder(ov.Chat(thing, template=text, variables=variables))
    assert made.render(TALK) == build_chat_encoder(ov.Chat(folders["mistral"])).render(TALK)


def test_a_tokenizer_without_characters_of_tokens_is_refused():
    import tiktoken

    thing = tiktoken.Encoding(
        "own", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
    )
    with pytest.raises(TransformError, match=r"expected a tokenizer\.json"):
        build_chat_encoder(ov.Chat(thing, template="{{ messages }}"))


def test_spaces_that_a_tokenizer_trims_from_offsets_belong_to_their_tokens(folders, tmp_path):
    given = json.loads(chats.tokenizer_json("chatml"))
    given["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False}
    given["post_processor"] |= {"trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    (tmp_path / "chat_template.jinja").write_text(chats.template("chatml"))
    messages = [TALK[0], {"role": "assistant", "content": "  \n  fine  "}]
    trimmed, plain = (
        build_chat_encoder(ov.Chat(str(folder))).encode([messages], None)
        for folder in (tmp_path, folders["chatml"])
    )
    assert plain[1] is not None
    assert trimmed[1] is not None
    assert trimmed[0].values.tolist() == plain[0].values.tolist()
    assert trimmed[1].values.tolist() == plain[1].values.tolist()


# Specification.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tokenizer": 3}, "tokenizer: expected a path"),
        ({"messages": ""}, "messages: expected a name"),
        ({"tools": 3}, "tools: expected a column or a list"),
        ({"tools": [3]}, "tools: expected a column or a list"),
        ({"tools": ""}, "tools: expected a name"),
        ({"train_on": "user"}, "train_on: expected one of assistant, last, all, got 'user'"),
        ({"template": ""}, "template: expected a text, a file or a name, got ''"),
        ({"variables": 3}, "variables: expected a mapping of plain values, got int"),
        ({"variables": {"x": object()}}, "variables: expected a mapping of plain values"),
        ({"variables": {"messages": 1}}, "variables: expected other names, got 'messages'"),
        ({"date": "today"}, "date: expected a day such as '2026-01-31', got 'today'"),
    ],
)
def test_invalid_fields_are_refused_with_all_problems(options, problem):
    with pytest.raises(JobError) as fault:
        ov.Chat(**{"tokenizer": "folder", **options})
    assert problem in str(fault.value)


def test_every_option_and_the_content_of_the_template_are_in_the_fingerprint(folders, tmp_path):
    folder = Path(chats.write_folder(tmp_path / "own", "chatml"))
    options: list[dict[str, Any]] = [
        {},
        {"messages": "m"},
        {"tools": "t"},
        {"tools": [TOOL]},
        {"train_on": "last"},
        {"template": chats.template("qwen")},
        {"variables": {"x": 1}},
        {"variables": {"x": True}},
        {"date": chats.DAY},
    ]
    given = [ov.Chat(str(folder), **o) for o in options]
    assert len({c.fingerprint() for c in given}) == len(options)
    assert len({repr(c) for c in given}) == len(options)
    assert given[0].fingerprint() == ov.Chat(folders["chatml"]).fingerprint()
    before = given[0].fingerprint()
    (folder / "chat_template.jinja").write_text(chats.template("chatml") + " ")
    assert given[0].fingerprint() != before


def test_a_pipeline_travels_and_refuses_a_template_that_changed(folders, tmp_path: Path):
    folder = Path(chats.write_folder(tmp_path / "own", "chatml"))
    made = Pipeline("chats", [ov.Chat(str(folder))], seed=0, context=64, on_long="split")
    sent = pickle.dumps(made)
    table = pa.Table.from_pylist([{"messages": TALK}])
    again = pickle.loads(sent).row_stage(table)
    assert again.tokens.values.tolist() == made.row_stage(table).tokens.values.tolist()
    (folder / "chat_template.jinja").write_text(chats.template("chatml") + " ")
    with pytest.raises(TransformError, match=r"expected the tokenizer and template of .* as at"):
        pickle.loads(sent)


def test_a_job_file_holds_the_transform(folders, tmp_path: Path):
    chats.write_folder(tmp_path / "tok", "chatml")
    (tmp_path / "own.jinja").write_text(chats.template("chatml"))
    (tmp_path / "job.yaml").write_text(
        "name: sft\n"
        "sources:\n"
        "  chats:\n"
        "    uri: a.jsonl\n"
        "    transforms:\n"
        "    - chat: {tokenizer: tok, messages: m, tools: [{name: f}], train_on: last,\n"
        "             template: own.jinja, variables: {x: 1}, date: 2026-01-31}\n"
        "batch: {samples: 4, context: 64}\n"
    )
    read = read_job(tmp_path / "job.yaml")
    wanted = ov.Chat(
        str(tmp_path / "tok"),
        "m",
        [{"name": "f"}],
        "last",
        template=str(tmp_path / "own.jinja"),
        variables={"x": 1},
        date="2026-01-31",
    )
    assert read.sources[0].transforms == (wanted,)
    (tmp_path / "again.yaml").write_text(write_job(read))
    assert read_job(tmp_path / "again.yaml") == read


def test_two_transforms_that_make_ids_are_refused(folders):
    chat = ov.Chat(folders["chatml"])
    with pytest.raises(TransformError, match="expected one Tokenize, Tokens or Chat"):
        Pipeline("chats", [chat, ov.Tokens()], seed=0, context=64, on_long="split")


def test_a_function_may_make_the_messages(folders):
    made = ov.Map(questions, rows=True)
    with ov.launch(job([{"q": "hello", "a": "fine"}] * 4, made, ov.Chat(folders["chatml"]))) as s:
        (step,) = list(s.client(0))
        assert [int(mb["loss_mask"].sum()) for mb in step] == [step.global_valid_tokens]


def questions(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": row["q"]},
            {"role": "assistant", "content": row["a"]},
        ]
    }


def test_the_package_does_not_import_jinja2_before_a_job_has_chats():
    code = (
        "import sys, overlord.transforms.pipeline, overlord.jobfile.yaml_file; "
        "assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inspection_of_conversations_suggests_the_transform(folders, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    shown = overlord("inspect", tmp_path / "a.jsonl")
    assert shown.exit_code == 0
    assert "chat:" in shown.output
    assert "messages: messages" in shown.output
