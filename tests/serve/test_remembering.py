"""A server's drafts copy from earlier texts of the same key, and never from those of another."""

from __future__ import annotations

import pytest

from specengine import Engine, ops
from tests.engine.engines import model_of
from tests.serve.served import CHAT, served
from tests.toy import byte_tokenizer

pytestmark = pytest.mark.skipif(
    ops.backends()["mix_rows"].name != "cpp", reason="the extension specengine._ops is not built"
)
GREEDY = CHAT | {"temperature": 0, "return_token_ids": True}


@pytest.mark.parametrize("parallel", [1, 2])
def test_keys_have_texts_of_their_own(parallel: int) -> None:
    def load() -> Engine:
        return Engine.from_pretrained(
            model_of(),
            "recycling",
            "eagle",
            tokenizer=byte_tokenizer(),
            backend="native",
            memory="process",
        )

    with served(load, api_keys=("one", "two"), parallel=parallel) as server:
        engine = server.worker.engine
        assert engine is not None
        assert engine.memory is not None

        def asked(headers: dict[str, str], text: str) -> list[int]:
            body = GREEDY | {"messages": [{"role": "user", "content": text}]}
            answer = server.post(body, headers=headers)
            assert answer.status_code == 200
            return answer.json()["choices"][0]["token_ids"]

        one, two = {"Authorization": "Bearer one"}, {"X-Api-Key": "two"}
        secret = asked(one, "my secret")
        assert asked(two, "my secret") == secret
        asked(two, "another text")
        texts = {
            owner: engine.memory.of(owner).index.texts() for owner in ("Bearer one", "two", "")
        }
        assert [len(each) for each in texts.values()] == [1, 2, 0]
        assert texts["Bearer one"][0][-len(secret) :] == secret
        assert server.post(GREEDY, headers={"X-Api-Key": "three"}).status_code == 401
        assert len(engine.memory._owners) == 3
