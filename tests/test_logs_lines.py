"""Log lines: for people on a terminal, JSON elsewhere, with the ids of what they tell of, and without any content."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars

from services import logs
from services.log_fields import LEFT_OUT
from services.logs import LAUNCHED_VARIABLE, LogConfig
from services.output import Output
from services.telemetry.tracing_context import Call, TraceContext, current_call
from specdec.log_extra import PRIVATE
from tools.log_lines import lines, logged

TRACE_ID = "ab" * 16
TRACEPARENT = f"00-{TRACE_ID}-{'cd' * 8}-01"
log = logging.getLogger("scheduler.driver")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    with logged(monkeypatch) as written:
        yield written


def test_outside_a_terminal_a_line_is_an_object_with_all_ids(stderr: io.StringIO) -> None:
    logs.configure("scheduler", LogConfig(instance="s-1"))
    with bound_contextvars(request_id="req_1"):
        log.warning("sequence %s leaves", "q", extra={"sequence_id": "q", "traceparent": TRACEPARENT})

    (line,) = lines(stderr)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "warning",
        "event": "sequence q leaves",
        "role": "scheduler",
        "instance": "s-1",
        "logger": "scheduler.driver",
        "request_id": "req_1",
        "sequence_id": "q",
        "trace_id": TRACE_ID,
    }


def test_a_line_of_a_call_has_the_trace_of_the_call(stderr: io.StringIO) -> None:
    logs.configure("scheduler")
    token = current_call.set(Call(TraceContext(0xAB, 0xCD, True), None, 0.0))
    try:
        log.info("hello")
    finally:
        current_call.reset(token)

    assert lines(stderr)[0]["trace_id"] == f"{0xAB:032x}"


def test_on_a_terminal_and_under_a_launcher_lines_are_for_people(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED_VARIABLE, "1")
    logs.configure("target")
    log.info("serving", extra={"sequence_id": "q"})
    monkeypatch.delenv(LAUNCHED_VARIABLE)
    terminal = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    with logged(monkeypatch, terminal):
        logs.configure("target")
        log.error("ended")

    assert stderr.getvalue()[8:] == " serving\n"  # behind the time
    assert terminal.getvalue().startswith("[target] ")
    assert "error" in terminal.getvalue()


def test_the_format_can_be_chosen(stderr: io.StringIO) -> None:
    logs.configure("draft", LogConfig(format="text"))
    log.info("hello")

    assert stderr.getvalue().startswith("[draft] ")


@pytest.mark.parametrize("name", ["services.http.errors", "uvicorn.error", "grpc._cython.cygrpc", "asyncio"])
@pytest.mark.parametrize("form", ["json", "text"])
def test_what_raised_while_serving_is_told_without_its_message(stderr: io.StringIO, name: str, form: str) -> None:
    logs.configure("scheduler", LogConfig(level="debug", format=form))
    try:
        try:
            raise KeyError("canary of the cause")
        except KeyError as cause:
            raise ValueError("canary of the error") from cause
    except ValueError as error:
        extra = {PRIVATE: True} if name.startswith("services") else {}
        logging.getLogger(name).error("failed\nfuture: canary", exc_info=error, extra=extra)

    written = stderr.getvalue()
    assert "failed" in written
    assert "ValueError" in written
    assert "KeyError" in written
    assert "test_logs_lines.py" in written
    assert LEFT_OUT in written
    assert written.count("canary of") == 2  # of the lines of this file that the traceback shows
    assert PRIVATE not in written.replace(LEFT_OUT, "")


def test_with_log_prompts_messages_are_told(stderr: io.StringIO) -> None:
    logs.configure("scheduler", LogConfig(format="json", prompts=True))
    logging.getLogger("services.errors").error("failed", exc_info=ValueError("told"), extra={PRIVATE: True})

    assert "told" in lines(stderr)[0]["exception"]
    assert PRIVATE not in lines(stderr)[0]


def test_errors_of_our_own_keep_their_messages(stderr: io.StringIO) -> None:
    logs.configure("target", LogConfig(format="json"))
    log.error("the loop ended", exc_info=RuntimeError("out of blocks"))

    assert "out of blocks" in lines(stderr)[0]["exception"]


def test_files_are_written_in_the_same_form(stderr: io.StringIO, tmp_path: Path) -> None:
    logs.configure("draft", LogConfig(folder=tmp_path))
    log.info("hello")

    assert json.loads((tmp_path / "draft.log").read_text())["event"] == "hello"
    assert lines(stderr)[0]["event"] == "hello"


def test_a_launcher_can_speak_json_too() -> None:
    stream = io.StringIO()
    output = Output(stream=stream, as_json=True)
    output.line("target-1", '{"event": "serving"}')
    output.say("target-1", "ready after 0.1 s")

    serving, ready = lines(stream)
    assert serving == {"event": "serving"}
    assert (ready["of"], ready["event"]) == ("target-1", "ready after 0.1 s")
