"""Which matrices are multiplied with which: what products that gather have in common.

A product has a batch of matrices on its left and one on its right, of any shapes. Which of them
each result is of is said by an array of indices, counted over the whole batch, or, where that is
omitted, by the place in the batch. What says it on both sides broadcasts, and is the batch of the
results. A kind of product is two letters: ``x`` or ``l`` for the left side, ``w`` or ``r`` for the
right one; ``l`` and ``r`` are indices. A kind ``tr`` has an axis of size 1 behind the left side's
batch, along which that of the indices is longer: the tokens, and the experts of each.
"""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import dtype_name, is_mlx, library
from .rows import on_cpu

INDICES = "(int32, uint32, int64, uint8, int8, int16, uint16, uint64)"

# The place `at` of what two shapes broadcast to, in each of them.
HEADER = """
struct Places {
  ulong left, right;
};
template <typename A, typename B>
inline Places places_of(ulong at, A a, int a_dims, B b, int b_dims) {
  Places found = {0, 0};
  ulong a_step = 1, b_step = 1;
  for (int back = 1; back <= a_dims || back <= b_dims; back++) {
    const ulong a_size = back <= a_dims ? ulong(a[a_dims - back]) : 1;
    const ulong b_size = back <= b_dims ? ulong(b[b_dims - back]) : 1;
    const ulong size = a_size == 1 ? b_size : a_size, digit = at % size;
    at /= size;
    if (a_size != 1) found.left += digit * a_step;
    if (b_size != 1) found.right += digit * b_step;
    a_step *= a_size;
    b_step *= b_size;
  }
  return found;
}

// How many places there are.
template <typename A, typename B>
inline ulong count_of(A a, int a_dims, B b, int b_dims) {
  ulong count = 1;
  for (int back = 1; back <= a_dims || back <= b_dims; back++) {
    const ulong a_size = back <= a_dims ? ulong(a[a_dims - back]) : 1;
    count *= a_size == 1 && back <= b_dims ? ulong(b[b_dims - back]) : a_size;
  }
  return count;
}
"""


class Kind:
    """The rule's and the body's words for a kind of product."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.indexed = letters[0] == "l", letters[1] == "r"
        self.tokens = letters[0] == "t"
        stars = "I" if self.indexed[0] else "X", "R" if self.indexed[1] else "W"
        self.batch = f"*broadcast({stars[0]},{stars[1]})"
        self.left = "*X,1" if self.tokens else "*X"
        self.inputs = ", lhs[*I]:L" * self.indexed[0] + ", rhs[*R]:J" * self.indexed[1]
        if self.tokens:
            self.batch, self.inputs = "*X,E", ", rhs[*X,E]:J"
        self.where = [f"L in {INDICES}"] * self.indexed[0] + [f"J in {INDICES}"] * self.indexed[1]

    @property
    def count(self) -> str:
        """How many results there are, in the body."""
        return "ulong(X_size) * uint(E)" if self.tokens else f"count_of({self.shapes()})"

    def shapes(self, left: str = "x", right: str = "w") -> str:
        """The shapes that broadcast, and how many axes each has."""
        return ", ".join(
            f"{index}_shape, {index}_ndim" if indexed else f"{name}_shape, {name}_ndim - 2"
            for name, index, indexed in zip(
                (left, right), ("lhs", "rhs"), self.indexed, strict=True
            )
        )

    def find(self, left: str = "x", right: str = "w") -> str:
        """Statements that find the matrices of the result ``batch``: ``from_left``, ``from_right``,
        and whether there are such, ``inside``."""
        at = [
            f"long({index}[found.{side}])" if indexed else f"long(found.{side})"
            for index, side, indexed in zip(
                ("lhs", "rhs"), ("left", "right"), self.indexed, strict=True
            )
        ]
        if self.tokens:
            places = "const long from_left = long(batch / uint(E)), from_right = long(rhs[batch]);"
        else:
            places = f"""const Places found = places_of(batch, {self.shapes(left, right)});
      const long from_left = {at[0]}, from_right = {at[1]};"""
        return f"""
      {places}
      const bool inside = from_left >= 0 && from_left < long(X_size)
          && from_right >= 0 && from_right < long(W_size);
