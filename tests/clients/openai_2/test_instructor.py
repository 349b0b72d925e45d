"""Instructor, in the modes that servers keep to: calls of tools, and schemas of answers."""

from typing import Any, Literal

import pytest

pytest.importorskip("instructor")
import instructor
import openai
from pydantic import BaseModel

pytestmark = pytest.mark.slow


class River(BaseModel):
    """A river."""

    river: Literal["Nile", "Po"]
    kind: Literal["long", "short"]


@pytest.fixture(params=["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def client(request: pytest.FixtureRequest, calling_server: str) -> Any:
    """Its model is random, so what meets the schema does so because it must."""
    own = openai.OpenAI(base_url=f"{calling_server}/v1", api_key="any", max_retries=0)
    return instructor.from_openai(own, mode=getattr(instructor.Mode, request.param))


def test_objects_whole_and_partial(client: Any) -> None:
    limit = "max_output_tokens" if client.mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    asked = {
        "model": "any",
        "messages": [{"role": "user", "content": "Hello"}],
        limit: 300,
        "max_retries": 0,
    }
    whole, completion = client.chat.completions.create_with_completion(
        response_model=River, **asked
    )
    assert (whole.river in ("Nile", "Po"), whole.kind in ("long", "short")) == (True, True)
    assert completion is not None
    *_, last = client.chat.completions.create_partial(response_model=River, **asked)
    assert last.model_dump() == whole.model_dump()
