"""Values as a header and columns, and back. No pickle: what can come out is a closed list, whatever
the bytes say.

The header is MessagePack. Numbers, texts, bytes and None stand for themselves and a map is a dict;
every array of MessagePack starts with a tag that says what it stands for: a list, a tuple, a
column, a record. Decoding imports nothing, runs nothing that the bytes name, and builds only
registered records and known exceptions, their fields checked against their annotations.
"""

from __future__ import annotations

from overlord.batch import Batch
from overlord.mesh import ClientPlaceTree
from overlord.messages import client, constructor, control, loader
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import Buffer, SampleId
from overlord.transport import error_codec as error_codec  # it registers exceptions
from overlord.transport.record_codec import register
from overlord.transport.value_codec import decode, encode

__all__ = ["decode", "encode", "register"]

for _cls in (SampleId, Batch, Buffer, ClientPlaceTree, Assignment, LoadingPlan):
    register(_cls)
for _module in (control, loader, constructor, client):
    for _cls in vars(_module).values():
        if isinstance(_cls, type) and _cls.__module__ == _module.__name__:
            register(_cls)
