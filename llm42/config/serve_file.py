"""serve_config.yaml as `llm42 serve` reads it: what it does not honour is refused by name, not dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm42.config import Settings
from llm42.config.yaml_file import YamlProblem, read_yaml
from llm42.errors import LaunchFailed

APP_NAME = "llm42"
IMPORT_PATH = "llm42_serve.app:build"


def read_serve_config(path: str | Path) -> Settings:
    """The settings in a Ray Serve configuration (its only application's args), or in a bare settings file.

    Paths are made absolute, because Ray's workers run elsewhere. Raises LaunchFailed for a file that is no
    mapping, and for a name that is unknown or that only a cluster honours: `serve deploy` is the tool for it.
    """
    source = Path(path)
    try:
        data = read_yaml(source)
    except YamlProblem as error:
        raise LaunchFailed(str(error)) from error
    if "applications" not in data:
        if misplaced := sorted(set(data) & set(_TOP)):
            raise LaunchFailed(
                f"{source}: {misplaced[0]}: only a file with `applications` has options of Ray Serve. Here"
                " set server.host and server.port, or put the settings under applications[0].args"
            )
        return absolute(Settings.load(data))
    return absolute(Settings.load(_settings(source, data)))


_TOP: dict[str, tuple[str, ...] | None] = {
    "proxy_location": ("HeadOnly", "EveryNode"),
    "http_options": None,
    "applications": None,
    "grpc_options": (),
    "logging_config": (),
}
_HTTP: dict[str, tuple[str, ...] | None] = {
    "host": None,
    "port": None,
    "root_path": (),
    "request_timeout_s": (),
    "keep_alive_timeout_s": (),
}
_APPLICATION: dict[str, tuple[str, ...] | None] = {
    "name": (APP_NAME,),
    "route_prefix": ("/",),
    "import_path": (IMPORT_PATH,),
    "args": None,
    "deployments": (),
    "runtime_env": (),
    "logging_config": (),
}
"""Names that Ray Serve knows, with the values that `llm42 serve` honours beside empty ones; None: all."""


def _settings(source: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings tree, with host and port of http_options in it."""
    _require_known(source, data, "", _TOP)
    http = _mapping(source, data.get("http_options"), "http_options")
    _require_known(source, http, "http_options.", _HTTP)
    applications = data["applications"]
    if not isinstance(applications, list) or len(applications) != 1:
        count = f", and has {len(applications)}" if isinstance(applications, list) else ""
        raise _refusal(source, "applications", f"a list of one application is needed{count}")
    application = _mapping(source, applications[0], "applications[0]")
    _require_known(source, application, "applications[0].", _APPLICATION)
    args = _mapping(source, application.get("args"), "applications[0].args")
    server = _mapping(source, args.get("server"), "applications[0].args.server")
    given = {key: http[key] for key in ("host", "port") if http.get(key) is not None}
    return {**args, "server": {**given, **server}}


def _require_known(
    source: Path, found: Mapping[str, Any], where: str, known: Mapping[str, tuple[str, ...] | None]
) -> None:
    """Refuses names that are not in `known`, and values that would not be honoured."""
    for name, value in found.items():
        if name not in known:
            raise LaunchFailed(
                f"{source}: {where}{name}: unknown name: correct or remove it; known here: {', '.join(known)}"
            )
        honoured = known[name]
        if honoured is not None and value not in (*honoured, None, "", [], {}):
            raise _refusal(source, f"{where}{name}", f"`llm42 serve` cannot apply {value!r}: remove it")


def _mapping(source: Path, value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refusal(source, where, f"a mapping is needed, not {value!r}")
    return value


def _refusal(source: Path, where: str, why: str) -> LaunchFailed:
    return LaunchFailed(f"{source}: {where}: {why}. To run the file on a Ray cluster: serve deploy {source}")


def absolute(settings: Settings) -> Settings:
    """The same settings with absolute paths."""
    tree = settings.model_dump()
    paths = (
        (tree["model"], "path"),
        (tree["model"], "chat_template"),
        (tree["engine"]["vllm"], "export_dir"),
        (tree["verifier"], "certificate_dir"),
        (tree["telemetry"], "trace_dir"),
        (tree["server"], "api_keys_file"),
        *((tree["audit"]["keys"], key) for key in settings.audit.keys),
    )
    for section, name in paths:
        if section[name] is not None:
            section[name] = str(Path(section[name]).absolute())
    return Settings.load(tree)
