# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM in the engine's environment: loads checkpoints from disk, one after another, and generates greedily.

Run as a script with one JSON argument: folders, prompts, the number of new tokens and the precision. The last line that it prints is
JSON with, for each checkpoint and prompt, tokens and logprobs.
"""

import json
import sys


def main(text: str) -> None:
    """Generate with a fresh engine for each checkpoint."""
    import vllm

    given = json.loads(text)
    params = vllm.SamplingParams(
        max_tokens=given["tokens"], temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in given["prompts"]]
    answers = []
    for folder in given["folders"]:
        engine = vllm.LLM(
            model=folder,
            dtype=given["dtype"],
            hf_overrides={"head_dtype": "float32"},
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            logprobs_mode="processed_logprobs",
        )
        outputs = engine.generate(prompts, params, use_tqdm=False)
        rows = [
            [list(sample.token_ids), [s[t].logprob for t, s in zip(sample.token_ids, sample.logprobs, strict=True)]]
            for (sample,) in (output.outputs for output in outputs)
        ]
        answers.append(rows)
        del engine
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
