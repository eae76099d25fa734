"""Encode values as a header and columns, and decode them.

The codec does not use pickle: only a closed set of types can be decoded, whatever the bytes
contain.

The header is MessagePack. Numbers, strings, bytes and None are encoded as themselves, and a dict as
a map. Every MessagePack array starts with a tag: list, tuple, column, record and so on. Decoding
imports nothing and runs nothing that the bytes name. It builds only registered records and known
exceptions, and checks their fields against their annotations.
"""

from __future__ import annotations

from overlord.batch import Batch
from overlord.mesh import ClientPlaceTree
from overlord.messages import client, constructor, control, loader
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import Buffer, SampleId
from overlord.transport import error_codec as error_codec  # registers exceptions
from overlord.transport.record_codec import register
from overlord.transport.value_codec import decode, encode

__all__ = ["decode", "encode", "register"]

for _cls in (SampleId, Batch, Buffer, ClientPlaceTree, Assignment, LoadingPlan):
    register(_cls)
for _module in (control, loader, constructor, client):
    for _cls in vars(_module).values():
        if isinstance(_cls, type) and _cls.__module__ == _module.__name__:
            register(_cls)
