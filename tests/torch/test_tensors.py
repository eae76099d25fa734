"""Tensors share the memory of a step and keep it alive; nothing is copied, and torch says no word
about read-only arrays.
"""

from __future__ import annotations

import gc
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
import overlord.torch as ot
from overlord.torch.microbatch_info import MicrobatchInfo
from overlord.torch.pinned_memory import fill, layout, views
from overlord.transport.connection import SocketConnection
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")


def address(value: np.ndarray | torch.Tensor) -> int:
    return (
        value.data_ptr()
        if isinstance(value, torch.Tensor)
        else value.__array_interface__["data"][0]
    )


def test_tensors_are_the_memory_of_the_arrays_with_their_types_and_without_a_warning(
    tmp_path: Path,
):
    with ov.launch(text_job(tmp_path)) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        mb = next(session.client(0))[0]
        found = ot.tensors(mb)
    assert list(found) == list(mb)
    for key, tensor in found.items():
        assert address(tensor) == address(mb[key]), key
        assert tensor.numpy().dtype == mb[key].dtype, key
        assert np.array_equal(tensor.numpy(), mb[key]), key
    assert found["max_seqlen"].shape == ()


def test_a_step_of_tensors_says_what_the_step_says(tmp_path: Path):
    with ov.launch(text_job(tmp_path)) as session:
        step = next(session.client(0))
        made = ot.TensorStep.of(step)
    for name in ("step", "rank", "global_valid_tokens", "plan_digest"):
        assert getattr(made, name) == getattr(step, name)
    assert (len(made), made.served_by, made.encoder) == (len(step), 0, ())
    assert [mb.samples for mb in made] == [mb.samples for mb in step]
    with pytest.raises(KeyError, match="'pixels' is not in this microbatch; it has tokens"):
        made[0]["pixels"]


def test_a_step_of_tensors_survives_pickling_with_its_samples(tmp_path: Path):
    """A DataLoader's worker sends it so."""
    with ov.launch(text_job(tmp_path)) as session:
        made = ot.TensorStep.of(next(session.client(0)))
        again = pickle.loads(pickle.dumps(made))
    assert again.step == made.step
    for a, b in zip(again, made, strict=True):
        assert a.samples == b.samples
        assert all(torch.equal(a[key], b[key]) for key in b)


def held(link: SocketConnection) -> int:
    """Slots of the constructor's ring that this process keeps views of."""
    gc.collect()
    return link.remote_held


def test_a_tensor_of_a_step_of_another_process_keeps_its_values_and_not_the_step(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=4), runtime="process") as session:
        client = session.client(0)
        step = next(client)
        link = client._queue._remote._link
        client._state = client.mark()[
            1
        ]  # else the client itself keeps the bytes of the state beside the arrays
        assert held(link) == 1
        wanted = np.array(step[0]["labels"])
        part = ot.tensors(step[0])["labels"][3:9]
        del step
        assert held(link) == 0, "what was widened lies in this process"
        for step in client:
            assert all((mb["labels"] >= -100).all() for mb in step), "their memory is another"
        assert part.tolist() == wanted[3:9].tolist()


def test_memory_of_another_process_lives_as_long_as_the_last_tensor_of_it(tmp_path: Path):
    """Slices along cp are read where the constructor built them."""
    job = replace(text_job(tmp_path, until=1), place=ov.ClientPlaceTree(cp=2))
    with ov.launch(job, runtime="process") as session:
        client = session.client(0)
        step = next(client)
        link = client._queue._remote._link
        client._state = client.mark()[1]
        assert held(link) == 1
        wanted = np.array(step[0]["labels"])
        labels = ot.tensors(step[0])["labels"]
        part = labels[3:9]
        del step, labels
        assert held(link) == 1
        assert part.tolist() == wanted[3:9].tolist()
        del part
        assert held(link) == 0


def test_a_mark_keeps_no_memory_of_the_channel(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=3), runtime="process") as session:
        client = session.client(0)
        next(client)
        link = client._queue._remote._link
        mark, state = client.mark(), client.state_dict()
        assert not np.shares_memory(mark[1].data, client._state.data)
        list(client)
        client._state = client.mark()[1]
        assert held(link) == 0
        assert client.state_dict(mark) == state


def test_host_keys_stay_where_the_host_reads_them(tmp_path: Path):
    with ov.launch(text_job(tmp_path)) as session:
        moved = ot.tensors(next(session.client(0))[0], "meta")
    assert moved["tokens"].device.type == "meta"
    assert moved["max_seqlen"].device.type == "cpu"


# one buffer for many arrays: what the device is sent

SOME = st.lists(
    st.tuples(
        st.sampled_from(["int64", "int32", "float32", "bool", "uint8", "float16"]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=9,
)


@given(SOME)
def test_arrays_come_out_of_one_buffer_as_they_went_in(shapes: list[tuple[str, list[int]]]):
    arrays = [
        (np.arange(int(np.prod(shape))) % 7).astype(dtype).reshape(shape) for dtype, shape in shapes
    ]
    arrays += [a.T for a in arrays if a.ndim == 2]  # not in one piece
    offsets, total = layout(arrays)
    buffer = torch.zeros(total, dtype=torch.uint8)
    fill(buffer.numpy(), arrays, offsets)
    found = views(buffer, arrays, offsets)
    assert len(found) == len(arrays)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_what_is_the_same_memory_is_copied_once():
    array = np.arange(1000)
    assert layout([array, array, array[:10]]) == ([0, 0, 8192], 8192 + 256)


def test_facts_tell_the_convention_of_labels(tmp_path: Path):
    for convention in ("shifted", "unshifted"):
        for more in ({}, {"pad_multiple": 4}, {"layout": "padded", "context": 64}):
            with ov.launch(text_job(tmp_path, labels=convention, **more)) as session:
                for step in session.client(0):
                    for mb in step:
                        facts = MicrobatchInfo.of(mb)
                        assert facts.labels in (convention, ""), more
                        assert (facts.labels == "") == bool((mb["labels"] == -100).all())
                        assert not facts.sliced
                        assert facts.tokens == facts.here == mb["tokens"].size
                        assert facts == ot.TensorMicrobatch.of(mb).facts
                        last_stage = {
                            key: mb[key] for key in mb if key not in ("tokens", "position_ids")
                        }
                        assert MicrobatchInfo.of(last_stage).labels == facts.labels


def test_labels_of_documents_of_one_token_over_and_over_are_told_by_their_ends():
    for labels, wanted in (
        ([7, 7, -100, 7, -100], "shifted"),
        ([-100, 7, 7, -100, 7], "unshifted"),
        ([-100] * 5, ""),
    ):
        bounds = np.array([0, 3, 5], np.int32)
        mb = {
            "tokens": np.full(5, 7),
            "labels": np.array(labels),
            "cu_seqlens": bounds,
            "cu_seqlens_padded": bounds,
        }
        assert MicrobatchInfo.of(mb).labels == wanted
