"""What grpo.py defines, against numbers worked out by hand or by a slow and obvious computation in float64; and the
trainer as its user starts it, on tiny models made on the spot.

    ./run.sh test                   all but the benchmarks
    ./run.sh test -m bench -s       the benchmarks: each compares two ways in one run and prints the ratio
"""
import functools
import json
import math
import operator
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig,
                          PreTrainedTokenizerFast)

import grpo
from grpo import Config, Policy, Row, Sample, UserError

torch.set_num_threads(1)
AttentionInterface.register("grouped", grpo.grouped_attention)
CPU = torch.device("cpu")
approx = lambda x, tolerance=1e-6: pytest.approx(x, rel=tolerance, abs=tolerance)
f64 = lambda values, **options: torch.tensor(values, dtype=torch.float64, **options)
relative = lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()


def make_groups(shapes, rewards=None, seed=0):
    """A group for each (prompt length, completion lengths). Few distinct tokens: ends and padding recur inside."""
    rng, groups = random.Random(seed), []
    for i, (prompt, lengths) in enumerate(shapes):
        row = Row(f"prompt {i}", rng.choices(range(128), k=prompt), {})
        scores = rewards[i] if rewards else [0.0] * len(lengths)
        advantages = grpo.group_advantages(torch.tensor([scores]))[0].tolist()
        groups.append([Sample(row, rng.choices(range(4), k=n), [rng.uniform(-7, -3) for _ in range(n)], False, "", r, a)
                       for n, r, a in zip(lengths, scores, advantages)])
    return groups


# --- advantage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, scale, expected", [
    ([[1, 0, 0]], "group", [[1.4142, -0.7071, -0.7071]]), ([[1, 0], [1, 1]], "group", [[1, -1], [0, 0]]),
    ([[1, 0, 0, 0]], "group", [[1.7320, -0.5773, -0.5773, -0.5773]]), ([[1, 0], [5, 7]], "group", [[1, -1], [-1, 1]]),
    ([[1, 0], [1, 1]], "batch", [[1.1547, -1.1547], [0, 0]]), ([[0.7, 0.701]], "group", [[-0.998, 0.998]]),
    ([[1, 0, 0, 0]], "none", [[0.75, -0.25, -0.25, -0.25]]), ([[1, 0, 0, 0]], "rloo", [[1, -1 / 3, -1 / 3, -1 / 3]])])
def test_advantages(rewards, scale, expected):
    how = ("none", "leave_one_out") if scale == "rloo" else (scale,)
    got = grpo.group_advantages(torch.tensor(rewards, dtype=torch.float32), *how)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward, size", [(1.0, 4), (0.0, 4), (0.7, 7), (0.1, 3), (1 / 3, 1000)])
def test_equal_rewards_give_exactly_zero(reward, size, dtype, scale):
    rewards = torch.full((2, size), reward, dtype=dtype)
    rewards[1, 0] = 2    # a group with a signal beside it
    got = grpo.group_advantages(rewards, scale)
    assert got[0].eq(0).all() and got[1].ne(0).all()


# --- loss -------------------------------------------------------------------------------------------------------------


def loss_and_gradient(logprobs, old, advantages, weights, **options):
    logprobs = f64(logprobs, requires_grad=True)
    loss, sums = grpo.policy_loss(logprobs, f64(old), f64(advantages), f64(weights),
                                  **{k: f64(v) if isinstance(v, list) else v for k, v in options.items()})
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}


@pytest.mark.parametrize("ratio, advantage, options, objective, gradient", [
    (1.5, 1, {}, 1.2, 0), (1.5, -1, {}, -1.5, -1.5), (0.5, 1, {}, 0.5, 0.5), (0.5, -1, {}, -0.8, 0),
    (1.0, 1, {}, 1, 1), (1.0, -1, {}, -1, -1), (1.5, 0, {}, 0, 0),
    (1.25, 1, {"epsilon_high": 0.28}, 1.25, 1.25), (1.5, 1, {"epsilon_high": 0.28}, 1.28, 0),
    (5.0, -1, {}, -5, -5), (5.0, -1, {"delta": 3}, -3, 0), (5.0, 1, {"delta": 3}, 1.2, 0),
    (2.0, -1, {"delta": 3}, -2, -2),
    (1.5, 1, {"engine_weights": [2.0]}, 2.4, 0), (0.5, 1, {"engine_weights": [2.0]}, 1, 1)])
def test_clipped_surrogate(ratio, advantage, options, objective, gradient):
    loss, grad, _ = loss_and_gradient([-1 + math.log(ratio)], [-1], [advantage], [1], **options)
    assert (loss, grad) == (approx(-objective), approx([-gradient]))


@pytest.mark.parametrize("options, kl, gradient", [
    ({"kl_estimator": "k2"}, 0.125, 0.5), ({}, 0.106531, 0.393469),
    ({"kl_times_ratio": True}, 0.106531, 0.393469 + 0.106531)])
def test_kl_estimators(options, kl, gradient):
    """Times the ratio, which is 1 here, d(rho k3) = d k3 + k3 d rho."""
    got = loss_and_gradient([-1], [-1], [0], [1], ref_logprobs=[-1.5], beta=1, **options)
    assert (got[0], got[1][0], got[2]["kl"]) == (approx(kl), approx(gradient), approx(0.106531))


def test_gspo_clips_one_ratio_a_completion():
    """Two completions: the first's ratio is exp((ln 1.5 + ln 0.8) / 3) = 1.0627, the second's 1.5 is over the clip."""
    log_ratio = [math.log(1.5), math.log(0.8), 0, math.log(1.5), math.log(1.5)]
    loss, grad, _ = loss_and_gradient(log_ratio, [0] * 5, [2, 2, 2, 1, 1], [1 / 3] * 3 + [1 / 2] * 2,
                                      sequence=torch.tensor([0, 0, 0, 1, 1]))
    assert loss == approx(-(2 * 1.0626586 + 1.2)) and grad == approx([-1.0626586 * 2 / 3] * 3 + [0, 0])


def test_cispo_weighs_and_stops_no_gradient():
    """Ratios of 3, cut to 2, and 0.1, which the other losses would clip for a negative advantage."""
    loss, grad, _ = loss_and_gradient([-1, -2], [-1 - math.log(3), -2 + math.log(10)], [1, -1], [0.5, 0.5], cispo=True,
                                      epsilon_high=1.0)
    assert loss == approx(-0.5 * (2 * -1 + 0.1 * -1 * -2)) and grad == approx([-0.5 * 2, 0.5 * 0.1])


@pytest.mark.parametrize("mode, expected", [
    ("token_truncate", [0.818731, 2, 1, 1.648721]), ("token_mask", [0.818731, 0, 1, 1.648721]),
    ("sequence_mask", [0, 0, 1.648721, 1.648721])])
def test_engine_weights(mode, expected):
    """Of two completions with log pi_old/mu of -0.2 and 1, and of 0 and 0.5; the first's product is e^0.8 > 2."""
    got = grpo.engine_weights(f64([-0.2, 1, 0, 0.5]), torch.tensor([4, 4, 1, 1]).sub(1), mode, 2.0)
    assert got.tolist() == approx(expected)
    far = grpo.engine_weights(torch.tensor([90.0, 800.0]), torch.tensor([0, 0]), mode, 2.0)    # whose exp is inf
    assert far.tolist() == ([2, 2] if mode == "token_truncate" else [0, 0])


@pytest.mark.parametrize("advantage, weight, beta, loss, gradient", [
    (0, 1, 1, 0.106531, 0.393469), (1, 1, 0.1, -2 + 0.0106531, -2 + 0.0393469),
    (1, 0.25, 0.1, (-2 + 0.0106531) / 4, (-2 + 0.0393469) / 4)])
def test_kl_is_k3_inside_the_mean_and_not_times_the_engine_weight(advantage, weight, beta, loss, gradient):
    got = loss_and_gradient([-1], [-1], [advantage], [weight], engine_weights=[2.0], ref_logprobs=[-1.5], beta=beta)
    assert (got[0], got[1][0], got[2]["kl"]) == (approx(loss), approx(gradient), approx(0.106531))


def test_clip_metrics_count_what_clipping_stops_among_tokens_that_weigh():
    ratio, advantage = zip((0.5, -1), (0.5, 1), (1.5, 1), (1.5, -1), (1, 1), (1.25, 1), (0.5, -1), (9, 1))
    _, _, sums = loss_and_gradient([math.log(r) for r in ratio], [0] * 8, advantage, [1] * 6 + [0] * 2,
                                   epsilon_high=0.3, ref_logprobs=[0.0] * 8)
    kl = sum(1 / r + math.log(r) - 1 for r in ratio[:6])
    assert sums == {"tokens": 6, "clip_low": 1, "clip_high": 1, "ratio_max": approx(1.5), "kl": approx(kl)}
    loss, grad, sums = loss_and_gradient([-1, -80], [-2, 0], [1, -1], [0, 0], ref_logprobs=[-3, -3], beta=0.1)
    assert (loss, grad, *sums.values()) == (0, [0, 0], 0, 0, 0, 0, 0)


LENGTHS_1_AND_3 = {"grpo": ([1 / 2, 1 / 6], 0), "dapo": ([1 / 4, 1 / 4], 0.5), "dr_grpo": ([1 / 8, 1 / 8], 0.25)}


@pytest.mark.parametrize("loss_type", LENGTHS_1_AND_3)
def test_token_weights_of_lengths_1_and_3(loss_type):
    weights, loss = LENGTHS_1_AND_3[loss_type]
    groups = make_groups([(2, [1, 3])], [[1.0, 0.0]])
    samples = grpo.set_token_weights(groups, Config(loss_type=loss_type, max_completion_length=4))
    assert samples == groups[0] and [s.token_weight for s in samples] == approx(weights)
    parts = [loss_and_gradient([-1] * n, [-1] * n, [s.advantage] * n, [s.token_weight] * n)[0]
             for s, n in zip(samples, (1, 3))]
    assert sum(parts) == approx(loss, 1e-5)    # micro-batches add up: with dapo and a loss of 1 and 0, 0, 0 to 1/4
    assert loss_and_gradient([-1], [-1], [-1], [samples[0].token_weight])[0] == approx(weights[0])


@pytest.mark.parametrize("loss_type, expected", [("grpo", 1 / (6 * 2)), ("dapo", 1 / 7), ("dr_grpo", 1 / (6 * 10))])
def test_who_counts_in_the_mean(loss_type, expected):
    """Masked truncated completions count in grpo and dr_grpo but not in dapo; groups without a signal count in all."""
    groups = make_groups([(2, [2, 5]), (2, [1, 3]), (2, [1, 4])], [[1.0, 0], [1.0, 1], [0.0, 2]])
    (a, b), (c, d), (e, f) = groups
    b.truncated = f.truncated = True
    cfg = Config(loss_type=loss_type, max_completion_length=10, mask_truncated_completions=True)
    for cfg, kept in ((cfg, [a, e]), (replace(cfg, skip_zero_std_groups=False), [a, c, d, e])):
        assert list(map(id, grpo.set_token_weights(groups, cfg))) == list(map(id, kept))
        assert a.token_weight == approx(expected)
        assert grpo.set_token_weights(groups[1:2], cfg) == []    # no signal at all


@pytest.mark.parametrize("delta", [None, 1.6])
@pytest.mark.parametrize("loss_type", LENGTHS_1_AND_3)
def test_weights_loss_and_gradient_against_a_loop(loss_type, delta):
    rng = random.Random(loss_type)
    cfg = Config(loss_type=loss_type, max_completion_length=12, mask_truncated_completions=True)
    groups = make_groups([(3, [rng.randint(1, 12) for _ in range(6)]) for _ in range(4)],
                         [[rng.random() for _ in range(6)] for _ in range(3)] + [[0.5] * 6])
    everybody, beta, loss, gradient, clipped = sum(groups, []), 0.3, 0.0, [], [0, 0]
    for s in everybody[::5]:
        s.truncated = True
    tokens = [(s, rng.gauss(-2, 0.3), rng.gauss(-2, 0.3), rng.gauss(-2, 0.6), rng.gauss(-2, 0.3))
              for s in grpo.set_token_weights(groups, cfg) for _ in s.ids]    # log pi, pi_old, mu, pi_ref of each
    for s, logprob, old, mu, ref in tokens:
        rho, w, a = math.exp(logprob - old), min(math.exp(old - mu), 2), s.advantage
        bound = 1.28 if a >= 0 else delta if delta and rho > delta else 0.8    # where it is cut, if it is
        cut = rho > bound if bound > 1 else rho < bound
        objective, slope = (w * bound * a, 0) if cut else (w * rho * a, w * rho * a)
        clipped[bound > 1] += cut and bound != delta
        objective -= beta * (math.exp(ref - logprob) - (ref - logprob) - 1)
        slope -= beta * (1 - math.exp(ref - logprob))
        weight = {"grpo": 1 / len(everybody) / len(s.ids), "dr_grpo": 1 / len(everybody) / 12,
                  "dapo": 1 / sum(len(x.ids) for x in everybody if not x.truncated)}[loss_type]
        loss -= weight * objective
        gradient.append(-weight * slope)
    _, logprobs, old, mu, ref = map(list, zip(*tokens))
    got = loss_and_gradient(logprobs, old, [s.advantage for s, *_ in tokens], [s.token_weight for s, *_ in tokens],
                            engine_weights=(f64(old) - f64(mu)).exp().clamp(max=2), ref_logprobs=ref, beta=beta,
                            epsilon_high=0.28, delta=delta)
    assert got[:2] == (approx(loss, 1e-10), approx(gradient, 1e-10))
    assert [got[2]["clip_low"], got[2]["clip_high"]] == clipped and min(clipped) > 0


# --- logprobs ---------------------------------------------------------------------------------------------------------


def one_by_one(hidden, weight, targets, temperature):
    """Logprobs, entropies, and the gradients of their sum weighted by cos and sin of the position."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs, entropies = [], []
    for i, target in enumerate(targets):
        logp = (weight @ hidden[i] / temperature).log_softmax(-1)
        logprobs.append(logp[target].item())
        entropies.append(-(logp.exp() * logp).sum().item())
        (math.cos(i) * logp[target] - math.sin(i) * (logp.exp() * logp).sum()).backward()
    return f64(logprobs), f64(entropies), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature, n, vocabulary", [(1.0, 37, 50), (0.5, 37, 50), (1.7, 1, 50), (0.8, 33, 2**20)])
def test_token_logprobs(temperature, n, vocabulary):
    """The large vocabulary needs several chunks of tokens, the last of them not full."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    targets, i = torch.randint(vocabulary, (n,)), torch.arange(n)
    assert vocabulary == 50 or len(list(grpo.chunks(hidden, weight, temperature))) > 2
    expected = one_by_one(hidden, weight, targets, temperature)
    logprobs, entropies = grpo.token_logprobs(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-6, atol=3e-5)
    parts = [torch.autograd.grad(part, (hidden, weight), retain_graph=True)    # each alone, then both together
             for part in ((i.cos() * logprobs).sum(), (i.sin() * entropies).sum())]
    (i.cos() * logprobs + i.sin() * entropies).sum().backward()
    for d_hidden, d_weight in ((hidden.grad, weight.grad), map(sum, zip(*parts))):
        assert relative(d_hidden, expected[2]) < 2e-3 and relative(d_weight, expected[3]) < 1e-5


def test_temperature_divides_the_logits():
    hidden, head = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    assert grpo.token_logprobs(hidden, head, torch.tensor([0]), 0.5)[0].item() == approx(-0.01815, 1e-5)


def test_softmax_of_bfloat16_is_in_float32():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (5, 150_000))
    targets, i = torch.randint(150_000, (5,)), torch.arange(5)
    logp = (hidden @ weight.T).detach().double().log_softmax(-1)    # of logits that bfloat16 has rounded
    logprobs, entropies = grpo.token_logprobs(hidden, weight, targets)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), logp.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropies.double(), -(logp.exp() * logp).sum(1), rtol=1e-6, atol=1e-5)
    (i.cos() * logprobs + i.sin() * entropies).sum().backward()
    expected = one_by_one(hidden, weight, targets, 1.0)
    assert relative(hidden.grad, expected[2]) < 2e-2 and relative(weight.grad, expected[3]) < 2e-2


def test_logits_are_not_kept_for_the_backward_pass():
    hidden, weight, saved = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        grpo.token_logprobs(hidden, weight, torch.randint(1000, (64,)))
    assert max(saved) == weight.numel() < 64 * 1000


# --- packing ----------------------------------------------------------------------------------------------------------


def tiny_config(kind):
    sizes = dict(vocab_size=128, initializer_range=0.2, bos_token_id=1, eos_token_id=2)
    if kind == "gpt2":    # absolute positions, and dropout 0.1
        return GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **sizes)
    return LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
                       num_key_value_heads=2, max_position_embeddings=256, **sizes)


