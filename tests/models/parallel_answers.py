"""Answer in a run of torchrun: python -m tests.models.parallel_answers PORT MODEL DRAFT TOKENS POLICY... [-- PORT ...].

Each model is answered with in a fork of its own, as a run serves one engine; its ranks meet at its port.
"""

import json
import os
import sys

from specengine import Engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
WAYS = ({}, {"temperature": 1.0, "seed": 4})


def answer(model: str, draft: str, tokens: str, *names: str) -> None:
    dtype = {"dtype": "float32", "offline": True}
    # the other ranks stay in here
    engine = Engine.from_pretrained(model, draft, tp_plan="auto", **dtype)
    print(json.dumps({"backend": engine.target.backend}), flush=True)
    rated = [round(found.logprob, 4) for found in engine.score(PROMPT)]
    print(json.dumps({"scores": rated}), flush=True)
    for name in names:
        policy = None if name == "default" else name
        for way, options in enumerate(WAYS):
            given = {"policy": policy} if policy else {}
            found = engine.generate(PROMPT, max_new_tokens=int(tokens), **given, **options)
            line = {
                "policy": name,
                "way": way,
                "tokens": found.token_ids,
                "steps": found.stats.num_spec_steps,
            }
            print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> None:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    port, *job = arguments[:end]
    if (rest := arguments[end + 1 :]) and (child := os.fork()):
        if os.waitpid(child, 0)[1]:
            sys.exit(f"rank {os.environ['RANK']}: {job[0]} was not answered with")
        main(rest)
        return
    # torchrun has a store at its own port, which knows the first of these engines for good
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    answer(*job)


if __name__ == "__main__":
    main(sys.argv[1:])
