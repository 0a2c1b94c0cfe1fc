"""``python -m llmx import``: every key has an outcome, and what is written composes to what the
tool would train. Rows and masks against the tools themselves: ``test_import_rows``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.cli.arguments import read_line
from llmx.cli.foreign.deepspeed import flat
from llmx.cli.import_config import CONVERTERS, main
from llmx.cli.plan import composed_line
from llmx.config import Experiment
from llmx.config.foreign import LAUNCHERS, TOOLS, TRAINER
from llmx.config.groups import key_problem
from llmx.errors import ConfigError, LlmxError

# The keys of examples/train_lora of LLaMA-Factory.
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,chats
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
deepspeed: z3.json
"""
DPO = {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "sigmoid", "dataset": "pairs"}
INFO = {
    "identity": {"file_name": "alpaca.json"},
    "chats": {
        "file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "turns"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                 "assistant_tag": "assistant"},
    },
    "pairs": {
        "hf_hub_url": "me/pairs", "ranking": True, "formatting": "sharegpt", "subset": "en",
        "columns": {"messages": "conversations", "chosen": "good", "rejected": "rejected"},
    },
    "answers": {"file_name": "a.json", "columns": {"prompt": "input", "response": "target"}},
    "pictures": {"file_name": "a.json", "columns": {"images": "images"}},
}  # fmt: skip
ZERO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "round_robin_gradients": True,
    },
}  # fmt: skip
# The keys of examples/llama-3/lora-1b.yml of axolotl.
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: turns
    message_field_role: role
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_fan_in_fan_out:
lora_target_modules: [q_proj, v_proj]
wandb_project: mine
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens: {pad_token: "<|end_of_text|>"}
"""
TRL = """\
#!/bin/bash
MODEL=Qwen/Qwen2-0.5B
accelerate launch -m trl sft --model_name_or_path $MODEL --dataset_name pc.jsonl \\
    --learning_rate 2.0e-4 --num_train_epochs 1 --packing --use_peft --lora_r 32 --lora_alpha 16 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eval_strategy no \\
    --output_dir Qwen2-0.5B-SFT --push_to_hub
"""
# The keys of DeepSpeed-Chat's training_scripts.
CHAT = """\
OUTPUT=$1
mkdir -p $OUTPUT
deepspeed --num_gpus 2 main.py --data_path Dahoas/rm-static Dahoas/full-hh-rlhf \\
   --data_split 2,4,4 \\
   --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 \\
   --per_device_eval_batch_size 4 --max_seq_len 512 --learning_rate 9.65e-6 --weight_decay 0. \\
   --num_train_epochs 4 --gradient_accumulation_steps 1 --lr_scheduler_type cosine \\
   --num_warmup_steps 0 --seed 1234 --gradient_checkpointing --zero_stage 3 --deepspeed \\
   --output_dir out &> $OUTPUT/training.log
"""
DEEPSPEED = """\
export NCCL_DEBUG=INFO
deepspeed --hostfile hosts --master_port 29501 run_clm.py --deepspeed z3.json \\
   --model_name_or_path facebook/opt-125m --train_file c.txt --block_size 512 --bf16 --do_train \\
   --per_device_train_batch_size 4 --learning_rate 1e-5 --max_steps 100 --output_dir out
