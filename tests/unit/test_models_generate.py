"""Completions: greedy and sampled ones against Transformers' ``generate``, log-probabilities
against a full forward, and that a draw depends on its seed and position alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmx.checkpoint.export.model import write_description
from llmx.config import ModelConfig
from llmx.data.format.templates import choose_template
from llmx.errors import ConfigError
from llmx.models import decode
from llmx.models.attention import AttentionMethod
from llmx.models.generate import (
    FILE,
    LENGTH,
    POSITIONS,
    STOP,
    Completion,
    Decoder,
    decoder_of,
    generate,
    keep_generation_config,
    shares,
    stop_ids,
)
from llmx.models.isolation import find_methods
from llmx.models.sampling import BLOCK, Sampling, draw, sample_seed, truncated, uniforms
from tests import forks
from tests.architectures import full_config, small_config
from tests.small_models import KINDS, small_model
from tests.small_tokenizers import byte_tokenizer

NEW_TOKENS = 12
EOS = 2


def packed(model: Any, attention: str = "sdpa", vocab_size: int | None = None) -> Decoder:
    """A model that takes the mask of left padding, as an engine knows it."""
    found = replace(decoder_of(model), attention=AttentionMethod(attention))
    return found if vocab_size is None else replace(found, vocab_size=vocab_size)


def greedy(
    model: Decoder, prompts: Any, stops: Any = (), *, new: int = NEW_TOKENS, **more: Any
) -> list[list[int]]:
    """What is decoded of the greedy completions."""
    sampling = Sampling(max_new_tokens=new, stop_ids=frozenset(stops))
    return [list(one.text_tokens) for one in generate(model, prompts, sampling, **more)]


def prompts() -> list[tuple[int, ...]]:
    draw = np.random.Generator(np.random.Philox(key=1))
    return [
        tuple(int(token) for token in draw.integers(3, 90, size=length))
        for length in (7, 1, 13, 7, 4, 22)
    ]


def reference(
    model: Any, prompt: tuple[int, ...], stops: list[int], new: int = NEW_TOKENS
) -> list[int]:
    """Transformers' greedy search for a prompt alone, without the stop token."""
    model.eval()
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=stops,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return found[:-1] if found and found[-1] in stops else found


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "sdpa") for kind in KINDS), ("opt", "eager")]
)
def test_greedy_completions_are_those_of_transformers(kind: str, attention: str) -> None:
    model = small_model(kind, attention=attention)
    decoder = packed(model, attention)
    without_stop = greedy(decoder, prompts())
    assert all(len(answer) == NEW_TOKENS for answer in without_stop)
    # Tokens that some answers come to, at different lengths, end them.
    stops = [without_stop[0][4], without_stop[2][0], EOS]
    answers = greedy(decoder, prompts(), stops)
    assert answers[2] == []
    assert len(answers[0]) <= 4
    for prompt, answer, longest in zip(prompts(), answers, without_stop, strict=True):
        assert answer == reference(model, prompt, stops)
        assert longest == reference(model, prompt, [10**6])


def test_a_completion_ends_at_the_last_position_of_the_model() -> None:
    """A long prompt beside a short one: the short one is completed to its end all the same."""
    for kind, length in (("gpt2", "n_positions"), ("llama", "max_position_embeddings")):
        model = small_model(kind, **{length: 16})
        long, short, full, over = tuple(range(3, 16)), (5, 6), tuple(range(3, 19)), (7,) * 17
        found = generate(
            packed(model), [long, short, full, over], Sampling(max_new_tokens=NEW_TOKENS)
        )
        assert list(found[1].tokens) == reference(model, short, [10**6])
        assert list(found[0].tokens[:3]) == reference(model, long, [10**6], new=3)
        # The last token of a completion is not fed back: it needs no position of its own.
        assert [len(one.tokens) for one in found] == [4, NEW_TOKENS, 1, 0]
        assert [one.ended for one in found] == [POSITIONS, LENGTH, POSITIONS, POSITIONS]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = small_model("llama")
    first = [one[0] for one in greedy(packed(model), prompts(), new=1)]
    size = max(first)
    cut = packed(model, vocab_size=size)
    found = greedy(cut, prompts())
    assert all(token < size for one in found for token in one)
    again = [one[0] for one, old in zip(found, first, strict=True) if old < size]
    assert again == [old for old in first if old < size]
    hot = Sampling(max_new_tokens=30, temperature=100, stop_ids=frozenset({3, 4}))
    told: dict[int, list[int]] = {n: [] for n in range(6)}
    drawn = generate(
        cut, prompts(), hot, seeds=range(6), batch_size=4,
        on_token=lambda at, token: told[at].append(token),
    )  # fmt: skip
    assert {len(one.tokens) == 30 for one in drawn} == {False, True}
    assert all(token < size for one in drawn for token in one.tokens)
    assert [tuple(told[n]) for n in range(6)] == [one.tokens for one in drawn], "told as drawn"


