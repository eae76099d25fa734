"""The documentation keeps up with the code: links lead somewhere, blocks of Python run, named files
exist, tables list all fields.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import overlord as ov
from overlord.setup.prepared_job import Options
from tests.unit.test_layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    p
    for p in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
# Pages whose paths are ours, of the present code. The changelog and result pages describe earlier
# versions, pages on frameworks and deployments name files of others.
CURRENT = [
    p
    for p in PAGES
    if p.name not in ("CHANGELOG.md", "frameworks.md")
    and p.parent.name not in ("results", "deploy")
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Headings as links name them."""
    headings = re.findall(r"^#+ +(.+)$", text_of(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(
        re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    ):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path):
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[here](#a-heading) [there](other.md) [off](#nowhere)\n")
    assert broken_links(page) == ["other.md", "#nowhere"]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the pages speak of."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    zstandard = pytest.importorskip("zstandard")
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "def",
        "return",
        "none",
        "import",
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["?", *words, "<eos>"])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [
        " ".join(words[(i + k) % len(words)] for k in range(2 + 7 * i % 60)) for i in range(300)
    ]
    for name in ("web", "code"):
        (tmp_path / "corpus" / name).mkdir(parents=True)
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "corpus" / "web" / "part-0.parquet", row_group_size=50
    )
    lines = "\n".join(json.dumps({"content": text}) for text in texts).encode()
    (tmp_path / "corpus" / "code" / "part-0.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(lines)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


PRIMITIVES = sorted((ROOT / "docs" / "primitives").glob("*.md"))
PYTHON = [
    ROOT / "README.md",
    ROOT / "docs" / "jobs.md",
    ROOT / "docs" / "images.md",
    ROOT / "docs" / "journal.md",
    ROOT / "docs" / "ray.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "start" / "your-data.md",
    ROOT / "docs" / "reference" / "metrics.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in [
            "budgets",
            "chat",
            "evaluation",
            "loss-weights",
            "model",
            "packing",
            "pairs",
            "stages",
        ]
    ),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
    *PRIMITIVES,
]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_python_run_in_the_order_of_the_page(page: Path, desk: Path):
    names = ""
    if "import torch" in text_of(page):
        pytest.importorskip("torch")
    if 'runtime="ray"' in text_of(page):
        pytest.importorskip("ray")
    if page == ROOT / "README.md":
        names = (
            "import torch\nmodel = torch.nn.Sequential(torch.nn.Embedding(32, 8), "
            "torch.nn.Linear(8, 32))\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        )
    found = blocks(page, "python")
    assert found
    program = desk / "page.py"
    program.write_text(names + "\n".join(found) + "\nprint('all blocks ran')\n")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=_env(desk),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all blocks ran\n")


def _env(desk: Path) -> dict[str, str]:
    import os

    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OVERLORD_CACHE": str(desk / "cache"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    "page", [p for p in PRIMITIVES if p.name != "README.md"], ids=lambda page: page.name
)
def test_a_page_on_a_primitive_has_a_picture_its_errors_its_cost_and_its_proof(page: Path):
    text = text_of(page)
    wanted = ("](../img/primitives/", "\n## Errors\n", "\n## Cost\n", "\nProved by [tests/")
    assert [part for part in wanted if part not in text] == []
    assert f"]({page.name})" in text_of(page.parent / "README.md")


def test_the_pictures_of_the_primitives_are_what_the_package_draws(desk: Path):
    command = [sys.executable, str(ROOT / "docs" / "img" / "primitives.py"), str(desk / "drawn")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=_env(desk)
    )
    assert done.returncode == 0, done.stderr
    kept, drawn = (
        {p.name: text_of(p) for p in folder.glob("*.svg")}
        for folder in (ROOT / "docs" / "img" / "primitives", desk / "drawn")
    )
    assert sorted(kept) == sorted(drawn)
    changed = [name for name in kept if kept[name] != drawn[name]]
    assert changed == [], "run python docs/img/primitives.py, and look at them"
    shown = "".join(text_of(page) for page in PRIMITIVES)
    assert [name for name in kept if f"img/primitives/{name}" not in shown] == []


