# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: one clear message, exit code 2, and nothing started or written."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl_core import guard
from nemo_rl_core.cli.app import main

TINY = Path(__file__).parents[3] / "examples" / "grpo_tiny.yaml"
GENERATION = "policy.generation"


@pytest.fixture(autouse=True)
def disarmed():
    """The command arms this process's guard, which other tests must not meet."""
    yield
    guard.disarm()


def dry_run(capsys, *overrides, config=TINY):
    code = main(["train", str(config), "--dry-run", *overrides])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_plan_names_clusters_roles_environments_backend_and_world_sizes(capsys):
    code, out, _ = dry_run(capsys, "cluster.gpus_per_node=5", "cluster.device=cpu", "policy.train_micro_batch_size=128")
    assert code == 0
    plan = {line[2:25].strip(): line[25:].strip() for line in out.splitlines()[1:]}
    assert plan["ray"] == "start a local one"
    assert plan["device"] == "cpu"
    assert plan["backend"].startswith("torch (available, protocol 1")
    assert plan["train workers"] == "4 of nemo_rl_core.workers.dtensor:DTensorPolicyWorker on 4 slots"
    assert plan["generation workers"].startswith("1 of nemo_rl_core.workers.torch_generation:TorchGenerationWorker")
    assert plan["train environment"].startswith("fsdp (")
    assert plan["steps"].endswith("of 512 completions")


