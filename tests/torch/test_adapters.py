"""Batches for Megatron-Core, torchtitan and Hugging Face: the keys, shapes and types that their own
code reads.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
import overlord.torch as ot
from overlord.constructor.pack import build
from overlord.constructor.rank_views import narrow, slice_index
from overlord.plan.view import SPLITS, View
from tests.torch.jobs import VOCAB, text_job

torch = pytest.importorskip("torch")
F = torch.nn.functional
huggingface, megatron, torchtitan, labels = (
    getattr(ot.adapters, name) for name in ("huggingface", "megatron", "torchtitan", "labels")
)


def made(
    lengths: list[int],
    *,
    convention: str = "shifted",
    multiple: int = 1,
    layout: str = "packed",
    seed: int = 0,
) -> dict[str, Any]:
    """One microbatch of documents with these lengths."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, VOCAB, max(1, sum(lengths)))
    length = np.array(lengths, np.int64)
    start = np.cumsum(length) - length
    batch = ov.Batch(samples=1, context=64, labels=convention, layout=layout)
    (mb,) = build(
        values,
        start,
        length,
        np.zeros(len(length), np.int64),
        1,
        np.zeros(len(length), np.int64),
        batch,
        multiple,
    )
    return mb


LENGTHS = st.lists(st.integers(1, 12), max_size=6)


@given(LENGTHS, st.sampled_from([1, 4]), st.sampled_from(["packed", "padded"]), st.integers(0, 9))
def test_labels_of_one_convention_become_those_of_the_other(
    lengths: list[int], multiple: int, layout: str, seed: int
):
    both = {
        c: made(lengths, convention=c, multiple=multiple, layout=layout, seed=seed)
        for c in ("shifted", "unshifted")
    }
    for given_, wanted in (
        ("shifted", "unshifted"),
        ("unshifted", "shifted"),
        ("shifted", "shifted"),
        ("unshifted", "unshifted"),
    ):
        for said in (None, given_):
            found, mask = labels.converted(both[given_], wanted, said)
            assert np.array_equal(found.numpy(), both[wanted]["labels"])
            assert np.array_equal(mask.numpy(), both[wanted]["loss_mask"])
    assert not both["shifted"]["labels"].flags.writeable  # and what was given is as it was


def test_labels_of_a_slice_are_not_moved_since_neighbours_are_elsewhere():
    mb = made([9, 4, 7])
    half = {
        key: mb[key][:10] if key in ("tokens", "position_ids", "labels", "loss_mask") else mb[key]
        for key in mb
    }
    with pytest.raises(
        ov.JobError,
        match=r"its shifted labels cannot become unshifted.*Set Batch\(labels='unshifted'\)",
    ):
        labels.converted(half, "unshifted")
    assert labels.converted(half, "shifted")[0].tolist() == half["labels"].tolist()
    last_stage = {key: half[key] for key in half if key not in ("tokens", "position_ids")}
    with pytest.raises(ov.JobError, match="its labels cannot become unshifted"):
        labels.converted(last_stage, "unshifted")
    with pytest.raises(
        ov.JobError, match=r"expected a labels convention \(shifted, unshifted\), got 'moved'"
    ):
        labels.converted(mb, "moved")


# Hugging Face


