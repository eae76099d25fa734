"""Mutation tests: put one small fault at a time into a copy of the repository, and run the tests.

    PYTHONPATH=src .venv/bin/python -m tests.mutations            # all, two at a time: minutes
    PYTHONPATH=src .venv/bin/python -m tests.mutations draw may   # those whose file or text match

A fault that no test detects is a gap in the tests, or not a fault. pytest does not collect this
module, and it never changes the working tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600
# The tests that should detect a fault, by its package; cheap ones first, since a run ends with the
# first failure.
LAWS = (
    "properties/test_look_ahead.py",
    "properties/test_cores.py",
    "properties/test_budget.py",
    "properties/test_stream.py",
)
TESTS = {
    "plan": ("unit/test_step.py", "properties/test_plan.py", "properties/test_rank_views.py"),
    "planning": (
        "properties/test_concat.py",
        "unit/test_source_budgets.py",
        "properties/test_source_budgets.py",
        "unit/test_stages.py",
        "properties/test_stages.py",
        "properties/test_chunk_weights.py",
        "unit/test_golden.py",
        "unit/test_planner.py",
        "unit/test_long_documents.py",
        "unit/test_feedback.py",
        "unit/test_add_source.py",
        "properties/test_feedback.py",
        "properties/test_draw.py",
        "properties/test_merge.py",
        "unit/test_reader.py",
        "properties/test_plan_router.py",
        *LAWS,
        "unit/test_lost_sources.py",
        "properties/test_lost_sources.py",
    ),
    "sources": (
        "unit/test_retry.py",
        "unit/test_sources_chunk_reader.py",
        "unit/test_sources_files.py",
        "unit/test_sources_columnar.py",
        "unit/test_sources_megatron.py",
        "unit/test_sources_mds.py",
    ),
    "loader": (
        "unit/test_golden.py",
        "properties/test_source_budgets.py",
        "unit/test_loader.py",
        "unit/test_reader.py",
        "unit/test_loader_rollback.py",
        "unit/test_long_documents.py",
        "unit/test_retry.py",
        *LAWS,
    ),
    "constructor": (
        "unit/test_golden.py",
        "unit/test_assembler.py",
        "unit/test_pack.py",
        "unit/test_step.py",
        "properties/test_pack.py",
        "properties/test_rank_views.py",
        *LAWS,
    ),
    "scaling": (
        "unit/test_scaler.py",
        "properties/test_scaling.py",
        "properties/test_memory_budget.py",
        "properties/test_partition.py",
    ),
    "session": ("unit/test_golden.py", *LAWS),
    "cluster": ("properties/test_plan_router.py", "properties/test_plan_router_images.py", *LAWS),
    "transforms": (
        "unit/test_chat_templates.py",
        "unit/test_chat.py",
        "unit/test_reader.py",
        "unit/test_plain_ids.py",
        "unit/test_image_header.py",
        "unit/test_image_items.py",
        "unit/test_images.py",
        "properties/test_images.py",
    ),
}
# Detecting a fault is enough; shrinking the example takes minutes. The database would carry
# examples from one fault to the next.
QUICK = """
from hypothesis import Phase
usual, phases = settings.get_profile("overlord"), [Phase.explicit, Phase.generate]
settings.register_profile("mutations", usual, phases=phases, database=None)
settings.load_profile("mutations")
"""


@dataclass(frozen=True, slots=True)
class Mutation:
    what: str
    file: str  # below src/overlord
    old: str  # occurs there once
    new: str


def _at(file: str, *faults: tuple[str, str, str]) -> list[Mutation]:
    return [Mutation(what, file, old, new) for what, old, new in faults]


MUTATIONS = [
    *_at(
        "scaling/partition.py",
        (
            "loaders of a source on one worker without bound",
            "if most is None:\n            return True",
            "return True\n        if most is None:\n            return True",
        ),
        (
            "loaders that only wait stay",
            "return self._partition(self._trimmed(best))",
            "return self._partition(best)",
        ),
        (
            "trimmed though it breaks per_actor",
            "return new if as_good and self._allowed(hosting) else best",
            "return new if as_good else best",
        ),
        (
            "trimmed though slower",
            "as_good = new.seconds <= best.seconds * (1 + CLOSE) and self",
            "as_good = self",
        ),
        (
            "loaders by level only",
            "for wanted in (self._by_level, self._by_share)",
            "for wanted in (self._by_level,)",
        ),
        (
            "loaders by share only",
            "for wanted in (self._by_level, self._by_share)",
            "for wanted in (self._by_share,)",
        ),
        (
            "loaders never share a worker",
            "while self.resources.memory_bytes is not None and room > 1",
            "while False",
        ),
        (
            "on one worker per_actor bounds nothing",
            "here = self.per_actor if self.together else None",
            "here = None",
        ),
    ),
    *_at(
        "scaling/loader_placement.py",
        ("a crowded worker is not spared", "0.5 if h in crowded else 1.0", "1.0"),
        (
            "workers of the launch do not stay first",
            "(not others.get(h), not first(h), h)",
            "(not others.get(h), h)",
        ),
        ("shards pile up on one worker", "mine[k % n]", "mine[min(k, n - 1)]"),
    ),
    *_at(
        "scaling/scaler.py",
        (
            "who only waits would take any number of steps",
            "max(seconds - waited, seconds / 20)",
            "max(seconds - waited, 1e-9)",
        ),
        ("more workers though no rank waits", "and self._is_late(s, need, observed)", ""),
        (
            "full workers do not count before a rank waits",
            "or self.waited > 0.01 or self._is_busy(seen, need, observed)",
            "or self.waited > 0.01",
        ),
        (
            "the lock is never measured",
            "known.locked if known.locked is not None else locked_part",
            "locked_part",
        ),
        (
            "threads are counted as cores in use",
            "math.floor(self.limits.cores - self._used + SPARE)",
            "self.limits.cores // 3 - 1",
        ),
        (
            "as many given back as meet the target",
            "hosts = need.fewest(self.limits.low)\n",
            "hosts = need.fewest(self.limits.target)\n",
        ),
        ("all sources of a crowded worker are named", "if crowded & set(s.hosts):", "if False:"),
        (
            "two changes at a time",
            "*(ups[:1] or self._downs(observed, needs, now, pressed=self._is_pressed())[:1])",
            "*ups[:1], *self._downs(observed, needs, now, pressed=self._is_pressed())[:1]",
        ),
        (
            "named once for ever",
            "known.short = known.short if known.fine < self.limits.idle_patience else 0",
            "pass",
        ),
        ("storage is blamed though nobody waits", "self.waited > 0.1\n", "True\n"),
        (
            "read-ahead follows every change",
            "if steps >= 2 * was or 2 * steps < was:",
            "if steps != was:",
        ),
    ),
    *_at(
        "scaling/profile.py",
        ("constructor workers cost nothing", "+ constructor_hosts * BUILDER_BYTES", ""),
        (
            "each worker gets the whole shared-memory pool",
            "return self.shared_bytes // max(1, self.hosts)",
            "return self.shared_bytes",
        ),
    ),
    *_at(
        "planning/draw.py",
        ("the may rule forgotten", "if owed[i] > UNIT * counts[i]] or weighted", "] or weighted"),
        ("may at equality", "if owed[i] > UNIT * counts[i]]", "if owed[i] >= UNIT * counts[i]]"),
        (
            "ties broken by the last source",
            "// weights[i], i) for i in may)",
            "// weights[i], -i) for i in may)",
        ),
        (
            "deadlines without weights",
            "- owed[i]) << SHIFT) // weights[i], i) for i in may)",
            "- owed[i]) << SHIFT), i) for i in may)",
        ),
        (
            "remainders to the smallest",
            "key=lambda i: (floors[i] - scaled[i], i))",
            "key=lambda i: (scaled[i] - floors[i], i))",
        ),
        (
            "accounts of weightless sources kept",
            "owed[i] = owed[i] + n * w if w else 0\n    counts",
            "owed[i] = owed[i] + n * w\n    counts",
        ),
        ("random picks start again after a source left", "run.picks += missing", "run.picks += 0"),
        (
            "step order without the half",
            "np.arange(1, 2 * int(n.sum()), 2)",
            "np.arange(0, 2 * int(n.sum()), 2)",
        ),
        ("a source leaves with its last sample", "if count > have:\n", "if count >= have:\n"),
        (
            "a source that left keeps its account",
            "self.owed[i], self.active[i], self.short = 0, False",
            "self.active[i], self.short = False",
        ),
        (
            "tokens: the missing rounded down",
            "amount += -(-run.owed[i] // UNIT)",
            "amount += run.owed[i] // UNIT",
        ),
        (
            "sub-draws: the last ones get the rest",
            "base + (k < more)",
            "base + (k >= self._draws - more)",
        ),
        (
            "whole weights kept after a source left",
            "self._whole[:2] != (run.weights, active)",
            "self._whole[0] != run.weights",
        ),
        (
            "the latest musts instead of the earliest",
            "heap, (((UNIT * (counts[i] + 1)",
            "heap, ((-(UNIT * (counts[i] + 1)",
        ),
    ),
    *_at(
        "planning/stream.py",
        (
            "a loader that said nothing does not hold back",
            "if last is None:\n                    return",
            "if last is None:\n                    continue",
        ),
        (
            "tokens: one sample too many",
            'base + tokens - held, side="left")',
            'base + tokens - held, side="right")',
        ),
        (
            "a group ends with its first loader",
            "if any(last is None or last > at.window",
            "if all(last is None or last > at.window",
        ),
        (
            "failures in a row are not counted across blocks",
            "self._bad_run + 1 if goods == previous else 1",
            "j + 1 if goods == previous else 1",
        ),
        (
            "an epoch restored in its middle looks empty",
            "self._epoch_has_sample = cursor.file >= 0",
            "self._epoch_has_sample = False",
        ),
        ("one epoch too many", "self._at.epoch >= self._epochs", "self._at.epoch > self._epochs"),
        (
            "failures before a sample are not listed",
            "(segment.bad_at < b) & (segment.bad_at >= a)",
            "(segment.bad_at < b) & (segment.bad_at > a)",
        ),
    ),
    *_at(
        "planning/stream.py",
        (
            "a dropped document counts before the next sample",
            "else bisect_left(segment.long_at, stop)",
            "else bisect_left(segment.long_at, stop + 1)",
        ),
        (
            "dropped documents behind the last sample are forgotten",
            "if b == segment.size and (n > 0 or not segment.trails)",
            "if b == segment.size",
        ),
        (
            "dropped documents at the end are not counted",
            "for s in self._segments if not self._ready else ():",
            "for s in ():",
        ),
    ),
    *_at(
        "planning/sample_blocks.py",
        (
            "rows of the bound itself are final",
            'np.uint64(bound), side="left")',
            'np.uint64(bound), side="right")',
        ),
        (
            "unordered merge",
            "order = np.lexsort((found.part, found.row, found.file, found.key))",
            "order = np.arange(len(found))",
        ),
        (
            "merge forgets file and row",
            "np.lexsort((found.part, found.row, found.file, found.key))",
            'np.argsort(found.key, kind="stable")',
        ),
        (
            "a loader that drops all does not say how far it is",
            "*(() if p.long is None else (p.long.key,))",
            "*()",
        ),
    ),
    *_at(
        "planning/stream.py",
        (
            "the sample stands before its own loss",
            "is_row = order < len(key)\n    return np.cumsum(~is_row)[is_row]",
            "is_row = order < len(key)\n    return np.cumsum(~is_row)[is_row] + 1",
        ),
    ),
    *_at(
        "planning/step.py",
        (
            "the cursor one sample early",
            "np.cumsum(self.sizes) - 1",
            "np.maximum(np.cumsum(self.sizes) - 2, 0)",
        ),
        (
            "the cursor without its part",
            "self.row[end], self.part[end]]",
            "self.row[end], 0 * self.part[end]]",
        ),
    ),
    *_at(
        "planning/draw.py",
        (
            "a loader is not asked again",
            "if self._held[loader] >= self._must[loader]:",
            "if self._held[loader] > self._must[loader]:",
        ),
    ),
    *_at(
        "planning/look_ahead.py",
        (
            "those that wait for their turn age too",
            "rows if left else rows[: int(last[0]) if len(last) else 0]",
            "rows",
        ),
        (
            "a restored reserve forgets its ages",
            "else age[:n].astype(np.int32)",
            "else np.minimum(age[:n], 0).astype(np.int32)",
        ),
        (
            "the cursor behind the first sample left",
            "gone = n = int(left[0]) if len(left)",
            "gone = n = int(left[0]) + 1 if len(left)",
        ),
    ),
    *_at(
        "planning/selection.py",
        (
            "the overdue are not preferred",
            "~overdue(candidates), candidates.source",
            "candidates.source",
        ),
    ),
    *_at(
        "planning/planner.py",
        (
            "prefetch one more",
            "len(self._outstanding) < self.spec.prefetch",
            "len(self._outstanding) <= self.spec.prefetch",
        ),
        (
            "the fastest rank sets the pace",
            "if s > self._consumed.slowest]",
            "if s > max(self._consumed.values())]",
        ),
        (
            "accounts of an empty draw lost",
            "state = replace(self._state, owed=drawn.owed, active=drawn.active)",
            "state = replace(self._state, active=drawn.active)",
        ),
        ("the horizon stands still", "if stream.group > group\n", "if False\n"),
    ),
    *_at(
        "planning/mixture.py",
        ("a mixture one step late", "and after < e.at <= step]", "and after < e.at < step]"),
        (
            "a change that is to come is forgotten",
            "isinstance(e, Skip) else 0) > step\n",
            "isinstance(e, Skip) else 0) > step + 1\n",
        ),
        (
            "a change of mixture outlives its stage",
            "if first <= step), default=0) - 1)",
            "if first <= step), default=0) - 10**9)",
        ),
        ("a skip is forgotten at once", "(lag if isinstance(e, Skip) else 0)", "0"),
        (
            "a mixture that waits for its epoch pushes out the one in force",
            "*latest(events, -1, mix_step, starts),\n        *latest(events, mix_step, step, starts),",
            "*(latest(events, mix_step, step) or latest(events, -1, mix_step)),",
        ),
        (
            "a mixture set before knows who joins after",
            "weights={**dict.fromkeys(names, 0.0), **change.weights}",
            "weights=change.weights",
        ),
        ("plans name who joins later", "while coming and names[n - 1] in coming:", "while False:"),
        (
            "reports since the plan are in no state",
            "every = self._reports | {(r.step, r.rank): r for r in reports}",
            "every = {(r.step, r.rank): r for r in reports}",
        ),
    ),
    *_at(
        "planning/mixture.py",
        ("mixed by the epoch: as the step says", 'if self._every != "epoch":', "if True:"),
        ("asked again when a draw is tried again", "if self._called == state.step:", "if False:"),
        (
            "the epoch looked at twice",
            "state.mix_epoch if repeated and not joins else epoch",
            "epoch",
        ),
        ("what was learned is forgotten", '"schedule": self._schedule_state()', '"schedule": None'),
        ("what was reported is forgotten", '"reports": self.feedback.pending()', '"reports": ()'),
    ),
    *_at(
        "planning/mixture.py",
        (
            "feedback a step early",
            "self._steps.pop(step - self._lag, {})",
            "self._steps.pop(step - self._lag + 1, {})",
        ),
        (
            "a report a step too late",
            "report.step + self._lag > planned",
            "report.step + self._lag > planned + 1",
        ),
        ("used across skipped steps", "        if skipped:\n", "        if False:\n"),
    ),
    *_at(
        "loader/loader.py",
        ("the cursor's window forgotten", "self._window = cursor.window", "self._window = 0"),
        (
            "the cursor kept for the next group",
            "self._window, self._after = 0, None  # the",
            "self._window = 0  # the",
        ),
        (
            "the cursor kept for the next window",
            "        self._after = None\n        if event.rows:",
            "        if event.rows:",
        ),
        ("chunks read again after their end", "if c not in event.over)", "if True)"),
        (
            "a window closed before its last rows",
            "closes = self._rows == 0",
            "closes = self._rows <= 1",
        ),
        (
            "the budget forgotten",
            "self.ready < self._level and self.ready_bytes < self._budget",
            "self.ready < self._level",
        ),
        (
            "the budget before the draw",
            "if self.ready < self._must_have:\n            return True",
            "if self.ready < self._must_have:\n            return self.ready_bytes < self._budget",
        ),
        (
            "a pop that does not lower what must be held",
            "self._must_have = max(0, self._must_have - n)",
            "pass",
        ),
    ),
    *_at(
        "loader/samples.py",
        (
            "chunks of a group by place in the group",
            "places[places % loaders == loader]",
            "places[(places - places[0] + 1) % loaders == loader]",
        ),
        (
            "the last group cut off",
            "return -(-self.n_chunks // self.group_size)",
            "return max(1, self.n_chunks // self.group_size)",
        ),
        (
            "row keys without the epoch",
            'key64("rows", self.seed, self.name, epoch), file, row',
            'key64("rows", self.seed, self.name, 0), file, row',
        ),
        ("row keys without the file", "epoch), file, row)", "epoch), row)"),
        (
            "one chunk order for all epochs",
            'key64("chunks", self.seed, self.name, epoch)',
            'key64("chunks", self.seed, self.name, 0)',
        ),
        (
            "a restored epoch starts at its first group",
            "for g in range(group, self.groups_of(epoch)):",
            "for g in range(0, self.groups_of(epoch)):",
        ),
    ),
    *_at(
        "loader/reader.py",
        (
            "user code gets several slices at once",
            'if self._singly or not getattr(self.stages, "only_ids", False):',
            "if self._singly:",
        ),
        (
            "failures of transforms under wrong rows",
            "((int(readable[j]), why) for j, why in staged.bad)",
            "((int(j), why) for j, why in staged.bad)",
        ),
        (
            "tables joined without their offset",
            "np.where(where >= 0, where + held, where)",
            "where",
        ),
    ),
    *_at(
        "transforms/base.py",
        (
            "pieces of separate tables unordered",
            'order = np.argsort(index, kind="stable")\n    content',
            "order = np.arange(len(index))\n    content",
        ),
    ),
    *_at(
        "loader/samples.py",
        ("the cursor's own row skipped", "& (row >= after.row)))", "& (row > after.row)))"),
        (
            "equal keys before the cursor",
            "(key == limit) & ((file > after.file)",
            "(key == limit) & ((file >= after.file)",
        ),
        (
            "rows of a window unordered",
            "positions = np.argsort(key)  # several times faster than lexsort",
            "positions = np.arange(len(key))",
        ),
        ("rows of equal keys in any order", "positions = np.lexsort((row, file, key))", "pass"),
    ),
    *_at(
        "loader/windows.py",
        ("the cursor's row given whole", "& (part <= after.part)", "& (part < 0)"),
        ("the cursor's piece given again", "& (part <= after.part)", "& (part < after.part)"),
        (
            "windows that were read as one end at wrong samples",
            "cuts = np.searchsorted(block.index, rows).tolist()",
            "cuts = [min(row, len(block.index)) for row in rows]",
        ),
        ("reasons mixed up", "window.reasons[-1 - int(at[j])]", "window.reasons[0]"),
        (
            "the loss of the cursor's document counted again",
            "(documents.file != after.file) | (documents.row != after.row)",
            "documents.row >= 0",
        ),
    ),
    *_at(
        "loader/loader.py",
        (
            "windows read on are counted once",
            "at = command.epoch, command.group, command.window + windows",
            "at = command.epoch, command.group, command.window + 1",
        ),
    ),
    *_at(
        "loader/samples.py",
        (
            "going back counts the loss of the cursor's document again",
            "(rows < c.row + own)",
            "(rows < c.row)",
        ),
    ),
    *_at(
        "constructor/assembler.py",
        (
            "steps out of order",
            "if status != BUILT:\n                break",
            "if status != BUILT:\n                continue",
        ),
        (
            "released by the first",
            "taken = min(self._acked.values())",
            "taken = max(self._acked.values())",
        ),
        (
            "released too late",
            "if s <= taken and status != BUILDING",
            "if s < taken and status != BUILDING",
        ),
        (
            "held when all left while it was built",
            "if step not in self._steps or not self._acked or self._is_over(step):",
            "if step not in self._steps or self._is_over(step):",
        ),
        ("the end before the last step", "all(status == BUILT for _, status in steps)", "True"),
        ("delivered twice", "if last < step:", "if last <= step:"),
        (
            "a late rank gets no held step",
            "first = min(self._steps, default=0) - 1",
            "first = max(self._steps, default=0)",
        ),
    ),
    *_at(
        "planning/budgets.py",
        (
            "one token beyond the budget",
            "= front.samples_within(left)",
            "= front.samples_within(left + 1)",
        ),
        (
            "look-ahead beyond the budget",
            "isinstance(front, BudgetFront) and front.ended",
            "isinstance(front, BudgetFront) and front is None",
        ),
        (
            "candidates as timing has them",
            "isinstance(front, BudgetFront) and front.ended",
            "isinstance(front, BudgetFront)",
        ),
        ("a chunk beyond the budget", "min(held, self._left)", "held"),
        ("a budget for each launch", "source.max_tokens - drawn[i]", "source.max_tokens"),
        ("rows after a budget in quarantine", "or ready > 0)", "and ready < 0)"),
    ),
    *_at(
        "loader/partial_epoch.py",
        ("a part one row short", "Fraction(1, 2))", "Fraction(1, 2)) - 1"),
        ("the last window whole", "(key < limit) | (", "(key <= limit) | ("),
        ("the last chunk whole", "< np.uint64(self.below)", "<= np.uint64(WHOLE - 1)"),
        ("a wrong window", "(middle + 1) * slice_rows", "middle * slice_rows"),
    ),
    *_at(
        "planning/chunks.py",
        ("the rest of a cut sample is lost", "pieces.end == tokens, state", "tokens > 0, state"),
        ("a cut that stays", "        cut[i] = 0\n", "        cut[i] += 0\n"),
    ),
    *_at(
        "planning/stage_cuts.py",
        ("pieces of a long sample overlap", "- n, n)) * context", "- n, n)) * (context - 1)"),
        (
            "a truncated sample continues",
            'whole = wide if how == "split" else np.minimum(wide, context)',
            "whole = wide",
        ),
    ),
    *_at(
        "planning/schedule/by_stage.py",
        (
            "a stage's schedule counts from the start of the job",
            "own(step - first, feedback)",
            "own(step, feedback)",
        ),
    ),
    *_at(
        "planning/cut_pieces.py",
        ("a cut sample begins again", "np.where(rank == 0, ", "np.where(rank < 0, "),
        ("a chunk one token short", "(chunk + 1) * context)", "(chunk + 1) * context - 1)"),
        ("sources in turn", "(2 * before + length) / (2 * total)", "before"),
        (
            "the label after a piece has no weight",
            "ahead = remaining > 0 if",
            "ahead = remaining < 0 if",
        ),
        (
            "weights of the sample's start",
            "pieces.offset + 1, pieces.offset",
            "0 * pieces.offset + 1, pieces.offset",
        ),
        ("a run counts once", "tokens * weight[at]", "weight[at]"),
    ),
    *_at(
        "constructor/build.py",
        (
            "samples in the order of the draw",
            "order = main.order()",
            "order = np.arange(len(main.bucket))[np.argsort(main.bins(), kind='stable')][::-1]",
        ),
        (
            "rows of the plan for documents",
            "docs, offsets = staged.stage.doc[rows], ",
            "docs, offsets = rows, ",
        ),
        (
            "a document one token short",
            "length = offsets[docs + 1] - start\n",
            "length = offsets[docs + 1] - start - (offsets[docs + 1] - start > 9)\n",
        ),
        (
            "bounds on the wrong side",
            "np.arange(main.n_microbatches * len(buckets) + 1))",
            "np.arange(main.n_microbatches * len(buckets) + 1), side='right')",
        ),
        (
            "sources in the order of the draw",
            "staged.plan.source[rows]",
            "staged.plan.source[: len(rows)]",
        ),
        ("stages get all keys", "of_stage(slices[view.cp_rank], view)", "slices[view.cp_rank]"),
        ("slices of ranks swapped", "zip(ranks, keyed", "zip(ranks[::-1], keyed"),
        (
            "views of a bucket for all buckets",
            "by_rank={r: batches[bucket_of[r], views[r]] for r in ranks}",
            "by_rank={r: found[min(found)[0], views[r]] for r in ranks}",
        ),
    ),
    *_at(
        "constructor/pack.py",
        ("labels not shifted", "labels[:-1] = tokens[1:]", "labels[:-1] = tokens[:-1]"),
        (
            "a label across documents",
            "ends, ended = offset + layout.content - 1, layout.content > 0",
            "ends, ended = offset + layout.content - 1, layout.content > 1",
        ),
        (
            "padding with a loss",
            "for positions in (unlabelled, holes):",
            "for positions in (unlabelled,):",
        ),
        (
            "pad_id forgotten",
            'arrays["tokens"][holes] = batch.pad_id',
            'arrays["tokens"][holes] = 0',
        ),
        (
            "cu_seqlens with padding",
            '"cu_seqlens": _cumulative(docs.true, first, counts)',
            '"cu_seqlens": _cumulative(docs.size, first, counts)',
        ),
        (
            "positions go on across documents",
            "np.repeat(origin[d:e] - a, size[d:e])",
            "np.repeat(origin[d:e] * 0 - a, size[d:e])",
        ),
        (
            "positions begin again in every run",
            "origin = offset if layout.base is None else offset - layout.base",
            "origin = offset",
        ),
        ("labels of a run's end from the next run", "labels[ends[on]] = values[", "values["),
        ("no label at the end of a run", "            ended &= ~on\n", ""),
        ("long runs from their document's start", "(start + base).tolist(),", "start.tolist(),"),
    ),
    *_at(
        "plan/view.py",
        (
            "the first stage gets labels",
            "and (self.last or key not in LAST)",
            "and (self.last or key not in LAST or self.first)",
        ),
        ("a fetcher gets its own stage only", "np.logical_or.at(last, queue_of, ", "last |= ("),
        (
            "a fetcher along cp gets a slice",
            "if sliced and lowest[rank] == highest[rank]",
            "if sliced",
        ),
        (
            "slices where cp ranks have buckets of their own",
            'place.cp > 1 and "cp" not in BUCKET_AXES[axis] and',
            "place.cp > 1 and",
        ),
        (
            "stages where they have buckets of their own",
            'place.pp > 1 and "pp" not in BUCKET_AXES[axis],',
            "place.pp > 1,",
        ),
    ),
    *_at(
        "constructor/runs.py",
        (
            "zigzag without the mirror",
            "[[r, 2 * cp - 1 - r] for r in ranks]",
            "[[r, cp + r] for r in ranks]",
        ),
        (
            "contiguous runs in falling order",
            "np.array([[r] for r in ranks])",
            "np.array([[cp - 1 - r] for r in ranks])",
        ),
        ("a remainder is divided unevenly", "if (size % pieces).any():", "if False:"),
        (
            "runs across documents lose their tail",
            "np.minimum((start + length)[run], ends[doc]) - begins",
            "np.minimum(start[run] + 1, ends[doc]) - begins",
        ),
    ),
    *_at(
        "constructor/rank_views.py",
        (
            "documents divided where the microbatch should be",
            'return ends if split == "zigzag" else ends[[0, -1]]',
            "return ends",
        ),
        ("narrowed twice, sliced twice", "array.shape[: len(shape)] == shape", "True"),
    ),
    *_at(
        "plan/view.py",
        (
            "the first stage gets labels",
            "and (self.last or key not in LAST)",
            "and (self.last or key not in LAST or self.first)",
        ),
        ("a fetcher gets its own stage only", "np.logical_or.at(last, queue_of, ", "last |= ("),
        (
            "a fetcher along cp gets a slice",
            "if sliced and lowest[rank] == highest[rank]",
            "if sliced",
        ),
        (
            "slices where cp ranks have buckets of their own",
            'place.cp > 1 and "cp" not in BUCKET_AXES[axis] and',
            "place.cp > 1 and",
        ),
        (
            "stages where they have buckets of their own",
            'place.pp > 1 and "pp" not in BUCKET_AXES[axis],',
            "place.pp > 1,",
        ),
    ),
    *_at(
        "plan/summary.py",
        (
            "empty microbatches cost nothing",
            "np.maximum(counts, 1).sum(axis=1)",
            "counts.sum(axis=1)",
        ),
        ("slices counted whole", "tokens // view.cp * per_token", "tokens * per_token"),
    ),
    *_at(
        "session/local_runtime.py",
        (
            "payload of loaders in falling order",
            "loaders = np.flatnonzero(stage.pops)",
            "loaders = np.flatnonzero(stage.pops)[::-1]",
        ),
    ),
    *_at(
        "loader/service.py",
        ("pieces of a loader in falling order", "pieces += popped", "pieces += popped[::-1]"),
        (
            "the loader does not receive a pop",
            "commands = self.loader.handle(Pop(step, n, left))",
            "commands = list[Any]()",
        ),
        (
            "held payload in another order",
            "pieces.insert(0, self.held)",
            "pieces.append(self.held)",
        ),
    ),
    *_at(
        "constructor/service.py",
        (
            "payload of a step never let go",
            "del self._holders[step], self._staged[step], self._infos[step]",
            "pass",
        ),
        ("built steps never let go", "self._built.pop((step, bucket), None)", "pass"),
        (
            "buckets built together get each other's",
            "zip(buckets, made, strict=True):",
            "zip(sorted(buckets, reverse=True), made, strict=True):",
        ),
    ),
    *_at(
        "cluster/plan_router.py",
        (
            "documents in the order of the plan",
            "order = np.lexsort((stage.doc[rows], worker[stage.doc[rows]]))",
            "order = np.arange(len(rows))",
        ),
        (
            "held documents not counted",
            "by = np.concatenate([self._held_by, np.repeat",
            "by = np.concatenate([self._held_by[:0], np.repeat",
        ),
        (
            "samples nobody waits for are sent",
            "np.where(served & (not stage.skipped), constructor_of, -1)",
            "constructor_of",
        ),
        (
            "a constructor without documents receives no plan",
            "np.unique(goes_to[goes_to >= 0])",
            "np.unique(goes_to[bucket])",
        ),
    ),
    *_at(
        "planning/spec.py",
        (
            "a step that was begun goes on as it is",
            "if self.has_begun(state.step) and event.at == state.step:",
            "if False:",
        ),
        (
            "events that came while a step waited are lost",
            "before = replace(self._before, events=state.events)",
            "before = self._before",
        ),
        ("the last source leaves, too", "not may_leave or not others or", "not may_leave or"),
        ("bad data are a reason to leave", " and isinstance(error, StorageError)\n", "\n"),
    ),
    *_at(
        "planning/look_ahead.py",
        ("samples of a lost source stay held", "return self._release(i)[1] > 0", "return False"),
    ),
    *_at(
        "planning/step.py",
        (
            "payload by source, not by loader",
            "doc[np.lexsort((order, loader))]",
            "doc[np.argsort(order, kind='stable')]",
        ),
    ),
    *_at(
        "scaling/core_demand.py",
        (
            "too few workers are added",
            "missing = self.most / target - self.room",
            "missing = self.most / (target + 0.15) - self.room",
        ),
    ),
    *_at(
        "transforms/columns.py",
        ("ids out of range are used", "if int(ids.max()) >= limit:", "if False:"),
    ),
    *_at(
        "sources/chunk_reader.py",
        (
            "the last slice is not the last",
            "last = first + table.num_rows >= whole.num_rows",
            "last = first + table.num_rows > whole.num_rows",
        ),
        (
            "a file that changes while it is read is believed",
            "if self._files.local or raw.bad or raw.last:",
            "if False:",
        ),
        ("reads that hang are never given up", "if seconds < limit:", "if True:"),
    ),
    *_at(
        "sources/retry.py",
        ("pauses that do not grow", "2 ** min(len(failures) - 1, 20)", "1"),
        ("retries beyond the deadline", "or took >= limit:", "or took >= 10 * limit:"),
        ("every attempt is logged", "if len(failures) == 1:", "if failures:"),
        (
            "work counts as waiting",
            "return max(0.0, seconds - self.clock.cpu_s(attempt.thread) + attempt.cpu_s)",
            "return seconds",
        ),
    ),
    *_at(
        "sources/retry.py",
        (
            "any time will do",
            "any(found_ns == indexed_ns // unit * unit for unit in (1, 10**3, 10**6, 10**9))",
            "True",
        ),
        ("any size will do", "size != file.size or not", "not"),
        ("a file that went is given up at once", "_RESTORE)", "_RESTORE, 1)"),
    ),
    *_at(
        "loader/reader.py",
        (
            "the answer of a read that was given up is taken",
            "if self._read_id is not read_id:",
            "if False:",
        ),
    ),
    *_at(
        "transforms/chat_spans.py",
        ("a turn ends after its first special token", "return found[-1][1]", "return found[0][1]"),
        ("text after the end of a turn trained", "found[-1][1] if found else last", "last"),
        ("the opening of the next turn trained", "in opening:", "in ():"),
        ("headers trained", "return first + len(header), header", "return first, header"),
        (
            "content outside of its turn accepted",
            "if any(run.mark.turn != number",
            "if not any(True",
        ),
        (
            "content of others in a turn accepted",
            "if any(run.mark.origin not in (-1, number)",
            "if not any(True",
        ),
        ("a turn in several places accepted", "!= last - first:", "> last - first:"),
        ("a turn without an end accepted", "if tail == last:", "if tail > last:"),
        (
            "tags of every turn trained",
            "if not (weight := turns.weights[owner]):",
            "if not (weight := 1.0):",
        ),
    ),
    *_at(
        "transforms/chat_encoder.py",
        (
            "tokens that begin before a span not trained",
            "offsets[:, 1] > span.start",
            "offsets[:, 0] >= span.start",
        ),
        (
            "tokens that end after a span not trained",
            "offsets[:, 0] < span.stop",
            "offsets[:, 1] <= span.stop",
        ),
        (
            "lost messages accepted",
            ")) is None:\n                return made",
            ")) or True:\n                return made",
        ),
    ),
    *_at(
        "transforms/chat_sandbox.py",
        ("steps without bound", "if self.steps > (most", "if self.steps < -(most"),
        ("text without bound", "if self.text > (most", "if self.text < -(most"),
        (
            "outputs without a turn",
            "return written(value, self._now.turns[-1])",
            "return written(value, -1)",
        ),
        (
            "the loop inside a loop keeps its turn",
            "self._now.turns.pop()",
            "self._now.turns.pop(0)",
        ),
    ),
    *_at(
        "transforms/image_header.py",
        (
            "an orientation that swaps sides not seen in a JPEG",
            "upright = (height, width) if orientation >= 5 else (width, height)\n    "
            "return ImageHeader(*upright, _JPEG",
            "upright = (width, height)\n    return ImageHeader(*upright, _JPEG",
        ),
        ("a JPEG without its end accepted", 'if b"\\xff\\xd9" not in raw:', "if not raw:"),
        ("scans not limited", "if scans > MAX_SCANS:", "if scans > 10 * MAX_SCANS:"),
        ("fill bytes for ever", "range(at + 1, at + 1 + MAX_FILL)", "range(at + 1, len(view))"),
        ("big-endian EXIF read as little", 'b"MM\\0*": ">"', 'b"MM\\0*": "<"'),
        ("the orientation of a PNG not read", 'elif name == b"eXIf":', 'elif name == b"eXIF":'),
        (
            "the signature of a lossless WebP not looked at",
            "if signature != 0x2F:",
            "if signature == 0x2E:",
        ),
        (
            "no limit on pixels",
            "if width * height > limits.max_pixels_in:",
            "if width * height > 100 * limits.max_pixels_in:",
        ),
        ("a GIF of several pictures taken for one", "if pictures == 2:", "if pictures == 1:"),
    ),
    *_at(
        "transforms/images.py",
        (
            "sides rounded down",
            "return whole + (2 * rest > factor or (2 * rest == factor and whole % 2 == 1))",
            "return max(1, whole)",
        ),
        ("a side that cannot shrink ignored", "min(rows, most // min(columns, most)),", "rows,"),
        (
            "too few pixels accepted",
            "if rows * columns * area < min_pixels:",
            "if rows * columns == 0:",
        ),
        (
            "the root rounded down",
            "return math.isqrt(-(-top // bottom) - 1) + 1",
            "return max(1, math.isqrt(top // bottom))",
        ),
        (
            "all images of a sample cropped alike",
            "mix64(key ^ number.astype(U64))",
            "mix64(key ^ (0 * number).astype(U64))",
        ),
        (
            "a crop out of the middle off by one side",
            "return (width - w) // 2, (height - h) // 2, w, h",
            "return width - w, height - h, w, h",
        ),
        ("place in the fingerprint", 'if f.name != "place")', 'if f.name != "at")'),
        (
            "animations never refused",
            'if image_header.frames > 1 and self.animated == "quarantine":',
            "if found.frames > 10:",
        ),
    ),
    *_at(
        "transforms/image_rows.py",
        (
            "images of several columns not sorted into rows",
            'np.argsort(row, kind="stable")',
            "np.arange(len(row))",
        ),
        (
            "items behind the context kept",
            'mine = offset < context if on_long == "truncate" else',
            "mine = offset >= 0 if True else",
        ),
        (
            "placeholders behind the first piece accepted",
            'if on_long == "split":',
            'if on_long == "splat":',
        ),
        (
            "images of bad rows kept",
            "kept = np.flatnonzero(good[images.row])",
            "kept = np.arange(len(images.row))",
        ),
        (
            "the placeholder cut to the ids' width",
            "np.promote_types(ids.values.dtype, np.min_scalar_type(spec.placeholder))",
            "ids.values.dtype",
        ),
        ("bytes without the files", "+ np.diff(ends[chosen.offsets])", "+ 0"),
        (
            "a marker left in the text",
            "values[where] = spec.placeholder",
            "values[where] = values[where]",
        ),
        ("null images not skipped", "nulls = set(null_rows(array).tolist())", "nulls = set()"),
        ("auto turned round", "totals.pixels <= totals.files", "totals.pixels > totals.files"),
    ),
    *_at(
        "transforms/image_items.py",
        (
            "rows and columns of a square swapped",
            ".transpose(0, 3, 1, 4, 6, 2, 5)",
            ".transpose(0, 3, 4, 1, 6, 2, 5)",
        ),
        ("no flip", "if prefix.flip:", "if False:"),
        ("mean not taken off", "(-mean / std)", "(0 * mean / std)"),
        (
            "a broken file raises at the loader",
            "    except BadImage:\n        return item",
            "    except BadImage:\n        raise",
        ),
    ),
    *_at(
        "transforms/image_decode.py",
        ("what is transparent stands on black", "(255, 255, 255)", "(0, 0, 0)"),
        ("the lower byte of sixteen bits", "np.asarray(image) >> 8", "np.asarray(image) & 255"),
        (
            "quarter turns the wrong way",
            "6: Image.Transpose.ROTATE_270",
            "6: Image.Transpose.ROTATE_90",
        ),
        ("scaled whatever is asked for", "if not prefix.scaled:", "if False:"),
        ("decoded too small", "GAP = 2", "GAP = 1"),
        ("what lies around a crop has a say", "if scale == 1:", "if scale == 0:"),
        (
            "another image than planned accepted",
            "if (image_header.width, image_header.height) != prefix.size:",
            "if False:",
        ),
        (
            "decoders' own errors let through",
            "except Exception as fault:  # decoders",
            "except OSError as fault:  # decoders",
        ),
    ),
]


def snapshot(root: Path) -> Path:
    """Return a copy of the repository. All faults are put into this one state, which passes without
    them, although the working tree may change meanwhile.
    """
    for part in ("src", "tests", "docs", "examples"):
        shutil.copytree(
            ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis")
        )
    shutil.copy(ROOT / "pyproject.toml", root)
    with (root / "tests/conftest.py").open("a") as conftest:
        conftest.write(QUICK)
    return root


def tests_on(root: Path, mutation: Mutation | None) -> tuple[str, str, float]:
    """Return (verdict, the first test that failed, seconds) of a copy with this fault.

    A fault is caught only by a test that fails or never ends. A copy that cannot be imported shows
    nothing about the tests.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="overlord-mutation-") as scratch:
        copy = Path(shutil.copytree(root, Path(scratch) / "copy"))
        if mutation is not None:
            path = copy / "src/overlord" / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                return ("STALE", f"{mutation.old!r} occurs {text.count(mutation.old)} times", 0.0)
            path.write_text(text.replace(mutation.old, mutation.new))
        tests = (
            sorted({t for ts in TESTS.values() for t in ts})
            if mutation is None
            else TESTS[mutation.file.partition("/")[0]]
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "--tb=no",
            "--timeout=120",
            *(f"tests/{t}" for t in tests),
        ]
        env = {**os.environ, "PYTHONPATH": "src"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return "caught", "hangs", time.monotonic() - start
    took, said = time.monotonic() - start, done.stdout + done.stderr
    if done.returncode == 0:
        return "SURVIVES", "", took
    if "+ Timeout +" in said:  # pytest-timeout ends the whole run
        return "caught", "a test hangs", took
    failed = re.search(r"^FAILED (\S+?\.py::\w+)", said, re.MULTILINE)
    if done.returncode == 1 and failed and "XPASS" not in said:
        return "caught", failed.group(1).rpartition("/")[2], took
    return "BROKEN", said.strip().splitlines()[-1], took


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(w in f"{m.file} {m.what}" for w in words)]
    with (
        tempfile.TemporaryDirectory(prefix="overlord-snapshot-") as scratch,
        ThreadPoolExecutor(2) as pool,
    ):
        root = snapshot(Path(scratch))
        verdict, failed, took = tests_on(root, None)
        print(f"without a fault: {failed or 'all pass'} ({took:.0f} s)", flush=True)
        if verdict != "SURVIVES":
            return 2
        verdicts = []
        for mutation, (verdict, failed, took) in zip(
            chosen, pool.map(lambda m: tests_on(root, m), chosen), strict=True
        ):
            verdicts.append(verdict)
            print(
                f"{verdict:<9}{took:4.0f} s  {mutation.file}: {mutation.what}  [{failed}]",
                flush=True,
            )
    print(", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts))))
    return int(set(verdicts) != {"caught"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
