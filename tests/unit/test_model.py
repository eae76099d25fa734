"""``ov.Model``: its shapes, its FLOPs, configurations of other libraries, and its use in jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord import cost
from overlord.observe.balancing_model import shown_model
from overlord.planning.cost.models import DENSE_12B
from overlord.planning.cost.on_rings import RING_12B
from overlord.planning.strategies import STRATEGIES

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
GEMMA_4B = {  # as published: heads and vocabulary have the defaults of the family
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
QWEN_VL = {  # keys of the backbone next to those of the encoder
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "temporal_patch_size": 2,
    },
}
SMALL = ov.Model(256, 4, 4, 2, ffn=512, name="small")
LOCAL = ov.Model(256, 4, 4, 2, ffn=512, window=64, global_layers=1)


def test_a_model_of_the_shapes_of_a_cost_has_the_flops_of_that_cost() -> None:
    lengths = np.array([1, 7, 64, 4096, 65_536])
    shapes: dict[str, Any] = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8}
    for more in (
        {"ffn": 14_336, "vocab": 128_256},
        {"ffn": 14_336, "window": 4096},
        {"gated": False},
        {"ffn": 14_336, "experts": 8, "active_experts": 2},
    ):
        expected = cost.transformer(**shapes, **more)({"tokens": lengths})
        assert ov.Model(**shapes, **more).flops(lengths) == pytest.approx(expected, rel=1e-12)


def test_a_model_is_the_cost_of_a_known_network() -> None:
    model = ov.Model.from_config(LLAMA_8B)
    # 8.03 billion parameters, of which the embedding table multiplies nothing
    assert model.per_token == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)
    assert model.kv_bytes == 131_072  # 128 KiB a token in 16 bits


@given(
    window=st.integers(1, 40),
    whole=st.integers(0, 3),
    length=st.integers(0, 100),
    causal=st.booleans(),
)
def test_flops_count_every_pair_of_tokens_that_attend(
    window: int, whole: int, length: int, causal: bool
) -> None:
    model = ov.Model(16, 3, 2, ffn=32, window=window, global_layers=whole, causal=causal)
    i, j = np.indices((length, length))
    full = (j <= i) if causal else np.ones_like(i, bool)
    near = (j <= i) & (i - j < window) if causal else (i // window == j // window)
    pairs = whole * full.sum() + (3 - whole) * near.sum()
    per = 4 * 2 * 8  # two products of 2 FLOPs for each channel of both heads
    attention = float(model.flops(length)) - model.per_token * length
    slack = per * 3 * (length / 2 if causal else window * window)  # diagonals; the last block
    assert abs(attention - per * pairs) <= slack + 1e-6


def test_the_representation_of_a_model_shows_what_was_given_and_can_be_evaluated() -> None:
    model = ov.Model.from_config(GEMMA_4B)
    shown = repr(model)
    assert shown.startswith("Model('gemma3', hidden=2560, layers=34, heads=8, kv_heads=4, ")
    assert "gated" not in shown.split("encoder")[0]
    text = shown.replace("Model('gemma3', ", "Model(").replace(
        "Model('siglip_vision_model', ", "Model("
    )
    assert eval(text, {"Model": ov.Model}) == model


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"heads": 0}, "model.heads: expected a whole number of at least 1, got 0"),
        ({"layers": None}, "model.layers: expected a whole number of at least 1, got None"),
        ({"kv_heads": 3}, "model.kv_heads: expected a divisor of heads=4, got 3"),
        ({"hidden": 250}, "model.hidden: expected a multiple of heads=4, got 250; give head_dim"),
        ({"experts": 8}, "model.active_experts: expected 1 to experts=8, got None"),
        ({"expert_ffn": 8}, "model.expert_ffn: expected experts next to it, got none"),
        ({"global_layers": 1}, "model.global_layers: expected window next to it, got none"),
        (
            {"window": 8, "global_layers": 9},
            "model.global_layers: expected at most layers=4, got 9",
        ),
        ({"rope_dim": 8}, "model.kv_rank: expected a rank for latent attention, got none"),
        ({"gated": 1}, "model.gated: expected true or false, got 1"),
        ({"encoder": 1}, "model.encoder: expected an ov.Model, got 1"),
        ({"hidden": True}, "model.hidden: expected a whole number of at least 1, got True"),
    ],
)
def test_shapes_that_are_no_model_are_refused(shapes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ov.JobError) as error:
        ov.Model(**{"hidden": 256, "layers": 4, "heads": 4, **shapes})
    assert problem in str(error.value)


# configurations


def test_windows_follow_the_pattern_of_a_family() -> None:
    gemma = ov.Model.from_config(GEMMA_4B)
    assert (gemma.window, gemma.global_layers) == (1024, 5)
    listed = ["sliding_attention"] * 3 + ["full_attention"]
    given = {**LLAMA_8B, "num_hidden_layers": 4, "sliding_window": 512, "layer_types": listed}
    assert ov.Model.from_config(given).global_layers == 1
    assert ov.Model.from_config({**LLAMA_8B, "sliding_window": 512}).full_layers == 0
    assert ov.Model.from_config(QWEN_VL).window is None
    some = {**QWEN_VL, "use_sliding_window": True, "max_window_layers": 20}
    assert ov.Model.from_config(some).global_layers == 20


def test_an_image_encoder_is_read_from_its_own_part() -> None:
    encoder = ov.Model.from_config(QWEN_VL).encoder
    assert encoder is not None
    assert (encoder.hidden, encoder.layers, encoder.ffn) == (1280, 32, 5120)
    assert not encoder.causal
    assert encoder.inputs == 14 * 14 * 3 * 2
    siglip = ov.Model.from_config(GEMMA_4B).encoder
    assert siglip is not None
    # a SigLIP of 0.4B parameters
    assert siglip.per_token == pytest.approx(2 * 0.41e9, rel=0.03)
    fields = {**QWEN_VL["vision_config"], "hidden_size": 1280, "intermediate_size": 3420}  # type: ignore[dict-item]
    del fields["embed_dim"]
    new = ov.Model.from_config(
        {
            **QWEN_VL,
            "model_type": "qwen2_5_vl",
            "vision_config": {
                **fields,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        }
    ).encoder
    assert new is not None
    assert (new.window, new.global_layers, new.gated) == (64, 4, True)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"model_type": "new"},
            "4 problems\n  - expected hidden_size or n_embd or d_model or dim, got none",
        ),
        ({**LLAMA_8B, "num_attention_heads": "32"}, "num_attention_heads or n_head"),
        ({**LLAMA_8B, "intermediate_size": None}, "expected intermediate_size or n_inner"),
        ({**LLAMA_8B, "n_routed_experts": 4}, "next to experts, got none"),
        ({**LLAMA_8B, "kv_lora_rank": 64}, "expected qk_nope_head_dim and v_head_dim"),
        ({**LLAMA_8B, "layer_types": ["linear_attention"]}, "layer_types: expected full_attention"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "got an encoder and a decoder"),
        ({**LLAMA_8B, "vision_config": {"hidden_size": 8}}, "vision_config: expected depth"),
    ],
)
def test_a_configuration_without_needed_keys_is_refused_with_all_of_them(
    keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ov.JobError) as error:
        ov.Model.from_config(keys)
    assert problem in str(error.value)
    assert "ov.Model(...)" in str(error.value)


def test_fields_replace_those_of_a_configuration() -> None:
    assert ov.Model.from_config(LLAMA_8B, gated=False, vocab=None).vocab is None
    unnamed = {key: value for key, value in LLAMA_8B.items() if key != "intermediate_size"}
    assert ov.Model.from_config(unnamed, ffn=99).ffn == 99
    with pytest.raises(ov.JobError, match="did you mean 'hidden'"):
        ov.Model.from_config(LLAMA_8B, hiden=3)


def test_a_file_and_its_folder_give_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    expected = ov.Model.from_config(LLAMA_8B)
    assert ov.Model.from_config(path) == ov.Model.from_config(str(tmp_path)) == expected
    for text, problem in (("{", "expected JSON"), ("[]", "expected a JSON object")):
        path.write_text(text)
        with pytest.raises(ov.JobError, match=problem):
            ov.Model.from_config(path)
    with pytest.raises(ov.JobError, match="No such file"):
        ov.Model.from_config(tmp_path / "none.json")
    with pytest.raises(ov.JobError, match=r"expected a config.json or a dict"):
        ov.Model.from_config(3)  # type: ignore[arg-type]


# costs and strategies


def buffer_of(model: ov.Model | None, **columns: Any) -> ov.Buffer:
    lengths = np.random.default_rng(0).integers(16, 4096, 64)
    buffer = ov.Buffer.from_columns(
        {"web": {"tokens": lengths, **columns}},
        batch=ov.Batch(samples=64, context=8192, microbatches=2),
        model=model,
    )
    return replace(buffer, drawn=True)


IMAGES = {"image_patches": ov.Ragged.from_rows([[4, 8], [16]] * 32)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_balances_by_the_model_of_the_job(strategy: str) -> None:
    buffer = buffer_of(LOCAL, **({} if strategy == "hdp_balance" else IMAGES))
    main = STRATEGIES[strategy](buffer, ov.Mesh(dp=4)).main
    lengths = buffer.column("tokens")
    assert isinstance(lengths, np.ndarray)
    expected = LOCAL.flops(lengths)
    if strategy != "hdp_balance":
        assert np.array_equal(main.cost, expected)
        return
    ring = cost.ring_of(LOCAL)
    assert ring.linear > 3 * LOCAL.per_token / 500e12  # windows are counted by token
    assert "RingCosts(linear=" + repr(ring.linear)[:8] in "".join(
        STRATEGIES[strategy](buffer, ov.Mesh(dp=4)).extra["trail"]
    )


@pytest.mark.parametrize("strategy", ["vlm_hybrid", "encoder_balance"])
def test_images_cost_what_the_encoder_of_the_model_needs(strategy: str) -> None:
    encoder = ov.Model(64, 2, 2, ffn=128, gated=False, causal=False, inputs=588)
    model = ov.Model(256, 4, 4, 2, ffn=512, encoder=encoder)
    plan = STRATEGIES[strategy](buffer_of(model, **IMAGES), ov.Mesh(dp=4))
    patches = np.array([4, 8, 16] * 32)
    assert np.array_equal(plan.modules["encoder"].cost, encoder.flops(patches))
    without = STRATEGIES[strategy](buffer_of(SMALL, **IMAGES), ov.Mesh(dp=4))
    assert np.array_equal(without.modules["encoder"].cost, cost.vit_1b({"image_patches": patches}))


def test_grouped_queries_move_fewer_bytes_on_rings() -> None:
    whole, grouped = ov.Model(4096, 32, 32), ov.Model(4096, 32, 32, 8)
    assert cost.ring_of(whole).token_bytes == 4 * cost.ring_of(grouped).token_bytes
    assert cost.ring_of(None) is RING_12B
    assert cost.of_model(None) is DENSE_12B
    # the model that is assumed, as a model
    same = cost.ring_of(ov.Model(4608, 45, 36))
    assert same.linear == pytest.approx(RING_12B.linear)
    assert same.square == pytest.approx(RING_12B.square)
    assert same.token_bytes == RING_12B.token_bytes
    with_window = cost.ring(cost.of_model(LOCAL), per_second=1e12)
    assert with_window.square == pytest.approx(LOCAL.per_pair / 1e12)


def test_the_texts_of_strategies_stay_whatever_the_model() -> None:
    """A state resumes under another model, so a strategy's own text must not name it."""
    assert "hdp(RingCosts(linear=" in ov.strategy.hdp().fingerprint
    vlm: Any = ov.strategy.vlm()
    assert cost.fingerprint_of(DENSE_12B) in vlm.fingerprint


