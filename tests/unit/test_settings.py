"""Settings: where each may come from, which source wins, and what a mistake looks like."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.errors import UsageError
from rollstream.settings import NOT_SETTINGS, Limits, ModelSettings, SamplingSettings, Settings, load_settings
from schemas.values import EpisodeLimits

SECRET = "secret-canary-4711"


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes `rollstream.toml` into the directory where the test runs."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "rollstream.toml").write_text(text)

    return write


def test_without_any_source_everything_has_a_default(toml: Callable[[str], None]) -> None:
    settings = load_settings()
    assert (settings.data_dir, settings.bootstrap_servers, settings.models) == (Path(".rollstream"), None, {})
    assert settings.limits == Limits()


def test_each_source_wins_over_the_ones_before_it(toml: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def max_steps(**options: object) -> int:
        return load_settings(**options).limits.max_steps

    assert max_steps() == 100
    toml("[limits]\nmax_steps = 1")
    assert max_steps() == 1
    monkeypatch.setenv("ROLLSTREAM_LIMITS__MAX_STEPS", "2")
    assert max_steps() == 2
    assert max_steps(limits={"max_steps": 3}) == 3


def test_one_value_of_a_section_can_be_changed_alone(toml: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    toml("[limits]\nmax_steps = 1\n\n[models.small]\nbase_url = 'http://toml/v1'\nmodel = 'small-1b'")
    monkeypatch.setenv("ROLLSTREAM_LIMITS__MAX_CONCURRENT_EPISODES", "7")
    monkeypatch.setenv("ROLLSTREAM_MODELS__SMALL__BASE_URL", "http://variable/v1")
    settings = load_settings()
    assert (settings.limits.max_steps, settings.limits.max_concurrent_episodes) == (1, 7)
    assert (settings.models["small"].base_url, settings.models["small"].model) == ("http://variable/v1", "small-1b")


def test_an_option_that_is_not_given_changes_nothing(toml: Callable[[str], None]) -> None:
    toml("data_dir = 'there'")
    assert load_settings(data_dir=None).data_dir == Path("there")


def test_another_file_can_be_named(toml: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml("data_dir = 'here'")
    (tmp_path / "other.toml").write_text("data_dir = 'there'")
    monkeypatch.setenv("ROLLSTREAM_CONFIG", "other.toml")
    assert load_settings().data_dir == Path("there")


@pytest.mark.parametrize("name", ["KAFKA_BOOTSTRAP_SERVERS", "ROLLSTREAM_BOOTSTRAP_SERVERS"])
def test_the_broker_is_known_by_its_usual_variable(
    name: str, toml: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml("bootstrap_servers = 'toml:9092'")
    assert load_settings().bootstrap_servers == "toml:9092"
    monkeypatch.setenv(name, "variable:9092")
    assert load_settings().bootstrap_servers == "variable:9092"
    assert load_settings(bootstrap_servers="option:9092").bootstrap_servers == "option:9092"


def test_an_empty_broker_variable_means_the_embedded_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "")
    assert load_settings().bootstrap_servers is None


def test_the_default_model_is_served_where_openais_variables_say(
    toml: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://variable/v1")
    monkeypatch.setenv("OPENAI_MODEL", "gpt-4711")
    model = load_settings().model_named("default")
    assert model is not None
    assert (model.base_url, model.model, model.api_key_env) == ("http://variable/v1", "gpt-4711", "OPENAI_API_KEY")


def test_a_declared_model_is_asked_for_by_its_own_name_unless_it_says_otherwise(toml: Callable[[str], None]) -> None:
    toml("[models.small]\nbase_url = 'http://a/v1'\n\n[models.large]\nbase_url = 'http://b/v1'\nmodel = 'large-70b'")
    settings = load_settings()
    names = ("small", "large", "unknown")
    assert [found and found.model for found in map(settings.model_named, names)] == ["small", "large-70b", None]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bootstrap_server = 'a:1'", "bootstrap_server"),
        ("[limits]\nmax_step = 5", "limits.max_step"),
        ("[models.small]\nurl = 'http://a/v1'", "models.small.url"),
        ("[models.small.sampling]\ntemprature = 0.5", "models.small.sampling.temprature"),
        ("[limits]\nmax_steps = 0", "limits.max_steps"),
        ("[kafka]\npartitions = 'many'", "kafka.partitions"),
        ("[models.small]\napi = 'grpc'", "models.small.api"),
    ],
)
def test_a_mistake_in_the_file_is_told_in_one_sentence_that_names_the_setting(
    text: str, name: str, toml: Callable[[str], None]
) -> None:
    toml(text)
    with pytest.raises(UsageError, match=f"^setting {name}: .*look in rollstream.toml, ROLLSTREAM_") as caught:
        load_settings()
    assert "\n" not in str(caught.value)


def test_a_misspelt_variable_of_a_section_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_LIMITS__MAX_STEP", "3")
    with pytest.raises(UsageError, match=r"setting limits\.max_step: "):
        load_settings()


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(UsageError, match="setting nonsense: "):
        load_settings(nonsense=1)


@pytest.mark.parametrize("name", ["ROLLSTREAM_LIMIT__MAX_STEPS", "ROLLSTREAM_BOOTSTRAP", "ROLLSTREAM_API_KEY"])
def test_a_misspelt_variable_is_refused_and_its_value_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    with pytest.raises(UsageError, match=f"variable {name}: there is no such setting") as caught:
        load_settings()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", sorted(NOT_SETTINGS - {"ROLLSTREAM_CONFIG"}))
def test_variables_that_are_no_settings_are_let_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    load_settings()


@pytest.mark.parametrize(
    "text", [f"[models.small]\napi_key = '{SECRET}'", f"sealing_key = ['{SECRET}']", f"openai_api_key = '{SECRET}'"]
)
def test_a_secret_in_the_wrong_place_is_not_shown(text: str, toml: Callable[[str], None]) -> None:
    toml(text)
    with pytest.raises(UsageError, match="setting ") as caught:
        load_settings()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("raw", [b"[limits\nmax_steps = 1", b"data_dir = '\xff'"])
def test_a_file_that_is_no_toml_is_told_in_one_sentence(raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollstream.toml").write_bytes(raw)
    with pytest.raises(UsageError, match=r"expected TOML in rollstream\.toml, found "):
        load_settings()


def test_a_file_that_was_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_CONFIG", "missing.toml")
    with pytest.raises(UsageError, match=r"expected a settings file at missing\.toml"):
        load_settings()


def test_a_variable_that_stands_for_a_section_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_LIMITS", "{")
    with pytest.raises(UsageError, match="expected JSON"):
        load_settings()


def test_a_default_model_declared_without_a_url_is_still_served_where_openais_variable_says(
    toml: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://variable/v1")
    toml("[models.default]\ntimeout_s = 5")
    model = load_settings().model_named("default")
    assert model is not None
    assert (model.base_url, model.timeout_s, model.model) == ("http://variable/v1", 5, "default")
    toml("[models.default]\nbase_url = 'http://toml/v1'")
    assert load_settings().models["default"].base_url == "http://toml/v1"


def test_the_sealing_key_is_in_no_print_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_SEALING_KEY", SECRET)
    settings = load_settings()
    assert settings.sealing_key is not None
    assert settings.sealing_key.get_secret_value() == SECRET
    for shown in (str(settings), repr(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert SECRET not in shown


def test_a_model_key_is_in_no_setting_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    settings = load_settings()
    assert SECRET not in repr(settings) + repr(settings.model_named("default"))


def test_a_worker_that_cannot_read_its_settings_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "rollstream.toml").write_text("[limits]\nmax_step = 5")
    command = [sys.executable, "-m", "services", "agent_worker"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: setting limits.max_step: ")
    assert ended.stderr.count("\n") == 1


def test_settings_and_their_sections_are_frozen() -> None:
    settings = Settings()
    for section in (settings, settings.limits, settings.kafka, ModelSettings(), SamplingSettings()):
        with pytest.raises(ValueError, match="frozen"):
            section.__setattr__(next(iter(type(section).model_fields)), 1)


def test_the_limits_of_an_episode_travel_under_names_with_units() -> None:
    limits = Limits(
        default_episode_timeout_seconds=1, agent_timeout_seconds=2, max_steps=3, max_model_tokens=4, max_output_bytes=5_000
    )
    assert limits.for_episode() == EpisodeLimits(
        episode_timeout_s=1, agent_timeout_s=2, max_steps=3, max_model_tokens=4, max_output_bytes=5_000
    )
