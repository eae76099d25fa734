"""The model of a Hugging Face configuration: its keys as the fields of ``Model``.

Families name the same shape differently, and leave out keys that have their default. Keys of layers
whose cost ``Model`` cannot express are refused, since a wrong cost would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from overlord.checks import did_you_mean, is_int
from overlord.errors import JobError
from overlord.job.model import Model

# Names of one shape in different families; the first that has a value counts.
KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size",),
    "head_dim": ("head_dim", "kv_channels"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
}
VISION_KEYS = {
    **KEYS,
    "hidden": ("embed_dim", *KEYS["hidden"]),  # Qwen2-VL: hidden_size is that of the backbone
    "layers": ("depth", *KEYS["layers"]),
}
# Families whose feed-forward has two matrices; no key says so.
WITHOUT_GATE = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "gpt-sw3", "opt", "bloom", "falcon"),
    *("mpt", "codegen", "phi", "starcoder2", "nemotron", "xglm", "biogpt", "persimmon"),
)
# Encoders whose feed-forward has three matrices.
WITH_GATE = ("qwen2_5_vl", "qwen2_5_vl_vision", "pixtral", "glm4v_vision")
# Defaults of families whose published configurations leave keys out.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 4096,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"head_dim": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mistral": {"num_key_value_heads": 8},
    "qwen2_vl_vision": {
        "num_heads": 16,
        "mlp_ratio": 4,
        "temporal_patch_size": 2,
        "in_channels": 3,
    },
    "siglip_vision_model": {"num_channels": 3},
}
# layers of which one in this many attends to the whole document, by family
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
KINDS = {"full_attention": True, "sliding_attention": False}  # kind -> whole document
# Keys of layers that cost something else; a value that is not empty is refused.
REFUSED = {
    "is_encoder_decoder": "an encoder and a decoder",
    "attention_chunk_size": "chunked attention",
    "global_head_dim": "another head width in global layers",
    "per_layer_config": "other shapes in some layers",
    "num_global_key_value_heads": "other key heads in global layers",
    "hidden_size_per_layer_input": "inputs for each layer",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "lru_width": "recurrent layers",
    "index_topk": "sparse attention",
    "cross_attention_layers": "cross-attention to images",
}
# keys that state nothing new if they equal another key
SAME_AS = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
OWN = "give ov.Model(...) with the shapes, or a measured cost: ov.cost.fit"


def model_of(
    plain: Mapping[str, Any], changes: Mapping[str, Any], where: str = "model config"
) -> Model:
    """Return the model of a configuration; ``where`` is its name for errors.

    ``changes``: fields of ``Model`` that replace those of the configuration.
    """
    names = [f.name for f in fields(Model)]
    if wrong := [name for name in changes if name not in names]:
        raise JobError(
            [f"expected fields of ov.Model, got {n!r}{did_you_mean(n, names)}" for n in wrong],
            where,
        )
    text = _text_config(plain)
    config_of_text = _Config(text, KEYS, {**changes})
    found = _text_shapes(config_of_text, str(text.get("model_type", "")))
    vision = plain.get("vision_config")
    if isinstance(vision, Mapping) and "encoder" not in changes:
        found["encoder"] = _encoder(vision, str(plain.get("model_type", "")), where)
    if config_of_text.problems:
        raise JobError([f"{p}; {OWN}" for p in config_of_text.problems], where)
    found["name"] = str(plain.get("_name_or_path") or plain.get("model_type") or "")
    return Model(**{**found, **changes})


def _text_config(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the backbone."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(inner := plain.get(name), Mapping):
            return inner
    return plain


class _Config:
    """A configuration with its aliases, which collects the problems of its keys."""

    def __init__(
        self, plain: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]], given: dict[str, Any]
    ) -> None:
        kind = str(plain.get("model_type", ""))
        self.plain = {**DEFAULTS.get(kind, {}), **{k: v for k, v in plain.items() if v is not None}}
        self.keys, self.given, self.problems = keys, given, list[str]()
        for key, what in REFUSED.items():
            value = self.plain.get(key)
            if value and value != self.plain.get(SAME_AS.get(key, "")):
                self.problems.append(f"{key}: expected layers of one kind of cost, got {what}")

    def get(self, name: str) -> Any:
        """Return a shape by the name of its field, or None."""
        return self.given.get(name) or next(self._values(name), None)

    def _values(self, name: str) -> Iterator[Any]:
        return (self.plain[key] for key in self.keys[name] if key in self.plain)

    def needed(self, name: str, *, because: str = "") -> int:
        """Return a shape; report a missing one, and return 1 in its place."""
        value = self.get(name)
        if not is_int(value) or value < 1:
            got = "none" if value is None else repr(value)
            wanted = " or ".join(self.keys[name])
            self.problems.append(f"expected {wanted}{because}, got {got}")
            return 1
        return int(value)

    def number(self, key: str) -> int | None:
        """Return the whole number of a key; None if it is absent or zero."""
        value = self.plain.get(key)
        if not value:
            return None
        if not is_int(value) or value < 0:
            self.problems.append(f"{key}: expected a whole number, got {value!r}")
            return None
        return int(value)


def _text_shapes(config: _Config, kind: str) -> dict[str, Any]:
    """Return the fields of a backbone."""
    shapes: dict[str, Any] = {name: config.needed(name) for name in ("hidden", "layers", "heads")}
    kv = config.get("kv_heads")
    if kv is None or (kind == "falcon" and not config.plain.get("new_decoder_architecture")):
        kv = 1 if config.plain.get("multi_query") else None
    gated = config.given.get("gated", kind not in WITHOUT_GATE)
    ffn = config.get("ffn")
    if ffn is None and gated:
        ffn = config.needed("ffn")
    shapes |= {
        "kv_heads": kv,
        "head_dim": config.get("head_dim"),
        "ffn": ffn,
        "vocab": config.get("vocab"),
        "gated": gated,
    }
    return shapes | _expert_shapes(config) | _latent(config) | _windows(config, kind, shapes)


def _expert_shapes(config: _Config) -> dict[str, Any]:
    """Return the fields of the experts; none if all layers are dense."""
    if (config.get("experts") or 1) <= 1:
        return {}
    plain, layers = config.plain, config.get("layers") or 1
    width = config.number("moe_intermediate_size") or config.get("ffn") or 0
    shared = config.number("shared_expert_intermediate_size")
    if shared is None:
        shared = config.number("shared_intermediate_size")
    if shared is None:
        shared = (config.number("n_shared_experts") or 0) * width
    every = config.number("decoder_sparse_step") or config.number("moe_layer_freq") or 1
    first = config.number("first_k_dense_replace") or 0
    listed = plain.get("mlp_only_layers") or ()
    starts = "moe_layer_freq" in plain  # counted from the first layer, and not from the end of one
    sparse = [
        i
        for i in range(layers)
        if i >= first and i not in listed and (i if starts else i + 1) % every == 0
    ]
    return {
        "experts": config.get("experts"),
        "active_experts": config.needed("active_experts", because=" next to experts"),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": layers - len(sparse),
    }


def _latent(config: _Config) -> dict[str, Any]:
    """Return the fields of latent attention; none without it."""
    rank = config.number("kv_lora_rank")
    if rank is None:
        return {}
    rope = config.number("qk_rope_head_dim") or 0
    plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    if plain is None or value is None:
        config.problems.append(
            "expected qk_nope_head_dim and v_head_dim with kv_lora_rank, got one of them or none"
        )
        return {}
    return {
        "kv_heads": None,
        "kv_rank": rank,
        "query_rank": config.number("q_lora_rank"),
        "rope_dim": rope,
        "head_dim": plain + rope,
        "value_dim": value,
    }


def _windows(config: _Config, kind: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of sliding windows; none if every layer attends to all tokens."""
    window, plain, layers = config.number("sliding_window"), config.plain, shapes["layers"]
    kinds = plain.get("layer_types")
    if isinstance(kinds, list):
        if unknown := sorted({str(k) for k in kinds if k not in KINDS}):
            config.problems.append(
                f"layer_types: expected {' or '.join(KINDS)}, got {', '.join(unknown)}"
            )
            return {}
        whole = sum(KINDS[k] for k in kinds[:layers])
    elif plain.get("use_sliding_window") is False:
        return {}
    elif "max_window_layers" in plain and "use_sliding_window" in plain:
        whole = min(int(plain["max_window_layers"]), layers)
    else:
        pattern = plain.get("sliding_window_pattern") or plain.get("_sliding_window_pattern")
        pattern = pattern or PATTERNS.get(kind)
        whole = layers // pattern if is_int(pattern) and pattern else 0
    if window is None or whole == layers:
        return {}
    return {"window": window, "global_layers": whole}


