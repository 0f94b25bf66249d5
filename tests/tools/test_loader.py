"""Libraries are loaded from bytes, each one for itself, and nothing stays behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule import _env
from ferrule.errors import DeviceError
from ferrule.tools import loader, toolchain

_TEXT = 'extern "C" __attribute__((visibility("default"))) unsigned answer() { return %sU; }'
_MARK = 0xFE44175E


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_env.CACHE_DIR, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def library() -> bytes:
    return toolchain.find_compiler().compile(_TEXT % _MARK, flags=["-O1"])


def answering(library: bytes, number: int) -> bytes:
    """The library with another answer in its machine code: sparing a run of the compiler."""
    mark = _MARK.to_bytes(4, "little")
    if library.count(mark) != 1:
        pytest.skip("this machine's code does not hold the constant in one piece")
    return library.replace(mark, number.to_bytes(4, "little"))


@pytest.fixture(params=["memory", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":

        def refuse(payload: bytes, label: str) -> None:
            raise OSError(errno.EPERM, "memfd_create is forbidden")

        monkeypatch.setattr(loader, "_from_memory", refuse)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memfd_create")
    return str(request.param)


def test_fifty_libraries_each_give_their_own_answer(
    library: bytes, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Descriptors are closed in between, so their numbers are used again, and again.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    numbers = [*range(1000, 1050), 1000, 1001]  # equal bytes are libraries of their own, too
    loaded = [loader.load_library(answering(library, n), f"kernel {n}") for n in numbers]
    assert [one.answer() for one in loaded] == numbers
    assert len({one._handle for one in loaded}) == len(numbers)
    assert os.listdir(tmp_path) == []
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["a_kernel", "a/b", "two words\n", "\0", "x" * 10_000, "é"])
def test_profilers_see_a_name(library: bytes, name: str) -> None:
    loader.load_library(library, name)
    shown = "".join(c if (c.isascii() and c.isalnum()) or c == "_" else "_" for c in name)[:100]
    assert f"memfd:{shown} " in Path("/proc/self/maps").read_text()


def test_the_fallback_is_private_while_it_loads(
    library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = loader._open

    def look(path: str) -> object:
        seen.append((os.stat(path).st_mode & 0o777, os.stat(os.path.dirname(path)).st_mode & 0o777))
        return real(path)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(loader, "_open", look)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert loader.load_library(answering(library, 7), "k").answer() == 7
    assert seen == [(0o700, 0o700)]
    assert os.listdir(tmp_path) == []


def test_equal_templates_do_not_share_their_statics(way: str) -> None:
    # g++ marks them STB_GNU_UNIQUE by default: one address for the whole process.
    text = (
        "template <class T> struct S { static inline int value = %d; };\n"
        'extern "C" int f() { return S<int>::value; }'
    )
    compiler = toolchain.find_compiler()
    one, two = (loader.load_library(compiler.compile(text % n), "k") for n in (1, 2))
    assert (one.f(), two.f()) == (1, 2)


@pytest.mark.parametrize("damage", ["junk", "empty", "cut", "no symbol"])
def test_what_cannot_be_loaded_is_named(library: bytes, damage: str) -> None:
    payload = {
        "junk": b"not a library at all" * 100,
        "empty": b"",
        "cut": library[:100],
        "no symbol": b"",
    }[damage]
    if damage == "no symbol":
        text = 'extern "C" int nowhere(); extern "C" int f() { return nowhere(); }'
        payload = toolchain.find_compiler().compile(text)
    with pytest.raises(DeviceError, match="'my kernel' could not be loaded: ") as raised:
        loader.load_library(payload, "my kernel")
    if damage == "no symbol":
        assert "nowhere" in str(raised.value)
