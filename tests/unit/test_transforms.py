"""What transforms do to rows, good and bad ones, and what they say when they cannot work."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from overlord.errors import ActorLost, DataStall, JobError, TransformError
from overlord.process.forkserver import describe_exit
from overlord.sources.tables import column_of, table_of
from overlord.transforms.base import Block, Filter, Map, Meta, RowIds, Select, Tokens
from overlord.transforms.image_rows import read_images
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.tokenize import Tokenize, build_encoder
from overlord.transforms.transform_process import TransformWorker
from tests.processes import WAIT_S, left_after


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words to ids: <s> 0, </s> 1, w0 2, w1 3, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *(f"w{k}" for k in range(300))])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_padding(length=50)
    made.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def pipeline(
    *transforms: Any,
    context: int = 1000,
    on_long: str = "truncate",
    seed: int = 0,
    source: str = "web",
) -> Pipeline:
    return Pipeline(source, transforms, seed=seed, context=context, on_long=on_long)


def ids(n: int, epoch: int = 0, file: int = 0, first: int = 0) -> RowIds:
    return RowIds(epoch, file, np.arange(first, first + n))


def rows_of(block: Block) -> list[list[int]]:
    return [block.tokens[i].tolist() for i in range(len(block))]


def run(p: Pipeline, table: pa.Table) -> Block:
    return p.row_stage(p.slice_stage(table, ids(table.num_rows)).table)


# Specs


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Tokenize(""), "tokenizer: expected a path"),
        (lambda: Tokenize("t.json", text=""), "text: expected a name"),
        (lambda: Tokenize("t.json", bos=-1), "bos: expected a token or an id"),
        (lambda: Tokenize("t.json", eos=True), "eos: expected a token or an id"),
        (
            lambda: Tokenize("t.json", add_special_tokens=1),
            "add_special_tokens: expected True or False",
        ),
        (lambda: Tokens(7), "column: expected a name"),
        (lambda: Map("clean"), "fn: expected a function"),
        (lambda: Map(len, rng=True), "rng: expected rows=True, got False"),
        (lambda: Filter(None), "fn: expected a function"),
        (lambda: Filter(len, rows="yes"), "rows: expected True or False"),
        (lambda: Select(), "expected at least one"),
        (lambda: Select("a", "a"), "expected different names, got these twice: a"),
        (lambda: Meta("tokens", "n"), "got 'tokens', which every sample has"),
        (lambda: Meta("n", 3), "value: expected a column's name or a function"),
        (lambda: Meta("n", "m", rows=True), "expected them only with a function"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_when_it_is_made(make: Any, problem: str):
    with pytest.raises(JobError, match=problem):
        make()


def test_a_spec_lists_all_its_problems_at_once():
    with pytest.raises(JobError) as caught:
        Tokenize("", text=3, bos=1.5)
    assert len(caught.value.problems) == 3


def keep_long(columns: dict[str, Any], least: int = 3) -> list[bool]:
    return [len(text) >= least for text in columns["text"]]


def upper(columns: dict[str, Any]) -> dict[str, Any]:
    return {"text": [text.upper() for text in columns["text"]]}


def test_specs_read_well_and_pickle():
    specs = [
        Tokenize("t.json", eos="</s>"),
        Tokens("ids"),
        Map(upper, holds_lock=True),
        Filter(keep_long),
        Select("a", "b"),
        Meta("n", "m"),
    ]
    assert [repr(s) for s in specs] == [
        "Tokenize('t.json', text='text', eos='</s>')",
        "Tokens('ids')",
        "Map(upper, holds_lock=True)",
        "Filter(keep_long)",
        "Select('a', 'b')",
        "Meta('n', 'm')",
    ]
    assert pickle.loads(pickle.dumps(specs)) == specs


def test_importing_specs_and_job_files_loads_neither_pyarrow_nor_tokenizers():
    code = (
        "import sys, overlord.jobfile.yaml_file, overlord.transforms.base; print([m for m in "
        "('pyarrow', 'tokenizers', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# Fingerprints


def scaled(by: float) -> Any:
    return lambda columns: {"n": columns["n"] * by}


def test_a_function_has_the_fingerprint_of_its_code_and_of_what_it_captured():
    assert Map(upper).fingerprint() == Map(upper).fingerprint() != Map(keep_long).fingerprint()
    assert (
        Map(upper).fingerprint()
        != Filter(upper).fingerprint()
        != Filter(upper, rows=True).fingerprint()
    )
    assert (
        Map(scaled(2)).fingerprint() == Map(scaled(2)).fingerprint() != Map(scaled(3)).fingerprint()
    )
    assert (
        Filter(partial(keep_long, least=4)).fingerprint()
        != Filter(partial(keep_long, least=5)).fingerprint()
    )


def test_a_function_without_source_has_the_fingerprint_of_its_byte_code():
    def made(text: str) -> Any:
        space: dict[str, Any] = {}
        exec(compile(text, "nowhere", "exec"), space)
        return Map(space["fn"]).fingerprint()

    one, same, other = (made(f"def fn(x):\n    return [y + {n} for y in x]") for n in (1, 1, 2))
    assert one == same != other


def test_the_fingerprint_of_a_function_is_the_same_in_another_process():
    code = (
        "from tests.unit.test_transforms import *; print(Map(scaled(2)).fingerprint(), "
        "Filter(partial(keep_long, least=4)).fingerprint())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == [
        Map(scaled(2)).fingerprint(),
        Filter(partial(keep_long, least=4)).fingerprint(),
    ]


def test_a_tokenizer_has_the_fingerprint_of_its_content_wherever_it_lies(
    tokenizer: str, tmp_path: Path
):
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(tokenizer).read_bytes())
    assert (
        Tokenize(copy).fingerprint()
        == Tokenize(tokenizer).fingerprint()
        != Tokenize(tokenizer, eos=1).fingerprint()
    )
    copy.write_bytes(Path(tokenizer).read_bytes().replace(b"w299", b"w29x"))
    os.utime(copy, ns=(1, 1))
    assert Tokenize(copy).fingerprint() != Tokenize(tokenizer).fingerprint()


# Tokenize


def test_a_process_that_finds_another_tokenizer_than_the_job_was_launched_with_says_so(
    tokenizer: str, tmp_path: Path
):
    path = tmp_path / "tokenizer.json"
    path.write_text(Path(tokenizer).read_text())
    sent = pickle.dumps(pipeline(Tokenize(str(path), text="text")))
    assert pickle.loads(sent).transforms == (Tokenize(str(path), text="text"),)
    path.write_text(Path(tokenizer).read_text().replace('"w299"', '"w300"'))
    with pytest.raises(
        TransformError,
        match=r"source 'web', Tokenize: expected the tokenizer file .* as at launch, .*; restore "
        "the file of the launch",
    ):
        pickle.loads(sent)


def test_text_becomes_ids_in_the_smallest_type_whatever_padding_the_file_asks_for(tokenizer: str):
    block = run(pipeline(Tokenize(tokenizer)), pa.table({"text": ["w0 w1 w2 w3 w4", "w299"]}))
    assert rows_of(block) == [[2, 3, 4, 5, 6], [301]]
    assert block.tokens.values.dtype == np.uint16
    assert block.meta["tokens"].tolist() == [5, 1]
    assert block.meta["bytes"].tolist() == [10, 2]


def test_bos_and_eos_are_tokens_or_ids(tokenizer: str):
    assert rows_of(
        run(pipeline(Tokenize(tokenizer, bos="<s>", eos=70_000)), pa.table({"text": ["w0", ""]}))
    ) == [[0, 2, 70_000], [0, 70_000]]


def test_the_tokenizer_is_loaded_once_per_process(tokenizer: str):
    assert (
        build_encoder(Tokenize(tokenizer)).tokenizer
        is build_encoder(Tokenize(tokenizer, text="body", eos=1)).tokenizer
    )


def test_encoding_runs_on_the_calling_thread_unless_the_user_wants_otherwise(tokenizer: str):
    code = (
        "import os, sys; from overlord.transforms.tokenize import *; "
        "build_encoder(Tokenize(sys.argv[1])); "
    )
    code += "print(os.environ['TOKENIZERS_PARALLELISM'])"
    for given, wanted in (({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, "true")):
        env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"} | given
        done = subprocess.run(
            [sys.executable, "-c", code, tokenizer],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=env,
        )
        assert done.stdout.strip() == wanted


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "could not read"),
        (b"{}", "expected a tokenizer.json"),
        (b"\xff", "expected a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named_when_the_pipeline_is_built(
    content: bytes | None, problem: str, tmp_path: Path
):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TransformError, match=problem) as caught:
        pipeline(Tokenize(path))
    assert str(path) in str(caught.value)
    assert "'web'" in str(caught.value)


def test_a_tokenizer_that_rolls_dice_is_refused(tmp_path: Path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0}, [], dropout=0.1)).save(str(path))
    with pytest.raises(TransformError, match="ids would differ in every run"):
        pipeline(Tokenize(path))


def test_a_token_that_the_vocabulary_lacks_is_refused_when_the_pipeline_is_built(tokenizer: str):
    with pytest.raises(TransformError, match=r"expected a token of .*, got '<eot>'"):
        pipeline(Tokenize(tokenizer, eos="<eot>"))


def test_rows_that_are_no_text_go_to_quarantine_and_harm_no_others(tokenizer: str):
    broken = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(np.array([0, 2, 4, 6], np.int32)), pa.py_buffer(b"w0\xff\xfew1")],
    )
    block = run(pipeline(Tokenize(tokenizer)), pa.table({"text": broken}))
    assert rows_of(block) == [[2], [3]]
    assert block.index.tolist() == [0, 2]
    assert block.bad == [(1, "text: expected UTF-8, got invalid start byte at byte 0")]
    block = run(pipeline(Tokenize(tokenizer)), pa.table({"text": ["w0", None, "", "w1"]}))
    assert block.bad == [
        (1, "text is null or missing"),
        (2, "expected at least one token, got none"),
    ]
    assert block.index.tolist() == [0, 3]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_text_may_come_in_any_of_arrows_types(kind: pa.DataType, tokenizer: str):
    text = pa.array(["w0 w1", None, "w2"]).cast(kind)
    block = run(pipeline(Tokenize(tokenizer)), pa.table({"text": text}))
    assert (rows_of(block), block.bad) == ([[2, 3], [4]], [(1, "text is null or missing")])


def test_a_text_that_the_tokenizer_refuses_is_quarantined_alone(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(
        models.WordLevel({"a": 0}, unk_token="<none>")
    )  # no such token: an unknown word cannot be encoded
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    block = run(
        pipeline(Tokenize(tmp_path / "t.json"), Meta("n", "n")),
        pa.table({"text": ["a", "b", "a a"], "n": [7, 8, 9]}),
    )
    assert rows_of(block) == [[0], [0, 0]]
    assert [i for i, _ in block.bad] == [1]
    assert block.meta["n"].tolist() == [7, 9]


# Tokens


@pytest.mark.parametrize(
    "inner",
    [
        pa.int8(),
        pa.uint8(),
        pa.int16(),
        pa.uint16(),
        pa.int32(),
        pa.uint32(),
        pa.int64(),
        pa.uint64(),
        pa.float64(),
    ],
)
@pytest.mark.parametrize("outer", [pa.list_, pa.large_list, lambda t: pa.list_(t, 2)])
def test_ids_may_come_in_any_list_of_numbers(inner: pa.DataType, outer: Any):
    column = pa.array([[9, 9], [1, 2], None, [3, 100], [5, 6]], outer(inner)).slice(1, 3)
    block = run(pipeline(Tokens("ids")), pa.table({"ids": column}))
    assert rows_of(block) == [[1, 2], [3, 100]]
    assert block.index.tolist() == [0, 2]
    assert block.bad == [(1, "tokens is null or missing")]
    assert block.tokens.values.dtype.kind == "u"
    assert block.tokens.values.itemsize <= 4


def test_ids_are_not_copied():
    column = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    block = run(pipeline(Tokens()), pa.table({"tokens": column}))
    assert block.tokens.values.ctypes.data == column.values.buffers()[1].address


@pytest.mark.parametrize("row", [[-1], [2**31], [5, None], [None]])
def test_ids_out_of_range_quarantine_their_row_only(row: list[Any]):
    block = run(
        pipeline(Tokens()),
        pa.table({"tokens": pa.array([[1], row, [], [2**31 - 1]], pa.list_(pa.int64()))}),
    )
    assert rows_of(block) == [[1], [2**31 - 1]]
    assert [i for i, _ in block.bad] == [1, 2]


def test_one_fraction_in_json_does_not_spoil_the_other_rows():
    block = run(pipeline(Tokens()), pa.table({"tokens": [[1.0, 2.0], [1.5], [3.0]]}))
    assert rows_of(block) == [[1, 2], [3]]
    assert block.bad == [(1, "tokens holds an id that is not a whole number")]


def test_a_column_called_tokens_needs_no_transform():
    assert rows_of(run(pipeline(), pa.table({"tokens": [[1, 2]]}))) == [[1, 2]]
    assert pipeline().columns == ("tokens",)


# on_long


@pytest.mark.parametrize(
    ("on_long", "rows", "index", "part", "bad", "long"),
    [
        ("truncate", [[1, 2, 3], [5], [6, 7, 8]], [0, 1, 2], [0, 0, 0], [], [(0, 1)]),
        ("split", [[1, 2, 3], [4], [5], [6, 7, 8]], [0, 0, 1, 2], [0, 1, 0, 0], [], []),
        (
            "quarantine",
            [[5], [6, 7, 8]],
            [1, 2],
            [0, 0],
            [(0, "expected at most context=3 tokens, got 4")],
            [],
        ),
        ("drop", [[5], [6, 7, 8]], [1, 2], [0, 0], [], [(0, 4)]),
    ],
)
def test_a_sample_longer_than_the_context(
    on_long: str, rows: Any, index: Any, part: Any, bad: Any, long: Any
):
    table = pa.table({"tokens": [[1, 2, 3, 4], [5], [6, 7, 8]], "n": [10, 20, 30]})
    block = run(pipeline(Tokens(), Meta("n", "n"), context=3, on_long=on_long), table)
    assert (rows_of(block), block.index.tolist(), block.part.tolist(), block.bad) == (
        rows,
        index,
        part,
        bad,
    )
    assert list(zip(block.long.tolist(), block.lost.tolist(), strict=True)) == long, (
        "rows that lost tokens, and how many"
    )
    assert block.meta["n"].tolist() == [(i + 1) * 10 for i in index]
    assert len(block.tokens.values) == sum(map(len, rows)), (
        "nothing that was cut off stays in memory"
    )


# Map, Filter, Select, Meta


def test_functions_get_numbers_as_arrays_and_the_rest_as_lists():
    seen: dict[str, Any] = {}

    def look(columns: dict[str, Any]) -> list[bool]:
        seen.update(columns)
        columns["n"][:] = 0  # its own copy
        return [True, False]

    table = pa.table(
        {
            "n": [1, 2],
            "x": [0.5, 1.5],
            "b": [True, False],
            "s": ["a", None],
            "l": [[1], [2, 3]],
            "h": [1, None],
        }
    )
    staged = pipeline(Filter(look), Tokens("l"), Meta("n", "n")).slice_stage(table, ids(2))
    assert {name: type(values) for name, values in seen.items()} == {
        "n": np.ndarray,
        "x": np.ndarray,
        "b": np.ndarray,
        "s": list,
        "l": list,
        "h": list,
    }
    assert (seen["s"], seen["l"], seen["h"]) == (["a", None], [[1], [2, 3]], [1, None])
    assert (staged.index.tolist(), staged.dropped, staged.table.to_pylist()) == (
        [0],
        1,
        [{"l": [1], "n": 1}],
    )


def test_a_function_that_fails_on_some_rows_loses_those_rows_only():
    inverse = Map(lambda columns: {"tokens": [[12 // n] for n in columns["n"].tolist()]})
    staged = pipeline(inverse).slice_stage(pa.table({"n": [3, 0, 4, 0]}), ids(4))
    assert staged.index.tolist() == [0, 2]
    assert staged.table.column("tokens").to_pylist() == [[4], [3]]
    assert [i for i, _ in staged.bad] == [1, 3]
    assert "ZeroDivisionError" in staged.bad[0][1]


def test_a_row_function_that_fails_or_answers_wrongly_loses_that_row_only():
    answers = {0: True, 1: None, 2: False, 3: np.True_}
    staged = pipeline(Filter(lambda row: answers[row["n"]], rows=True), Tokens("l")).slice_stage(
        pa.table({"n": range(5), "l": [[1]] * 5}), ids(5)
    )
    assert (staged.index.tolist(), staged.dropped) == ([0, 3], 1)
    assert [
        (i, reason.split(": ", 1)[1].partition(f" (at {__file__}:")[0]) for i, reason in staged.bad
    ] == [(1, "TypeError: expected True or False, got None"), (4, "KeyError: 4")]


def test_a_value_of_the_wrong_type_in_a_maps_answer_loses_that_row_only():
    table = pa.table({"l": [[1], [2], [3]]})
    answers: list[Any] = [[1], "two", [3]]
    staged = pipeline(Map(lambda row: {"tokens": answers[row["l"][0] - 1]}, rows=True)).slice_stage(
        table, ids(3)
    )
    assert staged.table.to_pylist() == [{"tokens": [1]}, {"tokens": [3]}]
    assert [i for i, _ in staged.bad] == [1]
    assert staged.bad[0][1].startswith(
        "column 'tokens': expected lists of token ids (list<int>), got string"
    )


def test_a_maps_answer_is_never_converted_to_the_type_of_other_rows():
    """Whole numbers made of fractions were the ids of a neighbour's type."""
    answers: list[Any] = [[1, 2], [1.5, 2.75], [3], "x", [True]]
    p = pipeline(Map(lambda row: {"tokens": answers[row["n"]]}, rows=True))
    staged = p.slice_stage(pa.table({"n": range(5)}), ids(5))
    block = p.row_stage(staged.table)
    assert rows_of(block) == [[1, 2], [3]]
    assert [i for i, _ in staged.bad] == [3, 4]
    assert block.bad == [(1, "tokens holds an id that is not a whole number")]


