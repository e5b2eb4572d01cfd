"""Chat templates as the common models have them, shortened to what says who speaks. What is between the generation tags
(here `[[` and `]]`, taken out by `plain`) is the assistant's, by the template's own word."""

from __future__ import annotations

from tokenizers_for_tests import byte_level
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "[[{{ m['content'] + '<|im_end|>' }}]]{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if m['role'] == 'assistant' %}"
    "[[{{ m['content'] | trim + '<|eot_id|>' }}]]"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\n' }}[[{{ m['content'] | trim + '<end_of_turn>' }}]]"
    "{{ '\n' }}{% else %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST]' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}[[{{ ' ' + m['content'] | trim + eos_token }}]]{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}[[{{ m['content'] + '<|end|>' }}]]"
    "{{ '\n' }}{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN_3 = (  # an empty thought before the last answer, none before earlier ones
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "[[{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>' }}]]{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_3_THINKING = (  # with thoughts and tools: thoughts of turns before the last question are left out
    "{% if tools %}{{ '<|im_start|>system\n<tools>' + tools | tojson + '</tools><|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set said, thought = m.content, m.reasoning_content | default('') %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1_DISTILL = (  # asks for a thought, and leaves all thoughts out of conversations
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '</s>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi-3": PHI_3,
    "qwen-3": QWEN_3,
}
SPECIAL = [
    *(
        "<s>",
        "</s>",
        "<pad>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<|assistant|>",
        "<|user|>",
        "<|system|>",
        "<|end|>",
    ),
]
TEXTS = [
    "Where is the key? It is under the stone by the river.",
    "Yes, and the other one is in the iron box.",
]


def plain(template: str) -> str:
    """The template as models have it: without marks."""
    return template.replace("[[", "").replace("]]", "")


def marked(template: str) -> str:
    """The template with transformers' own marks of what the assistant says."""
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def chat_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of these templates; the template without marks, or none."""
    tokenizer = byte_level(TEXTS * 20)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    tokenizer.chat_template = None if template is None else plain(template)
    return tokenizer