def test_the_flattened_batch_is_what_the_flattening_collator_makes():
    transformers = pytest.importorskip("transformers")
    mb = made([5, 1, 8, 3])
    rows = [
        {"input_ids": mb["tokens"][a:b].tolist()}
        for a, b in zip(mb["cu_seqlens"][:-1], mb["cu_seqlens"][1:], strict=True)
    ]
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True
    )
    wanted, found = collator(rows), huggingface.flattened(mb, seq_idx=True)
    assert found.pop("use_cache") is False
    assert sorted(found) == sorted(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert (type(found[key]), found[key]) == (int, value), key


def test_the_block_mask_joins_documents_with_themselves_and_with_no_future():
    mask = huggingface.flattened(made([2, 3]), mask=torch.float64)["attention_mask"]
    assert mask.shape == (1, 1, 5, 5)
    assert mask.dtype == torch.float64
    sees = (mask[0, 0] == 0).int().tolist()
    assert sees == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [False, True], ids=["by positions", "by mask"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_model_of_hugging_face_on_the_flattened_batch_equals_it_on_each_document(
    attention: str, mask: bool, multiple: int
):
    """Logits and summed losses in float64: to 1e-12 with SDPA, to 1e-7 with eager attention, whose
    softmax is float32. The loss that the model computes itself is float32: to a millionth.
    """
    pytest.importorskip("transformers")
    model, close = llama(attention), 1e-7 if attention == "eager" else 1e-12
    mb = made([7, 12, 1, 3], multiple=multiple)
    summed, valid = 0.0, int((mb["labels"] != -100).sum())
    with torch.no_grad():
        out = model(**huggingface.flattened(mb, mask=torch.float64 if mask else False))
        for start, length in zip(
            mb["cu_seqlens_padded"][:-1].tolist(), np.diff(mb["cu_seqlens"]).tolist(), strict=True
        ):
            document = torch.tensor(mb["tokens"][start : start + length])
            alone = model(input_ids=document[None]).logits[0]
            assert torch.allclose(out.logits[0, start : start + length], alone, atol=close, rtol=0)
            summed += float(F.cross_entropy(alone[:-1], document[1:], reduction="sum"))
    assert float(ot.token_loss(out.logits, torch.tensor(mb["labels"]), 1)) == pytest.approx(
        summed, rel=close
    )
    assert float(out.loss) * valid == pytest.approx(summed, rel=1e-6)


@pytest.mark.parametrize("change", ["no positions", "a cache"])
def test_documents_would_mix_otherwise(change: str):
    """What the test above must notice: models of this version make a cache unless told not to, and
    then positions do not count.
    """
    pytest.importorskip("transformers")
    model, mb = llama("sdpa").train(), made([7, 12])
    other = (
        {"input_ids": torch.tensor(mb["tokens"])[None]}
        if change == "no positions"
        else huggingface.flattened(mb, no_cache=False)
    )
    with torch.no_grad():
        right, wrong = model(**huggingface.flattened(mb)).logits, model(**other).logits
    assert not torch.allclose(right[0, 7:], wrong[0, 7:], atol=1e-3)


def test_the_padded_layout_has_rows_for_hugging_face():
    mb = made([5, 3], layout="padded", convention="shifted")
    found = huggingface.padded(mb)
    assert sorted(found) == ["attention_mask", "input_ids", "labels", "position_ids"]
    assert found["input_ids"].shape == (2, 64)
    assert found["attention_mask"].sum(1).tolist() == [5, 3]
    assert np.array_equal(
        found["labels"].numpy(), made([5, 3], layout="padded", convention="unshifted")["labels"]
    )
    with pytest.raises(
        ov.JobError,
        match=r"expected attention_mask in the microbatch.*set Batch\(layout='padded'\)",
    ):
        huggingface.padded(made([5, 3], layout="packed", convention="shifted"))


# torchtitan


def test_torchtitan_gets_one_row_of_input_positions_and_shifted_labels():
    for convention in ("shifted", "unshifted"):
        mb = made([4, 3], convention=convention)
        batch, found = torchtitan.flat(mb)
        assert sorted(batch) == ["input", "positions"]
        assert batch["input"].tolist() == [mb["tokens"].tolist()]
        assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
        assert found.tolist() == [made([4, 3], convention="shifted")["labels"].tolist()]
        of_branch, labels_of_branch = torchtitan.flat(mb, batched=False)
        assert {key: value.tolist() for key, value in of_branch.items()} == {
            key: value[0].tolist() for key, value in batch.items()
        }
        assert labels_of_branch.tolist() == found[0].tolist()


def test_torchtitan_is_padded_to_a_fixed_number_of_tokens_as_its_collator_pads():
    mb = made([4, 3])
    batch, found = torchtitan.flat(mb, tokens=10)
    assert batch["input"].tolist() == [[*mb["tokens"].tolist(), 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert found.tolist() == [[*mb["labels"].tolist(), -100, -100, -100]]
    with pytest.raises(
        ov.JobError, match="tokens: expected at least the 7 of the microbatch, got 6; give Batch"
    ):
        torchtitan.flat(mb, tokens=6)


def test_torchtitan_gets_pixels_where_there_are_some():
    patches = np.arange(96, dtype=np.float32).reshape(8, 12)
    mb = made([4]) | {"pixel_values": patches, "grid_thw": np.array([[1, 2, 3], [1, 1, 2]])}
    batch, _ = torchtitan.flat(mb)
    assert batch["grid_thw"].tolist() == [[1, 2, 3], [1, 1, 2]]
    assert batch["pixel_values"].shape == (2, 6, 12), "a row for each image, as long as the largest"
    assert batch["pixel_values"][0].tolist() == patches[:6].tolist()
    assert batch["pixel_values"][1].tolist() == [*patches[6:].tolist(), *[[0.0] * 12] * 4]
    assert torchtitan.flat(mb, batched=False)[0]["pixel_values"].shape == (8, 12)
    none = {"pixel_values": np.zeros((0, 12), np.float32), "grid_thw": np.zeros((0, 3), np.int64)}
    assert torchtitan.flat(made([4]) | none)[0]["pixel_values"].shape == (0, 0, 12)


# Megatron


def test_megatron_gets_the_keys_and_types_that_its_packing_code_asserts():
    mb = made([5, 2], multiple=4, convention="unshifted")
    found = megatron.packed(mb)
    assert {key: (value.dtype, value.dim()) for key, value in found.items()} == {
        "tokens": (torch.int64, 1),
        "position_ids": (torch.int64, 1),
        "labels": (torch.int64, 1),
        "loss_mask": (torch.float32, 1),
        "cu_seqlens": (torch.int32, 1),
        "cu_seqlens_padded": (torch.int32, 1),
        "max_seqlen": (torch.int32, 0),
    }
    assert found["labels"].tolist() == made([5, 2], multiple=4)["labels"].tolist()
    assert found["cu_seqlens"].tolist() == [0, 5, 7]
    assert found["cu_seqlens_padded"].tolist() == [0, 8, 12]


def test_packed_seq_params_have_the_padded_bounds_in_all_four_places_and_an_int_for_the_longest():
    mb = made([5, 2], multiple=4)
    params = megatron.packed_seq_params(mb, local_cp_size=2)
    assert params.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).tolist() == [0, 8, 12]
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.local_cp_size) == (8, 8, 2)
    assert type(params.max_seqlen_q) is int
    true = megatron.packed_seq_params(mb, true_lengths=True)
    assert true.cu_seqlens_q.tolist() == true.cu_seqlens_kv.tolist() == [0, 5, 7]
    assert true.cu_seqlens_q_padded.tolist() == [0, 8, 12]


def test_megatrons_own_class_is_used_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    names = [field.name for field in fields(megatron.PackedSeqParams)]
    (package / "packed_seq_params.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Any\n@dataclass\nclass "
        "PackedSeqParams:\n"
        + "".join(f"    {name}: Any = None\n" for name in [*names, "tokens_per_sample"])
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = megatron.packed_seq_params(made([3]), tokens_per_sample=64)
    assert type(found).__module__ == "megatron.core.packed_seq_params"
    assert (found.max_seqlen_q, found.tokens_per_sample) == (3, 64)


def test_the_padding_mask_is_true_on_padding():
    mb = made([5, 2], multiple=4)
    assert megatron.padding_mask(mb).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]]
    assert megatron.padding_mask(mb, [0, 5, 9, 11]).int().tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_padding_mask_of_a_slice_is_the_slice_of_the_padding_mask(cp: int, split: str):
    """Also of a stage in the middle, which has no tokens to count."""
    rng = np.random.default_rng(cp)
    for _ in range(20):
        mb = made(rng.integers(1, 30, rng.integers(1, 8)).tolist(), multiple=2 * cp)
        whole, middle = (
            megatron.padding_mask(mb)[0],
            {key: mb[key] for key in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")},
        )
        for r in range(cp):
            wanted = whole[
                torch.tensor(slice_index(mb["cu_seqlens_padded"], cp, r, split))
            ].tolist()
            view = View(cp=cp, cp_rank=r, split=split)
            for part in (narrow(mb, view), middle):
                assert (
                    megatron.get_batch(iter([part]), cp=(cp, r), cp_split=split)
                    .padding_mask[0]
                    .tolist()
                    == wanted
                )


def test_a_place_along_cp_that_does_not_fit_the_slice_is_refused():
    half = narrow(made([8, 4], multiple=4), View(cp=2, cp_rank=1))
    for cp, split in (((4, 1), "zigzag"), ((1, 0), "zigzag"), ((2, 1), "none")):
        with pytest.raises(
            ov.JobError,
            match=r"expected values that give a slice of 6 of 12 tokens, got .*; give this",
        ):
            megatron.get_batch(iter([half]), cp=cp, cp_split=split)
    with pytest.raises(
        ov.JobError, match=r"expected \(number of ranks, this rank from 0\), got \(2, 2\)"
    ):
        megatron.padding_mask(half, cp=(2, 2))
    with pytest.raises(
        ov.JobError, match="expected one of zigzag, zigzag_whole, contiguous, none, got 'zag'"
    ):
        megatron.padding_mask(half, cp=(2, 1), cp_split="zag")


def test_get_batch_pulls_microbatches_one_by_one(tmp_path: Path):
    job = text_job(tmp_path, pad_multiple=4)
    with ov.launch(job) as session:
        wanted = list(session.client(0).microbatches())
        arrays = [{key: np.array(mb[key]) for key in mb} for mb in wanted]
    with ov.launch(job) as session:
        iterator = session.client(0).microbatches()
        for mb in arrays:
            tokens, targets, mask, attention, positions, params, padding = megatron.get_batch(
                iterator
            )
            assert attention is None
            for found, key in (
                (tokens, "tokens"),
                (targets, "labels"),
                (mask, "loss_mask"),
                (positions, "position_ids"),
            ):
                assert found.shape == (1, len(mb["tokens"]))
                assert np.array_equal(found[0].numpy(), mb[key])
            assert params.cu_seqlens_q.tolist() == mb["cu_seqlens_padded"].tolist()
            assert padding.shape == tokens.shape
        with pytest.raises(StopIteration):
            megatron.get_batch(iterator)
    with pytest.raises(ov.JobError, match=r"got None; give client.microbatches\(\)"):
        megatron.get_batch(None)


def test_get_batch_of_a_stage_has_none_for_what_the_stage_does_not_have():
    mb = made([5, 2])
    first = {key: mb[key] for key in mb if key not in ("labels", "loss_mask", "source_ids")}
    middle = {key: first[key] for key in first if key not in ("tokens", "position_ids")}
    batch = megatron.get_batch(iter([first]))
    assert (batch.labels, batch.loss_mask) == (None, None)
    assert batch.tokens.shape == (1, 7)
    batch = megatron.get_batch(iter([middle]))
    assert (batch.tokens, batch.labels, batch.padding_mask) == (None, None, None)
    assert batch.packed_seq_params.max_seqlen_q == 5


def test_get_batch_of_the_padded_layout_has_rows():
    batch = megatron.get_batch(iter([made([5, 3], layout="padded", convention="unshifted")]))
    assert batch.tokens.shape == (2, 64)
    assert batch.packed_seq_params is None
    assert np.array_equal(batch.labels.numpy(), made([5, 3], layout="padded")["labels"])


def test_get_batch_of_a_stage_in_the_middle_of_the_padded_layout_has_nothing():
    rows = made([5, 3], layout="padded")
    middle = {
        key: rows[key]
        for key in ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    }
    assert set(megatron.get_batch(iter([middle]), cp=(1, 0))) == {None}


# what cannot be adapted

WRONG = {
    "a stage without tokens": (
        {"labels": np.zeros(3)},
        "expected tokens, position_ids.*each pipeline stage has only its own keys",
    ),
    "rows": (
        made([3], layout="padded"),
        r"expected the packed layout, got rows of Batch\(layout='padded'\)",
    ),
    "a slice": (
        {key: a[:4] if a.shape == (6,) else a for key, a in made([6]).items()},
        r"a slice of 4 of 6 tokens.*cp_split='none'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_an_adapter_cannot_take_is_said(what: str):
    mb, words = WRONG[what]
    for adapter in (huggingface.flattened, torchtitan.flat):
        with pytest.raises(ov.JobError, match=words):
            adapter(mb)


def test_adapters_take_tensors_as_well_as_arrays():
    mb = made([5, 2], convention="unshifted")
    for given_ in (ot.tensors(mb), ot.TensorMicrobatch.of(mb)):
        assert torch.equal(torchtitan.flat(given_)[1], torchtitan.flat(mb)[1])
        assert torch.equal(
            huggingface.flattened(given_)["labels"], huggingface.flattened(mb)["labels"]
        )
        assert torch.equal(megatron.packed(given_)["labels"], megatron.packed(mb)["labels"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_weights_that_labels_cannot_express_are_refused_unless_the_caller_applies_them(
    layout: str,
) -> None:
    mb = made([4, 3], layout=layout)
    zeros = {**mb, "loss_mask": np.where(mb["tokens"] % 2, mb["loss_mask"], 0)}
    halves = {**mb, "loss_mask": mb["loss_mask"] * np.float32(0.5)}
    for adapter in (
        (huggingface.flattened, torchtitan.flat) if layout == "packed" else (huggingface.padded,)
    ):
        adapter(zeros)
        adapter(halves, weighted=True)
        with pytest.raises(ov.JobError, match="expected loss weights of 0 and 1"):
            adapter(halves)
    if layout == "packed":
        assert torch.equal(
            megatron.packed(halves)["loss_mask"], torch.tensor(halves["loss_mask"])
        ), "Megatron's loss weighs by it"