def test_functions_over_columns_get_mixed_numbers_as_one_array_only_if_it_holds_them_exactly():
    seen: list[Any] = []

    def look(columns: dict[str, Any]) -> list[bool]:
        seen.append(columns["n"])
        return [True] * len(columns["n"])

    for values in ([1, 2.5], [1, 2], [2**53 + 1, 2.5], [1, True]):
        table, _ = table_of({"n": values, "tokens": [[1], [2]]}, 2)
        pipeline(Filter(look)).slice_stage(table, ids(2))
    assert [(type(s), getattr(s, "dtype", None)) for s in seen] == [
        (np.ndarray, np.float64),
        (np.ndarray, np.int64),
        (list, None),
        (list, None),
    ]
    assert seen[2] == [2**53 + 1, 2.5]


def test_metadata_that_float64_would_round_is_quarantined_in_any_company():
    large = 2**53 + 1
    for values in ([large, 0.5], [large, 1], [0.5, large, 1]):
        n = len(values)
        table, _ = table_of({"n": values, "tokens": [[1]] * n}, n)
        steps = (
            Meta("n", "n"),
            Meta("n", lambda row: row["n"], rows=True),
            Meta("n", lambda columns: list(columns["n"])),
        )
        for step in steps:
            p = pipeline(step)
            staged = p.slice_stage(table, ids(n))
            bad = [reason for _, reason in [*staged.bad, *p.row_stage(staged.table).bad]]
            assert len(bad) == 1, (values, step)
            assert "a whole number beyond 2**53, which float64 would round" in bad[0]


