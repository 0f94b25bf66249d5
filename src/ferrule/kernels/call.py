"""`metal_kernel`: the call that MLX users know, on any array and any machine. `CallableKernel` is
what it shares with `ferrule.cuda_kernel`.

Everything is checked before anything is launched. What a kernel becomes for one set of dtypes,
ranks and template values is looked up in a dictionary, so a repeated call builds no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..dtypes import Dtype
from ..errors import FerruleError, KernelError
from ..hosts import imported
from ..hosts import protocol as hosts
from ..kernel import Kernel
from ..spec import Facts, Input, Launch, Shape, Spec
from ..tools import fastcall
from . import arguments
from . import sizes as call_sizes
from .spec_builder import SpecBuilder, Template, make_launch

if TYPE_CHECKING:
    from ..devices.protocol import Binary, Program
    from ..hosts.protocol import Host
    from .repeated import RepeatedCalls
    from .sizes import Sizes


class _CheckedCall(NamedTuple):
    """The arguments of a call but its inputs, checked.

    Attributes:
        output_dtypes: as the call has them; ``outs`` are the same in our terms.
        key: what tells this call's `Spec` and device from others; the inputs' part is yet to come.
    """

    output_dtypes: list[Any]
    shapes: list[Shape]
    outs: list[Dtype]
    threads: tuple[int, int, int]
    group: tuple[int, int, int]
    items: Template
    number: float | None
    key: list[object]


class CallableKernel:
    """A kernel that can be called, in any language.

    Attributes:
        kernel: the text, names and flags, checked.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._builder = SpecBuilder(kernel)
        self._wants = tuple(any(kernel.wants(n)) for n in kernel.input_names)
        self._programs: dict[tuple[object, ...], Program] = {}
        self._again: Any = None  # calls with MLX's arrays like earlier ones
        self._atomic = kernel.atomic
        self._repeated: RepeatedCalls | None = None  # calls with other arrays like earlier ones

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(self.kernel.input_names), ", ".join(self.kernel.output_names)
        return f"<ferrule.{type(self).__name__} {self.kernel.name}({inputs}) -> {outputs}>"

    def __reduce__(self) -> tuple[type[CallableKernel], tuple[Kernel]]:
        return type(self), (self.kernel,)  # loaded programs stay behind

    @imported.eager_only
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
                ``"inp.shape"`` (see `ferrule.kernels.sizes`). In a compiled function whose sizes
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
        if again is not None and verbose is False and not fastcall.bypasses:
            nodes: list[Any] = again(
                inputs,
                stream,
                output_shapes,
                output_dtypes,
                grid,
                threadgroup,
                template,
                init_value,
            )
            if nodes is not NotImplemented:
                return nodes
        usual = stream is None and verbose is False
        repeated = self._repeated
        if repeated is not None and usual and not (self._atomic and imported.wants_determinism()):
            outputs: list[Any] | None = repeated.call(
                inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value
            )
            if outputs is not None:
                return outputs
        kernel = self.kernel
        arrays = arguments.listed(kernel, "inputs", inputs, kernel.input_names)
        as_given = output_shapes, output_dtypes, grid, threadgroup, template, init_value
        evaluated: tuple[Any, ...] = as_given
        sizes: Sizes | None = None
        if call_sizes.texts(grid, threadgroup, output_shapes, template):
            input_shapes = call_sizes.shapes_of(arrays)
            sizes = self._builder.sizes(
                input_shapes, output_dtypes, output_shapes, grid, threadgroup, template
            )
            grid, threadgroup, output_shapes, template = sizes.numbers(input_shapes)
            evaluated = output_shapes, output_dtypes, grid, threadgroup, template, init_value
        call = self._checked(verbose, *evaluated)
        graph = hosts.nodes(arrays, call.output_dtypes[0])
        if graph is not None:
            lazy = self._nodes(graph, arrays, call, template, verbose, stream, as_given, sizes)
            if lazy is not None:
                return lazy
        return self._run(arrays, call, stream, verbose, (inputs, *evaluated) if usual else None)

    def _checked(
        self,
        verbose: object,
        output_shapes: object,
        output_dtypes: object,
        grid: object,
        threadgroup: object,
        template: object,
        init_value: object,
    ) -> _CheckedCall:
        """The arguments of a call but its inputs, whose sizes are numbers."""
        kernel = self.kernel
        shapes = arguments.listed(kernel, "output_shapes", output_shapes, kernel.output_names)
        wanted = arguments.listed(kernel, "output_dtypes", output_dtypes, kernel.output_names)
        threads = arguments.axes(kernel, "grid", grid, 0)
        group = arguments.threadgroup_axes(kernel, threadgroup, threads)
        if verbose is not False and verbose is not True:
            raise arguments.wrong_type(arguments.label_of(kernel, "verbose"), verbose, "a bool")
        key: list[object] = []
        outs: list[Dtype] = []
        for i, value in enumerate(wanted):
            dtype = arguments.output_dtype(kernel, i, value)
            shapes[i] = arguments.output_shape(kernel, i, shapes[i], dtype)
            outs.append(dtype)
            key.append(dtype.name)
        items = () if template is None else self._builder.template(template, key)
        if 0 in threads:
            arguments.check_empty(kernel, threads, shapes)
        number = None if init_value is None else arguments.number(kernel, init_value)
        return _CheckedCall(wanted, shapes, outs, threads, group, items, number, key)

    def _nodes(
        self,
        graph: Any,
        arrays: list[Any],
        call: _CheckedCall,
        template: object,
        verbose: bool,
        stream: object,
        as_given: tuple[object, ...],
        sizes: Sizes | None,
    ) -> list[Any] | None:
        """The outputs as nodes of a lazy graph; None where nodes cannot be had."""
        kernel = self.kernel
        recorded = graph.exporting()
        _, *of_call, _ = call
        checked = kernel, self._wants, arrays, *of_call
        if recorded:
            nodes = graph.record_kernel(*checked, verbose, stream, sizes)
        else:
            nodes = graph.call_kernel(*checked, stream, as_given, sizes)
        if nodes is None:
            return None
        if verbose and not recorded:
            self._show(
                self.text(
                    inputs=arrays,
                    output_shapes=call.shapes,
                    output_dtypes=call.outs,
                    grid=call.threads,
                    threadgroup=call.group,
                    template=cast(Any, template),
                )
            )
        if self._again is None and not recorded:
            self._again = graph.again(kernel)
        return list(nodes)

    def _run(
        self,
        arrays: list[Any],
        call: _CheckedCall,
        stream: object,
        verbose: bool,
        to_remember: tuple[Any, ...] | None,
    ) -> list[Any]:
        """Allocate the outputs and launch. The second time with these dtypes, C is told how calls
        like ``to_remember`` are made, if it is not None."""
        kernel = self.kernel
        host, device, queue, facts, arrays, copies, owners = self._gathered(arrays, call, stream)
        for fact in facts:
            call.key.append(fact.dtype.name)
            call.key.append(-1 if fact.value else len(fact.shape))
        call.key.append(device)
        key = tuple(call.key)
        number = call.number
        outputs: list[Any] = []
        results: list[Facts] = []
        for i, dtype in enumerate(call.outs):
            output, fact = self._allocate(i, host, call.shapes[i], dtype, device, number)
            outputs.append(output)
            results.append(fact)
        launch = make_launch(call.threads, call.group, call.shapes, number, copies)
        empty = 0 in call.threads
        program = known = self._programs.get(key)
        if verbose or (program is None and not empty):
            program = self._load(facts, call.outs, call.items, key, device, launch, verbose)
        if program is not None and not empty:
            program.launch(facts, results, launch, queue)
            if device == "cpu":
                hosts.check_written(launch.of(kernel), host, kernel.output_names, outputs)
            if to_remember is not None and known is not None and not copies:
                self._remember(to_remember, program, host, device, facts, call.outs, number)
        del owners  # the bytes of scalars and copies had to live until here
        return host.finish(f"kernel {kernel.name!r}", arrays, outputs)

    def _gathered(
        self, values: list[Any], call: _CheckedCall, stream: object
    ) -> tuple[Host, str, int, list[Facts], list[Any], tuple[int, ...], list[object]]:
        """`arguments.gather` with the stream behind the device; of a call without arrays, too."""
        kernel = self.kernel
        try:
            host, device, facts, arrays, copies, owners = arguments.gather(
                kernel, values, self._wants
            )
        except RuntimeError as error:  # of a copy
            self._after_a_fault(error)
            raise
        if host is None:
            host, device = self._host_of_dtypes(call.output_dtypes)
        in_cuda = kernel.language == "cuda" and not device.startswith("cuda")
        if in_cuda and not (device == "cpu" and _runs_cuda(kernel)):
            raise arguments.needs_cuda(kernel, host.name, device)
        alert = getattr(host, "alert_not_deterministic", None) if self._atomic else None
        if alert is not None:
            alert(kernel.tag, f"kernel {kernel.name!r}", device)
        try:
            queue = host.stream(stream, device)
        except FerruleError as error:
            raise arguments.renamed(error, arguments.label_of(kernel, "stream")) from error
        return host, device, queue, facts, arrays, copies, owners

    def check(self, **call: Any) -> list[Any]:
        """What `ferrule.checking` finds in one call with arrays of NumPy, torch or MLX: a list of
        `ferrule.Finding`.

        Args:
            call: as `__call__` takes it.

        Raises:
            KernelError, KernelTypeError, CompileError, DeviceError: as a call does.
        """
        from ..devices import protocol as devices

        with devices.checking() as findings:
            self(**call)
        return findings

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
        spec, launch = self._builder.described(
            inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, device
        )
        if device == "metal":
            from ..source.metal import text as metal

            return metal.text(spec)
        from ..devices import protocol as devices

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
        spec, launch = self._builder.described(
            inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, device
        )
        from ..devices import protocol as devices

        if carry_to is not None:
            return devices.carry(device, spec, launch, carry_to)
        return devices.get(device).compile(spec, launch)

    def _host_of_dtypes(self, wanted: list[Any]) -> tuple[Host, str]:
        """The host and device of a call without arrays among its inputs, by its output dtypes."""
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
            from ..tools.driver import after_a_fault

            fault = after_a_fault(code, f"kernel {self.kernel.name!r} was not launched")
            if fault is not None:
                raise fault from error

    def _remember(self, call: tuple[Any, ...], *what: Any) -> None:
        """Let C make calls like this one from now on; takes what `RepeatedCalls.remember` does."""
        from . import repeated  # now that a first call has been made

        if self._repeated is None:
            self._repeated = repeated.repeated_calls(self.kernel)
        if self._repeated is not None and not fastcall.bypasses:
            self._repeated.remember(call, *what)

    def _load(
        self,
        facts: list[Facts],
        outs: list[Dtype],
        items: Template,
        key: tuple[object, ...],
        device: str,
        launch: Launch,
        verbose: bool,
    ) -> Program | None:
        """The program for a call that is not remembered, or that wants its text printed."""
        from ..devices import protocol as devices

        cuda = device != "cpu" or self.kernel.language == "cuda"
        inputs = tuple([Input(f.dtype, len(f.shape), value=cuda and f.value) for f in facts])
        spec = Spec(self.kernel, inputs, tuple(outs), items)
        where = devices.get(device)
        if verbose:
            self._show(where.text(spec, launch))
        if 0 in launch.grid:
            return None
        program = self._programs[key] = where.program(spec)
        return program

    def _show(self, text: str) -> None:
        print(f"Generated source code for `{self.kernel.name}`:\n```\n{text}\n```", flush=True)


def _runs_cuda(kernel: Kernel) -> bool:
    from ..devices import protocol as devices

    return devices.runs_cuda(kernel)


class MetalKernel(CallableKernel):
    """A kernel with the body of a Metal function: what `metal_kernel` returns."""
