"""Kind 11: no stream breaks a character, whatever the tokens cut and wherever the blocks end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from outrider import AsyncClient, Tokens
from services.generation import TokenPrompt, UserRequest
from tools.characters import CHARACTERS, Writer, byte_fallback, byte_level, windowed
from tools.lab import Lab, Told, read, served
from tools.lab_grid import equal_everywhere
from tools.parameters import bare

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
every_writer = pytest.mark.parametrize("writer", [byte_level(), byte_fallback(), windowed()], ids=lambda one: one.name)


def requests_of(count: int, tokens: int = 24) -> list[UserRequest]:
    return [
        replace(bare(i, temperature), prompt=TokenPrompt((97, 98 + i)), max_tokens=tokens - i % 5)
        for i, temperature in zip(range(count), (0.0, 0.8, 1.1) * count, strict=False)
    ]


@every_writer
async def test_kind11_pieces_join_to_the_full_decode_whatever_was_drafted(writer: Writer) -> None:
    """Emoji, joiners, CJK, Thai, combining marks; answers that end inside a character among them."""
    law = writer.law()
    async with Lab.of(writer, law) as lab:
        grid = await equal_everywhere(lab, law, requests_of(12), share=2)
    told = [choice.told for (choice,) in grid.plain]
    for one in told:
        assert one.text == writer.decode(one.token_ids)
        inside = one.text.rstrip(REPLACEMENT)
        assert inside.count(REPLACEMENT) == sum(piece.count(REPLACEMENT) for piece in one.pieces[:-1])
    text = "".join(one.text for one in told)
    assert sum(character in text for character in CHARACTERS if not character.isascii()) >= 5
    assert sum(piece == "" for one in told for piece in one.pieces) >= 10, "tokens that end inside a character"


@every_writer
async def test_kind11_broken_bytes_are_told_as_the_full_decode_has_them(writer: Writer) -> None:
    """Number 64: a model that draws any bytes at all."""
    law = writer.law(spelling=0.0)
    async with Lab.of(writer, law) as lab:
        grid = await equal_everywhere(lab, law, requests_of(12), share=4)
    for (choice,) in grid.plain:
        assert choice.told.text == writer.decode(choice.told.token_ids)
    assert sum(choice.told.text.count(REPLACEMENT) for (choice,) in grid.plain) >= 20


@every_writer
async def test_kind11_many_side_by_side_are_told_what_each_is_told_alone(writer: Writer) -> None:
    """Number 66: batch 1 and 16."""
    requests = requests_of(16)
    async with Lab.of(writer, writer.law()) as lab:
        alone = [await lab.plainly(request) for request in requests]
        together = await asyncio.gather(*(lab.plainly(request) for request in requests))
        assert lab.largest_batch >= 8
    assert alone == together


async def test_kind11_every_grpc_message_is_whole_text() -> None:
    """Number 65: no message ends inside a character, though most tokens do."""
    writer = byte_level()
    async with Lab.of(writer, writer.law()) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        asked = bare(3, 0.8)
        plain = await lab.plainly(replace(asked, prompt=TokenPrompt((97,))))
        events = [
            event
            async for event in client.generate(
                token_ids=[97], max_tokens=asked.max_tokens, temperature=0.8, seed=3, ignore_eos=True
            )
        ]
    (choice,) = read(events)
    assert choice.told.differences(plain) == []
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert sum(not event.text for event in tokens) >= 2
    assert not any(REPLACEMENT in event.text for event in tokens[:-1])


def _cut_by_pieces(told: Told, writer: Writer) -> bool:
    """Whether some token of the answer is no whole text by itself."""
    return any(REPLACEMENT in writer.decode([token_id]) for token_id in told.token_ids)


async def test_the_texts_of_these_tests_are_cut_by_their_tokens() -> None:
    writer = byte_level()
    async with Lab.of(writer, writer.law()) as lab:
        told = [await lab.plainly(request) for request in requests_of(6)]
    assert all(_cut_by_pieces(one, writer) for one in told)
