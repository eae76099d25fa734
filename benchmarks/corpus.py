"""The data of the benchmarks: many Parquet sources, and a tokenizer trained on them.

It is made once from a seed and reused. A source is about 3 MiB of text in four row groups over two
files. Document lengths are skewed, as in the corpora of the Overlord paper (arXiv 2504.09844): a
median of 110 words (160 tokens), one in a hundred near 8k tokens, the longest near 32k. Column
``text`` feeds the tokenized job; column ``tokens`` (one id per word) feeds the null job, in which
only the work of the loader itself remains.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VERSION = 1  # raise it when anything below changes what is written
SOURCE_BYTES = 3 * 2**20
FILES, GROUPS_PER_FILE = 2, 2
VOCABULARY = 24_000  # of the tokenizer
N_WORDS = 40_000
COMMON_WORDS = 300  # shared by all sources; the rarer ones are shifted from source to source
MEDIAN_WORDS, SIGMA, LONGEST_WORDS = 110, 1.71, 22_000  # a word is about 1.5 tokens
# Training text of the tokenizer: drawn like a source, and not part of the corpus.
TRAINING_SOURCES = range(1_000_000, 1_000_004)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of one source, and its sizes."""

    name: str
    files: tuple[str, ...]  # sorted; row groups are numbered across the files
    weight: float
    rows: int
    words: int  # of all rows: equal to the ids of column `tokens`

    @property
    def glob(self) -> str:
        return str(Path(self.files[0]).parent / "*.parquet")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sources and tokenizer under one folder."""

    folder: Path
    sources: tuple[SourceFiles, ...]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def weights(self) -> np.ndarray:
        weights = np.array([source.weight for source in self.sources])
        return weights / weights.sum()


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "overlord-benchmark"


def weight_of(number: int) -> float:
    """Return weights: a few sources dominate, as in real mixtures, and every run meets them all."""
    return 1.0 / (1 + number) ** 0.5


def make_corpus(
    root: Path, n_sources: int, seed: int, on_progress: Callable[[str, int, int], None]
) -> Corpus:
    """Return the corpus of n sources; sources of an earlier run are reused.

    Source i does not depend on n.
    """
    folder = root / f"v{VERSION}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    words: Words | None = None
    for number in range(n_sources):
        if not (folder / name_of(number) / "done.json").exists():
            words = words or Words.invent(seed)
            write_source(folder / name_of(number), words, number, seed)
        on_progress("sources", number + 1, n_sources)
    if not (folder / "tokenizer.json").exists():
        on_progress("tokenizer", 0, 1)
        train_tokenizer(folder / "tokenizer.json", words or Words.invent(seed), seed)
    on_progress("tokenizer", 1, 1)
    return open_corpus(folder, n_sources)


def open_corpus(folder: Path, n_sources: int, *, equal: bool = False) -> Corpus:
    sources = []
    for number in range(n_sources):
        done = json.loads((folder / name_of(number) / "done.json").read_text())
        files = tuple(str(folder / name_of(number) / name) for name in done["files"])
        sources.append(
            SourceFiles(
                name_of(number),
                files,
                1.0 if equal else weight_of(number),
                done["rows"],
                done["words"],
            )
        )
    return Corpus(folder, tuple(sources))


def name_of(number: int) -> str:
    return f"source{number:03d}"


# ---- text

ONSETS, VOWELS, ENDS = (
    text.split(" ")
    for text in (
        "b b c c d d f g h h j l l m m n n p p r r s s t t v w w br ch cl cr dr fl fr gr "
        "pl pr sh sl sp st str th tr wh",
        "a a e e e i i o o u u ai ea ou",
        # three empty ones first: many words end in a vowel
        "   n n r r s s t t l d m ck nd ng nt st tion ly",
    )
)
CAPITAL, COMMA, STOP = 1, 2, 4  # the number of a spelling is a sum of these


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """An invented language: words by decreasing frequency, and every spelling as bytes.

    A text is then one gather.
    """

    letters: np.ndarray  # uint8: all spellings, one after another, each followed by a space
    # int64, one more than spellings; spelling s of word w has the number s * N_WORDS + w.
    starts: np.ndarray
    cumulative: np.ndarray  # float64: Zipf's law over the words

    @staticmethod
    def invent(seed: int) -> Words:
        rng = np.random.default_rng([seed, 7])
        words: dict[str, None] = {}
        while len(words) < N_WORDS:  # a dict: in the order of their making, and each once
            # Frequent words are short, as in English: the number of syllables grows with the rank.
            syllables = 1 + int(rng.integers(0, 1 + (len(words) > 200) + (len(words) > 8000)))
            parts = [
                ONSETS[rng.integers(len(ONSETS))] + VOWELS[rng.integers(len(VOWELS))]
                for _ in range(syllables)
            ]
            word = "".join(parts) + ENDS[rng.integers(len(ENDS))]
            words[word if rng.random() > 0.02 else str(rng.integers(0, 3000))] = None
        spellings = [
            _spell(word, style) for style in range(CAPITAL + COMMA + STOP) for word in words
        ]
        starts = np.zeros(len(spellings) + 1, np.int64)
        np.cumsum([len(s) for s in spellings], out=starts[1:])
        frequency = 1.0 / (np.arange(N_WORDS) + 2.7) ** 1.1
        return Words(
            np.frombuffer("".join(spellings).encode(), np.uint8),
            starts,
            np.cumsum(frequency) / frequency.sum(),
        )

    def draw(self, rng: np.random.Generator, n: int, shift: int) -> np.ndarray:
        """Draw n word numbers by frequency; ``shift`` gives each source rare words of its own."""
        drawn = np.searchsorted(self.cumulative, rng.random(n)).clip(max=N_WORDS - 1)
        rare = COMMON_WORDS + (drawn + shift) % (N_WORDS - COMMON_WORDS)
        return np.where(drawn < COMMON_WORDS, drawn, rare)

    def spell(
        self, rng: np.random.Generator, words: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of all documents as bytes, and the end of each document.

        ``ends``: one past the last word of each document.
        """
        chance = rng.random(len(words))
        style = np.where(chance < 0.07, STOP, np.where(chance < 0.14, COMMA, 0))
        style[ends - 1] = STOP
        style[1:] += CAPITAL * (style[:-1] >= STOP)
        style[0] += CAPITAL
        spelling = style * N_WORDS + words
        sizes = self.starts[spelling + 1] - self.starts[spelling]
        stops = np.cumsum(sizes)
        text = self.letters[
            np.arange(stops[-1]) + np.repeat(self.starts[spelling] - (stops - sizes), sizes)
        ]
        text[stops[ends - 1] - 1] = ord("\n")  # in place of the last space
        return text, stops[ends - 1]


