"""Sandbox of chat templates: rendering with marks on every character, within fixed bounds.

The dialect is that of transformers. A template is untrusted code. It has no access to files,
modules or Python internals, and cannot change its arguments. Its work is counted in steps, not in
seconds, so that a template fails for the same rows on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from overlord.transforms.chat_filters import FILTERS, checked
from overlord.transforms.chat_text import (
    OPERATIONS,
    QUESTIONS,
    Mark,
    TemplateRefused,
    TracedText,
    Untraceable,
    as_text,
    concat,
    copied,
    generated,
    origins,
    plain,
    written,
)

MAX_SOURCE = 1 << 20  # characters of a template
MAX_STEPS = 200_000  # per rendering: passes of loops, calls, operators, outputs
MAX_TEXT = 1 << 24  # characters that a rendering writes and joins
STEPS_PER_CHARACTER, COPIES = 1, 64  # further steps and characters, for long conversations
CHARACTERS_PER_STEP = 256  # an operation on a long text counts as several steps
MAX_NUMBER = 1 << 63
PADDING = ("center", "ljust", "rjust", "zfill")  # methods that lengthen text by at most a number
MAX_SEQUENCE = 100_000  # also the bound of jinja2 for range()


class Message(dict):
    """A message as the template receives it; the number is not visible to the template."""

    __slots__ = ("_number",)

    def __init__(self, number: int, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._number = number

    @staticmethod
    def number_of(value: Any) -> int:
        return value._number if isinstance(value, Message) else -1


def messages_of(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages with the origin of their texts; a role is text of the template."""
    return [
        Message(i, {k: v if k == "role" else _copied(v, i) for k, v in message.items()})
        for i, message in enumerate(messages)
    ]


def _copied(value: Any, origin: int) -> Any:
    if isinstance(value, str):
        return copied(value, origin)
    if isinstance(value, dict):
        return {_copied(k, origin): _copied(v, origin) for k, v in value.items()}
    return [_copied(v, origin) for v in value] if isinstance(value, list) else value


def _size(value: Any) -> int:
    """Return the number of characters in a value."""
    if isinstance(value, dict):
        return sum(map(_size, value)) + sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


@dataclass(slots=True)
class _Rendering:
    """State of one rendering: the current message of the template's loop, and the work so far."""

    size: int = 0  # characters of the variables, by which the bounds grow
    turns: list[int] = field(default_factory=lambda: [-1])
    # For each loop, whether its items are messages.
    by_item: list[bool] = field(default_factory=lambda: [False])
    steps: int = 0
    text: int = 0

    def count(self, steps: int = 1, text: int = 0) -> None:
        self.steps += steps
        self.text += text
        if self.steps > (most := MAX_STEPS + self.size * STEPS_PER_CHARACTER):
            raise TemplateRefused(f"expected at most {most} steps of a template, got more")
        if self.text > (most := MAX_TEXT + self.size * COPIES):
            raise TemplateRefused(f"expected at most {most} characters, got more")


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_generated"), [], [], body)
        return call.set_lineno(line)

    def _generated(self, caller: Macro) -> str:
        return generated(caller())


