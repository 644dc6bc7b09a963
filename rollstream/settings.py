"""All settings, read once at the composition root.

Order of rising strength: defaults, `rollstream.toml`, environment variables, command-line options (keywords of
`load_settings`). API keys are never a setting: a model names the *environment variable* that holds its key.
"""

import os
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from rollstream.errors import UsageError
from schemas.sandbox import SandboxSpec
from schemas.values import EpisodeLimits, Name, Sampling

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
    price_per_million_input: Annotated[float, Field(ge=0)] | None = None
    """Of a million prompt tokens, in whatever currency; used by reports alone, at the time they are made."""
    price_per_million_output: Annotated[float, Field(ge=0)] | None = None
    price_per_million_cached: Annotated[float, Field(ge=0)] | None = None
    """Of a million prompt tokens that the server had cached; null means the price of input."""


class Defaults(Section):
    """`[defaults]`: what a bare task on `tasks.in` leaves out."""

    environment: str | None = None
    harness: str = "chat"
    model: str = "default"
    sandbox: Name | None = None
    """Backend of a run that takes sandboxes; null means `sandboxes.provider`, else this machine's default."""
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
    """Of a session, from fetch to start; null waits for ever."""
    default_episode_timeout_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """From seed to verdict, without queueing and clean-up; passing it is retryable."""
    cleanup_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    agent_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    max_steps: Annotated[int, Field(ge=1)] = 100
    max_model_tokens: Annotated[int, Field(ge=1)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1024)] = 1_000_000
    """Longest text kept of one message or observation; the rest is cut, with a marker that gives the original size."""
    verification_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Of environments that do not say how long theirs may take."""
    step_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    """One action of an episode, carried out by its environment; passing it is retryable."""

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
    idempotent_producer: bool = False
    """Let the broker drop what a producer repeats after a lost answer. Correctness does not need it, since repeated events have
    the same id; brokers may refuse it; and aiokafka's can wedge for good on a sequence error (its issue 1017)."""


class RetrySettings(Section):
    """`[retries]`: how often a stage of an attempt may run in all, and how patiently it is tried again."""

    agent_attempts: Annotated[int, Field(ge=1)] = 4
    verification_attempts: Annotated[int, Field(ge=1)] = 5
    first_delay_s: Annotated[float, Field(ge=0)] = 1.0
    factor: Annotated[float, Field(ge=1)] = 3.0
    most_delay_s: Annotated[float, Field(gt=0)] = 300.0
    budget_per_run: Annotated[int, Field(ge=0)] = 10_000
    """Failures of one run that one worker process schedules again; beyond it they are final."""


DEFAULT_POOL = "default"
RESERVED_POOLS = frozenset({DEFAULT_POOL, "retries", "actions"})
"""The pool that is always there, and names that would make one consumer group of two."""

PoolName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
"""Part of consumer groups, file names and variables, whose names are read in lower case."""


class PoolSettings(Section):
    """`[pools.NAME]`: a fleet of workers of its own. It serves what matches in everything that it names; the rest is any."""

    environments: list[Name] = []
    harnesses: list[Name] = []
    sandboxes: list[Name] = []

    @model_validator(mode="after")
    def _claims_something_once(self) -> Self:
        claims = self.claims()
        if not any(claims.values()):
            raise ValueError(
                f"expected a pool to name one of {', '.join(claims)}, found none: it would serve nothing of its own"
            )
        for names in claims.values():
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"expected every name once in a pool, found {repeated[0]} twice")
        return self

    def claims(self) -> dict[str, list[str]]:
        return {"environments": self.environments, "harnesses": self.harnesses, "sandboxes": self.sandboxes}


def _contested(first: PoolSettings, second: PoolSettings) -> str | None:
    """The name that two pools both claim for the same work; None if something that both name keeps them apart."""
    shared = ""
    for mine, theirs in zip(first.claims().values(), second.claims().values(), strict=True):
        both = [name for name in mine if name in theirs]
        if mine and theirs and not both:
            return None
        shared = shared or (both[0] if both else "")
    return shared or None


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


