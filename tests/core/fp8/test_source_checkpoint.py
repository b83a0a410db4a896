# SPDX-License-Identifier: Apache-2.0
"""What a folder has to be so that it can be calibrated and served with scales; all of it is seen without a tensor."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.safetensors_header import read_header
from nemo_rl_core.fp8.source_checkpoint import RESULT_FILES, SCALES_FILE, SourceCheckpoint
from tests.core.fp8.test_scaled_checkpoint import FP8, folder_of, written

FP8_CONFIG = {"dtype": "bfloat16", "quantization_config": FP8}
E4M3 = torch.float8_e4m3fn


def with_tensors(folder, **dtypes):
    """Give the single file tensors of these names; ``__`` stands for a dot."""
    tensors = {name.replace("__", "."): torch.ones(4).to(dtype) for name, dtype in dtypes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_index(folder, **changes):
    path = folder / "model.safetensors.index.json"
    index = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in index.items() if value is not None}))
    return folder


def refused(folder, message):
    with pytest.raises(ModelError, match=message) as caught:
        SourceCheckpoint.read(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"quantization_config": {"quant_method": "awq"}}}, "is quantised by 'awq'"),
        ({"config": {"quantization_config": {"bits": 4}}}, "is quantised by None"),
        ({"config": {"quantization_config": "fp8"}}, "must have an object as quantization_config, got 'fp8'"),
        ({"config": {"quantization_config": [1]}}, r"must have an object as quantization_config, got \[1\]"),
        ({"config": {"text_config": {"quantization_config": FP8}}}, "quantization_config inside of text_config"),
        ({"config": {"compression_config": {"format": "pack"}}}, "has 'compression_config' in its config.json"),
        ({"config": {"quantization_config": FP8, "dtype": "float32"}}, "keeps scales in the model's dtype"),
        ({"config": {"dtype": "foo"}}, "must have one of float32, bfloat16, float16 under 'dtype', got 'foo'"),
        ({"config": {"torch_dtype": "auto"}}, "under 'torch_dtype', got 'auto'"),
        ({"config": {"text_config": {"dtype": 16}}}, "under 'dtype', got 16"),
        ({"names": ("a.weight", "model.layers.0.self_attn.k_proj.k_scale")}, "has scales of a KV cache already"),
    ],
)
def test_what_could_not_be_served_with_scales_is_refused(tmp_path, options, message):
    """Q4: scales that stand there twice would be a matter of order."""
    refused(folder_of(tmp_path / "model", **options), message)


@pytest.mark.parametrize(
    ("config", "dtypes", "message"),
    [
        ({}, {"a__weight": E4M3}, "'a.weight' in F8_E4M3, and it is run only with a 'a.weight_scale_inv'"),
        (
            {},
            {"a__weight": E4M3, "a__weight_scale_inv": torch.float32},
            "no quantization_config with quant_method 'fp8'",
        ),
        (FP8_CONFIG, {"a__weight": E4M3}, "run only with a 'a.weight_scale_inv' beside it"),
        (FP8_CONFIG, {"a__weight": E4M3, "b__weight_scale_inv": torch.float32}, "'b.weight_scale_inv', but no"),
        (FP8_CONFIG, {"b__weight_scale_inv": torch.float32}, "'b.weight_scale_inv', but no 'b.weight'"),
        (FP8_CONFIG, {"a__weight": torch.bfloat16, "a__weight_scale_inv": torch.float32}, "'a.weight' is BF16"),
        (FP8_CONFIG, {"a__weight": torch.float8_e5m2, "a__weight_scale_inv": torch.float32}, "F8_E5M2"),
        (FP8_CONFIG, {"a__weight": E4M3, "a__weight_scale": torch.float32}, "'a.weight_scale'|'a.weight' in F8_E4M3"),
        (FP8_CONFIG, {"a__input_scale": torch.float32}, "'a.input_scale': transformers would leave it aside"),
        ({}, {"a__weight": torch.bfloat16, "a__weight_scale": torch.float32}, "'a.weight_scale': transformers would"),
    ],
)
def test_fp8_weights_without_the_scales_that_transformers_reads_are_refused(tmp_path, config, dtypes, message):
    """They would be run unscaled, and every scale of the cache would be wrong without a word."""
    refused(with_tensors(folder_of(tmp_path / "model", config={"model_type": "qwen3", **config}), **dtypes), message)


def test_fp8_weights_with_their_scales_are_taken(tmp_path):
    folder = folder_of(tmp_path / "model", config={"model_type": "qwen3", **FP8_CONFIG})
    SourceCheckpoint.read(with_tensors(folder, a__weight=E4M3, a__weight_scale_inv=torch.float32, b=torch.bfloat16))


def test_the_configuration_of_another_packer_is_refused(tmp_path):
    folder = folder_of(tmp_path / "model")
    (folder / "hf_quant_config.json").write_text("{}")
    refused(folder, "has 'hf_quant_config.json', so its weights are quantised")


@pytest.mark.parametrize(
    "name",
    ["../model-1.safetensors", "part/model-1.safetensors", "/model-1.safetensors", ".", "config.json", *RESULT_FILES],
)
def test_an_index_names_plain_files_of_its_folder_and_none_of_the_results(tmp_path, name):
    """A link under such a name would be the model's own file, and the result would be written through it."""
    folder = folder_of(tmp_path / "model", shards=2)
    (folder / "part").mkdir()
    os.link(folder / "model-1.safetensors", folder / "part" / "model-1.safetensors")
    os.link(folder / "model-1.safetensors", folder / SCALES_FILE)
    with_index(folder, weight_map={"a.weight": name})
    refused(
        folder, "must name plain .safetensors files" if name != SCALES_FILE else "which the result has for its scales"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": None}, "must have an object 'metadata'"),
        ({"metadata": 3}, "must have an object 'metadata'"),
        ({"weight_map": None}, "at least one tensor in 'weight_map', got None"),
        ({"weight_map": {}}, "at least one tensor in 'weight_map', got {}"),
        ({"weight_map": ["a.weight"]}, "at least one tensor in 'weight_map'"),
        ({"weight_map": {"a.weight": 3}}, "must name plain .safetensors files"),
        ({"weight_map": {"a.weight": ["b"]}}, "must name plain .safetensors files"),
        ({"weight_map": {"a.weight": "model-2.safetensors"}}, "the index has 'a.weight' there, and the file has not"),
        ({"weight_map": {"a.weight": "model-1.safetensors", "c": "model-1.safetensors"}}, "the index has 'c' there"),
    ],
)
def test_an_index_that_is_none_of_these_files_is_refused(tmp_path, changes, message):
    refused(with_index(folder_of(tmp_path / "model", shards=2), **changes), message)


