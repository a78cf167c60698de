"""A checkpoint's language in one piece."""

import shutil
from pathlib import Path

import pytest
import tokens_kit as kit

from polarnode.core.errors import ModelError
from polarnode.tokens.template import load_model


def test_tiny_checkpoint_loads_and_passes_audit() -> None:
    loaded = load_model(kit.TINY)
    assert (loaded.name, loaded.path, loaded.notes) == ("tiny", kit.TINY, ())
    assert loaded.family == kit.model().family
    assert loaded.template.tokenizer is loaded.tokenizer


def test_checkpoint_failing_audit_is_refused(tmp_path: Path) -> None:
    folder = kit.variant(
        tmp_path, template=lambda text: text.replace("'\\n<tool_response>\\n' +", "loop.index ~")
    )
    (folder / "config.json").write_text('{"vocab_size": 4096}')
    with pytest.raises(ModelError, match="depending on what came before"):
        load_model(folder)


def test_padding_ids_belong_to_model(tmp_path: Path) -> None:
    """Ids beyond the tokenizer's are still the model's."""
    folder = shutil.copytree(kit.TINY, tmp_path / "padded")
    (folder / "config.json").write_text('{"vocab_size": 4096}')
    assert load_model(folder).tokenizer.vocab_size == 4096


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_model(tmp_path)
