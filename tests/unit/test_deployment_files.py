"""Compose file, image, Makefile and CI script, as far as they can be judged without an engine to run them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SERVERS = {"postgresql", "redis"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_compose_starts_a_worker_two_beats_and_flower_on_postgresql_and_redis(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    assert set(services) == SERVERS | {"migrate", "worker", "beat", "flower"}
    assert services["beat"]["deploy"]["replicas"] == 2
    assert services["beat"]["command"].startswith("celery -A example.shop beat -S lifecycle")
    assert services["worker"]["command"].startswith("celery -A example.shop worker")
    assert services["flower"]["command"] == "celery -A example.shop lifecycle flower"


def test_in_compose_everything_waits_for_the_migration_and_the_migration_for_the_servers(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    healthy = {server: {"condition": "service_healthy"} for server in SERVERS}
    assert services["migrate"]["command"] == "celery -A example.shop lifecycle migrate"
    assert services["migrate"]["depends_on"] == healthy
    for name in ("worker", "beat", "flower"):
        migrated = {"migrate": {"condition": "service_completed_successfully"}}
        assert services[name]["depends_on"] == healthy | migrated


def test_in_compose_whatever_stays_up_has_a_health_check(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert ("healthcheck" in service) == (name != "migrate"), name


def test_in_compose_all_processes_of_the_shop_are_led_by_the_same_environment(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    environments = [service["environment"] for name, service in services.items() if name not in SERVERS]
    assert all(environment == environments[0] for environment in environments)
    login = services["postgresql"]["environment"]
    credentials = f"{login['POSTGRES_USER']}:{login['POSTGRES_PASSWORD']}@postgresql/{login['POSTGRES_DB']}"
    assert environments[0]["DATABASE_URL"] == f"postgresql+psycopg://{credentials}"


def test_docker_compose_accepts_the_file() -> None:
    try:
        command = ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
        there = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if there.returncode != 0:
        pytest.skip("docker's compose plugin is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image_installs_extras_that_exist_from_files_that_reach_the_engine() -> None:
    dockerfile = (ROOT / "example" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", dockerfile)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    sent = re.findall(r"^!(.*)", (ROOT / "example" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    assert sorted(copied) == sorted(sent)


def test_make_help_lists_every_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (commands,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"^  make (\w+)", done.stdout, re.MULTILINE) == commands.split()


def test_make_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"'\.\[(.*)\]'", (ROOT / "Makefile").read_text()):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_ci_runs_the_test_command_and_requires_services() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "export LIFECYCLE_REQUIRE_SERVICES=1" in lines
    assert lines[-1] == "make test"
