"""`make test-mutants`: tries every mutant, prints the table, and fails if one survives."""

from __future__ import annotations

import sys

from mutants.catalogue import MUTANTS
from mutants.mutant import judge


def main() -> int:
    survivors = 0
    print(f"{'mutant':<40} {'killed':<7} {'seconds':>7}  test: finding", flush=True)
    for mutant in MUTANTS:
        verdict = judge(mutant)
        survivors += not verdict.killed
        killed = "yes" if verdict.killed else "NO"
        print(f"{mutant.name:<40} {killed:<7} {verdict.seconds:7.1f}  {mutant.test}: {verdict.finding}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
