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
    """The engine is in an unknown state then; its late answer must not be taken for that of another call."""
    processes, _ = engine
    waiting = threading.Event()
    with pytest.raises(EngineSilentError, match="did not answer within"):
        processes.call(waiting.wait, limit_s=0.6)
    with pytest.raises(EngineGoneError, match="did not answer within"):
        processes.call(lambda: 7)
    waiting.set()


def test_processes_that_were_there_before_the_engine_do_not_count():
    stranger = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    stranger.start()
    processes = EngineProcesses()
    processes.started()
    stranger.kill()
    stranger.join(30)
    assert processes.call(lambda: 7) == 7
