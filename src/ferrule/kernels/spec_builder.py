"""The `Spec` and `Launch` of a call that is described, not made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import Dtype
from ..kernel import Kernel, check_distinct, check_identifier, check_not_given
from ..spec import SMALL, Input, Launch, Shape, Spec, clamped
from . import arguments
from . import sizes as call_sizes

if TYPE_CHECKING:
    from .sizes import Sizes

Template = tuple[tuple[str, int | bool | Dtype], ...]

_MOST_SIZES = 256  # that a kernel remembers


class SpecBuilder:
    """Builds the `Spec` and `Launch` of one kernel's calls; remembers what it checked."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._template_names: set[tuple[str, ...]] = {()}
        self._sizes: dict[str, Sizes] = {}

    def sizes(
        self,
        shapes: list[Shape],
        output_dtypes: object,
        output_shapes: object,
        grid: object,
        threadgroup: object,
        template: object,
    ) -> Sizes:
        """The sizes of a call, some of which are texts, for inputs of these shapes."""
        kernel = self.kernel
        names = kernel.output_names
        kinds = arguments.listed(kernel, "output_dtypes", output_dtypes, names)
        outs = [arguments.output_dtype(kernel, i, kind) for i, kind in enumerate(kinds)]
        ranks = [len(shape) for shape in shapes]
        # A repr tells True from 1, which are equal.
        key = f"{ranks}{outs}{grid!r}{threadgroup!r}{output_shapes!r}{template!r}"
        sizes = self._sizes.get(key)
        if sizes is None:
            wanted = arguments.listed(kernel, "output_shapes", output_shapes, names)
            sizes = call_sizes.Sizes(kernel, ranks, grid, threadgroup, wanted, outs, template)
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            self._sizes[key] = sizes
        return sizes

    def template(self, template: object, key: list[object]) -> Template:
        """The checked template; adds to ``key`` what tells it from others."""
        kernel = self.kernel
        label = arguments.label_of(kernel, "template")
        if isinstance(template, (str, bytes)) or not isinstance(template, Sequence):
            raise arguments.wrong_type(label, template, 'a list such as [("T", mx.float32)]')
        names: list[str] = []
        items: list[tuple[str, int | bool | Dtype]] = []
        for item in template:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise arguments.wrong_type(label, item, 'a pair such as ("T", mx.float32)')
            name = item[0]
            if type(name) is not str:
                name = check_identifier("`template`", name, kernel.name, kernel.language)
            value = arguments.template_value(kernel, name, item[1])
            names.append(name)
            items.append((name, value))
            # True == 1 in Python, but `bool B` and `int B` are different template parameters.
            key += (name, type(value), value.name if isinstance(value, Dtype) else value)
        if tuple(names) not in self._template_names:
            for name in names:
                check_identifier("`template`", name, kernel.name, kernel.language)
            check_distinct(
                kernel.name, (*kernel.input_names, *kernel.output_names, *names), kernel.language
            )
            check_not_given(kernel, tuple(names))
            self._template_names.add(tuple(names))
        return tuple(items)

    def described(
        self,
        inputs: Sequence[Any],
        output_dtypes: Sequence[Any],
        output_shapes: Sequence[Sequence[int | str] | str] | None,
        grid: Sequence[int | str] | None,
        threadgroup: Sequence[int | str] | None,
        template: Sequence[tuple[str, Any]] | None,
        init_value: float | None,
        device: str,
    ) -> tuple[Spec, Launch | None]:
        """A call on ``device`` that is only described."""
        kernel = self.kernel
        if kernel.language == "cuda" and device in ("cpu", "metal"):
            raise arguments.no_text(kernel, device)
        names = kernel.output_names
        values = arguments.listed(kernel, "inputs", inputs, kernel.input_names)
        wanted = arguments.listed(kernel, "output_dtypes", output_dtypes, names)
        outs = [arguments.output_dtype(kernel, i, value) for i, value in enumerate(wanted)]
        facts = [arguments.describe(kernel, i, value) for i, value in enumerate(values)]
        if call_sizes.texts(grid, threadgroup, output_shapes, template):
            input_shapes = [fact.shape for fact in facts]
            # What is left out is not looked at.
            written = self.sizes(
                input_shapes,
                output_dtypes,
                output_shapes or [()] * len(names),
                grid or (1, 1, 1),
                threadgroup or (1, 1, 1),
                template,
            ).numbers(input_shapes)
            grid = grid and written[0]
            threadgroup = threadgroup and written[1]
            output_shapes = output_shapes and written[2]
            template = template and written[3]
        items = () if template is None else self.template(template, [])
        shapes: list[Shape] | None = None
        if output_shapes is not None:
            shapes = arguments.listed(kernel, "output_shapes", output_shapes, names)
            for i, dtype in enumerate(outs):
                shapes[i] = arguments.output_shape(kernel, i, shapes[i], dtype)
        threads = None if grid is None else arguments.axes(kernel, "grid", grid, 0)
        group = None
        if threadgroup is not None:
            group = arguments.threadgroup_axes(kernel, threadgroup, threads)
        number = None if init_value is None else arguments.number(kernel, init_value)
        if number is not None:
            for i, dtype in enumerate(outs):
                arguments.fill_value(kernel, i, number, dtype)
        if threads is not None and 0 in threads and shapes is not None:
            arguments.check_empty(kernel, threads, shapes)
        metal, cuda = device == "metal", device not in ("metal", "cpu")
        spec = Spec(
            kernel,
            tuple(
                Input(f.dtype, len(f.shape), metal and f.size < SMALL, cuda and f.value)
                for f in facts
            ),
            tuple(outs),
            items,
        )
        if threads is None or group is None:
            return spec, None
        return spec, make_launch(threads, group, shapes or [], number, ())


def make_launch(
    threads: tuple[int, int, int],
    group: tuple[int, int, int],
    shapes: list[Shape],
    number: float | None,
    copies: tuple[int, ...],
) -> Launch:
    """What is sent: the threadgroup is never longer than the grid along any axis."""
    return Launch(threads, clamped(group, threads), tuple(shapes), number, copies)
