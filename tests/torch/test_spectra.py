"""Spectra of weights: exponents against numpy written from the papers and the published code, the
matrices of models, the table, the plot and the command.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import overlord.torch as ot  # noqa: E402
from overlord.cli.main import cli  # noqa: E402
from overlord.errors import JobError  # noqa: E402
from overlord.torch.fused_projections import FusedRules  # noqa: E402
from overlord.torch.sharded_gram import between, exponents, shares, within  # noqa: E402
from overlord.torch.tail_exponent import Estimator, window_starts  # noqa: E402
from overlord.torch.weight_matrices import (  # noqa: E402
    MatrixRules,
    block_of,
    checkpoint_matrices,
    model_matrices,
    named_parameters,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices of this size only wait for more threads, the longer the busier the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# oracles: singular values and sums, term by term


def squared_singular_values(w: np.ndarray) -> list[float]:
    return sorted(float(s) ** 2 for s in np.linalg.svd(w.astype(np.float64), compute_uv=False))


def paper_alpha(lam: list[float], k: int) -> float:
    """1 + k / sum over the k largest of ln(value / the value below them), as in the paper."""
    n = len(lam)
    return 1 + k / sum(math.log(lam[n - j] / lam[n - k - 1]) for j in range(1, k + 1))


def published_alpha(lam: list[float], xmin_pos: float = 2) -> float:
    """The arithmetic of the published code: the tail holds its threshold."""
    i = int(len(lam) / xmin_pos)
    n = len(lam) - i
    return 1 + n / (sum(math.log(x) for x in lam[i:]) - n * math.log(lam[i]))


def published_best_fit(lam: list[float]) -> float:
    alphas, distances = [], []
    for i, xmin in enumerate(lam[:-1]):
        n = len(lam) - i
        alpha = 1 + n / (sum(math.log(x) for x in lam[i:]) - n * math.log(xmin))
        alphas.append(alpha)
        distances.append(
            max(abs(1 - (x / xmin) ** (1 - alpha) - r / n) for r, x in enumerate(lam[i:]))
        )
    return alphas[int(np.argmin(distances))]


def windows_alpha(w: np.ndarray) -> float:
    """Blocks of the height of the short side, one below the other, spectra pooled."""
    tall = w if w.shape[0] >= w.shape[1] else w.T
    side = tall.shape[1]
    assert len(tall) % side == 0
    pooled = sorted(
        x for at in range(0, len(tall), side) for x in squared_singular_values(tall[at : at + side])
    )
    return paper_alpha(pooled, len(pooled) // 2)


def weight(*shape: int, seed: int = 0, tail: float = 0.7) -> torch.Tensor:
    """Gaussian with rows of very different sizes: the spectrum has a heavy tail."""
    rng = np.random.default_rng(seed)
    sizes = rng.pareto(1 / tail, shape[0]) + 0.1
    return torch.from_numpy((rng.standard_normal(shape).T * sizes).T.astype(np.float32))


def linear(w: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data = w.clone()
    return layer


def alphas(model: nn.Module, name: str = "hill", rules: MatrixRules | None = None, **more) -> dict:
    matrices = model_matrices(model, rules)
    found = exponents(matrices, named_parameters(model).__getitem__, Estimator(name=name, **more))
    return dict(zip([m.name for m in matrices], found.tolist(), strict=True))


@pytest.mark.parametrize("shape", [(64, 64), (96, 64), (64, 128), (51, 77), (130, 65)])
def test_exponents_are_those_of_the_paper_and_of_the_published_code(shape: tuple[int, int]):
    w = weight(*shape)
    lam = squared_singular_values(w.numpy())
    model = nn.ModuleList([linear(w)])
    n = len(lam)
    assert alphas(model)["0.weight"] == pytest.approx(paper_alpha(lam, n - n // 2), rel=1e-9)
    assert alphas(model, "published")["0.weight"] == pytest.approx(published_alpha(lam), rel=1e-9)
    assert alphas(model, "published", xmin_pos=1.5)["0.weight"] == pytest.approx(
        published_alpha(lam, 1.5), rel=1e-9
    )
    assert alphas(model, "ks")["0.weight"] == pytest.approx(published_best_fit(lam), rel=1e-6)


def test_the_paper_and_the_published_code_differ_by_the_threshold_only():
    lam = squared_singular_values(weight(100, 100).numpy())
    hill, published = Estimator(name="hill"), Estimator(name="published")
    assert hill.alpha(np.array(lam)) != published.alpha(np.array(lam))
    # with the threshold one place lower, and one term fewer, the paper's formula is the code's
    n = 50
    logs = sum(math.log(x / lam[50]) for x in lam[50:])
    assert published.alpha(np.array(lam)) == pytest.approx(1 + n / logs)


def test_a_square_window_is_the_whole_matrix_and_windows_pool():
    square, tall, wide = weight(64, 64), weight(192, 64, seed=1), weight(64, 256, seed=2)
    model = nn.ModuleList([linear(w) for w in (square, tall, wide)])
    found, whole = alphas(model, "farms"), alphas(model)
    assert found["0.weight"] == whole["0.weight"]
    for k, w in ((1, tall), (2, wide)):
        assert found[f"{k}.weight"] == pytest.approx(windows_alpha(w.numpy()), rel=1e-9)


def test_windows_cover_the_long_side_and_overlap_only_where_they_must():
    for long, short in [(64, 64), (65, 64), (128, 64), (1000, 64), (7, 3), (3, 7)]:
        starts = window_starts(long, short)
        assert starts[0] == 0
        covered = {row for at in starts for row in range(at, min(at + short, long))}
        assert covered == set(range(long))
        assert len(starts) == max(1, math.ceil(long / short))


def test_the_aspect_ratio_biases_the_exponent_and_windows_remove_the_bias():
    """All three are Gaussian noise: nothing distinguishes them but their shape."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256 * k, bias=False) for k in (1, 4, 8)]
    for layer in layers:
        nn.init.normal_(layer.weight)
    biased = list(alphas(nn.ModuleList(layers)).values())
    fair = list(alphas(nn.ModuleList(layers), "farms").values())
    assert biased[1] - biased[0] > 1.0
    assert biased[2] - biased[1] > 0.5
    assert max(fair) - min(fair) < 0.06