def tiny_lm(kind, attention):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation=attention).double().eval()
    for name, module in list(lm.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":    # it computes in float32 whatever it is given
            lm.set_submodule(name, nn.RMSNorm(64, eps=1e-6, dtype=torch.float64))
    return lm


def exact_logprobs(hidden, weight, targets, temperature):
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def alone(lm, s, temperature):
    """Logprobs and entropies of one completion by itself, in an ordinary forward pass."""
    logits = lm(torch.tensor([s.row.prompt_ids + s.ids])).logits[0, len(s.row.prompt_ids) - 1:-1]
    return exact_logprobs(logits, torch.eye(128, dtype=logits.dtype), torch.tensor(s.ids), temperature)


SHAPES = {"uneven": [(3, [1, 5, 2, 9]), (40, [4, 1, 7, 1])], "one token": [(3, [1, 1]), (40, [1])],
          "single": [(1, [6])]}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("packed, cuts", [(True, []), (True, [2, 5]), (False, [])], ids=["packed", "cut", "one a row"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_row_means_what_its_completions_mean_alone(kind, packed, cuts, shape, monkeypatch):
    """In float64, and so with another head than token_logprobs, which computes in float32."""
    monkeypatch.setattr(grpo, "token_logprobs", exact_logprobs)
    lm, plain = tiny_lm(kind, "grouped" if packed else "sdpa"), tiny_lm(kind, "sdpa")
    samples = sum(make_groups(shape), [])
    cuts = [cut for cut in cuts if cut < len(samples)] if packed else range(1, len(samples))    # as split() may
    batches = [grpo.pack(samples[a:b], packed, CPU) for a, b in zip([0, *cuts], [*cuts, len(samples)])]
    outputs = zip(*map(Policy(lm, 0.7), batches)), zip(*(alone(plain, s, 0.7) for s in samples))
    for got, expected in zip(*(map(torch.cat, parts) for parts in outputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        slopes = [torch.autograd.grad((torch.arange(len(x)).cos() * x).sum(), model.parameters(), retain_graph=True)
                  for x, model in ((got, lm), (expected, plain))]
        assert relative(*(torch.cat([g.flatten() for g in gradient]) for gradient in slopes)) < 1e-10


def test_exactly_the_completions_are_scored_each_token_from_the_one_before():
    samples = grpo.set_token_weights(make_groups(SHAPES["uneven"], [[1.0, 0, 0, 0], [0.0, 1, 1, 1]]), Config())
    batch = grpo.pack(samples, True, CPU)
    where = [len(s.row.prompt_ids) - 1 + i for s in samples for i in range(len(s.ids))]
    owner = [s for s in samples for _ in s.ids]
    assert batch.input_ids.flatten()[batch.score_index].tolist() == [
        (s.row.prompt_ids + s.ids)[i] for s, i in zip(owner, where)]
    assert batch.position_ids.flatten()[batch.score_index].tolist() == where
    assert batch.targets.tolist() == [token for s in samples for token in s.ids]
    assert batch.advantages.tolist() == approx([s.advantage for s in owner])
    assert batch.token_weights.tolist() == approx([s.token_weight for s in owner])
    assert batch.engine_logprobs.tolist() == approx([x for s in samples for x in s.engine_logprobs])
    assert batch.sequence.tolist() == [i for i, s in enumerate(samples) for _ in s.ids]
    assert batch.input_ids.numel() == 43 + 30 - 8    # each prompt once, no last token


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_of_nothing_weighs_nothing(packed):
    policy, batch = Policy(tiny_lm("llama", "grouped" if packed else "sdpa"), 1.0), grpo.pack([], packed, CPU)
    logprobs, _ = policy(batch)
    loss, sums = grpo.policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.token_weights)
    loss.backward()
    assert loss.item() == sums["tokens"] == 0 and all(p.grad.eq(0).all() for p in policy.parameters())


def row_length(samples):
    prompts = {id(s.row): len(s.row.prompt_ids) for s in samples}
    return sum(prompts.values()) + sum(len(s.ids) for s in samples)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_deals_each_sample_once_in_order_within_the_budget(world):
    rng = random.Random(world)
    for trial in range(40):
        samples = sum(make_groups([(rng.randint(1, 60), [rng.randint(1, rng.choice([1, 9, 90])) for _ in range(
            rng.randint(1, 8))]) for _ in range(rng.randint(1, 12))], seed=trial), [])
        budget = rng.choice([1, 20, 100, 300, 2000])
        ranks = grpo.split(samples, world, budget)
        assert [id(s) for rank in ranks for piece in rank for s in piece] == list(map(id, samples))
        assert len(ranks) == world and len({len(rank) for rank in ranks}) == 1
        assert all(len(piece) < 2 or row_length(piece) <= budget for rank in ranks for piece in rank)
        assert budget < 2000 or row_length(samples) > 2000 or len(ranks[0]) == 1


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("prompt, lengths, budget", [(50, (20, 64), 8192), (50, (20, 64), 1024), (400, (50, 300), 700),
                                                     (1000, (8, 16), 1050)])
def test_split_is_fair_and_sparing(prompt, lengths, budget, world):
    for seed in range(5):
        rng = random.Random(seed)
        samples = sum(make_groups([(prompt + rng.randint(-5, 5), [rng.randint(*lengths) for _ in range(8)])
                                   for _ in range(16)]), [])
        ranks, pieces = grpo.split(samples, world, budget), [[]]
        loads = [sum(map(row_length, rank)) for rank in ranks]
        assert prompt > 400 or all(abs(load / sum(loads) * world - 1) < 0.1 for load in loads)
        for s in samples:    # one rank's micro-batches if each is filled to the brim
            pieces += [[]] * (row_length([*pieces[-1], s]) > budget)
            pieces[-1] = [*pieces[-1], s]
        assert world * len(ranks[0]) <= 1.5 * len(pieces) + world


def test_split_keeps_even_groups_whole():
    groups = make_groups([(30, [10] * 4)] * 8)
    assert grpo.split(sum(groups, []), 2, 140) == [[sum(groups[i:i + 2], []) for i in r] for r in ((0, 2), (4, 6))]


# --- data -------------------------------------------------------------------------------------------------------------


def test_draw():
    """Rows are drawn wherever a step begins, each once an epoch."""
    rows = list(range(10))
    flat = grpo.draw(rows, 3, 0, 50)
    epochs = [flat[i:i + 10] for i in range(0, 50, 10)]
    assert len(flat) == 50 and all(sorted(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in [rows, *epochs]}) == 6    # each epoch in an order of its own
    assert all(grpo.draw(rows, 3, i, n) == flat[i:i + n] for i in range(20) for n in (1, 4, 8, 25))
    assert grpo.draw(rows, 4, 0, 50) != flat


@pytest.mark.parametrize("low, high, operators, size, sizes", [
    (10, 99, "+", 200, None), (-9, 9, "+-*", 50, None), (0, 5, "*", 5, None), (0, 999, "-", 256, (2**16 - 256, 256)),
    (1, 2, "+-", 0, (8, 0)), (7, 7, "+", 1, (0, 1)), (7, 7, "-", 0, (1, 0)), (0, 3, "-", 6, (10, 6))])
def test_arithmetic(low, high, operators, size, sizes):
    cfg = Config(arithmetic_min=low, arithmetic_max=high, arithmetic_operators=operators, eval_size=size)
    rows, count = grpo.arithmetic_rows(cfg), (high - low + 1) ** 2 * len(operators)
    parts = (rows[size:], rows[:size])
    assert tuple(map(len, parts)) == sizes or not sizes and len(parts[1]) == size and (
        count - 2 * size <= len(parts[0]) < count - size)    # less the twins of what is held out
    problems, compute = ([], []), {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for row, seen in ((row, seen) for part, seen in zip(parts, problems) for row in part):
        a, op, b = re.fullmatch(r"What is (-?\d+) ([-+*]) (-?\d+)\? .*", row["question"]).groups()
        assert row["answer"] == compute[op](int(a), int(b)) and low <= int(a) <= high and low <= int(b) <= high
        seen.append((op, int(a), int(b)))
    train, held_out = map(set, problems)
    assert len(train) + len(held_out) == sum(map(len, problems))
    assert {op for op, *_ in train | held_out} == set(operators)
    assert not train & (held_out | {(op, b, a) for op, a, b in held_out if op != "-"})
    assert grpo.arithmetic_rows(replace(cfg, seed=9)) == rows
    assert count < 16 or grpo.arithmetic_rows(replace(cfg, data_seed=9)) != rows


@pytest.mark.parametrize("line, named", [
    *((line, "not JSON") for line in ('{"prompt": "a"', "[" * 100_000, "five", b'{"prompt": "\xff"}')),
    *((line, "`prompt` or `question`") for line in ("5", '["prompt"]', '{"answer": 1}')),
    *(('{"answer": 1, "prompt": %s}' % prompt, "prompt") for prompt in (
        '""', '" "', "5", "null", "[]", '["a"]', '[{"role": "user"}]', '[{"role": "user", "content": ""}]')),
    ('{"answer": 1, "question": ""}', "question"), ('{"answer": 1, "prompt": "\\ud800"}', "prompt must be Unicode"),
    ('{"prompt": "a"}', "`answer`"),
    *(('{"prompt": "a", "answer": %s}' % answer, "`answer`") for answer in (
        "null", "true", "[1]", '""', "{}", '" "', "NaN"))])
def test_a_bad_row_is_named(tmp_path, line, named):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "a", "answer": 1}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError) as error:
        grpo.read_rows(str(file), Config(), "train")
    place, _, message = str(error.value).partition(" line 3: ")
    assert place == str(file) and named in message and "\n" not in message and len(message) < 300


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    for name, message in (("empty.jsonl", "no rows"), ("missing.jsonl", ".*No such file"), ("other", "no .jsonl file")):
        with pytest.raises(UserError, match=f"{re.escape(str(tmp_path / name))}: {message}"):
            grpo.read_rows(str(tmp_path / name), Config(), "train")


def test_rows_are_read_as_they_are(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "a\u2028b\x85c", "answer": 7, "level": 3, "tags": ["x"]}, {"prompt": "d", "answer": 2.5},
            {"prompt": [{"role": "user", "content": "e"}], "answer": "#### 72"}]
    file.write_bytes(("\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)).encode())
    by_prompt = lambda rows: sorted(rows, key=lambda row: str(row.get("prompt")))
    assert by_prompt(grpo.read_rows(str(file), Config(), "train")) == by_prompt(rows)
    file.write_text('{"prompt": "a"}\n')
    assert grpo.read_rows(str(file), Config(reward=("format",)), "train") == [{"prompt": "a"}]


WORDS = ["user", "system", "bot", *(f"w{i}" for i in range(60))]


def tiny_tokenizer(chat=True):
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="user"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ 'bot' if add_generation_prompt }}"
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template if chat else None)


CHAT = {"prompt": [{"role": "system", "content": "w3"}, {"role": "user", "content": "w4"}]}


@pytest.mark.parametrize("row, chat, words", [
    ({"question": "w1 w2"}, True, "user w1 w2 bot"), ({"question": "w1 w2"}, False, "w1 w2"),
    ({"prompt": "w1"}, True, "w1"), ({"prompt": "w1", "question": "w2"}, True, "w1"),
    (CHAT, True, "system w3 user w4 bot")])
def test_tokenize(row, chat, words):
    [got] = grpo.tokenize([row | {"answer": 5, "level": 2}], tiny_tokenizer(chat), Config(max_prompt_length=5))
    more = {} if isinstance(row.get("prompt"), list) else {"prompt_template": "w8 {prompt} w9"}
    more = Config(**more, **({"system_prompt": "w7"} if "user" in words else {}))
    [longer] = grpo.tokenize([row | {"answer": 5, "level": 2}], tiny_tokenizer(chat), more)
    text = row.get("prompt", row.get("question"))
    around = words if isinstance(text, list) else words.replace(text, f"w8 {text} w9")
    around = f"system w7 {around}" if "user" in words else around
    assert longer.prompt_ids == [WORDS.index(word) for word in around.split()] and longer.prompt == got.prompt
    assert got.prompt_ids == [WORDS.index(word) for word in words.split()]
    assert got.prompt == row.get("prompt", row.get("question"))
    assert got.columns == {k: v for k, v in row.items() if k != "prompt"} | {"answer": 5, "level": 2}


def test_chat_messages_need_a_chat_template():
    with pytest.raises(UserError, match="no chat template"):
        grpo.tokenize([CHAT], tiny_tokenizer(chat=False), Config())


def test_a_template_of_text_needs_text():
    with pytest.raises(UserError, match="--prompt-template"):
        grpo.tokenize([CHAT], tiny_tokenizer(), Config(prompt_template="Now {prompt}"))


def test_a_template_that_refuses_a_row_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserError, match="chat template refuses .*w3.*: no system role"):
        grpo.tokenize([CHAT], tokenizer, Config())


def test_a_system_prompt_needs_a_chat():
    for row, chat in (({"prompt": "w1"}, True), ({"question": "w1"}, False)):
        with pytest.raises(UserError, match="--system-prompt"):
            grpo.tokenize([row], tiny_tokenizer(chat), Config(system_prompt="w3"))


@pytest.mark.parametrize("row, flags, expected", [
    ({"problem": "a", "solution": "so \\boxed{3}"}, {}, {"question": "a", "answer": "so \\boxed{3}"}),
    ({"problem": "a", "question": "b", "solution": "3", "answer": 4}, {}, {"question": "b", "answer": 4}),
    ({"q": "a", "gold": 1}, {"prompt_column": "q", "answer_column": "gold"}, {"question": "a", "answer": 1}),
    ({"prompt": "a", "q": "b", "answer": 2}, {"prompt_column": "prompt"}, {"prompt": "a", "answer": 2}),
    ({"prompt": "no", "q": "a", "answer": "no", "gold": 3}, {"prompt_column": "q", "answer_column": "gold"},
     {"question": "a", "answer": 3})])
def test_columns(row, flags, expected):
    got = grpo.standard_row(row, Config(**flags))
    assert got == {k: v for k, v in row.items() if k not in ("prompt", "answer")} | expected


@pytest.mark.parametrize("row, flags, words", [
    ({"question": "a", "answer": 1}, {"prompt_column": "q"}, "column `q`"),
    ({"question": "a", "answer": 1}, {"answer_column": "gold"}, "column `gold`")])
def test_a_missing_column_is_named(row, flags, words):
    with pytest.raises(UserError, match=words):
        grpo.standard_row(row, Config(**flags))


ODD = [None, True, 0, -1, 1.5, math.nan, "", " ", "a", "\0", "\ud800", "#### 1", [], ["a"], {}, {"role": "user"}, [{}],
       [{"role": "user", "content": "a"}], [{"role": 1, "content": []}], 10**400, [[[]]]]


def test_odd_rows_are_taken_or_named(tmp_path):
    """Thousands of rows of odd columns and of cut or shuffled JSON."""
    rng, file, taken = random.Random(0), tmp_path / "odd.jsonl", 0
    for _ in range(3000):
        row = {name: rng.choice(ODD) for name in rng.sample(["prompt", "question", "problem", "answer", "solution", "x"], 3)}
        text = json.dumps(rng.choice([row, row, row, rng.choice(ODD)])).encode()
        if rng.random() < 0.2:
            text = bytes(rng.sample(text, len(text))) if rng.random() < 0.5 else text[:rng.randint(0, len(text))]
        file.write_bytes(text + b"\n")
        cfg = Config(prompt_column=rng.choice([None, None, "x"]), answer_column=rng.choice([None, None, "x"]))
        try:
            grpo.read_rows(str(file), cfg, "train")
            taken += 1
        except UserError as e:
            assert str(e).startswith(str(file)) and "\n" not in str(e).strip() and len(str(e)) < 400
    assert 30 < taken < 1500


def test_odd_flags_are_taken_or_named():
    rng, taken = random.Random(0), 0
    values = {int: [-1, 0, 1, 2, 7, 10**9], float: [-1.0, 0.0, 1e-9, 0.5, 1.0, 3.0, math.nan, math.inf], bool: [True, False],
              str: ["", "+", "{prompt}", "x"]}
    kinds = {f.name: type(getattr(Config(), f.name)) for f in fields(Config)}
    for _ in range(3000):
        flags = {name: rng.choice(values[kinds[name]]) for name in rng.sample(sorted(kinds), rng.choice([1, 1, 2, 3]))
                 if kinds[name] in values and "Literal" not in str(Config.__annotations__[name])}
        try:
            grpo.check_config(Config(**flags), rng.choice([1, 2, 8]))
            taken += 1
        except UserError as e:
            assert re.match(r"--[a-z0-9-]+ ", str(e)) and "\n" not in str(e)
    assert 500 < taken < 2700


def test_a_function_may_give_the_rows(tmp_path):
    (tmp_path / "my.py").write_text("""
def rows():
    return ({"question": f"sum {i}", "answer": i, "metadata": {"i": i}} for i in range(7))
def bad():
    return [{"question": "a", "answer": 1}, {"answer": 2}]
def broken():
    yield {"question": "a", "answer": 1}
    raise KeyError("x")
def nothing():
    pass
def ends():
    raise SystemExit(0)
""")
    rows = grpo.read_rows(f"{tmp_path}/my.py:rows", Config(), "train")
    assert sorted((row["question"], row["answer"], row["metadata"]["i"]) for row in rows) == [
        (f"sum {i}", i, i) for i in range(7)]
    for name, message in (
            ("my.py:bad", "my.py:bad row 2: .*`question`"), ("my.py:none", "--dataset .*no function 'none'"),
            ("no.py:rows", "--dataset .*no file"), ("my.py:nothing", "gave no rows: .*iterable, not None"),
            ("my.py:broken", "gave no rows: 'x'"), ("my.py:ends", "gave no rows: 0")):
        with pytest.raises(UserError, match=message):
            grpo.read_rows(f"{tmp_path}/{name}", Config(), "train")


