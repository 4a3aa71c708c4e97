"""The front part of a safetensors file, read from untrusted bytes.

    header length u64 | header: JSON object, name -> dtype, shape, data_offsets | the tensors' bytes

Every number is compared with the real file: the tensors' bytes follow one another without hole or
overlap from the header's end to the file's, and each has as many as its dtype and shape call for.

Source: the safetensors format description (huggingface/safetensors, README).
"""

from typing import NoReturn

from core.errors import CheckpointError, UnsupportedModel
from core.weights.checkpoint import MetadataValue, TensorInfo
from core.weights.json_file import parse_json_object
from core.weights.mapped_file import MappedFile, shown_start

MOST_HEADER_BYTES = 100_000_000
"""The format's own bound."""
MOST_DIMENSIONS = 8
DTYPES = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
"""Name in the file -> our name of the type, bytes per element."""
OTHER_DTYPES = frozenset(
    {
        "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64", "C64", "F4", "F6_E2M3",
        "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    }
)  # fmt: skip
"""Known by name, so that the refusal says that the file is sound."""


def read_header(file: MappedFile, *, file_number: int = 0) -> dict[str, TensorInfo]:
    """Read and check all tensor descriptions.

    Raises:
        CheckpointError: naming field, tensor, what it needs and what there is.
        UnsupportedModel: a dtype that is not built; lists those that are.
    """
    return _Header(file, file_number).tensors()


class _Header:
    def __init__(self, file: MappedFile, file_number: int) -> None:
        self._file, self._file_number = file, file_number

    def tensors(self) -> dict[str, TensorInfo]:
        entries, data_offset = self._entries()
        found = [
            self._tensor(name, entry, data_offset)
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
        found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        end, before = data_offset, "the header"
        for tensor in found:
            if tensor.offset != end:
                what = "overlaps" if tensor.offset < end else "leaves a hole after"
                self._fail(
                    f"tensor {tensor.name!r:.80} begins at byte {tensor.offset} of the file and {what} "
                    f"{before!r:.80}, which ends at {end}"
                )
            end, before = tensor.offset + tensor.nbytes, tensor.name
        if end != self._file.num_bytes:
            what = "is cut short" if end > self._file.num_bytes else "has bytes that belong to no tensor"
            self._fail(
                f"{what}: its tensors end at byte {end}, the file at {self._file.num_bytes}; "
                "download or copy it again"
            )
        return {tensor.name: tensor for tensor in found}

    def _entries(self) -> tuple[dict[str, MetadataValue], int]:
        size = self._file.num_bytes
        if size < 8:
            self._fail(f"is no safetensors file: it has {size} bytes and its header's length alone takes 8")
        header_bytes = int.from_bytes(self._file.bytes_at(0, 8), "little")
        if header_bytes > size - 8:
            self._fail(
                f"header length {header_bytes} at offset 0 passes the end of the file: {size} bytes in all; "
                "it is truncated or no safetensors file: download or copy it again"
            )
        if header_bytes > MOST_HEADER_BYTES:
            self._fail(
                f"header length {header_bytes} at offset 0 is over the limit of {MOST_HEADER_BYTES} bytes; "
                "split the model into several files"
            )
        raw = bytes(self._file.bytes_at(8, header_bytes))
        if not raw.startswith(b"{"):
            shown = shown_start(raw[:8])
            self._fail(f'is no safetensors file: its header starts with {shown} and should start with "{{"')
        entries = parse_json_object(raw, path=self._file.path, what="the header")
        metadata = entries.get("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            self._fail("__metadata__ in the header is not an object of strings")
        return entries, 8 + header_bytes

    def _tensor(self, name: str, entry: MetadataValue, data_offset: int) -> TensorInfo:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"tensor {name!r:.80} is not described by dtype, shape and data_offsets alone")
        dtype, shape = entry["dtype"], self._sizes(name, entry["shape"], "shape")
        begin_end = self._sizes(name, entry["data_offsets"], "data_offsets")
        if len(begin_end) != 2 or begin_end[0] > begin_end[1]:
            self._fail(f"data_offsets of tensor {name!r:.80} are {begin_end!r:.80}, not begin and end")
        if len(shape) > MOST_DIMENSIONS:
            self._fail(f"tensor {name!r:.80} has {len(shape)} dimensions; at most {MOST_DIMENSIONS} are read")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._refuse_dtype(name, dtype)
        our_type, element_bytes = DTYPES[dtype]
        begin, end = begin_end
        available = self._file.num_bytes - data_offset
        if end > available:
            self._fail(
                f"tensor {name!r:.80} ends at data byte {end}; there are {available}: it is truncated or "
                "damaged; download or copy it again"
            )
        tensor = TensorInfo(
            name, our_type, tuple(shape), data_offset + begin, end - begin, file=self._file_number
        )
        if tensor.num_elements * element_bytes != tensor.nbytes:
            self._fail(
                f"tensor {name!r:.80} has {tensor.nbytes} bytes; {dtype} of shape {tuple(shape)!r:.80} needs "
                f"{tensor.num_elements * element_bytes}"
            )
        return tensor

    def _sizes(self, name: str, value: MetadataValue, field: str) -> list[int]:
        sizes: list[int] = []
        for size in value if isinstance(value, list) else [value]:
            if not isinstance(value, list) or not isinstance(size, int) or isinstance(size, bool):
                self._fail(f"{field} of tensor {name!r:.80} is {value!r:.80}, not a list of whole numbers")
            if not 0 <= size < 1 << 64:
                self._fail(f"{field} of tensor {name!r:.80} holds {size!r:.80}; sizes are 0 to 2^64 - 1")
            sizes.append(size)
        return sizes

    def _refuse_dtype(self, name: str, dtype: MetadataValue) -> NoReturn:
        if isinstance(dtype, str) and dtype in OTHER_DTYPES:
            raise UnsupportedModel(
                self._file.path, f"tensor {name!r:.80} is {dtype}; supported: {', '.join(DTYPES)}"
            )
        self._fail(f"tensor {name!r:.80} has dtype {dtype!r:.80}, which the format does not know")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(self._file.path, problem)
