"""The columns that a transform reads, and the reason for a row that it cannot read."""

from __future__ import annotations

from overlord.transforms.base import Meta, Tokens, Transform
from overlord.transforms.chat import Chat
from overlord.transforms.columns import Check, check_ids, check_meta, check_texts
from overlord.transforms.document_groups import GroupedIds
from overlord.transforms.encoders import check_messages, check_tools
from overlord.transforms.grouped_rows import checks_of
from overlord.transforms.image_rows import check_images
from overlord.transforms.images import Images
from overlord.transforms.loss_weights import check_weights
from overlord.transforms.requirements import NO_IDS, used_columns
from overlord.transforms.tokenize import Tokenize

_CHECKS: dict[type, Check] = {
    Tokenize: check_texts,
    Tokens: check_ids,
    Images: check_images,
    Meta: check_meta,
}


def column_checks(t: Transform) -> list[tuple[str, Check]]:
    """Return the columns that a transform reads, with the check of each."""
    if isinstance(t, GroupedIds):
        return checks_of(t)
    if isinstance(t, Chat):
        tools = [(t.tools, check_tools)] if isinstance(t.tools, str) else []
        return [(t.messages, check_messages), *tools]
    if (check := _CHECKS.get(type(t))) is None:
        return []
    weights = t.loss if isinstance(t, Tokens) else None  # of one column: Pair has two
    return [(name, check_weights if name == weights else check) for name in used_columns(t)]


def named_reason(t: Transform | None, reason: str) -> str:
    """Return the reason of a refusal, with the transform that cannot read the values."""
    return f"{t!r}: {reason}" if t else f"{reason}; {NO_IDS}"
