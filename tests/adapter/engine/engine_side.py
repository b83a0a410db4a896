# SPDX-License-Identifier: Apache-2.0
"""A vLLM generation worker in a process of the engine's environment, driven by calls over a socket.

Run as a script: the interpreter that runs the tests has no engine.
"""

import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client
from typing import Any


def main(address: str) -> None:
    """Answer calls until the worker is shut down."""
    worker = None
    with Client(address, family="AF_UNIX") as pipe:
        while True:
            try:
                name, arguments, keywords = pipe.recv()
            except EOFError:
                break
            try:
                if name == "start":
                    from nemo_rl_vllm.worker import VllmGenerationWorker

                    worker = VllmGenerationWorker(*arguments, **keywords)
                    answer = None
                elif name == "plant":
                    from tests.adapter.engine import faults

                    answer = worker._llm.collective_rpc(getattr(faults, arguments[0]), args=arguments[1:])
                elif name == "keep_the_cache_warm":
                    # What vLLM answers while requests still hold blocks.
                    vars(worker._llm).pop("reset_prefix_cache", None)
                    if arguments[0]:
                        worker._llm.reset_prefix_cache = lambda: False
                    answer = None
                elif name == "prompt_logprobs":
                    answer = _prompt_logprobs(worker, *arguments)
                else:
                    answer = getattr(worker, name)(*arguments, **keywords)
                pipe.send((True, answer))
            except Exception as error:  # noqa: BLE001 - whatever it is, the tests are to hear of it
                pipe.send((False, error, traceback.format_exc()))
    if worker is not None:
        worker.shutdown()


def _prompt_logprobs(worker: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the logprob of each token of each prompt but the first, which the worker's protocol has no call for."""
    import vllm  # pyrefly: ignore[missing-import] - only in the engine's environment

    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = worker._llm.generate(given, params, use_tqdm=False)
    return [
        [float(step[token].logprob) for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1])
