"""The FLOPs of ``ov.Model`` equal those that torch counts while a model of that family runs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import overlord as ov  # noqa: E402

SHORT, LONG = 64, 192  # tokens; two lengths give both terms, since FLOPs are a n + b n^2

SHAPES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 160,
    "vocab_size": 250,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
GPT: dict[str, Any] = {"vocab_size": 250, "bos_token_id": 1, "eos_token_id": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 6,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPES),
    "qwen3": ("Qwen3Config", SHAPES),
    "mistral": ("MistralConfig", {**SHAPES, "sliding_window": 512}),
    "gemma2": ("Gemma2Config", {**SHAPES, "sliding_window": 512}),
    "gemma3": ("Gemma3TextConfig", {**SHAPES, "num_hidden_layers": 7, "sliding_window": 512}),
    "gpt2": ("GPT2Config", {**GPT, "n_embd": 96, "n_layer": 3, "n_head": 6}),
    "gpt_neox": (
        "GPTNeoXConfig",
        {k: v for k, v in SHAPES.items() if k not in ("head_dim", "num_key_value_heads")},
    ),
    "mixtral": ("MixtralConfig", {**SHAPES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **SHAPES,
            **EXPERTS,
            "head_dim": 16,
            "num_experts": 8,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**SHAPES, **EXPERTS, "num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{k: v for k, v in SHAPES.items() if k != "head_dim"},
            **EXPERTS,
            **LATENT,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def counted(model: Any, length: int) -> float:
    """FLOPs that torch counts for one document: matrix products alone."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, use_cache=False)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_and_attention_flops_equal_those_that_torch_counts(family: str) -> None:
    name, given = FAMILIES[family]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = getattr(transformers, name)(**given, **eager)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = {n: counted(network, n) for n in (SHORT, LONG)}
    square = (found[LONG] / LONG - found[SHORT] / SHORT) / (LONG - SHORT)
    linear = found[SHORT] / SHORT - square * SHORT
    model = ov.Model.from_config(config.to_dict())
    assert model.per_token == pytest.approx(linear, rel=0.01)
    # the eager attention computes every pair, of which the mask leaves half
    assert 2 * model.layers * model.per_pair == pytest.approx(square, rel=0.01)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_windows_are_those_of_the_masks_of_each_layer(family: str) -> None:
    """Pairs that the masks of the network leave, layer by layer."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    name, given = FAMILIES[family]
    config = getattr(transformers, name)(
        **{**given, "sliding_window": 16}, attn_implementation="eager"
    )
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    embeds = torch.zeros(1, 400, 8)
    pairs = 0
    for kind in kinds:
        mask = makers[kind](
            config=config,
            inputs_embeds=embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.arange(400)[None],
        )
        pairs += int((mask == 0).sum())
    model = ov.Model.from_config(config.to_dict())
    attention = float(model.flops(400)) - 400 * model.per_token
    # per_pair is per length squared, which is twice the number of pairs of a causal mask
    assert attention / (2 * model.per_pair) == pytest.approx(pairs, rel=0.01)
