"""The safetensors reader and writer: exact both ways, only FormatError from bad bytes."""

from __future__ import annotations

import contextlib
import io
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recur.errors import FormatError
from recur.io import safetensors

DTYPES = "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 ?".split()


def packed(header: dict | str | bytes, data: bytes = b"") -> bytes:
    """A file made of a header and data, as they are given, fitting or not."""
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(2,), place=(0, 8), **more) -> dict:
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(place), **more}}


def read_bytes(content: bytes):
    return safetensors.read(io.BytesIO(content))


@pytest.fixture
def arrays(rng) -> dict[str, np.ndarray]:
    return {
        "bytes": rng.integers(0, 255, 3).astype(np.uint8),
        "Wh": rng.standard_normal((5, 3)).astype(np.float32),
        "b": rng.standard_normal(7),
        "scalar": np.array(2.5, np.float32),
        "nothing": np.zeros((0, 4), np.int64),
        "layers.0.Größe": rng.standard_normal((2, 1, 3)).astype(np.float16),
    }


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_what_is_written_is_read_back_in_order_with_its_metadata(tmp_path, arrays):
    metadata = {"format": "test", "note": 'a "quoted" \n line with \\ and ü'}
    safetensors.write(tmp_path / "m.safetensors", arrays, metadata)
    found, notes = safetensors.read(tmp_path / "m.safetensors")
    assert_same(found, arrays)
    assert notes == metadata


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(tmp_path, name):
    array = np.arange(6).reshape(2, 3).astype(name)
    safetensors.write(tmp_path / "m", {"a": array})
    assert_same(safetensors.read(tmp_path / "m")[0], {"a": array})


def test_any_memory_layout_and_byte_order_is_written_as_its_values(tmp_path, rng):
    array = rng.standard_normal((4, 6))
    views = {
        "fortran": np.asfortranarray(array),
        "strided": array[::2, ::-1],
        "big": array.astype(">f8"),
        "transposed": array.T,
    }
    safetensors.write(tmp_path / "m", views)
    found, _ = safetensors.read(tmp_path / "m")
    for key, view in views.items():
        np.testing.assert_array_equal(found[key], view)
        assert found[key].dtype == np.float64 and found[key].flags.c_contiguous


def test_arrays_read_are_writable_and_share_no_memory(tmp_path, arrays):
    safetensors.write(tmp_path / "m", arrays)
    found, _ = safetensors.read(tmp_path / "m")
    found["Wh"][0, 0] = 1.0
    assert not np.shares_memory(found["Wh"], found["b"])


def test_bfloat16_is_widened_exactly():
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], "<u2")
    found, _ = read_bytes(packed(one("BF16", (4,)), bits.tobytes()))
    assert found["a"].dtype == np.float32
    np.testing.assert_array_equal(found["a"], [1.0, -2.0, np.inf, 2.0**-133])


def test_the_data_of_each_array_is_aligned_for_readers_that_map_the_file(tmp_path, arrays):
    safetensors.write(tmp_path / "m", arrays)
    header = safetensors.read_header(tmp_path / "m")
    for name, entry in header.entries.items():
        assert (header.offset + entry.start) % arrays[name].itemsize == 0


def test_the_header_alone_says_names_shapes_and_metadata(tmp_path, arrays):
    safetensors.write(tmp_path / "m", arrays, {"k": "v"})
    header = safetensors.read_header(tmp_path / "m")
    assert {key: entry.shape for key, entry in header.entries.items()} == {
        key: array.shape for key, array in arrays.items()
    }
    assert header.metadata == {"k": "v"}


def test_a_file_may_hold_nothing(tmp_path):
    safetensors.write(tmp_path / "m", {})
    assert safetensors.read(tmp_path / "m") == ({}, {})


