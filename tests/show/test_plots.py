import pytest

from labsupport.accelerators import accelerators
from labsupport.machine import fingerprint
from labsupport.measure import Ceiling, Ceilings
from labsupport.show import plot, timeline


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_timeline_has_a_lane_a_loop_on_the_same_axis():
    figure = timeline({"slow": [(0.08, 0.01)] * 3, "fast": [(0.01, 0.01)] * 3})
    (axes,) = figure.axes
    assert labels(axes) == ["slow", "fast"]
    assert axes.get_xlim() == (0, pytest.approx(60))  # where the shorter lane ends, in milliseconds


def test_timeline_draws_nothing_beyond_its_window():
    (axes,) = timeline({"one": [(0.06, 0.06)]}, window_s=0.1).axes
    ends = [path.vertices[:, 0].max() for bars in axes.collections for path in bars.get_paths()]
    assert max(ends) == pytest.approx(100)


@pytest.mark.parametrize("lanes", [{}, {"empty": []}])
def test_timeline_needs_steps(lanes):
    with pytest.raises(ValueError, match="at least one"):
        timeline(lanes)


def test_ceilings_are_drawn_beside_the_sheets():
    readings = (
        Ceiling(name="matmul_fp32", unit="FLOP/s", work=1e9, samples_s=(0.01,) * 6),
        Ceiling(name="host_memory", unit="B/s", work=1e9, samples_s=(0.1,) * 6),
    )
    figure = plot(Ceilings(machine=fingerprint("cpu"), readings=readings), beside={"T4": accelerators()["T4"]})
    left, right = figure.axes
    assert labels(left) == ["measured fp32", "T4 fp32 (sheet)", "T4 fp16 (sheet)"]
    assert labels(right) == ["measured host_memory", "T4 memory (sheet)"]


def test_says_what_it_can_draw():
    with pytest.raises(TypeError, match="int; there are pictures for Ceilings"):
        plot(3)