def test_the_gram_matrix_gives_the_exponent_of_the_singular_values_in_float32_too(monkeypatch):
    monkeypatch.setattr("overlord.torch.sharded_gram.EXACT", 0)
    w = weight(200, 120)
    lam = squared_singular_values(w.numpy())
    found = alphas(nn.ModuleList([linear(w)]))["0.weight"]
    assert found == pytest.approx(paper_alpha(lam, 60), rel=1e-4)


def test_half_precision_weights_have_almost_the_same_exponent():
    w = weight(128, 128)
    exact = alphas(nn.ModuleList([linear(w)]))["0.weight"]
    rounded = alphas(nn.ModuleList([linear(w).to(torch.bfloat16)]))["0.weight"]
    assert rounded == pytest.approx(exact, abs=2e-3)


def test_autocast_tf32_and_gradients_do_not_reach_the_spectra(monkeypatch):
    monkeypatch.setattr("overlord.torch.sharded_gram.EXACT", 0)  # autocast leaves float64 alone
    model = nn.ModuleList([linear(weight(128, 128))])
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = alphas(model)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert inside == alphas(model)
    assert model[0].weight.grad_fn is None


@pytest.mark.parametrize("name", ["hill", "farms", "ks", "published"])
def test_degenerate_matrices_have_no_exponent(name: str):
    low_rank = torch.randn(64, 4) @ torch.randn(4, 64)
    cases = {
        "zero": torch.zeros(64, 64),
        "orthogonal": torch.linalg.qr(torch.randn(64, 64))[0],
        "small": torch.randn(8, 64),
    }
    if name != "ks":  # it fits the eigenvalues that are not zero
        cases["low rank"] = low_rank
    for what, w in cases.items():
        assert math.isnan(alphas(nn.ModuleList([linear(w)]), name)["0.weight"]), what
    broken = weight(64, 64)
    broken[3, 5] = math.nan
    model = nn.ModuleList([linear(broken), linear(weight(64, 64))])
    found = alphas(model, name)
    assert found["0.weight"] == math.inf
    assert math.isfinite(found["1.weight"]), "a neighbour in the same batch is not affected"


def test_equal_sizes_are_solved_at_once_and_a_small_budget_changes_nothing(monkeypatch):
    model = nn.ModuleList([linear(weight(64, 96, seed=k)) for k in range(5)])
    calls = []
    solve = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: calls.append(len(a)) or solve(a))
    found = alphas(model)
    assert calls == [5]
    monkeypatch.setattr("overlord.torch.sharded_gram.BATCH_BYTES", 2 * 64 * 64 * 8)
    assert alphas(model) == pytest.approx(found)
    assert calls == [5, 2, 2, 1]


