"""The training loop, and checkpoints from which it goes on as if it had never stopped."""

from __future__ import annotations

import importlib
import io
import math
import os
import signal
import sys
import threading

import numpy as np
import pytest

from recur.data import DataLoader, windows
from recur.errors import FormatError, RecurError, ShapeError, StateError
from recur.gradients import withgradient
from recur.io import safetensors
from recur.io.model import load
from recur.layers import Chain, Dense, Dropout
from recur.losses import logitcrossentropy, mse
from recur.module import Module, named_params, seed, state_dict
from recur.optim import Adam, ClipNorm, Descent, OptimiserChain, setup, update
from recur.recurrent import GRU, LSTM, reset
from recur.train import History, train
from recur.train.progress import Progress


def network(dropout: float = 0.0, dtype=np.float32, start: int = 0) -> Chain:
    rng = np.random.default_rng(start)
    middle = [Dropout(dropout, rng=rng)] if dropout else []
    return Chain(GRU(3, 5, rng=rng, dtype=dtype), *middle, Dense(5, 2, rng=rng, dtype=dtype))


def batches(count: int, dtype=np.float32) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    shapes = [(3, 4, 6), (2, 4, 6)]
    return [tuple(rng.standard_normal(s).astype(dtype) for s in shapes) for _ in range(count)]


def squared(model, x, y):
    return mse(model(x), y)


def weights(model) -> bytes:
    return b"".join(p.value.tobytes() for p in named_params(model).values())


def everything(model) -> dict[str, bytes]:
    return {path: array.tobytes() for path, array in state_dict(model, include_state=True).items()}


def run(model, data, **options) -> History:
    opt = options.pop("opt", None) or setup(OptimiserChain(ClipNorm(1.0), Adam(0.01)), model)
    return train(squared, model, data, opt, progress=False, **options)


def test_training_is_the_plain_loop(dtype):
    data = batches(4, dtype)
    ours, plain = network(dtype=dtype), network(dtype=dtype)
    history = run(ours, data, epochs=2, opt=setup(Adam(0.01), ours))
    opt, losses = setup(Adam(0.01), plain), []
    for _ in range(2):
        reset(plain)
        for x, y in data:
            loss, grads = withgradient(lambda m, x=x, y=y: squared(m, x, y), plain)
            update(opt, plain, grads)
            losses.append(float(loss))
    assert everything(ours) == everything(plain)
    assert history.losses == losses
    assert history.steps == 8 and history.stopped == "finished" and history.seconds > 0.0


def test_accumulating_over_batches_is_one_update_by_the_batch_of_them_all():
    data = batches(4, np.float64)
    parts, whole = network(dtype=np.float64), network(dtype=np.float64)
    joined = [
        tuple(np.concatenate(arrays, axis=1) for arrays in zip(*data[i : i + 2], strict=True))
        for i in (0, 2)
    ]
    history = run(parts, data, accumulate=2, reset="batch", opt=setup(Descent(0.1), parts))
    wholes = run(whole, joined, reset="batch", opt=setup(Descent(0.1), whole))
    np.testing.assert_allclose(history.losses, wholes.losses, rtol=1e-12)
    for a, b in zip(named_params(parts).values(), named_params(whole).values(), strict=True):
        np.testing.assert_allclose(a.value, b.value, rtol=1e-10)


def test_the_last_update_of_an_epoch_averages_over_what_is_left():
    data = batches(3, np.float64)
    model, alone = network(dtype=np.float64), network(dtype=np.float64)
    run(model, data, accumulate=2, reset="batch", opt=setup(Descent(0.1), model))
    run(alone, data[:2], accumulate=2, reset="batch", opt=setup(Descent(0.1), alone))
    run(alone, data[2:], reset="batch", opt=setup(Descent(0.1), alone))
    assert weights(model) == weights(alone)


@pytest.mark.parametrize(
    ("when", "resets"), [("epoch", [0, 3]), ("batch", [0, 1, 2, 3, 4, 5]), ("never", [])]
)
def test_states_go_back_to_their_start_when_asked(when, resets):
    model = network()
    model(np.ones((3, 4), np.float32))  # a state to be reset
    found, calls = [], 0

    def loss(m, x, y):
        nonlocal calls
        if m.layers[0].at_start:
            found.append(calls)
        calls += 1
        return squared(m, x, y)

    train(loss, model, batches(3), setup(Descent(), model), epochs=2, reset=when, progress=False)
    assert found == resets


def test_a_batch_that_is_no_tuple_is_one_argument():
    model = network()
    data = [np.ones((3, 4, 2), np.float32)]
    history = train(
        lambda m, x: (m(x) ** 2).sum(), model, data, setup(Descent(), model), progress=False
    )
    assert history.steps == 1


