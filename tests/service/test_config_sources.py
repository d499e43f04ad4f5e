"""One precedence: a flag, the environment, the file, the default; every mistake is named."""

import tomllib
from pathlib import Path

import pytest

from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import ServiceConfig
from stemserve.service.config.sources import (
    Setting,
    known_keys,
    read_settings,
    settings_text,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "stemserve.toml"
    path.write_text(text)
    return path


def flag(value: object) -> Setting:
    return Setting(value=value, source="--port")


def test_without_any_source_the_defaults_are_in_force() -> None:
    settings = read_settings(file=None, environment={"PATH": "/bin"}, flags={})
    assert settings.config == ServiceConfig()
    assert not settings.sources


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nport = 1001\nhealth_port = 1002\nmetrics_port = 1003\n")
    environment = {"STEMSERVE__SERVER__PORT": "2001", "STEMSERVE__SERVER__HEALTH_PORT": "2002"}
    settings = read_settings(file=file, environment=environment, flags={"server.port": flag(3001)})
    server = settings.config.server
    assert (server.port, server.health_port, server.metrics_port) == (3001, 2002, 1003)
    assert settings.sources == {
        "server.port": "--port",
        "server.health_port": "STEMSERVE__SERVER__HEALTH_PORT",
        "server.metrics_port": str(file),
    }


def test_the_variables_that_kubernetes_sets_beside_a_service_are_not_ours() -> None:
    environment = {"STEMSERVE_PORT": "tcp://10.0.0.1:50051", "STEMSERVE_SERVICE_HOST": "10.0.0.1"}
    assert read_settings(file=None, environment=environment, flags={}).config == ServiceConfig()


def test_sizes_and_lists_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    file = written(tmp_path, '[worker]\nkv_memory = "1.5G"\n')
    environment = {"STEMSERVE__AUTH__JWT__ALGORITHMS": '["ES256"]', "STEMSERVE__MODEL": "./m"}
    config = read_settings(file=file, environment=environment, flags={}).config
    assert config.worker.kv_memory == 3 << 29
    assert config.auth.jwt.algorithms == ("ES256",)
    assert config.model == "./m"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[server]\nprot = 1", r"server.prot \(.*toml\): there is no such key; did you mean port"),
        ("port = 1", r"port \(.*toml\): there is no such key; did you mean server.port"),
        ("[server]\nmax_items = 1", r"server.max_items .*; did you mean limits.max_items"),
        ("[sever]\nport = 1", r"sever \(.*toml\): there is no such key; did you mean server"),
        ("[server]\nport = 'x'", r"server.port \(.*toml\): Input should be a valid integer"),
        ("[server]\nport = 70000", r"server \(.*toml\): port 70000 is not in 0 .. 65535"),
        ("server = 3", r"server \(.*toml\): is a table: write \[server\]"),
        ("[worker]\nkv_memory = 'lots'", r"worker.kv_memory .*: 'lots' is not a size such as 512M"),
        ("[limits]\nmax_items = 0", r"limits .*max_items must be in 1 \.\."),
        ("[limits]\nmax_items = 2147483648", r"limits .*max_items must be in 1 \.\."),
        ("[server\n", r"is not TOML"),
        ("[tenants.a]\nwight = 2", r"tenants.a.wight \(.*toml\): there is no such key"),
    ],
)
def test_a_mistake_in_the_file_names_the_key_and_the_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_settings(file=written(tmp_path, text), environment={}, flags={})


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    environment = {"STEMSERVE__SERVER__PORT": "many"}
    with pytest.raises(ConfigError, match=r"server.port \(STEMSERVE__SERVER__PORT\)"):
        read_settings(file=None, environment=environment, flags={})
    with pytest.raises(ConfigError, match="server is a value, not a table"):
        environment = {"STEMSERVE__SERVER": "1", "STEMSERVE__SERVER__PORT": "2"}
        read_settings(file=None, environment=environment, flags={})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none.toml: No such file"):
        read_settings(file=tmp_path / "none.toml", environment={}, flags={})


def test_what_is_printed_is_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    first = read_settings(
        file=written(tmp_path, "[worker]\nthreads = 3\n"),
        environment={"STEMSERVE__LIMITS__MAX_ITEMS": "7"},
        flags={"server.port": flag(9)},
    )
    text = settings_text(first)
    assert "max_items = 7  # STEMSERVE__LIMITS__MAX_ITEMS" in text
    assert "port = 9  # --port" in text
    again = read_settings(file=written(tmp_path, text), environment={}, flags={})
    assert again.config == first.config


def test_every_key_is_printed() -> None:
    text = settings_text(read_settings(file=None, environment={}, flags={}))
    tables = tomllib.loads(text)
    for key in known_keys():
        name = key.rpartition(".")[2]
        assert f"{name} = " in text or f"# {name}" in text
    assert tables["server"]["port"] == 50051


def test_a_tenant_without_settings_of_its_own_is_there(tmp_path: Path) -> None:
    jwks = tmp_path / "jwks.json"
    jwks.write_text("{}")
    file = tmp_path / "settings.toml"
    file.write_text(
        f'''
        [auth]
        mode = "jwt"
        jwt = {{jwks = "{jwks}", issuer = "us", audience = "stemserve"}}
        [tenants.mail]
        [server]
        '''
    )
    environment = {"STEMSERVE__SERVER__PORT": "7"}
    settings = read_settings(file=file, environment=environment, flags={})
    assert settings.config.tenants.keys() == {"mail"}
    assert settings.config.server.port == 7
