"""What the fingerprint says of a process: variables that may steer a library, libraries that are loaded,
threads that run. Two processes that differ in something that counts have two, and else one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from llm42 import fingerprint as fp
from llm42.config import Settings
from llm42.fingerprint import environment
from llm42.fingerprint.environment import HARMLESS, SHOWN, steering_variables
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT
from llm42_serve.verifiers import names as actors
from tests.support import write_model

SCRIPT = """
import json, sys
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.verifier import manifest
verifier = {"threads": int(sys.argv[2])}
s = Settings.load({"model": {"path": sys.argv[1], "max_model_len": 64}, "verifier": verifier})
model, tokenizer = load_for(s)
inputs = manifest.inputs(model, s, tokenizer.identity)
openmp = sorted({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
print(json.dumps([inputs, openmp]))
"""


def _start(model: str, threads: int, **env: str) -> subprocess.Popen[str]:
    names = ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV")
    plain = {name: os.environ[name] for name in names if name in os.environ}
    plain["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, model, str(threads)],
        env=plain | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _result(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str, list[str]]:
    """The manifest's inputs, what was logged, and the OpenMP libraries that the process has mapped."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    inputs, openmp = json.loads(out.splitlines()[-1])
    return inputs, err, openmp


AS_IN_AN_ACTOR = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_DYNAMIC": "false",
    "OMP_THREAD_LIMIT": actors.NO_THREAD_LIMIT,
    "CUDA_VISIBLE_DEVICES": "3",
    "NVIDIA_VISIBLE_DEVICES": "void",
    "TRITON_CACHE_DIR": "/tmp/t",
    "TORCH_HOME": "/tmp/h",
    "OMP_PROC_BIND": "true",
    "LD_LIBRARY_PATH": "/usr/lib",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}


def _other_openmp(folder: Path) -> Path:
    """A folder with torch's OpenMP library under another build id: what an image with its own would have."""
    (source,) = (Path(torch.__file__).parent / "lib").glob("libgomp.so*")
    copy = folder / source.name
    shutil.copy(source, copy)
    data = copy.read_bytes()
    at = data.index(b"GNU\0", data.index(b"\x14\0\0\0\x03\0\0\0GNU\0")) + 4
    copy.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    return folder


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "tiny"))
    bundled = list((Path(torch.__file__).parent / "lib").glob("libgomp.so*"))
    running = {
        "command": _start(model, 2),
        "actor": _start(model, 2, **AS_IN_AN_ACTOR),
        "limited": _start(model, 2, OMP_THREAD_LIMIT="1"),
        "one": _start(model, 1),
        "steered": _start(model, 2, MKL_CBWR="COMPATIBLE", ONEDNN_SOMETHING_NEW="secret value"),
    }
    if bundled:
        (tmp_path / "lib").mkdir()
        running["library"] = _start(model, 2, LD_LIBRARY_PATH=str(_other_openmp(tmp_path / "lib")))
    found = {name: _result(process) for name, process in running.items()}
    manifests = {name: inputs for name, (inputs, _, _) in found.items()}
    base = manifests["command"]
    assert fp.differing_fields(base, manifests["actor"]) == {}
    assert fp.differing_fields(base, manifests["limited"]) == {"device.threads": (2, 1)}
    assert fp.differing_fields(manifests["one"], manifests["limited"]) == {}
    assert "parallel regions have 1 threads" in found["limited"][1]
    assert "parallel regions" not in found["command"][1] + found["actor"][1]
    steered = manifests["steered"]
    assert set(fp.differing_fields(base, steered)) == {
        "environment.MKL_CBWR",
        "environment.ONEDNN_SOMETHING_NEW",
    }
    assert steered["environment"]["MKL_CBWR"] == "COMPATIBLE"
    assert "secret" not in json.dumps(steered), "manifests are public"
    if bundled:  # some builds of torch fix where theirs lies: then the variable changes nothing
        another = found["library"][2] != found["command"][2]
        assert list(fp.differing_fields(base, manifests["library"])) == ["loaded.openmp"] * another


