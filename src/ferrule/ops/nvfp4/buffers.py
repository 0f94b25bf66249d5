"""`Quantized`: what layers with buffers of NVFP4 have in common.

Their weights are a checkpoint's bytes, until `Quantized.prepare` puts them into the order of their
backend's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import ferrule

from . import humming, humming_order


class Matrix(NamedTuple):
    """A matrix of a layer, or one for each expert.

    Attributes:
        name: what the names of its buffers begin with.
        rows, depth: its sizes.
    """

    name: str
    rows: int
    depth: int

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.name}_packed", f"{self.name}_scale"

    @property
    def in_order(self) -> tuple[str, str]:
        return f"{self.name}_in_order", f"{self.name}_scale_in_order"


class Quantized(nn.Module):  # type: ignore[misc]
    """A layer with buffers of NVFP4, each of which keeps its dtype whatever the layer is cast to.

    Attributes:
        activations: what is done to inputs: None (W4A16), or "nvfp4" (W4A4, the reference).
        packed: the names of these buffers; users may add others.
        sharded: whether they are DTensors, as `tensor_parallel` makes them.
        backend: that of the op, `nvfp4_linear` or `nvfp4_moe`, where activations is None; set it.
        whole: whether all of the weights are in this process.
    """

    activations: str | None
    packed: tuple[str, ...] = ()
    sharded: bool = False
    backend: str | None = None
    whole: bool = True

    @property
    def prepared(self) -> bool:
        """Whether weights are in the order of the backend's kernels: see `prepare`."""
        return self._first in self._buffers

    def prepare(self) -> Any:
        """Put the weights into the order of the backend's kernels, in place of the checkpoint's.

        ``"humming"`` has such kernels, which else have a copy of the weights beside them. Those of
        other backends read a checkpoint's bytes: of a layer that was prepared, these are put back.

        One matrix after the other is put in order, and is there twice meanwhile, with 4 M elements
        at a time of what is put back to compare. Then the layer has no buffers ``*_packed`` and
        ``*_scale``. `state_dict` makes them, bit by bit: new tensors, so that what is written to
        them is not the layer's; copies and pickles have them, and are not prepared;
        `load_state_dict` puts what it is given in order, and says so where that is impossible, with
        the layer loaded and not prepared. Gradients of inputs put a matrix back in each call; there
        are no second derivatives of `NVFP4Experts`, and none forward.

        Returns:
            The layer.

        Raises:
            KernelError: there is no kernel for a matrix, its GPU, or its second scales; the layer
                is sharded, or one of `expert_parallel`. It is as it was.
        """
        if self.backend != "humming" or self.activations is not None:
            self._put_back()
        elif all(self._buffers[name].numel() for name in self.packed):
            self._put_in_order()
        return self

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _put_in_order(self) -> None:
        function = self._function
        if self.sharded or not self.whole:
            raise ferrule.KernelError(
                f"[{type(self).__name__}] prepare: the layer has a part of the weights; expected a "
                "whole one. Leave it out: each process has a copy of its part beside it."
            )
        for matrix in self._matrices:
            humming.check_rows(function, matrix.rows)
        self._check_scales()
        try:
            for matrix in self._matrices:
                if matrix.names[0] in self._buffers:
                    tensors = [self._buffers[name] for name in matrix.names]
                    made = humming_order.ordered(function, *tensors)
                    tensors.clear()
                    self._replace(matrix.names, dict(zip(matrix.in_order, made, strict=True)))
        except BaseException:
            self._put_back()
            raise

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _put_back(self) -> None:
        """The checkpoint's bytes in the place of those in order."""
        found = {matrix: self._as_in_checkpoints(matrix) for matrix in self._in_order}
        for matrix, tensors in found.items():  # once all are there
            self._replace(matrix.in_order, tensors)

    @property
    def _in_order(self) -> list[Matrix]:
        """The matrices that are in order: all or none, but where memory ran out."""
        return [matrix for matrix in self._matrices if matrix.in_order[0] in self._buffers]

    def _as_in_checkpoints(self, matrix: Matrix) -> dict[str, Any]:
        weight, scale = (self._buffers[name] for name in matrix.in_order)
        found = humming_order.put_back(self._function, weight, scale, matrix.rows, matrix.depth)
        return dict(zip(matrix.names, found, strict=True))

    def _replace(self, names: tuple[str, ...], others: Mapping[str, Any]) -> None:
        """Put buffers in the place of others; those in order are no part of a state_dict."""
        made: dict[str, Any] = {}
        for name, buffer in self._buffers.items():
            if name == names[0]:
                made.update(others)
            if name not in names:
                made[name] = buffer
        self._buffers.clear()
        self._buffers.update(made)
        in_order = {name for matrix in self._matrices for name in matrix.in_order}
        self._non_persistent_buffers_set.difference_update(names)
        self._non_persistent_buffers_set.update(in_order & others.keys())
        at = self.packed.index(names[0])
        rest = [name for name in self.packed if name not in names]
        self.packed = (*rest[:at], *others, *rest[at:])

    def _call(self, op: ferrule.Op, x: Any, *given: Any) -> Any:
        """What an op of weights in order makes of x.

        Raises:
            KernelError: the layer has another backend since, or its kernels do not take x.
        """
        if self.backend != "humming":
            raise ferrule.KernelError(
                f"[{type(self).__name__}] backend is {self.backend!r}, but the weights are in the "
                "order of 'humming'; expected the backend that they were prepared for. Call "
                "prepare(), which puts them back."
            )
        try:
            humming.check_input(self._function, self._input, x)
            return op(x, *given)
        except Exception as error:
            if op.explain is not None:
                op.explain(error, x, *given)
            raise

    def check_whole(self, function: str) -> None:
        """That the weights are a checkpoint's, and can be shared out.

        Raises:
            KernelError: the layer is prepared.
        """
        if self._in_order:
            raise ferrule.KernelError(
                f"[{function}] the weights are in the order of a backend's kernels in this "
                f"{type(self).__name__}; expected a checkpoint's. Set backend to None and call "
                "prepare(), which puts them back; then share them out."
            )

    def refresh(self) -> None:
        """Have what a backend made of weights made anew, here and in layers alike: after writes
        through ``.data``."""
        self._op_with_copies.refresh()

    _function: str  # whose weights these are
    _first: str  # the name of the first buffer in order
    _input: str  # the function's name for what it multiplies

    @property
    def _matrices(self) -> list[Matrix]:
        raise NotImplementedError

    @property
    def _op_with_copies(self) -> ferrule.Op:
        """One of those that share copies of the weights."""
        raise NotImplementedError

    def _check_scales(self) -> None:
        """That the kernels of humming take the second scales."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        in_order = self._first in self.__dict__.get("_buffers", ())  # not before there are any
        if in_order and any(name in matrix.names for matrix in self._matrices):
            raise ferrule.KernelError(
                f"[{type(self).__name__}] {name} is set, but the weights are in the order of a "
                "backend's kernels; expected to be loaded. Use load_state_dict, or set backend to "
                "None and call prepare() first."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have a checkpoint's bytes: those in order are the package's."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        for name in ("_buffers", "_non_persistent_buffers_set"):
            made.__dict__[name] = self.__dict__[name].copy()
        made._put_back()
        return made.__dict__

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        in_order = {matrix.in_order[0]: matrix for matrix in self._in_order}
        if not in_order:
            return
        own = [(name, prefix + name) for name in self._buffers]
        rest = {key: destination.pop(key) for _, key in own if key in destination}
        for name, key in own:
            if name in in_order:
                tensors = self._as_in_checkpoints(in_order[name])
                destination.update({prefix + other: value for other, value in tensors.items()})
            elif key in rest:
                destination[key] = rest[key]

    def _add(self, name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
        make = torch.ones if dtype == torch.float32 else torch.zeros
        self.register_buffer(name, make(shape, dtype=dtype, device=device))
        self.packed = (*self.packed, name)

    def _shapes_of(self, name: str) -> list[tuple[int, ...]]:
        """The shapes that a buffer may have."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to`, `.half`, `.cuda` and others call: they cast floats, so these are not shown as
        such."""
        kept = {name: self._buffers[name] for name in self.packed}
        for name, buffer in kept.items():
            self._buffers[name] = buffer.view(_INTEGERS[buffer.dtype])
        try:
            super()._apply(fn, recurse)
        finally:
            for name, buffer in kept.items():
                moved = self._buffers[name]
                if moved.dtype != _INTEGERS[buffer.dtype]:  # by .type(), which casts all
                    self._buffers.update(kept)
                    raise ferrule.KernelError(
                        f"[{type(self).__name__}] {name} of {buffer.dtype} cannot be cast to "
                        f"{moved.dtype}. Use .to(dtype), which casts the bias alone."
                    )
                self._buffers[name] = moved.view(buffer.dtype)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes what has the bytes of this layer: a copy from another dtype would change them."""
        names = (name for matrix in self._in_order for name in matrix.names)
        prepared = any(prefix + name in state_dict for name in names)
        if prepared:
            self._put_back()
        taken, refused = dict(state_dict), []
        for name in self.packed:
            own, key = self._buffers[name], prefix + name
            if key not in taken:
                continue
            given = getattr(taken[key], "dtype", None)
            if given == torch.uint8 and own.dtype == torch.float8_e4m3fn:
                taken[key] = taken[key].view(torch.float8_e4m3fn)
            try:
                self.check_buffer(prefix, name, taken[key])
            except ferrule.KernelError as error:
                error_msgs.append(str(error))
                refused.append(key)
                del taken[key]
                continue
            if own.shape != taken[key].shape:  # one scale of all rows, or one of each
                self._buffers[name] = own.new_empty(taken[key].shape)
        super()._load_from_state_dict(
            taken, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys[:] = [key for key in missing_keys if key not in refused]
        if prepared:
            try:
                self.prepare()
            except ferrule.KernelError as error:
                error_msgs.append(str(error))

    def check_buffer(self, prefix: str, name: str, given: Any) -> None:
        """That a buffer may be this tensor.

        Raises:
            KernelError: it has another dtype or shape.
        """
        own, shapes = self._buffers[name], self._shapes_of(name)
        if not isinstance(given, torch.Tensor):
            raise ferrule.KernelError(
                f"[{type(self).__name__}] {prefix}{name} is a {type(given).__name__}; expected a "
                "tensor of torch. Give torch.tensor(…), or torch.from_numpy(…)."
            )
        if given.dtype == own.dtype and tuple(given.shape) in shapes:
            return
        expected = " or ".join(map(str, shapes))
        raise ferrule.KernelError(
            f"[{type(self).__name__}] {prefix}{name} is of {given.dtype} and has the shape "
            f"{tuple(given.shape)}; expected {own.dtype} and {expected}. Is it of a layer of "
            f"another size, or packed by another rule? This is {self._get_name()}"
            f"({self.extra_repr()})."
        )

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Take tensors as buffers, without a copy."""
        for name, tensor in tensors.items():
            if name.endswith("_scale") and getattr(tensor, "dtype", None) == torch.uint8:
                tensor = tensor.view(torch.float8_e4m3fn)
            self.check_buffer("", name, tensor)
            self._buffers[name] = tensor


# A dtype that no cast of floats changes, of the same size.
_INTEGERS = {
    torch.uint8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float32: torch.int32,
    torch.int32: torch.int32,
}