BAD = {
    "an unknown key": (["policy.optimiser.name=x"], [r"policy\.optimiser", "optimizer"]),
    "a wrong type": (["grpo.max_num_steps=many"], [r"grpo\.max_num_steps", "integer", "many"]),
    "a missing key": (["data.task=null"], [r"data\.task"]),
    "tensor parallel": (["policy.dtensor_cfg.tensor_parallel_size=2"], ["tensor_parallel_size", "not supported"]),
    "megatron": (["policy.megatron_cfg.enabled=true"], ["megatron_cfg", "not supported"]),
    "version 2 of the worker": (["policy.dtensor_cfg._v2=true"], ["_v2", "not supported"]),
    "LoRA": (["policy.dtensor_cfg.lora_cfg.enabled=true"], ["lora_cfg", "not supported"]),
    "context parallel": (["policy.dtensor_cfg.context_parallel_size=2"], ["context_parallel_size", "not supported"]),
    "async engine": ([f"{GENERATION}.vllm_cfg.async_engine=true"], ["async_engine", "not supported"]),
    "colocated": ([f"{GENERATION}.colocated.enabled=true"], ["colocated", "not supported"]),
    "no generation": ([f"{GENERATION}=null"], [r"policy\.generation", "GRPO"]),
    "no train worker left": (
        [f"{GENERATION}.colocated.resources.gpus_per_node=2"],
        ["leave at least one", "gpus_per_node"],
    ),
    "a world size that does not divide": (["cluster.gpus_per_node=4"], ["train_global_batch_size", "512", "3"]),
    "an unknown backend": ([f"{GENERATION}.backend=tensorrt"], ["tensorrt", "installed: .*torch"]),
    "a misspelt backend": ([f"{GENERATION}.backend=troch"], ["Did you mean 'torch'"]),
    "a bad option of the backend": (
        [f"{GENERATION}.torch_cfg.max_batch=3"],
        [r"torch_cfg\.max_batch", "max_batch_size"],
    ),
    "top-p in training": ([f"{GENERATION}.top_p=0.9"], ["top_p", r"0\.9"]),
    "a missing model folder": (
        ["policy.hf_config=null", "policy.tokenizer.characters=null", "policy.model_name=no/such"],
        ["no/such", "does not exist"],
    ),
    "an unknown model type": (["policy.hf_config.model_type=nope"], ["model_type"]),
    "a context that is too short": (["policy.max_total_sequence_length=17"], ["17", "16 positions"]),
    "a prompt longer than the context": (
        ["policy.max_total_sequence_length=4"],
        ["4 tokens", "max_total_sequence_length"],
    ),
    "an unknown task": (["data.task=largest_digt"], ["largest_digt", "largest_digit"]),
    "a bad argument of the task": (["data.task_kwargs.num_digits=9"], ["num_digits", "2 to 4", "9"]),
    "an alphabet that lacks a character": (["policy.tokenizer.characters='0123456789'"], ["unknown to the tokenizer"]),
    "an interpreter that does not exist": (
        ["env.py_executables.fsdp=/no/such/python"],
        ["/no/such/python", "does not exist"],
    ),
    "an empty stop string": ([f"{GENERATION}.stop_strings=['']"], ["stop_strings", "empty"]),
    "an unknown optimizer": (["policy.optimizer.name=torch.optim.Adamm"], [r"policy\.optimizer\.name", "Adamm"]),
    "an optimizer that is none": (["policy.optimizer.name=torch.nn.Linear"], [r"policy\.optimizer\.name", "Optimizer"]),
    "an argument the optimizer lacks": (
        ["policy.optimizer.kwargs.learning_rate=0.1"],
        [r"policy\.optimizer\.kwargs", "learning_rate"],
    ),
    "an unknown schedule": (
        ["policy.scheduler={name: torch.optim.lr_scheduler.Nope, kwargs: {}}"],
        [r"policy\.scheduler\.name", "Nope"],
    ),
    "a vocabulary smaller than the tokenizer's": (["policy.hf_config.vocab_size=10"], ["14 token ids", "only 10"]),
    "a model value of the wrong type": (["policy.hf_config.hidden_size=wide"], ["hidden_size", "hf_config"]),
    "an unknown activation": (["policy.hf_config.hidden_act=foo"], ["no causal LM can be built", "foo"]),
    "a model that is no causal LM": (["policy.hf_config.model_type=vit"], ["hf_config|no causal LM"]),
    "a task that is a module": (["data.task=os.path"], [r"os\.path", "class or a function"]),
    "a task without a module": (["data.task=.foo"], [r"\.foo", "cannot be imported"]),
    "a task argument of the wrong type": (
        ["data.task_kwargs.num_digits=abc"],
        ["num_digits|largest_digit", "TypeError"],
    ),
    "a chat template that does not parse": (
        ["data.task=arithmetic", "policy.tokenizer.chat_template='{{ bad'"],
        ["chat template fails", r"policy\.tokenizer\.chat_template"],
    ),
    "a negative stop id": ([f"{GENERATION}.stop_token_ids=[-4]"], ["stop_token_ids", "not negative"]),
    "a seed beyond 32 bits": (["grpo.seed=4294967296"], [r"grpo\.seed", "4294967296"]),
    "an override without a value": (["grpo.max_num_steps"], [r"grpo\.max_num_steps", "="]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_starts_with_key_value_and_way_out(case, capsys, tmp_path, monkeypatch):
    import re

    monkeypatch.chdir(tmp_path)
    overrides, wanted = BAD[case]
    code, out, err = dry_run(capsys, *overrides)
    assert code == 2, err
    assert out == ""
    for pattern in wanted:
        assert re.search(pattern, err), (pattern, err)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_a_config_are_told_at_once(capsys):
    _, _, err = dry_run(capsys, "grpo.max_num_steps=0", "polcy=1", "loss_fn.ratio_clip_min=2")
    assert all(key in err for key in ("grpo.max_num_steps", "polcy", "loss_fn.ratio_clip_min"))


def test_a_config_that_is_no_file_and_a_run_folder_that_is_in_use_are_refused(capsys, tmp_path):
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    assert main(["train", str(TINY), f"run_dir={used}"]) == 2
    assert "new or empty" in capsys.readouterr().err


def make_plugin(folder, name, body, requires=""):
    """Install a generation backend of somebody else's, by metadata and a module."""
    module = f"backend_{name}"
    (folder / f"{module}.py").write_text(body)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n{requires}")
    (info / "entry_points.txt").write_text(f"[nemo_rl_core.generation]\n{name} = {module}:BACKEND\n")


SPEC = """
from nemo_rl_core.protocols.generation import BackendSpec
BACKEND = BackendSpec(name="{name}", protocol={protocol}, environment="base", worker_class="{worker}",
    config_section="x_cfg", config_schema="nemo_rl_core.workers.torch_config:TorchConfig", engine="{engine}",
    engine_range=">=2", install_hint="pip install the-engine")
"""


def in_a_fresh_process(folder, backend):
    """Plugins are found on sys.path, so each case gets an interpreter of its own."""
    command = [sys.executable, "-m", "nemo_rl_core", "train", str(TINY), "--dry-run", f"{GENERATION}.backend={backend}"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin"},
    )
    return done.returncode, done.stderr


def spec(name, protocol=1, worker="nemo_rl_core.workers.torch_generation:TorchGenerationWorker", engine=""):
    return SPEC.format(name=name, protocol=protocol, worker=worker, engine=engine)


@pytest.mark.parametrize(
    ("name", "body", "wanted"),
    [
        ("broken", "import json\nraise RuntimeError('libfoo.so is missing')\n", ["RuntimeError: libfoo.so is missing"]),
        ("lacking", "import no_such_dependency\n", ["no_such_dependency"]),
        ("future", spec("future", protocol=99), ["speaks protocol 99", "speaks 1"]),
        ("engineless", spec("engineless", engine="the-engine"), ["the-engine >=2", "pip install the-engine"]),
        ("workerless", spec("workerless", worker="no_such_module:Worker"), ["no_such_module:Worker"]),
    ],
)
def test_a_backend_that_cannot_be_used_says_why(name, body, wanted, tmp_path):
    """F27, F30, F41."""
    make_plugin(tmp_path, name, body)
    code, err = in_a_fresh_process(tmp_path, name)
    assert code == 2, err
    assert all(text in err for text in wanted), err
    assert "Traceback" not in err


def test_a_backend_of_somebody_else_needs_no_change_in_core(tmp_path):
    make_plugin(tmp_path, "mine", spec("mine"))
    code, err = in_a_fresh_process(tmp_path, "mine")
    assert code == 0, err


def test_the_vllm_backend_without_its_engine_names_the_pip_command(capsys):
    code, _, err = dry_run(capsys, f"{GENERATION}.backend=vllm", "cluster.device=cuda")
    assert code == 2
    assert 'pip install "nemo-rl-core[vllm]"' in err
    assert "env.py_executables.vllm" in err


def test_the_vllm_backend_without_a_gpu_names_the_command_that_builds_its_environment(capsys, tmp_path, monkeypatch):
    """U11, R3, R15: one line before any worker starts, also where half of it is there."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    code, out, err = dry_run(capsys, f"{GENERATION}.backend=vllm", "cluster.device=cpu")
    assert (code, out) == (2, "")
    assert err.endswith("'vllm-cpu' is not built on " + platform.node() + ": run `nemo-rl env build vllm-cpu`\n")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_user_task_that_imports_the_engine_is_refused_in_the_driver(tmp_path):
    """F23: the guard is armed in the driver before the user's code is imported."""
    (tmp_path / "vllm.py").write_text("")
    (tmp_path / "my_task.py").write_text("import vllm\nclass Task: ...\n")
    command = [sys.executable, "-m", "nemo_rl_core", "train", str(TINY), "--dry-run", "data.task=my_task:Task"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert done.returncode == 2, done.stderr
    assert "my_task.py:1" in done.stderr
    assert "driver" in done.stderr


TASKS = {
    "constructor": ("def __init__(self):\n        raise OSError('no data here')", "failed while it was built: OSError"),
    "prompts": ("def train_prompts(self):\n        raise OSError('no data here')", "train_prompts() of task 'mine'"),
    "heldout": ("def heldout_prompts(self):\n        return ['37?']", "heldout_prompts() of task 'mine' must give"),
}


@pytest.mark.parametrize("where", TASKS)
def test_a_task_that_fails_before_the_start_is_reported_as_the_users(where, tmp_path, capsys, monkeypatch):
    body, wanted = TASKS[where]
    (tmp_path / f"task_{where}.py").write_text(
        "from nemo_rl_core.rollout.largest_digit import LargestDigit\n"
        f"class Mine(LargestDigit):\n    name = 'mine'\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = dry_run(capsys, f"data.task=task_{where}:Mine")
    assert code == 2, err
    assert wanted in err


def test_a_folder_without_weights_is_refused_before_the_start(tmp_path, capsys):
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3", vocab_size=14, max_position_embeddings=16).save_pretrained(tmp_path)
    overrides = ["policy.hf_config=null", f"policy.model_name={tmp_path}", "policy.tokenizer.characters='0123456789?'"]
    code, _, err = dry_run(capsys, *overrides)
    assert code == 2
    assert "holds no weights" in err


def test_inheritance_and_overrides_reach_the_plan(capsys, tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text(yaml.safe_dump({"defaults": str(TINY), "grpo": {"max_num_steps": 7}}))
    code, out, _ = dry_run(capsys, "grpo.num_prompts_per_step=128", config=child)
    assert code == 0
    assert "7 of 1024 completions" in out


HELP = [["--help"], ["--version"], ["train", "--help"], ["backends", "--help"], ["env", "--help"]]


@pytest.mark.parametrize("arguments", [*HELP, ["env", "build", "--help"]])
def test_help_loads_neither_torch_nor_ray_nor_transformers(arguments):
    """F31, U2."""
    probe = (
        "import sys\nfrom nemo_rl_core.cli.app import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'nemo_rl_vllm'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout
