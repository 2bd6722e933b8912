"""Downloads one commit of a Hugging Face repository into a directory; complete files not again.

The token, where one is needed, is in HF_TOKEN.
"""

import argparse
import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError


def main() -> int:
    """Prints where the files are."""
    options = argparse.ArgumentParser()
    options.add_argument("repo")
    options.add_argument("--revision", required=True)
    options.add_argument("--directory", required=True)
    options.add_argument("--allow", action="append", help="pattern of files; may be given again")
    asked = options.parse_args()
    try:
        found = snapshot_download(
            asked.repo, revision=asked.revision, local_dir=asked.directory, allow_patterns=asked.allow
        )
    except HfHubHTTPError as error:
        print(f"{asked.repo} at {asked.revision}: {error}", file=sys.stderr)
        print("Gated or private? Set model.huggingface.tokenSecret.name.", file=sys.stderr)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
