"""Grammars through llguidance: which tokens may follow an answer.

A mask is a function of the answer alone. The matcher inside remembers the answer that it walked last and is rolled back
to what the next one has in common with it, so rows of a tree, a rejection, a retry, a preemption and a resume elsewhere
are one mechanism, and none of them can leave a token behind.

`check` may be called from any thread, all else from one thread at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.grammar import InvalidGrammar, TokenMask
from specdec.params import Grammar, GrammarKind

MAX_CHARACTERS = 256 * 1024
MAX_CHOICES = 10_000
CACHED_GRAMMARS = 64
MESSAGE_CHARACTERS = 300
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
"""50,000 lexer states are up to 100 MB. The other limits are the library's: about 20 ms to compile a regex, 20 ms for
one mask."""

# A run of blanks has an end: a model that would go on with them for ever must come to the point.
_JSON_OPTIONS = {"whitespace_pattern": r"(\x20|\x0A[\x20\x09]{0,20})"}
# The library would allow only the canonical tokens of a text that is forced; we restrict the model's law to valid texts
# and change nothing else about it.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

_log = logging.getLogger(__name__)


class UnsupportedTokenizer(Exception):
    """No masks can be made for this tokenizer; the message is one line."""


class Grammars:
    """Makes the masks of one vocabulary: a `MaskFactory`.

    vocabulary_size: of the model's logits, tokens from there on are never allowed. stop_token_ids: the only tokens
    allowed at the end of a grammar.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary_size: int, stop_token_ids: Sequence[int]) -> None:
        """Takes 0.3 s and 60 MB for 49,152 tokens, 1.6 s and 130 MB for 151,936. Raises UnsupportedTokenizer."""
        if not stop_token_ids:
            raise UnsupportedTokenizer("the model has no stop token, so no grammar could end")
        try:
            tokenizer = LLTokenizer(tokenizer_json.decode().strip(), eos_token=list(stop_token_ids))
        except ValueError as error:
            raise UnsupportedTokenizer(_one_line(str(error))) from error
        self._vocabulary = _Vocabulary(tokenizer, vocabulary_size, stop_token_ids)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # least lately used first

    def __call__(self, grammar: Grammar) -> TokenMask:
        """Raises InvalidGrammar."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = _compiled(self._vocabulary.tokenizer, grammar)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return _GrammarMask(self._vocabulary, compiled)


def check(grammar: Grammar) -> None:
    """Whether a grammar can be compiled, as far as that can be told without a model. Raises InvalidGrammar."""
    error = LLMatcher.validate_grammar(_source_of(grammar), limits=LIMITS)
    if error:
        raise InvalidGrammar(_one_line(error, grammar.kind))


class _Vocabulary:
    """What all masks of one vocabulary share. nothing, everything: packed as a `TokenMask` is."""

    def __init__(self, tokenizer: LLTokenizer, size: int, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.known = min(size, tokenizer.vocab_size)
        self._size = size
        self._length = (size + 31) // 32 * 4
        self.nothing = bytes(self._length)
        self.everything = self.cut(b"\xff" * self._length)
        # A stop token that is also plain text would be allowed wherever its text is, and end the answer there.
        self._plain_stops = [i for i in self.stop_token_ids if i < self.known and not tokenizer.is_special_token(i)]

    def cut(self, mask: bytes) -> bytes:
        """Without the tokens that are none, padded to the length of a `TokenMask`."""
        whole, bits = divmod(min(self._size, 8 * len(mask)), 8)
        rest = bytes([mask[whole] & ((1 << bits) - 1)]) if bits else b""
        return (mask[:whole] + rest).ljust(self._length, b"\0")

    def without_plain_stops(self, mask: bytes) -> bytes:
        if not self._plain_stops:
            return mask
        edited = bytearray(mask)
        for token_id in self._plain_stops:
            edited[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(edited)


class _GrammarMask:
    """Implements `TokenMask` for one sequence."""

    def __init__(self, vocabulary: _Vocabulary, compiled: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._walked: list[int] = []

    def allowed(self, answer: Sequence[int]) -> bytes:
        """Where the grammar comes to a dead end, or to the limits of its parser, nothing is allowed."""
        if not self._walk(list(answer)):
            return self._vocabulary.everything
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            _log.warning(
                "behind %d tokens a grammar allows nothing: %s", len(self._walked), _one_line(self._matcher.get_error())
            )
            self._restart()
            return self._vocabulary.nothing
        if not self._matcher.is_accepting():
            mask = self._vocabulary.without_plain_stops(mask)
        return self._vocabulary.cut(mask)

    def _walk(self, answer: list[int]) -> bool:
        """Brings the matcher behind `answer`, or as far as the grammar allows; whether it got there. The matcher never
        sees a stop token: nothing is committed behind one."""
        kept = _common_length(self._walked, answer)
        if kept < len(self._walked):
            self._matcher.rollback(len(self._walked) - kept)
            del self._walked[kept:]
        missing = answer[kept:]
        possible = next((i for i, token_id in enumerate(missing) if not self._is_text(token_id)), len(missing))
        self._walked += missing[: self._matcher.try_consume_tokens(missing[:possible])]
        if self._matcher.is_error():
            self._restart()
        return len(self._walked) == len(answer)

    def _is_text(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.known and token_id not in self._vocabulary.stop_token_ids

    def _restart(self) -> None:
        """A matcher never leaves its error state."""
        self._matcher = self._compiled.deep_copy()
        self._walked = []


def _common_length(left: list[int], right: list[int]) -> int:
    """Of the longest common prefix; compares slices, since answers have thousands of tokens and rows come by the
    dozen."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of the grammar, to be copied. Raises InvalidGrammar, also if no text matches."""
    matcher = LLMatcher(tokenizer, _source_of(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidGrammar(_one_line(matcher.get_error(), grammar.kind))
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    if probe.is_error():
        problem = _one_line(probe.get_error(), grammar.kind)
        raise InvalidGrammar("no text matches it" if problem.startswith("NoExtension") else problem)
    return matcher


def _source_of(grammar: Grammar) -> str:
    """In the library's own format. Raises InvalidGrammar."""
    if len(grammar.text) > MAX_CHARACTERS:
        raise InvalidGrammar(f"it has {len(grammar.text)} characters, must have at most {MAX_CHARACTERS}")
    try:
        lark = _lark_of(grammar)
        lark.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar("it holds half of a surrogate pair") from None
    return json.dumps({"grammars": [{"lark_grammar": lark + _NO_FORCING}]})


def _lark_of(grammar: Grammar) -> str:
    """Raises InvalidGrammar."""
    match grammar.kind:
        case GrammarKind.LARK:
            return grammar.text
        case GrammarKind.REGEX:
            return _lark_of_regex(grammar.text)
        case GrammarKind.CHOICE:
            return _lark_of_regex("|".join(_literal(choice) for choice in _choices(grammar.text)))
        case GrammarKind.JSON_OBJECT:
            return _lark_of_schema({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = _from_json(grammar.text)
            if not isinstance(schema, dict):
                raise InvalidGrammar(f"a JSON schema must be an object, this is a JSON {_json_type(schema)}")
            return _lark_of_schema(schema)


def _lark_of_schema(schema: dict[str, Any]) -> str:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise InvalidGrammar(f"x-guidance must be an object, this is a JSON {_json_type(options)}")
    return "start: %json " + json.dumps({**schema, "x-guidance": {**_JSON_OPTIONS, **options}})


def _lark_of_regex(regex: str) -> str:
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return str(grammar["lark_grammar"])


def _choices(text: str) -> list[str]:
    choices = _from_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidGrammar("choices must be a JSON array of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise InvalidGrammar(f"there are {len(choices)} choices, must be at most {MAX_CHOICES}")
    return choices


def _literal(text: str) -> str:
    """A regex for this text. One lexeme holds ten thousand of them; as rules of a grammar the parser would hold each
    open."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidGrammar("it is nested too deeply") from None
    except ValueError as error:
        raise InvalidGrammar(f"it is not valid JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _json_type(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "value")


def _one_line(message: str, kind: GrammarKind | None = None) -> str:
    """Without excerpts, carets and, unless the user wrote Lark, places: they show a grammar made from the user's."""
    lines = message.replace("<non-verbose/>", "").splitlines()
    kept = [line.strip() for line in lines if not re.fullmatch(r"\s*\d+ \| .*|\s*\^*\s*", line)]
    line = " ".join(" ".join(kept).split())[:MESSAGE_CHARACTERS] or "no reason given"
    return line if kind is GrammarKind.LARK else re.sub(r"^at \d+\(\d+\): ", "", line)
