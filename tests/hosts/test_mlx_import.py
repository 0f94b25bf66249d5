"""Files of `mx.export_function` that were cut off or altered: errors that say so, and no crash."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError
from ferrule.hosts.mlx import file as mlx_file
from mlx_files import (
    FEW,
    FOLDER,
    METADATA,
    SCALE,
    I,
    altered,
    content,
    exported,
    kernels,
    level0,
    values,
    write,
)
from mlx_versions import older_than

MINUS = ferrule.metal_kernel("minus", ["inp"], ["out"], I + "out[i] = -inp[i] * N;")


def sample() -> bytes:
    def f(x: mx.array) -> Any:
        y = SCALE(mx.sin(x), mx.array([1.0, 2.0, 3.0]), 1.0)
        (z,) = MINUS(inputs=[x], grid=("inp.size", 1, 1), threadgroup=(8, 1, 1),
                     template=[("N", "inp.ndim")], output_shapes=["inp.shape"],
                     output_dtypes=[x.dtype])  # fmt: skip
        return [*level0(ferrule.metal_kernel)(y), mx.split(y, 3, axis=-1)[1], z]

    return Path(exported(f, mx.zeros((2, 3)), **METADATA)).read_bytes()


if older_than(0, 32):
    pytest.skip(older_than(0, 32), allow_module_level=True)
SAMPLE = sample()


@settings(FEW, max_examples=60)
@given(st.integers(0, len(SAMPLE) - 1))
def test_files_that_are_cut_off_are_refused(size: int) -> None:
    file = write(SAMPLE[:size])
    with pytest.raises(KernelError, match=r"\[import_function\].*at byte \d+: ") as caught:
        ferrule.import_function(file)
    assert repr(file) in str(caught.value)


@settings(FEW, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255)), min_size=1,
                max_size=3))  # fmt: skip
def test_files_with_other_bytes_are_refused_or_read(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for at, by in changes:
        data[at] ^= by
    file = write(bytes(data))
    try:
        ferrule.import_function(file)
    except KernelError as error:
        assert repr(file) in str(error) and len(str(error)) < 4000


@settings(FEW, max_examples=60)
@given(st.integers(0, len(SAMPLE) - 8), st.sampled_from([0, 2**31, 2**62, 2**64 - 1, 10**6]))
def test_lengths_that_no_file_has_are_refused(at: int, number: int) -> None:
    file = write(SAMPLE[:at] + struct.pack("<Q", number) + SAMPLE[at + 8 :])
    try:
        ferrule.import_function(file)
    except KernelError as error:
        assert repr(file) in str(error)


@settings(FEW, max_examples=40)
@given(st.binary(max_size=200))
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(KernelError, match=r"is no file of mx.export_function, or damaged"):
        ferrule.import_function(write(data))


def test_files_that_cannot_be_read() -> None:
    with pytest.raises(KernelError, match=r"'/nowhere/x.mlxfn' cannot be read: No such file"):
        ferrule.import_function("/nowhere/x.mlxfn")
    with pytest.raises(KernelError, match="cannot be read: Is a directory"):
        ferrule.import_function(FOLDER)
    data = SAMPLE.replace(mx.__version__.encode(), b"9.99.9"[: len(mx.__version__)], 1)
    with pytest.raises(KernelError, match=r"It was written by MLX 9.99.9, and this is MLX"):
        ferrule.import_function(write(data[:-3]))
    with pytest.raises(KernelError, match="2 bytes follow the last function"):
        ferrule.import_function(write(SAMPLE + b"ab"))


def operations_of(file: str) -> list[mlx_file.Operation]:
    return [one for function in content(file).functions for one in function.operations]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"T(by);\n}", b"T(b7);\n}", "its text would not be what op 'scale'"),
        (b"T(by);\"", b"T(b7);\"", "the saved op 'scale_[0-9a-f]+' was altered"),
        (b"T(by);", b"T(b7);", "the saved op 'scale_[0-9a-f]+' was altered"),
        (b'"absent": ["m"]', b'"absent": ["w"]', "altered|scale"),
        (b'"op": "scale', b'"op": "scblf', "its op cannot be read"),
        (b'{"absent"', b'{"absenT"', "its op cannot be read"),
        (struct.pack("<6i", 6, 1, 1, 64, 1, 1), struct.pack("<6i", 7, 1, 1, 64, 1, 1),
         "its grid would not be"),
        (struct.pack("<6i", 6, 1, 1, 64, 1, 1), struct.pack("<6i", 6, 1, 1, 32, 1, 1),
         "its threadgroup would not be"),
        (b"custom_kernel_lean__", b"custom_kernel_lead__", "lead__|has no Metal function"),
        (b"const constant float* inp [[", b"const constant half_* inp [[", "its signature"),
        (b"\n}\n\ntemplate [[host_name(", b"\n}\n template [[host_name(", "altered|MLX writes"),
    ],
)  # fmt: skip
def test_kernels_that_were_altered_are_refused(old: bytes, new: bytes, said: str) -> None:
    file = write(SAMPLE)
    changed = altered(file, old, new)
    if old.startswith(b"custom_kernel_lean"):  # the whole name, everywhere: that is another kernel
        assert ferrule.import_function(changed)(values((2, 3)))
        return
    with pytest.raises(KernelError, match=said) as caught:
        ferrule.import_function(changed)
    assert repr(changed) in str(caught.value)


OF_MLX: list[tuple[str, Callable[[mx.array], Any], int, int]] = [
    ("Reduce", lambda x: x.sum(axis=1), -4, 7), ("Transpose", lambda x: x.T, -4, 5),
    ("Split", lambda x: mx.split(x, 3, 1), -4, -9), ("Split", lambda x: mx.split(x, 3, 1), 8, 40),
    ("Slice", lambda x: x[1:, :2], 8, 5), ("Slice", lambda x: x[::-1], 8, 2),
    ("Pad", lambda x: mx.pad(x, 1), -4, 90), ("Sort", lambda x: mx.sort(x, -1), -4, 3),
    ("ExpandDims", lambda x: mx.expand_dims(x, 1), -4, 8),
    ("Concatenate", lambda x: mx.concatenate([x, x]), -4, 2),
    ("Scan", lambda x: mx.cumsum(x, axis=0), 4, 30), ("FFT", mx.fft.fft, 8, 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "at", "number"), OF_MLX)
def test_operations_of_mlx_that_were_altered_are_refused(
    name: str, function: Callable[[mx.array], Any], at: int, number: int
) -> None:
    """MLX itself does not look, and crashes."""
    file = exported(function, mx.zeros((2, 3)))
    state = next(one.state for one in operations_of(file) if one.name == name)
    number_at = at % len(state)
    new = state[:number_at] + struct.pack("<i", number) + state[number_at + 4 :]
    with pytest.raises(KernelError, match=rf"was altered: {name} .*Export"):
        ferrule.import_function(altered(file, name.encode() + state, name.encode() + new))


def test_shapes_that_were_altered_are_refused() -> None:
    file = exported(lambda x: mx.sin(x), mx.zeros((2, 3)))
    shape = b"Sin" + struct.pack("<QQii", 0, 2, 2, 3)
    changed = altered(file, shape, shape[:-4] + struct.pack("<i", 300))
    with pytest.raises(KernelError, match="was altered: what Sin gives has not the shape"):
        ferrule.import_function(changed)


def test_operations_of_mlx_that_were_not_altered() -> None:
    """What looks for alterations finds none."""
    i, w, key = mx.array([1, 0]), mx.random.normal((4, 2, 1)), mx.random.key(0)
    mx.eval(i, w, key)
    functions: list[Callable[[mx.array], Any]] = [
        *[function for _, function, _, _ in OF_MLX], lambda x: x[:, 3:], lambda x: x[::-1, 2:0:-1],
        lambda x: x[1:100, -2:], lambda x: x[None, :, 0], lambda x: x[i], lambda x: x[i, i + 1],
        lambda x: mx.take_along_axis(x, i[:, None], 1), lambda x: x.at[i].add(5.0),
        lambda x: mx.split(x, [0, 1], axis=-1), lambda x: mx.unflatten(x, 1, (3, 1)),
        lambda x: mx.flatten(x), lambda x: x.reshape(3, 2), lambda x: mx.view(x, mx.int16),
        lambda x: mx.as_strided(x, (2, 2), (1, 1)), lambda x: mx.softmax(x @ x.T, -1),
        lambda x: mx.argmax(x, -1), lambda x: mx.argpartition(x, 1, 0), lambda x: mx.topk(x, 2),
        lambda x: mx.var(x, axis=(0, 1)), lambda x: mx.sum(x, axis=[]),
        lambda x: mx.tile(x, (2, 2)),
        lambda x: mx.conv1d(x[..., None], w), lambda x: mx.fft.irfft(mx.fft.rfft(x)),
        lambda x: mx.slice_update(x, mx.ones((1, 1)), i, (0, 1)), lambda x: mx.divmod(x, 2),
        lambda x: mx.slice(x, i[:1], (1,), (2, 2)), lambda x: mx.broadcast_to(x, (4, 2, 3)),
        lambda x: mx.pad(x, [(0, 0), (2, 1)]), lambda x: mx.random.normal(x.shape, key=key) + x,
        lambda x: mx.fast.rms_norm(x, mx.ones(3), 1e-5), lambda x: mx.einsum("ij,kj->ik", x, x),
        lambda x: mx.grad(lambda x: (mx.split(x, 3, 1)[0] ** 2).sum())(x),
        lambda x: mx.roll(x, 1, 1),
    ]  # fmt: skip
    for function in functions:
        x = values((2, 3))
        wanted = function(x)
        found = ferrule.import_function(exported(function, x))(x)
        several = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        assert all(mx.allclose(a, b, equal_nan=True) for a, b in zip(found, several, strict=True))


def test_machine_code_is_refused() -> None:
    """A file of `mx.fast.precompiled_cuda_kernel`, which cannot be written here."""
    file = exported(level0(ferrule.metal_kernel), mx.zeros((2, 3)))
    (one,) = kernels(file)
    # ensure_row_contiguous, init_value (7.0), no scalars, and whether it is machine code
    mark = struct.pack("<??fQ", True, True, 7.0, 0)
    assert one.state.count(mark + b"\0") == 1
    with pytest.raises(KernelError, match="it is machine code for a GPU"):
        ferrule.import_function(altered(file, mark + b"\0", mark + b"\1"))


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    imported = ferrule.import_function(write(SAMPLE))
    assert os.listdir(tmp_path) == []
    assert mx.isfinite(imported(values((2, 3)))[0]).all()


def test_what_is_written_is_what_was_read() -> None:
    """A tape without constants, byte for byte."""
    file = exported(lambda x: [mx.split(mx.sin(x), 2), *[x.reshape(-1)]][0], mx.zeros((2, 3)))
    assert mlx_file.write(content(file)) == Path(file).read_bytes()
