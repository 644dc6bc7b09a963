"""Run with `trl`: checks an export with its functions, and takes one step of SFT or DPO on a model of a few thousand numbers.

Nothing is downloaded: the tokenizer has a token a byte, the model is made of its configuration.
"""

import json
import sys
import tempfile

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import is_conversational, maybe_apply_chat_template

kind, folder = sys.argv[1:]
TEMPLATE = """{%- if tools %}<|start|>tools {{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }} {{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments }}</call>{% endfor %}
{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant {% endif %}"""


def tokenizer():
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>", "<|start|>", "<|end|>"]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def model(made):
    config = LlamaConfig(
        vocab_size=len(made), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, pad_token_id=made.pad_token_id, eos_token_id=made.eos_token_id,
    )  # fmt: skip
    # From a folder, because the DPO trainer loads its reference model from where the model came from.
    saved = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(saved)
    return LlamaForCausalLM.from_pretrained(saved)


torch.manual_seed(0)
words = tokenizer()
policy = model(words)
rows = load_dataset(folder, split="train")
assert all(is_conversational(row) for row in rows)
names = ("messages",) if kind == "sft" else ("prompt", "chosen", "rejected")
rendered = [maybe_apply_chat_template({name: row[name] for name in names}, words) for row in rows]
Trainer, Config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
settings = Config(
    output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, learning_rate=0.1, report_to=[], use_cpu=True,
    bf16=False, save_strategy="no", max_length=4096,
)  # fmt: skip
before = [parameter.detach().clone() for parameter in policy.parameters()]
trained = Trainer(model=policy, args=settings, train_dataset=rows, processing_class=words).train()
moved = any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
print(
    json.dumps(
        {"rows": len(rows), "steps": trained.global_step, "loss": trained.training_loss, "moved": moved, "texts": rendered}
    )
)