"""

    def split(self, arrays: Any) -> tuple[list[Any], Any, Any]:
        """The arrays before the indices, and both indices, None where they are omitted."""
        arrays = list(arrays)
        rhs = arrays.pop() if self.indexed[1] else None
        lhs = arrays.pop() if self.indexed[0] else None
        return arrays, lhs, rhs


def indices(function: str, lhs: Any, rhs: Any) -> tuple[Any, Any, bool]:
    """Indices that have axes, and whether an axis was added to all there are.

    Raises:
        KernelError: an index is no array of integers.
    """
    for name, index in (("lhs_indices", lhs), ("rhs_indices", rhs)):
        if index is not None and "int" not in str(getattr(index, "dtype", "")):
            given = getattr(index, "dtype", type(index).__name__)
            raise ferrule.KernelError(
                f"[{function}] {name} is of {given}; expected an array of {INDICES[1:-1]}."
            )
    single = [index is not None and index.ndim == 0 for index in (lhs, rhs)]
    lhs, rhs = (
        index[None] if alone else index for index, alone in zip((lhs, rhs), single, strict=True)
    )
    return lhs, rhs, any(single)


def for_kernels(
    function: str, letters: str, x: Any, w: Any, lhs: Any, rhs: Any, mlx: bool = False
) -> tuple[str, list[Any]]:
    """The kind of a product, and the indices that it has, as kernels take them.

    On a CPU, and of MLX's arrays but with ``mlx``, that is as they are; so is a product without a
    kind. ``function`` is what errors name.
    """
    if letters and not on_cpu(x) and (mlx or not is_mlx(x)):
        letters, lhs, rhs = _for_cuda(function, letters, x, w, lhs, rhs)
    return letters, [index for index in (lhs, rhs) if index is not None]


def _for_cuda(
    function: str, letters: str, x: Any, w: Any, lhs: Any, rhs: Any
) -> tuple[str, Any, Any]:
    """Tokens and their experts, and what broadcasts nothing, as they are; else an index of each
    side for every result."""
    if not is_mlx(x):
        batch = tuple(x.shape[:-2])
        if letters[0] == "x" and batch == tuple(w.shape[:-2] if rhs is None else rhs.shape):
            return letters, lhs, rhs
        if letters == "xr" and batch[-1:] == (1,) and tuple(rhs.shape[:-1]) == batch[:-1]:
            return "tr", None, rhs
        if letters == "lr" and tuple(lhs.shape) == tuple(rhs.shape):
            return "lr", lhs, rhs
    chosen = [index for index in (lhs, rhs) if index is not None]
    return ("lr", *_all_places(function, letters, 0, 0)(x, w, *chosen))


@ferrule.family
def _all_places(function: str, letters: str, x_depth: int, w_depth: int) -> ferrule.Op:
    """``x, w, lhs?, rhs? -> lhs, rhs``: where the matrices of each result are, -1 of none. x and w,
    of which only sizes are read, have as many axes more in front."""
    kind = Kind(letters)
    choose = kind.find()
    for name, depth in (("x", x_depth), ("w", w_depth)):
        deep = f"{name}_shape + {depth}, {name}_ndim - {2 + depth}"
        choose = choose.replace(f"{name}_shape, {name}_ndim - 2", deep)
    of_x, of_w = (
        "".join(f"{n}{i}," for i in range(d)) for n, d in (("U", x_depth), ("V", w_depth))
    )
    op = ferrule.op(
        function,  # which errors name
        f"x[{of_x}*X,M,K]:T, w[{of_w}*W,A,B]:Q{kind.inputs} "
        f"-> lhs_of_each[{kind.batch}]:int32, rhs_of_each[{kind.batch}]:int32"
        + f" where {', '.join(kind.where)}"
        * bool(kind.where),
        metal=f"""
    const uint batch = thread_position_in_grid.x;
    {choose}
    lhs_of_each[batch] = inside ? int(from_left) : -1;
    rhs_of_each[batch] = inside ? int(from_right) : -1;
