"""NumPy twins of the cell kernels, written from the equations in their docstrings.

    RNN     h' = act(Wi x + Wh h + b)
    LSTM    g = Wi x + Wh h + b in row blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);
            h' = s(u) tanh(c'), with peepholes i += p_i c, f += p_f c, u += p_o c'
    GRU     r, z = s(Wi x + Wh h + b);  n = tanh(Wi_n x + b_n + r (Wh_n h + bh));
            h' = (1-z) n + z h
    GRUv3   the same with n = tanh(Wi_n x + b_n + Whh (r h))

Arrays have the features last, as the kernels': x (B, I), h (B, H), X (T, B, I).  Everything is
computed in float64 whatever the dtype of the weights, one step at a time, without any packing.

    twin = LSTM(Wi, Wh, b)
    state, tape = twin.step(x, h, c)
    dx, dstate, gradients = twin.step_backward(tape, (dh, dc))
    Y, state, tapes = twin.sequence(X, h, c, lengths=None)
    dX, dstate, gradients = twin.sequence_backward(tapes, dY, (dh, dc))
"""

import numpy as np


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


# name: (function, its derivative in terms of its value)
FUNCTIONS = {
    "identity": (lambda x: x, lambda y: np.ones_like(y)),
    "tanh": (np.tanh, lambda y: 1 - y * y),
    "relu": (lambda x: np.maximum(x, 0), lambda y: (y > 0) * 1.0),
    "sigmoid": (sigmoid, lambda y: y * (1 - y)),
    "hard_sigmoid": (
        lambda x: np.clip(0.2 * x + 0.5, 0, 1),
        lambda y: 0.2 * ((y > 0) & (y < 1)),
    ),
}


def as_float64(array):
    return None if array is None else np.asarray(array, np.float64)


class Cell:
    """The step's loop over time and the sum of its weight gradients; a cell adds the two steps."""

    n_states = 1

    def __init__(self, Wi, Wh, b=None, **more):
        weights = {"Wi": Wi, "Wh": Wh, "b": b, **more}
        self.weights = {k: as_float64(w) for k, w in weights.items() if w is not None}
        self.Wi, self.Wh = self.weights["Wi"], self.weights["Wh"]
        self.b = self.weights.get("b", 0.0)

    def step(self, x, *state):
        return self.forward(as_float64(x), *map(as_float64, state))

    def step_backward(self, tape, dstate):
        shape = tape["h"].shape
        dstate = [np.zeros(shape) if d is None else as_float64(d) for d in dstate]
        dx, dstate, gradients = self.backward(tape, *dstate)
        return dx, dstate, {k: g for k, g in gradients.items() if k in self.weights}

    def sequence(self, X, *state, lengths=None):
        X, state = as_float64(X), tuple(map(as_float64, state))
        Y, tapes = np.zeros((*X.shape[:2], self.Wh.shape[1])), []
        for t, x in enumerate(X):
            live = np.ones(len(x), bool) if lengths is None else t < np.asarray(lengths)
            new, tape = self.step(np.where(live[:, None], x, 0), *state)
            state = tuple(np.where(live[:, None], n, s) for n, s in zip(new, state, strict=True))
            Y[t] = np.where(live[:, None], state[0], 0)
            tapes.append((live, tape))
        return Y, state, tapes

    def sequence_backward(self, tapes, dY, dstate):
        shape = (len(tapes[0][0]), self.Wh.shape[1])
        dstate = [np.zeros(shape) if d is None else as_float64(d) for d in dstate]
        total = {k: np.zeros_like(w) for k, w in self.weights.items()}
        dX = np.zeros((len(tapes), shape[0], self.Wi.shape[1]))
        for t in reversed(range(len(tapes))):
            live, tape = tapes[t]
            live = live[:, None]
            given = [np.where(live, d, 0) for d in dstate]
            if dY is not None:
                given[0] = given[0] + np.where(live, as_float64(dY[t]), 0)
            dX[t], before, gradients = self.step_backward(tape, given)
            dstate = [np.where(live, b, d) for b, d in zip(before, dstate, strict=True)]
            for k, g in gradients.items():
                total[k] += g
        return dX, tuple(dstate), total


class RNN(Cell):
    def __init__(self, Wi, Wh, b=None, *, act="tanh"):
        super().__init__(Wi, Wh, b)
        self.act, self.slope = FUNCTIONS[act]

    def forward(self, x, h):
        y = self.act(x @ self.Wi.T + h @ self.Wh.T + self.b)
        return (y,), {"x": x, "h": h, "y": y}

    def backward(self, tape, dh):
        dg = dh * self.slope(tape["y"])
        gradients = {"Wi": dg.T @ tape["x"], "Wh": dg.T @ tape["h"], "b": dg.sum(0)}
        return dg @ self.Wi, (dg @ self.Wh,), gradients


