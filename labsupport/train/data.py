"""Data to feed a training loop with, and the slowness of the place it comes from."""

import io
import time

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


class StoredImages(Dataset[tuple[Tensor, int]]):
    """JPEG images in a store that takes `latency_s` to open each one; items are (float[3, side, side] in 0..1, label).

    There are `count` items of at most `distinct` different images: crops of scikit-learn's two sample photographs.
    Decoding them is real work. The store's latency is emulated by waiting, which is what a process does while a
    disk or a network answers: it stands for the store, it is not one. The label says which photograph an image
    came from. Importable, so loader workers can be forked or spawned.
    """

    def __init__(
        self, count: int, *, latency_s: float = 0.0, side: int = 64, distinct: int = 64, seed: int = 0
    ) -> None:
        for name, value, low, high in (
            ("count", count, 1, 10**12),
            ("distinct", distinct, 1, 100_000),
            ("latency_s", latency_s, 0, 60),
            ("side", side, 8, 400),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name}={value}: {low} to {high} is expected")
        self.count, self.latency_s = count, latency_s
        self.files, self.labels = _crops(min(count, distinct), side, seed)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(f"index {index} of {self.count} images")
        if self.latency_s:
            time.sleep(self.latency_s)
        index %= len(self.files)
        pixels = np.asarray(Image.open(io.BytesIO(self.files[index])))
        return torch.tensor(pixels).permute(2, 0, 1) / 255, self.labels[index]


def _crops(count: int, side: int, seed: int) -> tuple[list[bytes], list[int]]:
    """JPEG files of random crops, from the sample photographs in turn."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    random = np.random.default_rng(seed)
    files, labels = [], []
    for index in range(count):
        label = index % len(photographs)
        height, width, _ = photographs[label].shape
        top, left = random.integers(height - side), random.integers(width - side)
        file = io.BytesIO()
        Image.fromarray(photographs[label][top : top + side, left : left + side]).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
        labels.append(label)
    return files, labels
