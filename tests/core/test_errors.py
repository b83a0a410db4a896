# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest

from nemo_rl_core import errors
from nemo_rl_core.errors import GenerationError, NemoRLError, RefitTimeoutError, WorkerError

ALL = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]


@pytest.mark.parametrize("kind", ALL)
def test_each_error_is_of_the_one_root_and_survives_a_pickle_round_trip(kind):
    error = kind("what broke, and the way out")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(error, NemoRLError)
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not NemoRLError])
def test_each_error_is_also_the_standard_error_that_it_specialises(kind):
    assert any(
        base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in kind.__mro__
    )


def test_fields_survive_the_round_trip_too():
    worker = WorkerError("m", worker="policy-1", rank=1, host="h", phase="train", cause_type="KeyError")
    refit = RefitTimeoutError("m", cause="silent", phase="transfer", culprit="generation rank 1")
    engine = GenerationError("m", type_name="vllm.Broken", remote_traceback="Traceback ...")
    for error in (worker, refit, engine):
        again = pickle.loads(pickle.dumps(error))
        assert vars(again) == vars(error)
        assert vars(error)


def test_the_text_of_an_exception_is_told_also_where_making_it_fails():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert errors.text_of(KeyError("k")) == "'k'"
    assert errors.text_of(MuteError()) == "<MuteError whose text cannot be made: RuntimeError>"
