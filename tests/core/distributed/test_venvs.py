# SPDX-License-Identifier: Apache-2.0
"""Environments that are built: real uv, tiny wheels made here, builders that are killed, stopped and raced."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest
import ray

from nemo_rl_core.distributed.environments import (
    Environment,
    InterpreterReport,
    probe_interpreter,
    resolve_environment,
)
from nemo_rl_core.distributed.own_sources import own_source, pack_wheel
from nemo_rl_core.distributed.venv_builder import BuildOptions, build_venv, remove_venv, worker_probe
from nemo_rl_core.distributed.venvs import (
    STAMP,
    Venv,
    VenvContents,
    VenvState,
    contents_of,
    settle,
    venv_root,
)
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl_core.errors import ConfigError, EnvironmentBuildError, EnvironmentLookupError
from nemo_rl_core.protocols.environments import EnvironmentRecipe


def quiet(_line: str) -> None:
    """Take a line of progress and show nothing."""


QUIET = BuildOptions(timeout_s=120, tell=quiet)


def probe_tiny(python: Path) -> InterpreterReport:
    report = probe_interpreter(python, deadline_s=60, imports=("tiny_package",))
    assert report.failed_imports == {}
    return report


def tiny_wheel(folder: Path, version: str = "1.0") -> Path:
    """A wheel with one module and one console script, made without any tool."""
    path = folder / f"tiny_package-{version}-py3-none-any.whl"
    info = f"tiny_package-{version}.dist-info"
    files = {
        "tiny_package.py": f"VERSION = {version!r}\n\n\ndef main():\n    print('tiny', VERSION)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-package\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntiny = tiny_package:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


@pytest.fixture
def tiny(tmp_path) -> Venv:
    wheel = tiny_wheel(tmp_path)
    contents = VenvContents(name="tiny", requirements=(f"tiny-package @ {wheel.as_uri()}",))
    return Venv(root=tmp_path / "venvs", contents=contents)


@dataclass(frozen=True)
class Slow:
    """An environment whose one package takes until somebody says so to build; its build notes what it sees."""

    venv: Venv
    folder: Path

    def builder(self) -> "subprocess.Popen[str]":
        """A process that builds it."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[3])\n"
            "from tests.core.distributed.test_venvs import build_slow; build_slow(*sys.argv[1:3])\n"
        )
        root = Path(__file__).parents[3]
        command = [sys.executable, "-c", code, str(self.venv.root), str(self.folder), str(root)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def until_begun(self, process: "subprocess.Popen[str]") -> dict[str, str]:
        """Wait until the package is being built and return the variables of its build."""
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            if (self.folder / "begun.json").exists():
                return json.loads((self.folder / "begun.json").read_text())
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError("the build did not begin within 60 s")

    def let_go(self) -> None:
        (self.folder / "go").touch()


_BACKEND = """\
import json, os, pathlib, shutil, time
HERE = pathlib.Path(__file__).parent.parent
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    (HERE / "begun.new").write_text(json.dumps({**os.environ, "PID": str(os.getpid())}))
    (HERE / "begun.new").rename(HERE / "begun.json")
    for _ in range(1200):
        if (HERE / "go").exists():
            break
        time.sleep(0.05)
    (wheel,) = HERE.glob("*.whl")
    shutil.copy(wheel, wheel_directory)
    return wheel.name
"""


def slow_venv(root: Path, folder: Path) -> Venv:
    requirement = f"tiny-package @ {(folder / 'project').as_uri()}"
    return Venv(root=root, contents=VenvContents(name="slow", requirements=(requirement,)))


def build_slow(root: str, folder: str) -> None:
    build_venv(slow_venv(Path(root), Path(folder)), probe_tiny, BuildOptions(timeout_s=100))


@pytest.fixture
def slow(tmp_path, monkeypatch) -> Slow:
    # A cache of its own: what uv has built once it would not build again.
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv_cache"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "backend.py").write_text(_BACKEND)
    (tmp_path / "project" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny-package"\nversion = "1.0"\n'
    )
    tiny_wheel(tmp_path)
    return Slow(venv=slow_venv(tmp_path / "venvs", tmp_path), folder=tmp_path)


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_built_environment_is_ready_and_its_stamp_says_what_it_holds(tiny):
    assert tiny.state is VenvState.ABSENT
    stamp = build_venv(tiny, probe_tiny, QUIET)
    assert tiny.state is VenvState.READY
    assert stamp["packages"] == {"tiny-package": "1.0"}
    assert stamp["contents"] == tiny.contents.as_dict()
    assert tiny.ready_python() == tiny.folder / "bin" / "python"
    # It was built elsewhere: a script that named that place would not start.
    done = subprocess.run([tiny.folder / "bin" / "tiny"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "tiny 1.0\n", done.stderr
    assert [path.name for path in tiny.root.iterdir() if path.name.startswith(".")] == []


def test_a_ready_environment_is_not_built_again_unless_that_is_asked_for(tiny):
    build_venv(tiny, probe_tiny, QUIET)
    before = (tiny.folder / STAMP).stat().st_ino
    build_venv(tiny, probe_tiny, QUIET)
    assert (tiny.folder / STAMP).stat().st_ino == before
    (tiny.folder / "left").touch()
    build_venv(tiny, probe_tiny, replace(QUIET, rebuild=True))
    assert not (tiny.folder / "left").exists()


def test_the_key_counts_everything_that_is_held_and_not_the_order():
    """U12, R14."""
    source = own_source("nemo-rl-core")
    base = VenvContents(name="x", requirements=("a==1", "b"), overrides=("c==1",), sources=(source,))
    others = [
        replace(base, requirements=("a==2", "b")),
        replace(base, requirements=("a==1", "b", "extra")),
        replace(base, overrides=()),
        replace(base, sources=()),
        replace(base, sources=(replace(source, identity="other"),)),
        replace(base, sources=(replace(source, version="9.9"),)),
        replace(base, python="CPython 3.12.0"),
        replace(base, platform="linux-aarch64"),
    ]
    assert len({contents.key for contents in [base, *others]}) == len(others) + 1
    assert replace(base, requirements=("b", "a==1")).key == base.key


def spoil_no_stamp(venv: Venv) -> None:
    (venv.folder / STAMP).unlink()


def spoil_torn_stamp(venv: Venv) -> None:
    text = (venv.folder / STAMP).read_text()
    (venv.folder / STAMP).write_text(text[: len(text) // 2])


def spoil_other_contents(venv: Venv) -> None:
    stamp = json.loads((venv.folder / STAMP).read_text())
    stamp["contents"]["overrides"] = ["torch==1.0"]
    (venv.folder / STAMP).write_text(json.dumps(stamp))


def spoil_no_interpreter(venv: Venv) -> None:
    venv.python.unlink()
    venv.python.symlink_to("/no/such/python")


@pytest.mark.parametrize("spoil", [spoil_no_stamp, spoil_torn_stamp, spoil_other_contents, spoil_no_interpreter])
def test_what_is_not_whole_is_refused_in_one_line_and_built_anew(tiny, spoil):
    """U11, U13, R3: an interpreter and packages that are there prove nothing."""
    build_venv(tiny, probe_tiny, QUIET)
    spoil(tiny)
    assert tiny.state is VenvState.HALF_BUILT
    with pytest.raises(EnvironmentLookupError, match=r"half-built: .* no stamp") as caught:
        tiny.ready_python()
    assert str(caught.value).endswith("run `nemo-rl env build tiny`")
    assert "\n" not in str(caught.value)
    build_venv(tiny, probe_tiny, QUIET)
    assert tiny.state is VenvState.READY


def test_other_contents_make_the_old_one_out_of_date_and_both_are_removed(tiny, tmp_path):
    """U12: an upgrade does not get the old packages."""
    build_venv(tiny, probe_tiny, QUIET)
    newer = tiny_wheel(tmp_path, "2.0")
    upgraded = replace(tiny, contents=replace(tiny.contents, requirements=(f"tiny-package @ {newer.as_uri()}",)))
    assert upgraded.state is VenvState.STALE
    with pytest.raises(EnvironmentLookupError, match="out of date: it was built for other requirements"):
        upgraded.ready_python()
    assert build_venv(upgraded, probe_tiny, QUIET)["packages"] == {"tiny-package": "2.0"}
    assert tiny.state is VenvState.READY
    assert remove_venv(upgraded, tell=quiet) == 2
    assert (tiny.state, upgraded.state) == (VenvState.ABSENT, VenvState.ABSENT)


def test_a_killed_builder_leaves_nothing_that_counts_and_nothing_to_wait_for(slow):
    """U11, U14: the marker of a dead owner is not waited for."""
    process = slow.builder()
    pid = int(slow.until_begun(process)["PID"])
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert slow.venv.state is VenvState.ABSENT
    assert slow.venv.builder is None
    slow.let_go()
    assert build_venv(slow.venv, probe_tiny, replace(QUIET, timeout_s=60))["packages"] == {"tiny-package": "1.0"}
    assert gone(pid)


def test_an_interrupted_builder_takes_everything_with_it(slow):
    """Ctrl-C reaches the builder alone, since uv has a session of its own."""
    process = slow.builder()
    pid = int(slow.until_begun(process)["PID"])
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert gone(pid)
    assert [path.name for path in slow.venv.root.iterdir() if path.is_dir()] == []
    assert slow.venv.builder is None


def test_who_waits_learns_for_whom_and_not_longer_than_its_deadline(slow):
    """U13, U14: the second one gets the first one's environment, never a folder in which packages still arrive."""
    first = slow.builder()
    slow.until_begun(first)
    assert slow.venv.state is VenvState.BUILDING
    with pytest.raises(EnvironmentLookupError, match=f"being built by process {first.pid} on "):
        slow.venv.ready_python()
    told: list[str] = []
    with pytest.raises(EnvironmentBuildError, match=rf"not free within 0.5 s: process {first.pid} on .* since"):
        build_venv(slow.venv, probe_tiny, BuildOptions(timeout_s=0.5, tell=told.append))
    assert told == [line for line in told if f"process {first.pid}" in line] != []
    with pytest.raises(EnvironmentBuildError, match=f"process {first.pid}"):
        remove_venv(slow.venv, tell=told.append)
    second = slow.builder()
    slow.let_go()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert slow.venv.state is VenvState.READY
    assert first.stdout is not None
    assert second.stdout is not None
    outputs = (first.stdout.read(), second.stdout.read())
    assert sum("installing" in output for output in outputs) == 1, outputs


def test_a_build_that_passes_its_deadline_is_ended_with_its_children(slow):
    """R20: the time is bound."""
    with pytest.raises(EnvironmentBuildError, match="did not end within its deadline"):
        build_venv(slow.venv, probe_tiny, replace(QUIET, timeout_s=5))
    assert gone(int(json.loads((slow.folder / "begun.json").read_text())["PID"]))
    assert slow.venv.state is VenvState.ABSENT


def test_nothing_of_the_users_python_reaches_a_build(slow, monkeypatch, tmp_path):
    """R11, U15: neither PYTHONPATH nor user site, and no override that the key does not know."""
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "UV_OVERRIDE"):
        monkeypatch.setenv(name, str(tmp_path / "theirs"))
    slow.let_go()
    build_venv(slow.venv, probe_tiny, QUIET)
    seen = json.loads((slow.folder / "begun.json").read_text())
    assert seen["PYTHONNOUSERSITE"] == "1"
    assert "theirs" not in "".join(seen.get(name, "") for name in ("PYTHONPATH", "VIRTUAL_ENV", "UV_OVERRIDE"))


def test_a_failing_build_quotes_the_end_of_its_log_and_leaves_no_folder(tiny, tmp_path):
    """R20, R12."""
    contents = replace(tiny.contents, requirements=(f"tiny-package @ {(tmp_path / 'gone.whl').as_uri()}",))
    venv = replace(tiny, contents=contents)
    with pytest.raises(EnvironmentBuildError, match=r"gone\.whl") as caught:
        build_venv(venv, probe_tiny, QUIET)
    assert str(venv.log) in str(caught.value)
    assert "pip install" in venv.log.read_text()
    assert [path.name for path in venv.root.iterdir() if path.is_dir()] == []
    assert venv.builder is None


def test_an_environment_that_does_not_serve_is_never_ready(tiny):
    """R15: what is imported on trial has to be there, and core, Ray and Python have to be the driver's."""
    recipe = EnvironmentRecipe(requirements=tiny.contents.requirements)
    with pytest.raises(EnvironmentBuildError, match=r"does not serve.*no nemo-rl-core"):
        build_venv(tiny, worker_probe(recipe), QUIET)
    assert tiny.state is VenvState.ABSENT


def test_without_uv_the_way_out_is_one_line(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentBuildError, match="pip install uv"):
        build_venv(tiny, probe_tiny, QUIET)


def test_a_folder_that_cannot_be_written_is_refused_with_the_variable(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentBuildError, match="NEMO_RL_VENV_DIR"):
        build_venv(replace(tiny, root=tmp_path / "file" / "venvs"), probe_tiny, QUIET)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "../x"}, {"name": ""}, {"requirements": ("--index-url=x",)}, {"overrides": ("torch = 2",)}],
)
def test_contents_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        VenvContents(**{"name": "x", "requirements": ("a",), **wrong})


def test_environments_lie_where_the_variable_says_else_in_the_users_cache():
    assert venv_root({"NEMO_RL_VENV_DIR": "/data/venvs"}) == Path("/data/venvs")
    assert venv_root({"XDG_CACHE_HOME": "/data/cache"}) == Path("/data/cache/nemo_rl/venvs")
    assert venv_root({}) == Path.home() / ".cache" / "nemo_rl" / "venvs"
    site = Path(ray.__file__).parents[1] / "venvs"
    for wrong in ("venvs", str(site)):
        with pytest.raises(ConfigError, match="NEMO_RL_VENV_DIR"):
            venv_root({"NEMO_RL_VENV_DIR": wrong})


def test_an_editable_distribution_stays_one_and_its_project_file_counts(tmp_path):
    source = own_source("nemo-rl-core")
    assert source.folder is not None
    assert (source.folder / "pyproject.toml").is_file()
    with pytest.raises(EnvironmentBuildError, match="no-such-distribution"):
        own_source("no-such-distribution")


def test_a_distribution_that_was_installed_from_a_wheel_is_packed_as_it_is(tmp_path):
    """Whatever index or file it came from: nothing of our own is asked from an index."""
    source = own_source("packaging")
    assert source.folder is None
    wheel = pack_wheel("packaging", tmp_path)
    requirement = f"packaging @ {wheel.as_uri()}"
    venv = Venv(root=tmp_path / "venvs", contents=VenvContents(name="packed", requirements=(requirement,)))
    build_venv(venv, lambda python: probe_interpreter(python, deadline_s=60, imports=()), QUIET)
    (site,) = venv.folder.glob("lib/python*/site-packages")
    mine = {str(f): f.hash.value for f in metadata.files("packaging") or [] if f.hash and f.suffix == ".py"}
    (theirs_dist,) = metadata.distributions(path=[str(site)], name="packaging")
    theirs = {str(f): f.hash.value for f in theirs_dist.files or [] if f.hash and f.suffix == ".py"}
    assert theirs == mine
    assert theirs_dist.version == source.version


def declare(folder: Path, monkeypatch, body: str) -> None:
    """Install a distribution that declares the environment `tiny`, by metadata and a module."""
    info = folder / "their_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nemo_rl_core.environments]\ntiny = their_env:TINY\n")
    (folder / "their_env.py").write_text(
        f"from nemo_rl_core.protocols.environments import EnvironmentRecipe\nTINY = {body}\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_env", raising=False)
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(folder / "venvs"))


