"""Values as a header and columns, and back. No pickle: what can come out is a closed list, whatever the bytes say.

The header is MessagePack. Numbers, texts, bytes and None stand for themselves and a map is a dict; every array of MessagePack
starts with a tag that says what it stands for: a list, a tuple, a column, a record. Decoding imports nothing, runs nothing that
the bytes name, and builds only registered records and known exceptions, their fields checked against their annotations.
"""

from __future__ import annotations

from overlord import messages
from overlord.channel import faults as faults  # it makes exceptions known
from overlord.channel.records import register
from overlord.channel.values import decode, encode
from overlord.job import Batch
from overlord.placetree import ClientPlaceTree
from overlord.plan import Assignment, LoadingPlan
from overlord.sample import Buffer, SampleId

__all__ = ["decode", "encode", "register"]

for _cls in (SampleId, Batch, Buffer, ClientPlaceTree, Assignment, LoadingPlan):
    register(_cls)
for _cls in vars(messages).values():
    if isinstance(_cls, type) and _cls.__module__ == messages.__name__:
        register(_cls)
