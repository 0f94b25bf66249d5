"""MLX's products that gather or dequantize matrices, right under every transformation of MLX.

``import ferrule`` does not import MLX; ``import ferrule.mlx`` does.
"""

from __future__ import annotations

from .errors import without_mlx as _without_mlx

try:
    from .hosts.mlx.matmul import gather_mm, gather_qmm, quantized_matmul
except ModuleNotFoundError as error:
    raise _without_mlx("mlx", error) from None

__all__ = ["gather_mm", "gather_qmm", "quantized_matmul"]
