# SPDX-License-Identifier: Apache-2.0
"""Promise 4 (data): what crosses from a worker can be unpickled where no engine is.

Exceptions cross as text; `tests/core/distributed/test_shell.py` holds that.
"""

import inspect
import pickle
import pickletools
import subprocess
import sys

import pytest

from nemo_rl_core.protocols.generation import Completion, GenerationRequest, GenerationWorker, SamplingParams
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker
from tests.core.workers.test_torch_generation import make_worker, model, worker  # noqa: F401 - fixtures

ALLOWED_ROOTS = {"nemo_rl_core", "torch", "numpy", "builtins", "collections"}
REQUEST = GenerationRequest(prompt_ids=(3, 4), sampling=SamplingParams(max_new_tokens=3, seed=1))

#: How each public method is called; a new method without an entry fails the test below.
CALLS = {
    "generate": lambda w: w.generate([REQUEST]),
    "num_receiving_ranks": lambda w: w.num_receiving_ranks(),
    "receive_weights": None,  # its report is what `refit_from` of the fixture returned; see below
    "weights_digest": lambda w: w.weights_digest(),
    "describe": lambda w: w.describe(),
    "shutdown": lambda w: w.shutdown(),
}


def public_methods(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def roots_of(stream):
    """Top-level modules that a pickle stream names."""
    strings, roots = [], set()
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"):
            strings.append(argument)
        elif opcode.name == "STACK_GLOBAL":
            roots.add(strings[-2].partition(".")[0])
        elif opcode.name == "GLOBAL":
            roots.add(argument.partition(" ")[0].partition(".")[0])
    return roots


def test_every_public_method_of_the_protocol_and_of_the_worker_is_covered():
    assert public_methods(GenerationWorker) == set(CALLS)
    assert public_methods(TorchGenerationWorker) == set(CALLS)


@pytest.mark.parametrize("method", sorted(set(CALLS) - {"receive_weights"}))
def test_results_name_only_modules_that_every_side_has(method, worker):  # noqa: F811 - the fixture
    result = CALLS[method](worker)
    assert roots_of(pickle.dumps(result)) <= ALLOWED_ROOTS, method


def test_the_report_of_a_refit_is_plain_data(make_worker, model):  # noqa: F811 - the fixtures
    from tests.core.workers.test_torch_generation import refit_from

    assert roots_of(pickle.dumps(refit_from(model, make_worker()))) == set()


def test_the_check_sees_a_foreign_module():
    """Control: a result that needs another package is found out."""
    from packaging.version import Version

    assert roots_of(pickle.dumps([Version("1.0")])) - ALLOWED_ROOTS == {"packaging"}


def test_completions_are_read_in_a_process_that_loads_neither_torch_nor_an_engine():
    """F51, U8."""
    stream = pickle.dumps(
        [Completion(token_ids=(1, 2), logprobs=(-0.5, -0.25), finish_reason="stop", weight_version=3)]
    )
    reader = (
        "import pickle, sys\n"
        f"completion = pickle.loads({stream!r})[0]\n"
        "assert completion.weight_version == 3\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", reader], check=True, timeout=60)
