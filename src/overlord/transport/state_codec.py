"""Stream states as opaque bytes: many components forward them, few decode them."""

from __future__ import annotations

import numpy as np

from overlord.errors import FrameError
from overlord.messages.control import EncodedState, StreamState
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack, unpack


def encode_state(state: StreamState) -> EncodedState:
    """Encode a state."""
    return EncodedState(state.step, np.frombuffer(b"".join(pack(*encode(state))), np.uint8))


def decode_state(encoded: EncodedState) -> StreamState:
    """Decode a state; raise ``FrameError`` if the bytes are invalid."""
    frame = unpack(np.ascontiguousarray(encoded.data))
    state = decode(frame.header, frame.columns)
    if not isinstance(state, StreamState) or state.step != encoded.step:
        raise FrameError(f"expected the state of step {encoded.step}, got {type(state).__name__}")
    return state