# jobs


def job_of(**fields: Any) -> ov.Job:
    rows = [{"tokens": list(range(1, n % 61 + 3))} for n in range(400)]
    batch = ov.Batch(samples=16, context=128, microbatches=2)
    given: dict[str, Any] = {
        "name": "model",
        "sources": [ov.Source.from_dataset("rows", rows)],
        "place": ov.Mesh(dp=2),
        "batch": batch,
        "until": 6,
    }
    return ov.Job(**{**given, **fields})


def drawn(session: Any, steps: range) -> list[set[str]]:
    found = []
    for step in steps:
        plan = session.plan(step)
        found.append({f"{r}/{p}" for r, p in zip(plan.row, plan.part, strict=True)})
    return found


def test_a_state_resumes_under_another_model_with_the_same_samples_in_every_step() -> None:
    # one long document costs as much as many short ones only where attention dominates
    wide = ov.Model(8, 1, 1, ffn=1)
    with ov.launch(job_of()) as session:
        clients = [session.client(rank) for rank in (0, 1)]
        for _ in range(3):
            [next(client) for client in clients]
        state = clients[0].state_dict()
        [list(client) for client in clients]
        expected = drawn(session, range(3, 6))
        before = [session.plan(step).digest() for step in range(3, 6)]
    with ov.launch(job_of(model=wide)) as session:
        clients = [session.client(rank) for rank in (0, 1)]
        [client.load_state_dict(state) for client in clients]
        [list(client) for client in clients]
        assert drawn(session, range(3, 6)) == expected
        assert [session.plan(step).digest() for step in range(3, 6)] != before


