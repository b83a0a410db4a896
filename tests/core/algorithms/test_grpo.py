# SPDX-License-Identifier: Apache-2.0
"""The loop in one process: real workers, real refits, no Ray."""

import warnings

import pytest
import torch

from nemo_rl_core.algorithms.mismatch import MismatchAlarm, logprob_gap
from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import DataError, RewardError, StateError
from nemo_rl_core.observability.timers import Timer
from nemo_rl_core.protocols.generation import GenerationRequest
from nemo_rl_core.rollout.largest_digit import LargestDigit
from tests.core.algorithms.local_run import local_run, small_config

BOUNDS = {"float32": 1.01, "bfloat16": 1.05}


class BadReward(LargestDigit):
    """Raises for every prompt that starts with an odd digit."""

    name = "bad_reward"

    def reward(self, prompt, completion):
        if int(prompt.text[0]) % 2:
            raise ValueError("cannot score this")
        return float(len(completion))


def test_each_step_logs_the_names_that_users_read_and_step_zero_says_where_it_started():
    with local_run(small_config()) as (grpo, steps):
        grpo.train()
    assert [step for step, _ in steps] == [0, 1, 2, 3]
    names = {
        "reward/mean",
        "train/loss",
        "train/grad_norm",
        "train/token_mult_prob_error",
        "train/logprob_gap_p999",
        "train/kl_penalty",
        "refit/seconds",
        "refit/bytes",
        "refit/version",
        "timing/generation",
        "timing/policy_training",
        "timing/tokens_per_second",
        "timing/total_step_time",
    }
    for step, metrics in steps[1:]:
        assert names <= set(metrics), step
    assert {"reward/mean", "validation/accuracy", "refit/version"} <= set(steps[0][1])
    assert "train/loss" not in steps[0][1]
    assert ["validation/accuracy" in m for _, m in steps] == [True, False, True, True]


def test_samples_carry_the_version_of_the_refit_before_them_and_every_refit_moves_new_weights():
    """R42: the version is the engine's word."""
    with local_run(small_config(), num_replicas=2) as (grpo, steps):
        grpo.train()
        assert set(grpo.generation.weights_digests()) == {grpo.policy.weights_digest()}
    assert [m["refit/version"] for _, m in steps] == [0, 1, 2, 3]
    assert [m["generation/weight_version"] for _, m in steps] == [0, 0, 1, 2]
    digests = [m["refit/digest"] for _, m in steps]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("precision", BOUNDS)
def test_right_after_a_refit_both_sides_agree_and_after_a_skipped_one_metric_version_and_digest_say_so(precision):
    config = small_config(policy__precision=precision, policy__optimizer__kwargs={"lr": 0.02})
    bound = BOUNDS[precision]
    with local_run(config) as (grpo, _):
        grpo.refit(Timer())
        healthy = grpo.optimize(grpo.prepare(grpo.roll_out(Timer()), Timer()), Timer())
        assert healthy["token_mult_prob_error"] < bound

        # The refit that belongs here is skipped: the policy has moved on, the engine has not.
        stale_rollout = grpo.roll_out(Timer())
        stale = grpo.optimize(grpo.prepare(stale_rollout, Timer()), Timer())
        assert stale["token_mult_prob_error"] > bound
        assert stale_rollout.weight_versions == (0,)
        assert grpo.refitter.next_version == 1
        assert grpo.generation.weights_digests() != [grpo.policy.weights_digest()]

        refit = grpo.refit(Timer())
        fresh_rollout = grpo.roll_out(Timer())
        fresh = grpo.optimize(grpo.prepare(fresh_rollout, Timer()), Timer())
        assert fresh_rollout.weight_versions == (refit.version,)
        assert fresh["token_mult_prob_error"] < bound


def test_at_learning_rate_zero_nothing_moves():
    config = small_config(policy__optimizer__kwargs={"lr": 0.0, "weight_decay": 0.0}, grpo__max_num_steps=2)
    with local_run(config) as (grpo, steps):
        grpo.train()
    assert len({m["refit/digest"] for _, m in steps}) == 1
    assert steps[-1][1]["train/grad_norm"] > 0
    assert steps[-1][1]["train/kl_penalty"] == pytest.approx(0, abs=1e-9)
    assert len({m["validation/accuracy"] for _, m in steps if "validation/accuracy" in m}) == 1


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    digests = []
    for seed in (1, 1, 2):
        with local_run(small_config(grpo__seed=seed, grpo__max_num_steps=2)) as (grpo, steps):
            grpo.train()
        digests.append([(m["refit/digest"], m["reward/mean"]) for _, m in steps])
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_several_optimizer_steps_of_one_rollout_start_from_the_logprobs_before_the_first():
    config = small_config(policy__train_global_batch_size=8, policy__train_micro_batch_size=8, grpo__max_num_steps=1)
    assert config.optimizer_steps_per_rollout == 4
    with local_run(config) as (grpo, steps):
        grpo.train()
    # At the first of them the ratio is exactly 1; later ones have moved away from the old policy.
    assert steps[1][1]["train/probs_ratio"] != pytest.approx(1.0, abs=1e-6)


