"""Build the peers and derive their model files, all under build/peers: `make peers`.

    build/peers/environment      a virtual environment of their own: OpenVINO, its exporter, cmake, ninja
    build/peers/llama.cpp        llama.cpp, built for this machine from sources that a package on PyPI vendors
    build/peers/models           each peer's form of the default checkpoint, and a large random model

What is there already is not made again; a peer that cannot be had is named and left out. About 20 minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.claims.random_model import default_model
from tests.benchmarks.cpu.peer_files import (
    read_weights,
    write_float_gguf,
    write_hugging_face_folder,
    write_large_model,
)

FOLDER = Path("build/peers")
ENVIRONMENT = FOLDER / "environment"
PYTHON = ENVIRONMENT / "bin" / "python"
BUILT = FOLDER / "llama.cpp" / "bin"
MODELS = FOLDER / "models"
OPENVINO_MODEL = MODELS / "openvino-int8"
LARGE_MODEL = MODELS / "large.Q4_0.gguf"
QUANTISED = ("Q4_0", "Q4_1", "Q8_0", "BF16")

LLAMA_PACKAGE = "llama-cpp-python==0.3.36"
TOOLS = ("cmake", "ninja")
OPENVINO_PACKAGES = ("optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0", "nncf==3.4.0")
TORCH_PACKAGE = "torch==2.13.0"
TARGETS = ("llama-quantize", "llama-bench", "llama-batched-bench", "llama-server")
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class PeerUnavailable(Exception):
    """A step failed; the message holds the end of what it said."""


def llama_model(form: str) -> Path:
    """The default checkpoint in one of llama.cpp's forms; Q4_1 is the shipped file itself."""
    return default_model() if form == "Q4_1" else MODELS / f"smollm2.{form}.gguf"


def has_llama() -> bool:
    return all((BUILT / target).exists() for target in TARGETS)


def has_openvino() -> bool:
    return (OPENVINO_MODEL / "openvino_model.xml").exists()


def build_llama(jobs: int) -> None:
    if has_llama():
        return
    install(*TOOLS)
    sources = FOLDER / "sources"
    if not sources.exists():
        run(
            [
                str(PYTHON),
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                "llama-cpp-python",
                LLAMA_PACKAGE,
            ]
            + ["--dest", str(FOLDER / "download")]
        )
        (archive,) = (FOLDER / "download").glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(FOLDER / "unpacking", filter="data")
        (unpacked,) = (FOLDER / "unpacking").glob("*/vendor/llama.cpp")
        shutil.move(unpacked, sources)
        shutil.rmtree(FOLDER / "unpacking")
        shutil.rmtree(FOLDER / "download")
    tools = ENVIRONMENT.absolute() / "bin"
    folder = BUILT.parent
    run(
        [str(tools / "cmake"), "-S", str(sources), "-B", str(folder), "-G", "Ninja"]
        + [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *(f"-D{option}" for option in OPTIONS)]
    )
    run([str(tools / "cmake"), "--build", str(folder), "-j", str(jobs), "--target", *TARGETS])


def derive_llama_files() -> None:
    MODELS.mkdir(parents=True, exist_ok=True)
    wanted = [form for form in QUANTISED if not llama_model(form).exists()]
    if not wanted:
        return
    widened = MODELS / "smollm2.F32.gguf"
    if not widened.exists():
        weights, metadata = read_weights(default_model())
        write_float_gguf(widened, weights, metadata)
    for form in wanted:
        run([str(BUILT / "llama-quantize"), str(widened), str(llama_model(form)), form, "2"])


def derive_openvino_files() -> None:
    if has_openvino():
        return
    # torch first: the exporter alone would bring whatever build of it comes first, at times one of gigabytes.
    install(TORCH_PACKAGE)
    install(*OPENVINO_PACKAGES, TORCH_PACKAGE)
    # It wants another build of torch, transformers tries to import it, and no text model needs it.
    run([str(PYTHON), "-m", "pip", "uninstall", "--yes", "--quiet", "torchvision"])
    folder = MODELS / "hugging-face"
    weights, metadata = read_weights(default_model())
    write_hugging_face_folder(folder, weights, metadata)
    partly = MODELS / "openvino-partly"
    run(
        [str(PYTHON.with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
        + ["--task", "text-generation-with-past", "--weight-format", "int8", str(partly)]
    )
    partly.rename(OPENVINO_MODEL)


def derive_large_model() -> None:
    if not LARGE_MODEL.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        partly = LARGE_MODEL.with_suffix(".partly")
        _, metadata = read_weights(default_model())
        write_large_model(partly, metadata).rename(LARGE_MODEL)


def install(*packages: str) -> None:
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(ENVIRONMENT)])
    run([str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])


def run(command: list[str]) -> None:
    """
    Raises:
        PeerUnavailable: the command is missing or failed.
    """
    print("+", " ".join(command), flush=True)
    niced = [nice, "-n", "15", *command] if (nice := shutil.which("nice")) else command
    told = subprocess.run(
        niced,
        env={**os.environ, **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if told.returncode:
        raise PeerUnavailable(f"{Path(command[0]).name} ended with {told.returncode}: {told.stdout[-1500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("llama.cpp", lambda: build_llama(options.jobs)),
        ("llama.cpp's files", derive_llama_files),
        ("OpenVINO", derive_openvino_files),
        ("the large model", derive_large_model),
    )
    missing = []
    for name, step in steps:
        try:
            step()
        except PeerUnavailable as problem:
            print(f"{name} cannot be had here: {problem}", file=sys.stderr)
            missing.append(name)
        else:
            print(f"{name}: ready")
    if missing:
        raise SystemExit(f"left out: {', '.join(missing)}")


if __name__ == "__main__":
    main()