def write_rows(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": 1}) + "\n" for prompt in prompts))
    return str(path)


def test_load_data_drops_and_says_what(tmp_path, capsys):
    file = write_rows(tmp_path / "a.jsonl", [*WORDS[3:23], *["w1 w1 w1 w1 w1"] * 3, "w59"])
    cfg = Config(dataset=file, eval_dataset=(write_rows(tmp_path / "b.jsonl", ["w3", "w4", "w50"]),), max_prompt_length=4)
    train, sets = grpo.load_data(cfg, tiny_tokenizer())
    train, [held_out] = {row.prompt for row in train}, [{row.prompt for row in rows} for rows in sets.values()]
    assert held_out == {"w3", "w4", "w50"} and train == {*WORDS[3:23], "w59"} - held_out
    out = capsys.readouterr().out
    assert "3 of 27 prompts dropped: longer than --max-prompt-length 4" in out and "2 of 21 training prompts" in out
    [held_out] = grpo.load_data(replace(cfg, eval_size=1), tiny_tokenizer())[1].values()
    assert len(held_out) == 1
    long = write_rows(tmp_path / "long.jsonl", ["w1 w1 w1 w1 w1"])
    with pytest.raises(UserError, match="long.jsonl: no held-out prompt"):
        grpo.load_data(replace(cfg, eval_dataset=(*cfg.eval_dataset, long), eval_only=True), tiny_tokenizer())


def test_load_data_sets_held_out_rows_aside(tmp_path):
    def prompts(cfg):
        train, sets = grpo.load_data(cfg, tiny_tokenizer())
        return [[row.prompt for row in rows] for rows in (train, *sets.values())]
    cfg = Config(dataset=write_rows(tmp_path / "a.jsonl", WORDS[3:33]), eval_size=14)
    train, held_out = prompts(cfg)
    assert len(held_out) == 14 and sorted(train + held_out) == sorted(WORDS[3:33])
    assert held_out != sorted(held_out, key=WORDS.index)    # a random share, not the head of the file
    assert prompts(replace(cfg, seed=5)) == [train, held_out] != prompts(replace(cfg, data_seed=5))
    with pytest.raises(UserError, match=r"a.jsonl leaves 15 .* 15 held out .*--prompts-per-step 16"):
        prompts(replace(cfg, eval_size=15))


# --- config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named, flags", [
    *((name, {name: value}) for value in (0, -1) for name in (
        "prompts_per_step", "max_prompt_length", "max_completion_length", "num_iterations", "num_minibatches",
        "max_steps", "eval_steps", "tokens_per_micro_batch", "learning_rate", "max_grad_norm", "temperature", "epsilon",
        "epsilon_high", "vllm_importance_sampling_clip_max", "dynamic_sampling_rounds", "reward_timeout", "kl_target",
        "max_skipped_steps", "save_steps", "save_total_limit")),
    *((name, {name: -1}) for name in ("beta", "weight_decay", "warmup_steps", "eval_size", "adam_beta2", "entropy_coef",
                                      "eval_num_generations", "soft_overlong_share")),
    *((name, {name: value}) for name, value in (("use_bias_correction_kl", True), ("kl_target", 0.1))),    # without a beta
    *(("importance_sampling_level", {"importance_sampling_level": "sequence"} | more) for more in (
        {"loss_type": "dapo"}, {"loss_type": "dr_grpo"}, {"loss_type": "cispo"},
        {"use_bias_correction_kl": True, "beta": 0.1})),
    ("delta", {"delta": 3.0, "loss_type": "cispo"}), ("soft_overlong_share", {"soft_overlong_share": 1.5}),
    *(("reward", {"reward": x}) for x in ((), ("",), ("correct", "correct:2"))),
    ("eval_dataset", {"eval_dataset": ("a/test.jsonl", "b/test.jsonl")}),
    ("prompt_template", {"prompt_template": "no place"}), ("eval_only", {"eval_only": True, "eval_size": 0}),
    *((name, {name: math.nan}) for name in ("learning_rate", "temperature", "beta", "delta")),
    *((name, {name: math.inf}) for name in ("reward_timeout", "learning_rate", "beta", "temperature")),
    *(("temperature", {"temperature": x}) for x in (0.005, 2.5)), *(("seed", {"seed": x}) for x in (-1, 2**31)),
    ("reward", {"reward": ("correct:1e400",)}), ("output_dir", {"output_dir": ""}),
    ("arithmetic_min", {"arithmetic_max": 10**10}),
    *((name, {name: 1.0}) for name in ("epsilon", "adam_beta2", "vllm_gpu_memory_utilization")),
    ("vllm_gpu_memory_utilization", {"vllm_gpu_memory_utilization": 0.0}), ("num_generations", {"num_generations": 1}),
    ("prompts_per_step", {"prompts_per_step": 17}), ("num_minibatches", {"num_minibatches": 16}),
    ("delta", {"delta": 1.2}), ("delta", {"delta": 1.3, "epsilon_high": 0.4}),
    ("vllm_max_model_length", {"vllm_max_model_length": 16}), ("arithmetic_operators", {"arithmetic_operators": "/"}),
    ("arithmetic_operators", {"arithmetic_operators": ""}), ("arithmetic_min", {"arithmetic_min": 100}),
    ("device", {"device": "cuda"})])
def test_a_bad_flag_is_named(named, flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as error:
        grpo.check_config(Config(**flags), 2)
    assert "--" + named.replace("_", "-") in str(error.value)


@pytest.mark.parametrize("world, flags", [
    (1, {}), (16, {}), (2, {"delta": 1.21}), (2, {"num_minibatches": 8}), (1, {"eval_size": 0, "warmup_steps": 0}),
    (1, {"vllm_max_model_length": 17}), (1, {"arithmetic_min": -5, "arithmetic_max": -5})])
def test_a_good_flag_is_taken(world, flags):
    grpo.check_config(Config(**flags), world)


# --- reward -----------------------------------------------------------------------------------------------------------


def reward_group(texts=("a", "bb", "ccc")):
    row = Row("the prompt", [1], {"answer": 7, "level": "hard"})
    return [Sample(row, [5] * (i + 1), [0.0] * (i + 1), False, text) for i, text in enumerate(texts)]


@pytest.fixture
def rules(tmp_path):
    """Rewards by name, from a file as a user would write it."""
    file = tmp_path / "rules.py"

    def rules(text):
        file.write_text("import math, os, sys, time\n" + text)
        grpo.load_function.cache_clear()
        return [f"{file}:{name}" for name in re.findall(r"(?m)^def (\w+)", text)]
    return rules


@pytest.fixture(scope="module")
def pool():
    """A pool of two workers; `rewards` names the rewards."""
    pools = []

    def pool(*rewards, **flags):
        pools.append(grpo.RewardPool(Config(reward=rewards, **flags), 2))
        return pools[-1]
    yield pool
    for each in pools:
        each.executor.shutdown(wait=False, cancel_futures=True)


def test_a_reward_gets_lists_and_columns(rules):
    everything, little = rules("""
def everything(prompts, completions, completion_ids, **columns):
    assert (prompts, completions, completion_ids) == (["the prompt"] * 3, ["a", "bb", "ccc"], [[5], [5, 5], [5, 5, 5]])
    assert columns == {"answer": [7] * 3, "level": ["hard"] * 3}
    return [len(completion) for completion in completions]
def little(level, completions):
    assert level == ["hard"] * 3
    return (True, 0.5, None)
""")
    assert grpo.call_reward(everything, reward_group()) == [1.0, 2.0, 3.0]
    assert grpo.call_reward(little, reward_group()) == [1.0, 0.5, None]
    assert grpo.call_reward("correct", reward_group(("7", "8", "It is 7."))) == [1.0, 0.0, 1.0]
    assert grpo.call_reward("format", reward_group(("7", "#### 8", "so \\boxed{7}"))) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("values", ["[1.0, 2.0]", "[1.0] * 4", "[]", "[1, 2, math.nan]", "[1, 2, math.inf]", "[10**400] * 3",
                                    "['1', '2', '3']"])
def test_a_reward_that_returns_nonsense_is_named(values, rules, pool):
    [name] = rules(f"def my_rule(completions):\n    return {values}\n")
    with pytest.raises(UserError, match="my_rule"):
        grpo.call_reward(name, reward_group())
    if values == "[]":
        with pytest.raises(UserError, match="my_rule"):
            pool(name).score([reward_group()])


BAD = {"hangs": "while True: pass", "sleeps": "time.sleep(99)", "raises": "1 / 0", "exits": "sys.exit()",
       "dies": "os._exit(0)", "eats": "x = bytearray(5 * 2**30)"}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reward_costs_only_the_completion_it_is_bad_on(bad, rules, pool):
    [name] = rules(f"def touchy(completions):\n    for c in completions:\n        if len(c) == 2:\n            {BAD[bad]}\n"
                   "    return [100 / (len(c) - 2) for c in completions]\n")
    groups = [reward_group(), reward_group(("dddd", "eeeeeee", "")), reward_group(("gg", "hhh", "ii"))]
    started, few = time.time(), pool(name, reward_timeout=2.0)
    failures = few.score(groups)
    assert [[s.reward for s in group] for group in groups] == [[-100, 0, 100], [50, 20, -50], [0, 100, 0]]
    words = {"raises": "ZeroDivisionError", "exits": "SystemExit", "dies": "died",
             "eats": "MemoryError"}.get(bad, "--reward-timeout 2 s")
    assert len(failures) == 3 and all(words in failure for failure in failures), failures
    assert all(text in failure for text, failure in zip(("'bb'", "'gg'", "'ii'"), sorted(failures)))
    assert time.time() - started < 60 and few.score([reward_group(("7", "8", "9"))]) == []    # it goes on


def test_rewards_are_weighted_and_each_is_kept(rules, pool):
    length, some = rules("""
def length(completions):
    return [len(c) for c in completions]
def some(completions):
    return [None if len(c) > 1 else 1 for c in completions]
""")
    group = reward_group(("7", "8", "#### 7"))
    assert pool("correct:2", f"{length}:0.5", f"{some}:-1").score([group]) == []
    assert [s.reward for s in group] == [2 + 0.5 - 1, 0.5 - 1, 2 + 3.0]    # None is left out of the sum
    assert group[2].rewards == {"correct": 1.0, length: 6.0, some: None}
    group, more = reward_group(("7", "88", "99")), pool(some)
    more.names.append("correct")    # a metric beside the reward
    more.score([group])
    assert [s.reward for s in group] == [1.0, None, None] and group[1].rewards["correct"] == 0
    advantages = grpo.group_advantages(f64([[1, math.nan, 0, 0], [math.nan, math.nan, 1, 1], [math.nan] * 4]))
    torch.testing.assert_close(advantages, torch.tensor([[1.4142, 0, -0.7071, -0.7071], [0] * 4, [0] * 4]), atol=1e-4,
                               rtol=0)


def test_a_worker_that_died_between_two_steps_is_replaced(rules, pool):
    [name] = rules("def length(completions):\n    return [len(c) for c in completions]\n")
    few = pool(name)
    assert few.score([reward_group()] * 4) == []
    for process in few.executor._processes.values():
        process.kill()
    time.sleep(1)
    group = reward_group()
    assert few.score([group] * 9) == [] and [s.reward for s in group] == [1, 2, 3]


def test_a_reward_that_looks_at_its_group_gets_it_whole_again(rules, pool):
    """Another group's crash doesn't split it."""
    [name] = rules("def rank(completions):\n    if 'die' in completions:\n        os._exit(0)\n"
                   "    return [len(completions)] * len(completions)\n")
    groups = [reward_group() for _ in range(6)] + [reward_group(("die", "a", "b"))]
    failures = pool(name).score(groups)
    assert [[s.reward for s in group] for group in groups] == [[3] * 3] * 6 + [[0, 1, 1]] and len(failures) == 1


def test_a_reward_that_always_hangs_is_given_up(rules, pool):
    [name] = rules("def hang(completions):\n    time.sleep(99)\n")
    groups, started = [reward_group(("a", "b", "c", "d", "e", "f", "g", "h")) for _ in range(12)], time.time()
    assert len(pool(name, reward_timeout=0.3).score(groups)) == 96 and time.time() - started < 60


def test_a_prompt_on_which_a_reward_hangs_costs_no_other(rules, pool):
    """However large its group: the others were ended with it, and are asked again before it is."""
    [name] = rules("def slow(completions):\n    while 'hang' in completions:\n        pass\n    return [1] * len(completions)\n")
    groups = [reward_group(("hang",) * 16), *(reward_group() for _ in range(6))]
    assert len(pool(name, reward_timeout=0.3).score(groups)) == 16
    assert [s.reward for group in groups[1:] for s in group] == [1] * 18


def test_what_a_reward_has_started_ends_with_it(rules, pool):
    [name] = rules("import subprocess\ndef runs(completions):\n    subprocess.run(['sleep', '4127'])\n")
    assert len(pool(name, reward_timeout=1.0).score([reward_group()])) == 3
    time.sleep(0.5)
    assert subprocess.run(["pgrep", "-f", "sleep 4127"], capture_output=True).stdout == b""


def test_equal_sums_of_rewards_are_equal(rules, pool):
    """0.1 + 0.2 is not 0.3 in floating point: it would be a signal of 5e-17."""
    first, other, second = rules("def a(completions):\n    return [1, 0]\ndef b(completions):\n    return [1, 0]\n"
                                 "def c(completions):\n    return [0, 1]\n")
    group = reward_group(("a", "b"))
    pool(f"{first}:0.1", f"{other}:0.2", f"{second}:0.3").score([group])
    assert [s.reward for s in group] == [0.3, 0.3] and not grpo.has_signal(group) and 0.1 + 0.2 != 0.3


def test_soft_overlong_punishment(pool):
    """DAPO, equation 13, with a limit of 10 tokens and a buffer of 4."""
    group = [Sample(Row("", [1], {"answer": 1}), [0] * n, [], False, "1") for n in (1, 6, 7, 9, 10)]
    pool("correct", soft_overlong_share=0.4, max_completion_length=10).score([group])
    assert [s.reward for s in group] == approx([1, 1, 0.75, 0.25, 0])
    assert [s.rewards["overlong"] for s in group] == approx([0, 0, -0.25, -0.75, -1])


def test_load_function(tmp_path):
    assert grpo.reward_weights(Config(reward=("correct", "format:0.2", "a/b.py:f", "a.py:f:-1e-1"))) == {
        "correct": 1, "format": 0.2, "a/b.py:f": 1, "a.py:f": -0.1}
    for name, text in (("rule", "from math import pi\nimport beside\nbad, most = 3, max\ndef short(completions):\n    return [pi]\n"),
                       ("broken", "import no_such_module\n"), ("syntax", "def f(:\n"), ("beside", ""),
                       ("ends", "raise SystemExit(0)\n")):
        (tmp_path / f"{name}.py").write_text(text)
    assert grpo.load_function("reward", f"{tmp_path}/rule.py:short")(["a"]) == [math.pi]
    for spec, message in (("none.py:f", "no file"), ("corect", "no file"), ("rule.py:long", "no function 'long'"),
                          ("rule.py:bad", "no function 'bad'"), ("rule.py:most", "no function 'most'"), ("syntax.py:f", "SyntaxError"),
                          ("broken.py:f", "no_such_module"), ("ends.py:f", "SystemExit: 0")):
        with pytest.raises(UserError, match=f"--reward {tmp_path}/{re.escape(spec)}: .*{message}"):
            grpo.load_function("reward", f"{tmp_path}/{spec}")


# --- update -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, expected", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])])
def test_learning_rate(kind, expected):
    cfg = Config(lr_scheduler_type=kind, warmup_steps=2, max_steps=6, learning_rate=2.0)
    assert [grpo.learning_rate(step, cfg) / 2 for step in range(6)] == approx(expected)
    assert grpo.learning_rate(0, replace(cfg, warmup_steps=0)) == 2
    assert grpo.learning_rate(1, replace(cfg, warmup_steps=8)) == 0.5


def test_sample_metrics():
    groups = make_groups([(1, [1, 3]), (1, [2, 2])], [[1.0, 0.0], [1.0, 1.0]])
    groups[0][0].text, groups[0][1].text, groups[1][1].text = "92", "What is it?", "It is 7."
    groups[0][1].truncated = True
    expected = {"reward/mean": 0.75, "reward/std": 0.4330, "reward/group_std": 0.25, "reward/zero_std_groups": 0.5,
                "reward/advantage_std": 0.7071, "completion/length_mean": 2, "completion/length_max": 3,
                "completion/truncated": 0.25, "completion/parsable": 0.5}
    got = grpo.sample_metrics(groups)
    assert {name: got[name] for name in expected} == approx(expected, 1e-4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, and a process group of one."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, kind) in enumerate([("llama", "llama"), ("reference", "llama"), ("gpt2", "gpt2")]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(folder / name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield folder
    dist.destroy_process_group()


def load(folder, packed=True, trainable=True, **flags):
    cfg = Config(model_name_or_path=str(folder), bf16=False, **flags)
    return cfg, grpo.load_policy(cfg, AutoConfig.from_pretrained(folder), packed, CPU, trainable)


def weights_of(policy):
    return torch.cat([grpo.whole(p.detach()).flatten() for p in policy.parameters()]).clone()


def step_groups():
    return make_groups([(5, [3, 1, 7, 2]), (9, [2, 6, 4, 4]), (3, [8, 1, 1, 5]), (7, [4, 2, 5, 3])],
                       [[1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 1], [0.0, 0, 0.5, 1]])


@pytest.fixture
def losses(monkeypatch):
    """Records the calls of policy_loss: their ratios and token weights."""
    calls, policy_loss = [], grpo.policy_loss

    def recorded(logprobs, old_logprobs, advantages, token_weights, **options):
        calls.append(((logprobs - old_logprobs).detach().exp(), token_weights.tolist()))
        return policy_loss(logprobs, old_logprobs, advantages, token_weights, **options)
    monkeypatch.setattr(grpo, "policy_loss", recorded)
    return calls


@pytest.mark.parametrize("micro_batches, budget, loss_type, packed, flags", [
    (1, 8192, "grpo", True, {}), (2, 50, "grpo", True, {}), (7, 15, "grpo", True, {}), (2, 50, "grpo", False, {}),
    (1, 8192, "dapo", True, {}), (7, 15, "dapo", True, {}), (7, 15, "dr_grpo", True, {}),
    (2, 50, "grpo", True, {"gradient_checkpointing": True}), (2, 50, "dapo", True, {"skip_zero_std_groups": False}),
    (2, 50, "grpo", True, {"vllm_importance_sampling_correction": False})])
def test_an_update_against_one_completion_at_a_time(models, losses, micro_batches, budget, loss_type, packed, flags):
    cfg, policy = load(models / "llama", packed, loss_type=loss_type, tokens_per_micro_batch=budget, beta=0.1,
                       temperature=0.8, mask_truncated_completions=True, max_grad_norm=1e9, max_completion_length=10,
                       **flags)
    _, reference = load(models / "reference", packed, trainable=False, temperature=0.8)
    lm, ref = (AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float64)
               for name in ("llama", "reference"))
    groups, loss, kls, entropies, gaps = step_groups(), 0.0, [], [], []
    groups[0][2].truncated = groups[3][1].truncated = True
    everybody = sum(groups, [])
    for s in everybody:
        if s.truncated or s.row is groups[2][0].row and cfg.skip_zero_std_groups:
            continue
        logprobs, entropy = alone(lm, s, 0.8)
        ref_gap, gap = alone(ref, s, 0.8)[0].detach() - logprobs, logprobs.detach() - f64(s.engine_logprobs)
        kl = ref_gap.exp() - ref_gap - 1
        engine = gap.exp().clamp(max=2) if cfg.vllm_importance_sampling_correction else 1
        weight = {"grpo": 1 / 16 / len(s.ids), "dr_grpo": 1 / 160, "dapo": 1 / sum(
            len(x.ids) for x in everybody if not x.truncated)}[loss_type]
        loss -= (weight * (engine * (logprobs - logprobs.detach()).exp() * s.advantage - 0.1 * kl)).sum()
        kls, entropies, gaps = kls + kl.tolist(), entropies + entropy.tolist(), gaps + gap.abs().tolist()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, lm.parameters())])

    before = weights_of(policy)
    metrics = grpo.train_on(groups, policy, reference, torch.optim.SGD(policy.parameters(), lr=0.1), cfg, packed, CPU, cfg.beta)
    assert len(losses) >= micro_batches and (micro_batches > 1 or len(losses) == 1)
    torch.testing.assert_close(weights_of(policy).double(), before - 0.1 * gradient, rtol=0, atol=1e-6)
    assert relative(before - weights_of(policy), 0.1 * gradient) < 1e-4
    mean = lambda values: sum(values) / len(values)
    assert metrics == approx({
        "policy/loss": loss.item(), "policy/grad_norm": gradient.norm().item(), "policy/kl": mean(kls),
        "policy/entropy": mean(entropies), "policy/clip_low": 0, "policy/clip_high": 0, "policy/ratio_max": 1,
        "policy/engine_gap_mean": mean(gaps), "policy/engine_gap_max": max(gaps), "policy/updates": 1,
        "policy/skipped_updates": 0, "policy/nonfinite_updates": 0, "policy/beta": 0.1}, 1e-5)