@pytest.mark.parametrize(
    ("name", "on_cpu"),
    [
        ("MKL_ENABLE_INSTRUCTIONS", True),
        ("ATEN_CPU_CAPABILITY", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", True),
        ("KMP_REDUCTION_BARRIER_PATTERN", True),
        ("GLIBC_TUNABLES", True),
        ("TORCH_BLAS_PREFER_CUBLASLT", True),
        ("CUBLASLT_WORKSPACE_SIZE", False),
        ("CUBLAS_EMULATION_STRATEGY", False),
        ("NVIDIA_TF32_OVERRIDE", False),
        ("DISABLE_ADDMM_CUDA_LT", False),
        ("DISABLE_PTXAS_OPT", False),
        ("PTXAS_OPTIONS", False),
        ("TRITON_DEFAULT_FP_FUSION", False),
        ("TRITON_OVERRIDE_ARCH", False),
        ("TRITON_A_NEW_KNOB", False),
        ("TRITON_PASS_PLUGIN_PATH", False),
        ("NVIDIA_A_NEW_VERSION", False),
        ("MKL_VERBOSE_KERNELS", True),
        ("TORCH_SECRET_FAST_PATH", True),
        ("TORCH_PASSWORDLESS", True),
        ("ONEDNN_A_NEW_CACHE_DIR", True),
        ("TORCH_A_NEW_HOME", True),
        ("MKL_A_NEW_STACKSIZE", True),
        ("ONEDNN_A_NEW_LOG_LEVEL", True),
    ],
)
def test_what_may_steer_is_in_it(name: str, on_cpu: bool) -> None:
    assert name in steering_variables("cuda", {name: "1"})
    assert (name in steering_variables("cpu", {name: "1"})) == on_cpu
    one, two = (steering_variables("cuda", {name: value}) for value in ("1", "2"))
    assert one != two, "also where the value is hashed"


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_REQUIRE_CUDA", "NVIDIA_DRIVER_CAPABILITIES",
        "CUDA_VERSION", "NVIDIA_PYTORCH_VERSION", "NVIDIA_API_KEY", "CUDA_HOME", "CUDA_CACHE_PATH",
        "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "OMP_NUM_THREADS",
        "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "MKL_VERBOSE", "ONEDNN_VERBOSE",
        "CUBLAS_LOGINFO_DBG",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_NVML_BASED_CUDA_CHECK", "LD_LIBRARY_PATH", "RAY_JOB_ID",
    ],
)  # fmt: skip
def test_what_is_harmless_is_not(name: str) -> None:
    for kind in ("cpu", "cuda"):
        assert steering_variables(kind, {name: "1"}) == {}


@pytest.mark.parametrize(("built", "counts"), [(None, False), (0, False), (1, True), (2, False), (7, True)])
def test_threads_of_an_openblas(built: int | None, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """built: what openblas_get_parallel says (0: no threads, 1: its own, 2: OpenMP's); None: no OpenBLAS."""
    asked = []

    def find(symbols: tuple[str, ...], library: str) -> Any:
        asked.append((*symbols, Path(library).name))
        return None if built is None else lambda: built

    monkeypatch.setattr(environment, "find", find)
    environment._openblas_has_threads.cache_clear()
    try:
        for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
            assert (name in steering_variables("cpu", {name: "3"})) == counts
        assert steering_variables("cpu", {"MKL_NUM_THREADS": "3"}) == {}
    finally:
        environment._openblas_has_threads.cache_clear()
    assert asked == [("openblas_get_parallel", "libtorch_cpu.so")]


def test_the_harmless_have_reasons_and_none_is_shown() -> None:
    assert all(len(reason) > 3 for reason in HARMLESS.values())
    assert not [name for name in SHOWN if any(fnmatchcase(name, pattern) for pattern in HARMLESS)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_verifiers_actor_is_given_is_what_a_command_has(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Remote:
        def options(self, **options: Any) -> Remote:
            given.update(options)
            return self

        def remote(self, *_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(actors.ray, "remote", lambda _: Remote())
    actors.get_or_create_verifier("v", Settings.load({"model": {"device": device}}), "identity")
    env = given["runtime_env"]["env_vars"]
    assert env["OMP_DYNAMIC"] == "false"
    assert int(env["OMP_THREAD_LIMIT"]) >= 1024
    # a command on a GPU sets the same by itself (llm42_kernels.cublas.rule_out_workspace)
    assert steering_variables(device, env) == (CUBLAS_ENVIRONMENT if device == "cuda" else {})


def test_what_the_linker_reads_is_as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may set LD_PRELOAD for the processes that it will start; this one is not changed by it."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("LD_PRELOAD", "/set/later.so")
    found = steering_variables("cpu")
    assert found["MKL_CBWR"] == "AVX2"
    assert found.get("LD_PRELOAD") != "/set/later.so"


@pytest.mark.parametrize("name", ["PYTORCH_TUNABLEOP_ENABLED", "TRITON_KERNEL_OVERRIDE"])
def test_kernels_chosen_by_the_clock_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(environment.UnsteadyKernels, match=name):
        environment.require_steady_kernels("cuda")
    environment.require_steady_kernels("cpu")
    monkeypatch.setenv(name, "0")
    environment.require_steady_kernels("cuda")


def test_tunable_op_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from llm42.checkpoint.load import load_for
    from llm42.verifier.build import build_verifier, certificate_for

    settings = Settings.load({"model": {"path": str(write_model(tmp_path)), "max_model_len": 64}})
    model, tokenizer = load_for(settings)
    on_gpu = replace(model, device="cuda:0")
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    for start in (certificate_for, build_verifier):
        with pytest.raises(environment.UnsteadyKernels, match="Unset it"):
            start(settings, on_gpu, tokenizer)  # type: ignore[operator]
