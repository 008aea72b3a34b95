"""What the daemon can be told, as one table: a file, the environment, the command line and the manual come from it.

Owns names, types, defaults and help of all settings, and the refusal of what is not in the table. It starts nothing.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from devipc.errors import UsageError
from devipc.hicache.engine.transferengine import EngineConfig
from devipc.hicache.policy import WritePolicy

__all__ = ["FILE_VARIABLE", "OPTIONS", "PREFIX", "DaemonConfig", "Option", "load_config", "option_table", "parse_size"]

PREFIX = "DEVIPC_HICACHE_"
"""What the names of environment variables begin with."""

FILE_VARIABLE = PREFIX + "CONFIG"
"""Names the file, where no flag does."""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_OWN_DEFAULTS = {"kept_percent": 50}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_LEVELS = ("debug", "info", "warning", "error")


def parse_size(value: object) -> int:
    """Return a number of bytes: an integer, or text such as ``512MiB``, ``20g`` or ``1048576``. Units are binary."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip().removesuffix("ib").removesuffix("b")
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError("pass bytes, or a number with KiB, MiB, GiB or TiB") from None


def _parse_int(value: object) -> int:
    if isinstance(value, bool | float):
        raise ValueError("pass an integer")
    try:
        return int(str(value).strip())
    except ValueError:
        raise ValueError("pass an integer") from None


def _parse_seconds(value: object) -> float:
    try:
        seconds = float("nan") if isinstance(value, bool) else float(str(value))
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise ValueError("pass seconds, 0 or more")
    return seconds


def _parse_bool(value: object) -> bool:
    text = str(value).strip().lower()
    if text in _YES + _NO:
        return text in _YES
    raise ValueError("pass true or false")


def _parse_ints(value: object) -> tuple[int, ...]:
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("pass a list of integers")
    return tuple(_parse_int(part) for part in parts)


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("pass text")
    return value


def _one_of(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"pass one of {', '.join(allowed)}")
        return str(value)

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Parameters
    ----------
    name : str
        In the file; the flag has dashes, the environment variable capitals behind :data:`PREFIX`.
    kind : str
        What may be passed, for people.
    default : object
        Parsed.
    help : str
        One sentence or two.
    parse : callable
        Returns the value, or raises ValueError with what to pass instead.
    """

    name: str
    kind: str
    default: Any
    help: str
    parse: Callable[[object], Any]

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def shown(self) -> str:
        """The default as it may be passed; ``none`` for an empty list, ``empty`` for empty text."""
        value = self.default
        if isinstance(value, bool):
            return str(value).lower()
        if self.kind == "size" and value:
            for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
                if value % step == 0:
                    return f"{value // step}{unit}"
        if isinstance(value, tuple):
            return ",".join(map(str, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value) or "empty"

    @property
    def variable(self) -> str:
        """Spelling in the environment."""
        return PREFIX + self.name.upper()


def _engine_options() -> list[Option]:
    """Those that the engine has wherever it runs; their defaults are its own, but for those that matter to many."""
    help_of = {
        "tier_nbytes": "Host memory of the tier.",
        "slab_nbytes": "Host memory that one page size takes at a time; at least a page of each pool.",
        "chunk_nbytes": "Host memory registered with the device by one call.",
        "index_entries": "Pages that `match` can find; 0: one for each 32 KiB of the tier.",
        "extent_pages": "Longest run of pages that is stored, and evicted, as one.",
        "pin_required": "Refuse to run when the tier cannot be pinned, instead of copying through a small buffer.",
        "bounce_nbytes": "Size of that buffer.",
        "kept_percent": "Part of the tier that is kept, in equal shares, for the clients and one that may come: none"
        " keeps so much from being evicted, by leases and transfers, that others have less. 0: whoever comes first.",
        "max_ops": "Transfers that a client may have unfinished; more are refused as busy.",
        "max_flying": "Operations on a stream at a time, for each direction.",
        "max_flying_nbytes": "Bytes on a stream at a time, for each direction; an operation alone may be larger.",
        "backup_nbytes_per_s": "Bytes a second from the device at most, on average; 0: as many as it moves.",
        "restore_nbytes_per_s": "Bytes a second to the device at most, on average; 0: as many as it moves.",
        "layer_groups": "Layers of a restore's first fences; the last takes the rest.",
    }
    found = []
    for field in fields(EngineConfig):
        if field.name not in help_of:
            continue
        assert field.default is not MISSING
        default: Any = _OWN_DEFAULTS.get(field.name, field.default)
        parse: Callable[[object], Any]
        if isinstance(default, bool):
            kind, parse = "true|false", _parse_bool
        elif "_nbytes" in field.name:
            kind, parse = "size", parse_size
        elif isinstance(default, int):
            kind, parse = "integer", _parse_int
        else:
            kind, parse, default = "integers", _parse_ints, tuple(default)
        found.append(Option(field.name, kind, default, help_of[field.name], parse))
    return found


def _parse_policy(value: object) -> str:
    try:
        return WritePolicy(str(value)).value
    except ValueError:
        raise ValueError(f"pass one of {', '.join(WritePolicy)}") from None


_POLICIES = tuple(policy.value for policy in WritePolicy)
OPTIONS: tuple[Option, ...] = (
    Option(
        "socket",
        "path",
        "",
        "Where clients connect. Empty: `hicache.sock` in the folder of this user's sockets.",
        _parse_text,
    ),
    Option("backend", "text", "host", "Backend of the device; see `devipc backends`.", _parse_text),
    Option("device", "text", "", "Identity of the device; the backend's first when empty.", _parse_text),
    Option(
        "strategy",
        "auto|stream_memop|host_flag|polling|event",
        "auto",
        "Completion strategy to insist on.",
        _one_of("auto", "stream_memop", "host_flag", "polling", "event"),
    ),
    Option(
        "allow_uids",
        "integers",
        (),
        "Further users whose processes may connect, for containers. The folder of the socket must let them in.",
        _parse_ints,
    ),
    *_engine_options(),
    Option("max_clients", "integer", 64, "Clients at a time; more are refused as busy.", _parse_int),
    Option(
        "write_policy",
        "|".join(_POLICIES),
        WritePolicy.WRITE_THROUGH.value,
        "What clients are told about when to back up a page: when it is computed, when it is hit again, or before it"
        " is evicted from the device.",
        _parse_policy,
    ),
    Option("messages", "true|false", False, "Messages only: no rings in shared memory.", _parse_bool),
    Option("start_timeout_s", "seconds", 120.0, "How long the engine may take to be ready.", _parse_seconds),
    Option("drain_timeout_s", "seconds", 30.0, "How long a drain waits for what is under way.", _parse_seconds),
    Option(
        "reap_s",
        "seconds",
        30.0,
        "How long copies of a client that is gone may go on, before the engine is killed and started again.",
        _parse_seconds,
    ),
    Option("stall_s", "seconds", 10.0, "An operation that is so long over its deadline is reported.", _parse_seconds),
    Option(
        "stuck_s",
        "seconds",
        30.0,
        "An engine that gave no sign of life for so long is killed and started again.",
        _parse_seconds,
    ),
    Option("metrics_port", "integer", 0, "Prometheus metrics on this port of 127.0.0.1; 0: none.", _parse_int),
    Option("log_level", "|".join(_LEVELS), "info", "What is logged to standard error.", _one_of(*_LEVELS)),
    Option(
        "engine_module",
        "text",
        "devipc.hicache.engineproc",
        "Module that is run as the engine process.",
        _parse_text,
    ),
)
"""All settings, in the order of the manual."""

_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Values of all :data:`OPTIONS`, and where each came from (``default``, ``file``, ``environment``, ``flag``)."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        """Return the value of an option."""
        if name in _BY_NAME:
            return self.values[name]
        raise AttributeError(name)

    def engine(self) -> EngineConfig:
        """Return the engine's part; raises UsageError for what makes no sense."""
        names = {field.name for field in fields(EngineConfig)} & set(_BY_NAME)
        return EngineConfig(**{name: self.values[name] for name in sorted(names)})


