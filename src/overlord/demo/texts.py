"""Texts of the demo corpus: six kinds with very different lengths, from the Python installation.

Nothing is downloaded. The same installation and seed give the same texts in the same order.
"""

from __future__ import annotations

import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from overlord.hashing import key64, keyed_hash

# Most characters of a module, about 12,000 tokens: above the context of the demo, so that some
# documents are longer than the context.
LONGEST = 48_000
EXCLUDED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "__pycache__",
}
DEFINITION = re.compile(r"(?m)^(?=@|def |class |async def )")
EXPLAINED = re.compile(r'def ([a-z]\w+)\([^)]*\)[^:\n]*:\n\s+r?"""([^"\n]{12,160})')
MODULE_DOC = re.compile(r'\A(?:#[^\n]*\n|\s)*r?"""(.{200,}?)"""', re.DOTALL)
ABOUT = re.compile(r"METADATA|.*(LICEN[CS]E|NOTICE|COPYING)")
QUESTIONS = (
    "What does {} do?",
    "Tell me about {}.",
    "{}?",
    "When would I call {}?",
    "Is {} what I want here?",
    "Short one: {}?",
)
ANSWERS = (
    "{}",
    "Sure. {}",
    "{} That is all it does.",
    "In one line: {}",
    "{} See the manual for more.",
    "Good question. {}",
)
FOLLOW_UPS = (
    "Thanks!",
    "ok",
    "Can you say that again?",
    "Great, that is what I need.",
    "Hmm, not sure I follow.",
    "And the rest?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of text: its origin, its file format, and its weights in the mixture."""

    name: str
    format: str
    column: str
    what: str  # description
    weight: float  # weight in the first half of the run
    later: float  # weight in the second half
    texts: Callable[[int, int], Iterator[str]]  # arguments: seed, number of wanted rows


def stdlib(rows: int) -> Iterator[tuple[str, str]]:
    """Yield name and source text of modules of the standard library, in the order of paths.

    There are at most ``rows`` modules, or 8 if ``rows`` is smaller.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = (
        p
        for p in sorted(root.rglob("*.py"))
        if not EXCLUDED.intersection(p.relative_to(root).parts)
    )
    for _, path in zip(range(max(rows, 8)), found, strict=False):
        yield (
            ".".join(path.relative_to(root).with_suffix("").parts),
            path.read_text(encoding="utf-8", errors="ignore"),
        )


def _chat(seed: int, rows: int) -> Iterator[str]:
    explained = [
        (name, line.strip()) for _, text in stdlib(rows) for name, line in EXPLAINED.findall(text)
    ]
    random = np.random.Generator(np.random.Philox(key64("chat", seed)))
    for _ in range(min(rows, 6000)):
        lines = []
        for _ in range(1 + int(random.geometric(0.6))):
            name, summary = explained[int(random.integers(len(explained)))]
            question, answer = (
                choices[int(random.integers(len(choices)))] for choices in (QUESTIONS, ANSWERS)
            )
            lines += [
                f"user: {question.format(name + '()')}",
                f"assistant: {answer.format(summary)}",
            ]
        if random.random() < 0.4:
            lines.append(f"user: {FOLLOW_UPS[int(random.integers(len(FOLLOW_UPS)))]}")
        yield "\n".join(lines)


def _dictionary(seed: int, rows: int) -> Iterator[str]:
    named = [chr(c) for c in range(0x20, 0x3000) if unicodedata.name(chr(c), "")]
    for i in _shuffled("dictionary", seed, len(named))[: min(rows, 6000)]:
        c = named[i]
        yield f"{c}  U+{ord(c):04X}  {unicodedata.name(c).lower()}"


def _functions(seed: int, rows: int) -> Iterator[str]:
    return chain.from_iterable(DEFINITION.split(text)[1:] for _, text in stdlib(rows))


def _articles(seed: int, rows: int) -> Iterator[str]:
    from pydoc_data.topics import topics  # the language reference, as help() shows it

    yield from (topics[name] for name in sorted(topics))
    for name, text in stdlib(rows):
        if found := MODULE_DOC.match(text):
            yield f"{name}\n\n{found[1]}"


def _licences(seed: int, rows: int) -> Iterator[str]:
    """Yield licences and descriptions of installed packages, then the licence of Python."""
    root = Path(sysconfig.get_path("purelib"))
    found = (
        p for p in sorted(root.glob("*.dist-info/**/*")) if ABOUT.match(p.name) and p.is_file()
    )
    yield from (p.read_text(encoding="utf-8", errors="ignore") for p in found)
    own = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if own.is_file():
        yield own.read_text(encoding="utf-8", errors="ignore")


def _modules(seed: int, rows: int) -> Iterator[str]:
    return (f"# {name}\n{text[:LONGEST]}" for name, text in stdlib(rows))


KINDS = (
    Kind(
        name="chat",
        format="jsonl",
        column="text",
        what="short dialogues about functions",
        weight=34,
        later=24,
        texts=_chat,
    ),
    Kind(
        name="dictionary",
        format="jsonl.gz",
        column="entry",
        what="characters and their names",
        weight=18,
        later=16,
        texts=_dictionary,
    ),
    Kind(
        name="functions",
        format="parquet",
        column="code",
        what="functions of the standard library",
        weight=26,
        later=31,
        texts=_functions,
    ),
    Kind(
        name="articles",
        format="arrow",
        column="text",
        what="the language reference",
        weight=10,
        later=13,
        texts=_articles,
    ),
    Kind(
        name="licences",
        format="tar",
        column="txt",
        what="licences of installed packages",
        weight=5,
        later=5,
        texts=_licences,
    ),
    Kind(
        name="modules",
        format="jsonl.zst",
        column="source",
        what="whole modules",
        weight=7,
        later=11,
        texts=_modules,
    ),
)


def texts_of(kind: Kind, seed: int, rows: int) -> list[str]:
    """Return at most ``rows`` texts of a kind, shuffled, without empty texts and duplicates."""
    found = list(dict.fromkeys(t for t in kind.texts(seed, rows) if t.strip()))
    return [found[i] for i in _shuffled(kind.name, seed, len(found))[:rows]]


def _shuffled(name: str, seed: int, n: int) -> list[int]:
    order = np.argsort(keyed_hash(key64("demo", name, seed), np.arange(n)), kind="stable")
    return [int(i) for i in order]
