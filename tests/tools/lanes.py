"""Two lanes for `pytest -n 2`: every file that loads torch in one, one after the other; the rest beside it.

Processes with torch on shared cores starve one another, so no two tests may run them at once. A file is in the lane of
torch unless it is named here: a new one is slow at worst, never in the way.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler.loadscope import LoadScopeScheduling

TORCH = "torch"
WITHOUT_TORCH = frozenset(
    {
        "test_batch_files",
        "test_bench_report",
        "test_cli_errors",
        "test_docs_api",
        "test_engine_block_pool",
        "test_gateway_requests",
        "test_goodput_choice",
        "test_goodput_models",
        "test_grammar_masks",
        "test_http_cancel",
        "test_http_chat",
        "test_http_completions",
        "test_http_errors",
        "test_http_tool_calls",
        "test_k8s_images",
        "test_k8s_manifests",
        "test_k8s_tls",
        "test_launcher_supervisor",
        "test_models_fetch",
        "test_models_resolve",
        "test_package_layers",
        "test_pool_scaling",
        "test_redis_discovery",
        "test_redis_embedded",
        "test_redis_metadata",
        "test_sdk_client",
        "test_settings_sources",
        "test_simulator_model",
        "test_specdec_draft_length",
        "test_specdec_worker",
        "test_tokenizer_bundle",
        "test_tokenizer_stream",
        "test_tools_history",
        "test_tools_proxy",
        "test_vocabulary_identity",
        "test_wire_codec",
        "test_wire_control",
        "test_wire_errors",
        "test_wire_links",
        "test_wire_process",
        "test_wire_server",
    }
)
"""Test files that load no torch, nor start a process that does (`tests/test_package_layers.py`)."""


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """A scope, which one process runs in order, is the lane of torch, or one file of the other lane."""

    def _split_scope(self, nodeid: str) -> str:
        name = PurePosixPath(nodeid.partition("::")[0]).stem
        return name if name in WITHOUT_TORCH else TORCH
