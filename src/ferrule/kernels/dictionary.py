"""Kernels whose arguments have no names: each call names them by the keys of its dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import KernelError, KernelTypeError
from ..hosts import imported
from ..kernel import make_kernel
from .call import MetalKernel

if TYPE_CHECKING:
    from ..devices.protocol import Binary


class DictionaryKernel:
    """A kernel made without names: arguments are named by the keys of each call's dictionaries.

    The form of MLX's first documentation of custom kernels. A call returns a dictionary.
    """

    def __init__(
        self,
        name: str,
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        compile_options: Mapping[str, str] | None,
        portable: bool,
    ) -> None:
        # Checks now what needs no names.
        self._base = make_kernel(
            name,
            (),
            ("out",),
            source,
            header,
            ensure_row_contiguous,
            atomic_outputs,
            compile_options,
            portable,
        )
        self._kernels: dict[tuple[object, ...], MetalKernel] = {}

    def __repr__(self) -> str:
        return f"<ferrule.DictionaryKernel {self._base.name}>"

    @imported.eager_only
    def __call__(
        self,
        *,
        inputs: Mapping[str, Any],
        output_shapes: Mapping[str, Sequence[int]],
        output_dtypes: Mapping[str, Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Mapping[str, Any] | None = None,
        init_value: float | None = None,
        ensure_row_contiguous: bool | None = None,
        atomic_outputs: bool | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Run the kernel as `MetalKernel.__call__` does, with arguments named by their keys.

        Args:
            inputs, output_shapes, output_dtypes, template: as in `MetalKernel.__call__`, as
                dictionaries. The keys of ``inputs`` and ``output_shapes`` are the arguments, in
                order; ``output_dtypes`` has the keys of ``output_shapes``.
            ensure_row_contiguous, atomic_outputs: in place of those given at construction.
            grid, threadgroup, init_value, verbose, stream: as in `MetalKernel.__call__`.

        Returns:
            An array per key of ``output_shapes``.
        """
        kernel, arguments = self._resolve(
            inputs, output_dtypes, output_shapes, template, ensure_row_contiguous, atomic_outputs
        )
        outputs = kernel(
            grid=grid,
            threadgroup=threadgroup,
            init_value=init_value,
            verbose=verbose,
            stream=stream,
            **arguments,
        )
        return dict(zip(kernel.kernel.output_names, outputs, strict=True))

    def text(
        self,
        device: str = "cpu",
        *,
        inputs: Mapping[str, Any],
        output_dtypes: Mapping[str, Any],
        output_shapes: Mapping[str, Sequence[int]] | None = None,
        template: Mapping[str, Any] | None = None,
        ensure_row_contiguous: bool | None = None,
        atomic_outputs: bool | None = None,
        **call: Any,
    ) -> str:
        """What the kernel becomes on ``device``: as `MetalKernel.text`, with dictionaries."""
        kernel, arguments = self._resolve(
            inputs, output_dtypes, output_shapes, template, ensure_row_contiguous, atomic_outputs
        )
        return kernel.text(device, **arguments, **call)

    def compile(
        self,
        device: str = "cpu",
        *,
        inputs: Mapping[str, Any],
        output_dtypes: Mapping[str, Any],
        output_shapes: Mapping[str, Sequence[int]] | None = None,
        template: Mapping[str, Any] | None = None,
        ensure_row_contiguous: bool | None = None,
        atomic_outputs: bool | None = None,
        **call: Any,
    ) -> Binary:
        """The kernel compiled for ``device``: as `MetalKernel.compile`, with dictionaries."""
        kernel, arguments = self._resolve(
            inputs, output_dtypes, output_shapes, template, ensure_row_contiguous, atomic_outputs
        )
        return kernel.compile(device, **arguments, **call)

    def _resolve(
        self,
        inputs: Mapping[str, Any],
        output_dtypes: Mapping[str, Any],
        output_shapes: Mapping[str, Sequence[int]] | None,
        template: Mapping[str, Any] | None,
        ensure_row_contiguous: bool | None,
        atomic_outputs: bool | None,
    ) -> tuple[MetalKernel, dict[str, Any]]:
        """The kernel with names, and the arguments of its call as lists."""
        base = self._base
        if output_shapes is None:
            output_shapes = dict.fromkeys(output_dtypes, ())
        for name, value in (
            ("inputs", inputs),
            ("output_shapes", output_shapes),
            ("output_dtypes", output_dtypes),
            ("template", {} if template is None else template),
        ):
            if not isinstance(value, Mapping):
                raise KernelTypeError(
                    f"[metal_kernel] `{name}` of kernel {base.name!r}: got a "
                    f"{type(value).__name__}, expected a dictionary, because the kernel was made "
                    "without `input_names` and `output_names`. Give both to call it with lists."
                )
        if output_shapes.keys() != output_dtypes.keys():
            raise KernelError(
                f"[metal_kernel] kernel {base.name!r}: `output_shapes` has the keys "
                f"{list(output_shapes)}, but `output_dtypes` has {list(output_dtypes)}; expected "
                "the same."
            )
        key = (tuple(inputs), tuple(output_shapes), ensure_row_contiguous, atomic_outputs)
        kernel = self._kernels.get(key)
        if kernel is None:
            contiguous = (
                base.ensure_row_contiguous
                if ensure_row_contiguous is None
                else ensure_row_contiguous
            )
            atomic = base.atomic_outputs if atomic_outputs is None else atomic_outputs
            kernel = self._kernels[key] = MetalKernel(
                make_kernel(
                    base.name,
                    key[0],
                    key[1],
                    base.source,
                    base.header,
                    contiguous,
                    atomic,
                    {"math_mode": base.math_mode},
                    base.portable,
                )
            )
        return kernel, {
            "inputs": list(inputs.values()),
            "output_shapes": list(output_shapes.values()),
            "output_dtypes": [output_dtypes[name] for name in output_shapes],
            "template": None if template is None else list(template.items()),
        }
