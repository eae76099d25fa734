"""The language of the documentation: spelling, the length of sentences and of pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parents[2]
WORDS = 25  # of a sentence, at most
LINES = 400  # of a page, at most
# Pages of results and records of decisions stay as they were written.
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.parent.name != "decisions"
)
names_of = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, items and cells of a page, without blocks of code and headings."""
    found: list[str] = []
    lines: list[str] = []
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [*text.splitlines(), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) +", line)
        row = line.lstrip().startswith(("|", "#", "!!!", "???", ":::", "<"))
        code = line.startswith("    ") and not lines
        if item or row or code or not line.strip():
            found += [" ".join(lines)] if lines else []
            lines = []
        if line.lstrip().startswith("|"):
            found += [cell.strip() for cell in line.strip().strip("|").split("|")]
        elif line.strip() and not row and not code:
            lines.append(line[item.end() :] if item else line.strip())
    return found


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph; a span of code counts as a word."""
    plain = re.sub(r"`[^`]*`", "code", paragraph)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return re.split(r"(?<=[.:;!?])\**\s+", plain)


def words(text: str) -> set[str]:
    """Return the words of prose, in lower case."""
    found = set()
    for paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`|https?://\S+", " ", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        found |= {w.strip("'").lower() for w in re.findall(r"\b[A-Za-z][a-z']+\b", plain)}
    return {word.removesuffix("'s") for word in found}


@names_of
def test_a_sentence_has_at_most_25_words(page: Path):
    long = [
        sentence
        for paragraph in paragraphs(page.read_text(encoding="utf-8"))
        for sentence in sentences(paragraph)
        if len(sentence.split()) > WORDS
    ]
    assert long == []


@names_of
def test_a_page_has_at_most_400_lines(page: Path):
    if page.name != "CHANGELOG.md":
        assert len(page.read_text(encoding="utf-8").splitlines()) <= LINES


@names_of
def test_the_text_of_a_link_to_a_page_is_a_title_and_not_a_file_name(page: Path):
    if page.is_relative_to(ROOT / "docs"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"\[[\w./-]+\.md[^\]]*\]\([^)]*\)", text) == []


def test_the_readme_is_short_and_begins_with_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900
    assert "```python" in "\n".join(text.splitlines()[:12]), "code on the first screen"


@pytest.fixture(scope="module")
def dictionary() -> SpellChecker:
    checker = SpellChecker()
    checker.word_frequency.load_words((ROOT / "docs" / "words.txt").read_text().split())
    return checker


@names_of
def test_words_are_spelt_as_in_the_dictionary_or_the_list_of_terms(
    page: Path, dictionary: SpellChecker
):
    unknown = dictionary.unknown(words(page.read_text(encoding="utf-8")))
    assert sorted(unknown) == [], "mend them, or add a term of the field to docs/words.txt"


def test_long_sentences_and_misspelt_words_are_found(dictionary: SpellChecker):
    text = f"# Title\n\n- {'word ' * 26}here.\n- A shrot `itme`.\n\n| a cell | {'more ' * 26} |\n"
    long = [s for p in paragraphs(text) for s in sentences(p) if len(s.split()) > WORDS]
    assert [len(s.split()) for s in long] == [27, 26]
    assert dictionary.unknown(words(text)) == {"shrot"}