def test_validation_sees_the_start_state_and_no_scope_and_leaves_training_alone():
    data = batches(4)
    watched, alone = network(dropout=0.5), network(dropout=0.5)
    seen = []

    def validation(model):
        assert model.layers[0].at_start
        y = model(data[0][0])
        assert isinstance(y, np.ndarray)  # plain: nothing is recorded
        seen.append(y.tobytes())
        return float(np.mean(y**2))

    history = run(watched, data, validation=validation, validate_every=2)
    run(alone, data)
    assert everything(watched) == everything(alone)
    assert [step for step, _ in history.validations] == [2, 4]
    assert len(set(seen)) == 2


def test_validation_by_batches_is_their_mean_loss_after_every_epoch():
    data = batches(5)
    model = network()
    history = run(model, data[:3], epochs=2, validation=data[3:])
    reset(model)
    expected = np.mean([squared(model, x, y) for x, y in data[3:]])
    assert [step for step, _ in history.validations] == [3, 6]
    assert history.validations[-1][1] == pytest.approx(float(expected), rel=1e-6)


def test_training_stops_when_patience_is_over_and_ends_with_the_best_weights():
    losses = iter([3.0, 2.0, 2.5, 2.0])
    seen = []

    def validation(model):
        seen.append(weights(model))
        return next(losses)

    model = network()
    history = run(model, batches(2), epochs=10, validation=validation, patience=2, keep_best=True)
    assert history.stopped == "patience" and history.best == 2.0
    assert [loss for _, loss in history.validations] == [3.0, 2.0, 2.5, 2.0]
    assert weights(model) == seen[1] != seen[3]


def test_without_keep_best_the_last_weights_stay():
    model, seen = network(), []
    run(model, batches(2), epochs=3, validation=lambda m: seen.append(weights(m)) or len(seen))
    assert weights(model) == seen[-1] != seen[0]


def test_training_ends_after_so_many_updates_wherever_that_is(tmp_path):
    path = tmp_path / "run.safetensors"
    first, longer = network(), network()
    assert run(first, batches(3), epochs=9, updates=4, checkpoint=path).stopped == "finished"
    assert run(longer, batches(3), epochs=9, updates=5).steps == 5
    again = run(first, batches(3), epochs=9, updates=5, checkpoint=path, resume=True)
    assert again.steps == 5 and weights(first) == weights(longer)


def test_callbacks_are_told_of_steps_validations_and_epochs_in_order():
    model, told = network(), []
    history = run(
        model,
        batches(2),
        epochs=2,
        validation=lambda m: 1.5,
        callbacks=[lambda event: told.append(event)],
    )
    kinds = [(event.kind, event.epoch, event.step) for event in told]
    one = [("step", 0, 1), ("step", 0, 2), ("epoch", 0, 2), ("validation", 0, 2)]
    assert kinds == one + [(kind, 1, step + 2) for kind, _, step in one]
    assert told[2].loss == pytest.approx(np.mean(history.losses[:2]))
    assert told[3].loss == 1.5
    assert told[0].model is model and told[0].history is history