def test_images_of_several_shapes_in_one_column_are_read_row_by_row():
    jpeg = b"\xff\xd8"
    values: list[Any] = [jpeg, [jpeg, jpeg], None, {"bytes": jpeg, "path": None}]
    row, files, bad = read_images(pa.table({"images": column_of(values)[0]}), ["images"])
    assert (row.tolist(), [f.tobytes() for f in files], bad) == ([0, 1, 1, 3], [jpeg] * 4, {})


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        (Map(lambda columns: None), "expected a dict of columns, got NoneType"),
        (
            Map(lambda columns: {"tokens": [[1]]}),
            "expected 2 rows in every column, got 'tokens': 1; drop rows with Filter",
        ),
        (Filter(lambda columns: [1, 0]), "expected 2 booleans"),
        (Filter(lambda columns: True), "expected 2 booleans"),
        (Meta("m", lambda columns: ["a", "b"]), "expected 2 numbers"),
    ],
)
def test_a_function_that_breaks_its_contract_ends_the_job(transform: Any, problem: str):
    with pytest.raises(TransformError, match=problem):
        pipeline(transform).slice_stage(pa.table({"tokens": [[1], [2]]}), ids(2))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("rows", [True, False])
def test_what_is_no_rows_fault_is_not_hidden(error: type[BaseException], rows: bool):
    def fail(_: Any) -> Any:
        raise error

    for transform in (Map(fail, rows=rows), Filter(fail, rows=rows), Meta("m", fail, rows=rows)):
        with pytest.raises(error):
            pipeline(transform).slice_stage(pa.table({"tokens": [[1]]}), ids(1))