"""
CHAT_ROW = {"turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which the other tool is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    for name in ("data/alpaca.json", "data/a.json"):
        (tmp_path / name).write_text('[{"instruction": "a", "input": "", "output": "b"}]')
    for name in ("data/chats.jsonl", "chats.jsonl"):
        (tmp_path / name).write_text(json.dumps(CHAT_ROW))
    (tmp_path / "pc.jsonl").write_text('{"prompt": "a", "completion": " b"}')
    (tmp_path / "c.txt").write_text("Some text.")
    (tmp_path / "z3.json").write_text(json.dumps(ZERO))
    (tmp_path / "hosts").write_text("n1 slots=4\nn2 slots=4\n")
    return tmp_path


def imported(text: str, name: str, *words: str) -> Experiment:
    """The experiment that is written for a file, as ``python -m llmx`` composes it."""
    Path(name).write_text(text)
    assert main([name, "--out", "out", *words]) == 0
    written = re.search(
        r"# (python -m llmx .*)", Path("out", f"{Path(name).stem}.yaml").read_text()
    )
    assert written is not None
    words = (*written[1].split()[3:], *(["hardware=h100x8"] * ("--config-dir" not in written[1])))
    return composed_line(read_line(words)).experiment


def outcomes(printed: str) -> dict[str, str]:
    """Key -> outcome, of a report whose keys fit into one line."""
    rows = re.findall(r"^  (\S.*?)  +.*?  (mapped|no effect|refused|unknown)  ", printed, re.M)
    assert rows
    return dict(rows)


def edited(text: str, **changes: Any) -> str:
    return yaml.safe_dump({**yaml.safe_load(text), **changes})


def test_llama_factory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = imported(LLAMA_FACTORY, "lf.yaml")
    seen = outcomes(capsys.readouterr().out)
    keys = {*yaml.safe_load(LLAMA_FACTORY)}
    assert keys <= {*seen}, keys - {*seen}
    assert {f"z3.json: {name}" for name, _ in flat(ZERO) if len(name) < 30} <= {*seen}
    assert (exp.adapter.rank, exp.adapter.alpha, exp.adapter.targets) == (8, 16, ["all-linear"])
    first, second = exp.data.sources
    assert (first.form, first.max_rows, second.columns) == (
        "alpaca",
        1000,
        {"conversations": "turns"},
    )
    assert (exp.data.template, exp.data.loss_on, exp.data.packing) == (
        "chatml",
        "assistant",
        "none",
    )
    assert (exp.data.seq_len, exp.data.eval_fraction, exp.task.eval_every_steps) == (2048, 0.1, 500)
    assert (exp.batch.micro_batch, exp.batch.accumulation, exp.task.epochs) == (1, 8, 3.0)
    assert (exp.optim.schedule, exp.optim.min_lr_ratio, exp.optim.warmup_fraction) == (
        "cosine",
        0,
        0.1,
    )
    assert (exp.optim.betas, exp.optim.weight_decay, exp.optim.lr) == ([0.9, 0.999], 0.0, 1e-4)
    assert (exp.zero.stage, exp.zero.offload_optimizer, exp.zero.overlap_comm) == (3, "cpu", False)
    assert exp.zero.extra == {"zero_optimization": {"contiguous_gradients": True}}
    assert (exp.precision, exp.model.activation_checkpointing, exp.seed) == ("bf16", "full", 42)


def test_llama_factory_dpo(here: Path) -> None:
    exp = imported(edited(LLAMA_FACTORY, **DPO, val_size=0.0, eval_strategy="no"), "dpo.yaml")
    assert (exp.task.kind, exp.task.options["beta"], exp.data.path) == ("dpo", 0.2, "hub:me/pairs")
    assert (exp.data.form, exp.data.subset, exp.data.columns) == (
        "preference",
        "en",
        {"chosen": "good"},
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"template": "mistral"}, "data.template=auto"),
        ({"pissa_init": True}, "finetuning_type"),
        ({"stage": "ppo"}, "sft, pt, rm, dpo, kto"),
        ({"dataset": "pictures"}, "images"),
        ({"dataset": "nothing"}, "data.path=FILE"),
        ({"optim": "adafactor"}, "optim.kind=adamw"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "optim.schedule=cosine"),
        ({"cutof_len": 3}, "cutoff_len"),
        ({"quantization_bit": 8}, "adapter.quantize=nf4"),
        ({"report_to": "comet_ml"}, "tracking.kinds=[]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    changes: dict[str, Any], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lf.yaml").write_text(edited(LLAMA_FACTORY, **changes))
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name}.*nothing was written.*--without {name}"):
        main(["lf.yaml", "--out", "out"])
    assert says in " ".join(capsys.readouterr().out.split())
    assert not Path("out").exists()


def test_a_refused_key_is_settled_or_left_out(here: Path) -> None:
    text = edited(LLAMA_FACTORY, template="mistral", cutof_len=3, use_galore=True)
    words = ("data.template=auto", "batch.global_batch=64", "--without", "cutof_len,use_galore")
    exp = imported(text, "lf.yaml", *words)
    assert (exp.data.template, exp.batch.global_batch) == ("auto", 64)
    assert exp.batch.accumulation is None
    with pytest.raises(ConfigError, match="is there already"):
        main(["lf.yaml", "--out", "out", *words])


def test_an_input_that_is_not_mapped_is_not_read(here: Path) -> None:
    exp = imported(edited(LLAMA_FACTORY, dataset="answers"), "lf.yaml")
    assert (exp.data.form, exp.data.columns) == (
        "prompt_response", {"prompt": "input", "response": "target"},
    )  # fmt: skip


def test_axolotl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = imported(AXOLOTL, "ax.yml")
    assert {*yaml.safe_load(AXOLOTL)} <= {*outcomes(capsys.readouterr().out)}
    assert (exp.data.form, exp.data.columns, exp.data.packing) == (
        "messages", {"messages": "turns"}, "best_fit",
    )  # fmt: skip
    assert (exp.optim.kind, exp.zero.stage, exp.optim.warmup_steps) == ("adam8bit", 0, 10)
    assert (exp.optim.lr, exp.tracking.kinds, exp.tracking.project) == (2e-4, ["wandb"], "mine")
    assert (exp.adapter.targets, exp.data.template) == (["q_proj", "v_proj"], "auto")


def test_trl(here: Path) -> None:
    text = TRL.replace(" --packing", " --packing --model_revision 007")
    assert imported(text, "text.sh").model.revision == "007"
    assert imported(text, "word.sh", "model.revision=1.10").model.revision == "1.10"
    exp = imported(TRL, "sft.sh")
    assert (exp.data.form, exp.data.template, exp.data.loss_on) == (
        "prompt_response",
        "plain",
        "last",
    )
    assert (exp.adapter.rank, exp.adapter.dropout, exp.adapter.targets) == (
        32,
        0.05,
        ["q_proj", "v_proj"],
    )
    assert (exp.data.packing, exp.data.seq_len, exp.precision) == ("best_fit", 1024, "bf16")


def test_deepspeed_chat(here: Path) -> None:
    exp = imported(CHAT, "chat.sh")
    assert [source.weight for source in exp.data.sources] == [0.2, 0.2]
    assert (exp.data.template, exp.data.loss_on, exp.precision) == ("plain", "all", "fp16")
    assert (exp.hardware.slots, exp.zero.stage, exp.optim.betas) == (2, 3, [0.9, 0.95])


def test_a_command_with_a_hostfile(here: Path) -> None:
    Path("run.sh").write_text(DEEPSPEED)
    with pytest.raises(ConfigError, match=r"hosts: names no devices.*hardware\.device="):
        main(["run.sh", "--out", "out"])
    exp = imported(DEEPSPEED, "run.sh", "hardware.device=a100_80g")
    assert [(host.name, host.slots) for host in exp.hardware.hosts] == [("n1", 4), ("n2", 4)]
    assert (exp.task.kind, exp.data.packing, exp.task.steps) == ("pretrain", "concat", 100)
    assert exp.launch.master_port == 29501


def test_the_json_wins_over_defaults(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offload = {"device": "none", "pin_memory": True}
    zero = {"stage": 2, "offload_optimizer": offload, "sub_group_size": 1e9, "mics_shard_size": 2}
    config = {"gradient_clipping": 0.5, "train_batch_size": 64, "zero_optimization": zero}
    Path("z.json").write_text(json.dumps(config))
    command = (
        "accelerate launch --num_processes 8 --num_machines 1 --deepspeed_config_file z.json t.py "
        "--model_name_or_path facebook/opt-125m --train_file c.txt --block_size 512 --bf16"
    )
    exp = imported(command, "run.sh", "--without", "zero_optimization.mics_shard_size")
    assert (exp.optim.clip_norm, exp.batch.global_batch, exp.hardware.slots) == (0.5, 64, 8)
    seen = outcomes(capsys.readouterr().out)
    assert (seen["num_machines"], seen.get("max_grad_norm")) == ("no effect", None)
    with pytest.raises(ConfigError, match="--without nothing: .*no such key"):
        main(["run.sh", "--without", "nothing"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "learning_rate: 1\n", "--from trl-sft"),
        ("a.yaml", "beta: 1\npacking_strategy: bfd\n", r"\(trl-sft, trl-dpo\)"),
        ("a.json", json.dumps(ZERO), "Import the shell file"),
        ("a.sh", "echo a\n", "has no commands"),
        ("a.sh", "trl sft --lora_r $1\n", "Write the value"),
        ("a.yaml", "base_model: a/b\nmicro_batch_size: 1\n", r"Add data\.path="),
    ],
)
def test_files_that_do_not_say_enough(name: str, text: str, says: str, here: Path) -> None:
    Path(name).write_text(text)
    with pytest.raises(LlmxError, match=says):
        main([name])


def names(table: Mapping[str, str]) -> list[str]:
    return [name for entry in table.values() for name in entry.split()]


@pytest.mark.parametrize("tool", [*TOOLS.values(), LAUNCHERS], ids=lambda tool: tool.title)
def test_a_table_has_each_key_once_and_real_ones_of_ours(tool: Any) -> None:
    keys = [name for table in (tool.mapped, tool.no_effect, tool.refused) for name in names(table)]
    assert [name for name in keys if keys.count(name) > 1] == []
    assert [key for key in tool.mapped if key != "task.options" and key_problem(key)] == []
    assert {*tool.defaults, *tool.remarks, *tool.marks.split()} - {
        *keys,
        "zero_optimization",
    } == set()
    converters = next(
        (CONVERTERS[n] for n, t in TOOLS.items() if t is tool and n in CONVERTERS), {}
    )
    assert {*tool.mapped.values()} or converters


def test_every_field_of_trl_and_its_default_is_known() -> None:
    from transformers import TrainingArguments
    from trl import DPOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig

    configs = {"trl-sft": SFTConfig, "trl-dpo": DPOConfig, "trl-reward": RewardConfig}
    for name, config in {**configs, "trainer": TrainingArguments}.items():
        tool = TOOLS[name]
        known = {
            key for table in (tool.mapped, tool.no_effect, tool.refused) for key in names(table)
        }
        fields = {field.name: field for field in dataclasses.fields(config)}
        if name != "trainer":
            fields |= {f.name: f for f in dataclasses.fields(ModelConfig)}
            fields |= {f.name: f for f in dataclasses.fields(ScriptArguments)}
        assert sorted({*fields} - known) == []
        given = {key: value for key, value in tool.defaults.items() if key in fields}
        theirs = {key: fields[key].default for key in given}
        theirs |= {"bf16": given["bf16"], "gradient_checkpointing": given["gradient_checkpointing"]}
        if name == "trl-dpo":
            theirs["loss_type"] = "sigmoid"
        assert given == {k: getattr(v, "value", v) for k, v in theirs.items()}


def page_of(key: str, tool: Any) -> str:
    """The keys of a tool as a section of docs/coming-from.md; those of the Trainer, which it also
    takes, are left to its own."""
    inherits = tool is not TRAINER and {*names(TRAINER.mapped)} & {*names(tool.mapped)}
    shared = {*names(TRAINER.mapped), *names(TRAINER.no_effect), *names(TRAINER.refused)}
    shared -= {n for n, value in tool.defaults.items() if value != TRAINER.defaults.get(n)}
    shared = shared if inherits and key != "deepspeed-chat" else set()
    lines = [f"### {tool.title}", "", f"Defaults are those of {tool.defaults_of}."]
    lines[-1] += " Keys of Transformers' Trainer are read, too." * bool(shared)
    lines += ["", "| there | default | here | |", "|---|---|---|---|"]
    for ours, entry in tool.mapped.items():
        for name in entry.split():
            if name not in shared:
                default = f"`{tool.defaults[name]}`" if name in tool.defaults else ""
                lines.append(f"| `{name}` | {default} | `{ours}` | {tool.remarks.get(name, '')} |")
    for title, table in (("Without effect here", tool.no_effect), ("Refused", tool.refused)):
        items = []
        for reason, entry in table.items():
            listed = [f"`{name}`" for name in entry.split() if name not in shared]
            items += [f"- {reason or 'see the report'}: {', '.join(listed)}"] if listed else []
        lines += ["", f"{title}:", "", *items] if items else []
    return "\n".join(lines)


def test_the_page_has_every_key(golden: Callable[[str, str], None]) -> None:
    """docs/coming-from.md: recording the golden files writes its tables anew."""
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    begin, end = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
    head, tail = page.partition(begin)[0], page.partition(end)[2]
    tools = {**TOOLS, "launchers": LAUNCHERS}
    tables = "\n\n".join(page_of(key, tool) for key, tool in tools.items())
    golden("../../docs/coming-from.md", f"{head}{begin}\n{tables}\n\n{end}{tail}")
