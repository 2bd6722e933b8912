"""Chat templates are functions: what prints objects, picks at random or asks the clock is refused by name."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import jinja2
import pytest

from llm42.errors import ModelFileError, RequestRejected, UnsupportedModel
from llm42.text.chat_template import ChatTemplate
from llm42.text.template_dates import strftime

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"function": {"name": "f", "parameters": {"items": {"type": "string"}, "keys": 1}}}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {}).render(USER, True, **({"tools": TOOLS} | variables))


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools[0].function.parameters.items }}",
        "{{ tools[0].function.parameters.keys }}",
        "{{ tools[0].function.parameters.items() }}",
        "{{ tools[0] | attr('values') }}",
        "{{ joiner(', ') }}",
        "{{ cycler(1, 2) }}",
        "{{ namespace(a=1) }}",
        "{{ raise_exception }}",
        "{{ strftime_now }}",
        "{{ range }}",
        "{{ dict }}",
        "{{ messages | map(attribute='role') }}",
        "{{ messages | reverse }}",
        "{% for m in messages %}{{ loop }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m }}",
        "{{ [joiner(', ')] }}",
        "{{ {'a': [tools[0].items]} }}",
        "{{ 'x' ~ tools[0].items }}",
        "{{ tools[0].items | string }}",
        "{{ tools[0].items | upper }}",
        "{{ [1, tools[0].items] | join(',') }}",
        "{{ tools | join(',', attribute='items') }}",
        "{{ [tools[0].items] | map('string') | join }}",
        "{{ '%s' % tools[0].items }}",
        "{{ '%s' | format(tools[0].items) }}",
        "{{ '{}'.format(tools[0].items) }}",
        "{{ '{a}'.format(a=tools[0].items) }}",
        "{{ '{a}'.format_map({'a': tools[0].items}) }}",
        "{% set text %}{{ tools[0].items }}{% endset %}{{ text }}",
        "{{ '{0.items}'.format(tools[0]) }}",
        "{{ '{0[a].items}'.format({'a': tools[0]}) }}",
        "{{ '{a.items}'.format_map({'a': tools[0]}) }}",
        "{{ '{0.items!r:>9}'.format(tools[0]) }}",
        "{{ ('{0.items}'|safe).format(tools[0]) }}",
        "{{ ('{a.items}'|safe).format_map({'a': tools[0]}) }}",
        "{{ ('{:{}}'|safe).format('a', tools[0].items) }}",
        "{{ (['{0.items}'] | map(attribute='format') | first)(tools[0]) }}",
        "{{ ('{0.items}' | attr('format'))(tools[0]) }}",
        "{{ '{0.format}'.format('a') }}",
        "{{ (''|safe).join([tools[0].items]) }}",
        "{{ (''|safe).join(tools | map(attribute='items')) }}",
        "{{ (''|safe).join([messages | map('upper')]) }}",
        "{{ (''|safe).join([tools[0].keys()]) }}",
        "{{ ('a'|safe).replace('a', tools[0].items) }}",
        "{{ ('a'|safe).replace('a', messages | select) }}",
        "{{ ('a'|safe).center(9, tools[0].items) }}",
        "{{ ('a'|safe).escape(tools[0].items) }}",
        "{{ ('%s'|safe) % tools[0].items }}",
        "{{ ('%s'|safe) % (tools[0].items,) }}",
        "{{ ('%(a)s'|safe) % {'a': tools[0].items} }}",
        "{{ ('%a'.encode() % tools[0].items).decode() }}",
        "{{ '%s' | format(namespace(a=1)) }}",
        "{{ '%(a)s' | format(a=tools[0].items) }}",
        "{{ [1, 2] | join(tools[0].items) }}",
        "{{ [tools[0].items] | list | string }}",
        "{{ tools[0].items | pprint }}",
        "{{ tools[0].items | urlize }}",
        "{{ 'https://a.b' | urlize(target=tools[0].items) }}",
        "{{ {'a': tools[0].items} | xmlattr }}",
        "{{ tools[0].items | e }}",
        "{{ tools[0].items | forceescape }}",
        "{{ 'a' | replace('a', tools[0].items) }}",
        "{{ tools[0].items | wordwrap }}",
        "{{ 'a b' | wordwrap(1, wrapstring=tools[0].items) }}",
        "{{ 'a' | indent(tools[0].items) }}",
        "{{ 'abcdefghijkl' | truncate(3, end=tools[0].items) }}",
        "{{ [tools[0].values()] }}",
        "{{ tools | rejectattr('absent') | string }}",
        "{{ raise_exception(tools[0].items) }}",
    ],
)
def test_printing_an_object_is_refused(source: str) -> None:
    with pytest.raises(RequestRejected, match=r"not reproducible.*prints an object of Python"):
        render(source)


def test_a_method_is_named() -> None:
    with pytest.raises(
        RequestRejected, match=r"builtin_function_or_method 'items'.*read as \['key'\]"
    ) as caught:
        render("{{ tools[0].function.parameters.items }}")
    assert " at 0x" not in str(caught.value)
    assert render("{{ tools[0].function.parameters['items'] }}") == "{'type': 'string'}"


def test_the_order_of_a_set_is_refused() -> None:
    with pytest.raises(RequestRejected, match="makes a set"):
        render("{% for k in tools[0].keys() - [] %}{{ k }}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    ["{{ '{:n}'.format(1234) }}", "{{ '{0:>12n}'.format(1.5) }}", "{{ ('{a:{b}}').format(a=1, b='n') }}"],
)
def test_numbers_by_the_locale_are_refused(source: str) -> None:
    with pytest.raises(RequestRejected, match=r"not reproducible.*locale"):
        render(source)


def test_keys_that_are_sorted_by_address_are_refused() -> None:
    with pytest.raises(RequestRejected, match=r"not reproducible.*pprint"):
        render("{{ [{(1, 'a'): 1, ('a', 1): 2}] | pprint }}")
    assert render("{{ [{'b': 1, 'a': (2, 3)}] | pprint }}") == "[{'a': (2, 3), 'b': 1}]"


def test_what_is_formatted_is_what_is_looked_at() -> None:
    source = (
        "{{ '{0[name]}|{1:,}|{a!r:>4}|{2.a}'.format(tools[0], 1234, namespace(a=1), a='x') }}"
        "|{{ ('{}<'|safe).format('<') }}|{{ '{a}'.format_map({'a': 2}) }}|{{ '{:>{}}'.format('n', 3) }}"
        "|{{ ('+'|safe).join(messages | map(attribute='role')) }}|{{ ','.join({'a': 1}.keys()) }}"
        "|{{ ('a'|safe).replace('a', '<') }}"
    )
    assert render(source, tools=[{"name": "f"}]) == "f|1,234| 'x'|1|&lt;<|2|  n|user|a|&lt;"


def test_identity_of_values_is_refused() -> None:
    with pytest.raises(RequestRejected, match="sameas"):
        render("{{ messages[0].role is sameas 'user' }}")
    assert render("{{ none is sameas none }}{{ 1 is sameas true }}") == "TrueFalse"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if false %}{{ lipsum(n=1) }}{% endif %}", "lipsum"),
        ("{% if false %}{{ [1, 2] | random }}{% endif %}", "random"),
        ("{% include 'other.jinja' %}", "include"),
        ("{% import 'other.jinja' as other %}", "import"),
    ],
)
def test_what_reading_shows_is_refused_at_load(source: str, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name) as caught:
        ChatTemplate(source, {})
    assert caught.value.field == "chat_template"


def test_an_unbounded_range_is_refused() -> None:
    with pytest.raises(RequestRejected, match="Range too big"):
        render("{% for i in range(n) %}x{% endfor %}", n=10**9)


def test_what_templates_really_do_still_works() -> None:
    source = (
        "{%- set ns = namespace(first=true) %}{% set comma = joiner(', ') %}"
        "{% for key, value in tools[0].function.items() %}{{ comma() }}{{ key ~ '=' ~ value }}{% endfor %}"
        "|{{ messages | map(attribute='role') | join('+') }}|{{ '%s/%d' % ('a', 2) }}|{{ '{}'.format(3.5) }}"
        "|{{ messages | length }}|{{ missing }}|{{ none }}|{{ true }}|{{ ns.first }}|{{ 5 - 2 }}|{{ 7 % 4 }}"
        "|{{ tools | tojson(sort_keys=true) }}|{{ [1, 'a', none] }}|{{ loop is defined }}"
    )
    assert render(source, tools=[{"function": {"name": "f", "b": [1]}}]) == (
        "name=f, b=[1]|user|a/2|3.5|1||None|True|True|3|3"
        '|[{"function": {"b": [1], "name": "f"}}]|[1, \'a\', None]|False'
    )


@pytest.mark.parametrize(
    "source", ["{{ tools[0].items | tojson }}", "{{ missing | tojson }}", "{{ 1 + 'a' }}"]
)
def test_other_faults_of_a_template_stay_the_requests(source: str) -> None:
    with pytest.raises(RequestRejected, match="refused the messages"):
        render(source)


def test_a_template_without_syntax_is_a_broken_file() -> None:
    with pytest.raises(ModelFileError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


ALL = (
    "%a %A %b %B %c %C %d %D %e %F %g %G %h %H %I %j %k %l %m %M %p %P %r"
    " %R %S %T %u %U %V %w %W %x %X %y %Y %%"
)
FLAGS = "%-d %-m %_m %-H %0e %^a %^B %#p %-I %-j"


@pytest.mark.parametrize("day", [(2024, 7, 26), (2021, 1, 3), (2023, 1, 1), (1999, 12, 31), (2027, 11, 9)])
@pytest.mark.parametrize("hour", [0, 9, 12, 23])
def test_dates_are_those_of_the_c_library(day: tuple[int, int, int], hour: int) -> None:
    moment = datetime.datetime(*day, hour, 5, 7, tzinfo=datetime.UTC)
    assert strftime(moment, f"{ALL} {FLAGS} %Z %z") == moment.strftime(f"{ALL} {FLAGS} %Z %z")


def test_an_unknown_directive_is_named() -> None:
    with pytest.raises(jinja2.TemplateError, match="%Q"):
        strftime(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "%d %Q")


PROGRAM = """
import locale, time
time.tzset()
locale.setlocale(locale.LC_ALL, "")
from llm42.text.chat_template import ChatTemplate
source = "{{ strftime_now('%s %Z %z %c %x %X %A %d %B %p %H') }}"
print(ChatTemplate(source, {}).render([{"role": "user", "content": ""}], True))
"""


def test_neither_time_zone_nor_locale_matter() -> None:
    def under(zone: str, language: str) -> str:
        environment = {
            "TZ": zone,
            "LC_ALL": language,
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    one = under("UTC", "C")
    assert one == "1721952000 UTC +0000 Fri Jul 26 00:00:00 2024 07/26/24 00:00:00 Friday 26 July AM 00\n"
    assert under("America/New_York", "C.UTF-8") == one
    assert under("XYZ-9", "C.UTF-8") == one
