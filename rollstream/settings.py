"""All settings, read once at the composition root.

Order of rising strength: defaults, `rollstream.toml`, environment variables, command-line options (keywords of
`load_settings`). API keys are never a setting: a model names the *environment variable* that holds its key.
"""

import os
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from rollstream.errors import UsageError
from schemas.values import EpisodeLimits, Sampling

CONFIG_FILE = "rollstream.toml"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingSettings(Sampling):
    """`[models.NAME.sampling]`: as in events, but a misspelt name is refused."""

    model_config = ConfigDict(extra="forbid")


class ModelSettings(Section):
    """`[models.NAME]`: one OpenAI-compatible endpoint under a name that runs and roles refer to."""

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str = ""
    """The id sent to the server; empty means the section's own name."""
    api: Literal["chat", "responses"] = "chat"
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the key. The key itself is never in a file or an event."""
    sampling: SamplingSettings = SamplingSettings()
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """One call, from request to the last byte."""
    max_retries: Annotated[int, Field(ge=0)] = 4
    """Retries of one call inside the episode: on 408, 409, 429, 5xx and connection errors, with exponential back-off."""


class Defaults(Section):
    """`[defaults]`: what a bare task on `tasks.in` leaves out."""

    environment: str | None = None
    harness: str = "chat"
    model: str = "default"
    run: str | None = None
    attempts: Annotated[int, Field(ge=1, le=10_000)] = 1
    dataset: str = "adhoc"
    agent_ref: dict[str, str] = {}
    """NeMo Gym `agent_ref.name` -> environment."""


class Limits(Section):
    """Limits per episode, by the field's own names. Reaching an agent limit is an outcome; passing others is retryable."""

    max_concurrent_episodes: Annotated[int, Field(ge=1)] = 256
    """Per worker process."""
    queue_timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    """From fetch to start; null waits for ever."""
    default_episode_timeout_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """From seed to verdict, without queueing and clean-up."""
    cleanup_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    agent_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    max_steps: Annotated[int, Field(ge=1)] = 100
    max_model_tokens: Annotated[int, Field(ge=1)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1024)] = 1_000_000
    """Longest text kept of one message or observation; the rest is cut, with a marker that gives the original size."""
    verification_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0

    def for_episode(self) -> EpisodeLimits:
        """The part that travels with a session."""
        return EpisodeLimits(
            episode_timeout_s=self.default_episode_timeout_seconds,
            agent_timeout_s=self.agent_timeout_seconds,
            max_steps=self.max_steps,
            max_model_tokens=self.max_model_tokens,
            max_output_bytes=self.max_output_bytes,
        )


class KafkaSettings(Section):
    """`[kafka]`: how topics are named and sized, and how workers consume."""

    topic_prefix: str = ""
    """Put before every topic and consumer-group name, so that several installations share one cluster."""
    partitions: Annotated[int, Field(ge=1, le=1000)] = 12
    """Of every topic keyed by session, group or rollout. Frozen at provisioning."""
    replication_factor: Annotated[int, Field(ge=1, le=10)] = 1
    commit_interval_s: Annotated[float, Field(gt=0)] = 0.5
    session_timeout_s: Annotated[float, Field(ge=6)] = 30.0
    drain_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """On SIGTERM, how long running episodes may go on before they are handed back."""
    max_record_bytes: Annotated[int, Field(ge=2**20)] = 16 * 1024 * 1024


class RetrySettings(Section):
    """`[retries]`: how often a stage of an attempt may run in all, and how patiently it is tried again."""

    agent_attempts: Annotated[int, Field(ge=1)] = 4
    verification_attempts: Annotated[int, Field(ge=1)] = 5
    first_delay_s: Annotated[float, Field(ge=0)] = 1.0
    factor: Annotated[float, Field(ge=1)] = 3.0
    most_delay_s: Annotated[float, Field(gt=0)] = 300.0
    budget_per_run: Annotated[int, Field(ge=0)] = 10_000
    """Failures of one run that one worker process schedules again; beyond it they are final."""


