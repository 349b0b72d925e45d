"""specengine serve: a model over HTTP."""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import jinja2
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME

from specengine.checkpoints import embedded
from specengine.checkpoints.pretrained import check_model
from specengine.cli import given, learn
from specengine.cli.commands import SERVING
from specengine.cli.terminal import say
from specengine.engine import Engine
from specengine.errors import InputError, missing_extra, require, require_input
from specengine.files import cache_dir
from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings, is_loopback, require_key
from specengine.protocol.tools import TEMPLATE, format_of

KEY_VARIABLE = "SPECENGINE_API_KEY"


def run(arguments: argparse.Namespace) -> int:
    models = models_of(arguments)
    template = read_template(arguments.chat_template)
    settings = settings_of(arguments)
    try:
        from specengine.serve import server
        from specengine.serve.models import ServedModel
    except ImportError as error:
        raise missing_extra("serve", "serve", error) from error
    if not (settings.api_keys or settings.unix_socket or is_loopback(settings.host)):
        say(
            f"specengine: note: {settings.host} can be reached from elsewhere, and no key is asked for (--api-key-file)"
        )

    scale = given.replicas(arguments)
    first, *others = models
    for path in models.values():
        if path not in (None, embedded.NAME):
            check_model(
                str(path),
                offline=bool(arguments.offline),
                trust_remote_code=bool(arguments.trust_remote_code),
            )
    recipe = dataclasses.replace(given.recipe(arguments), model=models[first])

    def listening(address: str) -> None:
        later = f", and {', '.join(others)} when asked for" if others else ""
        say(f"Serving {settings.name} at {address}, once it is loaded{later}")

    def loader(path: str | None, threads: int) -> Callable[[], Engine]:
        return functools.partial(
            templated,
            dataclasses.replace(recipe, model=path, threads=threads).load,
            template,
            own=path in (None, embedded.NAME),
        )

    require("replicas", "several", "1, with several models", not others or scale is None)
    require("learn", str(arguments.learn), "one model", not others or arguments.learn is None)
    if scale is None:
        # set in each model's thread: one that begins while another answers would take over the one thread of that
        threads = torch.get_num_threads()
        served = [
            ServedModel(name, loader(path, threads), path, functools.partial(size_of, path))
            for name, path in models.items()
        ]
        server.run(served, settings, listening, functools.partial(learn.beside, recipe))
    else:
        from specengine.serve import front

        front.run(functools.partial(loader, models[first]), settings, scale, listening)
    return 0


def models_of(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Return the models, None for the default one, by the names that clients call them; InputError."""
    models: dict[str, str | None] = {}
    several = [text for text in (arguments.model, *arguments.models) if text is not None]
    for text in several or [None]:
        name, equals, model = (text or "").partition("=")
        if not equals or Path(text).exists():
            name = arguments.served_model_name or given.model_name(text)
            model = text
        require("model", name, "names that differ; NAME=MODEL gives one", name not in models)
        models[name] = model
    return models


def size_of(model: str | None) -> int:
    """Return the bytes of a model's weights, 0 where they are not on this disk."""
    is_default = embedded.is_default(model)
    folder = cache_dir() / "models" / embedded.NAME if is_default else Path(str(model))
    if not folder.exists():
        with contextlib.suppress(ValueError):  # no id
            folder = Path(str(try_to_load_from_cache(str(model), CONFIG_NAME))).parent
    files = [folder] if folder.is_file() else list(folder.glob("*"))
    return max(
        sum(file.stat().st_size for file in files if file.suffix == suffix)
        for suffix in (".safetensors", ".gguf", ".bin")
    )


def templated(load: Callable[[], Engine], template: str | None, *, own: bool = False) -> Engine:
    """Load the engine with another chat template, if there is one.

    own: with the model's own template, and next to it one for requests with tools, where its own takes none.
    """
    engine = load()
    tokenizer = engine.tokenizer
    if template is not None:
        require_input(
            "chat_template: this model's tokenizer takes none", hasattr(tokenizer, "chat_template")
        )
        tokenizer.chat_template = template
    elif own:
        try:
            format_of(tokenizer)
        except RequestError:
            if isinstance(plain := getattr(tokenizer, "chat_template", None), str):
                tokenizer.chat_template = {"default": plain, "tool_use": TEMPLATE}
    return engine


def read_template(file: Path | None) -> str | None:
    """Return the text of a chat template; InputError for a file that cannot be read, or is no template."""
    text = given.read_option("chat_template", file)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text or "")
        )
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"chat_template: {file}, line {error.lineno}: {error.message}") from error
    return text


def read_keys(file: Path) -> list[str]:
    """Return the keys of a file, one a line; InputError for a line that is none, and for a file without any."""
    lines = (given.read_option("api_key_file", file) or "").expandtabs().splitlines()
    keys = {
        f"api_key_file: {file}, line {number}": key
        for number, line in enumerate(lines, start=1)
        if (key := f" {line}".partition(" #")[0].strip())
    }
    for place, key in keys.items():
        require_key(place, key)
    require("api_key_file", str(file), "a file with a key in a line", bool(keys))
    if file.stat().st_mode & 0o007:
        say(f"specengine: note: every user of this machine can read {file}; chmod 600 keeps it")
    return list(keys.values())


def settings_of(arguments: argparse.Namespace) -> Settings:
    values = given.values_of(SERVING, arguments)
    values["name"] = next(iter(models_of(arguments)))
    if arguments.api_key_file is not None:
        values["api_keys"] = [*values["api_keys"], *read_keys(arguments.api_key_file)]
    if not values["api_keys"] and (key := os.environ.get(KEY_VARIABLE)):
        values["api_keys"] = [key]
    return Settings(
        **values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    )
