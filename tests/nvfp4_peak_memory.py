"""Loads a checkpoint of about 200 MB, and prints how many bytes of memory of its own the process
had at most for that: run by `ops/test_nvfp4_loading.py` with a folder.

The file's pages are mapped, and the system's: it takes them back where memory is short. So what
counts is anonymous memory (``RssAnon``), which a thread reads all the while.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from ferrule.ops import nvfp4

WIDTH, LAYERS, WORDS = 4096, 20, 2048
FIRST = 64, 1, 16  # what is imported and warmed up by a first load is no part of it


def anonymous() -> int:
    """Bytes of the process's own memory that are resident."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


class Model(nn.Module):
    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))


def write(file: Path, width: int, layers: int, words: int) -> None:
    """A checkpoint as ModelOpt writes it, of which only the names and sizes matter: the file has
    holes, since memory that is used to write one would stay with the process, and be counted."""
    tensors: dict[str, tuple[str, list[int], int]] = {}
    tensors["embedding.weight"] = "BF16", [words, width], 2 * words * width
    for i in range(layers):
        half, groups = width // 2, width // 16
        tensors[f"layers.{i}.weight"] = "U8", [width, half], width * half
        tensors[f"layers.{i}.weight_scale"] = "F8_E4M3", [width, groups], width * groups
        tensors[f"layers.{i}.weight_scale_2"] = "F32", [], 4
    header, start = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + start)  # zeros, of which the disk has nothing
        for name, entry in header.items():
            if name.endswith("scale_2"):
                stream.seek(8 + len(text) + entry["data_offsets"][0])
                stream.write(struct.pack("<f", 1.0))


def main(folder: Path) -> None:
    small, file = folder / "first.safetensors", folder / "model.safetensors"
    write(small, *FIRST)
    write(file, WIDTH, LAYERS, WORDS)
    with torch.device("meta"):
        first, model = Model(*FIRST), Model(WIDTH, LAYERS, WORDS)
    nvfp4.load(first, small)
    ended, most = threading.Event(), [0]

    def watch() -> None:
        over = False
        while not over:  # the last look is behind the end
            over = ended.wait(0.0005)
            most[0] = max(most[0], anonymous())

    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    nvfp4.load(model, file)
    ended.set()
    watcher.join()
    tensors = model.state_dict().values()
    sizes = {
        "peak": most[0] - before,
        "stays": anonymous() - before,
        "model": sum(tensor.nbytes for tensor in tensors),
        "largest": max(tensor.nbytes for tensor in tensors),
        "file": file.stat().st_size,
    }
    print(json.dumps(sizes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
