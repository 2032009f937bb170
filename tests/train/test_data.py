import math
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from labsupport.train import StoredImages
from labsupport.train import data as data_module


def test_items_are_pictures_between_0_and_1_with_their_label():
    image, label = StoredImages(3, side=32)[1]
    assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1 and label == 1


def test_same_seed_same_images_other_seed_others():
    one, same, other = (StoredImages(4, side=16, seed=seed)[3][0] for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_many_items_share_few_files():
    images = StoredImages(1000, distinct=4, side=16)
    assert len(images) == 1000 and len(images.files) == 4
    assert torch.equal(images[1][0], images[997][0])


def test_each_open_waits_for_the_store(monkeypatch):
    waits = []
    monkeypatch.setattr(data_module.time, "sleep", waits.append)
    images = StoredImages(8, side=16, latency_s=0.25)
    _ = [images[i] for i in range(8)]
    assert waits == [0.25] * 8


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_workers_give_the_same_batches_however_they_start(start):
    images = StoredImages(8, side=16)
    alone = list(DataLoader(images, 4))
    workers = list(DataLoader(images, 4, num_workers=1, multiprocessing_context=start))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(alone, workers, strict=True))


@pytest.mark.parametrize(
    "name, value",
    [
        ("count", 0),
        ("distinct", 0),
        ("distinct", 10**6),
        ("latency_s", -1),
        ("latency_s", math.nan),
        ("side", 4),
        ("side", 4000),
    ],
)
def test_refuses_what_makes_no_sense_and_names_that_alone(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value}: \d+ to \d+ is expected$"):
        StoredImages(**{"count": 4, name: value})


def test_index_beyond_the_end():
    with pytest.raises(IndexError, match="of 4 images"):
        StoredImages(4, side=16)[4]
