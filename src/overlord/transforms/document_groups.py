"""Specification of samples of several documents: pairs of responses, and groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from overlord.documents import LENGTHS, PROMPTS
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.transforms.base import RESERVED_META, Tokens, Transform, column_problems, refuse
from overlord.transforms.chat import Chat
from overlord.transforms.fill_in_middle import FillInMiddle
from overlord.transforms.images import Images
from overlord.transforms.tokenize import Tokenize

Values = Mapping[str, "str | tuple[str, ...]"]
# Keys of microbatches, which no value may replace.
KEYS = (
    "tokens",
    "position_ids",
    "labels",
    "loss_mask",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "source_ids",
    "group_ids",
    "roles",
    PROMPTS,
    LENGTHS,
    *RESERVED_META,
)


@dataclass(frozen=True, slots=True, repr=False)
class Pair:
    """Make one sample of a chosen and a rejected response. Put it before Tokenize, Tokens or Chat.

    ``chosen`` and ``rejected`` are columns of texts, of token ids or of conversations, as the next
    transform reads them. ``prompt``: a column with the beginning of both, which has no loss.
    Without it the messages that both conversations begin with are their prompt; texts and ids have
    none. ``values``: numbers for microbatches by name, each from a column with one number or with a
    list of two, or from two columns.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    prompt: str | None = field(default=None, kw_only=True)
    values: Any = field(default=None, kw_only=True)
    kind: ClassVar[str] = "pair"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = column_problems("chosen", self.chosen)
        problems += column_problems("rejected", self.rejected) + prompt_problems(self.prompt)
        if not problems and self.chosen == self.rejected:
            problems.append(f"rejected: expected another column than chosen, got {self.rejected!r}")
        made, wrong = values_of(self.values, 2)
        refuse("Pair", problems + wrong)
        object.__setattr__(self, "values", made)

    @property
    def documents(self) -> tuple[str, ...]:
        """The columns of the documents."""
        return self.chosen, self.rejected

    def __repr__(self) -> str:
        shown = f"chosen={self.chosen!r}, rejected={self.rejected!r}{shown_options(self)}"
        return f"Pair({shown})"

    def fingerprint(self) -> str:
        return digest("pair", self.chosen, self.rejected, *options_text(self))


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """Make one sample of several responses. Put it before Tokenize, Tokens or Chat.

    ``column`` has a list of texts, of token ids or of conversations, as the next transform reads
    them. ``prompt``: as in ``Pair``. ``size``: number of responses of every row; None: any.
    ``values``: numbers for microbatches by name, each from a column with one number for all
    responses, or with a list of one for each.
    """

    column: str
    prompt: str | None = field(default=None, kw_only=True)
    size: int | None = field(default=None, kw_only=True)
    values: Any = field(default=None, kw_only=True)
    kind: ClassVar[str] = "group"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = column_problems("column", self.column) + prompt_problems(self.prompt)
        whole = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size > 0
        if not (self.size is None or whole):
            problems.append(
                f"size: expected a whole number of at least 1, or None for any, got {self.size!r}"
            )
        made, wrong = values_of(self.values, 0)
        refuse("Group", problems + wrong)
        object.__setattr__(self, "values", made)

    @property
    def documents(self) -> tuple[str, ...]:
        """The columns of the documents."""
        return (self.column,)

    def __repr__(self) -> str:
        size = "" if self.size is None else f", size={self.size}"
        return f"Group({self.column!r}{size}{shown_options(self)})"

    def fingerprint(self) -> str:
        return digest("group", self.column, repr(self.size), *options_text(self))


GROUPED = (Pair, Group)


def values_of(given: Any, columns: int) -> tuple[Values | None, list[str]]:
    """Return values as a mapping of name to column or columns, and the problems.

    ``columns``: number of columns that a value may have; 0: only one.
    """
    if given is None:
        return None, []
    if isinstance(given, (list, tuple)):
        given = {name: name for name in given if isinstance(name, str)} if given else given
    if not isinstance(given, Mapping) or not given:
        return None, [f"values: expected names of columns, or a mapping to them, got {given!r:.80}"]
    made: dict[str, str | tuple[str, ...]] = {}
    problems = []
    for name, column in given.items():
        listed = tuple(column) if isinstance(column, (list, tuple)) else (column,)
        if not isinstance(name, str) or not name.isidentifier() or name in KEYS:
            problems.append(f"values: expected a new name of letters, got {name!r}")
        if len(listed) not in ((1, columns) if columns else (1,)) or not all(
            isinstance(c, str) and c for c in listed
        ):
            several = f" or {columns} columns" if columns else ""
            problems.append(f"values.{name}: expected a column{several}, got {column!r:.80}")
        else:
            made[str(name)] = listed[0] if len(listed) == 1 else listed
    return made, problems


