"""serve_config.yaml as `llm42 serve` reads it: what it does not honour is refused by name, not dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llm42.config import Settings
from llm42.config.yaml_file import YamlProblem, read_yaml
from llm42.errors import LaunchFailed

APP_NAME = "llm42"
IMPORT_PATH = "llm42_serve.app:build"
_EMPTY: tuple[Any, ...] = (None, "", [], {})


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
                f"{source}: {misplaced[0]}: a file of settings, without `applications`, has no options of Ray"
                " Serve (server.host and server.port are settings)"
            )
        return absolute(Settings.load(data))
    reader = _Reader(source)
    reader.require_known(data, "", _TOP)
    return absolute(Settings.load(reader.settings(data)))


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _anything(_: Any) -> bool:
    return True


_TOP: dict[str, Callable[[Any], bool]] = {
    "proxy_location": _is("HeadOnly", "EveryNode"),
    "http_options": _anything,
    "applications": _anything,
    "grpc_options": _is(),
    "logging_config": _is(),
}
_HTTP: dict[str, Callable[[Any], bool]] = {
    "host": _anything,
    "port": _anything,
    "root_path": _is(),
    "request_timeout_s": _is(),
    "keep_alive_timeout_s": _is(),
}
_APPLICATION: dict[str, Callable[[Any], bool]] = {
    "name": _is(APP_NAME),
    "route_prefix": _is("/"),
    "import_path": _is(IMPORT_PATH),
    "args": _anything,
    "deployments": _is(),
    "runtime_env": _is(),
    "logging_config": _is(),
}
"""Names that Ray Serve knows, each with the values that `llm42 serve` honours, beside empty ones."""


class _Reader:
    """The checks of one file."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def settings(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The settings tree, with host and port of http_options in it."""
        http = self._mapping(data.get("http_options"), "http_options")
        self.require_known(http, "http_options.", _HTTP)
        applications = data["applications"]
        if not isinstance(applications, list) or len(applications) != 1:
            count = f", and has {len(applications)}" if isinstance(applications, list) else ""
            raise self._refusal("applications", f"a list of one application is needed{count}")
        application = self._mapping(applications[0], "applications[0]")
        self.require_known(application, "applications[0].", _APPLICATION)
        args = self._mapping(application.get("args"), "applications[0].args")
        server = self._mapping(args.get("server"), "applications[0].args.server")
        given = {key: http[key] for key in ("host", "port") if http.get(key) is not None}
        return {**args, "server": {**given, **server}}

    def require_known(
        self, found: Mapping[str, Any], where: str, known: Mapping[str, Callable[[Any], bool]]
    ) -> None:
        """Refuses names that are not in `known`, and values that would not be honoured."""
        for name, value in found.items():
            if name not in known:
                raise LaunchFailed(
                    f"{self._source}: {where}{name}: there is no such name here; known are {', '.join(known)}"
                )
            if not any(value == empty for empty in _EMPTY) and not known[name](value):
                raise self._refusal(f"{where}{name}", f"`llm42 serve` does not honour {value!r}")

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._refusal(where, f"a mapping is needed, not {value!r}")
        return value

    def _refusal(self, where: str, why: str) -> LaunchFailed:
        return LaunchFailed(
            f"{self._source}: {where}: {why}. On a cluster such a file is run by: serve deploy {self._source}"
        )


def absolute(settings: Settings) -> Settings:
    """The same settings with absolute paths."""
    tree = settings.model_dump()
    paths = (
        (tree["model"], "path"),
        (tree["model"], "chat_template"),
        (tree["engine"]["vllm"], "export_dir"),
        (tree["verifier"], "certificate_dir"),
        (tree["telemetry"], "trace_dir"),
        *((tree["audit"]["keys"], key) for key in settings.audit.keys),
    )
    for section, name in paths:
        if section[name] is not None:
            section[name] = str(Path(section[name]).absolute())
    return Settings.load(tree)
