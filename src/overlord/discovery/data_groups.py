"""Division of the data files below some paths into sources, by folders, names and formats.

A folder with subfolders gives a source for each subfolder. Files of one folder that differ in their
number alone (``web-00000-of-00010``) belong together. No file is opened here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from overlord.sources.base import PAIR
from overlord.sources.formats import DIRECTORY_SUFFIXES, FORMATS, SUFFIXES
from overlord.sources.mds_index import NAME as MDS_INDEX

STEMS = 8  # names in one folder that become sources of their own; more are shards of one source
# Files next to data that describe it, and parts of tokenizers and models.
_DESCRIBING = re.compile(
    r"(readme|licen[cs]e|notice|changelog|requirements|citation|merges|vocab|added_tokens"
    r"|special_tokens_map|(.*_)?config|dataset_infos?|dataset_dict|state|metadata|croissant|package"
    r"|tokenizer|chat_template|.*\.index)(\.(txt|json|csv|tsv))?",
    re.IGNORECASE,
)
# Numbers of shards at the end of a name: part-00001, .00001-of-01024, _0.
_NUMBER = re.compile(r"[-_.]?(part|shard|chunk|split|file)?[-_.]?\d+([-_.]of[-_.]\d+)?$", re.I)
_SHARD = re.compile(r"(part|shard|chunk|split|file|data)?", re.I)
_MEGATRON_ENDS = ("_text_document", "_document")
HELD_OUT = re.compile(r"(^|[-_.])(test|valid|validation|val|eval|dev|heldout|held-out)([-_.]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroup:
    """Files that belong to one source: paths, the name of the source, the name of the format."""

    name: str
    format: str
    folder: str  # the folder that holds all of them
    files: tuple[str, ...]  # absolute paths or URIs, sorted
    named: bool = False  # the user named the files, not their folder

    @property
    def held_out(self) -> bool:
        """Whether the name says that the data are for evaluation."""
        return bool(HELD_OUT.search(self.name.lower()))


@dataclass(slots=True)
class Listing:
    """Groups of data files, files that were left out, and folders that could not be listed."""

    groups: list[DataGroup] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)  # path -> reason
    problems: dict[str, str] = field(default_factory=dict)  # path -> reason


def format_by_name(path: str) -> str:
    """Return the format that the name of a file selects; an empty text if none does."""
    name = path.rpartition("/")[2].lower()
    if name == MDS_INDEX:
        return "mds"
    return next((f.name for f in FORMATS.values() if name.endswith(f.suffixes or ("\0",))), "")


def describes_data(path: str) -> bool:
    """Return whether the name of a file is one of those that describe data."""
    name = path.rpartition("/")[2]
    if name == MDS_INDEX or not name.lower().endswith((".txt", ".json", ".csv", ".tsv")):
        return False
    return bool(_DESCRIBING.fullmatch(name))


def clean_name(text: str) -> str:
    """Return a text as the name of a source; ``data`` if nothing is left of it."""
    return re.sub(r"[^\w.]+", "-", text).strip("-._") or "data"


def stem_of(path: str, format: str) -> str:
    """Return the name of a file without suffix and shard number; empty if nothing else is left."""
    name = path.rpartition("/")[2]
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    if format == "megatron":
        for end in _MEGATRON_ENDS:
            name = name.removesuffix(end)
    short = _NUMBER.sub("", name)
    return "" if _SHARD.fullmatch(short) else short


def divide(folder: str, name: str, files: Sequence[str]) -> list[DataGroup]:
    """Return the sources of the data files below ``folder``, whose own source is ``name``."""
    below = {path: PurePosixPath(path).relative_to(folder).parts for path in files}
    shards = _mds_roots(folder, below)
    if folder in shards:
        return _grouped(folder, {name: list(files)})
    here = [path for path, parts in below.items() if len(parts) == 1]
    children: dict[str, list[str]] = {}
    for path, parts in below.items():
        if len(parts) > 1:
            children.setdefault(parts[0], []).append(path)
    if not here and len(children) == 1:  # a chain of folders: the last one has the name
        [(child, inside)] = children.items()
        return divide(f"{folder}/{child}", child, inside)
    by_name: dict[str, list[str]] = {}
    for path, stem in _stems(here, name, bool(children)):
        by_name.setdefault(stem, []).append(path)
    for child in sorted(children):
        by_name.setdefault(child, []).extend(children[child])
    return _grouped(folder, by_name)


def _mds_roots(folder: str, below: dict[str, tuple[str, ...]]) -> set[str]:
    return {
        path.rpartition("/")[0]
        for path in below
        if path.endswith(f"/{MDS_INDEX}") and path.startswith(folder)
    }


def _stems(files: Sequence[str], name: str, among_folders: bool) -> Iterable[tuple[str, str]]:
    """Yield each file of one folder with the name of its source."""
    stems = {path: stem_of(path, format_by_name(path)) for path in files}
    several = len(set(stems.values())) > STEMS
    for path in files:
        yield path, name if several or not stems[path] else stems[path]


def _grouped(folder: str, by_name: dict[str, list[str]]) -> list[DataGroup]:
    """Return a group for each name and format; formats differ in their names if there are two."""
    found = []
    for name, paths in by_name.items():
        formats: dict[str, list[str]] = {}
        for path in sorted(paths):
            formats.setdefault(format_by_name(path), []).append(path)
        for format, inside in sorted(formats.items()):
            label = name if len(formats) == 1 else f"{name}-{format}"
            found.append(
                DataGroup(
                    name=clean_name(label),
                    format=format,
                    folder=_common_folder(inside),
                    files=tuple(inside),
                )
            )
    return found


def _common_folder(paths: Sequence[str]) -> str:
    folders = {path.rpartition("/")[0] for path in paths}
    return os.path.commonpath(folders) if len(folders) > 1 else next(iter(folders))


def usable(paths: Iterable[str], ignored: dict[str, str]) -> list[str]:
    """Return the data files among the files below a folder; put the others into ``ignored``.

    Tables, texts and plain ``.json`` files are data only if no other data are in their folder,
    below it or above it. Halves of Megatron datasets without the other half belong to other tools.
    """
    known = [path for path in paths if format_by_name(path)]
    plain = [path for path in known if not describes_data(path)]
    whole = _without_halves(plain, ignored)
    strong = [path for path in whole if _selects_itself(path)]
    for path in known:
        if path not in plain:
            ignored[path] = "its name says that it describes data"
    holding = {path.rpartition("/")[0] for path in strong}  # folders with data, and those above
    above = {str(parent) for folder in holding for parent in PurePosixPath(folder).parents}
    kept, selected = [], set(strong)
    for path in whole:
        folder = PurePosixPath(path).parent
        if path in selected or _is_index_of(path, strong):
            kept.append(path)
        elif path.rpartition("/")[2] == MDS_INDEX:
            ignored[path] = "it describes no MDS shards below its folder"
        elif str(folder) in above or not holding.isdisjoint(map(str, (folder, *folder.parents))):
            ignored[path] = "tables, texts and .json files next to other data usually describe it"
        else:
            kept.append(path)
    return kept


def _selects_itself(path: str) -> bool:
    """Return whether files of this kind are read when their folder is named, as in a job."""
    name = path.lower()
    return name.endswith(DIRECTORY_SUFFIXES) and not name.endswith(".json")


def _is_index_of(path: str, data: Sequence[str]) -> bool:
    """Return whether a file is the index.json of MDS shards below its folder."""
    folder, _, name = path.rpartition("/")
    return name == MDS_INDEX and any(
        other.startswith(f"{folder}/") and format_by_name(other) == "mds" for other in data
    )


def _without_halves(paths: Sequence[str], ignored: dict[str, str]) -> list[str]:
    halves = {path for path in paths if path.lower().endswith(PAIR)}
    kept = []
    for path in paths:
        other = path[:-4] + {".bin": ".idx", ".idx": ".bin"}.get(path[-4:].lower(), "")
        if path in halves and other not in halves:
            ignored[path] = f"a Megatron dataset needs {other.rpartition('/')[2]} next to it"
        else:
            kept.append(path)
    return kept


def unique_names(groups: Iterable[DataGroup]) -> list[str]:
    """Return different names: of equal ones the later get the folder above, or a number."""
    taken: set[str] = set()
    names = []
    for group in groups:
        above = PurePosixPath(group.folder).parent.name
        options = [group.name, clean_name(f"{above}-{group.name}")]
        options += [f"{group.name}-{n}" for n in range(2, len(taken) + 3)]
        name = next(option for option in options if option not in taken)
        taken.add(name)
        names.append(name)
    return names
