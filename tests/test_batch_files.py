"""The files of a batch: what can be asked, what has been answered, and what a crash leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.batch.answer_file import AnswerFile
from services.batch.input_file import InputFile, InvalidInput
from services.batch.output import Answered, Output
from services.batch.request import BatchRequest, InvalidLine, read_request
from services.start_error import StartError

OK = Answered(200, "req_1", {"usage": {"completion_tokens": 2}})
REFUSED = Answered(400, "req_2", {"error": {"message": "no"}})


def line(custom_id: object = "a", **changes: Any) -> bytes:
    values = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "w1"}}
    return json.dumps({**values, **changes}).encode()


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"


def opened(paths: tuple[Path, Path], *requests: BatchRequest) -> Output:
    output = Output(*paths)
    output.open({request.custom_id: request.id for request in requests})
    return output


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (b"{", "it is no JSON: "),
        (b"[1]", "it is no JSON object"),
        (b'{"custom_id": "\xff"}', "it is not UTF-8"),
        (line(7), "custom_id is 7, must be a text of 1 to 512 characters"),
        (line(""), 'custom_id is "", must be'),
        (line(method="GET"), 'method is "GET", must be POST'),
        (line(url="/v1/embeddings"), 'url is "/v1/embeddings", must be /v1/chat/completions or /v1/completions'),
        (line(url=["/v1/completions"]), "url is "),
        (line(body="w1"), 'body is "w1", must be an object'),
        (line(body={"stream": True}), "body.stream must be left out"),
        (line(model="m"), "model: this field is not known; there are custom_id, method, url, body"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "body: this field is required"),
    ],
)
def test_a_line_that_cannot_be_asked_says_why(asked: bytes, complaint: str) -> None:
    with pytest.raises(InvalidLine) as refused:
        read_request(asked)

    assert str(refused.value).startswith(complaint)
    assert "\n" not in str(refused.value)


def test_every_bad_line_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", line("a"), b"", b"{}", line("b"), line("a"))

    with pytest.raises(InvalidInput, match="2 lines cannot be asked; nothing was") as refused:
        InputFile(path).check()

    assert refused.value.complaints == [
        f"{path} line 3: custom_id: this field is required",
        f"{path} line 5: custom_id a is there already, on line 1",
    ]


@pytest.mark.parametrize(
    "changes", [{"url": "/v1/chat/completions"}, {"body": {"prompt": "w2"}}, {"custom_id": "b"}], ids=str
)
def test_the_id_tells_of_every_change(changes: dict[str, Any]) -> None:
    assert read_request(line(**changes)).id != read_request(line()).id


def test_the_id_stays_when_only_the_writing_changes() -> None:
    spaced = (
        b'{"body" : {"temperature": 0, "prompt": "w1"}, "url": "/v1/completions", "method": "POST", "custom_id": "a"}'
    )

    assert read_request(spaced).id == read_request(line(body={"prompt": "w1", "temperature": 0})).id


def test_answers_and_failures_go_to_their_files(paths: tuple[Path, Path]) -> None:
    a, b = read_request(line("a")), read_request(line("b"))
    output = opened(paths, a, b)
    output.write(a, OK)
    output.write(b, REFUSED)
    output.close()

    (answer,), (error,) = ([json.loads(text) for text in path.read_text().splitlines()] for path in paths)
    assert answer == {
        "id": a.id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"usage": {"completion_tokens": 2}}},
        "error": None,
    }
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("b", 400, None)
    again = opened(paths, a, b)
    assert again.holds("a")
    assert again.holds("b")
    assert (again.num_answered, again.num_failed) == (2, 1)
    again.close()


def test_without_failures_there_is_no_file_of_errors(paths: tuple[Path, Path]) -> None:
    output = opened(paths, read_request(line()))
    output.write(read_request(line()), OK)
    output.close()

    assert not paths[1].exists()


def test_a_torn_last_line_is_cut_off_wherever_it_tore(paths: tuple[Path, Path]) -> None:
    a, b = read_request(line("a")), read_request(line("b"))
    output = opened(paths, a, b)
    output.write(a, OK)
    whole = paths[0].read_bytes()
    output.write(b, OK)
    output.close()
    both = paths[0].read_bytes()

    for length in range(len(whole), len(both)):
        paths[0].write_bytes(both[:length])
        again = opened(paths, a, b)
        assert again.holds("a")
        assert not again.holds("b")
        again.close()
        assert paths[0].read_bytes() == whole


@pytest.mark.parametrize(
    "foreign", [b"a letter to a friend", b"a letter\nto a friend\n", b'{"custom_id": "a"}\n', b'{"id": "x"']
)
def test_a_file_of_another_kind_is_left_as_it_is(paths: tuple[Path, Path], foreign: bytes) -> None:
    paths[0].write_bytes(foreign)

    with pytest.raises(StartError, match="line 1 is no answer of a batch"):
        opened(paths, read_request(line("a")))

    assert paths[0].read_bytes() == foreign


def test_an_input_that_has_changed_is_refused(paths: tuple[Path, Path]) -> None:
    output = opened(paths, read_request(line("a")))
    output.write(read_request(line("a")), OK)
    output.close()

    with pytest.raises(StartError, match="answers a as it was before it changed"):
        opened(paths, read_request(line("a", body={"prompt": "w2"})))
    with pytest.raises(StartError, match="answers a, which the input does not hold"):
        opened(paths, read_request(line("b")))
    opened(paths, read_request(line("a")), read_request(line("b"))).close()  # lines may be added


def test_an_answer_that_is_there_twice_is_noticed(paths: tuple[Path, Path]) -> None:
    output = opened(paths, read_request(line("a")))
    output.write(read_request(line("a")), OK)
    output.close()
    once = paths[0].read_bytes()

    paths[1].write_bytes(once)
    with pytest.raises(StartError, match="a is answered both in"):
        opened(paths, read_request(line("a")))
    paths[1].unlink()
    paths[0].write_bytes(once + once)
    with pytest.raises(StartError, match="line 2: custom_id a is answered twice"):
        opened(paths, read_request(line("a")))


def test_two_batches_cannot_write_one_file(paths: tuple[Path, Path]) -> None:
    first = AnswerFile(paths[0])

    with pytest.raises(StartError, match="is being written by another batch"):
        AnswerFile(paths[0])

    first.close()
    AnswerFile(paths[0]).close()
