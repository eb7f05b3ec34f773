"""`outrider` as its image holds it, but that a target has a table model: `python -m tools.manifest_outrider target`.

Settings, lease, TLS, health, drain and exit code are the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from services import target_process
from services.cli.main import main
from services.settings import TargetSettings
from specdec.messages import TokenizerBundle
from tools.identities import target_identity, tokenizer_bundle
from tools.table_law import TableLaw
from tools.table_model import TableModel


def load_model(settings: TargetSettings, folder: Path, patience: float, **choices: object) -> TableModel:
    return TableModel(TableLaw(64, 3, 8.0, "table"), name=settings.model, context_length=512, delay=0.005)


def read_bundle(folder: Path, name: str) -> TokenizerBundle:
    return replace(tokenizer_bundle(target_identity("", model_name=name)), model_name=name)


if __name__ == "__main__":
    with patch.multiple(target_process, load_model=load_model, read_bundle=read_bundle, model_folder=Path):
        main()
