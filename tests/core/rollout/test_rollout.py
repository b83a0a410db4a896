# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import ConfigError, DataError, ModelError, RewardError
from nemo_rl_core.guard import ForbiddenImportError
from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.protocols.settings import TokenizerSettings
from nemo_rl_core.rollout.arithmetic import Arithmetic
from nemo_rl_core.rollout.collect import accuracy, collect, training_batch
from nemo_rl_core.rollout.largest_digit import LargestDigit
from nemo_rl_core.rollout.prompts import EncodedPrompt, PromptSampler, encode_prompts
from nemo_rl_core.rollout.tasks import Prompt, load_task
from nemo_rl_core.testing.generation import ScriptedGenerator

TOKENIZER = build_tokenizer(TokenizerSettings(characters="0123456789?"))
PARAMS = [SamplingParams(max_new_tokens=4)] * 2


class Fussy:
    """A task whose reward raises for one completion and is NaN for another."""

    name = "fussy"

    def __init__(self, bad="9"):
        self.bad = bad

    def train_prompts(self):
        return [Prompt(text="1?"), Prompt(text="2?")]

    def heldout_prompts(self):
        return [Prompt(text="3?")]

    def reward(self, prompt, completion):
        if completion == self.bad:
            raise KeyError("no such answer")
        return float("nan") if completion == "8" else 1.0

    def is_correct(self, prompt, completion):
        return completion == "5"


def groups_of(task):
    return list(enumerate(encode_prompts(task.train_prompts(), TOKENIZER, 16)))


def scripted(*texts):
    return ScriptedGenerator([tuple(TOKENIZER(text)["input_ids"]) for text in texts], weight_version=3)


