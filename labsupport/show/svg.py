"""The few shapes that the panels' pictures are made of, as text."""

import html
from collections.abc import Iterable

BLUE, RED, GREEN, GREY, TEXT = "#0072B2", "#B00020", "#00604A", "#888888", "#222222"
# Lines over a colour say the same to those who do not tell colours apart. Named as matplotlib's hatches are.
HATCHES = {
    "//": "M0 8 L8 0",
    "\\\\": "M0 0 L8 8",
    "xx": "M0 8 L8 0 M0 0 L8 8",
    "..": "M3 4 h2",
    "--": "M0 4 h8",
    "++": "M0 4 h8 M4 0 v8",
}


def svg(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """The picture: on a white ground, for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" style="max-width:100%"><title>{html.escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(body)}</svg>'
    )


def pattern(name: str, hatch: str, *, stroke: str = "white", width: float = 1.3, ground: str = "none") -> str:
    """Lines to fill with, as "url(#name)"; none for a hatch that is not known."""
    lines = ""
    if hatch in HATCHES:
        lines = f'<path d="{HATCHES[hatch]}" stroke="{stroke}" stroke-width="{width}" fill="none"/>'
        lines = f'<rect width="8" height="8" fill="{ground}"/>{lines}'
    return f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str = "none",
    opacity: float = 1,
    radius: float = 0,
) -> str:
    corners = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}" '
        f'stroke="{stroke}" opacity="{opacity:g}"{corners}/>'
    )


def dot(x: float, y: float, radius: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{BLUE}" stroke-width="1.5"/>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1.2, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    path = f"M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}"
    return f'<path d="{path}" stroke="{stroke}" stroke-width="{width}"{dashes} fill="none"/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "start",
    fill: str = TEXT,
    halo: str = "white",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}" stroke="{halo}" stroke-width="3" paint-order="stroke">{html.escape(words)}</text>'
    )
