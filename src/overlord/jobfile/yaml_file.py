"""Reading and writing of a job as one YAML file, whose keys are the fields of the Python classes.

The file is only data: it cannot import code, and functions come only from ``register_function``.
One ``JobError`` lists every problem of the file with its full key, including those that the classes
report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import Job, Source
from overlord.job.model import Model
from overlord.jobfile.functions import (
    REGISTER,
    qualified_name,
    registered_function,
    registered_names,
    strategy_named,
)
from overlord.jobfile.mixture import invalid_schedule, read_mixture, write_mixture
from overlord.jobfile.stages import (
    changed_fields,
    read_batch,
    read_stages,
    write_batch,
    write_stages,
)
from overlord.jobfile.yaml_scalars import Dumper, Loader, short_repr
from overlord.mesh import Batch, ClientPlaceTree
from overlord.transforms.base import Filter, Map, Meta, Select, Tokens
from overlord.transforms.chat import TEMPLATE_SUFFIX, Chat
from overlord.transforms.document_groups import GROUPED, Group, Pair
from overlord.transforms.fill_in_middle import FillInMiddle
from overlord.transforms.images import Images
from overlord.transforms.tokenize import Tokenize
from overlord.transforms.tokenizer_content import is_name
from overlord.uris import is_uri, uri_problems

_TRANSFORMS: dict[str, Any] = {
    "tokenize": Tokenize,
    "chat": Chat,
    "tokens": Tokens,
    "map": Map,
    "filter": Filter,
    "select": Select,
    "meta": Meta,
    "images": Images,
    "fill_in_middle": FillInMiddle,
    "pair": Pair,
    "group": Group,
}


def read_job(path: str | Path) -> Job:
    """Return the job of a YAML file; raise one ``JobError`` with all problems of the file.

    Relative paths are relative to the folder of the file.
    """
    where = str(path)
    if is_uri(where):
        raise JobError(
            ["expected a file on this machine, got a URI; copy the file to this machine"],
            "job file",
        )
    _refuse_data(where)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as fault:
        problem = f"could not be read: {fault.strerror or fault}; give the path of a job file"
        raise JobError([problem], where) from fault
    except UnicodeDecodeError as fault:
        problem = (
            f"expected a job file as text, got a file that is not UTF-8: {fault.reason} at "
            f"byte {fault.start}"
        )
        raise JobError([problem], where) from fault
    reader = _Reader(os.path.dirname(os.path.abspath(where)))
    job = reader.read(text)
    if job is None or reader.problems:
        raise JobError(reader.problems, where)
    return job


def _refuse_data(where: str) -> None:
    """Raise ``JobError`` for a directory, or for a name with the suffix of a data file."""
    from overlord.sources.formats import SUFFIXES

    if os.path.isdir(where):
        raise JobError(
            [
                f"expected a job file, got a directory; `overlord inspect {where}` lists "
                "the data in it"
            ],
            where,
        )
    if where.lower().endswith(SUFFIXES) and not where.lower().endswith(".json"):
        raise JobError(
            [
                f"expected a job file (YAML), got data; `overlord inspect {where}` shows "
                "it and suggests a job file"
            ],
            where,
        )


def write_job(job: Job) -> str:
    """Return the job as YAML text, without fields that have their default.

    Paths become absolute, so that the text is valid in every folder. Raise ``JobError`` for values
    that a file cannot hold.
    """
    writer = _Writer()
    plain = writer.job(job)
    if writer.problems:
        raise JobError(writer.problems, f"job {job.name!r} cannot be written as YAML")
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=140)


class _Reader:
    """Builder of the objects of a job file, which collects all their problems."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def read(self, text: str) -> Job | None:
        """Return the job of a text, or None if there is none; ``problems`` has all problems.

        A returned job is valid only if ``problems`` is empty.
        """
        plain = self._parse(text)
        if not isinstance(plain, dict):
            if not self.problems:
                self.problems.append(
                    f"expected a mapping with name, sources and batch, got {short_repr(plain)}"
                )
            return None
        known = self._known(plain, Job, "")
        place = (
            self._object(ClientPlaceTree, plain["place"], "place")
            if "place" in plain
            else ClientPlaceTree()
        )
        batch = (
            read_batch(plain["batch"], "batch", self._object, self.problems)
            if "batch" in plain
            else None
        )
        sources = self._sources(plain["sources"]) if "sources" in plain else []
        # Replacements of invalid values, so that Job still checks all other values.
        stand_ins = {
            "place": place or ClientPlaceTree(),
            "batch": batch or Batch(samples=1, context=2 * (place.cp if place else 1)),
            "sources": sources or [Source("?", "?")],
        }
        given = {
            key: value for key, value in known.items() if key not in ("place", "batch", "sources")
        }
        if (
            "mixture" in given
            and (mixture := read_mixture(given["mixture"], "mixture", self.problems))
            is not invalid_schedule
        ):
            given["mixture"] = mixture
        elif "mixture" in given:
            del given["mixture"]
        if given.get("stages") is not None:
            given["stages"] = read_stages(given["stages"], self._object, self.problems)
        if not sources:  # a mixture would name unknown sources
            given.pop("mixture", None)
            given.pop("stages", None)
        if isinstance(given.get("journal"), str):
            given["journal"] = self._path(given["journal"])
        if "strategy" in given:
            given["strategy"] = self._strategy(given["strategy"])
        if given.get("model") is not None:
            given["model"] = self._model(given["model"], "model")
        try:
            job = Job(**{**stand_ins, **given})
        except JobError as fault:
            self.problems += fault.problems
            return None
        return job

    def _parse(self, text: str) -> Any:
        loader = Loader(text)
        try:
            return loader.get_single_data()
        except (yaml.YAMLError, RecursionError, ValueError) as fault:
            self.problems.append(f"expected YAML, got a syntax error: {_yaml_error(fault)}")
            return None
        finally:
            self.problems += loader.duplicates
            loader.dispose()

    def _known(self, plain: Mapping[Any, Any], cls: type, at: str) -> dict[str, Any]:
        """Return the entries of ``plain`` that are fields of a class, and report all others.

        Missing required fields are reported and get a replacement, so that the others are checked.
        """
        names = [f.name for f in fields(cls)]
        dot = f"{at}." if at else ""
        self.problems += [
            f"{dot}{key}: expected a known field, got {key!r}{did_you_mean(key, names)}"
            for key in plain
            if key not in names
        ]
        needed = [
            f.name
            for f in fields(cls)
            if f.default is MISSING and f.default_factory is MISSING and f.init
        ]
        missing = [name for name in needed if name not in plain]
        self.problems += [f"{dot}{name}: expected a value, got none" for name in missing]
        stand_ins = {name: {"fn": _missing, "placeholder": 0}.get(name, "?") for name in missing}
        return {key: value for key, value in plain.items() if key in names} | stand_ins

    def _object(self, cls: type, plain: Any, at: str, **given: Any) -> Any:
        """Return an object of a class from the mapping at key ``at``; None if it is invalid.

        Problems are reported. ``given``: fields that were read before, which replace those of
        ``plain``.
        """
        if not isinstance(plain, dict):
            self.problems.append(f"{at}: expected a mapping, got {short_repr(plain)}")
            return None
        before = len(self.problems)
        values = self._known({**plain, **given}, cls, at)
        try:
            made = cls(**values)
        except JobError as fault:
            self.problems += [_keyed(problem, at, values.get("name")) for problem in fault.problems]
            return None
        return made if len(self.problems) == before else None

    def _sources(self, plain: Any) -> list[Source]:
        """Return a source for every entry, and report problems.

        An invalid entry gives a source with only its name, so that names and mixture are checked.
        """
        if isinstance(plain, dict) and plain:
            entries = [(f"sources.{name}", name, entry) for name, entry in plain.items()]
        elif isinstance(plain, list) and plain:
            entries = [(f"sources[{i}]", None, entry) for i, entry in enumerate(plain)]
        else:
            example = "as in {web: {uri: 'data/web/*.parquet'}}"
            self.problems.append(
                "sources: expected a list or a mapping with at least one source, got "
                f"{short_repr(plain)}; add one, {example}"
            )
            return []
        return [self._source(at, name, entry) for at, name, entry in entries]

    def _source(self, at: str, name: Any, plain: Any) -> Source:
        given: dict[str, Any] = {} if name is None else {"name": name}
        before = len(self.problems)
        if isinstance(plain, dict):
            if name is not None and "name" in plain:
                self.problems.append(
                    f"{at}.name: expected no name, got one; remove it, since the key is the name"
                )
            for key in ("transforms", "deferred"):
                if isinstance(plain.get(key), list):
                    given[key] = self._transforms(plain[key], f"{at}.{key}")
                elif key in plain:
                    self.problems.append(
                        f"{at}.{key}: expected a list, got {short_repr(plain[key])}"
                    )
                    given[key] = ()
            if "path" in plain:  # a frequent mistake: report it, and check the value as uri
                self.problems.append(f"{at}.path: expected 'uri', got 'path'")
                plain = {
                    "uri": plain["path"],
                    **{key: value for key, value in plain.items() if key != "path"},
                }
            if "uri" in plain:
                given["uri"] = self._paths(plain["uri"], at)
        source = self._object(Source, plain, at, **given)
        if source is not None and len(self.problems) == before:
            return source
        label = name if name is not None else plain.get("name") if isinstance(plain, dict) else None
        if isinstance(label, str) and label and "/" not in label and "\x1f" not in label:
            return Source(label, "?")
        return Source(at, "?")

    def _paths(self, path: Any, at: str) -> Any:
        """Return a path or a list of paths, resolved by ``_path``; report any other value."""
        if isinstance(path, str) and path:
            return self._path(path)
        if isinstance(path, list) and path and all(isinstance(p, str) and p for p in path):
            return [self._path(p) for p in path]
        self.problems.append(
            f"{at}.uri: expected a path or a list of paths, got {short_repr(path)}"
        )
        return "?"

    def _path(self, path: str) -> str:
        """Return a path, joined to the folder of the file if it is relative; a URI is unchanged.

        A malformed URI is unchanged, too, so that later checks report it.
        """
        if "://" in path or uri_problems(path):
            return path
        return os.path.join(self.folder, os.path.expanduser(path))

    def _tokenizer(self, text: str) -> str:
        """Return a tokenizer's path, joined to the folder of the file, or its name unchanged."""
        path = self._path(text)
        return text if is_name(text) and not os.path.exists(path) else path

    def _model(self, plain: Any, at: str) -> Model | None:
        """Return a model from its fields, or from the path of a Hugging Face ``config.json``."""
        if isinstance(plain, str):
            try:
                return Model.from_config(self._path(plain))
            except JobError as fault:
                self.problems += [f"{at}: {fault.where}: {problem}" for problem in fault.problems]
                return None
        given: dict[str, Any] = {}
        if isinstance(plain, dict) and plain.get("encoder") is not None:
            given["encoder"] = self._model(plain["encoder"], f"{at}.encoder")
        model: Model | None = self._object(Model, plain, at, **given)
        return model

    def _transforms(self, plain: list[Any], at: str) -> tuple[Any, ...]:
        made = [self._transform(entry, f"{at}[{i}]") for i, entry in enumerate(plain)]
        return tuple(t for t in made if t is not None)

    def _transform(self, plain: Any, at: str) -> Any:
        if isinstance(plain, str):
            plain = {plain: {}}
        if not isinstance(plain, dict) or len(plain) != 1:
            self.problems.append(
                f"{at}: expected one of {', '.join(_TRANSFORMS)} with its fields, got "
                f"{short_repr(plain)}"
            )
            return None
        kind, body = next(iter(plain.items()))
        if kind not in _TRANSFORMS:
            self.problems.append(
                f"{at}.{kind}: expected a known transform, got {kind!r}"
                + did_you_mean(kind, _TRANSFORMS)
            )
            return None
        at, cls = f"{at}.{kind}", _TRANSFORMS[kind]
        if kind == "select":
            return self._select(body, at)
        if not isinstance(body, dict):
            first = {"images": "placeholder"}.get(kind, fields(cls)[0].name)
            self.problems.append(
                f"{at}: expected its fields, as in {{{first}: ...}}, got {short_repr(body)}"
            )
            return None
        given: dict[str, Any] = {}
        if kind in ("tokenize", "chat") and isinstance(body.get("tokenizer"), str):
            given["tokenizer"] = body["tokenizer"] and self._tokenizer(body["tokenizer"])
        if kind == "chat" and str(body.get("template")).endswith(TEMPLATE_SUFFIX):
            given["template"] = self._path(str(body["template"]))
        if kind == "meta":
            body = self._meta_value(body, at)
        name = "value" if kind == "meta" else "fn"
        if kind in ("map", "filter", "meta") and isinstance(body.get(name), _Named):
            given[name] = body[name].fn
        elif kind in ("map", "filter") and "fn" in body:
            given["fn"] = self._function(body["fn"], f"{at}.fn")
        return self._object(cls, body, at, **given)

    def _select(self, body: Any, at: str) -> Select | None:
        if not isinstance(body, list):
            self.problems.append(f"{at}: expected a list of columns, got {short_repr(body)}")
            return None
        try:
            return Select(*body)
        except JobError as fault:
            self.problems += [f"{at}.{problem}" for problem in fault.problems]
            return None

    def _meta_value(self, body: dict[Any, Any], at: str) -> dict[Any, Any]:
        """Return the fields of ``Meta`` with ``column`` or ``fn`` as ``value``, as in Python."""
        rest = {key: value for key, value in body.items() if key not in ("column", "fn")}
        if ("column" in body) == ("fn" in body):
            self.problems.append(
                f"{at}: expected column or fn, got {'both' if 'column' in body else 'neither'}"
            )
            return {**rest, "value": "?"}
        return {
            **rest,
            "value": body["column"]
            if "column" in body
            else _Named(self._function(body["fn"], f"{at}.fn")),
        }

    def _strategy(self, name: Any) -> Any:
        try:
            return strategy_named(name)
        except JobError as fault:
            self.problems += fault.problems
            return "vanilla"

    def _function(self, name: Any, at: str) -> Callable[..., Any]:
        if (fn := registered_function(name)) is not None:
            return fn
        names = registered_names()
        known = f"known: {', '.join(names)}" if names else "none is registered"
        self.problems.append(
            f"{at}: expected a registered function ({known}), got {short_repr(name)}; {REGISTER}"
        )
        return _missing


