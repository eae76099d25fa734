"""Laws of the microbatch builder, against a program that goes document by document."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.constructor import pack as module
from overlord.constructor.pack import build, valid_tokens
from overlord.mesh import Batch

CONTEXT = 24


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Documents in any order and with gaps inside `values`, microbatches of any fill, empty ones
    too.
    """
    n_microbatches = draw(st.integers(1, 5))
    microbatch = sorted(draw(st.lists(st.integers(0, n_microbatches - 1), max_size=12)))
    n = len(microbatch)
    lengths = draw(st.lists(st.integers(1, CONTEXT), min_size=n, max_size=n))
    gaps = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    start, at = [0] * n, 0
    for i in draw(st.permutations(range(n))):
        start[i], at = at + gaps[i], at + gaps[i] + lengths[i]
    dtype = draw(st.sampled_from([np.uint16, np.uint32, np.int32, np.int64]))
    return {
        "values": (np.arange(at) * 37 % 1009 + 1).astype(dtype),
        "start": np.array(start, np.int64),
        "length": np.array(lengths, np.int64),
        "microbatch": np.array(microbatch, np.int32),
        "n_microbatches": n_microbatches,
        "source": np.array(draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)), np.int32),
        "batch": Batch(
            samples=1,
            context=CONTEXT,
            pad_id=draw(st.integers(0, 2)),
            layout=draw(st.sampled_from(["packed", "padded"])),
            labels=draw(st.sampled_from(["shifted", "unshifted"])),
        ),
        "multiple": draw(st.sampled_from([1, 2, 3, 8])),
        "weights": draw(st.sampled_from([None, weights_of(at, 2), weights_of(at, 5) * 0.5])),
    }


def weights_of(n: int, different: int) -> np.ndarray:
    return (np.arange(n) * 31 % 17 % different).astype(np.float32)


def one_by_one(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch contract, one document after another, in lists."""
    batch, multiple, out = step["batch"], step["multiple"], []
    for m in range(step["n_microbatches"]):
        keys = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask", "source_ids")
        rows: dict[str, list] = {key: [] for key in keys}
        true, size = [0], [0]
        documents = [i for i in range(len(step["start"])) if step["microbatch"][i] == m]
        for i in documents or [None]:
            if i is None:
                text, labels, source, loss = [], [], -1, []
            else:
                loss = weights_one_by_one(step, i)
                text = [
                    int(v)
                    for v in step["values"][step["start"][i] : step["start"][i] + step["length"][i]]
                ]
                labels, source = (
                    ([*text[1:], -100] if batch.labels == "shifted" else [-100, *text[1:]]),
                    int(step["source"][i]),
                )
            seen = len(text) or multiple
            room = batch.context if batch.layout == "padded" else -(-seen // multiple) * multiple
            labels = [label if weight else -100 for label, weight in zip(labels, loss, strict=True)]
            labels = labels + [-100] * (room - len(text))
            rows["tokens"].append(text + [batch.pad_id] * (room - len(text)))
            rows["position_ids"].append(list(range(room)))
            rows["labels"].append(labels)
            rows["loss_mask"].append(loss + [0.0] * (room - len(text)))
            rows["attention_mask"].append([j < seen for j in range(room)])
            rows["source_ids"].append(source)
            true.append(true[-1] + seen)
            size.append(size[-1] + room)
        source_ids = rows.pop("source_ids")
        if batch.layout == "packed":
            del rows["attention_mask"]
            rows = {key: [x for row in lists for x in row] for key, lists in rows.items()}
        longest = max(b - a for a, b in pairwise(size))
        out.append(
            rows
            | {
                "cu_seqlens": true,
                "cu_seqlens_padded": size,
                "max_seqlen": longest,
                "source_ids": source_ids,
            }
        )
    return out


def weights_one_by_one(step: dict[str, Any], i: int) -> list[float]:
    """The loss mask of document i: the weight of the token that each place predicts."""
    n, weights = int(step["length"][i]), step["weights"]
    given = [1.0] * n
    if weights is not None:
        given = [float(w) for w in weights[step["start"][i] : step["start"][i] + n]]
    return [*given[1:], 0.0] if step["batch"].labels == "shifted" else [0.0, *given[1:]]


@given(steps())
def test_the_whole_step_at_once_equals_document_by_document(step):
    assert [{k: a.tolist() for k, a in m.items()} for m in build(**step)] == one_by_one(step)


@given(steps())
def test_copying_by_slices_equals_gathering_by_index(step):
    usual = module.SLICE_FROM
    try:
        module.SLICE_FROM = 0
        sliced = build(**step)
        module.SLICE_FROM = 10**9
        gathered = build(**step)
    finally:
        module.SLICE_FROM = usual
    for a, b in zip(sliced, gathered, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)


@given(steps())
def test_every_document_can_be_cut_out_again(step):
    found = []
    for m in build(**step):
        tokens, true, at = m["tokens"].reshape(-1), np.diff(m["cu_seqlens"]), m["cu_seqlens_padded"]
        assert at[-1] == tokens.size
        for source, a, n in zip(
            m["source_ids"].tolist(), at[:-1].tolist(), true.tolist(), strict=True
        ):
            found += [(source, tokens[a : a + n].tolist())] if source >= 0 else []
    cut = [
        step["values"][s : s + n].tolist()
        for s, n in zip(step["start"], step["length"], strict=True)
    ]
    assert found == list(zip(step["source"].tolist(), cut, strict=True))


@given(steps())
def test_the_loss_mask_counts_the_valid_tokens_under_either_convention(step):
    microbatches = build(**step)
    expected: float = valid_tokens(step["length"])
    if step["weights"] is not None:
        expected = sum(sum(weights_one_by_one(step, i)) for i in range(len(step["length"])))
    assert sum(float(m["loss_mask"].sum()) for m in microbatches) == expected
    assert all(np.array_equal(m["loss_mask"] == 0, m["labels"] == -100) for m in microbatches)