def test_a_maps_answer_replaces_the_columns_but_metadata_stays(tokenizer: str):
    p = pipeline(
        Meta("chars", lambda columns: [len(t) for t in columns["text"]]),
        Meta("n", "n"),
        Map(upper),
        Filter(keep_long),
        Tokenize(tokenizer),
    )
    seen = p.slice_stage(pa.table({"text": ["w0 w1", "w2", "w3 w3"], "n": [1.5, 2.5, 3.5]}), ids(3))
    assert seen.index.tolist() == [0, 2]
    block = p.row_stage(seen.table)
    assert block.meta["chars"].tolist() == [5, 5]
    assert block.meta["n"].tolist() == [1.5, 3.5]
    assert [block.meta[m].dtype for m in ("chars", "n", "tokens", "bytes")] == [
        np.int64,
        np.float64,
        np.int64,
        np.int64,
    ]


def test_metadata_that_no_plan_can_count_with_quarantines_its_row():
    table = pa.table({"tokens": [[1], [2], [3], [4]], "q": [0.5, None, float("nan"), float("inf")]})
    block = run(pipeline(Meta("q", "q")), table)
    assert block.meta["q"].tolist() == [0.5]
    assert block.bad == [
        (1, "q is null or missing"),
        (2, "q is not finite"),
        (3, "q is not finite"),
    ]


