"""Chat templates: what they render to, with the helpers that they count on; a named refusal for what is malformed."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from model_lab import TARGET, target_tensors, write_checkpoint

from hipfire_kernels import CheckpointError, InputError
from hipfire_kernels.cli import app
from hipfire_kernels.model import ChatTemplate, Tokenizer, demo_pair_path
from hipfire_kernels.model.convert import Conversion

TEMPLATE = """
{%- set seen = namespace(users=0) %}
{%- if tools %}
    {{- '<tools>' + tools | tojson + '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join('') if message.content else '' %}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message comes first') }}
    {%- elif message.role == 'user' %}
        {%- set seen.users = seen.users + 1 %}
    {%- elif message.role == 'stop' %}
        {%- break %}
    {%- endif %}
    {%- if '</think>' in content and not loop.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + call.name }}
        {%- for key, value in call.arguments | items %}
            {{- ' ' + key + '=' + (value if value is string else value | tojson) }}
        {%- endfor %}
        {{- '</call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if not seen.users %}
    {{- raise_exception('nobody asks') }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""
ASK = {"role": "user", "content": "Hé <b>?"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    ASK,
    {"role": "assistant", "content": "<think>so</think>\n\nwell"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": [1, "é"], "y": "z"}}]},
    {"role": "user", "content": "more"},
]
TOOLS = [{"name": "f", "about": "é < 1"}]


def folder(path: Path, template: Any = TEMPLATE, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<|im_start|>", "pad_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **tokens, **config}))
    shutil.copy(demo_pair_path() / "target" / "tokenizer.json", path)
    return path


def test_a_conversation(tmp_path: Path) -> None:
    chat = ChatTemplate(folder(tmp_path))
    assert chat.render(TALK) == (
        "<|system|>Be brief.<|im_end|><|user|>Hé <b>?<|im_end|><|assistant|>well<|im_end|>"
        '<|assistant|><call>f x=[1, "é"] y=z</call><|im_end|><|user|>more<|im_end|><|assistant|>'
    )
    assert chat.render([ASK], add_generation_prompt=False) == "<|user|>Hé <b>?<|im_end|>"
    assert chat.render([ASK], enable_thinking=False) == "<|user|>Hé <b>?<|im_end|><|assistant|><think></think>"
    assert chat.render([ASK], enable_thinking=True) == "<|user|>Hé <b>?<|im_end|><|assistant|>"
    assert chat.render([ASK, {"role": "stop", "content": ""}, ASK]) == "<|user|>Hé <b>?<|im_end|><|assistant|>"
    with_tools = chat.render([ASK], tools=TOOLS)
    assert with_tools == '<tools>[{"name": "f", "about": "é < 1"}]</tools>\n<|user|>Hé <b>?<|im_end|><|assistant|>'


def test_ids_are_those_of_the_text(tmp_path: Path) -> None:
    chat, tokenizer = ChatTemplate(folder(tmp_path)), Tokenizer(tmp_path)
    ids = chat.encode(TALK, tokenizer, enable_thinking=False)
    assert ids == tokenizer.encode(chat.render(TALK, enable_thinking=False))
    assert tokenizer.decode(ids).startswith("<|system|>Be brief.")


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ bos_token }}{{ pad_token }}{{ cls_token }}", "<|im_start|>"),
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}", '{"a": 1, "b": "\\u00e9"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02345678"),
        ("{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0123"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ unknown }}{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_helpers_and_white_space(tmp_path: Path, template: str, want: str) -> None:
    assert ChatTemplate(folder(tmp_path, template)).render([ASK]) == want


def test_the_file_goes_before_the_key_and_stands_alone(tmp_path: Path) -> None:
    (folder(tmp_path) / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate(tmp_path).render([ASK]) == "file <|im_end|>"
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate(tmp_path).render([ASK]) == "file "


def test_a_template_per_use(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    chat = ChatTemplate(folder(tmp_path / "two", named))
    assert chat.render([ASK]) == "plain"
    assert chat.render([ASK], tools=TOOLS) == "tools"
    assert ChatTemplate(folder(tmp_path / "one", named[:1])).render([ASK], tools=TOOLS) == "plain"


def test_a_container_keeps_the_template(tmp_path: Path) -> None:
    source = folder(write_checkpoint(tmp_path / "source", TARGET, target_tensors(TARGET)), TEMPLATE, unrelated=1)
    Conversion(source, "f16").write(tmp_path / "target.hfq", lambda tensor: None)
    assert ChatTemplate(tmp_path / "target.hfq").render(TALK) == ChatTemplate(source).render(TALK)
    bare = write_checkpoint(tmp_path / "bare", TARGET, target_tensors(TARGET))
    Conversion(bare, "f16").write(tmp_path / "bare.hfq", lambda tensor: None)
    with pytest.raises(CheckpointError, match=r"bare\.hfq: holds no chat template"):
        ChatTemplate(tmp_path / "bare.hfq")


@pytest.mark.parametrize(
    ("template", "config", "message"),
    [
        (None, {}, r"holds no chat template, neither chat_template\.jinja nor chat_template in tokenizer_config\.json"),
        ("a\n{% if %}", {}, "line 2 is not Jinja"),
        ("{% generation %}", {}, "line 1 is not Jinja .*generation"),
        (3, {}, "it must be a text, or a list of objects with name and template, one named 'default'"),
        ([{"name": "rag", "template": ""}], {}, "one named 'default'"),
        ([{"template": ""}], {}, "one named 'default'"),
        ([{"name": "default", "template": 1}], {}, "one named 'default'"),
        ({"name": "default"}, {}, "one named 'default'"),
        ("x", {"eos_token": 3}, "eos_token is 3; it must be a text or an object with content"),
        ("x", {"bos_token": {"id": 3}}, "bos_token is {'id': 3}"),
    ],
)
def test_illegal_template_is_named(tmp_path: Path, template: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(folder(tmp_path, template, **config))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_unreadable_file_is_named(tmp_path: Path, name: str) -> None:
    (folder(tmp_path) / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is \[\]; required: a list of at least one"),
        ("hello", "messages is 'hello'"),
        (ASK, "messages is {'role'"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([ASK, {"content": "x"}], r"messages\[1\]: role is None"),
        ([{"role": "", "content": "x"}], "role is ''"),
        ([{"role": 3, "content": "x"}], "role is 3"),
        ([{"role": "user"}], r"messages\[0\]: content is None; required: a text"),
        ([{"role": "user", "content": 3}], "content is 3"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content is None"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "images and video are not read"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is {'type': 'text'}"),
        ([ASK, {"role": "system", "content": "x"}], "does not take these messages .*: a system message comes first"),
        ([{"role": "system", "content": "x"}], "nobody asks"),
        ([ASK, {"role": "a", "content": "", "tool_calls": [{"name": 1, "arguments": {}}]}], r"TypeError"),
        ([ASK, {"role": "a", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": {1}}}]}], r"TypeError"),
    ],
)
def test_malformed_messages_are_named(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChatTemplate(folder(tmp_path)).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__globals__.keys() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    messages = [dict(ASK)]
    with pytest.raises((CheckpointError, InputError), match=r"not allowed|unsafe|OverflowError|undefined"):
        ChatTemplate(folder(tmp_path, template)).render(messages)
    assert messages == [ASK]


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hfk generate` with plain numpy attention."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app(["generate", "--kv-format", "f32", "--max-new-tokens", "4", "--no-draft", "--json", *options])
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


def test_generate_takes_a_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(demo_pair_path() / "target", target)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}]
    text = ChatTemplate(folder(target)).render(messages, enable_thinking=False)
    want = json.loads(generated(capsys, "--target", str(target), "--prompt", text)[1])
    chat = ("--target", str(target), "--prompt", "é?", "--chat", "--system", "Be brief.", "--no-thinking")
    code, out, _ = generated(capsys, *chat)
    assert code == 0
    found = json.loads(out)
    assert (found["tokens"], found["prefill_tokens"]) == (want["tokens"], want["prefill_tokens"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "x"), "--system and --thinking say how a chat goes; pass --chat too"),
        (("--thinking",), "pass --chat too"),
        (("--chat",), "holds no chat template"),
    ],
)
def test_generate_refuses_what_is_no_chat(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, out, err = generated(capsys, "--prompt", "x", *options)
    assert code == 2
    assert message in err + out


def test_chat_equals_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="asks transformers itself: pip install hipfire-kernels[parity]"
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(demo_pair_path() / "target" / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    chat, tokenizer = ChatTemplate(folder(tmp_path)), Tokenizer(tmp_path)
    for options in ({}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}):
        given: dict[str, Any] = {"add_generation_prompt": True, **options}
        want = theirs.apply_chat_template(TALK, chat_template=TEMPLATE, tokenize=False, **given)
        assert chat.render(TALK, **options) == want
        ids = theirs.apply_chat_template(TALK, chat_template=TEMPLATE, return_dict=False, **given)
        assert chat.encode(TALK, tokenizer, **options) == ids
