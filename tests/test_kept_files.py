"""Texts are kept as they were written or not at all, by any number of writers, and no more bytes than a limit."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.kept_files import MOST_BYTES, keep_text, limit_bytes, read_text


def test_what_was_kept_is_read_and_nothing_else_stays(tmp_path):
    keep_text(tmp_path / "new", "a.json", "µ")
    assert read_text(tmp_path / "new", "a.json") == "µ"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_what_cannot_be_read_is_not_there(tmp_path):
    (tmp_path / "damaged").write_bytes(b"\xff")
    (tmp_path / "folder").mkdir()
    assert [read_text(tmp_path, name) for name in ("damaged", "folder", "missing")] == [None, None, None]


@pytest.mark.parametrize("change", [lambda kept: kept[:-1], lambda kept: kept + b" ", lambda kept: kept[1:]])
def test_a_text_that_was_changed_is_not_there(tmp_path, change):
    keep_text(tmp_path, "a", "a text")
    file = tmp_path / "a"
    file.write_bytes(change(file.read_bytes()))
    assert read_text(tmp_path, "a") is None


def test_a_directory_that_cannot_be_written_to_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    keep_text(tmp_path / "file", "a", "text")
    keep_text(tmp_path, "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_of_two_writers_at_once_one_wins_and_readers_see_whole_texts(tmp_path):
    texts = {letter * 100_000 for letter in "abcd"}

    def write(text):
        for _ in range(20):
            keep_text(tmp_path, "shared", text)
            assert read_text(tmp_path, "shared") in texts

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, sorted(texts)))
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_what_was_not_read_for_longest_goes_when_there_is_too_much(tmp_path):
    for number, name in enumerate("abcd"):
        keep_text(tmp_path, name, 10 * name)
        os.utime(tmp_path / name, (number, number))
    size = (tmp_path / "a").stat().st_size
    limit_bytes(tmp_path, 4 * size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]
    assert read_text(tmp_path, "a")  # which makes it the one that was read last
    limit_bytes(tmp_path, 4 * size - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]


@pytest.mark.parametrize("num_texts", [100])
def test_keeping_ever_more_texts_keeps_the_limit(tmp_path, num_texts):
    for number in range(num_texts):
        keep_text(tmp_path, f"{number}.json", 100 * "x", most_bytes=2_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_000 + 200 * num_texts / 2
    assert MOST_BYTES > 2_000
