# SPDX-License-Identifier: Apache-2.0
"""The documentation of the config says what the schema says, no more and no less."""

import dataclasses
import re
from pathlib import Path

from nemo_rl_core.config.cluster import RefitSection
from nemo_rl_core.config.grpo import LossSection
from nemo_rl_core.config.load import config_from_mapping
from nemo_rl_core.config.problems import UNSET
from nemo_rl_core.config.reference import render_table, schema_keys
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.config.yaml_io import load_yaml

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def rows(text: str) -> list[str]:
    """The table rows about keys."""
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_the_document_holds_exactly_the_rows_of_the_schema() -> None:
    """U62: documentation and code cannot differ."""
    expected = [row for section in (*RunConfig.model_fields, "") for row in rows(render_table(section))]
    # A top-level key that is no section is in the last table alone.
    expected = list(dict.fromkeys(expected))
    assert sorted(rows(DOCUMENT.read_text(encoding="utf-8"))) == sorted(expected)


def test_every_leaf_of_the_schema_has_a_row_and_a_meaning() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    leaves = [info for info in schema_keys() if not info.is_section]
    assert len(leaves) > 60
    for info in leaves:
        assert f"| `{info.key}` |" in text
        assert info.meaning, info.key


def test_keys_that_the_prose_names_exist() -> None:
    known = {info.key for info in schema_keys()} | {"env.actor_environments"}
    roots = {key.partition(".")[0] for key in known}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", DOCUMENT.read_text(encoding="utf-8"))
    ours = {name for name in named if name.partition(".")[0] in roots}
    assert ours <= known
    assert len(ours) > 60


def test_the_smallest_file_of_the_document_is_valid() -> None:
    match = re.search(r"<!-- smallest -->\n```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    config = config_from_mapping(load_yaml(match[1], "document"))
    assert config.train_world_size == 1


def test_sections_have_the_fields_of_what_they_fill() -> None:
    from nemo_rl_core.objectives.losses import LossSettings
    from nemo_rl_core.refit.settings import DEFAULT_SETTINGS

    assert RefitSection().model_dump() == dataclasses.asdict(DEFAULT_SETTINGS)
    assert list(LossSection.model_fields) == [field.name for field in dataclasses.fields(LossSettings)]


def test_defaults_in_the_reference_are_those_of_a_loaded_config() -> None:
    minimal = {
        "policy": {
            "model_name": "x",
            "generation": {"backend": "torch", "colocated": {"resources": {"gpus_per_node": 1}}},
        },
        "data": {"task": "t"},
    }
    config = config_from_mapping(minimal)
    given = {"policy.model_name", "policy.generation", "policy.generation.colocated.resources.gpus_per_node"}
    for info in schema_keys():
        if info.is_section or info.default is UNSET or info.key in given or info.key.startswith("policy.scheduler"):
            continue
        value = config
        for part in info.key.split("."):
            value = getattr(value, part)
        assert value == info.default, info.key
