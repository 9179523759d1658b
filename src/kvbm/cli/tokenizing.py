"""Text, or the messages of a chat, as the token ids that an engine makes of them. Nothing is fetched from anywhere."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.errors import SettingsError

ACCEPTED = "a directory with the model's tokenizer.json; or give --prompt-file a JSON list of token ids"


def tokenizer_of(option: str, model: str) -> str:
    """The directory of the tokenizer: that of `--tokenizer`, or the served model's name. Raises SettingsError."""
    if option and not Path(option).is_dir():
        raise SettingsError("--tokenizer", option, ACCEPTED)
    return option or model


def tokenized(text: str, directory: str) -> list[int]:
    """As an engine tokenizes a prompt of the completions API. A chat template is not applied. Raises SettingsError."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise SettingsError("--tokenizer", directory, ACCEPTED)
    tokenizers = _module("tokenizers", directory)
    try:
        ids: list[int] = tokenizers.Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:  # the library raises a bare one
        raise SettingsError("--tokenizer", directory, f"{ACCEPTED} ({_line(error)})") from None
    return ids


def chat_tokenized(messages: Sequence[Any], directory: str) -> list[int]:
    """As an engine tokenizes the messages of the chat API: by the model's chat template. Raises SettingsError."""
    if not Path(directory).is_dir():
        raise SettingsError(
            "--tokenizer", directory, "a directory with the model's tokenizer and chat template"
        )
    transformers = _module("transformers", directory)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        told = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
    except Exception as error:  # no template, a template that fails, messages that it does not know
        accepted = f"a directory with a chat template that takes these messages ({_line(error)})"
        raise SettingsError("--tokenizer", directory, accepted) from None
    ids: list[int] = list(told["input_ids"] if hasattr(told, "keys") else told)
    return ids


def _module(name: str, directory: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        accepted = f"a JSON list of token ids in --prompt-file: no {name} here (pip install {name})"
        raise SettingsError("--tokenizer", directory, accepted) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
