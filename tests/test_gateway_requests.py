"""What a user asks becomes what the scheduler is asked: every field checked, every default resolved."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from scheduler.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, SequenceFailed, Unavailable
from scheduler.request import GenerationRequest, Speculation
from services.gateway import Gateway
from services.generation import (
    ChatMessage,
    ChatPrompt,
    ChoiceFinished,
    ChoiceStarted,
    GatewayEvent,
    TextPrompt,
    TextTokens,
    TokenPrompt,
    UserRequest,
)
from services.prompts import MAX_CHARACTERS_PER_TOKEN
from tools.scripted_scheduler import CONTEXT, END_ID, ScriptedScheduler, bytes_bundle, target_identity

HELLO = UserRequest(prompt=TextPrompt("say hello"))


async def ask(scheduler: ScriptedScheduler, request: UserRequest = HELLO) -> list[GatewayEvent]:
    return [event async for event in Gateway(scheduler).generate(request)]


async def asked(request: UserRequest) -> GenerationRequest:
    """What the scheduler was asked."""
    scheduler = ScriptedScheduler()
    await ask(scheduler, request)
    (generation,) = scheduler.requests
    return generation


async def refusal(request: UserRequest, scheduler: ScriptedScheduler | None = None) -> InvalidRequest:
    scheduler = scheduler or ScriptedScheduler()
    with pytest.raises(InvalidRequest) as caught:
        await ask(scheduler, request)
    assert scheduler.requests == []
    assert "\n" not in str(caught.value)
    return caught.value


async def test_absent_fields_have_the_documented_defaults() -> None:
    generation = await asked(HELLO)
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert generation.token_ids == tuple(b"say hello")
    assert generation.max_tokens == CONTEXT - len(b"say hello")
    assert generation.min_tokens == 0
    assert generation.speculation is Speculation.AUTO
    assert generation.draft_length is None
    assert generation.timeout is None


async def test_an_absent_seed_is_drawn_anew_each_time_and_told() -> None:
    scheduler = ScriptedScheduler()
    events = [(await ask(scheduler))[0] for _ in range(8)]
    seeds = {event.seed for event in events if isinstance(event, ChoiceStarted)}
    assert len(seeds) == 8
    assert seeds == {request.sampling.seed for request in scheduler.requests}


async def test_given_fields_arrive_as_they_are() -> None:
    request = replace(
        HELLO, max_tokens=3, min_tokens=2, top_k=5, seed=2**64 - 1, draft_length=4, speculation=Speculation.ON
    )
    generation = await asked(request)
    assert (generation.max_tokens, generation.min_tokens, generation.draft_length) == (3, 2, 4)
    assert (generation.sampling.top_k, generation.sampling.seed) == (5, 2**64 - 1)
    assert generation.speculation is Speculation.ON


async def test_a_float_is_the_same_by_whatever_api_it_came() -> None:
    by_http = replace(HELLO, temperature=0.8, top_p=0.9, min_p=0.05)
    by_grpc = replace(HELLO, temperature=as_float32(0.8), top_p=as_float32(0.9), min_p=as_float32(0.05))
    first, second = await asked(by_http), await asked(by_grpc)
    assert replace(first.sampling, seed=0) == replace(second.sampling, seed=0)
    assert first.sampling.temperature == as_float32(0.8) != 0.8


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


async def test_stop_ids_of_user_and_model_add_up_and_ignore_eos_leaves_the_models_out() -> None:
    assert (await asked(HELLO)).stop_token_ids == {END_ID}
    assert (await asked(replace(HELLO, stop_token_ids=(7,)))).stop_token_ids == {7, END_ID}
    assert (await asked(replace(HELLO, stop_token_ids=(7,), ignore_eos=True))).stop_token_ids == {7}


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("temperature", replace(HELLO, temperature=-1.0)),
        ("temperature", replace(HELLO, temperature=float("nan"))),
        ("temperature", replace(HELLO, temperature=1e39)),
        ("top_k", replace(HELLO, top_k=-1)),
        ("top_k", replace(HELLO, top_k=2**31)),
        ("top_p", replace(HELLO, top_p=0.0)),
        ("top_p", replace(HELLO, top_p=1e-60)),
        ("top_p", replace(HELLO, top_p=1.5)),
        ("min_p", replace(HELLO, min_p=-0.1)),
        ("seed", replace(HELLO, seed=2**64)),
        ("seed", replace(HELLO, seed=-1)),
        ("max_tokens", replace(HELLO, max_tokens=0)),
        ("min_tokens", replace(HELLO, min_tokens=-1)),
        ("min_tokens", replace(HELLO, max_tokens=3, min_tokens=4)),
        ("draft_length", replace(HELLO, draft_length=0)),
        ("draft_length", replace(HELLO, draft_length=257)),
        ("stop_token_ids", replace(HELLO, stop_token_ids=(257,))),
        ("stop_token_ids", replace(HELLO, stop_token_ids=(1,) * 1025)),
        ("request_id", replace(HELLO, request_id="x" * 257)),
    ],
)
async def test_a_value_out_of_range_is_refused_by_name_with_the_range(field: str, request_: UserRequest) -> None:
    error = await refusal(request_)
    assert error.field == field
    assert str(error).startswith(field)
    assert "must" in str(error)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "there is no prompt"),
        (TextPrompt(""), "the prompt is empty"),
        (TokenPrompt(()), "the prompt is empty"),
        (ChatPrompt(()), "there are no messages"),
        (TokenPrompt((1, 2, 257)), r"token 2 of the prompt is 257, must be in \[0, 257\)"),
        (TokenPrompt((-1,)), "token 0 of the prompt is -1"),
        (TextPrompt("half \ud83d"), "not valid Unicode"),
    ],
)
async def test_a_prompt_that_is_none_is_refused(
    prompt: TextPrompt | ChatPrompt | TokenPrompt | None, message: str
) -> None:
    error = await refusal(UserRequest(prompt=prompt))
    assert error.field in ("prompt", "messages")
    with pytest.raises(InvalidRequest, match=message):
        raise error


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(length: int) -> None:
    error = await refusal(UserRequest(prompt=TokenPrompt((1,) * length)))
    assert str(error).startswith(f"the prompt has {length} tokens, the context of bytes is {CONTEXT} tokens")
    error = await refusal(UserRequest(prompt=TextPrompt("x" * length)))
    assert str(length) in str(error)


async def test_the_longest_prompt_has_room_for_one_token() -> None:
    assert (await asked(UserRequest(prompt=TokenPrompt((1,) * (CONTEXT - 1))))).max_tokens == 1


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
async def test_more_than_the_context_has_room_for_is_refused_with_the_numbers(field: str) -> None:
    room = CONTEXT - len(b"say hello")
    await asked(replace(HELLO, max_tokens=room, min_tokens=room))
    error = await refusal(UserRequest(prompt=HELLO.prompt, **{field: room + 1}))  # type: ignore[arg-type]
    assert error.field == field
    assert str(error).startswith(f"{field} is {room + 1}, must be at most {room}")


async def test_a_target_started_with_less_context_than_its_model_counts() -> None:
    scheduler = ScriptedScheduler(identities=[target_identity(context_length=16)])
    assert "context of bytes is 16" in str(await refusal(UserRequest(prompt=TokenPrompt((1,) * 16)), scheduler))


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tokenizer.Tokenizer.encode", lambda *args, **options: pytest.fail("tokenised"))
    text = "x" * (CONTEXT * MAX_CHARACTERS_PER_TOKEN + 1)
    assert "cannot fit" in str(await refusal(UserRequest(prompt=TextPrompt(text))))


async def test_a_chat_is_rendered_by_the_models_template() -> None:
    messages = (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))
    generation = await asked(UserRequest(prompt=ChatPrompt(messages)))
    assert bytes(generation.token_ids) == b"<system>be brief\n<user>hi\n<assistant>"


async def test_a_chat_with_a_model_that_has_no_template_is_refused() -> None:
    scheduler = ScriptedScheduler(bundles={"bytes": bytes_bundle(template=None)})
    error = await refusal(UserRequest(prompt=ChatPrompt((ChatMessage("user", "hi"),))), scheduler)
    assert "bytes has no chat template" in str(error)


async def test_a_long_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = turns_before = turns_after = 0

    def slow(self: object, text: str, **options: object) -> list[int]:
        nonlocal turns_before, turns_after
        turns_before, give_up = turns, time.monotonic() + 10.0
        while turns == turns_before and time.monotonic() < give_up:
            time.sleep(0.001)
        turns_after = turns
        return [1, 2, 3]

    monkeypatch.setattr("services.tokenizer.Tokenizer.encode", slow)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counter = asyncio.create_task(count_turns())
    await ask(ScriptedScheduler(), UserRequest(prompt=TextPrompt("word " * 2000)))
    counter.cancel()
    assert turns_after > turns_before


async def test_the_only_model_needs_no_name_and_an_unknown_one_is_refused_with_the_names() -> None:
    scheduler = ScriptedScheduler()
    await ask(scheduler)
    assert scheduler.requests[0].model == "bytes"
    with pytest.raises(ModelNotFound, match="no model 'other' is served; there are: bytes"):
        await ask(scheduler, replace(HELLO, model="other"))


async def test_the_tokenizer_is_fetched_once_even_for_many_at_once() -> None:
    scheduler = ScriptedScheduler()
    gateway = Gateway(scheduler)

    async def one() -> None:
        async with aclosing(gateway.generate(HELLO)) as events:
            async for _ in events:
                pass

    await asyncio.gather(*(one() for _ in range(8)))
    await one()
    assert scheduler.tokenizer_calls == 1


async def test_another_vocabulary_under_the_same_name_is_fetched_anew() -> None:
    scheduler = ScriptedScheduler()
    gateway = Gateway(scheduler)
    for sha256, calls in (("ab", 1), ("cd", 2), ("cd", 2)):
        scheduler.identities = [target_identity(sha256=sha256)]
        async for _ in gateway.generate(HELLO):
            pass
        assert scheduler.tokenizer_calls == calls


async def test_a_known_model_is_asked_for_while_its_targets_are_away() -> None:
    scheduler = ScriptedScheduler()
    gateway = Gateway(scheduler)
    async for _ in gateway.generate(HELLO):
        pass
    scheduler.identities, scheduler.bundles = [], {}
    async for _ in gateway.generate(HELLO):
        pass
    assert len(scheduler.requests) == 2


async def test_a_failed_fetch_is_tried_again_by_the_next_request() -> None:
    scheduler = ScriptedScheduler(bundles={})
    gateway = Gateway(scheduler)
    with pytest.raises(ModelNotFound):
        await anext(gateway.generate(HELLO))
    scheduler.bundles = {"bytes": bytes_bundle()}
    assert isinstance(await anext(gateway.generate(HELLO)), ChoiceStarted)


async def test_a_tokenizer_that_cannot_be_read_is_unavailable_in_one_line() -> None:
    bundle = bytes_bundle()
    bundle.tokenizer_json = b"{}"
    with pytest.raises(Unavailable, match="cannot read the tokenizer of bytes"):
        await ask(ScriptedScheduler(bundles={"bytes": bundle}))


async def test_what_the_deadline_has_left_goes_downstream() -> None:
    timeout = (await asked(replace(HELLO, timeout=50.0))).timeout
    assert timeout is not None
    assert 40 < timeout < 50
    with pytest.raises(DeadlineExceeded):
        await ask(ScriptedScheduler(), replace(HELLO, timeout=0.0))


async def test_a_trace_context_goes_downstream_and_what_is_none_is_dropped() -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    generation = await asked(replace(HELLO, traceparent=parent, tracestate="k=v"))
    assert (generation.traceparent, generation.tracestate) == (parent, "k=v")
    generation = await asked(replace(HELLO, traceparent="nonsense", tracestate="k=v"))
    assert (generation.traceparent, generation.tracestate) == ("", "")


async def test_an_answer_without_its_last_event_is_an_error_not_a_silent_end() -> None:
    with pytest.raises(SequenceFailed):
        await ask(ScriptedScheduler(unending=True))


async def test_leaving_early_closes_the_schedulers_iterator() -> None:
    scheduler = ScriptedScheduler()
    async with aclosing(Gateway(scheduler).generate(HELLO)) as events:
        await anext(events)
        assert scheduler.running == 1
    assert scheduler.running == 0


TEXTS = ["hello", "h\u00e9llo w\u00f6rld", "\U0001f600\U0001f680 family", "\u65e5\u672c\u8a9e", ""]


@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize("text", TEXTS)
async def test_pieces_never_cut_a_character_and_join_to_the_text(text: str, block: int) -> None:
    ids = (*text.encode(), END_ID)
    events = await ask(ScriptedScheduler(answer=ids, block=block))
    tokens = [event for event in events if isinstance(event, TextTokens)]
    assert "".join(event.text for event in tokens) == text
    for event in tokens:
        assert len(event.pieces) == len(event.token_ids) == len(event.sources)
        assert "".join(event.pieces) == event.text
        assert "\N{REPLACEMENT CHARACTER}" not in event.text
    assert isinstance(events[-1], ChoiceFinished)


async def test_half_a_character_at_the_end_belongs_to_the_last_token() -> None:
    ids = tuple("ab\u00e9".encode()[:-1])
    request = replace(HELLO, max_tokens=len(ids))
    tokens = [event for event in await ask(ScriptedScheduler(answer=ids), request) if isinstance(event, TextTokens)]
    assert [piece for event in tokens for piece in event.pieces] == ["a", "b", "\N{REPLACEMENT CHARACTER}"]


async def test_half_a_character_at_an_unforeseen_end_is_not_lost() -> None:
    ids = tuple("ab\u00e9".encode()[:-1])
    events = await ask(ScriptedScheduler(answer=ids))
    tokens = [event for event in events if isinstance(event, TextTokens)]
    assert "".join(event.text for event in tokens) == "ab\N{REPLACEMENT CHARACTER}"
    assert tokens[-1].token_ids == ()
    assert isinstance(events[-1], ChoiceFinished)
