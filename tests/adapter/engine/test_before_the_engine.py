# SPDX-License-Identifier: Apache-2.0
"""What the worker refuses before vLLM is imported; these tests run where it is not installed."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from nemo_rl_core.errors import BackendIncompatibleError, ConfigError, ModelError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings
from nemo_rl_vllm.checks import check_settings
from nemo_rl_vllm.engine import EngineFolder, engine_arguments, failure
from nemo_rl_vllm.worker import VllmGenerationWorker
from tests.adapter.engine.checkpoints import CONTEXT, FAMILIES
from tests.adapter.engine.live import settings


def test_a_worker_without_an_engine_names_the_range_and_the_command() -> None:
    """U5: one line, before anything is written or started."""
    with pytest.raises(
        BackendIncompatibleError, match=r"no engine is installed in this interpreter.*0\.32.*pip install"
    ):
        VllmGenerationWorker(settings("qwen3"))


@pytest.mark.parametrize(
    "module", ["engine", "engine_plugin", "expert_weights", "layouts", "live_weights", "worker", "worker_extension"]
)
def test_a_worker_module_imports_without_the_engine(module: str) -> None:
    """Otherwise a missing engine would be an ImportError from somewhere, and vLLM's environment could not be set."""
    code = f"import sys; sys.modules['vllm'] = None; import nemo_rl_vllm.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the model's 4 attention heads"),
        ({"async_engine": True}, "async_engine=True is not there yet"),
        ({"load_format": "safetensors"}, "load_format must be dummy"),
        ({"max_model_len": CONTEXT - 1}, f"max_model_len must be at least .*, got {CONTEXT - 1}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_worker_refuses_by_name_what_would_not_act(options: dict, message: str) -> None:
    """Also where no driver has checked it before; no engine is looked for then."""
    with pytest.raises(ConfigError, match=message):
        VllmGenerationWorker(settings("qwen3", **options))


@pytest.mark.parametrize(
    ("family", "shape", "ranks", "message"),
    [
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "neither divides the model's 4 KV heads nor is",
        ),
        ("qwen3", {"intermediate_size": 95}, 2, "does not divide the model's intermediate_size of 95"),
        ("qwen3_moe", {"moe_intermediate_size": 33}, 2, "does not divide the model's moe_intermediate_size of 33"),
        ("qwen3", {}, 2, None),
        ("qwen3", {"num_key_value_heads": 1}, 4, None),
        ("qwen3", {"vocab_size": 41}, 2, None),
        ("qwen3_moe", {"intermediate_size": 95}, 2, None),
    ],
    ids=["KV heads", "width", "width of experts", "shared", "KV head on all", "padded vocabulary", "unused width"],
)
def test_a_model_that_cannot_be_shared_out_is_refused_before_any_worker_starts(family, shape, ranks, message) -> None:
    """U6: by the driver too, from the config alone."""
    given = settings(family, tensor_parallel_size=ranks)
    given = replace(given, model=replace(given.model, hf_config={**FAMILIES[family], **shape}))
    if message is None:
        check_settings(given)
        return
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={ranks} {message}"):
        check_settings(given)


def test_an_engine_with_a_context_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match=f"max_model_len is 4096, but the model's context has {CONTEXT} positions"):
        EngineFolder(settings("qwen3", max_model_len=4096))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "no HF config can be read"),
        ({"hidden_size": 8}, "no HF config can be read"),
        ({"model_type": "t5"}, "no causal LM of model_type 't5'"),
    ],
    ids=["unknown type", "no type", "no causal model"],
)
def test_a_model_that_cannot_be_described_is_refused(config: dict, message: str) -> None:
    given = settings("qwen3")
    with pytest.raises(ModelError, match=message):
        EngineFolder(replace(given, model=ModelSettings(hf_config=config)))


@pytest.fixture
def folder():
    folder = EngineFolder(settings("qwen3_moe"))
    yield folder
    folder.remove()


def test_the_engine_gets_config_and_tokenizer_in_a_folder_of_its_own_that_is_removed(folder: EngineFolder) -> None:
    """The driver's model has no checkpoint, and there is no shared file system: all comes from the settings."""
    names = {path.name for path in folder.path.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not any(name.endswith((".safetensors", ".bin")) for name in names)
    assert '"Qwen3MoeForCausalLM"' in (folder.path / "config.json").read_text()
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_replicas_have_seeds_of_their_own_which_numpy_takes(folder: EngineFolder) -> None:
    given: GenerationSettings = replace(settings("qwen3"), seed=2**31)
    seeds = {engine_arguments(given, folder, rank=rank, device="cpu")["seed"] for rank in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_an_engines_failure_carries_phase_version_and_last_lines(folder: EngineFolder) -> None:
    """U3: and nothing of the engine's own types."""
    lines = [f"line {number}\n" for number in range(100)]
    folder.log.write_text(
        "".join([*lines[:50], "ValueError: no such kernel\n", "RuntimeError: see above\n", *lines[50:]])
    )
    error = failure(OSError("no space"), "start", "vllm 0.33.0", folder)
    start = "vllm 0.33.0 failed (start): OSError: no space; the engine's first error was ValueError: no such kernel; its last"
    assert str(error).startswith(start)
    assert "line 99" in str(error)
    assert "line 20\n" not in str(error)
    assert (error.type_name, error.phase, error.engine_version) == ("OSError", "start", "vllm 0.33.0")
    assert error.rank == -1
    assert error.remote_traceback.endswith("line 99")
    assert error.__cause__ is None


def test_an_engines_failure_names_the_rank_that_ended(folder: EngineFolder) -> None:
    error = failure(
        OSError("cancelled"), "generate", "vllm 0.33.0", folder, lost=("engine rank 1 (pid 7) has ended", 1)
    )
    assert str(error) == "vllm 0.33.0 failed (generate): OSError: cancelled; engine rank 1 (pid 7) has ended"
    assert error.rank == 1
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)


def test_a_second_engine_of_one_process_does_not_look_for_the_logging_of_the_first(monkeypatch) -> None:
    """It would not start: the file is gone with the first one's folder; a site's own file stays."""
    for name in ("VLLM_LOGGING_CONFIG_PATH", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "NEMO_RL_VLLM_KEEP_WEIGHTS"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever is set here
        monkeypatch.delenv(name)
    first = EngineFolder(settings("qwen3"))
    first.set_environment("cuda")
    used = os.environ["VLLM_LOGGING_CONFIG_PATH"]
    assert used.startswith(str(first.path))
    first.remove()
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "site.json")
    second = EngineFolder(settings("qwen3"))
    second.set_environment("cuda")
    second.remove()
    assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "site.json"
