"""A prompt template over a row's columns: Jinja in a sandbox, strict about what is missing or null."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import (
    StrictUndefined,
    Template,
    TemplateError,
    TemplateSyntaxError,
    UndefinedError,
    meta,
    nodes,
    pass_eval_context,
)
from jinja2.exceptions import SecurityError
from jinja2.filters import do_join, make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen_data.errors import ConfigError, RowError, nearest

MAX_RENDERED_CHARS = 8 * 2**20
MAX_NUMBER_BITS = 2**16
# The whole row under one name, for columns whose names are not Jinja identifiers: {{ row["my column"] }}.
ROW_NAME = "row"
# These filters turn their value into text, so a null would come out as the word "None".
_TEXT_FILTERS = ("capitalize", "center", "escape", "e", "forceescape", "format", "indent", "lower", "replace")
_MORE_TEXT_FILTERS = ("safe", "string", "striptags", "title", "trim", "truncate", "upper", "wordwrap")
_MAPPING_METHODS = ("get", "items", "keys", "values")
_FILE_NODES: tuple[type[nodes.Node], ...] = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def is_null(value: object) -> bool:
    """Return whether a cell counts as null: None, or a NaN of any kind."""
    differs = value is None or value != value
    return isinstance(differs, bool) and differs  # an array compares to an array, and is no null


class PromptTemplate:
    """A compiled template.

    Args:
        source: Jinja text. Columns are variables; `row` is the mapping of all columns.

    Raises:
        ConfigError: The text is not valid Jinja, wants to read other files, or fails whatever the row.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        try:
            tree = _ENVIRONMENT.parse(source)
            self._own_words = _own_words(tree)
            self._names = frozenset(meta.find_undeclared_variables(_WITHOUT_GLOBALS.parse(source)))
            self._row_keys, self._whole_row = _row_lookups(tree)
            if any(tree.find(kind) is not None for kind in _FILE_NODES):
                raise ConfigError("the prompt template cannot include, import or extend other templates")
            # `a ~ b` turns its operands to text past `finalize`; the string filter checks them first.
            for concat in list(tree.find_all(nodes.Concat)):
                concat.nodes = [nodes.Filter(n, "string", [], [], None, None) for n in concat.nodes]
            # set_environment lets nodes made here be folded like parsed ones.
            tree.set_environment(_ENVIRONMENT)
            self._template = Template.from_code(
                _ENVIRONMENT, _ENVIRONMENT.compile(tree), _ENVIRONMENT.globals
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"the prompt template, line {error.lineno}: {error.message}") from error
        except TemplateError as error:  # a constant expression is worked out while compiling
            raise ConfigError(
                f"the prompt template holds an expression that always fails: {self._explained(error)}"
            ) from error

    def columns(self, present: Iterable[str]) -> tuple[str, ...]:
        """Return the columns that the template names, in the order of `present`.

        These are the ones a null policy applies to.

        Raises:
            ConfigError: The template names a column that is not there, or none although it holds ``{name}``.
        """
        present = list(present)
        uses_row = ROW_NAME in self._names and ROW_NAME not in present
        wanted = self._names - {ROW_NAME} | self._row_keys if uses_row else self._names
        wanted -= _ENVIRONMENT.globals.keys() - set(present)
        if absent := sorted(wanted.difference(present)):
            raise ConfigError(
                f"the prompt template names {'a column that is' if len(absent) == 1 else 'columns that are'} "
                f"not in the input: {', '.join(map(repr, absent))}{nearest(absent[0], present)}; "
                f"the input has {', '.join(map(repr, present))}"
            )
        if not self._names:
            for name in present:
                if re.search(r"(?<!\{)\{ *" + re.escape(name) + r" *\}(?!\})", self._source):
                    raise ConfigError(
                        f"the prompt template uses no column, but holds {{{name}}}: "
                        f"write {{{{ {name} }}}} for the column's value"
                    )
        return tuple(name for name in dict.fromkeys(present) if name in wanted)

    def reads_whole_row(self, present: Iterable[str]) -> bool:
        """Return whether the template uses `row` other than by constant keys, so needs every column."""
        return self._whole_row and ROW_NAME in self._names and ROW_NAME not in set(present)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt of one row.

        Args:
            values: Column name to Python value.

        Raises:
            RowError: `null_input` when a null would be printed, `wrong_type` when a binary value would,
                `template_error` for anything else, such as more than `MAX_RENDERED_CHARS` characters.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({ROW_NAME: values, **values}):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RowError(
                        "template_error", f"the rendered prompt passes {MAX_RENDERED_CHARS} characters"
                    )
                pieces.append(piece)
        except RowError:
            raise
        except Exception as error:
            raise RowError("template_error", self._explained(error)) from error
        return "".join(pieces)

    def _explained(self, error: Exception) -> str:
        """Say what went wrong in fixed words and the template's own: an error's text may quote the row."""
        if not isinstance(error, (UndefinedError, SecurityError)):
            return f"the prompt template raised {type(error).__name__}"
        name = str(error)  # see `_Missing`
        shown = repr(name) if name in self._own_words else "a computed name"
        if isinstance(error, SecurityError):
            return f"the prompt template asks for {shown}, which is unsafe"
        return f"the prompt template asks for {shown}, which is not there"


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> PromptTemplate:
    """Return the compiled template for `source`, once per process.

    Raises:
        ConfigError: See `PromptTemplate`.
    """
    return PromptTemplate(source)