def test_the_strategy_of_the_readme_plans(desk: Path):
    block = next(b for b in blocks(ROOT / "README.md", "python") if "def my_strategy" in b)
    scope: dict[str, Any] = {"ov": ov}
    exec(block, scope)
    buffer = ov.Buffer.from_columns(
        {"web": {"tokens": [5, 9, 30, 2]}}, batch=ov.Batch(samples=4, context=32)
    )
    drawn = ov.DGraph.from_buffer(buffer, ov.ClientPlaceTree(dp=2)).mix({"web": 1.0}).buffer
    assert scope["my_strategy"](drawn, ov.ClientPlaceTree(dp=2)).imbalance()["bucket"] < 1.4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_other_blocks_of_python_compile(page: Path):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_yaml_of_the_page_on_jobs_says_what_its_python_says(desk: Path):
    page = ROOT / "docs" / "jobs.md"
    (yaml,) = blocks(page, "yaml")
    (desk / "job.yaml").write_text(yaml)
    scope: dict[str, Any] = {}
    exec(blocks(page, "python")[0].partition("with ov.launch")[0], scope)
    by_file, by_python = ov.Job.from_yaml("job.yaml"), scope["job"]
    (desk / "python.yaml").write_text(by_python.to_yaml())
    assert by_file == ov.Job.from_yaml("python.yaml")


def rows_under(page: Path, heading: str) -> dict[str, str]:
    """Tables below a heading: the names in the first column, each with its second column."""
    part = re.split(r"^## ", text_of(page), flags=re.MULTILINE)
    (section,) = [p for p in part if p.split("\n", 1)[0].strip() == heading]
    found: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            first, second = line.split("|")[1:3]
            names, values = re.findall(r"`([^`]+)`", first), re.findall(r"`([^`]+)`", second)
            found |= {
                name: values[i] if i < len(values) else (values[-1] if values else second.strip())
                for i, name in enumerate(names)
            }
    return found


@pytest.mark.parametrize(
    "cls", [ov.Job, ov.Source, ov.Batch, ov.ClientPlaceTree, Options], ids=lambda cls: cls.__name__
)
def test_every_field_stands_in_the_page_on_jobs_with_its_default(cls: type):
    heading = {Options: "launch"}.get(cls, cls.__name__)
    listed = rows_under(ROOT / "docs" / "jobs.md", heading)
    known = {f.name: f.default for f in fields(cls)}
    assert sorted(set(known) - set(listed)) == []
    assert (
        sorted(
            set(listed) - set(known) - ({"runtime", "resume", "allow"} if cls is Options else set())
        )
        == []
    )
    for name, default in known.items():
        said = listed[name]
        if (
            default is not MISSING
            and default is not None
            and re.fullmatch(r'[\d.]+|".*"|\(.*\)|True|False', said)
        ):
            assert said.replace('"', "'") in (repr(default), repr(default).removesuffix(".0")), name


def test_the_manifest_for_kuberay_has_the_pinned_ray_and_the_settings_of_the_page_on_clusters():
    """What the operator makes of it was tried by hand; what may drift apart is seen here."""
    cluster = yaml.safe_load(blocks(ROOT / "docs/deploy/kuberay.md", "yaml")[0])
    pinned = re.search(r'^ +"ray==([\d.]+)",$', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    by_hand = text_of(ROOT / "docs/deploy/cluster.md")
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        settings = {
            e["name"]: e["value"]
            for e in container["env"]
            if e["name"].startswith(("RAY_", "ARROW_"))
        }
        assert [name for name, value in settings.items() if f"{name}={value}" not in by_hand] == []
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), (
            "the operator takes texts alone"
        )


def test_the_files_of_the_paper_map_exist():
    named = re.findall(r"`([\w./]+\.py)`", text_of(ROOT / "docs" / "paper-map.md"))
    assert len(named) > 30
    missing = [
        name
        for name in named
        if not (ROOT / "src" / "overlord" / name).is_file() and not (ROOT / name).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_pages_exist(page: Path):
    """A bare name next to a path (`draw.py` after `planning/planner.py`) may be anywhere in the
    package.
    """
    places = (ROOT / "src" / "overlord", ROOT / "src", ROOT, page.parent)
    for name in re.findall(r"`([\w./]+\.py)`", text_of(page)):
        anywhere = list((ROOT / "src" / "overlord").rglob(name)) if "/" not in name else []
        assert anywhere or any((place / name).is_file() for place in places), name


def test_the_table_of_packages_lists_the_layers_and_their_imports():
    text = text_of(ROOT / "docs" / "architecture.md")
    section = text.split("\n## Packages\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    listed = {
        name.strip(" `"): None
        if may_import.strip() == "every package above"
        else " ".join(re.findall(r"`(\w+)`", may_import))
        for name, _, may_import in rows
    }
    assert list(listed.items()) == list(LAYERS.items())


def test_records_of_decisions_are_numbered_and_have_three_parts():
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(r.name[:4]) for r in records]
    assert numbers == sorted(set(numbers))  # numbers of records in preparation may be missing
    for record in records:
        text = text_of(record)
        assert text.startswith(f"# {record.name[:4]} "), record.name
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences")), (
            record.name
        )


