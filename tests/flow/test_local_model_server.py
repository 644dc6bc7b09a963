"""The local model, really started: one server for the module, asked through the client that the workers use."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx2
import psutil
import pytest
from openai import APIStatusError, AsyncOpenAI, DefaultAioHttpClient

from rollstream.errors import UsageError
from rollstream.models.local import ENGINE_PACKAGE, MODEL_NAME, WEIGHTS_PACKAGE, LocalModelServer, read_state

_missing = [package for package in (ENGINE_PACKAGE, WEIGHTS_PACKAGE) if find_spec(package) is None]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"not installed: {', '.join(_missing)}")

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local-model")


@pytest.fixture(scope="module")
def url(data_dir: Path) -> Iterator[str]:
    with LocalModelServer(data_dir) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="none", http_client=DefaultAioHttpClient(), max_retries=0) as client:
        yield client


async def test_it_serves_one_model_under_its_name(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL_NAME]


async def test_a_completion_counts_its_tokens_and_names_their_logprobs(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "What is 2 + 2?"}],
        max_tokens=8,
        temperature=0.7,
        logprobs=True,
        top_logprobs=1,
    )
    assert completion.model == MODEL_NAME
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 0
    assert completion.usage.completion_tokens > 0
    choice = completion.choices[0]
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert all(token.logprob <= 0 for token in choice.logprobs.content)


async def test_what_a_request_leaves_open_is_sampled_from_the_whole_distribution(client: AsyncOpenAI, url: str) -> None:
    """Else the recorded log-probabilities would belong to another policy than the one that was sampled."""
    properties = await client.get(f"{url.removesuffix('/v1')}/props", cast_to=httpx2.Response)
    sampling = properties.json()["default_generation_settings"]["params"]
    assert {name: sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }


async def test_concurrent_requests_get_each_its_own_answer(client: AsyncOpenAI) -> None:
    async def say(word: str) -> str:
        completion = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": f"Repeat this word three times: {word}"}],
            max_tokens=16,
            temperature=0,
        )
        return (completion.choices[0].message.content or "").casefold()

    words = ["apple", "river", "window", "mountain"]
    answers = await asyncio.gather(*map(say, words))
    assert [next((word for word in words if word in answer), None) for answer in answers] == words


async def test_a_prompt_beyond_the_context_of_a_slot_is_refused_by_the_server(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError, match="exceed") as refused:
        await client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "word " * 2000}], max_tokens=1
        )
    assert refused.value.status_code == 400


def test_a_second_start_finds_the_running_server_and_leaves_it_running(url: str, data_dir: Path) -> None:
    with LocalModelServer(data_dir) as found:
        assert found == url
    assert LocalModelServer(data_dir).running() is not None


def test_stop_leaves_no_process_and_no_state(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path, slots=1)
    server.start()
    state = server.running()
    assert state is not None
    assert LocalModelServer(tmp_path).stop() is True
    assert not psutil.pid_exists(state.pid)
    assert server.running() is None
    assert sorted(path.name for path in server.folder.iterdir()) == ["lock", "server.log"]
    assert server.stop() is False


def test_the_server_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from rollstream.models.local import LocalModelServer
server = LocalModelServer(Path({str(tmp_path)!r}), slots=1)
server.start()
print(flush=True)
input()
"""
    state_path = LocalModelServer(tmp_path).state_path
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"\n"
        state = read_state(state_path)
        assert state is not None
        process = psutil.Process(state.pid)
        starter.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert not state_path.exists()


def test_a_detached_server_outlives_whoever_started_it(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from rollstream.models.local import LocalModelServer
LocalModelServer(Path({str(tmp_path)!r}), slots=1).start(detached=True)
"""
    subprocess.run([sys.executable, "-W", "ignore::ResourceWarning", "-c", program], check=True, timeout=DEADLINE_S)
    server = LocalModelServer(tmp_path)
    state = server.running()
    assert state is not None
    assert state.parent_pid is None
    assert server.stop() is True


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path, slots=1000, context_tokens=1)
    with pytest.raises(UsageError, match=r"ended with code \d+ before it answered; see .*server\.log"):
        server.start(timeout_s=DEADLINE_S)