def test_what_functions_see_can_be_narrowed_and_ids_stay():
    p = pipeline(
        Tokens("ids"), Select("n"), Filter(lambda columns: [set(columns) == {"n", "tokens"}] * 2)
    )
    staged = p.slice_stage(pa.table({"ids": [[1], [2]], "n": [1, 2], "x": ["a", "b"]}), ids(2))
    assert staged.table.to_pylist() == [{"tokens": [1]}, {"tokens": [2]}]


def test_without_user_code_a_slice_passes_as_it_is():
    table = pa.table({"tokens": [[1], [2]]})
    staged = pipeline(Tokens()).slice_stage(table, ids(2))
    assert staged.table is table
    assert (staged.index.tolist(), staged.bad, staged.dropped) == ([0, 1], [], 0)


def test_no_row_left_is_no_error(tokenizer: str):
    p = pipeline(
        Filter(lambda columns: [False] * len(columns["a"])),
        Map(lambda columns: {"text": columns["a"]}),
        Meta("n", "n"),
        Tokenize(tokenizer),
    )
    staged = p.slice_stage(pa.table({"a": ["x", "y"]}), ids(2))
    assert staged.dropped == 2
    block = p.row_stage(staged.table)
    assert (len(block), block.bad, sorted(block.meta)) == (0, [], ["bytes", "n", "tokens"])