class _Missing(StrictUndefined):
    """A value that is not there; using it raises an error whose whole text is the name asked for."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        return self._undefined_name if isinstance(self._undefined_name, str) else ""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which one multiplication cannot fill the memory either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else 1
            if left.bit_length() * factor + (right.bit_length() if operator == "*" else 0) > MAX_NUMBER_BITS:
                raise RowError("template_error", "the prompt template computes too large a number")
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if (
                    hasattr(text, "__len__")
                    and isinstance(times, int)
                    and len(text) * times > MAX_RENDERED_CHARS
                ):
                    raise RowError("template_error", "the prompt template repeats a value too many times")
        return super().call_binop(context, operator, left, right)


def _printable(value: Any) -> Any:
    if isinstance(value, RowError):  # a cell that could not be read, reached through `row`
        raise value
    if is_null(value):
        raise RowError("null_input", "the prompt template prints a null value")
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise RowError("wrong_type", "the prompt template prints a binary value; decode the column to text")
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _printable(item)
    return value


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _printable(args[position])
        return function(*args, **kwargs)

    return checked


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return do_join(context, [_printable(item) for item in items], d)


def _row_lookups(tree: nodes.Template) -> tuple[frozenset[str], bool]:
    """Return the constant keys by which `row` is read, and whether it is used in any other way."""
    keys: set[str] = set()
    num_lookups = 0
    lookups: list[nodes.Getitem | nodes.Getattr] = [*tree.find_all(nodes.Getitem)]
    lookups += tree.find_all(nodes.Getattr)
    for lookup in lookups:
        if not (isinstance(lookup.node, nodes.Name) and lookup.node.name == ROW_NAME):
            continue
        if isinstance(lookup, nodes.Getattr) and lookup.attr not in _MAPPING_METHODS:
            keys.add(lookup.attr)
        elif (
            isinstance(lookup, nodes.Getitem)
            and isinstance(lookup.arg, nodes.Const)
            and isinstance(lookup.arg.value, str)
        ):
            keys.add(lookup.arg.value)
        else:
            continue
        num_lookups += 1
    num_uses = sum(name.name == ROW_NAME and name.ctx == "load" for name in tree.find_all(nodes.Name))
    return frozenset(keys), num_uses > num_lookups


def _own_words(tree: nodes.Template) -> frozenset[str]:
    """Return the names, attributes and string constants that the template itself is written with."""
    words = {name.name for name in tree.find_all(nodes.Name)}
    words |= {lookup.attr for lookup in tree.find_all(nodes.Getattr)}
    words |= {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    return frozenset(words)


def _sandbox() -> _Sandbox:
    environment = _Sandbox(
        undefined=_Missing, finalize=_printable, autoescape=False, keep_trailing_newline=True
    )
    environment.globals.pop("lipsum")
    for name in (*_TEXT_FILTERS, *_MORE_TEXT_FILTERS):
        environment.filters[name] = _checked(environment.filters[name])
    environment.filters["join"] = _join
    return environment


_ENVIRONMENT = _sandbox()
# Jinja leaves its globals out of a template's free names, but a column may be called `range`.
_WITHOUT_GLOBALS = _ENVIRONMENT.overlay()
_WITHOUT_GLOBALS.globals = {}
