# SPDX-License-Identifier: Apache-2.0
"""Config and tokenizer on their way to a node without the driver's folders."""

import json
import shutil
from pathlib import Path

import pytest

from nemo_rl_core.data.folders import LARGEST_FOLDER_BYTES, local_folders, read_folder
from nemo_rl_core.data.tokenizers import build_tokenizer, character_tokenizer
from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model folder with weights and what else lies in such folders."""
    path = tmp_path / "model"
    character_tokenizer("0123456789?").save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("model.safetensors", "optimizer.pt", "README.md", "model.safetensors.index.json", "train.jsonl"):
        (path / name).write_text("not sent")
    return path


def settings(folder: Path, files) -> GenerationSettings:
    return GenerationSettings(
        model=ModelSettings(folder=str(folder)), tokenizer=TokenizerSettings(folder=str(folder)), files=files
    )


def test_config_and_tokenizer_are_read_and_nothing_else(folder):
    files = read_folder(str(folder))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert not [name for name, contents in files.items() if contents == b"not sent"]
    assert files["config.json"] == (folder / "config.json").read_bytes()


def test_a_worker_builds_the_tokenizer_where_the_drivers_folder_is_not(folder):
    """The private folders are gone afterwards, and the settings themselves are as they were."""
    told = settings(folder, {str(folder): read_folder(str(folder))})
    wanted = build_tokenizer(told.tokenizer).get_vocab()
    shutil.rmtree(folder)
    with local_folders(told) as local:
        private = Path(str(local.model.folder))
        assert local.tokenizer.folder == str(private)
        assert build_tokenizer(local.tokenizer).get_vocab() == wanted
        assert (private / "config.json").is_file()
    assert not private.exists()
    assert told.model.folder == str(folder)


def test_a_generation_worker_starts_where_the_drivers_folder_is_not(folder):
    values = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **values}))
    told = settings(folder, {str(folder): read_folder(str(folder))})
    shutil.rmtree(folder)
    worker = TorchGenerationWorker(told)
    try:
        assert worker.num_receiving_ranks() == 1
    finally:
        worker.shutdown()
    with pytest.raises(ModelError, match="does not exist"):
        TorchGenerationWorker(settings(folder, {}))


def test_without_files_the_folders_are_the_drivers(folder):
    told = settings(folder, {})
    with local_folders(told) as local:
        assert local == told


def test_a_folder_that_is_too_large_is_refused_with_its_largest_file(folder):
    with (folder / "tokenizer.model").open("wb") as file:
        file.truncate(LARGEST_FOLDER_BYTES)  # sparse: no disk is used
    with pytest.raises(ModelError, match=rf"at most {LARGEST_FOLDER_BYTES} .*'tokenizer\.model'"):
        read_folder(str(folder))


def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_folder(str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["../config.json", "model.safetensors", "a/b.model"])
def test_a_name_that_was_read_from_no_folder_is_not_written(folder, name):
    told = settings(folder, {str(folder): {name: b""}})
    with pytest.raises(ModelError, match="not written"), local_folders(told):
        pass


def test_contents_of_files_do_not_stand_in_messages(folder):
    assert "xxx" not in repr(settings(folder, {str(folder): {"config.json": b"x" * 1000}}))
