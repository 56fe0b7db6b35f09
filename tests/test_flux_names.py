"""docs/reference/flux-names.md: it leaves out no name of Flux, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import recur

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flux-names.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| ") and "`" in line
]
#: What the second column may begin with, besides the names of recur.
BEGINNINGS = {"cell": recur.LSTMCell(1, 1)}

#: What Flux exports, with what its pages on recurrence, training and data use besides.
FLUX = {
    "0.8": """
        Chain Dense Maxout RNN LSTM GRU Conv CrossCor ConvTranspose MaxPool MeanPool DepthwiseConv
        Dropout AlphaDropout LayerNorm BatchNorm InstanceNorm GroupNorm SkipConnection params
        mapleaves cpu gpu f32 f64 TrackedArray TrackedVector TrackedMatrix param SGD Descent ADAM
        Momentum Nesterov RMSProp ADAGrad AdaMax ADADelta AMSGrad NADAM ADAMW RADAM InvDecay
        ExpDecay WeightDecay Recur RNNCell LSTMCell GRUCell reset! truncate! hidden
        Tracker.back! Tracker.grad Tracker.data Tracker.update! forward @treelike @epochs throttle
        train! onehot onehotbatch onecold chunk batchseq batch unstack unsqueeze stack frequencies
        crossentropy logitcrossentropy binarycrossentropy logitbinarycrossentropy mse normalise
        kldivergence glorot_uniform glorot_normal σ relu leakyrelu elu swish softmax logsoftmax logσ
        testmode! loadparams! Diagonal flip @grad""",
    "0.11": """
        gradient SamePad flatten fmap trainmode! testmode! GlobalMaxPool GlobalMeanPool
        AdaptiveMaxPool AdaptiveMeanPool OADAM AdaBelief ClipValue ClipNorm pullback @adjoint
        @nograd @functor destructure DataLoader mae msle huber_loss poisson_loss hinge_loss
        squared_hinge_loss dice_coeff_loss tversky_loss label_smoothing focal_loss Optimiser
        modules paramtype early_stopping stop skip outputsize orthogonal
        kaiming_uniform kaiming_normal sparse_init""",
    "0.14": """
        Embedding Parallel PairwiseFusion GRUv3 Upsample PixelShuffle Adam NAdam AdamW RAdam OAdam
        AdaGrad AdaDelta @autosize Scale Bilinear MultiHeadAttention setup update! adjust! freeze!
        thaw! withgradient loadmodel! state OptimiserChain ClipGrad SignDecay patience plateau
        rpad_constant splitobs shuffleobs numobs getobs ctc_loss truncated_normal identity_init
        siamese_contrastive_loss binary_focal_loss f16 mish gelu selu celu relu6 hardσ hardtanh
        lisht logcosh softplus softsign softshrink tanhshrink tanh_fast sigmoid_fast rrelu trelu""",
    "0.16": """
        EmbeddingBag RNNCell LSTMCell GRUCell GRUv3Cell Recurrence initialstates @layer trainables
        rand32 randn32 zeros32 ones32 create_bias trainable trainstep! jacobian withjacobian hessian
        gpu_device cpu_device Lion Rprop AccumGrad lecun_normal nfan""",
}


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolved(name: str) -> object:
    first, *rest = name.split(".")
    found = BEGINNINGS[first] if first in BEGINNINGS else getattr(recur, first)
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("version", FLUX)
def test_every_name_of_flux_is_on_the_page(version):
    listed = {re.split(r"[(\s]", span)[0] for row in ROWS for span in spans(row[0])}
    listed |= {name.split(".")[-1] for name in listed}
    assert sorted(set(FLUX[version].split()) - listed) == []


def test_what_the_page_names_exists():
    for flux, here, _ in ROWS:
        if here != "–":
            assert spans(here), flux
            for name in spans(here):
                assert resolved(name) is not None


def test_a_name_that_is_the_same_here_is_not_said_to_be_another():
    for flux, here, _ in ROWS:
        for name in spans(flux):
            plain = name.removesuffix("!")
            if plain.isidentifier() and hasattr(recur, plain) and here != "–":
                assert plain in spans(here), name


def test_a_row_without_a_counterpart_names_nothing_that_recur_has():
    for flux, here, _ in ROWS:
        if here == "–":
            assert not [name for name in spans(flux) if hasattr(recur, name.removesuffix("!"))]


def test_exp_decay_of_flux_is_a_step_schedule():
    """ExpDecay(0.1, 0.5, 3) multiplies the rate by 0.5 after every third update."""
    rate, x = recur.Step(0.1, 0.5, 3), recur.Param(np.zeros(1))
    opt, taken = recur.setup(recur.Descent(rate), {"x": x}), []
    for _ in range(7):
        before = np.array(x.value)
        recur.update(opt, {"x": x}, {"x": np.ones(1)})
        taken.append((before - x.value).item())
    np.testing.assert_allclose(taken, [0.1] * 3 + [0.05] * 3 + [0.025], rtol=1e-6)
