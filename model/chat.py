"""Messages to the text that a checkpoint was trained on, by its own chat template, and to token ids.

A template is a Jinja program that comes with the weights. It runs in jinja2's sandbox, which lets it change nothing
and reach nothing but what it is given, with the helpers that templates of Hugging Face checkpoints count on:
raise_exception, strftime_now, tojson, break and continue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hipfire_kernels.errors import CheckpointError, InputError
from hipfire_kernels.model.hfq import read_container
from hipfire_kernels.model.jsonfile import read_json
from hipfire_kernels.model.tokenizer import Tokenizer

_TEMPLATE, _FILE = "chat_template", "chat_template.jinja"
_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_DEFAULT, _WITH_TOOLS = "default", "tool_use"

Message = Mapping[str, Any]


def chat_settings(path: Path) -> dict[str, Any]:
    """What a chat template needs, from a checkpoint folder or a container; empty where there is no template.

    Returns:
        chat_template (a text, or a list of {name, template}) and the special tokens, as tokenizer_config.json has
        them. A chat_template.jinja goes before the chat_template there.

    Raises:
        CheckpointError: a file or the container's metadata cannot be read, or is something else.
    """
    if path.is_file():
        config = read_container(path).metadata.get("tokenizer_config") or {}
        if not isinstance(config, dict):
            raise CheckpointError(f"metadata of {path}: tokenizer_config is {config!r}; it must be an object or null")
    else:
        file = path / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        if (path / _FILE).is_file():
            config[_TEMPLATE] = _text(path / _FILE)
    if config.get(_TEMPLATE) is None:
        return {}
    return {key: config[key] for key in (_TEMPLATE, *_TOKENS) if config.get(key) is not None}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


class ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        path: the checkpoint folder, or a container.

    Raises:
        CheckpointError: it has no template, or one that is not Jinja.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._source = f"chat template of {path}"
        settings = chat_settings(Path(path))
        if not settings:
            raise CheckpointError(
                f"{path}: holds no chat template, neither {_FILE} nor {_TEMPLATE} in tokenizer_config.json; "
                "it can continue text, but not take messages"
            )
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in self._named(settings.pop(_TEMPLATE)).items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{self._source}: line {error.lineno} is not Jinja ({error.message})") from error
        self._tokens = {name: self._token(name, value) for name, value in settings.items()}

    def _named(self, value: Any) -> dict[str, str]:
        """The texts by name. The list form has one for every use, and needs one for the usual."""
        entries = [{"name": _DEFAULT, "template": value}] if isinstance(value, str) else value
        try:
            named = {entry["name"]: entry["template"] for entry in entries}
            if all(isinstance(part, str) for pair in named.items() for part in pair) and _DEFAULT in named:
                return named
        except (TypeError, KeyError):
            pass
        raise CheckpointError(
            f"{self._source}: it must be a text, or a list of objects with name and template, one named {_DEFAULT!r}"
        )

    def _token(self, name: str, value: Any) -> str:
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise CheckpointError(f"{self._source}: {name} is {value!r}; it must be a text or an object with content")
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: objects with a role and a content: a text, or a list of {"type": "text", "text": ...}. Further
                keys (tool_calls, reasoning_content, ...) go to the template as they are.
            add_generation_prompt: end with the beginning of an answer.
            tools: JSON schemas of what the model may call, if the template has a place for them.
            options: what else the template reads, such as enable_thinking=False.

        Raises:
            InputError: malformed messages, or such as the template does not take.
            CheckpointError: the template tries what the sandbox forbids.
        """
        _check(messages)
        template = self._templates[_WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT]
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render({**self._tokens, **options, **given})
        except SecurityError as error:
            raise CheckpointError(f"{self._source}: it does what is not allowed ({error})") from error
        except Exception as error:  # a template is a program: anything may come out of it
            raise InputError(
                f"{self._source}: it does not take these messages ({type(error).__name__}: {error})"
            ) from error

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer, **options: Any) -> list[int]:
        """The token ids of a conversation. Arguments and errors as for `render`."""
        return tokenizer.encode(self.render(messages, **options))


def _environment() -> ImmutableSandboxedEnvironment:
    # White space as transformers has it: a template counts on it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InputError(f"messages is {messages!r}; required: a list of at least one object with role and content")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} is {message!r}; required: an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InputError(f"{where}: role is {role!r}; required: a text such as 'user' or 'assistant'")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, (str, list)):
            raise InputError(f"{where}: content is {content!r}; required: a text, or a list of text parts")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise InputError(
                    f"{where}: content[{at}] is {part!r}; required: {{'type': 'text', 'text': ...}}, "
                    "for images and video are not read here"
                )