def load_config(
    file: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> DaemonConfig:
    """Return the configuration: a flag counts more than the environment, that more than the file.

    Parameters
    ----------
    file : path-like, optional
        TOML with the options at its top level.
    environment : mapping, optional
        ``os.environ`` when None.
    flags : mapping, optional
        By option name; None as a value: not given.

    Raises
    ------
    UsageError
        For a name that is not in the table, with the nearest one, or a value that is none.
    CapabilityError
        For a value that is known, and cannot be had here.
    """
    values = {option.name: option.default for option in OPTIONS}
    origins = dict.fromkeys(values, "default")
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    sources = (
        ("file", _from_file(file) if file is not None else {}),
        ("environment", _from_environment(os.environ if environment is None else environment)),
        ("flag", given),
    )
    for origin, source in sources:
        for name, value in source.items():
            values[name] = _parsed(name, value, origin)
            origins[name] = origin
    config = DaemonConfig(values, origins)
    config.engine()
    for name, low, high in (("max_clients", 1, 4096), ("metrics_port", 0, 65535)):
        _bounds(name, values[name], low, high)
    return config


def _bounds(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} of {value}", code="config", remedy=f"pass {low} .. {high}")


def _from_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise UsageError(
            f"cannot read {os.fspath(file)!r} ({error.strerror})", code="config", remedy="check its path and rights"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{os.fspath(file)!r} is no TOML: {error}", code="config", remedy="correct it") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith(PREFIX)} - {FILE_VARIABLE}
    return {name.removeprefix(PREFIX).lower(): environment[name] for name in names}


def _parsed(name: str, value: object, origin: str) -> Any:
    option = _BY_NAME.get(name)
    if option is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        raise UsageError(
            f"no option {name!r} ({origin})",
            code="option",
            remedy=f"did you mean {near[0]!r}?" if near else "see `devipc hicache serve --help`",
        )
    try:
        return option.parse(value)
    except ValueError as error:
        raise UsageError(f"{name} = {value!r} ({origin})", code="option", remedy=str(error)) from None


def option_table() -> str:
    """Return the table of all options as Markdown, for the manual."""
    lines = ["| option | value | default | |", "|---|---|---|---|"]
    for option in OPTIONS:
        kind = option.kind.replace("|", ", ")
        lines.append(f"| `{option.name}` | {kind} | `{option.shown}` | {option.help} |")
    return "\n".join(lines) + "\n"
