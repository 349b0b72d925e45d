"""Train Learning to Draft's two networks by PPO: each alone, then in turn with the other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from research.ltd.files import hidden_of, save
from research.ltd.options import PolicyOptions, RewardName, Stage
from research.ltd.outcomes import Speed
from research.ltd.released import actor_of, as_network
from specengine.errors import InputError, missing_extra
from specengine.files import atomic
from specengine.policies._ltd import ACTIVATIONS, Networks

if TYPE_CHECKING:
    from research.ltd.grounds import Ground

MANIFEST = "policy.json"
BEST, LATEST, STATE, LOG, PAIR = (
    "best.zip",
    "latest.zip",
    "state.json",
    "log.jsonl",
    "ltd.safetensors",
)

Progress = Callable[[str], None]


def require_extra() -> None:
    """Raise MissingExtraError if Gymnasium or Stable-Baselines3 is not installed."""
    try:
        import gymnasium  # noqa: F401
        import stable_baselines3  # noqa: F401
    except ImportError as error:
        raise missing_extra("research.ltd", "research", error) from error


class Candidate(NamedTuple):
    """A pair of networks after a stage, and its speed on held-back trees."""

    stage: int
    speed: Speed
    networks: Networks


def train_policy(
    ground: Ground,
    folder: Path,
    options: PolicyOptions,
    *,
    facts: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda line: None,
) -> Path:
    """Train a pair of networks. An interrupted call resumes where it stopped, with the same result.

    Write the best pair to FOLDER/ltd.safetensors, with `facts` in its metadata, and all figures to FOLDER/log.jsonl.
    Return the pair's file. Raise InputError if the folder was begun with other options.
    """
    require_extra()
    _begin(folder, options)
    torch.manual_seed(options.seed)
    networks = Networks(
        options.shape,
        {"depth": options.hidden_depth, "size": options.hidden_size},
        options.activation,
    )
    pairs: list[Candidate] = []
    for number, which in enumerate(options.stages):
        stage = _Stage(ground, folder, options, number, which, networks, progress)
        networks = stage.run()
        if number >= 1:
            speed = ground.validate(networks, None, None)
            pairs.append(Candidate(number, speed, networks))
            progress(f"pair after stage {number} ({which}): {_told(speed)}")
    best = max(pairs, key=lambda pair: score(options.reward, pair.speed))
    record = {
        "options": asdict(options),
        "ground": ground.facts(),
        "pairs": [{"stage": pair.stage, **pair.speed._asdict()} for pair in pairs],
        "kept": best.stage,
        **(facts or {}),
    }
    save(folder / PAIR, best.networks, json.loads(json.dumps(record)), dtype)
    return folder / PAIR


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return all figures of a training run."""
    file = folder / LOG
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.is_file()
        else []
    )


def _begin(folder: Path, options: PolicyOptions) -> None:
    wanted = json.loads(json.dumps(asdict(options)))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MANIFEST
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        for name in {**found, **wanted}:
            if found.get(name) != wanted.get(name):
                raise InputError(
                    f"{name}: the training in {folder} was begun with {found.get(name)!r}, got {wanted.get(name)!r}; "
                    "use the same, or another folder"
                )
    else:
        with atomic(file) as part:
            part.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