class StoreSettings(Section):
    """`[store]`: the projection of the log into DuckDB."""

    publish_interval_s: Annotated[float, Field(gt=0)] = 5.0
    batch_max_records: Annotated[int, Field(ge=1)] = 5_000
    memory_limit_mib: Annotated[int, Field(ge=128)] = 1024
    """What DuckDB may take while it checkpoints; between checkpoints it keeps to 128 MiB."""


class VerifierSettings(Section):
    """`[verifier]`: the killable processes that run graders which may hang."""

    grader_processes: Annotated[int, Field(ge=1)] = 2
    grader_timeout_s: Annotated[float, Field(gt=0)] = 10.0


class Settings(BaseSettings):
    """Everything a process of rollstream needs to know, frozen."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLSTREAM_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        nested_model_default_partial_update=True,
    )

    data_dir: Path = Path(".rollstream")
    """Embedded broker's log, store, blobs, keys."""
    bootstrap_servers: str | None = Field(
        default=None,
        validation_alias=AliasChoices("bootstrap_servers", "KAFKA_BOOTSTRAP_SERVERS", "ROLLSTREAM_BOOTSTRAP_SERVERS"),
    )
    """Null means the embedded broker of `data_dir`."""
    sealing_key: SecretStr | None = None
    """Base64 of 32 bytes. Null means the key file of `data_dir`, generated at first use."""
    defaults: Defaults = Defaults()
    models: dict[str, ModelSettings] = {}
    limits: Limits = Limits()
    kafka: KafkaSettings = KafkaSettings()
    retries: RetrySettings = RetrySettings()
    store: StoreSettings = StoreSettings()
    verifier: VerifierSettings = VerifierSettings()

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _blank_means_embedded(cls, value: object) -> object:
        return value or None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = Path(os.environ.get("ROLLSTREAM_CONFIG", CONFIG_FILE))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)

    def model_named(self, name: str) -> ModelSettings | None:
        """The settings of model `name`, or None if it is not declared.

        `default` always exists: `OPENAI_BASE_URL` (or a local server on port 8000) serves it.
        """
        found = self.models.get(name)
        if name == "default":
            found = found or ModelSettings(model=os.environ.get("OPENAI_MODEL", ""))
            if "base_url" not in found.model_fields_set and (base_url := os.environ.get("OPENAI_BASE_URL")):
                found = found.model_copy(update={"base_url": base_url})
        return found if found is None or found.model else found.model_copy(update={"model": name})


NOT_SETTINGS = frozenset({"ROLLSTREAM_CONFIG", "ROLLSTREAM_CACHE_DIR", "ROLLSTREAM_IMAGE", "ROLLSTREAM_USER"})
"""Variables of ours that say where things are kept or how containers are made."""
_SECRET = ("sealing_key",)


def load_settings(**overrides: Any) -> Settings:
    """Read file and environment, with `overrides` on top.

    Raises:
        UsageError: a setting is malformed; the sentence names it and where it may have come from, and quotes no secret.
    """
    _refuse_unknown_variables()
    named = os.environ.get("ROLLSTREAM_CONFIG")
    if named and not Path(named).is_file():
        raise UsageError(f"expected a settings file at {named}, which ROLLSTREAM_CONFIG names, found none")
    try:
        return Settings(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        where = f"look in {named or CONFIG_FILE}, ROLLSTREAM_* variables and options"
        # What stands under a name that is not ours, or under a secret, may be a key.
        if first["type"] == "extra_forbidden":
            raise UsageError(f"setting {name}: there is no such setting; {where}") from None
        found = "" if name.startswith(_SECRET) else f", found {first['input']!r}"
        raise UsageError(f"setting {name}: {first['msg']}{found}; {where}") from None
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"expected TOML in {named or CONFIG_FILE}, found {error}") from None
    except SettingsError as error:
        raise UsageError(f"{error}: expected JSON in a variable that stands for a whole section") from None


def _refuse_unknown_variables() -> None:
    """A misspelt variable would otherwise be no variable."""
    for variable in os.environ.keys() - NOT_SETTINGS:
        name = variable.upper().removeprefix("ROLLSTREAM_")
        if name != variable.upper() and name.split("__")[0].lower() not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise UsageError(f"variable {variable}: there is no such setting; ROLLSTREAM_ goes before one of {known}")
