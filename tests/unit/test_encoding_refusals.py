"""Where images cannot go: a plan whose replicas share samples is refused in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

import overlord as ov
from overlord.planning.images import check_images


@pytest.mark.parametrize("axis", ["PP", "TP"])
def test_images_do_not_go_with_samples_that_several_replicas_train_on(axis: str) -> None:
    place = ov.ClientPlaceTree(dp=2, tp=2, pp=2)
    columns = {"tokens": [4, 4], "image_patches": [[2], [2]]}
    buffer = replace(
        ov.Buffer.from_columns({"s": columns}, batch=ov.Batch(samples=2, context=16)), drawn=True
    )
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    images = drawn.select("image_patches").distribute("WORLD").balance("none")
    for good in ("DP", "CP", "WORLD"):
        check_images(
            drawn.select("tokens").distribute(good).balance("none").plan(encoder=images), buffer
        )
    plan = drawn.select("tokens").distribute(axis).balance("none").plan(encoder=images)
    with pytest.raises(ov.PlanError, match=f'over "DP", "CP" or "WORLD", got {axis},'):
        check_images(plan, buffer)
