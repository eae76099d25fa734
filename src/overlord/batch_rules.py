"""The rules of ``Batch(samples=, tokens=)`` and ``Batch(packing=, shape=, max_documents=)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.batch_ramp import Ramp
from overlord.checks import is_int

if TYPE_CHECKING:
    from overlord.mesh import Batch


def size_problems(batch: Batch) -> list[str]:
    """Return the problems of the size of a batch, as text."""
    found = []
    if (batch.samples is None) == (batch.tokens is None):
        given = "neither" if batch.samples is None else "both"
        found.append(f"batch: expected exactly one of samples= and tokens=, got {given}")
    for name in ("samples", "tokens"):
        value = getattr(batch, name)
        if value is None or isinstance(value, Ramp) or (is_int(value) and value >= 1):
            continue
        remedy = "; make a ramp from numbers, as in linear(64, 256, steps=1000)"
        found.append(
            f"batch.{name}: expected a whole number of at least 1, got {value!r}"
            + (remedy if callable(value) else "")
        )
    return found


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
    ramps = [n for n in ("samples", "tokens") if isinstance(getattr(batch, n), Ramp)]
    if batch.fixed and ramps:
        found.append(
            f'batch.{ramps[0]}: expected a number with shape="fixed", whose steps have equal '
            f"shapes, got {getattr(batch, ramps[0])!r}; use stages, which may differ in shape"
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
    sizes = batch.tokens
    if isinstance(sizes, Ramp) and any(n % batch.context for n in (*sizes.numbers, sizes.unit)):
        found.append(
            f"batch.tokens: expected multiples of context={batch.context} with "
            f'packing="concat", got {sizes!r}; give multiple={batch.context}, or set samples'
        )
    elif batch.tokens is not None and not ramps and batch.tokens % batch.context:
        found.append(
            f'batch.tokens: expected a multiple of context={batch.context} with packing="concat"'
            f", got {batch.tokens}; set samples, the number of chunks"
        )
    return found
