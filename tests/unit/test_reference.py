"""The reference stream itself, on cases small enough to work out by hand."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from overlord import hashing
from overlord.job.job import Job, Source
from overlord.mesh import Batch
from overlord.transforms.base import Filter, Map, Select, Tokens
from overlord.transforms.tokenize import Tokenize
from tests.reference import U, key64, keyed_hash, reference_stream, whole


def job(sources: list[Source], **fields: Any) -> Job:
    batch = {"context": 100} | {
        k: fields.pop(k) for k in ("samples", "tokens", "microbatches", "context") if k in fields
    }
    return Job(name="reference", sources=sources, batch=Batch(**batch), **fields)


def source(name: str, rows: int | list[Any], **fields: Any) -> Source:
    """A map-style source; a number stands for that many rows of one token each."""
    data = [
        {"tokens": tokens}
        for tokens in ([[i] for i in range(rows)] if isinstance(rows, int) else rows)
    ]
    return Source(
        name, data_set(data), **({"transforms": [Tokens()], "shuffle": False, "epochs": 1} | fields)
    )


class data_set:  # noqa: N801  a map-style dataset, and no list: a list of paths is something else
    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.rows[i], Exception):
            raise self.rows[i]
        return self.rows[i]


def names(stream: Any) -> list[str]:
    """Each step as a word: 'a0 b0' is row 0 of source a, then row 0 of source b."""
    return [" ".join(f"{name}{row}" for (name, _, _, row, _), _ in step) for step in stream]


def tokens(stream: Any) -> list[list[int]]:
    return [tokens for step in stream for _, tokens in step]


# Hashes and weights


def test_hashes_are_those_of_the_package():
    key = key64("rows", 7, "wéb", 3)
    assert key == hashing.key64("rows", 7, "wéb", 3)
    files, rows = np.array([0, 5, 300]), np.array([9, 0, 2**45])
    assert [
        keyed_hash(key, int(f), int(r)) for f, r in zip(files, rows, strict=True)
    ] == hashing.keyed_hash(key, files, rows).tolist()


def test_hashes_never_change():
    assert key64("chunks", 0, "web", 0) == int.from_bytes(
        bytes.fromhex("efec8290c6a33172"), "little"
    )
    assert keyed_hash(0, 0) == 0xE220A8397B1DCDAF  # splitmix64's first output from state 0


def test_whole_weights_sum_to_the_unit_and_the_largest_remainders_get_what_is_missing():
    assert whole([1, 1, 1]) == [U // 3 + 1, U // 3, U // 3]
    assert whole([0.5, 0, 0.5]) == [U // 2, 0, U // 2]
    assert whole([0, 0]) == [0, 0]
    assert sum(whole([0.1, 0.2, 0.7, 1e-9])) == U


# The draw


def test_exact_draws_follow_the_deadlines():
    # Step 0: owed 1.5 and 0.5; a must give 1, and its second is due first: (2-1.5)/.75 <
    # (1-.5)/.25. Step 1: owed 1 and 1.
    stream = reference_stream(job([source("a", 6, weight=3), source("b", 2)], samples=2))
    assert names(stream) == ["a0 a1", "a2 b0", "a3 a4", "a5 b1"]


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    "weights",
    [(0.5, 0.3, 0.2), (1, 1, 1), (0.9, *[0.02] * 5), (0.37, 0.0, 0.63), (0.5, *[0.1] * 5)],
)
def test_under_constant_weights_the_error_stays_below_one_sample(weights, size):
    sources = [source(f"s{i}", 40, weight=w, epochs=None) for i, w in enumerate(weights)]
    shares = [Fraction(w) / U for w in whole(list(weights))]
    counts: Counter[str] = Counter()
    for step, drawn in enumerate(islice(reference_stream(job(sources, samples=size)), 60), 1):
        assert len(drawn) == size
        counts.update(name for (name, *_), _ in drawn)
        assert all(abs(counts[f"s{i}"] - size * step * share) < 1 for i, share in enumerate(shares))


def test_samples_of_a_source_are_spread_over_the_step():
    # a stands at 1/8, 3/8, 5/8, 7/8 and b at 1/4, 3/4.
    (step,) = names(reference_stream(job([source("a", 4, weight=2), source("b", 2)], samples=6)))
    assert step == "a0 b0 a1 a2 b1 a3"


def test_what_changed_weights_left_owed_is_drawn_by_the_earliest_deadline():
    def schedule(step: int, feedback: Any) -> dict[str, float]:
        return {"a": 1, "b": 1, "c": 1} if step == 0 else {"a": 1, "b": 1, "c": 0}

    # One sample over three sources: a comes first, c forgets its third when its weight falls to
    # zero.
    sources = [source(n, 9) for n in "abc"]
    assert names(islice(reference_stream(job(sources, samples=1, mixture=schedule)), 5)) == [
        "a0",
        "b0",
        "a1",
        "b1",
        "a2",
    ]


def test_musts_beyond_the_batch_wait():
    def schedule(step: int, feedback: Any) -> dict[str, float]:
        return {"a": 3, "b": 3, "c": 1, "d": 1} if step < 2 else {"c": 1, "d": 3}

    # Two steps leave a and b half a sample ahead, c and d half behind. Then c is owed 1 and d 2:
    # three musts for two places; d's first is
    # the most overdue, c's first and d's second are due at the same time. At last .5 and 2.5 are
    # owed.
    sources = [source(n, 9) for n in "abcd"]
    assert names(islice(reference_stream(job(sources, samples=2, mixture=schedule)), 4)) == [
        "a0 b0",
        "a1 b1",
        "c0 d0",
        "d1 d2",
    ]


def test_sub_draws_mix_every_microbatch():
    sources = [source("a", 6), source("b", 6)]
    whole_step = names(reference_stream(job(sources, samples=5, microbatches=2)))[0]
    assert whole_step == "a0 b0 a1 b1 a2"
    # Sub-draws of 3 and 2: first a, b, a; then .5 and 1.5 are owed, b must give one, and both
    # seconds are due at the same time: a.
    sub_draws = names(
        reference_stream(job(sources, samples=5, microbatches=2, mix_every="microbatch"))
    )
    assert sub_draws[0] == "a0 b0 a1 a2 b1"


def test_random_draws_pick_by_the_hash_of_step_and_number():
    sources = [source("a", 50, weight=3), source("b", 50)]
    steps = list(islice(reference_stream(job(sources, samples=8, draw="random", seed=5)), 3))
    for step, drawn in enumerate(steps):
        picks = [
            "a" if keyed_hash(key64("draw", 5), step, j) < 3 * 2**62 else "b" for j in range(8)
        ]
        assert Counter(name for (name, *_), _ in drawn) == Counter(picks)


def test_what_random_draws_leave_missing_is_drawn_again():
    steps = list(reference_stream(job([source("a", 2), source("b", 30)], samples=8, draw="random")))
    assert [len(step) for step in steps] == [8, 8, 8, 8]
    assert sorted(id for step in steps for id, _ in step) == sorted(
        ("ab"[n > 1], 0, 0, n - 2 * (n > 1), 0) for n in range(32)
    )


# Batches in tokens


def test_a_batch_in_tokens_takes_until_nothing_is_owed():
    rows = [[1] * 4 for _ in range(8)]
    assert names(reference_stream(job([source("a", rows)], tokens=10))) == [
        "a0 a1 a2",
        "a3 a4",
        "a5 a6 a7",
    ]


def test_a_batch_in_tokens_mixes_tokens_not_samples():
    long, short = [[1] * 6 for _ in range(20)], [[2] * 2 for _ in range(60)]
    counts: Counter[str] = Counter()
    for step, drawn in enumerate(
        islice(reference_stream(job([source("a", long), source("b", short)], tokens=16)), 10), 1
    ):
        for (name, *_), ids in drawn:
            counts[name] += len(ids)
        assert 0 <= counts["a"] - 8 * step < 6
        assert 0 <= counts["b"] - 8 * step < 2


def test_a_draw_that_is_still_paid_for_is_no_step_and_takes_no_number():
    rows = [[1] * 25, [1] * 5, [1] * 5, [1] * 30]
    # Owed 10 - 25, then +10 twice without a sample; 5 - 5; 10 - 5 - 30.
    assert names(reference_stream(job([source("a", rows)], tokens=10))) == ["a0", "a1", "a2 a3"]
    assert names(reference_stream(job([source("a", rows)], tokens=10, until=2))) == ["a0", "a1"]


def test_tokens_an_exhausted_source_owes_come_from_the_others():
    sources = [source("a", [[1] * 3]), source("b", [[2] * 5 for _ in range(4)])]
    # Owed 10 each: a gives 3 of 10 and leaves 7; b takes 10, then 7 more in two samples.
    assert names(reference_stream(job(sources, tokens=20))) == ["b0 b1 a0 b2 b3"]


# The end of data


def test_an_exhausted_source_gives_what_it_has_and_the_others_fill_the_step():
    sources = [source("a", 3), source("b", 6)]
    assert names(reference_stream(job(sources, samples=4))) == ["a0 b0 a1 b1", "b2 a2 b3 b4", "b5"]


def test_until_first_ends_with_the_step_that_found_a_source_exhausted():
    sources = [source("a", 3), source("b", 6)]
    assert names(reference_stream(job(sources, samples=4, until="first"))) == [
        "a0 b0 a1 b1",
        "b2 a2 b3",
    ]
    assert names(reference_stream(job([source("a", 4)], samples=4, until="first"))) == [
        "a0 a1 a2 a3"
    ]


def test_until_a_number_of_steps_is_a_bound():
    assert names(reference_stream(job([source("a", 5)], samples=2, until=2))) == ["a0 a1", "a2 a3"]
    assert names(reference_stream(job([source("a", 5)], samples=2, until=9))) == [
        "a0 a1",
        "a2 a3",
        "a4",
    ]


def test_a_source_of_weight_zero_keeps_no_job_alive():
    assert names(reference_stream(job([source("a", 2), source("b", 9, weight=0)], samples=2))) == [
        "a0 a1"
    ]


# One source


def test_epochs_follow_one_another_inside_a_step():
    steps = list(reference_stream(job([source("a", 3, epochs=2)], samples=4)))
    assert [[(epoch, row) for (_, epoch, _, row, _), _ in step] for step in steps] == [
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(1, 1), (1, 2)],
    ]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    shuffled = job(
        [source("a", 90, epochs=3, shuffle=True)], samples=90, slice_rows=4, shuffle_chunks=2
    )
    orders = [[row for (_, _, _, row, _), _ in step] for step in reference_stream(shuffled)]
    assert [sorted(order) for order in orders] == [list(range(90))] * 3
    assert orders[0] != orders[1] != orders[2] != list(range(90))


def test_a_window_is_one_slice_of_each_chunk_of_a_group():
    # 6 rows by slice_rows 1 make one chunk of 16; with 40 rows the chunks are 0-15, 16-31, 32-39,
    # all in one group.
    stream = reference_stream(
        job([source("a", 40, shuffle=True)], samples=40, slice_rows=1, shuffle_chunks=3)
    )
    order = [row for (_, _, _, row, _), _ in next(stream)]
    assert [sorted(order[t * 3 : t * 3 + 3]) for t in range(8)] == [
        [t, 16 + t, 32 + t] for t in range(8)
    ]
    assert [sorted(order[24 + t * 2 : 26 + t * 2]) for t in range(8)] == [
        [8 + t, 24 + t] for t in range(8)
    ]


def test_long_samples_are_cut_split_dropped_or_quarantined():
    rows = [[1, 2], [3, 4, 5, 6, 7], []]
    bad: list[Any] = []
    long: dict[str, dict[str, list[int]]] = {}
    by_policy = {
        p: list(
            reference_stream(
                job([source("a", rows)], samples=9, context=2, on_long=p),
                bad,
                long=long.setdefault(p, {}),
            )
        )
        for p in ("truncate", "split", "drop", "quarantine")
    }
    assert tokens(by_policy["truncate"]) == [[1, 2], [3, 4]]
    assert tokens(by_policy["split"]) == [[1, 2], [3, 4], [5, 6], [7]]
    assert [id for id, _ in by_policy["split"][0]][1:] == [
        ("a", 0, 0, 1, 0),
        ("a", 0, 0, 1, 1),
        ("a", 0, 0, 1, 2),
    ]
    assert tokens(by_policy["quarantine"]) == [[1, 2]]
    assert tokens(by_policy["drop"]) == [[1, 2]]
    assert bad == [("a", 0, 0, 2), ("a", 0, 0, 2), ("a", 0, 0, 2), ("a", 0, 0, 1), ("a", 0, 0, 2)]
    assert long == {"truncate": {"a": [3]}, "split": {}, "drop": {"a": [5]}, "quarantine": {}}


def test_bad_rows_in_a_row_stop_the_job_only_when_a_sample_behind_them_is_needed():
    rows = [[1], None, [-1], [2], None, ["x"], [3.5], [4]]
    stream = reference_stream(job([source("a", rows, max_bad=3)], samples=1))
    assert names(islice(stream, 2)) == ["a0", "a3"]
    with pytest.raises(ValueError, match="3 bad rows in a row"):
        next(stream)
    assert names(reference_stream(job([source("a", rows, max_bad=4)], samples=9))) == ["a0 a3 a7"]


def test_dropped_rows_are_no_samples_and_an_epoch_without_a_sample_is_an_error():
    none = Filter(lambda columns: np.zeros(len(columns["tokens"]), bool))
    with pytest.raises(ValueError, match="epoch 0 has no sample"):
        list(reference_stream(job([source("a", 3, transforms=[Tokens(), none])], samples=1)))
    with pytest.raises(ValueError, match="epoch 0 has no sample"):
        list(
            reference_stream(job([source("a", [[1, 2, 3]])], samples=1, context=2, on_long="drop"))
        )


def test_transforms_see_one_slice_at_a_time_as_columns():
    seen: list[list[int]] = []

    def double(columns: dict[str, Any]) -> dict[str, Any]:
        seen.append(columns["n"].tolist())
        assert isinstance(columns["n"], np.ndarray)
        return {"tokens": [[2 * n, 1] for n in columns["n"]], "n": columns["n"]}

    odd = Filter(lambda columns: columns["n"] % 2 == 1)
    rows = data_set([{"n": n, "x": "y"} for n in range(5)])
    numbers = Source("a", rows, shuffle=False, epochs=1, transforms=[Select("n"), Map(double), odd])
    assert tokens(reference_stream(job([numbers], samples=9, slice_rows=2))) == [[2, 1], [6, 1]]
    assert seen == [[0, 1], [2, 3], [4]]


def test_a_function_that_fails_on_a_slice_is_tried_row_by_row():
    bad: list[Any] = []
    inverse = Map(lambda row: {"tokens": [12 // row["n"]]}, rows=True)
    rows = [{"n": 3}, {"n": 0}, {"n": 4}, ValueError("unreadable")]
    source = Source("a", data_set(rows), shuffle=False, epochs=1, transforms=[inverse])
    assert tokens(reference_stream(job([source], samples=9), bad)) == [[4], [3]]
    assert bad == [("a", 0, 0, 1), ("a", 0, 0, 3)]


def test_a_factory_has_a_chunk_and_a_file_per_shard():
    factory = SimpleNamespace(
        fn=lambda shard: ({"tokens": [10 * shard + i]} for i in range(2)), shards=2
    )
    shards = Source("a", factory, shuffle=False, epochs=1, transforms=[Tokens()])
    (step,) = reference_stream(job([shards], samples=9))
    assert step == [(("a", 0, f, r, 0), [10 * f + r]) for f in range(2) for r in range(2)]


# Files


def lines(rows: list[Any]) -> bytes:
    return b"".join(
        row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
    )


def ids_and_tokens(path: Any, **fields: Any) -> list[tuple[int, int, list[int]]]:
    files = Source("a", path, shuffle=False, epochs=1, transforms=[Tokens()])
    return [
        (file, row, ids)
        for step in reference_stream(job([files], samples=99, **fields))
        for (_, _, file, row, _), ids in step
    ]


def test_lines_are_named_by_their_offset_whatever_the_compression(tmp_path: Path):
    text = lines(
        [{"tokens": [1]}, b" \r\n", {"tokens": [2]}, b"{broken\n", b"[3]\n", b'{"tokens": [4]}']
    )
    (tmp_path / "b.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(text))
    assert ids_and_tokens(str(tmp_path / "*"), chunk_bytes=20) == [
        (f, row, [n]) for f in range(3) for row, n in ((0, 1), (19, 2), (47, 4))
    ]


def test_plain_lines_belong_to_the_byte_range_of_their_first_byte(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"tokens": [i]} for i in range(4)]))  # 16 bytes each
    files = Source("a", str(tmp_path), epochs=1, transforms=[Tokens()])
    chunks = sorted(
        range(3), key=lambda c: keyed_hash(key64("chunks", 0, "a", 0), c)
    )  # bytes 0-23, 24-47, 48-63
    rows = {0: [0, 16], 1: [32], 2: [48]}
    (step,) = reference_stream(job([files], samples=9, chunk_bytes=24, shuffle_chunks=1))
    by_row = keyed_hash(key64("rows", 0, "a", 0), 0, 0) > keyed_hash(
        key64("rows", 0, "a", 0), 0, 16
    )
    rows[0] = rows[0][::-1] if by_row else rows[0]
    assert [row for (_, _, _, row, _), _ in step] == [row for c in chunks for row in rows[c]]


def test_parquet_and_arrow_rows_are_named_by_number(tmp_path: Path):
    table = pa.table({"tokens": [[1], [2, 3], [4]]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as f:
        f.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as f:
        f.write_table(table)
    wanted = [(f, row, ids) for f in range(3) for row, ids in enumerate([[1], [2, 3], [4]])]
    assert ids_and_tokens([str(tmp_path / "b.arrow"), str(tmp_path / "[ac].*")]) == wanted


def test_tar_samples_are_named_by_the_offset_of_their_first_header(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("x/1.txt", b"hello"), ("x/1.json", b"{}"), ("x/2.txt", b"world")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    text = Map(lambda row: {"tokens": list(row["txt"]), "key": row["__key__"]}, rows=True)
    (step,) = reference_stream(
        job([Source("a", str(tmp_path), shuffle=False, epochs=1, transforms=[text])], samples=9)
    )
    assert step == [(("a", 0, 0, 0, 0), list(b"hello")), (("a", 0, 0, 2048, 0), list(b"world"))]


def test_an_empty_file_is_one_unreadable_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(lines([{"tokens": [1]}]))
    bad: list[Any] = []
    files = Source("a", str(tmp_path / "*.jsonl"), shuffle=False, epochs=1, transforms=[Tokens()])
    assert names(reference_stream(job([files], samples=2), bad)) == ["a0"]
    assert bad == [("a", 0, 0, 0)]


def test_text_is_tokenized_one_row_at_a_time(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = data_set([{"text": "a b"}, {"text": None}, {"text": "b"}])
    texts = Source(
        "a",
        rows,
        shuffle=False,
        epochs=1,
        transforms=[Tokenize(tmp_path / "tokenizer.json", bos="<s>", eos=9)],
    )
    assert tokens(reference_stream(job([texts], samples=9))) == [[0, 1, 2, 9], [0, 2, 9]]
