"""Downloads one commit of a Hugging Face repository into a directory, and marks it when it is complete.

A marked directory is used as it is, without the network: a restart does not need the Hub. Without the mark
nothing is taken for complete, whatever lies there; with it, files must have the sizes that it names.
`--wait` downloads nothing and waits for the mark. The token, where one is needed, is in HF_TOKEN.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

MARK = ".llm42-complete.json"


def main() -> int:
    """Prints where the files are."""
    options = argparse.ArgumentParser()
    options.add_argument("repo")
    options.add_argument("--revision", required=True)
    options.add_argument("--directory", type=Path, required=True)
    options.add_argument("--allow", action="append", help="pattern of files; may be given again")
    options.add_argument("--wait", action="store_true", help="until another process has downloaded it")
    asked = options.parse_args()
    wanted = {"repo": asked.repo, "revision": asked.revision, "allow": asked.allow}
    if asked.wait:
        wait(asked.directory, wanted)
    elif not complete(asked.directory, wanted) and (problem := download(asked.directory, wanted)):
        print(problem, file=sys.stderr)
        return 1
    print(asked.directory)
    return 0


def complete(directory: Path, wanted: dict) -> bool:
    """Whether the directory is marked as these files, and all are there with their sizes."""
    try:
        mark = json.loads((directory / MARK).read_text())
        return {k: mark[k] for k in wanted} == wanted and not broken(directory, mark["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def broken(directory: Path, files: dict) -> list:
    """Names of the files that are missing or have another size."""
    return [name for name, size in files.items() if size_of(directory / name) != size]


def size_of(file: Path) -> int:
    """Its size in bytes, -1 without such a file."""
    return file.stat().st_size if file.is_file() else -1


def wait(directory: Path, wanted: dict) -> None:
    """Returns when the directory is complete."""
    turn = 0
    while not complete(directory, wanted):
        if turn % 30 == 0:
            print(f"waiting for {wanted['repo']} in {directory}: see the Job fetch", flush=True)
        turn += 1
        time.sleep(2)


def download(directory: Path, wanted: dict) -> str:
    """Downloads and marks; what is wrong, or nothing."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import filter_repo_objects

    repo, revision, allow = wanted["repo"], wanted["revision"], wanted["allow"]
    try:
        # asked first: snapshot_download takes what lies in the directory when it cannot reach the Hub
        listed = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
        files = {f.rfilename: f.size for f in listed}
        files = {name: files[name] for name in filter_repo_objects(list(files), allow_patterns=allow)}
        if not files:
            return f"{repo} at {revision} has no file that model.huggingface.allowPatterns names"
        for name in broken(directory, files):
            (directory / name).unlink(missing_ok=True)
        snapshot_download(repo, revision=revision, local_dir=str(directory), allow_patterns=allow)
    except HfHubHTTPError as error:
        return f"{repo} at {revision}: {error}\nGated or private? Set model.huggingface.tokenSecret.name."
    except Exception as error:  # of the HTTP library, which huggingface_hub does not wrap
        return f"{repo} at {revision} could not be downloaded: {type(error).__name__}: {error}"
    if wrong := broken(directory, files):
        return f"{directory} is not complete after the download: {', '.join(wrong[:5])}"
    mark(directory, {**wanted, "files": files})
    return ""


def mark(directory: Path, content: dict) -> None:
    """Writes the mark as a whole or not at all, after the files themselves have reached the disk."""
    os.sync()
    part = directory / f"{MARK}.{os.getpid()}"
    with part.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(directory / MARK)


if __name__ == "__main__":
    sys.exit(main())
