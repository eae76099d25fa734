"""Cost functions: their base, the FLOPs of models by layer shape, and costs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.checks import did_you_mean, signature_problem
from overlord.errors import PlanError
from overlord.job.model import Model
from overlord.sample import Column, Columns, Ragged

# ----------------------------------------------------------------------------
# Base of cost functions: call on metadata columns, addition, scaling, unit and fingerprint.

CostFn = Callable[[Mapping[str, Any]], np.ndarray]


class Cost:
    """A cost function of metadata columns. Costs can be added and scaled: ``2 * a + b`` is a cost.

    For example, a sum combines a backbone with its encoder, and a factor stands for a slower
    device. ``unit`` is "s", "FLOPs", "tokens", or "" if only ratios have a meaning.
    """

    __slots__ = ()

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        raise NotImplementedError

    def __add__(self, other: CostFn) -> Sum:
        if not callable(other):
            return NotImplemented
        return Sum(
            (
                *(self.parts if isinstance(self, Sum) else (self,)),
                *(other.parts if isinstance(other, Sum) else (other,)),
            )
        )

    def __radd__(self, other: CostFn) -> Sum:
        return Sum((other, self)) if callable(other) else NotImplemented

    def __mul__(self, factor: float) -> Scaled:
        if not isinstance(factor, (int, float)):
            return NotImplemented
        return Scaled(float(factor), self)

    __rmul__ = __mul__

    @property
    def fingerprint(self) -> str:
        """Text of the cost's parameters, which is equal for equal costs in every process."""
        return repr(self)

    @property
    def title(self) -> str:
        """Short text for display, with the main parameters only."""
        return repr(self)


