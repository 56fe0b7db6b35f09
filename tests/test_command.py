"""The `recur` command: what each subcommand prints, writes, and exits with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from flux_models import Layer, chain
from julia_writer import bson_file

from recur.__main__ import main
from recur.command import demo
from recur.command.characters import CharacterModel, new
from recur.command.text import Alphabet
from recur.io import flux
from recur.io.model import load, save
from recur.layers import Chain, Dense
from recur.module import named_params
from recur.recurrent import GRU

PROSE = "the cat sat on the mat, and the rat sat on the cat.\n"


@pytest.fixture
def prose(in_tmp_path):
    (in_tmp_path / "prose.txt").write_text(PROSE * 60)
    return "prose.txt"


@pytest.fixture
def trained(in_tmp_path, rng):
    """A file with a small character model, not trained: what it writes does not matter."""
    model = new(Alphabet(PROSE), "lstm", hidden=8, layers=1, embedding=4, dropout=0.0, rng=rng)
    model.save("model.safetensors")
    return "model.safetensors"


SMALL = "--hidden 16 --embedding 8 --batch 4 --steps 16".split()


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def weights(path) -> bytes:
    return b"".join(p.value.tobytes() for p in named_params(load(path)).values())


# train


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru", "gruv3"])
def test_train_writes_a_model_that_sample_eval_and_info_read(prose, capsys, cell):
    code, out, err = run(
        capsys, "train", prose, "--cell", cell, "--layers", "2", "--epochs", "2", *SMALL
    )
    assert code == 0
    assert "bits per held-out character" in out and "bits/char" in err
    assert run(capsys, "sample", "model.safetensors", "--length", "20")[0] == 0
    assert run(capsys, "eval", "model.safetensors", prose)[0] == 0
    assert run(capsys, "info", "model.safetensors")[0] == 0


def test_train_learns(prose, capsys):
    arguments = ["train", prose, *SMALL, "--learning-rate", "0.02", "--epochs", "12"]
    out = run(capsys, *arguments)[1]
    assert float(re.search(r"([\d.]+) bits per held-out", out)[1]) < 1.5


def test_the_same_seed_gives_the_same_model(prose, capsys):
    for name in ("a", "b"):
        run(capsys, "train", prose, *SMALL, "--dropout", "0.2", "--output", f"{name}.safetensors")
    run(capsys, "train", prose, *SMALL, "--dropout", "0.2", "--seed", "1", "--output", "c")
    assert weights("a.safetensors") == weights("b.safetensors") != weights("c")


def test_train_goes_on_from_its_checkpoint(prose, capsys):
    options = [*SMALL, "--checkpoint-every", "5", "--dropout", "0.2"]
    run(capsys, "train", prose, *options, "--epochs", "3", "--output", "whole.safetensors")
    whole = weights("whole.safetensors")
    code, _, err = run(
        capsys,
        "train",
        prose,
        *options,
        "--epochs",
        "3",
        "--output",
        "whole.safetensors",
        "--resume",
    )
    assert code == 0 and "step" not in err  # nothing was left to do
    assert weights("whole.safetensors") == whole


def test_a_checkpoint_of_another_size_says_what_to_do_and_stays(prose, in_tmp_path, capsys):
    run(capsys, "train", prose, *SMALL)
    before = (in_tmp_path / "model.checkpoint.safetensors").read_bytes()
    code, _, err = run(capsys, "train", prose, *SMALL, "--hidden", "8", "--resume")
    assert code == 1 and "Build the model as it was when it was saved." in err
    assert (in_tmp_path / "model.checkpoint.safetensors").read_bytes() == before


def test_train_makes_the_folder_of_its_model(prose, in_tmp_path, capsys):
    assert run(capsys, "train", prose, *SMALL, "--output", "new/folder/m.safetensors")[0] == 0
    assert (in_tmp_path / "new" / "folder" / "m.safetensors").exists()


def test_a_text_too_short_for_the_windows_says_so(in_tmp_path, capsys):
    (in_tmp_path / "short.txt").write_text("short")
    code, _, err = run(capsys, "train", "short.txt")
    assert code == 1
    assert err == (
        "recur: short.txt: 5 characters are too few for 32 streams of 32 steps. Lower --batch or "
        "--steps, or give more text.\n"
    )


TRAIN = [sys.executable, "-m", "recur", "train", "prose.txt", *SMALL, "--epochs", "100000"]


def started(arguments: list[str], folder, wait_for) -> subprocess.Popen:
    process = subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not wait_for.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_leaves_the_model_so_far_and_a_checkpoint(prose, in_tmp_path, capsys):
    process = started(
        [*TRAIN, "--checkpoint-every", "1"],
        in_tmp_path,
        in_tmp_path / "model.checkpoint.safetensors",
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the model so far is model.safetensors, --resume goes on" in err
    assert "Traceback" not in err
    assert weights("model.safetensors") == weights("model.checkpoint.safetensors")
    assert run(capsys, "sample", "model.safetensors", "--length", "5")[0] == 0


# sample


def test_sample_streams_the_prompt_and_what_follows(trained, capsys):
    code, out, _ = run(capsys, "sample", trained, "--prompt", "the ", "--length", "30")
    assert code == 0 and out.startswith("the ") and len(out) == 4 + 30 + 1


def test_sample_repeats_itself_by_seed(trained, capsys):
    outs = [run(capsys, "sample", trained, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


def test_temperature_zero_takes_the_likeliest_character_of_the_running_state(trained, capsys):
    out = run(capsys, "sample", trained, "--prompt", "th", "--temperature", "0", "--length", "12")[
        1
    ]
    model = CharacterModel.load(trained)
    text = "\nth"
    while len(text) < 15:
        whole = load(trained)(model.alphabet.encode(text)[None, :])[:, 0, -1]
        text += model.alphabet.characters[1 + int(np.argmax(whole[1:]))]
    assert out == text[1:] + "\n"


def test_unknown_characters_of_a_prompt_are_named_and_read_as_unknown(trained, capsys):
    code, out, err = run(capsys, "sample", trained, "--prompt", "the 日本日\t", "--length", "3")
    assert code == 0 and out.startswith("the 日本日\t")
    assert err == "recur: the model's alphabet lacks '日', '本', '\\t'; each reads as unknown\n"
    assert run(capsys, "sample", trained, "--prompt", "the cat", "--length", "3")[2] == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_character_that_the_output_cannot_hold_is_escaped(trained, in_tmp_path, encoding):
    result = subprocess.run(
        [sys.executable, "-m", "recur", "sample", trained, "--prompt", "é\udcff", "--length", "3"],
        cwd=in_tmp_path,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert result.returncode == 0 and b"Traceback" not in result.stderr
    start = "é".encode() if encoding == "utf-8" else rb"\xe9"
    assert result.stdout.startswith(start + rb"\udcff")


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_a_reader_that_goes_away_ends_sample_quietly(trained, in_tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "recur", "sample", trained, "--length", "100000000"],
        cwd=in_tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


# eval


def test_eval_measures_every_character_from_the_first(trained, in_tmp_path, capsys):
    (in_tmp_path / "text").write_text("the cat ü")
    code, out, _ = run(capsys, "eval", trained, "text")
    assert code == 0
    assert out.splitlines()[0] == "9 characters, 1 of them outside the model's alphabet"
    alphabet = CharacterModel.load(trained).alphabet
    numbers = alphabet.encode("\nthe cat ü")
    logits = load(trained)(numbers[None, :-1])[:, 0].astype(np.float64)
    chosen = logits[numbers[1:], np.arange(9)] - np.log(np.exp(logits).sum(axis=0))
    assert float(re.search(r"model +([\d.]+) bits", out)[1]) == pytest.approx(
        -chosen.mean() / np.log(2), abs=6e-4
    )


def test_many_streams_measure_nearly_the_same_as_one(trained, rng):
    model = CharacterModel.load(trained)
    text = model.alphabet.encode(PROSE * 80)[:4001]
    one, many = model.bits(text, streams=1), model.bits(text, streams=4, steps=33)
    assert one == pytest.approx(many, abs=0.02) and one != many
    assert model.chain.layers[1].at_start


def test_an_empty_text_has_nothing_to_measure(trained, in_tmp_path, capsys):
    (in_tmp_path / "empty").write_text("")
    assert run(capsys, "eval", trained, "empty") == (1, "", "recur: empty: no text to measure.\n")


# info


def test_info_shows_layers_arrays_and_metadata(trained, capsys):
    code, out, _ = run(capsys, "info", trained)
    assert code == 0
    assert "a model written by recur" in out and "LSTMCell(4 => 8)" in out
    assert "layers.1.cell.Wi  F32 (32, 4)" in out and "alphabet: " in out


def test_info_shows_arrays_of_other_libraries(in_tmp_path, capsys):
    from recur.io import safetensors

    safetensors.write("other", {"weight": np.zeros((2, 3))}, {"format": "pt"})
    code, out, _ = run(capsys, "info", "other")
    assert code == 0 and "weight  F64 (2, 3)" in out and "format: pt" in out


def test_info_describes_a_flux_file(flux_file, capsys):
    code, out, _ = run(capsys, "info", flux_file)
    assert code == 0
    assert out.startswith("BSON\n") and "load builds: Chain(Recur(LSTMCell(3 => 4))" in out


# convert


@pytest.fixture
def flux_file(in_tmp_path, rng):
    Path("model.bson").write_bytes(bson_file(model=chain(Layer("LSTM", 3, 4, rng).layer("0.14"))))
    return "model.bson"


def test_convert_turns_a_flux_file_into_a_model_that_loads(flux_file, capsys, rng):
    code, out, _ = run(capsys, "convert", flux_file, "model.safetensors")
    assert code == 0 and out == "model.safetensors: Chain(Recur(LSTMCell(3 => 4)))\n"
    x = rng.standard_normal((3, 2)).astype(np.float32)
    assert load("model.safetensors")(x).tobytes() == flux.load(flux_file)(x).tobytes()


def test_convert_keeps_the_running_state_only_when_asked(flux_file, capsys):
    run(capsys, "convert", flux_file, "start.safetensors")
    run(capsys, "convert", flux_file, "running.safetensors", "--resume")
    assert load("start.safetensors").layers[0].at_start
    assert not load("running.safetensors").layers[0].at_start


def test_convert_writes_arrays_for_julia(trained, capsys):
    assert run(capsys, "convert", trained, "model.npz")[0] == 0
    with np.load("model.npz") as arrays:
        assert arrays["layers.2.cell.Wi"].shape == (32, 4)


def test_convert_keeps_initial_states_for_a_flux_that_has_them(flux_file, capsys):
    code, _, err = run(capsys, "convert", flux_file, "model.npz")
    assert code == 1 and 'flux="0.14"' in err
    assert run(capsys, "convert", flux_file, "model.npz", "--flux", "0.14")[0] == 0
    with np.load("model.npz") as arrays:
        assert any("state0" in name for name in arrays)


def test_convert_takes_the_activations_that_a_file_does_not_hold(in_tmp_path, rng, capsys):
    W, b = rng.standard_normal((2, 3)).astype("f4"), np.zeros(2, "f4")
    (in_tmp_path / "list.bson").write_bytes(bson_file(weights=[W, b]))
    assert run(capsys, "convert", "list.bson", "m.safetensors")[0] == 1
    code, _, err = run(
        capsys, "convert", "list.bson", "m.safetensors", "--act", "layers.0.act=tanh"
    )
    assert code == 0, err
    x = rng.standard_normal((3, 1)).astype("f4")
    np.testing.assert_allclose(load("m.safetensors")(x), np.tanh(W @ x), rtol=1e-5)
    with pytest.raises(SystemExit) as stopped:
        run(capsys, "convert", "list.bson", "m.safetensors", "--act", "layers.0.act=sin")
    assert stopped.value.code == 2 and "no activation is named 'sin'" in capsys.readouterr().err


def test_convert_refuses_what_it_cannot_read_or_write(trained, in_tmp_path, capsys):
    for source, target in ((trained, "model.h5"), ("missing.bson", "m.safetensors")):
        code, out, err = run(capsys, "convert", source, target)
        assert code == 1 and out == "" and err.startswith("recur: ")
    (in_tmp_path / "odd.bson").write_bytes(bson_file(note="no model"))
    code, _, err = run(capsys, "convert", "odd.bson", "m.safetensors")
    assert code == 1 and "no variable of the file is a model" in err
    assert not (in_tmp_path / "m.safetensors").exists()


# demo


@pytest.fixture
def little_library(monkeypatch):
    """A text small enough for a test, in place of the standard library's."""
    text = PROSE * 400
    monkeypatch.setattr(demo, "standard_library", lambda: (text, PROSE * 20))


