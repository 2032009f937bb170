"""Fake tensors against real ones: each operation's bytes, for the layers and losses that people use."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labsupport.measure import MemoryLedger
from labsupport.train import CannotPlan, Recipe, Workload, build_step
from labsupport.train.traces import trace


def workload(model, shape, loss=None, target=lambda n: None, inputs=None):
    return Workload(
        "part",
        model,
        lambda n, device: ((inputs or (lambda m: torch.randn(m, *shape)))(n), target(n)),
        loss or (lambda model, batch: model(batch[0]).float().square().mean()),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def assert_the_same(each):
    for batch in (2, 5):
        traced = trace(each, Recipe(batch_size=batch), "cpu")
        step = build_step(each, Recipe(batch_size=batch), "cpu")
        with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
            step()
            step()
        assert [one.nbytes for one in traced.storages] == [one.nbytes for one in ledger.log.storages]
        assert traced.changes.cumsum().max() == ledger.peak_bytes


def linear():
    return nn.Linear(8, 8)


def like(n):
    return torch.rand(n, 8)


def classes(n):
    return torch.randint(8, (n,))


LOSSES = {
    # These four compute element by element where the result will be: its storage is as large as the input.
    "mse": (F.mse_loss, like),
    "mse sum": (lambda a, b: F.mse_loss(a, b, reduction="sum"), like),
    "mse none": (lambda a, b: F.mse_loss(a, b, reduction="none").mean(), like),
    "mse broadcast": (lambda a, b: F.mse_loss(a, b[:1].expand_as(a)), like),
    "smooth l1": (F.smooth_l1_loss, like),
    "bce": (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b), like),
    "soft margin": (F.soft_margin_loss, lambda n: torch.ones(n, 8)),
    "l1": (F.l1_loss, like),
    "huber": (F.huber_loss, like),
    "bce logits": (F.binary_cross_entropy_with_logits, like),
    "kl": (lambda a, b: F.kl_div(a.log_softmax(-1), b), like),
    "cross entropy": (F.cross_entropy, classes),
    "cross entropy sum": (lambda a, b: F.cross_entropy(a, b, reduction="sum"), classes),
    "label smoothing": (lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1), classes),
    "poisson": (F.poisson_nll_loss, like),
    "multi margin": (F.multi_margin_loss, classes),
    "multilabel margin": (F.multilabel_margin_loss, lambda n: torch.randint(8, (n, 8))),
    "hinge": (F.hinge_embedding_loss, lambda n: torch.ones(n, 8)),
    "cosine": (lambda a, b: F.cosine_embedding_loss(a, a.flip(0), b), lambda n: torch.ones(n)),
    "triplet": (lambda a, b: F.triplet_margin_loss(a, a.flip(0), b), like),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, target = LOSSES[name]
    assert_the_same(workload(linear, (8,), lambda model, batch: loss(model(batch[0]), batch[1]), target))


ACTIVATIONS = [
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Hardswish, nn.Mish),
    *(nn.Hardsigmoid, nn.LeakyReLU, nn.PReLU, nn.Softsign, nn.LogSigmoid, nn.RReLU, nn.GLU, nn.Hardtanh),
    *(nn.Dropout, nn.AlphaDropout),
]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind):
    assert_the_same(workload(lambda: nn.Sequential(nn.Linear(8, 8), kind()), (8,)))


def after_convolution(*parts):
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 3), *(make() for make in parts))


IMAGES = {
    "strided": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1),
    "one by one": lambda: nn.Conv2d(4, 8, 1),
    "dilated": lambda: nn.Conv2d(4, 8, 3, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2),
    "circular": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "reflection": lambda: nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(4, 4, 3)),
    "channels last": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last),
    "batch norm": after_convolution(lambda: nn.BatchNorm2d(4)),
    "batch norm first": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: nn.LayerNorm([4, 16, 16]),
    "RMS norm": lambda: nn.RMSNorm([16]),
    "local response norm": after_convolution(lambda: nn.LocalResponseNorm(2)),
    "max pool": after_convolution(lambda: nn.MaxPool2d(2)),
    "average pool": after_convolution(lambda: nn.AvgPool2d(2)),
    "adaptive average": after_convolution(lambda: nn.AdaptiveAvgPool2d(3)),
    "adaptive max": after_convolution(lambda: nn.AdaptiveMaxPool2d(3)),
    "nearest": after_convolution(lambda: nn.Upsample(scale_factor=2)),
    "bilinear": after_convolution(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "pixel shuffle": after_convolution(lambda: nn.PixelShuffle(2)),
    "unfold": after_convolution(lambda: nn.Unfold(3)),
    "dropout 2d": after_convolution(nn.Dropout2d),
    "flatten": after_convolution(nn.Flatten, lambda: nn.Linear(4 * 14 * 14, 3)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_layers_for_images(name):
    assert_the_same(workload(IMAGES[name], (4, 16, 16)))


class First(nn.Module):
    """A module's first result, or one that takes its input three times."""

    def __init__(self, part, times=1, **options):
        super().__init__()
        self.part, self.times, self.options = part, times, options

    def forward(self, x):
        return self.part(*[x] * self.times, **self.options)[0]


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.qkv, self.options = nn.Linear(8, 24), options

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 2, 12).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, **self.options)


SEQUENCES = {
    "RNN": lambda: First(nn.RNN(8, 16, batch_first=True)),
    "GRU": lambda: First(nn.GRU(8, 16, batch_first=True)),
    "attention": lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3, need_weights=False),
    "attention with weights": lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "fused": Attention,
    "fused, causal": lambda: Attention(is_causal=True),
    "fused, dropout": lambda: Attention(dropout_p=0.1),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "conv 1d": lambda: nn.Conv1d(6, 4, 3),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_layers_for_sequences(name):
    assert_the_same(workload(SEQUENCES[name], (6, 8)))


@pytest.mark.parametrize("make", [lambda: nn.Embedding(10, 4), lambda: nn.EmbeddingBag(10, 4)])
def test_embeddings(make):
    assert_the_same(workload(make, (), inputs=lambda n: torch.randint(10, (n, 3))))


def test_conv_3d():
    assert_the_same(workload(lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.MaxPool3d(2)), (2, 8, 8, 8)))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_is_refused_for_its_workspace_and_planned_without_onednn(bidirectional):
    lstm = workload(lambda: First(nn.LSTM(8, 16, batch_first=True, bidirectional=bidirectional)), (5, 8))
    with torch.backends.mkldnn.flags(enabled=True), pytest.raises(CannotPlan, match="workspace"):
        trace(lstm, Recipe(batch_size=2), "cpu")
    with torch.backends.mkldnn.flags(enabled=False):
        assert_the_same(lstm)


def test_sparse_gradients_are_refused():
    sparse = workload(lambda: nn.Embedding(10, 4, sparse=True), (), inputs=lambda n: torch.randint(10, (n, 3)))
    with pytest.raises(CannotPlan, match="sparse"):
        trace(sparse, Recipe(batch_size=2), "cpu")
