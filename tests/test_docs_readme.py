"""The documents promise only what exists: commands, flags, make targets, links, names of the SDK, messages."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import outrider
from services.cli.main import app
from tools.http_system import structured_system
from tools.scripted import oracle

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "THIRD_PARTY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "k8s").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> Iterator[str]:
    """Lines of shell blocks, and inline code, without comments."""
    for language, block in FENCE.findall(text):
        if language in ("", "sh"):
            yield from (line.partition(" #")[0].strip() for line in block.splitlines())
    yield from INLINE.findall(FENCE.sub("", text))


def complete_commands(text: str, program: str) -> list[str]:
    """Commands of one program; `outrider up` in a sentence counts, `outrider` or `outrider.v1` alone does not."""
    return [line for line in commands(text) if line.startswith(f"{program} ")]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def parse(words: list[str]) -> list[str]:
    """Parses a command line as `outrider` would, without running it. Returns the names of the commands on the way."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("outrider", list(words), resilient_parsing=False)
    names: list[str] = []
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        if not hasattr(command, "resolve_command"):
            raise ValueError(f"left over: {rest}")
        name, command, rest = command.resolve_command(context, rest)
        names.append(name)
        context = command.make_context(name, rest, parent=context)
    return names


def readme_commands() -> list[str]:
    return sorted(
        {line for document in DOCUMENTS for line in complete_commands(document.read_text("utf-8"), "outrider")}
    )


@pytest.mark.parametrize("line", readme_commands())
def test_every_command_line_in_the_documents_parses(line: str) -> None:
    words = shlex.split(line)[1:]
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--version")
        return
    alternatives = words[0].split("|")  # `outrider scheduler|draft|target`
    if words[-1] == "--help" or len(words) == 1 or words == ["models", "fetch"]:  # a command that is only named
        for name in alternatives:
            assert name in typer.main.get_command(app).commands  # type: ignore[attr-defined]
        return
    assert parse(words)


def test_a_flag_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["up", "--no-such-flag", "1"])
    with pytest.raises(Exception, match="No such command"):
        parse(["fly"])


def test_the_readme_shows_every_command() -> None:
    shown = {shlex.split(line)[1] for line in complete_commands(README.read_text("utf-8"), "outrider")}
    demonstrated = {"demo"}  # by `make run` and `make demo`
    assert set(typer.main.get_command(app).commands) <= shown | demonstrated  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_make_target_exists(document: Path) -> None:
    for line in complete_commands(document.read_text("utf-8"), "make"):
        targets = {
            word for word in shlex.split(re.sub(r"<[^>]*>", "", line))[1:] if re.fullmatch(r"[a-z][a-z-]*", word)
        }
        assert targets <= makefile_targets(), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_pictures_fetch_nothing_from_elsewhere() -> None:
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        text = picture.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        text = re.sub(r"(<text[^>]*>)[^<]*", r"\1", text)  # what is shown is not fetched
        assert "http" not in text, picture


def test_the_index_lists_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    names = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert re.findall(r"^\| \[\d{4}\]\((.*?)\)", (folder / "README.md").read_text("utf-8"), re.MULTILINE) == names
    for name in names:
        assert (folder / name).read_text("utf-8").startswith(f"# {name[:4]} "), name


def test_every_direct_dependency_has_its_licence_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    wanted = {re.split(r"[\[<>=]", name)[0].lower() for name in listed} - {"outrider"}
    text = (ROOT / "THIRD_PARTY.md").read_text("utf-8").lower()
    assert not [name for name in wanted if not re.search(rf"[\s`(]{re.escape(name)}[\s`,)]", text)]


def python_blocks() -> list[str]:
    return [block for language, block in FENCE.findall(README.read_text("utf-8")) if language == "python"]


@pytest.mark.parametrize("source", python_blocks(), ids=lambda source: source.splitlines()[-1])
def test_the_python_examples_compile_and_import_what_exists(source: str) -> None:
    tree = ast.parse(source)
    compile(tree, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in imported:
        module = importlib.import_module(node.module or "")
        for name in node.names:
            assert hasattr(module, name.name), f"{node.module} has no {name.name}"
    assert any(node.module in ("outrider", "openai") for node in imported)


def test_options_in_the_python_examples_exist() -> None:
    from outrider.request import GenerateOptions

    for source in python_blocks():
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("generate", "complete"):
                assert {keyword.arg for keyword in call.keywords} <= set(GenerateOptions.__annotations__)
                assert hasattr(outrider.Client, call.func.attr)


def test_settings_named_in_the_readme_exist() -> None:
    """Names of environment variables."""
    from services.settings import DraftSettings, SchedulerSettings, TargetSettings, UpSettings

    kinds = (UpSettings, SchedulerSettings, TargetSettings, DraftSettings)
    known = {f"OUTRIDER_{field.upper()}" for kind in kinds for field in kind.model_fields}
    known |= {f"OUTRIDER_{kind.section.upper()}_{field.upper()}" for kind in kinds for field in kind.model_fields}
    known |= {"OUTRIDER_HOME", "OUTRIDER_CONFIG", "OUTRIDER_ADDRESS", "OUTRIDER_API_KEY"}
    assert set(re.findall(r"\bOUTRIDER_[A-Z_]+\b", README.read_text("utf-8"))) <= known


def test_fields_and_settings_in_sentences_exist() -> None:
    """Inline code with an underscore: a setting, a field of the API, a metric, a column of an answer."""
    from services.settings import DraftSettings, SchedulerSettings, TargetSettings, UpSettings

    settings = {
        name for kind in (UpSettings, SchedulerSettings, TargetSettings, DraftSettings) for name in kind.model_fields
    }
    elsewhere = (ROOT / "docs" / "api.md").read_text("utf-8") + (ROOT / "docs" / "metrics.md").read_text("utf-8")
    words = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", README.read_text("utf-8"))
    assert len(words) > 10
    client = {"api_key", "extra_body"}  # of the official client
    assert not [word for word in words if word not in settings | client and f"`{word}`" not in elsewhere]


def test_paths_in_the_readme_are_those_of_the_api_page() -> None:
    paths = re.findall(r"`(/[a-z/0-9]+)`", README.read_text("utf-8"))
    assert len(paths) > 5
    api = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert not [path for path in paths if f"`{path}`" not in api]


async def test_the_example_of_the_official_client_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = (source for source in python_blocks() if "from openai import" in source)
    async with structured_system(oracle) as (url, _):
        source = source.replace("http://127.0.0.1:8000", url).replace("smollm2-135m", "table")
        assert url in source
        await asyncio.to_thread(exec, source, {})
    assert capsys.readouterr().out


def source_text() -> str:
    """All strings of the code, without the borders between adjacent literals."""
    packages = ("outrider", "scheduler", "services", "specdec", "draft_worker", "target_worker")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts]
    return re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(path.read_text("utf-8") for path in files))


def error_messages() -> list[str]:
    table = README.read_text("utf-8").partition("## Errors and cures")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_the_readme_tells_at_least_ten_errors() -> None:
    assert len(error_messages()) >= 10


@pytest.mark.parametrize("message", error_messages())
def test_messages_in_the_readme_are_those_of_the_code(message: str) -> None:
    """Each run of words that holds no value (numbers, names, addresses) is in the code."""
    runs = re.split(r"\S*[\d/'.:()=]\S*|\bmy-model\b|\bsmollm2\S*|\bstart one with\b|\bsend\b", message)
    telling = [run.strip(" `,;") for run in runs if len(run.strip(" `,;")) >= 12]
    assert telling
    missing = [run for run in telling if run not in source_text()]
    assert not missing
