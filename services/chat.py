"""Chat templates: messages to the one text that the model continues.

Templates come with models and are code by strangers. They run in jinja2's immutable sandbox with a bound on time and on
what they write, see nothing but plain JSON values, and render as transformers' `apply_chat_template` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the model's template reads (`tool_calls`, `name`, ...)."""

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_CHARACTERS = 1 << 24
"""What one rendering may write, and the longest text a template may multiply together."""
MAX_SECONDS = 5.0
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template; thread-safe. Raises ValueError, in one line, if it is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ValueError(f"the chat template is longer than {MAX_TEMPLATE_CHARACTERS} characters")
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> str:
        """The prompt; tokenise it with `add_special_tokens=False`.

        variables: what else the template may read (`enable_thinking`, ...). Raises ValueError in one line: the template
        refuses the messages, fails, writes too much or takes longer than `max_seconds`.
        """
        values = {**self._special_tokens, **_plain(variables or {})}
        values |= {"messages": [_message(message) for message in messages], "tools": _plain(tools)}
        values |= {"documents": _plain(documents), "add_generation_prompt": add_generation_prompt}
        deadline = _deadline.set(time.monotonic() + max_seconds)
        try:
            return "".join(_bounded(_compile(self._source).generate(values)))
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"the chat template failed: {_one_line(error)}") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError("the chat template failed: it is nested too deeply or asks for too much") from error
        finally:
            _deadline.reset(deadline)


_deadline: ContextVar[float] = ContextVar("chat_template_deadline")
"""time.monotonic() at which the running template is stopped."""


def _check_deadline() -> None:
    if time.monotonic() > _deadline.get():
        raise jinja2.TemplateError("it takes too long")


def _bounded(chunks: Iterable[str]) -> Iterator[str]:
    written = 0
    for chunk in chunks:
        written += len(chunk)
        if written > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
        yield chunk


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Stops a template that runs too long: every call and every turn of a loop looks at the clock."""

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= MAX_CHARACTERS and abs(right) <= 64):
            raise jinja2.TemplateError("a power in it is too large")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if (
                    isinstance(text, (str, list, tuple))
                    and isinstance(times, int)
                    and len(text) * times > MAX_CHARACTERS
                ):
                    raise jinja2.TemplateError("it repeats a text too often")
        return super().call_binop(context, operator, left, right)

    def tick(self) -> None:
        """Called at the start of each turn of a loop; the clock is looked at by `call`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; rendering is not changed by it."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As the call block it is in transformers: what is set inside stays inside.
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Dict:
    """Templates get `dict(...)` and `dict.fromkeys(...)`, and not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's, without names that reach into Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No name for self, so that a template may use that one.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: rename it")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's HTML escapes, which a model would read as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    """Raises ValueError if it is no template."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
    try:
        parsed = environment.parse(source)
        for loop in parsed.find_all(jinja2.nodes.For):
            tick = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(tick).set_lineno(loop.lineno))
        code = environment.compile(parsed)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise ValueError(f"the chat template is not valid: {_one_line(error)}") from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _message(message: Message) -> dict[str, Any]:
    """Fields that are None count as absent; the names for a model's reasoning are all filled."""
    plain: dict[str, Any] = {str(key): _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    """Rebuilt of JSON types alone: methods of richer objects would be within the template's reach."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ValueError(f"a message holds a {type(value).__name__}, which is no JSON value")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
