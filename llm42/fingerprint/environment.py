"""The environment variables as far as bits may depend on them: every one with a prefix of the libraries that
compute, but for a list of those that are known to change no bit.

What is not known is in: a new variable of a library is rather a fingerprint of its own than a silent
difference. Values of variables that nobody here knows are hashed, since manifests are public.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from llm42.errors import LLM42Error
from llm42.fingerprint import digest
from llm42.host.linked import find

PREFIXES = (
    "ATEN_", "BLIS_", "DNNL_", "FBGEMM_", "GLIBC_TUNABLES", "GOMP_", "GOTO_", "KMP_", "LD_AUDIT",
    "LD_PRELOAD", "LIBOMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "THP_MEM_", "TORCH",
    "VECLIB_", "XNNPACK_",
)  # fmt: skip
"""What begins so may steer a library on any device."""

CUDA_PREFIXES = (
    "ALLOW_LHS_TMEM_", "CUBLAS", "CUDA_", "DISABLE_ADDMM_", "DISABLE_LLVM_OPT", "DISABLE_MMA_",
    "DISABLE_PTXAS_", "LLVM_", "NVIDIA_", "NVPTX_", "PTXAS", "TRITON_",
)  # fmt: skip
"""What begins so may steer a library of a GPU, and nothing on a CPU."""

HARMLESS = {
    # which device, and what a container image says of itself
    "CUDA_VISIBLE_DEVICES": "the GPU that is used is in the field device",
    "CUDA_DEVICE_ORDER": "likewise",
    "NVIDIA_VISIBLE_DEVICES": "likewise",
    "NVIDIA_DRIVER_CAPABILITIES": "which driver libraries a container is given; those in use are in loaded",
    "NVIDIA_REQUIRE_*": "what an image asks of the host before it starts",
    "NVIDIA_DISABLE_REQUIRE": "likewise",
    "NVIDIA_CPU_ONLY": "a note of an image's start script",
    "NVIDIA_BUILD_*": "the name of an image's build",
    "NVIDIA_PRODUCT_NAME": "likewise",
    "NVIDIA_PYTORCH_VERSION": "a version in an image's name; those in use are in libraries and loaded",
    "NVIDIA_CUDA_VERSION": "likewise",
    "NVIDIA_TRITON_SERVER_VERSION": "likewise",
    "CUBLAS_VERSION": "likewise",
    "CUBLASLT_VERSION": "likewise",
    "CUBLASMP_VERSION": "likewise",
    "CUDA_VERSION": "likewise",
    "CUDA_DRIVER_VERSION": "likewise",
    "PYTORCH_VERSION": "likewise",
    "PYTORCH_BUILD_*": "likewise",
    "TORCH_CUDA_ARCH_LIST": "read when extensions are compiled",
    "TORCH_NVCC_FLAGS": "likewise",
    "*_API_KEY": "a credential: not even its hash may be in a public manifest",
    "*_TOKEN": "likewise",
    "*_SECRET": "likewise",
    "*_PASSWORD": "likewise",
    # folders and caches
    "CUDA_HOME": "a folder",
    "TORCH_HOME": "a folder",
    "TRITON_HOME": "a folder",
    "TRITON_CACHE_DIR": "a folder; what is kept there has a key of its content",
    "CUDA_CACHE_*": "likewise",
    "CUDA_PATH": "a folder",
    "CUDA_MPS_*_DIRECTORY": "a folder",
    "TORCH_EXTENSIONS_DIR": "a folder",
    # tools and libraries by path
    "TRITON_PTXAS_PATH": "the compiler and library in use are in the field loaded",
    "TRITON_PTXAS_BLACKWELL_PATH": "likewise",
    "TRITON_LIBDEVICE_PATH": "likewise",
    "TRITON_LIBCUDA_PATH": "likewise",
    "TRITON_CUOBJDUMP_PATH": "a tool that shows code",
    "TRITON_NVDISASM_PATH": "a tool that shows code",
    "TRITON_CUPTI_LIB_PATH": "the library of a profiler",
    # what is said
    "MKL_VERBOSE": "a log",
    "MKL_VERBOSE_OUTPUT_FILE": "a log",
    "DNNL_VERBOSE": "a log",
    "DNNL_VERBOSE_TIMESTAMP": "a log",
    "ONEDNN_VERBOSE": "a log",
    "ONEDNN_VERBOSE_TIMESTAMP": "a log",
    "OPENBLAS_VERBOSE": "a log",
    "CUBLAS_LOGINFO_DBG": "a log",
    "CUBLAS_LOGDEST_DBG": "a log",
    "CUBLASLT_LOG_LEVEL": "a log",
    "CUBLASLT_LOG_MASK": "a log",
    "CUBLASLT_LOG_FILE": "a log",
    "PYTORCH_JIT_LOG_LEVEL": "a log",
    "TORCH_CPP_LOG_LEVEL": "a log",
    "TORCH_LOGS": "a log",
    "TORCH_LOGS_FORMAT": "a log",
    "TORCH_LOGS_OUT": "a log",
    "TORCH_TRACE": "a log",
    "TORCH_SHOW_*": "a log",
    "TORCH_*ADDR2LINE*": "a log",
    "TORCH_SYMBOLIZE_MODE": "a log",
    "TORCH_DISTRIBUTED_DEBUG": "a log",
    "OMP_DISPLAY_*": "a log",
    "OMP_AFFINITY_FORMAT": "a log",
    "OMP_DEBUG": "a log",
    "KMP_DISPLAY_*": "a log",
    "KMP_SETTINGS": "a log",
    "KMP_VERSION": "a log",
    "KMP_WARNINGS": "a log",
    "FBGEMM_STATS_*": "a log",
    "DNNL_JIT_DUMP": "a dump of generated code",
    "ONEDNN_JIT_DUMP": "likewise",
    "DNNL_JIT_PROFILE": "a mark for profilers",
    "ONEDNN_JIT_PROFILE": "likewise",
    "TRITON_DUMP_*": "a dump of generated code",
    "TRITON_KERNEL_DUMP": "likewise",
    "NVPTX_ENABLE_DUMP": "likewise",
    "LLVM_IR_ENABLE_DUMP": "likewise",
    "LLVM_*SYMBOLIZ*": "a log",
    "TRITON_PRINT_AUTOTUNING": "a log",
    "TRITON_CACHE_AUTOTUNING": "no kernel here is tuned by the clock",
    "TRITON_ALWAYS_COMPILE": "when the same code is compiled",
    # how many threads, where they run and how they wait
    "OMP_NUM_THREADS": "device.threads is how many run",
    "OMP_THREAD_LIMIT": "likewise",
    "OMP_DYNAMIC": "switched off on the thread that computes; device.threads is how many run",
    "MKL_NUM_THREADS": "set by torch on the thread that computes",
    "OPENBLAS_NUM_THREADS": "OpenBLAS follows OpenMP's number, or the variable counts (_OPENBLAS_THREADS)",
    "GOTO_NUM_THREADS": "likewise",
    "BLIS_NUM_THREADS": "likewise",
    "VECLIB_MAXIMUM_THREADS": "likewise",
    "KMP_ALL_THREADS": "device.threads is how many run",
    "KMP_DEVICE_THREAD_LIMIT": "likewise",
    "OMP_PROC_BIND": "where threads run, not what they do",
    "OMP_PLACES": "likewise",
    "GOMP_CPU_AFFINITY": "likewise",
    "KMP_AFFINITY": "likewise",
    "KMP_HW_SUBSET": "likewise",
    "OMP_WAIT_POLICY": "how threads wait",
    "GOMP_SPINCOUNT": "likewise",
    "KMP_BLOCKTIME": "likewise",
    "KMP_TPAUSE": "likewise",
    "OMP_STACKSIZE": "a thread's stack",
    "GOMP_STACKSIZE": "likewise",
    "KMP_STACKSIZE": "likewise",
    "KMP_MONITOR_STACKSIZE": "likewise",
    "KMP_DUPLICATE_LIB_OK": "whether a second OpenMP is an error; the one in use is in loaded",
    # when and where, not what
    "CUDA_LAUNCH_BLOCKING": "whether a launch is waited for",
    "CUDA_MODULE_LOADING": "when code is loaded",
    "CUDA_DEVICE_MAX_CONNECTIONS": "how many streams run side by side",
    "PYTORCH_CUDA_ALLOC_CONF": "where a tensor lies; every place is aligned alike",
    "PYTORCH_ALLOC_CONF": "likewise",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "how a GPU is looked for",
    # parts of PyTorch that the canonical path does not use
    "PYTORCH_TUNABLEOP_*": "refused where it is on (require_steady_kernels)",
    "TORCHINDUCTOR_*": "nothing canonical is compiled by PyTorch",
    "TORCHDYNAMO_*": "likewise",
    "TORCH_COMPILE_*": "likewise",
    "TORCH_CUDNN_*": "cuDNN is not called",
    "TORCH_NCCL_*": "nothing is sent between devices",
    "TORCH_FR_*": "likewise",
    "TORCH_GLOO_*": "likewise",
}
"""Pattern -> why it can change no bit."""

SHOWN = (
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "DISABLE_PTXAS_OPT",
    "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "LD_PRELOAD", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "PTXAS_OPTIONS", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TRITON_DEFAULT_FP_FUSION", "TRITON_F32_DEFAULT", "TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH",
)  # fmt: skip
"""Variables whose values the manifest shows; of others it has a hash."""

_OPENBLAS_THREADS = ("GOTO_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""How many threads an OpenBLAS has that makes its own: nothing else says so, and it divides sums by them."""

