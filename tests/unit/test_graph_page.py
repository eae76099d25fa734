"""The picture of a step: bindings that only a planned step tells, the flowchart, and the page with
all its data and nothing foreign.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import OverlordError, PlanError
from overlord.loader.samples import SourceOrder
from overlord.planning.graph import page_data
from overlord.planning.graph.lineage import Binding, planned_graph
from overlord.planning.graph.mermaid import escaped
from overlord.planning.graph.page import SCRIPTS, page
from overlord.planning.graph.page_data import PageStep, _module, column, facts, spans
from overlord.planning.strategies import llm_balance, vlm_hybrid
from tests.worlds import Rows

ASSETS = Path(page_data.__file__).parent / "assets"
HOSTILE = '</script><img src=x onerror="alert(1)">'
VOID = {"meta", "input", "img", "br", "link", "hr"}


def buffer(
    tokens: dict[str, list[int]],
    samples: int,
    context: int = 64,
    microbatches: int = 2,
    **meta: Any,
) -> ov.Buffer:
    columns = {
        name: {"tokens": t, **{k: v[name] for k, v in meta.items()}} for name, t in tokens.items()
    }
    return ov.Buffer.from_columns(
        columns, batch=ov.Batch(samples=samples, context=context, microbatches=microbatches), step=7
    )


def placed(
    tokens: dict[str, list[int]], dp: int = 2, samples: int = 8, microbatches: int = 2
) -> ov.DGraph:
    graph = ov.DGraph.from_buffer(
        buffer(tokens, samples, microbatches=microbatches), ov.ClientPlaceTree(dp=dp), meta="tokens"
    )
    return (
        graph.mix(dict.fromkeys(tokens, 1.0))
        .distribute("DP")
        .cost(ov.cost.tokens)
        .balance("greedy")
    )


def planned(
    tokens: dict[str, list[int]], dp: int = 2, samples: int = 8, microbatches: int = 2
) -> ov.DGraph:
    """As session.graph gives it, with two loaders a source."""
    graph = placed(tokens, dp, samples, microbatches)
    plan = graph.plan()
    loader = 2 * plan.source + np.arange(len(plan)) % 2
    names = tuple(f"loader/{name}/{k}" for name in tokens for k in range(2))
    return planned_graph(plan, graph.buffer.batch, graph.tree, loader, names)


def step_of(graph: ov.DGraph) -> PageStep:
    assert graph.bound is not None
    return PageStep(
        plan=graph.bound.plan, place=graph.tree, edges=graph.edges(), loader=graph.bound.loader
    )


def html_of(graph: ov.DGraph, tmp_path: Path, **modules: ov.DGraph) -> str:
    graph.to_html(tmp_path / "step.html", **modules)
    return (tmp_path / "step.html").read_text(encoding="utf-8")


class Parsed(HTMLParser):
    """Tags in order, attributes, and the text of every script; fails on a tag that is not closed
    where it should be.
    """

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.scripts: dict[str, str] = {}
        self.open: list[str] = []
        self._script: str | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or "code"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts["facts"])
        return found


def unpacked(packed: list[str]) -> np.ndarray:
    return np.frombuffer(b64decode(packed[1]), f"<{packed[0]}")


TOKENS = {"web": [5, 9, 30, 2, 17], "code": [40, 1, 1, 12, 8], "books": [60, 3, 22]}


# bindings


def reading(what: str) -> Any:
    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix()
        assert len({"graph": graph, "buffer": buffer}[what].loader)
        return llm_balance(buffer, place)

    return strategy


def job(strategy: Any = "llm_balance", n: int = 60, **changes: Any) -> ov.Job:
    def source(name: str) -> ov.Source:
        return ov.Source(
            name,
            Rows([{"tokens": [1] * (1 + k % 9)} for k in range(n)]),
            transforms=[ov.Tokens("tokens")],
            epochs=1,
        )

    return ov.Job(
        name="pictured",
        sources=[source("a"), source("b")],
        batch=ov.Batch(samples=8, context=32, microbatches=2),
        place=ov.ClientPlaceTree(dp=2),
        strategy=strategy,
        slice_rows=2,
        shuffle_chunks=2,
        **changes,
    )


@pytest.mark.parametrize("what", ["graph", "buffer"])
def test_a_strategy_that_reads_which_loader_holds_a_sample_is_refused(what: str) -> None:
    with (
        ov.launch(job(reading(what))) as session,
        pytest.raises(PlanError, match="number of loaders") as refused,
    ):
        next(session.client(0))
    assert f"{what}.loader" in str(refused.value)
    assert "session.graph" in str(refused.value)


def test_a_graph_has_no_constructor_before_its_step_is_planned() -> None:
    with pytest.raises(PlanError, match="no constructor is bound"):
        _ = placed(TOKENS).constructor


def test_a_planned_step_tells_loaders_and_constructors_of_its_samples() -> None:
    with ov.launch(job(n=400), loaders={"a": 2}, prefetch=1) as session:
        next(session.client(0))
        graph, plan = session.graph(0), session.plan(0)
    assert graph.bound is not None
    assert graph.bound.plan is plan
    assert graph.loader.names == ("loader/a/0", "loader/a/1", "loader/b/2")
    assert len(graph.loader) == len(plan)
    for i in range(len(plan)):
        assert graph.loader[i].startswith(f"loader/{plan.names[plan.source[plan.main.sample[i]]]}/")
    assert sum(graph.loader.counts().values()) == len(plan)
    assert {"loader/a/0", "loader/a/1"} <= set(
        graph.loader.counts()
    )  # chunks of two groups of two were open together
    assert graph.constructor == ("constructor/0", "constructor/1")


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_a_sample_is_bound_to_the_loader_that_owns_its_chunk(look_ahead: int) -> None:
    with ov.launch(
        job(n=400, look_ahead=look_ahead), loaders={"a": 3, "b": 2}, prefetch=1
    ) as session:
        client = session.client(0)
        for _ in range(5):
            next(client)
        for step in range(5):
            graph = session.graph(step)
            assert graph.bound is not None
            plan = graph.bound.plan
            for i, k in enumerate(plan.main.sample.tolist()):
                order = SourceOrder(
                    name=plan.names[plan.source[k]],
                    n_chunks=13,
                    seed=0,
                    shuffle=True,
                    shuffle_chunks=2,
                )
                place = order.chunk_order(0).tolist().index(plan.row[k] // 32)
                assert (
                    graph.loader[i]
                    == f"loader/{order.name}/{place % 3 if order.name == 'a' else 3 + place % 2}"
                )


def test_the_number_of_loaders_is_seen_in_bindings_and_nowhere_else() -> None:
    graphs = []
    for loaders in (1, 3):
        with ov.launch(job(n=400), loaders={"a": loaders, "b": loaders}, prefetch=1) as session:
            next(session.client(0))
            graphs.append(session.graph(0))
    one, three = (g.bound.plan for g in graphs if g.bound is not None)
    assert one.digest() == three.digest()
    assert len(graphs[0].loader.names) == 2
    assert len(graphs[1].loader.names) == 6


def test_a_step_that_is_not_planned_has_no_graph() -> None:
    with ov.launch(job(), prefetch=1) as session:
        next(session.client(0))
        with pytest.raises(
            PlanError, match="not planned yet; name a step whose plan is kept: 0 to"
        ):
            session.graph(5)


def test_an_encoder_on_every_rank_is_built_by_the_constructor_of_its_replica() -> None:
    place = ov.ClientPlaceTree(dp=2, tp=2, order=("tp", "pp", "cp", "dp"))
    from overlord.planning.graph.lineage import constructors_of

    assert constructors_of(place, "WORLD") == (
        "constructor/0",
        "constructor/1",
        "constructor/0",
        "constructor/1",
    )
    assert constructors_of(place, "DP") == ("constructor/0", "constructor/1")


def test_edges_tell_the_states_that_nodes_went_through() -> None:
    edges = planned(TOKENS).edges()
    assert [e.after for e in edges] == ["drawn", "distributed", "weighed", "placed", "planned"]
    assert [e.before for e in edges] == ["buffered", *(e.after for e in edges[:-1])]
    assert edges[1].what == "distribute(DP: 2 buckets)"
    assert placed(TOKENS).edges()[-1].after == "placed"


def test_no_array_of_a_graph_can_be_written() -> None:
    mine = np.ones(8)
    graph = ov.DGraph.from_buffer(buffer(TOKENS, 8), ov.ClientPlaceTree(dp=2), meta="tokens").mix(
        dict.fromkeys(TOKENS, 1.0)
    )
    graph = graph.distribute("DP").cost(lambda columns: mine).balance("greedy")
    assert graph.placement is not None
    assert graph.costs is not None
    arrays = [
        graph.sample,
        graph.costs,
        graph.placement.bucket,
        graph.placement.microbatch,
        *graph.columns.values(),
    ]
    arrays.append(planned(TOKENS).loader.index)
    assert [a.flags.writeable for a in arrays] == [False] * len(arrays)
    mine[0] = 2.0  # the user's own array stays the user's


# the flowchart


def test_the_flowchart_goes_from_sources_over_loaders_to_microbatches() -> None:
    graph = planned(TOKENS)
    text = graph.to_mermaid()
    assert text.startswith("flowchart LR\n")
    assert re.search(r's0\["web: \d"\] --> l0\["loader/web/0: \d"\] --> p0', text)
    assert re.search(r'p3 --> b0\["bucket 0: [01]\.\d{3}"\]', text)
    assert re.search(r'b1 --> b1m1\["microbatch 1: 0\.\d{3}"\]', text)
    assert graph.placement is not None
    assert graph.costs is not None
    loads = np.bincount(graph.placement.bucket, weights=graph.costs)
    assert f'"bucket 0: {loads[0] / loads.mean():.3f}"' in text


def test_the_flowchart_of_many_elides_and_says_how_many() -> None:
    graph = planned({f"s{i:02d}": [1 + i, 5, 9] for i in range(20)}, dp=16, samples=48)
    text = graph.to_mermaid()
    assert '["12 more sources: ' in text
    assert '["8 more buckets: ' in text
    assert len(re.findall(r'--> b\d+\["', text)) == 8
    assert graph.placement is not None
    assert graph.costs is not None
    dearest = int(np.bincount(graph.placement.bucket, weights=graph.costs).argmax())
    assert f'b{dearest}["bucket {dearest}:' in text


@given(st.text(max_size=40))
def test_no_name_breaks_out_of_its_label(name: str) -> None:
    label = escaped(name)
    assert not set('"<>\n\r`') & set(label)
    assert label.count("#") == label.count(";") - name.count(";")


# the page


def test_the_page_is_well_formed_and_asks_for_nothing_outside_it(tmp_path: Path) -> None:
    text = html_of(planned(TOKENS), tmp_path)
    parsed = Parsed(text)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in parsed.attributes}
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    assert (
        re.findall(
            r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon|innerHTML|document\.write",
            text,
        )
        == []
    )
    assert (
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    ) in parsed.attributes
    assert len(parsed.ids) == len(set(parsed.ids))


def test_the_look_for_a_tag_left_open_can_fail() -> None:
    with pytest.raises(AssertionError):
        Parsed("<div><p></div>")


def test_scripts_ask_only_for_elements_that_the_page_has() -> None:
    have = set(Parsed((ASSETS / "graph.html").read_text()).ids)
    code = "".join((ASSETS / name).read_text() for name in SCRIPTS)
    wanted = set(re.findall(r'(?:\$|put|table|choices)\("([\w-]+)"', code))
    assert len(wanted) > 15
    assert wanted <= have


def test_a_hostile_source_name_stays_a_name(tmp_path: Path) -> None:
    harmless, hostile = (
        Parsed(html_of(planned({name: TOKENS["web"], "code": TOKENS["code"]}), tmp_path))
        for name in ("web", HOSTILE)
    )
    assert hostile.tags == harmless.tags
    assert hostile.facts["sources"][0]["name"] == HOSTILE
    assert "\\u003c" in hostile.scripts["facts"]
    assert HOSTILE not in "".join(hostile.scripts.values())


def test_every_sample_is_on_the_page_where_the_plan_has_it(tmp_path: Path) -> None:
    graph = planned(TOKENS)
    assert graph.bound is not None
    plan, found = graph.bound.plan, Parsed(html_of(graph, tmp_path)).facts
    ids, [module] = found["kept"]["ids"], found["modules"]
    for name in ("source", "epoch", "file", "row", "part", "tokens"):
        assert unpacked(ids[name]).tolist() == getattr(plan, name).tolist()
    assert unpacked(ids["loader"]).tolist() == graph.bound.loader.index.tolist()
    for name in ("sample", "bucket", "microbatch", "slot", "size", "cost"):
        assert unpacked(module["kept"][name]).tolist() == getattr(plan.main, name).tolist()
    assert found["digest"] == plan.digest()
    assert found["loaders"] == list(graph.loader.names)
    assert module["imbalance"]["cost"] == plan.imbalance()
    assert [s["samples"] for s in found["sources"]] == np.bincount(
        plan.source, minlength=3
    ).tolist()
    assert [sum(s["lengths"]) for s in found["sources"]] == [s["samples"] for s in found["sources"]]
    assert found["sources"][0]["wanted"] == pytest.approx(1 / 3)
    assert [e[2] for e in found["edges"]] == [*graph.trail, "plan()"]


def test_lengths_fall_into_powers_of_two() -> None:
    tokens = [1, 2, 3, 4, 7, 8, 63, 64]
    graph = planned({"a": tokens}, samples=8)
    lengths = facts(step_of(graph))["sources"][0]["lengths"]
    assert lengths[:8] == [1, 2, 2, 1, 0, 1, 1, 0]


def test_modules_are_on_the_page_each_with_its_items(tmp_path: Path) -> None:
    images = {name: [[16] * (k % 3) for k in range(len(t))] for name, t in TOKENS.items()}
    tokens = {name: [t + 48 for t in some] for name, some in TOKENS.items()}
    place = ov.ClientPlaceTree(dp=2, tp=2)
    mixed = ov.DGraph.from_buffer(buffer(tokens, 12, context=256, image_patches=images), place).mix(
        dict.fromkeys(TOKENS, 1.0)
    )
    plan = vlm_hybrid(mixed.buffer, place)
    found = facts(PageStep(plan=plan, place=place, edges=[]))
    assert [(m["name"], m["axis"], m["buckets"]) for m in found["modules"]] == [
        ("backbone", "DP", 2),
        ("encoder", "WORLD", 4),
    ]
    encoder, a = found["modules"][1], plan.modules["encoder"]
    assert unpacked(encoder["kept"]["bucket"]).tolist() == a.bucket.tolist()
    assert unpacked(encoder["constructor"]).tolist() == [0, 0, 1, 1]
    assert (found["modules"][0]["ranks"], encoder["ranks"]) == (["0, 1", "2, 3"], None)


def test_a_graph_by_hand_is_drawn_with_its_modules_and_without_loaders(tmp_path: Path) -> None:
    found = Parsed(html_of(placed(TOKENS), tmp_path, encoder=placed(TOKENS))).facts
    assert [m["name"] for m in found["modules"]] == ["backbone", "encoder"]
    assert found["loaders"] == []
    assert [layer["kind"] for layer in found["modules"][0]["flow"]["layers"]] == [
        "source",
        "bucket",
        "microbatch",
    ]


def test_a_graph_that_is_not_placed_says_what_is_missing(tmp_path: Path) -> None:
    graph = ov.DGraph.from_buffer(buffer(TOKENS, 4), ov.ClientPlaceTree(dp=2), meta="tokens").mix(
        dict.fromkeys(TOKENS, 1.0)
    )
    with pytest.raises(PlanError, match=r"got one without \.distribute\(\)"):
        graph.to_html(tmp_path / "step.html")


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        OverlordError, match=r"no/step\.html: the page cannot be written: No such file"
    ):
        planned(TOKENS).to_html(tmp_path / "no" / "step.html")


def test_equal_steps_have_equal_pages() -> None:
    assert page(step_of(planned(TOKENS))) == page(step_of(planned(TOKENS)))


def conserved(found: dict[str, Any], plan: ov.LoadingPlan) -> None:
    """Whatever was summed up, nothing is lost: every picture shows the whole step."""
    for m in found["modules"]:
        a = plan.modules[m["name"]]
        for part in ("grid", "cells"):
            assert unpacked(m[part]["cost"]).astype(float).sum() == pytest.approx(
                a.cost.sum(), rel=1e-5
            )
            assert unpacked(m[part]["size"]).sum(dtype=np.int64) == a.size.sum()
            assert unpacked(m[part]["count"]).sum(dtype=np.int64) == len(a.sample)
        per, columns = m["grid"]["per"], m["grid"]["columns"]
        sizes = np.zeros((a.n_buckets, columns), np.int64)
        np.add.at(sizes, (a.bucket, a.microbatch // per), a.size)
        assert unpacked(m["grid"]["size"]).tolist() == sizes.ravel().tolist()
        by_bucket = np.bincount(
            unpacked(m["cells"]["bucket"]),
            weights=unpacked(m["cells"]["size"]),
            minlength=a.n_buckets,
        )
        assert by_bucket.tolist() == sizes.sum(axis=1).tolist()
        layers = Counter[int]()
        for layer, _, _, _, _, count in m["flow"]["links"]:
            layers[layer] += int(count)
        assert dict(layers) == dict.fromkeys(range(len(m["flow"]["layers"]) - 1), len(a.sample))


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_loads_on_the_page_sum_to_those_of_the_plan(
    tokens: list[int], dp: int, n_sources: int, most: int
) -> None:
    sources = {f"s{k}": tokens[k::n_sources] for k in range(n_sources) if tokens[k::n_sources]}
    graph = planned(sources, dp, len(tokens), microbatches=5)
    assert graph.bound is not None
    plan, step = graph.bound.plan, step_of(graph)
    modules = [_module(step, "backbone", most, most)]
    conserved({"modules": modules}, plan)


def test_a_step_of_a_quarter_million_samples_makes_a_page_below_three_megabytes() -> None:
    rng = np.random.default_rng(0)
    n, dp, n_sources = 4096 * 64, 4096, 306
    of = rng.integers(0, n_sources, n)
    tokens = np.minimum(rng.lognormal(6, 1, n), 8192).astype(np.int64) + 1
    columns = {f"source-{i:03d}": {"tokens": tokens[of == i]} for i in range(n_sources)}
    batch = ov.Batch(samples=n, context=8193, microbatches=8)
    place = ov.ClientPlaceTree(dp=dp, tp=2)
    graph = ov.DGraph.from_buffer(
        ov.Buffer.from_columns(columns, batch=batch), place, meta="tokens"
    ).mix(dict.fromkeys(columns, 1.0))
    plan = llm_balance(graph.buffer, place)
    step = PageStep(
        plan=plan, place=place, edges=[], loader=Binding(index=plan.source, names=tuple(columns))
    )
    found = facts(step)
    assert len(page(step)) < 3_000_000
    conserved(found, plan)
    [module] = found["modules"]
    assert module["cells"]["alone"] is not None
    assert found["kept"]["samples"] > 10_000
    shown = unpacked(module["kept"]["cost"])
    assert (
        shown.min() >= np.sort(plan.main.cost)[-len(shown)] * 0.999
    )  # those that are listed are the dearest


def test_ranks_are_written_as_people_write_them() -> None:
    assert spans([3]) == "3"
    assert spans([6, 7]) == "6, 7"
    assert spans(range(8)) == "0-7"
    assert spans([0, 8, 16, 24]) == "0, 8, ..., 24"
    assert spans([0, 1, 4, 5]) == "0, 1, 4, 5"
    assert spans([0, 1, 4, 5, 8, 9, 12, 13, 16]) == "0, 1, 4, 5, 8, 9, 12, ..., 16"


@given(st.lists(st.integers(0, 2**53), max_size=20))
def test_whole_numbers_come_back_from_a_column(values: list[int]) -> None:
    assert unpacked(column(np.array(values, np.int64))).astype(np.int64).tolist() == values


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_is_readable_and_marks_are_seen_in_light_and_dark(theme: int) -> None:
    block = re.findall(r":root[^{]*\{([^}]*)\}", (ASSETS / "graph.css").read_text())[theme]
    colours = {
        name: c if len(c) == 7 else "#" + "".join(2 * x for x in c[1:])
        for name, c in re.findall(r"--(\w+):\s*(#\w+)", block)
    }
    for text in ("ink", "muted", "faint"):
        assert contrast(colours[text], colours["surface"]) >= 4.5, text
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    for mark in ("other", "over", "under", *(f"s{k}" for k in range(8))):
        assert contrast(colours[mark], colours["surface"]) >= 2, mark