class _Loops(NodeTransformer):
    """A visitor that adds calls to every loop, which record the message of its current pass."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        name = node.target.name if isinstance(node.target, nodes.Name) else None
        value = nodes.Name(name, "load") if name else nodes.Const(None)
        node.body.insert(0, _statement("next_pass", [value], node.lineno))
        return [
            _statement("begin_loop", [], node.lineno),
            node,
            _statement("end_loop", [], node.lineno),
        ]

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        if not isinstance(node.target, nodes.Name):
            return node
        value = nodes.Name(node.target.name, "load")
        return [node, _statement("assigned", [value], node.lineno)]


def _statement(name: str, arguments: list[nodes.Expr], line: int) -> nodes.ExprStmt:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    return nodes.ExprStmt(call, lineno=line)


class _Generator(CodeGenerator):
    """A generator of template code whose outputs keep their marks."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.output({''.join(map(str, group))!r})"

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # a constant expression may be huge: bounds apply at rendering
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.output(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.part(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write("None") if bound is None else self.visit(bound, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment that renders one template at a time, with marks and within bounds."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, today: date | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are evaluated at rendering, where bounds apply
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self._now = _Rendering()
        self.concat = self.joined  # type: ignore[method-assign]
        self.filters = {
            name: self._bounded(name, FILTERS.get(name) or checked(name, f))
            for name, f in {**self.filters, **FILTERS}.items()
            if name not in ("random", "urlize", "xmlattr", "pprint")
        }
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {
            "range": self._range,
            "raise_exception": _raise_exception,
            "namespace": _Namespace,
            "dict": _new_dict,
        }
        if today is not None:
            self.globals["strftime_now"] = today.strftime

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> TracedText:
        """Return the rendered text. Any exception of the template passes through."""
        self._now = _Rendering(_size(dict(variables)))
        context = template.new_context(dict(variables))
        return concat(template.root_render_func(context))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Loops().visit(source), *args, **kwargs)

    # Called by compiled templates.

    def output(self, value: Any) -> TracedText:
        """Return a value as it is written at this point of the template."""
        if isinstance(value, dict) and len(found := origins(value)) == 1:
            text = str(value)
            value = TracedText.of(text, ((len(text), Mark(min(found))),))
        value = as_text(value)
        self._now.count(1, len(value))
        return written(value, self._now.turns[-1])

    def joined(self, values: Iterable[Any]) -> TracedText:
        parts = [as_text(v) for v in values]
        self._now.count(len(parts), sum(map(len, parts)))
        return concat(parts)

    def part(self, value: Any, bounds: slice) -> Any:
        self._count_size(value)
        try:
            return value[bounds]
        except (TypeError, LookupError):
            return self.undefined(obj=value, name=str(bounds))

    def begin_loop(self) -> None:
        self._now.turns.append(self._now.turns[-1])
        self._now.by_item.append(False)

    def next_pass(self, item: Any) -> None:
        self._now.count()
        if (number := Message.number_of(item)) >= 0:
            self._now.turns[-1] = number
            self._now.by_item[-1] = True

    def assigned(self, value: Any) -> None:
        """Follow ``{% set message = messages[i] %}`` in a loop over numbers."""
        number = Message.number_of(value)
        if number >= 0 and len(self._now.turns) > 1 and not any(self._now.by_item):
            self._now.turns[-1] = number

    def end_loop(self) -> None:
        self._now.turns.pop()
        self._now.by_item.pop()

    # Overridden operations of the sandbox.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._now.count()
        text = getattr(function, "__self__", None)
        if not isinstance(text, str):
            return super().call(context, function, *args, **kwargs)
        for name in ("_loop_vars", "_block_vars"):  # compiled code passes them to every call
            kwargs.pop(name, None)
        self._count_size(text)
        self._check_numbers(args, kwargs)
        return self._text_method(text, function, args, kwargs)

    def _text_method(
        self, text: str, method: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = method.__name__
        if name in ("format", "format_map"):
            return _refuse_format()
        if name == "join" and args:
            args = (list(args[0]), *args[1:])
            self._count_join(args[0], text)
        elif name == "replace":
            self._count_replace(text, *args)
        if name in QUESTIONS:
            return getattr(plain(text), name)(*args, **kwargs)
        if not origins(text) and not origins(list(args)) and not origins(list(kwargs.values())):
            if name not in OPERATIONS and name not in PADDING:
                raise TemplateRefused(f"expected another method of text, got {name}()")
            return getattr(plain(text), name)(*args, **kwargs)
        if name not in OPERATIONS:
            raise Untraceable(f"the method {name}() on the content of a message")
        return OPERATIONS[name](text, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._now.count()
        self._check_operands(operator, left, right)
        if operator == "%" and isinstance(left, str) and (origins(left) or origins([right])):
            raise Untraceable("the operator % on the content of a message")
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, (str, list, tuple)):
            self._count_size(made)
        elif isinstance(made, int) and abs(made) > MAX_NUMBER:
            raise TemplateRefused("expected numbers of at most 64 bits, got more")
        return made

    def _check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Refuse an operation whose result may be too large to be computed."""
        numbers = [v for v in (left, right) if isinstance(v, int)]
        sizes = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
        if operator == "**" and any(abs(v) > 64 for v in numbers):
            raise TemplateRefused("expected operands of ** up to 64, got more")
        if operator == "*" and sizes and numbers and max(sizes) * max(numbers) > MAX_SEQUENCE:
            raise TemplateRefused(f"expected at most {MAX_SEQUENCE} repetitions, got more")
        if operator == "%" and isinstance(left, str) and any(c.isdigit() for c in left):
            raise TemplateRefused("expected a format without widths, got one with digits")
        if operator == "+" and sizes:
            self._now.count(0, sum(sizes))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None if super().wrap_str_format(value) is None else _refuse_format

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts its work, with the attributes that jinja2 reads."""

        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._now.count()
            for value in args:
                self._count_size(value)
            self._check_numbers(args, kwargs)
            if name == "replace":
                self._count_replace(*args, **kwargs)
            elif name == "join":  # the first argument is the environment
                args = (args[0], list(args[1]), *args[2:])
                self._count_join(args[1], args[2] if len(args) > 2 else kwargs.get("d"))
            made = function(*args, **kwargs)
            if isinstance(made, str):
                self._now.count(0, len(made))
            return made

        bounded.__dict__.update(getattr(function, "__dict__", {}))
        return bounded

    def _count_join(self, parts: list[Any], separator: Any) -> None:
        each = len(separator) if isinstance(separator, str) else 0
        self._now.count(0, sum(len(p) if isinstance(p, str) else 0 for p in parts))
        self._now.count(0, len(parts) * each)

    def _count_replace(self, text: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self._now.count(0, len(text) + plain(text).count(plain(old)) * len(new))

    def _count_size(self, value: Any) -> None:
        if isinstance(value, str):
            self._now.count(len(value) // CHARACTERS_PER_STEP)
        elif isinstance(value, (list, tuple, dict)):
            self._now.count(len(value) // 16)

    def _check_numbers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_SEQUENCE:
                raise TemplateRefused(f"expected numbers up to {MAX_SEQUENCE}, got {value}")

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        if len(made) > MAX_SEQUENCE:
            raise TemplateRefused(f"expected a range of at most {MAX_SEQUENCE}, got {len(made)}")
        self._now.count(len(made) // 16)
        return made


class _Namespace(jinja2.utils.Namespace):
    """A namespace without attributes of Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateRefused(f"expected a public name in a namespace, got {name!r}")
        super().__setitem__(name, value)


def _refuse_format(*args: Any, **kwargs: Any) -> str:
    raise TemplateRefused("expected ~ or + to join text, got str.format")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


class Template:
    """A compiled template. Runs on: any thread; one rendering at a time."""

    def __init__(self, source: str, today: date | None = None) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateRefused(
                f"expected a template of at most {MAX_SOURCE} characters, got {len(source)}"
            )
        self._sandbox, self._lock = Sandbox(today), threading.Lock()
        parsed = self._sandbox.parse(source)
        self.has_generation = any(
            isinstance(node, nodes.ExtensionAttribute) for node in parsed.find_all(nodes.Node)
        )
        self.names = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        self._template = self._sandbox.from_string(source)

    def render(self, **variables: Any) -> TracedText:
        with self._lock:
            return self._sandbox.render(self._template, variables)