_READ_BY_THE_LINKER = ("GLIBC_TUNABLES", "LD_AUDIT", "LD_PRELOAD")


class UnsteadyKernels(LLM42Error):
    """A setting of this process lets a library choose its kernels by the clock, or take foreign ones: equal
    inputs would not give equal bits. The message says what to unset."""

    code = "unsteady_kernels"


def steering_variables(kind: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name -> value, or a hash of it, of every set variable that may steer a library on this kind of device
    (`cpu` or `cuda`). environ: that of this process."""
    found = _of_this_process() if environ is None else environ
    prefixes = PREFIXES + (CUDA_PREFIXES if kind == "cuda" else ())
    names = (name for name in sorted(found) if name.startswith(prefixes) and found[name])
    counted = _OPENBLAS_THREADS if _openblas_has_threads() else ()
    kept = [n for n in names if n in counted or not any(fnmatchcase(n, pattern) for pattern in HARMLESS)]
    return {name: found[name] if name in SHOWN else f"sha256:{digest(found[name])}" for name in kept}


@cache
def _openblas_has_threads() -> bool:
    """Whether torch calls an OpenBLAS that makes threads of its own, instead of none or OpenMP's."""
    import torch

    library = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    function = find(("openblas_get_parallel",), library)
    return function is not None and function() not in (0, 2)


def _of_this_process() -> dict[str, str]:
    """os.environ, but what the linker reads as it was when the process started: later it has no effect."""
    try:
        lines = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return dict(os.environ)
    at_start = dict(line.split("=", 1) for line in lines if "=" in line)
    now = {name: value for name, value in os.environ.items() if name not in _READ_BY_THE_LINKER}
    return now | {name: at_start[name] for name in _READ_BY_THE_LINKER if name in at_start}


def require_steady_kernels(kind: str) -> None:
    """Raises UnsteadyKernels where kernels are chosen by the clock or taken from a folder."""
    if kind != "cuda":
        return
    for name, what in (
        ("PYTORCH_TUNABLEOP_ENABLED", "PyTorch's TunableOp chooses kernels by their time"),
        ("TRITON_KERNEL_OVERRIDE", "Triton takes kernels from a folder in place of its own"),
    ):
        if os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y"):
            raise UnsteadyKernels(f"{name} is set: {what}, and bits follow. Unset it for the verifier.")
    import torch

    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        raise UnsteadyKernels("TunableOp is on: switch it off with torch.cuda.tunable.enable(False)")
