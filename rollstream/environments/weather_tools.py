"""`weather_tools`: one tool that tells the weather. Runs NeMo Gym's `example_single_tool_call` rows."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from rollstream.environments.protocol import Episode, Services, Task, Verdict, World
from rollstream.environments.tools import ToolEnvironment, ToolError, tool
from schemas.action import ToolCall
from schemas.session import Submission

SKIES = ("clear", "cloudy", "foggy", "rainy", "snowy", "windy")
MAX_CITY = 200


class WeatherTask(Task):
    expected_cities: list[str] = []
    """Cities that must be looked up; without any, one look at any city will do."""


class Forecasts(World):
    asked: list[str] = []
    """Cities whose weather was looked up, in order."""


class WeatherToolsEnvironment(ToolEnvironment[WeatherTask, Forecasts]):
    """Reward 1.0 when the weather that was asked for was looked up, else 0.0."""

    name: ClassVar[str] = "weather_tools"
    version: ClassVar[str] = "1"
    task_type = WeatherTask
    example: ClassVar[Mapping[str, object]] = {
        "messages": [{"role": "user", "content": "What is the weather like in Lima?"}],
        "expected_cities": ["Lima"],
    }
    world_type = Forecasts

    def begin(self, task: WeatherTask) -> Forecasts:
        return Forecasts()

    @tool
    async def get_weather(self, world: Forecasts, city: Annotated[str, Field(max_length=MAX_CITY)]) -> dict[str, object]:
        """Tell the weather in a city now."""
        if not _plain(city):
            raise ToolError("expected the name of a city, found nothing")
        world.asked.append(city)
        # The same city has the same weather, whoever answers: an action may be carried out twice.
        chance = hashlib.sha256(_plain(city).encode("utf-8", "replace")).digest()
        return {
            "city": city,
            "sky": SKIES[chance[0] % len(SKIES)],
            "temperature_c": chance[1] % 45 - 10,
            "humidity_percent": chance[2] % 101,
        }

    def reference_actions(self, task: WeatherTask) -> list[ToolCall]:
        cities = task.expected_cities or ["San Francisco"]
        return [
            ToolCall(id=f"reference-{number}", name="get_weather", arguments={"city": city})
            for number, city in enumerate(cities)
        ]

    def reference(self, task: WeatherTask) -> Submission:
        return Submission(text="That is what the weather is like.")

    async def score(self, task: WeatherTask, world: Forecasts, episode: Episode, services: Services) -> Verdict:
        asked = {_plain(city) for city in world.asked}
        wanted = {_plain(city) for city in task.expected_cities}
        found = wanted <= asked if wanted else bool(asked)
        return Verdict(reward=1.0 if found else 0.0, diagnostics={"looked_up": len(world.asked)})


def _plain(city: str) -> str:
    return " ".join(city.casefold().split())
