# SPDX-License-Identifier: Apache-2.0
"""Worker groups in a real Ray: starting, calling, failing, ending."""

import os
import signal
import threading
import time

import pytest
import ray

from nemo_rl_core.distributed.environments import Environment
from nemo_rl_core.distributed.futures import wait_all
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl_core.errors import (
    ClusterError,
    EnvironmentLookupError,
    GenerationError,
    RefitTimeoutError,
    StateError,
    WorkerError,
    WorkerTimeoutError,
)

WORKERS = "nemo_rl_core.testing.workers"


def start(cluster, worker="EchoWorker", *args, role="rollout", environment="base", **options):
    builder_kwargs = options.pop("kwargs", {})
    path = worker if ":" in worker else f"{WORKERS}:{worker}"
    return RayWorkerGroup(
        cluster,
        RayWorkerBuilder(path, *args, **builder_kwargs),
        name_prefix=options.pop("name_prefix", "test"),
        role=role,
        environment=environment,
        **{"start_timeout_s": 60.0, "call_timeout_s": 30.0, **options},
    )


def still_runs(future, rank: int) -> bool:
    """Whether the call on a rank has not been answered yet."""
    (ref,) = [call.ref for call in future.calls if call.worker.rank == rank]
    return not ray.wait([ref], timeout=0)[0]


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=3, name="pair") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def single(local_ray):
    with RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2, name="single") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(cluster):
    sharding = NamedSharding([[0], [1]], ["data_parallel", "tensor_parallel"])
    variables = {"MY_SETTING": "17"}
    with start(cluster, "EchoWorker", "hi", sharding=sharding, env_vars=variables, name_prefix="echo") as group:
        assert variables == {"MY_SETTING": "17"}
        yield group


def test_the_same_call_on_every_rank_gives_results_in_rank_order(echo):
    assert echo.run_all_workers_single_data("greet").get_results() == ["hi from 0", "hi from 1"]
    assert echo.run_all_workers_single_data("echo", x=[1, 2]).get_results() == [(0, {"x": [1, 2]}), (1, {"x": [1, 2]})]


def test_a_call_on_one_rank_reaches_that_rank_alone(echo):
    before = echo.run_all_workers_single_data("count").get_results()
    future = echo.run_single_worker_single_data("echo", worker_idx=1, x=5)
    assert future.called_ranks == (1,)
    assert future.get_results() == [(1, {"x": 5})]
    after = echo.run_all_workers_single_data("count").get_results()
    assert after == [before[0], before[1] + 1]
    with pytest.raises(IndexError, match="0 to 1, got 2"):
        echo.run_single_worker_single_data("echo", worker_idx=2)


def test_lists_give_each_rank_its_own_element(echo):
    results = echo.run_all_workers_multiple_data("echo", common_kwargs={"step": 3}, x=["a", "b"]).get_results()
    assert results == [(0, {"step": 3, "x": "a"}), (1, {"step": 3, "x": "b"})]


def test_sharded_data_goes_by_the_axes_and_replicated_outputs_come_once(echo):
    future = echo.run_all_workers_sharded_data(
        "echo", in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"], x=["a", "b"]
    )
    assert future.get_results() == [(0, {"x": "a"}), (1, {"x": "b"})]
    future = echo.run_all_workers_sharded_data(
        "echo", in_sharded_axes=[], replicate_on_axes=["data_parallel"], output_is_replicated=["data_parallel"], x="all"
    )
    assert future.called_ranks == (0, 1)
    assert future.return_ranks == (0,)
    assert future.get_results() == [(0, {"x": "all"})]


def test_workers_know_who_they_are(echo):
    first, second = echo.identities()
    assert [first["worker"], second["worker"]] == ["echo-0", "echo-1"]
    assert [first["pid"], second["pid"]] == [worker.pid for worker in echo.workers]
    assert first["pid"] != second["pid"]
    assert first["role"] == "rollout"
    assert first["versions"]["nemo-rl-core"]
    assert [report["role"] for report in echo.firewall_reports()] == ["rollout", "rollout"]


