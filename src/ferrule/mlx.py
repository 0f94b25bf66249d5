"""MLX's products that gather or dequantize matrices, right under every transformation of MLX.

``import ferrule`` does not import MLX; ``import ferrule.mlx`` does.
"""

from __future__ import annotations

from .hosts.mlx_matmul import gather_mm, gather_qmm, quantized_matmul

__all__ = ["gather_mm", "gather_qmm", "quantized_matmul"]
