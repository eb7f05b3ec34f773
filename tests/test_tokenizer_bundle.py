"""A bundle holds all a gateway needs, and encoding adds exactly what the model's own tokenizer adds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner

from services.tokenizer import InvalidTokenizer, Tokenizer, load_bundle

WORDS = {"hello": 0, "world": 1, "[UNK]": 2}


def inner(bos: bool = False) -> Inner:
    made = Inner(models.WordLevel(dict(WORDS), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.add_special_tokens([AddedToken("<turn_end>", special=True)])
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return made


def write_model(folder: Path, tokenizer: Inner | None = None, **files: Any) -> Path:
    """files: name with `__` for the dot, and its content."""
    (tokenizer or inner()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_all_stop_ids_of_all_files_count(tmp_path: Path) -> None:
    bundle = load_bundle(
        write_model(
            tmp_path,
            config__json={"eos_token_id": 4, "max_position_embeddings": 512},
            generation_config__json={"eos_token_id": [5, 4]},
            tokenizer_config__json={"eos_token": "</s>", "bos_token": {"content": "<s>"}, "model_max_length": 99},
        ),
        "served",
    )
    assert bundle.stop_token_ids == (5, 4)
    assert bundle.bos_token_id == 3
    assert bundle.context_length == 512
    assert bundle.model_name == "served"
    assert bundle.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}


def test_the_eos_of_the_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    bundle = load_bundle(write_model(tmp_path, tokenizer_config__json={"eos_token": "<turn_end>"}))
    assert bundle.stop_token_ids == (5,)
    assert (bundle.bos_token_id, bundle.context_length, bundle.chat_template) == (None, 0, None)
    assert bundle.model_name == tmp_path.name


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    config = {"text_config": {"eos_token_id": 4, "max_position_embeddings": 64}}
    bundle = load_bundle(write_model(tmp_path, config__json=config))
    assert (bundle.stop_token_ids, bundle.context_length) == ((4,), 64)


def test_placeholders_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    padded = inner()
    padded.add_special_tokens([AddedToken(f"[PAD{number}]", special=True) for number in (6, 7)])
    bundle = load_bundle(write_model(tmp_path, padded))
    assert bundle.vocabulary_size == 6
    assert Tokenizer(bundle).is_token(5)
    assert not Tokenizer(bundle).is_token(6)
    assert all(Tokenizer(bundle).is_token(token_id) for token_id in Tokenizer(bundle).encode("hello [PAD6] world"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "in settings"}}, "in settings"),
        ({"tokenizer_config__json": {"chat_template": "x"}, "chat_template__jinja": "own file"}, "own file"),
        ({"chat_template__json": {"chat_template": "json file"}}, "json file"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
    ],
)
def test_where_a_chat_template_may_stand(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    assert load_bundle(write_model(tmp_path, **files)).chat_template == expected


def test_bos_is_added_to_plain_prompts_of_models_that_want_it(tmp_path: Path) -> None:
    with_bos = Tokenizer(load_bundle(write_model(tmp_path, inner(bos=True))))
    assert with_bos.encode("hello world") == [3, 0, 1]
    assert with_bos.encode("<s> hello", add_special_tokens=False) == [3, 0]
    assert Tokenizer(load_bundle(write_model(tmp_path))).encode("hello world") == [0, 1]


def test_prompts_are_never_cut_or_padded(tmp_path: Path) -> None:
    cutting = inner()
    cutting.enable_truncation(1)
    cutting.enable_padding(length=8)
    assert Tokenizer(load_bundle(write_model(tmp_path, cutting))).encode("hello world hello") == [0, 1, 0]


def test_special_tokens_are_left_out_of_text_unless_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer(load_bundle(write_model(tmp_path)))
    assert tokenizer.decode([3, 0, 1, 4]) == "hello world"
    assert tokenizer.decode([3, 0, 1, 4], skip_special_tokens=False) == "<s> hello world </s>"


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        Tokenizer(load_bundle(write_model(tmp_path))).encode("hello \ud83d")


def test_broken_files_end_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidTokenizer, match=r"no readable tokenizer\.json"):
        load_bundle(tmp_path)
    write_model(tmp_path, config__json="{broken")
    with pytest.raises(InvalidTokenizer, match=r"config\.json"):
        load_bundle(tmp_path)
    (tmp_path / "config.json").unlink()
    bundle = load_bundle(tmp_path)
    with pytest.raises(InvalidTokenizer):
        Tokenizer(replace(bundle, tokenizer_json=b"{}"))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InvalidTokenizer) as refused:
        load_bundle(tmp_path)
    assert "\n" not in str(refused.value)


def test_no_torch_and_no_transformers_are_loaded() -> None:
    program = (
        "import sys, services.tokenizer, services.chat; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
