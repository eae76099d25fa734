"""Every example runs as a reader would run it, says what it promises, and leaves no file behind."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import rays
from tests.sizes import ALL

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "10_long_short.py": [
        "vanilla: 24 steps take 2.5",
        "balanced: 24 steps take 1.4",
        "balanced, look-ahead 4: 24 steps take 1.1",
    ],
    "01_local.py": ["LoadingPlan(step 0, 64 samples", "expected 60.0%, realised 60.0%"],
    "02_torch_loop.py": ["step 39:"],
    "19_fill_in_middle.py": ["'<fim_prefix>def add_9(x):<", "6 of 12 documents are rearranged"],
    "22_sft.py": [
        "200 steps: loss 5.6",
        " to 0.0",
        "quarantined: message 0: expected a role of system, developer, user",
    ],
    "26_stages.py": [
        "step  0 pretraining   2102 tokens,   0% books, longest piece 256",
        "step 15 long          8430 tokens, 100% books, longest piece 1024",
        "resumed in stage 'annealing' at step 10: True",
    ],
    "23_dpo.py": ["20 steps: loss 0.693 to 0.0", "quarantined: rejected is null or missing"],
    "20_packing.py": [
        "176 pieces continue a document of an earlier chunk",
        "compiled 1 time(s) for 160 microbatches",
    ],
    "03_resume.py": [
        "step 3 on 3 ranks: 24 samples, the same",
        "step 5 on 3 ranks: 24 samples, the same",
    ],
    "04_custom_strategy.py": [
        "dealt out in turn: a step takes 1.9",
        "windowed: a step takes 1.003 of the mean rank's time",
    ],
    "07_custom_balance.py": [
        "dealt                          1.",
        "greedy                         1.056                    1.057",
    ],
    "08_vlm_hybrid.py": [
        "vlm_hybrid: time over mean, encoder on 8 ranks: 1.000; backbone on 4 replicas: 1.001",
        "rank 2 encodes",
        "step 2: 181 images",
    ],
    "09_low_level.py": [
        "step 2: 49 of 868 tokens masked",
        "imbalance 1.006",
        "samples candidates; web:",
    ],
    "05_yaml_job.py": ["read back equal: True", "wrong.yaml: 3 problems", "did you mean 'weight'?"],
    "11_connect.py": [
        "rank 0 of another process: steps 0 to 9",
        "rank 1 of another process: steps 0 to 9",
        "320 samples, each once: True",
    ],
    "12_fsdp2.py": [
        "1 rank(s), 10 steps: loss 4.1",
        "steps 5 to 9 again, from the checkpoint: same losses: True",
    ],
    "13_megatron_style.py": [
        "ranks that fetch: [0, 2] of 8; rank 0 for ranks [0, 1, 4, 5]",
        "last stage: cu_seqlens",
        "loss 4.24 to 0.01",
    ],
    "14_vlm_torchrun.py": [
        "images encoded by each rank: [564, 561, 549, 540]",
        "loss 2.30 to 0.01",
    ],
    "15_ray_train.py": [
        "step 11, by the second group of workers: loss 0.0",
        "12 steps on both ranks are those of a calm run: True",
    ],
    "16_hdp.py": [
        "rank 0: 225 tokens on [0, 1, 2, 3], 175 tokens on [3, 2, 1, 0], ",
        "rank 3: 225 tokens on",
        "40 steps: loss 4.3",
        " to 0.",
    ],
    "25_budgets.py": [
        "code: 250 documents",
        "licensed: 159 documents, 4,982 tokens; ended after step 49",
        "licensed, with a raised budget: 7,992 of 8,000 tokens",
    ],
    "24_evaluation.py": [
        "step 59: 1736 tokens, loss 0.00",
        "dp=16: 1736 tokens, loss 0.00",
        "equal on every mesh: True",
    ],
    "18_megatron_data.py": ["wiki: expected 70%, read 70.0% of 400", "code: expected 30%"],
    "17_tempbalance.py": [
        "60 steps: loss 4.4 to 0.0",
        "layers.0: learning rate times",
        "steps 30 to 59 again, from the checkpoint: same rates: True",
        "same losses: True",
    ],
    "06_curriculum.py": ["curriculum(column='difficulty'", "rising over the ramp: True"],
}
NEEDS = {
    "02_torch_loop.py": "torch",
    "12_fsdp2.py": "transformers",
    "13_megatron_style.py": "torch",
    "14_vlm_torchrun.py": "torch",
    "16_hdp.py": "torch",
    "17_tempbalance.py": "torch",
    "20_packing.py": "torch",
    "22_sft.py": "torch",
    "23_dpo.py": "torch",
    "24_evaluation.py": "torch",
}
# The source with a bad row, of which the example's job warns.
BAD_ROWS = {"22_sft.py": "letters", "23_dpo.py": "prefs"}
LONGER = (
    "08_",
    "12_",
    "13_",
    "14_",
    "15_",
    "16_",
    "23_",
    "24_",
    "17_",
    "20_",
    "22_",
)  # whole training loops, or several modules


def run(path: Path, tmp_path: Path, launcher: tuple[str, ...] = ()) -> str:
    """The example's output; its temporary files and its cache are bound to a folder of the test."""
    if (module := NEEDS.get(path.name)) is not None and find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if path.name == "15_ray_train.py" and (why := rays.train_missing()):
        pytest.skip(why)
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(tmp_path),
        "OVERLORD_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    warnings = () if launcher else ("-W", "error::ResourceWarning")
    command = [sys.executable, *warnings, *launcher, str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if (source := BAD_ROWS.get(path.name)) is None:
        assert launcher or done.stderr == ""
    else:
        assert f"rows are quarantined and skipped: {source!r} 1, so far" in done.stderr
        assert done.stderr.count("\n") == 1
    return done.stdout


@pytest.mark.skipif(not ALL, reason="8 processes: OVERLORD_TEST_ALL=1")
def test_the_hybrid_example_runs_under_torchrun_on_8_ranks(tmp_path: Path) -> None:
    eight = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
    path = next(path for path in EXAMPLES if path.name == "16_hdp.py")
    output = run(path, tmp_path, eight)
    assert all(f"rank {rank}: " in output for rank in range(8))
    assert "40 steps: loss 4.3" in output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_what_it_promises_and_leaves_nothing_behind(path: Path, tmp_path: Path):
    output = run(path, tmp_path)
    assert [words for words in SAYS[path.name] if words not in output] == []
    left = [
        file.name for file in tmp_path.iterdir() if not file.name.startswith("torchinductor")
    ]  # torch's own
    assert left == []
    if path.name == "01_local.py":
        assert run(path, tmp_path) == output, "it prints the same on every run"
    if path.name == "02_torch_loop.py":
        losses = [float(line.rsplit(" ", 1)[1]) for line in output.splitlines()]
        assert losses[-1] < 0.1 * losses[0], "its model learns"


def test_examples_stay_short():
    limits = {path: 140 if path.name.startswith(LONGER) else 90 for path in EXAMPLES}
    assert [
        path.name for path in EXAMPLES if len(path.read_text().splitlines()) >= limits[path]
    ] == []
    assert {path.name for path in EXAMPLES} == set(SAYS)
