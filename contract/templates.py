"""Templates: Jinja2 in a sandbox that gives neither files, nor attributes of Python, nor much work.

What a template may use is bounded: the steps of its loops and calls, the length of every text that
it makes, the width that it pads to. This stops a template gone wrong before it holds up a lane; it
does not turn writing campaigns into something that strangers may be let do.

A variable that is missing is an error, and so is to print one that is null, a list or an object:
nobody wants to read "Dear None". `{{ name or "customer" }}` says what to print instead.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import CodeType, TracebackType
from typing import Any, Final, cast
from urllib.parse import quote

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from contract.events import CampaignScheduled

MAXIMUM_TEXT: Final = 1_000_000
"""Characters of any text that a template makes, its output included."""

MAXIMUM_PROGRAM: Final = 2_000_000
"""Characters of the Python that a template becomes, some five times those of the largest HTML with a few hundred variables:
Python's compiler takes a second for so many, in which nothing else of the process runs."""

MAXIMUM_STEPS: Final = 100_000
"""Rounds of loops and calls that one rendering may take."""

_MAXIMUM_ARGUMENT: Final = 256  # a width, a precision, or the characters put between or in place
_MAXIMUM_BITS: Final = 4096  # of a whole number
_MAXIMUM_FAULT: Final = 300

# Names that no template can write, because they hold a space.
_STEPS: Final = "steps left"
_COUNTED: Final = "counted steps"
_BOUNDED: Final = "bounded text"

# Not bound by what they are given, not of one answer, or of no use to a message.
_WITHDRAWN: Final = {"attr", "batch", "center", "pprint", "random", "slice", "urlize"}
_BOUND_BY_THEIR_ARGUMENTS: Final = {"indent", "join", "replace", "round", "tojson", "wordwrap"}
_UNBOUND_METHODS: Final = frozenset(
    {"center", "encode", "expandtabs", "join", "ljust", "replace", "rjust"}
    | {"to_bytes", "translate", "zfill"}
)
_WIDE_FORMAT: Final = re.compile(r"\d{4}|\*|\{[^{}]*\{")


class TemplateError(ValueError):
    """A template cannot be compiled or rendered; one line: the template's line, what is wrong."""


class CompiledTemplate:
    """A template ready to be rendered any number of times."""

    def __init__(self, template: Template) -> None:
        self._template = template
        # Jinja2 copies them for each rendering, from a chain of mappings: a third of the time of a short template.
        template.globals = dict(template.globals)

    def render(self, variables: Mapping[str, object]) -> str:
        """What the template makes of the variables.

        Raises:
            TemplateError: A variable is missing, the sandbox forbids something, or the template
                asks for too much.
        """
        try:
            context = self._template.new_context({**variables, _STEPS: _Steps()})
            return _bounded_concat(self._template.root_render_func(context))
        except Exception as error:
            raise TemplateError(_fault(_line(error.__traceback__), error)) from error


def compile_text(source: str) -> CompiledTemplate:
    """A template for plain text: a part, or the value of a header field.

    Raises:
        TemplateError: Its syntax is wrong, or it names an unknown filter or test.
    """
    return _compile(_TEXT, source)


def compile_html(source: str) -> CompiledTemplate:
    """A template for HTML: what it prints is escaped.

    Raises:
        TemplateError: Its syntax is wrong, or it names an unknown filter or test.
    """
    return _compile(_HTML, source)


def compile_url(source: str) -> CompiledTemplate:
    """A template for a URL: what it prints is percent-encoded (RFC 3986), unless marked `safe`.

    Raises:
        TemplateError: Its syntax is wrong, or it names an unknown filter or test.
    """
    return _compile(_URL, source)


def check_templates(campaign: CampaignScheduled) -> None:
    """Compiles every template of a campaign.

    Raises:
        TemplateError: one is wrong; which, its line, and why.
    """
    for email_key, template in campaign.templates.items():
        for part, compiler, source in (
            ("subject", compile_text, template.subject),
            ("text", compile_text, template.text),
            ("html", compile_html, template.html),
        ):
            _check(f"templates: {email_key}: {part}", compiler, source)
    _check("unsubscribe_url", compile_url, campaign.unsubscribe_url)
    for name, value in campaign.headers.items():
        _check(f"headers: {name}", compile_text, value)


def _check(where: str, compiler: Callable[[str], CompiledTemplate], source: str | None) -> None:
    try:
        if source is not None:
            compiler(source)
    except TemplateError as error:
        raise TemplateError(f"{where}: {error}") from error


