import itertools
import math
import subprocess
import sys

import pytest
import torch

from labsupport.machine import fingerprint
from labsupport.measure import Ceiling, Ceilings, measure_ceilings, roofline

CPU_NAMES = ["matmul_fp32", "matmul_bf16", "matmul_fp16", "device_copy", "host_memory", "disk_read"]


def reading_of(ceilings: Ceilings, name: str) -> Ceiling:
    found = ceilings.get(name)
    assert found is not None, f"no reading {name}"
    return found


def ticking(step_s):
    """A clock on which every piece of work takes exactly so long."""
    return itertools.count(0.0, step_s).__next__


@pytest.fixture(scope="module")
def ceilings(tmp_path_factory):
    return measure_ceilings("cpu", min_time_s=0.01, folder=tmp_path_factory.mktemp("disk"))


def test_every_reading_is_there_and_finite(ceilings):
    assert [reading.name for reading in ceilings.readings] == CPU_NAMES
    assert ceilings.skipped == ()
    for reading in ceilings.readings:
        assert reading.unit in ("FLOP/s", "B/s")
        assert math.isfinite(reading.value) and reading.value > 0
        assert math.isfinite(reading.spread) and reading.spread >= 0
        assert reading.n == len(reading.samples_s) >= 1


def test_get(ceilings):
    assert reading_of(ceilings, "matmul_fp32").unit == "FLOP/s"
    assert ceilings.get("matmul_fp4") is None
    assert reading_of(ceilings, "device_copy").value == reading_of(ceilings, "host_memory").value


def test_the_clock_decides(tmp_path):
    exact = measure_ceilings("cpu", min_time_s=0.5, folder=tmp_path, clock=ticking(0.125))
    for name in ("matmul_fp32", "matmul_bf16", "matmul_fp16"):
        assert reading_of(exact, name).value == 2 * 256**3 / 0.125
    assert reading_of(exact, "host_memory").value == 2 * roofline.HOST_COPY_BYTES / 0.125
    assert reading_of(exact, "disk_read").value == roofline.DISK_BYTES / 0.125
    assert {(reading.n, reading.spread) for reading in exact.readings} == {(5, 0.0)}


def test_slow_work_is_not_repeated(tmp_path):
    slow = measure_ceilings("cpu", min_time_s=0.1, folder=tmp_path, clock=ticking(1.0))
    assert {reading.n for reading in slow.readings} == {1}


def test_a_product_grows_until_it_can_be_timed(monkeypatch, tmp_path):
    monkeypatch.setitem(roofline.LARGEST_SIZE, "cpu", 64)
    monkeypatch.setattr(roofline, "FIRST_SIZE", 16)
    fast = measure_ceilings("cpu", min_time_s=1e-5, folder=tmp_path, clock=ticking(1e-5))
    assert reading_of(fast, "matmul_fp32").note == "64 cubed"
    assert reading_of(fast, "matmul_fp32").value == pytest.approx(2 * 64**3 / 1e-5)


def test_median_and_spread_come_from_the_samples():
    reading = Ceiling(name="copy", unit="B/s", work=12.0, samples_s=(1.0, 2.0, 3.0, 4.0, 100.0))
    assert (reading.value, reading.n) == (4.0, 5)
    assert reading.spread == pytest.approx(2 / 3)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    missing = measure_ceilings("cpu", min_time_s=1e-3, folder=tmp_path / "missing", clock=ticking(1.0))
    assert missing.get("disk_read") is None
    assert missing.skipped == (f"disk_read: No such file or directory in {tmp_path / 'missing'}",)
    assert "Not measured: disk_read" in missing._repr_markdown_()


def test_a_precision_that_does_not_exist_is_said(monkeypatch, tmp_path):
    real = roofline._matmul

    def matmul(sampler, precision):
        if precision == "bf16":
            raise RuntimeError("not implemented for 'BFloat16'\nmore")
        return real(sampler, precision)

    monkeypatch.setattr(roofline, "_matmul", matmul)
    partial = measure_ceilings("cpu", min_time_s=1e-3, folder=tmp_path, clock=ticking(1.0))
    assert partial.get("matmul_bf16") is None
    assert partial.skipped == ("matmul_bf16: not implemented for 'BFloat16'",)


def test_nothing_is_left_behind(tmp_path):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    measure_ceilings("cpu", min_time_s=1e-3, folder=tmp_path, clock=ticking(1.0))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("setting", ["none", "tf32", "ieee"])
def test_precision_settings_are_put_back(setting):
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, setting
    with pytest.raises(KeyError), roofline._fp32_precision("tf32"):
        assert products.fp32_precision == "tf32"
        raise KeyError
    after, products.fp32_precision = products.fp32_precision, before
    assert after == setting


@pytest.mark.parametrize(
    "answer, dropped", [(BlockingIOError(), True), (OSError(95, "not supported"), None), (4096, False)]
)
def test_whether_the_page_cache_was_dropped(monkeypatch, answer, dropped):
    def preadv(*args):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(roofline.os, "preadv", preadv, raising=False)
    monkeypatch.setattr(roofline.os, "RWF_NOWAIT", 8, raising=False)
    assert roofline._is_dropped(0) is dropped


def test_the_note_says_that_the_cache_could_not_be_dropped(monkeypatch, tmp_path):
    monkeypatch.delattr(roofline.os, "RWF_NOWAIT", raising=False)
    monkeypatch.delattr(roofline.os, "posix_fadvise", raising=False)
    result = measure_ceilings("cpu", min_time_s=1e-3, folder=tmp_path, clock=ticking(1.0))
    assert "could not be dropped" in reading_of(result, "disk_read").note


def test_markdown_shows_n_spread_and_the_machine():
    reading = Ceiling(name="matmul_bf16", unit="FLOP/s", work=1e9, samples_s=(0.001, 0.001), note="1024 cubed")
    shown = Ceilings(machine=fingerprint("cpu"), readings=(reading,))._repr_markdown_()
    assert "| matmul_bf16 | 1.00 TFLOP/s | 0.0% | 2 | 1024 cubed |" in shown
    assert f"torch {torch.__version__}" in shown


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="use one of cpu, cuda"):
        measure_ceilings("meta")


@pytest.mark.parametrize("min_time_s", [0, -0.1])
def test_a_time_that_is_not_above_0_is_refused(min_time_s):
    with pytest.raises(ValueError, match=f"min_time_s={min_time_s}: a time above 0 is expected"):
        measure_ceilings("cpu", min_time_s=min_time_s)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no ceilings for cuda: .* sees no GPU; use cpu"):
        measure_ceilings("cuda")


# A process's peak only ever grows, so it is read in a fresh one: as VmHWM, because ru_maxrss outlives exec.
PEAK = """
import re, sys
from pathlib import Path
from labsupport.measure import measure_ceilings
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
measure_ceilings("cpu", min_time_s=0.001, folder=sys.argv[1])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's VmHWM")
def test_memory_stays_small(tmp_path):
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    extra_bytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0 < extra_bytes < 400e6
