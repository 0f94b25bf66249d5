"""A stand-in for the package ``humming-kernels``, in plain torch, on the CPU: the functions that
`ferrule.ops.nvfp4.humming` calls, with the checks of the real ones."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ferrule.ops.quantizing import dequantize


class Humming:
    """The package, and what was asked of it.

    Attributes:
        compiled: the configs of kernels, in order.
        launches: of each the config, and rows.
        repacked: how many matrices, or stacks of them.
    """

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launches: list[tuple[dict[str, Any], int]] = []
        self.repacked = 0

    @property
    def modules(self) -> dict[str, ModuleType]:
        """What ``sys.modules`` has of it."""
        schema = SimpleNamespace(to_humming_schema=lambda dtype: {"b_dtype": "float4e2m1"})
        contents: dict[str, dict[str, Any]] = {
            "humming": {},
            "humming.kernel": {},
            "humming.kernel.humming": {"HummingKernel": self},
            "humming.schema": {"BaseWeightSchema": self},
            "humming.transform": {
                "prepare_layer_config": Layer,
                "transform_humming_tensors": self.transform,
            },
            "humming.tune": {"get_heuristics_config": self.tune},
        }
        self._schema = schema
        modules = {name: ModuleType(name) for name in contents}
        for name, names in contents.items():
            vars(modules[name]).update(names)
        return modules

    @property
    def ops(self) -> Any:
        """What ``torch.ops.humming`` is."""
        return SimpleNamespace(launch_kernel=SimpleNamespace(out=self.launch))

    def from_config(self, config: dict[str, str]) -> Any:
        assert config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        return self._schema

    def tune(self, layer: Layer, shape_m: int, gemm_type: str, device: Any, **options: Any) -> Any:
        assert isinstance(device, torch.device) and shape_m > 0
        assert (gemm_type == "dense") == (layer.experts == 0)
        return {"block_shape": [8, 128, 128], "use_stream_k": not options["use_batch_invariant"]}

    def prepare_kernels(self, layer: str, compute: str, tuning: str, device: Any) -> torch.Tensor:
        config = {**json.loads(layer), **json.loads(compute), **json.loads(tuning)}
        if config not in self.compiled:
            self.compiled.append(config)
        return torch.tensor([0, 1 << 30, self.compiled.index(config), 0])

    def transform(self, layer: Layer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Elements and scales as a kernel has them here: transposed, of the padded matrix."""
        self.repacked += 1
        n, k, lead = layer.n, layer.k, (layer.experts,) * bool(layer.experts)
        expected = {
            "weight": (torch.int32, (*lead, n, k // 8)),
            "weight_scale": (torch.float8_e4m3fn, (*lead, n, k // 16)),
            "weight_scale_2": (torch.float32, (max(layer.experts, 1),)),
        }
        assert {name: (a.dtype, tuple(a.shape)) for name, a in tensors.items()} == expected
        more = 0, layer.padded_k - k, 0, layer.padded_n - n
        pad = torch.nn.functional.pad
        w = pad(tensors["weight"], (0, more[1] // 8, *more[2:]))
        scale = pad(tensors["weight_scale"].view(torch.uint8), (0, more[1] // 16, *more[2:]))
        return {
            "weight": w.mT.contiguous(),
            "weight_scale": scale.mT.contiguous().view(torch.float8_e4m3fn),
            "weight_scale_2": tensors["weight_scale_2"],
        }

    def launch(
        self, configs: Any, a: Any, b: Any, bs: Any, bs2: Any, as_: Any, as2: Any, bzp: Any,
        bias: Any, c: Any, sorted_ids: Any, expert_ids: Any, num_tokens_padded: Any, layout: Any,
        locks: Any, top_k: int, valid_shape_m: int,
    ) -> None:  # fmt: skip
        """A product, after the checks of §5.7 of the launcher: sizes, dtypes, alignment, locks."""
        config = self.compiled[int(configs[2])]
        n, k, experts = (config[name] for name in ("n", "k", "experts"))
        assert all(one is None for one in (as_, as2, bzp, bias, sorted_ids, expert_ids))
        assert num_tokens_padded is None and (top_k, valid_shape_m) == (1, 0)
        dtype = getattr(torch, config["dtype"])
        assert a.shape[0], "shape_m is not within any range defined in configs."
        a = a.contiguous()
        assert a.data_ptr() % 16 == 0, "a.data_ptr() must be 16-byte aligned"
        assert a.dtype == c.dtype == dtype and c.is_contiguous()
        assert a.shape[1:] == (k,) and c.shape == (a.shape[0], n)
        lead, padded_n, padded_k = (
            (experts,) * bool(experts),
            config["padded_n"],
            config["padded_k"],
        )
        assert b.dtype == torch.int32 and b.shape == (*lead, padded_k // 8, padded_n)
        assert bs.dtype == torch.float8_e4m3fn and bs.shape == (*lead, padded_k // 16, padded_n)
        assert bs2.dtype == torch.float32 and bs2.shape == (max(experts, 1),)
        assert b.is_contiguous() and bs.is_contiguous() and bs2.is_contiguous()
        assert locks.dtype == torch.int32 and locks.numel() == 2048 and not locks.any()
        self.launches.append((config, a.shape[0]))
        packed = b.mT.contiguous().view(torch.uint8)
        w = dequantize(packed, bs.mT.contiguous(), mode="nvfp4", dtype="float32")
        w = w[..., :n, :k]
        if config["gemm_type"] == "dense":
            assert layout is None
            c.copy_(a.float() @ w.mT * bs2)
            return
        assert config["gemm_type"] == "grouped_contiguous" and layout.is_contiguous()
        assert layout.dtype in (torch.int32, torch.int64) and layout.shape == (experts + 1,)
        assert layout[0] >= 0 and layout[-1] <= a.shape[0] and (layout.diff() >= 0).all()
        c.fill_(float("nan"))  # of rows behind the last expert's
        for e in range(experts):
            rows = slice(int(layout[e]), int(layout[e + 1]))
            c[rows] = (a[rows].float() @ w[e].T * bs2[e]).to(dtype)


class Layer:
    """The description of a matrix, or of one for each expert."""

    def __init__(
        self, n: int, k: int, schema: Any, *, num_experts: int, pad_n_to_multiple: int,
        pad_k_to_multiple: int, torch_dtype: torch.dtype, device: Any,
    ) -> None:  # fmt: skip
        assert schema == {"b_dtype": "float4e2m1"} and isinstance(device, torch.device)
        assert n > 0 and k > 0 and n % 8 == 0 and k % 16 == 0
        self.n, self.k, self.experts = n, k, num_experts
        self.padded_n = -(-n // pad_n_to_multiple) * pad_n_to_multiple
        self.padded_k = -(-k // pad_k_to_multiple) * pad_k_to_multiple
        assert self.padded_n % 128 == 0 and self.padded_k % 32 == 0
        self.dtype = str(torch_dtype).removeprefix("torch.")

    def to_str(self) -> str:
        return json.dumps(vars(self))