def test_modes_are_as_they_were_afterwards() -> None:
    """cuDNN's attention is off meanwhile: it would plan anew for the length of every token."""
    cuda, seen, model = torch.backends.cuda, [], small_model("llama").train()
    model.lm_head.eval()  # frozen parts may have a mode of their own
    modes = [module.training for module in model.modules()]
    model.register_forward_pre_hook(lambda *_: seen.append(cuda.cudnn_sdp_enabled()))
    usual = cuda.cudnn_sdp_enabled()
    try:
        for was in (True, False):
            cuda.enable_cudnn_sdp(was)
            greedy(packed(model), [(3, 4)], new=1)
            assert cuda.cudnn_sdp_enabled() == was
            assert [module.training for module in model.modules()] == modes
        cuda.enable_cudnn_sdp(True)
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            greedy(packed(model), [(3, 4)], new=2)
        assert (seen, cuda.cudnn_sdp_enabled()) == ([False] * 3, True)
    finally:
        cuda.enable_cudnn_sdp(usual)


def test_ranks_share_the_prompts_evenly() -> None:
    lengths = [5, 3, 9, 3, 5, 5, 3]
    rows = [(index + 1,) * length for index, length in enumerate(lengths)]
    for world in (1, 3, 8):
        by_rank = shares(rows, world=world)
        assert sorted(index for share in by_rank for index in share) == list(range(7))
        assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1
    by_length = [[lengths[index] for index in share] for share in shares(rows, world=2)]
    assert by_length == [[9, 5, 3], [3, 5, 5, 3]]
    # Samples of a prompt are on one rank, and the last of too many on the next.
    samples = [(1, 2), (3, 4), (1, 2), (3, 4), (1, 2), (3, 4)]
    assert shares(samples, world=2) == [[0, 2, 4], [1, 3, 5]]
    assert shares(samples[:5], world=2) == [[0, 2], [4, 1, 3]]


@pytest.mark.parametrize("name", ["mamba2", "roberta", "bart", "bloom", "gpt_oss"])
def test_models_that_are_fed_otherwise_complete_as_their_plain_forward(name: str) -> None:
    """Padded layouts, masks by kind of layer, no positions; with and without a cache."""
    config = small_config(name)
    config.use_cache = False
    found = find_methods(full_config(name))
    method = found.packed or found.padded
    torch.manual_seed(0)
    attention = {"attn_implementation": method.implementation}
    model = AutoModelForCausalLM.from_config(config, **attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    answers = greedy(replace(decoder_of(model), attention=method), prompts()[:3], [EOS], new=5)
    for prompt, answer in zip(prompts(), answers, strict=False):
        ids = list(prompt)
        for token in [*answer, EOS][:5]:
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


# Sampling


def processors(sampling: Sampling) -> LogitsProcessorList:
    """Of Transformers, in its order."""
    found = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=2.0, top_k=7),
        Sampling(temperature=1.0, top_k=10**6),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=2.0, top_k=50, top_p=0.5),
    ],
)
def test_what_is_removed_is_what_transformers_removes(sampling: Sampling) -> None:
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(3)) * 3
    logits[0] = 1.0  # all alike
    logits[1, 5:9] = 20.0  # a tie at the top
    wanted = processors(sampling)(None, logits.clone())
    if sampling.top_p < 1:  # of equal ones, which are removed is a matter of sorting alone
        found = truncated(logits, sampling)
        sizes = [(x[:2] > -torch.inf).sum(1) for x in (found, wanted)]
        assert int((sizes[0] - sizes[1]).abs().max()) <= 1
        logits, wanted = logits[2:], wanted[2:]
    assert torch.equal(truncated(logits, sampling), wanted)


def test_a_uniform_number_is_a_function_of_seed_and_position() -> None:
    alone = [float(uniforms(7, first=place, count=1)[0]) for place in range(4000)]
    many = uniforms(7, first=0, count=4000)
    assert many.tolist() == alone
    assert uniforms(2**63, first=2**40, count=9)[5] == uniforms(2**63, first=2**40 + 5, count=1)
    assert not set(uniforms(8, first=0, count=4000)) & set(alone)
    assert ((many >= 0) & (many < 1)).all()
    assert len(set(many.tolist())) == 4000
    # What a seed gives is a promise: recorded once.
    assert uniforms(1, first=0, count=1)[0] == pytest.approx(0.7598886162154329, abs=1e-15)
    assert len({sample_seed(0, step=s, prompt=p, sample=n)
                for s in range(9) for p in range(9) for n in range(9)}) == 729  # fmt: skip


