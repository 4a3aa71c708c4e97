"""Model folders as the Hugging Face hub has them: `config.json` and safetensors, one file or shards.

Nothing in such a folder is ever imported or unpickled: Python files (`auto_map`) and `.bin` files
are not looked at. Torch-free.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Final

from core.errors import CheckpointError
from core.weights.checkpoint import MetadataValue, TensorInfo
from core.weights.json_file import read_json_file
from core.weights.mapped_file import MappedFile, map_file
from core.weights.safetensors_header import read_header

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
"""A plain name: an index cannot point out of its folder."""


class SafetensorsFolder:
    """An open folder. Made by `open_safetensors`, ended by `close()`."""

    format: Final = "safetensors"

    def __init__(self, path: str, metadata: dict[str, MetadataValue], shards: list[MappedFile]) -> None:
        self.path: Final = path
        self.metadata: Final = metadata
        self.files: Final = (str(Path(path) / CONFIG), *(shard.path for shard in shards))
        self.file_bytes: Final = sum(shard.num_bytes for shard in shards)
        self._shards = shards
        self.tensors: Final[dict[str, TensorInfo]] = {}
        for number, shard in enumerate(shards):
            for name, tensor in read_header(shard, file_number=number).items():
                if name in self.tensors:
                    other = shards[self.tensors[name].file].path
                    raise CheckpointError(shard.path, f"tensor {name!r:.80} stands in {other} too")
                self.tensors[name] = tensor

    @property
    def architecture(self) -> str:
        name = self.metadata.get("model_type")
        if not isinstance(name, str):
            raise CheckpointError(str(Path(self.path) / CONFIG), "'model_type' is missing or no text")
        return name

    def raw(self, name: str) -> memoryview:
        """Return the tensor's bytes, read-only and without a copy.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        tensor = self._find(name)
        return self._shards[tensor.file].bytes_at(tensor.offset, tensor.nbytes)

    def drop_pages(self, name: str) -> None:
        """Give the tensor's pages back to the system; they are read again when touched."""
        tensor = self._find(name)
        self._shards[tensor.file].drop(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Let go of the files. Views that were handed out stay valid until they are dropped."""
        for shard in self._shards:
            shard.close()

    def _find(self, name: str) -> TensorInfo:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(self.path, f"there is no tensor {name!r} among its {len(self.tensors)}")
        return tensor


def open_safetensors(path: str) -> SafetensorsFolder:
    """Map a folder's safetensors and check all of their structure. Reads no tensor data.

    Raises:
        CheckpointError: a file is missing, unreadable, cut short or lying; names it.
        UnsupportedModel: a dtype that is not built; lists those that are.
    """
    folder = Path(path)
    metadata = read_folder_config(path)
    weight_map = _weight_map(folder)
    shards: list[MappedFile] = []
    try:
        for name in sorted(set(weight_map.values())) or [SINGLE]:
            if weight_map:
                _refuse_missing(folder / name, num_tensors=Counter(weight_map.values())[name])
            shards.append(map_file(str(folder / name), kind=".safetensors"))
        checkpoint = SafetensorsFolder(path, metadata, shards)
        _check_index(checkpoint, weight_map)
    except CheckpointError:
        for shard in shards:
            shard.close()
        raise
    return checkpoint


def read_folder_config(path: str) -> dict[str, MetadataValue]:
    """Return what a folder's `config.json` says.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    return read_json_file(Path(path) / CONFIG)


def _refuse_missing(shard: Path, *, num_tensors: int) -> None:
    if not shard.exists():
        raise CheckpointError(
            str(shard), f"is missing: {INDEX} keeps {num_tensors} tensors in it; fetch it again"
        )


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index; empty where the model is one file.

    Raises:
        CheckpointError: there is neither, or the index is not one.
    """
    if (folder / SINGLE).exists():
        return {}
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(str(folder), f"holds neither {SINGLE} nor {INDEX}; no other weights are read")
    weight_map = read_json_file(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(index), "'weight_map' is missing, empty or no object")
    result: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise CheckpointError(
                str(index), f"tensor {tensor!r:.80} lies in {name!r:.80}, which is no .safetensors file name"
            )
        result[tensor] = name
    return result


def _check_index(checkpoint: SafetensorsFolder, weight_map: dict[str, str]) -> None:
    """Index and shards must name the same tensors at the same places."""
    if not weight_map:
        return
    found = {name: Path(checkpoint.files[1 + info.file]).name for name, info in checkpoint.tensors.items()}
    for name in sorted(weight_map.keys() | found.keys()):
        if weight_map.get(name) != found.get(name):
            raise CheckpointError(
                str(Path(checkpoint.path) / INDEX),
                f"tensor {name!r:.80} is in {weight_map.get(name, 'no file')} by the index "
                f"and in {found.get(name, 'no file')} in truth",
            )