class _Steps:
    """The steps that are left to one rendering; a template cannot reach what begins with `_`."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAXIMUM_STEPS

    def _take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"it takes more than {MAXIMUM_STEPS} steps")


def _take_step(context: Context) -> None:
    context.parent[_STEPS]._take()  # noqa: SLF001 - private only to templates


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, finalize: Callable[[Any], object], *, autoescape: bool = False) -> None:
        super().__init__(
            undefined=StrictUndefined,
            autoescape=autoescape,
            finalize=finalize,
            keep_trailing_newline=True,
        )
        del self.globals["lipsum"]
        self.filters = {name: FILTERS[name] for name in FILTERS.keys() - _WITHDRAWN}
        for name in _BOUND_BY_THEIR_ARGUMENTS:
            self.filters[name] = _with_small_arguments(FILTERS[name])
        self.filters["format"] = _format
        self.filters[_COUNTED] = _counted
        self.filters[_BOUNDED] = _bounded

    def _compile(self, source: str, filename: str) -> CodeType:
        if len(source) > MAXIMUM_PROGRAM:
            raise SecurityError("it makes too long a program")
        return super()._compile(source, filename)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Prefers the data: `order.items` is the order's items, not a method of Python's dict."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _UNBOUND_METHODS and isinstance(obj, str | int):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise SecurityError("the format is too wide")
        return wrapped

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _take_step(context)
        return _bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _refuse_long(_size(left) * right if isinstance(right, int) else 0)
            _refuse_long(_size(right) * left if isinstance(left, int) else 0)
        elif operator == "+":
            _refuse_long(_size(left) + _size(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_large(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("the format is too wide")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            _refuse_large(result.bit_length())
        return result


class _Bounds(NodeTransformer):
    """Adds the bounds that the sandbox cannot put on a template from outside."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by the node
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), _COUNTED, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by the node
        self.generic_visit(node)
        return _filtered(node, _BOUNDED, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802 - likewise
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _BOUNDED, node.lineno)
        return node


def _filtered(node: nodes.Expr | None, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _compile(sandbox: _Sandbox, source: str) -> CompiledTemplate:
    try:
        tree = _Bounds().visit(sandbox.parse(source))
        return CompiledTemplate(sandbox.from_string(tree))
    except TemplateSyntaxError as error:
        raise TemplateError(_fault(error.lineno, error)) from error
    except Exception as error:  # what Jinja2 works out beforehand can fail like any expression
        raise TemplateError(_fault(None, error)) from error


def _fault(line: int | None, error: Exception) -> str:
    if isinstance(error, MemoryError):
        error = SecurityError("it takes too much memory")
    what = " ".join(str(error).split()) or type(error).__name__
    what = "".join(character if character.isprintable() else "?" for character in what)
    where = "" if line is None else f"line {line}: "
    return f"{where}{what[:_MAXIMUM_FAULT]}"


def _line(traceback: TracebackType | None) -> int | None:
    line = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


def _printable(value: Any) -> object:
    if isinstance(value, str | int | float | Undefined):
        return value
    kind = {type(None): "null", list: "a list", dict: "an object"}.get(type(value), "no text")
    raise SecurityError(f"what it prints is {kind}")


def _percent_encoded(value: Any) -> object:
    if isinstance(value, Markup):
        return str(value)
    return quote(str(_printable(value)), safe="")


def _urlencode_for_url(value: Any) -> Markup:
    encoded: str = FILTERS["urlencode"](value)
    return Markup(encoded)  # noqa: S704 - encoded once, not to be encoded again


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _refuse_long(length: int) -> None:
    if length > MAXIMUM_TEXT:
        raise SecurityError(f"it makes more than {MAXIMUM_TEXT} characters")


def _refuse_large(bits: int) -> None:
    if bits > _MAXIMUM_BITS:
        raise SecurityError("it makes too large a number")


def _bounded(value: Any) -> Any:
    _refuse_long(_size(value))
    return value


def _bounded_concat(pieces: Iterable[str]) -> str:
    text: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAXIMUM_TEXT:
            _refuse_long(length)
        text.append(piece)
    return "".join(text)


@pass_context
def _counted(context: Context, iterable: Iterable[object]) -> Iterator[object]:
    for item in iterable:
        _take_step(context)
        yield item


def _format(value: str, *args: object, **kwargs: object) -> str:
    if _WIDE_FORMAT.search(value):
        raise SecurityError("the format is too wide")
    formatted: str = FILTERS["format"](value, *args, **kwargs)
    return formatted


def _with_small_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args[value_at + 1 :], *kwargs.values()):
            size = abs(argument) if isinstance(argument, int) else _size(argument)
            if size > _MAXIMUM_ARGUMENT:
                raise SecurityError(f"an argument of {function.__name__[3:]} is too large")
        return _bounded(function(*args, **kwargs))

    return bounded


_TEXT: Final = _Sandbox(_printable)
_HTML: Final = _Sandbox(_printable, autoescape=True)
_URL: Final = _Sandbox(_percent_encoded)
_URL.filters["urlencode"] = _urlencode_for_url
