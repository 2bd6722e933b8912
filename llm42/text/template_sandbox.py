"""The sandbox that chat templates run in: equal messages give equal text, in every process and at every time.

Jinja lets a template print any object. A method, a generator or a function prints its address in memory,
another one in each process; a set is walked in the order of hashes that every process salts anew. Such a
template is refused by name: when it is loaded where reading it is enough, else when it is rendered.
"""

from __future__ import annotations

import functools
import json
import pprint
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from llm42.errors import ModelFileError, UnsupportedModel

_FIELD = "chat_template"
_RANDOM: tuple[tuple[type[nodes.Node], str, str], ...] = (
    (nodes.Name, "lipsum", "a function of random text"),
    (nodes.Filter, "random", "a filter that picks at random"),
)
_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace",
    "safe", "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount",
    "wordwrap", "xmlattr",
)  # fmt: skip
"""Jinja's filters that make text of whatever they are given."""
_PRINTED = "printed"


class Unrepeatable(jinja2.TemplateRuntimeError):
    """The template did what has another outcome in another process."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, without what is not a function of its input."""

    intercepted_binops = frozenset("%-")

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=require_plain,
        )
        for name in _TEXT_FILTERS:
            self.filters[name] = _checked(self.filters[name])
        self.filters |= {"join": _join, "pprint": _pprint, "tojson": _tojson, _PRINTED: require_plain}
        self.tests["sameas"] = _same_constant
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"], self.filters["random"]

    def compiled(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """The template, and the variables that it reads. Raises ModelFileError or UnsupportedModel."""
        try:
            tree = self.parse(source)
            _refuse_visible(tree)
            variables = jinja2.meta.find_undeclared_variables(tree)
            made = jinja2.Template.from_code(
                self, self.compile(_Concat(self).visit(tree)), dict(self.globals)
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template cannot be parsed: line {error.lineno}: {error}"
            ) from error
        return made, frozenset(variables)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`text % values` prints the values; a difference of dictionary views is a set. Raises Unrepeatable
        for what differs between processes."""
        if operator == "%" and isinstance(left, (str, bytes)):
            require_plain(right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (set, frozenset)):
            raise Unrepeatable("it makes a set, which has another order in each process")
        return result

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Methods of text that is marked safe make text of whatever they are given."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) or (isinstance(owner, type) and issubclass(owner, str)):
            if getattr(obj, "__name__", "") == "join" and len(args) == 1:
                args = ([*args[0]],)  # what a generator yields can be looked at once only
            require_plain([*args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format(values)` prints what its fields name, which may be an attribute of a value."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        if isinstance(text, Markup):
            made: _Formatter = _EscapeFormatter(self, escape=text.escape)
        else:
            made = _Formatter(self)

        def call(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                if kwargs or len(args) != 1:
                    raise TypeError("format_map() takes one mapping")
                return type(text)(made.vformat(text, (), args[0]))
            return type(text)(made.vformat(text, args, kwargs))

        return functools.update_wrapper(call, value)


class _Formatter(SandboxedFormatter):
    """Looks at each value as it is printed, after the field's attributes and keys are followed."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """`!r` and `!s` print, too."""
        return super().convert_field(require_plain(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Raises Unrepeatable for the type `n`, which separates digits as the process's locale does."""
        if format_spec.endswith("n") and isinstance(value, (int, float)):
            raise Unrepeatable("it formats a number by the locale of the process ({:n}); {:,} does not")
        return super().format_field(require_plain(value), format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for text that is marked safe."""


def require_plain(value: Any) -> Any:
    """The value itself, if its text is a function of its content: what JSON knows, and undefined. Raises
    Unrepeatable."""
    if value is None or isinstance(value, (str, int, float, Undefined)):
        return value
    if isinstance(value, (list, tuple)):
        for item in value:
            require_plain(item)
    elif isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            require_plain(item)
    else:
        name = getattr(value, "__name__", "")
        what = f"{type(value).__name__} {name!r}" if isinstance(name, str) and name else type(value).__name__
        raise Unrepeatable(
            f"it prints an object of Python ({what}), which looks different in each process"
            " (a key named like a method is read as ['key'])"
        )
    return value


def _refuse_visible(tree: nodes.Template) -> None:
    for kind, name, what in _RANDOM:
        if any(node.name == name for node in tree.find_all(kind)):  # type: ignore[attr-defined]
            raise UnsupportedModel(f"the chat template uses {name}, {what}: not reproducible", _FIELD)
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        what = f"line {node.lineno}: {type(node).__name__.lower()}"
        raise UnsupportedModel(f"the chat template needs other files ({what}): not supported", _FIELD)


class _Concat(NodeTransformer):
    """`a ~ b` prints both."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self.environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The same with every part checked."""
        self.generic_visit(node)
        node.nodes = [nodes.Filter(part, _PRINTED, [], [], None, None) for part in node.nodes]
        return node.set_environment(self.environment).set_lineno(node.lineno)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text to train on; here it is just its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with all that it may print checked before. Jinja's own first arguments pass."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (jinja2.Environment, nodes.EvalContext)):
                require_plain(value)
        return function(*args, **kwargs)

    return call


@jinja2.pass_eval_context
def _join(
    eval_ctx: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items = map(make_attrgetter(eval_ctx.environment, attribute), value) if attribute is not None else value
    joined: str = do_join(eval_ctx, require_plain(list(items)), require_plain(d))
    return joined


def _pprint(value: Any) -> str:
    if any(isinstance(key, tuple) for key in _keys(require_plain(value))):
        raise Unrepeatable("it sorts keys that are lists, which may be done by their addresses (pprint)")
    return pprint.pformat(value)


def _keys(value: Any) -> Iterator[Any]:
    """The keys of all dictionaries in a plain value."""
    if isinstance(value, dict):
        yield from value
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from _keys(item)


@pass_environment
def _same_constant(environment: jinja2.Environment, value: Any, other: Any) -> bool:
    """Whether two texts or numbers are one object depends on what this process did before."""
    if other is None or isinstance(other, bool):
        return value is other
    raise Unrepeatable("it asks whether two values are the same object (sameas); == compares them")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(require_plain(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on
    options: Mapping[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
