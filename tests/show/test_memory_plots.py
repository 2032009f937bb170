"""What is drawn of a ledger and of a plan."""

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from labsupport.measure import MemoryLedger
from labsupport.show import plot
from labsupport.train import Workload, plan_memory


@pytest.fixture(scope="module")
def ledger():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(128, 64)
    with MemoryLedger(model, optimizer, inputs=inputs) as found:
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return found


def test_bars_are_the_parts_at_the_peak(ledger):
    left, _ = plot(ledger).axes
    names = [label.get_text() for label in left.get_yticklabels()]
    widths = [bar.get_width() for bar in left.patches]
    assert dict(zip(names, widths, strict=True)).items() <= ledger.at_peak().items()
    assert {"parameter", "gradient", "optimizer state", "activation"} <= set(names)


def test_areas_add_up_and_the_peak_is_marked(ledger):
    _, right = plot(ledger).axes
    top = max(area.get_datalim(right.transData).y1 for area in right.collections)
    assert top == ledger.peak_bytes
    (peak,) = [line for line in right.lines if line.get_label() == "peak"]
    assert list(peak.get_ydata()) == [ledger.peak_bytes]
    assert {"forward", "backward", "optimizer"} <= {text.get_text() for text in right.texts}


def test_modules_are_in_the_order_of_the_model(ledger):
    (axes,) = plot(ledger, by_module=True).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "outside of modules"]
    total = sum(bar.get_width() for bar in axes.patches)
    assert total == ledger.peak_bytes


def test_a_plan_is_its_peak_and_its_ceiling():
    workload = Workload(
        "small",
        lambda: nn.Linear(64, 256),
        lambda n, device: torch.randn(n, 64, device=device),
        lambda model, batch: model(batch).mean(),
        torch.optim.Adam,
    )
    plan = plan_memory(workload)
    (axes,) = plot(plan, up_to=100, budget=10 << 20).axes
    (peak,) = [line for line in axes.lines if line.get_label() == "peak"]
    assert list(peak.get_ydata()) == [plan.peak_bytes(batch) for batch in range(2, 101)]
    assert axes.get_ylim()[1] > 10 << 20
    assert "ceiling 10.0 MiB" in axes.get_legend_handles_labels()[1]


def test_a_ledger_that_saw_nothing_is_drawn_too():
    with MemoryLedger() as empty:
        pass
    plot(empty)
    plot(empty, by_module=True)


def test_figures_are_closed(ledger):
    plot(ledger)
    assert not plt.get_fignums()