def test_the_whole_range_of_a_uniform_number_draws_only_what_is_left() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]]).expand(3, -1)
    ends = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, ends).tolist() == [1, 3, 3]
    flat = torch.zeros(1, 5)
    assert draw(flat, torch.tensor([0.6], dtype=torch.float64)).tolist() == [3]
    broken = torch.full((1, 5), torch.nan)  # the training around it tells of that
    assert 0 <= int(draw(broken, ends[1:2])) < 5


@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK + 7])
def test_what_is_drawn_has_the_probabilities_of_the_softmax(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3))
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(logits.expand(count, -1), uniform)
    parts = torch.bincount(drawn, minlength=size) / count
    torch.testing.assert_close(parts, logits.softmax(-1), rtol=0, atol=2e-4)
    assert (drawn.diff() >= 0).all(), "in the order of the vocabulary"


@torch.no_grad()
def full_forward(model: Any, prompt: Any, one: Completion, sampling: Sampling) -> Any:
    """(log-probabilities of the model, of what was sampled from) by one forward of it all."""
    logits = model(input_ids=torch.tensor([[*prompt, *one.tokens]])).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(one.tokens)[:, None]
    kept = processors(sampling)(None, logits.clone())
    return [x.log_softmax(-1).gather(1, tokens).squeeze(1).tolist() for x in (logits, kept)]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_a_full_forward(kind: str) -> None:
    """With padding beside it, samples that share their prompt's forward, and a stop token."""
    model = small_model(kind)
    sampling = Sampling(
        temperature=1.4, top_k=40, top_p=0.95, max_new_tokens=10, stop_ids=frozenset(range(20, 32))
    )
    rows = [prompt for prompt in prompts() for _ in range(3)]
    found = generate(packed(model), rows, sampling, seeds=range(len(rows)))
    for prompt, one in zip(rows, found, strict=True):
        logps, sampled = full_forward(model, prompt, one, sampling)
        assert one.logps == pytest.approx(logps, abs=1e-5)
        assert one.sampled_logps == pytest.approx(sampled, abs=1e-5)
        assert len(one.logps) == len(one.tokens)
        if one.ended == STOP:
            assert one.tokens[-1] in sampling.stop_ids
        else:
            assert (one.ended, len(one.tokens)) == (LENGTH, 10)
        assert one.text_tokens == (one.tokens[:-1] if one.ended == STOP else one.tokens)
        assert not set(one.text_tokens) & sampling.stop_ids
    assert {one.ended for one in found} == {STOP, LENGTH}
    plain = generate(packed(model), rows, Sampling(temperature=1), seeds=range(len(rows)))
    assert all(one.logps == one.sampled_logps for one in plain)
    certain = generate(packed(model), rows[:1], Sampling(max_new_tokens=3))
    assert certain[0].sampled_logps == (0, 0, 0)
    assert certain[0].logps == pytest.approx(
        full_forward(model, rows[0], certain[0], Sampling(temperature=1))[0], abs=1e-5
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_sample_is_the_same_whatever_is_beside_it(kind: str) -> None:
    decoder = packed(small_model(kind))
    sampling = Sampling(temperature=1.2, top_p=0.98, max_new_tokens=NEW_TOKENS)
    rows = [prompt for prompt in prompts() for _ in range(2)]
    seeds = [sample_seed(0, step=3, prompt=n // 2, sample=n % 2) for n in range(len(rows))]
    wanted = [one.tokens for one in generate(decoder, rows, sampling, seeds=seeds)]
    assert len(set(wanted)) == len(wanted)
    for size in (1, 2, 5):
        found = generate(decoder, rows, sampling, seeds=seeds, batch_size=size)
        assert [one.tokens for one in found] == wanted
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    mixed = generate(
        decoder, [rows[n] for n in order], sampling, seeds=[seeds[n] for n in order], batch_size=4
    )
    assert [one.tokens for one in mixed] == [wanted[n] for n in order]
    # A completion that was cut goes on as it would have.
    cut = [(*row, *tokens[:5]) for row, tokens in zip(rows, wanted, strict=True)]
    rest = generate(decoder, cut, replace(sampling, max_new_tokens=NEW_TOKENS - 5), seeds=seeds)
    assert [one.tokens for one in rest] == [tokens[5:] for tokens in wanted]


def shapes_fed(model: Any) -> list[tuple[int, ...]]:
    """A list that gets (rows, tokens) of each forward from now on."""
    fed: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _module, _args, given: fed.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return fed


@pytest.mark.parametrize("room", [3, 64])
def test_a_prompt_takes_the_place_of_a_completion_that_has_ended(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buffers that grow all the time, or never."""
    monkeypatch.setattr(decode, "ROOM", room)
    model = small_model("llama")
    decoder = packed(model)
    rows = [prompt for prompt in prompts() for _ in range(4)]
    sampling = Sampling(temperature=1, max_new_tokens=30, stop_ids=frozenset(range(20, 32)))
    wanted = [
        generate(decoder, [row], sampling, seeds=[number])[0] for number, row in enumerate(rows)
    ]
    fed = shapes_fed(model)
    completions = generate(decoder, rows, sampling, seeds=range(len(rows)), batch_size=8)
    assert [one.tokens for one in completions] == [one.tokens for one in wanted]
    for one, alone in zip(completions, wanted, strict=True):
        assert one.logps == pytest.approx(alone.logps, abs=1e-5)
    sizes = [len(one.tokens) for one in completions]
    decodes = [rows for rows, new in fed if new == 1 and rows > 1]
    assert max(decodes) == 8
    assert sum(decodes) <= sum(sizes) - len(sizes), "no forward of rows that have ended"
    by_batch = [sizes[at : at + 8] for at in range(0, len(sizes), 8)]
    assert len(fed) < sum(map(max, by_batch)), "nobody waits for the longest of eight"


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "gemma3_text"])
def test_samples_share_a_first_forward_whatever_the_cache_keeps(name: str) -> None:
    """States along the sequence and sliding windows: as if each were alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(name)).eval()
    rows = [(5, 6, 7, 8, 9, 10)] * 3 + [(11, 12)] * 2
    sampling = Sampling(temperature=1, max_new_tokens=20)
    wanted = generate(decoder_of(model), rows, sampling, seeds=range(5), batch_size=1)
    fed = shapes_fed(model)
    found = generate(decoder_of(model), rows, sampling, seeds=range(5))
    assert fed[0] in ((2, 6), (1, 6)), "one for each prompt, not for each sample"
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for prompt, one in zip(rows, found, strict=True):
        assert one.logps == pytest.approx(full_forward(model, prompt, one, sampling)[0], abs=1e-5)


ASKED = [(5, 6, 7), (8,), (5, 6, 7), (9, 10, 11, 12, 13), (5, 6, 7), (20, 21), (8,)]


def on_rank(rank: int, place: Path, world: int) -> None:
    model, forwards = small_model("llama"), []
    greedily = Sampling(max_new_tokens=9, stop_ids=frozenset({2, 30, 31, 32, 33}))
    drawn = replace(greedily, temperature=1.5, top_k=60)
    seeds = [sample_seed(1, step=0, prompt=prompt, sample=0) for prompt in range(len(ASKED))]

    def completions(sampling: Sampling, attention: str = "sdpa") -> list[dict[str, Any]]:
        decoder = packed(model, attention)
        found = generate(decoder, ASKED, sampling, seeds=seeds, batch_size=2)
        return [asdict(one) for one in found]

    # The last host has an attention that takes no mask of left padding.
    own = "flex_attention" if rank == world - 1 else "sdpa"
    result = {"mixed": completions(greedily, own), "greedy": completions(greedily)}
    result["sampled"] = completions(drawn)
    parameter = next(model.parameters())
    parameter.ds_numel = world * parameter.numel()  # as if ZeRO-3 had sharded it
    model.register_forward_hook(lambda *_: forwards.append(1))
    result["lockstep"] = completions(drawn, own)
    (place / f"{rank}.json").write_text(json.dumps([result, len(forwards)]))


def test_one_two_and_three_ranks_draw_the_same(tmp_path: Path) -> None:
    read = {}
    for world in (1, 2, 3):
        place = tmp_path / str(world)
        place.mkdir()
        forks.group(on_rank, place, world, world=world)
        read[world] = [json.loads((place / f"{rank}.json").read_text()) for rank in range(world)]
    ((wanted, _),) = read[1]
    assert [one["tokens"] for one in wanted["mixed"]] == [one["tokens"] for one in wanted["greedy"]]
    assert len({tuple(one["tokens"]) for one in wanted["sampled"]}) == 7
    for ranks in read.values():
        assert len({forwards for _, forwards in ranks}) == 1
        for (found, _), (kind, completions) in itertools.product(ranks, wanted.items()):
            for one, other in zip(completions, found[kind], strict=True):
                assert (one["tokens"], one["ended"]) == (other["tokens"], other["ended"])
                for name in ("logps", "sampled_logps"):
                    assert one[name] == pytest.approx(other[name], abs=1e-5)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1}, r"temperature=-1 must be 0 \(greedy\), or a .*temperature=0.7."),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": 1, "top_p": 0}, "top_p=0 must be a number above 0 and at most 1"),
        ({"temperature": 1, "top_p": 1.1}, "top_p=1.1 must be"),
        ({"temperature": 1, "top_k": -1}, "top_k=-1 must be a number from 0 to"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a number from 1 to"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect with temperature=0 .greedy.. Set temperature=1"),
        ({"top_k": 5}, "top_k=5 has no effect"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_say_what_can(values: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampling(**values)


def test_what_cannot_be_generated_from_is_refused() -> None:
    decoder = packed(small_model("llama"))
    rows = decoder.module.get_input_embeddings().num_embeddings
    for asked, seeds, error, message in (
        ([(3,), ()], [1, 2], ValueError, "prompt 1 has no tokens"),
        ([(3, rows)], [1], ConfigError, f"id {rows}, and the model an embedding of {rows} rows"),
        ([(3,), (4,)], [1], ValueError, "2 prompts need a seed each, 1 given"),
        ([(3,), (4,)], None, ValueError, "2 prompts need a seed each, none given"),
    ):
        with pytest.raises(error, match=message):
            generate(decoder, asked, Sampling(temperature=1), seeds=seeds)
    assert generate(decoder, [], Sampling()) == []


# --- Where an answer ends: every stop token is in generation_config.json --------------------------

CHATML = ("<|im_start|>", "<|im_end|>")


def model_and_tokenizer(*more: str, template: str | None = "chatml") -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(*CHATML, *more)
    if template is not None:
        tokenizer.chat_template = choose_template(tokenizer, template)[1]
    model = small_model("llama", vocab_size=len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


@pytest.fixture
def described(tmp_path: Path) -> Callable[[Any, Any], dict[str, Any]]:
    """``generation_config.json`` as an export writes it."""

    def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
        write_description(
            tmp_path, model, model.config, tokenizer=tokenizer, vocab_size=len(tokenizer),
            dtype=torch.float32,
        )  # fmt: skip
        return dict(json.loads((tmp_path / FILE).read_text()))

    return describe


def published(directory: Path, model: Any, **values: Any) -> ModelConfig:
    """A model directory that somebody else wrote; ``values`` go into its generation config."""
    model.save_pretrained(directory)
    (directory / FILE).write_text(json.dumps(values))
    return ModelConfig(path=str(directory), init="pretrained")


@pytest.mark.parametrize(
    ("template", "published_ends", "ends"),
    [
        ("chatml", None, ["</s>", "<|im_end|>"]),
        ("chatml", ["</s>", "<|eom_id|>"], ["</s>", "<|eom_id|>", "<|im_end|>"]),
        # What is ordinary text in another tokenizer, or not there at all.
        ("chatml", ["a", 128_009], ["</s>", "<|im_end|>"]),
    ],
)
def test_stop_tokens_are_those_of_the_turn_of_eos_and_of_the_pretrained_model(
    template, published_ends, ends, described, tmp_path
) -> None:
    model, tokenizer = model_and_tokenizer("<|eom_id|>", template=template)
    if published_ends is not None:
        ids = [tokenizer.convert_tokens_to_ids(e) if e != 128_009 else e for e in published_ends]
        source = published(tmp_path / "in", model, eos_token_id=ids, top_k=7)
        keep_generation_config(model, source)
    written = described(model, tokenizer)
    wanted = sorted(tokenizer.convert_tokens_to_ids(ends))
    assert written["eos_token_id"] == (wanted if len(wanted) > 1 else wanted[0])
    assert written.get("top_k") == (None if published_ends is None else 7)
    assert not written.get("_from_model_config"), "or an older generate() derives it anew"


@pytest.mark.filterwarnings("ignore:.*temperature")
def test_a_published_config_that_transformers_would_refuse_is_kept(described, tmp_path) -> None:
    """Llama 2's: ``save_pretrained`` refuses a changed config with a temperature it ignores. One
    that is not there is none."""
    model, tokenizer = model_and_tokenizer()
    source = published(tmp_path / "in", model, temperature=0.6, do_sample=False)
    keep_generation_config(model, source)
    written = described(model, tokenizer)
    assert written["temperature"] == 0.6
    assert len(written["eos_token_id"]) == 2
    (tmp_path / "in" / FILE).unlink()
    before = model.generation_config
    keep_generation_config(model, source)
    assert model.generation_config is before
    model, tokenizer = model_and_tokenizer(template=None)
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)
