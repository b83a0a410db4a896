# SPDX-License-Identifier: Apache-2.0
"""A checkpoint gets scales: what is written, what is linked, and what is refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.scaled_checkpoint import SCALES_FILE, SourceCheckpoint, write_scaled_checkpoint

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
    write_scaled_checkpoint(SourceCheckpoint.read(model), out, SCALES)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"quantization_config": {"quant_method": "awq"}}}, "is quantised by 'awq'"),
        ({"config": {"quantization_config": FP8, "dtype": "float32"}}, "keeps scales in the model's dtype"),
        ({"names": ("a.weight", "model.layers.0.self_attn.k_proj.k_scale")}, "has scales of a KV cache already"),
    ],
)
def test_what_could_not_be_served_with_scales_is_refused(tmp_path, options, message):
    """Q4: scales that stand there twice would be a matter of order."""
    with pytest.raises(ModelError, match=message):
        SourceCheckpoint.read(folder_of(tmp_path / "model", **options))


def test_a_folder_that_is_no_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(ModelError, match="must be a local HF folder"):
        SourceCheckpoint.read(tmp_path / "none")
    model = folder_of(tmp_path / "model", shards=2)
    (model / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 'model-2\.safetensors', which its index names"):
        SourceCheckpoint.read(model)
    (model / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be read"):
        SourceCheckpoint.read(model)
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="scales are added to safetensors alone"):
        SourceCheckpoint.read(model)
    (model / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelError, match="is no safetensors file"):
        SourceCheckpoint.read(model)