# Chance


def dice(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"tokens": rng.integers(0, 1000, 4)}


def test_a_random_map_depends_on_who_the_row_is_and_on_nothing_else():
    def rolled(
        first: int,
        n: int,
        *,
        position: int = 0,
        epoch: int = 0,
        file: int = 0,
        seed: int = 0,
        source: str = "web",
    ) -> list[Any]:
        before = [Filter(lambda columns: columns["n"] >= 0)] * position
        p = pipeline(*before, Map(dice, rows=True, rng=True), seed=seed, source=source)
        table = pa.table({"n": range(n)})
        return p.slice_stage(table, ids(n, epoch, file, first)).table.column("tokens").to_pylist()

    usual = rolled(0, 6)
    assert usual[2:5] == rolled(2, 3), "the rows beside it do not matter"
    assert len({str(r) for r in usual}) == 6
    others = [
        rolled(0, 6, **changed)
        for changed in ({"epoch": 1}, {"file": 1}, {"seed": 1}, {"source": "code"}, {"position": 1})
    ]
    assert all(a != b for other in others for a, b in zip(usual, other, strict=True))


# Columns


@pytest.mark.parametrize(
    ("transforms", "columns"),
    [
        ([Tokens("ids"), Meta("q", "quality")], ("ids", "quality")),
        ([Meta("q", "quality")], ("quality", "tokens")),
        ([Filter(len), Tokens()], None),
        ([Meta("q", len), Tokens()], None),
        ([Select("a", "b"), Map(len), Tokens("c")], ("a", "b")),
        ([Select("a", "tokens"), Filter(len)], ("a", "tokens")),
        ([Map(len), Select("a", "tokens")], None),
        ([Tokens("ids"), Meta("q", "quality"), Map(len)], None),
    ],
)
def test_only_the_columns_that_are_needed_are_read(transforms: Any, columns: Any):
    assert pipeline(*transforms).columns == columns


