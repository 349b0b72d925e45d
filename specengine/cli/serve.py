"""specengine serve: a model over HTTP."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

import torch

from specengine.cli import given
from specengine.cli.parser import names_of
from specengine.cli.terminal import say
from specengine.errors import missing_extra
from specengine.protocol.settings import Settings, is_loopback
from specengine.replicas import Scale

KEY_VARIABLE = "SPECENGINE_API_KEY"


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    try:
        from specengine.serve import server
    except ImportError as error:
        raise missing_extra("serve", "serve", error) from error
    if not settings.api_keys and not is_loopback(settings.host):
        say(f"specengine: note: {settings.host} can be reached from elsewhere, and no --api-key is asked for")

    def listening(address: str) -> None:
        say(f"Serving {settings.name} at {address}/v1, once it is loaded")

    if (scale := _scale(arguments)) is None:
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        server.run(lambda: given.load_engine(arguments), settings, listening)
        return 0
    from specengine.serve import front

    front.run(lambda threads: given.recipe(arguments, threads=threads).load, settings, scale, listening)
    return 0


def _scale(arguments: argparse.Namespace) -> Scale | None:
    """Return the number and place of replicas, or None for one engine in this process."""
    scale = Scale(
        arguments.replicas, arguments.max_replicas, arguments.threads, arguments.ray_address, given.wants_gpu(arguments)
    )
    return None if scale.most == 1 and scale.address is None else scale


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the checked settings of the command line."""
    same = {field.name for field in fields(Settings)} & vars(arguments).keys()
    chosen = {name: getattr(arguments, name) for name in same}
    chosen["allowed_hosts"] = tuple(arguments.allowed_host)
    keys = arguments.api_key or [key for key in [os.environ.get(KEY_VARIABLE)] if key]
    name = arguments.served_model_name or os.path.basename(_target(arguments).rstrip("/"))
    return Settings(name=name, api_keys=tuple(keys), origins=tuple(arguments.cors), **chosen)


def _target(arguments: argparse.Namespace) -> str:
    """Return the model's path or id, without a draft."""
    return names_of(argparse.Namespace(model=arguments.model))