def _encoder(vision: Mapping[str, Any], family: str, where: str) -> Model:
    """Return the model of an image encoder, whose patches all attend to each other."""
    kind = str(vision.get("model_type") or f"{family}_vision")
    config = _Config({"model_type": kind, **vision}, VISION_KEYS, {})
    shapes: dict[str, Any] = {name: config.needed(name) for name in ("hidden", "layers", "heads")}
    patch = config.number("patch_size") or 0
    channels = config.plain.get("num_channels") or config.plain.get("in_channels")
    channels = channels or config.plain.get("in_chans") or 3
    if not patch:
        config.problems.append("expected patch_size, got none")
    ratio, ffn = config.plain.get("mlp_ratio"), config.get("ffn")
    if ffn is None and ratio:
        ffn = int(shapes["hidden"] * ratio)
    windows: dict[str, Any] = {}
    whole, window = vision.get("fullatt_block_indexes"), config.number("window_size")
    if isinstance(whole, list) and window and patch:
        windows = {"window": (window // patch) ** 2, "global_layers": len(whole)}
    if config.problems:
        raise JobError([f"vision_config: {p}; {OWN}" for p in config.problems], where)
    frames = config.number("temporal_patch_size") or 1
    return Model(
        **shapes,
        **windows,
        ffn=ffn,
        gated=kind in WITH_GATE,
        causal=False,
        inputs=patch * patch * int(channels) * frames,
        name=kind,
    )
