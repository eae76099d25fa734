"""Search for a tokenizer: in the named paths, next to them, in the working directory, in a cache.

A tokenizer is chosen only if one place has exactly one. Several are an error that lists them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlord.errors import JobError, OverlordError
from overlord.transforms.chat_content import DEFAULT, read_chat_tokenizer
from overlord.transforms.tokenizer_content import content_digest, is_name, read_content
from overlord.transforms.tokenizer_engines import Engine, load_engine

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
SHOWN = 8  # most tokenizers that an error lists
DEMO = "overlord-demo"  # folder of ``overlord demo``, whose tokenizer fits no other text
DEPTH = 3  # folders below a path that are searched
# Tokens that models replace by images, and tokens that end documents.
IMAGE_TOKENS = (
    "<|image_pad|>",
    "<image>",
    "<|image|>",
    "<image_soft_token>",
    "<image_pad>",
    "[IMG]",
    "<IMG_CONTEXT>",
    "<|imgpad|>",
)
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "<|eos|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokenizer:
    """A tokenizer: its path or name, the place where it was found, and its properties."""

    name: str  # an absolute path, or a name on the Hugging Face Hub
    place: str
    end: str | None = None  # the token that ends documents
    has_template: bool = False
    engine: Engine = field(repr=False, compare=False)

    def token(self, names: Iterable[str]) -> str | None:
        """Return the first of these tokens that the vocabulary has."""
        return next((name for name in names if self.engine.token_id(name) is not None), None)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The tokenizer, or None with the places that were searched and the candidates there."""

    tokenizer: FoundTokenizer | None
    searched: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()


def find_tokenizer(given: str | None, paths: Sequence[str]) -> SearchResult:
    """Return the given tokenizer, or the only one in the first place that has one.

    Raises JobError if the given one cannot be loaded.
    """
    if given is not None:
        local = os.path.exists(os.path.expanduser(given)) or not is_name(given)
        name = os.path.abspath(os.path.expanduser(given)) if local else given
        return SearchResult(_load(name, "--tokenizer"))
    searched = []
    for place, names in _places(paths):
        searched.append(place)
        distinct = _distinct(names)
        if len(distinct) > 1:
            return SearchResult(None, tuple(searched), tuple(distinct))
        if distinct:
            return SearchResult(_load(distinct[0], place), tuple(searched))
    return SearchResult(None, tuple(searched))


def _load(name: str, place: str) -> FoundTokenizer:
    try:
        content = read_content(name, "")
        engine = load_engine(content, name, "")
        templates = read_chat_tokenizer(name).templates
    except OverlordError as fault:
        raise JobError([str(fault)], place) from fault
    named = dict(templates.tokens or ())
    ends = (named["eos_token"],) if "eos_token" in named else END_TOKENS
    end = next((token for token in ends if engine.token_id(token) is not None), None)
    return FoundTokenizer(
        name=name,
        place=place,
        end=end,
        has_template=templates.text(DEFAULT) is not None,
        engine=engine,
    )


def _places(paths: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    local = [os.path.abspath(os.path.expanduser(p)) for p in paths if "://" not in p]
    folders = [path for path in local if os.path.isdir(path)]
    yield "the given paths", [name for folder in folders for name in _below(folder)]
    above = list(dict.fromkeys(os.path.dirname(path) for path in local))
    yield "the folders next to them", [name for folder in above for name in _inside(folder)]
    yield "the working directory", _inside(os.getcwd())
    yield "the cache of the Hugging Face Hub", _cached()


def _below(folder: str) -> list[str]:
    """Return the tokenizers in a folder and its subfolders."""
    found = []
    for at, folders, _ in os.walk(folder):
        depth = len(Path(at).relative_to(folder).parts)
        folders[:] = sorted(n for n in folders if n[0] != ".") if depth < DEPTH else []
        found += _here(at)
    return found


def _inside(folder: str) -> list[str]:
    """Return the tokenizers in a folder and directly below it, without that of the demo."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    below = [f"{folder}/{name}" for name in names if name[0] != "." and name != DEMO]
    return [name for at in [folder, *filter(os.path.isdir, below)] for name in _here(at)]


def _here(folder: str) -> list[str]:
    """Return the tokenizer of one folder: the folder itself if it has templates, else the file."""
    file = next((name for name in FILES if os.path.isfile(f"{folder}/{name}")), None)
    if file is None:
        return []
    config = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
    whole = any(os.path.isfile(f"{folder}/{name}") for name in config)
    return [folder if whole else f"{folder}/{file}"]


def _cached() -> list[str]:
    """Return the names of models in the local cache of the Hub that have a tokenizer.json."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    try:
        files = sorted(hub.glob("models--*/snapshots/*/tokenizer.json"))
    except OSError:
        return []
    models = (file.parents[2].name.removeprefix("models--") for file in files)
    return list(dict.fromkeys(model.replace("--", "/") for model in models))


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names whose contents differ; one that cannot be read counts by its name."""
    found: dict[str, str] = {}
    for name in names:
        try:
            key = content_digest(name)
        except OverlordError:
            key = name
        found.setdefault(key, name)
    return list(found.values())


def missing_tokenizer(result: SearchResult, sources: Sequence[str]) -> JobError:
    """Return the error for sources that need a tokenizer, with what was searched and a remedy."""
    who = ", ".join(sources[:SHOWN])
    who += f" and {len(sources) - SHOWN} more" * (len(sources) > SHOWN)
    remedy = (
        "give one: --tokenizer PATH of a tokenizer.json, a sentencepiece model or a folder, "
        "--tokenizer OWNER/MODEL of the Hugging Face Hub, or --tokenizer tiktoken:NAME; data that "
        "hold token ids already need none"
    )
    if result.candidates:
        shown = ", ".join(result.candidates[:SHOWN])
        more = f" and {len(result.candidates) - SHOWN} more" * (len(result.candidates) > SHOWN)
        problem = (
            f"expected one tokenizer for the text of {who}, got {len(result.candidates)} in "
            f"{result.searched[-1]}: {shown}{more}; choose one with --tokenizer"
        )
    else:
        problem = (
            f"expected a tokenizer for the text of {who}, got none in "
            f"{', '.join(result.searched)}; {remedy}"
        )
    return JobError([problem], "init")
