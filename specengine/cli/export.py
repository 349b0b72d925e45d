"""specengine export: an EAGLE head as other engines read it."""

import argparse
from dataclasses import replace
from pathlib import Path

from specengine import checkpoints as models
from specengine.checkpoints.checks import config_of, why_absent
from specengine.checkpoints.eagle import Verifier, head_folder, save_head, writer
from specengine.cli import given
from specengine.cli.commands import FORMATS
from specengine.cli.terminal import say
from specengine.errors import InputError, require, require_input
from specengine.models.eagle import EagleConfig, require_shape


def run(arguments: argparse.Namespace) -> int:
    named = FORMATS[arguments.format]
    layout = writer(named)
    folder: Path = arguments.folder
    require(
        "folder",
        str(folder),
        "a new or an empty folder",
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
    )
    require_input(
        "tokens: the eagle format has no field for it; set it when you start the engine",
        arguments.tokens is None or layout.names_target,
    )
    source, shipped_for = _source(arguments)
    head = given.load_head(source, arguments)
    target = arguments.target or (shipped_for if layout.names_target else None)
    verifier = Verifier()
    if target is not None:
        config, verifier = _fitted(head.config, target, arguments)
        head = head._replace(config=config)
    if arguments.tokens is not None:
        verifier = replace(verifier, tokens=arguments.tokens)
    save_head(head.config, head.state, arguments.folder, named, verifier=verifier)
    for note in head.dialect.notes:
        say(f"specengine: note: {note}")
    for line in layout.unread(head.config):
        say(f"specengine: warning: {line}")
    print(arguments.folder)
    return 0


def _source(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the folder of the head, and the model that it ships for."""
    # of which only the first is a draft's name, too
    names = models.embedded.HEAD, models.embedded.NAME
    shipped = models.embedded.draft_head(models.embedded.NAME) if arguments.head in names else None
    if shipped is not None and not Path(arguments.head).is_dir():
        return shipped, models.embedded.NAME
    folder = head_folder(arguments.head, offline=arguments.offline)
    if folder is None:
        raise InputError(
            f"head: {models.embedded.missing_head(models.embedded.NAME)}"
            if arguments.head in names
            else f"head: got {arguments.head}, accepted a folder or Hub id of an EAGLE head, or {names[0]}"
        )
    return folder, None


def _fitted(
    head: EagleConfig, target: str, arguments: argparse.Namespace
) -> tuple[EagleConfig, Verifier]:
    """Return the head with the layers that it reads of this target, and the target as the export names it.

    InputError where the head was made for another, UnsupportedModelError where the target's config cannot be had.
    """
    name = models.resolve(target, offline=arguments.offline)
    reason = why_absent(name, offline=arguments.offline)
    require_input(f"target: {target}: {reason}", reason is None)
    config = config_of(
        name, offline=arguments.offline, trust_remote_code=arguments.trust_remote_code
    )
    decoder = config.get_text_config(decoder=True)
    layers = int(decoder.num_hidden_layers)
    require_shape(
        head,
        hidden_size=int(decoder.hidden_size),
        vocab_size=int(decoder.vocab_size),
        layers=layers,
    )
    fitted = head if head.version == 1 else replace(head, layer_ids=head.feature_ids(layers))
    name = str(Path(name).resolve()) if Path(name).exists() else name  # it is read from anywhere
    return fitted, Verifier(name, tuple(config.architectures or ()))
