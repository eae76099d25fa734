"""The columns that the transforms of a source need, their checks, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlord.errors import TransformError
from overlord.transforms.base import IDS, Map, Meta, Select, Tokens, Transform
from overlord.transforms.chat import Chat
from overlord.transforms.columns import Check, check_ids, check_meta, check_texts
from overlord.transforms.document_groups import GroupedIds
from overlord.transforms.encoders import check_messages, check_tools
from overlord.transforms.grouped_rows import checks_of
from overlord.transforms.image_rows import check_images
from overlord.transforms.images import Images
from overlord.transforms.loss_weights import check_weights
from overlord.transforms.tokenize import Tokenize

# ----------------------------------------------------------------------------
# Columns that the transforms of a source read, and combinations of transforms that cannot work.

ID_TRANSFORMS = (Tokenize, Tokens, Chat, GroupedIds)  # transforms that make token ids
NO_IDS = (
    "add Tokenize(...) or Tokens(column=...) to the transforms, or let the last Map return 'tokens'"
)


def raw_columns(source: str, transforms: Sequence[Transform]) -> tuple[str, ...] | None:
    """Return the columns to read in order of first use, or None if user code gets all columns.

    Raises TransformError for a combination of transforms that cannot work.
    """
    needed: dict[str, None] = {}
    made = False  # an earlier Tokenize or Tokens has made ids
    known: set[str] | None = None  # all existing columns after a Select; None: unknown
    everything = mapped = False
    for t in transforms:
        uses = used_columns(t)
        if known is None and not mapped:  # columns used after a Map may come from the Map
            needed |= dict.fromkeys(c for c in uses if not (made and c == IDS))
        elif known is not None and (lost := [c for c in uses if c not in known]):
            raise TransformError(
                source,
                repr(t),
                f"expected the column {lost[0]!r}, got an earlier Select that drops it",
                f"add {lost[0]!r} to that Select",
            )
        if isinstance(t, ID_TRANSFORMS):
            if made:
                raise TransformError(
                    source,
                    repr(t),
                    "expected one Tokenize, Tokens or Chat, got another one before it",
                    "keep one of them",
                )
            made, known = True, None if known is None else known | {IDS}
        elif isinstance(t, Select):
            known = {*t.columns, IDS} if made else set(t.columns)
        elif t.user_code:
            everything = everything or (known is None and not mapped)
            mapped, known = (True, None) if isinstance(t, Map) else (mapped, known)
    if not made and known is not None and IDS not in known:
        raise TransformError(
            source, "transforms", "expected a transform that makes token ids, got none", NO_IDS
        )
    if not made and known is None and not mapped:
        needed |= {IDS: None}
    return None if everything else tuple(needed)


def id_columns(transforms: Sequence[Transform]) -> tuple[str, ...]:
    """Return the columns of the files without which a row has no token ids.

    The tuple is empty if user code runs first: it may make the columns, or drop rows without them.
    """
    for t in transforms:
        if t.user_code:
            return ()
        if isinstance(t, Tokenize):
            return (t.text,)
        if isinstance(t, Tokens):
            return (t.column,)
        if isinstance(t, Chat):
            return (t.messages,)
        if isinstance(t, GroupedIds):
            return tuple(t.spec.documents)
    return (IDS,)


def used_columns(t: Transform) -> tuple[str, ...]:
    if isinstance(t, Tokenize):
        return (t.text,)
    if isinstance(t, Tokens):
        return (t.column,) if t.loss is None else (t.column, *_names(t.loss))
    if isinstance(t, (Select, Images, Chat, GroupedIds)):
        return t.columns
    return (t.value,) if isinstance(t, Meta) and isinstance(t.value, str) else ()


def lengths_suffice(transforms: Sequence[Transform]) -> bool:
    """Return whether samples and their metadata depend on the number of token ids alone.

    Ids that are out of range are the exception: their rows are quarantined.
    """
    return all(
        (isinstance(t, Tokens) and t.loss is None)
        or isinstance(t, Select)
        or (isinstance(t, Meta) and not t.user_code and t.value != IDS)
        for t in transforms
    )


def has_weights(transforms: Sequence[Transform]) -> bool:
    """Return whether the samples have loss weights."""
    return any(
        (isinstance(t, Tokens) and t.loss is not None)
        or (isinstance(t, (Chat, GroupedIds)) and t.has_weights)
        for t in transforms
    )


def describes(name: str, items: str) -> bool:
    """Return whether list ``name`` must have one number per item of list ``items``.

    For example, ``image_tokens`` and ``image_offset`` have one for each item of ``image_patches``.
    """
    stem, _, what = name.rpartition("_")
    return (
        what in ("tokens", "offset")
        and stem == items.rpartition("_")[0] != ""
        and items.rpartition("_")[2] not in ("tokens", "offset")
    )


# ----------------------------------------------------------------------------
# Detection of loss columns, which select the tokens that have a loss.
#
# A job that ignored such a column would train on the wrong tokens. ``Tokens(loss=)`` reads one.

LOSS = ("loss_mask", "labels")


def refused_columns(source: str, transforms: Sequence[Transform]) -> tuple[str, ...]:
    """Return the loss columns that files of a source must not have.

    A loss column is refused if ids come from a column and no transform drops or reads it. Raises
    TransformError for a ``Select`` that keeps a loss column. ``check_map`` refuses a loss column
    that a ``Map`` returns.
    """
    weights = _loss_columns(transforms)
    for position, t in enumerate(transforms):
        if (
            isinstance(t, Select)
            and (kept := [name for name in LOSS if name in t.columns and name not in weights])
            and not _later(transforms, position, Map)
        ):
            problem, remedy = (
                f"expected columns that a transform reads, got {kept[0]!r}, which none does",
                f"{how_to_use(kept[0])}, or remove it from the Select",
            )
            raise TransformError(source, repr(t), problem, remedy)
    encoded = [t.encode if isinstance(t, GroupedIds) else t for t in transforms]
    if any(isinstance(t, (Tokenize, Chat, Map, Select)) for t in encoded) or weights:
        return ()
    read = {t.value for t in transforms if isinstance(t, Meta)}
    return tuple(name for name in LOSS if name not in read)


def check_map(
    source: str, transforms: Sequence[Transform], position: int, made: Iterable[str]
) -> None:
    """Raise TransformError if the ``Map`` at a position returned a loss column.

    The column is accepted if a later Map, Select or Tokenize replaces or drops it.
    """
    read = _loss_columns(transforms[position + 1 :])
    if (kept := [name for name in LOSS if name in made and name not in read]) and not _later(
        transforms, position, Map, Select, Tokenize, Chat
    ):
        raise TransformError(
            source,
            repr(transforms[position]),
            f"expected columns that a transform reads, got {kept[0]!r}, which none does",
            f"{how_to_use(kept[0])}, or return 'tokens' without {kept[0]!r}",
        )


def how_to_use(name: str) -> str:
    """Return the remedy for a loss column that no transform reads."""
    if name == "loss_mask":
        return f"read it with Tokens(loss={name!r})"
    return "make a column of weights from it, and read that with Tokens(loss=...)"


def _loss_columns(transforms: Sequence[Transform]) -> set[str]:
    found = [_names(t.loss) for t in transforms if isinstance(t, Tokens) and t.loss is not None]
    found += [t.loss for t in transforms if isinstance(t, GroupedIds)]
    return {name for names in found for name in names}


def _names(columns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else columns


def _later(transforms: Sequence[Transform], position: int, *kinds: type) -> bool:
    return any(isinstance(other, kinds) for other in transforms[position + 1 :])


# ----------------------------------------------------------------------------
# The check of each column that a transform reads.

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