def test_unknown_settings_are_refused_together():
    with pytest.raises(JobError, match=r"3 problems(.|\n)*expected one of hill, farms"):
        Estimator(name="median", xmin_pos=1.0, min_eigs=1)


# the matrices of models


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("encoder.layers.0.fc.weight", "encoder.layers.0"),
        ("decoder.layers.0.fc.weight", "decoder.layers.0"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "encoder.block.0"),
        ("model.layers.5.mlp.experts.3.w1.weight", "model.layers.5"),
        ("swin.encoder.layers.2.blocks.1.attn.qkv.weight", "swin.encoder.layers.2.blocks.1"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("model.layers.0.mlp.2.weight", "model.layers.0"),
        ("lm_head.weight", ""),
    ],
)
def test_the_block_of_a_parameter_is_a_whole_path(name: str, block: str):
    assert block_of(name) == block


class Separate(nn.Module):
    def __init__(self, parts: list[torch.Tensor]):
        super().__init__()
        self.layers = nn.ModuleList([linear(p) for p in parts])


class Attention(nn.Module):
    def __init__(self, name: str, w: torch.Tensor, config: object = None):
        super().__init__()
        self.add_module(name, linear(w))
        if config is not None:
            self.config = config


@pytest.mark.parametrize("name", ["hill", "farms"])
def test_a_split_qkv_has_the_exponents_of_separate_projections(name: str):
    q, k, v = weight(128, 128, seed=1), weight(64, 128, seed=2), weight(64, 128, seed=3)
    config = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=4, head_dim=16, hidden_size=128
    )
    fused = nn.ModuleDict({"attn": Attention("qkv_proj", torch.cat([q, k, v]), config)})
    expected = list(alphas(Separate([q, k, v]), name).values())
    found = alphas(fused, name)
    assert list(found) == [f"attn.qkv_proj.weight[{part}]" for part in "qkv"]
    assert list(found.values()) == pytest.approx(expected, rel=1e-9)
    one = alphas(fused, name, MatrixRules(fused=FusedRules(sizes={"*qkv_proj*": (256,)})))
    stack = next(iter(one.values()))
    assert abs(stack - np.mean(expected)) > 0.01, "a stack is not the mean of its parts"


def test_other_fused_forms_are_split_the_same_way():
    q, k, v = (weight(64, 64, seed=s) for s in range(3))
    expected = pytest.approx(list(alphas(Separate([q, k, v])).values()), rel=1e-9)
    # columns, as GPT-2 stores them
    gpt2 = pytest.importorskip("transformers.pytorch_utils").Conv1D(192, 64)
    gpt2.weight.data = torch.cat([q, k, v]).T.contiguous()
    assert list(alphas(nn.ModuleDict({"c_attn": gpt2})).values()) == expected
    attention = nn.MultiheadAttention(64, 4, bias=False)
    attention.in_proj_weight.data = torch.cat([q, k, v])
    found = alphas(attention)
    assert list(found)[:3] == [f"in_proj_weight[{part}]" for part in "qkv"]
    assert list(found.values())[:3] == expected
    # head by head, as GPT-NeoX stores them
    heads = torch.stack([w.reshape(4, 16, 64) for w in (q, k, v)], dim=1).reshape(192, 64)
    neox = SimpleNamespace(num_attention_heads=4, hidden_size=64, model_type="gpt_neox")
    model = Attention("query_key_value", heads, neox)
    assert list(alphas(model).values()) == expected
    assert list(alphas(Attention("gate_up_proj", torch.cat([q, k])))) == [
        "gate_up_proj.weight[gate]",
        "gate_up_proj.weight[up]",
    ]


SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        (
            "Phi3",
            {},
            {
                "qkv_proj.weight[q]": (64, 64),
                "qkv_proj.weight[k]": (32, 64),
                "gate_up_proj.weight[up]": (96, 64),
            },
        ),
        (
            "Mixtral",
            {"num_local_experts": 2},
            {"experts.gate_up_proj[1][gate]": (96, 64), "experts.down_proj[0]": (64, 96)},
        ),
        (
            "GptOss",
            {"num_local_experts": 2, "head_dim": 16},
            {"experts.gate_up_proj[1][gate]": (64, 96), "experts.down_proj[0]": (96, 64)},
        ),
    ],
)
def test_models_of_transformers_are_split_as_they_compute(name, more, expected):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    found = {m.name: m for m in model_matrices(model)}
    assert {m.block for m in found.values()} == {"model.layers.0"}
    assert not [n for n in found if n.endswith("bias")]
    for end, shape in expected.items():
        (matrix,) = (m for n, m in found.items() if n.endswith(end))
        assert (matrix.rows, matrix.cols) == shape


