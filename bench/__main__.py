"""`python -m bench [NAME ...]`: measures and writes docs/benchmarks. Without names: all of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Workers that spin while they wait starve each other; read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from bench import report

STOCK = ("plain", "assisted")
NAMES = ("rounds", "engine", "concurrency", "pair", "acceptance")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all")
    parser.add_argument("--data", type=Path, default=report.ROOT.parent / "shared" / "data", help="HumanEval's folder")
    parser.add_argument("--prompts", type=int, default=20, help="HumanEval prompts of `pair` and `acceptance`")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer of `pair`")
    parser.add_argument(
        "--stock", nargs="*", choices=STOCK, default=list(STOCK), help="transformers' generate in `pair`"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is named {unknown[0]}: {', '.join(NAMES)}")
    for name in options.names or NAMES:
        print(f"{name} ...", file=sys.stderr)
        run(name, options)
    print(f"written: {report.PAGE.relative_to(report.ROOT)}", file=sys.stderr)


def run(name: str, options: argparse.Namespace) -> None:
    from bench import acceptance, concurrency, engine, pair, rounds

    command = f"python -m bench {name}"
    if name == "rounds":
        rounds.main(command)
    elif name == "engine":
        engine.main(command)
    elif name == "concurrency":
        concurrency.main(command)
    elif name == "acceptance":
        acceptance.main(f"{command} --prompts {options.prompts}", options.data, options.prompts)
    else:
        command += f" --prompts {options.prompts} --tokens {options.tokens} --stock {' '.join(options.stock)}".rstrip()
        pair.main(command, options.data, options.prompts, options.tokens, tuple(options.stock))


if __name__ == "__main__":
    main()
