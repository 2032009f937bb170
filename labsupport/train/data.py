"""Data to feed a training loop with, and the slowness of the place it comes from."""

import time

import torch
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
        if count < 1 or distinct < 1 or latency_s < 0 or not 8 <= side <= 400:
            raise ValueError(
                f"count={count}, distinct={distinct}, latency_s={latency_s}, side={side}: "
                "at least 1, 1 and 0, and a side of 8 to 400 pixels are expected"
            )
        self.count, self.latency_s = count, latency_s
        self.files, self.labels = _crops(min(count, distinct), side, seed)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.io import decode_jpeg

        if not 0 <= index < self.count:
            raise IndexError(f"index {index} of {self.count} images")
        if self.latency_s:
            time.sleep(self.latency_s)
        index %= len(self.files)
        return decode_jpeg(self.files[index]).float() / 255, self.labels[index]


def _crops(count: int, side: int, seed: int) -> tuple[list[Tensor], list[int]]:
    from sklearn.datasets import load_sample_images
    from torchvision.io import encode_jpeg

    photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    files, labels = [], []
    for index in range(count):
        label = index % len(photographs)
        _, height, width = photographs[label].shape
        top = int(torch.randint(height - side, (), generator=generator))
        left = int(torch.randint(width - side, (), generator=generator))
        files.append(encode_jpeg(photographs[label][:, top : top + side, left : left + side].contiguous()))
        labels.append(label)
    return files, labels
