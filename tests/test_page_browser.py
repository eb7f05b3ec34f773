"""The page in a real browser: asked, watched, looked at, and attacked. Without Chromium this is skipped; CI has it."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from PIL import Image

from scheduler.config import Policy
from services.http.app import HttpConfig
from tools.browser import Page, browser_page, chromium
from tools.deployment import quick_config
from tools.identities import words
from tools.page_system import LAW, MARKUP, page_system, scripted
from tools.scripted import WrongFrom

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH (Debian: apt install chromium)")

TEXT_COLOURS = {"accepted": (19, 117, 74), "correction": (168, 75, 0)}
LANE_COLOURS = {"verify": (63, 98, 201), "draft": (58, 165, 122)}
PROMPT = "document.getElementById('prompt')"


def text_of(element: str) -> str:
    return f"document.getElementById('{element}').textContent"


async def ask(page: Page, prompt: str = "w1 w2 w3", tokens: int = 60) -> None:
    await page.until(f"{text_of('state')} === 'ready'")
    await page.read(f"{PROMPT}.value = {prompt!r}; document.getElementById('tokens').value = {tokens}")
    await page.click("#go")
    await page.until(f"{text_of('figures')} !== ''")


def pixels(png: bytes) -> Counter[tuple[int, int, int]]:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counted = image.getcolors(2**24) or []
    return Counter({colour: count for count, colour in counted})  # type: ignore[misc]


async def test_a_question_streams_in_colours_and_its_rounds_are_drawn() -> None:
    drafter = scripted(WrongFrom(3, LAW.vocabulary_size))
    drafter.delay = 0.003
    async with page_system([drafter], quick_config(5)) as system, browser_page() as page:
        await page.resize(1280, 900)
        await page.prefer("light")
        await page.go(system.url + "/")
        await ask(page)
        answer = await page.read(f"{text_of('answer')}.trim().split(' ').length")
        sources = await page.read("[...document.querySelectorAll('#answer span')].map(token => token.className)")
        await page.hover("#answer .refuted")
        detail = await page.read(text_of("detail"))
        await page.click("#compare")
        await page.until(f"{text_of('comparison')} !== ''")
        compared = await page.read(text_of("comparison"))
        await page.until(f"{text_of('t-gain')} !== '–'")
        await page.until("lanes.rounds.length === 75")
        await page.read("document.getElementById('lanes').focus()")
        for _ in range(61):  # behind the 60 plain steps lie the rounds
            await page.press("ArrowLeft")
        chosen = await page.read(text_of("round"))
        await page.until("!lanes.waiting")
        counts = pixels(await page.screenshot(whole=True))
        workers = await page.read(text_of("workers"))
        errors, requests = page.errors, page.requests
    assert answer == 60
    assert len(sources) == 60
    assert Counter(name.split()[0] for name in sources) == {"accepted": 45, "correction": 14, "bonus": 1}
    assert "Guessed instead:" in detail
    assert "The same text" in compared
    assert chosen.startswith("Round 15: ")
    assert "3 of 3 candidates accepted, 4 tokens committed" in chosen
    assert "target-0" in workers
    for colour in (*TEXT_COLOURS.values(), *LANE_COLOURS.values()):
        assert counts[colour] > 50, colour
    assert counts.most_common(1)[0][1] < 0.8 * counts.total()
    assert errors == []
    assert all(url.startswith((system.url, "data:", "about:")) for url in requests)


async def test_on_a_phone_in_the_dark_with_a_key_and_a_model_that_writes_markup() -> None:
    spelled = [MARKUP if i == 7 else word for i, word in enumerate(words(LAW.vocabulary_size))]
    drafter = scripted(WrongFrom(1, LAW.vocabulary_size))
    keys = HttpConfig(api_keys=("right",))
    phone_system = page_system([drafter], quick_config(5, Policy.THRESHOLD), keys, spelled=spelled)
    async with phone_system as system, browser_page() as page:
        await page.resize(360, 740, mobile=True)
        await page.prefer("dark")
        await page.go(system.url + "/ui")
        await page.until("document.getElementById('key-dialog').open")
        await page.read("document.getElementById('key-input').value = 'right'")
        await page.click("#key-form button")
        expected_refusals, page.errors = page.errors, []
        await ask(page, tokens=200)
        text, title = await page.read(text_of("answer")), await page.read("document.title")
        images = await page.read("document.images.length")
        width = await page.read("document.documentElement.scrollWidth")
        await page.read("document.getElementById('answer').focus()")
        await page.press("ArrowDown")
        detail = await page.read(text_of("detail"))
        counts = pixels(await page.screenshot())
        errors = page.errors
    assert any("401" in error for error in expected_refusals)
    assert MARKUP in text
    assert (title, images) == ("Outrider", 0)
    assert width <= 360
    assert "Guessed instead:" in detail
    assert counts.most_common(1)[0][0] in {(18, 20, 18), (26, 29, 27)}
    assert errors == []


async def test_a_stopped_answer_ends_on_the_server_too() -> None:
    async with page_system([], delay=0.02) as system, browser_page() as page:
        await page.go(system.url + "/ui")
        await page.until(f"{text_of('state')} === 'ready'")
        await page.read(f"{PROMPT}.value = 'w1 w2'; document.getElementById('tokens').value = 400")
        await page.click("#go")
        await page.until("document.querySelectorAll('#answer span').length > 3")
        await page.click("#stop")
        await page.until(f"{text_of('figures')} === 'Stopped.'")
        await system.deployment.idle()
        assert page.errors == []
