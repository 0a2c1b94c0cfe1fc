"""Every option of every group composes and plans; what is impossible says so."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from llmx.__main__ import main
from llmx.config import to_dict
from llmx.config.groups import CONF, GROUPS, options
from llmx.errors import ConfigError
from tests.composing import composed, planned, sized
from tests.rundirs import TINY_LLAMA

# What an option needs beside it to make a possible run.
PARTNERS = {
    ("data", "file"): ["data.path={data}/rows.jsonl", "model=tiny"],
    ("data", "text"): ["data.path={data}/corpus.txt", "task=pretrain"],
    ("data", "alpaca"): ["data.path={data}/alpaca.json"],
    ("data", "hub"): ["data.path=owner/name"],
    ("data", "labelled"): ["data.path={data}/rows.jsonl"],
    ("data", "messages"): ["data.path={data}/chats.jsonl", "model=llama3_8b"],
    ("data", "mixture"): ["data.sources=[{{path: {data}/a.jsonl, weight: 2}}]"],
    ("data", "sharegpt"): ["data.path={data}/chats.json", "model=llama3_8b"],
    ("experiment", "book_reviews"): ["data.path={data}/a.jsonl", "data.eval_path={data}/a.jsonl"],
    **{
        ("experiment", name): ["data.path={data}/a.jsonl", "hardware=a100x8"]
        for name in ("lora", "qlora", "dpo", "kto", "reward", "classify", "embed", "distill")
    },
    ("data", "fincorpus"): ["data.path={data}", "task=pretrain", "model=llama2_7b"],
    ("model", "hf"): ["model.path=owner/name"],
    ("model", "llama_1_7b"): ["model.tokenizer={data}"],
    ("adapter", "lora"): ["model=llama2_7b", "hardware=a100x8"],
    ("adapter", "qlora"): ["model=llama2_7b", "hardware=a100x8"],
    ("model", "bert_tiny"): ["model.tokenizer={data}", "task=mlm"],
    ("model", "megatron_bert_3_9b"): ["model.tokenizer={data}", "task=mlm"],
    ("experiment", "grpo"): ["model.path=owner/name", "hardware=a100x8"],
    ("task", "distill"): ["task.options.teacher=owner/name"],
    ("optim", "adafactor"): ["zero=stage0"],
    ("optim", "adam8bit"): ["zero=stage0", "hardware=a100x8"],
    ("zero", "stage3_zeropp"): ["hardware=a100x2_v100x2"],
    ("hardware", "static"): ["hardware.hosts=[{{name: a, slots: 2, device: a100_80g}}]"],
    ("hardware", "hostfile"): ["hardware.path={hostfile}", "hardware.device=a100_80g"],
    ("hardware", "slurm"): ["hardware.nodes=2", "hardware.slots=4", "hardware.device=a100_80g"],
    ("launch", "slurm"): ["hardware=a100x2_v100x2"],
    ("launch", "openmpi"): ["hardware=a100x2_v100x2"],
    ("batch", "by_speed"): ["hardware=a100x2_v100x2"],
    ("batch", "tokens_2m"): ["hardware=a800x2_n7"],
}
# launch=external needs processes: tests/cluster/test_train.py.
ALONE = [
    [(group, name)]
    for group in GROUPS
    for name in options(group)
    if group not in ("tracking", "checkpoint") and (group, name) != ("launch", "external")
]
BESIDE = [
    [("tracking", name), ("checkpoint", checkpoint)]
    for name, checkpoint in zip(options("tracking"), itertools.cycle(options("checkpoint")))
]


@pytest.mark.parametrize(
    "chosen", [*ALONE, *BESIDE], ids=lambda chosen: "-".join("=".join(one) for one in chosen)
)
def test_every_option_composes_and_plans(chosen: list[tuple[str, str]], tmp_path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("gpu-1 slots=8\ngpu-2 slots=8\n")
    for file in ("rows.jsonl", "corpus.txt", "alpaca.json", "chats.json", "chats.jsonl", "a.jsonl"):
        (tmp_path / file).touch()
    partners = [item for one in chosen for item in PARTNERS.get(one, [])]
    words = ["=".join(one) for one in chosen]
    words += [item.format(hostfile=hostfile, data=tmp_path) for item in partners]
    done = composed(words)
    assert done.plan.world_size >= 1
    batch = done.plan.batch
    ranks = range(len(batch.micro_batches))
    assert batch.global_batch == sum(sum(batch.sizes_of(rank)) for rank in ranks)
    assert done.ds_config["train_batch_size"] == (
        done.ds_config["train_micro_batch_size_per_gpu"] * batch.accumulation * done.plan.world_size
    )
    assert '"auto"' not in json.dumps(done.ds_config)


def test_every_file_says_what_it_is_and_sets_no_steps() -> None:
    """Steps win over epochs, so a shipped value would silently beat an epochs that was typed."""
    paths = sorted(CONF.rglob("*.yaml"))
    assert len(paths) > 50
    for path in paths:
        text = path.read_text()
        comments = [line for line in text.splitlines()[:2] if line.startswith("# ")]
        assert [line for line in comments if "@package" not in line], path
        task = (yaml.safe_load(text) or {}).get("task")
        assert not (isinstance(task, dict) and task.get("steps")), path


@pytest.mark.usefixtures("made_up_traces")
def test_the_second_copy_of_hpz_goes_with_an_offload() -> None:
    """hpZ and an offload together are refused: the advice can be typed as it is."""
    overrides = ["hardware=a100x2_v100x2", "model=llama3_8b", "zero=stage3", "data.seq_len=512"]
    overrides += ["model.activation_checkpointing=full", "zero.hpz_partition_size=2"]
    overrides += ["batch.global_batch=4"]
    advised = planned(overrides)
    (text,) = [each for each in advised.plan.warnings if "These fit by the plan" in each]
    typed = text.partition("first: ")[2].partition(" (")[0]
    assert typed == "zero=stage3_offload zero.hpz_partition_size=1"
    again = planned([*overrides, *typed.split()])
    assert all(part.fits for part in again.plan.memory)


@pytest.mark.usefixtures("made_up_traces")
def test_a_recipe_needs_what_its_comment_says() -> None:
    # The rest of it is in golden/plan.
    llama = planned(["experiment=llama2_7b_fincorpus"])
    states = llama.plan.memory[0]
    # Published: about 28.7 GB of states a GPU for 7B under ZeRO-3 on four, gradients in bf16.
    sharded = states.optimizer_gib + states.gradients_gib + 2 * 6_738_415_616 / 4 / 1024**3
    assert 24 < sharded - states.gradients_gib / 2 < 27
    # It does not fit its hardware; what its comment names does, with the same steps.
    assert not any(part.fits for part in llama.plan.memory)
    comment = (CONF / "experiment/llama2_7b_fincorpus.yaml").read_text()
    variant = ["zero.hpz_partition_size=1", "zero.offload_optimizer=cpu"]
    assert " ".join(variant) in comment
    fitting = planned(["experiment=llama2_7b_fincorpus", *variant])
    assert all(part.fits for part in fitting.plan.memory)
    assert fitting.plan.batch.tokens_per_step == llama.plan.batch.tokens_per_step
    bert, opt = planned(["experiment=megatron_bert_3_9b"]), planned(["experiment=opt_1_3b_sft"])
    assert all(part.fits for part in (*bert.plan.memory, *opt.plan.memory))
    assert 3.8e9 < bert.plan.num_parameters < 3.9e9
    assert bert.plan.batch.micro_batches == (16,) * 14


def test_recipes_are_those_of_their_sources() -> None:
    for name, source in {
        "llama2_7b_fincorpus": ((5e-5, 0.01, [0.9, 0.999]), ("linear", 0.0, 1.0)),
        "llama_1_7b_pretrain": ((3e-4, 0.1, [0.9, 0.95]), ("cosine", 0.1, 0.9)),
        "opt_1_3b_sft": ((9.65e-6, 0.1, [0.9, 0.95]), ("cosine", 0.0, 1.0)),
    }.items():
        optim = composed([f"experiment={name}"]).experiment.optim
        schedule = (optim.schedule, optim.min_lr_ratio, optim.decay_end_fraction)
        assert ((optim.lr, optim.weight_decay, optim.betas), schedule) == source, name
    assert composed(["experiment=llama2_7b_fincorpus"]).experiment.task.epochs == 1
    small = sized(["experiment=llama_1_7b_pretrain"])
    assert 1.6e9 < small.plan.num_parameters < 1.9e9
    assert small.experiment.optim.warmup_fraction == 0.03
    assert abs(small.plan.batch.tokens_per_step - 2_097_152) / 2_097_152 < 0.03
    opt = composed(["experiment=opt_1_3b_sft"])
    assert (opt.plan.batch.micro_batches, opt.plan.batch.accumulation) == ((8, 8, 8, 8), 1)
    exp = opt.experiment
    assert (exp.task.epochs, exp.data.seq_len, exp.optim.warmup_steps) == (2, 512, 0)
    data = exp.data
    assert (data.sources[0].path, data.columns) == ("Dahoas/rm-static", {"response": "chosen"})


def test_unequal_slots_are_refused_for_slurm(tmp_path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=2\nb slots=1\n")
    hardware = ["hardware=hostfile", f"hardware.path={hostfile}", "hardware.device=cpu"]
    with pytest.raises(ConfigError, match="needs the same number of slots on every host"):
        composed([*hardware, "launch=slurm"])
    micro = ["batch.global_batch=null", "batch.micro_batch=2"]
    plan = composed([*hardware, "launch=openmpi", *micro]).plan
    assert [rank.host for rank in plan.ranks] == [0, 0, 1]


def test_a_local_model_directory_is_checked_by_its_config(tmp_path) -> None:
    config = {"model_type": "llama", "vocab_size": 256, **TINY_LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    words = ["model=hf", f"model.path={tmp_path}", "data=demo", "data.seq_len=1024"]
    with pytest.raises(ConfigError, match="at most 512 positions"):
        composed(words)


@pytest.mark.usefixtures("made_up_traces")
@pytest.mark.parametrize(
    ("option", "overrides"),
    [
        ("demo", ["hardware=cpu2"]),
        ("mission", ["task=sft", "zero=stage3", "hardware=a100x2_v100x2"]),
        ("llama2_7b_fincorpus", ["experiment=llama2_7b_fincorpus"]),
        ("infinity", ["zero=infinity", "hardware=a100x8"]),
        ("zeropp", ["zero=stage3_zeropp", "hardware=a800x2_n7"]),
    ],
)
def test_rendered_plan_and_ds_config(option, overrides, golden, monkeypatch) -> None:
    for name in ("FINCORPUS", "TOKENIZER", "BERT_TOKENIZER", "CORPUS", "SFT_DATA"):
        monkeypatch.delenv(f"LLMX_{name}", raising=False)
    done = planned(overrides)
    golden(f"plan/{option}.ds_config.json", json.dumps(done.ds_config, indent=2) + "\n")
    golden(f"plan/{option}.plan.json", json.dumps(done.plan.to_dict(), indent=2) + "\n")
    if option == "demo":  # most of a config are its defaults
        text = yaml.safe_dump(to_dict(done.experiment), sort_keys=False, width=100)
        golden("plan/demo.config.yaml", text)


def test_typed_steps_win_over_the_epochs_of_a_group() -> None:
    exp = composed(["task.steps=10", "optim.warmup_steps=0"]).experiment
    assert (exp.task.steps, exp.task.epochs) == (10, None)
    assert (exp.optim.warmup_steps, exp.optim.warmup_fraction) == (0, None)


def test_a_run_is_composed_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    compose = ConfigLoaderImpl.load_configuration

    def counted(self, config_name, overrides, *words, **options):
        found.append(list(overrides))
        return compose(self, config_name, overrides, *words, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    assert main(["hardware=cpu2", "dry_run=true", "run_dir=run"]) == 0
    assert len(found) == 1
