"""Detection of loss columns, which name the tokens that have a loss.

They are not supported yet. Ignoring one would train on the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlord.errors import TransformError
from overlord.transforms.base import Map, Meta, Select, Transform
from overlord.transforms.tokenize import Tokenize

LOSS = ("loss_mask", "labels")


def refused_columns(source: str, transforms: Sequence[Transform]) -> tuple[str, ...]:
    """Return the columns that files of a source must not have.

    Files must not have a mask if ids come from a column and no transform drops or reads that mask.
    A ``Select`` that names a mask is refused here. ``check_map`` refuses a mask that a ``Map``
    returns.
    """
    for position, t in enumerate(transforms):
        if (
            isinstance(t, Select)
            and (kept := [name for name in LOSS if name in t.columns])
            and not _later(transforms, position, Map)
        ):
            problem, remedy = (
                f"expected columns that a job can use, got {kept[0]!r}, which is not supported yet",
                "leave it out",
            )
            raise TransformError(source, repr(t), problem, remedy)
    if any(isinstance(t, (Tokenize, Map, Select)) for t in transforms):
        return ()
    read = {t.value for t in transforms if isinstance(t, Meta)}
    return tuple(name for name in LOSS if name not in read)


def check_map(
    source: str, transforms: Sequence[Transform], position: int, made: Iterable[str]
) -> None:
    """Refuse a mask among the columns that the ``Map`` at a position returned.

    It is accepted if a later transform replaces or drops it.
    """
    if (kept := [name for name in LOSS if name in made]) and not _later(
        transforms, position, Map, Select, Tokenize
    ):
        problem = (
            f"expected columns that a job can use, got {kept[0]!r}, which is not supported yet"
        )
        raise TransformError(
            source,
            repr(transforms[position]),
            problem,
            f"return 'tokens' without {kept[0]!r}: every token has a loss",
        )


def _later(transforms: Sequence[Transform], position: int, *kinds: type) -> bool:
    return any(isinstance(other, kinds) for other in transforms[position + 1 :])