def test_every_public_error_is_in_the_page_on_errors():
    listed = rows_under_title(ROOT / "docs" / "errors.md")
    public = {
        n
        for n in ov.__all__
        if isinstance(getattr(ov, n), type) and issubclass(getattr(ov, n), ov.OverlordError)
    }
    assert public - {"OverlordError"} == listed


def rows_under_title(page: Path) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", text_of(page), re.MULTILINE))


def test_the_readme_names_its_two_commands_before_anything_else():
    text = text_of(ROOT / "README.md")
    assert "make demo" in text.split("## ")[0]
    assert "make test" in text.split("## ")[0]


def test_pages_give_methods_of_a_session_the_arguments_and_defaults_that_they_have():
    """A call that a page writes out in full, as in `session.add_source(source, at=None, *,
    loaders=None)`.
    """
    names = [
        name
        for name in dir(ov.Session)
        if not name.startswith("_") and callable(getattr(ov.Session, name))
    ]
    written, wrong = 0, []
    for page in PAGES:
        for name, given in re.findall(
            rf"(?<![.\w])(?:session\.)?({'|'.join(names)})\(([^()`]*=[^()`]*)\)", text_of(page)
        ):
            if "*" not in given and "at=None" not in given:
                continue  # a call, with values of its own
            written += 1
            found = [
                str(p).split(":")[0] + ("" if p.default is p.empty else f"={p.default!r}")
                for p in _parameters(getattr(ov.Session, name))
            ]
            if [part.strip() for part in given.split(",") if part.strip() != "*"] != found:
                wrong.append(
                    f"{page.name}: {name}({given}), and the method has ({', '.join(found)})"
                )
    assert wrong == []
    assert written >= 5


def _parameters(method: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(method).parameters.values() if p.name != "self"]


def test_the_page_on_laptops_needs_no_guard(desk: Path):
    """Its block runs as it is, also with a function of its own in the job."""
    [block] = [b for b in blocks(ROOT / "docs/deploy/laptop.md", "python") if '"process"' in b]
    job = (
        f"name: x\nsources: {{web: {{uri: {desk}/corpus/web, epochs: 1, transforms: "
        f"[{{tokenize: {{tokenizer: tokenizer.json}}}}]}}}}\n"
    )
    (desk / "job.yaml").write_text(job + "batch: {samples: 50, context: 64}\n")
    keep = (
        "from dataclasses import replace\nimport overlord as ov\ndef keep(row):\n    "
        "return True\njob = ov.Job.from_yaml('job.yaml')\n"
        "source = replace(job.sources[0], transforms=[ov.Filter(keep, rows=True), "
        "*job.sources[0].transforms])\n"
        "job = replace(job, sources=[source])\n"
    )
    for text in (block, keep + block.replace('ov.Job.from_yaml("job.yaml")', "job")):
        (desk / "program.py").write_text(text)
        command = [sys.executable, str(desk / "program.py")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=_env(desk)
        )
        assert done.returncode == 0, done.stderr
        assert "loader-worker/0" in done.stdout


def test_pages_on_images_agree_that_they_are_decoded_and_routed():
    """Decision 0006 was made before; a page that says otherwise is out of date."""
    pages = {page.name: " ".join(text_of(page).split()) for page in PAGES}
    assert [
        name
        for name, text in pages.items()
        if re.search(r"(?i)nothing (yet )?decodes|images are not decoded", text)
    ] == []
    assert "0016-images-are-items.md" in pages["0006-encoder-once-per-iteration.md"]


def test_the_axis_cp_alone_splits_no_sequence_as_its_page_says():
    buffer = ov.Buffer.from_columns(
        {"text": {"tokens": [4000, 10, 10, 10]}}, batch=ov.Batch(samples=4, context=8192)
    )
    plan = (
        ov.DGraph.from_buffer(buffer, ov.ClientPlaceTree(dp=1, cp=4))
        .mix([1.0])
        .distribute("CP")
        .balance("greedy")
        .plan()
    )
    assert sorted(plan.main.sample.tolist()) == [0, 1, 2, 3]  # each once, so in one bucket, whole
    assert int(plan.main.size.max()) == 4000
    page = " ".join(text_of(ROOT / "docs" / "primitives" / "distribute.md").split())
    assert "this axis alone splits no sequence" in page
