"""Execution of the transforms of a source in two stages.

The *slice stage* is everything up to the last user code. Its batches are always the slices of the
stream, so that a function of a whole batch returns the same rows in every run. The *row stage* is
the rest. The result of a row depends on that row alone, so a loader may run it on any rows at any
time. Both stages return the rows that cannot be transformed, with their reasons.

Only the columns that the row stage reads pass between the stages, in types that it can read. Slices
of JSON lines may differ in types. The outcome of a row must not depend on the types of its
neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from overlord.content import RaggedSpans, spans_of
from overlord.documents import LENGTHS, PROMPTS
from overlord.errors import TransformError
from overlord.hashing import digest, key64, keyed_hash
from overlord.sample import LOSS_RUNS, LOSS_WEIGHTS, Column, Ragged
from overlord.sources.tables import arrow_of, is_mixed
from overlord.transforms.base import (
    IDS,
    Block,
    Filter,
    Map,
    Meta,
    RowIds,
    Select,
    StagedRows,
    Tokens,
    Transform,
    empty_block,
)
from overlord.transforms.chat import Chat
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    Check,
    RowFrame,
    Unfit,
    as_bool,
    as_meta,
    as_row,
    check_ids,
    from_values,
    meta_column,
    meta_rows,
    plain_ids,
    read_ids,
    read_meta,
    select_columns,
    unequal_items,
)
from overlord.transforms.document_groups import GROUPED, GroupedIds, executed
from overlord.transforms.encoders import KEY, Encoders
from overlord.transforms.fill_in_middle import FillInMiddle, keys_of
from overlord.transforms.grouped_rows import run_grouped
from overlord.transforms.grouped_samples import Limits, column_by_document, grouped_samples
from overlord.transforms.image_rows import (
    ITEM,
    RANDOM_KEY,
    ImageTotals,
    add_items,
    find_images,
    run_images,
)
from overlord.transforms.images import META, Images
from overlord.transforms.long_documents import Pieces, lost_tokens, split_rows, too_long
from overlord.transforms.loss_weights import (
    label_sums,
    runs_of,
    stored,
    unequal_weights,
    use_weights,
    weights_of,
)
from overlord.transforms.requirements import (
    ID_TRANSFORMS,
    NO_IDS,
    check_map,
    column_checks,
    describes,
    has_weights,
    id_columns,
    lengths_suffice,
    named_reason,
    raw_columns,
    refused_columns,
)
from overlord.transforms.tokenize import Tokenize
from overlord.transforms.user_functions import (
    columns_per_row,
    join_rows,
    meta_per_row,
    meta_values,
    run_each,
    run_whole,
    value_per_row,
)

NO_ROWS = np.zeros(0, np.int64)
ID_BYTES = 4  # bytes of an id in the metadata ``bytes`` of a source without a tokenizer


class Pipeline:
    """The validated transforms of one source, with their tokenizers loaded.

    A Pipeline is pickled as its arguments; tokenizers are loaded once per process.
    """

    def __init__(
        self,
        source: str,
        transforms: Sequence[Transform],
        *,
        seed: int,
        context: int,
        on_long: str,
        room: int | None = None,
        cuts: bool = False,
    ) -> None:
        """Validate the transforms and load their tokenizers.

        ``context``: tokens of the longest document. ``room``: tokens of all documents of a sample,
        with a reserve for their padding; None: ``context``. ``cuts``: samples will be cut into
        pieces, so their metadata has runs of equal loss weights.
        """
        self.source, self._given, self._cuts = source, tuple(transforms), cuts
        self.transforms: tuple[Transform, ...] = self._given
        if any(
            isinstance(t, GROUPED) or isinstance(getattr(t, "loss", 0), tuple) for t in transforms
        ):
            self.transforms = executed(source, self._given)
        self.seed, self.context, self.on_long = seed, context, on_long
        self.room = context if room is None else room
        code = [i for i, t in enumerate(self.transforms) if t.user_code]
        self._row_stage_start = code[-1] + 1 if code else 0
        self.holds_lock: bool = any(t.holds_lock for t in self.transforms)
        self.columns: tuple[str, ...] | None = raw_columns(source, self.transforms)
        self.refused: tuple[str, ...] = refused_columns(source, self.transforms)
        self.required: tuple[str, ...] = id_columns(self.transforms)
        self.lengths_suffice: bool = lengths_suffice(self.transforms)
        images = any(isinstance(t, Images) for t in self.transforms)
        self._images = find_images(source, self.transforms) if images else None
        self._image_totals = ImageTotals(source)
        own = tuple(t.name for t in self.transforms if isinstance(t, Meta))
        names = own + (META if self._images else ())
        # Names of all metadata but ``tokens`` and ``bytes``.
        grouped = [t for t in self.transforms if isinstance(t, GroupedIds)]
        # Names of the metadata with a value for each document of a sample.
        self.document_meta: tuple[str, ...] = grouped[0].meta if grouped else ()
        self._columns_of_meta = names
        names += self.document_meta
        weights = (LOSS_WEIGHTS, LOSS_RUNS) if cuts else (LOSS_WEIGHTS,)
        self._weighted = has_weights(self.transforms)
        self.meta_names = names + (weights if self._weighted else ())
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TransformError(
                source,
                "Meta",
                f"expected different names of metadata, got {twice[0]!r} twice",
                "rename one of them",
            )
        # Whether a sample is a row of ids and nothing else; ``blocks_of`` reads all at once. No
        # user code runs then, and the slice stage checks types only.
        self.only_ids = not names and all(
            isinstance(t, Tokens) and t.loss is None for t in self.transforms
        )
        # The only column that samples consist of; empty if the transforms name none, or several.
        named = [t.column for t in self.transforms if isinstance(t, Tokens)]
        self._id_column = named[0] if self.only_ids and len(named) == 1 else ""
        self._paired_meta = [(a, b) for a in names for b in names if a != b and describes(a, b)]
        self._needs = self._row_stage_needs()
        # By thread: the transform that the thread executes, its rows, and their identity.
        self._running: dict[int, tuple[Transform, RowFrame, RowIds | None]] = {}
        # Schema of slices that the slice stage returns unchanged, once one was seen.
        self._unchanged_schema: pa.Schema | None = None
        kinds = (Tokenize, Chat, FillInMiddle)
        some = any(isinstance(t, kinds) for t in self._given)
        self._encoders = Encoders(source, self._given, context) if some else None
        # Bytes of one id in the metadata ``bytes``. The number is fixed for the source: in memory
        # an id may be wider, if its batch has rows of a file with wider ids.
        self._id_bytes = ID_BYTES if self._encoders is None else self._encoders.id_bytes
        if self._images is not None:
            self._id_bytes = max(
                self._id_bytes, np.min_scalar_type(self._images.placeholder).itemsize
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            self.source,
            self._given,
            self.seed,
            self.context,
            self.on_long,
            self.room,
            {} if self._encoders is None else self._encoders.contents,
            self._cuts,
        )

    def __repr__(self) -> str:
        names, start = [repr(t) for t in self._given], self._row_stage_start
        first, rest = (" > ".join(part) or "nothing" for part in (names[:start], names[start:]))
        return f"Pipeline({self.source!r}: {first} | {rest})"

    def check_tokenizers(self, contents: Mapping[int, str]) -> None:
        """Raise TransformError if a tokenizer file differs from that of the launch.

        ``contents``: digest of each file at launch, by the position of its transform.
        """
        if self._encoders is not None:
            self._encoders.check(contents)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the transforms.

        Seed, context and on_long belong to the fingerprint of the job.
        """
        return digest(*(t.fingerprint() for t in self._given))

    @property
    def has_slice_stage(self) -> bool:
        return self._row_stage_start > 0

    def running(self, thread: int) -> tuple[str, int]:
        """Return the transform that a thread executes ("": none) and its row in the file.

        The row is -1 if the transform processes a whole batch. Runs on: any thread.
        """
        if (current := self._running.get(thread)) is None:
            return "", -1
        t, frame, ids = current
        at, index = frame.at, frame.index
        return repr(t), int(ids.row[index[at]]) if ids is not None and 0 <= at < len(index) else -1

    def passes(self, table: pa.Table) -> bool:
        """Return whether ``slice_stage`` is known to return a slice of this type unchanged."""
        known = self._unchanged_schema
        return known is not None and table.schema.equals(known)

    def slice_stage(self, table: pa.Table, ids: RowIds) -> StagedRows:
        """Run the transforms up to the last user code over one slice of the stream.

        Without user code, columns of the slice are only checked and selected.
        """
        if self.passes(table):
            return StagedRows(table, np.arange(table.num_rows), [], 0)
        frame = RowFrame(table)
        if self._images is not None and self._images.randomized:
            frame.put(
                RANDOM_KEY,
                arrow_of(
                    keyed_hash(
                        key64("images", self.seed, self.source), ids.epoch, ids.file, ids.row
                    )
                ),
            )
        if self._encoders is not None and self._encoders.need_keys:
            key = key64("fill_in_middle", self.seed, self.source)
            frame.put(KEY, arrow_of(keys_of(key, ids.epoch, ids.file, ids.row)))
        try:
            for position in range(self._row_stage_start):
                try:
                    self._run(position, frame, ids)
                except Unfit as fault:
                    frame.drop_all(f"{self.transforms[position]!r}: {fault}")
        finally:
            self._running.pop(threading.get_ident(), None)
        self._select_needed(frame)
        if (
            not self._row_stage_start
            and frame.table is table
            and not frame.bad
            and not any(is_mixed(f.type) for f in table.schema)
        ):
            self._unchanged_schema = table.schema
        return StagedRows(frame.table, frame.index, sorted(frame.bad), frame.dropped)

    def row_stage(self, table: pa.Table) -> Block:
        """Turn rows of the slice stage, in batches of any size, into samples.

        Raises TransformError if a column that a transform reads is unusable in all rows.
        """
        frame = RowFrame(table)
        try:
            for position in range(self._row_stage_start, len(self.transforms)):
                try:
                    # Columns between the stages are already selected.
                    if not isinstance(self.transforms[position], Select):
                        self._run(position, frame, None)
                except Unfit as fault:
                    self._refuse(self.transforms[position], str(fault))
        finally:
            self._running.pop(threading.get_ident(), None)
        if not frame.table.num_rows:
            return empty_block(self.meta_names, frame.bad)
        try:
            tokens, bad = read_ids(frame.table, IDS)
        except Unfit as fault:
            raise TransformError(self.source, "tokens", str(fault), NO_IDS) from None
        for name, items in self._paired_meta:
            bad = unequal_items(frame.table, name, items) | bad
        lengths = tokens.lengths
        weights = weights_of(frame.table) if self._weighted else None
        if weights is not None:
            bad = unequal_weights(weights, lengths) | bad
        if self.document_meta:
            return self._grouped_block(frame, tokens, weights, bad)
        return self._whole_block(frame, tokens, weights, bad)

    def blocks_of(self, table: pa.Table) -> Callable[[np.ndarray], Block] | None:
        """Return a function from rows of the slice stage to their block, without a copy of ids.

        The block equals that of ``row_stage``. Its ids are spans of those of the table, which are
        read at once. Return None if samples are more than ids, or if no row has ids.
        """
        if not self.only_ids or not table.num_rows:
            return None
        if self._id_column and (spans := plain_ids(table, self._id_column)) is not None:
            return partial(self._block_of, table, spans, {})
        frame = RowFrame(table)
        try:
            for t in self.transforms:
                assert isinstance(t, Tokens)
                _use_ids(frame, t)
            ids, bad = read_ids(frame.table, IDS)
        except Unfit:
            return None
        return partial(self._block_of, table, spans_of(ids), bad)

    def _block_of(self, table: pa.Table, ids: RaggedSpans, bad: Bad, rows: np.ndarray) -> Block:
        starts, stops = ids.starts[rows], ids.stops[rows]
        if not bad and len(rows) and (block := self._fitting(ids.held, starts, stops)) is not None:
            return block
        frame = RowFrame(table.slice(0, len(rows)))  # only the number of its rows is used
        tokens = RaggedSpans(ids.held, starts, stops)
        mine = {j: bad[i] for j, i in enumerate(rows.tolist()) if i in bad} if bad else {}
        return self._whole_block(frame, tokens, None, mine)

    def _fitting(self, held: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Block | None:
        """Return the block of rows of ids that become one sample each; None if some do not."""
        size = stops - starts
        if not int(size.min()):
            return None
        long = lost = NO_ROWS
        if int(size.max()) > self.context:
            if self.on_long != "truncate":
                return None
            long = np.flatnonzero(size > self.context)
            lost = size[long] - self.context
            size = np.minimum(size, self.context)
            stops = starts + size
        n = len(size)
        meta: dict[str, Column] = {"tokens": size, "bytes": size * self._id_bytes}
        block = Block(np.arange(n), np.zeros(n, np.int32), RaggedSpans(held, starts, stops), meta)
        block.long, block.lost = long, lost
        return block

    def _whole_block(
        self, frame: RowFrame, tokens: Ragged, weights: Ragged | None, bad: Bad
    ) -> Block:
        """Return the block of rows that are one document each."""
        lengths = tokens.lengths
        # The usual case: no row is removed or split.
        if not bad and int(lengths.min()) > 0 and int(lengths.max()) <= self.context:
            whole = Pieces(
                np.arange(len(lengths)), np.zeros(len(lengths), np.int32), lengths, tokens, weights
            )
            return self._block(frame, whole)
        return self._trimmed_block(frame, tokens, weights, bad)

    def _trimmed_block(
        self, frame: RowFrame, tokens: Ragged, weights: Ragged | None, bad: Bad
    ) -> Block:
        """Return the block of rows of which some must be removed, truncated or split."""
        lengths = tokens.lengths
        for i in np.flatnonzero(lengths == 0):
            bad.setdefault(int(i), "expected at least one token, got none")
        if self.on_long == "quarantine":
            bad = too_long(lengths, self.context) | bad
        keep = frame.record_bad(bad)
        lost = lost_tokens(lengths[keep], self.context, self.on_long)
        rows, lost = keep[lost > 0], lost[lost > 0]
        if self.on_long == "drop":
            keep = keep[lengths[keep] <= self.context]
        block = self._block(frame, split_rows(tokens, keep, self.context, self.on_long, weights))
        block.long, block.lost = frame.index[rows], lost
        return block

    def _grouped_block(
        self, frame: RowFrame, tokens: Ragged, weights: Ragged | None, bad: Bad
    ) -> Block:
        """Return the block of rows of several documents; documents that are too long are cut."""
        limits = Limits(self.context, self.room, self.on_long)
        samples = grouped_samples(frame, tokens, weights, bad, limits)
        row = samples.row
        meta: dict[str, Column] = {
            "tokens": samples.tokens.lengths,
            "bytes": samples.tokens.lengths * self._id_bytes,
        }
        for name in self._columns_of_meta:
            meta[name] = meta_rows(frame.table.column(HIDDEN + name), row, np.zeros_like(row))
        meta |= {name: column_by_document(frame.table, name, row) for name in self.document_meta}
        meta |= {LENGTHS: samples.lengths, PROMPTS: samples.prompts}
        part = np.zeros(len(row), np.int32)
        block = Block(frame.index[row], part, samples.tokens, meta, sorted(frame.bad))
        block.long, block.lost = frame.index[samples.long], samples.lost
        if samples.weights is not None:
            starts = samples.tokens.offsets[0] + np.concatenate(
                ([0], np.cumsum(samples.lengths.values))
            )
            sums = label_sums(samples.weights.values, starts[:-1])
            meta[LOSS_WEIGHTS] = Ragged(sums, samples.lengths.offsets)
            block.weights = Ragged(stored(samples.weights.values), samples.weights.offsets)
        return block

    def _block(self, frame: RowFrame, samples: Pieces) -> Block:
        """Return the block of samples, which are made from rows of the frame's table."""
        row, part, size = samples.row, samples.part, samples.size
        meta: dict[str, Column] = {"tokens": size, "bytes": size * self._id_bytes}
        for name in self._columns_of_meta:
            meta[name] = meta_rows(frame.table.column(HIDDEN + name), row, part)
        block = Block(frame.index[row], part, samples.tokens, meta, sorted(frame.bad))
        if (weights := samples.weights) is not None:
            sums = label_sums(weights.values, weights.offsets[:-1])
            meta[LOSS_WEIGHTS] = Ragged(sums, np.arange(len(row) + 1))
            block.weights = Ragged(stored(weights.values), weights.offsets)
            if self._cuts:
                meta[LOSS_RUNS] = runs_of(weights)
        if frame.images is not None:
            assert self._images is not None
            add_items(
                block,
                frame,
                meta_rows(frame.table.column(ITEM), row, part),
                self._images,
                self._image_totals,
            )
        return block

    def _row_stage_needs(self) -> list[tuple[Transform | None, str, Check]]:
        """Return (transform, column, check of its type) for columns that the row stage reads."""
        rest = self.transforms[self._row_stage_start :]
        needs: list[tuple[Transform | None, str, Check]] = []
        for t in rest:
            if not isinstance(t, Select):
                needs += [(t, name, check) for name, check in column_checks(t)]
        if not any(isinstance(t, ID_TRANSFORMS) for t in rest):
            needs.append((None, IDS, check_ids))
        return needs

    def _select_needed(self, frame: RowFrame) -> None:
        hidden = [name for name in frame.table.column_names if name.startswith(HIDDEN)]
        for t, name, check in self._needs:
            try:
                frame.drop_unfit(name, check, partial(named_reason, t))
            except Unfit as fault:
                frame.drop_all(named_reason(t, str(fault)))
                frame.table = frame.table.select([])
                return
        names = dict.fromkeys(name for _, name, _ in self._needs)
        if [*names, *hidden] != frame.table.column_names:
            frame.table = frame.table.select([*names, *hidden])

    def _refuse(self, t: Transform, problem: str, remedy: str = "") -> NoReturn:
        raise TransformError(self.source, repr(t), problem, remedy)

    def _run(self, position: int, frame: RowFrame, ids: RowIds | None) -> None:
        t = self.transforms[position]
        if not frame.table.num_rows:
            return
        self._running[threading.get_ident()] = t, frame, ids
        # The row stage (``ids`` is None) receives columns that are already checked.
        if ids is not None:
            for name, check in column_checks(t):
                frame.drop_unfit(name, check, partial(named_reason, t))
            if not frame.table.num_rows:
                return
        if isinstance(t, GroupedIds):
            encoder = None if self._encoders is None else self._encoders.of(position)
            run_grouped(frame, t, encoder)
        elif isinstance(t, (Tokenize, Chat)):
            assert self._encoders is not None
            self._encoders.run(position, frame)
        elif isinstance(t, Tokens):
            _use_ids(frame, t)
        elif isinstance(t, Select):
            made = any(isinstance(p, ID_TRANSFORMS) for p in self.transforms[:position])
            select_columns(frame, t.columns, made=[IDS] if made else [])
        elif isinstance(t, Images):
            run_images(frame, t, context=self.context, on_long=self.on_long)
        elif isinstance(t, Meta):
            self._meta(frame, t)
        elif isinstance(t, Filter):
            self._filter(frame, t)
        elif isinstance(t, Map):
            assert ids is not None, "a Map is user code and runs in the slice stage"
            self._map(frame, t, position, ids)

    def _meta(self, frame: RowFrame, t: Meta) -> None:
        if isinstance(t.value, str):
            column, bad = read_meta(frame.table, t.value)
        else:
            made = (
                run_each(frame, t, t.value, as_meta)
                if t.rows
                else run_whole(frame, t, t.value, meta_per_row(self.source, t))
            )
            column, bad = meta_values(made, t.name)
        frame.put(HIDDEN + t.name, meta_column(column))
        frame.drop(bad)

    def _filter(self, frame: RowFrame, t: Filter) -> None:
        results = (
            run_each(frame, t, t.fn, as_bool)
            if t.rows
            else run_whole(frame, t, t.fn, value_per_row(self.source, t, "b", "booleans"))
        )
        keep = np.asarray(results, bool)
        frame.dropped += len(keep) - int(keep.sum())
        frame.keep(keep)

    def _map(self, frame: RowFrame, t: Map, position: int, ids: RowIds) -> None:
        if t.rows:
            made = join_rows(
                run_each(
                    frame,
                    t,
                    t.fn,
                    as_row,
                    self._generators(frame, position, ids) if t.rng else None,
                )
            )
        else:
            made = run_whole(frame, t, t.fn, columns_per_row(self.source, t))
        check_map(self.source, self._given, position, made)
        if not frame.table.num_rows:
            return
        bad: Bad = {}
        columns = {
            name: frame.table.column(name)
            for name in frame.table.column_names
            if name.startswith(HIDDEN)
        }
        for name, values in made.items():
            columns[name], faults = from_values(values, name)
            bad = faults | bad
        frame.table = pa.table(columns)
        frame.drop({i: f"{t!r}: {reason}" for i, reason in bad.items()})

    def _generators(
        self, frame: RowFrame, position: int, ids: RowIds
    ) -> Iterator[np.random.Generator]:
        """Return one random generator per row, seeded by the identity of the row.

        A generator is therefore the same in any process and order.
        """
        keys = keyed_hash(
            key64("map", self.seed, self.source, position),
            ids.epoch,
            ids.file,
            ids.row[frame.index],
        )
        return (np.random.Generator(np.random.Philox(key=int(key))) for key in keys)


def _rebuild(
    source: str,
    transforms: tuple[Transform, ...],
    seed: int,
    context: int,
    on_long: str,
    room: int,
    contents: Mapping[int, str],
    cuts: bool,
) -> Pipeline:
    pipeline = Pipeline(
        source, transforms, seed=seed, context=context, on_long=on_long, room=room, cuts=cuts
    )
    pipeline.check_tokenizers(contents)
    return pipeline


def _use_ids(frame: RowFrame, t: Tokens) -> None:
    """Use the ids of a column, and the weights of another if the transform names one."""
    check_ids(frame.table, t.column)
    if t.column != IDS:
        frame.put(IDS, frame.table.column(t.column))
    if t.loss is not None:
        use_weights(frame, t.loss)
