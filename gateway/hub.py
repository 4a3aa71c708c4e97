"""What a user may write for MODEL, beside nothing: a file, a folder, or a name on the Hugging Face hub.

    path/to/model.gguf       a file
    path/to/folder           config.json, safetensors, tokenizer.json; or one single .gguf file
    org/name                 such a folder on the hub, fetched through `huggingface_hub` and its cache
    org/name:FILE.gguf       one file of the hub

A path that exists is never looked for on the hub. Only weights, configs and tokenizer files are
fetched: no Python, nothing pickled.
"""

import errno
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.model_store import ModelUnavailable

HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(:(?P<file>[\w.-]+\.gguf))?")
FOLDER_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
)  # fmt: skip


def resolve_model(name: str) -> str:
    """Return the path of the file or folder that `name` stands for, fetching it if it is on the hub.

    Raises:
        ModelUnavailable: it cannot be had; says why and what to do.
    """
    path = Path(name)
    try:
        exists = path.exists()
    except (OSError, ValueError):
        return name  # too long, or a zero byte: the reader says so
    if exists:
        return str(_only_gguf(path) or path)
    match = HUB_NAME.fullmatch(name)
    if match is None or (match["file"] is None and name.endswith((".gguf", ".safetensors"))):
        return name
    return _from_hub(match["repo"], match["file"])


def check_readable(path: str) -> str:
    """Return `path`, a model's file or folder, if it can be opened: a wrong one fails before anything starts.

    Raises:
        ModelUnavailable: it is not there or not readable; says what to do.
    """
    try:
        Path(path).stat()
        if not os.access(path, os.R_OK):  # not opened: that would wait for a pipe's other end
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError:
        raise ModelUnavailable(
            f"{path}: there is no such file; give the path of a .gguf file or of a model folder, or no MODEL "
            "for the default one"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelUnavailable(
            f"{path[:256]!r}: cannot be opened: {reason}; check the path and who may read it"
        ) from None
    return path


def default_model_id(name: str) -> str:
    """What clients ask for where no name is given: the last part of MODEL, in lower case."""
    last = name.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return last.removesuffix(".gguf").lower() or name.lower()


def _only_gguf(folder: Path) -> Path | None:
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelUnavailable(f"{folder} holds several models; give the path of one of them: {names}")
    return files[0] if files else None


def _from_hub(repo: str, file: str | None) -> str:
    folder = Path(_snapshot(repo, [file] if file else list(FOLDER_FILES)))
    if file:
        if not (folder / file).is_file():
            raise ModelUnavailable(f"{repo} on the Hugging Face hub has no file {file}")
        return str(folder / file)
    if not any(folder.glob("model*.safetensors")):
        raise ModelUnavailable(
            f"{repo} on the Hugging Face hub has no model.safetensors; if it holds GGUF files, name one: "
            f"{repo}:FILE.gguf"
        )
    return str(folder)


def _snapshot(repo: str, patterns: list[str]) -> str:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ModuleNotFoundError:
        raise ModelUnavailable(
            f"there is no file or folder {repo}; to fetch it from the Hugging Face hub, install the extra: "
            "pip install 'tidegate[hub]'"
        ) from None
    fetch: Callable[..., str] = hub.snapshot_download
    try:
        return fetch(repo, allow_patterns=patterns)
    except errors.GatedRepoError:
        why = "is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "is not there, or is private and needs `hf auth login` or HF_TOKEN"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            "is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set): check the "
            "network, or give the path of a file or folder"
        )
    except errors.HFValidationError:
        why = "is no possible name"
    except OSError as error:  # what the hub's own HTTP errors are, and a full disk
        why = f"cannot be fetched: {str(error).strip().splitlines()[0]:.200}"
    raise ModelUnavailable(f"{repo} on the Hugging Face hub {why}")