class _Named:
    """A wrapper of a registered function, which distinguishes it from the name of a column."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn


def _missing(*_: Any) -> None:
    """Do nothing; this replaces an unknown function, so that its transform is still checked."""


def _keyed(problem: str, at: str, name: Any) -> str:
    """Return a problem that a class reported, with the key ``at`` of the file.

    "source 'web'.weight: ..." becomes "sources[3].weight: ...".
    """
    for own in (f"source {name!r}", "batch", "place", "model", "stage"):
        if problem.startswith((f"{own}.", f"{own}:")):
            return at + problem.removeprefix(own)
    return f"{at}.{problem}"


def _yaml_error(fault: Exception) -> str:
    """Return an error of the YAML parser in one line, with line and column if known."""
    mark = getattr(fault, "problem_mark", None)
    if mark is None:
        return " ".join(str(fault).split())
    texts = (getattr(fault, "context", None), getattr(fault, "problem", None))
    text = ", ".join(text for text in texts if text)
    return f"{text} (line {mark.line + 1}, column {mark.column + 1})"


class _Writer:
    """Converter of a job to plain values; values that a file cannot hold become problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def job(self, job: Job) -> dict[str, Any]:
        """Return the fields of a job as plain values, without those at their default."""
        plain = {name: getattr(job, name) for name in ("name",)}
        plain["sources"] = [self._source(i, source) for i, source in enumerate(job.sources)]
        if job.place != ClientPlaceTree():
            plain["place"] = {
                k: list(v) if isinstance(v, tuple) else v
                for k, v in changed_fields(job.place).items()
            }
        plain["batch"] = write_batch(job.batch, "batch", self.problems)
        for name, value in changed_fields(job).items():
            if name in ("name", "sources", "place", "batch"):
                continue
            if name == "mixture" and isinstance(value, Mapping):
                value = {
                    source: float(weight) if isinstance(weight, float) else int(weight)
                    for source, weight in value.items()
                }
            elif name == "mixture":
                value = write_mixture(value, "mixture", self.problems)
            elif name == "stages":
                value = write_stages(value, self.problems)
            elif name == "journal":
                value = _absolute(value)
            elif name == "model":
                value = _model_fields(value)
            elif name == "strategy" and callable(value):
                value = self._name_of(value, name)
            elif callable(value) or name == "hooks":
                self.problems.append(
                    f"{name}: expected a value that a file can hold, got the code "
                    f"{short_repr(value)}; set it in Python"
                )
            plain[name] = value
        return plain

    def _source(self, i: int, source: Source) -> dict[str, Any]:
        plain = changed_fields(source)
        at = f"sources[{i}]"
        paths = list(source.uri) if isinstance(source.uri, (list, tuple)) else [source.uri]
        if all(isinstance(p, (str, os.PathLike)) for p in paths):
            text = [_absolute(os.fspath(p)) for p in paths]
            plain["uri"] = text if isinstance(source.uri, (list, tuple)) else text[0]
        else:
            self.problems.append(
                f"{at}.uri: expected files, got the Python object {short_repr(source.uri)}; write "
                "its rows to files"
            )
        if "weight" in plain:
            plain["weight"] = (
                float(source.weight) if isinstance(source.weight, float) else int(source.weight)
            )
        if source.transforms:
            plain["transforms"] = [
                self._transform(t, f"{at}.transforms[{k}]") for k, t in enumerate(source.transforms)
            ]
        return plain

    def _transform(self, t: Any, at: str) -> dict[str, Any]:
        if type(t) not in _TRANSFORMS.values():
            self.problems.append(
                f"{at}: expected a transform of this package, got {short_repr(t)}; use ov.Map "
                "with a registered function"
            )
            return {}
        if isinstance(t, Select):
            return {"select": list(t.columns)}
        body = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in changed_fields(t).items()
        }
        if isinstance(t, (Tokenize, Chat)):
            body["tokenizer"] = self._tokenizer(t, at)
        if isinstance(t, Chat) and str(t.template).endswith(TEMPLATE_SUFFIX):
            body["template"] = _absolute(str(t.template))
        if isinstance(t, GROUPED) and t.values:
            body["values"] = {n: c if isinstance(c, str) else list(c) for n, c in t.values.items()}
        if isinstance(t, (Map, Filter)):
            body["fn"] = self._name_of(t.fn, at)
        if isinstance(t, Meta):
            value = body.pop("value")
            body |= (
                {"column": value} if isinstance(value, str) else {"fn": self._name_of(value, at)}
            )
        return {t.kind: body}

    def _tokenizer(self, t: Tokenize | Chat, at: str) -> str:
        if isinstance(t.tokenizer, str):
            return t.tokenizer if is_name(t.tokenizer) else _absolute(t.tokenizer)
        self.problems.append(
            f"{at}: expected a tokenizer by path or name, got an object; save it, and use its path"
        )
        return "?"

    def _name_of(self, fn: Any, at: str) -> str:
        for name in registered_names():
            if registered_function(name) is fn:
                return name
        self.problems.append(
            f"{at}: expected a registered function, got {qualified_name(fn)}; call "
            "ov.register_function first"
        )
        return "?"


def _model_fields(model: Model) -> dict[str, Any]:
    """Return the fields of a model and of its encoder that differ from their default."""
    plain = changed_fields(model)
    if model.encoder is not None:
        plain["encoder"] = _model_fields(model.encoder)
    return plain


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