@pytest.mark.parametrize(
    ("transforms", "problem"),
    [
        (
            [Select("a"), Tokens("b")],
            "expected the column 'b', got an earlier Select that drops it; add 'b'",
        ),
        ([Select("a")], "expected a transform that makes token ids, got none; add Tokenize"),
        ([Tokens("a"), Tokens("b")], "keep one of them"),
        (
            [Tokens(), Meta("q", "a"), Meta("q", "b")],
            "expected different names of metadata, got 'q' twice",
        ),
    ],
)
def test_transforms_that_cannot_follow_each_other_are_refused_when_the_pipeline_is_built(
    transforms: Any, problem: str
):
    with pytest.raises(TransformError, match=problem):
        pipeline(*transforms)


@pytest.mark.parametrize(
    ("transform", "table", "said"),
    [
        (Tokens("ids"), {"a": [1], "b": [2]}, ["expected the column 'ids'", "a, b"]),
        (Tokens("ids"), {"ids": ["x"]}, ["'ids': expected", "list<int>"]),
        (Tokens("ids"), {"ids": [["x"]]}, ["list<item: string>"]),
        (Meta("q", "q"), {"tokens": [[1]], "q": ["x"]}, ["'q': expected numbers", "got string"]),
    ],
)
def test_a_column_that_never_fits_is_named_with_what_was_found_and_wanted(
    transform: Any, table: Any, said: list[str]
):
    p = pipeline(transform)
    with pytest.raises(TransformError) as caught:
        p.row_stage(pa.table(table))
    assert all(part in str(caught.value) for part in [*said, "'web'", repr(transform)])
    # A slice of JSON lines may hold nothing but bad rows: its neighbours are none the worse for it.
    staged = p.slice_stage(pa.table(table), ids(1))
    assert staged.table.num_rows == 0
    assert all(part in staged.bad[0][1] for part in said)


def test_text_where_a_number_stands_is_named(tokenizer: str):
    with pytest.raises(TransformError, match=r"column 'text': expected text \(string\), got int64"):
        pipeline(Tokenize(tokenizer)).row_stage(pa.table({"text": [1]}))


# A process of its own


def slow(columns: dict[str, Any]) -> dict[str, Any]:
    signal.pause()
    return columns