def test_a_callback_that_returns_true_stops_training():
    model = network()
    history = run(model, batches(4), callbacks=lambda event: event.step == 3)
    assert history.steps == 3 and history.stopped == "callback"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "count from 1"),
        ({"updates": 0}, "count from 1"),
        ({"checkpoint_every": 0}, "count from 1"),
        ({"validate_every": 0, "validation": len}, "count from 1"),
        ({"reset": "always"}, "reset='always'"),
        ({"patience": 2}, "need validation"),
        ({"keep_best": True}, "need validation"),
        ({"metadata": {"model": "x"}}, "belong|uses these names"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_happens(options, message):
    model = network()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        run(model, batches(1), **options)
    assert weights(model) == before


def test_data_that_runs_only_once_is_named():
    model = network()
    with pytest.raises(ValueError, match="no batch in epoch 1"):
        run(model, iter(batches(2)), epochs=2)


def test_a_loss_that_is_not_finite_stops_training_before_it_reaches_the_weights():
    data = batches(3)
    data[2][1][:] = np.inf
    model, before = network(), network()
    run(before, data[:2])
    with pytest.raises(FloatingPointError, match="inf at update 3"):
        run(model, data)
    assert weights(model) == weights(before)


# Checkpoints.


class Counter:
    """A callback with a state of its own."""

    def __init__(self):
        self.seen = np.zeros(2)

    def __call__(self, event):
        self.seen += [1.0, event.loss]

    def state_dict(self):
        return {"seen": self.seen.copy()}

    def load_state_dict(self, saved):
        self.seen[:] = saved["seen"]


@pytest.mark.parametrize("stop", range(1, 12))
@pytest.mark.parametrize("kind", ["list", "windows", "loader"])
def test_a_resumed_run_gives_the_numbers_of_one_that_never_stopped(tmp_path, kind, stop):
    """Stopped after any update: weights, states, optimiser, generators, data, callbacks."""

    def go(until=None, **options):
        seed(5)
        model = network(dropout=0.3)
        own, counter = np.random.default_rng(9), Counter()
        opt = setup(OptimiserChain(ClipNorm(1.0), Adam(0.01)), model)

        def noisy(m, x, y):
            return squared(m, x + 0.1 * own.standard_normal(x.shape).astype(x.dtype), y)

        history = train(
            noisy,
            model,
            data(),
            opt,
            epochs=3,
            accumulate=2,
            validation=lambda m: float(np.mean(m(batches(1)[0][0]) ** 2)),
            validate_every=3,
            keep_best=True,
            callbacks=[counter, lambda event: until is not None and event.step >= until],
            checkpoint_every=5,
            generators={"noise": own},
            progress=False,
            **options,
        )
        return model, opt, counter, history

    def data():
        if kind == "list":
            return batches(7)
        rng = np.random.default_rng(3)
        x, y = (rng.standard_normal((n, 200)).astype(np.float32) for n in (3, 2))
        if kind == "windows":
            return windows((x, y), batch=4, steps=6)
        x, y = (a.reshape(-1, 4, 50) for a in (x, y))
        return DataLoader((x, y), batchsize=7, shuffle=True)

    model, opt, counter, history = go()
    path = tmp_path / "run.safetensors"
    go(until=stop, checkpoint=path)
    again = go(checkpoint=path, resume=True)
    assert everything(again[0]) == everything(model)
    assert again[2].seen.tolist() == counter.seen.tolist()
    assert again[3].losses == history.losses
    assert again[3].validations == history.validations
    flat, expected = io.StringIO(), io.StringIO()
    print(again[1].state_dict(), file=flat)
    print(opt.state_dict(), file=expected)
    assert flat.getvalue() == expected.getvalue()


def test_a_checkpoint_is_a_model_that_loads(tmp_path):
    path = tmp_path / "run.safetensors"
    model = network()
    run(model, batches(3), checkpoint=path, metadata={"note": "mine"})
    assert everything(load(path)) == everything(model)
    assert safetensors.read_header(path).metadata["note"] == "mine"


def test_a_finished_run_resumed_does_nothing_more_until_epochs_are_added(tmp_path):
    path = tmp_path / "run.safetensors"
    first, longer = network(), network()
    run(first, batches(3), checkpoint=path)
    before = weights(first)
    assert run(first, batches(3), checkpoint=path, resume=True).steps == 3
    assert weights(first) == before
    run(longer, batches(3), epochs=2)
    run(first, batches(3), epochs=2, checkpoint=path, resume=True)
    assert weights(first) == weights(longer)


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    path = tmp_path / "run.safetensors"
    assert run(network(), batches(3), checkpoint=path, resume=True).steps == 3
    assert path.exists()


def test_without_resume_an_old_checkpoint_is_overwritten(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), batches(3), checkpoint=path)
    assert run(network(), batches(2), checkpoint=path).steps == 2


def test_a_run_out_of_patience_stays_so_when_it_is_resumed(tmp_path):
    options = {"epochs": 9, "patience": 1, "checkpoint": tmp_path / "run.safetensors"}
    first = run(network(), batches(2), validation=lambda m: 1.0, **options)
    again = run(network(), batches(2), validation=lambda m: 1.0, resume=True, **options)
    assert first.steps == again.steps == 4 and again.stopped == "patience"


class Own(Module):
    """A layer that is not registered."""

    def __init__(self):
        self.inner = Dense(3, 2, rng=np.random.default_rng(0))

    def __call__(self, x):
        return self.inner(x)


def test_a_model_with_layers_of_your_own_resumes_but_does_not_load(tmp_path):
    path = tmp_path / "run.safetensors"
    whole, first, again = Own(), Own(), Own()
    run(whole, batches(4), epochs=2)
    run(first, batches(4), epochs=1, checkpoint=path)
    run(again, batches(4), epochs=2, checkpoint=path, resume=True)
    assert weights(again) == weights(whole)
    with pytest.raises(FormatError, match="not registered"):
        load(path)


def larger() -> Chain:
    return Chain(GRU(3, 6), Dense(6, 2))


@pytest.mark.parametrize(
    ("make", "options", "error"),
    [
        (larger, {}, ShapeError),
        (lambda: Chain(LSTM(3, 5), Dense(5, 2)), {}, RecurError),
        (lambda: network(dropout=0.5), {}, StateError),
        (network, {"callbacks": Counter()}, FormatError),
        (network, {"generators": {"mine": np.random.default_rng(0)}}, StateError),
    ],
    ids=["sizes", "kind", "random layers", "callbacks", "generators"],
)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_changes(tmp_path, make, options, error):
    path = tmp_path / "run.safetensors"
    run(network(), batches(2), checkpoint=path)
    model = make()
    before = everything(model)
    with pytest.raises(error, match=r"run\.safetensors"):
        run(model, batches(2), checkpoint=path, resume=True, **options)
    assert everything(model) == before


