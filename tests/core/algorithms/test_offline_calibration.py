# SPDX-License-Identifier: Apache-2.0
"""``calibrate_folder``: from a tiny model and a file of texts to a checkpoint with scales, or to nothing at all."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl_core.algorithms import offline_calibration
from nemo_rl_core.algorithms.offline_calibration import CalibrationJob, calibrate_folder
from nemo_rl_core.cli.interrupts import terminate_like_interrupt
from nemo_rl_core.data.tokenizers import character_tokenizer
from nemo_rl_core.errors import DataError, ModelError, ScaleNameError
from nemo_rl_core.fp8.blockwise import cast_many
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription
from nemo_rl_core.fp8.source_checkpoint import SCALES_FILE
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.models import random_model
from tests.core.workers.tiny import CHARACTERS, MODEL

FILES = {"kv_scales.json", "report.md", "scales.svg", SCALES_FILE, "model.safetensors.index.json"}
TEXTS = ("0123456789", "10?", "abcdefgh" * 3, "7")
OWNERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def save(folder, dtype=torch.bfloat16, **values):
    """Write a tiny model with its tokenizer; returns it."""
    settings = ModelSettings(hf_config={**MODEL, **values}, max_total_sequence_length=32, seed=3)
    model = random_model(settings, dtype).eval()
    model.save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return model


@pytest.fixture
def job(tmp_path):
    """A job on a model and a file that are there."""
    save(tmp_path / "model")
    return job_in(tmp_path)


def job_in(tmp_path, **options):
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))
    paths = {"model": tmp_path / "model", "data": tmp_path / "data.txt", "out": tmp_path / "out"}
    return CalibrationJob(**{**paths, "device": "cpu", **options})


def change(job, **options):
    return CalibrationJob(**{**vars(job), **options})


def rewrite(folder, **values):
    """Change values in a folder's config.json; None takes one out."""
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (folder / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


def run(job):
    lines = []
    return calibrate_folder(job, lines.append), lines


def key_magnitudes(model):
    """The largest keys of each layer, by transformers' own cache."""
    tokenizer = character_tokenizer(CHARACTERS)
    largest = torch.zeros(2)
    with torch.no_grad():
        for text in TEXTS:
            cache = model(torch.tensor([tokenizer(text)["input_ids"]]), use_cache=True).past_key_values
            seen = torch.stack([layer.keys.abs().max().float() for layer in cache.layers])
            largest = torch.maximum(largest, seen)
    return largest.tolist()


def test_the_folder_has_scales_that_are_those_of_the_models_own_cache(tmp_path):
    model = save(tmp_path / "model", torch.float32)
    record, lines = run(job_in(tmp_path, margin=1.5))
    for owner, magnitude in zip(OWNERS, key_magnitudes(model), strict=True):
        assert record["layers"][f"{owner}.k_scale"] == pytest.approx(1.5 * magnitude / 448, rel=1e-5)
    assert {name: x.item() for name, x in load_file(tmp_path / "out" / SCALES_FILE).items()} == record["layers"]
    assert lines[0] == "4 sequences, 38 tokens, 0 cut to the limit"
    assert lines[-1] == "calibrating: 38 of 38 tokens (100 %)"


def test_the_folder_is_whole_and_the_models_is_as_before(job):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.model.iterdir()}
    record, _ = run(change(job, include_q=True, percentile=99.0, max_tokens=8))
    assert {path.name for path in job.out.iterdir()} == set(before) | FILES
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.model.iterdir()} == before
    assert json.loads((job.out / "kv_scales.json").read_text()) == json.loads(json.dumps(record))
    assert record["data"] == {"file": "data.txt", "sequences": 4, "tokens": 20, "cut": 2}
    assert (record["percentile"], record["include_q"], record["kept_as"]) == (99.0, True, "float32")
    assert (record["model"]["architecture"], record["model"]["dtype"]) == ("Qwen3ForCausalLM", "bfloat16")
    assert "| q | calibrated too |" in (job.out / "report.md").read_text()
    assert sorted(path.name for path in job.out.parent.iterdir()) == ["data.txt", "model", "out"]


def test_the_budget_of_a_pass_changes_nothing(tmp_path):
    save(tmp_path / "model", torch.float32)
    expected, _ = run(job_in(tmp_path))
    for number, budget in enumerate((1, 30)):
        got, _ = run(job_in(tmp_path, batch_tokens=budget, out=tmp_path / f"out {number}"))
        assert got["layers"] == pytest.approx(expected["layers"], rel=1e-5)