def test_a_declared_environment_that_is_not_built_names_the_command_and_a_variable_replaces_it(tmp_path, monkeypatch):
    """U10, U11: before any worker starts."""
    declare(tmp_path, monkeypatch, "EnvironmentRecipe(requirements=('tiny-package==1.0',))")
    named = resolve_environment("x.Y", config="tiny", environ={})
    assert named == Environment(name="tiny", kind="requirements")
    with pytest.raises(EnvironmentLookupError, match=r"'tiny' is not built on .*: run `nemo-rl env build tiny`"):
        settle(named)
    replaced = resolve_environment("x.Y", config="tiny", environ={"NEMO_RL_PY_EXECUTABLE_TINY": "/opt/t/python"})
    assert settle(replaced) == Environment(name="tiny", kind="interpreter", python="/opt/t/python")
    assert "their_env" not in sys.modules or "tiny" in sys.modules["their_env"].__dict__["TINY"].requirements[0]


def test_naming_an_environment_imports_nothing_of_who_declares_it(tmp_path, monkeypatch):
    declare(tmp_path, monkeypatch, "1 / 0")
    assert resolve_environment("x.Y", config="tiny", environ={}).kind == "requirements"
    assert "their_env" not in sys.modules


def test_the_drivers_ray_and_its_own_core_are_part_of_what_workers_get():
    """R17: an upgrade of Ray makes another key."""
    contents = contents_of("x", EnvironmentRecipe(requirements=("torch",)))
    assert f"ray=={ray.__version__}" in contents.requirements
    (core,) = contents.sources
    assert (core.distribution, core.version) == ("nemo-rl-core", metadata.version("nemo-rl-core"))


