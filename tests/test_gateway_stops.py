"""Kinds 4 and 5 for text: an answer ends where its text ends, whatever tokens and blocks the end lies across."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from scheduler.request import Speculation
from services.gateway import Gateway
from services.generation import TextPrompt, TokenPrompt, UserRequest
from services.text_stops import TextStops
from specdec.commit import FinishReason
from specdec.drafter import Drafter
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.letters import Bundled, ask, letters_bundle, text_of
from tools.scripted import RandomTree, ScriptedDrafter, WrongFrom, oracle
from tools.scripted_scheduler import END_ID, ScriptedScheduler
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(order=1000)
REQUEST = UserRequest(
    TokenPrompt((3, 1, 4, 1, 5)), max_tokens=24, temperature=0.8, seed=11, top_logprobs=2, draft_length=8
)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "oracle": lambda: ScriptedDrafter(oracle, LawContinuation(LAW)),
    "half": lambda: ScriptedDrafter(WrongFrom(3, 64), LawContinuation(LAW)),
    "tree": lambda: ScriptedDrafter(RandomTree(3, 64), LawContinuation(LAW)),
}


@dataclass(frozen=True, slots=True)
class End:
    """Where a text ends: by definition, token by token, with no state."""

    tokens: int
    text: str
    stop_text: str | None


def expected_end(token_ids: Sequence[int], stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> End:
    texts = [text_of(token_ids[:count]) for count in range(len(token_ids) + 1)]
    for count in range(min_tokens + 1, len(token_ids) + 1):
        for end in range(len(texts[count - 1]) + 1, len(texts[count]) + 1):
            ending = [stop for stop in stops if texts[count][:end].endswith(stop)]
            if ending:
                stop = max(ending, key=len)
                return End(count, texts[count][: end if include else end - len(stop)], stop)
    return End(len(token_ids), texts[-1], None)


@pytest.fixture(params=list(DRAFTERS.values()), ids=list(DRAFTERS))
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with Deployment([TableModel(LAW)], [request.param()], quick_config(8)) as system:
        yield Gateway(Bundled(system.scheduler, letters_bundle()))
        await system.idle()


async def check(gateway: Gateway, request: UserRequest, token_ids: Sequence[int]) -> End:
    """Plain and speculative answers are the expected one, in everything that is told. token_ids: without stops."""
    end = expected_end(token_ids, request.stop, request.include_stop_str_in_output, request.min_tokens or 0)
    answer = await ask(gateway, request)
    plain = await ask(gateway, replace(request, speculation=Speculation.OFF))
    assert answer.told == plain.told
    assert answer.token_ids == list(token_ids[: end.tokens])
    assert answer.text == end.text
    assert len(answer.logprobs) == end.tokens
    assert answer.finished is not None
    assert answer.finished.stop_text == end.stop_text
    assert answer.finished.finish_reason is (FinishReason.LENGTH if end.stop_text is None else FinishReason.STOP)
    return end


@pytest.mark.parametrize("include", [False, True])
async def test_an_answer_ends_at_the_token_that_completes_a_stop_text(gateway: Gateway, include: bool) -> None:
    """Stop texts of 1 to 5 characters that end inside each of the first nine tokens, within and across blocks of 8."""
    free = await ask(gateway, REQUEST)
    ends = set()
    for j in range(1, 10):
        text = text_of(free.token_ids[:j])
        for length in (1, 4):
            stop = text[-length:]
            request = replace(REQUEST, stop=(stop, "nowhere"), include_stop_str_in_output=include)
            ends.add((await check(gateway, request, free.token_ids)).tokens)
    assert len(ends) >= 8


async def test_of_several_stop_texts_the_first_one_ends_the_answer(gateway: Gateway) -> None:
    free = await ask(gateway, REQUEST)
    text = text_of(free.token_ids)
    rng = random.Random(5)
    for _ in range(12):
        starts = [rng.randrange(len(text) - 6) for _ in range(3)]
        stops = tuple(text[start : start + rng.randint(1, 6)] for start in starts)
        await check(gateway, replace(REQUEST, stop=stops), free.token_ids)


async def test_min_tokens_puts_stop_texts_off(gateway: Gateway) -> None:
    free = await ask(gateway, REQUEST)
    ends = []
    for min_tokens in range(8):
        request = replace(REQUEST, stop=(free.text[0], free.text[:3]), min_tokens=min_tokens)
        ends.append((await check(gateway, request, free.token_ids)).tokens)
    assert ends[0] == 1
    assert all(end > least for least, end in enumerate(ends))


async def test_a_stop_text_at_the_last_token_of_the_budget_wins(gateway: Gateway) -> None:
    free = await ask(gateway, REQUEST)
    for budget in range(2, 12):
        text = text_of(free.token_ids[:budget])
        request = replace(REQUEST, max_tokens=budget, stop=(text[-4:], text[-2:] + "~"))
        await check(gateway, request, free.token_ids[:budget])


async def test_half_a_stop_text_is_told_once_the_answer_ends(gateway: Gateway) -> None:
    free = await ask(gateway, REQUEST)
    for budget in range(1, 12):
        ids = free.token_ids[:budget]
        text = text_of(ids)
        request = replace(REQUEST, max_tokens=budget, stop=(text[-3:] + "~",))
        answer = await ask(gateway, request)
        assert answer.token_ids == ids
        assert answer.text.startswith(text)  # half a character at the end is told as U+FFFD
        assert answer.finished is not None
        assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_what_may_become_a_stop_text_is_held_back_and_no_longer() -> None:
    scheduler = ScriptedScheduler(answer=(*b"so sto stop", END_ID), block=1)
    answer = await ask(Gateway(scheduler), UserRequest(TextPrompt("x"), stop=("stop",)))
    assert answer.pieces == ["", "so", " ", "", "", "", "sto ", "", "", "", ""]
    assert answer.text == "so sto "


async def test_nothing_is_held_back_of_a_stop_text_that_is_shown() -> None:
    scheduler = ScriptedScheduler(answer=(*b"to stopping", END_ID), block=3)
    request = UserRequest(TextPrompt("x"), stop=("stop",), include_stop_str_in_output=True)
    answer = await ask(Gateway(scheduler), request)
    assert answer.pieces == list("to stop")


async def test_a_stop_text_across_the_bytes_of_a_character() -> None:
    scheduler = ScriptedScheduler(answer=(*"caf\u00e9 cr\u00e8me".encode(), END_ID), block=1)
    answer = await ask(Gateway(scheduler), UserRequest(TextPrompt("x"), stop=("\u00e9 c",)))
    assert answer.text == "caf"
    assert answer.token_ids == list("caf\u00e9 c".encode())


def told_at_once(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Character by character, with no state."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_the_end_of_a_text_does_not_depend_on_its_pieces() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        include = rng.random() < 0.5
        stopper, told, stop_text, left = TextStops(stops, include), "", None, text
        while left and stop_text is None:
            size = rng.randint(1, 4)
            piece, left = left[:size], left[size:]
            part = stopper.push(piece)
            told, stop_text = told + part.text, part.stop_text
            assert told_at_once(text, stops, include)[0].startswith(told), "a partial match leaked"
        told += stopper.flush()
        assert (told, stop_text) == told_at_once(text, stops, include)


def test_no_more_is_held_back_than_may_belong_to_a_stop_text() -> None:
    stopper = TextStops(["abc", "cd"])
    assert [stopper.push(piece).text for piece in ("a", "b", "a", "bx", "c")] == ["", "", "ab", "abx", ""]
    assert stopper.flush() == "c"
