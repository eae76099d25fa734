"""The draft of one source: its files opened, its columns judged, its documents measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from overlord.checks import describe_error
from overlord.discovery.column_roles import ColumnRoles, roles_of
from overlord.discovery.data_groups import DataGroup
from overlord.discovery.tokenizer_search import IMAGE_TOKENS, FoundTokenizer
from overlord.errors import OverlordError, SourceError
from overlord.job.job import Job, Source
from overlord.mesh import Batch
from overlord.observe.source_inspection import inspect_source
from overlord.observe.source_report import SourceReport
from overlord.sources.base import RawSlice, ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.files import Files
from overlord.sources.formats import DIRECTORY_SUFFIXES, FORMATS
from overlord.sources.index import Index, build_index, default_cache_dir
from overlord.transforms.base import Tokens
from overlord.transforms.chat import Chat
from overlord.transforms.document_groups import Pair
from overlord.transforms.images import Images
from overlord.transforms.tokenize import Tokenize

ROWS = 64  # rows whose values decide the roles of columns
HEAD_BYTES = 2**20  # bytes of a compressed file from which its expansion is measured
PACKED = {".gz": "gzip", ".zst": "zstd"}
UNCUT = 2**30  # a context that no sampled document exceeds


@dataclass(slots=True, kw_only=True)
class SourceDraft:
    """A proposed source: location, transforms, measurements, remarks."""

    name: str
    group: DataGroup
    uri: str | list[str]
    format: str = ""
    needs_format: bool = False  # the job must name the format
    roles: ColumnRoles = field(default_factory=ColumnRoles)
    transforms: list[dict[str, Any]] = field(default_factory=list)  # as in a job file
    report: SourceReport = field(default_factory=lambda: SourceReport(name=""))
    rows: float = 0.0  # estimated, all files
    notes: list[str] = field(default_factory=list)
    problem: str = ""  # the reason why the source is left out
    weight: float = 0.0

    @property
    def total_tokens(self) -> float:
        """The estimated tokens of all files."""
        report = self.report
        if not report.sampled_rows or not len(report.tokens):
            return 0.0
        return self.rows * len(report.tokens) / report.sampled_rows * float(report.tokens.mean())

    @property
    def has_images(self) -> bool:
        return any("images" in transform for transform in self.transforms)


def draft_source(group: DataGroup, name: str) -> SourceDraft:
    """Open a group of files and judge its columns. A failure becomes the draft's problem."""
    draft = SourceDraft(name=name, group=group, uri=group.files[0])
    try:
        _open(draft)
    except OverlordError as fault:
        draft.problem = str(fault)
    except Exception as fault:  # an unexpected error of one source must not hide the others
        draft.problem = describe_error(fault)
    draft.problem = draft.problem or draft.roles.problem
    return draft


def _open(draft: SourceDraft) -> None:
    draft.uri, draft.needs_format = location(draft.group)
    options = ReadOptions()
    given = draft.group.format if draft.needs_format else None
    index = build_index(draft.name, draft.uri, given, options, cache_dir=default_cache_dir())
    draft.format = index.format
    cache = OpenChunkCache(max_open=1)
    try:
        raw = ChunkReader(index, options, cache).slice(0, 0)
    finally:
        cache.close()
    if not raw.table.num_rows:
        reason = raw.bad[0][1] if raw.bad else "the file has no rows"
        raise SourceError(
            draft.name,
            f"expected rows, got none that can be read: {reason}",
            index.files[0].path,
            "check the format and the first lines of the file",
        )
    rows = raw.table.slice(0, ROWS).to_pylist()
    draft.rows = _estimated_rows(index, raw)
    draft.roles = roles_of(rows, tar=index.format == "tar")
    draft.notes += draft.roles.notes


def location(group: DataGroup) -> tuple[str | list[str], bool]:
    """Return the uri of a group, and whether the job must name the format.

    A folder or a pattern is used if it selects exactly the files of the group, else their list.
    """
    files = data_files(group)
    if not group.format:  # a URI
        return group.files[0], False
    if group.format == "mds":
        return group.folder, False
    whole = FORMATS[group.format].suffixes
    if not group.named and _selected(group.folder, whole) == set(group.files):
        return group.folder, _selected(group.folder, DIRECTORY_SUFFIXES) != set(group.files)
    if len(files) == 1:
        return files[0], False
    pattern = _pattern(files)
    return (files if pattern is None else pattern), False


