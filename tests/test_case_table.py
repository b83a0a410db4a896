# SPDX-License-Identifier: Apache-2.0
"""tests/README.md says which public case is covered where, and is true."""

import pytest

from tests.case_table import BEGIN, END, README, covered, table, table_in


def test_the_table_of_cases_is_what_the_docstrings_say():
    """Both ways: a case that no test names any more, and a test whose case is not listed."""
    assert table_in(README.read_text(encoding="utf-8")) == table(), "run: python -m tests.case_table"


def test_cases_are_found_where_tests_name_them():
    found = covered()
    assert "core/refit/test_between_processes.py::test_another_version_than_the_expected_is_refused" in found["R42"]
    assert {case[0] for case in found} == set("URFQ")


def test_a_readme_without_the_marks_is_refused():
    assert table_in(f"a\n{BEGIN}\nrow\n{END}\nb") == "row"
    with pytest.raises(ValueError, match="one of them is missing"):
        table_in("no marks here")