def test_a_job_without_a_model_says_which_one_is_assumed() -> None:
    assert "12B Llama is assumed" in shown_model(job_of())
    assert shown_model(job_of(model=SMALL)) == "small (hidden 256, 4 layers)"
    assert "window 64 in 3 layers" in shown_model(job_of(model=LOCAL))
    assert shown_model(job_of(strategy=lambda buffer, place: None)) == ""
    with ov.launch(job_of(model=SMALL, until=1)) as session:
        clients = [session.client(rank) for rank in (0, 1)]
        [next(client) for client in clients]
        explained = session.explain(0)
    assert explained.model == "small (hidden 256, 4 layers)"
    assert "model     small (hidden 256, 4 layers)" in str(explained)


def test_a_job_refuses_a_model_of_another_type() -> None:
    with pytest.raises(ov.JobError, match=r"model: expected an ov.Model or None, got 'llama'"):
        job_of(model="llama")


# job files

FILE = """
name: files
sources: {web: {uri: web.parquet}}
batch: {samples: 4, context: 64}
"""


def read(folder: Path, text: str) -> ov.Job:
    path = folder / "job.yaml"
    path.write_text(FILE + text)
    return ov.Job.from_yaml(path)


def test_a_job_file_has_a_model_by_its_fields_or_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(GEMMA_4B))
    expected = ov.Model.from_config(GEMMA_4B)
    for where in ("llama", "llama/config.json", str(tmp_path / "llama")):
        job = read(tmp_path, f"model: {where}")
        assert job.model == expected
    again = tmp_path / "again.yaml"
    again.write_text(job.to_yaml())
    assert ov.Job.from_yaml(again).model == expected
    assert (
        read(tmp_path, "model: {hidden: 256, layers: 4, heads: 4, kv_heads: 2, ffn: 512}").model
        == SMALL
    )
    assert read(tmp_path, "model:").model is None


def test_problems_of_a_model_in_a_job_file_have_its_key(tmp_path: Path) -> None:
    with pytest.raises(ov.JobError) as error:
        read(
            tmp_path, "model: {hidden: 256, layers: 4, heads: 3, kvheads: 2, encoder: {layers: 1}}"
        )
    text = str(error.value)
    assert "model.kvheads: expected a known field, got 'kvheads'; did you mean 'kv_heads'?" in text
    assert "model.encoder.hidden: expected a value, got none" in text
    with pytest.raises(ov.JobError, match=r"model: model config .*: could not be read"):
        read(tmp_path, "model: none")