class LSTM(Cell):
    n_states = 2

    def __init__(self, Wi, Wh, b=None, *, peephole=None, gate="sigmoid"):
        super().__init__(Wi, Wh, b, peephole=peephole)
        self.p_i, self.p_f, self.p_o = self.weights.get("peephole", np.zeros((3, 1)))
        self.gate, self.slope = FUNCTIONS[gate]

    def forward(self, x, h, c):
        i, f, n, u = np.split(x @ self.Wi.T + h @ self.Wh.T + self.b, 4, axis=1)
        i, f, n = self.gate(i + self.p_i * c), self.gate(f + self.p_f * c), np.tanh(n)
        c_new = f * c + i * n
        u = self.gate(u + self.p_o * c_new)
        tape = {"x": x, "h": h, "c": c, "i": i, "f": f, "n": n, "u": u, "c_new": c_new}
        return (u * np.tanh(c_new), c_new), tape

    def backward(self, tape, dh, dc):
        x, h, c, i, f, n, u, c_new = tape.values()
        tanh_c = np.tanh(c_new)
        du = dh * tanh_c * self.slope(u)
        dc = dc + dh * u * (1 - tanh_c**2) + du * self.p_o
        di, df, dn = dc * n * self.slope(i), dc * c * self.slope(f), dc * i * (1 - n**2)
        dg = np.concatenate([di, df, dn, du], axis=1)
        gradients = {
            "Wi": dg.T @ x,
            "Wh": dg.T @ h,
            "b": dg.sum(0),
            "peephole": np.stack([(di * c).sum(0), (df * c).sum(0), (du * c_new).sum(0)]),
        }
        return dg @ self.Wi, (dg @ self.Wh, dc * f + di * self.p_i + df * self.p_f), gradients


class GRU(Cell):
    def __init__(self, Wi, Wh, b=None, *, bh=None, gate="sigmoid"):
        super().__init__(Wi, Wh, b, bh=bh)
        self.bh = self.weights.get("bh", 0.0)
        self.gate, self.slope = FUNCTIONS[gate]

    def forward(self, x, h):
        r, z, n = np.split(x @ self.Wi.T + self.b, 3, axis=1)
        hr, hz, hn = np.split(h @ self.Wh.T, 3, axis=1)
        r, z, hn = self.gate(r + hr), self.gate(z + hz), hn + self.bh
        n = np.tanh(n + r * hn)
        return ((1 - z) * n + z * h,), {"x": x, "h": h, "r": r, "z": z, "n": n, "hn": hn}

    def backward(self, tape, dh):
        x, h, r, z, n, hn = tape.values()
        dn = dh * (1 - z) * (1 - n**2)
        dz = dh * (h - n) * self.slope(z)
        dr = dn * hn * self.slope(r)
        dg = np.concatenate([dr, dz, dn], axis=1)
        dgh = np.concatenate([dr, dz, dn * r], axis=1)
        gradients = {
            "Wi": dg.T @ x,
            "Wh": dgh.T @ h,
            "b": dg.sum(0),
            "bh": (dn * r).sum(0),
        }
        return dg @ self.Wi, (dgh @ self.Wh + dh * z,), gradients


class GRUv3(Cell):
    def __init__(self, Wi, Wh, b=None, *, Whh, gate="sigmoid"):
        super().__init__(Wi, Wh, b, Whh=Whh)
        self.Whh = self.weights["Whh"]
        self.gate, self.slope = FUNCTIONS[gate]

    def forward(self, x, h):
        r, z, n = np.split(x @ self.Wi.T + self.b, 3, axis=1)
        hr, hz = np.split(h @ self.Wh.T, 2, axis=1)
        r, z = self.gate(r + hr), self.gate(z + hz)
        n = np.tanh(n + (r * h) @ self.Whh.T)
        return ((1 - z) * n + z * h,), {"x": x, "h": h, "r": r, "z": z, "n": n}

    def backward(self, tape, dh):
        x, h, r, z, n = tape.values()
        dn = dh * (1 - z) * (1 - n**2)
        dz = dh * (h - n) * self.slope(z)
        drh = dn @ self.Whh
        dr = drh * h * self.slope(r)
        drz = np.concatenate([dr, dz], axis=1)
        dg = np.concatenate([drz, dn], axis=1)
        gradients = {
            "Wi": dg.T @ x,
            "Wh": drz.T @ h,
            "b": dg.sum(0),
            "Whh": dn.T @ (r * h),
        }
        return dg @ self.Wi, (drz @ self.Wh + drh * r + dh * z,), gradients
