"""`python -m bench.peers`: which peers are installed; `install NAME` makes a peer's own environment."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv

from bench.peers.known import PACKAGES, Package


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Other engines to compare with, each in an environment of its own."
    )
    parser.add_argument("action", nargs="?", default="list", choices=("list", "install", "remove"))
    parser.add_argument("name", nargs="?", choices=tuple(PACKAGES), help="of `install` and `remove`")
    options = parser.parse_args()
    if options.action == "list":
        for package in PACKAGES.values():
            state = f"installed in {package.environment}" if package.installed else "not installed"
            print(f"{package.name:10} {state}. {package.note}")
        return 0
    if options.name is None:
        parser.error(f"{options.action} needs one of {', '.join(PACKAGES)}")
    package = PACKAGES[options.name]
    if options.action == "remove":
        shutil.rmtree(package.environment, ignore_errors=True)
        return 0
    return _install(package)


def _install(package: Package) -> int:
    """Goes on where an interrupted call ended."""
    if not package.python.is_file():
        venv.create(package.environment, with_pip=True)
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    print(f"Installing {', '.join(package.requirements)} into {package.environment}. {package.note}", file=sys.stderr)
    pip = [str(package.python), "-m", "pip"]
    code = subprocess.run([*pip, "install", "--quiet", *package.requirements], env=environment).returncode
    if code:
        print(f"bench: pip could not install {package.name}; see its message above", file=sys.stderr)
        return code
    if package.unwanted:
        subprocess.run(
            [str(package.python), "-m", "pip", "uninstall", "--quiet", "--yes", *package.unwanted], check=True
        )
    if package.name == "llama_cpp":
        from bench.peers.gguf import fetch_gguf

        fetch_gguf()
    (package.environment / "complete").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
