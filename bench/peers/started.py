"""The peers that take part in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from bench.contestants import ContestantFailed
from bench.peers.known import PACKAGES, PEERS, VLLM_OPTIONS, Package
from bench.peers.peer import Peer
from bench.peers.server import SERVED_AS, ServerPeer

Say = Callable[[str], None]


async def peers(
    names: Sequence[str], target: str, draft: str, threads: int, stack: AsyncExitStack, say: Say
) -> list[Peer]:
    """Started peers, which `stack` closes. One that is not installed or does not start is left out, and said so."""
    found: list[Peer] = []
    for name in names:
        package = PACKAGES[PEERS[name]]
        if not package.installed:
            say(f"{name} takes no part: not installed; run `python -m bench.peers install {package.name}`")
            continue
        peer = _peer(name, package, target, draft, threads, say)
        stack.push_async_callback(peer.close)
        try:
            await peer.start()
        except ContestantFailed as error:
            say(f"{name} takes no part: {error}")
            continue
        say(f"{name}: version {peer.version}")
        found.append(peer)
    return found


def _peer(name: str, package: Package, target: str, draft: str, threads: int, say: Say) -> Peer:
    from services.models import resolve

    model = str(resolve(target))
    if name == "vllm_server":
        return ServerPeer(
            name, _vllm_serve(package, model), package.process_environment(threads), say, package.restless
        )
    from transformers import AutoTokenizer

    from bench.peers.gguf import gguf_file
    from bench.peers.process import LibraryPeer

    if package.name == "llama_cpp":
        arguments = [str(gguf_file()), str(threads)]
    else:
        arguments = [model, str(resolve(draft)) if name.endswith("_draft") else "-"]
    return LibraryPeer(name, package, arguments, threads, AutoTokenizer.from_pretrained(resolve(target)))


def _vllm_serve(package: Package, model: str) -> list[str]:
    """As a module: the command `vllm` asks for a distribution of that name, and the CPU build has another one.
    generation-config: else the model's own configuration would set what a request leaves out."""
    command = [str(package.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--generation-config", "vllm"]
    for name, value in VLLM_OPTIONS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command
