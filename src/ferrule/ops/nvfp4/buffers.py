"""`Quantized`: what layers with buffers of NVFP4 have in common.

Their weights are a checkpoint's bytes, until `Quantized.prepare` puts them into the order of their
backend's kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import ferrule

from . import humming, humming_order

SUFFIXES = "_in_order", "_scale_in_order"  # of the names of buffers


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
        return f"{self.name}{SUFFIXES[0]}", f"{self.name}{SUFFIXES[1]}"


class Quantized(nn.Module):  # type: ignore[misc]
    """A layer with buffers of NVFP4, each of which keeps its dtype whatever the layer is cast to.

    Attributes:
        activations: what is done to inputs: None (W4A16), or "nvfp4" (W4A4, the reference).
        packed: the names of these buffers; users may add others.
        sharded: whether they are DTensors, as `tensor_parallel` makes them.
        backend: that of the op, `nvfp4_linear` or `nvfp4_moe`, where activations is None; set it.
        prepared: whether weights are in the order of the backend's kernels.
    """

    activations: str | None
    packed: tuple[str, ...] = ()
    sharded: bool = False
    backend: str | None = None
    prepared: bool = False
    _order: Any = None  # that of its kernels

    def prepare(self) -> Any:
        """Put the weights into the order of the backend's kernels, in place of the checkpoint's.

        ``"humming"`` has such kernels; those of other backends read a checkpoint's bytes, which
        this puts back, where a layer is prepared for another. Without it, humming has a copy of the
        weights beside them. A matrix is put in order after the other, each of which is there twice
        meanwhile. Then there are no buffers ``*_packed`` and ``*_scale``, but `state_dict` has
        them, bit by bit, and `load_state_dict` takes them; derivatives put them back each time.

        Returns:
            The layer.

        Raises:
            KernelError: there is no kernel for a matrix, its GPU, or its second scales; the layer
                is sharded. The layer is as it was.
        """
        wanted = self.backend == "humming" and self.activations is None
        if wanted == self.prepared:
            return self
        if not wanted:
            self._put_back()
            return self
        function = self._function
        if self.sharded:
            raise ferrule.KernelError(
                f"[{type(self).__name__}] prepare: the buffers are DTensors; expected whole ones. "
                "Leave it out: each process has a copy of its part beside it."
            )
        for matrix in self._matrices:
            humming.check_rows(function, matrix.rows)
        self._check_scales()
        device = self._buffers[self._matrices[0].names[0]].device
        self._order = humming_order.order(function, device)
        try:
            for matrix in self._matrices:
                packed, scale = (self._buffers[name] for name in matrix.names)
                made = humming_order.ordered(function, packed, scale, self._order)
                del packed, scale
                self._replace(matrix.names, dict(zip(matrix.in_order, made, strict=True)))
        except BaseException:
            self._put_back()
            raise
        self.prepared = True
        return self

    def _check_call(self, name: str, x: Any) -> None:
        """That a prepared layer can have such an input.

        Raises:
            KernelError: it has another backend since, or its kernels do not take x.
        """
        if self.backend != "humming":
            raise ferrule.KernelError(
                f"[{type(self).__name__}] backend is {self.backend!r}, but the weights are in the "
                "order of 'humming'; expected the backend that they were prepared for. Call "
                "prepare(), which puts them back."
            )
        humming.check_input(self._function, name, x)

    def check_whole(self, function: str) -> None:
        """That the weights are a checkpoint's, and can be shared out.

        Raises:
            KernelError: the layer is prepared.
        """
        if self.prepared:
            raise ferrule.KernelError(
                f"[{function}] the weights are in the order of a backend's kernels in this "
                f"{type(self).__name__}; expected a checkpoint's. Set backend to None and call "
                "prepare(), which puts them back; then share them out."
            )

    def refresh(self) -> None:
        """Have what a backend made of the weights made anew: after writes through ``.data``."""
        for op in self._ops_with_copies:
            op.refresh()

    @property
    def _function(self) -> str:
        """The function whose weights these are."""
        raise NotImplementedError

    @property
    def _matrices(self) -> list[Matrix]:
        raise NotImplementedError

    @property
    def _ops_with_copies(self) -> list[ferrule.Op]:
        """Those of which some have a copy of the weights."""
        raise NotImplementedError

    def _check_scales(self) -> None:
        """That the kernels of humming take the second scales."""
        raise NotImplementedError

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
        self._non_persistent_buffers_set.difference_update(names)
        hidden = (name for name in others if name.endswith(SUFFIXES))
        self._non_persistent_buffers_set.update(hidden)
        at = self.packed.index(names[0])
        rest = [name for name in self.packed if name not in names]
        self.packed = (*rest[:at], *others, *rest[at:])

    def _put_back(self) -> None:
        """The checkpoint's bytes in the place of those in order."""
        for matrix in self._matrices:
            if matrix.in_order[0] in self._buffers:
                weight, scale = (self._buffers[name] for name in matrix.in_order)
                found = humming_order.put_back_all(
                    weight, scale, matrix.rows, matrix.depth, self._order
                )
                self._replace(matrix.in_order, dict(zip(matrix.names, found, strict=True)))
        self.prepared = False

    @contextlib.contextmanager
    def _as_in_checkpoints(self) -> Iterator[None]:
        """With the checkpoint's bytes, which are dropped afterwards."""
        buffers, packed = dict(self._buffers), self.packed
        self._put_back()
        try:
            yield
        finally:
            self._buffers.clear()
            self._buffers.update(buffers)
            hidden = (name for name in buffers if name.endswith(SUFFIXES))
            self._non_persistent_buffers_set.update(hidden)
            self.packed, self.prepared = packed, True

    def _save_to_state_dict(self, *args: Any) -> None:
        with self._as_in_checkpoints() if self.prepared else contextlib.nullcontext():
            super()._save_to_state_dict(*args)

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
        prepared = self.prepared
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