class _Stage:
    """The training of one network, with the other one fixed."""

    def __init__(
        self,
        ground: Ground,
        folder: Path,
        options: PolicyOptions,
        number: int,
        which: Stage,
        networks: Networks,
        progress: Progress,
    ) -> None:
        self.ground, self.root, self.options, self.number, self.which = (
            ground,
            folder,
            options,
            number,
            which,
        )
        self.folder = folder / f"stage-{number}-{which}"
        self.networks, self.progress = networks, progress
        self.best, self._validated = -float("inf"), -1
        self.began = time.perf_counter()

    def run(self) -> Networks:
        """Train, and return the networks with this one at its fastest checkpoint."""
        from stable_baselines3.common.callbacks import BaseCallback

        state = self._state()
        if not state.get("done"):
            stage, model = self, self._model()

            class Watch(BaseCallback):
                def _on_rollout_start(self) -> None:
                    stage.rollout_begins(self.model)

                def _on_step(self) -> bool:
                    stage.count(self.locals["rewards"], self.locals["dones"])
                    return True

                def _on_rollout_end(self) -> None:
                    stage.rollout_ends(self.model)

            if state:
                model.set_parameters(str(self.folder / LATEST), device="cpu")
                model.num_timesteps, self.best = state["steps"], state["best"]
                self._validated = state["steps"]
                self._forget_after(state["steps"])
            self._clear()
            try:
                model.learn(
                    max(0, self._steps - model.num_timesteps),
                    Watch(),
                    reset_num_timesteps=not state,
                )
            finally:
                model.env.close()
            self._validate(model, done=True)
        return self._with(self._load(BEST))

    def rollout_begins(self, model: Any) -> None:
        """Validate and save between two updates, and draw the next rollout from its own seed."""
        rollouts = model.num_timesteps // self.options.rollout
        if rollouts % self.options.validate_every == 0 and model.num_timesteps != self._validated:
            self._validate(model)
        model.set_random_seed(
            (self.options.seed * 1000 + self.number) * 100_003 + model.num_timesteps
        )
        # so that a training that goes on sees what it would have seen
        model._last_obs = model.env.reset()
        model._last_episode_starts[:] = True
        self._clear()

    def count(self, rewards: Any, dones: Any) -> None:
        self._sum += float(rewards.sum())
        self._episodes += int(dones.sum())

    def rollout_ends(self, model: Any) -> None:
        mean = self._sum / max(1, self._episodes)
        self._note(
            steps=model.num_timesteps,
            reward=round(mean, 6),
            seconds=round(time.perf_counter() - self.began, 1),
        )

    @property
    def _steps(self) -> int:
        """Return the number of steps as whole rollouts, at least one."""
        rollout = self.options.rollout
        return max(rollout, self.options.steps(self.number) // rollout * rollout)

    def _clear(self) -> None:
        self._sum, self._episodes = 0.0, 0

    def _model(self) -> Any:
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

        options, size = self.options, self.which == "size"
        other: Networks | int | None = self.networks
        if self.number == 0:
            other = None
        elif self.number == 1:
            other = options.fixed_size
        environment = self.ground.environment(self.which, other, self.networks)
        if not isinstance(environment, VecEnv):
            environment = DummyVecEnv([lambda: environment])
        hidden = options.hidden_size if size else options.hidden_depth
        model = PPO(
            "MlpPolicy",
            environment,
            learning_rate=self._rate,
            n_steps=options.rollout // environment.num_envs,
            batch_size=options.minibatch,
            n_epochs=options.epochs,
            gamma=options.size_gamma if size else options.depth_gamma,
            clip_range=options.clip,
            ent_coef=options.entropy,
            target_kl=(options.target_kl or None) if self.number >= 2 else None,
            policy_kwargs={
                "net_arch": {"pi": list(hidden), "vf": list(options.hidden_critic)},
                "activation_fn": ACTIVATIONS[options.activation],
            },
            seed=options.seed * 1000 + self.number,
            device="cpu",
        )
        earlier = [
            n for n, which in enumerate(options.stages[: self.number]) if which == self.which
        ]
        if earlier:
            model.set_parameters(
                str(self.root / f"stage-{earlier[-1]}-{self.which}" / BEST), device="cpu"
            )
        return model

    def _rate(self, remaining: float) -> float:
        done, warmup = 1 - remaining, self.options.warmup
        return self.options.learning_rate * (
            done / warmup if done < warmup else remaining / (1 - warmup)
        )

    def _validate(self, model: Any, done: bool = False) -> None:
        self._validated = model.num_timesteps
        networks = self._with(model.policy.state_dict())
        alone = self.number < 2
        depth = self.options.fixed_depth if alone and self.which == "size" else None
        size = self.options.fixed_size if alone and self.which == "depth" else None
        speed = self.ground.validate(networks, depth, size)
        self._note(steps=model.num_timesteps, validation=speed._asdict())
        self.progress(
            f"stage {self.number} ({self.which}), {model.num_timesteps} of {self._steps}: {_told(speed)}"
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        if score(self.options.reward, speed) > self.best:
            self.best = score(self.options.reward, speed)
            _save(model, self.folder / BEST)
        _save(model, self.folder / LATEST)
        with atomic(self.folder / STATE) as part:
            state = {"steps": model.num_timesteps, "best": self.best, "done": done}
            part.write_text(json.dumps(state) + "\n", encoding="utf-8")

    def _with(self, state: dict[str, torch.Tensor]) -> Networks:
        """Return the pair with this actor in it."""
        hidden, activation = hidden_of(self.networks), self.networks.activation
        made = Networks(self.options.shape, hidden, activation)
        made.load_state_dict(self.networks.state_dict())
        getattr(made, self.which).load_state_dict(as_network(actor_of(state)))
        return made.eval().requires_grad_(False)

    def _load(self, name: str) -> dict[str, torch.Tensor]:
        from stable_baselines3.common.save_util import load_from_zip_file

        _, parameters, _ = load_from_zip_file(
            str(self.folder / name), device="cpu", load_data=False
        )
        return dict(parameters["policy"])

    def _state(self) -> dict[str, Any]:
        file = self.folder / STATE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _note(self, **figures: Any) -> None:
        with (self.root / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps({"stage": self.number, "which": self.which, **figures}) + "\n")

    def _forget_after(self, steps: int) -> None:
        """Drop figures of a rollout that was lost."""
        kept = [
            entry
            for entry in read_log(self.root)
            if (entry["stage"], entry["steps"]) <= (self.number, steps)
        ]
        with atomic(self.root / LOG) as part:
            part.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def _save(model: Any, file: Path) -> None:
    with atomic(file) as part, part.open("wb") as opened:
        model.save(opened, exclude=["lr_schedule", "learning_rate", "clip_range"])


def score(kind: RewardName, speed: Speed) -> float:
    """Return the figure by which checkpoints are chosen: the speed, or an ablation's."""
    return {"accept": speed.tau, "time": -speed.tau / speed.speed}.get(kind, speed.speed)


def _told(speed: Speed) -> str:
    return f"{speed.speed:.4f}, tau {speed.tau:.3f}, {speed.delta:.2f} passes, {speed.verified:.1f} nodes"
