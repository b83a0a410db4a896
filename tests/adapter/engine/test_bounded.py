# SPDX-License-Identifier: Apache-2.0
"""Calls into an engine's processes: real ones, which are killed or do not answer."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from nemo_rl_vllm.bounded import EngineGoneError, EngineProcesses, EngineSilentError


@pytest.fixture
def engine():
    """Processes with one child that does nothing, as an idle engine."""
    processes = EngineProcesses()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="idle-engine")
    child.start()
    processes.started()
    yield processes, child
    if child.is_alive():
        child.kill()
    child.join(30)


def test_a_call_gives_its_result_or_raises_what_it_raised(engine):
    processes, _ = engine
    assert processes.call(lambda: 7) == 7
    with pytest.raises(KeyError, match="no such request"):
        processes.call(lambda: {}["no such request"])
    assert processes.call(lambda: None) is None


def test_a_call_ends_when_a_process_of_the_engine_dies_and_so_does_every_later_one(engine):
    """U3, U30: vLLM itself would wait for its answer without end."""
    processes, child = engine
    waiting = threading.Event()
    threading.Timer(0.5, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineGoneError, match=rf"idle-engine \(pid {child.pid}\) ended with exit code -9"):
        processes.call(waiting.wait, limit_s=60)
    with pytest.raises(EngineGoneError, match="exit code -9"):
        processes.call(lambda: 7)
    waiting.set()


def test_what_a_dying_engine_says_itself_comes_before_its_exit_code(engine):
    processes, child = engine

    def call() -> None:
        child.join()
        time.sleep(0.5)  # its words travel for a while after its death
        raise ConnectionError("the engine is out of memory")

    threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(ConnectionError, match="out of memory"):
        processes.call(call)


def test_a_call_ends_at_its_limit_and_none_is_made_after_it(engine):
    """U51: The engine is in an unknown state then; its late answer must not be taken for that of another call."""
    processes, _ = engine
    waiting = threading.Event()
    with pytest.raises(EngineSilentError, match="did not answer within"):
        processes.call(waiting.wait, limit_s=0.6)
    with pytest.raises(EngineGoneError, match="did not answer within"):
        processes.call(lambda: 7)
    waiting.set()


@pytest.fixture(params=[False, True], ids=["grandchildren", "children"])
def ranks(request):
    """Two processes that are watched by their ids, as grandchildren are, or as children too."""
    before = EngineProcesses()
    children = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for child in children:
        child.start()
    if request.param:
        before.started()
    before.watch({rank: child.pid for rank, child in enumerate(children)})
    yield before, children
    before.close()
    before.close()
    for child in children:
        child.kill()
        child.join(30)


@pytest.mark.parametrize("first", [0, 1])
def test_a_call_names_the_rank_that_ended_first_also_where_the_engine_ends_the_others_after_it(ranks, first):
    """U3, U30: a rank may be a child of the engine's own process."""
    processes, children = ranks
    waiting = threading.Event()
    assert processes.lost == ("", -1)
    threading.Timer(0.3, os.kill, (children[first].pid, signal.SIGKILL)).start()
    with pytest.raises(EngineGoneError, match=rf"engine rank {first}\b.* \(pid {children[first].pid}\) (has )?ended"):
        processes.call(waiting.wait, limit_s=60)
    children[1 - first].kill()
    children[1 - first].join(30)
    with pytest.raises(EngineGoneError, match=f"engine rank {first}"):
        processes.call(lambda: 7)
    assert processes.lost[1] == first
    waiting.set()


def test_a_rank_that_has_ended_before_it_is_watched_is_an_error_at_once():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join(30)
    processes = EngineProcesses()
    with pytest.raises(EngineGoneError, match=f"engine rank 3 .pid {child.pid}. has ended"):
        processes.watch({3: child.pid})
    processes.close()


def test_this_process_is_not_watched_where_it_is_a_rank_itself():
    processes = EngineProcesses()
    processes.watch({0: os.getpid()})
    assert processes.call(lambda: 7) == 7
    processes.close()


def test_processes_that_were_there_before_the_engine_do_not_count():
    stranger = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    stranger.start()
    processes = EngineProcesses()
    processes.started()
    stranger.kill()
    stranger.join(30)
    assert processes.call(lambda: 7) == 7
