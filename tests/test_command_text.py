"""Alphabets, the text of the standard library, and what that text costs without a network."""

from __future__ import annotations

import bz2
import lzma
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recur.command.baselines import OrderTwo, compressed_bits
from recur.command.text import UNKNOWN, Alphabet, read_text, standard_library
from recur.errors import RecurError


@given(st.text())
def test_any_text_survives_the_alphabet_of_its_characters(text):
    alphabet = Alphabet.of(text)
    numbers = alphabet.encode(text)
    assert numbers.dtype == np.int64 and numbers.shape == (len(text),)
    assert alphabet.decode(numbers) == text


def test_a_character_outside_the_alphabet_becomes_unknown():
    alphabet = Alphabet("abc")
    assert alphabet.decode(alphabet.encode("a\ud800bß😀c")) == f"a{UNKNOWN}b{UNKNOWN}{UNKNOWN}c"
    assert alphabet.encode("~")[0] == 0


def test_an_alphabet_is_the_same_whatever_the_order_of_its_characters():
    assert Alphabet("cab").characters == Alphabet("abcabc" + UNKNOWN).characters == UNKNOWN + "abc"
    assert len(Alphabet("cab")) == 4


def test_rare_characters_can_be_left_to_unknown():
    assert Alphabet.of("aaabbc", least=2).characters == UNKNOWN + "ab"


def test_an_empty_alphabet_knows_nothing():
    assert Alphabet("").encode("ab").tolist() == [0, 0]


def test_text_is_read_with_newlines_of_one_kind_and_bad_bytes_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\xff")
    (tmp_path / "b").write_bytes("ü\r".encode())
    assert read_text([tmp_path / "a", tmp_path / "b"]) == f"one\ntwo{UNKNOWN}ü\n"


@pytest.fixture
def library(tmp_path):
    for number in range(40):
        folder = tmp_path / f"package{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(f"[{number}]" * 50)
    return tmp_path


def files_in(text: str) -> set[str]:
    return set(text.replace("[", "").split("]")) - {""}


def test_training_and_held_out_text_share_no_file(library):
    training, held_out = standard_library(library, held_out=600)
    assert len(held_out) == 600
    assert files_in(held_out) and not files_in(held_out) & files_in(training)
    assert len(files_in(held_out)) >= 8  # an eighth of it from one file at most


def test_what_is_left_of_a_held_out_file_is_not_trained_on(library):
    (library / "long.py").write_text("[long]" * 1000)
    whole = standard_library(library, held_out=5_000, training=10**6)
    assert ("[long]" in whole[0]) != ("[long]" in whole[1])


def test_the_split_is_the_same_every_time_and_bounded(library):
    first = standard_library(library, held_out=600, training=1000)
    assert first == standard_library(library, held_out=600, training=1000)
    assert [len(text) for text in first] == [1000, 600]


@pytest.mark.parametrize("folder", ["encodings", "test", "tests", "idle_test", "site-packages"])
def test_tests_and_tables_of_characters_are_left_out(library, folder):
    before = standard_library(library, held_out=600)
    (library / folder).mkdir()
    (library / folder / "more.py").write_text("left out" * 100)
    (library / "package0" / "test_more.py").write_text("left out" * 100)
    (library / "package0" / "data.txt").write_text("left out" * 100)
    assert standard_library(library, held_out=600) == before


def test_a_python_without_sources_says_what_to_do_instead(tmp_path):
    with pytest.raises(RecurError, match="recur train TEXT"):
        standard_library(tmp_path)


def test_the_running_python_has_enough_text():
    training, held_out = standard_library(training=500_000)
    assert len(training) == 500_000 and len(held_out) == 200_000
    assert "import" in training and "import" in held_out


def plain_order_two(training: str, size: int, context: str, character: str) -> float:
    """The definition, one probability at a time: orders 2, 1, 0, then uniform."""
    padded = "\n\n" + training
    p = 1.0 / size
    for order in range(3):
        tail = context[len(context) - order :]
        # A context ends at any character from the third on, whatever its order.
        followers = Counter(
            padded[i] for i in range(2, len(padded)) if padded[i - order : i] == tail
        )
        if followers:
            n, unique = sum(followers.values()), len(followers)
            p = (followers[character] + unique * p) / (n + unique)
    return p


def test_order_two_follows_its_definition():
    alphabet = Alphabet("abcdnr\n")
    training, text = "abracadabra\nbanana\n" * 2, "bad\ncab~aab"
    model = OrderTwo(alphabet.encode(training), len(alphabet), start=int(alphabet.encode("\n")[0]))
    padded = "\n\n" + alphabet.decode(alphabet.encode(text))
    costs = [
        -math.log2(plain_order_two(training, len(alphabet), padded[i - 2 : i], padded[i]))
        for i in range(2, len(padded))
    ]
    assert model.bits(alphabet.encode(text)) == pytest.approx(np.mean(costs), rel=1e-12)


def test_order_two_gives_probabilities_that_sum_to_one(rng):
    model = OrderTwo(rng.integers(0, 5, 30), 6, start=0)
    for a in range(6):
        for b in range(6):
            context = np.array([a, b])
            total = 0.0
            for c in range(6):
                bits = 3 * model.bits(np.append(context, c)) - 2 * model.bits(context)
                total += 2.0**-bits
            assert total == pytest.approx(1.0)


def test_compressors_are_measured_in_bits_of_a_character():
    text = "ünïcode and more of it\n" * 40
    found = compressed_bits(text)
    assert found["bz2"] == 8 * len(bz2.compress(text.encode(), 9)) / len(text)
    assert found["lzma"] == 8 * len(lzma.compress(text.encode(), preset=9 | 2**31)) / len(text)
