"""What is around a statement of a body that is split, and behind it."""

from __future__ import annotations

from typing import NamedTuple

from ..cpp import NotSplittable

ANY = "::fr::split::any"  # whether a mask has a lane


class Frame(NamedTuple):
    """Something around a statement that lanes leave.

    Attributes:
        kind: ``fn`` for the whole function, ``if``, ``loop``, ``round`` for one of a loop's, or
            ``stride`` for one of a loop that lanes go through in step.
        mask: the C++ name of the mask of its lanes; nothing for a loop that needs none.
        loop: where the loop starts.
        end: no lane from here on is in it.
        plain: the loop's head is plain C++.
    """

    kind: str
    mask: str = ""
    loop: int = -1
    end: str = "fr_n"
    plain: bool = False


class Nest(NamedTuple):
    """What is around a statement, and behind it.

    Attributes:
        frames: what is around, innermost last.
        later: texts behind the statement: what they name outlives a loop over lanes.
        inside: the names of uniform variables that the loop over lanes declares.
    """

    frames: tuple[Frame, ...] = ()
    later: tuple[str, ...] = ()
    inside: frozenset[str] = frozenset()

    @property
    def masks(self) -> list[str]:
        return [frame.mask for frame in self.frames if frame.mask]

    @property
    def mask(self) -> str:
        return (self.masks or ["nullptr"])[-1]

    @property
    def end(self) -> str:
        return self.frames[-1].end if self.frames else "fr_n"

    @property
    def loop(self) -> Frame:
        """The innermost loop."""
        for frame in reversed(self.frames):
            if frame.kind == "loop":
                return frame
        raise NotSplittable("a break or continue is in no loop")

    def within(self, frame: Frame) -> Nest:
        """The nest inside of a frame more."""
        return self._replace(frames=(*self.frames, frame))