def test_an_architecture_that_is_not_known_is_calibrated_by_a_description(job):
    rewrite(job.model, architectures=["MyForCausalLM"])
    block = AttentionBlock(prefix="net.h", module="mix.attn", layers=(0, 1))
    mine = ModelDescription(architecture="MyForCausalLM", blocks=(block,))
    record, _ = run(change(job, description=mine))
    assert list(record["layers"]) == list(mine.names())


def test_weights_in_fp8_are_calibrated_in_the_models_dtype_and_scales_are_rounded_up_to_it(tmp_path):
    """The engine's Fp8 config keeps scales in bfloat16."""
    model = save(tmp_path / "model", torch.bfloat16, hidden_size=128, intermediate_size=128)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    linear = {n.removesuffix(".weight"): x for n, x in tensors.items() if ".layers." in n and x.ndim == 2}
    rest = {n: x for n, x in tensors.items() if n.removesuffix(".weight") not in linear}
    save_file({**rest, **cast_many(linear)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rewrite(tmp_path / "model", quantization_config=fp8)
    record, _ = run(job_in(tmp_path))
    for owner, magnitude in zip(OWNERS, key_magnitudes(model), strict=True):
        scale = record["layers"][f"{owner}.k_scale"]
        assert scale == pytest.approx(2 * magnitude / 448, rel=0.2)
        assert scale >= 2 * record["amax"][owner]["k"] / 448
        assert torch.tensor(scale).bfloat16().item() == scale
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == fp8


def nothing_is_written(job):
    return sorted(path.name for path in job.out.parent.iterdir()) == ["data.txt", "model"]


def test_an_activation_that_is_not_finite_is_told_by_layer_and_nothing_is_written(job):
    model = AutoModelForCausalLM.from_pretrained(job.model)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3] = float("inf")
    model.save_pretrained(job.model)
    with pytest.raises(ModelError, match="v in layer 1 are infinite or NaN"):
        run(job)
    assert nothing_is_written(job)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"architectures": ["MyForCausalLM"]}, ModelError, "scale names of 'MyForCausalLM' were never tried"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 8},
            ModelError,
            r"caches one latent .* keep this model's KV cache in bfloat16",
        ),
        (
            {
                "architectures": ["JambaForCausalLM"],
                "model_type": "jamba",
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "layer_types": None,
            },
            ScaleNameError,
            r"vLLM loads no scales into 'model\.layers\.\*\.attn' of JambaForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ModelError, "is quantised by 'awq'"),
        (
            {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4},
            ModelError,
            "does not take its attention",
        ),
    ],
    ids=["unknown", "MLA", "Jamba", "AWQ", "Bloom"],
)
def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(job, monkeypatch, values, error, message):
    """Q7."""
    rewrite(job.model, **values)
    monkeypatch.setattr(offline_calibration, "load_for_calibration", lambda *_: pytest.fail("loaded"))
    with pytest.raises(error, match=message) as caught:
        run(job)
    assert "\n" not in str(caught.value)
    assert nothing_is_written(job)


def test_data_without_a_sequence_and_impossible_numbers_are_refused_before_the_model_is_loaded(job, monkeypatch):
    monkeypatch.setattr(offline_calibration, "load_for_calibration", lambda *_: pytest.fail("loaded"))
    with pytest.raises(DataError, match="margin must be"):
        run(change(job, margin=0.5))
    job.data.write_text("\n")
    with pytest.raises(DataError, match="has no line with a sequence"):
        run(job)
    assert nothing_is_written(job)


def test_a_folder_that_holds_something_and_one_inside_the_model_are_refused(job):
    job.out.mkdir()
    (job.out / "notes").touch()
    with pytest.raises(DataError, match=r"must be new or empty, .* it holds 'notes'"):
        run(job)
    for out in (job.model, job.model / "fp8"):
        with pytest.raises(DataError, match="must lie outside of the model's"):
            run(change(job, out=out))
    with pytest.raises(DataError, match="must be a folder"):
        run(change(job, out=job.data))


def test_an_empty_folder_is_filled(job):
    job.out.mkdir()
    run(job)
    assert (job.out / "config.json").is_file()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_end_in_the_middle_of_writing_leaves_nothing(job, monkeypatch, how):
    def begin_and_end(source, out, scales):
        (out / "config.json").write_text("{}")
        os.kill(os.getpid(), how)
        pytest.fail("the signal came later")

    monkeypatch.setattr(offline_calibration, "add_scales", begin_and_end)
    with terminate_like_interrupt(), pytest.raises(KeyboardInterrupt):
        run(job)
    assert nothing_is_written(job)


