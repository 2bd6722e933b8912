"""The libraries as far as bits may depend on them: which versions are installed, and which files are loaded.

A version alone does not say what runs: LD_LIBRARY_PATH, an image or another wheel may put another cuBLAS
under the same torch. So the files are asked for through the functions that torch calls.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llm42.host.linked import file_identity, file_of, find, mapped_file

LIBRARIES = ("torch", "numpy", "tokenizers", "jinja2", "gguf", "safetensors")
CUDA_LIBRARIES = ("triton",)
"""Distributions that matter on a GPU only."""

WHERE_A_GPU_IS_VISIBLE = ("CUDA Runtime", "NVCC", "CuDNN", "Built with CuDNN", "Magma")

SYMBOLS = {
    "openmp": ("GOMP_parallel", "__kmpc_fork_call", "omp_get_num_threads"),
    "blas": ("sgemm_", "cblas_sgemm", "openblas_get_config"),
    "libm": ("expf", "exp"),
}
"""What torch calls for its threads, products and functions -> where it may find them. A part that is linked
into libtorch itself is named by libtorch."""

CUDA_SYMBOLS = {
    "cublas": ("cublasCreate_v2", "cublasGetProperty"),
    "cublasLt": ("cublasLtMatmul", "cublasLtGetVersion"),
    "cudart": ("cudaRuntimeGetVersion",),
}


def library_versions(kind: str) -> dict[str, str | None]:
    """The installed distributions' versions; None for one that is not installed. kind: `cpu` or `cuda`."""
    names = LIBRARIES + (CUDA_LIBRARIES if kind == "cuda" else ())
    return {name: installed_version(name) for name in names}


def torch_build(kind: str) -> str:
    """What torch says of its build, its own products and the instruction set that it uses. On a CPU without
    the lines that it adds where a GPU is visible: whether one is changes no bit there."""
    import torch  # which an ingress does without: it asks for versions only

    lines = torch.__config__.show().splitlines()
    if kind == "cpu":
        lines = [line for line in lines if not line.strip(" -").startswith(WHERE_A_GPU_IS_VISIBLE)]
    return "\n".join(lines)


def installed_version(name: str) -> str | None:
    """A distribution's; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def loaded_libraries(kind: str) -> dict[str, str]:
    """Part -> build id (or a hash) of the file that is loaded for it, after the version it gives itself where
    it has one. On a GPU also the compiler and the library that Triton uses, and the driver's own library."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    found = {"torch": file_identity(str(folder / "libtorch_cpu.so"))}
    found |= _by_symbols(SYMBOLS, str(folder / "libtorch_cpu.so"))
    if kind == "cuda":
        library = str(folder / "libtorch_cuda.so")
        found["torch_cuda"] = file_identity(library)
        found |= _by_symbols(CUDA_SYMBOLS, library) | triton_tools()
        driver = mapped_file("libcuda.so")
        found |= {"libcuda": file_identity(driver)} if driver else {}
    return found


def _by_symbols(parts: dict[str, tuple[str, ...]], library: str) -> dict[str, str]:
    found = {}
    for part, symbols in parts.items():
        function = find(symbols, library)
        file = (function and file_of(function)) or mapped_file(f"lib{part}.so")
        if file is not None:
            said = own_version(part, library)
            found[part] = f"{said} {file_identity(file)}" if said else file_identity(file)
    return found


def own_version(part: str, library: str) -> str:
    """What cuBLAS or the CUDA runtime say of themselves; empty for other parts, or without an answer."""
    if part == "cublasLt" and (function := find(["cublasLtGetVersion"], library)) is not None:
        function.restype = ctypes.c_size_t
        return str(function())
    if part == "cublas" and (function := find(["cublasGetProperty"], library)) is not None:
        numbers = []
        for which in range(3):  # major, minor, patch
            value = ctypes.c_int(-1)
            if function(ctypes.c_int(which), ctypes.byref(value)):
                return ""
            numbers.append(str(value.value))
        return ".".join(numbers)
    if part == "cudart" and (function := find(["cudaRuntimeGetVersion"], library)) is not None:
        value = ctypes.c_int(-1)
        return "" if function(ctypes.byref(value)) else str(value.value)
    return ""


def triton_tools() -> dict[str, str]:
    """The PTX assembler and the device library that Triton takes on this GPU, wherever variables point it."""
    import torch

    try:
        from triton import knobs
        from triton.backends import nvidia
    except ImportError:
        return {}
    tools = ["ptxas"]
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
        tools.append("ptxas_blackwell")
    found = {}
    for name in tools:
        try:
            tool = getattr(knobs.nvidia, name)
        except (AttributeError, RuntimeError):
            continue
        found[name] = f"{tool.version} {file_identity(tool.path)}"
    folder = Path(next(iter(nvidia.__path__)))
    library = knobs.nvidia.libdevice_path or folder / "lib" / "libdevice.10.bc"
    return found | {"libdevice": file_identity(str(library))}