def test_every_rank_has_its_variables_and_the_callers(echo):
    """R28: settings reach all ranks, not the leader alone."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MY_SETTING", "NEMO_RL_ROLE", "PYTHONNOUSERSITE"]
    seen = echo.run_all_workers_single_data("variables", names=names).get_results()
    assert [tuple(variables.values()) for variables in seen] == [
        ("0", "2", "0", "0", "17", "rollout", "1"),
        ("1", "2", "1", "0", "17", "rollout", "1"),
    ]


def test_an_exception_in_one_rank_names_it_and_does_not_wait_for_the_others(echo):
    """U26."""
    future = echo.run_all_workers_single_data("fail_on", ranks=[1], then_sleep_s=6.0)
    with pytest.raises(WorkerError) as caught:
        future.get_results()
    assert still_runs(future, rank=0)
    error = caught.value
    assert (error.worker, error.rank, error.phase, error.cause_type) == ("echo-1", 1, "fail_on", "ValueError")
    assert error.host
    assert f"pid {echo.workers[1].pid}" in str(error)
    assert "asked to fail on rank 1" in str(error)
    assert "fail_on" in error.remote_traceback
    # The group lives on: the sibling ends its call and both answer again.
    assert echo.run_all_workers_single_data("greet").get_results() == ["hi from 0", "hi from 1"]


def test_two_failures_are_one_error_with_the_other_in_a_note(echo):
    with pytest.raises(WorkerError) as caught:
        echo.run_all_workers_single_data("fail_on", ranks=[0, 1]).get_results()
    other = 1 - caught.value.rank
    assert any(f"also failed: echo-{other}" in note for note in caught.value.__notes__)


def test_cores_own_errors_are_the_cause_with_their_fields(echo):
    with pytest.raises(WorkerError) as caught:
        echo.run_single_worker_single_data("raise_core_error", worker_idx=0).get_results()
    cause = caught.value.__cause__
    assert type(cause) is RefitTimeoutError
    assert (str(cause), cause.cause, cause.phase, cause.culprit) == (
        "nobody came",
        "rank 3 missing",
        "handshake",
        "generation rank 3",
    )


def test_a_result_that_cannot_leave_the_worker_is_an_error_of_that_rank(echo):
    with pytest.raises(WorkerError, match=r"echo-1 .*'unpicklable'.*TypeError.*generator"):
        echo.run_single_worker_single_data("unpicklable", worker_idx=1).get_results()


def test_a_deadline_names_the_ranks_that_are_missing(echo):
    with pytest.raises(WorkerTimeoutError) as caught:
        echo.run_all_workers_single_data("sleep", seconds=3.0, ranks=[1]).get_results(timeout_s=1.0)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rank == 1
    assert "1 of 2 calls" in str(caught.value)
    assert "echo-1 (rank 1" in str(caught.value)
    assert "echo-0" not in str(caught.value)
    assert echo.run_all_workers_single_data("sleep", seconds=0.0).get_results() == [0, 1]


def test_futures_of_two_groups_are_awaited_together_and_the_first_failure_wins(cluster, echo):
    """R43: one side's failure ends the wait for the other."""
    with start(cluster, "EchoWorker", "ho", name_prefix="other") as other:
        both = [echo.run_all_workers_single_data("greet"), other.run_single_worker_single_data("greet", worker_idx=1)]
        assert wait_all(both, 30.0) == [["hi from 0", "hi from 1"], ["ho from 1"]]
        slow = echo.run_all_workers_single_data("sleep", seconds=6.0)
        with pytest.raises(WorkerError, match="other-1 "):
            wait_all([slow, other.run_all_workers_single_data("fail_on", ranks=[1])], 30.0)
        assert still_runs(slow, rank=0)


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_constructor_that_raises_on_one_rank_ends_the_group_with_that_cause(cluster, tmp_path):
    """U25, U26: rank 0 waits as in a collective; the cause comes at once and no process stays."""
    arguments = {"failing_rank": 1, "wait_s": 120.0, "pid_folder": str(tmp_path)}
    with pytest.raises(WorkerError) as caught:
        start(cluster, "FailingWorker", kwargs=arguments, name_prefix="policy")
    error = caught.value
    assert (error.worker, error.rank, error.phase, error.cause_type) == ("policy-1", 1, "start", "RuntimeError")
    assert "no device for rank 1" in str(error)
    for rank in ("0", "1"):
        assert gone(int((tmp_path / rank).read_text()))


