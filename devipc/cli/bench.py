"""``devipc bench``: what moving pages costs here, beside floors that are measured in the same run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from devipc.cli.tables import show_table
from devipc.errors import CapabilityError

__all__ = ["command"]

_URL_HELP = "Whose cache: inproc: for this process, unix:/path of a daemon, or daemon for one of its own."
_MIB = 2**20


@click.group()
def command() -> None:
    """Measure what moving pages costs here. Every figure stands beside a floor of the same run."""


def _common(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--backend", default="host", show_default=True, help="See `devipc backends`."),
        click.option("--device", default="", help="Identity of the device; the backend's first when empty."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."),
        click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON document."),
    ):
        function = option(function)
    return function


def _serving(function: Callable[..., None]) -> Callable[..., None]:
    return click.option("--url", default="inproc:", show_default=True, help=_URL_HELP)(function)


def _repetitions(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--repetitions",
        default=count,
        show_default=True,
        type=click.IntRange(1),
        help="Of each measurement, after a warm-up.",
    )


def _some(name: str, values: Iterable[str], default: str, what: str) -> Callable[..., Any]:
    """Return an option that takes some of ``values``, with commas between."""
    known = tuple(values)

    def parse(_ctx: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
        chosen = tuple(value.split(","))
        if unknown := [one for one in chosen if one not in known]:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
        return chosen

    return click.option(name, default=default, show_default=True, callback=parse, help=f"{what}: {', '.join(known)}.")


@contextmanager
def _device(backend: str, uuid: str) -> Iterator[tuple[Any, Any]]:
    missing = [name for name in ("msgspec", "numpy") if find_spec(name) is None]
    if missing:
        raise CapabilityError(
            f"measuring needs {', '.join(missing)}", code="extra", remedy="pip install 'devipc[hicache]'"
        )
    from devipc.registry import load_backend

    found = load_backend(backend)
    device = found.open_device(uuid or None)
    try:
        for name, part in (("memory", device.memory), ("transfer", device.transfer)):
            if part is None:
                answer = device.capabilities()[name]
                raise CapabilityError(f"the device has no {name}: {answer.reason}", remedy=answer.remedy)
        yield found, device
    finally:
        device.close()


def _report(
    what: str,
    backend: Any,
    device: Any,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    columns: tuple[str, ...],
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    from devipc.bench.facts import machine, write

    document = {
        "schema": f"devipc.bench.{what}/1",
        "backend": backend.name,
        "device": {"uuid": device.info.uuid, "name": device.info.name},
        "facts": dict(backend.facts()),
        "machine": machine(),
        "settings": settings,
        "results": rows,
    }
    if out is not None:
        write(out, document)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        show_table(what, columns, [[str(row.get(column, "")) for column in columns] for row in rows])


@command.command()
@_common
@_serving
@_repetitions(30)
@_some("--geometry", ("llama", "tp4", "mla"), "llama", "Rows of a token, some of")
@_some("--allocation", ("one", "layers", "classic"), "one", "Allocations of the pool, some of")
@_some("--page-tokens", ("1", "16", "32", "64", "128"), "64,16,1", "Tokens in a page, some of")
@_some("--shape", ("random", "runs"), "random", "Which pages, some of")
@click.option("--tokens", default="2048", show_default=True, help="Tokens of one operation; several with commas.")
@click.option("--in-flight", default="1", show_default=True, help="Operations at a time; several with commas.")
@click.option("--rows", default=0, help="Tokens in the pool; when 0, room for all at a time and a page.")
@click.option("--baselines", default=0, show_default=True, help="Repetitions of a loop of copies and of one batch.")
@click.option("--extent-pages", default=16, show_default=True, type=click.IntRange(1), help="Pages in a host extent.")
def transfer(
    *,
    backend: str,
    device: str,
    as_json: bool,
    out: Path | None,
    url: str,
    repetitions: int,
    geometry: tuple[str, ...],
    allocation: tuple[str, ...],
    page_tokens: tuple[str, ...],
    shape: tuple[str, ...],
    tokens: str,
    in_flight: str,
    rows: int,
    baselines: int,
    extent_pages: int,
) -> None:
    """Back pages up and restore them, one way and both, beside contiguous copies of the same bytes."""
    with _device(backend, device) as (found, opened):
        from devipc.bench.transfer import Case, measure_cases

        sizes = [int(size) for size in tokens.split(",")]
        at_once = [int(count) for count in in_flight.split(",")]
        every = itertools.product(geometry, allocation, page_tokens, sizes, shape, at_once)
        cases = [Case(g, a, int(p), size, s, count) for g, a, p, size, s, count in every]
        results = list(
            measure_cases(
                url,
                found,
                opened,
                cases,
                rows=rows,
                repetitions=repetitions,
                slow_repetitions=baselines,
                extent_pages=extent_pages,
            )
        )
        settings = {"url": url, "rows": rows, "repetitions": repetitions, "extent_pages": extent_pages}
        columns = ("geometry", "allocation", "shape", "page_tokens", "tokens", "in_flight", "method", "direction")
        figures = ("share_of_floor", "gb_per_s", "floor_gb_per_s", "median_ms", "p99_ms", "first_layer_share")
        _report("transfer", found, opened, settings, results, columns + figures, as_json=as_json, out=out)


@command.command()
@_common
@_serving
@_repetitions(1000)
def control(*, backend: str, device: str, as_json: bool, out: Path | None, url: str, repetitions: int) -> None:
    """Ask without moving much, beside a bare round trip between two processes."""
    with _device(backend, device) as (found, opened):
        from devipc.bench.control import measure_control

        results = measure_control(url, found, opened, repetitions=repetitions)
        settings = {"url": url, "repetitions": repetitions}
        columns = ("request", "median_us", "p99_us", "median_over_bare", "p99_over_bare")
        _report("control", found, opened, settings, results, columns, as_json=as_json, out=out)


@command.command()
@_common
@_repetitions(1000)
def sync(*, backend: str, device: str, as_json: bool, out: Path | None, repetitions: int) -> None:
    """Hand over by fences between two processes, beside a bare round trip."""
    with _device(backend, device) as (found, opened):
        from devipc.bench.sync import measure_sync

        results = measure_sync(found.name, repetitions=repetitions)
        columns = ("what", "median_us", "p99_us", "median_over_bare", "p99_over_bare")
        _report("sync", found, opened, {"repetitions": repetitions}, results, columns, as_json=as_json, out=out)


@command.command()
@_common
@_serving
@_some("--model", ("decode", "decode_launched", "prefill"), "decode,prefill", "What runs in the other process, some of")
@click.option("--tokens", default=2048, show_default=True, help="Tokens of one operation.")
@click.option("--windows", default=6, show_default=True, help="Quiet and busy windows, of one second each.")
@click.option("--gather/--no-gather", default=True, help="Measure a gather kernel of this process as well.")
def interference(
    *,
    backend: str,
    device: str,
    as_json: bool,
    out: Path | None,
    url: str,
    model: tuple[str, ...],
    tokens: int,
    windows: int,
    gather: bool,
) -> None:
    """Slow down a model in another process by moving pages, and see by how much. Needs torch."""
    if find_spec("torch") is None:
        raise CapabilityError("the model needs torch", code="extra", remedy="pip install 'devipc[torch]'")
    with _device(backend, device) as (found, opened):
        from devipc.bench.interference import measure_interference

        results = measure_interference(
            url, found, opened, kinds=model, tokens=tokens, rows=3 * tokens, windows=windows, gather=gather
        )
        settings = {"url": url, "tokens": tokens, "windows": windows}
        columns = ("model", "moved_by", "mean_over_quiet", "p99_over_quiet", "quiet_mean_ms", "gb_per_s")
        _report("interference", found, opened, settings, results, columns, as_json=as_json, out=out)


@command.command()
@_common
@click.option("--tier-mib", default=1024, show_default=True, help="Host memory of the tier.")
@click.option("--rows", default=4096, show_default=True, type=click.IntRange(2048), help="Tokens in the pool.")
@_some("--allocation", ("one", "layers", "classic"), "one", "Allocations of the pool, one of")
def footprint(
    *,
    backend: str,
    device: str,
    as_json: bool,
    out: Path | None,
    tier_mib: int,
    rows: int,
    allocation: tuple[str, ...],
) -> None:
    """Compare an engine process with one that only registers and opens the same memory."""
    with _device(backend, device) as (found, opened):
        from devipc.bench.footprint import measure_footprint

        results = measure_footprint(found, opened, tier_nbytes=tier_mib * _MIB, rows=rows, allocation=allocation[0])
        settings = {"tier_mib": tier_mib, "rows": rows, "allocation": allocation[0]}
        columns = ("process", "VmRSS_nbytes", "RssAnon_nbytes", "own_rss_over_control_nbytes", "device_nbytes")
        more = ("device_over_control_nbytes", "torch_loaded")
        _report("footprint", found, opened, settings, results, columns + more, as_json=as_json, out=out)


@command.command()
@_common
@click.option(
    "--model",
    type=click.Choice(["tiny", "smollm2", "llama-3-8b"]),
    default="tiny",
    show_default=True,
    help="Random and small; real and small; random, and of the shape of Llama-3-8B.",
)
@_some("--deployment", ("none", "inproc", "daemon", "process"), "none,inproc,daemon,process", "Some of")
@click.option("--deaths/--no-deaths", default=True, help="Kill the runtime's process and a daemon as well.")
def engine(
    *, backend: str, device: str, as_json: bool, out: Path | None, model: str, deployment: tuple[str, ...], deaths: bool
) -> None:
    """Run a language model without a cache and with each deployment of it, in turn. Needs torch."""
    if find_spec("torch") is None:
        raise CapabilityError("the model needs torch", code="extra", remedy="pip install 'devipc[torch]'")
    with _device(backend, device) as (found, opened):
        from dataclasses import asdict

        from devipc.bench.engine import measure_engine
        from devipc.bench.engines import MODELS

        results = measure_engine(found, opened, model=model, deployments=deployment, deaths=deaths)
        settings = {"model": model, **asdict(MODELS[model])}
        columns = ("deployment", "died", "ttft_computed_ms", "ttft_restored_ms", "itl_p50_ms", "itl_p99_ms")
        more = ("itl_busy_over_quiet_p50", "itl_busy_over_quiet_p99", "scheduler_cpu_us", "longest_step_ms")
        _report("engine", found, opened, settings, results, columns + more, as_json=as_json, out=out)