def test_long_gradients_are_scaled_down(models):
    cfg, policy = load(models / "llama", max_grad_norm=1e-3)
    before = weights_of(policy)
    metrics = grpo.train_on(step_groups(), policy, None, torch.optim.SGD(policy.parameters(), lr=10.0), cfg, True, CPU, cfg.beta)
    assert metrics["policy/grad_norm"] > 0.01 and (weights_of(policy) - before).norm().item() == approx(0.01, 1e-3)


def test_equal_rewards_move_nothing_not_even_by_momentum(models):
    cfg, policy = load(models / "llama", beta=0.1)
    _, reference = load(models / "reference", trainable=False)
    optimizer, weights = torch.optim.AdamW(policy.parameters(), lr=1e-3), [weights_of(policy)]
    for rewards in ([1.0] * 4, [1.0, 0, 0, 0], [0.7] * 4):
        groups = make_groups([(5, [3, 1, 7, 2])], [rewards])
        metrics = grpo.train_on(groups, policy, reference, optimizer, cfg, True, CPU, cfg.beta)
        weights.append(weights_of(policy))
        signal = rewards[1] == 0
        assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (signal, not signal)
        assert (metrics["policy/grad_norm"] > 0) == signal and torch.equal(*weights[-2:]) != signal


@pytest.mark.parametrize("kind, flags", [("gpt2", {}), ("llama", {}), ("gpt2", {"gradient_checkpointing": True})])
def test_the_ratio_is_1_until_the_weights_move(models, losses, kind, flags):
    """For gpt2 as well, whose config has dropout."""
    cfg, policy = load(models / kind, num_iterations=2, epsilon=1e-9, **flags)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics = grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, cfg.beta)
    first, second = (ratio for ratio, _ in losses)
    assert first.eq(1).all() and (second - 1).abs().mean() > 1e-3
    advantages = torch.tensor([s.advantage for i in (0, 1, 3) for s in step_groups()[i] for _ in s.ids])
    for name, clipped in (("low", (second < 1) & (advantages < 0)), ("high", (second > 1) & (advantages > 0))):
        assert metrics[f"policy/clip_{name}"] == approx(clipped.double().mean().item() / 2)    # none in the first
    assert metrics["policy/ratio_max"] == approx(second.max().item()) and metrics["policy/updates"] == 2


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_each_minibatch_is_normalised_by_its_own_groups(models, losses, loss_type):
    cfg, policy = load(models / "llama", num_minibatches=2, num_iterations=2, loss_type=loss_type)
    groups, optimizer = step_groups(), torch.optim.SGD(policy.parameters(), lr=0.1)
    metrics = grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, cfg.beta)
    # groups[2] has no signal, but counts; each half has 8 completions of 29 tokens
    halves = [[1 / 8 / len(s.ids) if loss_type == "grpo" else 1 / 29 for s in half for _ in s.ids]
              for half in (groups[0] + groups[1], groups[3])]
    assert [weights for _, weights in losses] == list(map(approx, halves * 2)) and metrics["policy/updates"] == 4
    # pi_old is the policy that sampled, for the second half as well
    assert losses[0][0].eq(1).all() and all((ratio - 1).abs().mean() > 1e-3 for ratio, _ in losses[1:])
    cfg = replace(cfg, num_minibatches=4, num_iterations=1)
    metrics = grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, cfg.beta)
    assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (3, 1)


@pytest.mark.parametrize("spoil", [lambda s: setattr(s, "advantage", math.nan),
                                   lambda s: s.engine_logprobs.__setitem__(1, math.nan)], ids=["advantage", "engine"])
def test_a_gradient_that_is_not_finite_is_no_update(models, spoil):
    cfg, policy = load(models / "llama", tokens_per_micro_batch=50)
    before, optimizer, groups = weights_of(policy), torch.optim.AdamW(policy.parameters(), lr=1e-3), step_groups()
    spoil(groups[1][1])
    metrics = grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, cfg.beta)
    assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (0, 1)
    assert torch.equal(weights_of(policy), before) and not optimizer.state
    metrics = grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, cfg.beta)    # nothing is left over
    assert metrics["policy/updates"] == 1 and weights_of(policy).isfinite().all()


def test_a_reward_that_always_raises_ends_the_run(models, capsys, rules, pool):
    class Engine:
        sample = staticmethod(lambda rows, *args: [reward_group() for _ in rows])
    picky, always = rules("""
def picky(completions):
    return [{"a": 1.0, "ccc": 0.5}[text] for text in completions]
def always(completions):
    return [typo]
""")
    rows = [Row("", [1], {})] * 2
    groups, failures = grpo.rollout(Engine, rows, 3, 1.0, 0, pool(picky), "")
    assert failures == 2 and [s.reward for group in groups for s in group] == [1, 0, 0.5] * 2
    assert "2 rewards of 6 completions failed" in capsys.readouterr().out
    with pytest.raises(UserError, match="every completion.*NameError"):
        grpo.rollout(Engine, rows, 3, 1.0, 0, pool(always), "")


def scored_groups(table):
    """A group for each list of verdicts."""
    groups = make_groups([(2, [1] * len(verdicts)) for verdicts in table], [list(map(float, v)) for v in table])
    for s in sum(groups, []):
        s.rewards = {"correct": s.reward}
    return groups


def test_pass_at_k(monkeypatch, tmp_path):
    """1, 4 and 0 right of 4: 1 - C(wrong, k) / C(4, k), in the mean."""
    class Quiet:
        cfg = Config(eval_num_generations=4)
        write_samples = staticmethod(lambda *args: None)
    tables = {1: [[1], [1], [0]], 4: [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]}
    monkeypatch.setattr(grpo, "rollout", lambda engine, rows, n, *args: (scored_groups(tables[n]), 0))
    expected = {"reward": 2 / 3, "accuracy": 2 / 3, "pass@1": 1.25 / 3, "pass@2": 1.5 / 3, "pass@4": 2 / 3}
    assert grpo.evaluate(None, {"a.jsonl": [1]}, None, Quiet, 0) == approx({f"eval/{k}": v for k, v in expected.items()})
    both = grpo.evaluate(None, {"x/a.jsonl": [1], "b": [1]}, None, Quiet, 0)
    assert both == approx({f"eval/{name}/{k}": v for name in "ab" for k, v in expected.items()})


def test_dynamic_sampling_does_not_count_lengths(monkeypatch):
    trainer = grpo.Trainer.__new__(grpo.Trainer)
    trainer.cfg = Config(prompts_per_step=2, num_generations=2, dynamic_sampling_rounds=1 + 1)
    trainer.engine = trainer.pool = None
    trainer.rows, trainer.state = [Row("", [i], {}) for i in range(100)], {"drawn": 9}
    groups = make_groups([(1, [1, 1]), (1, [1, 1])], [[0.7, 0.9], [0.1, 0.9]])
    for group, overlong in zip(groups, ([-0.3, -0.1], [-0.9, 0.0])):    # all right, and one right and the other long
        for s, part in zip(group, overlong):
            s.rewards["overlong"] = part
    groups[1][1].reward = 0.0
    monkeypatch.setattr(grpo, "rollout", lambda *args: (groups, 0))
    assert trainer.sample(1)[0] == [groups[1]] * 2


@pytest.mark.parametrize("rounds, drawn, kept, counts", [
    (1, ["e11"], "e11", (1, 0)), (3, ["e1e", "2e3"], "123", (2, 3)), (3, ["1ee", "eee", "e2e"], "12", (3, 7)),
    (2, ["eee", "eee"], "eee", (2, 3)), (4, ["12e", "345"], "123", (2, 3))])
def test_dynamic_sampling(monkeypatch, rounds, drawn, kept, counts):
    """e: a group of equal rewards. The next rows are drawn until there are groups enough, at most so many times."""
    trainer, calls = grpo.Trainer.__new__(grpo.Trainer), []
    trainer.cfg = Config(prompts_per_step=3, num_generations=2, dynamic_sampling_rounds=rounds)
    trainer.engine = trainer.pool = None
    trainer.rows, trainer.state = [Row("", [i], {}) for i in range(100)], {"drawn": 9}

    def rollout(engine, rows, n, temperature, seed, *args):
        calls.append((seed, [row.prompt_ids[0] for row in rows]))
        return [make_groups([(1, [1, 1])], [[0.0, 0.0 if c == "e" else float(c)]])[0] for c in drawn[len(calls) - 1]], 1
    monkeypatch.setattr(grpo, "rollout", rollout)
    groups, counted = trainer.sample(7)
    assert [round(group[1].reward) for group in groups] == [0 if c == "e" else int(c) for c in kept]
    assert counted == {"reward/failures": counts[0], "rollout/rounds": counts[0], "rollout/dropped_groups": counts[1]}
    assert len({seed for seed, _ in calls}) == counts[0] == len(drawn)
    assert sum((rows for _, rows in calls), []) == [
        row.prompt_ids[0] for row in grpo.draw(trainer.rows, 0, 9, 3 * counts[0])]


def test_what_is_left_of_a_step_is_normalised_by_itself(models, losses):
    """Three groups for two updates: two, then one; and none at all."""
    cfg, policy = load(models / "llama", num_minibatches=2)
    groups, optimizer = step_groups()[:2] + step_groups()[3:], torch.optim.SGD(policy.parameters(), lr=0.1)
    assert grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, 0.0)["policy/updates"] == 2
    assert sum(losses[0][1]) == approx(1) == sum(losses[1][1])
    assert grpo.train_on([], policy, None, optimizer, cfg, True, CPU, 0.0)["policy/updates"] == 0


def test_the_loss_is_the_mean_of_the_updates_made_or_skipped(models, monkeypatch):
    cfg, policy = load(models / "llama", num_minibatches=2)
    optimizer, clip, norms = torch.optim.SGD(policy.parameters(), lr=0.0), nn.utils.clip_grad_norm_, [math.inf]
    right = grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(norms.pop()) if norms else clip(*args))
    got = grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)
    assert (right["policy/updates"], got["policy/updates"]) == (2, 1) and got["policy/loss"] == right["policy/loss"] != 0


def test_sampling_seeds_every_generator_that_vllm_draws_from():
    import numpy
    class Llm:
        def generate(self, *args, **kwargs):
            self.seen = torch.rand(3).tolist(), numpy.random.rand(3).tolist()
            return [type("Output", (), {"outputs": []})]
    engine, seen = grpo.Engine.__new__(grpo.Engine), []
    for seed in (7, 7, 8, 2**40):
        engine.llm, engine.params = Llm(), lambda **_: None
        engine.sample([Row("", [1], {})], 1, 1.0, seed, "")
        seen.append(engine.llm.seen)
    assert seen[0] == seen[1] and all(a != b for a, b in zip(seen[1], seen[2]))


def test_weights_that_are_missing_are_named(tmp_path):
    tiny_model(tmp_path, False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    cfg = Config(model_name_or_path=str(tmp_path), max_prompt_length=64)
    with pytest.raises(UserError, match="no weights for .*layers.2"):
        grpo.load_policy(cfg, grpo.load_tokenizer(cfg)[0], True, CPU, True)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(UserError, match="no weights in safetensors"):
        grpo.load_policy(cfg, grpo.load_tokenizer(cfg)[0], True, CPU, True)


def test_a_signal_that_comes_twice_breaks_off_once(monkeypatch):
    for name, value in (("signal", 0), ("breakable", True), ("since", 0.0)):
        monkeypatch.setitem(grpo.STATUS, name, value)
    with pytest.raises(grpo.Broken):
        grpo.on_signal(15, None)
    grpo.on_signal(15, None)    # by torchrun too: nothing is broken off outside of sampling and scoring
    assert grpo.STATUS["signal"] == 15 and not grpo.STATUS["breakable"]


def test_a_signal_before_sampling_breaks_it_off(monkeypatch, models):
    for name, value in (("signal", 2), ("breakable", False)):
        monkeypatch.setitem(grpo.STATUS, name, value)
    with pytest.raises(grpo.Stopped):
        grpo.rollout(None, [Row("", [1], {})], 2, 1.0, 0, None, "evaluation")    # no engine is asked


@pytest.mark.parametrize("change, words", [
    ({"step": 3, "reward/mean": 0.0, "reward/std": 0.0}, "no completion got a reward.*'It is 7.', read as '7.'"),
    ({"reward/zero_std_groups": 1.0}, "differ within no group"), ({"policy/kl": 2.0}, "KL"),
    ({"completion/truncated": 1.0}, "--max-completion-length"), ({"policy/engine_gap_mean": 0.5}, "drift apart"), ({}, None)])
def test_alarms(change, words):
    calm = {"step": 2, "reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 0.5, "completion/truncated": 0.5,
            "policy/engine_gap_mean": 0.01, "policy/kl": 0.1}
    found = grpo.alarms(calm | change, reward_group(["It is 7."])[0])
    assert re.search(words, *found) if words else not found


# --- checkpoints ------------------------------------------------------------------------------------------------------

def trained(models, tmp_path, steps=1, **flags):
    """A run of a tiny policy after some updates: the run, its tensors, and all to go on with."""
    cfg, policy = load(models / "llama", output_dir=str(tmp_path / "run"), **flags)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
    tensors = grpo.training_tensors(policy, optimizer)
    go_on = lambda: grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)
    for _ in range(steps):
        go_on()
    return grpo.Run(cfg), tensors, policy, go_on


def test_a_checkpoint_goes_on_bit_for_bit(models, tmp_path):
    run, tensors, policy, go_on = trained(models, tmp_path)
    grpo.save_checkpoint(run, tensors, {"step": 1, "data": "d", "beta": 0.5})
    go_on()
    expected = weights_of(policy)
    run, tensors, policy, go_on = trained(models, tmp_path, steps=0)
    assert grpo.load_checkpoint(run, tensors, "d") == {"step": 1, "data": "d", "beta": 0.5}
    go_on()
    assert torch.equal(weights_of(policy), expected)
    with pytest.raises(UserError, match="--dataset"):
        grpo.load_checkpoint(run, tensors, "other data")


def test_adamw_starts_from_the_state_it_would_make(models):
    """training_tensors makes the optimizer's state ahead of its first step."""
    ends = []
    for ahead in (True, False):
        cfg, policy = load(models / "llama")
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
        _ = ahead and grpo.training_tensors(policy, optimizer)
        grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)
        ends.append(weights_of(policy))
    assert torch.equal(*ends)


DAMAGE = {"flipped": lambda f: f.write_bytes(bytes([f.read_bytes()[0]]) + bytes([f.read_bytes()[1] ^ 1]) + f.read_bytes()[2:]),
          "emptied": lambda f: f.write_bytes(b""), "truncated": lambda f: f.write_bytes(f.read_bytes()[:-1]),
          "gone": lambda f: f.unlink()}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "complete.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(models, tmp_path, capsys, damage, file):
    run, tensors, policy, go_on = trained(models, tmp_path)
    for step in (9, 10):
        grpo.save_checkpoint(run, tensors, {"step": step, "data": ""})
    (run.folder / "checkpoint-11.unfinished").mkdir()
    before = weights_of(policy)
    DAMAGE[damage](run.folder / "checkpoint-10" / file)
    go_on()
    assert grpo.load_checkpoint(run, tensors, "")["step"] == 9 and torch.equal(weights_of(policy), before)
    assert f"{run.folder}/checkpoint-10 is damaged" in capsys.readouterr().out
    assert [folder.name for folder in run.checkpoints()] == ["checkpoint-9"]    # the damaged one is not among those kept
    grpo.save_checkpoint(run, tensors, {"step": 10, "data": ""})
    (run.folder / "checkpoint-10" / "complete.json").write_text("null")    # once more, in another way
    assert grpo.load_checkpoint(run, tensors, "")["step"] == 9


