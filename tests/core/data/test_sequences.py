# SPDX-License-Identifier: Apache-2.0
"""Files of texts: what a line means, and what is wrong with it, by its number."""

import json

import pytest

from nemo_rl_core.data.sequences import read_sequences, text_tokenizer
from nemo_rl_core.data.tokenizers import character_tokenizer
from nemo_rl_core.errors import DataError, ModelError

TOKENIZER = character_tokenizer("abc")  # ids 3, 4, 5; 2 is any other character


def read(tmp_path, name, contents, **options):
    path = tmp_path / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return read_sequences(path, lambda: TOKENIZER, **{"vocab_size": 6, "max_tokens": 10, **options})


def test_a_json_line_has_text_or_prompt_and_response_or_ids_and_what_else_it_has_is_left_alone(tmp_path):
    rows = [{"text": "ab", "id": 7}, {"prompt": "a", "response": "cc"}, {"input_ids": [5, 0]}]
    sequences = read(tmp_path, "data.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert sequences.ids == ((3, 4), (3, 5, 5), (5, 0))
    assert (sequences.num_tokens, sequences.num_cut) == (7, 0)


def test_special_tokens_stand_before_the_prompt_and_not_before_the_response(tmp_path):
    class WithStart:
        def __call__(self, text, add_special_tokens=True):
            ids = TOKENIZER(text)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}')
    assert read_sequences(path, WithStart, vocab_size=6, max_tokens=10).ids == ((1, 3, 4),)


def test_no_end_token_stands_between_prompt_and_response(tmp_path):
    class WithStartAndEnd:
        def __call__(self, text, add_special_tokens=True):
            ids = TOKENIZER(text)["input_ids"]
            return {"input_ids": [0, *ids, 1] if add_special_tokens else ids}

    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "ab", "response": "b"}\n{"text": "ab"}')
    sequences = read_sequences(path, WithStartAndEnd, vocab_size=6, max_tokens=10)
    assert sequences.ids == ((0, 3, 4, 4), (0, 3, 4, 1))


def test_a_line_of_a_text_file_is_a_text(tmp_path):
    assert read(tmp_path, "data.txt", "\ufeffab\n\n  \nc\r\n").ids == ((3, 4), (5,))


def test_ids_need_no_tokenizer(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"input_ids": [1, 2]}')
    assert read_sequences(path, lambda: pytest.fail("loaded"), vocab_size=6, max_tokens=10).ids == ((1, 2),)


def test_what_is_too_long_loses_its_end_and_is_counted(tmp_path):
    sequences = read(tmp_path, "data.txt", "abcab\nab\nabc\n", max_tokens=3)
    assert sequences.ids == ((3, 4, 5), (3, 4), (3, 4, 5))
    assert sequences.num_cut == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, is no JSON"),
        ('["a"]', "line 2, is no JSON object"),
        ('{"prompt": "a"}', r"line 2, has the keys \['prompt'\]"),
        ('{"texts": "a"}', r"line 2, has the keys \['texts'\]"),
        ('{"text": "a", "input_ids": [1]}', "line 2, .* with one of the three"),
        ('{"text": 3}', "line 2, has a 'text' that is no text, but 3"),
        ('{"input_ids": "12"}', "line 2, has 'input_ids' that are no list"),
        ('{"input_ids": [1, true]}', "line 2, has 'input_ids' that are no list"),
        ('{"input_ids": [1, -1]}', "line 2, has 'input_ids' that are no list"),
        ('{"input_ids": [1, 6]}', "line 2, has the token id 6, but the model's vocabulary has 6"),
        ('{"input_ids": []}', "line 2, has no token"),
        ('{"text": ""}', "line 2, has no token"),
        ('{"text": "a\\ud800"}', "line 2, has a 'text' with half of a character"),
        ('{"prompt": "a", "response": "\\udc00"}', "line 2, has a 'response' with half of a character"),
        ('{"text": ' + "[" * 100_000, "line 2, is JSON that is nested too deeply"),
        ('{"' + 1000 * "k" + '": 1}', r"line 2, has the keys \['k{75}\.\.\.;"),
        ('{"text": ' + 1000 * "3" + "}", r"that is no text, but 3{77}\.\.\.;"),
        ('{"input_ids": [' + 1000 * "3" + "]}", r"has the token id 3{77}\.\.\., but"),
    ],
)
def test_a_malformed_line_is_told_by_its_number_with_the_rule(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, "data.jsonl", f'{{"text": "a"}}\n{line}\n')


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("data.jsonl", "\n \n", "has no line with a sequence"),
        ("data.txt", b"ab\n\xff\n", "line 2, is not UTF-8: invalid start byte at byte 0"),
        ("data.csv", "a", "must be a .jsonl file .* or a .txt file"),
    ],
)
def test_a_file_without_sequences_is_told(tmp_path, name, contents, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, name, contents)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_sequences(tmp_path / "no.txt", lambda: TOKENIZER, vocab_size=6, max_tokens=3)


def test_a_tokenizer_needs_neither_a_padding_nor_an_end_token(tmp_path):
    tokenizer = character_tokenizer("abc")
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    assert text_tokenizer(tmp_path)("ab")["input_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[[["),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[[["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
    ],
)
def test_a_broken_tokenizer_is_one_line_with_the_way_out(tmp_path, name, text):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match="give the data as input_ids") as caught:
        text_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_empty_tokenizer_that_transformers_makes_up_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="knows no text: it has special tokens alone"):
        text_tokenizer(tmp_path)
