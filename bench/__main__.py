"""Measures, and writes docs/benchmarks.md, plots, and docs/benchmarks/NAME.json with everything raw.

`python -m bench` runs the default set, at most 40 minutes; `python -m bench NAME --help` tells the options of one
benchmark. A run that was interrupted goes on where it ended when it is started again with the same options.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from bench import registry, report
from bench.contestants import ContestantFailed
from bench.journal import ROOT, Journal
from bench.session import Session
from services.torch_threads import wait_briefly

wait_briefly(os.environ)  # as our workers do, before torch is imported

SET_MINUTES = 38.0
_HIDDEN = ("SECRET", "KEY")
_NO_SETTINGS = ("minutes", "fresh", "out")
"""Options that change nothing about a single result."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] == "page":
        options = _common("page", "Write the page anew from the results.").parse_args(words[1:])
        report.write_page(options.out)
        return 0
    if words and not words[0].startswith("-"):
        return _one(words[0], words[1:])
    parser = _common("", _overview(), argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_positive, default=SET_MINUTES, help="for the whole set (default: 38)")
    return _default_set(parser.parse_args(words))


def _one(name: str, words: Sequence[str], minutes: float | None = None) -> int:
    if name not in registry.BENCHES:
        print(f"bench: no benchmark is named {name}; there are {', '.join(registry.BENCHES)}", file=sys.stderr)
        return 2
    entry, bench = registry.BENCHES[name], registry.load(name)
    parser = _common(name, bench.__doc__ or "", argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes",
        type=_positive,
        default=entry.minutes,
        help=f"begins no further prompt that would end later (default: {entry.minutes:g})",
    )
    parser.add_argument(
        "--label",
        type=_label,
        default="",
        help="writes NAME_LABEL.json beside the usual NAME.json (default: another --model's name, else none)",
    )
    bench.add_arguments(parser)
    options = parser.parse_args(words)
    options.label = options.label or _model_label(options, parser)
    settings = {key: value for key, value in vars(options).items() if key not in _NO_SETTINGS}
    file = f"{name}_{options.label}" if options.label else name
    journal = Journal(options.out / f"{file}.jsonl", settings | {"environment": _environment()}, options.fresh)
    session = Session(name, journal, options.minutes if minutes is None else min(minutes, options.minutes))
    if journal.other_settings:
        session.say("what an interrupted run left was made with other options: begins anew")
    elif journal.rows:
        session.say(f"goes on behind {len(journal.rows)} results of an interrupted run (--fresh: from the start)")
    result = bench.run(options, session)
    if options.label:
        result = replace(
            result,
            title=f"{result.title} ({options.label})",
            charts=[replace(chart, name=f"{chart.name}_{options.label}") for chart in result.charts],
        )
    if not session.rows:
        print(f"bench: nothing was measured by {name}", file=sys.stderr)
        return 1
    command = " ".join([*_environment(), "python -m bench", name, shlex.join(words)]).rstrip()
    report.write(file, result, command, session.rows, journal.commits(), options.out)
    journal.finish()
    session.say(f"written: {_shown(report.page_of(options.out))}")
    for key, figure in result.ratios.items():
        print(f"{key}: {figure}" + (f", goal {figure.goal}: {figure.verdict}" if figure.goal else ""))
    return 0


def _default_set(options: argparse.Namespace) -> int:
    """Every benchmark of the set that no interrupted run has finished yet."""
    deadline = time.monotonic() + options.minutes * 60
    names = [name for name, entry in registry.BENCHES.items() if entry.in_default_set]
    done = Journal(options.out / "all.jsonl", {"names": names}, options.fresh)
    for name in names:
        left = (deadline - time.monotonic()) / 60
        if name in done:
            continue
        if left < 1:
            print(f"bench: no time is left for {name}; start again to go on", file=sys.stderr)
            return 1
        code = _one(name, ["--out", str(options.out), *(["--fresh"] if options.fresh else [])], left)
        if code:
            return code
        done.record(name, {})
    done.finish()
    return 0


def _common(
    name: str, description: str, formatter: type[argparse.HelpFormatter] = argparse.HelpFormatter
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m bench {name}".rstrip(), None, description, formatter_class=formatter)
    parser.add_argument("--out", type=_folder, default=report.RESULTS, help="folder of results (docs/benchmarks)")
    parser.add_argument("--fresh", action="store_true", help="does not go on from an interrupted run")
    return parser


def _overview() -> str:
    lines = [
        f"  {name:11} {entry.summary}{'' if entry.in_default_set else ' (not in the default set)'}"
        for name, entry in registry.BENCHES.items()
    ]
    return "\n".join([__doc__ or "", "benchmarks:", *lines, "  page        write the page anew from the results"])


def _environment() -> list[str]:
    """Settings from the environment change what is measured, so the command names them."""
    found = [(key, value) for key, value in sorted(os.environ.items()) if key.startswith("OUTRIDER_")]
    return [f"{key}={value}" for key, value in found if key != "OUTRIDER_HOME" and not key.endswith(_HIDDEN)]


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return value


def _label(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"{text}: small letters, digits and _ only")
    return text


def _model_label(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Of another model than the usual one, so that its results do not take the place of the usual ones."""
    usual, model = parser.get_default("model"), getattr(options, "model", None)
    if model == usual or usual is None:
        return ""
    return re.sub(r"[^a-z0-9]+", "_", Path(str(model)).name.lower()).strip("_")


def _folder(text: str) -> Path:
    return Path(text).absolute()


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ContestantFailed as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        print("\nbench: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