def test_a_rollout_keeps_prompt_group_completion_and_reward_together():
    rollout = collect(scripted("5", "66", "7", "5"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER)
    assert rollout.texts == ("5", "66", "7", "5")
    assert rollout.group_ids == (0, 0, 1, 1)
    assert [p.prompt.text for p in rollout.prompts] == ["1?", "1?", "2?", "2?"]
    assert rollout.weight_versions == (3,)
    assert rollout.num_sampled_tokens == 5
    assert accuracy(rollout, Fussy()) == 0.5


def test_a_training_batch_lays_tokens_out_right_padded_with_masks_on_the_sampled_ones():
    rollout = collect(scripted("5", "66", "7", "5"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER)
    batch = training_batch(rollout, pad_id=0)
    assert batch.tensor("input_ids").tolist() == [[4, 13, 8, 0], [4, 13, 9, 9], [5, 13, 10, 0], [5, 13, 8, 0]]
    assert batch.tensor("token_mask").tolist() == [[0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert batch.tensor("input_lengths").tolist() == [3, 4, 3, 3]
    logprobs = batch.tensor("generation_logprobs")
    assert torch.equal(logprobs != 0, batch.tensor("token_mask") > 0)


@pytest.mark.parametrize(("text", "cause"), [("9", "KeyError: 'no such answer'"), ("8", "it is nan")])
def test_a_reward_that_fails_stops_with_task_sample_and_cause(text, cause):
    with pytest.raises(RewardError, match=rf"'fussy'.*sample 2.*'2\?'.*{cause}.*on_reward_error=drop"):
        collect(scripted("5", "6", text, "5"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER)


def test_an_answer_check_that_fails_is_reported_with_task_sample_and_cause():
    class Unsure(Fussy):
        def is_correct(self, prompt, completion):
            raise ZeroDivisionError("no key")

    rollout = collect(scripted("5", "6", "7", "5"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER)
    with pytest.raises(RewardError, match=r"is_correct\(\) of task 'fussy'.*sample 0.*ZeroDivisionError: no key"):
        accuracy(rollout, Unsure())


def test_any_character_can_be_in_the_alphabet():
    tokenizer = build_tokenizer(TokenizerSettings(characters="a\n b"))
    assert tokenizer.decode(tokenizer("b\na b")["input_ids"]) == "b\na b"


def test_a_dropped_sample_is_counted_and_masked_and_spoils_no_mean():
    rollout = collect(
        scripted("5", "6", "9", "8"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER, on_reward_error="drop"
    )
    assert [index for index, _ in rollout.failures] == [2, 3]
    assert rollout.mean_reward == 1.0
    assert training_batch(rollout, pad_id=0).tensor("sample_mask").tolist() == [1, 1, 0, 0]


def test_a_rollout_in_which_every_reward_failed_is_refused_and_so_is_a_forbidden_import():
    with pytest.raises(RewardError, match=r"every reward of a rollout failed.*KeyError"):
        collect(scripted("9", "9", "9", "8"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER, on_reward_error="drop")

    class Smuggler(Fussy):
        def reward(self, prompt, completion):
            raise ForbiddenImportError("import of vllm")

    with pytest.raises(ForbiddenImportError):
        collect(scripted("5", "6", "7", "5"), groups_of(Fussy()), PARAMS, Smuggler(), TOKENIZER, on_reward_error="drop")


def test_a_backend_that_returns_too_few_completions_is_refused():
    with pytest.raises(DataError, match="3 completions for 4 requests"):
        collect(scripted("5", "6", "7"), groups_of(Fussy()), PARAMS, Fussy(), TOKENIZER)


def test_every_prompt_comes_once_before_any_comes_again_and_groups_are_never_shared():
    prompts = [EncodedPrompt(prompt=Prompt(text=str(i)), token_ids=(i,)) for i in range(5)]
    sampler, same, other = (PromptSampler(prompts, seed=s) for s in (1, 1, 2))
    taken = sampler.take(12)
    assert sorted(p.token_ids[0] for _, p in taken[:5]) == list(range(5))
    assert sorted(p.token_ids[0] for _, p in taken[5:10]) == list(range(5))
    assert [group for group, _ in taken] == list(range(12))
    assert taken == same.take(7) + same.take(5)
    assert taken != other.take(12)


def test_prompts_that_cannot_be_used_are_refused_before_anything_starts():
    with pytest.raises(DataError, match=r"prompt 0 \('12345'\) has 5 tokens.*max_total_sequence_length=5"):
        encode_prompts([Prompt(text="12345")], TOKENIZER, 5)
    with pytest.raises(DataError, match="unknown to the tokenizer"):
        encode_prompts([Prompt(text="1x")], TOKENIZER, 9)
    with pytest.raises(DataError, match="is empty"):
        encode_prompts([Prompt()], TOKENIZER, 9)
    with pytest.raises(DataError, match="no chat template"):
        encode_prompts([Prompt(messages=({"role": "user", "content": "1"},))], TOKENIZER, 9)


def test_chat_prompts_are_rendered_by_the_template():
    template = "{% for m in messages %}{{ m.content }}?{% endfor %}{% if add_generation_prompt %}0{% endif %}"
    tokenizer = build_tokenizer(TokenizerSettings(characters="0123456789?", chat_template=template))
    encoded = encode_prompts([Prompt(messages=({"role": "user", "content": "42"},))], tokenizer, 9)
    assert tokenizer.decode(encoded[0].token_ids) == "42?0"


def test_tasks_come_by_name_by_dotted_path_and_by_module_and_class():
    assert load_task("largest_digit", {"heldout": 5}).heldout_prompts()[4:] != []
    for path in (f"{__name__}.Fussy", f"{__name__}:Fussy"):
        assert load_task(path, {"bad": "1"}).bad == "1"


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("largest_digt", {}, "did you mean 'largest_digit'"),
        ("no_such_module.Task", {}, "ModuleNotFoundError"),
        (f"{__name__}:Nothing", {}, "AttributeError"),
        ("largest_digit", {"holdout": 3}, r"holdout.*heldout"),
        ("largest_digit", {"heldout": 1000}, "from 1 to 999"),
        ("collections:OrderedDict", {}, "it lacks name, train_prompts"),
        ("arithmetic", {"operations": "+/"}, r"\+ - \*"),
        ("arithmetic", {"largest": 2, "num_train": 9}, "the 9 that exist"),
    ],
)
def test_tasks_that_cannot_be_built_are_refused(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name, kwargs)


@pytest.mark.parametrize(
    "task", [LargestDigit(), LargestDigit(num_digits=2, heldout=50, seed=4), Arithmetic(), Arithmetic(operations="+-*")]
)
def test_held_out_prompts_are_never_trained_on(task):
    train, heldout = ({str(p) for p in prompts} for prompts in (task.train_prompts(), task.heldout_prompts()))
    assert train
    assert heldout
    assert not train & heldout


def test_rewards_of_the_built_in_tasks():
    digits = LargestDigit()
    prompt = digits.train_prompts()[0]
    right = max(prompt.text[:-1])
    assert [digits.reward(prompt, t) for t in (right, right + right, "", "x")] == [1.0, 0.0, 0.0, 0.0]
    task = Arithmetic(format_bonus=0.25)
    question = Prompt(facts={"answer": 1234})
    answers = {"1234": 1.25, "1,234.": 1.25, "It is 1234": 1.0, "12": 0.25, "": 0.0, "no": 0.0, "-1234": 0.25}
    assert {text: task.reward(question, text) for text in answers} == answers


def test_a_tokenizer_needs_one_source_and_an_alphabet_without_doubles():
    with pytest.raises(ModelError, match="exactly one"):
        build_tokenizer(TokenizerSettings())
    with pytest.raises(ModelError, match=r"\['1'\] more than once"):
        build_tokenizer(TokenizerSettings(characters="121"))
    with pytest.raises(ModelError, match="local folder"):
        build_tokenizer(TokenizerSettings(folder="no/such/folder"))