def test_gates_of_recurrent_layers_are_matrices_of_their_own():
    torch.manual_seed(0)
    layer = nn.LSTM(64, 64, bias=False, proj_size=52)
    found = alphas(nn.ModuleDict({"rnn": layer}))
    assert list(found) == [
        *(f"rnn.weight_ih_l0[{k}]" for k in range(4)),
        *(f"rnn.weight_hh_l0[{k}]" for k in range(4)),
        "rnn.weight_hr_l0",
    ]
    expected = alphas(Separate(list(layer.weight_ih_l0.detach().split(64))))
    assert list(found.values())[:4] == pytest.approx(list(expected.values()), rel=1e-9)


def test_a_projection_of_unknown_parts_is_one_matrix_and_a_warning_names_the_remedy(caplog):
    model = Attention("qkv_proj", weight(100, 64))
    assert list(alphas(model)) == ["qkv_proj.weight"]
    assert 'fused={"*.qkv_proj.weight": (4096, 1024, 1024)}' in caplog.text
    sizes = FusedRules(sizes={"*qkv_proj*": (60, 20, 20)})
    assert len(alphas(model, rules=MatrixRules(fused=sizes))) == 3
    caplog.clear()
    alphas(model, rules=MatrixRules(fused=FusedRules(sizes={"*qkv_proj*": (60, 20, 10)})))
    assert "expected an axis of 90" in caplog.text


