"""The precision panel counts what a cast makes of each number, and says so in picture and text alike."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labsupport.show.precision_panel import FATES, FORMATS, SCALES, PrecisionPanel, fates_of, lines, picture
from labsupport.show.widgets import png_of

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_counts(values, kind):
    """What PyTorch's own cast makes of them."""
    cast, info = values.to(kind), torch.finfo(kind)
    zero, over = cast == 0, cast.isinf()
    subnormal = ~zero & (cast.double().abs() < info.smallest_normal)
    found = {"zero": zero, "subnormal": subnormal, "normal": ~(zero | over | subnormal), "overflow": over}
    return {fate: int(mask.sum()) for fate, mask in found.items()}


@pytest.mark.parametrize("name", TYPES)
def test_formats_are_those_of_torch(name):
    form, info = FORMATS[name], torch.finfo(TYPES[name])
    assert 2.0**form.lowest == info.smallest_normal and 2.0**-form.fraction_bits == info.eps
    assert (2 - 2.0**-form.fraction_bits) * 2.0**form.highest == info.max
    assert 2.0**form.least == info.smallest_normal * info.eps


@pytest.mark.parametrize("name", TYPES)
def test_fates_are_those_of_a_cast(name):
    """Spread over the whole range, and right at its edges: halves, ties, and their neighbours."""
    form = FORMATS[name]
    torch.manual_seed(0)
    spread = torch.randn(20_000, dtype=torch.float64) * 2.0 ** torch.randint(-160, 140, (20_000,)).double()
    one_over = (2 - 2.0 ** -(form.fraction_bits + 1)) * 2.0**form.highest
    least, low = 2.0**form.least, 2.0**form.lowest
    kinds = [least / 2, least, 1.5 * least, low, low - least / 2, low - least, one_over, 2.0**15]
    edges = torch.tensor(kinds, dtype=torch.float64)
    values = torch.cat([spread, edges])
    if name != "fp32":  # a cast from float64 goes by way of float32, and rounds twice
        narrow = values.float()
        up, down = (narrow.nextafter(torch.tensor(end)) for end in (float("inf"), -float("inf")))
        values = torch.cat([narrow, up, down]).double()
        values = values[values.isfinite() & (values != 0)]
    assert dict(fates_of(values, form, 1).counts) == cast_counts(values, TYPES[name])


@given(st.sampled_from(sorted(TYPES)), st.integers(0, 32), st.lists(st.floats(2.0**-40, 1024, width=32), min_size=1))
def test_a_scale_is_a_shift(name, power, sizes):
    values = torch.tensor(sizes)
    found = fates_of(values, FORMATS[name], 2**power)
    assert dict(found.counts) == cast_counts(values.double() * 2**power, TYPES[name])
    assert sum(sum(bins.values()) for bins in found.bins.values()) == found.total == len(sizes)
    for k, over in ((found.safe, False), (found.safe + 1, True)):
        scaled = values.double() * 2.0**k
        assert bool(FORMATS[name].fates(scaled)["overflow"].any()) is over


def test_tf32_has_the_range_of_fp32_and_the_digits_of_fp16():
    tf32 = FORMATS["tf32"]
    assert (tf32.lowest, tf32.highest) == (FORMATS["fp32"].lowest, FORMATS["fp32"].highest)
    assert tf32.fraction_bits == FORMATS["fp16"].fraction_bits


@pytest.fixture
def gradients():
    torch.manual_seed(0)
    return [torch.randn(100, 40) * 2.0 ** torch.randint(-30, -4, (100, 40)), torch.zeros(7)]


@pytest.fixture
def panel(gradients):
    return PrecisionPanel(gradients)


def words(svg):
    return " ".join(re.findall(r">([^<>]+)</text>", svg))


@pytest.mark.parametrize("name", FORMATS)
def test_every_setting_is_drawn_and_text_and_picture_agree(panel, name):
    for _, scale in SCALES:
        panel.set(format=name, scale=scale)
        ET.fromstring(panel.svg)
        fates = panel.fates(panel.values)
        assert fates.total == 4000 and fates.zeros == 7 and not panel.errors
        title = panel.text.splitlines()[2].removesuffix(" (measured)")
        assert title in words(panel.svg)
        for fate in FATES:
            if fates.counts[fate] == 0:
                assert re.search(rf"{FATES[fate][1].split(':')[0]} 0 %", words(panel.svg))
    assert png_of(panel.svg).startswith(b"\x89PNG")


def test_what_the_scale_is_for(panel):
    assert panel.fates(panel.values).share("zero") > 0.1 and "a larger scale would keep them" in panel.text
    panel.set(scale=2**16)
    assert panel.fates(panel.values).share("zero") < 0.01
    panel.set(scale=2**32)
    assert "overflow: the scaler skips this step and halves the scale" in panel.text
    panel.set(format="bf16")
    assert "they fit" in panel.text and panel.fates(panel.values).share("normal") == 1


def test_few_of_many_are_not_called_none():
    fates = fates_of(torch.cat([torch.full((99_999,), 1.0), torch.full((1,), 1e-9)]), FORMATS["fp16"], 1)
    assert "1 of 100,000 becomes zero" in " ".join(lines(fates)) and "all but a few" in words(picture(fates))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], TypeError, "tensors are expected, got list"),
        (torch.zeros(3), ValueError, "some that are not zero"),
        (torch.tensor([1.0, float("inf")]), ValueError, "finite numbers"),
    ],
)
def test_what_is_no_gradient_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        fates_of(PrecisionPanel(given)._gradients, FORMATS["fp16"], 1)


def test_a_knob_has_no_other_values(panel):
    with pytest.raises(ValueError, match="format: one of fp32, tf32, bf16, fp16 is expected"):
        panel.set(format="fp8")
