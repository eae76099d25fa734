"""Write the demo corpus: six sources in six formats, and a tokenizer trained on them.

Without the package tokenizers the sources hold token ids instead of text (formats.py). A stamp next
to the files records the parameters of the corpus. A later run with the same parameters reuses the
files.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlord.checks import pip_install
from overlord.demo.formats import DemoFormats, word_ids
from overlord.demo.texts import KINDS, texts_of
from overlord.errors import OverlordError, TransformError
from overlord.job.job import Job, Source
from overlord.mesh import Batch, ClientPlaceTree
from overlord.transforms.base import Tokens
from overlord.transforms.tokenize import Tokenize

END = "<|end|>"
TRAINING_CHARS = 2_000_000  # a third of the corpus; more takes seconds longer, for few new merges
FILES = 3  # files per source

Show = Callable[[str], None]
Row = str | list[int]  # a text, or its token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters of the demo corpus, and of the job that reads it."""

    seed: int = 7
    rows: int = 10_000  # most rows per source
    vocab: int = 8192
    ranks: int = 4
    samples: int = 128
    context: int = 8192
    microbatches: int = 2


def make_corpus(out: Path, shape: Shape, show: Show, formats: DemoFormats | None = None) -> bool:
    """Write corpus and tokenizer under ``out``; return False if they exist for these parameters."""
    formats = formats or DemoFormats.installed()
    stamp = {
        "version": 1,
        "seed": shape.seed,
        "rows": shape.rows,
        "vocab": shape.vocab,
        "python": platform.python_version(),
        **asdict(formats),
    }
    stamp_file = out / "corpus" / "made-from.json"
    if (
        stamp_file.is_file()
        and _read_json(stamp_file) == stamp
        and ((out / "tokenizer.json").is_file() or not formats.tokenizers)
    ):
        return False
    try:
        stamp_file.unlink(missing_ok=True)  # an interrupted run leaves no stamp
        training: list[str] = []
        for kind in KINDS:
            format = formats.format(kind)
            show(f"writing {kind.name}: {kind.what}, as {format}")
            texts = texts_of(kind, shape.seed, shape.rows)
            if not texts:
                raise OverlordError(
                    f"demo source {kind.name!r}: expected {kind.what}, got none; use a Python "
                    "installation that includes them"
                )
            rows = texts if formats.tokenizers else [word_ids(text, shape.vocab) for text in texts]
            write_rows(out / "corpus" / kind.name, format, formats.column(kind), rows)
            training += _some(texts, TRAINING_CHARS // len(KINDS))
        if formats.tokenizers:
            show(f"training a tokenizer of {shape.vocab} tokens")
            (out / "tokenizer.json").write_text(
                train_tokenizer(training, shape.vocab), encoding="utf-8"
            )
        stamp_file.write_text(json.dumps(stamp), encoding="utf-8")
    except OSError as fault:
        raise cannot_write(out, fault) from fault
    return True


def make_job(out: Path, shape: Shape, formats: DemoFormats | None = None) -> Job:
    """Return the job over the corpus under ``out``."""
    formats = formats or DemoFormats.installed()
    sources = []
    for kind in KINDS:
        column = formats.column(kind)
        to_ids = (
            Tokenize(str(out / "tokenizer.json"), text=column, eos=END)
            if formats.tokenizers
            else Tokens(column)
        )
        uri = str(out / "corpus" / kind.name / f"*.{formats.format(kind)}")
        sources.append(Source(kind.name, uri, weight=kind.weight, transforms=[to_ids]))
    batch = Batch(samples=shape.samples, microbatches=shape.microbatches, context=shape.context)
    place = ClientPlaceTree(dp=shape.ranks)
    # sync="step": the trainers of the demo wait for each other once per step.
    return Job(name="demo", sources=sources, batch=batch, place=place, sync="step", seed=shape.seed)


def later_mixture() -> dict[str, float]:
    """Return the weights of the sources for the second half of the run."""
    return {kind.name: kind.later for kind in KINDS}


def cannot_write(out: Path, fault: OSError) -> OverlordError:
    """Return the error for a folder that cannot be written; ``fault``: the cause."""
    return OverlordError(
        f"demo: cannot write to {out}: {fault.strerror or fault}; choose another folder with --out"
    )


def train_tokenizer(texts: Sequence[str], vocab: int) -> str:
    """Train a byte-level BPE tokenizer of ``vocab`` tokens; return the text of a tokenizer.json."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as fault:
        raise TransformError(
            "", "Tokenize", "expected the package tokenizers, got none", pip_install("text")
        ) from fault
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def write_rows(folder: Path, format: str, column: str, rows: Sequence[Row]) -> None:
    """Write the rows to ``FILES`` files of one format, in order.

    If there are too few rows, the first row fills the remaining files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    per_file = -(-len(rows) // FILES)
    for k in range(FILES):
        chosen = rows[k * per_file : (k + 1) * per_file] or rows[:1]
        _WRITERS[format](folder / f"part-{k}.{format}", column, chosen)


def _write_lines(path: Path, column: str, rows: Sequence[Row]) -> None:
    data = "".join(json.dumps({column: row}, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".zst":
        import pyarrow as pa

        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


def _write_parquet(path: Path, column: str, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: list(rows)}), path, row_group_size=256)


def _write_arrow(path: Path, column: str, rows: Sequence[Row]) -> None:
    import pyarrow as pa

    table = pa.table({column: list(rows)})
    with pa.ipc.new_file(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=128)


def _write_tar(path: Path, column: str, rows: Sequence[Row]) -> None:
    with tarfile.open(path, "w") as out:
        for i, text in enumerate(rows):
            data = str(text).encode()
            info = tarfile.TarInfo(f"{i:06d}.{column}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


_WRITERS: dict[str, Callable[[Path, str, Sequence[Row]], None]] = {
    "jsonl": _write_lines,
    "jsonl.gz": _write_lines,
    "jsonl.zst": _write_lines,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "tar": _write_tar,
}


def _some(texts: Sequence[str], chars: int) -> list[str]:
    """Return the first texts with about ``chars`` characters in all, each cut at a tenth of that.

    The limit of a text shrinks with the characters that are left.
    """
    out: list[str] = []
    for text in texts:
        out.append(text[: chars // 10])
        chars -= len(out[-1])
        if chars <= 0:
            break
    return out


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # an unreadable stamp counts as missing