@dataclass(frozen=True, slots=True, repr=False)
class Sum(Cost):
    """The sum of several costs of one sample, in one unit."""

    parts: tuple[CostFn, ...]

    def __post_init__(self) -> None:
        units = sorted({unit_of(part) for part in self.parts} - {""})
        if len(units) > 1:
            raise PlanError(
                f"costs in {' and '.join(units)} cannot be added: expected one unit, got "
                f"{len(units)}",
                remedy="measure both with cost.fit, which gives seconds",
            )

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        total = np.asarray(self.parts[0](columns), np.float64)
        for part in self.parts[1:]:
            total = total + np.asarray(part(columns), np.float64)
        return total

    @property
    def unit(self) -> str:
        return max(unit_of(part) for part in self.parts)

    def __repr__(self) -> str:
        return " + ".join(fingerprint_of(part) for part in self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class Scaled(Cost):
    """A cost times a number."""

    factor: float
    of: CostFn

    def __post_init__(self) -> None:
        if not 0 <= self.factor < float("inf"):
            raise PlanError(
                f"cost: expected a finite factor of at least 0, got {self.factor!r}",
                remedy="multiply by a finite number of at least 0",
            )

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return self.factor * np.asarray(self.of(columns), np.float64)

    @property
    def unit(self) -> str:
        return unit_of(self.of)

    def __repr__(self) -> str:
        # every digit, since plans depend on it
        inner, factor = (fingerprint_of(self.of), repr(self.factor).removesuffix(".0"))
        return f"{factor} * ({inner})" if isinstance(self.of, Sum) else f"{factor} * {inner}"


@dataclass(frozen=True, slots=True)
class LengthCost(Cost):
    """A cost by length: ``linear * length + square * length ** 2``.

    For a ragged column (images) it is the sum over a sample's items.
    """

    linear: float = 0.0
    square: float = 0.0
    column: str = "tokens"
    unit: str = ""

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(
            columns,
            self.column,
            lambda length: self.linear * length + self.square * (length * length),
        )


def over_lengths(
    columns: Mapping[str, Any], name: str, cost_of: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return ``cost_of`` of metadata column ``name``, one number for each node.

    For a ragged column it is the sum over the items of every sample. Raise ``PlanError`` if the
    column is missing.
    """
    if not isinstance(columns, Mapping):
        raise PlanError(
            f"cost: expected metadata columns by name, got {type(columns).__name__}",
            remedy=f"call the cost with a mapping such as {{{name!r}: lengths}}",
        )
    if name not in columns:
        raise PlanError(
            f"the cost needs metadata {name!r}; known: {', '.join(sorted(columns))}",
            remedy="select it or add it with ov.Meta",
        )
    column = columns[name]
    if not isinstance(column, Ragged):
        return cost_of(np.asarray(column, np.float64))
    items = cost_of(column.values[column.offsets[0] : column.offsets[-1]].astype(np.float64))
    # bincount adds one item after another, in order: the same sum on every machine.
    return np.bincount(
        np.repeat(np.arange(len(column)), column.lengths), weights=items, minlength=len(column)
    )


def unit_of(fn: CostFn) -> str:
    return str(getattr(fn, "unit", ""))


def title_of(fn: CostFn | str) -> str:
    return getattr(fn, "__name__", None) or (fn.title if isinstance(fn, Cost) else repr(fn))


def fingerprint_of(fn: CostFn) -> str:
    """Return the ``fingerprint`` of a cost, or its module and name if it has none."""
    mine = getattr(fn, "fingerprint", None)
    return (
        str(mine)
        if mine
        else f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    )


# ----------------------------------------------------------------------------
# Forward FLOPs of models by their layer shapes, with the models of the Overlord paper.
#
# The models are those of its Table 1 (arXiv 2504.09844).
#
# The backward pass costs about twice the forward pass in both terms, so only the forward pass is
# counted. FLOPs underestimate attention (by about 2x on one H200, where its kernels reach less of
# the peak). ``cost.fit`` uses measured times instead.


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(Cost):
    """Forward FLOPs of a transformer: a term per token and one per pair of tokens (attention)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int  # fewer than heads: grouped queries share keys and values
    head_dim: int
    ffn: int  # width of the feed-forward; of one expert if there are several
    gated: bool = True  # three feed-forward matrices (SwiGLU) instead of two
    causal: bool = True
    window: int = 0  # tokens back that a token attends to; 0: all
    active_experts: int = 1  # top-k: routed feed-forwards of each token
    shared_experts: int = 0  # additional feed-forwards of every token
    experts: int = 0  # total number: the router scores each
    # input size of one token that is projected, such as a patch, instead of looked up in a table
    inputs: int = 0
    vocab: int = 0  # the output layer counts if this is given
    column: str = "tokens"
    unit: str = "FLOPs"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(columns, self.column, self.of)

    @property
    def title(self) -> str:
        return f"Transformer(hidden={self.hidden}, layers={self.layers}, heads={self.heads})"

    def of(self, length: np.ndarray) -> np.ndarray:
        """Return the forward FLOPs of each document, by its length."""
        if not self.window:
            return self.per_token * length + self.per_pair * (length * length)
        # Tokens inside the first window attend to all tokens before them, later ones to a window.
        near = np.minimum(length, float(self.window))
        return self.per_token * length + self.per_pair * (
            near * near + 2.0 * near * (length - near)
        )

    @property
    def per_token(self) -> float:
        width = self.heads * self.head_dim
        attention = 2 * self.hidden * (width + self.kv_heads * self.head_dim)
        feed_forward = (
            (3 if self.gated else 2)
            * self.hidden
            * self.ffn
            * (self.active_experts + self.shared_experts)
        )
        return 2.0 * (
            self.layers * (attention + feed_forward + self.hidden * self.experts)
            + self.hidden * (self.vocab + self.inputs)
        )

    @property
    def per_pair(self) -> float:
        """FLOPs of attention per length squared.

        The scores and the weighted sum take 2 FLOPs each per channel. A causal mask leaves half of
        the pairs.
        """
        return (2.0 if self.causal else 4.0) * self.heads * self.head_dim * self.layers


def transformer(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    gated: bool = True,
    causal: bool = True,
    window: int = 0,
    active_experts: int = 1,
    shared_experts: int = 0,
    experts: int = 0,
    vocab: int = 0,
    column: str = "tokens",
) -> Transformer:
    """Return the cost of a model by its layer shapes; the fields of ``Transformer`` explain them.

    ``ffn`` defaults to 8/3 of ``hidden`` (4 times ``hidden`` without a gate), ``kv_heads`` to
    ``heads``, and ``head_dim`` to ``hidden / heads``. Raise ``PlanError`` for invalid shapes.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    positive = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "active_experts": active_experts,
    }
    _check(
        "transformer",
        positive,
        {"window": window, "shared_experts": shared_experts, "experts": experts, "vocab": vocab},
    )
    if heads % kv_heads:
        raise PlanError(
            f"cost.transformer: expected kv_heads that divide the {heads} heads, got {kv_heads}"
        )
    if head_dim is None and hidden % heads:
        raise PlanError(
            f"cost.transformer: expected hidden as a multiple of heads={heads}, got {hidden}",
            remedy="give head_dim=",
        )
    if window and not causal:
        raise PlanError("cost.transformer: expected causal=True with a window, got causal=False")
    if ffn is None:
        ffn = 8 * hidden // 3 if gated else 4 * hidden
    head_dim = hidden // heads if head_dim is None else head_dim
    _check("transformer", {"head_dim": head_dim}, {"ffn": ffn})
    return Transformer(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=gated,
        causal=causal,
        window=window,
        active_experts=active_experts,
        shared_experts=shared_experts,
        experts=experts,
        vocab=vocab,
        column=column,
    )


def vit(
    *,
    hidden: int,
    layers: int,
    heads: int,
    ffn: int | None = None,
    gated: bool = False,
    patch: int = 14,
    channels: int = 3,
    column: str = "image_patches",
) -> Transformer:
    """Return the cost of an image encoder whose patches all attend to each other.

    ``patch``: width and height of a patch in pixels. ``ffn`` defaults to 4 times ``hidden``.
    """
    _check(
        "vit",
        {"hidden": hidden, "layers": layers, "heads": heads, "patch": patch, "channels": channels},
        {"ffn": ffn or 0},
    )
    if hidden % heads:
        raise PlanError(f"cost.vit: expected hidden as a multiple of heads={heads}, got {hidden}")
    return Transformer(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden if ffn is None else ffn,
        gated=gated,
        causal=False,
        inputs=patch * patch * channels,
        column=column,
    )


def _check(where: str, positive: Mapping[str, object], others: Mapping[str, object]) -> None:
    both = [(name, value, 1) for name, value in positive.items()] + [
        (name, value, 0) for name, value in others.items()
    ]
    wrong = [
        f"{name}={value!r}"
        for name, value, least in both
        if not isinstance(value, int) or value < least
    ]
    if wrong:
        raise PlanError(
            f"cost.{where}: expected whole numbers, of at least 1 for "
            f"{', '.join(positive)} and of at least 0 for {', '.join(others)}, got "
            f"{', '.join(wrong)}"
        )


# Table 1 gives layers, heads, hidden size and top-k. All other parameters are chosen here. For the
# encoders: feed-forward widths of ViT-g and ViT-G with the same hidden size, which give 1.0B and
# 1.8B parameters.
vit_1b = vit(hidden=1408, layers=39, heads=16, ffn=6144)
vit_2b = vit(hidden=1664, layers=48, heads=16, ffn=8192)
# The vocabulary of Llama 3, as many key heads as heads, and a feed-forward width of 8/3 of hidden
# give 12.6B parameters.
llama_12b = transformer(hidden=4608, layers=45, heads=36, vocab=128_256)
# Key heads, expert width, experts and vocabulary are those of the published Mixtral 8x7B.
mixtral_8x7b = transformer(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    ffn=14_336,
    active_experts=2,
    experts=8,
    vocab=32_000,
)
# A guess for a model that was not published: 16 experts of this width give 25B parameters.
tmoe_25b = transformer(
    hidden=2048, layers=42, heads=16, ffn=5632, active_experts=2, experts=16, vocab=128_256
)


# ----------------------------------------------------------------------------
# Costs by name: the built-in ones, and those that users register.

tokens = LengthCost(linear=1.0, unit="tokens")
quadratic = LengthCost(square=1.0)  # attention alone

_BUILT_IN: dict[str, CostFn] = {
    "tokens": tokens,
    "quadratic": quadratic,
    "llama_12b": llama_12b,
    "mixtral_8x7b": mixtral_8x7b,
    "tmoe_25b": tmoe_25b,
    "vit_1b": vit_1b,
    "vit_2b": vit_2b,
}
_REGISTERED: dict[str, CostFn] = {}


def register_cost(name: str, fn: CostFn) -> None:
    """Register ``fn(columns) -> one number for each node`` as ``name``, for ``.cost(name)``.

    A second function under the same name replaces the first. Names of built-in costs are refused.
    """
    if not isinstance(name, str) or not name or not callable(fn):
        raise PlanError(f"register_cost: expected a name and a function, got {name!r} and {fn!r}")
    if name in _BUILT_IN:
        raise PlanError(f"the cost {name!r} is built in", remedy="choose another name")
    _REGISTERED[name] = fn


def registered() -> dict[str, CostFn]:
    """Return the costs that users registered in this process."""
    return dict(_REGISTERED)


def restore(costs: Mapping[str, CostFn]) -> None:
    """Register costs that another process has registered."""
    _REGISTERED.update(costs)


def named(cost: CostFn | str) -> CostFn:
    """Return a cost by its name, or the function itself; raise for an unknown name."""
    if callable(cost):
        return cost
    known = {**_BUILT_IN, **_REGISTERED}
    if not isinstance(cost, str) or cost not in known:
        raise PlanError(
            f"unknown cost {cost!r}{did_you_mean(cost, known)}", remedy="add it with register_cost"
        )
    return known[cost]


def checked_costs(
    cost: CostFn | str, columns: Mapping[str, Column], n: int, what: str = "cost"
) -> np.ndarray:
    """Return the costs of n nodes by a cost or its name; raise unless each is finite and >= 0.

    ``what``: the purpose, for errors: "cost" or "memory".
    """
    fn, name = named(cost), getattr(cost, "__name__", None) or repr(cost)
    if not isinstance(fn, Cost) and (problem := signature_problem(fn, ("columns",))):
        raise PlanError(f"{what}: {problem}")
    result = fn(Columns(columns))
    try:
        numbers = np.asarray(result, np.float64)
    except (TypeError, ValueError):
        raise PlanError(
            f"{what} function {name}: expected {n} numbers, "
            f"got {type(result).__name__} {result!r:.80}"
        ) from None
    if numbers.shape != (n,):
        raise PlanError(f"{what} function {name}: expected {n} numbers, got shape {numbers.shape}")
    if n and not (np.isfinite(numbers).all() and numbers.min() >= 0):
        raise PlanError(
            f"{what} function {name}: expected finite numbers of at least 0, "
            "got one that is negative, infinite or NaN"
        )
    return numbers


# ----------------------------------------------------------------------------
# Costs of a job's model, of documents on one rank and of its images. Without a model they are those
# of the Overlord paper (arXiv 2504.09844); only ratios matter.

DENSE_12B = transformer(hidden=4608, layers=45, heads=36)  # its backbone
VIT_1B = vit_1b  # its encoder


@dataclass(frozen=True, slots=True)
class ModelCost(Cost):
    """Forward FLOPs of documents in a ``Model``."""

    model: Model
    column: str = "tokens"
    unit: str = "FLOPs"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(columns, self.column, self.model.flops)

    @property
    def title(self) -> str:
        return f"Model({self.model.title})"

    @property
    def linear(self) -> float:
        """FLOPs of a token, with the attention of whole windows.

        A document shorter than a window costs less, so this is an upper bound for it.
        """
        model, window = self.model, float(self.model.window or 0)
        pairs = 2.0 * window if model.causal else window
        return model.per_token + (model.layers - model.full_layers) * model.per_pair * pairs

    @property
    def square(self) -> float:
        """FLOPs per length squared, of the layers without a window."""
        return self.model.full_layers * self.model.per_pair


def of_model(model: Model | None) -> Cost:
    """Return the cost of a document on one rank; without a model that of a 12B Llama."""
    return DENSE_12B if model is None else ModelCost(model)


def encoder_of(model: Model | None) -> Cost:
    """Return the cost of an image, by its patches; without an encoder that of a ViT of 1B."""
    if model is None or model.encoder is None:
        return VIT_1B
    return ModelCost(model.encoder, column="image_patches")