def with_more(folder, **more):
    """Give the first of two files more tensors, which the index does not have there."""
    tensors = {**load_file(folder / "model-1.safetensors"), **{n.replace("__", "."): x for n, x in more.items()}}
    save_file(tensors, folder / "model-1.safetensors")
    return folder


def test_tensors_that_an_index_does_not_name_count_too(tmp_path):
    """Engines and transformers read whole files."""
    SourceCheckpoint.read(with_more(folder_of(tmp_path / "1", shards=2), inv_freq=torch.ones(1)))
    refused(
        with_more(folder_of(tmp_path / "2", shards=2), a__weight_scale=torch.ones(1)), "has the tensor 'a.weight_scale'"
    )
    refused(with_more(folder_of(tmp_path / "3", shards=2), attn__k_scale=torch.ones(1)), "scales of a KV cache already")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = with_more(folder_of(tmp_path / "model", shards=2), b__weight=torch.ones(1))
    refused(folder, "the file has 'b.weight' there, and the index has not")


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    """transformers would load the one, and the engine the others."""
    folder = folder_of(tmp_path / "model", shards=2)
    save_file({"a.weight": torch.ones(1)}, folder / "model.safetensors")
    refused(folder, "transformers loads model.safetensors, and vLLM what model.safetensors.index.json names")


def test_a_result_is_refused_as_what_it_is(tmp_path):
    """Not for its index, which names a file that the next result would have."""
    refused(written(folder_of(tmp_path / "model"), tmp_path / "out"), "has scales of a KV cache already")


def test_an_index_of_the_single_file_is_taken(tmp_path):
    folder = folder_of(tmp_path / "model")
    weight_map = dict.fromkeys(("a.weight", "b.weight"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert SourceCheckpoint.read(folder).weight_files == ("model.safetensors",)


def test_a_folder_that_is_no_whole_checkpoint_is_refused(tmp_path):
    refused(tmp_path / "none", "must be a local HF folder")
    folder = folder_of(tmp_path / "model", shards=2)
    (folder / "model-2.safetensors").unlink()
    refused(folder, r"lacks 'model-2\.safetensors', which its index names")
    for text in ("[", "[" * 100_000, "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        refused(folder, "cannot be read|holds no JSON object")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "scales are added to safetensors alone")


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "has no header"),
        (b"abc", "has no header"),
        (struct.pack("<Q", 2**60) + b"{}", "has no header"),
        (file_of(b"[1]"), "has no header"),
        (file_of(b"[" * 100_000), "has no header"),
        (file_of({"a": 3}), "the entry of 'a' must have"),
        (file_of({"a": {"dtype": "F32"}}), "the entry of 'a' must have"),
        (file_of({"a": {"dtype": 3, "data_offsets": [0, 4]}}), "the entry of 'a' must have"),
        (file_of({"a": {"dtype": "F32", "data_offsets": [4, 0]}}), "the entry of 'a' must have"),
        (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"abc"), "was cut, or written in part"),
        (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"abcde"), "its header speaks of"),
    ],
)
def test_a_file_that_is_no_whole_safetensors_file_is_told(tmp_path, contents, message):
    folder = folder_of(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(contents)
    refused(folder, message)


def test_a_header_has_the_tensors_with_their_sizes(tmp_path):
    folder = with_tensors(folder_of(tmp_path / "model"), a=torch.bfloat16, b=E4M3)
    assert {name: (x.dtype, x.num_bytes) for name, x in read_header(folder / "model.safetensors").items()} == {
        "a": ("BF16", 8),
        "b": ("F8_E4M3", 4),
    }
