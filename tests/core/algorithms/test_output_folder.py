# SPDX-License-Identifier: Apache-2.0
"""A folder of results: its place is tried first, it appears whole, and what others made stays."""

from pathlib import Path

import pytest

from nemo_rl_core.algorithms.output_folder import OutputFolder, require_free_place
from nemo_rl_core.errors import DataError


def filled(out):
    """Claim a place, write into it, and publish."""
    with OutputFolder.claim(out) as place:
        (place.folder / "a").write_text("a")
        place.publish()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["out", "o" * 255, "new/parents/out"])
def test_the_folder_appears_alone(tmp_path, name):
    out = tmp_path / name
    require_free_place(out, tmp_path / "model")
    filled(out)
    assert names(out) == ["a"]
    assert names(out.parent) == [out.name]
    (tmp_path / "usual").mkdir()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode


def begin_and_end(out, note):
    """Claim a place, write into it and beside it, and be interrupted."""
    with OutputFolder.claim(out) as place:
        (place.folder / "a").write_text("a")
        note.touch()
        raise KeyboardInterrupt


def test_an_end_before_that_leaves_nothing_that_this_made_and_all_that_others_made(tmp_path):
    (tmp_path / ".out.partial-4711").mkdir()
    for out, note in (("out", "note"), ("gone/with/it/out", "note"), ("mine/out", "mine/theirs")):
        with pytest.raises(KeyboardInterrupt):
            begin_and_end(tmp_path / out, tmp_path / note)
    assert names(tmp_path) == [".out.partial-4711", "mine", "note"]
    assert names(tmp_path / "mine") == ["theirs"]


def test_two_runs_for_one_place_have_folders_of_their_own_and_the_first_result_stays(tmp_path):
    out = tmp_path / "out"
    with OutputFolder.claim(out) as first, OutputFolder.claim(out) as second:
        assert first.folder != second.folder
        for place, text in ((first, "first"), (second, "second")):
            (place.folder / "a").write_text(text)
        first.publish()
        with pytest.raises(OSError, match="not empty"):
            second.publish()
    assert (out / "a").read_text() == "first"
    assert names(tmp_path) == ["out"]


def refused(out, model, message):
    with pytest.raises(DataError, match=message):
        require_free_place(out, model)


def test_a_place_that_a_rename_could_not_fill_is_refused(tmp_path):
    model = tmp_path / "model"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "file").touch()
    refused(tmp_path / "full", model, "must be new or empty, .* it holds 'notes'")
    refused(tmp_path / "link", model, "must not be a link")
    refused(tmp_path / "file", model, "must be a folder that can be written")
    refused(tmp_path / ("o" * 256), model, "File name too long")
    refused(model / "inside", model, "must lie outside of the model's")
    refused(Path("/"), model, "must not be a mount point")


def test_a_parent_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be made: .* give a place that can be written"):
        filled(tmp_path / "file" / "out")
    # No user may make a folder there, root neither.
    with pytest.raises(DataError, match="cannot be made"):
        filled(Path("/proc/out"))


def test_a_rescued_file_is_beside_the_place_and_replaces_none(tmp_path):
    with OutputFolder.claim(tmp_path / "out") as place:
        paths = [place.rescue("scales.json", text) for text in ("a", "b")]
        place.discard()
    assert [path.read_text() for path in paths] == ["a", "b"]
    assert names(tmp_path) == sorted(path.name for path in paths)
    assert all(path.name.startswith("out.") and path.name.endswith(".scales.json") for path in paths)


def test_what_cannot_be_rescued_leaves_no_half_file(tmp_path):
    with OutputFolder.claim(tmp_path / "new" / "out") as place:
        place.discard()
        (tmp_path / "new").rmdir()
        assert place.rescue("scales.json", "a") is None
    assert names(tmp_path) == []