def test_a_worker_of_ours_starts_in_a_built_environment(local_ray, tmp_path):
    """R15, R19, U17: with the driver's core, and with its own tools and packages."""
    recipe = EnvironmentRecipe(requirements=(f"torch=={metadata.version('torch')}",))
    venv = Venv(root=tmp_path, contents=contents_of("worker", recipe))
    stamp = build_venv(venv, worker_probe(recipe), QUIET)
    assert {"ray", "torch", "nemo-rl-core"} <= set(stamp["packages"])
    assert "vllm" not in stamp["packages"]
    environment = Environment(name="worker", kind="interpreter", python=str(venv.ready_python()))
    with RayVirtualCluster([1], use_gpus=False, name="built") as cluster:
        options = {"name_prefix": "built", "role": "generation", "start_timeout_s": 120.0}
        builder = RayWorkerBuilder("nemo_rl_core.testing.workers:EchoWorker", "hi")
        with RayWorkerGroup(cluster, builder, environment=environment, **options) as group:
            assert group.run_all_workers_single_data("greet").get_results() == ["hi from 0"]
            (identity,) = group.identities()
            (seen,) = group.run_all_workers_single_data("variables", names=["VIRTUAL_ENV", "PATH"]).get_results()
    assert identity["interpreter"] == str(venv.python)
    assert identity["role"] == "generation"
    assert seen["VIRTUAL_ENV"] == str(venv.folder)
    assert seen["PATH"].startswith(str(venv.folder / "bin"))
