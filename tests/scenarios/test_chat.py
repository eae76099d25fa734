"""Conversations give the same stream in one process, in several and in the simulation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import overlord as ov
from tests import chats
from tests.processes import RUNTIMES, written

TURNS = ("hello there", "how are you", "fine, <|im_end|> thanks", "é 日本")


def job(folder: Path) -> ov.Job:
    """Return a job of two sources with different templates; every fifth row is bad."""
    sources = []
    for model, train_on in (("qwen", "assistant"), ("llama3", "last")):
        rows = []
        for k in range(40):
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": f"{TURNS[(k + i) % 4]} {k}"}
                for i in range(2 + 2 * (k % 3))
            ]
            rows.append({"messages": messages if k % 5 else messages[:1]})
        path = folder / f"{model}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        tokenizer = chats.write_folder(folder / model, model)
        chat = ov.Chat(tokenizer, train_on=train_on, date=chats.DAY)
        sources.append(ov.Source(model, str(path), epochs=1, transforms=[chat]))
    batch = ov.Batch(samples=8, context=128)
    return ov.Job(name="chats", sources=sources, batch=batch, slice_rows=4, seed=3)


def test_all_runtimes_deliver_one_stream_of_conversations_and_one_quarantine(tmp_path: Path):
    made, found = job(tmp_path), []
    for runtime in RUNTIMES:
        with ov.launch(made, runtime=runtime, stall_limit_s=60) as session:
            steps = [written(step) for step in session.client(0)]
            bad = sorted((q["source"], q["row"], q["reason"]) for q in session.quarantine())
        found.append((steps, bad))
    done = ov.simulate(made, seed=1)
    assert done.error is None
    assert found[0] == found[1]
    assert [written(step) for step in done.steps[0]] == found[0][0]
    assert len(found[0][1]) == 16


def test_a_job_of_conversations_continues_from_its_state(tmp_path: Path):
    made = job(tmp_path)
    with ov.launch(made) as session:
        whole = [written(step) for step in session.client(0)]
    with ov.launch(made) as session:
        client = session.client(0)
        for _ in range(3):
            next(client)
        state = session.state_dict()
    with ov.launch(made, resume=state) as session:
        assert [written(step) for step in session.client(0)] == whole[3:]


def learned(made: ov.Job, runtime: str) -> tuple[Counter[Any], float]:
    """Return how often each label of each sample is learned, and the sum of their weights."""
    found, total = Counter[Any](), 0.0
    with ov.launch(made, runtime=runtime, stall_limit_s=60) as session:
        for step in session.client(0):
            total += step.global_valid_tokens
            for mb in step:
                for piece, begin in zip(mb.samples, mb.begins.tolist(), strict=True):
                    for k in range(piece.length):
                        at = piece.offset + k
                        if mb["loss_mask"][at]:
                            label = int(mb["labels"][at])
                            found[tuple(piece.sample), begin + k + 1, label] += 1
    return found, total


def test_conversations_in_chunks_learn_the_tokens_of_whole_conversations(tmp_path: Path) -> None:
    made = job(tmp_path)
    wanted, total = learned(made, "local")
    assert set(wanted.values()) == {1}
    for context in (16, 128):
        batch = ov.Batch(samples=8, context=context, packing="concat", shape="fixed")
        chunks = replace(made, batch=batch, max_document=128)
        for runtime in RUNTIMES:
            assert learned(chunks, runtime) == (wanted, total)