def test_checkpoints_are_few_and_whole(models, tmp_path, capsys):
    run, tensors, _, _ = trained(models, tmp_path, save_total_limit=2)
    for step in (1, 2, 3, 10):
        assert grpo.save_checkpoint(run, tensors, {"step": step, "data": ""}) == step
    assert [folder.name for folder in run.checkpoints()] == ["checkpoint-10", "checkpoint-3"]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))    # as a full disk: larger files fail
    try:
        grpo.save_checkpoint(run, tensors, {"step": 11, "data": ""})
        run.write("metrics.jsonl", [{"step": 1, "x": "y" * 2**17}])
        run.write("metrics.jsonl", [{"step": 2, "x": "y" * 2**17}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    out = capsys.readouterr().out
    assert "checkpoint-11 can't be written" in out and out.count("metrics.jsonl can't be written") == 1
    assert all(out.split("\n")[:-1])    # no empty lines
    assert sorted(f.name for f in run.folder.glob("checkpoint*")) == ["checkpoint-10", "checkpoint-3"]
    assert grpo.load_checkpoint(run, tensors, "")["step"] == 10


def test_a_checkpoint_of_another_model_is_refused(models, tmp_path):
    run, tensors, _, _ = trained(models, tmp_path)
    grpo.save_checkpoint(run, tensors, {"step": 1, "data": ""})
    for other in ({name: torch.cat([t, t]) if t.dim() else t for name, t in tensors.items()}, tensors | {"more": torch.ones(1)}):
        with pytest.raises(UserError, match="doesn't fit the model"):
            grpo.load_checkpoint(run, other, "")


def test_a_folder_of_another_run_is_refused(models, tmp_path):
    cfg = Config(output_dir=str(tmp_path / "run"), reward=("correct", "format:0.5"))
    assert grpo.Run(cfg).folder == grpo.Run(cfg).folder
    grpo.Run(replace(cfg, learning_rate=1.0))    # none of them has begun
    for folder in ("checkpoint-7-copy", "checkpoint-old1", "checkpoint-7"):
        (grpo.Run(cfg).folder / folder).mkdir()
    assert [folder.name for folder in grpo.Run(cfg).checkpoints()] == ["checkpoint-7"]
    grpo.Run(replace(cfg, tokens_per_micro_batch=64, gradient_checkpointing=True))    # what running out of memory advises
    for flags, words in (({"learning_rate": 1.0}, "--learning-rate 3e-05, not 1.0"), ({"reward": ("format",)}, "--reward")):
        with pytest.raises(UserError, match=f"holds a run with {words}"):
            grpo.Run(replace(cfg, **flags))
    for text, words in (("{", "can't be used"), ("5", "can't be used"), ("[]", "something else"),
                        ('{"hidden_size": 64}', "something else")):    # a model's, say
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            grpo.Run(cfg)
        assert (tmp_path / "run" / "config.json").read_text() == text
    (tmp_path / "other" / "model").mkdir(parents=True)
    with pytest.raises(UserError, match="something else"):
        grpo.Run(replace(cfg, output_dir=str(tmp_path / "other")))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't be used"):
        grpo.Run(replace(cfg, output_dir=str(tmp_path / "file")))


@pytest.mark.parametrize("evaluated, eval_kept", [(True, [0, 2]), (False, [0])])
def test_rewind(models, tmp_path, evaluated, eval_kept):
    run = grpo.Run(Config(output_dir=str(tmp_path / "run")))
    for step in range(5):
        run.write("metrics.jsonl", [{"step": step}])
        run.write("samples.jsonl", [{"step": step, "split": "train"}] + [{"step": step, "split": "eval"}] * (step % 2 == 0))
    with open(run.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 1, "x{"step": 1}\n{"step": 1, "x')    # a full disk, and a run killed while it wrote
    (run.folder / "mine.jsonl").write_text('{"question": "a"}\n')
    run.rewind(2, evaluated)
    assert (run.folder / "mine.jsonl").read_text() == '{"question": "a"}\n'
    samples = lines(run.folder / "samples.jsonl")
    assert [m["step"] for m in lines(run.folder / "metrics.jsonl")] == [0, 1, 2][:2 + evaluated]
    assert [s["step"] for s in samples if s["split"] == "train"] == [0, 1, 2]
    assert [s["step"] for s in samples if s["split"] == "eval"] == eval_kept


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(models, value):
    cfg, policy = load(models / "llama")
    optimizer, before = torch.optim.AdamW(policy.parameters(), lr=1e-2), weights_of(policy)
    groups = step_groups()
    groups[1][0].advantage = value
    metrics = grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, 0.0)
    assert (metrics["policy/updates"], metrics["policy/nonfinite_updates"], metrics["policy/skipped_updates"]) == (0, 1, 1)
    assert torch.equal(weights_of(policy), before)
    assert grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)["policy/updates"] == 1


# --- reward cases -----------------------------------------------------------------------------------------------------

REWARD_CASES = [
    "bare answers of the default task, with no marker",
    ("92", "92", True), ("92.", "92", True), ("= 92", "92", True), (" 92\n", 92, True), ("34 + 58 = 92", "92", True),
    ("34 + 58 = 92.", 92, True), ("The sum of 34 and 58 is 92.", "92", True), ("34 plus 58 equals 92", "92", True),
    ("34 + 58 = 92!", "92", True), ("**92**", "92", True), ("It is 92.\nHope this helps!", "92", True),
    ("93", "92", False), ("34 + 58 = 93", "92", False), ("The sum of 34 and 58 is 91.", "92", False),
    ("920", "92", False), ("9", "92", False), ("So she has 17 marbles left.", "17", True),
    ("So, 30 + 60 = 90\n90 + 2 = 92", "92", True), ("-7", -7, True),
    "bare text that states no answer: the question echoed, cut-off text, words",
    ("34 + 58", "58", False), ("What is 34 + 58?", "58", False), ("34 + 58 =", "58", False), ("34 and 58", "34", False),
    ("The sum of 34 and 58 is", "58", False), ("Add 34 to 58", "58", False), ("ninety", "90", False),
    ("What is 58? Answer with only the number.", "58", False), ("34 + 5", "5", False), ("Step 1", "1", False),
    ("1. Add the numbers", "1", False), ("First part.\n2. Double it", "2", False), ("Step 3: add", "3", False),
    "guesses are never paid",
    ("42 or 43", "42", False), ("42 or 43", "43", False), ("1, 2, 3", "3", False), ("1 2 3 4", "4", False),
    ("40 41 42", "42", False), ("between 40 and 50", "50", False), ("Between 40 and 50.", "40", False),
    ("either 6 or 7", "7", False), ("Maybe 42", "42", False), ("40-50", "50", False), ("40–50", "40", False),
    ("42/43/44", "44", False), ("It is 42. Or 43.", "43", False), ("It is 42. No, 43.", "42", False),
    ("6;7", "7", False), ("#### 6 or 7", "6", False), ("#### 6 7", "7", False), ("#### 6, 7", "7", False),
    ("#### 6; 7", "6", False), ("#### 6. 7. 8.", "6", False), ("#### 6 / 7 / 8", "8", False),
    ("#### 6 (or 7)", "6", False), ("#### 6 (perhaps 7)", "7", False), ("#### 6 pens and 7 pens", "7", False),
    ("The answer is 6 or 7.", "7", False), ("The answer is 6. Or maybe 7.", "6", False), ("\\boxed{6, 7}", "7", False),
    ("\\boxed{6\\text{ or }7}", "6", False), ("\\boxed{x=6, y=7}", "7", False), ("x = 6, y = 7", "7", False),
    ("\\boxed{6;7}", "6", False), ("\\boxed{1}\\boxed{2}\\boxed{3}", "3", False),
    ("#### 1\n#### 2\n#### 3\n#### 4", "4", False), ("The answer is 1. The answer is 2. The answer is 3.", "3", False),
    ("1\n2\n3 4", "4", False),
    "claims that only name the number",
    ("not 42", "42", False), ("The answer is not 42.", "42", False), ("The answer isn't 42.", "42", False),
    ("more than 42", "42", False), ("at least 42", "42", False), ("x > 42", "42", False),
    ("\\boxed{x \\ge 42}", 42, False), ("#### < 42", "42", False), ("34 + 58 != 92", "92", False),
    ("34 + 58 ≠ 92", "92", False), ("±42", "42", False), ("#### x ≤ 42", "42", False),
    ("It can never be 42.", "42", False),
    "#### lines",
    ("#### 72", "72", True), ("####72", 72, True), ("#### 72\n", 72.0, True), ("8*9=72\n#### 72 eggs", "72", True),
    ("#### = 72", "72", True), ("####  72 .", "72", True), ("#### x = 72", "72", True), ("#### 70+2=72", "72", True),
    ("#### 71", "72", False), ("#### 7", "72", False), ("#### 72", "7", False), ("#### 172", "72", False),
    ("#### 5\nOh, I mean\n#### 6", "6", True), ("#### 5\nOh, I mean\n#### 6", "5", False), ("#### 21", 1, False),
    ("#### 8, which is 3 more than 5", "3", False), ("#### 8, which is 3 more than 5", "5", False),
    ("#### 4 + 4", "4", False), ("#### 4 +", "4", False), ("####", "72", False),
    ("#### <answer>72</answer>", "72", True), ("#### \n72", "72", True), ("#### 2*4", "8", False),
    ("#### 2*4", "4", False), ("##### 72", "72", True), ("72 ####", "72", True),
    "headings are no answers",
    ("#### Step 1\nadd", "1", False), ("#### Step 2", "2", False), ("#### 2. Double it", "2", False),
    ("#### Part 3\n3 * 4 = 12", "12", True), ("#### 1. Add\n7\n#### 2. Double\n#### 14", "14", True),
    ("#### Answer\n14", "14", True), ("#### Answer: 14", "14", True), ("### Step 4: 3 + 4 = 7", "7", True),
    ("#### Question 5", 5, False), ("#### Result\nThe result is 9.", "9", True), ("#### N/A", "0", False),
    "remarks after the answer",
    ("#### 12 (4 rows of 3)", "12", True), ("#### 12 (4 rows of 3)", "3", False), ("#### 12 (= 3 * 4)", "12", True),
    ("#### 12, found in 3 steps", "3", False), ("#### 12. This took 3 steps.", "3", False),
    ("<answer>12 (3 * 4 rows)", 12, True), ("#### 12, in total", "12", True),
    ("\\boxed{12} as 3 times 4 is 12", "12", True), ("#### 12\n// 13", "13", False),
    ("The answer is 12. There were 3 steps.", "12", True), ("The answer is 12. There were 3 steps.", "3", False),
    "boxes",
    ("\\boxed{7}", "7", True), ("$\\boxed{7}$.", 7, True), ("\\boxed {7}", "7", True),
    ("\\boxed{\\text{7}}", "7", True), ("\\boxed{{7}}", "7", True), ("\\boxed{x = 7}", "7", True),
    ("\\boxed{\\$7}", "7", True), ("\\boxed{+7}", "7", True), ("\\boxed{3} then \\boxed{7}", "7", True),
    ("\\boxed{3} then \\boxed{7}", "3", False), ("\\boxed{7", "7", False), ("\\boxed{7} and \\boxed{}", "7", True),
    ("\\boxed{}", "0", False), ("\\boxed{ }", "", False), ("\\boxed{8}", 7, False), ("\\boxed{7x}", "7", False),
    ("\\boxed{7\\pi}", "7", False), ("\\boxed{7ab}", "7", False), ("\\boxed{7i}", "7", False), ("\\boxed{7!}", "7", False),
    ("\\boxed{7^2}", "7", False), ("\\boxed{7^2}", "2", False), ("\\boxed{\\sqrt{7}}", "7", False),
    ("\\boxed{\\sqrt[3]{7}}", "3", False), ("\\boxed{\\{7\\}}", "7", False), ("\\boxed{7+}", "7", False),
    ("\\boxed{\\log_2 7}", "7", False), ("\\boxed{a_7}", "7", False), ("\\boxed{g(7)}", "7", False),
    ("\\boxed{a_{7}}", "7", False),
    ("\\boxed{7_{10}}", "10", False), ("\\boxed{-x}", "1", False), ("\\boxed{|7|}", "7", False),
    ("\\boxed{7 \\cdot 1}", "7", False), ("\\boxed{7\\text{ million}}", "7", False),
    "<answer> tags, 'answer is', and which of several markers counts",
    ("<answer>7</answer>", "7", True), ("<answer> 7 km </answer>", "7", True), ("<answer>8</answer>", "7", False),
    ("<answer>7 or 8</answer>", "7", False), ("<answer>\n7\n</answer>\n", "7", True), ("<answer></answer>", "7", False),
    ("The answer is 7", "7", True), ("Answer: 7", "7", True), ("**Answer:** 7", "7", True), ("ANSWER = 7", "7", True),
    ("**Final Answer**: $7$", "7", True), ("The final answer is: 7.", "7", True), ("The answer is 7!", "7", True),
    ("The answer is 8.", "7", False), ("The answer is 7 apples.\nBye 3.", "7", True), ("Answer：7", "7", True),
    ("The answer is 6. Wait, the answer is 7.", "7", True), ("The answer is 6. Wait, the answer is 7.", "6", False),
    ("The answer is 6.\n#### 7", "7", True), ("The answer is 6.\n#### 7", "6", False), ("Answer:\n7", "7", True),
    ("#### 6\nso \\boxed{7}", "7", True), ("\\boxed{6}\n#### 7", "6", False), ("The answer is", "7", False),
    "thinking and special tokens",
    ("<think>5</think>7", "7", True), ("<think>5</think>7", "5", False), ("<think>#### 7</think>", "7", False),
    ("<think>#### 7", "7", False), ("<think>\\boxed{7}", "7", False), ("<think>a</think>\nb\n<think>7", "7", False),
    ("so 5\n</think>\n\n7", "7", True), ("so 7\n</think>", "7", False), ("7<|im_end|>", "7", True), ("7</s>", 7, True),
    ("#### 7<|endoftext|>", "7", True), ("\\boxed{7}<|eot_id|>\n", "7", True), ("<|im_end|>", "7", False),
    ("7<eos>", "7", True), ("#### 4<|im_end|>2", "42", False), ("The total is 4*3=<<4*3=12>>12 pens.", "12", True),
    "signs",
    ("#### -3", "-3", True), ("#### - 3", "-3", True), ("#### −3", -3, True), ("#### +3", "3", True),
    ("-3", "3", False), ("3", "-3", False), ("#### 9-6", "-6", False), ("9 - 6 = 3", "3", True),
    ("6 - 9 = -3", "-3", True), ("6 - 9 = -3", "3", False), ("#### minus 3", "-3", True),
    ("It is negative 3.", "-3", True), ("#### --3", "-3", False), ("\\boxed{-(3)}", "3", False),
    ("#### -$3", "-3", True), ("#### $-3$", "-3", True), ("#### -0.0", 0, True), ("Minus 3", 3, False),
    ("The temperature is -3 degrees.", -3, True), ("It is minus 3.", "3", False), ("#### （-3）", "-3", True),
    "thousands separators and decimals",
    ("#### 3,000", "3000", True), ("3,000", "3", False), ("#### 3,000", "0", False),
    ("#### 12,345,678.9", 12345678.9, True), ("3{,}000", "3000", True), ("\\boxed{3\\,000}", "3000", True),
    ("\\boxed{3,\\!000}", "3000", True), ("#### 3,00", "300", False), ("#### 3, 000", "3000", False),
    ("#### 0,250", "250", False), ("3.50", "3.5", True), ("#### 3.4.5", "3.4", False), ("#### 3.14", "3", False),
    ("#### 3.14", "14", False), ("#### 007", "7", True), ("#### 2.9999", "3", False), ("#### 3.0001", 3, False),
    ("#### 1,2,3", "123", False), ("3000", "3,000", True),
    "currency",
    ("#### $15", "15", True), ("#### €15", "15", True), ("#### 15 £", "15", True), ("#### 15 dollars", "$15", True),
    ("It costs $15.", "15", True), ("It costs $15.", "5", False), ("#### US$ 15", "15", True),
    ("#### $15.5", "15.50", True), ("#### \\$15", "15", True), ("\\boxed{\\$1{,}500}", "1500", True),
    ("#### $15 and $16", "15", False),
    "units",
    ("#### 9 cm", "9", True), ("#### 9cm", "9", True), ("#### 9 cm^3", "9", True), ("#### 9 cm^3", "3", False),
    ("#### 9 m²", "9", True), ("\\boxed{9\\text{ cm}^2}", "9", True), ("\\boxed{9\\ \\mathrm{km/h}}", "9", True),
    ("\\boxed{30^\\circ}", "30", True), ("\\boxed{30^{\\circ}}", "30", True), ("#### 30°", "30", True),
    ("\\boxed{9\\,\\text{m}}", "9", True), ("#### 9 miles per hour", "9", True), ("#### 9th", "9", True),
    ("9", "9 cm", True), ("#### 9 dozen", "9", False), ("#### 9 thousand", "9", False),
    ("#### 9 and a half", "9", False), ("9k", "9", False),
    "percent: as written, or as the share it means",
    ("25%", "25", True), ("25%", "25%", True), ("25 percent", "25%", True), ("25\\%", "25 \\%", True),
    ("25", "25%", True), ("0.25", "25%", True), ("\\boxed{25\\%}", "0.25", True), ("25%", "1/4", True),
    ("2500%", "25%", False), ("0.25%", "25%", False), ("25%", "0.0025", False), ("25%", "2500", False),
    ("24%", "0.25", False),
    "fractions and mixed numbers",
    ("1/2", "0.5", True), ("\\frac{1}{2}", "1/2", True), ("\\boxed{\\frac12}", "0.5", True),
    ("\\tfrac{2}{4}", "1/2", True), ("\\boxed{\\frac{1}2}", "1/2", True), ("1/3", "0.3333", False),
    ("0.333", "1/3", False), ("2/3", "3/2", False), ("1/2", "2", False), ("1/2", "1", False), ("6/3", "2", True),
    ("½", "0.5", True), ("2½", "2.5", True), ("2 1/2", "2.5", True), ("\\boxed{2\\frac{1}{2}}", "5/2", True),
    ("-2 1/2", "-2.5", True), ("-2 1/2", "-1.5", False), ("\\boxed{-2\\tfrac12}", "-5/2", True), ("2 1/2", "1", False),
    ("2 1/2", "10.5", False), ("-1/2", "1/2", False), ("\\boxed{\\frac{-1}{-2}}", "1/2", True),
    ("\\boxed{-\\frac{-1}{2}}", "-1/2", False), ("1/2 cup", "1/2", True), ("\\boxed{\\frac{x}{2}}", "2", False),
    ("5/0", "5", False), ("0/0", "0", False), ("1/2/3", "1/2", False), ("\\boxed{\\frac{3+3}{2}}", "3/2", False),
    ("x/5", "5", False), ("3:5", "5", False), ("3 : 5", "5", False),
    "scientific notation",
    ("1.5e3", "1500", True), ("#### 1.5E-2", "0.015", True), ("\\boxed{1.5 \\times 10^{3}}", 1500, True),
    ("1.5 x 10^3", "1500", True), ("1.5 × 10³", "1500", True), ("\\boxed{1.5\\cdot10^{-2}}", "0.015", True),
    ("1500", 1.5e3, True), ("1.5e3", "1.5", False), ("\\boxed{3 \\times 10^3}", "3", False), ("2e1", "20", True),
    ("10^3", "10", False), ("#### 1e22", 1e22, True), ("\\boxed{2 \\times 3}", "3", False),
    "unicode",
    ("=７２", "72", True), ("#### ７２", "72", True), ("#### ٧٢", "72", True), ("####\u202f72", "72", True),
    ("5²", "52", False), ("#### 7\u200a", "7", True), ("答案是 72", "72", True), ("５００", "500", True),
    ("3\u00a0000", "3", False),
    "markdown",
    ("`72`", "72", True), ("```\n72\n```", "72", True), ("> 72", "72", True), ("*72*", "72", True),
    ("__72__", "72", True), ("#### __72__", "72", True), ("**Answer: 72**", "72", True), ('"72"', "72", True),
    ("- The sum is 72.", "72", True), ("1. 70 + 2 = 72", "72", True), ("\\(72\\)", "72", True), ("[72]", "72", True),
    ("#### 6*7", "67", False),
    "golds: worked solutions, texts, none",
    ("#### 72", "8*9=<<8*9=72>>72 eggs\n#### 72", True), ("#### 9", "8*9=72 eggs\n#### 72", False), ("7", None, False),
    ("\\boxed{3}", "We get \\boxed{3}.", True), ("\\boxed{2}", "2 more is \\boxed{3}.", False), ("", "", False),
    ("0", 0, True), ("#### 0", None, False), ("None", None, False), ("#### 3", "no idea", False), ("", 0, False),
    ("\\boxed{}", "", False), ("\\boxed{$}", "$", False), ("nan", float("nan"), False), ("1e999", float("inf"), False),
    "symbolic answers: equal as plain text or not paid",
    ("\\boxed{\\sqrt{5}}", "$\\sqrt{5}$", True), ("\\boxed{\\left(1, 2\\right)}", "(1,2)", True),
    ("\\boxed{x}", "y", False), ("\\boxed{\\dfrac{x}{2}}", "\\frac{x}{2}", True), ("The answer is (C).", "C", True),
    ("Answer: D", "C", False), ("\\boxed{\\text{even}}", "even", True), ("\\boxed{(0, 1]}", "[0,1]", False),
    ("\\boxed{2x}", "2x", True), ("\\boxed{\\frac{1}{23}x}", "\\frac{12}{3}x", False), ("\\boxed{3, 5}", "5, 3", False),
    ("\\boxed{(3,5)}", "35", False),
    "what would be huge ends at once",
    ("9^9^9^9", "9", False), ("\\boxed{9^{9^9}}", "9", False), ("\\boxed{(10^9)!}", "10", False),
    ("1e999999999", 1, False), ("#### " + "3" * 5000, "3", False), ("2" * 5000, 2, False), ("1e-99999", "0", False),
    ("7", 10**5000, False),
]
FRAGMENTS = (
    "<think> </think> <answer> </answer> \\boxed{ { } \\frac \\frac{1} \\text{ #### ** ` > $ % \\% , . ; : = + - − / "
    "^ _ ! ? ( ) \\{ \\\\ 0 1 42 1,250 .5 e3 ½ ² ٣ ７ x pi km or is answer Answer: Step <|im_end|> << >> "
    "\u0301 \ufeff \ud800 \0"
).split() + [" ", "\n", "\xa0", "\r"]


def test_cases(monkeypatch):
    """With `-s`, a table by class. By grpo.py alone: math-verify, if it is installed, is not asked."""
    monkeypatch.setattr(grpo, "symbolically_equal", lambda *texts: False)
    table, wrong = {}, []
    for case in REWARD_CASES:
        if isinstance(case, str):
            verdicts = table.setdefault(case, [])
        else:
            verdicts.append(grpo.answer_is_correct(*case[:2]) is case[2])
            wrong += [] if verdicts[-1] else [case]
    print("", *(f"{sum(verdicts):4} of {len(verdicts):3} right: {kind}" for kind, verdicts in table.items()), sep="\n")
    assert sum(map(len, table.values())) >= 260 and not wrong


SYMBOLIC = [("\\boxed{3+2i}", "2i+3", True), ("\\boxed{(1,\\frac{9}{2})}", "(1,4.5)", True), ("\\boxed{x+1}", "1+x", True),
            ("\\boxed{x+1}", "x+2", False), ("\\boxed{9^9^9^9}", "x^9^9^9", False), ("\\boxed{(10^9)!}", "x!", False),
            ("#### 72 (that is 8 rows of 9)", "9", False), ("#### 0.0000002", "0.0000001", False)]


@pytest.mark.parametrize("completion, gold, right", SYMBOLIC)
def test_symbolic_answers_by_math_verify(completion, gold, right):
    """Without the package they are compared as text."""
    pytest.importorskip("math_verify")
    started = time.time()
    assert grpo.answer_is_correct(completion, gold) is right and time.time() - started < 5    # the first import


def test_math_verify_is_asked_only_about_what_is_no_number(monkeypatch):
    asked = []
    monkeypatch.setattr(grpo, "symbolically_equal", lambda *texts: asked.append(texts) or True)
    assert [grpo.answer_is_correct(*case[:2]) for case in SYMBOLIC] == [True] * 6 + [False] * 2 and len(asked) == 6
    assert not grpo.answer_is_correct("no answer", "x") and not grpo.answer_is_correct("", "x")


def test_extract_answer():
    assert grpo.extract_answer("#### 7 km\n") == "7 km" and grpo.extract_answer("It is 7.") == "7."
    assert [grpo.extract_answer(text) for text in ("", "no number", "#### ...", "42 or 43", "<think>7")] == [None] * 5


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text, gold = ("".join(rng.choices(FRAGMENTS, k=rng.randint(0, 30))) for _ in range(2))
        assert grpo.answer_is_correct(text, gold) in (True, False)


LONG = [
    "<think>", "</think>", "\\boxed{", "\\boxed{1}", "####", "#### 1\n", "<answer>", "answer is ", "answer: 1\n",
    "{", "(", "<<1", "-", "1", "1,", ",", " ", "\n", "5\n", "x = ", "1. A", "\\frac{", "*", "?\n", "\u0301\u0323", "½",
    "\\", "1/",
]


@pytest.mark.parametrize("piece", LONG)
def test_long_text_ends_soon(piece):
    many = piece * (200_000 // len(piece))
    for text in (many, "#### 7" + many, many + "7", many[:100_000] + "}" * 100_000):
        started = time.process_time()    # of this process alone: the machine may be busy
        grpo.answer_is_correct(text, "8")
        grpo.answer_is_correct("#### 8", text)
        assert time.process_time() - started < 1


SOURCE = Path(grpo.__file__).resolve()
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SOURCE.parent), "CUDA_VISIBLE_DEVICES": ""}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
         "MASTER_PORT": "0"}
