"""Settings: read once, a bad one fails at start and is named."""

from dataclasses import FrozenInstanceError, fields
from datetime import timedelta

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle
from celery_lifecycle import config as config_module
from celery_lifecycle.config import Config, read_config
from celery_lifecycle.errors import ConfigurationError


def test_without_settings_the_documented_defaults_stand():
    config = read_config({})
    assert (config.backup_alarm, config.poll_interval, config.max_memory_strikes) == (30, 0.2, 3)
    assert (config.strike_delay, config.strike_delay_max, config.table_prefix) == (30, 300, "lifecycle_")
    assert (config.lease_ms, config.doubt_ms, config.renew_every) == (20_000, 5_000, 5)
    assert (config.dispatch_window, config.chain_length, config.lock_timeout) == (1000, 50, 5)


def test_without_a_database_the_embedded_default_is_used_and_makes_its_own_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read_config({})
    assert config.embedded
    assert config.migrates_itself
    assert config.url == f"sqlite:///{tmp_path}/lifecycle.db"
    named = read_config({"database_url": "sqlite:///x.db"})
    assert (named.embedded, named.migrates_itself) == (False, False)
    assert read_config({"database_url": "sqlite:///x.db", "auto_migrate": True}).migrates_itself


def test_an_unknown_setting_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"lifecycle_poll_intervall.*lifecycle_poll_interval"):
        read_config({"poll_intervall": 1})


@pytest.mark.parametrize("name", sorted(config_module._RANGES))
def test_a_number_out_of_range_is_an_error_that_names_setting_value_and_range(name):
    low, high = config_module._RANGES[name]
    for bad in (low - 1, high + 1, "many", True, [], float("nan")):
        with pytest.raises(ConfigurationError, match=rf"lifecycle_{name} is .*from {low:.15g} to {high:.15g}"):
            read_config({name: bad})
    assert getattr(read_config({name: low}), name) == low
    assert getattr(read_config({name: high}), name) == high


def test_durations_are_seconds_timedeltas_or_text_from_the_environment():
    assert read_config({"backup_alarm": timedelta(minutes=1)}).backup_ms == 60_000
    assert read_config({"poll_interval": "0.5", "claim_batch": "10"}).poll_interval == 0.5
    with pytest.raises(ConfigurationError, match="whole number"):
        read_config({"claim_batch": 10.5})


@pytest.mark.parametrize("bad", ["1x", "a-b", "a.b", "x" * 32, "", "ä", 5])
def test_a_table_prefix_is_an_identifier(bad):
    with pytest.raises(ConfigurationError, match="lifecycle_table_prefix"):
        read_config({"table_prefix": bad})


@pytest.mark.parametrize(("name", "bad"), [("database_url", 5), ("auto_migrate", "yes")])
def test_a_setting_of_another_type_is_refused(name, bad):
    with pytest.raises(ConfigurationError, match=f"lifecycle_{name}"):
        read_config({name: bad})


def test_none_stands_for_the_default():
    assert read_config({"backup_alarm": None}) == Config()


def test_settings_cant_be_changed_after_they_were_read():
    with pytest.raises(FrozenInstanceError):
        read_config({}).backup_alarm = 5


def test_every_number_has_a_range_and_every_setting_a_sentence():
    for field in fields(Config):
        assert f"        {field.name}: " in (Config.__doc__ or ""), field.name
        assert field.name in config_module._RANGES or field.type in ("str", "bool | None"), field.name


def test_patience_is_never_shorter_than_the_backup_alarm():
    assert read_config({"backup_alarm": 600, "patience_max": 300}).patience_max_ms == 600_000


def configured(namespace: str | None, **settings: object) -> Lifecycle:
    app = Celery("shop", set_as_current=False)
    app.config_from_object(type("Settings", (), settings), namespace=namespace)
    return Lifecycle(app)


@pytest.mark.parametrize("namespace", ["SHOP", "CELERY", None])
def test_settings_stand_under_the_namespace_of_the_configuration(namespace):
    prefix = f"{namespace}_" if namespace else ""
    name = f"{prefix}LIFECYCLE_LOCK_TIMEOUT"
    made = configured(namespace, **{name if prefix else name.lower(): 7})
    assert made.config.lock_timeout == 7
    overridden = configured(namespace, **{name if prefix else name.lower(): 7})
    overridden.app.conf.lifecycle_lock_timeout = 8
    assert overridden.config.lock_timeout == 8


@pytest.mark.parametrize("namespace", ["SHOP", "CELERY"])
def test_an_unknown_setting_under_a_namespace_is_an_error_too(namespace):
    with pytest.raises(ConfigurationError, match="lifecycle_nonsense"):
        _ = configured(namespace, **{f"{namespace}_LIFECYCLE_NONSENSE": 1}).config


def test_settings_of_somebody_else_that_lie_beside_a_namespace_are_let_be():
    assert configured("SHOP", SHOP_TIMEZONE="UTC", PETS_LIFECYCLE_STAGES=3).config.lock_timeout == 5