def test_demo_trains_compares_draws_and_streams(in_tmp_path, little_library, capsys):
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, "demo", "--updates", "6", "--length", "50")
    assert code == 0
    for row in ("this model", "two characters of context", "bz2", "lzma"):
        assert re.search(rf"^  {row} +\d\.\d{{3}}$", out, re.MULTILINE), row
    assert re.search(r"^6 updates in \d+ s, [\d,]+ characters a second$", out, re.MULTILINE)
    assert re.search(r"^\d+ microseconds a character$", out, re.MULTILINE)
    folder = in_tmp_path / "recur-demo"
    assert (folder / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    assert "microseconds a character" in (folder / "log.txt").read_text()
    assert run(capsys, "sample", str(folder / "model.safetensors"), "--length", "5")[0] == 0


def test_demo_without_matplotlib_says_which_extra_draws(
    in_tmp_path, little_library, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = run(capsys, "demo", "--updates", "2", "--length", "5")
    assert code == 0 and 'pip install "recur[cli]"' in out
    assert not (in_tmp_path / "recur-demo" / "learning-curve.png").exists()


def test_demo_names_the_script_that_runs_where_the_shell_would_not_find_it(
    in_tmp_path, little_library, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [".venv/bin/recur", "demo"])
    for path, command in (("", r"\.venv/bin/recur"), (str(in_tmp_path), "recur")):
        monkeypatch.setenv("PATH", path)
        script = in_tmp_path / "recur"
        script.touch(mode=0o755)
        out = run(capsys, "demo", "--updates", "2", "--length", "5")[1]
        assert re.search(rf"^try: {command} sample ", out, re.MULTILINE)


def test_demo_measures_excerpts_of_the_whole_held_out_text_as_it_learns():
    text = np.arange(200_000)
    chosen = demo._excerpts(text).reshape(10, 1000)
    assert (chosen == np.arange(1000) + 20_000 * np.arange(10)[:, None]).all()
    assert (demo._excerpts(text[:57]) == text[:57]).all()


def test_demo_stops_by_the_clock(in_tmp_path, little_library, capsys):
    began = time.monotonic()
    code, out, _ = run(capsys, "demo", "--updates", "1000000", "--seconds", "1", "--length", "5")
    assert code == 0 and time.monotonic() - began < 60
    assert int(re.search(r"^(\d+) updates", out, re.MULTILINE)[1]) < 1_000_000


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("delay", [0.0, 0.4, 1.5, 3.0])
def test_ctrl_c_at_any_time_of_the_demo_leaves_a_model_that_loads(in_tmp_path, capsys, delay):
    path = in_tmp_path / "recur-demo" / "model.safetensors"
    process = started([sys.executable, "-m", "recur", "demo"], in_tmp_path, path)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert run(capsys, "sample", str(path), "--length", "5")[0] == 0


# Errors and exit codes.


@pytest.mark.parametrize("subcommand", ["sample", "eval", "info"])
def test_a_file_that_is_missing_broken_or_cut_short_is_one_sentence(trained, capsys, subcommand):
    texts = ["x"] if subcommand == "eval" else []
    Path("broken").write_bytes(b"no model")
    Path("cut").write_bytes(Path(trained).read_bytes()[:-5])
    for name in ("missing", "broken", "cut"):
        code, out, err = run(capsys, subcommand, name, *texts)
        assert code == 1 and out == ""
        assert err.startswith(f"recur: {name}: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda path: save(Chain(GRU(3, 4), Dense(4, 3)), path),
        lambda path: save(Chain(GRU(3, 4)), path, metadata={"alphabet": '"ab"'}),
        lambda path: save(Dense(1, 3), path, metadata={"alphabet": '"abc"'}),
        lambda path: save(Dense(1, 3), path, metadata={"alphabet": "[1, 2]"}),
        lambda path: save(Dense(1, 3), path, metadata={"alphabet": "{"}),
    ],
    ids=["no alphabet", "no embedding", "another size", "a list", "damaged"],
)
def test_a_model_of_something_else_is_refused_by_name(in_tmp_path, capsys, make):
    make("m.safetensors")
    code, _, err = run(capsys, "sample", "m.safetensors")
    assert code == 1 and err.startswith("recur: m.safetensors: no character model")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["train"],
        ["train", "x", "--cell", "perceptron"],
        ["train", "x", "--hidden", "0"],
        ["train", "x", "--hidden", "many"],
        ["train", "x", "--dropout", "1"],
        ["sample", "m", "--temperature", "-1"],
    ],
)
def test_arguments_that_make_no_sense_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: recur" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    from recur._version import __version__

    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"recur {__version__}\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(in_tmp_path, capsys):
    (in_tmp_path / "file").write_text("")
    code, _, err = run(capsys, "demo", "--folder", "file/folder")
    assert code == 1 and err.startswith("recur: file/folder: ")
