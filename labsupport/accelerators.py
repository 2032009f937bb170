"""Vendors' peaks to compare a measurement with; the figures and their sources stand in accelerators.toml."""

import re
import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A vendor's peaks, from accelerators.toml: dense TFLOP/s by precision, GB, GB/s (all decimal)."""

    name: str
    device_name: str
    memory_gb: tuple[float, ...]  # one card may have been sold with several
    bandwidth_gbs: float
    fp32: float
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    compute_capability: str
    source: str
    note: str = ""

    def flops_per_s(self, precision: str) -> float | None:
        """Peak FLOP/s in "fp32", "tf32", "fp16" or "bf16"; None where the card has no such hardware."""
        tera = {"fp32": self.fp32, "tf32": self.tf32, "fp16": self.fp16, "bf16": self.bf16}[precision]
        return None if tera is None else tera * 1e12


def accelerators() -> dict[str, Accelerator]:
    """The table of vendors' peaks, by the card's name."""
    table = tomllib.loads(resources.files(__package__).joinpath("accelerators.toml").read_text("utf-8"))
    rows = {}
    for name, row in table.items():
        memory = row["memory_gb"] if isinstance(row["memory_gb"], list) else [row["memory_gb"]]
        rows[name] = Accelerator(name=name, **{**row, "memory_gb": tuple(memory)})
    return rows


def find_accelerator(device_name: str, *, memory_bytes: int | None = None) -> Accelerator | None:
    """The row for a device as torch names it ("NVIDIA A100-SXM4-80GB"); None rather than a wrong one.

    Where the name leaves the memory open, `memory_bytes` decides; a card with other memory than its row's is
    not that card.
    """
    words = re.sub(r"\b(nvidia|tesla|quadro|geforce)\b|[-_]", " ", device_name.lower()).split()
    found = [row for row in accelerators().values() if re.fullmatch(row.device_name, " ".join(words))]
    if memory_bytes is not None:
        # Drivers report from 0.9 (ECC's share taken) to 1.08 (sold by the GiB) of what is on the box.
        found = [row for row in found if any(0.85 < memory_bytes / (gb * 1e9) < 1.12 for gb in row.memory_gb)]
    return found[0] if len(found) == 1 else None
