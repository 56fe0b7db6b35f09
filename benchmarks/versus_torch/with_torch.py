"""The tasks in PyTorch."""

import tasks
import torch
from tasks import ALPHABET, CLASSES, EMBEDDING, HIDDEN, STEPS
from torch import nn
from torch.nn import functional as F


def fill(parameter, array):
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(array))


def lstm(n_in, n_out, weights):
    layer = nn.LSTM(n_in, n_out)
    fill(layer.weight_ih_l0, weights[0])
    fill(layer.weight_hh_l0, weights[1])
    fill(layer.bias_ih_l0, weights[2])
    nn.init.zeros_(layer.bias_hh_l0)
    layer.bias_hh_l0.requires_grad_(False)  # recur has one bias
    return layer


def dense(weights):
    layer = nn.Linear(weights[0].shape[1], weights[0].shape[0])
    fill(layer.weight, weights[0])
    fill(layer.bias, weights[1])
    return layer


class CharacterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, EMBEDDING)
        fill(self.embedding.weight, tasks.EMBEDDING_WEIGHT)
        self.lstm = lstm(EMBEDDING, HIDDEN, tasks.CHARACTER_LSTM)
        self.head = dense(tasks.LOGITS)

    def forward(self, x, state=None):
        y, state = self.lstm(self.embedding(x), state)
        return self.head(y), state


def learned(module):
    return [p for p in module.parameters() if p.requires_grad]


def training():
    model = CharacterModel()
    opt = torch.optim.Adam(learned(model), tasks.RATE)
    x, y = (torch.from_numpy(a.T.copy()) for a in tasks.WINDOW)

    def run():
        opt.zero_grad()
        loss = F.cross_entropy(model(x)[0].reshape(-1, ALPHABET), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(learned(model), tasks.CLIP)
        opt.step()
        return loss.item()

    return run, lambda: [run() for _ in range(3)]


def sampling():
    model = CharacterModel().eval()
    characters = [torch.tensor([[int(c)]]) for c in tasks.WINDOW[0, 0]]
    t, state = 0, None

    def run():
        nonlocal t, state
        t = (t + 1) % STEPS
        with torch.inference_mode():
            logits, state = model(characters[t], state)
        return logits

    return run, lambda: run()[0, 0, :3].tolist()


def adam(**options):
    def build():
        model = lstm(128, 256, tasks.MIDDLE)
        model(torch.from_numpy(tasks.X))[0].sum().backward()
        opt = torch.optim.Adam(learned(model), tasks.RATE, **options)

        def result():
            opt.step()
            return model.weight_hh_l0[0, :3].tolist()

        return opt.step, result

    return build


def gradients_of(module, forward):
    def run():
        module.zero_grad()
        loss = forward()
        loss.backward()
        return loss.item()

    return run


def layer():
    model, X = lstm(128, 256, tasks.MIDDLE), torch.from_numpy(tasks.X)
    run = gradients_of(model, lambda: model(X)[0].sum())

    def result():
        run()
        return model.weight_hh_l0.grad[0, :3].tolist()

    return run, result


def layer_and_head():
    model = nn.ModuleList([lstm(128, 256, tasks.MIDDLE), dense(tasks.MIDDLE_HEAD)])
    X, labels = torch.from_numpy(tasks.X), torch.from_numpy(tasks.LABELS).reshape(-1)

    def forward():
        return F.cross_entropy(model[1](model[0](X)[0]).reshape(-1, CLASSES), labels)

    run = gradients_of(model, forward)
    return run, run


def large(dropped):
    def build():
        model = lstm(650, 650, tasks.LARGE)
        X, dY = torch.from_numpy(tasks.X_LARGE), torch.from_numpy(tasks.DY_LARGE)

        def forward():
            if not dropped:
                return (model(X)[0] * dY).sum()
            weights = {"weight_hh_l0": F.dropout(model.weight_hh_l0, 0.5)}
            return (torch.func.functional_call(model, weights, (X,))[0] * dY).sum()

        run = gradients_of(model, forward)
        return run, (lambda: None) if dropped else run

    return build


TASKS = {
    "character model, one training window": training,
    "character model, one character": sampling,
    "Adam, LSTM(128 => 256)": adam(),
    "Adam, LSTM(128 => 256), fused": adam(fused=True),
    "LSTM(128 => 256), T 100, B 16": layer,
    "the same with Dense and cross entropy": layer_and_head,
    "LSTM(650 => 650), T 35, B 20": large(False),
    "the same with dropped recurrent weights": large(True),
}

if __name__ == "__main__":
    threads, seconds = tasks.arguments()
    torch.set_num_threads(threads)
    tasks.measure(TASKS, threads, seconds)
