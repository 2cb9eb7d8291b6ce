"""Templates in their sandbox: what they may do, and how they are stopped."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.events import CampaignScheduled, Template
from contract.templates import (
    MAXIMUM_TEXT,
    CompiledTemplate,
    TemplateError,
    check_templates,
    compile_html,
    compile_text,
    compile_url,
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Hi {{ name }}!\n", "Hi Ann!\n"),
        (
            "{% for item in order.items %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
            "1/2 2/2 ",
        ),
        ("{% for k, v in prices.items() if v > 1 %}{{ k }}{% else %}none{% endfor %}", "b"),
        ("{% for n in tree recursive %}{{ n.name }}{{ loop(n.sub) }}{% endfor %}", "xy"),
        ("{% set both = name ~ ' ' ~ name %}{{ both }}", "Ann Ann"),
        ("{% set block %}<{{ name }}>{% endset %}{{ block }}", "<Ann>"),
        ("{% macro hi(who) %}hi {{ who }}{% endmacro %}{{ hi(name) }}", "hi Ann"),
        (
            "{{ '%.2f' % 2.5 }} {{ '%.1f'|format(1) }} {{ '{:,.2f}'.format(1234) }}",
            "2.50 1.0 1,234.00",
        ),
        ("{{ order['items']|join(', ') }} {{ name|replace('A', 'E') }}", "a, b Enn"),
        ("{{ nothing or 'customer' }} {{ unknown|default('x') }}", "customer x"),
        ("{{ 3 * 4 }} {{ 2 ** 8 }} {{ '-' * 3 }} {{ 1.005|round(1) }}", "12 256 --- 1.0"),
        ("{{ order['items']|tojson }}", '["a", "b"]'),
    ],
)
def test_what_templates_do(source: str, expected: str) -> None:
    """Loops, macros, formats and filters work, and data goes before the methods of Python."""
    variables = {
        "name": "Ann",
        "nothing": None,
        "order": {"items": ["a", "b"]},
        "prices": {"a": 1, "b": 2},
        "tree": [{"name": "x", "sub": [{"name": "y", "sub": []}]}],
    }
    assert compile_text(source).render(variables) == expected


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("a\nb\n{{ nam }}", "line 3: 'nam' is undefined"),
        ("\n{{ name.first.second }}", "line 2: 'str object' has no attribute 'first'"),
        ("{{ nothing }}", "line 1: what it prints is null"),
        ("{{ list }}", "line 1: what it prints is a list"),
        ("{{ {'a': 1} }}", "line 1: what it prints is an object"),
        ("{{ list|map('upper') }}", "line 1: what it prints is no text"),
        ("{{ 1 / 0 }}", "line 1: division by zero"),
        (
            "{{ name.__class__ }}",
            "line 1: access to attribute '__class__' of 'str' object is unsafe.",
        ),
        (
            "{{ list.append(1) }}",
            "line 1: access to attribute 'append' of 'list' object is unsafe.",
        ),
        ("{% include 'other' %}", "line 1: no loader for this environment specified"),
        ("{{ name + 1 }}", 'line 1: can only concatenate str (not "int") to str'),
    ],
)
def test_what_templates_cannot(source: str, fault: str) -> None:
    """A fault while rendering is one line that names the template's line and what is wrong."""
    with pytest.raises(TemplateError) as raised:
        compile_text(source).render({"name": "Ann", "nothing": None, "list": ["a"]})
    assert str(raised.value) == fault


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("a\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
        ("{{ name|random }}", "line 1: No filter named 'random'."),
        ("\n\n{{ name", "line 3: unexpected end of template, expected 'end of print statement'."),
    ],
)
def test_wrong_syntax(source: str, fault: str) -> None:
    """A template that cannot be compiled is one line: which of its lines, what is wrong."""
    with pytest.raises(TemplateError) as raised:
        compile_text(source)
    assert str(raised.value) == fault


def test_deep_nesting() -> None:
    """A template nested deeper than the parser goes is a fault like any other."""
    with pytest.raises(TemplateError, match="recursion"):
        compile_text("{{ " + "(" * 5_000 + ")" * 5_000 + " }}")


def test_long_programs() -> None:
    """What Python's compiler would take seconds for is refused; half a megabyte of HTML with its variables is taken."""
    with pytest.raises(TemplateError, match=r"^it makes too long a program$"):
        compile_text("{{ [" + "a," * 40_000 + "] }}")
    compile_html("<p>Hello {{ name }}</p>\n" + "<td>x</td>\n" * 45_000)