""",
        header=HEADER,
        grid="lhs_of_each.size",
        threadgroup=64,
        version=1,
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return (None,) * len(primals)

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        return None, None

    def vmap(size: int, axes: Any, values: Any) -> Any:
        (x, w), lhs, rhs = kind.split(values)
        (x_axis, w_axis), lhs_axis, rhs_axis = kind.split(axes)
        deeper = _all_places(
            function, letters, x_depth + (x_axis is not None), w_depth + (w_axis is not None)
        )
        ranks = (
            x.ndim - 2 - x_depth - (x_axis is not None)
            if lhs is None
            else lhs.ndim - (lhs_axis is not None),
            w.ndim - 2 - w_depth - (w_axis is not None)
            if rhs is None
            else rhs.ndim - (rhs_axis is not None),
        )
        chosen = [
            index if axis is None else deepened(_first(index, axis), max(ranks) + 1)
            for index, axis in ((lhs, lhs_axis), (rhs, rhs_axis))
            if index is not None
        ]
        places = deeper(_first(x, x_axis), _first(w, w_axis), *chosen)
        batched = lhs_axis is not None or rhs_axis is not None
        return places, (0, 0) if batched else (None, None)

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    op.def_vmap(vmap, version=1)
    return op


def no_axes(left: Any, right: Any, lhs: Any, rhs: Any) -> bool:
    """Whether products of matrices, which indices choose where there are any, have no batch."""
    ranks = [
        matrices.ndim - 2 if index is None else index.ndim
        for matrices, index in ((left, lhs), (right, rhs))
    ]
    return not any(ranks)


def put(text: str, words: dict[str, str]) -> str:
    """A text with something in place of words, one by one: in what was put in, the later ones."""
    for name, value in words.items():
        text = text.replace(name, value)
    return text


def bilinear_jvp(op: ferrule.Op) -> Any:
    """The forward derivative of what is linear in each of its first two inputs."""

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        a, b, *rest = primals
        terms = [op(tangents[0], b, *rest)] if tangents[0] is not None else []
        terms += [op(a, tangents[1], *rest)] if tangents[1] is not None else []
        return (sum(terms[1:], terms[0]) if terms else op(a * 0, b, *rest),)

    return jvp


def vmap_of(op: ferrule.Op, letters: str, batched: Any) -> Any:
    """The rule of `vmap` for products of x and the parts of w, by one call.

    Args:
        op: the product.
        letters: its kind; or empty, where x is rows and w one matrix.
        batched: gives the product of another kind.
    """

    def rule(size: int, axes: Any, values: Any) -> Any:
        general = letters.replace("t", "x") or "xw"
        kind = Kind(general)
        (x, *parts), lhs, rhs = kind.split(values)
        (x_axis, *part_axes), lhs_axis, rhs_axis = kind.split(axes)
        x = _first(x, x_axis)
        if not letters and all(axis is None for axis in part_axes):
            return op(x, *parts), 0
        row = not letters and x.ndim == 1 + (x_axis is not None)
        x = x[..., None, :] if row else x
        like = _batched(axes, values)
        of_w = any(axis is not None for axis in part_axes)
        if of_w:
            parts = [
                part
                if axis is None and part.ndim == 1 and part.shape[0] == 1  # a global scale
                else repeated(_first(part, axis), None if axis is not None else like)
                for part, axis in zip(parts, part_axes, strict=True)
            ]
        lhs, left = _index(lhs, lhs_axis, x if x_axis is not None else None, like)
        rhs, right = _index(rhs, rhs_axis, parts[0] if of_w else None, like)
        # What chooses has the batch in front, and as many axes behind it as the other side's.
        x_batch, w_batch = x_axis is not None, of_w
        rank = max(
            (x.ndim - 2 - x_batch) if lhs is None else lhs.ndim - left,
            (parts[0].ndim - 2 - w_batch) if rhs is None else rhs.ndim - right,
        )
        if lhs is None and x_batch:
            x = deepened(x, rank + 3)
        if lhs is not None and left:
            lhs = deepened(lhs, rank + 1)
        if rhs is None and w_batch:
            parts = [deepened(part, rank + 3) if part.ndim > 2 else part for part in parts]
        if rhs is not None and right:
            rhs = deepened(rhs, rank + 1)
        general, chosen = for_kernels(op.name, general, x, parts[0], lhs, rhs)
        y = batched(general)(x, *parts, *chosen)
        return (y[..., 0, :] if row else y), 0

    return rule


def _index(index: Any, axis: int | None, batch: Any, like: Any) -> tuple[Any, bool]:
    """An index with the axis of a batch in front, into a batch of what it chose from; and whether
    it has that axis."""
    if index is None or (axis is None and batch is None):
        return index, False
    index = repeated(_first(index, axis), None if axis is not None else like)
    return index if batch is None else shifted(index, batch), True


def _batched(axes: Any, values: Any) -> Any:
    """The first array that has the axis of a batch, with that in front."""
    return next(
        _first(value, axis) for value, axis in zip(values, axes, strict=True) if axis is not None
    )


def _first(array: Any, axis: int | None) -> Any:
    return array if axis in (None, 0) else library(array).moveaxis(array, axis, 0)


def deepened(array: Any, rank: int) -> Any:
    """An array with axes of size 1 behind its first, up to a rank."""
    while array.ndim < rank:
        array = array[:, None]
    return array


def squeezed(array: Any, axes: Any) -> Any:
    """An array without axes of size 1; by an index MLX would keep the sizes of a trace."""
    axes = tuple(axes)
    return library(array).squeeze(array, axes) if axes else array


def all_first(axes: Any, values: Any) -> list[Any]:
    """Arrays with the axis of a batch in front; those without one are repeated."""
    like = _batched(axes, values)
    return [
        repeated(_first(value, axis), None if axis is not None else like)
        for value, axis in zip(values, axes, strict=True)
    ]


def repeated(array: Any, like: Any) -> Any:
    """An array, once for each place on the first axis of another; as it is where that is None."""
    return array if like is None else _repeated()(array, like)


@ferrule.family
def _repeated() -> ferrule.Op:
    op = ferrule.op(
        "repeated",
        "array[*D]:T, like[B,*E]:U -> copies[B,*D]:T",
        metal="""
    const uint i = thread_position_in_grid.x;
    copies[i] = array[i % uint(D_size)];
