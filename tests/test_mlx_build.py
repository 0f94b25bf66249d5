"""ferrule's part of MLX's graphs: where it comes from, and what is said where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import ferrule
from ferrule.hosts import mlx_build


def said() -> str:
    """The warning where there are no nodes."""
    with pytest.warns(ferrule.FerruleWarning, match="MLX's arrays run at once") as found:
        assert mlx_build.library.__wrapped__() is None
    return str(found[0].message)


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_build, "VERSION", "0.30.5")
    assert said().endswith("MLX is 0.30.5, and ferrule's nodes need 0.30.6 or newer.")


@pytest.mark.parametrize("version", ["0.32.4", "0.32.10", "1.0.0", "0.32.4.dev20261122+abc1"])
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(mlx_build, "VERSION", version)
    assert mlx_build.at_least(0, 32, 4) and mlx_build.at_least(0, 32)
    assert mlx_build.at_least(*mlx_build.OLDEST) and not mlx_build.at_least(1, 2)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FERRULE_CXX", str(tmp_path / "none"))
    assert "the C++ compiler" in said()


def test_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mx, "__file__", str(tmp_path / "core.so"))
    assert "MLX's headers are not in" in said()