class PluginSettings(Section):
    """`[plugins]`: environments and harnesses of your own. Paths are relative to where the process is started."""

    environments: dict[str, str] = {}
    """Name -> path.py:Class."""
    harnesses: dict[str, str] = {}
    """Name -> path.py:Class."""


class HttpEnvironmentSettings(Section):
    """`[environments.http.NAME]`: an environment called NAME that runs on a server of your own."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Base address; `/seed`, `/step`, `/verify` and `/close` are put after it."""
    version: str = "1"
    """Raise it when the same episode could get another reward."""
    public_fields: list[str] = []
    """Fields of a row that `/seed` gets; all others go to `/verify` only."""
    success_threshold: float = 1.0
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """One request, from connecting to the last byte."""
    token_env: str = ""
    """Name of the environment variable with a bearer token for the server; empty sends none."""


class SweBenchSettings(Section):
    """`[environments.swe_bench]`: the boxes of SWE-bench instances, which say nothing about them."""

    image_template: str = "swebench/sweb.eval.x86_64.{id}:latest"
    """Of instances that name no image. `{id}` is the instance's as Docker Hub has it: in lower case, `__` as `_1776_`;
    `{instance_id}` is as it stands."""
    cpus: Annotated[float, Field(gt=0)] = 2.0
    memory_mib: Annotated[int, Field(ge=64)] = 8192
    disk_mib: Annotated[int, Field(ge=8)] = 4096
    """Of the repository; it counts as memory."""
    pids: Annotated[int, Field(ge=16)] = 1024
    test_timeout_s: Annotated[float, Field(gt=0)] = 1800.0

    @field_validator("image_template")
    @classmethod
    def _has_no_other_placeholder(cls, template: str) -> str:
        try:
            template.format(id="", instance_id="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"expected no placeholders but {{id}} and {{instance_id}}, found {error}") from None
        return template


class EnvironmentSettings(Section):
    """`[environments]`: environments that are declared rather than installed, and what is set of shipped ones."""

    http: dict[str, HttpEnvironmentSettings] = {}
    swe_bench: SweBenchSettings = SweBenchSettings()


class BlobSettings(Section):
    """`[blobs]`: where that is kept which is too long for a record."""

    url: str | None = None
    """A directory or any fsspec URL; null means `blobs` in the data directory."""
    inline_limit_bytes: Annotated[int, Field(ge=256)] = 8192
    """Longest sealed ticket or receipt that travels inside an event, and longest artifact or file that is handed in so."""


class EnvSettings(Section):
    """`[env]`: how an env_worker carries out actions."""

    action_lanes: Annotated[int, Field(ge=1)] = 256
    """Actions at once, per worker process."""
    world_cache_mib: Annotated[int, Field(ge=0)] = 64
    """Worlds kept so that their next action finds them open."""
    max_open_sessions: Annotated[int, Field(ge=1)] = 1024
    """Sessions whose environment holds something outside its world (a box, a connection) in this worker process; more wait
    in the log."""


class WarmSettings(Section):
    """`[sandboxes.warm.NAME]`: boxes of one kind that wait, started, for a session that asks for such a one."""

    count: Annotated[int, Field(ge=1, le=100)] = 1
    """In every process of the worker."""
    worker: Literal["agent_worker", "verifier_worker"] = "verifier_worker"
    provider: Name | None = None
    """Null means `sandboxes.provider`, else this machine's default."""
    spec: SandboxSpec = SandboxSpec()
    """Sessions get one if theirs is the same but for variables, files and a shorter time."""
    idle_seconds: Annotated[float, Field(ge=1)] = 1800.0
    """How long one waits before it is replaced."""

    @field_validator("spec")
    @classmethod
    def _has_no_gateway(cls, spec: SandboxSpec) -> SandboxSpec:
        if spec.network == "gateway":
            raise ValueError("expected another network for warm sandboxes than gateway, whose socket is each session's own")
        return spec


class SandboxSettings(Section):
    """`[sandboxes]`: where commands of agents and of verification run."""

    provider: str | None = None
    """`docker`, `bubblewrap`, `local`, or a plug-in's name: for runs that name none, and reaped from the start. Others are
    brought in by the sessions that name them, and by leases of this host that are still open."""
    image: str | None = None
    """Of boxes whose task names none, where the provider has images; null is what `make sandbox-image` makes."""
    agent: SandboxSpec = SandboxSpec(network="gateway")
    """`[sandboxes.agent]`: the box of a harness that works in one, where the environment describes none."""
    unsafe_local: bool = False
    """Lets `local` run commands of agents with the rights of whoever runs the worker."""
    lease_seconds: Annotated[float, Field(ge=1)] = 600.0
    """How long a box outlives its last use before anybody may reap it."""
    reap_interval_seconds: Annotated[float, Field(gt=0)] = 30.0
    warm: dict[str, WarmSettings] = {}


class CliSettings(Section):
    """`[harnesses.claude_code]`, `[harnesses.codex]`: a command-line agent that works in the box."""

    path: str = ""
    """Of the program on the machine of the boxes, or of a directory that holds it, itself or in `bin`: mounted read-only into
    every box of this harness. Empty: the image brings the program."""
    args: list[str] = []
    """More options of the program, put after our own."""
    env: dict[str, str] = {}
    """More variables of the program. Whatever runs in the box can read them: no place for keys."""


class CommandSettings(CliSettings):
    """`[harnesses.command]`: any other program as an agent."""

    argv: list[str] = []
    """Program and arguments. `{instruction}`, `{instruction_file}`, `{workdir}`, `{model}` and `{model_url}` are filled in."""
    instruction: Literal["stdin", "argument", "file"] = "stdin"
    """How it is told what to do: on its standard input, by `{instruction}` or by `{instruction_file}`."""
    steps: Literal["none", "jsonl"] = "none"
    """`jsonl`: every line that it prints is a chat message, which may have `usage`, `model` and `finish_reason` beside it."""
    answer_file: str = ""
    """What it says in the end, relative to the work directory; empty takes its last message, or what it prints."""
    ok_exit_codes: list[int] = [0]
    """Any other means that it has failed, and did not just give up."""


class HarnessSettings(Section):
    """`[harnesses]`: agents that work in boxes."""

    claude_code: CliSettings = CliSettings()
    codex: CliSettings = CliSettings()
    command: CommandSettings = CommandSettings()


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
    plugins: PluginSettings = PluginSettings()
    environments: EnvironmentSettings = EnvironmentSettings()
    blobs: BlobSettings = BlobSettings()
    env: EnvSettings = EnvSettings()
    pools: dict[PoolName, PoolSettings] = {}
    pool: str = DEFAULT_POOL
    """Which pool the workers of this process serve."""

    @field_validator("pools")
    @classmethod
    def _claimed_once(cls, pools: Mapping[str, PoolSettings]) -> Mapping[str, PoolSettings]:
        for name in pools:
            if name in RESERVED_POOLS:
                raise ValueError(f"expected another name for a pool than {name}, which has a meaning of its own")
        for (one, first), (other, second) in combinations(sorted(pools.items()), 2):
            if (contested := _contested(first, second)) is not None:
                raise ValueError(
                    f"expected one pool to claim {contested}, found {one} and {other} claiming it for the same work"
                )
        return pools

    @field_validator("pool")
    @classmethod
    def _is_declared(cls, pool: str, info: ValidationInfo) -> str:
        declared = info.data.get("pools")
        if declared is not None and pool != DEFAULT_POOL and pool not in declared:
            names = ", ".join([DEFAULT_POOL, *sorted(declared)])
            raise ValueError(f"expected one of the pools {names}, found {pool!r}: declare it with [pools.{pool}]")
        return pool

    sandboxes: SandboxSettings = SandboxSettings()
    harnesses: HarnessSettings = HarnessSettings()

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
        if first["type"] == "value_error":
            # A sentence of our own, which says what was found.
            raise UsageError(f"setting {name}: {first['ctx']['error']}; {where}") from None
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