def data_files(group: DataGroup) -> list[str]:
    """Return the files of a group that hold rows: an .idx or index.json only describes others."""
    described = (".idx", "/index.json")
    return [path for path in group.files if not path.lower().endswith(described)]


def _selected(folder: str, suffixes: Sequence[str]) -> set[str]:
    """Return the files that a source of this folder would read."""
    try:
        return {file.path for file in Files.resolve(folder, suffixes=suffixes)[1]}
    except SourceError:
        return set()


def _pattern(files: Sequence[str]) -> str | None:
    """Return a pattern that matches exactly these files of one folder; None if there is none."""
    folders = {path.rpartition("/")[0] for path in files}
    if len(folders) > 1:
        return None
    [folder] = folders
    names = [path.rpartition("/")[2] for path in files]
    start = _shared_start(names)
    end = _shared_start([name[::-1] for name in names])[::-1]
    end = end[max(0, end.find(".")) :] if "." in end else end
    if not start or set("*?[]") & set(folder + start + end):
        return None
    try:
        there = os.listdir(folder)
    except OSError:
        return None
    matching = [name for name in there if fnmatchcase(name, f"{start}*{end}")]
    return f"{folder}/{start}*{end}" if sorted(matching) == sorted(names) else None


def _shared_start(names: Sequence[str]) -> str:
    low, high = min(names), max(names)
    n = next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:n]


def _estimated_rows(index: Index, raw: RawSlice) -> float:
    """Return the number of raw rows of all files: from the index, or from the first slice."""
    if index.rows is not None:
        return float(index.rows)
    n, size = len(raw.row), float(index.files[0].size)
    if raw.last and int((index.chunks.file == 0).sum()) == 1:
        per_row = size / n  # the slice is the whole file
    elif index.row_unit == "row":
        per_row = raw.table.nbytes / n
    else:
        per_row = float(raw.row[-1] - raw.row[0]) / max(1, n - 1) / _expansion(index)
    return max(float(n), index.nbytes / max(per_row, 1e-9))


def _expansion(index: Index) -> float:
    """Return the decompressed bytes for each byte of the first file, measured at its beginning."""
    import pyarrow as pa

    file = index.files[0]
    codec = next((c for end, c in PACKED.items() if file.path.lower().endswith(end)), None)
    if codec is None:
        return 1.0
    with index.access.open(file) as handle:
        head = handle.read(min(file.size, HEAD_BYTES))
    stream, total = pa.CompressedInputStream(pa.BufferReader(head), codec), 0
    try:
        while block := stream.read(HEAD_BYTES):
            total += len(block)
    except (OSError, ValueError):  # the head ends inside a block
        pass
    return max(1.0, total / max(1, len(head)))


def add_transforms(
    draft: SourceDraft, tokenizer: FoundTokenizer | None, image_token: str | int | None
) -> None:
    """Set the transforms of a draft, or the problem that no transform fits."""
    roles = draft.roles
    if roles.pair is not None:
        _add_pair(draft, tokenizer)
    elif roles.tokens is not None:
        loss = {} if roles.loss is None else {"loss": roles.loss}
        draft.transforms = [{"tokens": {"column": roles.tokens, **loss}}]
    elif roles.messages is not None:
        assert tokenizer is not None, "the caller refuses text without a tokenizer"
        if not tokenizer.has_template:
            draft.problem = (
                f"expected a tokenizer with a chat template for the column {roles.messages!r}, got "
                f"{tokenizer.name} without one; give --tokenizer the folder of a chat model"
            )
            return
        tools = {} if roles.tools is None else {"tools": roles.tools}
        draft.transforms = [
            {"chat": {"tokenizer": tokenizer.name, "messages": roles.messages, **tools}}
        ]
    else:
        assert tokenizer is not None
        assert roles.text is not None
        end = {} if tokenizer.end is None else {"eos": tokenizer.end}
        draft.transforms = [{"tokenize": {"tokenizer": tokenizer.name, "text": roles.text, **end}}]
        if tokenizer.end is None:
            draft.notes.append("no token ends the documents: the tokenizer names none; set eos")
    if roles.images is not None:
        _add_images(draft, tokenizer, image_token)


