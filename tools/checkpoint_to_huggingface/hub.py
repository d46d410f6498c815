"""An export on the hub, or on another server with the same interface."""

import re
from collections.abc import Callable
from pathlib import Path

from shardwright_data.foreign import LARGE, read_object, shown
from tools.checkpoint_to_huggingface.card import CARD

_ALWAYS = (CARD, "config.json", "generation_config.json")
_SOMETIMES = ("tokenizer.json", "tokenizer_config.json")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def check_repository(name: str) -> None:
    """Raises ValueError if `name` is not the name of a repository, with its owner."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        if name.count("/") != 1:
            raise HFValidationError("it has no owner")
    except HFValidationError as error:
        raise ValueError(f"push_to_hub is {name!r}: {_line(error)}. Give push_to_hub=<owner>/<name>.") from error


def files_of(directory: Path) -> list[str]:
    """Names of the files in `directory` that are the export.

    Raises:
        ValueError: one is missing, or is a link; it is no export.
    """
    weights = [_WEIGHTS]
    if (directory / _INDEX).exists():
        index = read_object(directory / _INDEX, {"weight_map": {str: str}}, LARGE, "Export the run again.")
        parts = {*index["weight_map"].values()}
        if not all(map(_PART.fullmatch, parts)):
            raise ValueError(f"{directory / _INDEX} does not list the files of an export. Export the run again.")
        weights = [_INDEX, *sorted(parts)]
    names = [*_ALWAYS, *(name for name in _SOMETIMES if (directory / name).exists()), *weights]
    for path in (directory / name for name in names):
        if path.is_symlink() or not path.is_file():
            what = "a link" if path.is_symlink() else "missing"
            raise ValueError(f"{path} is {what}: the directory is not an export of this program. Export the run again.")
    return names


def push(directory: Path, repository: str, private: bool, log: Callable[[str], None]) -> None:
    """Uploads the export in `directory`, and no other file, as one commit.

    Args:
        directory: the complete export.
        repository: <owner>/<name>. It is made if it does not exist.
        private: whether only the owner is to see it.
        log: prints a line.

    Raises:
        ValueError: the directory is no export; a repository that all can see is to be private; or the server, the
            network or the token does not allow it.
    """
    from huggingface_hub import HfApi, get_token

    names = files_of(directory)
    if others := sorted({path.name for path in directory.iterdir()} - {*names}):
        log(shown(f"not sent   {', '.join(others)}: not part of the export"))
    api = HfApi()
    try:
        if get_token() is None:
            raise ValueError("there is no token; run `hf auth login`, or set HF_TOKEN")
        url = api.create_repo(repository, private=private, exist_ok=True)
        is_private = api.model_info(repository).private
        if is_private or not private:
            # The names hold no sign that fnmatch would read as a pattern.
            api.upload_folder(
                repo_id=repository,
                folder_path=directory,
                allow_patterns=names,
                commit_message="Export of a run of shardwright",
            )
    except Exception as error:  # of the library, of its HTTP client or of the network
        again = f"output={directory} push_to_hub={repository}{'' if private else ' private=false'}"
        raise ValueError(
            f"push_to_hub={repository} at {api.endpoint}: {_line(error)}. The export {directory} is complete. To push "
            f"it again: python -m tools.checkpoint_to_huggingface {again}"
        ) from error
    if private and not is_private:
        raise ValueError(
            f"push_to_hub={repository}: it exists already and is public, so nothing was sent. Give private=false to "
            f"publish the export {directory} there, or choose another name."
        )
    log(shown(f"pushed     {url}: {len(names)} files, {'private' if is_private else 'public'}"))


def _line(error: Exception) -> str:
    """What an error of the hub says, as one line without its last full stop."""
    text = " ".join(shown(error).split()) or type(error).__name__
    text = re.sub(r"For more information check: \S+ ?", "", text)
    return text[:300].rstrip(". ")
