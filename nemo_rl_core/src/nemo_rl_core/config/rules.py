# SPDX-License-Identifier: Apache-2.0
"""Rules that hold between keys: what one section's schema cannot say.

A rule is a pure function of the sections that it needs and returns problems. Rules run for every group of sections
that is valid in itself, so that one broken section does not hide what is wrong in the others.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from nemo_rl_core.config.base import Section
from nemo_rl_core.config.cluster import ClusterSection, FirewallSection, RefitSection
from nemo_rl_core.config.generation import GenerationSection
from nemo_rl_core.config.grpo import GrpoSection, LossSection
from nemo_rl_core.config.placement import check_placement, plan_placement
from nemo_rl_core.config.policy import PolicySection
from nemo_rl_core.config.problems import Problem
from nemo_rl_core.guard.policy import Policy

__all__ = ["check_rules"]

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def check_rules(sections: Mapping[str, Section]) -> list[Problem]:
    """Apply every rule whose sections are all there.

    Args:
        sections: Top-level key to its validated section.
    """
    problems: list[Problem] = []
    for needed, rule in _RULES:
        if all(name in sections for name in needed):
            problems.extend(rule(*(sections[name] for name in needed)))
    return problems


def _model_source(policy: PolicySection) -> Iterator[Problem]:
    if policy.model_name is not None and policy.hf_config is not None:
        rule = "exactly one of policy.model_name and policy.hf_config must be set, both are"
        yield Problem(key="policy.model_name", rule=rule, value=policy.model_name, way_out="set one of them to null")
    if policy.model_name is None and policy.hf_config is None:
        way_out = "name a local model folder, or give policy.hf_config for a model with random weights"
        yield Problem(key="policy.model_name", rule="one of it and policy.hf_config must be set", way_out=way_out)
    if policy.hf_config is not None and not isinstance(policy.hf_config.get("model_type"), str):
        way_out = "name the architecture, e.g. model_type: qwen3"
        found = policy.hf_config.get("model_type")
        yield Problem(key="policy.hf_config.model_type", rule="must be a string", value=found, way_out=way_out)


def _parity(policy: PolicySection) -> Iterator[Problem]:
    if policy.generation is not None and policy.generation.parity == "strict" and policy.precision != "float32":
        rule = "must be float32 with policy.generation.parity=strict"
        way_out = "set it to float32, or leave it out"
        yield Problem(key="policy.precision", rule=rule, value=policy.precision, way_out=way_out)


def _tokenizer(policy: PolicySection) -> Iterator[Problem]:
    name, characters = policy.tokenizer.name, policy.tokenizer.characters
    if name is not None and characters is not None:
        rule = "excludes policy.tokenizer.name"
        yield Problem(key="policy.tokenizer.characters", rule=rule, value=characters, way_out="set one of them to null")
    if policy.tokenizer_name is None and characters is None:
        rule = "is required, because without policy.model_name there is no tokenizer to take"
        yield Problem(key="policy.tokenizer.name", rule=rule, way_out="or give policy.tokenizer.characters")
    if characters is not None and (not characters or len(set(characters)) < len(characters)):
        rule = "must hold at least one character, and each once"
        yield Problem(key="policy.tokenizer.characters", rule=rule, value=characters)


def _numbers_in_kwargs(policy: PolicySection) -> Iterator[Problem]:
    # These mappings have no schema, so a quoted number would only fail deep inside a train worker.
    mappings = {"policy.optimizer.kwargs": policy.optimizer.kwargs}
    if policy.scheduler is not None:
        mappings["policy.scheduler.kwargs"] = policy.scheduler.kwargs
    for prefix, mapping in mappings.items():
        for key, value in _leaves(prefix, mapping):
            if isinstance(value, str) and _NUMBER.fullmatch(value):
                yield Problem(key=key, rule="must be a number, not a string", value=value, way_out="remove the quotes")


def _train_worker(policy: PolicySection) -> Iterator[Problem]:
    if not policy.dtensor_cfg.enabled:
        rule = "must be true: the FSDP2 worker is the only one"
        yield Problem(key="policy.dtensor_cfg.enabled", rule=rule, value=False, way_out="remove the key")
    batching = policy.dynamic_batching
    for field in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(batching, field)
        if batching.enabled and (tokens is None or tokens < policy.max_total_sequence_length):
            shortest = policy.max_total_sequence_length
            rule = f"must hold one sequence of policy.max_total_sequence_length = {shortest} tokens"
            way_out = f"set {shortest} or more"
            yield Problem(key=f"policy.dynamic_batching.{field}", rule=rule, value=tokens, way_out=way_out)


def _generation(policy: PolicySection) -> Iterator[Problem]:
    generation = policy.generation
    if generation is None:
        way_out = "add at least policy.generation.backend"
        yield Problem(key="policy.generation", rule="is required: GRPO samples completions", way_out=way_out)
        return
    yield from _uncut_sampling(generation)
    yield from _backend_sections(generation)
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        length = policy.max_total_sequence_length
        rule = f"must leave room for a prompt within policy.max_total_sequence_length = {length}"
        way_out = f"set at most {length - 1}, less the longest prompt"
        key = "policy.generation.max_new_tokens"
        yield Problem(key=key, rule=rule, value=generation.max_new_tokens, way_out=way_out)


def _uncut_sampling(generation: GenerationSection) -> Iterator[Problem]:
    why = "the train side computes logprobs over the whole vocabulary and cannot reproduce a cut distribution"
    if generation.top_p != 1.0:
        rule = f"must be 1 in training: {why}"
        yield Problem(
            key="policy.generation.top_p", rule=rule, value=generation.top_p, way_out="set 1; temperature may vary"
        )
    if generation.top_k is not None:
        rule = f"must be null in training: {why}"
        yield Problem(
            key="policy.generation.top_k", rule=rule, value=generation.top_k, way_out="set null; temperature may vary"
        )


def _backend_sections(generation: GenerationSection) -> Iterator[Problem]:
    known = list(GenerationSection.model_fields)
    for name, value in (generation.model_extra or {}).items():
        key = f"policy.generation.{name}"
        if not (name.endswith("_cfg") and name != "_cfg"):
            near = difflib.get_close_matches(name, known, n=1)
            way_out = f"did you mean policy.generation.{near[0]}?" if near else f"the keys are {', '.join(known)}"
            yield Problem(
                key=key, rule="unknown key", value=value, way_out=f"{way_out} (a backend's own is <name>_cfg)"
            )
        elif not isinstance(value, Mapping | None):
            yield Problem(key=key, rule="must be a mapping, or null", value=value)


def _colocated(policy: PolicySection) -> Iterator[Problem]:
    if policy.generation is not None and policy.generation.colocated.enabled:
        rule = "must be false: training and generation on the same devices is not supported"
        way_out = "set it to false and give generation its share in policy.generation.colocated.resources"
        yield Problem(key="policy.generation.colocated.enabled", rule=rule, value=True, way_out=way_out)


def _placement(policy: PolicySection, cluster: ClusterSection) -> Iterator[Problem]:
    if policy.generation is not None and not policy.generation.colocated.enabled:
        yield from check_placement(cluster, policy.generation.colocated.resources)


def _rollout_batches(policy: PolicySection, grpo: GrpoSection) -> Iterator[Problem]:
    rollout = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if rollout % policy.train_global_batch_size:
        rule = (
            f"must divide the rollout of grpo.num_prompts_per_step x grpo.num_generations_per_prompt = "
            f"{grpo.num_prompts_per_step} x {grpo.num_generations_per_prompt} = {rollout} sequences"
        )
        way_out = f"set {rollout}, or a divisor of it for several optimizer steps per rollout"
        key = "policy.train_global_batch_size"
        yield Problem(key=key, rule=rule, value=policy.train_global_batch_size, way_out=way_out)


def _worker_batches(policy: PolicySection, cluster: ClusterSection) -> Iterator[Problem]:
    if policy.generation is None or check_placement(cluster, policy.generation.colocated.resources):
        return
    workers = plan_placement(cluster, policy.generation.colocated.resources).train_world_size
    per_worker, rest = divmod(policy.train_global_batch_size, workers)
    if rest:
        rule = f"must be a multiple of the number of train workers, {workers}"
        key = "policy.train_global_batch_size"
        yield Problem(key=key, rule=rule, value=policy.train_global_batch_size, way_out="change it or cluster")
    elif not policy.dynamic_batching.enabled and per_worker % policy.train_micro_batch_size:
        rule = f"must divide a train worker's share of the batch, {per_worker} sequences"
        key = "policy.train_micro_batch_size"
        yield Problem(key=key, rule=rule, value=policy.train_micro_batch_size, way_out="set a divisor of it")


def _validation(grpo: GrpoSection) -> Iterator[Problem]:
    if (grpo.val_period or grpo.val_at_start) and not grpo.max_val_samples:
        way_out = "set grpo.val_period=0 and grpo.val_at_start=false, or raise it"
        yield Problem(key="grpo.max_val_samples", rule="must be at least 1 to validate", value=0, way_out=way_out)


def _importance_sampling(loss: LossSection) -> Iterator[Problem]:
    cap = loss.truncated_importance_sampling_ratio
    if cap is not None and not loss.use_importance_sampling_correction:
        rule = "caps the weights of loss_fn.use_importance_sampling_correction, which is off"
        way_out = "switch that on, or set null"
        yield Problem(key="loss_fn.truncated_importance_sampling_ratio", rule=rule, value=cap, way_out=way_out)


def _refit_deadlines(refit: RefitSection) -> Iterator[Problem]:
    if refit.silence_timeout_s > refit.transfer_timeout_s:
        rule = f"must not exceed refit.transfer_timeout_s = {refit.transfer_timeout_s}: it would never be reached"
        yield Problem(key="refit.silence_timeout_s", rule=rule, value=refit.silence_timeout_s)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{key}[{index}]", item)
    else:
        yield key, value


def _firewall_names(firewall: FirewallSection) -> Iterator[Problem]:
    # The guard knows what these lists may hold; asked here, a wrong name is told with the rest of the config.
    for key, names in {"allow": firewall.allow, "allow_importers": firewall.allow_importers}.items():
        for name in names:
            try:
                if key == "allow":
                    Policy(role="driver", allow=(name,))
                else:
                    Policy(role="driver", allow_importers=(name,))
            except ValueError as error:
                yield Problem(key=f"firewall.{key}", rule=str(error))


_Rule = Callable[..., Iterator[Problem]]
_RULES = cast(
    "tuple[tuple[tuple[str, ...], _Rule], ...]",
    (
        (("policy",), _model_source),
        (("policy",), _parity),
        (("policy",), _tokenizer),
        (("policy",), _numbers_in_kwargs),
        (("policy",), _train_worker),
        (("policy",), _generation),
        (("policy",), _colocated),
        (("policy", "cluster"), _placement),
        (("policy", "grpo"), _rollout_batches),
        (("policy", "cluster"), _worker_batches),
        (("grpo",), _validation),
        (("loss_fn",), _importance_sampling),
        (("refit",), _refit_deadlines),
        (("firewall",), _firewall_names),
    ),
)