@pytest.mark.parametrize(
    ("arrays", "metadata", "error"),
    [
        ({"a": np.zeros(2, complex)}, {}, TypeError),
        ({"a": np.array(["text"])}, {}, TypeError),
        ({"a": np.array([None])}, {}, TypeError),
        ({"__metadata__": np.zeros(2)}, {}, ValueError),
        ({3: np.zeros(2)}, {}, ValueError),
        ({"\ud800": np.zeros(2)}, {}, ValueError),
        ({}, {"a": 3}, ValueError),
        ({}, {"a": "\udfff"}, ValueError),
    ],
)
def test_what_the_format_cannot_hold_is_refused_and_the_old_file_stays(
    tmp_path, arrays, metadata, error
):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    with pytest.raises(error):
        safetensors.write(path, arrays, metadata)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_header_past_the_formats_limit_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "HEADER_LIMIT", 100)
    with pytest.raises(ValueError, match="at most 100"):
        safetensors.write(tmp_path / "m", {}, {"long": "x" * 200})
    assert list(tmp_path.iterdir()) == []


GOOD = packed({"__metadata__": {"k": "v"}, **one()}, bytes(8))

BROKEN = {
    "empty file": b"",
    "short file": b"\x02\0\0\0",
    "no header": (0).to_bytes(8, "little"),
    "header past the end": (100).to_bytes(8, "little") + b"{}",
    "header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "not UTF-8": packed(b'{"\xff":1}'),
    "not JSON": packed("{]"),
    "not an object": packed("[1, 2]"),
    "space first": packed(" {}"),
    "text after": packed("{} {}"),
    "open": packed('{"a":'),
    "deep": packed("{" + '"a":{' * 100_000),
    "deep list": packed('{"a":{"shape":' + "[" * 100_000),
    "cut short": GOOD[:-1],
    "too long": GOOD + b"\0",
    "array is a list": packed({"a": [1]}),
    "field missing": packed({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "field unknown": packed(one(strides=[1]), bytes(8)),
    "dtype unknown": packed(one("F8_E4M3"), bytes(8)),
    "dtype a number": packed(one(3), bytes(8)),
    "shape a number": packed({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, bytes(8)),
    "shape negative": packed(one(shape=(-2,)), bytes(8)),
    "shape of floats": packed(one(shape=(2.0,)), bytes(8)),
    "shape of exponents": packed(
        '{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', bytes(8)
    ),
    "shape with a leading zero": packed(
        '{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', bytes(8)
    ),
    "shape huge": packed(one(shape=(10**30,)), bytes(8)),
    "shape overflows": packed(one(shape=(2**62, 2**62)), bytes(8)),
    "shape overflows to 8 bytes": packed(one(shape=(2**63 + 2,)), bytes(8)),
    "empty shape overflows": packed(one(shape=(2**62, 0), place=(0, 0))),
    "65 axes": packed(one(shape=[1] * 65, place=(0, 4)), bytes(4)),
    "claims a terabyte": packed(one(shape=(2**38,), place=(0, 2**40)), bytes(8)),
    "place past the end": packed(one(place=(8, 16)), bytes(8)),
    "place backwards": packed(one(place=(8, 0)), bytes(8)),
    "place of three": packed(one(place=(0, 8, 8)), bytes(8)),
    "place of one": packed(one(place=(0,)), bytes(8)),
    "place does not fit the shape": packed(one(place=(0, 4)), bytes(4)),
    "hole": packed({**one(), "b": one(place=(12, 20))["a"]}, bytes(20)),
    "overlap": packed({**one(), "b": one(place=(4, 12))["a"]}, bytes(12)),
    "same place twice": packed({**one(), "b": one()["a"]}, bytes(8)),
    "name twice": packed(json.dumps(one())[:-1] + "," + json.dumps(one())[1:], bytes(8)),
    "metadata twice": packed('{"__metadata__":{},"__metadata__":{}}'),
    "metadata key twice": packed('{"__metadata__":{"a":"1","a":"2"}}'),
    "metadata a number": packed({"__metadata__": {"a": 1}}),
    "metadata a list": packed({"__metadata__": []}),
    "half a surrogate pair": packed(r'{"__metadata__":{"a":"\ud800"}}'),
    "control character": packed('{"__metadata__":{"a":"\x01"}}'),
    "bad escape": packed(r'{"__metadata__":{"a":"\q"}}'),
    "open string": packed('{"__metadata__":{"a":"'),
    "bool of 2": packed(one("BOOL", (1,), (0, 1)), b"\x02"),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_or_hostile_file_is_a_format_error(content):
    with pytest.raises(FormatError):
        read_bytes(content)


def test_the_file_those_were_broken_from_is_sound():
    found, metadata = read_bytes(GOOD)
    np.testing.assert_array_equal(found["a"], [0.0, 0.0])
    assert metadata == {"k": "v"}


def test_the_error_names_the_file_and_the_array(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(BROKEN["place does not fit the shape"])
    with pytest.raises(FormatError, match=r"m\.safetensors: .*'a'.* needs 8"):
        safetensors.read(path)


def test_every_shortened_file_is_a_format_error(tmp_path, arrays):
    safetensors.write(tmp_path / "m", arrays, {"k": "v"})
    whole = (tmp_path / "m").read_bytes()
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            read_bytes(whole[:length])


@given(st.data())
@settings(max_examples=300)
def test_mutated_files_raise_only_format_errors(data):
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 8))
        content[at : at + cut] = data.draw(st.binary(max_size=8))
    try:
        found, _ = read_bytes(bytes(content))
    except FormatError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(content)


@given(st.text(alphabet='{}[]:,"\\ aF32dtypeshadatofs_m0123456789', max_size=120))
@settings(max_examples=300)
def test_headers_of_any_text_raise_only_format_errors(text):
    try:
        found, _ = read_bytes(packed("{" + text))
    except FormatError:
        return
    assert all(array.size == 0 for array in found.values())


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"shape":[' + "[]," * 300_000 + "[]]}}",
        '{"a":{"shape":[' + "1," * 500_000 + "1]}}",
        "{" + '{"":' * 250_000,
        '{"__metadata__":{"a":"' + r"\n" * 500_000 + '"}}',
        '{"a":{"dtype":"' + "F" * 1_000_000,
        '{"a":{"shape":[' + "9" * 1_000_000 + "]}}",
    ],
    ids=["lists", "numbers", "objects", "escapes", "dtype", "digits"],
)
def test_a_hostile_header_takes_no_more_than_a_few_times_its_size(header):
    content = io.BytesIO(packed(header))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) if "metadata" not in header else contextlib.nullcontext():
            safetensors.read(content)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(header)
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_read_is_a_format_error():
    class Shrinking(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3]) if self.tell() < len(GOOD) - 5 else 0

    with pytest.raises(FormatError, match="ends inside array 'a'"):
        safetensors.read(Shrinking(GOOD))


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        safetensors.read(tmp_path / "nowhere")