def test_another_optimiser_is_refused_and_nothing_changes(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), batches(2), checkpoint=path)
    model = network(start=1)
    before, opt = everything(model), setup(Descent(0.1), model)
    with pytest.raises(StateError, match="Descent"):
        run(model, batches(2), checkpoint=path, resume=True, opt=opt)
    assert everything(model) == before


def test_damaged_checkpoints_are_format_errors(tmp_path, rng):
    path = tmp_path / "run.safetensors"
    run(network(), batches(2), checkpoint=path)
    arrays, metadata = safetensors.read(path)
    text = metadata["checkpoint"]
    for _ in range(60):
        at = int(rng.integers(len(text)))
        new = text[:at] + str(rng.choice(list('0{}[]",:ax'))) + text[at + int(rng.integers(3)) :]
        safetensors.write(path, arrays, {**metadata, "checkpoint": new})
        model = network(start=1)
        before = everything(model)
        try:
            run(model, batches(2), checkpoint=path, resume=True)
        except RecurError:
            assert everything(model) == before


def test_a_plain_model_file_is_no_checkpoint(tmp_path):
    from recur.io.model import save

    path = tmp_path / "m.safetensors"
    save(network(), path)
    with pytest.raises(FormatError, match=r"not a checkpoint. Open it with recur.load"):
        run(network(), batches(2), checkpoint=path, resume=True)


# Interrupts.


def press_at(step):
    def callback(event):
        if event.kind == "step" and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return callback


def test_ctrl_c_completes_the_update_and_the_checkpoint_first(tmp_path):
    path = tmp_path / "run.safetensors"
    whole, first, again = network(), network(), network()
    run(whole, batches(4))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(first, batches(4), checkpoint=path, callbacks=press_at(2))
    assert signal.getsignal(signal.SIGINT) is before
    assert everything(load(path)) == everything(first)
    history = run(again, batches(4), checkpoint=path, callbacks=lambda event: None, resume=True)
    assert weights(again) == weights(whole) and history.steps == 4


def test_a_second_ctrl_c_is_raised_at_once():
    def twice(event):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        run(network(), batches(4), callbacks=twice)


def test_training_in_another_thread_leaves_signals_alone():
    handlers = []
    model = network()

    def work():
        run(model, batches(2), callbacks=lambda e: handlers.append(signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert handlers and all(handler is before for handler in handlers)


# What is shown.


def test_logs_get_plain_lines(monkeypatch, capsys):
    module = importlib.import_module("recur.train.progress")
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    model = network()
    train(squared, model, batches(2), setup(Descent(0.01), model), validation=lambda m: 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/2: epoch 0, loss ")
    assert lines[2].startswith("epoch 0, mean loss ")
    assert lines[3] == "epoch 0, validation loss 0.5"


def test_a_short_run_still_says_where_it_ended(capsys):
    model = network()
    train(
        squared,
        model,
        batches(2),
        setup(Descent(0.01), model),
        progress=lambda event: f"{event.kind} {event.step}",
    )
    assert capsys.readouterr().err.splitlines() == ["epoch 2", "step 2/2: step 2"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar():
    pytest.importorskip("tqdm")
    terminal = Terminal()
    progress = Progress(4, 1, terminal)
    progress.step(2, "loss 1")
    progress.line("a line that stays")
    progress.step(4, "loss 0")
    progress.close()
    assert "a line that stays\n" in terminal.getvalue()
    assert "4/4" in terminal.getvalue() and "loss 0" in terminal.getvalue()


def test_a_terminal_without_tqdm_gets_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = Terminal()
    progress = Progress(None, 0, terminal)
    progress.step(3, "loss 1")
    progress.close()
    assert terminal.getvalue() == "step 3: loss 1\n"


def test_a_character_model_learns_a_pattern():
    text = np.array([0, 1, 1, 2] * 200)
    rng = np.random.default_rng(0)
    model = Chain(LSTM(3, 8, rng=rng), Dense(8, 3, rng=rng))
    hot = np.eye(3, dtype=np.float32)[text].T
    data = windows((hot[:, :-1], text[1:]), batch=4, steps=10)
    history = train(
        lambda m, x, y: logitcrossentropy(m(x), y),
        model,
        data,
        setup(Adam(0.02), model),
        epochs=8,
        progress=False,
    )
    assert history.losses[0] > 0.9 and math.fsum(history.losses[-3:]) / 3 < 0.1
