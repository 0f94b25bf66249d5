"""`metal_kernel`: the call that MLX users know, on any array and any machine. `CallableKernel` is
what it shares with `ferrule.cuda_kernel`.

Everything is checked before anything is launched. What a kernel becomes for one set of dtypes,
ranks and template values is looked up in a dictionary, so a repeated call builds no text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, cast, overload

from . import arguments, call_sizes, fastcall, hosts
from .dtypes import Dtype
from .errors import FerruleError, KernelError, KernelTypeError
from .kernel import Kernel, check_distinct, check_identifier, check_not_given, make_kernel
from .spec import SMALL, Facts, Input, Launch, Shape, Spec

if TYPE_CHECKING:
    from .call_sizes import Sizes
    from .devices import Binary, Program
    from .dictionary_call import DictionaryKernel
    from .hosts import Host


_MOST_SIZES = 256  # that a kernel remembers


class CallableKernel:
    """A kernel that can be called, in any language.

    Attributes:
        kernel: the text, names and flags, checked.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._wants = tuple(any(kernel.wants(n)) for n in kernel.input_names)
        self._programs: dict[tuple[object, ...], Program] = {}
        self._template_names: set[tuple[str, ...]] = {()}
        self._sizes: dict[str, Sizes] = {}
        self._again: Any = None  # calls with MLX's arrays like earlier ones
        self._table = fastcall.table(
            len(kernel.input_names), len(kernel.output_names), kernel.ensure_row_contiguous
        )

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(self.kernel.input_names), ", ".join(self.kernel.output_names)
        return f"<ferrule.{type(self).__name__} {self.kernel.name}({inputs}) -> {outputs}>"

    def __reduce__(self) -> tuple[type[CallableKernel], tuple[Kernel]]:
        return type(self), (self.kernel,)  # loaded programs stay behind

    @hosts.eager_only
    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int | str] | str],
        output_dtypes: Sequence[Any],
        grid: Sequence[int | str],
        threadgroup: Sequence[int | str],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[Any]:
        """Run the kernel on ``grid`` threads and return its outputs.

        Args:
            inputs: one array or Python or NumPy scalar per input name. All arrays belong to one
                library (NumPy, torch, MLX, CuPy) and one device, and the outputs do too; where no
                input is an array, the library of the output dtypes decides.
            output_shapes: one shape per output name. A size here, in ``grid`` and in
                ``threadgroup``, and a template's int may be a text: an expression of the inputs,
                such as ``"inp.size"`` or ``"ceildiv(inp.shape[0], 32) * 32"``, and a shape may be
                ``"inp.shape"`` (see `ferrule.call_sizes`). In a compiled function whose sizes
                change, they follow.
            output_dtypes: one dtype per output name, of NumPy, torch or MLX, or its name, such as
                ``"float32"``.
            grid: threads along x, y and z; exactly this many run. A CUDA body runs in whole
                blocks: where ``threadgroup`` does not divide the grid, threads beyond its end
                run, too, and the body must stop them.
            threadgroup: threads per threadgroup, which is CUDA's block, along x, y and z, 1024 in
                all at most. An axis of the grid that is shorter makes the threadgroup shorter; it
                may be 0 where the grid has no thread.
            template: ``(name, value)`` pairs; a value is an int, a bool or a dtype.
            init_value: what every output is filled with before the launch. None leaves them
                unwritten.
            verbose: print the text of the kernel for the device that runs it.
            stream: None; for torch on CUDA also the current stream; for MLX any stream or device.

        Returns:
            One row-contiguous array per output name.

        Raises:
            KernelError: an argument has a value that is not allowed (also a ValueError).
            KernelTypeError: an argument has a type that is not allowed (also a TypeError).
            CompileError: the compiler refused the kernel's text.
            DeviceError: the arrays are on a device that ferrule cannot use.
        """
        again = self._again
        if again is not None and verbose is False:
            made: list[Any] = again(
                inputs, stream, output_shapes, output_dtypes, grid, threadgroup, template,
                init_value,
            )  # fmt: skip
            if made is not NotImplemented:
                return made
        table = self._table if stream is None and verbose is False else None
        if table is not None:
            known = table.call(
                inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value
            )
            if known is not None:
                return known
        kernel = self.kernel
        arrays = arguments.listed(kernel, "inputs", inputs, kernel.input_names)
        asked = (output_shapes, output_dtypes, grid, threadgroup, template, init_value)
        written: Sizes | None = None
        if call_sizes.texts(grid, threadgroup, output_shapes, template):
            written = self._written(
                call_sizes.shapes_of(arrays), output_dtypes, output_shapes, grid, threadgroup,
                template,
            )  # fmt: skip
            grid, threadgroup, output_shapes, template = written.numbers(
                call_sizes.shapes_of(arrays)
            )
        shapes = arguments.listed(kernel, "output_shapes", output_shapes, kernel.output_names)
        wanted = arguments.listed(kernel, "output_dtypes", output_dtypes, kernel.output_names)
        threads = arguments.axes(kernel, "grid", grid, 0)
        group = arguments.threadgroup_axes(kernel, threadgroup, threads)
        if verbose is not False and verbose is not True:
            raise arguments.wrong_type(arguments.label_of(kernel, "verbose"), verbose, "a bool")
        key: list[object] = []  # what tells this call's Spec and device from others
        outs: list[Dtype] = []
        for i, value in enumerate(wanted):
            dtype = arguments.output_dtype(kernel, i, value)
            shapes[i] = arguments.output_shape(kernel, i, shapes[i], dtype)
            outs.append(dtype)
            key.append(dtype.name)
        items = () if template is None else self._template(template, key)
        empty = 0 in threads
        if empty:
            arguments.check_empty(kernel, threads, shapes)
        number = None if init_value is None else arguments.number(kernel, init_value)
        graph = hosts.nodes(arrays, wanted[0])
        if graph is not None:
            recorded = graph.exporting()
            call = (
                kernel, self._wants, arrays, shapes, outs, threads, group, items, number
            )  # fmt: skip
            if recorded:
                nodes = graph.record_kernel(*call, verbose, stream, written)
            else:
                nodes = graph.call_kernel(*call, stream, asked, written)
            if nodes is not None:
                if verbose and not recorded:
                    self._show(self.text(
                        inputs=arrays, output_shapes=shapes, output_dtypes=outs, grid=threads,
                        threadgroup=group, template=template,
                    ))  # fmt: skip
                if self._again is None and not recorded:
                    self._again = graph.again(kernel)
                return list(nodes)

        try:
            host, device, facts, arrays, copies, owners = arguments.gather(
                kernel, arrays, self._wants
            )
        except RuntimeError as error:  # of a copy
            self._after_a_fault(error)
            raise
        if host is None:
            host, device = self._host_of_dtypes(wanted)
        if kernel.language == "cuda" and not device.startswith("cuda"):
            raise arguments.needs_cuda(kernel, host.name, device)
        for fact in facts:
            key.append(fact.dtype.name)
            key.append(-1 if fact.value else len(fact.shape))
        key.append(device)
        try:
            queue = host.stream(stream, device)
        except FerruleError as error:
            raise arguments.renamed(error, arguments.label_of(kernel, "stream")) from error

        outputs: list[Any] = []
        results: list[Facts] = []
        for i, dtype in enumerate(outs):
            output, fact = self._allocate(i, host, shapes[i], dtype, device, number)
            outputs.append(output)
            results.append(fact)
        launch = _launch(threads, group, shapes, number, copies)
        program = self._programs.get(tuple(key))
        if verbose or (program is None and not empty):
            program = self._load(facts, outs, items, tuple(key), device, launch, verbose)
        if program is not None and not empty:
            program.launch(facts, results, launch, queue)
            if device == "cpu":
                hosts.check_written(launch.of(kernel), host, kernel.output_names, outputs)
            if table is not None and not copies:
                plan = self._plan(program, host, device, facts, results, outs, launch, number)
                if plan is not None:
                    table.remember(
                        inputs, output_shapes, output_dtypes, grid, threadgroup, template,
                        init_value, plan,
                    )  # fmt: skip
        del owners  # the bytes of scalars and copies had to live until here
        return host.finish(f"kernel {kernel.name!r}", arrays, outputs)

    def text(
        self,
        device: str = "cpu",
        *,
        inputs: Sequence[Any],
        output_dtypes: Sequence[Any],
        output_shapes: Sequence[Sequence[int | str] | str] | None = None,
        grid: Sequence[int | str] | None = None,
        threadgroup: Sequence[int | str] | None = None,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> str:
        """What the kernel becomes on ``device``; nothing is compiled or launched.

        Args:
            device: ``"metal"`` for the text that MLX compiles on Apple's GPUs, ``"cpu"``,
                ``"cuda"``, or an architecture such as ``"sm_90"``.
            inputs: as in a call, or in place of arrays ``(shape, dtype)`` pairs or strings such
                as ``"float16[4,16]"``.
            output_dtypes, template: as in a call.
            output_shapes, grid, threadgroup, init_value, verbose, stream: as in a call; checked
                where given, without effect on the text.

        Raises:
            KernelError, KernelTypeError: as a call does.
            DeviceError: there is no such device, or the kernel's language is not for it.
        """
        spec, launch = self._described(
            inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, device
        )
        if device == "metal":
            from .source import metal

            return metal.text(spec)
        from . import devices

        return devices.get(device).text(spec, launch)

    def compile(
        self,
        device: str = "cpu",
        *,
        inputs: Sequence[Any],
        output_dtypes: Sequence[Any],
        output_shapes: Sequence[Sequence[int | str] | str] | None = None,
        grid: Sequence[int | str] | None = None,
        threadgroup: Sequence[int | str] | None = None,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        carry_to: str | PathLike[str] | None = None,
    ) -> Binary:
        """The kernel compiled for ``device``, from the disk cache where it is there.

        Takes what `text` takes, and launches nothing. ``carry_to`` is a folder that gets machine
        code for an NVIDIA GPU, for machines without NVRTC: ``ferrule cache add FOLDER`` there.

        Raises:
            KernelError, KernelTypeError: as a call does.
            CompileError: the compiler refused the kernel's text.
            ToolchainError: there is no compiler for ``device``.
            DeviceError: there is no such device, or the kernel's language is not for it.
        """
        spec, launch = self._described(
            inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, device
        )
        from . import devices

        if carry_to is not None:
            return devices.carry(device, spec, launch, carry_to)
        return devices.get(device).compile(spec, launch)

    def _host_of_dtypes(self, wanted: list[Any]) -> tuple[Host, str]:
        """Who makes the outputs of a call that has no array among its inputs."""
        names = self.kernel.output_names
        host = hosts.of_dtype(wanted[0])
        for name, value in zip(names, wanted, strict=True):
            if hosts.of_dtype(value) is not host:
                raise KernelError(
                    f"{arguments.label_of(self.kernel, 'output_dtypes')}: output "
                    f"{names[0]!r} has a dtype of {host.name}, output {name!r} one of "
                    f"{hosts.of_dtype(value).name}; no input is an array, so the dtypes decide "
                    "whose arrays the outputs are: expected dtypes of one library."
                )
        return host, host.device()

    def _allocate(
        self, index: int, host: Host, shape: Shape, dtype: Dtype, device: str, number: float | None
    ) -> tuple[Any, Facts]:
        """One output and its facts."""
        kernel = self.kernel
        if number is not None:
            number = arguments.fill_value(kernel, index, number, dtype)
        try:
            if number is None:
                output = host.empty(shape, dtype, device)
            else:
                output = host.full(shape, number, dtype, device)
            return output, cast(Facts, host.facts(output))
        except FerruleError as error:
            name = kernel.output_names[index]
            label = f"{kernel.tag} output {name!r} of kernel {kernel.name!r}"
            raise arguments.renamed(error, label) from error
        except host.allocation_errors as error:
            self._after_a_fault(error)
            raise KernelError(
                f"{arguments.output_label(kernel, 'output_shapes', index)}: got "
                f"{shape}, which is {dtype.itemsize * math.prod(shape)} bytes of {dtype.name}; "
                f"{host.name} cannot allocate them: {error}"
            ) from error

    def _after_a_fault(self, error: Exception) -> None:
        """Say in our words that a library found CUDA broken by a kernel that was launched before.

        Raises:
            DeviceError: that is so; names the last kernels.
        """
        # Of torch.AcceleratorError, or CuPy's CUDARuntimeError.
        code = getattr(error, "error_code", getattr(error, "status", None))
        if isinstance(code, int):
            from . import devices

            found = devices.after_a_fault(code, f"kernel {self.kernel.name!r} was not launched")
            if found is not None:
                raise found from error

    def _plan(
        self,
        program: Program,
        host: Host,
        device: str,
        facts: list[Facts],
        results: list[Facts],
        outs: list[Dtype],
        launch: Launch,
        number: float | None,
    ) -> tuple[object, ...] | None:
        """What runtime/fastcall.c must know to do the same again; None where it cannot, or where
        this was the first time."""
        device_part = program.repeat(facts, results, launch)
        if device_part is None:
            return None
        kernel = self.kernel
        makers = []
        for i, dtype in enumerate(outs):
            value = None if number is None else arguments.fill_value(kernel, i, number, dtype)
            maker = host.maker(results[i].shape, value, dtype, device)
            if maker is None:
                return None
            makers.append(maker)

        def fail(status: int, inputs: list[Any], outputs: list[Any]) -> None:
            if device == "cpu":
                hosts.check_written(launch.of(kernel), host, kernel.output_names, outputs)
            arrays = [host.facts(a) if hosts.find(type(a)) else None for a in [*inputs, *outputs]]
            # A scalar's address was that of its first call.
            gone = [fact._replace(pointer=0) for fact in [*facts, *results]]
            known = [a or f for a, f in zip(arrays, gone, strict=True)]
            raise program.failure(status, launch, known)

        return (tuple(makers), fail, *device_part)

    def _load(
        self,
        facts: list[Facts],
        outs: list[Dtype],
        items: tuple[tuple[str, int | bool | Dtype], ...],
        key: tuple[object, ...],
        device: str,
        launch: Launch,
        verbose: bool,
    ) -> Program | None:
        """The program for a call that is not remembered, or that wants its text printed."""
        from . import devices

        cuda = device != "cpu"
        inputs = tuple([Input(f.dtype, len(f.shape), value=cuda and f.value) for f in facts])
        spec = Spec(self.kernel, inputs, tuple(outs), items)
        where = devices.get(device)
        if verbose:
            self._show(where.text(spec, launch))
        if 0 in launch.grid:
            return None
        program = self._programs[key] = where.program(spec)
        return program

    def _written(
        self, shapes: list[Shape], output_dtypes: object, output_shapes: object, grid: object,
        threadgroup: object, template: object,
    ) -> Sizes:  # fmt: skip
        """The sizes of a call, some of which are texts, for inputs of these shapes."""
        kernel = self.kernel
        names = kernel.output_names
        kinds = arguments.listed(kernel, "output_dtypes", output_dtypes, names)
        outs = [arguments.output_dtype(kernel, i, kind) for i, kind in enumerate(kinds)]
        ranks = [len(shape) for shape in shapes]
        # A repr tells True from 1, which are equal.
        key = f"{ranks}{outs}{grid!r}{threadgroup!r}{output_shapes!r}{template!r}"
        found = self._sizes.get(key)
        if found is None:
            wanted = arguments.listed(kernel, "output_shapes", output_shapes, names)
            found = call_sizes.Sizes(kernel, ranks, grid, threadgroup, wanted, outs, template)
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            self._sizes[key] = found
        return found

    def _show(self, text: str) -> None:
        print(f"Generated source code for `{self.kernel.name}`:\n```\n{text}\n```", flush=True)

    def _template(
        self, template: object, key: list[object]
    ) -> tuple[tuple[str, int | bool | Dtype], ...]:
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

    def _described(
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
            given = [f.shape for f in facts]
            # What is left out is not looked at.
            written = self._written(
                given, output_dtypes, output_shapes or [()] * len(names), grid or (1, 1, 1),
                threadgroup or (1, 1, 1), template,
            ).numbers(given)  # fmt: skip
            grid = grid and written[0]
            threadgroup = threadgroup and written[1]
            output_shapes = output_shapes and written[2]
            template = template and written[3]
        items = () if template is None else self._template(template, [])
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
        return spec, _launch(threads, group, shapes or [], number, ())


def _launch(
    threads: tuple[int, int, int],
    group: tuple[int, int, int],
    shapes: list[Shape],
    number: float | None,
    copies: tuple[int, ...],
) -> Launch:
    """What is sent: the threadgroup is never longer than the grid along any axis."""
    gx, gy, gz = threads
    x, y, z = group
    group = (x if x < gx else gx, y if y < gy else gy, z if z < gz else gz)
    return Launch(threads, group, tuple(shapes), number, copies)


class MetalKernel(CallableKernel):
    """A kernel with the body of a Metal function: what `metal_kernel` returns."""


@overload
def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    portable: bool = False,
) -> MetalKernel: ...


@overload
def metal_kernel(
    name: str,
    *,
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    portable: bool = False,
) -> DictionaryKernel: ...


def metal_kernel(
    name: str,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    source: str | None = None,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    portable: bool = False,
) -> MetalKernel | DictionaryKernel:
    """A kernel from the body of a Metal function, run on the device of its arrays.

    The parameters are those of ``mx.fast.metal_kernel``. Nothing is compiled before the first
    call.

    Args:
        name: the kernel's name: letters, digits and underscores.
        input_names: the names of the inputs, in order. Without ``input_names`` and
            ``output_names`` each call names its arguments: see `DictionaryKernel`.
        output_names: the names of the outputs, in order.
        source: the body of a Metal function; its signature is generated.
        header: text placed before the function: helper functions, structs, constants.
        ensure_row_contiguous: copy the inputs that are not row-contiguous before the launch.
            Otherwise a body that wants strides reads ``<input>_strides``, in elements.
        atomic_outputs: make every output a ``device atomic<T>*``.
        compile_options: ``{"math_mode": "safe" | "relaxed" | "fast"}``; safe by default.
        portable: refuse what runs here but Apple's compiler or GPU would not take.

    Raises:
        KernelError: a name, option or text that is not allowed (also a ValueError).
        KernelTypeError: an argument of a type that is not allowed (also a TypeError).

    Example:
        >>> import ferrule, numpy as np
        >>> double = ferrule.metal_kernel(
        ...     name="double_it", input_names=["inp"], output_names=["out"],
        ...     source="uint i = thread_position_in_grid.x; out[i] = 2 * inp[i];")
        >>> x = np.arange(4, dtype=np.float32)
        >>> (y,) = double(inputs=[x], grid=(4, 1, 1), threadgroup=(4, 1, 1),
        ...               output_shapes=[x.shape], output_dtypes=[x.dtype])
        >>> y
        array([0., 2., 4., 6.], dtype=float32)
    """
    if source is None:
        raise KernelTypeError(
            f"[metal_kernel] kernel {name!r} has no `source`; give the body of a Metal function."
        )
    hosts.prepare_tracers()
    if input_names is None and output_names is None:
        from .dictionary_call import DictionaryKernel

        return DictionaryKernel(
            name, source, header, ensure_row_contiguous, atomic_outputs, compile_options, portable
        )
    if input_names is None or output_names is None:
        missing = "input_names" if input_names is None else "output_names"
        raise KernelTypeError(
            f"[metal_kernel] kernel {name!r} has no `{missing}`; give both `input_names` and "
            "`output_names`, or neither to name the arguments in each call's dictionaries."
        )
    return MetalKernel(
        make_kernel(
            name, input_names, output_names, source, header, ensure_row_contiguous,
            atomic_outputs, compile_options, portable,
        )
    )  # fmt: skip