""",
        grid="array.size * B",
        threadgroup=256,
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        floats = "float" in dtype_name(primals[0])
        return _sum_of_copies()(cotangents[0]) if floats else None, None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        array = primals[0] * 0 if tangents[0] is None else tangents[0]
        return (_repeated()(array, primals[1]),)

    @op.def_vmap
    def _(size: int, axes: Any, values: Any) -> Any:
        (array, like), (axis, like_axis) = values, axes
        if like_axis is not None:  # only its first axis counts
            like = library(like).moveaxis(like, like_axis, -1)
        return _repeated()(_first(array, axis), like), None if axis is None else 1

    return op


@ferrule.family
def _sum_of_copies() -> ferrule.Op:
    op = ferrule.op(
        "sum_of_copies",
        "copies[B,*D]:T -> sums[*D]:T where T in (float32, float16, bfloat16)",
        metal="""
    const uint i = thread_position_in_grid.x;
    float sum = 0;
    for (ulong b = 0; b < uint(B); b++) sum += float(copies[b * uint(D_size) + i]);
    sums[i] = T(sum);
""",
        grid="sums.size",
        threadgroup=256,
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return _repeated()(cotangents[0], primals[0])

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return (_sum_of_copies()(tangents[0]),)

    @op.def_vmap
    def _(size: int, axes: Any, values: Any) -> Any:
        return _sum_of_copies()(library(values[0]).moveaxis(values[0], axes[0], 1)), 0

    return op


def shifted(index: Any, like: Any) -> Any:
    """Indices that count over matrices of one of many batches, counted over all of them:
    ``index[B,*I], like[B,*X,M,K] -> [B,*I]``. Those that name no matrix become -1."""
    return _shifted(0, 0)(index, like)


@ferrule.family
def _shifted(index_depth: int, like_depth: int) -> ferrule.Op:
    """With as many axes more in front of the index, and of what only its sizes are read of."""
    of_index = "".join(f"U{i}," for i in range(index_depth))
    of_like = "".join(f"V{i}," for i in range(like_depth))
    op = ferrule.op(
        "shifted",
        f"index[{of_index}B,*I]:L, like[{of_like}B,*X,M,K]:T -> all[{of_index}B,*I]:int64 "
        f"where L in {INDICES}",
        metal="""
    const uint i = thread_position_in_grid.x;
    const long to = long(index[i]), batch = i / uint(I_size) % uint(B);
    const bool inside = to >= 0 && to < long(X_size);
    all[i] = inside ? to + batch * long(X_size) : -1;
    """,
        grid="index.size",
        threadgroup=256,
        version=2,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return None, None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return (None,)

    @op.def_vmap
    def _(size: int, axes: Any, values: Any) -> Any:
        (index, like), (axis, like_axis) = values, axes
        deeper = _shifted(index_depth + (axis is not None), like_depth + (like_axis is not None))
        return deeper(_first(index, axis), _first(like, like_axis)), None if axis is None else 0

    return op