REWARDS = """
import os
def none(completions):
    return [None] * len(completions)
def low(completion_ids, **_):
    return [sum(i < 60 for i in ids) / len(ids) for ids in completion_ids]
def misspelt(completions, **_):
    return [len(c.splitt()) for c in completions]
def short_on_rank_3(completions, **_):
    return [1.0] * (len(completions) - (os.environ["RANK"] == "3"))
"""


def tiny_model(folder: Path, tied: bool, seed: int = 0) -> Path:
    """A random Llama with a tokenizer of characters and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    ids = {token: i for i, token in enumerate(["<pad>", "<eos>", "<user>", "<unk>", *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
                                        additional_special_tokens=["<user>"])
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<eos>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(    # a vocabulary larger than the tokenizer's, as in many published models
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1 if tied else 2, tie_word_embeddings=tied, initializer_range=0.1, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, max_position_embeddings=1024)).save_pretrained(folder)
    return folder


def start(*command, ranks: int = 0, timeout: float = 240) -> subprocess.CompletedProcess:
    """Runs a script to its end, under torchrun if it is to have ranks, else as if it were torchrun's only one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.run([sys.executable, *torchrun, *map(str, command)], env=ENV | ({} if ranks else ALONE),
                          timeout=timeout, capture_output=True, text=True)


def lines(file: Path) -> list[dict]:
    text = file.read_text()
    assert not text or text.endswith("\n")    # a run killed before its first line leaves an empty file
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, rewards and datasets."""
    torch.set_num_threads(1)    # of models so small, threads only wait for each other
    place = tmp_path_factory.mktemp("grpo")
    tiny_model(place / "tied", True)
    tiny_model(place / "untied", False)
    tiny_model(place / "other", True, seed=1)
    (place / "rewards.py").write_text(REWARDS)
    # The same question on both ranks: were their draws the same, so would their completions be.
    (place / "train.jsonl").write_text('{"question": "Say it.", "answer": 1}\n' * 8)
    (place / "held_out.jsonl").write_text("".join(
        f'{{"prompt": "Say {i}", "answer": {i}, "text": "Say {i}", "label": {i}}}\n' for i in range(5)))
    (place / "datasets.py").write_text("""def load_dataset(path, name, split):
    assert (path, name) == ("made/up", "main") and split in ("some", "other")
    return [{"text": f"{split} {i}", "label": i, "answer": "not it"} for i in range(20)]
