"""The laws of the stream on datasets of other libraries, tables and texts: the reference on every
runtime, and a resume at every step.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from tests.corpus import INDEXED_FORMATS, JSON_TEXTS, TOKEN_FORMATS
from tests.laws import examples
from tests.properties.test_stream import delivered, fingerprint, run, wanted
from tests.worlds import folder, worlds

EVERY_INPUT = (*TOKEN_FORMATS, *INDEXED_FORMATS, *JSON_TEXTS)


@pytest.mark.parametrize("format", EVERY_INPUT)
@given(st.data(), st.integers(0, 2**20), st.integers(1, 3))
@examples(15)
def test_the_stream_equals_the_reference_on_the_clock_and_in_threads(format, data, seed, loaders):
    """Exactly once, in the order of the reference, whatever the timing and number of loaders."""
    world = data.draw(worlds(formats=(format,)))
    with folder() as directory:
        job = world.job(directory)
        steps, broken, bad = wanted(job)
        simulated, error, quarantine, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(simulated, len(simulated[0])) == steps
        if not broken:
            assert set(quarantine) <= set(bad)
        local, error, _, _ = run(job, loaders={"s0": loaders})
        assert (error is not None) == broken, error
        assert fingerprint(local) == fingerprint(simulated)


@pytest.mark.parametrize("format", EVERY_INPUT)
@given(st.data())
@examples(5)
def test_a_resume_at_every_step_continues_the_stream(format, data):
    world = data.draw(worlds(formats=(format,), endless=False))
    with folder() as directory:
        job = world.job(directory)
        steps, broken, _ = wanted(job)
        if broken:
            return
        states = []
        with ov.launch(job, check=True, stall_limit_s=60) as session:
            clients = [session.client(r) for r in range(job.place.world_size)]
            for _ in steps[:10]:
                for client in clients:
                    next(client)
                states.append(clients[0].state_dict())
        for done, state in enumerate(states, 1):
            rest, error, _, _ = run(job, resume=state)
            assert error is None
            assert delivered(rest, len(rest[0])) == steps[done:]
