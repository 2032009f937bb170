"""The compile panel's rule is that of `torch.compile` itself, and its picture and text say the same."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from labsupport.show.compile_panel import (
    COMPILED,
    EAGER,
    LIMITS,
    MARKED,
    REUSED,
    SEQUENCES,
    SETTINGS,
    CompilePanel,
    calls_of,
)
from labsupport.show.widgets import png_of

OWN = {  # sequences where the rule could go wrong
    "one first": (1, 32, 1, 5),
    "one in between": (32, 1, 5, 1, 32, 7),
    "one twice": (1, 5, 5, 6, 1),
    "back and forth": (32, 5, 32, 6, 7, 6, 5),
}
FLAGS = {"dynamic=None": None, "dynamic=False": False, "dynamic=True": True, MARKED: None}


class Counting:
    """A backend that compiles nothing: it counts the graphs it is given, and how often they run."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*arguments):
            self.runs += 1
            return graph.forward(*arguments)

        return run


def really(sizes, setting, limit):
    """What the calls are when torch.compile runs them: (kind, compilations so far)."""
    torch._dynamo.reset()
    backend = Counting()
    layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=backend, dynamic=FLAGS[setting])
    found = []
    with torch._dynamo.config.patch(recompile_limit=limit):
        for size in sizes:
            batch = torch.randn(size, 8)
            if setting == MARKED:
                torch._dynamo.mark_dynamic(batch, 0)
            before = backend.graphs, backend.runs
            layer(batch)
            grown = backend.graphs > before[0], backend.runs > before[1]
            found.append((COMPILED if grown[0] else REUSED if grown[1] else EAGER, backend.graphs))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [*SEQUENCES, *OWN])
def test_the_rule_is_that_of_torch_compile(name, setting):
    sizes = (SEQUENCES | OWN)[name]
    for limit in LIMITS:
        said = [(call.kind, call.compilations) for call in calls_of(sizes, setting, limit)]
        assert said == really(sizes, setting, limit), limit


def words(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_picture_and_text_say_the_same_at_every_choice():
    panel = CompilePanel()
    seen = set()
    for sizes, setting, limit in itertools.product(SEQUENCES, SETTINGS, LIMITS):
        panel.set(sizes=sizes, setting=setting, limit=limit)
        ET.fromstring(panel.svg)  # well formed
        calls = calls_of(SEQUENCES[sizes], setting, limit)
        title, told, *_ = panel.text.splitlines()
        shown = words(panel.svg)
        assert shown[0] in title and f"{len(calls)} calls" in title
        for kind in (COMPILED, REUSED, EAGER):
            count = sum(call.kind == kind for call in calls)
            assert f"{count} {kind}" in told and f"{kind}: {count}" in shown
        assert panel.box.children[-1].value.startswith(panel.svg)
        seen.add(panel.svg)
    assert len(seen) > 30 and not panel.errors
    assert png_of(panel.svg).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("values", "meaning"),
    [
        ({"sizes": "full batches"}, "paid once"),
        ({"sizes": "two epochs, ragged"}, "paid more than once, and then no more"),
        ({"sizes": "a ragged end"}, "compiles again late"),
        ({"sizes": "growing", "setting": "dynamic=False"}, "eager for the rest"),
    ],
)
def test_it_says_what_it_means_for_a_run(values, meaning):
    panel = CompilePanel()
    panel.set(**values)
    assert meaning in panel.text.splitlines()[-1]


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(ValueError, match="dynamic=None.*'static'"):
        calls_of((1, 2), "static")
    with pytest.raises(ValueError, match="limit"):
        CompilePanel().set(limit=3)