def leave(columns: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


def wrong(columns: dict[str, Any]) -> dict[str, Any]:
    return {"text": []}


@pytest.mark.parametrize("on_long", ["split", "truncate", "drop"])
def test_a_worker_gives_what_the_pipeline_gives(tokenizer: str, on_long: str):
    p = pipeline(
        Map(upper, holds_lock=True),
        Meta("n", keep_long),
        Tokenize(tokenizer),
        context=2,
        on_long=on_long,
    )
    assert p.holds_lock
    table = pa.table({"text": ["w0 w1 w2", None, "", "x y"]})
    with TransformWorker(p) as worker:
        for t in (table, table.slice(1, 2), table.slice(0, 0)):
            here, there = p.slice_stage(t, ids(t.num_rows)), worker.slice_stage(t, ids(t.num_rows))
            assert here.table.equals(there.table)
            assert (here.index.tolist(), here.bad, here.dropped) == (
                there.index.tolist(),
                there.bad,
                there.dropped,
            )
            one, two = p.row_stage(here.table), worker.row_stage(there.table)
            assert (rows_of(one), one.part.tolist(), one.index.tolist(), one.bad) == (
                rows_of(two),
                two.part.tolist(),
                two.index.tolist(),
                two.bad,
            )
            assert (one.long.tolist(), one.lost.tolist()) == (two.long.tolist(), two.lost.tolist())
            assert one.tokens.values.dtype == two.tokens.values.dtype
            assert {k: (v.dtype, v.tolist()) for k, v in one.meta.items()} == {
                k: (v.dtype, v.tolist()) for k, v in two.meta.items()
            }


def test_an_error_in_the_worker_is_the_same_error_here(tokenizer: str):
    with TransformWorker(pipeline(Map(wrong), Tokenize(tokenizer))) as worker:
        with pytest.raises(TransformError, match="drop rows with Filter") as caught:
            worker.slice_stage(pa.table({"text": ["a"]}), ids(1))
        assert caught.value.source == "web"
        assert (
            worker.slice_stage(pa.table({"text": ["a"]}).slice(0, 0), ids(0)).index.tolist() == []
        ), "and the worker goes on"


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_worker_that_dies_is_named(how: str, tokenizer: str):
    with TransformWorker(
        pipeline(Map(leave if how == "left" else upper), Tokenize(tokenizer)),
        "transforms of 'web' (1)",
    ) as worker:
        if how == "killed":
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(
            ActorLost, match=r"transforms of 'web' \(1\) is lost: .*(signal 9|exit code 3)"
        ):
            worker.slice_stage(pa.table({"text": ["a"]}), ids(1))
        with pytest.raises(ActorLost, match="lost earlier"):
            worker.row_stage(pa.table({"text": ["a"]}))


def test_how_a_process_ended_is_said_as_far_as_it_is_known():
    assert [describe_exit(code) for code in (-9, 3, None)] == [
        "killed by signal 9",
        "exit code 3",
        "exit code unknown",
    ]


def test_a_worker_that_does_not_answer_is_given_up_at_its_deadline(tokenizer: str):
    with TransformWorker(pipeline(Map(slow), Tokenize(tokenizer))) as worker:
        worker.set_deadline(0.05)
        pid = worker.pid
        with pytest.raises(DataStall, match="transforms of 'web', slice stage"):
            worker.slice_stage(pa.table({"text": ["a"]}), ids(1))
        assert left_after([pid], WAIT_S) == []


def test_a_function_that_cannot_cross_to_a_process_is_refused_with_the_way_out(tokenizer: str):
    lock = threading.Lock()
    with pytest.raises(
        JobError,
        match=r"source 'web': .*variable 'lock': an object of _thread.lock cannot be sent to "
        "another process: .*; create it in the function that uses it",
    ):
        TransformWorker(pipeline(Map(lambda columns: lock), Tokenize(tokenizer)))


def test_any_number_of_workers_share_one_thread_which_ends_with_the_last(tokenizer: str):
    before = threading.active_count()
    workers = [TransformWorker(pipeline(Map(upper), Tokenize(tokenizer))) for _ in range(3)]
    assert threading.active_count() == before + 1
    for worker in workers:
        worker.close()
    assert threading.active_count() == before


def test_a_worker_that_cannot_open_its_transforms_raises_their_error(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    module = type(sys)("only_here")
    exec("def convert(columns):\n    return columns", module.__dict__)
    module.convert.__module__ = "only_here"
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(ModuleNotFoundError, match="only_here"):
        TransformWorker(pipeline(Map(module.convert), Tokenize(tokenizer)))


def test_closing_leaves_no_process(tokenizer: str):
    worker = TransformWorker(pipeline(Map(upper), Tokenize(tokenizer)))
    pid = worker.pid
    worker.close()
    worker.close()
    assert left_after([pid], WAIT_S) == []
    del worker
    gc.collect()


def test_a_worker_ends_when_its_parent_is_killed(tokenizer: str):
    code = (
        "import os, signal; from tests.unit.test_transforms import *\n"
        f"w = TransformWorker(pipeline(Map(upper), Tokenize({tokenizer!r})))\n"
        "print(w.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    # The pipe that printed the number is also the child's: it is about to be gone when reading it
    # to its end is done.
    assert left_after([int(done.stdout)], WAIT_S) == []
