# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor against a gateway with a real chat model: `uv run instructor_client.py URL MODEL`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


class Forecast(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]
    temperatures: list[Annotated[int, Field(ge=-60, le=60)]] = Field(min_length=1, max_length=3)


server = OpenAI(base_url=URL, api_key="none", max_retries=0)
# By a call that must be made, by one that is strict, and by the form of the answer.
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(server, mode=mode)
    for seed in range(3):
        forecast = client.chat.completions.create(
            model=MODEL,
            response_model=Forecast,
            messages=[{"role": "user", "content": "It will be 21 and 23 degrees Celsius in Zürich."}],
            max_retries=0,
            max_tokens=200,
            temperature=0.7,
            seed=seed,
        )
        assert isinstance(forecast, Forecast)
        assert forecast.temperatures
print("instructor is served")