def _add_pair(draft: SourceDraft, tokenizer: FoundTokenizer | None) -> None:
    """Add the transforms of pairs: a chosen and a rejected response."""
    roles = draft.roles
    prompt = {} if roles.prompt is None else {"prompt": roles.prompt}
    draft.transforms = [{"pair": {"chosen": "chosen", "rejected": "rejected", **prompt}}]
    if roles.pair == "tokens":
        return
    assert tokenizer is not None, "the caller refuses text without a tokenizer"
    end = {} if tokenizer.end is None else {"eos": tokenizer.end}
    if roles.pair == "text":
        draft.transforms.append({"tokenize": {"tokenizer": tokenizer.name, **end}})
    elif tokenizer.has_template:
        draft.transforms.append({"chat": {"tokenizer": tokenizer.name}})
    else:
        draft.problem = (
            f"expected a tokenizer with a chat template for pairs of conversations, got "
            f"{tokenizer.name} without one; give --tokenizer the folder of a chat model"
        )


def _add_images(
    draft: SourceDraft, tokenizer: FoundTokenizer | None, given: str | int | None
) -> None:
    """Add the transform of images; without a token for them, leave the source out."""
    column = draft.roles.images
    token: int | None = None
    if isinstance(given, int):
        token = given
    elif tokenizer is not None:
        name = given or tokenizer.token(IMAGE_TOKENS)
        token = None if name is None else tokenizer.engine.token_id(name)
    if token is None:
        what = f"the token {given!r}" if given is not None else "a token for images"
        draft.problem = (
            f"expected {what} in the tokenizer, since the column {column!r} holds images, got "
            "none; give --image-token ID or TOKEN, which each image replaces"
        )
        return
    draft.transforms.append({"images": {"column": column, "placeholder": token, "at": "start"}})


def measure(
    draft: SourceDraft, seed: int = 0, progress: Callable[[float], None] = lambda done: None
) -> None:
    """Measure lengths and bad rows of a draft; set its problem if no row becomes a sample.

    Images whose placeholders are in the text already are found here, and set ``at: marker``.
    """
    if draft.has_images and _has_markers(draft):
        draft.transforms[-1]["images"]["at"] = "marker"
    source = made_source(draft)
    job = Job(
        name="init",
        sources=[source],
        batch=Batch(tokens=UNCUT, context=UNCUT),
        seed=seed,
        on_long="truncate",
    )
    draft.report = inspect_source(source, job, progress=progress)
    if draft.report.failures:
        draft.problem = "; ".join(draft.report.failures)


def _has_markers(draft: SourceDraft) -> bool:
    """Return whether documents hold one marker for each image: then images replace them."""
    draft.transforms[-1]["images"]["at"] = "marker"
    source = made_source(draft)
    job = Job(name="init", sources=[source], batch=Batch(tokens=UNCUT, context=UNCUT))
    report = inspect_source(source, job)
    draft.transforms[-1]["images"]["at"] = "start"
    return not report.failures and report.bad_rows * 2 < report.sampled_rows


def made_source(draft: SourceDraft) -> Source:
    """Return the source of a draft. Raises JobError for a draft that is not valid."""
    made: list[Any] = []
    classes: Mapping[str, Any] = {
        "tokens": Tokens,
        "tokenize": Tokenize,
        "chat": Chat,
        "images": Images,
        "pair": Pair,
    }
    for transform in draft.transforms:
        [(kind, fields)] = transform.items()
        made.append(classes[kind](**fields))
    return Source(
        draft.name,
        draft.uri,
        format=draft.format if draft.needs_format else None,
        transforms=made,
        weight=draft.weight or 1.0,
    )


def median_length(draft: SourceDraft) -> float:
    """Return the median tokens of the sampled documents; 0 without any."""
    return float(np.median(draft.report.tokens)) if len(draft.report.tokens) else 0.0