def test_a_reward_that_raises_stops_the_run_or_drops_the_sample_as_configured():
    task = f"{__name__}:BadReward"
    with local_run(small_config(data__task=task)) as (grpo, _), pytest.raises(RewardError, match="cannot score this"):
        grpo.train()
    config = small_config(data__task=task, data__on_reward_error="drop", policy__optimizer__kwargs={"lr": 0.0})
    with local_run(config) as (grpo, steps):
        grpo.train()
    assert sum(m["reward/num_failures"] for _, m in steps) > 0
    assert all(m["reward/mean"] == m["reward/mean"] for _, m in steps)


class Constant(LargestDigit):
    """Pays 0.1 for everything: equal rewards that are not exact in float32."""

    name = "constant"

    def reward(self, prompt, completion):
        return 0.1


def test_groups_of_equal_rewards_are_counted_as_such():
    config = small_config(
        data__task=f"{__name__}:Constant",
        grpo__num_generations_per_prompt=7,
        grpo__max_num_steps=1,
        policy__train_global_batch_size=56,
        policy__train_micro_batch_size=56,
    )
    with local_run(config) as (grpo, steps):
        grpo.train()
    assert [m["reward/zero_std_fraction"] for _, m in steps] == [1.0, 1.0]


def test_validation_can_be_switched_off_and_is_capped_in_size():
    with local_run(small_config(grpo__val_period=0, grpo__val_at_start=False, grpo__max_num_steps=1)) as (grpo, steps):
        grpo.train()
    assert not any("validation/accuracy" in m for _, m in steps)
    asked = []
    with local_run(small_config(grpo__max_val_samples=7, grpo__max_num_steps=1)) as (grpo, _):
        plain = grpo.generation.generate
        grpo.generation.generate = lambda requests: asked.append(list(requests)) or plain(requests)
        grpo.train()
    greedy = [batch for batch in asked if all(r.sampling.temperature == 0 for r in batch)]
    assert [len(batch) for batch in greedy] == [7, 7]
    assert isinstance(greedy[0][0], GenerationRequest)


def test_the_alarm_warns_or_stops_and_knows_nan_for_what_it_is():
    alarm = MismatchAlarm(bound=1.05)
    assert not alarm.check(3, 1.05, (2,))
    with pytest.warns(UserWarning, match=r"step 3.*1\.2, above the bound of 1\.05.*version \[2\]"):
        assert alarm.check(3, 1.2, (2,))
    with pytest.warns(UserWarning, match="nan"):
        assert alarm.check(3, float("nan"), (2,))
    with pytest.raises(StateError, match="on_mismatch=warn"):
        MismatchAlarm(bound=1.05, action="stop").check(3, 1.2, (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not MismatchAlarm(bound=None).check(3, 9.0, (2,))


def test_the_reported_gap_is_that_of_the_worst_token_in_a_thousand_among_those_that_count():
    ours_BS = torch.zeros(4, 600)
    theirs_BS = torch.zeros(4, 600)
    theirs_BS[0, :4] = torch.tensor([0.5, 9.0, -0.25, 0.125])
    theirs_BS[3, :] = 7.0
    mask_BS = torch.ones(4, 600)
    mask_BS[0, 1] = 0
    batch = BatchedDataDict(
        token_mask=mask_BS,
        sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        prev_logprobs=ours_BS,
        generation_logprobs=theirs_BS,
    )
    # 1799 tokens count, and 1798 of them are 99.9 %, rounded up: one may be farther off.
    assert logprob_gap(batch) == 0.25
    batch["sample_mask"] = torch.zeros(4)
    assert logprob_gap(batch) == 0.0


def test_a_stale_engine_stops_a_run_that_asks_for_it():
    config = small_config(
        policy__optimizer__kwargs={"lr": 0.05}, grpo__on_mismatch="stop", grpo__max_token_mult_prob_error=1.01
    )
    with local_run(config) as (grpo, steps):
        refit = grpo.refit
        outcome = refit(Timer())
        grpo.refit = lambda _timer: outcome
        with pytest.raises(StateError, match=r"weights of version \[0\]"):
            grpo.train()
    assert [step for step, _ in steps] == [0, 1, 2], "the row that shows the mismatch is there"


def test_a_batch_that_does_not_divide_is_scored_whole_and_trained_only_in_whole_batches():
    with local_run(small_config()) as (grpo, _):
        grpo.refit(Timer())
        batch = grpo.prepare(grpo.roll_out(Timer()), Timer())
        part = batch.slice(0, 5)
        assert torch.allclose(grpo.policy.get_logprobs(part), batch["prev_logprobs"][:5], atol=1e-5)
        with pytest.raises(DataError, match="5 sequences cannot be cut into global batches of 3"):
            grpo.policy.train(part, grpo.loss, global_batch_size=3)