def prompt_problems(prompt: Any) -> list[str]:
    return [] if prompt is None else column_problems("prompt", prompt)


def shown_options(t: Pair | Group) -> str:
    options = {"prompt": t.prompt, "values": t.values}
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)


def options_text(t: Pair | Group) -> tuple[str, str]:
    return repr(t.prompt), repr(sorted((t.values or {}).items()))


@dataclass(frozen=True, slots=True, repr=False)
class GroupedIds:
    """A Pair or Group with the transform that makes token ids of its documents, as one step."""

    spec: Pair | Group
    encode: Tokenize | Tokens | Chat
    kind: ClassVar[str] = "grouped"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{self.spec!r} > {self.encode!r}"

    def fingerprint(self) -> str:
        return digest("grouped", self.spec.fingerprint(), self.encode.fingerprint())

    @property
    def loss(self) -> tuple[str, ...]:
        """The columns with loss weights."""
        loss = self.encode.loss if isinstance(self.encode, Tokens) else None
        return () if loss is None else (loss,) if isinstance(loss, str) else tuple(loss)

    @property
    def value_columns(self) -> tuple[str, ...]:
        listed = (self.spec.values or {}).values()
        return tuple(c for given in listed for c in ((given,) if isinstance(given, str) else given))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        spec, encode = self.spec, self.encode
        tools = (
            (encode.tools,) if isinstance(encode, Chat) and isinstance(encode.tools, str) else ()
        )
        prompt = () if spec.prompt is None else (spec.prompt,)
        found = (*spec.documents, *prompt, *tools, *self.loss, *self.value_columns)
        return tuple(dict.fromkeys(found))

    @property
    def has_weights(self) -> bool:
        return bool(self.spec.prompt or self.loss or isinstance(self.encode, Chat))

    @property
    def meta(self) -> tuple[str, ...]:
        """Names of the metadata with a value for each document."""
        return (LENGTHS, PROMPTS, *(self.spec.values or {}))


def executed(source: str, transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return the transforms to execute: a Pair or Group and the transform after it are one step.

    The step has the position of the second. Raises TransformError for transforms that cannot be
    combined.
    """
    made = list(transforms)
    for position, t in enumerate(transforms):
        follower = transforms[position + 1] if position + 1 < len(transforms) else None
        if isinstance(t, Tokens) and isinstance(t.loss, tuple):
            before = transforms[position - 1] if position else None
            if not isinstance(before, Pair):
                problem = f"loss: expected one column, got {t.loss!r}"
                _refuse(source, t, problem, "name one column, or put Pair before it")
        if not isinstance(t, GROUPED):
            continue
        _check(source, t, follower, transforms)
        if follower is None:
            made.append(GroupedIds(t, Tokens()))
        else:
            assert isinstance(follower, (Tokenize, Tokens, Chat))
            made[position + 1] = GroupedIds(t, follower)
    return tuple(made)


def _check(
    source: str, t: Pair | Group, follower: Transform | None, transforms: Sequence[Transform]
) -> None:
    others = [
        o for o in transforms if isinstance(o, (*GROUPED, Images, FillInMiddle)) and o is not t
    ]
    if others:
        problem = f"expected no {type(others[0]).__name__} in the same source"
        _refuse(source, t, problem, "use one of them")
    if not isinstance(follower, (Tokenize, Tokens, Chat, type(None))):
        problem = f"expected Tokenize, Tokens or Chat directly after it, got {follower!r}"
        _refuse(source, t, problem, "move the other transform before it")
    own = {Tokenize: ("text", "text"), Tokens: ("column", "tokens"), Chat: ("messages", "messages")}
    if follower is not None:
        name, default = own[type(follower)]
        if (given := getattr(follower, name)) != default:
            problem = f"expected no {name}= after it, got {given!r}"
            _refuse(source, t, problem, f"leave it out: {type(t).__name__} names the columns")
    if isinstance(follower, Chat) and follower.train_on == "all":
        problem = 'expected train_on="assistant" or "last" after it, got "all"'
        _refuse(source, t, problem, "the prompt of a response has no loss")
    if isinstance(follower, Tokenize) and follower.add_special_tokens and t.prompt is not None:
        problem = "expected add_special_tokens=False after it with a prompt, got True"
        _refuse(source, t, problem, "set bos and eos: prompt and response are tokenized separately")


def _refuse(source: str, t: Transform, problem: str, remedy: str) -> None:
    raise TransformError(source, repr(t), problem, remedy)
