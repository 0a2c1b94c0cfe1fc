"""Real text in a real 50k vocabulary, from scratch: the loss falls and the model is usable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command_runs import llmx, train
from tests.realdata import real_tokenizer_dir

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

STEPS = 24

NETWORK = (
    *("model.config.hidden_size=64", "model.config.intermediate_size=128"),
    *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=4"),
    *("model.config.num_key_value_heads=2", "task.eval_generate=0", f"task.steps={STEPS}"),
    *("optim=demo", "batch.global_batch=8", "batch.micro_batch=4"),
)


def test_pretraining_on_shakespeare(real_data: Path, tmp_path: Path) -> None:
    """It ends well without a warning, it learns, and its model loads and answers."""
    tokenizer = real_tokenizer_dir(real_data, tmp_path / "tokenizer")
    # A text file is one document, so what is held out is cut off by hand.
    text = (real_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    (tmp_path / "first.txt").write_text(text[:-20_000], encoding="utf-8")
    (tmp_path / "last.txt").write_text(text[-20_000:], encoding="utf-8")
    run = train(
        tmp_path, "shakespeare", f"model.tokenizer={tokenizer}", *NETWORK, "data=text",
        f"data.path={tmp_path / 'first.txt'}", f"data.eval_path={tmp_path / 'last.txt'}",
        "data.seq_len=128", "task=pretrain",
    )  # fmt: skip
    assert run.exit_code == 0, run.said
    assert run.result["outcome"] == "ok"
    assert run.warnings() == []
    losses = run.losses
    assert len(losses) == STEPS
    # Uniform over the 50,265 tokens is ln 50265 = 10.82; the demo's initialisation adds some.
    assert 10.5 < losses[0] < 12.5, losses
    assert sum(losses[-3:]) / 3 < losses[0] - 3.0, losses
    before, after = run.lines("eval")
    assert after["loss"] < before["loss"] - 3.0, (before, after)

    model = AutoModelForCausalLM.from_pretrained(run.dir.final_model)
    saved = AutoTokenizer.from_pretrained(run.dir.final_model)
    assert model.dtype == torch.float32
    # 50,304 rows while it trained, cut back to the tokenizer's own.
    assert model.get_input_embeddings().weight.shape == (50265, 64)
    text, prompt = "the the 春 To be", "First Citizen: we are"
    assert saved(text).input_ids == AutoTokenizer.from_pretrained(tokenizer)(text).input_ids
    ids = torch.tensor([saved(prompt).input_ids])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
        )
    assert out.shape[1] > ids.shape[1]
    assert int(out.max()) < 50265
    # Plain text is continued as it stands, so it is the same continuation.
    answered = llmx(run.dir.root, "generate", str(run.dir.root), prompt, "--max-new-tokens", "5")
    new = saved.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert (answered.returncode, answered.stdout) == (0, f"{new}\n")
