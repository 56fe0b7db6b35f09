"""The character model of `recur demo`: an embedding, an LSTM of 192, logits."""

import numpy as np

import recur
from recur.losses import logitcrossentropy

ALPHABET, EMBEDDING, HIDDEN = 100, 48, 192


class Characters:
    """Training on windows of 32 × 32 characters, and one character after the other."""

    def setup(self):
        self.m = recur.Chain(
            recur.Embedding(ALPHABET, EMBEDDING),
            recur.LSTM(EMBEDDING, HIDDEN),
            recur.Dense(HIDDEN, ALPHABET),
        )
        rule = recur.OptimiserChain(recur.ClipNorm(1.0), recur.Adam(1e-2))
        self.opt = recur.setup(rule, self.m)
        self.x, self.y = np.random.default_rng(0).integers(0, ALPHABET, (2, 32, 32))

    def time_training_window(self):
        recur.reset(self.m)
        _, grads = recur.withgradient(lambda m: logitcrossentropy(m(self.x), self.y), self.m)
        recur.update(self.opt, self.m, grads)

    def time_next_character(self):
        self.m(np.array([1]))