def test_where_writing_fails_in_the_end_the_scales_are_saved_beside(job, monkeypatch):
    """The passes may have taken an hour."""

    def full(source, out, scales):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offline_calibration, "add_scales", full)
    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device; the scales are in '") as caught:
        run(job)
    path = Path(str(caught.value).split("'")[-2])
    assert sorted(path.name for path in job.out.parent.iterdir()) == sorted(["data.txt", "model", path.name])
    assert path.name.startswith("out.")
    assert len(json.loads(path.read_text())["layers"]) == 4


def test_where_nothing_can_be_written_in_the_end_that_is_said(job, monkeypatch):
    def gone(source, out, scales):
        shutil.rmtree(job.out.parent)
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(offline_calibration, "add_scales", gone)
    job = change(job, out=job.out / "deep" / "out")
    with pytest.raises(DataError, match="could not be saved either: the calibration is lost"):
        run(job)


def file_in_the_way(job):
    (job.out.parent / "file").touch()
    return change(job, out=job.out.parent / "file" / "out")


def link(job):
    job.out.symlink_to("elsewhere")
    return job


def no_room(job):
    with (job.model / "notes").open("wb") as file:
        file.truncate(shutil.disk_usage(job.model).free + 2**30)
    return job


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (file_in_the_way, "cannot be made"),
        (link, "must not be a link"),
        (no_room, "GB free; give a folder with more room"),
        (lambda job: change(job, out=job.out.with_name("o" * 256)), "File name too long"),
        (lambda job: change(job, out=Path("/proc/out")), "cannot be made"),
        (lambda job: change(job, out=Path("/")), "must not be a mount point"),
    ],
    ids=["a file in the way", "a link", "no room", "a long name", "not writable", "a mount point"],
)
def test_a_place_that_cannot_take_the_result_is_refused_before_the_model_is_loaded(job, monkeypatch, prepare, message):
    monkeypatch.setattr(offline_calibration, "load_for_calibration", lambda *_: pytest.fail("loaded"))
    job = prepare(job)
    before = sorted(job.data.parent.iterdir())
    with pytest.raises(DataError, match=message):
        run(job)
    assert sorted(job.data.parent.iterdir()) == before


def test_the_models_files_are_brought_before_it_is_loaded(job, monkeypatch):
    class LoadedError(Exception):
        pass

    def stop(*_):
        (partial,) = [path for path in job.out.parent.iterdir() if path.name.startswith(".out.partial-")]
        assert (partial / "result" / "model.safetensors").samefile(job.model / "model.safetensors")
        raise LoadedError

    monkeypatch.setattr(offline_calibration, "load_for_calibration", stop)
    with pytest.raises(LoadedError):
        run(job)
    assert nothing_is_written(job)


@pytest.mark.parametrize(
    ("tensor", "is_refused"),
    [
        ("model.layers.0.self_attn.k_proj.bias", True),
        ("model.layers.0.self_attn.k_proj.weight.outliers", True),
        ("model.norm.offset", True),
        ("visual.blocks.0.weight", False),
        ("model.layers.2.self_attn.k_proj.weight", False),
    ],
)
def test_tensors_that_modules_of_the_model_would_run_without_are_refused(job, tensor, is_refused):
    tensors = load_file(job.model / "model.safetensors")
    save_file({**tensors, tensor: torch.ones(2)}, job.model / "model.safetensors", {"format": "pt"})
    if not is_refused:
        run(job)
        return
    with pytest.raises(ModelError, match=re.escape(repr(tensor))):
        run(job)
    assert nothing_is_written(job)


def test_what_does_not_go_along_is_said(job):
    for name in ("report.md", "weights.onnx"):
        (job.model / name).write_text("the model's own")
    _, lines = run(job)
    assert f"not taken along from {job.model}: report.md, weights.onnx" in lines
    assert (job.out / "report.md").read_text() != "the model's own"
    assert (job.model / "report.md").read_text() == "the model's own"


def test_one_sequence_is_one(job):
    job.data.write_text("012")
    assert run(job)[1][0] == "1 sequence, 3 tokens, 0 cut to the limit"


@pytest.mark.parametrize(
    "values",
    [{"hidden_act": "foo"}, {"hidden_size": -1}, {"num_hidden_layers": "two"}, {"vocab_size": None, "dtype": 3}],
)
def test_values_that_make_no_model_are_one_line_before_it_is_loaded(job, monkeypatch, values):
    monkeypatch.setattr(offline_calibration, "load_for_calibration", lambda *_: pytest.fail("loaded"))
    rewrite(job.model, **values)
    with pytest.raises(ModelError) as caught:
        run(job)
    assert "\n" not in str(caught.value)
    assert nothing_is_written(job)
