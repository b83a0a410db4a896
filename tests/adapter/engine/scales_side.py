# SPDX-License-Identifier: Apache-2.0
"""FP8 KV scales in live engines: each is changed alone, by both roads, and everything that moved is told.

Run as a script in the engine's interpreter, with the address of a socket. A request is a name of this module and its
keyword arguments; each starts an engine of its own in this process and frees it. Answers are plain data.
"""

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client
from typing import Any

KINDS = ("q_scale", "k_scale", "v_scale")
#: Every copy that the engine keeps of a scale, as this file reads them: not by the code under test.
COPIES = ("_{}", "_{}_float", "_{}_cpu")
#: No kernel reads the fourth scale, and its other copies are never written.
PROB = "_prob_scale"
#: Tokens in a block of the KV cache.
BLOCK = 32
#: What all scales are but the one that is changed. No power of two, and nothing saturates at it.
BASE = 0.7
#: The one that is changed: the largest values of k and v saturate.
CHANGED = 0.001


def set_each(
    *, folder: str, names: list[str], prompt: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Set one scale after another in a live engine, as a refit does.

    Args:
        folder: Where the model's configuration is.
        names: What a refit would bring.
        prompt: In vLLM's form, for the logprobs; None for an engine that cannot run here.
        arguments: More arguments of the engine.

    Returns:
        ``owners`` and ``names`` of ``LiveScales``; ``refused``, why it would take no refit, or None; ``at_start``,
        every scale of the new engine; ``steady``, whether the same scales give the same logprobs, and ``finite``,
        whether these are numbers. And in ``changes``, by name of the scale that was set: ``read``, what
        ``LiveScales.get`` says; ``moved``, the copies that are others now; ``reacts``, whether the logprobs are.
    """
    from nemo_rl_vllm.live_scales import LiveScales

    with engine(folder, arguments) as llm:
        model = model_of(llm)
        fill(model)
        scales = LiveScales(model)
        at_start = {name: value for name, value in copies(model).items() if name.rpartition(".")[0] in scales.owners}
        refused = _answer_of(lambda: scales.require(names))
        for name in scales.names():
            scales.set(name, BASE)
        before, words = copies(model), logprobs(llm, prompt)
        steady = logprobs(llm, prompt) == words
        changes = {}
        for name in scales.names():
            scales.set(name, CHANGED)
            now, new_words = copies(model), logprobs(llm, prompt)
            changes[name] = {
                "read": _answer_of(lambda name=name: scales.get(name)),
                "moved": {copy: now[copy] for copy in now if now[copy] != before[copy]},
                "reacts": new_words != words,
            }
            scales.set(name, BASE)
        steady = steady and copies(model) == before and logprobs(llm, prompt) == words
        return {
            "owners": list(scales.owners),
            "names": list(scales.names()),
            "refused": refused,
            "at_start": at_start,
            "steady": steady,
            "finite": all(abs(word) < float("inf") for word in words),
            "changes": changes,
        }


def load_each(
    *, folder: str, names: list[str], prompt: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Load scales under the given names into a live engine, as a checkpoint does, and change one after another.

    Returns:
        ``cache``, the type of each owner's cache; ``parameters``, the scales for which the model has parameters;
        ``error``, what the loader raised, or None; ``loaded``, the scales that it says it loaded; ``live``, every copy
        afterwards; and ``changes`` as in ``set_each``.
    """
    with engine(folder, arguments) as llm:
        model = model_of(llm)
        fill(model)
        cache = {name: module.kv_cache_dtype for name, module in attention(model)}
        values = dict.fromkeys(names, BASE)
        parameters, loaded, error = load(llm, values)
        answer = {"cache": cache, "parameters": parameters, "error": error, "loaded": loaded, "live": copies(model)}
        if error is not None or not loaded:
            return {**answer, "changes": {}}
        before, words = copies(model), logprobs(llm, prompt)
        changes = {}
        for name in names:
            _, _, error = load(llm, {**values, name: CHANGED})
            now, new_words = copies(model), logprobs(llm, prompt)
            changes[name] = {
                "moved": {copy: now[copy] for copy in now if now[copy] != before[copy]},
                "reacts": new_words != words,
            }
        return {**answer, "changes": changes}


def fates(*, folder: str, names: list[str], keys: list[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Load one further key after all live names, again and again, as checkpoints spell it.

    Returns:
        By key, a fate and what belongs to it: ``loads`` and the one name whose copies all have the key's value then,
        ``stale`` and the one of which only some have it, ``spread`` and several such names, ``dropped`` where none has
        it, ``refused`` and the engine's error.
    """
    found = {}
    with engine(folder, arguments) as llm:
        model = model_of(llm)
        for key in keys:
            base = dict.fromkeys(names, BASE)
            if key.rpartition(".")[2].startswith("_"):
                # A buffer, which whatever makes the scales overwrites at the end: it is for a running engine.
                load(llm, base)
                error = load_plainly(model, key)
            else:
                _, _, error = load(llm, {**base, key: CHANGED})
            changed = {}
            for copy, value in copies(model).items():
                owner, _, form = copy.rpartition("._")
                name = f"{owner}.{form.removesuffix('_float').removesuffix('_cpu')}"
                # A config may keep it in fewer bits.
                changed.setdefault(name, []).append(abs(value / CHANGED - 1) < 0.01)
            hit = {name for name, is_new in changed.items() if any(is_new)}
            if error is not None:
                found[key] = ("refused", error)
            elif not hit:
                found[key] = ("dropped", None)
            elif len(hit) > 1:
                found[key] = ("spread", sorted(hit))
            else:
                (name,) = hit
                found[key] = ("loads" if all(changed[name]) else "stale", name)
    return found


def loaded(*, folder: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Start an engine from a whole checkpoint; returns every copy of every scale."""
    with engine(folder, {"load_format": "safetensors", **arguments}) as llm:
        return copies(model_of(llm))


@contextlib.contextmanager
def engine(folder: str, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Start an engine in this process, without weights, and free it."""
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    leave_weights_alone()
    given = {
        "model": folder,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 160,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 2**26,
        **arguments,
    }
    llm = vllm.LLM(**given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def leave_weights_alone() -> None:
    """Let vLLM's Fp8 and ModelOpt configs quantise the KV cache alone: their kernels for weights need another machine.

    The attention layers, their scale parameters and the models' loaders stay as they are.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    for config in (Fp8Config, ModelOptFp8Config):
        stock = config.get_quant_method
        if stock.__name__ == "for_attention_alone":
            continue

        def for_attention_alone(self: Any, layer: Any, prefix: str, stock: Any = stock) -> Any:
            if isinstance(layer, Attention | MLAAttention):
                return stock(self, layer, prefix)
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            return UnquantizedFusedMoEMethod(layer.moe_config) if isinstance(layer, RoutedExperts) else None

        config.get_quant_method = for_attention_alone


def model_of(llm: Any) -> Any:
    """Return the model itself: the engine is in this process."""
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    return model


def fill(model: Any) -> None:
    """Give the weights numbers of usual size; those of the dummy loader are so small that nothing saturates."""
    import torch

    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            noise = torch.randn(parameter.shape, generator=stream)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def attention(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield every module that keeps scales, with its name."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "_k_scale"))


def copies(model: Any) -> dict[str, float]:
    """Return every copy of every scale, as ``<owner>._k_scale_float`` and the like."""
    found = {}
    for owner, module in attention(model):
        for name in (*(form.format(kind) for kind in KINDS for form in COPIES), PROB):
            if hasattr(module, name):
                value = getattr(module, name)
                found[f"{owner}.{name}"] = value if isinstance(value, float) else value.item()
    return found


def load(llm: Any, values: Mapping[str, float]) -> tuple[list[str], list[str], str | None]:
    """Reload scales alone, by vLLM's own steps for a checkpoint; the weights stay.

    Returns:
        The scales that have parameters, those that the loader says it loaded, and its error.
    """
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = model_of(llm), llm.llm_engine.vllm_config.model_config
    initialize_layerwise_reload(model)
    parameters = [name for name, _ in model.named_parameters() if name.endswith(KINDS)]
    loaded: list[str] = []
    fault: str | None = None
    for step in (
        lambda: loaded.extend(model.load_weights((name, torch.tensor(value)) for name, value in values.items())),
        lambda: finalize_layerwise_reload(model, config),
    ):
        try:
            step()
        except Exception as error:  # noqa: BLE001 - what it is, is the answer
            fault = fault or f"{type(error).__name__}: {error}"
    return parameters, sorted(loaded), fault


def load_plainly(model: Any, key: str) -> str | None:
    """Give a running engine's model one more key, without the steps of a reload; returns its error."""
    import torch

    try:
        model.load_weights([(key, torch.tensor(CHANGED))])
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        return f"{type(error).__name__}: {error}"
    return None


def logprobs(llm: Any, prompt: Mapping[str, Any] | None) -> list[float]:
    """Return the logprobs of a prompt and of a few greedy tokens, from an empty cache; none without a prompt."""
    import vllm

    if prompt is None:
        return []
    llm.reset_prefix_cache()
    params = vllm.SamplingParams(
        max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    (output,) = llm.generate([dict(prompt)], params, use_tqdm=False)
    steps = [*(output.prompt_logprobs or ())[1:], *output.outputs[0].logprobs]
    return [entry.logprob for step in steps if step for entry in step.values()]


def _answer_of(call: Callable[[], Any]) -> Any:
    """Return what the code under test answers, or its error's text, so that the rest is looked at all the same."""
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def main(address: str) -> None:
    """Answer requests until the other side hangs up."""
    with Client(address, family="AF_UNIX") as pipe:
        while True:
            try:
                name, keywords = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, globals()[name](**keywords)))
            except Exception:  # noqa: BLE001 - whatever it is, the tests are to hear of it
                pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1])
