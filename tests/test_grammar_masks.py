"""A mask holds exactly the tokens that keep the answer the beginning of a text that the grammar allows."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import grammars
from specdec.grammar import InvalidGrammar
from specdec.grammars import Grammars, UnsupportedTokenizer
from specdec.params import Grammar, GrammarKind
from tools.grammar_vocabulary import (
    PLACEHOLDERS,
    STOP,
    SYSTEM,
    TOKENS,
    VOCABULARY,
    byte_level_json,
    ids_of,
    make_grammars,
    schema,
    shared_grammars,
    spelled,
    text_of,
    token_id,
)
from tools.identities import tokenizer_json, words

QUIET = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
EVERYTHING = set(range(VOCABULARY))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "re"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def _allowed(grammar: Grammar, answer: list[int]) -> set[int]:
    return ids_of(shared_grammars()(grammar).allowed(answer))


def _oracle(texts: set[bytes], answer: bytes) -> set[int]:
    """By brute force over all texts of a finite language."""
    beginnings = {text[:end] for text in texts for end in range(len(text) + 1)}
    allowed = {i for i, token in enumerate(TOKENS) if answer + token in beginnings}
    return allowed | {STOP} if answer in texts else allowed


def _check_everywhere(grammar: Grammar, texts: set[bytes], walks: int = 40) -> None:
    """Holds the mask against the oracle along random walks of its own; each must end in a text of the language."""
    rng = random.Random(grammar.text)
    mask = shared_grammars()(grammar)
    for _ in range(walks):
        answer: list[int] = []
        while True:
            allowed = ids_of(mask.allowed(answer))
            assert allowed == _oracle(texts, text_of(answer)), text_of(answer)
            token = rng.choice(sorted(allowed))
            if token == STOP:
                break
            answer.append(token)
        assert text_of(answer) in texts


def test_choice_allows_exactly_the_choices() -> None:
    choices = ["red", "re", "cab", "abcab", 'a"b', "a\nb", "é", "€", "/[a-z]+(", "\\", ""]
    _check_everywhere(Grammar(GrammarKind.CHOICE, json.dumps(choices)), {choice.encode() for choice in choices})


@pytest.mark.parametrize("regex", ["(ab|abc|cab){1,2}", "a?b?c?", "[12]{2}(\\.0)?", "x|", "(re|red)d?[ab/]"])
def test_regex_allows_exactly_its_language(regex: str) -> None:
    alphabet = sorted(set("abcdrex12.0/") & set("abcdrex12.0/"))
    texts = {
        "".join(letters).encode()
        for length in range(7)
        for letters in itertools.product(sorted(set(regex) & set(alphabet) | set("d")), repeat=length)
        if re.fullmatch(regex, "".join(letters))
    }
    _check_everywhere(Grammar(GrammarKind.REGEX, regex), texts)


def test_schema_allows_exactly_its_texts() -> None:
    """With blanks off, the language of this schema is finite."""
    content = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 9, "maximum": 12}, "name": {"enum": ["red", True, None]}},
        "required": ["name"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
    }
    texts = {
        json.dumps({**number, "name": name}, separators=(",", ":")).encode()
        for number in ({}, *({"a": a} for a in range(9, 13)))
        for name in ("red", True, None)
    }
    _check_everywhere(schema(content), texts)


def test_lark_grammar_nests() -> None:
    grammar = Grammar(GrammarKind.LARK, 'start: "(" start ")" | "ab"')
    texts = {b"(" * depth + b"ab" + b")" * depth for depth in range(40)}
    answer = spelled("((ab")
    assert _allowed(grammar, answer) == _oracle(texts, b"((ab") == {token_id(")")}


REGEXES = st.recursive(
    st.sampled_from(["a", "b", "c"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda one: f"({one})*"),
        inner.map(lambda one: f"({one})?"),
    ),
    max_leaves=4,
)


@QUIET
@given(REGEXES)
def test_any_regex_allows_what_can_still_match(regex: str) -> None:
    """A beginning of up to two letters, and a token of up to three, need at most four more letters to match."""
    texts = {
        text
        for length in range(10)
        for text in map("".join, itertools.product("abc", repeat=length if length < 8 else 0))
        if re.fullmatch(regex, text)
    }
    beginnings = {text[:end] for text in texts for end in range(min(len(text), 3) + 1)}
    mask = shared_grammars()(Grammar(GrammarKind.REGEX, regex))
    letters = [token for token in TOKENS if set(token) <= set(b"abc")]
    for answer in sorted(beginnings):
        if len(answer) <= 1 or (len(answer) == 2 and answer not in texts):
            expected = {token_id(t) for t in letters if len(answer) + len(t) <= 3 and answer + t.decode() in beginnings}
            expected |= {STOP} if answer in texts else set()
            found = ids_of(mask.allowed(spelled(answer)))
            assert {i for i in found if i == STOP or len(answer) + len(TOKENS[i]) <= 3} == expected, (regex, answer)


def test_tokens_that_split_a_character_are_allowed_inside_it_only() -> None:
    grammar = Grammar(GrammarKind.REGEX, "é€")
    assert _allowed(grammar, []) == {token_id(b"\xc3"), token_id("é")}
    assert _allowed(grammar, [token_id(b"\xc3")]) == {token_id(b"\xa9")}
    assert _allowed(grammar, [token_id("é")]) == {token_id(b"\xe2\x82")}
    assert _allowed(grammar, [token_id("é"), token_id(b"\xe2\x82"), token_id(b"\xac")]) == {STOP}


def test_placeholders_and_special_tokens_are_never_allowed() -> None:
    mask = shared_grammars()(Grammar(GrammarKind.REGEX, r"(?s:.*)"))
    allowed = ids_of(mask.allowed([]))
    assert SYSTEM not in allowed
    assert max(allowed) == STOP
    assert allowed >= {token_id(chr(code)) for code in range(0x20, 0x7F)}
    assert len(mask.allowed([])) % 4 == 0
    assert len(mask.allowed([])) * 8 >= VOCABULARY


@pytest.mark.parametrize("size", [VOCABULARY - 2, VOCABULARY + PLACEHOLDERS, VOCABULARY + 500])
def test_mask_fits_logits_that_are_longer_or_shorter_than_the_tokenizer(size: int) -> None:
    tokenizer = byte_level_json(TOKENS, ("<stop>", "<system>"), PLACEHOLDERS)
    mask = Grammars(tokenizer, size, [STOP])(Grammar(GrammarKind.REGEX, "(abc)?"))
    for answer in ([], spelled("x")):
        assert len(mask.allowed(answer)) == (size + 31) // 32 * 4
        assert max(ids_of(mask.allowed(answer)), default=0) < size


def test_all_ones_behind_what_the_grammar_forbids_and_behind_a_stop_token() -> None:
    grammar = schema(PERSON)
    for answer in (spelled("x"), [STOP], [*spelled('{"'), STOP], [SYSTEM], [VOCABULARY + 1], [-1], [10**6]):
        for rest in ([], spelled('"name"')):
            assert _allowed(grammar, [*answer, *rest]) == EVERYTHING
    may_end = Grammar(GrammarKind.REGEX, "a(bc)?")
    assert _allowed(may_end, spelled("a")) >= {STOP, token_id("b")}
    assert _allowed(may_end, [*spelled("a"), STOP]) == EVERYTHING


def test_only_stop_tokens_at_the_end_of_the_grammar() -> None:
    tokenizer = byte_level_json(TOKENS, ("<stop>", "<system>"))
    mask = Grammars(tokenizer, VOCABULARY, [STOP, SYSTEM])(schema(PERSON))
    done = spelled('{"name":"a","tags":["re"]}')
    assert ids_of(mask.allowed(done)) == {STOP, SYSTEM}
    assert ids_of(mask.allowed([*done, SYSTEM])) == EVERYTHING


def test_a_stop_token_that_is_plain_text_ends_nothing_early() -> None:
    """The token `b` stops this model, so no answer may hold it, even where the grammar has a b."""
    mask = Grammars(byte_level_json(TOKENS), len(TOKENS), [token_id("b")])(Grammar(GrammarKind.REGEX, "a(bc)?"))
    assert ids_of(mask.allowed([])) >= {token_id("a")}
    assert token_id("b") in ids_of(mask.allowed(spelled("a")))
    other = Grammars(byte_level_json(TOKENS), len(TOKENS), [token_id("b")])(Grammar(GrammarKind.REGEX, "a(bc|d)"))
    assert ids_of(other.allowed(spelled("a"))) == {token_id("d")}


def test_blanks_between_the_parts_of_json_have_an_end() -> None:
    """One blank, or one line end with some indentation."""
    assert token_id(" ") in _allowed(schema(PERSON), spelled("{"))
    assert _allowed(schema(PERSON), spelled("{ ")) == {token_id('"'), token_id('"name"')}
    indented = spelled("{\n" + " " * 20)
    assert token_id(" ") in _allowed(schema(PERSON), indented[:-1])
    assert _allowed(schema(PERSON), indented) == {token_id('"'), token_id('"name"')}


def test_json_object_is_an_object() -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert {TOKENS[i][:1] for i in _allowed(grammar, [])} == {b"{"}
    assert STOP in _allowed(grammar, spelled('{"a": [1, {"b": null}]}'))


STEPS = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=6)), min_size=1, max_size=12
)


@QUIET
@given(STEPS)
def test_rolled_back_equals_fresh(steps: list[tuple[float, list[tuple[float, bool]]]]) -> None:
    """Each step cuts the answer somewhere and goes on with allowed tokens, or with any."""
    factory = shared_grammars()
    used = factory(schema(PERSON))
    answer: list[int] = []
    for cut, tokens in steps:
        answer = answer[: int(cut * len(answer))]
        for choice, any_token in tokens:
            allowed = sorted(EVERYTHING if any_token else ids_of(factory(schema(PERSON)).allowed(answer)))
            answer.append(allowed[int(choice * (len(allowed) - 1))])
        assert used.allowed(answer) == factory(schema(PERSON)).allowed(answer)


def test_masks_of_one_grammar_do_not_know_of_each_other() -> None:
    factory = shared_grammars()
    one, other = factory(schema(PERSON)), factory(schema(PERSON))
    first = other.allowed([])
    one.allowed(spelled('{"name": "ab'))
    assert other.allowed([]) == first


def test_more_grammars_than_are_kept() -> None:
    factory = make_grammars()
    mask = factory(Grammar(GrammarKind.REGEX, "a0"))
    for i in range(2 * grammars.CACHED_GRAMMARS):
        factory(Grammar(GrammarKind.REGEX, f"a{i}"))
    assert len(factory._compiled) == grammars.CACHED_GRAMMARS
    assert ids_of(mask.allowed(spelled("a"))) == {token_id("0")}


INVALID = {
    "no JSON": (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not valid JSON"),
    "no object": (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "must be an object, this is a JSON array"),
    "unknown type": (schema({"type": "nope"}), "Invalid type: nope"),
    "unknown keyword": (schema({"not": {}}), "not"),
    "bad pattern": (schema({"type": "string", "pattern": "("}), "unclosed group"),
    "dangling reference": (schema({"$ref": "#/nope"}), "/nope"),
    "contradiction": (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
    "endless nesting": (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "nested too deeply"),
    "not a number": (Grammar(GrammarKind.JSON_SCHEMA, '{"const": NaN}'), "NaN"),
    "regex": (Grammar(GrammarKind.REGEX, "a("), "unclosed group"),
    "look-ahead": (Grammar(GrammarKind.REGEX, "a(?=b)"), "look-around"),
    "no choices": (Grammar(GrammarKind.CHOICE, "[]"), "one or more strings"),
    "numbers as choices": (Grammar(GrammarKind.CHOICE, "[1]"), "one or more strings"),
    "half a character": (Grammar(GrammarKind.CHOICE, '["\\ud800"]'), "surrogate"),
    "unknown rule": (Grammar(GrammarKind.LARK, "start: x"), 'unknown name: "x"'),
    "empty grammar": (Grammar(GrammarKind.LARK, ""), "start"),
    "too long": (Grammar(GrammarKind.REGEX, "a" * 300_000), "at most 262144"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_cannot_be_compiled_is_refused_in_one_line(name: str) -> None:
    """The gateway's check and the worker's factory agree."""
    grammar, reason = INVALID[name]
    for judge in (grammars.check, shared_grammars()):
        with pytest.raises(InvalidGrammar) as error:
            judge(grammar)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "grammar", [Grammar(GrammarKind.REGEX, r"[^\s\S]"), Grammar(GrammarKind.LARK, 'start: x\nx: x "a"')]
)
def test_a_grammar_that_no_text_matches_is_refused_by_the_worker(grammar: Grammar) -> None:
    with pytest.raises(InvalidGrammar, match="no text matches it"):
        shared_grammars()(grammar)


def test_a_character_that_no_token_can_spell_is_a_dead_end_and_others_go_on() -> None:
    """The vocabulary has no token for the bytes of `Ж`."""
    mask = shared_grammars()(Grammar(GrammarKind.REGEX, "a(Ж|b)"))
    assert ids_of(mask.allowed(spelled("a"))) == {token_id("b")}
    dead = shared_grammars()(Grammar(GrammarKind.REGEX, "(aЖ|c)x?"))
    assert ids_of(dead.allowed(spelled("a"))) == set()
    assert ids_of(dead.allowed(spelled("c"))) == {STOP, token_id("x")}
    assert ids_of(dead.allowed(spelled("a"))) == set()
    assert ids_of(dead.allowed(spelled("ab"))) == EVERYTHING


def test_special_token_in_a_grammar_is_for_the_worker_to_judge() -> None:
    grammars.check(Grammar(GrammarKind.LARK, 'start: "a" <system>'))
    grammars.check(Grammar(GrammarKind.LARK, 'start: "a" <nobody>'))
    assert _allowed(Grammar(GrammarKind.LARK, 'start: "a" <system>'), spelled("a")) == {SYSTEM}
    with pytest.raises(InvalidGrammar, match="<nobody>"):
        shared_grammars()(Grammar(GrammarKind.LARK, 'start: "a" <nobody>'))


@pytest.mark.parametrize(
    ("content", "stops"),
    [(tokenizer_json(words(8)), [1]), (b"{}", [1]), (byte_level_json(TOKENS), []), (byte_level_json(TOKENS), [9999])],
    ids=["words", "nothing", "no stop token", "stop token out of range"],
)
def test_tokenizer_that_no_mask_can_be_made_for(content: bytes, stops: list[int]) -> None:
    with pytest.raises(UnsupportedTokenizer) as error:
        Grammars(content, 8, stops)
    assert "\n" not in str(error.value)