def test_experts_of_a_stack_are_matrices_of_their_own():
    parts = [[weight(64, 96, seed=10 * e + p) for p in range(2)] for e in range(3)]
    model = nn.Module()
    model.experts = nn.Module()
    stack = torch.stack([torch.cat(p) for p in parts])
    model.experts.gate_up_proj = nn.Parameter(stack)
    model.config = SimpleNamespace(moe_intermediate_size=64)
    found = alphas(model)
    assert list(found)[:3] == [
        f"experts.gate_up_proj{e}" for e in ("[0][gate]", "[0][up]", "[1][gate]")
    ]
    expected = alphas(Separate([w for pair in parts for w in pair]))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-9)
    # columns of gate and up alternate, as gpt-oss stores them
    pairs = [torch.stack([g.T, u.T], dim=-1).flatten(-2) for g, u in parts]
    model.experts.gate_up_proj = nn.Parameter(torch.stack(pairs))
    model.config = SimpleNamespace(intermediate_size=64, model_type="gpt_oss")
    assert list(alphas(model).values()) == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_pools_its_kernel_positions(groups: int):
    torch.manual_seed(1)
    layer = nn.Conv2d(32, 48, 3, groups=groups)
    w = layer.weight.detach().double().numpy()
    pooled = sorted(
        x
        for g in range(groups)
        for i in range(3)
        for j in range(3)
        for x in squared_singular_values(w[g * 48 // groups : (g + 1) * 48 // groups, :, i, j])
    )
    found = alphas(nn.ModuleDict({"conv": layer}))
    assert list(found) == ["conv.weight"]
    assert found["conv.weight"] == pytest.approx(paper_alpha(pooled, len(pooled) // 2), rel=1e-9)
    # a kernel of one position is a matrix; the published code takes norms of rows there
    one = nn.Conv1d(64, 64, 1)
    lam = squared_singular_values(one.weight.detach().numpy()[:, :, 0])
    found = alphas(nn.ModuleDict({"conv": one}))
    assert found["conv.weight"] == pytest.approx(paper_alpha(lam, 32), rel=1e-9)


def test_complex_spectral_weights_pool_their_modes():
    torch.manual_seed(2)
    model = nn.Module()
    model.modes = nn.Parameter(torch.randn(20, 20, 6, dtype=torch.cfloat))
    w = model.modes.detach().numpy()
    pooled = sorted(
        float(s) ** 2
        for mode in range(6)
        for s in np.linalg.svd(w[:, :, mode].astype(np.complex128), compute_uv=False)
    )
    assert alphas(model)["modes"] == pytest.approx(paper_alpha(pooled, 60), rel=1e-6)


class Lora(nn.Module):
    """A layer as peft makes it."""

    def __init__(self, w: torch.Tensor, rank: int):
        super().__init__()
        self.base_layer = linear(w)
        self.base_layer.weight.requires_grad = False
        self.lora_A = nn.ModuleDict({"default": nn.Linear(w.shape[1], rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, w.shape[0], bias=False)})
        self.scaling = {"default": 2.0}


def test_a_matrix_with_adapters_is_the_sum_and_the_adapters_learn_it():
    w = weight(64, 96)
    layer = Lora(w, 4)
    nn.init.normal_(layer.lora_B["default"].weight, std=3.0)
    whole = (
        w + 2.0 * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()
    )
    model = nn.ModuleDict({"q_proj": layer})
    (matrix,) = model_matrices(model)
    assert matrix.targets == ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight")
    found = alphas(model)["q_proj.base_layer.weight"]
    lam = squared_singular_values(whole.numpy())
    assert found == pytest.approx(paper_alpha(lam, 32), rel=1e-5)
    adapted = nn.ModuleDict({"qkv_proj": Lora(weight(192, 64), 4)})
    assert [m.name for m in model_matrices(adapted)] == [
        f"qkv_proj.base_layer.weight[{part}]" for part in "qkv"
    ]


def test_embeddings_and_outputs_tied_to_them_are_left_out():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(100, 64)
            self.fc = nn.Linear(64, 64)
            self.out = nn.Linear(64, 100, bias=False)
            self.out.weight = self.tokens.weight
            self.again = self.fc

    model = Tied()
    assert list(alphas(model)) == ["fc.weight"]
    assert list(alphas(torch.compile(model))) == ["fc.weight"]
    model.lm_head = nn.Linear(64, 100)
    assert list(alphas(model)) == ["fc.weight"]
    assert list(alphas(model, rules=MatrixRules(skip=("fc",)))) == ["lm_head.weight"]


def test_a_pattern_matches_whole_components():
    rules = MatrixRules(skip=("wi", "*.q.*"))
    assert rules.skips("block.wi.weight")
    assert not rules.skips("block.wi_0.weight")
    assert rules.skips("block.q.weight")


# sharding arithmetic that needs no processes


def test_work_goes_to_the_rank_with_the_least():
    owner = shares([5, 9, 3, 3, 4], 2)
    loads = [sum(c for c, o in zip([5, 9, 3, 3, 4], owner, strict=True) if o == r) for r in (0, 1)]
    assert sorted(loads) == [12, 12]
    assert shares([1, 1], 4) == [0, 1]


def test_ranges_are_cut_and_clipped():
    assert between(((10, 14), (20, 24)), 2, 6) == ((12, 14), (20, 22))
    assert between(((0, 5),), 5, 7) == ()
    assert within(((0, 10), (20, 30)), (5, 25)) == ((0, 5), (15, 20))
    assert within(((0, 3),), (4, 8)) == ()


# the table, the plot and the command


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(
        [nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)}) for _ in range(3)]
    )
    model.embed_tokens = nn.Embedding(50, 64)
    return model


def test_spectra_of_a_model_are_a_table_and_a_plot(tmp_path: Path):
    model = small_model()
    found = ot.spectra(model)
    assert len(found) == 6
    assert list(found.alphas) == [
        f"layers.{i}.{n}.weight" for i in range(3) for n in ("up", "down")
    ]
    row = next(iter(found))
    sigma = np.linalg.svd(model.layers[0]["up"].weight.detach().numpy(), compute_uv=False)
    assert row.norm == pytest.approx(sigma[0], rel=1e-5)
    assert row.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-5)
    text = str(found).splitlines()
    assert text[0].split() == ["matrix", "shape", "eigenvalues", "alpha", "norm", "stable", "rank"]
    assert text[1].split()[:4] == ["layers.0.up.weight", "96x64", "64", f"{row.alpha:.3f}"]
    assert found.metrics() == {
        f"alpha/layers.{i}": a for i, a in enumerate(found.blocks().values())
    }
    svg = found.plot(tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_text() == svg
    paths = [e for e in ElementTree.fromstring(svg).iter() if e.get("class") == "line"]
    assert len(paths) == 3  # up, down and their mean
    assert all(p.get("d", "").count("L") == 2 for p in paths)


def test_a_model_without_exponents_still_has_a_plot():
    model = nn.Linear(4, 4)
    found = ot.spectra(model)
    assert math.isnan(found.alphas["weight"])
    assert found.to_dict()["matrices"][0]["alpha"] is None
    ElementTree.fromstring(found.plot())
    nothing = ot.spectra(nn.LayerNorm(4))
    assert len(nothing) == 0
    assert str(nothing).split()[0] == "matrix"
    ElementTree.fromstring(nothing.plot())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save = pytest.importorskip("safetensors.torch").save_file
    save(small_model().to(torch.bfloat16).state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def run(*args: object) -> object:
    return CliRunner().invoke(cli, ["spectra", *map(str, args)])


def test_the_command_prints_what_the_model_has(checkpoint: Path, tmp_path: Path):
    result = run(checkpoint, "--json", "--plot", tmp_path / "plot.svg")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    expected = ot.spectra(small_model().to(torch.bfloat16)).to_dict()
    assert printed["estimator"] == "hill"
    assert sorted(m["name"] for m in printed["matrices"]) == sorted(
        m["name"] for m in expected["matrices"]
    )
    assert printed["blocks"] == pytest.approx(expected["blocks"])
    ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    table = run(checkpoint, "--estimator", "farms", "--skip", "down").stdout
    assert "layers.2.up.weight" in table
    assert "down" not in table
    assert "layers.1: mean alpha" in table


def test_the_command_reads_folders_and_indexes_and_their_config(tmp_path: Path):
    save = pytest.importorskip("safetensors.torch").save_file
    q, k, v = weight(64, 64), weight(32, 64, seed=1), weight(32, 64, seed=2)
    save({"model.layers.0.attn.qkv_proj.weight": torch.cat([q, k, v])}, tmp_path / "a.safetensors")
    quantised = torch.ones(64, 64, dtype=torch.int8)
    save(
        {"model.layers.1.conv.weight": torch.randn(8, 8, 3, 3), "q.weight": quantised},
        tmp_path / "b.safetensors",
    )
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    names = {
        "model.layers.0.attn.qkv_proj.weight": "a.safetensors",
        "model.layers.1.conv.weight": "b.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for target in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = json.loads(run(target, "--json", "--min-eigs", "20").stdout)["matrices"]
        assert [m["name"].rpartition(".")[2] for m in found] == [
            "weight[q]",
            "weight[k]",
            "weight[v]",
            "weight",
        ]
    lam = squared_singular_values(k.numpy())
    assert found[1]["alpha"] == pytest.approx(paper_alpha(lam, 16), rel=1e-5)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "got nothing there"), (b"no tensors", "expected a whole file of safetensors")],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, content: bytes | None, says: str):
    pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    result = run(path)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "x.safetensors" in result.stderr


