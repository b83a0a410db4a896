# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM in the engine's environment: serves folders one after another, with an FP8 KV cache or without.

Run as a script with one JSON argument: ``engines``, pairs of a folder and the cache's dtype, and ``prompt``, token ids.
The last line that it prints is JSON with, for each engine, ``scales``: attention module to what it quantises with, and
``logprobs`` of the prompt's tokens. Nothing of this repository is imported.
"""

import gc
import json
import sys


def live_scales(model):
    """Return each scale that the engine's attention reads, in both forms that kernels take."""
    return {
        name: {kind: [getattr(module, f"_{kind}").item(), getattr(module, f"_{kind}_float")] for kind in KINDS}
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale")
    }


KINDS = ("q_scale", "k_scale", "v_scale")


def main(text: str) -> None:
    """Serve each folder."""
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    given = json.loads(text)
    answers = []
    for folder, dtype in given["engines"]:
        engine = vllm.LLM(
            model=folder,
            kv_cache_dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            # The prompt takes several passes, and each but the first reads what the cache holds.
            max_num_batched_tokens=64,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
        )
        params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        (output,) = engine.generate([{"prompt_token_ids": given["prompt"]}], params, use_tqdm=False)
        logprobs = [
            at[token].logprob
            for token, at in zip(given["prompt"], output.prompt_logprobs, strict=True)
            if at is not None
        ]
        (scales,) = engine.apply_model(live_scales)
        answers.append({"scales": scales, "logprobs": logprobs})
        engine.llm_engine.engine_core.shutdown()
        del engine, output
        cleanup_dist_env_and_memory()
        gc.collect()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
