"""Rendering of chat templates: spans of the assistant, bounds of the sandbox, origins of text.

transformers is the reference, on templates with generation tags. The templates that are compared
with it have none.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.transforms.chat import Chat
from overlord.transforms.chat_encoder import ChatEncoder, build_chat_encoder, token_weights
from overlord.transforms.chat_sandbox import Template, TemplateRefused, messages_of
from overlord.transforms.chat_spans import NoSpan, Span
from overlord.transforms.chat_text import (
    OPERATIONS,
    Mark,
    TracedText,
    Untraceable,
    concat,
    copied,
    plain,
)
from tests import chats

PLAIN_MODELS = ("chatml", "llama3", "mistral", "qwen", "gemma")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, ChatEncoder] = {}

    def encoder(model: str, marked: bool = False, **options: Any) -> ChatEncoder:
        key = (model, marked, repr(sorted(options.items())))
        if key not in made:
            folder = chats.write_folder(tmp_path_factory.mktemp("model"), model, marked)
            made[key] = build_chat_encoder(Chat(folder, **{"date": chats.DAY, **options}))
        return made[key]

    return encoder


def trained(encoder: ChatEncoder, messages: Any, tools: Any = None) -> list[str]:
    text, spans = encoder.render(messages, tools)
    return [text[span.start : span.stop] for span in spans]


def encoded(encoder: ChatEncoder, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    ids, weights, bad = encoder.encode([messages], [tools])
    assert not bad, bad
    assert weights is not None
    return ids.values.tolist(), weights.values.tolist()


def refusal(encoder: ChatEncoder, messages: Any, tools: Any = None) -> str:
    ids, _, bad = encoder.encode([messages], [tools])
    assert len(ids) == 0
    return bad[0]


# Spans.


@pytest.mark.parametrize("model", PLAIN_MODELS)
def test_ids_and_weights_equal_the_mask_of_transformers_on_tagged_templates(encoders, model):
    @given(chats.conversations())
    @settings(max_examples=30, deadline=None, database=None)
    def check(messages):
        assert encoded(encoders(model), messages) == chats.reference(model, messages)

    check()


@pytest.mark.parametrize("model", PLAIN_MODELS)
def test_generation_tags_give_the_same_spans_as_the_template_without_them(encoders, model):
    @given(chats.conversations())
    @settings(max_examples=15, deadline=None, database=None)
    def check(messages):
        if model == "gemma" and messages[0]["role"] == "system":
            messages = messages[1:]
        assert trained(encoders(model), messages) == trained(encoders(model, True), messages)

    check()


def test_tool_calls_and_reasoning_are_trained_as_transformers_marks_them(encoders):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "</think>"}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add 1"},
        {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nit is 2"},
    ]
    assert encoded(encoders("qwen"), messages, [TOOL]) == chats.reference("qwen", messages, [TOOL])
    assert trained(encoders("qwen"), messages, [TOOL]) == [
        '<think>\nuse it\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, '
        '"b": "</think>"}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\nit is 2<|im_end|>",
    ]


def test_reasoning_that_a_template_drops_from_earlier_turns_is_not_in_the_span(encoders):
    messages = [*TALK[:1], {"role": "assistant", "content": "<think>a</think>b"}, *TALK[2:]]
    assert trained(encoders("qwen"), messages)[0] == "b<|im_end|>"
    assert encoded(encoders("qwen"), messages) == chats.reference("qwen", messages)


def test_only_the_last_turn_is_trained_with_last(encoders):
    ids, weights = encoded(encoders("chatml", train_on="last"), TALK)
    both, mask = chats.reference("chatml", TALK)
    first = mask.index(0, mask.index(1))  # the first token after the first turn
    assert ids == both
    assert weights == [0] * first + mask[first:]


def test_every_token_is_trained_with_all(encoders):
    encoder = encoders("chatml", train_on="all")
    ids, weights, bad = encoder.encode([TALK], None)
    assert (ids.values.tolist(), weights, bad) == (chats.reference("chatml", TALK)[0], None, {})


def test_a_weight_of_a_message_applies_to_its_turn(encoders):
    messages = [TALK[0], {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 0.5}]
    assert trained(encoders("chatml"), messages) == ["fine<|im_end|>"]
    assert set(encoded(encoders("chatml"), messages)[1]) == {0, 0.5}
    assert trained(encoders("chatml", True), messages) == ["fine<|im_end|>"]


def test_a_header_of_the_prompt_that_a_turn_lacks_ends_before_its_content(encoders):
    # As templates of reasoning models: the prompt opens a thought that earlier turns do not have.
    text = chats.template("chatml").replace("assistant\\n'", "assistant\\n<think>\\n'")
    assert trained(encoders("chatml", template=text), TALK) == [
        "hello there<|im_end|>",
        "fine<|im_end|>",
    ]


def test_text_after_the_last_turn_is_not_trained(encoders):
    text = chats.template("chatml") + "{% if not add_generation_prompt %}<|im_end|>{% endif %}"
    assert trained(encoders("chatml", template=text), TALK)[1] == "fine<|im_end|>"


def test_a_loop_over_numbers_gives_the_same_spans(encoders):
    text = chats.template("chatml").replace(
        "{% for message in messages %}",
        "{% for i in range(messages | length) %}{% set message = messages[i] %}",
    )
    assert trained(encoders("chatml", template=text), TALK) == trained(encoders("chatml"), TALK)
    marked = chats.template("chatml", True).replace(
        "{% for message in messages -%}",
        "{% for i in range(messages | length) %}{% set message = messages[i] %}",
    )
    assert trained(encoders("chatml", template=marked), TALK) == trained(encoders("chatml"), TALK)


def test_tags_without_any_loop_are_used_where_all_turns_count_alike(encoders):
    text = (
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}!{% endgeneration %}"
        "{{ messages[2].content }}{% generation %}{{ messages[3].content }}!{% endgeneration %}"
    )
    assert trained(encoders("chatml", template=text), TALK) == ["hello there!", "fine!"]
    reason = refusal(encoders("chatml", template=text, train_on="last"), TALK)
    assert "expected {% generation %} after a message of the assistant" in reason


@pytest.mark.parametrize("opening", ["<|im_start|>user\n", "<|im_start|>", "<s>[INST] "])
def test_the_opening_of_the_next_turn_is_not_trained(encoders, opening):
    model = "mistral" if "INST" in opening else "chatml"
    end = "eos_token" if model == "mistral" else "'<|im_end|>'"
    text = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ " + end + " }}"
        "{% if not loop.last %}OPEN{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}HEAD{% endif %}"
    ).replace("OPEN", opening)
    head = "" if model == "mistral" else "<|im_start|>assistant\n"
    text = text.replace("HEAD", head).replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}" + head + "{% endif %}{{ m.content }}", 1
    )
    end = "</s>" if model == "mistral" else "<|im_end|>"
    found = trained(encoders(model, template=text), TALK)
    assert found == [f"hello there{end}", f"fine{end}"]


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }} BODY<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ messages | map(attribute='content') | join }}" + PROMPT,
            "expected the template to write it in its loop",
        ),
        (
            LOOP.replace("BODY", "{{ m.content }}") + "{{ messages[1].content }}" + PROMPT,
            "expected its content inside its turn",
        ),
        (
            LOOP.replace("BODY", "{{ messages[0].content }}{{ m.content }}") + PROMPT,
            "expected its own content, got that of another message",
        ),
        (
            LOOP.replace("BODY", "{{ m.content }}") + PROMPT.replace("assistant", "model"),
            "expected it to begin with its prompt",
        ),
        (
            LOOP.replace("BODY", "{{ m.content }}").replace("<|im_end|>", "") + PROMPT,
            "expected the template to end the turn",
        ),
        (
            LOOP.replace("BODY", "{{ m.content if m.role == 'user' else '' }}") + PROMPT,
            "message 1: expected the template to write its content, got none of it",
        ),
        (
            LOOP.replace("BODY", "{{ m.content if m.role == 'assistant' else '' }}") + PROMPT,
            "message 0: expected the template to write its content, got none of it",
        ),
        (
            LOOP.replace("BODY", "{{ m.content | urlencode }}"),
            "expected a template that can be traced",
        ),
        (
            LOOP.replace("BODY", "{{ '%s' | format(m.content) }}"),
            "expected a template that can be traced",
        ),
        (LOOP.replace("BODY", "{{ '%s' % m.content }}"), "the operator %"),
        (LOOP.replace("BODY", "{{ m.content.encode() }}"), "the method encode()"),
        (LOOP.replace("BODY", "{{ [m.content] | trim }}"), "a list of a message, written as text"),
        (LOOP.replace("BODY", "{{ [m.content] }}"), "a list of a message, written as text"),
        (LOOP.replace("BODY", "{{ m.items() }}"), "a dict_items, written as text"),
        (LOOP.replace("BODY", "{{ namespace(x=m.content) }}"), "a _Namespace, written as text"),
        (
            LOOP.replace("BODY", "{{ [[1, m.content]] | map('list') | urlencode }}"),
            "the filter urlencode on the content",
        ),
        (LOOP.replace("BODY", "{{ m.missing.deeper }}"), "UndefinedError"),
        (
            "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
            "expected one run of text",
        ),
        (
            "{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
            + LOOP.replace("BODY", "{{ m.content }}"),
            "expected the template to render its prompt",
        ),
    ],
)
def test_a_template_whose_spans_are_uncertain_is_refused(encoders, template, reason):
    assert reason in refusal(encoders("chatml", template=template), TALK)


def test_a_template_that_is_not_traced_can_still_train_on_all_tokens_of_what_it_renders(encoders):
    text = LOOP.replace("BODY", "{{ m.content }}").replace("<|im_end|>", "")
    ids, _, bad = encoders("chatml", template=text, train_on="all").encode([TALK], None)
    assert len(ids) == 1
    assert not bad


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_a_token_is_trained_if_it_has_a_character_of_a_span(pieces, start, size):
    ends = np.cumsum([a + b for a, b in pieces]).tolist()
    offsets = np.array([(e - b, e) for e, (_, b) in zip(ends, pieces, strict=True)] or [(0, 0)])
    weights = token_weights(offsets, [Span(start, start + size, 2)])
    inside = [a < start + size and b > start for a, b in offsets]
    low = inside.index(True) if any(inside) else 0
    high = len(inside) - inside[::-1].index(True) if any(inside) else 0
    assert weights.tolist() == [2.0 * (low <= i < high) for i in range(len(offsets))]


# Origins of text.

TEXTS = st.text("ab \n\tAß<>", max_size=12)


@given(TEXTS, TEXTS, st.sampled_from(sorted(OPERATIONS)), st.integers(-1, 3))
def test_operations_on_traced_text_equal_those_of_str_and_keep_every_origin(one, two, name, count):
    # Distinct origins for all characters show which of them each result has.
    traced = concat([copied(c, i) for i, c in enumerate(one)])
    separator = two[:2]
    arguments: dict[str, tuple[Any, ...]] = {
        "replace": (separator, "-", count),
        "join": ([one, separator, one],),
        "split": (separator or None, count),
        "rsplit": (separator or None, count),
        "partition": (separator,),
        "rpartition": (separator,),
        "removeprefix": (separator,),
        "removesuffix": (separator,),
    }
    given_ = arguments.get(name, ())
    expected: Any
    try:
        expected = getattr(one, name)(*given_)
    except ValueError:
        return
    try:
        made = OPERATIONS[name](traced, *given_)
    except Untraceable:
        assert "ß" in one or (name == "replace" and not separator)
        return
    flat = made if isinstance(made, (list, tuple)) else [made]
    assert list(map(str.__str__, flat)) == (
        list(expected) if isinstance(expected, (list, tuple)) else [expected]
    )
    for piece in flat:
        at = 0
        assert sum(n for n, _ in getattr(piece, "runs", ())) in (len(piece), 0)
        for count_, mark in getattr(piece, "runs", ()):
            for k in range(at, at + count_):
                if mark.origin >= 0:
                    assert plain(piece)[k].lower() == one[mark.origin].lower()
            at += count_


@given(TEXTS, st.integers(-14, 14), st.integers(-14, 14), st.sampled_from([1, 2, -1, None]))
def test_slices_keep_the_origin_of_every_character(text, start, stop, step):
    traced = concat([copied(c, i) for i, c in enumerate(text)])
    made = traced[start:stop:step]
    marks = [m.origin for n, m in made.runs for _ in range(n)]
    assert plain(made) == text[start:stop:step]
    assert marks == list(range(len(text)))[start:stop:step]
    assert [plain(c) for c in traced] == list(text)


def test_joining_and_adding_traced_and_plain_text_keeps_marks():
    made = "a" + copied("b", 1) + "c" + copied("", 2) + copied("d", 1)
    assert isinstance(made, TracedText)
    assert (plain(made), made.runs) == (
        "abcd",
        ((1, Mark()), (1, Mark(1)), (1, Mark()), (1, Mark(1))),
    )


# The sandbox.


def render(text: str, **variables: Any) -> str:
    return plain(Template(text).render(**variables))


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ ('\t' * 9999).expandtabs(99999) }}",
        "{{ ('a' * 9999).translate({97: 'a' * 99999}) }}",
        "{{ ('\n' * 9999) | indent(99999) }}",
        "{{ range(99999) | join('a' * 99999) }}",
        "{{ range(99999) | join(d='a' * 99999) }}",
        "{{ ('a' * 99999) | replace(old='a', new='a' * 99999) }}",
        "{{ [0] * 9999 | tojson(indent=99999) }}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('' | attr('format'))(1) }}",
        "{{ range(10 ** 9) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ namespace(_x=1)._x }}{% set ns = namespace() %}{% set ns['_x'] = 1 %}",
        "{{ lipsum() }}",
        "{{ [1, 2] | random }}",
        "{{ strftime_now('%Y') }}",
        "{% include 'x' %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_hostile_template_fails_after_bounded_work(text):
    start = time.process_time()
    with pytest.raises(Exception) as fault:  # noqa: PT011
        render(text, messages=messages_of(TALK))
    assert time.process_time() - start < 20  # a second or two; hours without the bounds
    assert not isinstance(fault.value, MemoryError)


@pytest.mark.parametrize("text", ["{{ none }}", "{{ 'a' ~ none }}", "{{ none | trim }}"])
def test_a_template_that_would_write_none_is_refused(text):
    with pytest.raises(TemplateRefused, match="expected text, got none"):
        render(text)


def test_a_template_sees_no_number_of_a_message():
    assert render("{{ messages[0]._number }}", messages=messages_of(TALK)) == ""


def test_the_bound_of_steps_is_the_same_in_every_rendering():
    made = Template("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}")
    assert [made.render(n=230) for _ in range(2)] == ["", ""]
    with pytest.raises(TemplateRefused, match="steps of a template, got more"):
        made.render(n=500)


def test_the_bounds_grow_with_the_conversation(encoders):
    long = [{"role": "user", "content": "x" * 3_000_000}, TALK[1]]
    text, spans = encoders("chatml").render(long)
    assert text[spans[0].start : spans[0].stop] == "hello there<|im_end|>"
    assert trained(encoders("chatml", train_on="last"), TALK * 300) == ["fine<|im_end|>"]


def test_a_template_that_is_too_long_is_refused():
    with pytest.raises(TemplateRefused, match="characters"):
        Template("a" * ((1 << 20) + 1))


def test_today_is_the_date_of_the_specification(encoders):
    assert "Today Date: 31 Jan 2026" in encoders("llama3").render(TALK)[0]
    assert "set date=" in refusal(encoders("llama3", date=None), TALK)


def test_filters_give_what_jinja2_gives():
    import jinja2

    cases = (
        "{{ x | trim }}|{{ x | upper }}|{{ x | lower }}|{{ x | capitalize }}",
        "{{ x | replace('a', 'bb') }}|{{ x | replace('a', 'b', 1) }}|{{ x | replace('', '-') }}",
        "{{ x | indent }}|{{ x | indent(2, true) }}|{{ x | indent('..', blank=true) }}",
        "{{ [x, 1, x] | join(', ') }}|{{ ys | join('-', attribute='k') }}|{{ x | string }}",
        "{{ x | first }}|{{ x | last }}|{{ x | length }}|{{ x | list | join('.') }}|{{ x | safe }}",
        "{{ x ~ 1 ~ true }}|{{ x[1:] }}|{{ x[:-1] }}|{{ x[::-1] }}|{{ x | reverse }}",
        "{{ ys | map(attribute='k') | list | length }}|{{ {'b': 1, 'a': 2} | dictsort }}",
        "{{ x.split('a') | length }}|{{ x.title() }}|{{ 'a' in x }}|{{ x | default('d') }}",
        "{% set b %}{{ x }}!{% endset %}{{ b }}|{% filter upper %}{{ x }}{% endfilter %}",
    )
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    for x in ("abc", " a\n b\n\nca ", ""):
        for text in cases:
            wanted = environment.from_string(text).render(x=x, ys=[{"k": "v"}, {"k": 2}])
            for value in (x, copied(x, 0)):
                try:
                    assert render(text, x=value, ys=[{"k": "v"}, {"k": 2}]) == wanted, text
                except Untraceable:
                    assert "replace('', " in text


def test_an_error_of_the_template_is_the_reason(encoders):
    reason = refusal(encoders("mistral"), [TALK[0], TALK[0], TALK[1]])
    assert "user and assistant must alternate" in reason


def test_a_prompt_of_no_messages_that_fails_is_refused(encoders):
    with pytest.raises(NoSpan, match="message 0: expected the template to render its prompt"):
        encoders("llama3").render([TALK[1]])
    assert trained(encoders("chatml"), [TALK[1]]) == ["hello there<|im_end|>"]


def test_a_template_outside_its_folder_gives_the_same(encoders, tmp_path: Path):
    path = tmp_path / "other.jinja"
    path.write_text(chats.template("chatml"), encoding="utf-8")
    given_ = encoders("qwen", template=str(path))
    assert trained(given_, TALK) == trained(encoders("chatml"), TALK)