@pytest.mark.oracle
def test_the_safetensors_package_reads_what_is_written(tmp_path, arrays):
    oracle = pytest.importorskip("safetensors.numpy")
    safetensors.write(tmp_path / "m", arrays, {"k": "v"})
    found = oracle.load_file(tmp_path / "m")
    assert_same({name: found[name] for name in arrays}, arrays)
    with pytest.importorskip("safetensors").safe_open(tmp_path / "m", "np") as file:
        assert file.metadata() == {"k": "v"}


@pytest.mark.oracle
def test_what_the_safetensors_package_writes_is_read(tmp_path, arrays):
    oracle = pytest.importorskip("safetensors.numpy")
    oracle.save_file(arrays, tmp_path / "m", {"k": "v"})
    found, metadata = safetensors.read(tmp_path / "m")
    assert_same({name: found[name] for name in arrays}, arrays)
    assert metadata == {"k": "v"}


# NumPy cannot hold the first three, the package says nothing about the others.
ONLY_OURS = {
    *("bool of 2", "65 axes", "empty shape overflows"),
    *("field unknown", "space first", "name twice", "metadata key twice"),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ONLY_OURS])
def test_the_safetensors_package_refuses_the_same_files(name):
    package = pytest.importorskip("safetensors")
    with pytest.raises(package.SafetensorError):
        package.deserialize(BROKEN[name])
