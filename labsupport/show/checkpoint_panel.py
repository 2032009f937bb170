"""The checkpoint panel: segments against bytes and time, by a model of a deep chain, with measured points over it."""

from collections.abc import Mapping
from dataclasses import dataclass

from labsupport.show.checkpoint_picture import Shown, picture
from labsupport.show.widgets import Panel, Values, slider
from labsupport.units import format_bytes

SEGMENTS = [("none", 0), *((str(n), n) for n in (2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 36, 48))]
DEPTHS = [4, 8, 12, 18, 24, 36, 48]
NOT_IN_IT = "not in it: each checkpoint's random state (5,056 B on a CPU), kernels' workspaces"


@dataclass(frozen=True)
class Chain:
    """The bytes and products of one forward and backward pass of a chain that is checkpointed in segments.

    `depth` blocks of (Linear, LayerNorm, GELU) of one `width` in fp32, then a Linear to `classes` and a cross-entropy;
    the gradients are None before. Segments are those of `checkpoint_sequential`: equal ones, the last takes the rest
    and is stored; 0 is a chain without checkpoints. On a CPU the bytes are MemoryLedger's, to the byte, while a row of
    activations is no smaller than a block's gradient; a checkpoint's random state is counted by neither.
    """

    depth: int
    width: int
    batch: int
    classes: int = 10

    @property
    def tensor(self) -> int:
        """Bytes of one activation."""
        return 4 * self.batch * self.width

    @property
    def gradient(self) -> int:
        """Bytes of a block's gradients, and of its parameters: a matrix, its bias, and the norm's two vectors."""
        return 4 * (self.width**2 + 3 * self.width)

    @property
    def _head(self) -> int:
        return 4 * (self.width + 1) * self.classes

    def blocks_in(self, segments: int) -> list[int]:
        """How many blocks each segment has. Raises ValueError for more segments than blocks."""
        if not 0 <= segments <= self.depth:
            raise ValueError(f"{segments} segments of {self.depth} blocks: at most one a block is possible")
        count = max(segments, 1)
        each = self.depth // count
        return [each] * (count - 1) + [self.depth - each * (count - 1)]

    def _own(self, blocks: int) -> int:
        """What the backward pass of so many blocks needs: three tensors each, and the norm's mean and deviation."""
        return blocks * (3 * self.tensor + 8 * self.batch)

    def saved_bytes(self, segments: int) -> int:
        """What the forward pass leaves behind: the segments' inputs (the first is the batch, which is there anyway),
        the last segment, the loss and the probabilities that it needs."""
        blocks = self.blocks_in(segments)
        return (len(blocks) - 1) * self.tensor + self._own(blocks[-1]) + 4 * self.batch * self.classes + 8

    def moments(self, segments: int) -> list[int]:
        """The bytes that are live at the worst moment of each segment's backward pass.

        That moment is its first: what the segment needs has been computed, nothing of it is freed, two gradients of
        activations lie there, and the gradients of all blocks behind it.
        """
        blocks, found = self.blocks_in(segments), []
        always = self.depth * self.gradient + 2 * self._head + self.tensor + 8 * self.batch + 8
        behind = 0
        for inputs in range(len(blocks), 0, -1):
            own = blocks[inputs - 1]
            found.append(always + inputs * self.tensor + self._own(own) + behind * self.gradient)
            behind += own
        found[0] += 4 * self.batch * self.classes  # the gradient of the logits
        return found[::-1]

    def peak_bytes(self, segments: int) -> int:
        return max(self.moments(segments))

    def worst(self, segments: int) -> int:
        """Which segment's backward pass has the peak, counted from 0: of equals the one that comes first in time."""
        moments = self.moments(segments)
        return max(range(len(moments)), key=lambda index: (moments[index], index))

    def compute(self, segments: int) -> float:
        """FLOP of all matrix products, over those without checkpoints. The first block needs no gradient of its
        input."""
        products = (3 * self.depth - 1) * self.width + 3 * self.classes
        return 1 + (self.depth - self.blocks_in(segments)[-1]) * self.width / products


class CheckpointPanel(Panel):
    """Segments and depth of a chain, against what is kept after the forward pass, the live peak, and time.

    `measured` are segments -> (bytes kept, peak bytes, time over that without checkpoints), at the `depth` given.
    Raises ValueError for a depth that the slider does not have.
    """

    def __init__(
        self,
        *,
        depth: int = 36,
        width: int = 256,
        batch: int = 512,
        segments: int = 12,
        measured: Mapping[int, tuple[int, int, float]] | None = None,
    ) -> None:
        self._width, self._batch, self._measured = width, batch, (depth, dict(measured or {}))
        if depth not in DEPTHS:
            raise ValueError(f"depth: one of {', '.join(map(str, DEPTHS))} is expected, got {depth}")
        controls = {"segments": slider("segments", SEGMENTS, segments), "depth": slider("blocks", DEPTHS, depth)}
        super().__init__(
            "checkpoints in segments",
            controls,
            lambda values: picture(self.shown(values)),
            lambda values: "\n".join(self.lines(values)),
        )

    def shown(self, values: Values) -> Shown:
        """Everything that the picture tells."""
        depth, segments = values["depth"], values["segments"]
        chain = Chain(depth, self._width, self._batch)
        counts = range(1, depth + 1)
        curves = {n: (chain.saved_bytes(n), chain.peak_bytes(n), chain.compute(n)) for n in counts}
        measured = self._measured[1] if depth == self._measured[0] else {}
        if segments > depth:
            problem = f"{segments} segments of {depth} blocks: at most one a block is possible"
            return Shown(depth, segments, [], 0, 0, 0, curves, measured, problem)
        return Shown(
            depth,
            segments,
            chain.blocks_in(segments),
            chain.worst(segments),
            chain.saved_bytes(segments),
            chain.peak_bytes(segments),
            curves,
            measured,
        )

    def lines(self, values: Values) -> tuple[str, ...]:
        """The same in words. Those with measured times end with "(measured)"."""
        shown = self.shown(values)
        if shown.problem:
            return (shown.problem,)
        timed = shown.measured.get(shown.segments)
        least, lowest = shown.best
        return (
            f"{shown.title}: {format_bytes(shown.saved)} kept after the forward pass, {format_bytes(shown.peak)} live "
            "at the peak",
            f"at the peak: {shown.event}; kept inputs left: {shown.inputs}; blocks with gradients: {shown.behind}",
            f"least kept: {format_bytes(shown.curves[least][0])} with {least} segments; lowest peak: "
            f"{format_bytes(shown.curves[lowest][1])} with {lowest}",
            f"matrix products: {shown.curves[max(shown.segments, 1)][2]:.2f}x of those without checkpoints",
            f"time: {timed[2]:.2f}x of that without checkpoints (measured)" if timed else "time: not measured here",
            NOT_IN_IT,
        )