def test_a_constructor_that_hangs_ends_at_the_deadline_and_is_named(cluster):
    """U25: ready means that every constructor returned."""
    with pytest.raises(WorkerTimeoutError) as caught:
        start(cluster, "HangingWorker", kwargs={"hanging_rank": 1, "wait_s": 120.0}, start_timeout_s=20.0)
    assert (caught.value.rank, caught.value.phase) == (1, "start")
    assert "test-0" not in str(caught.value)


def test_a_worker_killed_during_a_call_is_named_with_host_pid_and_phase(cluster):
    """R59, R43."""
    with start(cluster, name_prefix="victim") as group:
        future = group.run_all_workers_single_data("sleep", seconds=60.0)
        threading.Timer(1.0, os.kill, (group.workers[0].pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerError) as caught:
            future.get_results()
        error = caught.value
        assert (error.worker, error.rank, error.phase) == ("victim-0", 0, "sleep")
        assert error.host == group.workers[0].host
        assert f"pid {group.workers[0].pid}) died" in str(error)
        # A call after the death says so at once, it does not wait.
        with pytest.raises(WorkerError, match="died"):
            group.run_single_worker_single_data("greet", worker_idx=0).get_results()
        assert group.shutdown(timeout_s=5.0) is False


def test_a_process_group_is_built_on_the_kept_store_and_a_death_is_the_first_cause(cluster):
    """U21, R24, R25: rank 0's shell keeps the port. The peer's broken connection is a note, not the cause."""
    with start(cluster, "GlooWorker", role="train", name_prefix="policy") as group:
        assert group.run_all_workers_single_data("total").get_results() == [3, 3]
        with pytest.raises(WorkerError) as caught:
            group.run_all_workers_single_data("total_unless_killed", victim=1).get_results()
        assert (caught.value.rank, caught.value.phase) == (1, "total_unless_killed")
        assert "died" in str(caught.value)


def test_code_that_knows_only_the_environment_variables_joins_the_same_store(cluster):
    """U21: torch's `env://` becomes a client of the kept listener and binds nothing."""
    with start(cluster, "RendezvousWorker", role="train") as group:
        assert group.run_all_workers_single_data("total").get_results() == [3, 3]


def test_an_explicit_interpreter_is_really_used(single, other_interpreter):
    """U10, R19."""
    environment = Environment(name="own", kind="interpreter", python=str(other_interpreter))
    with start(single, environment=environment) as group:
        (process,) = group.run_all_workers_single_data("process").get_results()
        (identity,) = group.identities()
        (seen,) = group.run_all_workers_single_data("variables", names=["VIRTUAL_ENV", "PATH"]).get_results()
    assert process["interpreter"] == identity["interpreter"] == str(other_interpreter)
    assert seen["VIRTUAL_ENV"] == str(other_interpreter.parent.parent)
    assert seen["PATH"].startswith(str(other_interpreter.parent))


def test_workers_of_two_slots_see_two_devices_each_and_are_counted_as_one(local_ray):
    with RayVirtualCluster([2], use_gpus=True, slots_per_bundle=2) as pair, start(pair) as group:
        names = ["CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE"]
        seen = group.run_all_workers_single_data("variables", names=names).get_results()
    assert [row["LOCAL_RANK"] for row in seen] == ["0", "1"]
    assert [row["CUDA_VISIBLE_DEVICES"] for row in seen] == ["0,1", "2,3"]
    assert {row["WORLD_SIZE"] for row in seen} == {"2"}


def test_an_interpreter_without_core_is_refused_by_name_before_any_worker_starts(cluster, interpreter_without_core):
    """R15, R4: no start loop, one error."""
    with pytest.raises(ClusterError, match="no nemo-rl-core"):
        start(cluster, environment=str(interpreter_without_core))


def test_an_interpreter_that_is_not_on_the_node_is_refused_with_the_node(cluster, tmp_path):
    with pytest.raises(ClusterError, match=r"on node .*does not exist"):
        start(cluster, environment=str(tmp_path / "bin" / "python"))


def test_an_actor_without_environment_is_refused_before_anything_starts(cluster):
    """R61."""
    with pytest.raises(EnvironmentLookupError):
        start(cluster, environment=None)


def test_pythonpath_of_whoever_started_ray_stays_out_of_workers(cluster, echo):
    (seen, _) = echo.run_all_workers_single_data("variables", names=["PYTHONPATH"]).get_results()
    assert not seen["PYTHONPATH"]


def test_an_engine_import_in_a_train_worker_is_refused_and_the_culprit_named(single, only_workers_see):
    """The control is the environment that composes the engine in: it lifts the rule, and the same class starts."""
    options = {"role": "train", "env_vars": {"PYTHONPATH": str(only_workers_see)}, "process_group": False}
    with pytest.raises(WorkerError) as caught:
        start(single, "sneaky_worker:SneakyWorker", environment="fsdp", **options)
    assert (caught.value.phase, caught.value.cause_type) == ("import", "ForbiddenImportError")
    for text in ("vllm", "sneaky_worker.py:1", "train"):
        assert text in str(caught.value)
    with start(single, "sneaky_worker:SneakyWorker", environment="fsdp+vllm", **options) as group:
        assert group.run_all_workers_single_data("version").get_results() == ["0.0.fake"]


def test_nothing_of_the_workers_environment_is_needed_to_read_its_failures(single, only_workers_see):
    with start(
        single,
        "foreign_worker:ForeignWorker",
        role="generation",
        env_vars={"PYTHONPATH": str(only_workers_see)},
    ) as group:
        with pytest.raises(ModuleNotFoundError):
            __import__("foreign_worker")
        with pytest.raises(WorkerError, match="EngineDeadError: engine x ended with 9"):
            group.run_all_workers_single_data("fail").get_results()
        with pytest.raises(WorkerError) as caught:
            group.run_all_workers_single_data("fail_as_adapter").get_results()
        assert caught.value.cause_type == "AdapterError"
        assert type(caught.value.__cause__) is GenerationError
        assert caught.value.__cause__.type_name == "x.OutOfMemory"
        with pytest.raises(WorkerError, match="foreign_worker"):
            group.run_all_workers_single_data("give").get_results()
        assert group.run_all_workers_single_data("ok").get_results() == [1]


def test_a_second_run_in_the_same_ray_finds_no_name_taken_and_a_closed_group_says_so(single):
    """U27."""
    with start(single, name_prefix="again") as first:
        with start(single, name_prefix="again") as second:
            assert first.workers[0].name == second.workers[0].name
            pid = second.workers[0].pid
        with pytest.raises(StateError, match="shut down"):
            second.run_all_workers_single_data("greet")
        assert gone(pid)
        with pytest.raises(StateError, match="without a sharding"):
            first.run_all_workers_sharded_data("echo", in_sharded_axes=[])
        assert first.shutdown(cleanup_method="greet") is True
        assert first.shutdown() is True


def test_a_sharding_that_is_not_the_clusters_is_refused(cluster):
    with pytest.raises(ValueError, match="0 to 1"):
        start(cluster, sharding=NamedSharding([0, 1, 2], ["data_parallel"]))


def test_colocated_groups_share_devices_and_each_worker_sees_its_own(local_ray):
    with RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=2) as shared:
        devices = [bundle.gpu_id for bundle in shared.get_bundles()]
        with start(shared) as first, start(shared) as second:
            for group in (first, second):
                seen = group.run_all_workers_single_data("variables", names=["CUDA_VISIBLE_DEVICES"]).get_results()
                assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen] == devices
