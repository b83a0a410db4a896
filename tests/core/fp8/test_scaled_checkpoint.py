# SPDX-License-Identifier: Apache-2.0
"""A checkpoint gets scales: what is written, what is linked, and what is left out."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.errors import DataError
from nemo_rl_core.fp8.scaled_checkpoint import add_scales, copy_checkpoint
from nemo_rl_core.fp8.source_checkpoint import SCALES_FILE, SourceCheckpoint

SCALES = {"model.layers.0.self_attn.attn.k_scale": 0.5, "model.layers.0.self_attn.attn.v_scale": 0.0123456}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def folder_of(folder, *, config=None, shards=1, names=("a.weight", "b.weight")):
    """A HF folder with tensors of four bytes each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"model-{1 + i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file)
    index = {"metadata": {"total_size": 4 * len(tensors)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def written(model, out):
    out.mkdir()
    source = SourceCheckpoint.read(model)
    copy_checkpoint(source, out, str)
    add_scales(source, out, SCALES)
    return out


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_index_names_every_tensor_with_the_file_that_holds_it(tmp_path, shards):
    model = folder_of(tmp_path / "model", shards=shards)
    before = contents(model)
    out = written(model, tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a.weight", "b.weight", *SCALES}
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    assert index["metadata"]["total_size"] == 16
    assert contents(model) == before


def test_scales_are_float32_and_exact(tmp_path):
    scales = load_file(written(folder_of(tmp_path / "model"), tmp_path / "out") / SCALES_FILE)
    assert {name: x.shape for name, x in scales.items()} == dict.fromkeys(SCALES, torch.Size([1]))
    assert all(x.dtype == torch.float32 and x.item() == torch.tensor(SCALES[name]).item() for name, x in scales.items())


def test_weights_are_linked_and_what_a_user_may_edit_is_copied(tmp_path):
    model = folder_of(tmp_path / "model")
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (model / name).write_bytes(b"other weights")
    (model / "onnx").mkdir()
    out = written(model, tmp_path / "out")
    assert (out / "model.safetensors").samefile(model / "model.safetensors")
    assert not (out / "tokenizer.json").samefile(model / "tokenizer.json")
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", SCALES_FILE)
    }


def test_a_link_in_a_download_cache_becomes_the_file_itself(tmp_path):
    model = folder_of(tmp_path / "model")
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to("../blob")
    out = written(model, tmp_path / "out")
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").samefile(tmp_path / "blob")


def test_where_links_are_impossible_weights_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    model = folder_of(tmp_path / "model")
    out = written(model, tmp_path / "out")
    assert not (out / "model.safetensors").samefile(model / "model.safetensors")
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_plain_model_gets_a_configuration_that_quantises_the_cache_alone(tmp_path):
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    model = folder_of(tmp_path / "model", config=config)
    assert SourceCheckpoint.read(model).kept_as == "float32"
    found = json.loads((written(model, tmp_path / "out") / "config.json").read_text())
    quantization = found.pop("quantization_config")
    assert found == config
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"] == {}
    assert quantization["kv_cache_scheme"]["strategy"] == "tensor"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_with_fp8_weights_keeps_its_configuration_and_scales_in_its_dtype(tmp_path, dtype):
    config = {"model_type": "qwen3", "dtype": dtype, "quantization_config": FP8}
    model = folder_of(tmp_path / "model", config=config)
    assert SourceCheckpoint.read(model).kept_as == dtype
    assert json.loads((written(model, tmp_path / "out") / "config.json").read_text()) == config


def test_nothing_is_written_onto_a_file_that_is_there(tmp_path):
    """It may be another name of the model's own file."""
    model = folder_of(tmp_path / "model")
    before = contents(model)
    source = SourceCheckpoint.read(model)
    for name in (SCALES_FILE, "config.json", "model.safetensors.index.json"):
        out = tmp_path / f"out {name}"
        out.mkdir()
        os.link(model / "config.json", out / name)
        with pytest.raises(FileExistsError):
            add_scales(source, out, SCALES)
    out = tmp_path / "out"
    out.mkdir()
    os.link(model / "config.json", out / "tokenizer.json")
    with pytest.raises(FileExistsError):
        copy_checkpoint(source, out, str)
    assert contents(model) == before


def test_a_file_system_without_room_for_copies_is_told_before_a_byte_is_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    model = folder_of(tmp_path / "model")
    os.truncate(model / "tokenizer.json", 2**25)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**24, 2**24))
    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"needs 0\.05 GB, .* has 0\.02 GB free; give a folder with more room"):
        copy_checkpoint(SourceCheckpoint.read(model), tmp_path / "out", str)
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_that_are_copied_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: os.open(tmp_path / "nowhere" / "at all", os.O_RDONLY))
    (tmp_path / "out").mkdir()
    lines = []
    copy_checkpoint(SourceCheckpoint.read(folder_of(tmp_path / "model", shards=2)), tmp_path / "out", lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("copying 2 files of weights")


def test_what_is_left_out_is_known_by_name(tmp_path):
    model = folder_of(tmp_path / "model")
    for name in ("report.md", "kv_scales.json", "pytorch_model.bin", "LICENSE"):
        (model / name).write_text("the model's own")
    (model / "onnx").mkdir()
    source = SourceCheckpoint.read(model)
    assert source.left_out == ("kv_scales.json", "onnx", "pytorch_model.bin", "report.md")
    assert source.other_files == ("LICENSE", "tokenizer.json")