def _spell(word: str, style: int) -> str:
    word = word.capitalize() if style & CAPITAL else word
    return word + (". " if style & STOP else ", " if style & COMMA else " ")


def draw_lengths(rng: np.random.Generator, n_words: int) -> np.ndarray:
    """Draw log-normal document lengths that sum to ``n_words``."""
    drawn = (
        rng.lognormal(np.log(MEDIAN_WORDS), SIGMA, size=n_words // 100)
        .astype(np.int64)
        .clip(4, LONGEST_WORDS)
    )
    sums = np.cumsum(drawn)
    n = int(np.searchsorted(sums, n_words)) + 1
    lengths = drawn[:n]
    lengths[-1] -= max(0, int(sums[n - 1]) - n_words)
    return lengths


def documents(words: Words, number: int, seed: int) -> pa.Table:
    """Return all rows of one source."""
    rng = np.random.default_rng([seed, 11, number])
    lengths = draw_lengths(rng, int(SOURCE_BYTES / 5.9))  # 5.9 bytes per word
    ends = np.cumsum(lengths)
    drawn = words.draw(rng, int(ends[-1]), shift=number * 97)
    text, text_ends = words.spell(rng, drawn, ends)
    offsets = [np.concatenate([[0], e]).astype(np.int32) for e in (text_ends, ends)]
    texts = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets[0]), pa.py_buffer(text))
    ids = pa.ListArray.from_arrays(pa.array(offsets[1]), pa.array(drawn.astype(np.int32)))
    return pa.table({"text": texts, "tokens": ids})


# ---- files


def write_source(folder: Path, words: Words, number: int, seed: int) -> None:
    """Write the files, then the note that they are complete.

    A later run does not trust the files of an interrupted run.
    """
    folder.mkdir(exist_ok=True)
    table = documents(words, number, seed)
    # Split by words, not by rows, so that a long document does not make a row group huge.
    ends = np.cumsum(table["tokens"].combine_chunks().value_lengths().to_numpy())
    cuts = [
        0,
        *np.searchsorted(
            ends, ends[-1] * np.arange(1, FILES * GROUPS_PER_FILE) / (FILES * GROUPS_PER_FILE)
        ),
        len(table),
    ]
    names = []
    for f in range(FILES):
        names.append(f"part{f}.parquet")
        mine = cuts[f * GROUPS_PER_FILE : (f + 1) * GROUPS_PER_FILE + 1]
        with pq.ParquetWriter(folder / names[-1], table.schema, use_dictionary=False) as writer:
            for start, stop in pairwise(mine):
                writer.write_table(table.slice(start, stop - start), row_group_size=len(table))
    note = {"files": names, "rows": len(table), "words": int(ends[-1]), "version": VERSION}
    part = folder / "done.part"
    part.write_text(json.dumps(note))
    os.replace(part, folder / "done.json")


def train_tokenizer(path: Path, words: Words, seed: int) -> None:
    """Train a byte-level BPE tokenizer, as current models use it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(words, seed), trainer)
    part = path.with_suffix(".part")
    tokenizer.save(str(part))
    os.replace(part, path)


def _training_text(words: Words, seed: int) -> Iterator[Sequence[str]]:
    for number in TRAINING_SOURCES:
        yield documents(words, number, seed)["text"].to_pylist()
