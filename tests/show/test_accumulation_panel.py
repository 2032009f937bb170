"""The accumulation panel: picture and text say the same, at every setting."""

import re
import xml.etree.ElementTree as ET

import pytest

from labsupport.show import AccumulationPanel
from labsupport.show.accumulation_panel import ENDS, MICRO_BATCHES, SAMPLES, WINDOWS, lines, shown, title_of
from labsupport.show.accumulation_picture import MOST_BOXES, groups_of
from labsupport.show.widgets import png_of
from labsupport.train.accumulation import DROPPED, LEAKS, STEPPED, WEIGHED

GIVEN = {"samples": 1000, "micro_batch": 64, "window": 6, "end": STEPPED, "divided": True}


@pytest.fixture
def panel():
    return AccumulationPanel()


def html(panel):
    return panel.box.children[-1].value


def words(svg):
    return " ".join(re.findall(r">([^<>]+)</text>", svg))


@pytest.mark.parametrize(
    "change",
    [{"samples": 400}, {"micro_batch": 16}, {"window": 4}, {"end": DROPPED}, {"end": LEAKS}, {"divided": False}],
    ids=lambda change: "-".join(map(str, change)),
)
def test_each_knob_changes_picture_and_text(panel, change):
    before, text = panel.svg, panel.text
    panel.set(**change)
    assert panel.svg != before and panel.text != text and not panel.errors
    assert panel.text.splitlines()[1] in words(panel.svg)
    ET.fromstring(panel.svg)  # well formed


def test_every_setting_has_its_words(panel):
    for samples in SAMPLES[:6]:
        for micro_batch in MICRO_BATCHES[3::2]:
            for window in WINDOWS:
                for end in ENDS.values():
                    values = GIVEN | {"samples": samples, "micro_batch": micro_batch, "window": window, "end": end}
                    said = lines(values | {"divided": window % 2 == 0})
                    assert len(said) >= 2 and title_of(values) == lines(values)[1]


@pytest.mark.parametrize("samples", [SAMPLES[0], SAMPLES[-1]])
@pytest.mark.parametrize("micro_batch", [MICRO_BATCHES[0], MICRO_BATCHES[-1]])
@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[-1]])
def test_the_ends_of_every_scale_can_be_drawn(panel, samples, micro_batch, window):
    for end in ENDS.values():
        panel.set(samples=samples, micro_batch=micro_batch, window=window, end=end)
        assert png_of(panel.svg).startswith(b"\x89PNG") and panel.svg.count("<rect") < 3 * MOST_BOXES
    assert not panel.errors


def test_each_step_of_a_short_epoch_is_marked(panel):
    panel.set(samples=400, window=3)
    assert panel.svg.count('class="step"') == len(shown(panel.values).updates) == 3
    panel.set(end=DROPPED)
    assert panel.svg.count('class="step"') == 2 and "no step" in words(panel.svg)
    assert "2 optimizer steps an epoch, 16 samples lost" in panel.text


def test_a_partial_window_by_each_treatment():
    by = {end: lines(GIVEN | {"end": end}) for end in ENDS.values()}
    assert "4 micro-batches left" in by[STEPPED][0]
    assert by[DROPPED][1] == "2 optimizer steps an epoch, 232 samples lost"
    assert by[STEPPED][-1].endswith("times 1, and 0.667 in the last update")
    assert by[WEIGHED][1:] == (
        "3 optimizer steps an epoch, every sample has its share",
        "SGD steps as with the learning rate times 1",
    )
    assert by[LEAKS][1] == "2 optimizer steps an epoch, 232 samples in the wrong epoch"
    assert by[LEAKS][-2].endswith("times 1, and 1.67 in the first update")
    assert by[LEAKS][-1] == "the next epoch's first update has 4 micro-batches of this one in it"


def test_what_leaks_is_drawn_where_it_goes_and_where_it_comes_from(panel):
    panel.set(end=LEAKS)
    assert 'class="leak"' in panel.svg and "of the epoch before" in words(panel.svg)
    first, *_, left = groups_of(shown(panel.values))
    assert [box.carried for box in first.boxes] == [True] * 4 + [False] * 6
    assert {box.kind for box in left.boxes} == {"next"} and not left.steps


def test_a_loss_that_is_not_divided_multiplies_sgds_learning_rate(panel):
    panel.set(window=4, divided=False)
    assert "SGD steps as with the learning rate times 4" in panel.text
    assert "more than its share in its update: 1,000 samples" in panel.text


def test_a_window_longer_than_the_epoch(panel):
    panel.set(samples=64, micro_batch=32, window=4, end=LEAKS)
    assert "no optimizer step at all" in html(panel) and 'class="step"' not in panel.svg and not panel.errors