DOUBLE = 40


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% set a = 'aaaa' %}" + "{% set a = a ~ a %}" * DOUBLE,
        "{% set a = 'aaaa' %}" + "{% set a = a + a %}" * DOUBLE,
        "{% set a = [1, 2, 3] %}" + "{% set a = a + a %}" * DOUBLE,
        "{% set a = 'aaaa' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * DOUBLE,
        "{% set a = 'aaaa' %}"
        + "{% set a %}{{ a }}{{ a }}{% endset %}{% set a = a|lower %}" * DOUBLE,
        "{% set n = namespace(a='aaaa') %}{% for i in range(50) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "{% set n = namespace(a=99) %}{% for i in range(50) %}{% set n.a = n.a * n.a %}{% endfor %}",
        "{% for i in range(2000) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x'['zfill'](10 ** 9) }}",
        "{{ (5).to_bytes(10 ** 9) }}",
        "{{ 'x\ny'|indent(10 ** 9) }}",
        "{{ 'x'|center(10 ** 9) }}",
        "{{ (-5)|round(-10 ** 9) }}",
        "{{ [1]|tojson(indent=10 ** 9) }}",
        "{{ [1]|batch(10 ** 9, 'x')|list }}",
        "{% set a = 'a' * 99999 %}{{ a|replace('a', a) }}",
        "{% set a = 'a' * 99999 %}{{ range(9999)|join(a) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ lipsum() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ joiner.__init__['__globals__'] }}",
        "{{ namespace|attr('__init__') }}",
        "{{ ''|map(attribute='__class__')|list }}",
        "{{ ['']|map(attribute='__class__')|first }}",
        "{{ (1).__class__.__mro__ }}",
        "{{ '%s'.__mod__.__self__.__class__ }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('{0.__class__}'|string).format(1) }}",
        "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m._environment }}",
        "{% for i in [1] %}{{ loop._iterator.gi_frame }}{% endfor %}",
        "{% import 'os' as os %}",
        "{% from '/etc/passwd' import a %}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{{ config }}{{ request }}",
        "{{ url_for.__globals__ }}",
    ],
)
def test_abuse_is_stopped(source: str) -> None:
    """What would take the memory, the time or the inside of the agent is an error, at once."""
    with pytest.raises(TemplateError):
        compile_text(source).render({})


@pytest.mark.parametrize("compiler", [compile_text, compile_html, compile_url])
def test_nothing_outlives_a_rendering(compiler: Callable[[str], CompiledTemplate]) -> None:
    """A rendering has all its steps again, whatever the one before took."""
    template = compiler("{% for i in range(60000) %}{% endfor %}ok")
    assert [template.render({}) for _ in range(3)] == ["ok"] * 3


def test_longest_output() -> None:
    """An output of the most characters passes; one more does not."""
    template = compile_text("{{ a }}{{ b }}")
    assert len(template.render({"a": "x" * (MAXIMUM_TEXT - 1), "b": "y"})) == MAXIMUM_TEXT
    with pytest.raises(TemplateError, match="more than 1000000 characters"):
        template.render({"a": "x" * MAXIMUM_TEXT, "b": "y"})


@given(st.text())
def test_html_escapes(value: str) -> None:
    """No variable brings markup into HTML, also not through a block or a concatenation."""
    template = compile_html(
        "{% set b %}{{ v }}{% endset %}<p title=\"{{ v }}\">{{ b }}{{ v ~ '<' }}</p>"
    )
    html = template.render({"v": value})
    inside = html.removeprefix("<p title=").removesuffix("</p>")
    assert inside.count("<") == 0
    assert inside.count('"') == 2
    assert inside.count(">") == 1


def test_html_keeps_what_is_marked_safe() -> None:
    """A template may say that a variable is markup."""
    assert compile_html("{{ v }}{{ v|safe }}").render({"v": "<b>"}) == "&lt;b&gt;<b>"


def test_url_encodes_values_once() -> None:
    """What a URL's template prints is percent-encoded once, unless marked safe."""
    template = compile_url("{{ base|safe }}/u?a={{ e }}&b={{ e|urlencode }}&c={{ 'é&=/ ' }}{{ 5 }}")
    url = template.render({"base": "https://shop.test", "e": "a+b@x.test"})
    assert url == "https://shop.test/u?a=a%2Bb%40x.test&b=a%2Bb%40x.test&c=%C3%A9%26%3D%2F%205"


def test_text_is_left_as_it_is() -> None:
    """Plain text is neither escaped nor stripped of its last line end."""
    assert compile_text("{{ v }}\n\n").render({"v": "<&>"}) == "<&>\n\n"


@given(st.text(max_size=200))
def test_any_source_is_a_template_or_a_fault(source: str) -> None:
    """Whatever stands in a template, there is an output or one printable line."""
    fault = ""
    try:
        compile_text("{{ " + source + " }}").render({})
    except TemplateError as error:
        fault = str(error)
    assert fault.isprintable()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"subject": "{{ name"}, "templates: offer: subject: line 1: "),
        ({"text": "Hello\n{% if x %}"}, "templates: offer: text: line 2: "),
        ({"html": "<p>\n\n{{ x | no_such_filter }}"}, "templates: offer: html: line 3: "),
    ],
)
def test_a_campaign_with_a_wrong_template_is_refused(change: dict[str, str], why: str) -> None:
    """What does not compile is told with the email_key, the part and the line."""
    fields = {"subject": "s", "text": "t", **change}
    with pytest.raises(TemplateError) as error:
        check_templates(_campaign(templates={"offer": Template(**fields)}))
    assert str(error.value).startswith(why)
    assert "\n" not in str(error.value)


def test_url_and_headers_of_a_campaign_are_templates_too() -> None:
    """A wrong one is told by its name; right ones pass."""
    with pytest.raises(TemplateError, match=r"^unsubscribe_url: line 1: "):
        check_templates(_campaign(unsubscribe_url="https://shop.test/{{"))
    with pytest.raises(TemplateError, match=r"^headers: X-Id: line 1: "):
        check_templates(_campaign(headers={"X-Id": "{% endif %}"}))
    check_templates(_campaign(unsubscribe_url="https://shop.test/{{ user_id }}"))


def _campaign(**fields: Any) -> CampaignScheduled:
    made: dict[str, Any] = {
        "campaign_id": "c",
        "name": "n",
        "sender": "a@b.test",
        "scheduled_for": datetime(2026, 1, 1, tzinfo=UTC),
        "templates": {"offer": Template(subject="s", text="t")},
        **fields,
    }
    return CampaignScheduled(**made)