def test_a_checkpoint_that_was_not_copied_whole_is_named(tmp_path: Path):
    save = pytest.importorskip("safetensors.torch").save_file
    save({"layers.0.weight": torch.randn(64, 64)}, tmp_path / "a.safetensors")
    names = {"layers.0.weight": "a.safetensors", "layers.1.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "all 2 files of the index in its folder, got none of b.safetensors" in result.stderr
    assert "copy these files too" in result.stderr
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-100])
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "b.safetensors: expected a whole file of safetensors" in result.stderr
    assert "copy it again if it is cut off" in result.stderr


def test_a_plot_in_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path):
    result = run(tmp_path, "--plot", tmp_path / "none" / "x.svg")
    assert result.exit_code == 2
    assert "--plot: expected a file in a folder that exists" in result.stderr


def test_without_safetensors_the_command_says_what_to_install(checkpoint: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    result = run(checkpoint)
    assert result.exit_code == 2
    assert "pip install 'overlord-data[spectra]'" in result.stderr


def test_shapes_of_a_checkpoint_say_what_is_a_matrix():
    shapes = {
        "model.embed_tokens.weight": (100, 64),
        "model.layers.0.mlp.experts.down_proj": (4, 64, 32),
        "model.norm.weight": (64,),
        "conv.weight": (16, 8, 5),
    }
    found = checkpoint_matrices(shapes)
    assert [(m.name, m.rows, m.cols, m.stack) for m in found[-2:]] == [
        ("model.layers.0.mlp.experts.down_proj[3]", 64, 32, 1),
        ("conv.weight", 16, 8, 5),
    ]
    assert len(found) == 5
