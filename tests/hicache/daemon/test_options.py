"""One table of settings: file, environment and flags, who counts more, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from devipc.errors import CapabilityError, UsageError
from devipc.hicache.daemon.options import OPTIONS, PREFIX, load_config, option_table, parse_size
from devipc.hicache.engine import EngineConfig


def test_a_policy_that_needs_a_storage_tier_is_refused_from_wherever_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "hicache.toml"
    file.write_text('write_policy = "buffer_only"')
    name = "write_policy"
    sources: list[dict[str, Any]] = [
        {"file": file, "environment": {}},
        {"environment": {PREFIX + name.upper(): "buffer_only"}},
        {"environment": {}, "flags": {name: "buffer_only"}},
    ]
    for source in sources:
        with pytest.raises(CapabilityError) as caught:
            load_config(**source)
        assert caught.value.code == "no_storage"


def test_a_flag_counts_more_than_the_environment_and_that_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hicache.toml"
    file.write_text('tier_nbytes = "2GiB"\nslab_nbytes = 1048576\nmax_ops = 7\nallow_uids = [1000, 1001]\n')
    environment = {PREFIX + "SLAB_NBYTES": "2MiB", PREFIX + "MAX_OPS": "8", "PATH": "x", PREFIX + "LAYER_GROUPS": "1,3"}
    config = load_config(file, environment=environment, flags={"max_ops": "9", "device": None})
    assert (config.tier_nbytes, config.slab_nbytes, config.max_ops) == (2 * 2**30, 2 * 2**20, 9)
    assert config.allow_uids == (1000, 1001)
    assert {name: config.origins[name] for name in ("tier_nbytes", "slab_nbytes", "max_ops", "device")} == {
        "tier_nbytes": "file",
        "slab_nbytes": "environment",
        "max_ops": "flag",
        "device": "default",
    }
    assert config.engine() == EngineConfig(
        tier_nbytes=2 * 2**30, slab_nbytes=2 * 2**20, max_ops=9, kept_percent=50, layer_groups=(1, 3)
    )


@pytest.mark.parametrize(
    ("file", "environment", "says"),
    [
        ("tier_bytes = 1", {}, "did you mean 'tier_nbytes'"),
        ("", {PREFIX + "MAX_OP": "1"}, "did you mean 'max_ops'"),
        ("", {PREFIX + "QQQQQQQ": "1"}, "see `devipc hicache serve --help`"),
        ("[engine]\nmax_ops = 1", {}, "no option 'engine' (file)"),
        ("max_ops = 1.5", {}, "pass an integer"),
        ("max_ops = true", {}, "pass an integer"),
        ("pin_required = 2", {}, "pass true or false"),
        ('tier_nbytes = "2 gallons"', {}, "pass bytes"),
        ("tier_nbytes = 0", {}, "at least 1"),
        ("stuck_s = -1", {}, "pass seconds"),
        ("stuck_s = nan", {}, "pass seconds"),
        ('write_policy = "never"', {}, "pass one of write_through"),
        ("metrics_port = 70000", {}, "0 .. 65535"),
        ("max_clients = 0", {}, "pass 1 .."),
        ("kept_percent = 91", {}, "0 .. 90"),
        ("socket = 3", {}, "pass text"),
        ("max_ops =", {}, "is no TOML"),
    ],
)
def test_what_is_not_in_the_table_is_refused(tmp_path: Path, file: str, environment: dict[str, str], says: str) -> None:
    path = tmp_path / "hicache.toml"
    path.write_text(file)
    with pytest.raises(UsageError) as caught:
        load_config(path, environment=environment)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("1k", 1024), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("20gb", 20 * 2**30), (7, 7), ("1T", 2**40)],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "k", "1kk", "-", "1e999", "0x10", "1 mile"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="pass bytes"):
        parse_size(text)


def test_every_option_can_be_given_as_its_default_is_shown() -> None:
    """Defaults survive the way through the environment, so that what the manual shows can be pasted."""
    rows = [line.split(" | ") for line in option_table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{option.name}`" for option in OPTIONS]
    shown = {option.name: option.shown for option in OPTIONS}
    environment = {PREFIX + name.upper(): text for name, text in shown.items() if text not in ("empty", "none")}
    assert load_config(environment=environment).values == load_config(environment={}).values