""")    # a stand-in for the package
    return place


# --- whole runs -------------------------------------------------------------------------------------------------------

RUN_A = """--model-name-or-path {0}/tied --dataset {0}/train.jsonl --eval-dataset {0}/held_out.jsonl --eval-size 5
    --reward {0}/rewards.py:low --no-bf16 --device cpu --prompts-per-step 8 --num-generations 4 --max-prompt-length 64
    --max-completion-length 12 --max-steps 5 --eval-steps 2 --learning-rate 1e-2 --lr-scheduler-type constant
    --warmup-steps 0 --beta 0.01 --num-iterations 2 --num-minibatches 2 --tokens-per-micro-batch 100
    --ref-cpu-offload --use-bias-correction-kl --save-steps 2 --save-total-limit 1"""
RUN_B = """--model-name-or-path {0}/untied --reward {0}/rewards.py:low --seed 7 --data-seed 3 --dataset arithmetic
    --arithmetic-operators +- --arithmetic-min 0 --arithmetic-max 9 --eval-size 4 --bf16
    --prompts-per-step 4 --num-generations 4 --max-completion-length 8 --max-steps 2 --loss-type dapo --temperature 0.8
    --scale-rewards none --mask-truncated-completions --no-skip-zero-std-groups --gradient-checkpointing --delta 2
    --epsilon 0.1 --epsilon-high 0.3 --vllm-importance-sampling-correction --vllm-importance-sampling-clip-max 3
    --vllm-gpu-memory-utilization 0.1 --vllm-max-model-length 90 --vllm-enable-sleep-mode --vllm-enforce-eager True
    --weight-decay 0.1 --adam-beta2 0.99 --max-grad-norm 0.5 --system-prompt Add. --prompt-template Now,{{prompt}}
    --recipe dapo --dynamic-sampling-rounds 2 --reward-timeout 20 --soft-overlong-share 0.5 --eval-num-generations 2
    --advantage-baseline leave_one_out --entropy-coef 0.01 --max-skipped-steps 3
    --vllm-importance-sampling-mode token_mask"""
RUN_C = """--model-name-or-path {0}/tied --no-bf16 --recipe gspo --importance-sampling-level sequence --kl-estimator k2
    --beta 0.1 --kl-target 0.001 --dataset made/up --dataset-config main --dataset-split some
    --eval-dataset made/up {0}/held_out.jsonl --eval-split other --eval-size 3 --prompt-column text --answer-column label
    --prompts-per-step 4 --num-generations 4 --max-steps 4 --reward {0}/rewards.py:low:2 format:0.5 --learning-rate 1e-2"""
RUN_D = """--model-name-or-path {0}/tied --eval-only --eval-size 6"""
METRICS = {
    "reward": "mean std group_std zero_std_groups advantage_std failures",
    "completion": "length_mean length_max truncated parsable",
    "policy": "loss kl ratio_max clip_low clip_high entropy engine_gap_mean engine_gap_max grad_norm learning_rate",
    "time": "sampling training reload step elapsed tokens_per_second peak_memory_gib"}


def run(place: Path, flags: str, out: str, *more, ranks: int, script=(SOURCE,)) -> Path:
    done = start(*script, *flags.format(place).split(), "--output-dir", place / out, *more, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"the model is in {place / out}" in done.stdout or "--eval-only" in flags
    return place / out


@pytest.fixture(scope="module")
def run_a(place) -> Path:
    return run(place, RUN_A, "a", ranks=2)


def test_every_step_is_measured(run_a):
    first, *steps = lines(run_a / "metrics.jsonl")
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5] and first["step"] == 0
    for m in steps:
        assert all(math.isfinite(m[f"{kind}/{name}"]) for kind, names in METRICS.items() for name in names.split())
        assert ("eval/accuracy" in m) == (m["step"] in (2, 4, 5))
        assert m["policy/updates"] == 4 and m["policy/grad_norm"] > 0
    assert json.loads((run_a / "config.json").read_text())["num_iterations"] == 2


def test_engine_follows_large_updates(run_a):
    for m in lines(run_a / "metrics.jsonl")[1:]:
        assert m["policy/engine_gap_mean"] <= 1e-4 and m["policy/engine_gap_max"] <= 1e-2
    assert m["policy/kl"] > 0.1    # else the updates were not large


def test_reward_rises(run_a):
    first, *steps = lines(run_a / "metrics.jsonl")
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.15
    assert steps[-1]["eval/reward"] > first["eval/reward"]


def test_samples_are_what_the_metrics_say(run_a):
    samples = lines(run_a / "samples.jsonl")
    for m in lines(run_a / "metrics.jsonl"):
        train, held_out = ([s for s in samples if (s["step"], s["split"]) == (m["step"], split)]
                           for split in ("train", "eval"))
        assert len(train) == (32 if m["step"] else 0) and len(held_out) == (5 if "eval/reward" in m else 0)
        if m["step"]:
            r = torch.tensor([s["reward"] for s in train], dtype=torch.float64).view(8, 4)
            assert m["reward/mean"] == pytest.approx(r.mean().item())
            want = (r - r.mean(1, keepdim=True)) / (r.std(1, correction=0, keepdim=True) + 1e-6)
            assert [s["advantage"] for s in train] == pytest.approx(want.flatten().tolist(), abs=1e-6)


def test_same_prompt_gets_different_completions(run_a):
    texts = [s["completion"] for s in lines(run_a / "samples.jsonl") if (s["step"], s["split"]) == (1, "train")]
    assert texts[:16] != texts[16:]    # the first half came from rank 0
    assert len(set(texts)) > 24    # a few are empty


def test_saved_model_loads_in_transformers_and_vllm(run_a, place):
    from safetensors.torch import load_file
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "tied", run_a / "model"))
    assert before.keys() == after.keys() and all((before[name] - after[name]).abs().max() > 1e-3 for name in before)
    done = start(__file__, "both_load", run_a / "model")
    assert done.returncode == 0, done.stderr


def both_load(folder: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**24)
    messages = [[{"role": "user", "content": text}] for text in ("Say it.", "2 + 3?", "a long, long question")]
    outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    for message, output in zip(messages, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == prompt
        ids = list(output.outputs[0].token_ids)
        logprobs = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == ids
        theirs = torch.tensor([entry[i].logprob for entry, i in zip(output.outputs[0].logprobs, ids)])
        assert (logprobs.max(-1).values - theirs).abs().max() < 1e-3


def test_seed_decides_the_run(run_a, place):
    def story(folder):
        fixed = lambda m: {k: v for k, v in m.items() if not k.startswith("time/")}
        return [fixed(m) for m in lines(folder / "metrics.jsonl")[:3]], lines(folder / "samples.jsonl")[:5 + 32 + 32]
    again = run(place, RUN_A, "again", "--max-steps", 2, ranks=2)
    assert story(again) == story(run_a)
    other = run(place, RUN_A, "other_seed", "--max-steps", 1, "--seed", 1, ranks=2)
    assert [s["completion"] for s in lines(other / "samples.jsonl")[5:37]] != [
        s["completion"] for s in lines(run_a / "samples.jsonl")[5:37]]


def test_bf16_untied_run_with_the_other_flags(place):
    from safetensors.torch import load_file
    out = run(place, RUN_B, "b", ranks=1)
    first, *steps = lines(out / "metrics.jsonl")
    for m in steps:
        assert m["policy/engine_gap_mean"] < 0.1 and "policy/kl" not in m and m["policy/updates"] == 1
    assert "eval/accuracy" in first and "eval/accuracy" in m
    model = load_file(out / "model" / "model.safetensors")
    assert "lm_head.weight" in model and {w.dtype for w in model.values()} == {torch.bfloat16}


def test_run_with_the_flags_of_kl_and_of_other_data(place, monkeypatch):
    monkeypatch.setitem(ENV, "PYTHONPATH", f"{ENV['PYTHONPATH']}:{place}")
    out = run(place, RUN_C, "c", ranks=0, script=(__file__, "without_engine"))
    first, *steps = lines(out / "metrics.jsonl")
    assert {f"eval/{name}/{what}" for name in ("up", "held_out") for what in ("reward", "accuracy")} <= set(first)
    samples, low = lines(out / "samples.jsonl"), f"{place}/rewards.py:low"
    assert all(s["reward"] == approx(2 * s["rewards"][low] + 0.5 * s["rewards"]["format"]) for s in samples)
    assert {s["prompt"] for s in samples if s["split"] == "train"} <= {f"some {i}" for i in range(20)}
    assert {s["prompt"] for s in samples if s["split"] == "eval"} >= {"Say 0"}
    assert all(m["reward/mean"] == approx(2 * m[f"reward/{low}"] + 0.5 * m["reward/format"]) for m in steps)
    for now, then in zip(steps, steps[1:]):    # beta follows the KL
        change = 2 if now["policy/kl"] > 1.5e-3 else 0.5 if now["policy/kl"] < 1e-3 / 1.5 else 1
        assert then["policy/beta"] == approx(now["policy/beta"] * change)
    kl = [m["policy/kl"] for m in steps]
    assert kl[0] == 0 < min(kl[1:])    # the reference is the policy as it was at the start


def test_eval_only(place):
    out = run(place, RUN_D, "d", ranks=0, script=(__file__, "without_engine"))
    [m] = lines(out / "metrics.jsonl")
    assert m["step"] == 0 and "eval/accuracy" in m and len(lines(out / "samples.jsonl")) == 6
    assert not (out / "model").exists()


def test_a_reward_that_applies_to_nothing_teaches_nothing(place):
    flags = RUN_D.replace("--eval-only", "--max-steps 1 --prompts-per-step 2 --num-generations 2 --reward {0}/rewards.py:none")
    first, last = lines(run(place, flags, "none", ranks=0, script=(__file__, "without_engine")) / "metrics.jsonl")
    assert "eval/accuracy" in first and "eval/reward" not in first and math.nan not in last.values()
    assert last["reward/mean"] is None and last["policy/updates"] == 0 and last["reward/zero_std_groups"] == 1


@pytest.mark.parametrize("flags, said", [
    ("--recipe gspo --epsilon 0.1", "recipe gspo: --importance-sampling-level sequence --epsilon 0.1 --epsilon-high 0.0004"),
    ("--recipe dr_grpo", "recipe dr_grpo: --loss-type dr_grpo --scale-rewards none"), ("", "")])
def test_a_recipe_says_what_it_sets_and_given_flags_win(flags, said):
    done = start(SOURCE, *flags.split(), "--num-generations", 1)
    assert done.stdout.strip() == said and "--num-generations 1 must be" in done.stderr


def test_every_flag_is_in_a_run():
    given = set(re.findall(r"--(?:no-)?([\w-]+)", f"{RUN_A} {RUN_B} {RUN_C} {RUN_D}")) | {"output-dir"}
    assert given == {f.name.replace("_", "-") for f in fields(grpo.Config)}


def test_engine_with_other_weights_is_found_out(place):
    done = start(__file__, "without_loading", *RUN_A.format(place).split(), "--output-dir", place / "found_out")
    assert done.returncode == 2
    assert re.search(r"grpo.py: engine and trainer disagree .* by \d+\.\d+ nats .* \d+\.\d+ at most", done.stderr)


def without_loading(*flags) -> None:
    grpo.Engine.load = lambda self, policy: None
    sys.argv[1:] = flags
    grpo.main()


# --- one rollout, on 1, 2 and 4 ranks, in few and many micro-batches --------------------------------------------------

CASES = {    # changes to UPDATE; `model`, `packed`, `groups` (which part of the rollout) and `optimizer` are the test's
    "grpo": {}, "dapo": {"loss_type": "dapo"}, "dr_grpo": {"loss_type": "dr_grpo"}, "padded": {"packed": False},
    "untied": {"model": "untied", "gradient_checkpointing": True}, "adamw": {"optimizer": "AdamW"},
    "fewer completions than ranks": {"groups": [(1, 2)]}, "no signal": {"groups": [(2, 4)]},
    "several updates": {"num_iterations": 2, "num_minibatches": 2, "max_grad_norm": 0.5, "epsilon": 0.1, "delta": 1.4,
                        "epsilon_high": 0.3, "skip_zero_std_groups": False, "loss_type": "dapo"},
    "gspo": {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 0.02, "entropy_coef": 0.03},
    "kl": {"kl_estimator": "k2", "use_bias_correction_kl": True, "num_iterations": 2, "entropy_coef": 0.05,
           "vllm_importance_sampling_mode": "token_mask"},
    "sequence mask": {"vllm_importance_sampling_mode": "sequence_mask", "loss_type": "dr_grpo"},
    "second minibatch without signal": {"groups": [(0, 4), (2, 4)], "num_minibatches": 2},
}
UPDATE = {"bf16": False, "temperature": 0.7, "beta": 0.1, "mask_truncated_completions": True, "max_grad_norm": 1e9,
          "max_completion_length": 16, "model": "tied", "packed": True, "groups": [(i, 4) for i in range(6)],
          "optimizer": "SGD"}
RATES = {"SGD": {"lr": 0.3}, "AdamW": {"lr": 1e-3, "weight_decay": 0.1}}


def case_config(place, case: str, **more) -> tuple[dict, grpo.Config]:
    case = UPDATE | CASES[case] | more
    mine = {name: case.pop(name) for name in ("model", "packed", "groups", "optimizer")}
    return mine, grpo.Config(model_name_or_path=str(Path(place) / mine["model"]), **case)


def optimizer_of(mine: dict, model):
    return getattr(torch.optim, mine["optimizer"])(model.parameters(), **RATES[mine["optimizer"]])


def whole_model(folder: Path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def plain_logprobs(model, prompt: list[int], ids: list[int], temperature: float):
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
    logprobs = (logits / temperature).log_softmax(-1)                                   # [T, V]
    return logprobs[range(len(ids)), ids], -(logprobs.exp() * logprobs).sum(-1)


@pytest.fixture(scope="module")
def rollout(place) -> list[dict]:
    """Six groups of four, of uneven lengths. Group 2's rewards are equal and group 3's completions all cut."""
    generator, model = torch.Generator().manual_seed(0), whole_model(place / "tied")
    draw = lambda low, high, *size: torch.randint(low, high, size or (1,), generator=generator).tolist()
    groups = []
    for g, prompt_length in enumerate([3, 40, 7, 12, 5, 21]):
        prompt, rewards = draw(4, 99, prompt_length), [0.5] * 4 if g == 2 else [1.0, 0.0, 0.25, *draw(0, 2)]
        mean, std = sum(rewards) / 4, torch.tensor(rewards).std(correction=0).item()
        completions = []
        for i, length in enumerate(draw(1, 16, 4)):
            ids = draw(4, 99, length)
            with torch.no_grad():
                mu = plain_logprobs(model, prompt, ids, UPDATE["temperature"])[0]
            mu += 0.6 * torch.randn(len(ids), generator=generator)    # some weights above the cut at 2
            completions.append({"ids": ids, "mu": mu.tolist(), "truncated": g == 3 or i == 3 and g != 2,
                                "reward": rewards[i], "advantage": (rewards[i] - mean) / (std + 1e-6)})
        groups.append({"prompt": prompt, "completions": completions})
    (place / "rollout.json").write_text(json.dumps(groups))
    return groups


@pytest.fixture(scope="module")
def expected(place, rollout):
    """The same updates in float64 on the whole model, a completion at a time, by the formulas of the paper."""
    @functools.cache
    def expected(case: str) -> dict:
        mine, cfg = case_config(place, case)
        model, reference = whole_model(place / mine["model"]), whole_model(place / "other")
        optimizer = optimizer_of(mine, model)
        groups = [[{"prompt": rollout[g]["prompt"], **c} for c in rollout[g]["completions"][:n]]
                  for g, n in mine["groups"]]
        score = lambda m, c: plain_logprobs(m, c["prompt"], c["ids"], cfg.temperature)
        with torch.no_grad():
            for c in sum(groups, []):
                c["old"], c["ref"] = score(model, c)[0], score(reference, c)[0]
                c["mu"] = torch.tensor(c["mu"]).double()
        result, seen, size = {"grads": [], "norms": [], "losses": []}, [], len(groups) // cfg.num_minibatches
        for first in [*range(0, len(groups), size)] * cfg.num_iterations:
            part = groups[first:first + size]
            signal = [len({c["reward"] for c in group}) > 1 for group in part]
            if not any(signal):
                continue
            of_update = sum(part, [])
            tokens = sum(len(c["ids"]) for c in of_update if not c["truncated"])
            divisor = {"grpo": len(of_update), "dapo": tokens, "cispo": tokens,
                       "dr_grpo": len(of_update) * cfg.max_completion_length}[cfg.loss_type]
            loss = 0.0
            for c in (c for group, s in zip(part, signal) if s or not cfg.skip_zero_std_groups for c in group):
                if c["truncated"]:
                    continue
                logprobs, entropy = score(model, c)
                ratio, a = (logprobs - c["old"]).exp(), c["advantage"]
                if cfg.importance_sampling_level == "sequence":
                    ratio = (logprobs - c["old"]).mean().exp().expand(len(c["ids"]))
                top = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
                clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.clip_high)
                kl = (c["ref"] - logprobs).exp() - (c["ref"] - logprobs) - 1
                penalty = (c["ref"] - logprobs) ** 2 / 2 if cfg.kl_estimator == "k2" else kl
                penalty = penalty * ratio if cfg.use_bias_correction_kl else penalty
                gap = c["old"] - c["mu"]
                w = {"token_truncate": gap.exp().clamp(max=2), "token_mask": gap.exp() * (gap.exp() <= 2),
                     "sequence_mask": gap.sum().exp() * (gap.sum().exp() <= 2)}[cfg.vllm_importance_sampling_mode]
                surrogate = torch.min(top * a, clipped * a)
                if cfg.loss_type == "cispo":
                    surrogate = ratio.detach().clamp(max=1 + cfg.clip_high) * a * logprobs
                objective = w * surrogate - cfg.beta * penalty + cfg.entropy_coef * entropy
                loss -= objective.sum() / divisor / (len(c["ids"]) if cfg.loss_type == "grpo" else 1)
                low, high = (ratio < 1 - cfg.epsilon) & (a < 0), (ratio > 1 + cfg.clip_high) & (a > 0)
                seen.append(torch.stack([kl, entropy, low, high, (c["old"] - c["mu"]).abs(), ratio]).detach())
            loss.backward()
            result["losses"].append(loss.item())
            result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item())
            result["grads"].append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        tokens, n = torch.cat([*seen, torch.zeros(6, 0)], 1), len(result["losses"])
        names = ("kl", "entropy", "clip_low", "clip_high", "engine_gap_mean")
        mean = dict(zip(names, tokens[:5].mean(1).tolist()))
        peaks = {"engine_gap_max": tokens[4].max().item(), "ratio_max": tokens[5].max().item()} if n else {}
        total = {"loss": sum(result["losses"]) / max(n, 1), "grad_norm": sum(result["norms"]) / max(n, 1), "updates": n}
        return result | {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
                         "metrics": {f"policy/{k}": v for k, v in (mean | peaks | total).items() if math.isfinite(v)}}
    return expected


def update_everywhere(place: str) -> None:
    """On each rank: all cases through `train_on`; rank 0 saves gradients, weights and everybody's metrics."""
    import torch.distributed as dist
    from transformers import AutoConfig
    import transformers
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    place, cpu, results = Path(place), torch.device("cpu"), {}

    @functools.cache
    def load(model, packed, gradient_checkpointing, trainable):
        cfg = case_config(place, "grpo", model=model, gradient_checkpointing=gradient_checkpointing)[1]
        return grpo.load_policy(cfg, AutoConfig.from_pretrained(place / model), packed, cpu, trainable)
    flat = lambda tensors: torch.cat([grpo.whole(t.detach()).flatten() for t in tensors])
    for case in CASES:
        mine, cfg = case_config(place, case)
        policy = load(mine["model"], mine["packed"], cfg.gradient_checkpointing, True)
        reference = load("other", mine["packed"], False, False)
        start = [p.detach().clone() for p in policy.parameters()]
        groups = []
        for g, n in mine["groups"]:
            group = json.loads((place / "rollout.json").read_text())[g]
            row = grpo.Row("", group["prompt"], {})
            groups.append([grpo.Sample(row, c["ids"], c["mu"], c["truncated"], "", c["reward"], c["advantage"])
                           for c in group["completions"][:n]])
        samples = grpo.set_token_weights(groups[:len(groups) // cfg.num_minibatches], cfg)
        # One micro-batch on each rank, some, and one a completion.
        some = grpo.packed_tokens(samples) // (2 * dist.get_world_size())
        for pieces, budget in enumerate([10**6, max(1, some), 1]):
            cut = grpo.split(samples, dist.get_world_size(), budget)[0]
            grads, optimizer = [], optimizer_of(mine, policy)
            optimizer.register_step_pre_hook(lambda *_: grads.append(flat(p.grad for p in policy.parameters())))
            cfg = case_config(place, case, tokens_per_micro_batch=budget)[1]
            logged = grpo.train_on(groups, policy, reference, optimizer, cfg, mine["packed"], cpu, cfg.beta)
            dist.all_gather_object(metrics := [None] * dist.get_world_size(), logged)
            results[case, pieces] = {"grads": grads, "weights": flat(policy.parameters()), "metrics": metrics,
                                     "micro_batches": len(cut)}
            with torch.no_grad():
                for p, before in zip(policy.parameters(), start):
                    p.copy_(before)
    if dist.get_rank() == 0:
        torch.save(results, place / f"updates{dist.get_world_size()}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def updated(place, rollout):
    @functools.cache
    def updated(ranks: int) -> dict:
        done = start(__file__, "update_everywhere", place, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return torch.load(place / f"updates{ranks}.pt")
    return updated


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_updates_do_not_depend_on_the_split(ranks, case, place, updated, expected):
    single, truth = updated(1)[case, 0], expected(case)
    model = whole_model(place / case_config(place, case)[0]["model"])
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    splits = [updated(ranks)[case, i] for i in range(3)]
    if "groups" not in CASES[case]:
        one, some, many = (got["micro_batches"] for got in splits)
        assert one == 1 < some < many and many * ranks >= 8
    for got in splits:
        assert all(m == got["metrics"][0] for m in got["metrics"])    # every rank logs the same
        for name, value in truth["metrics"].items():
            assert got["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        for other in (truth, single):
            assert len(got["grads"]) == len(other["grads"])
            for ours, theirs in zip(got["grads"], other["grads"]):
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
            apart = (got["weights"] - other["weights"]).double()
            if case == "adamw":    # its first step is a sign
                assert apart.norm() <= 1e-3 * (truth["weights"] - start).norm()
            else:
                assert apart.abs().max() <= 1e-6
    assert ((got["weights"] - start).norm() > 0) == (case != "no signal")


# --- bad input --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def no_weights(place) -> Path:
    """A model folder without weights: what fails for another reason failed before it loaded them."""
    folder = tiny_model(place / "no_weights", True)
    (folder / "model.safetensors").unlink()
    (place / "bad.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n{"question": "1 + 2?", answer: 3}\n')
    return folder


@pytest.mark.parametrize("flags, words", [
    ("--num-generation 8", "--num-generation"),
    ("--model-name-or-path /no/such/model", "grpo.py: --model-name-or-path /no/such/model: no such folder"),
    ("--dataset {0}/missing.jsonl", "grpo.py: dataset {0}/missing.jsonl: [Errno 2] No such file"),
    ("--dataset {0}/bad.jsonl", "grpo.py: {0}/bad.jsonl line 2: not JSON"),
    ("--num-generations 1", "grpo.py: --num-generations 1 must be at least 2"),
    ("--device cuda", "grpo.py: --device 'cuda' needs a GPU and torch sees none"),
    ("--output-dir {0}/used", "grpo.py: --output-dir {0}/used holds a config.json or model of something else"),
    ("--reward {0}/rewards.py:no", "grpo.py: --reward {0}/rewards.py:no: {0}/rewards.py has no function 'no'"),
])
def test_bad_command_line(flags, words, place, no_weights):
    (place / "used").mkdir(exist_ok=True)
    (place / "used" / "config.json").write_text("{}")
    started = time.time()
    done = start(SOURCE, "--model-name-or-path", no_weights, "--output-dir", place / "new",
                 *flags.format(place).split())
    assert done.returncode == 2 and time.time() - started < 60
    assert words.format(place) in done.stderr and "Traceback" not in done.stderr and not done.stdout
    if words.startswith("grpo.py"):
        assert len(done.stderr.splitlines()) == 1
    assert not (place / "new").exists() and os.listdir(place / "used") == ["config.json"]


@pytest.mark.parametrize("reward, line", [
    ("misspelt", r"grpo.py \(rank \d\): the reward .*misspelt failed on every completion of a step, .*'splitt'"),
    ("short_on_rank_3", r"grpo.py \(rank 3\): the reward .*:short_on_rank_3 returned 3 values for 4 completions")])
def test_failing_reward_ends_all_ranks(reward, line, place):
    started = time.time()
    done = start(__file__, "without_engine", "--model-name-or-path", place / "tied", "--output-dir", place / reward,
                 "--reward", f"{place}/rewards.py:{reward}", "--num-generations", 4, "--eval-size", 0, ranks=4)
    assert done.returncode != 0 and time.time() - started < 120
    assert re.search(line, done.stderr), done.stderr


def without_engine(*flags) -> None:
    """The trainer with random letters for completions: engines would take a minute to start. With HOLD=phase:n, at the
    n-th time that phase begins, it waits there for a signal, and rank 0 says so in the file HELD."""
    from torch.distributed import checkpoint
    where, _, count = os.environ.get("HOLD", "").partition(":")
    left = {where: int(count or 0)}

    def hold(phase, seconds=0.0):
        left[phase] = left.get(phase, 0) - 1
        if left[phase] == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if os.environ["RANK"] == "0":
                Path(os.environ["HELD"]).touch()
            time.sleep(seconds)    # broken off by what the signal raises
            while not grpo.STATUS["signal"] or os.environ["SLOW"]:
                time.sleep(0.05)

    class Canned(grpo.Engine):
        dtype = torch.float32
        def __init__(self, *args): self.cpu, self.sleeps = True, False
        def load(self, policy): pass
        def sample(self, rows, n, temperature, seed, phase):
            hold(phase, 90)
            groups = []
            for row in rows:
                draw = random.Random(f"{seed} {row.prompt_ids}")
                groups.append([grpo.Sample(row, [draw.randrange(4, 99) for _ in range(draw.randint(1, 8))], [], False, "")
                               for _ in range(n)])
                for s in groups[-1]:
                    s.engine_logprobs, s.text = [-4.0] * len(s.ids), "".join(chr(28 + i) for i in s.ids)
            return groups
    score, policy_loss, save = grpo.RewardPool.score, grpo.policy_loss, checkpoint.save
    grpo.RewardPool.score = lambda self, groups: hold("scoring", 90) or score(self, groups)
    grpo.policy_loss = lambda *args, **options: hold("training") or policy_loss(*args, **options)
    checkpoint.save = lambda *args, **options: hold("saving") or save(*args, **options)
    grpo.Engine, grpo.self_test = Canned, lambda *args: None
    sys.argv[1:] = flags
    grpo.main()


# --- faults -----------------------------------------------------------------------------------------------------------

FAULTY = """--model-name-or-path {0}/tied --reward {0}/rewards.py:low --no-bf16 --device cpu --prompts-per-step 4
    --num-generations 4 --max-prompt-length 64 --max-completion-length 8 --max-steps 6 --eval-steps 2 --eval-size 4
    --save-steps 2 --learning-rate 1e-2 --tokens-per-micro-batch 100"""


class Job:
    """A run on ranks of its own, which can be disturbed; `mark` is in the environment of all its processes."""

    def __init__(self, place, out, *more, ranks=2, hold="", slow=False, restarts=0):
        self.held, self.mark, self.folder = place / f"{out}.held", f"{time.time()}-{out}", place / out
        self.held.unlink(missing_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts",
                    str(restarts)]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, __file__, "without_engine", *FAULTY.format(place).split(), "--output-dir",
             str(self.folder), *map(str, more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ENV | {"HOLD": hold, "HELD": str(self.held), "SLOW": "1" * slow, "MARK": self.mark, "OMP_NUM_THREADS": "1"})

    def pids(self, words="") -> list[int]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.mark in Path("/proc", pid, "environ").read_text() and words in Path("/proc", pid, "cmdline").read_text():
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def ranks(self) -> list[int]:
        return [pid for pid in self.pids(f"{Path(__file__).name}\0without_engine") if pid != self.process.pid]

    def wait_until_held(self):
        for _ in range(1200):
            if self.held.exists():
                return time.sleep(0.5)    # the other rank too
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError("never held")

    def kill(self):
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        self.process.communicate()

    def end(self, timeout=120) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; nothing of it is left over."""
        out, err = self.process.communicate(timeout=timeout)
        for _ in range(50):
            if not self.pids():
                break
            time.sleep(0.1)
        assert not self.pids()
        return self.process.returncode, out, err


def story(folder: Path):
    """What a run leaves, but for times."""
    from safetensors.torch import load_file
    weights = load_file(folder / "model" / "model.safetensors")
    untimed = [{k: v for k, v in m.items() if not k.startswith("time/")} for m in lines(folder / "metrics.jsonl")]
    return untimed, lines(folder / "samples.jsonl"), {name: w.tolist() for name, w in weights.items()}


@pytest.fixture(scope="module")
def undisturbed(place):
    job = Job(place, "undisturbed")
    code, out, err = job.end()
    assert code == 0, err
    assert [m["step"] for m in lines(job.folder / "metrics.jsonl")] == list(range(7))
    assert sorted(f.name for f in job.folder.iterdir()) == [
        "checkpoint-4", "checkpoint-6", "config.json", "metrics.jsonl", "model", "samples.jsonl"]
    return story(job.folder)


def goes_on(place, name, undisturbed):
    code, out, err = Job(place, name).end()
    assert code == 0, err
    assert story(place / name) == undisturbed
    return out


def test_a_killed_run_goes_on_exactly(place, undisturbed):
    job = Job(place, "killed", hold="training:8")    # between two checkpoints
    job.wait_until_held()
    job.kill()
    assert [m["step"] for m in lines(job.folder / "metrics.jsonl")][-1] >= 2    # whole lines
    assert "going on after step 2" in goes_on(place, "killed", undisturbed)


PHASES = {"sampling": "sampling:4", "training": "training:8", "scoring": "scoring:6", "evaluation": "evaluation:3",
          "saving": "saving:2"}


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=[] if phase in ("sampling", "evaluation") else
                                                pytest.mark.faults) for phase in PHASES])
def test_a_stopped_run_saves_and_goes_on_exactly(place, undisturbed, phase):
    job = Job(place, f"stopped_{phase}", hold=PHASES[phase])
    job.wait_until_held()
    started = time.time()
    job.process.send_signal(15)
    code, out, err = job.end()
    assert code != 0 and time.time() - started < 25 and "failed during" not in err
    [step] = re.findall(r"stopped after step (\d+): .*the same command goes on", out)
    assert (job.folder / f"checkpoint-{step}" / "complete.json").exists() and int(step) >= 3
    assert f"going on after step {step}" in goes_on(place, f"stopped_{phase}", undisturbed)


def test_a_checkpoint_goes_on_on_other_numbers_of_ranks(place, undisturbed):
    """Saved by 2 ranks after step 4: the rows and weights of the rest are the same on 1 and 4, if samples are."""
    for ranks in (1, 4):
        out = place / f"on_{ranks}"
        shutil.copytree(place / "undisturbed", out, ignore=lambda *_: ["model", "checkpoint-6"])
        code, said, err = Job(place, f"on_{ranks}", ranks=ranks).end()
        assert code == 0 and "going on after step 4" in said, err
        metrics, samples, weights = story(out)
        assert [s["prompt"] for s in samples] == [s["prompt"] for s in undisturbed[1]]
        assert metrics[:5] == undisturbed[0][:5] and len(metrics) == 7
        assert weights.keys() == undisturbed[2].keys() and metrics[5]["policy/updates"] == 1


def nan_on_rank_1(place: str) -> None:
    """On two ranks, one of which finds a gradient that is not finite: neither moves, both count it."""
    dist.init_process_group("gloo")
    cfg = Config(model_name_or_path=f"{place}/tied", bf16=False)
    policy = grpo.load_policy(cfg, AutoConfig.from_pretrained(f"{place}/tied"), True, CPU, True)
    optimizer, before = torch.optim.AdamW(policy.parameters(), lr=1e-2), weights_of(policy)
    policy_loss = grpo.policy_loss
    grpo.policy_loss = lambda *args, **more: (policy_loss(*args, **more)[0] * (math.nan if dist.get_rank() else 1),
                                              policy_loss(*args, **more)[1])
    metrics = grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)
    assert metrics["policy/nonfinite_updates"] == 1 and metrics["policy/updates"] == 0
    grpo.gathered()
    assert torch.equal(weights_of(policy), before)
    grpo.policy_loss = policy_loss
    assert grpo.train_on(step_groups(), policy, None, optimizer, cfg, True, CPU, 0.0)["policy/updates"] == 1
    assert not torch.equal(weights_of(policy), before)
    dist.barrier()
    dist.destroy_process_group()


def test_a_gradient_that_is_not_finite_on_one_rank_moves_none(place):
    done = start(__file__, "nan_on_rank_1", place, ranks=2)
    assert done.returncode == 0, done.stderr


def test_a_run_of_bad_gradients_ends(place):
    done = start(__file__, "without_engine", *RUN_D.format(place).replace("--eval-only", "").split(), "--num-generations",
                 4, "--reward", f"{place}/rewards.py:low", "--learning-rate", 1e30, "--max-grad-norm", 1e30,
                 "--warmup-steps", 0, "--max-skipped-steps", 3, "--output-dir", place / "bad_gradients")
    assert done.returncode == 2 and "3 steps in a row had a gradient that was not finite" in done.stderr, done.stderr
    skipped = [m["policy/nonfinite_updates"] for m in lines(place / "bad_gradients" / "metrics.jsonl")[1:]]
    assert skipped[-2:] == [1, 1]    # the third ended the run


@pytest.mark.parametrize("error, code, words", [
    (MemoryError(), 2, "out of memory"), (MemoryError("too much"), 2, "grpo.py: out of memory during training: lower --tokens-per-micro-batch"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte"), 2, "DefaultCPUAllocator"),
    (torch.OutOfMemoryError("CUDA out of memory."), 2, "--gradient-checkpointing"), (UserError("wrong"), 2, "grpo.py: wrong"),
    (ValueError("odd"), 1, "ValueError: odd\ngrpo.py: failed during training")])
def test_the_first_to_fail_says_why(monkeypatch, capsys, error, code, words):
    """The claim is a counter in the store of all ranks: only the first one speaks."""
    class Ended(BaseException): pass
    def end(status):
        raise Ended(status)
    for store, speaks in ((None, True), (dist.HashStore(), True), (dist.HashStore(), False)):
        monkeypatch.setitem(grpo.STATUS, "store", store)
        monkeypatch.setitem(grpo.STATUS, "phase", "training")
        monkeypatch.setattr(os, "_exit", end)
        if not speaks:
            store.add("failed", 1)
        with pytest.raises(Ended) as ended:
            grpo.fail(error, "grpo.py")
        assert ended.value.args == (code,) and (words in capsys.readouterr().err) == speaks


@pytest.mark.faults
def test_a_second_signal_ends_at_once(place):
    job = Job(place, "twice", hold="saving:1", slow=True)
    job.wait_until_held()
    for rank in job.ranks():
        os.kill(rank, 15)
        os.kill(rank, 15)    # the same once more, as by torchrun
    time.sleep(3)
    assert job.process.poll() is None
    for rank in job.ranks():
        os.kill(rank, 15)
    started = time.time()
    assert job.end()[0] != 0 and time.time() - started < 10


@pytest.mark.faults
@pytest.mark.parametrize("phase", PHASES)
def test_one_rank_dies(place, undisturbed, phase):
    job = Job(place, f"died_{phase}", hold=PHASES[phase])
    job.wait_until_held()
    os.kill(job.ranks()[1], 9)
    started = time.time()
    assert job.end()[0] != 0 and time.time() - started < 90
    goes_on(place, f"died_{phase}", undisturbed)


@pytest.mark.faults
def test_torchrun_brings_a_killed_rank_back(place, undisturbed):
    job = Job(place, "elastic", hold="training:8", restarts=3)
    job.wait_until_held()
    os.kill(job.ranks()[1], 9)
    code, out, err = job.end(timeout=300)
    assert code == 0, err
    assert story(job.folder) == undisturbed


@pytest.mark.faults
def test_twenty_kills_lose_nothing(place, undisturbed):
    rng, kills, job = random.Random(0), 0, None
    while kills < 20:
        job = Job(place, "twenty")
        try:
            job.process.wait(rng.uniform(4, 14))
        except subprocess.TimeoutExpired:
            kills += 1
            job.kill()
            if (job.folder / "metrics.jsonl").exists():
                assert lines(job.folder / "metrics.jsonl") is not None
        else:    # it got to its end between two kills: begin again
            assert job.end()[0] == 0 and story(job.folder) == undisturbed
            subprocess.run(["rm", "-r", job.folder], check=True)
    goes_on(place, "twenty", undisturbed)


@pytest.mark.parametrize("model, change, words", [
    ("Gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ("Cohere", {"logit_scale": 0.0625}, "logit_scale = 0.0625"), ("Phi", {}, "head is not a plain matrix product")])
def test_head_that_is_no_plain_product_is_refused(model, change, words, tmp_path):
    import transformers
    tiny_model(tmp_path, False)
    config = getattr(transformers, f"{model}Config")(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, head_dim=32,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1, **change)
    getattr(transformers, f"{model}ForCausalLM")(config).save_pretrained(tmp_path)
    cfg, cpu = grpo.Config(model_name_or_path=str(tmp_path), max_prompt_length=64), torch.device("cpu")
    with pytest.raises(grpo.UserError, match=f"{tmp_path}.*{words}"):
        grpo.load_policy(cfg, grpo.load_tokenizer(cfg)[0], True, cpu, True)


def test_too_little_memory_names_the_flag(place):
    cfg = grpo.Config(model_name_or_path=str(place / "tied"), vllm_gpu_memory_utilization=1e-9)
    with pytest.raises(grpo.UserError, match="--vllm-gpu-memory-utilization 1e-09 of this machine's memory"):
        grpo.cpu_cache_bytes(cfg, grpo.load_tokenizer(cfg)[0], 8)


def test_import_is_quick_and_needs_no_vllm():
    done = start("-c", "import sys, time, torch; sys.modules['vllm'] = None; before = time.time(); import grpo\n"
                 "assert time.time() - before < 2 and not {'transformers', 'tyro'} & set(sys.modules)\n"
                 "assert not torch.distributed.is_initialized()")
    assert done.returncode == 0, done.stderr


# --- benchmarks -------------------------------------------------------------------------------------------------------

@pytest.mark.bench
def test_token_logprobs_against_the_plain_way():
    """16,384 tokens, vocabulary 49,152, float32, forward and backward: memory and time beside full logits."""
    figures = {}
    for way in ("plain", "ours"):
        done = start(__file__, "bench_logprobs", way, timeout=900)
        assert done.returncode == 0, done.stderr
        figures[way] = json.loads(done.stdout)
        print(f"\n{way}: {figures[way]['gib']:.2f} GiB, {figures[way]['seconds']:.1f} s", end="")
    gib, seconds = (figures["ours"][name] / figures["plain"][name] for name in ("gib", "seconds"))
    print(f"\nours / plain: memory {gib:.3f}, time {seconds:.2f}")
    assert figures["ours"]["checksum"] == pytest.approx(figures["plain"]["checksum"], rel=1e-3) and gib <= 0.1


def bench_logprobs(way: str) -> None:
    def plain(hidden, weight, targets):
        return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def ours(hidden, weight, targets):
        return grpo.token_logprobs(hidden, weight, targets)[0]
    torch.manual_seed(0)
    hidden, weight = torch.randn(16384, 576).requires_grad_(), (torch.randn(49152, 576) * 0.05).requires_grad_()
    targets = torch.randint(49152, (16384,))
    {"plain": plain, "ours": ours}[way](hidden[:64], weight[:99], targets[:64] % 99).sum().backward()    # warm up
    hidden.grad = weight.grad = None
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    {"plain": plain, "ours": ours}[way](hidden, weight, targets).sum().backward()
    seconds, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"gib": (peak - before) / 2**20, "seconds": seconds,
                      "checksum": [hidden.grad.norm().item(), weight.grad.norm().item()]}))


def smollm(vocab=49152):
    """The default model's shape, with random weights."""
    return LlamaConfig(vocab_size=vocab, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                       num_attention_heads=9, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
                       max_position_embeddings=8192)


def bench_groups(groups, prompt, lo=20, hi=64, seed=0):
    r = random.Random(seed)
    tokens = lambda n: [r.randrange(49152) for _ in range(n)]
    made = []
    for _ in range(groups):
        row = grpo.Row("", tokens(prompt), {})
        made.append([grpo.Sample(row, tokens(r.randint(lo, hi)), [], False, "", float(i % 2), (-1.0) ** i)
                     for i in range(8)])
        for s in made[-1]:
            s.engine_logprobs = [-10.8] * len(s.ids)
    return made


def padded_step(lm, optimizer, groups):
    """The usual way: every completion a row with its prompt, padded to the step's longest, logits of all positions."""
    samples = [s for g in groups for s in g]
    longest = max(len(s.row.prompt_ids + s.ids) for s in samples)
    padded = lambda x: nn.functional.pad(x, (0, longest - len(x)))
    for rows in (samples[i:i + 8] for i in range(0, len(samples), 8)):
        full = [torch.tensor(s.row.prompt_ids + s.ids) for s in rows]
        ids, mask = (torch.stack([padded(x) for x in xs]) for xs in (full, map(torch.ones_like, full)))
        with torch.autocast("cpu", torch.bfloat16):
            logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = 0.0
        for row, s in zip(logprobs, rows):
            lp = row[len(s.row.prompt_ids) - 1:][:len(s.ids)]
            loss = loss - ((lp - lp.detach()).exp() * s.advantage).sum() / len(s.ids) / len(samples)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def seconds(f, repeat=3, warm=True):
    if warm:
        f()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        f()
        taken.append(time.perf_counter() - start)
    return min(taken)


def bench_policy(folder, **flags):
    cfg = Config(model_name_or_path=str(folder), max_completion_length=4096, device="cpu", **flags)
    policy = grpo.load_policy(cfg, AutoConfig.from_pretrained(folder), True, CPU, trainable=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    return policy, lambda groups: grpo.train_on(groups, policy, None, optimizer, cfg, True, CPU, 0.0)


@pytest.mark.bench
def test_bench_training_step(tmp_path, models):
    """Forward, backward and optimizer, packed, against one padded row a completion with full logits."""
    torch.set_num_threads(os.cpu_count())
    lm = AutoModelForCausalLM.from_config(smollm(), dtype=torch.float32, attn_implementation="sdpa")
    lm.save_pretrained(tmp_path)
    _, step = bench_policy(tmp_path)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    body = sum(p.numel() for name, p in lm.named_parameters() if "embed" not in name)
    big = torch.randn(4096, 4096, dtype=torch.bfloat16)
    peak = 2 * 4096 ** 3 / seconds(lambda: big @ big)
    print(f"\nlarge bf16 product: {peak / 1e9:.0f} GFLOP/s")
    for prompt in (50, 500):
        groups = bench_groups(8, prompt)
        packed = seconds(lambda: step(groups))
        padded = seconds(lambda: padded_step(lm, optimizer, groups), 1, warm=prompt == 50)
        scored = sum(len(s.ids) for g in groups for s in g)
        useful = 6 * body * (scored - 64 + 8 * prompt) + 6 * 576 * 49152 * scored
        print(f"8 groups of 8, prompt {prompt}, {scored} completion tokens: packed {packed:.1f} s, padded {padded:.1f} "
              f"s, {padded / packed:.2f} times as fast; {useful / packed / peak:.2f} of the product rate")


@pytest.mark.bench
def test_bench_growth(tmp_path, models):
    """How the cost of a training step grows with completions, their length and the prompts'."""
    torch.set_num_threads(os.cpu_count())
    AutoModelForCausalLM.from_config(smollm(), dtype=torch.float32).save_pretrained(tmp_path)
    _, step = bench_policy(tmp_path)
    for name, cases in (("groups of 8", [(n, 50, 32) for n in (2, 4, 8, 16)]),
                        ("completion length", [(4, 50, n) for n in (16, 32, 64, 128)]),
                        ("prompt length", [(4, n, 32) for n in (50, 100, 200, 400, 800)])):
        taken = [(case, seconds(lambda: step(bench_groups(case[0], case[1], case[2], case[2])), 1)) for case in cases]
        which = {"groups of 8": 0, "completion length": 2, "prompt length": 1}[name]
        print(f"{name}: " + ", ".join(f"{case[which]} {t:.2f} s" for case, t in taken))


@pytest.mark.bench
def test_bench_memory_is_bounded_by_the_token_budget(tmp_path):
    AutoModelForCausalLM.from_config(smollm(), dtype=torch.float32).save_pretrained(tmp_path)
    small, large = (float(start(__file__, "bench_memory", tmp_path, n, timeout=900).stdout.split()[-1]) for n in (8, 32))
    print(f"\npeak memory of training on 64 and 256 completions: {small:.2f} and {large:.2f} GiB, {large / small:.2f}")


def bench_memory(folder: str, groups: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{groups}", rank=0, world_size=1)
    bench_policy(folder, tokens_per_micro_batch=2048)[1](bench_groups(int(groups), 50))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
