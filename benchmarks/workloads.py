"""The models that the memory instruments are held against, from a small MLP to ResNet-50; tests use them too."""

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from labsupport.train import Workload

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
CLASSES = 10


def classify(model, batch):
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def images(side):
    def batch(n, device):
        return torch.randn(n, 3, side, side, device=device), torch.randint(CLASSES, (n,), device=device)

    return batch


def mlp():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def cnn():
    layers = []
    for channels_in, channels_out in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES))


class Encoder(nn.Module):
    """Tokens in, a class out: an embedding, a transformer encoder, the mean over the tokens."""

    def __init__(self, vocabulary=1000, width=64, heads=4, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens)).mean(1))


def tokens(length, vocabulary):
    def batch(n, device):
        return torch.randint(vocabulary, (n, length), device=device), torch.randint(CLASSES, (n,), device=device)

    return batch


class Recommender(nn.Module):
    """A large table, a small head: the parameters outweigh everything."""

    def __init__(self, items=200_000, width=32):
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.head = nn.Linear(width, 1)

    def forward(self, ids):
        return self.head(self.items(ids).sum(1))


def recommend(model, batch):
    ids, ratings = batch
    return mse_loss(model(ids), ratings)


def rated(n, device):
    return torch.randint(200_000, (n, 20), device=device), torch.randn(n, 1, device=device)


def named(name, model, batch, loss=classify):
    """A workload for each optimizer."""
    return {f"{name}, {kind}": Workload(f"{name}, {kind}", model, batch, loss, OPTIMIZERS[kind]) for kind in OPTIMIZERS}


WORKLOADS = {
    **named("MLP", mlp, lambda n, device: (torch.randn(n, 256, device=device), torch.randint(CLASSES, (n,)))),
    **named("CNN", cnn, images(32)),
    **named("ResNet-18, 32 px", lambda: torchvision.models.resnet18(num_classes=CLASSES), images(32)),
    **named("ResNet-50, 32 px", lambda: torchvision.models.resnet50(num_classes=CLASSES), images(32)),
    **named("ResNet-18, 224 px", lambda: torchvision.models.resnet18(num_classes=CLASSES), images(224)),
    **named("ResNet-50, 224 px", lambda: torchvision.models.resnet50(num_classes=CLASSES), images(224)),
    **named("encoder", Encoder, tokens(64, 1000)),
    **named("embedding", Recommender, rated, recommend),
}
