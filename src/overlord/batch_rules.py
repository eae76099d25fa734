"""The rules of ``Batch(packing=, shape=, max_documents=)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.checks import is_int

if TYPE_CHECKING:
    from overlord.mesh import Batch


def packing_problems(batch: Batch) -> list[str]:
    """Return the problems of the packing and the shape of a batch, as text."""
    found = []
    if batch.max_documents is not None:
        if not is_int(batch.max_documents) or batch.max_documents < 1:
            found.append(
                "batch.max_documents: expected a whole number of at least 1, or None for the "
                f"context, got {batch.max_documents!r}"
            )
        elif not batch.fixed:
            found.append(
                'batch.max_documents: expected None with shape="free", got '
                f'{batch.max_documents}; set shape="fixed"'
            )
    if batch.fixed and batch.tokens is not None and not batch.in_chunks:
        found.append(
            'batch.tokens: expected None with shape="fixed" and packing="documents", got '
            f'{batch.tokens}; set samples, or packing="concat"'
        )
    if not batch.in_chunks:
        return found
    for name, wanted, got in (
        ("layout", '"packed"', batch.layout),
        ("pad_multiple", "1", batch.pad_multiple),
    ):
        if repr(got).replace("'", '"') != wanted:
            found.append(
                f'batch.{name}: expected {wanted} with packing="concat", which pads no '
                f'document, got {got!r}; leave it out, or set packing="documents"'
            )
    if batch.tokens is not None and batch.tokens % batch.context:
        found.append(
            f'batch.tokens: expected a multiple of context={batch.context} with packing="concat"'
            f", got {batch.tokens}; set samples, the number of chunks"
        )
    return found
