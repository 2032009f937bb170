"""The checkpoint panel: its model is what the ledger measures, and its text and picture say what the model says."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from labsupport.measure import MemoryLedger
from labsupport.show import CheckpointPanel
from labsupport.show.checkpoint_panel import DEPTHS, SEGMENTS, Chain
from labsupport.show.widgets import png_of
from labsupport.units import format_bytes

MEASURED = {0: (56_000_000, 67_000_000, 1.0), 12: (10_500_000, 24_000_000, 1.27)}


@pytest.fixture
def panel():
    return CheckpointPanel(measured=MEASURED)


def words(panel):
    return " ".join(re.findall(r">([^<>]+)</text>", panel.svg))


class Real:
    """The chain that the model is of."""

    def __init__(self, chain):
        torch.manual_seed(0)
        width = chain.width
        blocks = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(chain.depth))
        self.model = nn.ModuleList([nn.Sequential(*blocks), nn.Linear(width, chain.classes)])
        self.x, self.y = torch.randn(chain.batch, width), torch.randint(chain.classes, (chain.batch,))

    def loss(self, segments):
        blocks, head = self.model
        out = checkpoint_sequential(blocks, segments, self.x, use_reentrant=False) if segments else blocks(self.x)
        return F.cross_entropy(head(out), self.y)


CHAINS = [(36, n) for n in (0, 2, 4, 6, 9, 12, 18, 36)] + [
    (36, 19),
    (36, 10),
    (48, 30),
    (13, 2),
    (6, 6),
    (2, 2),
    (1, 0),
]


@pytest.mark.parametrize(("depth", "segments"), CHAINS)
@pytest.mark.parametrize(("width", "batch"), [(64, 128), (32, 32), (48, 500)])
def test_the_model_is_the_ledger_to_the_byte(depth, segments, width, batch):
    chain = Chain(depth, width, batch)
    real = Real(chain)
    with MemoryLedger(real.model, inputs=(real.x, real.y)) as ledger:
        before = ledger.live_bytes
        loss = real.loss(segments)
        saved = ledger.live_bytes - before
        loss.backward()
    assert (saved, ledger.peak_bytes) == (chain.saved_bytes(segments), chain.peak_bytes(segments))


@pytest.mark.parametrize("segments", [0, 2, 5, 12])
def test_compute_is_what_a_count_of_flop_says(segments):
    real, counts = Real(Chain(12, 32, 64)), []
    for n in (segments, 0):
        with FlopCounterMode(display=False) as counter:
            real.loss(n).backward()
        counts.append(counter.get_total_flops())
    assert Chain(12, 32, 64).compute(segments) == pytest.approx(counts[0] / counts[1], rel=1e-12)


def test_more_segments_than_blocks_are_refused():
    with pytest.raises(ValueError, match="5 segments of 4 blocks: at most one a block"):
        Chain(4, 8, 8).saved_bytes(5)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("segments", [n for _, n in SEGMENTS])
def test_every_setting_can_be_drawn_and_text_and_picture_agree(panel, depth, segments):
    panel.set(segments=segments, depth=depth)
    ET.fromstring(panel.svg)  # well formed
    assert png_of(panel.svg).startswith(b"\x89PNG")
    if segments > depth:
        assert "at most one a block" in panel.text and "at most one a block" in words(panel)
    else:
        chain = Chain(depth, 256, 512)
        for nbytes in (chain.saved_bytes(segments), chain.peak_bytes(segments)):
            assert format_bytes(nbytes) in panel.text.splitlines()[0] and format_bytes(nbytes) in words(panel)
        least, lowest = re.search(r"with (\d+) segments; lowest peak: .* with (\d+)", panel.text).groups()
        assert f"least: {least}" in words(panel) and f"least: {lowest}" in words(panel)
    assert not panel.errors


@pytest.mark.parametrize("change", [{"segments": 18}, {"depth": 24}], ids=["segments", "depth"])
def test_each_slider_changes_picture_and_text(panel, change):
    before = panel.svg, panel.text
    panel.set(**change)
    assert panel.svg != before[0] and panel.text != before[1] and not panel.errors


def test_what_was_measured_is_shown_at_its_depth_only(panel):
    assert panel.svg.count('class="measured"') == 3 * len(MEASURED)
    assert "time: 1.27x of that without checkpoints (measured)" in panel.text
    panel.set(segments=18)
    assert "time: not measured here" in panel.text
    panel.set(segments=12, depth=24)
    assert 'class="measured"' not in panel.svg and "time: not measured here" in panel.text


def test_the_picture_shows_what_is_kept_and_which_segment_is_computed_again(panel):
    blue, again = 'height="34.0" fill="#0072B2"', 'height="26.0" fill="url(#again)"'
    assert panel.svg.count(blue) == 11  # after the forward pass, and none at the peak
    assert panel.svg.count(again) == 3 and "segment 1 of 12 has been computed again" in panel.text
    panel.set(segments=36)
    assert panel.svg.count(blue) == 35 + 35 and again not in panel.svg
    assert "segment 36 of 36 was stored; kept inputs left: 35" in panel.text


def test_a_depth_that_no_slider_has_is_refused():
    with pytest.raises(ValueError, match="depth: one of 4, 8"):
        CheckpointPanel(depth=5)
