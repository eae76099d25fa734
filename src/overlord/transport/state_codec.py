"""A state as opaque bytes: carried by many, looked into by few."""

from __future__ import annotations

import numpy as np

from overlord.errors import FrameError
from overlord.messages.control import EncodedState, StreamState
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack, unpack


def seal(state: StreamState) -> EncodedState:
    return EncodedState(state.step, np.frombuffer(b"".join(pack(*encode(state))), np.uint8))


def unseal(sealed: EncodedState) -> StreamState:
    """What was sealed; bytes are never trusted."""
    frame = unpack(np.ascontiguousarray(sealed.data))
    state = decode(frame.header, frame.columns)
    if not isinstance(state, StreamState) or state.step != sealed.step:
        raise FrameError(f"expected the state of step {sealed.step}, got {type(state).__name__}")
    return state
