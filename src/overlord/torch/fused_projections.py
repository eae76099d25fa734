"""Parts of fused projections: which rows or columns of one parameter are q, k, v, gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Ranges = tuple[tuple[int, int], ...]

QKV = frozenset({"qkv", "qkv_proj", "wqkv", "c_attn", "query_key_value", "to_qkv", "attn_qkv"})
QKV_PARTS = ("q", "k", "v")
# prefixes of parameter names of torch's attention and recurrent modules
STACKED = ("in_proj_weight", "weight_ih", "weight_hh")
GATE_UP = frozenset({"gate_up_proj", "gate_up", "gate_and_up_proj", "w13"})
# model types whose parts of a projection alternate by head, or by column
BY_HEAD = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom"})
BY_COLUMN = frozenset({"gpt_oss"})
REMEDY = 'give the sizes of its parts, as in fused={"*.qkv_proj.weight": (4096, 1024, 1024)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The parts of a parameter along one axis, by name; ``parts`` is empty if it is one matrix.

    ``doubt``: why a parameter that looks fused has no known parts, else empty.
    """

    axis: int = 0
    parts: tuple[tuple[str, Ranges], ...] = ()
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRules:
    """The sizes of parts by patterns of parameter names; other names follow known conventions."""

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def parts(self, name: str, shape: tuple[int, ...], config: Any, gates: int) -> Fused:
        """Return the parts of a parameter.

        ``config``: the model's configuration, an object or a mapping. ``gates``: equal parts that
        the module is known to stack, 0 if unknown.
        """
        for pattern, sizes in self.sizes.items():
            if fnmatchcase(name, pattern):
                return _by_size(shape, tuple(sizes), tuple(map(str, range(len(sizes)))))
        owner = name.removesuffix(".weight").removesuffix(".base_layer")  # an adapted layer
        leaf = owner.rpartition(".")[2].lower()
        if gates and leaf.startswith(STACKED):
            labels = QKV_PARTS if leaf == "in_proj_weight" else tuple(map(str, range(gates)))
            return _by_size(shape, (shape[0] // gates,) * gates, labels)
        if leaf in QKV and len(shape) == 2:
            return _qkv(shape, config)
        if leaf in GATE_UP and len(shape) in (2, 3):
            return _gate_up(shape, config)
        return Fused()


def _qkv(shape: tuple[int, ...], config: Any) -> Fused:
    heads = _number(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_heads = _number(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    width = _number(config, "head_dim") or (hidden // heads if heads and hidden else 0)
    if heads and width:
        sizes = (heads * width, kv_heads * width, kv_heads * width)
        if _text(config, "model_type") in BY_HEAD and heads == kv_heads:
            axis = 0 if shape[0] >= shape[1] else 1
            return _interleaved(shape, axis, 3, width, QKV_PARTS)
        return _by_size(shape, sizes, QKV_PARTS)
    for axis in (0, 1):
        if shape[axis] == 3 * shape[1 - axis]:
            return _by_size(shape, (shape[1 - axis],) * 3, QKV_PARTS)
    return Fused(doubt=f"looks like a fused qkv projection of unknown parts, {shape}; {REMEDY}")


def _gate_up(shape: tuple[int, ...], config: Any) -> Fused:
    inner = _number(config, "moe_intermediate_size") if len(shape) == 3 else 0
    known = [inner, _number(config, "intermediate_size"), _number(config, "ffn_hidden_size")]
    axes = range(len(shape) - 2, len(shape))
    for size in filter(None, known):
        if fitting := [axis for axis in axes if shape[axis] == 2 * size]:
            if _text(config, "model_type") in BY_COLUMN:
                return _interleaved(shape, fitting[-1], 2, 1, ("gate", "up"))
            return _by_size(shape, (size, size), ("gate", "up"))
    if len(shape) == 2 and shape[0] % 2 == 0:  # a Linear layer: its rows are its outputs
        return _by_size(shape, (shape[0] // 2,) * 2, ("gate", "up"))
    return Fused(doubt=f"looks like a fused gate and up projection, {shape}; {REMEDY}")


def _by_size(shape: tuple[int, ...], sizes: tuple[int, ...], labels: tuple[str, ...]) -> Fused:
    """Return consecutive parts along the first matrix axis whose length is the sum of sizes."""
    for axis in range(len(shape) - 2, len(shape)):
        if shape[axis] == sum(sizes):
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            ranges = [((a, a + n),) for a, n in zip(starts, sizes, strict=True)]
            return Fused(axis=axis, parts=tuple(zip(labels, ranges, strict=True)))
    return Fused(doubt=f"expected an axis of {sum(sizes)} for parts {sizes}, got {shape}; {REMEDY}")


def _interleaved(
    shape: tuple[int, ...], axis: int, count: int, width: int, labels: tuple[str, ...]
) -> Fused:
    """Return parts that alternate every ``width`` entries of an axis."""
    period = count * width
    if shape[axis] % period:
        return Fused(doubt=f"expected an axis that {period} divides, got {shape}; {REMEDY}")
    parts = [
        tuple((at + i * width, at + (i + 1) * width) for at in range(0, shape[axis], period))
        for i in range(count)
    ]
    return Fused(axis=axis, parts=tuple(zip(labels, parts, strict=True)))


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _number(config: Any, *names: str) -> int:
    found = (_value(config, name) for name in names)
    return next((v for v in found if isinstance(v, int) and not isinstance(v, bool)), 0)


def _text(config: Any, name: str) -> str:
    found = _value(config, name)
    return found if isinstance(found, str) else ""
