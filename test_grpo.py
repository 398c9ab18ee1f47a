"""What grpo.py defines, against numbers worked out by hand or by a slow and obvious computation in
float64; and the trainer as its user starts it, on tiny models made on the spot.

    ./run.sh test                   all but the benchmarks, the long series of faults and the sweep
    ./run.sh test -m bench -s       the benchmarks: each compares two ways in one run, prints the ratio
    ./run.sh test -m faults         kills and dead ranks, many times over
    ./run.sh test -m sweep -s       every causal language model that transformers has
"""
import functools
import importlib
import itertools
import json
import math
import os
import pickle
import pty
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.models import WordLevel
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast)

import grpo
from grpo import Config, Policy, Row, Sample, State, Tokens, UserError

torch.set_num_threads(1)    # of tiny_models so small, threads only wait for each other
AttentionInterface.register("grouped", grpo.grouped_attention)
CPU = torch.device("cpu")


def approx(value, tolerance=1e-6):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


def f64(values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def distance(ours, theirs) -> float:
    """Relative, between two tensors."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


# --- the plain loop -------------------------------------------------------------------------------


def plain_logprobs(model, s: Sample, temperature: float):
    """Logprobs and entropies of one completion's sampled tokens, by an ordinary forward pass."""
    prompt = s.row.prompt_ids
    logits = model(torch.tensor([[*prompt, *s.ids]])).logits[0, len(prompt) - 1:-1]
    all_logprobs = (logits / temperature).log_softmax(-1)                     # [T, V]
    logprobs = all_logprobs[range(len(s.ids)), s.ids]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return logprobs[s.mask], entropy[s.mask]


def plain_engine_weights(gap, mode: str, maximum: float):
    if mode == "sequence_mask":
        weight = gap.sum().exp()
        return weight if weight <= maximum else 0 * weight
    weights = gap.exp()
    if mode == "token_mask":
        return torch.where(weights <= maximum, weights, 0)
    return weights.clamp(max=maximum)


def plain_objective(s: Sample, logprobs, entropy, old, ref, cfg: Config):
    """Of each token of one completion: what is to be maximised, and what is measured. No reference
    where ref is None."""
    ratio = (logprobs - old).exp()
    if cfg.importance_sampling_level == "sequence":
        ratio = (logprobs - old).mean().exp().expand(len(old))
    a, low, high = s.advantage, 1 - cfg.epsilon, 1 + cfg.clip_high
    if cfg.loss_type == "cispo":
        objective = ratio.detach().clamp(max=high) * a * logprobs
        measured = {"ratio_cut": ratio > high}
    else:
        bounded = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
        objective = torch.min(bounded * a, ratio.clamp(low, high) * a)
        nothing = torch.zeros(len(old), dtype=torch.bool)
        measured = {"clip_low": ratio < low if a < 0 else nothing,
                    "clip_high": ratio > high if a > 0 else nothing}
    mu = f64(s.engine_logprobs)[s.mask]
    known = mu.isfinite()
    gap = torch.where(known, old - mu, 0)
    if cfg.vllm_importance_sampling_correction:
        objective = objective * plain_engine_weights(gap, cfg.vllm_importance_sampling_mode,
                                                     cfg.vllm_importance_sampling_clip_max)
    if ref is not None:
        k3 = (ref - logprobs).exp() - (ref - logprobs) - 1
        penalty = k3 if cfg.kl_estimator == "k3" else (ref - logprobs) ** 2 / 2
        if cfg.use_bias_correction_kl:
            penalty = penalty * ratio
        objective = objective - cfg.beta * penalty
        measured["kl"] = k3
    objective = objective + cfg.entropy_coef * entropy
    measured |= {"entropy": entropy, "ratio_max": ratio, "engine_nan": ~known,
                 "engine_gap_mean": gap.abs(), "engine_gap_max": gap.abs()}
    return objective, {name: values.detach().double() for name, values in measured.items()}


def is_left_out(s: Sample, cfg: Config) -> bool:
    return s.truncated and cfg.mask_truncated_completions


def plain_divisor(s: Sample, part: list[list[Sample]], cfg: Config) -> int:
    """What the objective of one of its tokens is divided by, in the mean of an update."""
    completions = [each for group in part for each in group]
    if cfg.loss_type == "grpo":
        return len(completions) * sum(s.mask)
    if cfg.loss_type == "dr_grpo":
        return len(completions) * cfg.max_completion_length
    return sum(sum(each.mask) for each in completions if not is_left_out(each, cfg))


def plain_updates(groups: list[list[Sample]], cfg: Config, model, reference, optimizer) -> dict:
    """All updates of a rollout: their gradients, and the metrics that a step reports of them."""
    old, ref = {}, {}
    with torch.no_grad():
        for s in itertools.chain(*groups):
            old[id(s)] = plain_logprobs(model, s, cfg.temperature)[0]
            ref[id(s)] = reference and plain_logprobs(reference, s, cfg.temperature)[0]
    gradients, norms, losses, measures = [], [], [], []
    size = math.ceil(len(groups) / cfg.num_minibatches)
    parts = [groups[i:i + size] for i in range(0, len(groups), size)] * cfg.num_iterations
    for part in parts:
        if not any(s.advantage for group in part for s in group):
            continue
        loss = torch.zeros(())
        for group in part:
            if cfg.skip_zero_std_groups and not any(s.advantage for s in group):
                continue
            for s in group:
                if is_left_out(s, cfg):
                    continue
                logprobs, entropy = plain_logprobs(model, s, cfg.temperature)
                objective, measured = plain_objective(s, logprobs, entropy, old[id(s)],
                                                      ref[id(s)], cfg)
                loss = loss - objective.sum() / plain_divisor(s, part, cfg)
                measures.append(measured)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item())
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    updates = len(losses)
    metrics = {"loss": sum(losses) / max(1, updates), "grad_norm": sum(norms) / max(1, updates),
               "updates": updates, "skipped_updates": len(parts) - updates, "nonfinite_updates": 0,
               "learning_rate": cfg.learning_rate, "beta": cfg.beta}
    for name in measures[0] if measures else []:
        values = torch.cat([measured[name] for measured in measures])
        metrics[name] = (values.max() if name.endswith("_max") else values.mean()).item()
    return {"gradients": gradients, "weights": flat(model.parameters()),
            "metrics": {f"policy/{name}": value for name, value in metrics.items()}}


def flat(tensors):
    return torch.cat([grpo.whole(tensor.detach()).flatten() for tensor in tensors]).clone()


# --- loss -----------------------------------------------------------------------------------------


def loss_of(logprobs, old=None, advantages=None, weights=None, ref=None, engine=None,
            sequence=None, beta=0.0, dtype=torch.float64, **flags):
    """policy_loss of these tokens: the loss, its gradient, and what it measures of each token.
    Left out: the policy is the one that sampled, the engine agrees, every token weighs 1."""
    n = len(logprobs)
    values = functools.partial(torch.tensor, dtype=dtype)
    old = logprobs if old is None else old
    tokens = Tokens(
        advantages=values(advantages or [0.0] * n), token_weights=values(weights or [1.0] * n),
        sequence=torch.tensor(sequence or [0] * n),
        engine_logprobs=values(old if engine is None else engine), old_logprobs=values(old),
        ref_logprobs=None if ref is None else values(ref),
        logprobs=values(logprobs, requires_grad=True), entropy=torch.zeros(n, dtype=dtype))
    loss, metrics = grpo.policy_loss(tokens, Config(**flags), beta)
    loss.backward()
    measured = {name: each.detach().double().tolist() for name, each in metrics.items()}
    return loss.item(), tokens.logprobs.grad.tolist(), measured


def surrogate_at(ratio, advantage, **flags):
    """The objective of one token of this ratio, and its slope in log pi."""
    loss, [slope], _ = loss_of([-1 + math.log(ratio)], [-1.0], [advantage], **flags)
    return [-loss, -slope]


def test_a_better_token_is_made_likelier_up_to_the_upper_clip():
    assert surrogate_at(0.5, 1.0) == approx([0.5, 0.5])
    assert surrogate_at(1.0, 1.0) == approx([1.0, 1.0])
    assert surrogate_at(1.5, 1.0) == approx([1.2, 0.0])    # 1 + epsilon, and no slope
    assert surrogate_at(1.25, 1.0, epsilon_high=0.28) == approx([1.25, 1.25])
    assert surrogate_at(1.5, 1.0, epsilon_high=0.28) == approx([1.28, 0.0])


def test_a_worse_token_is_made_less_likely_down_to_the_lower_clip():
    assert surrogate_at(1.5, -1.0) == approx([-1.5, -1.5])
    assert surrogate_at(1.0, -1.0) == approx([-1.0, -1.0])
    assert surrogate_at(0.5, -1.0) == approx([-0.8, 0.0])


def test_a_token_without_advantage_moves_nothing():
    assert surrogate_at(1.5, 0.0) == approx([0.0, 0.0])


def test_delta_bounds_the_ratio_of_worse_tokens_only():
    assert surrogate_at(5.0, -1.0) == approx([-5.0, -5.0])
    assert surrogate_at(5.0, -1.0, delta=3.0) == approx([-3.0, 0.0])
    assert surrogate_at(2.0, -1.0, delta=3.0) == approx([-2.0, -2.0])
    assert surrogate_at(5.0, 1.0, delta=3.0) == approx([1.2, 0.0])


def test_the_engine_weight_multiplies_the_surrogate_outside_the_clip():
    twice = [-1.0 - math.log(2)]    # log mu: pi_old/mu is 2
    assert surrogate_at(1.5, 1.0, engine=twice) == approx([2 * 1.2, 0.0])
    assert surrogate_at(0.5, 1.0, engine=twice) == approx([2 * 0.5, 2 * 0.5])
    off = dict(engine=twice, vllm_importance_sampling_correction=False)
    assert surrogate_at(0.5, 1.0, **off) == approx([0.5, 0.5])


# log pi = -1 against a reference of -1.5: log pi_ref/pi = -0.5.
K3 = math.exp(-0.5) + 0.5 - 1         # 0.106531
K3_SLOPE = 1 - math.exp(-0.5)         # 0.393469
K2, K2_SLOPE = 0.5**2 / 2, 0.5


def test_kl_estimators_by_hand():
    kl = functools.partial(loss_of, [-1.0], ref=[-1.5], beta=1.0)
    loss, slope, measured = kl()
    assert (loss, slope, measured["kl"]) == (approx(K3), approx([K3_SLOPE]), approx([K3]))
    loss, slope, measured = kl(kl_estimator="k2")    # what is reported stays k3
    assert (loss, slope, measured["kl"]) == (approx(K2), approx([K2_SLOPE]), approx([K3]))
    loss, slope, measured = kl(use_bias_correction_kl=True)    # d(rho k3) = d k3 + k3 d rho, rho 1
    assert (loss, slope, measured["kl"]) == (approx(K3), approx([K3_SLOPE + K3]), approx([K3]))


def test_the_kl_is_in_the_mean_and_not_times_the_engine_weight():
    kl = functools.partial(loss_of, [-1.0], ref=[-1.5], engine=[-1.0 - math.log(2)])
    assert kl(beta=1.0)[:2] == (approx(K3), approx([K3_SLOPE]))
    assert kl(beta=0.1, advantages=[1.0])[:2] == (approx(-2 + 0.1 * K3),
                                                  approx([-2 + 0.1 * K3_SLOPE]))
    assert kl(beta=0.1, advantages=[1.0], weights=[0.25])[:2] == (
        approx((-2 + 0.1 * K3) / 4), approx([(-2 + 0.1 * K3_SLOPE) / 4]))


def test_without_a_reference_there_is_no_kl_at_any_beta():
    loss, slope, measured = loss_of([-1.0], beta=1.0)
    assert (loss, slope) == (0, [0]) and "kl" not in measured


def test_gspo_clips_one_ratio_a_completion():
    ratios = [1.5, 0.8, 1.0, 1.5, 1.5]    # of two completions, of three tokens and of two
    mean = (1.5 * 0.8) ** (1 / 3)         # 1.0627; the other's, 1.5, is over the clip at 1.2
    loss, slope, measured = loss_of(
        [math.log(r) for r in ratios], [0.0] * 5, [2.0, 2.0, 2.0, 1.0, 1.0],
        [1 / 3] * 3 + [1 / 2] * 2, sequence=[0, 0, 0, 1, 1], importance_sampling_level="sequence")
    assert loss == approx(-(2 * mean + 1.2))
    assert slope == approx([-mean * 2 / 3] * 3 + [0, 0])
    assert measured["ratio_max"] == approx([mean] * 3 + [1.5] * 2)
    assert measured["clip_high"] == [0, 0, 0, 1, 1]


def test_cispo_weighs_log_pi_and_stops_no_gradient():
    # Ratios of 3, cut to 2, and of 0.1, which the clipped surrogate would stop for A < 0.
    loss, slope, measured = loss_of(
        [-1.0, -2.0], [-1 - math.log(3), -2 + math.log(10)], [1.0, -1.0], [0.5, 0.5],
        loss_type="cispo", epsilon_high=1.0)
    assert loss == approx(-0.5 * (2 * 1 * -1 + 0.1 * -1 * -2))
    assert slope == approx([-0.5 * 2, 0.5 * 0.1])
    assert measured["ratio_cut"] == [1, 0]


def test_cispo_reports_the_ratios_it_cuts_and_no_clip():
    measured = loss_of([-1.0], advantages=[1.0], loss_type="cispo")[2]
    assert "ratio_cut" in measured and not any(name.startswith("clip") for name in measured)
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        measured = loss_of([-1.0], advantages=[1.0], loss_type=loss_type)[2]
        assert {"clip_low", "clip_high"} < set(measured) and "ratio_cut" not in measured


def test_delta_is_refused_where_the_loss_does_not_read_it():
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        grpo.check_config(Config(loss_type=loss_type, delta=2.0), 1)
    with pytest.raises(UserError, match="--delta 2.0 .*--loss-type cispo"):
        grpo.check_config(Config(loss_type="cispo", delta=2.0), 1)


def test_what_is_measured_of_each_token():
    ratios, advantages = zip((0.5, -1.0), (0.5, 1.0), (1.5, 1.0), (1.5, -1.0), (1.0, 1.0),
                             (1.25, 1.0))
    measured = loss_of([math.log(r) for r in ratios], [0.0] * 6, advantages, epsilon_high=0.3,
                       ref=[0.0] * 6, engine=[0.0, 0.5, -0.5, 0.0, 0.0, math.nan])[2]
    assert measured["clip_low"] == [1, 0, 0, 0, 0, 0]     # only where clipping stops the gradient
    assert measured["clip_high"] == [0, 0, 1, 0, 0, 0]
    assert measured["ratio_max"] == approx(ratios)
    assert measured["kl"] == approx([1 / r + math.log(r) - 1 for r in ratios])
    assert measured["engine_gap_mean"] == measured["engine_gap_max"] == [0, 0.5, 0.5, 0, 0, 0]
    assert measured["engine_nan"] == [0, 0, 0, 0, 0, 1]
    assert measured["tokens"] == [1] * 6 and measured["entropy"] == [0] * 6


# Two completions of two tokens, with log pi_old/mu of -0.2 and 1, and of 0 and 0.5.
@pytest.mark.parametrize("mode, expected", [
    ("token_truncate", [math.exp(-0.2), 2, 1, math.exp(0.5)]),
    ("token_mask", [math.exp(-0.2), 0, 1, math.exp(0.5)]),
    ("sequence_mask", [0, 0, math.exp(0.5), math.exp(0.5)]),    # e^(-0.2 + 1) is over 2
])
def test_engine_weights(mode, expected):
    gap, sequence = f64([-0.2, 1, 0, 0.5]), torch.tensor([0, 0, 1, 1])
    assert grpo.engine_weights(gap, sequence, mode, 2.0).tolist() == approx(expected)
    far = grpo.engine_weights(torch.tensor([90.0, 800.0]), torch.tensor([0, 1]), mode, 2.0)
    assert far.tolist() == ([2, 2] if mode == "token_truncate" else [0, 0])    # exp of them is inf


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_a_token_the_engine_gave_no_number_for_has_weight_1(mode, lost):
    # log pi_old/mu of the other token is 0.5, alone or in its completion's product.
    _, slope, measured = loss_of([-1.0, -1.0], advantages=[1.0, 1.0], engine=[lost, -1.5],
                                 vllm_importance_sampling_mode=mode)
    w = math.exp(0.5)
    assert slope == approx([-w, -w] if mode == "sequence_mask" else [-1.0, -w])
    assert measured["engine_nan"] == [1, 0] and measured["engine_gap_mean"] == approx([0, 0.5])


@pytest.mark.parametrize("estimator", ["k3", "k2"])
@pytest.mark.parametrize("corrected", [True, False])
def test_a_policy_far_from_the_reference_has_a_finite_kl(estimator, corrected):
    loss, slope, measured = loss_of([-90.0], ref=[-0.1], beta=0.1, dtype=torch.float32,
                                    kl_estimator=estimator, use_bias_correction_kl=corrected)
    assert math.isfinite(loss) and loss > 1 and math.isfinite(slope[0])
    assert measured["kl"][0] > 1e8


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("flags", [{}, {"importance_sampling_level": "sequence"},
                                   {"loss_type": "cispo"}, {"use_bias_correction_kl": True}], ids=str)
def test_a_ratio_over_float32_has_a_finite_loss_and_gradient(advantage, flags):
    loss, slope, measured = loss_of([-1.0], [-96.0], [advantage], dtype=torch.float32, beta=0.1,
                                    ref=[-90.0], **flags)    # e^95
    assert math.isfinite(loss) and math.isfinite(slope[0])
    assert 1e8 < measured["ratio_max"][0] < math.inf
    if flags == {} and advantage == 1:    # clipped: what is left is the KL, nearly 88 nats
        assert (loss, slope[0]) == (approx(-1.2 + 0.1 * 88), approx(0.1))


@pytest.mark.parametrize("delta", [None, 1.6])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_and_gradient_of_random_tokens_against_derivatives_by_hand(loss_type, delta):
    rng = random.Random(loss_type)
    cfg = Config(loss_type=loss_type, max_completion_length=12, mask_truncated_completions=True)
    groups = make_groups([(3, [rng.randint(1, 12) for _ in range(6)]) for _ in range(4)],
                         [[rng.random() for _ in range(6)] for _ in range(3)] + [[0.5] * 6])
    everybody = list(itertools.chain(*groups))
    for s in everybody[::5]:
        s.truncated = True
    owners = [s for s in grpo.set_token_weights(groups, cfg) for _ in s.ids]
    n, beta, loss, slopes, low, high = len(owners), 0.3, 0.0, [], [], []
    logprobs, old, ref = ([rng.gauss(-2, 0.3) for _ in range(n)] for _ in range(3))
    mu = [rng.gauss(-2, 0.6) for _ in range(n)]
    for i, s in enumerate(owners):
        ratio, a = math.exp(logprobs[i] - old[i]), s.advantage
        engine_weight = min(math.exp(old[i] - mu[i]), 2)
        high.append(a > 0 and ratio > 1.28)
        low.append(a < 0 and ratio < 0.8)
        beyond = a < 0 and delta is not None and ratio > delta
        used, slope = ratio, engine_weight * ratio * a
        for is_cut, bound in ((high[-1], 1.28), (low[-1], 0.8), (beyond, delta)):
            if is_cut:
                used, slope = bound, 0.0
        gap = ref[i] - logprobs[i]
        objective = engine_weight * used * a - beta * (math.exp(gap) - gap - 1)
        slope -= beta * (1 - math.exp(gap))
        weight = 1 / plain_divisor(s, groups, cfg)
        loss -= weight * objective
        slopes.append(-weight * slope)
    got = loss_of(logprobs, old, [s.advantage for s in owners], [s.token_weight for s in owners],
                  ref=ref, engine=mu, beta=beta, epsilon_high=0.28, delta=delta)
    assert got[:2] == (approx(loss, 1e-10), approx(slopes, 1e-10))
    assert (got[2]["clip_low"], got[2]["clip_high"]) == (low, high) and any(low) and any(high)


def test_a_surrogate_of_ones_own_is_one_entry(monkeypatch, tiny_models):
    def reinforce(tokens, ratio, cfg):
        return tokens.advantages * tokens.logprobs, {"half_ratio": ratio / 2}

    monkeypatch.setitem(grpo.LOSS_TYPES, "reinforce", (reinforce, grpo.token_mean))
    cfg, policy = tiny_policy(tiny_models / "llama", loss_type="reinforce", learning_rate=0.1, max_grad_norm=1e9,
                       vllm_importance_sampling_correction=False)
    groups = step_groups()
    model = whole_model(tiny_models / "llama")
    trained = [s for i in (0, 1, 3) for s in groups[i]]    # the rewards of groups[2] are equal
    loss = 0.0
    for s in trained:
        loss -= s.advantage * plain_logprobs(model, s, 1.0)[0].sum() / 58    # sampled tokens
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
    before = flat(policy.parameters())
    metrics = update(groups, cfg, policy)
    assert distance(before - flat(policy.parameters()), 0.1 * gradient) < 1e-4
    assert metrics["policy/half_ratio"] == approx(0.5) and "policy/clip_low" not in metrics


# --- advantage ------------------------------------------------------------------------------------


def advantages_of(rewards, *args, **options):
    got = grpo.group_advantages(f64(rewards), *args, **options)
    assert got.dtype == torch.float32
    return got.tolist()


def test_an_advantage_is_the_distance_from_the_groups_mean_in_its_std():
    # Of 1, 0, 0 the mean is 1/3 and the population std sqrt(2)/3.
    assert advantages_of([[1, 0, 0]])[0] == approx([1.4142, -0.7071, -0.7071], 1e-4)
    assert advantages_of([[1, 0, 0, 0]])[0] == approx([1.7320] + [-0.5773] * 3, 1e-4)
    for group in advantages_of([[1, 0], [5, 3]]):    # whatever the other groups are
        assert group == approx([1, -1], 1e-4)
    assert advantages_of([[0.7, 0.701]])[0] == approx([-0.998, 0.998], 1e-4)    # std + 1e-6


def test_the_batchs_std_is_of_all_rewards():
    # Of 1, 0, 1, 1 it is sqrt(3)/4; the distances are 1/2.
    got = advantages_of([[1, 0], [1, 1]], "batch")
    assert got[0] == approx([1.1547, -1.1547], 1e-4) and got[1] == [0, 0]


def test_without_scaling_it_is_the_distance_itself():
    assert advantages_of([[1, 0, 0, 0]], "none")[0] == approx([0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_is_the_distance_from_the_mean_of_the_others():
    got = advantages_of([[1, 0, 0, 0]], "none", "leave_one_out")[0]
    assert got == approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_a_completion_without_a_reward_is_left_out_of_its_group():
    [got] = advantages_of([[1, math.nan, 0]])
    assert got == [approx(1, 1e-4), 0, approx(-1, 1e-4)]
    assert advantages_of([[1, math.nan, 0, 0]], "none", "leave_one_out")[0] == approx(
        [1, 0, -1 / 2, -1 / 2])
    assert advantages_of([[math.nan, math.nan], [1, 0]], "batch")[0] == [0, 0]
    for scale in ("group", "batch", "none"):
        assert advantages_of([[math.nan, math.nan]], scale) == [[0, 0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(dtype, baseline, scale):
    for reward, size in ((1.0, 4), (0.0, 4), (0.7, 7), (0.1, 3), (1 / 3, 1000)):
        rewards = torch.full((2, size), reward, dtype=dtype)
        rewards[1, 0] = 2    # a group with a signal beside it
        got = grpo.group_advantages(rewards, scale, baseline)
        assert got[0].eq(0).all() and got[1].ne(0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_that_differ_by_rounding_are_no_signal(scale):
    assert advantages_of([[0.5, 0.5, 0.5, 0.5000001]], scale) == [[0, 0, 0, 0]]


def test_the_floor_of_a_groups_std_is_a_flag():
    close = [[0.5, 0.5, 0.5, 0.5001]]    # a std of 4.3e-5, so 8.7e-5 of the largest reward
    assert advantages_of(close)[0] == approx([-0.5643] * 3 + [1.6930], 1e-3)
    assert advantages_of(close, min_group_std=1e-3) == [[0, 0, 0, 0]]
    row = Row(0, "", numpy.array([1]), {})
    groups = [[Sample(row, [5], [True], [0.0], False, "", reward=r) for r in close[0]]]
    grpo.set_advantages(groups, Config())
    assert [s.advantage for s in groups[0]] == approx([-0.5643] * 3 + [1.6930], 1e-3)
    grpo.set_advantages(groups, Config(min_group_std=1e-3))
    assert [s.advantage for s in groups[0]] == [0, 0, 0, 0]


def test_the_flags_of_the_advantage_reach_it():
    groups = make_groups([(1, [1, 1, 1, 1])], [[1.0, 0, 0, 0]])
    grpo.set_advantages(groups, Config(scale_rewards="none", advantage_baseline="leave_one_out"))
    assert [s.advantage for s in groups[0]] == approx([1, -1 / 3, -1 / 3, -1 / 3])


# --- token weights --------------------------------------------------------------------------------


def make_groups(shapes, rewards=None, seed=0) -> list[list[Sample]]:
    """A group for each (prompt length, completion lengths). Few distinct tokens: ends and padding
    recur inside."""
    rng = random.Random(seed)
    groups = []
    for i, (prompt_length, lengths) in enumerate(shapes):
        row = Row(i, f"prompt {i}", numpy.array(rng.choices(range(120), k=prompt_length)), {})
        scores = rewards[i] if rewards else [0.0] * len(lengths)
        group = []
        for n, reward in zip(lengths, scores, strict=True):
            group.append(Sample(
                row=row, ids=numpy.array(rng.choices(range(4), k=n)), mask=numpy.ones(n, bool), text="",
                engine_logprobs=numpy.array([rng.uniform(-7, -3) for _ in range(n)]), truncated=False,
                reward=reward))
        grpo.set_advantages([group], Config())
        groups.append(group)
    return groups


def weights_of_lengths_1_and_3(loss_type):
    groups = make_groups([(2, [1, 3])], [[1.0, 0.0]])    # advantages of 1 and -1
    cfg = Config(loss_type=loss_type, max_completion_length=4)
    short, long = grpo.set_token_weights(groups, cfg)
    assert (short, long) == tuple(groups[0])
    losses = []    # each completion in a micro-batch of its own, at a ratio of 1
    for s, n in ((short, 1), (long, 3)):
        losses.append(loss_of([-1.0] * n, advantages=[s.advantage] * n,
                              weights=[s.token_weight] * n)[0])
    return [short.token_weight, long.token_weight], sum(losses)


def test_grpo_is_the_mean_over_a_completions_tokens_then_over_completions():
    weights, loss = weights_of_lengths_1_and_3("grpo")
    assert weights == approx([1 / 2, 1 / 6]) and loss == approx(0, 1e-5)


def test_dapo_is_the_mean_over_all_tokens():
    weights, loss = weights_of_lengths_1_and_3("dapo")
    assert weights == approx([1 / 4, 1 / 4])
    assert loss == approx(-1 / 4 + 3 / 4, 1e-5)    # micro-batches add up


def test_cispo_is_the_mean_over_all_tokens():
    assert weights_of_lengths_1_and_3("cispo")[0] == approx([1 / 4, 1 / 4])


def test_dr_grpo_divides_by_completions_of_the_greatest_length():
    weights, loss = weights_of_lengths_1_and_3("dr_grpo")
    assert weights == approx([1 / 8, 1 / 8]) and loss == approx(-1 / 8 + 3 / 8, 1e-5)


# Masked truncated completions count in the mean of grpo and dr_grpo but not in dapo's; groups
# without a signal count in all.
@pytest.mark.parametrize("loss_type, weight", [
    ("grpo", 1 / (6 * 2)), ("dapo", 1 / (2 + 1 + 3 + 1)), ("dr_grpo", 1 / (6 * 10))])
def test_who_counts_in_the_mean_and_who_is_trained_on(loss_type, weight):
    groups = make_groups([(2, [2, 5]), (2, [1, 3]), (2, [1, 4])],
                         [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    (a, cut_1), (equal_1, equal_2), (b, cut_2) = groups
    cut_1.truncated = cut_2.truncated = True
    cfg = Config(loss_type=loss_type, max_completion_length=10, mask_truncated_completions=True)
    assert grpo.set_token_weights(groups, cfg) == [a, b]
    assert a.token_weight == approx(weight)
    with_equals = replace(cfg, skip_zero_std_groups=False)
    assert grpo.set_token_weights(groups, with_equals) == [a, equal_1, equal_2, b]
    assert a.token_weight == approx(weight)
    for each in (cfg, with_equals):
        assert grpo.set_token_weights(groups[1:2], each) == []    # no signal at all


def test_a_completion_without_a_reward_is_not_trained_on():
    groups = make_groups([(2, [2, 3, 4])], [[1.0, 0.0, None]])
    a, b, unscored = groups[0]
    assert grpo.set_token_weights(groups, Config(skip_zero_std_groups=False)) == [a, b]
    assert a.token_weight == approx(1 / (3 * 2))    # it counts in the mean over completions


@pytest.mark.parametrize("loss_type, weight", [
    ("grpo", 1 / (3 * 2)), ("dapo", 1 / (2 + 1)), ("dr_grpo", 1 / (3 * 10))])
def test_only_sampled_tokens_count_in_the_mean(loss_type, weight):
    groups = make_groups([(2, [5, 3, 2])], [[1.0, 0.0, 0.0]])
    a, b, only_read = groups[0]
    a.mask = [True, False, True, False, False]
    b.mask = [False, False, True]
    only_read.mask = [False, False]
    cfg = Config(loss_type=loss_type, max_completion_length=10)
    assert grpo.set_token_weights(groups, cfg) == [a, b]
    assert a.token_weight == approx(weight)


def test_decoupled_rewards_are_each_normalised_before_they_are_added():
    """Rewards a of weight 1 and b of weight 0.5. Group 1: a = [1, 0], b = [0, 0]: advantages
    [1, -1] + 0.5 [0, 0]. Group 2: a = [0, 1], b = [10, 30]: [-1, 1] + 0.5 [-1, 1]. The std of
    [1, -1, -1.5, 1.5] is sqrt(1.625). Added up first, group 2 would be ruled by b alone."""
    cfg = Config(reward=("a", "b:0.5"), multi_objective_aggregation="normalize_then_sum")
    groups = make_groups([(1, [1, 1]), (1, [1, 1])])
    values = [(1, 0), (0, 0)], [(0, 10), (1, 30)]
    for group, pairs in zip(groups, values):
        for s, (a, b) in zip(group, pairs):
            s.rewards, s.reward = {"a": a, "b": b}, a + 0.5 * b
    grpo.set_advantages(groups, cfg)
    truth = [x / math.sqrt(1.625) for x in (1, -1, -1.5, 1.5)]
    assert [s.advantage for s in itertools.chain(*groups)] == approx(truth, 1e-5)
    groups[1][0].rewards["b"] = None    # left out of b, whose mean is then the other's
    grpo.set_advantages(groups, cfg)
    truth = [x / math.sqrt((1 + 1 + 1 + 1) / 4) for x in (1, -1, -1, 1)]
    assert [s.advantage for s in itertools.chain(*groups)] == approx(truth, 1e-5)


def test_a_signal_is_an_advantage_whatever_the_rewards_are(monkeypatch, tiny_models, losses):
    """With the batch's mean as a baseline, groups of equal rewards are better or worse as a whole."""
    groups = make_groups([(5, [3, 1]), (3, [2, 2])], [[1.0, 1.0], [0.0, 0.0]])
    cfg, policy = tiny_policy(tiny_models / "llama")
    assert update(groups, cfg, policy)["policy/updates"] == 0 and losses == []

    def batch_baseline(rewards, scale_rewards, baseline, min_group_std):
        return (rewards - rewards.mean()).float()
    monkeypatch.setattr(grpo, "group_advantages", batch_baseline)
    grpo.set_advantages(groups, cfg)
    assert [[s.advantage for s in group] for group in groups] == [[0.5, 0.5], [-0.5, -0.5]]
    before = flat(policy.parameters())
    metrics = update(groups, cfg, policy)
    [tokens] = losses
    assert metrics["policy/updates"] == 1 and len(tokens.advantages) == 8    # of both groups
    assert not torch.equal(flat(policy.parameters()), before)
    assert grpo.sample_metrics(groups)["reward/zero_std_groups"] == 0


# --- logprobs -------------------------------------------------------------------------------------


def one_by_one(hidden, weight, targets, temperature):
    """Logprobs, entropies, and the gradients of their sum weighted by cos and sin of the place."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs, entropies = [], []
    for i, target in enumerate(targets):
        all_logprobs = (weight @ hidden[i] / temperature).log_softmax(-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum()
        (math.cos(i) * all_logprobs[target] + math.sin(i) * entropy).backward()
        logprobs.append(all_logprobs[target].item())
        entropies.append(entropy.item())
    return f64(logprobs), f64(entropies), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature, n, vocabulary", [
    (1.0, 37, 50), (0.5, 37, 50), (1.7, 1, 50),
    (0.8, 17, 2**20),    # in chunks of 8 tokens, the last not full
])
def test_token_logprobs_against_one_token_at_a_time(temperature, n, vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(n, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    targets, place = torch.randint(vocabulary, (n,)), torch.arange(n)
    chunks = len(list(grpo.logit_chunks(hidden, weight, temperature)))
    assert chunks == (3 if vocabulary == 2**20 else 1)
    truth = one_by_one(hidden, weight, targets, temperature)
    logprobs, entropies = grpo.token_logprobs(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs.double(), truth[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropies.double(), truth[1], rtol=1e-6, atol=3e-5)
    of_logprobs, of_entropies = (place.cos() * logprobs).sum(), (place.sin() * entropies).sum()
    gradient = functools.partial(torch.autograd.grad, inputs=(hidden, weight), retain_graph=True)
    together = gradient(of_logprobs + of_entropies)
    added = [a + b for a, b in zip(gradient(of_logprobs), gradient(of_entropies))]
    for d_hidden, d_weight in (together, added):
        assert distance(d_hidden, truth[2]) < 2e-3 and distance(d_weight, truth[3]) < 1e-5


def test_the_temperature_divides_the_logits():
    hidden, head = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    [logprob], _ = grpo.token_logprobs(hidden, head, torch.tensor([0]), 0.5)
    assert logprob.item() == approx(-math.log(1 + math.exp(-4)), 1e-5)


def test_the_softmax_of_bfloat16_is_in_float32():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (5, 150_000))
    targets, place = torch.randint(150_000, (5,)), torch.arange(5)
    rounded = (hidden @ weight.T).detach().double()    # bfloat16 has rounded the logits
    truth = rounded.log_softmax(-1)
    logprobs, entropies = grpo.token_logprobs(hidden, weight, targets)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), truth[range(5), targets], rtol=1e-6, atol=1e-5)
    entropy = -(truth.exp() * truth).sum(1)
    torch.testing.assert_close(entropies.double(), entropy, rtol=1e-6, atol=1e-5)
    (place.cos() * logprobs + place.sin() * entropies).sum().backward()
    _, _, d_hidden, d_weight = one_by_one(hidden, weight, targets, 1.0)
    assert distance(hidden.grad, d_hidden) < 2e-2 and distance(weight.grad, d_weight) < 2e-2


def test_logits_are_not_kept_for_the_backward_pass():
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        grpo.token_logprobs(hidden, weight, torch.randint(1000, (64,)))
    assert max(sizes) == weight.numel() < 64 * 1000


# --- packing --------------------------------------------------------------------------------------


def tiny_config(kind):
    sizes = dict(vocab_size=120, initializer_range=0.1, bos_token_id=1, eos_token_id=2)
    if kind == "gpt2":    # absolute positions, and dropout 0.1
        return GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **sizes)
    return LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                       tie_word_embeddings=kind == "tied", **sizes)


def exact_lm(kind, attention):
    """In float64 throughout."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for name, module in list(lm.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":    # it computes in float32 whatever it is given
            lm.set_submodule(name, nn.RMSNorm(64, eps=1e-6, dtype=torch.float64))
    return lm


def exact_logprobs(hidden, weight, targets, temperature):
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


SHAPES = {"uneven": [(3, [1, 5, 2, 9]), (40, [4, 1, 7, 1])], "one token": [(3, [1, 1]), (40, [1])],
          "single": [(1, [6])]}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rows are laid out as on a GPU. FlexAttention isn't compiled: it then asks the mask about all
    pairs, whatever the blocks, and has the backward pass that torch refuses on the CPU."""
    monkeypatch.setitem(grpo.ROW_MULTIPLE, "cpu", grpo.ROW_MULTIPLE["cuda"])
    monkeypatch.setattr(grpo, "packed_attention",
                        lambda *row: {"attention_mask": grpo.block_mask(*row)})
    monkeypatch.setattr(transformers.integrations.flex_attention.WrappedFlexAttention, "__call__",
                        lambda self: flex.flex_attention)
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind, layout", [
    *itertools.product(["llama", "gpt2"], ["one row", "cut after 2 and 5", "one a row"]),
    ("llama", "on a GPU")])
def test_a_row_means_what_its_completions_mean_alone(kind, layout, shape, monkeypatch, request):
    """In float64, so with another head than token_logprobs, whose softmax is in float32."""
    monkeypatch.setattr(grpo, "token_logprobs", exact_logprobs)
    packed = layout != "one a row"
    attention = "grouped" if packed else "sdpa"
    if layout == "on a GPU":
        request.getfixturevalue("as_on_a_gpu")
        attention = "flex_attention"
    lm, plain = exact_lm(kind, attention), exact_lm(kind, "sdpa")
    samples = list(itertools.chain(*make_groups(SHAPES[shape])))
    if len(samples[-1].ids) > 5:
        samples[-1].mask[2:4] = [False, False]
    cuts = {"cut after 2 and 5": [2, 5], "one a row": range(1, len(samples))}.get(layout, [])
    ends = [0, *(cut for cut in cuts if cut < len(samples)), len(samples)]
    rows = [grpo.pack(samples[a:b], packed, CPU) for a, b in itertools.pairwise(ends)]
    ours = zip(*[Policy(lm, 0.7, CPU)(row) for row in rows])
    theirs = zip(*[plain_logprobs(plain, s, 0.7) for s in samples])
    for got, truth in zip(map(torch.cat, ours), map(torch.cat, theirs), strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-10)
        gradients = []
        for values, model in ((got, lm), (truth, plain)):
            weighted = (torch.arange(len(values)).cos() * values).sum()
            gradient = torch.autograd.grad(weighted, model.parameters(), retain_graph=True)
            gradients.append(torch.cat([g.flatten() for g in gradient]))
        assert distance(*gradients) < 1e-10


def rows_for_blocks():
    """As make_groups takes them: prompts within, at and over the ends of blocks, and at random."""
    rows = [[(1, [1])], [(1, [6])], [(128, [129, 129])], [(300, [1, 2, 500, 1])], [(127, [131])],
            [(256, [257] * 3), (128, [1, 1])], [(513, [600, 3]), (2, [1, 900])],
            [(5, [9, 1, 30])] * 30]
    rng = random.Random(0)
    for _ in range(12):
        longest = rng.choice([4, 150, 700])
        lengths = lambda: [rng.randint(1, longest) for _ in range(rng.randint(1, 6))]
        rows.append([(rng.randint(1, longest), lengths()) for _ in range(rng.randint(1, 4))])
    return rows


def pairs_seen(shape, n):
    """[N, N], a query at a time. What fills the row up sees no real token."""
    seen, start = torch.zeros(n, n, dtype=torch.bool), 0
    for prompt_length, lengths in shape:
        prompt = slice(start, start + prompt_length)
        for length in [prompt_length, *(length - 1 for length in lengths)]:
            for query in range(start, start + length):
                seen[query, start:query + 1] = True
                if start > prompt.start:
                    seen[query, prompt] = True
            start += length
    for query in range(start, n):
        seen[query, start:query + 1] = True
    return seen


@pytest.mark.parametrize("shape", rows_for_blocks())
def test_the_blocks_of_a_row_hold_exactly_the_pairs_that_are_seen(shape, as_on_a_gpu):
    batch = grpo.pack(list(itertools.chain(*make_groups(shape))), True, CPU)
    mask, n = batch.attention["attention_mask"], batch.input_ids.numel()
    read = sum(prompt + sum(lengths) - len(lengths) for prompt, lengths in shape)
    assert n % 256 == 0 and 0 <= n - read < 256 and mask.shape == (1, 1, n, n)
    assert batch.score_index.max() < read
    truth = pairs_seen(shape, n)
    blocks = truth.view(n // 128, 128, n // 128, 128)
    some, every = blocks.any(3).any(1), blocks.all(3).all(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), some)
    listed = {}    # by the lists of a query block and by those of a key block
    for lists in ("kv", "full_kv", "q", "full_q"):
        listed[lists] = set()
        counts = getattr(mask, f"{lists}_num_blocks")[0, 0]
        indices = getattr(mask, f"{lists}_indices")[0, 0]
        assert counts.dtype == indices.dtype == torch.int32
        for i, (count, row) in enumerate(zip(counts.tolist(), indices.tolist())):
            assert row[:count] == sorted(set(row[:count]))
            listed[lists] |= {(i, j) if "kv" in lists else (j, i) for j in row[:count]}
    assert listed["kv"] == listed["q"] == set(map(tuple, (some & ~every).nonzero().tolist()))
    assert listed["full_kv"] == listed["full_q"] == set(map(tuple, every.nonzero().tolist()))
    got = torch.zeros_like(truth)
    places = torch.arange(n)
    for i, j in listed["full_kv"]:
        got[128 * i:128 * i + 128, 128 * j:128 * j + 128] = True
    for i, j in listed["kv"]:
        queries, keys = places[128 * i:128 * i + 128], places[128 * j:128 * j + 128]
        got[queries[:, None], keys] = mask.mask_mod(None, None, queries[:, None], keys)
    assert torch.equal(got, truth)


def test_flex_attention_over_a_row_is_softmax_over_the_pairs_that_are_seen(as_on_a_gpu):
    torch.manual_seed(0)
    shape = [(140, [1, 90, 200]), (7, [60, 2])]
    batch = grpo.pack(list(itertools.chain(*make_groups(shape))), True, CPU)
    n = batch.input_ids.numel()
    inputs = [torch.randn(1, heads, n, 16, dtype=torch.float64, requires_grad=True)
              for heads in (4, 2, 2)]
    out = flex.flex_attention(*inputs, block_mask=batch.attention["attention_mask"], scale=0.3,
                              enable_gqa=True)
    q, k, v = inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])
    scores = (0.3 * q @ k.mT).masked_fill(~pairs_seen(shape, n), -torch.inf)
    truth = scores.softmax(-1) @ v
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad((weights * out).sum(), inputs),
                            torch.autograd.grad((weights * truth).sum(), inputs)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_no_tensor_of_a_block_mask_grows_with_the_square_of_the_row():
    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.append(max([x.numel() for x in torch.utils._pytree.tree_leaves(result)
                                if isinstance(x, torch.Tensor)], default=0))
            return result

    for n in (2048, 4096, 8192):
        largest = []
        with Sizes():
            mask = grpo.block_mask([n // 8] * 8, [0] * 4 + [4] * 4, CPU)
        assert max(largest) == 128 * n
        kept = [x for x in mask.as_tuple() if isinstance(x, torch.Tensor)]
        assert sum(x.numel() for x in kept) == 4 * ((n // 128)**2 + n // 128)


def test_four_compiled_variants_serve_rows_of_all_lengths(as_on_a_gpu):
    """The first length alone and then any, with gradients and without; after eight torch falls back
    to what holds all pairs."""
    torch._dynamo.reset()
    compiled = CompileCounter()
    attention = torch.compile(flex.flex_attention, backend=compiled)
    for read in (300, 310, 1, 700, 100, 128, 256, 7, 1200, 129, 2500, 640):
        batch = grpo.pack(list(itertools.chain(*make_groups([(1, [read])]))), True, CPU)
        for gradients in (False, True):
            q = torch.randn(1, batch.input_ids.numel(), 4, 16, requires_grad=gradients)
            q = q.transpose(1, 2)
            with torch.set_grad_enabled(gradients):
                attention(q, q, q, block_mask=batch.attention["attention_mask"])
    assert compiled.frame_count == 4
    torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True])
def test_exactly_the_sampled_tokens_are_scored_each_from_the_one_before(masked):
    groups = make_groups(SHAPES["uneven"], [[1.0, 0, 0, 0], [0.0, 1, 1, 1]])
    if masked:
        groups[0][1].mask = [True, False, False, True, True]
        groups[1][2].mask = [False] * 6 + [True]
    samples = grpo.set_token_weights(groups, Config())
    batch = grpo.pack(samples, True, CPU)
    read, tokens = batch.input_ids[0], batch.tokens
    places, before, targets, owner, engine, sequence = [], [], [], [], [], []
    for number, s in enumerate(samples):
        everything = [*s.row.prompt_ids, *s.ids]
        for i in range(len(s.ids)):
            if s.mask[i]:
                place = len(s.row.prompt_ids) + i
                places.append(place - 1)
                before.append(everything[place - 1])
                targets.append(everything[place])
                engine.append(s.engine_logprobs[i])
                owner.append(s)
                sequence.append(number)
    assert len(targets) == (30 - 2 - 6 if masked else 30)
    assert read[batch.score_index].tolist() == before
    assert batch.position_ids[0, batch.score_index].tolist() == places
    assert batch.targets.tolist() == targets
    assert tokens.advantages.tolist() == approx([s.advantage for s in owner])
    assert tokens.token_weights.tolist() == approx([s.token_weight for s in owner])
    assert tokens.engine_logprobs.tolist() == approx(engine)
    assert tokens.sequence.tolist() == sequence
    assert batch.input_ids.numel() == 43 + 30 - 8    # each prompt once, no last token


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss_type", list(grpo.LOSS_TYPES))
def test_a_micro_batch_of_nothing_weighs_nothing(packed, loss_type):
    policy = Policy(exact_lm("llama", "grouped" if packed else "sdpa"), 1.0, CPU)
    batch = grpo.pack([], packed, CPU)
    logprobs, entropy = policy(batch)
    tokens = replace(batch.tokens, logprobs=logprobs, old_logprobs=logprobs.detach(),
                     ref_logprobs=logprobs.detach(), entropy=entropy)
    for level in ("token", "sequence"):
        cfg = Config(loss_type=loss_type, importance_sampling_level=level, entropy_coef=0.1)
        loss, metrics = grpo.policy_loss(tokens, cfg, 0.1)
        assert loss.item() == 0 and set(grpo.summed(metrics).values()) == {0}
    loss.backward()
    assert all(p.grad.eq(0).all() for p in policy.parameters())    # every rank reduces all of them


def row_length(samples):
    prompts = {s.row.index: len(s.row.prompt_ids) for s in samples}
    return sum(prompts.values()) + sum(len(s.ids) for s in samples)


def random_samples(rng, seed):
    shapes = []
    for _ in range(rng.randint(1, 12)):
        prompt, completions = rng.randint(1, 60), rng.randint(1, 8)
        shapes.append((prompt, [rng.randint(1, rng.choice([1, 9, 90])) for _ in range(completions)]))
    return list(itertools.chain(*make_groups(shapes, seed=seed)))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_deals_each_sample_once_in_order_within_the_budget(world):
    rng = random.Random(world)
    for trial in range(40):
        samples = random_samples(rng, trial)
        budget = rng.choice([1, 20, 100, 300, 2000])
        ranks = grpo.split(samples, world, budget)
        micro_batches = list(itertools.chain(*ranks))
        assert list(map(id, itertools.chain(*micro_batches))) == list(map(id, samples))
        assert len(ranks) == world and len({len(rank) for rank in ranks}) == 1
        for piece in micro_batches:
            assert len(piece) < 2 or row_length(piece) <= budget
        if budget == 2000 >= row_length(samples):
            assert len(ranks[0]) == 1


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("prompt, lengths, budget", [
    (50, (20, 64), 8192), (50, (20, 64), 1024), (400, (50, 300), 700), (1000, (8, 16), 1050)])
def test_split_is_fair_and_sparing(prompt, lengths, budget, world):
    for seed in range(5):
        rng = random.Random(seed)
        shapes = [(prompt + rng.randint(-5, 5), [rng.randint(*lengths) for _ in range(8)])
                  for _ in range(16)]
        samples = list(itertools.chain(*make_groups(shapes)))
        ranks = grpo.split(samples, world, budget)
        loads = [sum(map(row_length, rank)) for rank in ranks]
        if prompt <= 400:    # a longer prompt weighs much where a cut repeats it
            assert all(abs(tiny_policy / sum(loads) * world - 1) < 0.1 for tiny_policy in loads)
        brimful = [[]]    # one rank's micro-batches if each is filled to the brim
        for s in samples:
            if row_length([*brimful[-1], s]) > budget:
                brimful.append([])
            brimful[-1].append(s)
        assert world * len(ranks[0]) <= 1.5 * len(brimful) + world


def test_split_keeps_even_groups_whole():
    groups = make_groups([(30, [10] * 4)] * 8)    # rows of 70 tokens
    pairs = [groups[i] + groups[i + 1] for i in (0, 2, 4, 6)]
    assert grpo.split(list(itertools.chain(*groups)), 2, 140) == [pairs[:2], pairs[2:]]


# --- what a step reports --------------------------------------------------------------------------


@pytest.mark.parametrize("kind, shares", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])])
def test_the_learning_rate_warms_up_and_falls(kind, shares):
    cfg = Config(lr_scheduler_type=kind, warmup_steps=2, max_steps=6, learning_rate=2.0)
    assert [grpo.learning_rate(step, cfg) / 2 for step in range(6)] == approx(shares)
    assert grpo.learning_rate(0, replace(cfg, warmup_steps=0)) == 2
    assert grpo.learning_rate(1, replace(cfg, warmup_steps=8)) == 2 * (2 / 8)


def test_sample_metrics():
    groups = make_groups([(1, [1, 3]), (1, [2, 2])], [[1.0, 0.0], [1.0, 1.0]])
    (a, b), (c, d) = groups
    a.text, b.text, c.text, d.text = "92", "What is it?", "It is 7.", "It is 7."
    b.truncated = True
    got = grpo.sample_metrics(groups)
    assert got == approx({
        "reward/mean": 0.75, "reward/std": math.sqrt(3) / 4, "reward/group_std": 0.25,
        "reward/zero_std_groups": 0.5, "reward/advantage_std": math.sqrt(1 / 2),
        "completion/tokens": 8, "completion/length_mean": 2, "completion/length_max": 3,
        "completion/truncated": 0.25, "completion/distinct": 0.75}, 1e-5)
    for s in (a, b, c, d):
        s.rewards = {"correct": s.reward, "parsable": float(s is not b)}
    got = grpo.sample_metrics(groups)
    assert (got["reward/correct"], got["reward/parsable"]) == (0.75, 0.75)


def test_whether_a_text_states_an_answer_is_found_where_it_is_scored(pool):
    group = reward_group(("It is 7.", "It is 8.", "What is it?"))
    assert pool("format").score([group]) == []
    assert [sample.rewards for sample in group] == [
        {"format": 0, "correct": correct, "parsable": parsable} for correct, parsable in ((1, 1), (0, 1), (0, 0))]
    assert [sample.reward for sample in group] == [0, 0, 0]


def test_a_sample_travels_as_9_bytes_a_token():
    completion = SimpleNamespace(token_ids=[7] * 10_000, finish_reason="stop",
                                 logprobs=SimpleNamespace(logprobs=[-0.5] * 9_999 + [math.nan]))
    engine = SimpleNamespace(tokenizer=tiny_tokenizer())
    sample = grpo.Engine.to_sample(engine, Row(0, "", numpy.array([1]), {}), completion)
    size = len(pickle.dumps(replace(sample, text="")))
    assert 90_000 < size < 91_000
    assert sample.ids.tolist() == [7] * 10_000 and sample.mask.all() and len(sample.mask) == 10_000
    assert sample.engine_logprobs[0] == -0.5 and math.isnan(sample.engine_logprobs[-1])
    assert sample.text == " ".join([WORDS[7]] * 10_000)


CALM = {"step": 2, "reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 0.5,
        "completion/truncated": 0.5, "policy/engine_gap_mean": 0.01, "policy/kl": 0.1}


@pytest.mark.parametrize("change, words", [
    ({"step": 3}, "no completion got a reward.*'It is 7.', read as '7.'"),
    ({"reward/zero_std_groups": 1.0}, "differ within no group"),
    ({"policy/kl": 2.0}, "KL"),
    ({"completion/truncated": 1.0}, "--max-completion-length"),
    ({"policy/engine_gap_mean": 0.5}, "drift apart")])
def test_a_warning_is_said_in_the_step_in_which_it_begins(change, words, capsys):
    [[first]] = make_groups([(1, [1])])
    first.text = "It is 7."
    found = grpo.show_warnings([CALM | change], first, Config(), {})
    assert len(found) == 1
    assert re.search(f"warning: step {change.get('step', 2)}: .*{words}", capsys.readouterr().out)
    assert grpo.show_warnings([CALM | change], first, Config(), found) == found    # it holds on
    assert capsys.readouterr().out == ""


def test_a_calm_step_warns_of_nothing(capsys):
    [[first]] = make_groups([(1, [1])])
    assert grpo.show_warnings([CALM], first, Config(), {"an older warning": "do this"}) == {}
    assert grpo.show_warnings([CALM | {"step": 3, "reward/mean": 0.1}], first, Config(), {}) == {}
    assert capsys.readouterr().out == ""


def history(changes) -> list[dict]:
    """20 steps of a run that learns; changes: of a metric, its values in the first 10 and the last 10."""
    steps = []
    for i in range(20):
        metrics = {"step": i + 1, "reward/mean": 0.3 + i / 100, "reward/std": 0.4, "policy/entropy": 0.5,
                   "policy/kl": i / 100, "policy/grad_norm": 0.2, "policy/clip_low": 0.01,
                   "policy/clip_high": 0.02, "policy/engine_gap_mean": 0.03, "completion/distinct": 0.6,
                   "completion/length_mean": 100.0, "completion/truncated": 0.05,
                   "reward/zero_std_groups": 0.4, "eval/accuracy": 0.3 + i // 10 / 10}
        for name, values in changes.items():
            metrics[name] = values[i // 10]
        steps.append(metrics)
    return steps


STILL = {"reward/mean": (0.3, 0.3)}


@pytest.mark.parametrize("changes, words", [
    (STILL | {"policy/kl": (0.01, 0.0101)}, "neither reward nor KL moves: lower --beta"),
    ({"eval/accuracy": (0.4, 0.3)}, "reward rises and held-out accuracy falls: the reward is gamed"),
    (STILL | {"policy/entropy": (0.5, 0.05)}, "entropy falls and reward doesn't rise: lower --learning-rate"),
    ({"completion/distinct": (0.3, 0.15), "eval/accuracy": (0.3, 0.3)},
     "a prompt's completions are nearly all the same: raise --temperature"),
    ({"policy/clip_low": (0.1, 0.3), "policy/clip_high": (0.1, 0.3)}, "half of the tokens are clipped: lower"),
    (STILL | {"completion/length_mean": (100.0, 200.0)}, "the length changes .*: it is 200 tokens, and was 100"),
    (STILL | {"completion/length_mean": (100.0, 40.0)}, "the length changes .*: it is 40 tokens, and was 100"),
    ({"reward/format": (0.8, 0.6)}, "fewer completions have the format: raise format's weight"),
    ({"reward/zero_std_groups": (0.5, 0.95), "reward/correct": (0.9, 0.97)},
     "9 of 10 groups have no signal: the problems are too easy, 97% are solved"),
    ({"reward/zero_std_groups": (0.5, 0.95), "reward/correct": (0.1, 0.02)},
     "9 of 10 groups have no signal: the problems are too hard, 2% are solved"),
    ({"policy/engine_gap_mean": (0.02, 0.1)}, "vLLM and trainer drift apart: see policy/engine_gap_mean"),
    ({"reward/correct": (0.0, 0.0)}, "the reward correct is the same in all steps: nothing is learnt"),
    ({"completion/truncated": (0.1, 0.3)}, "more completions are cut: raise --max-completion-length")])
def test_a_trend_is_told_from_a_history(changes, words):
    cfg = Config(reward=("correct", "format"))
    own = {"reward/correct": (0.3, 0.4), "reward/format": (0.5, 0.6)}
    assert grpo.trends(history(own), cfg) == {}    # the same without the change
    [(warning, advice)] = grpo.trends(history(own | changes), cfg).items()
    assert re.match(words, f"{warning}: {advice}")


def test_a_spike_of_the_gradient_is_told():
    steps = history({})
    steps[14]["policy/grad_norm"] = 2.1    # over ten times the usual
    assert [*grpo.trends(steps, Config())] == ["the gradient's norm has spikes"]


def test_a_trend_is_told_once_there_are_20_steps_and_of_what_was_measured(capsys):
    [[first]] = make_groups([(1, [1])])
    steps = history({"completion/truncated": (0.1, 0.3)})
    assert grpo.show_warnings(steps[:19], first, Config(), {}) == {}
    for metrics in steps:    # no update in any of them
        for name in [name for name in metrics if name.startswith(("policy/", "eval/"))]:
            del metrics[name]
        metrics["policy/grad_norm"] = 0.0
    assert [*grpo.show_warnings(steps, first, Config(), {})] == ["more completions are cut"]
    assert "warning: step 20: more completions are cut: raise" in capsys.readouterr().out


# --- update ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory, group):
    """Folders of tiny models."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {"llama": "llama", "reference": "llama", "gpt2": "gpt2", "tied": "tied"}
    for seed, (name, kind) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(tiny_config(kind))
        lm.save_pretrained(folder / name)
    return folder


def tiny_policy(folder, packed=True, trainable=True, **flags):
    constant = dict(lr_scheduler_type="constant", warmup_steps=0)
    cfg = Config(**{"model_name_or_path": str(folder), "bf16": False, **constant, **flags})
    model_config = AutoConfig.from_pretrained(folder)
    return cfg, grpo.load_policy(cfg, model_config, packed, CPU, trainable)


def whole_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64,
                                                attn_implementation="eager")


def sgd(policy):
    return torch.optim.SGD(policy.parameters(), lr=0.0)    # update() sets the rate


def update(groups, cfg, policy, reference=None, optimizer=None):
    optimizer = optimizer or sgd(policy)
    return grpo.update(groups, cfg, policy, reference, optimizer, State(beta=cfg.beta))


def step_groups():
    """58 tokens in four groups of four; the rewards of the third are equal."""
    return make_groups([(5, [3, 1, 7, 2]), (9, [2, 6, 4, 4]), (3, [8, 1, 1, 5]), (7, [4, 2, 5, 3])],
                       [[1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 1], [0.0, 0, 0.5, 1]])


@pytest.fixture
def losses(monkeypatch):
    """The tokens of each call of policy_loss."""
    calls, policy_loss = [], grpo.policy_loss

    def recorded(tokens, cfg, beta):
        calls.append(tokens)
        return policy_loss(tokens, cfg, beta)
    monkeypatch.setattr(grpo, "policy_loss", recorded)
    return calls


def ratios(tokens):
    return (tokens.logprobs - tokens.old_logprobs).detach().exp()


def assert_as_in_the_loop(tiny_models, groups, packed=True, **flags):
    """One optimizer update or more of `llama`: weights and every metric, against the plain loop."""
    cfg, policy = tiny_policy(tiny_models / "llama", packed, max_grad_norm=1e9, learning_rate=0.1,
                       temperature=0.8, max_completion_length=10, **flags)
    reference = plain_reference = None
    if cfg.beta:
        reference = tiny_policy(tiny_models / "reference", packed, trainable=False, temperature=0.8)[1]
        plain_reference = whole_model(tiny_models / "reference")
    model = whole_model(tiny_models / "llama")
    start = flat(model.parameters())
    plain_sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = plain_updates(groups, cfg, model, plain_reference, plain_sgd)
    metrics = update(groups, cfg, policy, reference)
    weights = flat(policy.parameters()).double()
    torch.testing.assert_close(weights, truth["weights"], rtol=0, atol=1e-6)
    assert distance(weights - start, truth["weights"] - start) < 1e-4
    assert metrics == approx(truth["metrics"], 1e-5)


@pytest.mark.parametrize("micro_batches, budget, packed, flags", [
    (1, 8192, True, {"loss_type": "grpo"}), (2, 50, True, {"loss_type": "grpo"}),
    (7, 15, True, {"loss_type": "grpo"}), (7, 50, False, {"loss_type": "grpo"}),
    (1, 8192, True, {"loss_type": "dapo"}), (7, 15, True, {"loss_type": "dapo"}),
    (7, 15, True, {"loss_type": "dr_grpo"}), (2, 50, True, {"gradient_checkpointing": True}),
    (2, 50, True, {"loss_type": "dapo", "skip_zero_std_groups": False}),
    (2, 50, True, {"vllm_importance_sampling_correction": False})])
def test_an_update_in_any_micro_batches_is_the_loops(tiny_models, losses, micro_batches, budget, packed,
                                                     flags):
    groups = step_groups()
    groups[0][2].truncated = groups[3][1].truncated = True
    assert_as_in_the_loop(tiny_models, groups, packed, tokens_per_micro_batch=budget, beta=0.1,
                          mask_truncated_completions=True, **flags)
    assert len(losses) == 1 if micro_batches == 1 else len(losses) >= micro_batches


@pytest.mark.parametrize("flags", [
    {"loss_type": "grpo"}, {"loss_type": "dapo", "entropy_coef": 0.05}, {"loss_type": "dr_grpo"},
    {"importance_sampling_level": "sequence", "epsilon": 0.01},
    {"loss_type": "cispo", "epsilon_high": 0.01},
    {"vllm_importance_sampling_mode": "sequence_mask"}], ids=str)
def test_tokens_the_model_did_not_sample_are_read_and_nothing_else(tiny_models, losses, flags):
    groups = step_groups()
    for s in itertools.chain(*groups):
        for i in range(1, len(s.ids), 3):
            s.mask[i] = False
            s.engine_logprobs[i] = math.nan    # nobody sampled it: nobody looks
    assert_as_in_the_loop(tiny_models, groups, beta=0.1, num_iterations=2, **flags)
    sampled = sum(sum(s.mask) for i in (0, 1, 3) for s in groups[i])
    assert [len(tokens.advantages) for tokens in losses] == [sampled] * 2
    assert all(tokens.engine_logprobs.isfinite().all() for tokens in losses)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_what_the_engine_did_not_measure_is_counted_and_the_update_goes_on(tiny_models, mode):
    groups = step_groups()
    groups[0][0].engine_logprobs[1] = math.nan
    groups[1][2].engine_logprobs[0] = math.inf
    groups[3][0].engine_logprobs[2] = -math.inf
    assert_as_in_the_loop(tiny_models, groups, vllm_importance_sampling_mode=mode)
    cfg, policy = tiny_policy(tiny_models / "llama")
    metrics = update(groups, cfg, policy)
    assert metrics["policy/engine_nan"] == approx(3 / (13 + 16 + 14))
    assert (metrics["policy/updates"], metrics["policy/nonfinite_updates"]) == (1, 0)
    assert math.isfinite(metrics["policy/engine_gap_max"])


def test_cispo_reports_no_clip_among_the_metrics_of_a_step(tiny_models):
    cfg, policy = tiny_policy(tiny_models / "llama", loss_type="cispo")
    metrics = update(step_groups(), cfg, policy)
    assert metrics["policy/ratio_cut"] == 0 and not [name for name in metrics if "clip" in name]


def test_long_gradients_are_scaled_down(tiny_models):
    cfg, policy = tiny_policy(tiny_models / "llama", max_grad_norm=1e-3, learning_rate=10.0)
    before = flat(policy.parameters())
    metrics = update(step_groups(), cfg, policy)
    assert metrics["policy/grad_norm"] > 0.01    # the norm before
    assert (flat(policy.parameters()) - before).norm().item() == approx(10 * 1e-3, 1e-3)


def test_the_learning_rate_is_that_of_the_step(tiny_models):
    cfg, policy = tiny_policy(tiny_models / "llama", learning_rate=0.5, warmup_steps=4)
    optimizer = sgd(policy)
    metrics = grpo.update(step_groups(), cfg, policy, None, optimizer, State(step=1))
    assert metrics["policy/learning_rate"] == optimizer.param_groups[0]["lr"] == 0.5 * 2 / 4


def test_equal_rewards_move_nothing_not_even_by_momentum(tiny_models):
    cfg, policy = tiny_policy(tiny_models / "llama", beta=0.1, learning_rate=1e-3)
    reference = tiny_policy(tiny_models / "reference", trainable=False)[1]
    optimizer = torch.optim.AdamW(policy.parameters())

    def step(rewards):
        before = flat(policy.parameters())
        groups = make_groups([(5, [3, 1, 7, 2])], [rewards])
        metrics = update(groups, cfg, policy, reference, optimizer)
        moved = not torch.equal(flat(policy.parameters()), before)
        return (moved, metrics["policy/updates"], metrics["policy/skipped_updates"],
                metrics["policy/grad_norm"] > 0)
    assert step([1.0] * 4) == (False, 0, 1, False)
    assert step([1.0, 0, 0, 0]) == (True, 1, 0, True)
    assert step([0.7] * 4) == (False, 0, 1, False)


@pytest.mark.parametrize("kind, flags", [
    ("llama", {}), ("gpt2", {}),    # its config has dropout
    ("gpt2", {"gradient_checkpointing": True})])
def test_the_ratio_is_1_until_the_weights_move(tiny_models, losses, kind, flags):
    cfg, policy = tiny_policy(tiny_models / kind, num_iterations=2, epsilon=1e-9, learning_rate=1e-3, **flags)
    optimizer = torch.optim.AdamW(policy.parameters())
    metrics = update(step_groups(), cfg, policy, None, optimizer)
    first, second = map(ratios, losses)
    assert first.eq(1).all() and (second - 1).abs().mean() > 1e-3
    advantages = losses[1].advantages
    low, high = (second < 1) & (advantages < 0), (second > 1) & (advantages > 0)
    assert metrics["policy/clip_low"] == approx(low.double().mean().item() / 2)    # none in the first
    assert metrics["policy/clip_high"] == approx(high.double().mean().item() / 2)
    assert metrics["policy/ratio_max"] == approx(second.max().item())
    assert metrics["policy/updates"] == 2


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_each_minibatch_is_normalised_by_its_own_groups(tiny_models, losses, loss_type):
    cfg, policy = tiny_policy(tiny_models / "llama", num_minibatches=2, num_iterations=2, loss_type=loss_type,
                       learning_rate=0.1)
    groups = step_groups()
    metrics = update(groups, cfg, policy)
    # groups[2] has no signal, but counts: each half has 8 completions of 29 tokens.
    halves = []
    for half in (groups[0] + groups[1], groups[3]):
        halves.append([1 / (8 * len(s.ids)) if loss_type == "grpo" else 1 / 29
                       for s in half for _ in s.ids])
    assert [tokens.token_weights.tolist() for tokens in losses] == list(map(approx, halves * 2))
    assert metrics["policy/updates"] == 4
    # pi_old is the policy that sampled, for the second half as well.
    assert (ratios(losses[0]) - 1).abs().max() < 1e-5
    assert all((ratios(tokens) - 1).abs().mean() > 1e-3 for tokens in losses[1:])
    metrics = update(groups, replace(cfg, num_minibatches=4, num_iterations=1), policy)
    assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (3, 1)


def test_what_is_left_of_a_step_is_normalised_by_itself(tiny_models, losses):
    """Three groups for two updates: two, then one; and none at all."""
    cfg, policy = tiny_policy(tiny_models / "llama", num_minibatches=2, loss_type="dapo")
    groups = step_groups()
    assert update([groups[0], groups[1], groups[3]], cfg, policy)["policy/updates"] == 2
    assert [len(tokens.advantages) for tokens in losses] == [13 + 16, 14]
    assert [tokens.token_weights.sum().item() for tokens in losses] == approx([1, 1])
    assert update([], cfg, policy)["policy/updates"] == 0


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_no_update(tiny_models, advantage):
    cfg, policy = tiny_policy(tiny_models / "llama", tokens_per_micro_batch=50, learning_rate=1e-3)
    before, groups = flat(policy.parameters()), step_groups()
    optimizer = torch.optim.AdamW(policy.parameters())
    groups[1][1].advantage = advantage
    metrics = update(groups, cfg, policy, None, optimizer)
    assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (0, 1)
    assert metrics["policy/nonfinite_updates"] == 1
    assert torch.equal(flat(policy.parameters()), before) and not optimizer.state
    metrics = update(step_groups(), cfg, policy, None, optimizer)    # nothing is left over
    assert metrics["policy/updates"] == 1 and flat(policy.parameters()).isfinite().all()


def test_the_loss_is_the_mean_of_the_updates_made_or_skipped(tiny_models, monkeypatch):
    cfg, policy = tiny_policy(tiny_models / "llama", num_minibatches=2, learning_rate=1e-30)
    right = update(step_groups(), cfg, policy)
    clip, norms = nn.utils.clip_grad_norm_, [math.inf]

    def clip_but_first_fail(*args):
        return torch.tensor(norms.pop()) if norms else clip(*args)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_but_first_fail)
    got = update(step_groups(), cfg, policy)
    assert (right["policy/updates"], got["policy/updates"]) == (2, 1)
    assert got["policy/loss"] == approx(right["policy/loss"]) and right["policy/loss"] != 0


# --- adapters -------------------------------------------------------------------------------------


class PlainAdapter(nn.Module):
    """W + alpha / rank B A, in float64."""

    def __init__(self, layer, alpha):
        super().__init__()
        self.a = nn.Parameter(grpo.whole(layer.lora_A.detach()).double())
        self.b = nn.Parameter(grpo.whole(layer.lora_B.detach()).double())
        self.scale = alpha / len(self.a)

    def forward(self, weight):
        return weight + self.scale * self.b @ self.a


def policy_with_adapters(tiny_models, packed=True, **flags):
    """Of `llama`, with adapters that already say something."""
    cfg, policy = tiny_policy(tiny_models / "llama", packed, temperature=0.8, lora_rank=3, lora_alpha=6, **flags)
    for i, (name, p) in enumerate(policy.named_parameters()):
        if name.endswith("lora_B"):
            torch.manual_seed(i)
            with torch.no_grad():
                p.copy_(torch.distributed.tensor.DTensor.from_local(torch.randn(p.shape) / 4, p.device_mesh))
    return cfg, policy


def adapters_of(policy):
    return [p for p in policy.parameters() if p.requires_grad]


@pytest.mark.parametrize("packed, budget, flags", [
    (True, 8192, {}), (True, 40, {"lora_target_modules": ("q_proj", "down_proj")}),
    (False, 1, {"gradient_checkpointing": True})])
def test_adapters_learn_as_in_the_loop(tiny_models, packed, budget, flags):
    """Two updates against a float64 model whose weights are W + alpha / rank B A. The reference is W."""
    flags = dict(num_iterations=2, tokens_per_micro_batch=budget, beta=0.1, learning_rate=0.1,
                 max_grad_norm=1e9, **flags)
    cfg, policy = policy_with_adapters(tiny_models, packed, **flags)
    model, own = whole_model(tiny_models / "llama").requires_grad_(False), []
    for name, layer in policy.lm.named_modules():
        if isinstance(layer, grpo.LoraLinear):
            plain = PlainAdapter(layer, 6)
            torch.nn.utils.parametrize.register_parametrization(model.get_submodule(name), "weight", plain)
            own += [plain.a, plain.b]
    model.parameters = lambda: iter(own)
    assert len(own) == 2 * 2 * (2 if cfg.lora_target_modules else 7)    # two layers
    truth = plain_updates(step_groups(), cfg, model, whole_model(tiny_models / "llama"),
                          torch.optim.SGD(own, lr=0.1))
    start = flat(adapters_of(policy))
    frozen = flat(p for p in policy.parameters() if not p.requires_grad)
    metrics = update(step_groups(), cfg, policy, functools.partial(grpo.without_adapters, policy),
                     torch.optim.SGD(adapters_of(policy), lr=0.0))
    assert metrics == approx(truth["metrics"], 1e-5) and metrics["policy/kl"] > 1e-3
    assert distance(flat(adapters_of(policy)) - start, truth["weights"] - start) < 1e-4
    assert torch.equal(frozen, flat(p for p in policy.parameters() if not p.requires_grad))


def test_merged_adapters_say_the_same(tiny_models):
    cfg, policy = policy_with_adapters(tiny_models)
    merged = whole_model(tiny_models / "llama")
    sent = dict(grpo.checkpoint_tensors(policy, torch.float32))
    assert set(sent) == set(merged.state_dict())
    merged.load_state_dict(sent)
    samples = list(itertools.chain(*step_groups()))
    with torch.no_grad():
        batch = grpo.pack(samples, True, CPU)
        ours = policy(batch)[0]
        theirs = torch.cat([plain_logprobs(merged, s, 0.8)[0] for s in samples])
        start = torch.cat([plain_logprobs(whole_model(tiny_models / "llama"), s, 0.8)[0] for s in samples])
        assert (ours - theirs).abs().max() < 1e-5 and (ours - start).abs().max() > 0.1
        assert (grpo.without_adapters(policy, batch)[0] - start).abs().max() < 1e-5


def test_what_is_frozen_is_held_in_the_dtype_it_computes_in_and_adapters_in_float32(tiny_models):
    policy = tiny_policy(tiny_models / "llama", bf16=True, lora_rank=2)[1]
    dtypes = {name.rpartition(".")[2]: p.dtype for name, p in policy.named_parameters()}
    assert dtypes == {"weight": torch.bfloat16, "lora_A": torch.float32, "lora_B": torch.float32}


@pytest.mark.parametrize("flags, states, activations", [
    # 16 bytes a weight; 8192 tokens x 2 layers x (12 x 32 + 4 x 64) values of 4 bytes.
    ({}, 16, 4 * 8192 * 2 * 640), ({"beta": 0.1}, 20, 4 * 8192 * 2 * 640),
    ({"bf16": True, "beta": 0.1}, 18, 2 * 8192 * 2 * 640),
    ({"bf16_optimizer_states": True}, 12, 4 * 8192 * 2 * 640),
    ({"fsdp_size": 1}, 32, 4 * 8192 * 2 * 640), ({"lora_rank": 8, "bf16": True}, None, 2 * 8192 * 2 * 640),
    ({"gradient_checkpointing": True, "tokens_per_micro_batch": 100}, 16, 4 * 100 * (2 * 32 + 640))])
def test_memory_is_said_before_anything_is_loaded(tiny_models, monkeypatch, capsys, flags, states, activations):
    config = AutoConfig.from_pretrained(tiny_models / "llama")
    config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim = 32, 64, 10**6, 16
    config.num_attention_heads = config.num_key_value_heads = 2
    cfg = Config(**{"bf16": False, **flags})
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    weights = 10**6 * 32 * (1 if config.tie_word_embeddings else 2) + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    need = (states or 0) * weights / 2
    if cfg.lora_rank:
        adapters = 2 * 8 * (4 * 64 + 3 * 96)    # of layers of 32 x 32 and 32 x 64
        need = (2 * weights + 16 * adapters) / 2
    monkeypatch.setattr(grpo, "physical_memory", lambda: need + 2**20)
    grpo.check_memory(cfg, config, CPU)
    gib = [x / 2**30 for x in (need, activations)]
    assert "training takes {:.1f} GiB for weights, gradients and optimizer, about {:.1f}".format(*gib) in capsys.readouterr().out
    monkeypatch.setattr(grpo, "physical_memory", lambda: need - 2**20)
    with pytest.raises(UserError, match="--lora-rank 32 or --optimizer-cpu-offload take less"):
        grpo.check_memory(cfg, config, CPU)


def test_layers_that_are_not_there_are_named(tiny_models):
    with pytest.raises(UserError, match=r"--lora-target-modules: .* has no \['qproj'\]; it has \['down_proj', "):
        tiny_policy(tiny_models / "llama", lora_rank=2, lora_target_modules=("qproj", "v_proj"))


# --- what a step samples --------------------------------------------------------------------------


class FakeEngine:
    """Gives the groups that `respond` makes of each call."""
    ranks = 1

    def __init__(self, respond):
        self.respond = respond
        self.seeds, self.prompts = [], []

    def sample(self, rows, n, temperature, seed, phase):
        self.seeds.append(seed)
        self.prompts.append([row.prompt_ids[0] for row in rows])
        return self.respond(n, temperature)


class FakePool:
    """Keeps the rewards that the engine's groups came with."""
    cfg = Config()

    def __init__(self, failures=()):
        self.failures = list(failures)

    def score(self, groups):
        return self.failures


class FakeRun:
    def __init__(self):
        self.written = []

    def write_samples(self, groups, step, split):
        self.written.append((step, split, len(groups[0])))


def fake_trainer(respond, held_out=None, failures=()):
    return grpo.Trainer(
        policy=None, reference=None, optimizer=None, engine=FakeEngine(respond),
        pool=FakePool(failures), rows=[Row(i, "", numpy.array([i]), {}) for i in range(100)],
        held_out=held_out or {}, run=FakeRun(), tokenizer=None, state=State(step=6, drawn=9))


def scored_groups(table):
    """A group for each list of verdicts."""
    groups = make_groups([(2, [1] * len(verdicts)) for verdicts in table], table)
    for s in itertools.chain(*groups):
        s.rewards = {"correct": s.reward}
    return groups


def test_pass_at_k_of_4_completions_of_which_1_4_and_0_are_right(tiny_models):
    """1 - C(wrong, k) / C(4, k), in the mean over problems; the greedy ones have 2 of 3 right."""
    greedy, sampled = [[1], [1], [0]], [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    expected = {"reward": 2 / 3, "accuracy": 2 / 3, "accuracy_ci": 1.96 * math.sqrt(2 / 3 * 1 / 3 / 3),
                "length_mean": 1, "truncated": 0, "repetition": 0, "pass@1": (1 / 4 + 1 + 0) / 3,
                "pass@2": (1 / 2 + 1 + 0) / 3, "pass@4": (1 + 1 + 0) / 3}

    def respond(n, temperature):
        assert (n, temperature) in ((1, 0.0), (4, 0.9))
        return scored_groups(greedy if n == 1 else sampled)
    cfg = Config(eval_num_generations=4, temperature=0.9)
    rows = [Row(i, "", numpy.array([i]), {}) for i in range(3)]
    trainer = fake_trainer(respond, {"a.jsonl": rows})
    got = grpo.evaluate(cfg, trainer)
    assert got == approx({f"eval/{name}": value for name, value in expected.items()})
    assert trainer.run.written == [(6, "eval", 1), (6, "pass@k", 4)]
    got = grpo.evaluate(cfg, fake_trainer(respond, {"x/a.jsonl": rows, "b": rows}))
    assert got == approx({f"eval/{which}/{name}": value
                          for which in "ab" for name, value in expected.items()})


def test_the_kl_from_the_start_is_that_of_the_starts_own_completions(tiny_models, tmp_path):
    """Mean over tokens of r - 1 - log r, r = pi / pi_start, by the plain loop; no second model is kept."""
    policy = tiny_policy(tiny_models / "llama")[1]
    run = SimpleNamespace(folder=tmp_path, is_writer=True, cfg=Config(tokens_per_micro_batch=30))
    trainer = SimpleNamespace(policy=policy, run=run)
    assert grpo.kl_from_start(trainer) == {}    # nothing is held out
    groups = step_groups()
    for s in itertools.chain(*groups):
        s.mask[2:3] = [False] * len(s.mask[2:3])    # only read
    grpo.keep_start(groups, trainer)
    assert grpo.kl_from_start(trainer) == {"eval/kl": 0.0}
    start, now = whole_model(tiny_models / "llama"), whole_model(tiny_models / "reference")
    policy.lm.load_state_dict(tiny_policy(tiny_models / "reference")[1].lm.state_dict())
    log_ratio = torch.cat([plain_logprobs(now, s, 1.0)[0] - plain_logprobs(start, s, 1.0)[0]
                           for s in itertools.chain(*groups)])
    truth = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert grpo.kl_from_start(trainer) == {"eval/kl": approx(truth, 1e-4)} and truth > 0.01


# e: a group of equal rewards; a number: a group with a signal, by which it is told apart.
@pytest.mark.parametrize("rounds, drawn, kept", [
    (1, ["e11"], "e11"),               # without dynamic sampling all are kept
    (3, ["e1e", "2e3"], "123"),        # full after two rounds
    (3, ["1ee", "eee", "e2e"], "12"),  # not full after the last
    (2, ["eee", "eee"], "eee"),        # nothing to learn from: the last round stands for the step
    (4, ["12e", "345"], "123")])       # one too many is dropped
def test_dynamic_sampling_draws_until_there_are_groups_enough(tiny_models, rounds, drawn, kept):
    answers = iter(drawn)

    def respond(n, temperature):
        rewards = [[0.0, 0.0 if c == "e" else float(c)] for c in next(answers)]
        return make_groups([(1, [1, 1])] * 3, rewards)
    trainer = fake_trainer(respond, failures=["rule: broke"])
    cfg = Config(prompts_per_step=3, num_generations=2, dynamic_sampling_rounds=rounds)
    groups, counted = grpo.sample_groups(cfg, trainer)
    assert [round(group[1].reward) for group in groups] == [
        0 if c == "e" else int(c) for c in kept]
    assert counted == {"reward/failures": len(drawn), "rollout/rounds": len(drawn),
                       "rollout/dropped_groups": 3 * len(drawn) - len(kept)}
    assert len(set(trainer.engine.seeds)) == len(drawn)
    rows = grpo.draw(trainer.rows, 0, 9, 3 * len(drawn))    # the next of the stream
    assert list(itertools.chain(*trainer.engine.prompts)) == [row.prompt_ids[0] for row in rows]


def test_no_two_rounds_of_a_run_share_a_seed(tiny_models):
    seen = set()
    cfg = Config(prompts_per_step=1, num_generations=2, dynamic_sampling_rounds=3)
    for seed in range(3):
        for step in range(5):
            trainer = fake_trainer(lambda *_: make_groups([(1, [1, 1])], [[0.0, 0.0]]))
            trainer.state.step = step
            grpo.sample_groups(replace(cfg, seed=seed), trainer)
            seen |= set(trainer.engine.seeds)
    assert len(seen) == 3 * 5 * 3


def test_k2_pulls_however_far_the_policy_is():
    """Half the squared log has no exponent to bound: at -90 against -0.1 its slope is the distance."""
    logprobs = f64([-90.0], requires_grad=True)
    tokens = Tokens(f64([0.0]), f64([1.0]), torch.tensor([0]), f64([-90.0]), f64([-90.0]), f64([-0.1]),
                    logprobs, f64([0.0]))
    loss, _ = grpo.policy_loss(tokens, Config(kl_estimator="k2"), 1.0)
    loss.backward()
    assert loss.item() == approx(89.9**2 / 2) and logprobs.grad.tolist() == approx([-89.9])


def test_dynamic_sampling_takes_rounding_for_no_signal_as_the_advantage_does(tiny_models):
    def respond(n, temperature):
        return make_groups([(1, [1, 1])] * 2, [[0.5, 0.5000001], [0.5, 0.6]])
    cfg = Config(prompts_per_step=2, num_generations=2, dynamic_sampling_rounds=2)
    groups, counted = grpo.sample_groups(cfg, fake_trainer(respond))
    assert [[s.reward for s in group] for group in groups] == [[0.5, 0.6]] * 2
    assert counted["rollout/dropped_groups"] == 2
    groups, _ = grpo.sample_groups(replace(cfg, min_group_std=0.5), fake_trainer(respond))
    assert len(groups) == 2 and not any(map(grpo.has_signal, groups[:1]))


def test_dynamic_sampling_does_not_count_lengths(tiny_models):
    """Rewards of which only the part of the length differs are no group to learn from."""
    def respond(n, temperature):
        groups = make_groups([(1, [1, 1])] * 2, [[0.7, 0.9], [0.1, 0.0]])
        for group, overlong in zip(groups, ([-0.3, -0.1], [-0.9, 0.0])):
            for s, part in zip(group, overlong):
                s.rewards = {"overlong": part}    # both right; one right, and too long
        return groups
    trainer = fake_trainer(respond)
    cfg = Config(prompts_per_step=2, num_generations=2, dynamic_sampling_rounds=2)
    groups, counted = grpo.sample_groups(cfg, trainer)
    assert [[s.reward for s in group] for group in groups] == [[0.1, 0.0]] * 2
    assert counted["rollout/dropped_groups"] == 2


def test_a_steps_line_adds_up_what_is_clipped_and_says_nothing_where_nothing_clips():
    metrics = {"step": 2, "reward/mean": 0.5, "policy/clip_low": 0.01, "policy/clip_high": 0.02,
               "completion/length_mean": 3.0, "time/tokens_per_second": 7.0, "time/step": 1.5, "time/left": 80.2}
    line = grpo.step_line(metrics, [0.1, math.nan, 0.2, 0.5], Config(max_steps=10))
    assert line == ("step  2/10 ▁▃█ | reward 0.500 | clipped 3.0% | length 3.0 | 7 tokens/s | 1.5 s | 1:20 left")
    del metrics["policy/clip_low"], metrics["policy/clip_high"]
    assert "clipped" not in grpo.step_line(metrics, [math.nan], Config(max_steps=10))


def test_time_left_counts_steps_and_evaluations_apart():
    """After 4 of 20 steps: 10 s a step; two evaluations of 30 s, at 0 and 4; four to come, at 8, 12, 16 and 20."""
    state = State(step=4, elapsed=100.0, evaluating=60.0)
    assert grpo.seconds_left(state, Config(max_steps=20, eval_steps=4)) == 16 * 10 + 4 * 30
    state = State(step=0, elapsed=30.0, evaluating=30.0)
    assert grpo.seconds_left(state, Config(max_steps=21, eval_steps=4)) == 6 * 30
    assert grpo.seconds_left(State(step=21, elapsed=30.0), Config(max_steps=21, eval_steps=4)) == 0


def test_repetition_is_the_share_of_four_tokens_seen_before():
    assert grpo.repetition([1, 2, 3]) == 0 == grpo.repetition([1, 2, 3, 4, 5])
    assert grpo.repetition([7] * 8) == approx(4 / 5)    # five runs of four, one of them new
    assert grpo.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == approx(1 / 5)


def test_the_other_build_of_vllm_is_named(monkeypatch):
    platforms = type(sys)("vllm.platforms")
    platforms.current_platform = type("Platform", (), {"device_type": "cuda"})
    monkeypatch.setitem(sys.modules, "vllm", type(sys)("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(UserError, match="torch is to use the cpu, and this build of vLLM the cuda"):
        grpo.engine_options(Config(), None, on_cpu=True)


def test_sampling_seeds_every_generator_that_vllm_draws_from():
    class Llm:
        def generate(self, *args, **kwargs):
            self.drawn = torch.rand(3).tolist(), numpy.random.rand(3).tolist()
            return [SimpleNamespace(outputs=[None])]

    class Fake:
        llm, limit, params, to_sample = Llm(), 8, dict, lambda *_: None
    drawn = []
    for seed in (7, 7, 8, 2**40):
        grpo.Engine.sample(Fake(), [Row(0, "", numpy.array([1]), {})], 1, 1.0, seed, "")
        drawn.append(Fake.llm.drawn)
    assert drawn[0] == drawn[1]
    for earlier, later in itertools.pairwise(drawn[1:]):
        assert earlier[0] != later[0] and earlier[1] != later[1]


# --- one rollout, on 1, 2 and 4 ranks, in few and many micro-batches ------------------------------

# Changes to UPDATE; `groups`, which are (number, completions) of the rollout's, `model`, `packed`
# and `optimizer` are the test's own.
CASES = {
    "grpo": {}, "dapo": {"loss_type": "dapo"}, "dr_grpo": {"loss_type": "dr_grpo"},
    "padded": {"packed": False}, "untied": {"model": "llama", "gradient_checkpointing": True},
    "adamw": {"optimizer": "AdamW", "learning_rate": 1e-3},
    "fewer completions than ranks": {"groups": [(1, 2)]}, "no signal": {"groups": [(2, 4)]},
    "several updates": {
        "num_iterations": 2, "num_minibatches": 2, "max_grad_norm": 0.5, "epsilon": 0.1,
        "delta": 1.4, "epsilon_high": 0.3, "skip_zero_std_groups": False, "loss_type": "dapo"},
    "gspo": {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 0.01,
             "epsilon_high": 0.02},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 0.02,
              "entropy_coef": 0.03},
    "kl": {"kl_estimator": "k2", "use_bias_correction_kl": True, "num_iterations": 2,
           "entropy_coef": 0.05, "vllm_importance_sampling_mode": "token_mask"},
    "sequence mask": {"vllm_importance_sampling_mode": "sequence_mask", "loss_type": "dr_grpo"},
    "second minibatch without signal": {"groups": [(0, 4), (2, 4)], "num_minibatches": 2},
    "tokens only read": {"groups": [(4, 4), (5, 4), (0, 4)], "num_iterations": 2, "masked": True},
    "two copies of the shards": {"copies": 2, "num_iterations": 2},
}
ON_4_RANKS = ["grpo", "fewer completions than ranks", "several updates", "two copies of the shards"]
UPDATE = {"bf16": False, "temperature": 0.7, "beta": 0.1, "mask_truncated_completions": True,
          "max_grad_norm": 1e9, "max_completion_length": 16, "learning_rate": 0.3,
          "lr_scheduler_type": "constant", "warmup_steps": 0,
          "model": "tied", "packed": True, "groups": [(i, 4) for i in range(6)], "optimizer": "SGD",
          "masked": False, "copies": 1}


def case_of(place, name: str, **more) -> tuple[dict, Config]:
    """What is the test's own in a case, and the trainer's flags."""
    flags = UPDATE | CASES[name] | more
    own = {each: flags.pop(each) for each in ("model", "packed", "groups", "optimizer", "masked", "copies")}
    if own["copies"] > 1:
        flags["fsdp_size"] = max(1, dist.get_world_size() // own["copies"])
    return own, Config(model_name_or_path=str(Path(place) / own["model"]), **flags)


def groups_of(place, own: dict) -> list[list[Sample]]:
    """New ones on each call: an update writes into them."""
    rollout = pickle.loads((Path(place) / "rollout").read_bytes())
    groups = [rollout[number][:n] for number, n in own["groups"]]
    if own["masked"]:
        for s in itertools.chain(*groups):
            s.mask = [i % 4 != 1 for i in range(len(s.ids))]
    return groups


def optimizer_of(own: dict, model):
    if own["optimizer"] == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


@pytest.fixture(scope="module")
def rollout(tiny_models) -> None:
    """Six groups of four, of uneven lengths. The rewards of group 2 are equal, the completions of
    group 3 all cut; the engine lost a number in group 0."""
    generator, model = torch.Generator().manual_seed(0), whole_model(tiny_models / "tied")

    def draw(low, high, n):
        return torch.randint(low, high, (n,), generator=generator).tolist()
    groups = []
    for number, prompt_length in enumerate([3, 40, 7, 12, 5, 21]):
        row = Row(number, "", numpy.array(draw(4, 99, prompt_length)), {})
        rewards = [0.5] * 4 if number == 2 else [1.0, 0.0, 0.25, *draw(0, 2, 1)]
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
        group = []
        for i, length in enumerate(draw(1, 16, 4)):
            s = Sample(row, draw(4, 99, length), [True] * length, [], text="", reward=rewards[i],
                       truncated=number == 3 or i == 3 and number != 2,
                       advantage=(rewards[i] - mean) / (std + 1e-6))
            with torch.no_grad():
                mu = plain_logprobs(model, s, UPDATE["temperature"])[0]
            mu += 0.6 * torch.randn(length, generator=generator)    # some weights are cut at 2
            s.engine_logprobs = mu.tolist()
            group.append(s)
        groups.append(group)
    groups[0][0].engine_logprobs[-1] = math.nan
    (tiny_models / "rollout").write_bytes(pickle.dumps(groups))


@pytest.fixture(scope="module")
def expected(tiny_models, rollout):
    @functools.cache
    def expected(case: str) -> dict:
        own, cfg = case_of(tiny_models, case)
        model, reference = whole_model(tiny_models / own["model"]), whole_model(tiny_models / "reference")
        return plain_updates(groups_of(tiny_models, own), cfg, model, reference,
                             optimizer_of(own, model))
    return expected


def update_all_cases(place: Path) -> None:
    """On each rank: its cases, each in three splits; rank 0 saves what came of them."""
    world_size, results = dist.get_world_size(), {}

    @functools.cache
    def policy_of(name, packed, gradient_checkpointing, trainable, fsdp_size=0):
        return tiny_policy(place / name, packed, trainable, temperature=UPDATE["temperature"],
                    gradient_checkpointing=gradient_checkpointing, fsdp_size=fsdp_size)[1]
    for case in ON_4_RANKS if world_size == 4 else CASES:
        own, cfg = case_of(place, case)
        policy = policy_of(own["model"], own["packed"], cfg.gradient_checkpointing, True,
                           cfg.fsdp_size)
        reference = policy_of("reference", own["packed"], False, False)
        start = [p.detach().clone() for p in policy.parameters()]
        groups = groups_of(place, own)
        first = grpo.set_token_weights(groups[:len(groups) // cfg.num_minibatches], cfg)
        # One micro-batch on each rank, some, and one a completion.
        some = max(1, grpo.packed_length(first) // (2 * world_size))
        for number, budget in enumerate([10**6, some, 1]):
            gradients, optimizer = [], optimizer_of(own, policy)

            def keep_gradient(*_):
                gradients.append(flat(p.grad for p in policy.parameters()))
            optimizer.register_step_pre_hook(keep_gradient)
            cfg = case_of(place, case, tokens_per_micro_batch=budget)[1]
            with unittest.mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                metrics = update(groups_of(place, own), cfg, policy, reference, optimizer)
            results[case, number] = {
                "all_reduces": all_reduce.call_count,
                "gradients": gradients, "weights": flat(policy.parameters()),
                "metrics": grpo.gathered(metrics),
                "micro_batches": len(grpo.split(first, world_size, budget)[0])}
            with torch.no_grad():
                for p, before in zip(policy.parameters(), start):
                    p.copy_(before)
    if dist.get_rank() == 0:
        torch.save(results, place / f"updates_{world_size}")


def as_a_rank(place: str) -> None:
    dist.init_process_group("gloo")
    update_all_cases(Path(place))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def updated(tiny_models, rollout):
    @functools.cache
    def updated(ranks: int) -> dict:
        if ranks == 1:
            update_all_cases(tiny_models)    # this process is a group of one
        else:
            folder = str(Path(grpo.__file__).parent)
            done = subprocess.run(
                [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", str(ranks), __file__, "as_a_rank", str(tiny_models)],
                env=os.environ | {"PYTHONPATH": folder, "CUDA_VISIBLE_DEVICES": "",
                                  "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, done.stderr
        return torch.load(tiny_models / f"updates_{ranks}")
    return updated


@pytest.mark.parametrize("ranks, case", [
    *itertools.product([1, 2], CASES), *itertools.product([4], ON_4_RANKS)])
def test_updates_do_not_depend_on_the_split(ranks, case, tiny_models, updated, expected):
    truth, single = expected(case), updated(1)[case, 0]
    splits = [updated(ranks)[case, number] for number in range(3)]
    start = flat(whole_model(tiny_models / case_of(tiny_models, case)[0]["model"]).parameters())
    if "groups" not in CASES[case]:
        one, some, many = (got["micro_batches"] for got in splits)
        assert one == 1 < some < many and many * ranks >= 8
    if case == "two copies of the shards" and ranks > 1:    # they meet once an update
        assert len({got["all_reduces"] for got in splits}) == 1 and splits[0]["all_reduces"] > 0
    for got in splits:
        assert all(metrics == got["metrics"][0] for metrics in got["metrics"])    # on every rank
        assert got["metrics"][0] == pytest.approx(truth["metrics"], rel=1e-4, abs=1e-6)
        for other in (truth, single):
            assert len(got["gradients"]) == len(other["gradients"])
            for ours, theirs in zip(got["gradients"], other["gradients"]):
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
            apart = (got["weights"] - other["weights"]).double()
            if case == "adamw":    # its first step is a sign
                assert apart.norm() <= 1e-3 * (truth["weights"] - start).norm()
            else:
                assert apart.abs().max() <= 3e-6    # of up to four updates, at a rate of 0.3
        assert ((got["weights"] - start).norm() > 0) == (case != "no signal")


def test_the_cases_reach_what_they_are_about(expected, rollout):
    """Else they would pass whatever the trainer did there."""
    def of(case):
        return expected(case)["metrics"]
    assert of("several updates")["policy/clip_low"] > 0 < of("several updates")["policy/clip_high"]
    assert of("gspo")["policy/clip_high"] > 0 and of("cispo")["policy/ratio_cut"] > 0
    assert of("grpo")["policy/engine_nan"] > 0 and of("grpo")["policy/engine_gap_max"] > math.log(2)
    assert of("second minibatch without signal")["policy/skipped_updates"] == 1
    assert of("no signal")["policy/updates"] == 0


SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.1, pad_token_id=0,
             bos_token_id=None, eos_token_id=1)


def config_of_kind(kind: str, **changes):
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})


def save_tokenizer(folder):
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)


def save_tiny(folder, kind: str, **changes):
    """A folder with a tiny random model and a tokenizer of one word."""
    save_tokenizer(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of_kind(kind, **changes)).save_pretrained(folder)
    return folder


def config_for(folder, **flags) -> Config:
    return Config(**{"model_name_or_path": str(folder), "bf16": False, "max_prompt_length": 64,
                     "max_completion_length": 16, **flags})


def load_kind(folder, packed=True, trainable=True, **flags) -> Policy:
    cfg = config_for(folder, **flags)
    return grpo.load_policy(cfg, grpo.load_tokenizer(cfg)[0], packed, CPU, trainable)


def two_groups(vocabulary: int = 128) -> list[Sample]:
    """Completions of 5, 1 and 9 tokens to a prompt of 3, and of 7 and 2 to one of 20."""
    generator = torch.Generator().manual_seed(1)
    tokens = lambda n: torch.randint(2, vocabulary, (n,), generator=generator).tolist()
    samples = []
    for index, (prompt, lengths) in enumerate([(3, [5, 1, 9]), (20, [7, 2])]):
        row = Row(index=index, prompt="", prompt_ids=numpy.array(tokens(prompt)), columns={})
        for n in lengths:
            samples.append(Sample(row=row, ids=tokens(n), mask=[True] * n, engine_logprobs=[0.0] * n,
                                  truncated=False, text=""))
    return samples


def logprobs_alone(lm, sample: Sample) -> torch.Tensor:
    """Of one completion by itself, by the model's own forward pass and its own head."""
    prompt = sample.row.prompt_ids
    logits = lm(torch.tensor([[*prompt, *sample.ids]]), use_cache=False).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)[range(len(sample.ids)), sample.ids]


def policy_logprobs(policy, samples, packed: bool) -> torch.Tensor:
    if packed:
        return policy(grpo.pack(samples, True, CPU))[0]
    return torch.cat([policy(grpo.pack([s], False, CPU))[0] for s in samples])


# --- packing ----------------------------------------------------------------------------------------------------------

LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8)


def longrope(threshold: int) -> dict:
    return dict(head_dim=16, rope_parameters={**LONGROPE, "original_max_position_embeddings": threshold},
                original_max_position_embeddings=threshold)


DEEPSEEK = dict(num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                moe_intermediate_size=16, first_k_dense_replace=1)


@pytest.mark.parametrize("kind, changes", [
    ("Llama", {}), ("GPT2", {}), ("SmolLM3", {}), ("Olmo2", {}), ("Mixtral", {"num_local_experts": 4}),
    ("Gemma3Text", {"sliding_window": 200, "num_hidden_layers": 6}), ("Mistral", {"sliding_window": 200}),
    ("Phi3", longrope(200)), ("Qwen2", {"sliding_window": 16, "use_sliding_window": False})],
    ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_packs_if_completions_mean_the_same_in_a_packed_row(kind, changes, capsys):
    """Also where a window or threshold is no shorter than the longest row of a run, 184 + 16 tokens."""
    assert grpo.packs(config_for("it", max_prompt_length=184), config_of_kind(kind, **changes), CPU)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("kind, changes", [
    ("Gemma3Text", {"sliding_window": 199, "num_hidden_layers": 6}), ("Mistral", {"sliding_window": 199}),
    ("Phi3", longrope(199)), ("Doge", {}), ("RecurrentGemma", {}), ("Nemotron", {})],
    ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_does_not_pack_otherwise_and_the_reason_is_said(kind, changes, monkeypatch):
    said = []
    monkeypatch.setattr(grpo, "say", said.append)
    assert not grpo.packs(config_for("it", max_prompt_length=184), config_of_kind(kind, **changes), CPU)
    assert len(said) == 1 and "one row a completion" in said[0] and "\n" not in said[0]


def test_a_threshold_far_beyond_the_rows_that_are_tried_counts_too():
    config = config_of_kind("Phi3", **longrope(900))
    assert grpo.packs(config_for("it", max_prompt_length=800, max_completion_length=100), config, CPU)
    assert not grpo.packs(config_for("it", max_prompt_length=800, max_completion_length=101), config, CPU)


def test_trying_whether_a_model_packs_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    grpo.packs(config_for("it"), config_of_kind("Llama"), CPU)
    assert torch.equal(torch.rand(3), expected)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, words", [
    ("GptOss", "GptOssForCausalLM can't compute its attention"), ("Bloom", "BloomForCausalLM can't compute its"),
    ("GPTJ", "GPTJForCausalLM can't compute its attention"), ("Mamba", "MambaForCausalLM can't compute its attention"),
    ("Llama4", "more than a text model .Llama4Config"), ("Gemma3", "more than a text model .Gemma3Config"),
    ("Gemma2", "final_logit_softcapping = 30.0"), ("Cohere", "logit_scale = 0.0625"),
    ("RecurrentGemma", "logits_soft_cap = 30.0"), ("T5", "not a causal language model"), ("Llama", "over the 8 positions")])
def test_a_model_that_cannot_be_trained_is_refused_for_its_true_reason(kind, words):
    config = getattr(transformers, f"{kind}Config")()
    if kind == "Llama":
        config.max_position_embeddings = 8
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        grpo.check_model(config_for("it"), config)


def test_a_head_with_a_bias_is_refused(tmp_path):
    save_tiny(tmp_path, "Phi")
    with pytest.raises(UserError, match=f"{tmp_path}: its head is not a plain matrix product"):
        load_kind(tmp_path)


def test_a_model_whose_layers_share_tensors_is_refused(tmp_path):
    folder = save_tiny(tmp_path, "Llama")
    config = grpo.load_tokenizer(config_for(folder))[0]
    original = AutoModelForCausalLM.from_pretrained

    def tied_layers(*args, **options):
        lm, found = original(*args, **options)
        lm.model.layers[1].mlp.up_proj.weight = lm.model.layers[0].mlp.up_proj.weight
        return lm, found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", tied_layers)
        with pytest.raises(UserError, match="its layers share tensors .model.layers.1.mlp.up_proj.weight"):
            grpo.load_policy(config_for(folder), config, True, CPU, True)


def test_weights_that_are_missing_are_named(tmp_path):
    save_tiny(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match="no weights for .*layers.2"):
        load_kind(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(UserError, match="no weights in safetensors"):
        load_kind(tmp_path)


def model_with_code(folder) -> None:
    """A folder whose config, tokenizer and model ask for code of its own, which would leave a marker."""
    save_tokenizer(folder)
    (folder / "own.py").write_text(f"open({str(folder / 'marker')!r}, 'w').close()\n")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "of_its_own", "auto_map": names}))


@pytest.mark.parametrize("terminal", ["yes on standard input", "closed standard input", "pseudo-terminal"])
def test_code_of_a_model_is_never_run_nor_asked_about(tmp_path, terminal):
    model_with_code(tmp_path)
    code = ("import grpo, sys\ntry: grpo.load_tokenizer(grpo.Config(model_name_or_path=sys.argv[1]))\n"
            "except grpo.UserError as e: print('REFUSED', e)")
    options = {"input": "y\ny\ny\n"}
    if terminal == "closed standard input":
        options = {"stdin": subprocess.DEVNULL}
    if terminal == "pseudo-terminal":
        ours, theirs = pty.openpty()
        os.write(ours, b"y\ny\ny\n")
        options = {"stdin": theirs}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120,
                          cwd=os.path.dirname(grpo.__file__), **options)
    assert done.stdout.startswith("REFUSED") and "code of its own" in done.stdout, done
    assert done.stdout.count("\n") == 1 and "[y/N]" not in done.stdout + done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_model_of_transformers_own_needs_no_code_that_lies_beside_it(tmp_path):
    save_tiny(tmp_path, "Llama")
    model_with_code_of = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(model_with_code_of | {"auto_map": names}))
    assert type(load_kind(tmp_path).lm).__name__.endswith("LlamaForCausalLM")
    assert not (tmp_path / "marker").exists()


# --- weights ----------------------------------------------------------------------------------------------------------

EXPERTS = {"Llama": {}, "Mixtral": {"num_local_experts": 4},
           "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
           "Glm4Moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_method": "noaux_tc"}}


@pytest.mark.parametrize("kind", EXPERTS)
def test_weights_have_the_names_and_shapes_of_the_checkpoint(kind, tmp_path):
    """Mixtures of experts are held fused; Glm4Moe has a buffer that a checkpoint stores."""
    folder = save_tiny(tmp_path, kind, **EXPERTS[kind])
    stored = load_file(folder / "model.safetensors")
    sent = dict(grpo.checkpoint_tensors(load_kind(folder), torch.float32))
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name].float()) for name in stored)
    halves = dict(grpo.checkpoint_tensors(load_kind(folder), torch.bfloat16))
    assert halves["model.norm.weight"].dtype == torch.bfloat16
    if kind == "Glm4Moe":
        assert halves["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_saved_model_is_the_one_that_was_trained(kind, tmp_path):
    folder = save_tiny(tmp_path / "start", kind, **EXPERTS[kind])
    policy = load_kind(folder)
    with torch.no_grad():
        for p in policy.parameters():
            p += torch.randn(p.shape) if not hasattr(p, "to_local") else 0 * p + 0.5
    grpo.save_model(policy, grpo.load_tokenizer(config_for(folder))[1], tmp_path / "model", torch.float32)
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.dtype == torch.float32 and not (tmp_path / "model.unfinished").exists()
    trained = dict(policy.lm.named_parameters())
    assert all(torch.equal(p, grpo.whole(trained[name])) for name, p in again.named_parameters())


# --- beside an engine -------------------------------------------------------------------------------------------------

ENGINE = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
BESIDE = {"SmolLM3": ENGINE | {"tie_word_embeddings": True, "num_hidden_layers": 4}, "Mixtral": ENGINE | EXPERTS["Mixtral"],
          "Qwen3Moe": ENGINE | EXPERTS["Qwen3Moe"]}


@pytest.mark.parametrize("kinds", [["SmolLM3"], ["Mixtral", "Qwen3Moe"]], ids=str)
def test_a_model_trains_beside_the_engine_which_follows_it(kinds, tmp_path):
    """SmolLM3 is served through vLLM's Transformers backend, which changes the class that trains."""
    done = subprocess.run([sys.executable, __file__, "train_beside_an_engine", str(tmp_path), *kinds], capture_output=True, text=True, timeout=300,
                          cwd=os.path.dirname(grpo.__file__))
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GAP")]
    assert len(gaps) == 2 * len(kinds) and max(gaps) < 1e-3, gaps


def train_beside_an_engine(place: str, *kinds: str) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    for kind in kinds:
        folder = save_tiny(f"{place}/{kind}", kind, **BESIDE[kind])
        cfg = config_for(folder, device="cpu", prompts_per_step=4, num_generations=2, vllm_gpu_memory_utilization=0.05)
        model_config, tokenizer, stop_ids = grpo.load_tokenizer(cfg)
        policy = grpo.load_policy(cfg, model_config, grpo.packs(cfg, model_config, CPU), CPU, True)
        engine = grpo.Engine(cfg, model_config, tokenizer, stop_ids, CPU)
        rows = [Row(index=n, prompt="", prompt_ids=numpy.arange(4, 4 + n), columns={}) for n in (3, 9, 17, 30)]
        for seed in range(2):    # the second time with other weights
            engine.load(policy)
            samples = sum(engine.sample(rows, 2, 1.0, seed, "test"), [])
            logprobs = policy_logprobs(policy, samples, True)
            theirs = torch.tensor([x for s in samples for x in s.engine_logprobs])
            print("GAP", (logprobs - theirs).abs().max().item(), flush=True)
            before = torch.cat([grpo.whole(p.detach()).flatten() for p in policy.parameters()]).clone()
            logprobs.sum().backward()
            with torch.no_grad():    # far
                for p in policy.parameters():
                    p -= 0.05 * p.grad.sign()
            policy.zero_grad()
            after = torch.cat([grpo.whole(p.detach()).flatten() for p in policy.parameters()])
            assert (after - before).norm() > 0.1 * before.norm()
        del engine


# --- sweep ------------------------------------------------------------------------------------------------------------

TINY = dict(
    vocab_size=128, hidden_size=64, n_embd=64, d_model=64, intermediate_size=64, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, num_hidden_layers=4, n_layer=4, num_layers=4, n_layers=4, num_attention_heads=4,
    n_head=4, num_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=16, ffn_dim=64, decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=64,
    max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=1, layer_types=None, mlp_layer_types=None,
    layers_block_type=None, block_types=None, no_rope_layers=None, use_cache=False)


def tiny_of(kind: type):
    """A config of this class for which a model of under 30 million parameters can be made, or the last error."""
    error = "no small config"
    for without in ((), ("num_key_value_heads",), ("head_dim",), ("head_dim", "num_key_value_heads"),
                    ("layer_types", "layers_block_type", "block_types"), ("num_hidden_layers", "layer_types"),
                    ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
                    ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types",
                     "layers_block_type", "block_types", "mlp_layer_types", "no_rope_layers")):
        try:
            known = {**kind().to_dict(), **getattr(kind, "attribute_map", {})}
            values = {key: value for key, value in TINY.items() if key in known and key not in without}
            config = kind(**values)
            with torch.device("meta"):
                lm = AutoModelForCausalLM.from_config(config)
            if sum(p.numel() for p in lm.parameters()) < 3e7:
                with torch.no_grad():
                    AutoModelForCausalLM.from_config(config).eval()(torch.tensor([[3, 4, 5, 6]]), use_cache=False)
                return config, ""
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
    return None, error


def verdict(kind: type, folder, said: list) -> tuple[str, str]:
    """How one architecture fares, and why; FAULT for what must not be."""
    cfg = config_for(folder)
    config, error = tiny_of(kind)
    if config is None:
        try:
            grpo.check_model(cfg, kind())
        except UserError as e:
            return "refused", str(e).removeprefix(f"{folder} ").removeprefix(f"{folder}: ")
        except Exception as e:    # no default config of this kind
            error = f"{type(e).__name__}: {e}"
        return "not tried", error
    said.clear()
    try:
        grpo.check_model(cfg, config)
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for p in lm.parameters():
                p += torch.randn_like(p) * (0.1 if p.ndim < 2 else p.shape[-1] ** -0.5)
        lm.save_pretrained(folder)
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)    # some zero padding's row
        packed = grpo.packs(cfg, config, CPU)
        policy = grpo.load_policy(cfg, config, packed, CPU, True)
    except UserError as e:
        return "refused", str(e).removeprefix(f"{folder} ").removeprefix(f"{folder}: ")
    reason = "; ".join(said).rpartition("slower ")[2]
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    sent = dict(grpo.checkpoint_tensors(policy, torch.float32))
    wrong = [name for name, tensor in stored.items() if name not in sent or sent[name].shape != tensor.shape
             # The first row of an embedding is the padding's: some models zero it when they load_kind.
             or not torch.equal(sent[name].flatten()[64:], tensor.float().flatten()[64:])]
    if wrong:
        return "FAULT", f"weights differ from the checkpoint's: {wrong[:3]}"
    samples = two_groups()
    with torch.no_grad():
        gap = (policy_logprobs(policy, samples, packed) - torch.cat([logprobs_alone(lm, s) for s in samples])).abs().max()
    if not gap <= 1e-4:
        return "FAULT", f"{gap:.2g} nats from the model's own forward pass; {reason}"
    return ("packed" if packed else "single"), reason


@pytest.mark.sweep
def test_sweep_over_all_causal_models_of_transformers(tmp_path, monkeypatch):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    said, table = [], []
    monkeypatch.setattr(grpo, "say", said.append)
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda kind: kind.__name__):
        folder = tmp_path / kind.__name__
        folder.mkdir(exist_ok=True)
        try:
            fate, reason = verdict(kind, folder, said)
        except Exception as e:
            fate, reason = "FAULT", f"{type(e).__name__}: {e}"
        table.append((kind.__name__, fate, (reason.splitlines() or [""])[0][:200]))
        print(f"{table[-1][0]:32} {fate:10} {table[-1][2]}", flush=True)
        for file in folder.glob("*.safetensors"):
            file.unlink()
    print({fate: sum(row[1] == fate for row in table) for fate in sorted({row[1] for row in table})})
    assert not [row for row in table if row[1] == "FAULT"]


WORDS = [
    "user",
    "system",
    "bot",
    "<s>",
    "assistant",
    "<think>",
    "</think>",
    *(f"w{i}" for i in range(60)),
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{{ 'bot' if add_generation_prompt }}{{ ' <think>' if thinking }}"
)


def tiny_tokenizer(template=TEMPLATE, bos=False):
    """A token a word. Roles are written as they are; with bos, a text starts with <s>."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="user"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {}
    if bos:
        words.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 3)]
        )
        options = {"bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **options)


def words_of(ids):
    return " ".join(WORDS[i] for i in ids)


def tokenized(row, tokenizer=None, **flags):
    """The words that a row's prompt becomes."""
    cfg, tokenizer = Config(**flags), tokenizer or tiny_tokenizer()
    text, special = grpo.prompt_text(grpo.standard_row({"answer": 1} | row, cfg), tokenizer, cfg)
    made = Row(0, "", numpy.empty(0), {})
    grpo.tokenize([(made, text)], special, tokenizer)
    return words_of(made.prompt_ids)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_file(path, prompts):
    return write_lines(path, [{"prompt": prompt, "answer": 1} for prompt in prompts])


def load_file_rows(dataset, tokenizer=None, **flags):
    """Training rows of a dataset; nothing is held out unless the flags say so."""
    defaults = {"eval_size": 0, "prompts_per_step": 1}
    return grpo.load_data(
        Config(dataset=str(dataset), **{**defaults, **flags}), tokenizer or tiny_tokenizer()
    )[0]


def user(content):
    return {"role": "user", "content": content}


# --- order ----------------------------------------------------------------------------------------


def test_each_row_is_drawn_once_an_epoch_in_an_order_of_its_own():
    rows = list(range(10))
    stream = grpo.draw(rows, 3, 0, 50)
    epochs = [stream[i : i + 10] for i in range(0, 50, 10)]
    assert len(stream) == 50
    for epoch in epochs:
        assert sorted(epoch) == rows
    assert len({tuple(epoch) for epoch in [rows, *epochs]}) == 6
    assert grpo.draw(rows, 4, 0, 50) != stream


def test_the_stream_is_the_same_wherever_a_step_begins():
    rows = list(range(10))
    stream = grpo.draw(rows, 3, 0, 50)
    for start in range(21):
        for n in (1, 4, 8, 10, 25):
            assert grpo.draw(rows, 3, start, n) == stream[start : start + n]


def test_the_stream_keeps_the_order_it_always_had():
    assert grpo.draw(list("abcde"), 0, 3, 6) == [
        *random.Random("0 0").sample("abcde", 5)[3:],
        *random.Random("0 1").sample("abcde", 5)[:4],
    ]


def test_without_shuffling_rows_are_drawn_in_order():
    rows = list("abc")
    assert grpo.draw(rows, 0, 2, 5, shuffle=False) == ["c", "a", "b", "c", "a"]
    assert rows == list("abc")


def test_shuffle_dataset_false_keeps_the_files_order_and_the_same_held_out_rows(tmp_path):
    cfg = Config(dataset=prompts_file(tmp_path / "a.jsonl", WORDS[7:37]), eval_size=14)
    shuffled, held_out = grpo.load_data(cfg, tiny_tokenizer())
    ordered, same_held_out = grpo.load_data(replace(cfg, shuffle_dataset=False), tiny_tokenizer())
    places = [WORDS.index(row.prompt) for row in ordered]
    assert places == sorted(places) and len(places) == 16
    assert [row.prompt for row in shuffled] != [row.prompt for row in ordered]
    assert same_held_out == held_out


# --- environments ---------------------------------------------------------------------------------

GAMES = """
import os, random, sys, time
def number(row):
    guess = yield f"up to {row['top']}"
    tries = 1
    while guess != row["secret"]:
        tries += 1
        guess = yield "hi" if int(guess) < int(row["secret"]) else "lo"
    return {"won": True, "speed": 1 / tries}
def one_turn(row):
    reply = yield [{"role": "system", "content": "S"}, {"role": "user", "content": row["question"]}]
    return len(reply)
def columns(row):
    reply = yield f"{row['prompt']}{row['question']}"
    row["question"] = "changed"
    yield {"role": "tool", "content": reply + row.pop("prompt")}
    return 2
def dice(row):
    secret = str(random.randint(1, 9))
    yield "roll"
    yield secret
    return int(secret)
def unfair(row):
    reply = yield "roll"
    yield str(time.time_ns())
def touchy(row):
    reply = yield "go"
    reply = yield "on"
    if reply == "bad":
        BAD
    return 1
def misspelt(row):
    reply = yield "go"
    return repl
def nothing(row):
    yield "go"
def silent(row):
    return 1
    yield
def plain(row):
    return 1
"""
CHATS = {    # the templates of ChatML, of Llama 3 and, in what matters, of Qwen 3
    "chatml": "{% for m in messages %}[{{ m.role }}\n{{ m.content }}]\n{% endfor %}"
              "{{ '[assistant\n' if add_generation_prompt }}",
    "llama": "{{ bos_token }}{% for m in messages %}{{ m.role }}\n\n{{ m.content | trim }}]{% endfor %}"
             "{{ 'assistant\n\n' if add_generation_prompt }}",
    "thinking": "{% for m in messages %}[{{ m.role }}\n{{ '<t></t>' if loop.last and m.role == 'assistant' }}"
                "{{ m.content }}]\n{% endfor %}{{ '[assistant\n<t></t>' if add_generation_prompt }}"}


def chat_tokenizer(template="chatml"):
    """A token a character. `]` ends a turn."""
    ids = {chr(i): i for i in range(128)}
    core = Tokenizer(WordLevel(ids, unk_token="\0"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="]", bos_token="\1",
                                   chat_template=CHATS[template])


class Player:
    """In the engine's place. Completion i of a prompt begins with firsts[i]; `then` tells the next
    reply from all that was said. Turns end with `]` and are cut where the engine would cut them."""

    def __init__(self, firsts, then=None, limit=99, ends=True):
        self.tokenizer = chat_tokenizer()
        self.firsts, self.then, self.limit, self.ends = firsts, then, limit, ends
        self.calls = []

    def sample(self, rows, n, temperature, seed, phase):
        self.calls.append({"n": n, "rows": len(rows), "temperature": temperature, "seed": seed})
        groups = []
        for row in rows:
            replies = self.firsts
            if row.read:
                replies = [self.then(self.tokenizer.decode(row.prompt_ids))]
            groups.append([self.reply(row, text) for text in replies])
        return groups

    def reply(self, row, text):
        ids = self.tokenizer(text + "]" * self.ends)["input_ids"]
        kept = ids[:self.limit - row.read]
        return Sample(row=row, ids=numpy.array(kept, numpy.int32), mask=numpy.ones(len(kept), bool),
                      engine_logprobs=numpy.full(len(kept), -0.5, numpy.float32),
                      truncated=kept != ids, text=text[:len(kept)])


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """The name of a game; `bad` is what `touchy` does to a bad reply."""
    folder = tmp_path_factory.mktemp("games")

    def games(name, bad="1 / 0"):
        file = folder / f"games_{len(bad)}.py"
        file.write_text(GAMES.replace("BAD", bad))
        return f"{file}:{name}"
    return games


@pytest.fixture(scope="module")
def played():
    """Groups of these rows that a player has played, and what failed."""
    pools = []

    def played(game, player, rows=({},), **flags):
        cfg = Config(environment=game, **{"max_completion_length": player.limit, **flags})
        pools.append(grpo.RewardPool(cfg, 1))
        rows = game_rows(rows, cfg, player.tokenizer)
        groups = player.sample(rows, len(player.firsts), 1.0, 5, "sampling")
        grpo.converse(groups, player, pools[-1], 1.0, 5, "sampling")
        return groups, pools[-1].score(groups)
    yield played
    for each in pools:
        each.close()


def game_rows(rows, cfg, tokenizer):
    file = Path(cfg.environment.partition(":")[0]).with_suffix(".jsonl")
    write_lines(file, rows)
    cfg = replace(cfg, dataset=str(file), eval_size=0, prompts_per_step=1, max_completion_length=100)
    return grpo.load_data(replace(cfg, shuffle_dataset=False), tokenizer)[0]


def guess_lower_or_higher(text):
    return {"hi": "7", "lo": "6"}[text.split("[user\n")[-1][:2]]


def test_a_game_by_hand(games, played):
    """The secret is 7: one completion begins with 5 and is told that it is higher, one begins with
    8, goes down to 6 and up again, one knows it."""
    player = Player(["5", "8", "7"], guess_lower_or_higher)
    [group], failures = played(games("number"), player, [{"top": 9, "secret": "7"}])
    low, high, knows = group
    assert failures == [] and low.row.prompt == [user("up to 9")]
    assert player.tokenizer.decode(low.row.prompt_ids) == "[user\nup to 9]\n[assistant\n"
    told = "\n[user\n{}]\n[assistant\n"
    for s, pieces in ((low, ["5]", told.format("hi"), "7]"]), (knows, ["7]"]),
                      (high, ["8]", told.format("lo"), "6]", told.format("hi"), "7]"])):
        assert s.ids.tolist() == [ord(c) for c in "".join(pieces)]
        assert s.mask.tolist() == [i % 2 == 0 for i, piece in enumerate(pieces) for _ in piece]
        assert s.engine_logprobs.tolist() == [-0.5 if sampled else 0.0 for sampled in s.mask]
        assert s.text == ("7" if s is knows else "".join(pieces)) and not s.truncated
        name = games("number")
        tries = len(pieces) // 2 + 1
        assert s.rewards == {"won": 1, "speed": approx(1 / tries), name: approx(1 + 1 / tries)}
        assert s.reward == approx(1 + 1 / tries)
    assert high.turns == [[user("up to 9")], "8", [user("lo")], "6", [user("hi")], "7"]
    # All that go on in one call, each turn with a seed of its own.
    assert [(call["n"], call["rows"]) for call in player.calls] == [(3, 1), (1, 2), (1, 1), (1, 0)]
    assert len({call["seed"] for call in player.calls}) == 4


def test_what_a_game_said_is_read_and_not_scored(games, played):
    player = Player(["5", "8", "7"], guess_lower_or_higher)
    groups, _ = played(games("number"), player, [{"top": 9, "secret": "7"}])
    batch = grpo.pack(groups[0], True, CPU)
    sampled = [t for s in groups[0] for t, m in zip(s.ids, s.mask, strict=True) if m]
    assert batch.targets.tolist() == sampled == [ord(c) for c in "5]7]8]6]7]7]"]
    ids, positions = batch.input_ids[0], batch.position_ids[0]
    prompt = len(groups[0][0].row.prompt_ids)
    for place, position in zip(batch.score_index[2:4], (1, 2)):    # the second turn of the first
        words = len("5]\n[user\nhi]\n[assistant\n")
        assert positions[place] == prompt + words - 2 + position
    assert chr(ids[batch.score_index[2]]) == "\n" and chr(ids[batch.score_index[3]]) == "7"
    metrics = grpo.sample_metrics(groups)
    assert metrics["completion/tokens"] == 12 and metrics["completion/length_max"] == 6
    assert metrics["reward/won"] == 1


@pytest.mark.parametrize("template", CHATS)
@pytest.mark.parametrize("ended", [True, False])
def test_the_words_between_two_replies_are_those_of_the_chat_template(template, ended):
    """Prompt, reply and words are what the template makes of the whole conversation."""
    tokenizer = chat_tokenizer(template)
    told = [{"role": "tool", "content": "b a"}, user("a")]
    reply = tokenizer("x a" + "]" * ended)["input_ids"]
    words = grpo.words_between(told, reply, tokenizer, Config())
    whole = [user("u"), {"role": "assistant", "content": "x a"}, *told]
    text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(words) == text.partition("x a")[2].removeprefix("]" * ended)
    if template != "thinking":    # whose template takes the thought out of what is past
        first, special = grpo.prompt_text({"prompt": [user("u")]}, tokenizer, Config())
        first = tokenizer(first, add_special_tokens=special)["input_ids"]
        assert first + reply + words == tokenizer(text)["input_ids"]


def test_a_reply_that_did_not_end_its_turn_is_ended(games, played):
    player = Player(["5"], guess_lower_or_higher, ends=False)
    [[s]], _ = played(games("number"), player, [{"top": 9, "secret": "7"}])
    assert player.tokenizer.decode(s.ids) == "5]\n[user\nhi]\n[assistant\n7"
    assert s.mask.tolist() == [True] + [False] * (len(s.ids) - 2) + [True]


@pytest.mark.parametrize("turns, reward, replies", [(1, 0, 1), (2, 0, 2), (3, 1 + 1 / 3, 3)])
def test_a_game_that_takes_more_than_max_turns_is_cut_and_worth_nothing(turns, reward, replies,
                                                                         games, played):
    player = Player(["8"], guess_lower_or_higher)
    [[s]], failures = played(games("number"), player, [{"top": 9, "secret": "7"}], max_turns=turns)
    assert (s.reward, s.truncated, failures) == (approx(reward), reward == 0, [])
    assert len(s.turns[1::2]) == replies and s.mask[-1]    # it ends with a reply


def test_the_parts_of_a_game_that_did_not_end_or_failed_are_0(games, played):
    player = Player(["7", "5", "x"])
    groups, failures = played(games("number"), player, [{"top": 9, "secret": "7"}], max_turns=1)
    ended, cut, failed = (list(s.rewards.values()) for s in groups[0])
    assert ended == [1, 1, 2] and cut == failed == [0, 0, 0] and len(failures) == 1
    assert grpo.sample_metrics(groups)["reward/won"] == approx(1 / 3)


# `8]` and its answer take 24 tokens, `7]` two.
@pytest.mark.parametrize("limit, kept, reward", [
    (24, "8]", 0), (25, "8]\n[user\nlo]\n[assistant\n7", 1.5), (26, "8]\n[user\nlo]\n[assistant\n7]", 1.5)])
def test_a_conversation_and_what_is_read_of_it_fit_the_limit(limit, kept, reward, games, played):
    player = Player(["8"], lambda text: "7", limit=limit)
    [[s]], _ = played(games("number"), player, [{"top": 9, "secret": "7"}])
    assert player.tokenizer.decode(s.ids) == kept and len(s.ids) <= limit
    assert s.truncated == (limit < 26) and s.reward == approx(reward)


FAULTS = {"raises": ("1 / 0", "ZeroDivisionError"), "hangs": ("time.sleep(99)", "--reward-timeout 0.5 s"),
          "dies": ("os._exit(3)", "died"), "says nonsense": ("return 'a lot'", "must return finite numbers"),
          "returns nothing": ("return", "TypeError"), "exits": ("sys.exit()", "SystemExit")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_game_costs_its_completion_only(fault, games, played):
    bad, words = FAULTS[fault]
    player = Player(["a", "b", "c"], lambda text: "bad" if "b]" in text else "good")
    [group], [failure] = played(games("touchy", bad), player,
                                reward_timeout=0.5 if fault == "hangs" else 60.0)
    assert [s.reward for s in group] == [1, 0, 1]
    assert words in failure and "bad" in failure


def test_a_game_that_fails_on_all_ends_the_run(games, played):
    groups, failures = played(games("misspelt"), Player(["a", "b"]))
    with pytest.raises(UserError, match="misspelt failed on every completion .* 'repl' is not defined"):
        grpo.report_failures(failures, 2)


def test_chance_is_the_rows(games, played):
    """One row's completions meet the same secret, which other rows do not."""
    player = Player(["a"] * 3, lambda text: "b")
    groups, failures = played(games("dice"), player, [{"game": i} for i in range(9)])
    assert failures == []
    for group in groups:
        [secret] = {s.reward for s in group}
        assert group[0].turns[2] == [user(f"{secret:g}")]
    assert len({group[0].reward for group in groups}) > 2


def test_a_game_that_says_something_else_when_run_again_is_a_fault(games, played):
    [[s]], [failure] = played(games("unfair"), Player(["a"], lambda text: "b"))
    assert s.reward == 0 and "something else when it was run again" in failure


def test_the_first_words_are_the_prompt_and_the_game_gets_the_row_as_it_is(games, played):
    player = Player(["xy", "z"], lambda text: "c")
    [group], failures = played(games("columns"), player, [{"prompt": "p", "question": "q", "answer": 3}],
                               max_turns=2)
    assert failures == [] and group[0].row.prompt == [user("pq")]
    assert group[0].row.columns == {"prompt": "p", "question": "q", "answer": 3}
    assert [s.turns[2] for s in group] == [[{"role": "tool", "content": reply + "p"}] for reply in ("xy", "z")]
    assert [list(s.rewards) for s in group] == [[games("columns")]] * 2    # `correct` is not asked


def test_an_environment_of_one_turn_is_a_reward(games, played):
    [[a, b]], _ = played(games("one_turn"), Player(["xy", "z"]), [{"question": "q"}])
    assert (a.reward, b.reward) == (2, 1) and a.text == "xy" and all(a.mask)
    assert a.row.prompt == [{"role": "system", "content": "S"}, user("q")]


def test_a_row_without_first_words_is_dropped_and_counted(games, capsys):
    cfg = Config(environment=games("number"))
    rows = game_rows([{"top": 1}, {"bottom": 2}], cfg, chat_tokenizer())
    assert [row.columns for row in rows] == [{"top": 1}]
    assert re.search("dropped: 1 of 2 rows are unusable, the first line 2: the environment has no "
                     "first words for it: 'top'", capsys.readouterr().out)
    for name, message in (("silent", "must be text or a list"), ("plain", "no first words .*send")):
        with pytest.raises(UserError, match=message):
            game_rows([{}], replace(cfg, environment=games(name)), chat_tokenizer())


def test_conversations_that_begin_alike_are_told_apart_by_their_rows(games, tmp_path):
    rows = [{"top": 1, "secret": i} for i in range(6)]
    train, held_out = (write_lines(tmp_path / f"{i}.jsonl", part) for i, part in enumerate((rows, rows[:2])))
    cfg = Config(environment=games("number"), dataset=train, eval_dataset=(held_out,), prompts_per_step=1)
    fresh, _ = grpo.load_data(cfg, chat_tokenizer())
    assert sorted(row.columns["secret"] for row in fresh) == [2, 3, 4, 5]


def test_what_goes_not_with_an_environment_is_named(games):
    with pytest.raises(UserError, match="--reward .* goes without --environment"):
        grpo.check_config(Config(environment="a.py:b", reward=("format",)), 1)
    with pytest.raises(UserError, match="--max-turns 0 must be"):
        grpo.check_config(Config(max_turns=0), 1)
    with pytest.raises(UserError, match="--environment nowhere.py:f: no file"):
        grpo.RewardPool(Config(environment="nowhere.py:f"), 1)
    with pytest.raises(UserError, match="messages need a chat template"):
        tokenizer = chat_tokenizer()
        tokenizer.chat_template = None
        game_rows([{}], Config(environment=games("nothing")), tokenizer)


def test_the_engine_gives_a_reply_the_room_that_is_left():
    class Llm:
        def generate(self, prompts, params, **_):
            self.given = [each["max_tokens"] for each in params]
            return [SimpleNamespace(outputs=[i]) for i in range(len(prompts))]
    fake = SimpleNamespace(llm=Llm(), limit=20, params=dict, to_sample=lambda row, i: (row.index, i))
    rows = [Row(0, "", numpy.array([1]), {}), Row(1, "", numpy.array([1] * 9), {}, read=8)]
    groups = grpo.Engine.sample(fake, rows, 2, 1.0, 0, "")
    assert fake.llm.given == [20, 20, 12, 12]
    assert groups == [[(0, 0), (0, 1)], [(1, 2), (1, 3)]]


def test_pass_at_k_counts_a_game_without_a_part_correct_as_wrong():
    [group] = make_groups([(2, [1, 1])])
    group[0].rewards = {"correct": 1.0}
    assert grpo.pass_at_k([group], 1) == 0.5


# --- arithmetic -----------------------------------------------------------------------------------


def problems_of(rows):
    """(a, operator, b) of each, its answer checked."""
    problems = []
    for row in rows:
        match = re.fullmatch(
            r"What is (-?\d+) ([-+*]) (-?\d+)\? Answer with only the number\.", row["question"]
        )
        a, operator, b = int(match[1]), match[2], int(match[3])
        assert row["answer"] == {"+": a + b, "-": a - b, "*": a * b}[operator]
        problems.append((a, operator, b))
    return problems


@pytest.mark.parametrize(
    "low, high, operators, size",
    [(10, 99, "+", 200), (-9, 9, "+-*", 50), (0, 5, "*", 5), (7, 7, "+", 1), (1, 2, "+-", 0)],
)
def test_arithmetic_holds_out_problems_that_never_come_again(low, high, operators, size):
    cfg = Config(
        arithmetic_min=low, arithmetic_max=high, arithmetic_operators=operators, eval_size=size
    )
    rows = grpo.arithmetic_rows(cfg)
    problems = problems_of(rows)
    held_out, train = problems[:size], problems[size:]
    assert len(held_out) == size and len(set(problems)) == len(problems)
    total = (high - low + 1) ** 2 * len(operators)
    assert total - 2 * size <= len(train) <= total - size  # less the twins of what is held out
    for a, operator, b in problems:
        assert operator in operators and low <= a <= high and low <= b <= high
    for a, operator, b in held_out:
        if operator != "-":
            assert (b, operator, a) not in train


@pytest.mark.parametrize(
    "low, high, operators, size, sizes",
    [
        (0, 999, "-", 256, (2**16 - 256, 256)),  # at most 2**16 problems are made
        (1, 2, "+-", 0, (8, 0)),
        (7, 7, "+", 1, (0, 1)),
        (7, 7, "-", 0, (1, 0)),
        (0, 3, "-", 6, (10, 6)),
    ],
)
def test_how_many_arithmetic_problems_there_are(low, high, operators, size, sizes):
    cfg = Config(
        arithmetic_min=low, arithmetic_max=high, arithmetic_operators=operators, eval_size=size
    )
    rows = grpo.arithmetic_rows(cfg)
    assert (len(rows[size:]), len(rows[:size])) == sizes


def test_both_a_problem_and_its_twin_may_be_held_out():
    cfg = Config(arithmetic_min=1, arithmetic_max=2, eval_size=4)
    assert sorted(problems_of(grpo.arithmetic_rows(cfg))) == [
        (1, "+", 1),
        (1, "+", 2),
        (2, "+", 1),
        (2, "+", 2),
    ]


def test_arithmetic_follows_data_seed_and_not_seed():
    rows = grpo.arithmetic_rows(Config())
    assert grpo.arithmetic_rows(Config(seed=9)) == rows != grpo.arithmetic_rows(Config(data_seed=9))


def test_the_default_problems_are_what_they_always_were():
    rows = grpo.arithmetic_rows(Config())
    numbers = random.Random(0).sample(range(8100), 8100)[:256]
    assert len(rows) == 256 + 7606
    assert problems_of(rows[:256]) == [(10 + n // 90, "+", 10 + n % 90) for n in numbers]


# --- files ----------------------------------------------------------------------------------------


def test_lines_are_read_as_they_are(tmp_path):
    """With a byte order mark, Windows line ends, blank lines, and U+2028 in the text."""
    rows = [
        {"question": "a\u2028b\x85c", "answer": 7, "level": 3, "tags": ["x"]},
        {"prompt": "d", "answer": 2.5},
        {"prompt": [user("e")], "answer": "#### 72"},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "rows.jsonl").write_bytes(("\ufeff" + "\r\n \r\n".join(lines)).encode())
    read = grpo.read_rows(str(tmp_path / "rows.jsonl"), Config(), "train")
    assert list(read) == ["line 1", "line 3", "line 5"]
    assert [grpo.standard_row(line, Config()) for line in read.values()] == rows


def test_a_json_file_may_hold_an_array(tmp_path):
    for name in ("rows.json", "rows.jsonl"):
        (tmp_path / name).write_text(
            "\ufeff\n[\n" + '{"prompt": "w1",\n "answer": 1},\n{"prompt": "w2", "answer": 2}]'
        )
        assert sorted((row.prompt, row.columns["answer"]) for row in load_file_rows(tmp_path / name)) == [
            ("w1", 1),
            ("w2", 2),
        ]
    (tmp_path / "rows.json").write_text('[{"prompt": "w1", "answer": 1}')
    with pytest.raises(
        UserError, match="rows.json gave no rows: Expecting ',' delimiter: line 1 column 31"
    ):
        load_file_rows(tmp_path / "rows.json")


@pytest.mark.parametrize(
    "content, name, message",
    [
        (" \n\n", "empty.jsonl", "it is empty"),
        ("[]", "none.json", "it is empty"),
        (None, "missing.jsonl", "No such file"),
        (None, "other", "no .json or .jsonl file"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, name, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(
        UserError, match=f"dataset {re.escape(str(tmp_path / name))} gave no rows: .*{message}"
    ):
        load_file_rows(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "w1", "answer": 1}\n'.encode(encoding))
    with pytest.raises(
        UserError, match="a.jsonl gave no rows: it is UTF-16 or UTF-32, and must be UTF-8"
    ):
        load_file_rows(tmp_path / "a.jsonl")


FUNCTIONS = """
def rows():
    return ({"question": f"sum {i}", "answer": i, "metadata": {"i": i}} for i in range(7))
def second_is_bad():
    return [{"question": "a", "answer": 1}, {"answer": 2}]
def broken():
    yield {"question": "a", "answer": 1}
    raise KeyError("x")
def nothing():
    pass
def ends():
    raise SystemExit(0)
"""


def test_a_function_may_give_the_rows(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    rows = load_file_rows(f"{tmp_path}/my.py:rows")
    assert sorted(
        (row.prompt, row.columns["answer"], row.columns["metadata"]["i"]) for row in rows
    ) == [(f"sum {i}", i, i) for i in range(7)]


@pytest.mark.parametrize(
    "name, message",
    [
        ("my.py:none", "--dataset .*no function 'none'"),
        ("no.py:rows", "--dataset .*no file"),
        ("my.py:nothing", "gave no rows: .*not iterable"),
        ("my.py:broken", "gave no rows: 'x'"),
        ("my.py:ends", "gave no rows: 0"),
    ],
)
def test_a_function_that_gives_no_rows_is_named(tmp_path, name, message):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    with pytest.raises(UserError, match=message):
        load_file_rows(f"{tmp_path}/{name}")


def test_a_functions_unusable_row_is_named(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    with pytest.raises(UserError, match="my.py:second_is_bad: 1 of 2 rows .* row 2: .*`question`"):
        load_file_rows(f"{tmp_path}/my.py:second_is_bad", strict_dataset=True)


# --- rows -----------------------------------------------------------------------------------------

PROMPT = '{"answer": 1, "prompt": %s}'
ANSWER = '{"prompt": "w1", "answer": %s}'
UNUSABLE = [
    ('{"prompt": "w1"', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("five", "not JSON"),
    (b'{"prompt": "\xff"}', "not JSON"),
    ("5", "object of columns"),
    ('["prompt"]', "object of columns"),
    ('{"answer": 1}', "`prompt` or `question`"),
    (PROMPT % '""', "prompt"),
    (PROMPT % '" "', "prompt"),
    (PROMPT % "5", "prompt"),
    (PROMPT % "null", "prompt"),
    (PROMPT % "[]", "prompt"),
    (PROMPT % '["a"]', "prompt"),
    (PROMPT % '[{"role": "user"}]', "prompt"),
    (PROMPT % '[{"role": "user", "content": ""}]', "prompt"),
    (PROMPT % '[{"content": "w1"}]', "prompt"),
    (PROMPT % '[{"role": 1, "content": "w1"}]', "prompt"),
    (PROMPT % '[null]', "prompt"),
    (PROMPT % '[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]', "prompt"),
    (PROMPT % '[{"role": "system", "content": ""}]', "prompt"),
    (PROMPT % '"\\ud800"', "surrogates"),
    (PROMPT % '[{"role": "user", "content": "\\ud800"}]', "surrogates"),
    ('{"answer": 1, "question": ""}', "question"),
    ('{"prompt": "w1"}', "`answer`"),
    (ANSWER % "null", "`answer`"),
    (ANSWER % "true", "`answer`"),
    (ANSWER % '""', "`answer`"),
    (ANSWER % "{}", "`answer`"),
    (ANSWER % '" "', "`answer`"),
    (ANSWER % "NaN", "`answer`"),
    (ANSWER % "Infinity", "`answer`"),
    (ANSWER % "-Infinity", "`answer`"),
    (ANSWER % "1e999", "`answer`"),
    (ANSWER % "[]", "`answer`"),
    (ANSWER % "[1, null]", "`answer`"),
    (ANSWER % "[1, Infinity]", "`answer`"),
    (ANSWER % "[[1]]", "`answer`"),
    (ANSWER % '[""]', "`answer`"),
]


@pytest.mark.parametrize("line, named", UNUSABLE)
def test_an_unusable_row_is_dropped_counted_and_named(tmp_path, capsys, line, named):
    file = tmp_path / "a.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"prompt": "w2", "answer": 1}\n\n' + line + b"\n")
    assert [row.prompt for row in load_file_rows(file)] == ["w2"]
    [said] = capsys.readouterr().out.splitlines()
    start, _, reason = said.partition("1 of 2 rows are unusable, the first line 3: ")
    assert start == f"dataset {file}: dropped: " and named in reason and len(reason) < 300
    with pytest.raises(UserError) as error:
        load_file_rows(file, strict_dataset=True)
    assert (
        str(error.value) == f"dataset {file}: 1 of 2 rows are unusable, the first line 3: {reason}"
    )


def test_of_several_unusable_rows_the_first_is_named(tmp_path, capsys):
    file = write_lines(
        tmp_path / "a.jsonl",
        [{"prompt": "w1", "answer": 1}] * 4 + [{"answer": 2}, 5, {"prompt": 3}],
    )
    assert len(load_file_rows(file)) == 4
    assert (
        "3 of 7 rows are unusable, the first line 5: a row needs a column"
        in capsys.readouterr().out
    )


def test_a_dataset_without_a_usable_row_is_refused(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "w1", "reply": 1}] * 3)
    with pytest.raises(
        UserError, match="3 of 3 rows are unusable, the first line 1: .*column `answer`"
    ):
        load_file_rows(file)


def test_every_answer_counts_as_usable_where_correct_is_no_reward():
    cfg = Config(reward=("format",))
    assert grpo.standard_row({"prompt": "a"}, cfg) == {"prompt": "a"}
    assert grpo.standard_row({"prompt": "a", "answer": {"x": 1}}, cfg) == {
        "prompt": "a",
        "answer": {"x": 1},
    }


@pytest.mark.parametrize(
    "answer",
    [
        5,
        0,
        -1.5,
        "x",
        "#### 72",
        10**30,
        Decimal("2.50"),
        [1, 2, 3],
        ["72", 72.0, Decimal(72)],
        [0],
    ],
)
def test_an_answer_is_passed_through_as_it_is(answer):
    got = grpo.standard_row({"prompt": "a", "answer": answer}, Config())["answer"]
    assert got == answer and type(got) is type(answer)


ODD_ANSWERS = [
    Decimal("Infinity"),
    Decimal("NaN"),
    math.nan,
    math.inf,
    10**400,
    10**5000,
    True,
    (1,),
    1j * math.inf,
]


@pytest.mark.parametrize("i", range(len(ODD_ANSWERS)))
def test_a_functions_odd_answer_is_dropped(monkeypatch, capsys, i):
    rows = [{"prompt": "w1", "answer": ODD_ANSWERS[i]}, {"prompt": "w2", "answer": 1}]
    monkeypatch.setattr(grpo, "load_function", lambda flag, name: lambda: rows)
    assert [row.prompt for row in load_file_rows("any.py:rows")] == ["w2"]
    assert "1 of 2 rows are unusable, the first row 1: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, flags, expected",
    [
        (
            {"problem": "a", "solution": "so \\boxed{3}"},
            {},
            {"question": "a", "answer": "so \\boxed{3}"},
        ),
        (
            {"problem": "a", "question": "b", "solution": "3", "answer": 4},
            {},
            {"question": "b", "answer": 4},
        ),
        (
            {"prompt": None, "question": "b", "answer": None, "solution": 4},
            {},
            {"question": "b", "answer": 4},
        ),
        (
            {"q": "a", "gold": 1},
            {"prompt_column": "q", "answer_column": "gold"},
            {"question": "a", "answer": 1},
        ),
        (
            {"prompt": "a", "q": "b", "answer": 2},
            {"prompt_column": "prompt"},
            {"prompt": "a", "answer": 2},
        ),
        (
            {"prompt": "no", "q": "a", "answer": "no", "gold": 3},
            {"prompt_column": "q", "answer_column": "gold"},
            {"question": "a", "answer": 3},
        ),
        (
            {"prompt": "a", "reward_model": {"ground_truth": "7"}},
            {"answer_column": "reward_model.ground_truth"},
            {"prompt": "a", "answer": "7"},
        ),
        (
            {"x": {"y": {"z": "a"}}, "answer": 1},
            {"prompt_column": "x.y.z"},
            {"question": "a", "answer": 1},
        ),
        (
            {"x.y": "flat", "x": {"y": "deep"}, "answer": 1},
            {"prompt_column": "x.y"},
            {"question": "flat", "answer": 1},
        ),
    ],
)
def test_columns(row, flags, expected):
    rest = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    assert grpo.standard_row(row, Config(**flags)) == rest | expected


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"prompt_column": "q"}, "column `q`"),
        ({"answer_column": "gold"}, "column `gold`"),
        ({"answer_column": "metadata.gold"}, "column `metadata.gold`"),
        ({"answer_column": "metadata.level.gold"}, "column `metadata.level.gold`"),
    ],
)
def test_a_missing_column_is_named(flags, words):
    with pytest.raises(UserError, match=words):
        grpo.standard_row({"question": "a", "answer": 1, "metadata": {"level": 3}}, Config(**flags))


ODD = [
    None,
    True,
    0,
    -1,
    1.5,
    math.nan,
    "",
    " ",
    "a",
    "\0",
    "\ud800",
    "#### 1",
    [],
    ["a"],
    {},
    {"role": "user"},
    [{}],
    [user("a")],
    [{"role": 1, "content": []}],
    10**400,
    [[[]]],
    [user([{"type": "text", "text": "a"}])],
    math.inf,
]


def test_odd_rows_are_taken_or_named(tmp_path, capsys):
    """Thousands of rows of odd columns, and of cut or shuffled JSON."""
    rng = random.Random(0)
    lines = []
    for _ in range(3000):
        names = rng.sample(["prompt", "question", "problem", "answer", "solution", "x"], 3)
        row = {name: rng.choice(ODD) for name in names}
        text = json.dumps(rng.choice([row, row, row, rng.choice(ODD)])).encode()
        fate = rng.random()
        if fate < 0.1:
            text = bytes(rng.sample(text, len(text)))
        elif fate < 0.2:
            text = text[: rng.randint(0, len(text))]
        lines.append(text)
    taken = 0
    for line in lines:
        cfg = Config(
            prompt_column=rng.choice([None, None, "x"]), answer_column=rng.choice([None, None, "x"])
        )
        try:
            row = grpo.standard_row(line, cfg)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        except (
            UnicodeEncodeError
        ):  # of an answer; where rows are read, it is dropped like the others
            assert b"ud800" in line
        else:
            assert row.get("prompt", row.get("question"))
            taken += 1
    assert 30 < taken < 1500
    (tmp_path / "odd.jsonl").write_bytes(b"{}\n" + b"\n".join(lines))
    rows = load_file_rows(tmp_path / "odd.jsonl")
    [said] = capsys.readouterr().out.splitlines()[:1]
    dropped, given = map(
        int, re.search(r"(\d+) of (\d+) rows are unusable, the first line 1: ", said).groups()
    )
    assert given - dropped == len(rows) > 30


@pytest.mark.parametrize(
    "line", ['"\\ud800"', PROMPT % '"\\ud800\\n"', '{"\\ud800\\n": 1}', ANSWER % '"\\ud800"']
)
def test_what_is_said_of_a_row_can_be_printed(tmp_path, capsys, line):
    (tmp_path / "a.jsonl").write_text('{"prompt": "w1", "answer": 1}\n' + line)
    assert len(load_file_rows(tmp_path / "a.jsonl")) == 1
    [said] = capsys.readouterr().out.splitlines()
    assert "line 2: " in said


# --- messages -------------------------------------------------------------------------------------


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    row = grpo.standard_row({"prompt": [user(parts)], "answer": 1}, Config())
    assert row["prompt"] == [user("w1 w2")]
    assert tokenized({"prompt": [user(parts)]}) == "user w1 w2 bot"


@pytest.mark.parametrize("empty", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_message_is_left_out(empty):
    assert (
        tokenized({"prompt": [{"role": "system", "content": empty}, user("w4")]}) == "user w4 bot"
    )


def test_messages_that_end_with_the_assistants_answer_are_dropped(tmp_path, capsys):
    answered = [user("w1"), {"role": "assistant", "content": "w9"}]
    file = write_lines(
        tmp_path / "a.jsonl",
        [{"prompt": answered, "answer": 1}, {"prompt": [*answered, user("w2")], "answer": 1}],
    )
    [row] = load_file_rows(file)
    assert words_of(row.prompt_ids) == "user w1 assistant w9 user w2 bot"
    said = capsys.readouterr().out
    assert "1 of 2 rows are unusable, the first line 1: " in said
    assert "the last message is the assistant's own answer" in said


def test_other_keys_of_a_message_stay():
    message = {"role": "user", "content": "w1", "name": "Ann"}
    assert grpo.standard_row({"prompt": [message], "answer": 1}, Config())["prompt"] == [message]


# --- tokens ---------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "w3"}, user("w4")]


def test_a_question_is_the_users_turn_of_the_chat_template():
    assert tokenized({"question": "w1 w2"}) == "user w1 w2 bot"


def test_without_a_chat_template_a_question_is_text():
    assert tokenized({"question": "w1 w2"}, tiny_tokenizer(template=None)) == "w1 w2"


def test_a_text_prompt_is_read_without_the_template():
    assert tokenized({"prompt": "w1"}) == "w1"
    assert tokenized({"prompt": "w1", "question": "w2"}) == "w1"


def test_messages_go_through_the_template():
    assert tokenized({"prompt": CHAT}) == "system w3 user w4 bot"


def test_a_prompt_template_surrounds_text():
    assert tokenized({"question": "w1"}, prompt_template="w8 {prompt} w9") == "user w8 w1 w9 bot"
    assert tokenized({"prompt": "w1"}, prompt_template="w8 {prompt} w9") == "w8 w1 w9"


def test_a_system_prompt_comes_first():
    assert tokenized({"question": "w1"}, system_prompt="w7") == "system w7 user w1 bot"
    assert tokenized({"prompt": [user("w1")]}, system_prompt="w7") == "system w7 user w1 bot"


def test_chat_template_kwargs_reach_the_template():
    assert (
        tokenized({"question": "w1"}, chat_template_kwargs='{"thinking": true}')
        == "user w1 bot <think>"
    )
    assert (
        tokenized({"question": "w1"}, chat_template_kwargs='{"thinking": false}') == "user w1 bot"
    )


@pytest.mark.parametrize(
    "prompt, words", [("w1", "<s> w1"), ("<s> w1", "<s> w1"), ("w1 <s> w2", "<s> w1 <s> w2")]
)
def test_a_text_prompt_starts_with_one_bos(prompt, words):
    assert tokenized({"prompt": prompt}, tiny_tokenizer(bos=True)) == words


def test_a_text_that_repeats_its_first_word_keeps_it():
    assert tokenized({"prompt": "w1 w1"}) == "w1 w1"


@pytest.mark.parametrize(
    "row, template, flags, message",
    [
        ({"prompt": CHAT}, None, {}, "no.* chat template|chat template, and the model has none"),
        ({"prompt": CHAT}, TEMPLATE, {"prompt_template": "Now {prompt}"}, "--prompt-template"),
        (
            {"prompt": CHAT},
            "{{ raise_exception('no system role') }}",
            {},
            "chat template refuses .*w3.*: no system role",
        ),
        ({"prompt": "w1"}, TEMPLATE, {"system_prompt": "w3"}, "--system-prompt"),
        ({"question": "w1"}, None, {"system_prompt": "w3"}, "--system-prompt"),
        (
            {"prompt": "w1"},
            TEMPLATE,
            {"chat_template_kwargs": '{"thinking": true}'},
            "--chat-template-kwargs",
        ),
        (
            {"question": "w1"},
            TEMPLATE,
            {"chat_template_kwargs": '{"tokenize": 1, "messages": 2}'},
            "template refuses",
        ),
    ],
)
def test_what_a_prompt_needs_is_named(row, template, flags, message):
    with pytest.raises(UserError, match=message):
        tokenized(row, tiny_tokenizer(template), **flags)


@pytest.mark.parametrize(
    "row, flags, thinks",
    [
        ({"question": "w1"}, {"chat_template_kwargs": '{"thinking": true}'}, True),
        ({"question": "w1"}, {}, False),
        ({"prompt": "user w1 bot <think>\n"}, {}, True),
        ({"prompt": "w1 <think> w2 </think>"}, {}, False),
        ({"question": "w1 <think>"}, {}, False),
    ],
)  # the user speaks of the tag; the template closes the turn
def test_a_row_knows_that_its_prompt_opens_a_thought(tmp_path, row, flags, thinks):
    [got] = load_file_rows(write_lines(tmp_path / "a.jsonl", [row | {"answer": 1}]), **flags)
    assert got.thinks is thinks


def test_rows_of_both_kinds_are_tokenized_many_at_once_as_each_alone(tmp_path):
    rng = random.Random(0)
    rows = []
    for _ in range(2500):
        text = " ".join(rng.choices(WORDS[7:37], k=rng.randint(1, 6)))
        rows.append(rng.choice([{"prompt": rng.choice(["", "<s> "]) + text}, {"question": text},
                                {"prompt": [user(text)]}]) | {"answer": 1})
    tokenizer = tiny_tokenizer(bos=True)
    made = load_file_rows(write_lines(tmp_path / "a.jsonl", rows), tokenizer, shuffle_dataset=False)
    assert [words_of(row.prompt_ids) for row in made] == [tokenized(row, tokenizer) for row in rows]


def test_half_a_surrogate_pair_in_a_message_costs_its_row_and_no_other(tmp_path, capsys):
    template = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }} {% endfor %}"
    rows = [{"prompt": [user("w1") | {"name": name}], "answer": 1} for name in ("w2", "\ud800", "w3")]
    made = load_file_rows(write_lines(tmp_path / "a.jsonl", rows), tiny_tokenizer(template),
                          shuffle_dataset=False)
    assert [words_of(row.prompt_ids) for row in made] == ["user w2 w1", "user w3 w1"]
    assert re.search("1 of 3 rows are unusable, the first line 2: the chat template refuses .*surrogates",
                     capsys.readouterr().out)


# --- what is loaded -------------------------------------------------------------------------------


def test_a_row_keeps_its_columns_for_the_reward(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": CHAT, "answer": 5, "level": 2}])
    [row] = load_file_rows(file)
    assert row.prompt == CHAT and row.columns == {"answer": 5, "level": 2}
    file = write_lines(tmp_path / "a.jsonl", [{"question": "w1", "answer": 5, "level": 2}])
    [row] = load_file_rows(file)
    assert row.prompt == "w1" and row.columns == {"question": "w1", "answer": 5, "level": 2}


def test_long_prompts_are_dropped_and_counted(tmp_path, capsys):
    file = prompts_file(
        tmp_path / "a.jsonl", [*WORDS[7:27], *["w1 w1 w1 w1 w1"] * 3, "w1 w1 w1 w1"]
    )
    assert len(load_file_rows(file, max_prompt_length=4)) == 21
    assert (
        f"dataset {file}: dropped: 3 of 24 prompts are longer than 4 tokens"
        in capsys.readouterr().out
    )
    assert len(load_file_rows(file, vllm_max_model_length=20, max_completion_length=16)) == 21


def test_training_prompts_that_are_held_out_are_dropped_and_counted(tmp_path, capsys):
    file = prompts_file(tmp_path / "a.jsonl", WORDS[7:27])
    held_out = prompts_file(tmp_path / "b.jsonl", [WORDS[7], WORDS[8], "w50"])
    train, sets = grpo.load_data(Config(dataset=file, eval_dataset=(held_out,)), tiny_tokenizer())
    assert {row.prompt for row in train} == set(WORDS[9:27])
    assert {row.prompt for row in sets[held_out]} == {WORDS[7], WORDS[8], "w50"}
    assert "2 of 20 training prompts" in capsys.readouterr().out


def test_a_held_out_set_has_at_most_eval_size_rows(tmp_path):
    file = prompts_file(tmp_path / "a.jsonl", WORDS[7:27])
    held_out = prompts_file(tmp_path / "b.jsonl", ["w40", "w41", "w42"])
    cfg = Config(dataset=file, eval_dataset=(held_out,), eval_size=1)
    assert [len(rows) for rows in grpo.load_data(cfg, tiny_tokenizer())[1].values()] == [1]
    assert grpo.load_data(replace(cfg, eval_size=0), tiny_tokenizer())[1] == {}


def test_a_held_out_set_without_a_short_prompt_is_named(tmp_path):
    file = prompts_file(tmp_path / "a.jsonl", WORDS[7:27])
    long = prompts_file(tmp_path / "long.jsonl", ["w1 w1 w1 w1 w1"])
    cfg = Config(dataset=file, eval_dataset=(file, long), max_prompt_length=4, eval_only=True)
    with pytest.raises(UserError, match="long.jsonl: no held-out prompt"):
        grpo.load_data(cfg, tiny_tokenizer())


def test_held_out_rows_are_a_random_share_that_follows_data_seed(tmp_path):
    cfg = Config(dataset=prompts_file(tmp_path / "a.jsonl", WORDS[7:37]), eval_size=14)

    def prompts(cfg):
        train, sets = grpo.load_data(cfg, tiny_tokenizer())
        return [[row.prompt for row in rows] for rows in (train, *sets.values())]

    train, held_out = prompts(cfg)
    assert len(held_out) == 14 and sorted(train + held_out) == sorted(WORDS[7:37])
    assert held_out != sorted(held_out, key=WORDS.index)  # not the head of the file
    assert prompts(replace(cfg, seed=5)) == [train, held_out] != prompts(replace(cfg, data_seed=5))
    with pytest.raises(
        UserError, match=r"a.jsonl leaves 15 .* 15 held out .*--prompts-per-step 16"
    ):
        prompts(replace(cfg, eval_size=15))


def test_held_out_rows_are_set_aside_from_what_is_short_enough(tmp_path):
    """Of 40 rows 20 are too long: 4 of the other 20 are held out, and 16 are left to train on."""
    file = prompts_file(
        tmp_path / "a.jsonl", [*(f"w1 w1 w1 w1 {word}" for word in WORDS[7:27]), *WORDS[7:27]]
    )
    train, sets = grpo.load_data(
        Config(dataset=file, eval_size=4, max_prompt_length=4), tiny_tokenizer()
    )
    assert len(sets[file]) == 4 and len(train) == 16


def test_rows_are_told_apart_by_their_index(tmp_path):
    files = [
        prompts_file(tmp_path / name, WORDS[start : start + 20])
        for name, start in (("a.jsonl", 7), ("b.jsonl", 27))
    ]
    train, sets = grpo.load_data(
        Config(dataset=files[0], eval_dataset=(files[1],)), tiny_tokenizer()
    )
    rows = [*train, *sets[files[1]]]
    assert len({row.index for row in rows}) == len(rows) == 40
    again, _ = grpo.load_data(Config(dataset=files[0], eval_dataset=(files[1],)), tiny_tokenizer())
    assert [row.index for row in again] == [row.index for row in train]  # the same on every rank


@pytest.mark.parametrize(
    "answers, noted",
    [
        ([1, "#### 72", Decimal("0.5")], False),
        ([1, "x + 1"], True),
        ([[1, 2], ["3"]], False),
        ([["yes", "y"]], True),
    ],
)
def test_answers_that_are_no_numbers_are_said_to_be_compared_as_text(
    monkeypatch, capsys, answers, noted
):
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: None)
    rows = [{"prompt": f"w{i}", "answer": answer} for i, answer in enumerate(answers)]
    monkeypatch.setattr(grpo, "load_function", lambda flag, name: lambda: rows)
    load_file_rows("any.py:rows")
    assert ("no plain numbers" in capsys.readouterr().out) == noted


def test_the_package_datasets_reads_hubs_and_other_files(tmp_path, monkeypatch):
    (tmp_path / "datasets.py").write_text("""
def load_dataset(path, name=None, split=None, data_files=None):
    return [{"prompt": "w1", "answer": [path, str(name), split, str(data_files)]}]
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    table = tmp_path / "a.csv"
    table.write_text("prompt,answer\nw1,5\n")
    [from_file] = load_file_rows(table)
    assert from_file.columns["answer"] == ["csv", "None", "train", str(table)]
    [from_hub] = load_file_rows("openai/gsm8k", dataset_config="main", dataset_split="test")
    assert from_hub.columns["answer"] == ["openai/gsm8k", "main", "test", "None"]
    sys.modules.pop("datasets", None)


def test_gsm8k_loads_as_it_is(tmp_path):
    rows = [
        {
            "question": "Natalia sold clips to 48 of her friends ...",
            "answer": "48/2 = <<48/2=24>>24\n#### 72",
        },
        {
            "question": "Weng earns $12 an hour ...",
            "answer": "Weng earned 0.2 x 50 = $10.\n#### 10",
        },
    ]
    loaded = load_file_rows(write_lines(tmp_path / "train.jsonl", rows), shuffle_dataset=False)
    assert [row.columns for row in loaded] == rows
    assert [grpo.is_number(row.columns["answer"]) for row in loaded] == [True, True]


def reward_group(texts=("a", "bb", "ccc"), index=0):
    row = Row(index=index, prompt="the prompt", prompt_ids=numpy.array([1]),
              columns={"answer": 7, "level": "hard"})
    group = []
    for i, text in enumerate(texts):
        length = i + 1
        group.append(Sample(row=row, ids=numpy.full(length, 5, numpy.int32),
                            mask=numpy.ones(length, bool), engine_logprobs=numpy.zeros(length),
                            truncated=False, text=text))
    return group


def rewards_of(groups):
    return [[sample.reward for sample in group] for group in groups]


@pytest.fixture
def rules(tmp_path):
    """Names of the rewards in a file as a user would write it."""
    def rules(text):
        file = tmp_path / f"rules_{len(list(tmp_path.iterdir()))}.py"
        file.write_text("import math, os, sys, time\n" + text)
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
        each.close()


# --- what a reward is given, and what it may return ---


def test_a_reward_gets_lists_and_columns(rules):
    everything, little = rules("""
def everything(prompts, completions, completion_ids, **columns):
    assert (prompts, completions) == (["the prompt"] * 3, ["a", "bb", "ccc"])
    assert completion_ids == [[5], [5, 5], [5, 5, 5]]
    assert columns == {"answer": [7] * 3, "level": ["hard"] * 3}
    return [len(completion) for completion in completions]
def little(level, completions):
    assert level == ["hard"] * 3
    return (True, 0.5, None)
""")
    assert grpo.call_reward(everything, reward_group()) == [1.0, 2.0, 3.0]
    assert grpo.call_reward(little, reward_group()) == [1.0, 0.5, None]


def test_the_builtin_rewards(rules):
    group = reward_group(("7", "8", "It is 7."))
    assert grpo.call_reward("correct", group) == [1.0, 0.0, 1.0]
    group = reward_group(("7", "#### 8", "so \\boxed{7}"))
    assert grpo.call_reward("format", group) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("values", [
    "[1.0, 2.0]", "[1.0] * 4", "[]", "[1, 2, math.nan]", "[1, 2, math.inf]", "[10**400] * 3",
    "['1', '2', '3']", "[1, 2, -math.inf]"])
def test_a_reward_that_returns_nonsense_is_the_users_error(values, rules):
    [name] = rules(f"def my_rule(completions):\n    return {values}\n")
    with pytest.raises(UserError, match="my_rule"):
        grpo.call_reward(name, reward_group())


def test_the_users_error_is_raised_in_the_trainer(rules, pool):
    [name] = rules("def my_rule(completions):\n    return []\n")
    with pytest.raises(UserError, match="my_rule returned 0 values for 3 completions"):
        pool(name).score([reward_group()])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_float32_of_numpy_that_is_not_finite_is_refused_without_a_warning(value, rules):
    [name] = rules(f"import numpy\ndef f(completions):\n"
                   f"    return numpy.array([0.5, 1, {value!r}], dtype=numpy.float32)\n")
    with pytest.raises(UserError, match="must return finite numbers or None, got .*(inf|nan)"):
        grpo.call_reward(name, reward_group())


@pytest.mark.filterwarnings("error")
def test_finite_numbers_of_numpy_are_taken(rules):
    [name] = rules("import numpy\ndef f(completions):\n    return numpy.float32([0.5, 3e38, -1])\n")
    assert grpo.call_reward(name, reward_group()) == [0.5, pytest.approx(3e38), -1]


def test_load_function(tmp_path):
    assert grpo.reward_weights(Config(reward=("correct", "format:0.2", "a/b.py:f", "a.py:f:-1e-1"))
                               ) == {"correct": 1, "format": 0.2, "a/b.py:f": 1, "a.py:f": -0.1}
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "rule.py").write_text("from math import pi\nimport beside\nbad, most = 3, max\n"
                                      "def short(completions):\n    return [pi]\n")
    assert grpo.load_function("reward", f"{tmp_path}/rule.py:short")(["a"]) == [math.pi]


@pytest.mark.parametrize("text, function, message", [
    (None, "f", "no file"), ("bad = 3\n", "f", "no function 'f'"), ("f = 3\n", "f", "no function"),
    ("f = max\n", "f", "no function 'f' whose parameters can be seen"),
    ("def f(:\n", "f", "SyntaxError"), ("import no_such_module\n", "f", "no_such_module"),
    ("raise SystemExit(0)\n", "f", "SystemExit: 0")])
def test_a_function_that_cannot_be_had_is_named_with_its_flag(tmp_path, text, function, message):
    if text is not None:
        (tmp_path / "rule.py").write_text(text)
    name = f"{tmp_path}/rule.py:{function}"
    with pytest.raises(UserError, match=f"--reward {re.escape(name)}: .*{message}"):
        grpo.load_function("reward", name)


def test_a_misspelt_builtin_reward_is_named():
    with pytest.raises(UserError, match="--reward corect: no file"):
        grpo.load_function("reward", "corect")


# --- faults of a reward ---

BAD = {"hangs": ("while True: pass", "--reward-timeout 0.5 s"),
       "sleeps": ("time.sleep(99)", "--reward-timeout 0.5 s"),
       "raises": ("1 / 0", "ZeroDivisionError"),
       "exits": ("sys.exit()", "SystemExit"),
       "dies": ("os._exit(0)", "died"),
       "eats": ("x = bytearray(5 * 2**30)", "MemoryError")}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reward_costs_only_the_completion_it_is_bad_on(bad, rules, pool):
    """It is bad on completions of two letters."""
    code, words = BAD[bad]
    [name] = rules(f"""
def touchy(completions):
    for completion in completions:
        if len(completion) == 2:
            {code}
    return [100 / (len(completion) - 2) for completion in completions]
""")
    groups = [reward_group(("a", "bb", "ccc")), reward_group(("dddd", "eeeeeee", "")),
              reward_group(("gg", "hhh", "ii"))]
    its_pool = pool(name, reward_timeout=0.5 if bad in ("hangs", "sleeps") else 60.0)
    failures = its_pool.score(groups)
    assert rewards_of(groups) == [[-100, 0, 100], [50, 20, -50], [0, 100, 0]]
    assert len(failures) == 3
    for text, failure in zip(("'bb'", "'gg'", "'ii'"), failures):
        assert failure.startswith(f"{name}: ") and words in failure
        assert failure.endswith(f", on {text}")
    assert its_pool.score([reward_group(("7", "8", "9"))]) == []    # it goes on


def test_a_worker_that_died_between_two_steps_is_replaced(rules, pool):
    [name] = rules("def size(completions):\n    return [len(completions)] * len(completions)\n")
    its_pool = pool(name)
    assert its_pool.score([reward_group() for _ in range(4)]) == []
    killed = kill_workers(its_pool)
    assert killed
    groups = [reward_group() for _ in range(9)]
    assert its_pool.score(groups) == []
    assert rewards_of(groups) == [[3, 3, 3]] * 9    # no group was split


def kill_workers(its_pool):
    import multiprocessing
    processes = multiprocessing.active_children()
    for process in processes:
        process.kill()
        process.join()
    return processes


def test_a_reward_that_looks_at_its_group_gets_it_whole_whatever_another_group_does(rules, pool):
    [name] = rules("""
def rank(completions):
    if 'die' in completions:
        os._exit(0)
    return [len(completions)] * len(completions)
""")
    groups = [reward_group() for _ in range(6)] + [reward_group(("die", "a", "b"))]
    failures = pool(name).score(groups)
    assert rewards_of(groups) == [[3] * 3] * 6 + [[0, 1, 1]]
    assert len(failures) == 1


def test_a_reward_that_always_hangs_is_given_up(rules, tmp_path, pool):
    """12 groups, and 8 completions of each of the first three: 36 calls, not 12 + 96."""
    [name] = rules(f"""
def hang(completions):
    with open({str(tmp_path / 'calls')!r}, 'a') as file:
        file.write('x')
    time.sleep(99)
""")
    groups = [reward_group("abcdefgh") for _ in range(12)]
    assert len(pool(name, reward_timeout=0.05).score(groups)) == 96
    assert len((tmp_path / "calls").read_text()) <= 36


def test_a_reward_that_hangs_once_in_every_group_is_asked_about_every_group(rules, pool):
    [name] = rules("""
def slow(completions):
    while 'hang' in completions:
        pass
    return [1] * len(completions)
""")
    groups = [reward_group(("hang", "a")) for _ in range(5)]
    assert len(pool(name, reward_timeout=0.2).score(groups)) == 5
    assert rewards_of(groups) == [[0, 1]] * 5


def test_a_prompt_on_which_a_reward_hangs_costs_no_other(rules, pool):
    """However large its group."""
    [name] = rules("""
def slow(completions):
    while 'hang' in completions:
        pass
    return [len(completions)] * len(completions)
""")
    groups = [reward_group(("hang",) * 16), *(reward_group() for _ in range(6))]
    assert len(pool(name, reward_timeout=0.2).score(groups)) == 16
    assert rewards_of(groups[1:]) == [[3, 3, 3]] * 6


def test_a_hang_ends_no_other_worker(rules, pool):
    """The other reward's process stays the one it was."""
    [name] = rules("""
def pid(completions):
    while 'hang' in completions:
        pass
    return [os.getpid()] * len(completions)
""")
    its_pool = pool(name, reward_timeout=0.5)
    before = [reward_group() for _ in range(8)]
    its_pool.score(before)
    groups = [reward_group(("hang",)), *(reward_group() for _ in range(8))]
    its_pool.score(groups)
    stayed = {group[0].reward for group in before} & {group[0].reward for group in groups}
    assert stayed


def test_a_workers_start_and_imports_are_not_on_the_clock_of_a_call(rules, pool):
    """The file takes longer to import than a call may take, in the trainer too."""
    [name] = rules("time.sleep(1)\ndef one(completions):\n    return [1] * len(completions)\n")
    group = reward_group()
    assert pool(name, reward_timeout=0.3).score([group]) == []
    assert rewards_of([group]) == [[1, 1, 1]]


def test_a_file_that_a_worker_cannot_import_is_the_users_error(rules, pool):
    [name] = rules(f"if os.getpid() != {os.getpid()}:\n    import no_such_module\n"
                   "def f(completions):\n    return [1]\n")
    with pytest.raises(UserError, match="importing .* failed: ModuleNotFoundError"):
        pool(name).score([reward_group()])
    [name] = rules(f"if os.getpid() != {os.getpid()}:\n    os._exit(3)\n"
                   "def g(completions):\n    return [1]\n")
    with pytest.raises(UserError, match="--reward: a worker died"):
        pool(name).score([reward_group()])


def test_what_a_reward_has_started_ends_with_it(rules, tmp_path, pool):
    """The child holds the writing end of a fifo: reading ends when the child has."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    [name] = rules(f"""
import subprocess
def runs(completions):
    writer = os.open({str(fifo)!r}, os.O_WRONLY)
    os.write(writer, b'x')
    subprocess.run(['sleep', '4127'], pass_fds=[writer])
""")
    assert len(pool(name, reward_timeout=0.5).score([reward_group()])) == 3
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == b"xxxx"    # a group, and three completions
    assert os.read(reader, 100) == b""


@pytest.mark.parametrize("flags, failures", [
    ({"reward_memory": 4.0}, 0), ({"reward_memory": 1.0}, 3)])
def test_reward_memory_limits_a_worker(flags, failures, rules, pool):
    [name] = rules("def f(completions):\n    bytearray(2**30)\n    return [1] * len(completions)\n")
    found = pool(name, **flags).score([reward_group()])
    assert len(found) == failures
    assert all("MemoryError" in failure for failure in found)


# --- state, whole steps, output ---


def test_with_one_worker_a_module_keeps_its_state(rules, pool):
    """Two functions of one file share it too."""
    first, second = rules("""
calls = []
def first(completions):
    calls.append('first')
    return [len(calls)] * len(completions)
def second(completions):
    return [len(calls)] * len(completions)
""")
    its_pool = pool(first, f"{second}:100", reward_workers=1)
    for step in (1, 2, 3):
        group = reward_group()
        its_pool.score([group])
        assert rewards_of([group]) == [[101 * step] * 3]


def test_a_function_marked_whole_step_gets_all_completions_of_the_step_at_once(rules, pool):
    [name] = rules("""
def rank(completions, answer):
    assert answer == [7, 7, 8, 8]
    order = sorted(completions)
    return [order.index(completion) for completion in completions]
rank.whole_step = True
""")
    groups = [reward_group(("d", "a")), reward_group(("c", "b"), index=1)]
    groups[1][0].row.columns["answer"] = 8
    assert pool(name).score(groups) == []
    assert rewards_of(groups) == [[3, 0], [2, 1]]


def test_a_whole_step_that_fails_is_asked_one_completion_at_a_time(rules, pool):
    [name] = rules("""
def score(completions):
    return [1 / len(completion) for completion in completions]
score.whole_step = True
""")
    groups = [reward_group(("a", "bb")), reward_group(("", "dddd"))]
    [failure] = pool(name).score(groups)
    assert rewards_of(groups) == [[1, 0.5], [0, 0.25]]
    assert "ZeroDivisionError" in failure


def test_a_file_of_cases_is_compared_with_what_the_reward_says(tmp_path, rules, pool, capsys):
    cases = [{"completion": "The answer is 12.", "answer": 12, "reward": 1},
             {"completion": "It is 12 or 13.", "answer": 12, "reward": 1},    # a wish too many
             {"completion": "\\\\boxed{0.5}", "answer": "1/2", "reward": 1.0},
             {"completion": "13", "answer": 12, "reward": 0}]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases))
    grpo.check_reward(pool("correct"), str(file))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "line 2: 0.0, not 1.0, for 'It is 12 or 13.'"
    assert re.fullmatch(r"3 of 4 rewards are as wanted; a call takes \d+\.\d ms", said[1])
    file.write_text('{"completion": "13"}\n')
    with pytest.raises(UserError, match="--check-reward .*`completion`, a text, and `reward`, a number"):
        grpo.check_reward(pool("correct"), str(file))


def test_what_a_reward_prints_is_shown_once_the_step_is_scored(rules, capfd, pool):
    """Also what the call that hangs printed, and what a program that it ran did."""
    [name] = rules("""
import subprocess
def talks(completions):
    print('first', 'line')
    print('to stderr', file=sys.stderr)
    subprocess.run(['echo', 'from a program'])
    print('before the hang', flush=True)
    while 'hang' in completions:
        pass
    return [1] * len(completions)
""")
    its_pool = pool(name, reward_timeout=1.0)
    capfd.readouterr()
    its_pool.score([reward_group(("hang",))])
    lines = ["first line", "to stderr", "from a program", "before the hang"]
    out, err = capfd.readouterr()
    assert out.splitlines() == lines * 2 and err == ""    # it was asked twice
    its_pool.score([reward_group(("a",))])
    assert capfd.readouterr().out.splitlines() == lines


# --- sums ---


def test_rewards_are_weighted_and_each_is_kept(rules, pool):
    length, some = rules("""
def length(completions):
    return [len(completion) for completion in completions]
def some(completions):
    return [None if len(completion) > 1 else 1 for completion in completions]
""")
    group = reward_group(("7", "8", "#### 7"))
    assert pool("correct:2", f"{length}:0.5", f"{some}:-1").score([group]) == []
    assert rewards_of([group]) == [[2 + 0.5 - 1, 0.5 - 1, 2 + 3.0]]    # None is left out of the sum
    assert group[2].rewards == {"correct": 1.0, "parsable": 1.0, length: 6.0, some: None}


def test_correct_is_a_metric_where_it_is_no_reward_and_there_are_answers(rules, pool):
    [some] = rules("def some(completions):\n    return [1, None, None]\n")
    its_pool = pool(some)
    group = reward_group(("7", "88", "7"))
    its_pool.score([group])
    assert rewards_of([group]) == [[1.0, None, None]]    # None: no reward applies
    assert [sample.rewards["correct"] for sample in group] == [1, 0, 1]
    assert [sample.rewards["parsable"] for sample in group] == [1, 1, 1]
    unanswered = reward_group()
    unanswered[0].row.columns.pop("answer")
    its_pool.score([reward_group(), unanswered])
    assert list(unanswered[0].rewards) == [some]


def test_equal_sums_of_rewards_are_equal(rules, pool):
    """0.1 + 0.2 is not 0.3 in floating point: it would be a signal of 5e-17."""
    assert 0.1 + 0.2 != 0.3
    a, b, c = rules("""
def a(completions):
    return [1, 0]
def b(completions):
    return [1, 0]
def c(completions):
    return [0, 1]
""")
    group = reward_group(("a", "b"))
    pool(f"{a}:0.1", f"{b}:0.2", f"{c}:0.3").score([group])
    assert rewards_of([group]) == [[0.3, 0.3]]


def test_soft_overlong_punishment(pool):
    """DAPO, equation 13, with a limit of 10 tokens and a buffer of 4."""
    group = []
    row = Row(index=0, prompt="", prompt_ids=numpy.array([1]), columns={"answer": 1})
    for length in (1, 6, 7, 9, 10):
        ids = numpy.zeros(length, numpy.int32)
        group.append(Sample(row=row, ids=ids, mask=ids == 0, engine_logprobs=ids,
                            truncated=False, text="1"))
    pool("correct", soft_overlong_share=0.4, max_completion_length=10).score([group])
    assert rewards_of([group]) == [pytest.approx([1, 1, 0.75, 0.25, 0])]
    overlong = [sample.rewards["overlong"] for sample in group]
    assert overlong == pytest.approx([0, 0, -0.25, -0.75, -1])


def test_a_rank_without_prompts_scores_nothing(rules, pool):
    [whole] = rules("def whole(completions):\n    return [1]\nwhole.whole_step = True\n")
    its_pool = pool("correct", whole)
    assert its_pool.score([]) == []
    assert its_pool.idle == [None, None]    # no worker was started for it


# --- the end ---

TRAINER = """
import os, sys, time
import grpo, test_grpo
pool = grpo.RewardPool(grpo.Config(reward=(sys.argv[1],)), 2)
"""


def start_trainer(tmp_path, end, name):
    """A process with a pool, whose temporary folder is tmp_path/tmp."""
    (tmp_path / "tmp").mkdir()
    places = [Path(grpo.__file__).parent, Path(__file__).parent]
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": ":".join(map(str, places))}
    return subprocess.Popen([sys.executable, "-c", TRAINER + end, name], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("end", [
    "pool.close(); pool.close(); os._exit(0)", "raise grpo.UserError('its end')"])
def test_an_end_leaves_no_process_and_no_file(end, tmp_path, rules):
    """Each worker holds its output, the pipe: reading it ends when all of them have."""
    [name] = rules("def f(completions):\n    return [1] * len(completions)\n")
    score = "pool.score([test_grpo.reward_group() for _ in range(4)])\n"
    maps = "assert '/dev/shm' not in open('/proc/self/maps').read()\n"
    trainer = start_trainer(tmp_path, score + maps + end, name)
    output, _ = trainer.communicate(timeout=120)
    failed = "its end" in end
    assert trainer.returncode == int(failed), output
    assert (b"its end" in output) == failed
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_ends_when_the_trainer_is_killed_in_the_middle_of_a_call(tmp_path, rules):
    """The reward holds the fifo's writing end and hangs: reading ends when its process has."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    [name] = rules(f"""
def hang(completions):
    writer = os.open({str(fifo)!r}, os.O_WRONLY)
    os.write(writer, b'x')
    while True:
        pass
""")
    trainer = start_trainer(tmp_path, "pool.score([test_grpo.reward_group()])", name)
    with open(fifo, "rb") as file:
        assert file.read(1) == b"x"
        os.kill(trainer.pid, signal.SIGKILL)
        assert file.read() == b""
    trainer.communicate()


SOURCE = Path(grpo.__file__).resolve()
RANK_ENV = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
RANK_ENV |= {"PYTHONPATH": str(SOURCE.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env=RANK_ENV, timeout=120, capture_output=True, text=True)


class Ended(BaseException):
    """What os._exit raises here."""


@pytest.fixture
def ends(monkeypatch):
    """os._exit raises, and nothing waits to be closed."""
    def end(code):
        raise Ended(code)
    monkeypatch.setattr(os, "_exit", end)
    grpo.AT_END.pop_all()


@pytest.fixture
def stopping(monkeypatch):
    """Nobody has been told to stop."""
    fresh = grpo.Stopping()
    monkeypatch.setattr(grpo, "STOPPING", fresh)
    return fresh


@pytest.fixture
def alone_rank(group):
    """A process group of one."""


# --- signals


def test_a_signal_breaks_off_the_block_and_nothing_else(stopping):
    done = []
    with stopping.interruptible():
        stopping.break_off_if_told()
        done.append("before")
        stopping.hear(15, None)
        done.append("after")
    done.append("outside")
    assert done == ["before", "outside"] and stopping.signal == 15


def test_a_signal_breaks_off_no_block_in_which_others_wait(stopping):
    done = []
    with stopping.interruptible(alone=False):
        stopping.break_off_if_told()
        stopping.hear(15, None)
        done.append("after")
    assert done == ["after"] and stopping.signal == 15


def test_a_signal_outside_the_block_interrupts_nothing(stopping):
    stopping.hear(15, None)
    assert stopping.signal == 15


def test_a_signal_that_came_before_ends_the_block_at_its_start(stopping):
    done = []
    stopping.hear(2, None)
    with stopping.interruptible():
        stopping.break_off_if_told()
        done.append("not reached")
    assert done == []


def test_other_errors_pass_through_the_block_and_a_later_signal_breaks_nothing(stopping):
    with pytest.raises(ValueError):
        with stopping.interruptible():
            raise ValueError
    stopping.hear(15, None)
    assert stopping.signal == 15


def test_a_signal_that_torchrun_repeats_counts_once(stopping, ends):
    with stopping.interruptible():
        stopping.hear(15, None)
    stopping.hear(2, None)
    assert stopping.signal == 15


def test_a_second_signal_closes_and_ends(stopping, ends, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(grpo.time, "monotonic", lambda: clock[0])
    closed = []
    grpo.at_end(lambda: closed.append("log"))
    stopping.hear(15, None)
    clock[0] = 102.5
    with pytest.raises(Ended) as ended:
        stopping.hear(2, None)
    assert ended.value.args == (130,) and closed == ["log"]


def test_a_third_signal_ends_what_hangs_in_its_closing(stopping, ends, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(grpo.time, "monotonic", lambda: clock[0])
    closed = []

    def hang():
        clock[0] += 3
        stopping.hear(15, None)    # the third, while this one never comes to its end
        closed.append("not reached")
    grpo.at_end(lambda: closed.append("log"))
    grpo.at_end(hang)
    stopping.hear(15, None)
    clock[0] += 3
    with pytest.raises(Ended) as ended:
        stopping.hear(15, None)
    assert ended.value.args == (143,) and closed == ["log"]


def test_real_signals_are_listened_to(stopping):
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stopping.listen()
        with stopping.interruptible():
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("went on")
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert stopping.signal == signal.SIGTERM


def test_a_stop_point_raises_the_signal_and_gathering_does_not(stopping, alone_rank):
    grpo.stop_point()
    stopping.hear(15, None)
    assert grpo.gathered("value") == ["value"]
    with pytest.raises(grpo.Stopped) as stopped:
        grpo.stop_point()
    assert stopped.value.args == (15,)


# --- ends


def test_leaving_closes_once_each_last_first_and_passes_over_what_fails(ends, capsys):
    closed = []
    grpo.at_end(lambda: closed.append("first"))
    grpo.at_end(lambda: 1 / 0)
    grpo.at_end(lambda: closed.append("last"))
    with pytest.raises(Ended) as ended:
        grpo.leave(7)
    grpo.close()
    assert closed == ["last", "first"] and ended.value.args == (7,)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_is_logged_and_printed_before_an_end_is_not_lost(tmp_path):
    """To files, which Python writes in blocks: an end by os._exit alone_rank would lose both."""
    code = f"""
import logging.handlers, sys
target = logging.FileHandler({str(tmp_path / "log")!r})
logging.getLogger().addHandler(logging.handlers.MemoryHandler(10**6, logging.CRITICAL, target))
import grpo
kept = open({str(tmp_path / "fork")!r}, "w")
grpo.at_end(kept.close)
kept.write("a row")
logging.error("a line")
print("a word")
grpo.leave(3)
"""
    done = python(code)
    assert done.returncode == 3 and done.stdout == "a word\n", done.stderr
    assert (tmp_path / "log").read_text() == "a line\n"
    assert (tmp_path / "fork").read_text() == "a row"


MEMORY = "grpo.py: out of memory during training: lower --tokens-per-micro-batch"
CPU_MEMORY = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried 1 byte"
PEER = ("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:15791: Connection "
        "reset by peer.")
LOST = "grpo.py: lost another process of the run during training"


@pytest.mark.parametrize("error, code, line", [
    (UserError("wrong"), 2, "grpo.py: wrong"),
    (UserError("out of memory, it says"), 2, "grpo.py: out of memory, it says"),
    (MemoryError(), 2, MEMORY),
    (MemoryError("too much"), 2, MEMORY),
    (RuntimeError(CPU_MEMORY), 2, MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory."), 2, MEMORY),
    (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"), 2, MEMORY),
    (RuntimeError(PEER), 1, LOST),
    (dist.DistNetworkError("Broken pipe\nframe #0: c10::Error\nframe #1"), 1, LOST),
    (dist.DistBackendError("NCCL error: remote process exited"), 1, LOST)])
def test_a_known_failure_is_one_line(error, code, line, ends, stopping, capsys):
    stopping.phase = "training"
    with pytest.raises(Ended) as ended:
        grpo.fail(error, "grpo.py")
    said = capsys.readouterr().err
    assert ended.value.args == (code,) and said.startswith(line) and said.count("\n") == 1


def test_advice_on_memory_names_the_flags_that_help_and_what_torch_said(ends, stopping, capsys):
    with pytest.raises(Ended):
        grpo.fail(torch.OutOfMemoryError("CUDA out of memory."), "grpo.py (rank 1)")
    said = capsys.readouterr().err
    assert said.startswith("grpo.py (rank 1): out of memory during the start")
    for word in ("--gradient-checkpointing", "--vllm-gpu-memory-utilization", "(CUDA out of memory.)"):
        assert word in said


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("shapes differ"),
                                   ConnectionError("connection reset by a hub")])
def test_an_unknown_failure_is_a_traceback_and_the_phase(error, ends, stopping, capsys):
    stopping.phase = "training"
    with pytest.raises(Ended) as ended:
        grpo.fail(error, "grpo.py")
    said = capsys.readouterr().err
    assert ended.value.args == (1,)
    assert said.endswith(f"{type(error).__name__}: {error}\ngrpo.py: failed during training\n")


def test_only_the_first_rank_to_fail_speaks(ends, stopping, capsys):
    store = dist.HashStore()
    for said in ("grpo.py (rank 1): wrong\n", ""):
        with pytest.raises(Ended) as ended:
            grpo.fail(UserError("wrong"), "grpo.py (rank 1)", store)
        assert ended.value.args == (2,) and capsys.readouterr().err == said


def test_before_the_ranks_meet_only_rank_0_speaks(ends, stopping, capsys, monkeypatch):
    monkeypatch.setattr(grpo, "IS_FIRST_RANK", False)
    with pytest.raises(Ended):
        grpo.fail(UserError("wrong"), "grpo.py (rank 1)")
    assert capsys.readouterr().err == ""


def test_every_rank_speaks_where_the_host_of_the_store_is_gone(ends, stopping, capsys):
    class Gone:
        def add(self, key, amount):
            raise dist.DistNetworkError("Broken pipe")
    with pytest.raises(Ended) as ended:
        grpo.fail(dist.DistNetworkError("Broken pipe"), "grpo.py (rank 1)", Gone())
    said = capsys.readouterr().err
    assert ended.value.args == (1,) and said.count("\n") == 1 and "lost another process" in said


def test_a_failing_rank_closes_before_it_ends(ends, stopping, capsys):
    closed = []
    grpo.at_end(lambda: closed.append("log"))
    with pytest.raises(Ended):
        grpo.fail(ValueError("odd"), "grpo.py")
    assert closed == ["log"]


PEERS = """
import json, os, signal, sys, time
import grpo, torch, tyro
import torch.distributed as dist

def train(cfg, trainer):
    grpo.STOPPING.phase = "training"
    grpo.STOPPING.listen()
    rank = dist.get_rank()
    grpo.at_end(lambda: print(f"closed {rank}"))
    if how == "end":
        dist.barrier()
        return
    if rank == 1 and how == "signal":
        signal.raise_signal(signal.SIGTERM)
    if rank == 1 and how == "error":
        raise grpo.UserError("wrong on one")
    if rank == 1 and how == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    grpo.stop_point()
    time.sleep(100)

def run(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{how}.{stream}.{rank}", os.O_CREAT | os.O_WRONLY), number)
    grpo.IS_FIRST_RANK = rank == 0
    grpo.train = train
    grpo.set_up = lambda *_: "a trainer"
    grpo.check_config = lambda *_: None
    grpo.in_a_dtype_of = lambda device, cfg: cfg
    grpo.main()
    grpo.close()
    os._exit(0)

for how in ("end", "signal", "error", "death"):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)    # as torchrun's agent has
    pids = [os.fork() or run(rank, store.port) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps([how, codes]), flush=True)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """For each way of ending: the two ranks' exit codes, outputs and errors. Without torchrun, which
    would add its own words and end the slower one."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "peers.py").write_text(PEERS)
    done = subprocess.run([sys.executable, "peers.py"], cwd=folder, env=RANK_ENV, timeout=120,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = dict(map(json.loads, done.stdout.splitlines()))
    read = lambda how, stream: [(folder / f"{how}.{stream}.{rank}").read_text() for rank in range(2)]
    return {how: (codes[how], read(how, "out"), read(how, "err")) for how in codes}


def test_two_ranks_that_come_to_their_end_close_and_say_nothing(two_ranks):
    assert two_ranks["end"] == ([0, 0], ["closed 0\n", "closed 1\n"], ["", ""])


def test_a_signal_to_one_rank_stops_both(two_ranks):
    assert two_ranks["signal"] == ([143, 143], ["closed 0\n", "closed 1\n"], ["", ""])


def test_an_error_on_one_rank_ends_both_and_only_that_one_speaks(two_ranks):
    codes, out, err = two_ranks["error"]
    assert codes == [1, 2] and out == ["closed 0\n", "closed 1\n"]
    assert err == ["", "grpo.py (rank 1): wrong on one\n"]


def test_a_rank_whose_peer_died_says_so_in_one_line(two_ranks):
    codes, out, err = two_ranks["death"]
    assert codes == [1, -9] and out == ["closed 0\n", ""] and err[1] == ""
    assert err[0].startswith("grpo.py (rank 0): lost another process of the run during training: ")
    assert err[0].count("\n") == 1


def test_a_rank_ends_with_the_process_that_started_it():
    """A parent starts a child that waits for ever, and is killed: the child's end of the pipe closes."""
    child = "import grpo; grpo.end_with_parent(); print('ready', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True,
                               stdin=subprocess.PIPE, env=RANK_ENV)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.stdout.read() == ""    # returns when the child, too, has ended
    process.communicate(timeout=60)


def test_a_folder_in_use_is_refused_with_its_holder_and_free_after_its_end(tmp_path):
    hold = ("import grpo, sys, pathlib; grpo.lock_folder(pathlib.Path(sys.argv[1]))\n"
            "print('held', flush=True); input()")
    holder = subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env=RANK_ENV)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))} is in use by process {holder.pid}:"):
        grpo.lock_folder(tmp_path)
    holder.kill()
    holder.communicate()
    grpo.lock_folder(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    grpo.AT_END.close()    # lets go
    grpo.lock_folder(tmp_path)
    grpo.AT_END.close()


# --- the start


@pytest.fixture
def main_says(ends, stopping, monkeypatch, capsys):
    """Runs main in this process, as one rank of one, and returns its exit code, stdout and stderr."""
    def run(flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["grpo.py", *flags.split()])
        with pytest.raises((Ended, SystemExit)) as ended:
            grpo.main()
        return ended.value.args[0], *capsys.readouterr()
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    old = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("flags, line", [
    ("--reward-funcs x.py:f", "grpo.py: --reward-funcs is no flag here: use --reward, "),
    ("--reward_funcs=x.py:f", "grpo.py: --reward_funcs is no flag here: use --reward, "),
    ("--top-k 5", "grpo.py: --top-k is no flag here: the trainer's probabilities can't match"),
    ("--num-generations 1", "grpo.py: --num-generations 1 must be at least 2"),
    ("--bf16-optimizer-states --adam-beta2 0.99", "grpo.py: --adam-beta2 0.99 must be at most 0.98 with --bf16-o")])
def test_a_bad_command_line_is_one_line(flags, line, main_says):
    code, out, err = main_says(flags)
    assert code == 2 and err.startswith(line) and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_a_misspelt_flag_is_named_by_rank_0_only(is_first_rank, main_says, monkeypatch):
    monkeypatch.setattr(grpo, "IS_FIRST_RANK", is_first_rank)
    code, out, err = main_says("--num-generation 8")
    assert code == 2 and ("--num-generation" in out + err) == is_first_rank


def test_without_torchrun_it_says_how_to_start(main_says, monkeypatch):
    monkeypatch.delenv("RANK")
    code, out, err = main_says("")
    assert code == 2 and err.startswith("grpo.py: start it with torchrun: ")


def test_restarts_need_a_folder(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    grpo.check_launch(grpo.Config(output_dir="runs/a"))
    for cfg in grpo.Config(), grpo.Config(output_dir="runs/a", save_only_model=True):
        with pytest.raises(UserError, match="--max-restarts needs an --output-dir, .* and no --save-only-model"):
            grpo.check_launch(cfg)


class Meeting:
    """Ranks that meet in a store, each in a thread of its own."""

    def __init__(self, patience=60):
        self.store, self.patience, self.threads = dist.HashStore(), patience, ThreadPoolExecutor()

    def come(self, *ranks: int) -> list:
        return [self.threads.submit(grpo.meet, self.store, rank, 3, self.patience) for rank in ranks]

    def have_met(self, start: int, coming: list) -> bool:
        """All in this start, and so in the same."""
        for number, each in enumerate(coming):
            each.result(PATIENCE).set(f"{number}", "here")
        return self.store.check([f"start {start}/{number}" for number in range(len(coming))])


def test_ranks_meet_each_time_they_are_started():
    meeting = Meeting()
    assert meeting.have_met(1, meeting.come(2, 0, 1))
    assert meeting.have_met(2, meeting.come(1, 2, 0))


def test_a_rank_that_comes_again_waits_for_the_others_to_do_so():
    """On its host torchrun saw at once that it died; the others find out later."""
    meeting = Meeting()
    assert meeting.have_met(1, meeting.come(0, 1, 2))
    again = meeting.come(1)
    time.sleep(0.2)
    assert not again[0].done()
    assert meeting.have_met(2, [*again, *meeting.come(0, 2)])


def test_ranks_meet_though_some_died_before_all_had_come():
    meeting = Meeting()
    meeting.store.add("starts", 1)    # as rank 0 does, which died then
    early = meeting.come(1, 2)
    time.sleep(0.2)
    assert not any(each.done() for each in early)
    assert meeting.have_met(2, [*early, *meeting.come(0)])


def test_a_rank_that_nobody_joins_ends():
    [alone] = Meeting(patience=0.1).come(0)
    with pytest.raises(dist.DistError, match="some ranks have not come"):
        alone.result(PATIENCE)


@pytest.mark.parametrize("flags, said", [
    ("--recipe gspo --epsilon 0.1", "recipe gspo: --importance-sampling-level sequence --epsilon 0.1 "
                                    "--epsilon-high 0.0004"),
    ("--recipe dr_grpo", "recipe dr_grpo: --loss-type dr_grpo --scale-rewards none"),
    ("", "")])
def test_a_recipe_says_what_it_sets_and_given_flags_win(flags, said, main_says):
    code, out, err = main_says(f"{flags} --num-generations 1")
    assert code == 2 and out.strip() == said and "--num-generations 1 must be" in err


def test_names_of_others_are_not_ours_and_what_they_advise_is():
    ours = {field.name for field in fields(grpo.Config)}
    assert not ours & grpo.TRL_NAMES.keys()
    for name, advice in grpo.TRL_NAMES.items():
        for flag in re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", advice):
            assert flag.replace("-", "_") in ours, (name, flag)


def test_a_word_that_is_no_flag_may_be_one_of_their_names():
    grpo.refuse_other_names(["--system-prompt", "top-k", "report_to", "--reward", "correct"])


def test_import_needs_neither_vllm_nor_transformers_and_starts_nothing():
    done = python("import sys; sys.modules['vllm'] = None; import grpo, torch\n"
                  "assert not {'transformers', 'tyro'} & set(sys.modules)\n"
                  "assert not torch.distributed.is_initialized()")
    assert done.returncode == 0, done.stderr


# --- run.sh


def run_sh(folder: Path, *words, nvidia="", **env) -> subprocess.CompletedProcess:
    """run.sh in a folder of its own, whose Python is a stand-in that says how it was started."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("run.sh", "requirements.txt"):
        (folder / name).write_text((SOURCE.parent / name).read_text())
    (folder / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True, exist_ok=True)
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{nvidia}'\n")
    (tools / "nvidia-smi").chmod(0o755)
    count = subprocess.run(["cksum"], input=(folder / "requirements.txt").read_bytes(),
                           capture_output=True).stdout.decode().strip()
    for venv, mode in ((".venv", "cuda" if nvidia else "cpu"), (".venv-cpu", "cpu")):
        python = folder / venv / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit "${NO_HEADERS:-0}"\n'
                          f'echo {venv}:$PYTHONUTF8:$CUDA_VISIBLE_DEVICES: "$@"\n')
        python.chmod(0o755)
        (folder / venv / "ready").write_text(f"recipe 1, {mode}, {count}\n")
    return subprocess.run(["bash", folder / "run.sh", *words], capture_output=True, text=True, timeout=60,
                          env=RANK_ENV | {"PATH": f"{tools}:{os.environ['PATH']}"} | env)


def test_run_sh_tests_all_but_what_is_left_out_by_name(tmp_path):
    done = run_sh(tmp_path, "test")
    assert "-m not bench and not faults and not sweep" in done.stdout, done.stderr
    assert "markers=bench\nfaults\nsweep" in done.stdout


@pytest.mark.parametrize("visible, venv, ranks", [("", ".venv-cpu", 1), ("-1", ".venv-cpu", 1),
                                                  ("0", ".venv", 1), ("0,1", ".venv", 2)])
def test_run_sh_without_visible_gpus_takes_the_cpu(visible, venv, ranks, tmp_path):
    done = run_sh(tmp_path, nvidia="GPU 0: a\\nGPU 1: b\\n", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{venv}:1:{visible}:") and f"--nproc-per-node {ranks} " in done.stdout


@pytest.mark.parametrize("name", ["a b", "it's", "a$b"])
def test_run_sh_refuses_a_path_that_compilers_cannot_take(name, tmp_path):
    done = run_sh(tmp_path / name)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and f"/{name}" in done.stderr


def test_run_sh_takes_a_path_that_is_not_ascii_in_any_locale(tmp_path):
    """torch writes paths as UTF-8: where Python reads them by another coding, compiling fails."""
    done = run_sh(tmp_path / "Übung", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 0 and ".venv:1:" in done.stdout, done.stderr


@pytest.mark.parametrize("env, words", [({"CC": "no-such-compiler"}, "no-such-compiler.*apt install gcc"),
                                        ({"NO_HEADERS": "1"}, "Python.h.*apt install .*-dev")])
@pytest.mark.parametrize("nvidia", ["GPU 0: a\\n", ""])
def test_run_sh_names_the_package_that_compiling_misses(nvidia, env, words, tmp_path):
    """On GPUs nothing goes without it. On the CPU only long runs compile, so it is a note."""
    if "CC" in env and not nvidia:
        env, words = {"CXX": "no-such-compiler"}, r"no-such-compiler.*apt install g\+\+.*--vllm-enforce-eager"
    done = run_sh(tmp_path, nvidia=nvidia, CUDA_VISIBLE_DEVICES="0", **env)
    assert done.stderr.count("\n") == 1 and re.search(words, done.stderr), done.stderr
    assert done.returncode == (1 if nvidia else 0) and bool(done.stdout) == (not nvidia)


@pytest.mark.parametrize("flags", [["--model-name-or-path", "/no/such"], ["--model_name_or_path=/no/such"]])
def test_run_sh_names_a_missing_model_folder_before_anything_starts(flags, tmp_path):
    done = run_sh(tmp_path, *flags)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "run.sh: --model-name-or-path /no/such: no such folder\n"


WAITING = """
import os, sys, time
open(os.environ["TMPDIR"] + "/left", "w").close()
print(os.environ["TMPDIR"], flush=True)
time.sleep(100)
"""


def test_run_sh_leaves_nothing_in_the_temporary_folder_and_sweeps_what_killed_runs_left(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    shared = tmp_path / "tmp"
    old = shared / f"grpo-run-{gone.pid}-abc"
    live = shared / f"grpo-run-{os.getpid()}-abc"
    for folder in (old, live):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    run_sh(tmp_path)    # makes the folder
    (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "grpo.py").write_text(WAITING)
    process = subprocess.Popen(["bash", tmp_path / "run.sh"], stdout=subprocess.PIPE, text=True,
                               env=RANK_ENV | {"TMPDIR": str(shared)})
    own = Path(process.stdout.readline().strip())
    assert own.parent == shared and own.name.startswith(f"grpo-run-{process.pid}-")
    assert {path.name for path in shared.iterdir()} == {live.name, own.name}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 143
    assert {path.name for path in shared.iterdir()} == {live.name}


HERE = Path(__file__).resolve()
PATIENCE = 600    # seconds: only what hangs takes as long
ENV = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
ENV |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}    # read at the import
ENV |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE.parent}:{HERE.parent}"}
needs_cpu_engine = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the CPU build of vLLM")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# Not as a script: a reward worker would import its parent's script.
CALL = ["-c", f"import sys, {HERE.stem} as tests; getattr(tests, sys.argv[1])(*sys.argv[2:])"]


def call(function: str, *arguments) -> str:
    """What a function of this file prints, in a process of its own."""
    done = subprocess.run([sys.executable, *CALL, function, *map(str, arguments)], env=ENV | ALONE,
                          timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(file: Path) -> list[dict]:
    text = file.read_text()
    assert not text or text.endswith("\n")    # a run killed before its first line leaves an empty file
    return [json.loads(line) for line in text.splitlines()]


def untimed(folder: Path) -> list[dict]:
    """Its metrics, but for times and memory."""
    return [{name: value for name, value in metrics.items() if not name.startswith("time/")}
            for metrics in lines(folder / "metrics.jsonl")]


def samples_of(folder: Path, step: int, split: str) -> list[dict]:
    return [s for s in lines(folder / "samples.jsonl") if (s["step"], s["split"]) == (step, split)]


# --- models, rewards and data

REWARDS = """
import os, random
def none(completions):
    return [None] * len(completions)
def low(completion_ids, **_):
    return [sum(i < 60 for i in ids) / len(ids) for ids in completion_ids]
def misspelt(completions, **_):
    return [len(c.splitt()) for c in completions]
def talk(row):
    reply = yield row["question"]
    rounds = random.randint(0, 4)
    for i in range(rounds):
        reply = yield f"{i} more"
    return {"low": sum(c < "X" for c in reply) / 8, "rounds": rounds / 9}
def short_on_rank_1(completions, **_):
    return [1.0] * (len(completions) - (os.environ["RANK"] == "1"))
"""
HUB = """
def load_dataset(path, name, split):
    assert (path, name) == ("made/up", "main") and split in ("some", "other")
    return [{"text": f"{split} {i}", "label": i, "answer": "not it"} for i in range(20)]
"""


def tiny_model(folder: Path, tied: bool) -> Path:
    """A random Llama with a tokenizer of characters and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    special = ["<pad>", "<eos>", "<user>", "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<user>"])
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<eos>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(    # a vocabulary larger than the tokenizer's, as many models have
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1 if tied else 2, tie_word_embeddings=tied,
        initializer_range=0.1, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        max_position_embeddings=1024)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, rewards and data."""
    place = tmp_path_factory.mktemp("runs")
    tiny_model(place / "tied", True)
    tiny_model(place / "untied", False)
    (place / "rewards.py").write_text(REWARDS)
    # The same question on both ranks: were their draws the same, so would their completions be.
    (place / "train.jsonl").write_text('{"question": "Say it.", "answer": 1}\n' * 8)
    held_out = [{"prompt": f"Say {i}", "answer": i, "text": f"Say {i}", "label": i} for i in range(5)]
    (place / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (place / "hub").mkdir()
    (place / "hub" / "datasets.py").write_text(HUB)    # a stand-in for the package
    return place


# --- checkpoints and the run's folder, in this process

@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """A process group of one."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def unlocked(group, monkeypatch):
    """Runs of one process may share a folder."""
    monkeypatch.setattr(grpo, "lock_folder", lambda folder: None)


def run_policy(folder: Path, **flags) -> tuple[Config, Policy]:
    cfg = Config(model_name_or_path=str(folder), bf16=False, max_prompt_length=64, **flags)
    model_config = grpo.load_tokenizer(cfg)[0]
    return cfg, grpo.load_policy(cfg, model_config, True, CPU, True)


def run_weights(policy: Policy) -> torch.Tensor:
    return torch.cat([grpo.whole(p.detach()).flatten() for p in policy.parameters()]).clone()


def run_groups() -> list[list[Sample]]:
    """Three groups of four with a signal, and one without."""
    rng = random.Random(0)
    groups = []
    for index, (prompt, lengths, rewards) in enumerate([
            (5, [3, 1, 7, 2], [1, 0, 0, 0]), (9, [2, 6, 4, 4], [1, 1, 0, 0]),
            (3, [8, 1, 1, 5], [1, 1, 1, 1]), (7, [4, 2, 5, 3], [0, 0, 0.5, 1])]):
        prompt_ids = numpy.array(rng.choices(range(99), k=prompt))
        row = Row(index=index, prompt="", prompt_ids=prompt_ids, columns={})
        groups.append([
            Sample(row=row, ids=rng.choices(range(99), k=n), mask=[True] * n, text="", reward=reward,
                   engine_logprobs=[-5.0] * n, truncated=False)
            for n, reward in zip(lengths, rewards, strict=True)])
    grpo.set_advantages(groups, Config())
    return groups


def begin(place: Path, folder: Path, steps: int = 0, **flags) -> SimpleNamespace:
    """A run of a tiny policy, as a Trainer has it, after some updates."""
    cfg, policy = run_policy(place / "tied", output_dir=str(folder), learning_rate=1e-2, **flags)
    optimizer = grpo.make_optimizer(policy, cfg)
    trainer = SimpleNamespace(cfg=cfg, policy=policy, optimizer=optimizer, run=grpo.Run(cfg),
                              state=State(), rows=run_groups()[0][0].row)
    trainer.rows = [trainer.rows]
    for _ in range(steps):
        go_on(trainer)
    return trainer


def go_on(trainer) -> dict:
    return grpo.update(run_groups(), trainer.cfg, trainer.policy, None, trainer.optimizer, State())


def save(trainer, step: int) -> None:
    trainer.state = State(step=step, beta=0.5)
    trainer.run.save_checkpoint(trainer)


def load_newest(trainer) -> State:
    return trainer.run.load_checkpoint(trainer.policy, trainer.optimizer, trainer.rows)


@pytest.mark.parametrize("flags", [{}, {"bf16_optimizer_states": True}])
def test_a_checkpoint_goes_on_bit_for_bit(flags, place, unlocked, tmp_path):
    before = begin(place, tmp_path / "run", steps=1, **flags)
    save(before, 1)
    go_on(before)
    after = begin(place, tmp_path / "run", **flags)
    assert load_newest(after) == State(step=1, beta=0.5)
    go_on(after)
    assert torch.equal(run_weights(after.policy), run_weights(before.policy))


def test_a_folder_that_another_machine_does_not_see_is_refused(place, unlocked, tmp_path, monkeypatch):
    gathered = grpo.gathered
    monkeypatch.setattr(grpo, "gathered", lambda value: [*gathered(value), None])
    with pytest.raises(UserError, match="is not the same folder on all machines"):
        grpo.Run(Config(output_dir=str(tmp_path / "run")))


def test_a_forward_pass_alone_leaves_all_that_a_checkpoint_needs(place, unlocked, tmp_path):
    trainer = begin(place, tmp_path / "run")
    tensors = grpo.training_tensors(trainer.policy, trainer.optimizer)
    with torch.no_grad():
        trainer.policy(grpo.pack(run_groups()[0], True, CPU))
    after = grpo.training_tensors(trainer.policy, trainer.optimizer)
    assert after.keys() == tensors.keys() and len(after) == 4 * len(list(trainer.policy.parameters()))
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())


def test_a_checkpoint_of_other_rows_is_refused(place, unlocked, tmp_path):
    trainer = begin(place, tmp_path / "run")
    save(trainer, 1)
    trainer.rows = [replace(trainer.rows[0], prompt_ids=numpy.array([7]))]
    with pytest.raises(UserError, match="rows of --dataset are not those"):
        load_newest(trainer)


def test_a_new_run_starts_from_the_state_that_adamw_would_make(place, unlocked):
    """The optimizer's state is made ahead of its first step, which makes it otherwise."""
    ends = []
    for ahead in (True, False):
        cfg, policy = run_policy(place / "tied", adam_beta2=0.9, weight_decay=0.1)
        optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.9), weight_decay=0.1, fused=True)
        if ahead:
            optimizer = grpo.make_optimizer(policy, cfg)
        grpo.update(run_groups(), cfg, policy, None, optimizer, State())
        ends.append(run_weights(policy))
    assert torch.equal(*ends)


@pytest.mark.parametrize("beta2, weight_decay", [(0.95, 0.0), (0.5, 0.1)])
def test_moments_of_bfloat16_make_the_updates_that_a_slow_adamw_makes(beta2, weight_decay, place):
    """By arXiv 1711.05101, algorithm 2, a weight at a time; what it keeps is rounded to bfloat16."""
    cfg, policy = run_policy(place / "tied", adam_beta2=beta2, weight_decay=weight_decay,
                             bf16_optimizer_states=True)
    optimizer = grpo.make_optimizer(policy, cfg)
    optimizer.param_groups[0]["lr"] = 0.01
    p = policy.lm.model.norm.weight
    w, mean, square = grpo.whole(p.detach()).double().tolist(), [0.0] * len(p), [0.0] * len(p)
    rng = random.Random(0)
    for step in range(1, 6):
        grads = [rng.gauss(0, 10.0**rng.randint(-6, 2)) for _ in w]
        p.grad = torch.distributed.tensor.distribute_tensor(torch.tensor(grads), p.device_mesh, p.placements)
        optimizer.step()
        for i, g in enumerate(grads):
            m = 0.9 * mean[i] + (1 - 0.9) * g
            v = beta2 * square[i] + (1 - beta2) * g * g
            w[i] -= 0.01 * (m / (1 - 0.9**step) / (math.sqrt(v / (1 - beta2**step)) + 1e-8) + weight_decay * w[i])
            mean[i], square[i] = torch.tensor([m, v], dtype=torch.bfloat16).tolist()
    torch.testing.assert_close(grpo.whole(p.detach()), torch.tensor(w), rtol=0, atol=1e-5)
    others = {q: q.detach().clone() for q in policy.parameters() if q is not p}    # which had no gradient
    optimizer.step()
    assert all(torch.equal(q, before) for q, before in others.items())
    assert {value.dtype for name, value in optimizer.state[p].items() if name != "step"} == {torch.bfloat16}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1] ^= 1
    file.write_bytes(data)


DAMAGE = {"flipped": flip_a_bit, "gone": Path.unlink, "emptied": lambda file: file.write_bytes(b""),
          "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1])}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "complete.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(place, unlocked, tmp_path, capsys, damage, file):
    trainer = begin(place, tmp_path / "run", steps=1)
    for step in (9, 10):
        save(trainer, step)
    folder = trainer.run.folder
    (folder / "checkpoint-11.unfinished").mkdir()
    before = run_weights(trainer.policy)
    DAMAGE[damage](folder / "checkpoint-10" / file)
    go_on(trainer)
    assert load_newest(trainer).step == 9 and torch.equal(run_weights(trainer.policy), before)
    assert f"{folder}/checkpoint-10 is damaged" in capsys.readouterr().out
    assert trainer.run.checkpoints() == [folder / "checkpoint-9"]    # the other isn't one to keep
    save(trainer, 10)
    (folder / "checkpoint-10" / "complete.json").write_text("null")    # once more, in another way
    assert load_newest(trainer).step == 9


def test_checkpoints_are_few_and_whole(place, unlocked, tmp_path, capsys):
    trainer = begin(place, tmp_path / "run", save_total_limit=2)
    run = trainer.run
    for step in (1, 2, 3, 10):
        save(trainer, step)
    kept = [run.folder / "checkpoint-10", run.folder / "checkpoint-3"]
    assert run.checkpoints() == kept
    run.write("metrics.jsonl", [{"step": 0}])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))    # as a full disk: larger files fail
    try:
        save(trainer, 11)
        for step in (1, 2):
            run.write("metrics.jsonl", [{"step": step, "x": "y" * 2**17}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    out = capsys.readouterr().out
    assert "checkpoint-11 can't be written" in out
    assert out.count("metrics.jsonl can't be written") == 1
    assert all(out.split("\n")[:-1])    # no empty lines
    assert lines(run.folder / "metrics.jsonl") == [{"step": 0}]    # nor half a line in the file
    assert sorted(run.folder.glob("checkpoint*")) == sorted(kept)
    assert load_newest(trainer).step == 10


def test_checkpoints_of_the_model_only_are_models_to_load(place, unlocked, tmp_path, capsys):
    trainer = begin(place, tmp_path / "run", steps=1, save_only_model=True, save_total_limit=2)
    trainer.tokenizer = grpo.load_tokenizer(trainer.cfg)[1]
    trainer.engine = SimpleNamespace(dtype=torch.float32)
    for step in (1, 2, 3):
        save(trainer, step)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, hard))
    try:
        save(trainer, 4)
        with pytest.raises(UserError, match="model can't be written; with --save-only-model .* be saved: "):
            grpo.save_result(trainer.cfg, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "checkpoint-4 can't be written: the model can't be saved: " in capsys.readouterr().out
    folder = trainer.run.folder
    assert trainer.run.checkpoints() == [folder / "checkpoint-3", folder / "checkpoint-2"]
    assert not list(folder.glob("checkpoint*.unfinished"))
    saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-3")
    for (ours, p), (theirs, q) in zip(trainer.policy.lm.named_parameters(), saved.named_parameters(), strict=True):
        assert ours == theirs and torch.equal(grpo.whole(p.detach()), q.detach())


def test_a_run_that_saves_only_models_is_not_begun_anew_over_itself(start, place):
    job = start("models", "--save-only-model --save-steps 1 --max-steps 3", ranks=1, hold="sampling:2")
    [pid] = job.ranks_held(1)
    os.kill(pid, signal.SIGTERM)
    assert job.end() == [143]
    assert "stopped after step 1: with --save-only-model there is no way to go on" in job.said
    again = start("models", "--save-only-model --save-steps 1 --max-steps 3", ranks=1)
    assert again.end() == [2] and "holds a run of this kind: with --save-only-model" in again.stderr.read_text()
    assert (place / "models" / "checkpoint-1" / "model.safetensors").exists()
    assert [m["step"] for m in lines(place / "models" / "metrics.jsonl")] == [0, 1]


def test_a_folder_deleted_during_a_checkpoint_costs_a_warning(place, unlocked, tmp_path, capsys, monkeypatch):
    trainer = begin(place, tmp_path / "run")
    monkeypatch.setattr(grpo, "digests", lambda *_: shutil.rmtree(trainer.run.folder) or {})
    save(trainer, 1)
    monkeypatch.undo()
    trainer.run.write("metrics.jsonl", [{"step": 1}])
    out = capsys.readouterr().out
    assert "checkpoint-1 can't be written" in out and "metrics.jsonl can't be written" in out
    save(trainer, 2)    # it makes the folder again
    assert load_newest(trainer).step == 2


def test_a_checkpoint_of_another_model_is_refused(place, unlocked, tmp_path):
    trainer = begin(place, tmp_path / "run")
    save(trainer, 1)
    _, trainer.policy = run_policy(place / "untied")    # a wider key and value, and a head of its own
    trainer.optimizer = grpo.make_optimizer(trainer.policy, trainer.cfg)
    with pytest.raises(UserError, match="checkpoint-1 doesn't fit the model"):
        load_newest(trainer)


@pytest.fixture
def a_run(unlocked, tmp_path) -> Config:
    """The flags of a run that has begun."""
    cfg = Config(output_dir=str(tmp_path / "run"), reward=("correct", "format:0.5"))
    grpo.Run(cfg)
    (tmp_path / "run" / "checkpoint-7").mkdir()
    return cfg


def test_only_numbered_folders_are_checkpoints(a_run, tmp_path):
    for name in ("checkpoint-7-copy", "checkpoint-old1", "checkpoint-8.unfinished"):
        (tmp_path / "run" / name).mkdir()
    assert grpo.Run(a_run).checkpoints() == [tmp_path / "run" / "checkpoint-7"]


@pytest.mark.parametrize("flags, words", [
    ({"learning_rate": 1.0}, "--learning-rate 3e-05, not 1.0"), ({"reward": ("format",)}, "--reward")])
def test_a_run_of_other_flags_is_refused(a_run, flags, words):
    with pytest.raises(UserError, match=f"holds a run with {words}"):
        grpo.Run(replace(a_run, **flags))


def test_a_run_goes_on_with_other_flags_of_memory(a_run):
    """Which running out of memory advises."""
    grpo.Run(replace(a_run, tokens_per_micro_batch=64, gradient_checkpointing=True))


def test_a_start_that_failed_does_not_fix_the_flags(unlocked, tmp_path):
    cfg = Config(output_dir=str(tmp_path / "run"))
    grpo.Run(cfg)
    grpo.Run(replace(cfg, learning_rate=1.0))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["learning_rate"] == 1.0


@pytest.mark.parametrize("text, words", [
    ("{", "can't be used"), ("5", "can't be used"), ("[]", "something else"),
    ('{"hidden_size": 64}', "something else")])    # a model's, say
def test_a_config_of_something_else_is_refused_and_kept(a_run, tmp_path, text, words):
    config = tmp_path / "run" / "config.json"
    config.write_text(text)
    with pytest.raises(UserError, match=words):
        grpo.Run(a_run)
    assert config.read_text() == text


def test_a_folder_of_a_model_and_a_file_are_refused(unlocked, tmp_path):
    (tmp_path / "other" / "model").mkdir(parents=True)
    with pytest.raises(UserError, match="something else"):
        grpo.Run(Config(output_dir=str(tmp_path / "other")))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't be used"):
        grpo.Run(Config(output_dir=str(tmp_path / "file")))


def test_what_was_written_after_the_state_is_dropped_and_nothing_of_the_users(unlocked, tmp_path):
    run = grpo.Run(Config(output_dir=str(tmp_path)))
    for step in range(3):
        run.write("metrics.jsonl", [{"step": step}])
    state = State(file_sizes=run.file_sizes())    # no sample is written by then
    run.write("metrics.jsonl", [{"step": 3}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "x')    # a run killed while it wrote
    run.write("samples.jsonl", [{"step": 3}])
    (tmp_path / "mine.jsonl").write_text('{"question": "a"}\n')
    run.rewind(state)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert lines(tmp_path / "samples.jsonl") == []
    assert (tmp_path / "mine.jsonl").read_text() == '{"question": "a"}\n'


def test_completions_are_written_every_so_many_steps_and_those_of_evaluations_always(unlocked, tmp_path):
    run = grpo.Run(Config(output_dir=str(tmp_path), log_completions_steps=3))
    for step in range(1, 8):
        run.write_samples([reward_group()], step, "train")
        run.write_samples([reward_group(["e"])], step, "eval")
    written = [(s["step"], s["completion"]) for s in lines(tmp_path / "samples.jsonl")]
    assert [step for step, text in written if text == "e"] == [1, 2, 3, 4, 5, 6, 7]
    assert [each for each in written if each[1] != "e"] == [
        (3, "a"), (3, "bb"), (3, "ccc"), (6, "a"), (6, "bb"), (6, "ccc")]


# --- the report and loggers

def metrics_at(step: int, value: float = 0.0, **more) -> dict:
    return {"step": step, "reward/mean": value, "time/elapsed": 60.0 * step, **more}


def sample_at(step: int, split: str, completion: str, reward, advantage=0.0, prompt="1 + 1?") -> dict:
    return {"step": step, "split": split, "prompt": prompt, "completion": completion, "reward": reward,
            "rewards": {}, "advantage": advantage}


def page_of(folder: Path, metrics: list[dict], samples: list[dict]) -> str:
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "samples.jsonl", samples)
    return grpo.report_page(folder, 8)


def figures(page: str) -> dict[str, str]:
    """Of each chart its HTML, by its title."""
    return dict(re.findall("<figure><figcaption>(.*?)<(.*?)</figure>", page, re.DOTALL))


def tables(page: str) -> dict[str, list[list[str]]]:
    """Of each table its rows' texts, by its title."""
    found = re.findall("<h2>(.*?)</h2>(.*?)</table>", page, re.DOTALL)
    return {title: [re.findall("<div>(.*?)</div>", row, re.DOTALL) for row in body.split("<tr>")[2:]]
            for title, body in found}


def test_a_report_draws_each_curve_to_scale(tmp_path):
    page = page_of(tmp_path, [
        metrics_at(0, None, **{"eval/accuracy": 0.25}), metrics_at(1, 0.5, **{"reward/std": 9.0}),
        metrics_at(2, -0.5), metrics_at(4, 1.5, **{"eval/accuracy": 0.75, "eval/kl": 0.1, "policy/kl": None})], [])
    assert "Step 4 of 8, 4.0 minutes" in page and tables(page) == {}
    charts = figures(page)
    assert [*charts] == ["Reward", "Held-out accuracy", "KL to the model as it started, nats"]
    # Of 4 steps 300 wide, and 2 from the lowest to the highest 100 high: y is counted down.
    assert 'points="75.0,50.0 75.0,50.0 150.0,100.0 300.0,0.0"' in charts["Reward"]
    assert "reward/mean: 0.5 → 1.5" in charts["Reward"] and "reward/std" not in page
    assert 'points="0.0,66.7 0.0,66.7 300.0,0.0"' in charts["Held-out accuracy"]    # from 0
    assert 'points="300.0,0.0 300.0,0.0"' in charts["KL to the model as it started, nats"]    # a dot


def test_a_report_has_a_chart_for_what_a_run_logs(tmp_path):
    names = """reward/correct reward/parsable eval/reward eval/accuracy eval/sums/accuracy eval/sums/pass@8
        completion/distinct completion/truncated eval/repetition reward/zero_std_groups policy/entropy
        completion/length_mean eval/length_mean policy/kl eval/kl policy/engine_gap_mean time/step time/sampling
        time/training time/reload""".split()
    charts = figures(page_of(tmp_path, [metrics_at(1, **dict.fromkeys(names, 1.0))], []))
    assert [*charts] == [*grpo.CHARTS]
    assert sorted(re.findall(r">([^\s>]+): 1 → 1<", "".join(charts.values()))) == sorted(names)


def test_a_warning_is_drawn_at_the_steps_in_which_it_begins(tmp_path):
    held = [{}, {"<KL>": "raise it"}, {"<KL>": "again"}, {}, {"<KL>": "again", "cut": "b"}]
    page = page_of(tmp_path, [metrics_at(i, 0.0, warnings=found) for i, found in enumerate(held)], [])
    assert tables(page) == {"Warnings, dashed above": [["&lt;KL&gt;", "raise it", "[1, 4]"], ["cut", "b", "[4]"]]}
    marks = re.findall(r'translate\((.*?)\)" y2="100">\s*<title>(.*?)</title>', figures(page)["Reward"])
    assert marks == [("75.0", "&lt;KL&gt;"), ("300.0", "&lt;KL&gt;"), ("300.0", "cut")]


def test_a_report_shows_completions_to_read(tmp_path):
    chat = [{"role": "user", "content": "<1>"}, {"role": "tool", "content": None}]
    page = page_of(tmp_path, [metrics_at(4)], [
        *(sample_at(0, "eval", f"old {i}", reward) for i, reward in enumerate([0.0, 1.0, None])),
        *(sample_at(3, "train", "of step 3", 9.0, 9.0) for _ in range(9)),
        *(sample_at(4, "eval", f"new {i}", reward) for i, reward in enumerate([1 / 3, 0.0, 2.0])),
        sample_at(4, "pass@k", "sampled", 9.0),
        sample_at(4, "train", "right", 1.0, 1.0, chat), sample_at(4, "train", "lone", 0.5, -3.0),
        sample_at(4, "train", "x" * 4001, 0.0, 0.0), sample_at(4, "train", "<wrong>", -1.0, -0.5),
        sample_at(4, "train", "unasked", None)])
    gains, best, worst, surprising = tables(page).values()
    assert gains == [["1 + 1?", "old 2", "None", "new 2", "2"], ["1 + 1?", "old 0", "0", "new 0", "0.333"],
                     ["1 + 1?", "old 1", "1", "new 1", "0"]]
    assert [row[1] for row in best[:2]] == ["right", "lone"] and best[0][0] == "user: &lt;1&gt;\ntool: None"
    assert worst[0] == ["1 + 1?", "&lt;wrong&gt;", "-1", "-0.5"]
    assert [row[1] for row in surprising] == ["lone", "right", "&lt;wrong&gt;"]
    assert f"<div>{'x' * 4000} [and 1 characters]</div>" in page
    assert not re.search("https?:", page)    # it needs nothing else


def test_a_report_of_a_long_run_is_small_and_reads_the_ends_of_its_samples(tmp_path):
    names = ["policy/entropy", "policy/kl", "eval/kl", "time/step", "completion/length_mean", "completion/distinct"]
    parts = {f"reward/part{i}": 0.25 for i in range(9)}
    rows = [metrics_at(i, i % 20 / 19, **dict.fromkeys(names, i / 7), **parts) for i in range(1, 10_001)]
    for row in rows[::2]:
        row["warnings"] = {f"warning {i}": "advice" for i in range(17)}
    train = [sample_at(i // 8, "train", "word " * 2000, 1.0) for i in range(9_000)]    # 90 MB
    page = page_of(tmp_path, rows, [sample_at(0, "eval", "old", 0.0), *train, sample_at(10_000, "eval", "new", 1.0)])
    assert 100_000 < len(page.encode()) < 2 * 10**6
    [line] = re.findall('points="(.*?)"', figures(page)["Entropy, nats"])
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == 501 and points[0] == points[1] == (0.3, 99.9)    # of steps 1 to 20, at 10.5 of 10,000
    means = re.findall('--c0.*?points="(.*?)"', figures(page)["Reward"].partition("<svg")[2])[0].split()
    assert len(means) == 501 and {point.split(",")[1] for point in means} == {"50.0"}    # of 20 steps, from 0 to 1
    assert [row[1::2] for row in tables(page)["Held-out problems that gained most and least"]] == [["old", "new"]]
    assert len(tables(page)["Worst"]) == 3


def test_a_report_is_written_beside_and_its_fault_costs_a_warning(unlocked, tmp_path, capsys):
    run = grpo.Run(Config(output_dir=str(tmp_path)))
    run.log(metrics_at(0, math.nan), {})
    state = State(file_sizes=run.file_sizes())
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "x')    # a run killed while it wrote
    run = grpo.Run(Config(output_dir=str(tmp_path)))
    for _ in range(2):
        run.write_report()
    out = capsys.readouterr().out
    assert out.count("report.html can't be written: JSONDecodeError") == 1 and out.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
    run.rewind(state)    # which comes first in a run
    run.write_samples([reward_group(["half a pair \ud800"])], 0, "eval")
    run.log(metrics_at(1, 0.5, **{"time/left": 0.0, "time/step": 1.0, "time/tokens_per_second": 1.0,
                                  "completion/length_mean": 1.0}), {"cut": "advice"})
    run.write_report()
    page = (tmp_path / "report.html").read_text()
    assert "Step 1 of 70" in page and "half a pair ?" in page and "<title>cut</title>" in page
    assert lines(tmp_path / "metrics.jsonl")[1]["warnings"] == {"cut": "advice"}
    assert "can't" not in capsys.readouterr().out and not list(tmp_path.glob("*.new"))


LOGGER = """
calls = []
def init(**options):
    calls.append(("init", options))
def log(metrics, step):
    calls.append(("log", metrics, step))
    if step > 1:
        raise OSError
def finish():
    calls.append(("finish",))
"""
TENSORBOARD = """
import pathlib
calls = []
class SummaryWriter:
    def __init__(self, folder):
        calls.append(("init", folder))
    def add_scalar(self, *call):
        calls.append(call)
    def flush(self):
        calls.append(("flush",))
    def close(self):
        calls.append(("close",))
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for the loggers' packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for name, text in (("wandb", LOGGER), ("trackio", LOGGER)):
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    exec(TENSORBOARD, vars(tensorboard))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    yield
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def logged_run(folder: Path, *names) -> grpo.Run:
    run = grpo.Run(Config(output_dir=str(folder), report_to=names))
    run.start_loggers()
    return run


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_is_reported_and_goes_on_as_the_same_run(name, packages, ends, unlocked, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run: one"
    first = logged_run(folder, name)
    (folder / "metrics.jsonl").touch()    # it has begun
    again = logged_run(folder, name)
    other = logged_run(tmp_path / "other" / "run: one", name)
    calls = sys.modules[name].calls
    options = [options for _, options in calls]
    assert options[0] == options[1] and options[0]["resume"] == "allow" and options[0]["project"] == "grpo"
    assert re.fullmatch(r"run--one-\d+", options[0]["name"]) and options[0]["config"]["seed"] == 0
    if name == "wandb":
        assert options[0]["id"] == options[0]["name"] and options[0]["dir"] == folder
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    logged_run(folder, name)
    assert calls.pop()[1]["project"] == "mine"
    calls.clear()
    again.log({"step": 0, "reward/mean": math.nan, "eval/reward": 0.5}, {"a": "warning"})
    assert calls == [("log", {"step": 0, "eval/reward": 0.5}, 0)]    # what was measured
    said = {"time/left": 0.0, "time/step": 1.0, "time/tokens_per_second": 1.0, "completion/length_mean": 1.0}
    for step in (2, 3):
        again.log(metrics_at(step, **said), {})
    assert capsys.readouterr().out.count(f"{name} can't be written: OSError()") == 1
    assert [m["step"] for m in lines(folder / "metrics.jsonl")] == [0, 2, 3]
    calls.clear()
    grpo.close()
    assert calls == [("finish",)] * 4    # of each start


def test_tensorboard_gets_each_metric_and_is_closed(packages, ends, unlocked, tmp_path):
    run = logged_run(tmp_path / "run", "tensorboard")
    run.log({"step": 0, "eval/reward": 0.5, "policy/kl": None}, {})
    calls = sys.modules["torch.utils.tensorboard"].calls
    assert calls == [("init", tmp_path / "run" / "tensorboard"), ("step", 0, 0), ("eval/reward", 0.5, 0), ("flush",)]
    grpo.close()
    assert calls[-1] == ("close",)


@pytest.mark.parametrize("name, module", [("wandb", "wandb"), ("trackio", "trackio"),
                                          ("tensorboard", "torch.utils.tensorboard")])
def test_a_logger_that_is_not_installed_is_one_line(name, module, unlocked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)    # as if it were not there
    with pytest.raises(UserError, match=rf"^--report-to {name} can't start: pip install {name}: .*{module}[^\n]*$"):
        logged_run(tmp_path / "run", name)


def test_a_logger_that_does_not_start_is_one_line(packages, unlocked, tmp_path, monkeypatch):
    def refuse(**_):
        raise ValueError("no key\nlog in first")
    monkeypatch.setattr(importlib.import_module("wandb"), "init", refuse)
    with pytest.raises(UserError, match="^--report-to wandb can't start: no key$"):
        logged_run(tmp_path / "run", "wandb")


def test_only_the_rank_that_writes_reports(packages, unlocked, tmp_path):
    run = grpo.Run(Config(output_dir=str(tmp_path / "run"), report_to=("wandb",)))
    run.is_writer = False
    run.start_loggers()
    run.write_report()
    assert "wandb" not in sys.modules and not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(place, unlocked, tmp_path, value):
    trainer = begin(place, tmp_path / "run")
    before = run_weights(trainer.policy)
    groups = run_groups()
    groups[1][0].advantage = value
    metrics = grpo.update(groups, trainer.cfg, trainer.policy, None, trainer.optimizer, State())
    counts = [metrics[f"policy/{name}"] for name in ("updates", "nonfinite_updates", "skipped_updates")]
    assert counts == [0, 1, 1] and torch.equal(run_weights(trainer.policy), before)
    assert go_on(trainer)["policy/updates"] == 1


# --- whole runs, with vLLM

RUN_A = """--model-name-or-path {0}/tied --dataset {0}/train.jsonl --eval-dataset {0}/held_out.jsonl
    --eval-size 5 --reward {0}/rewards.py:low --no-bf16 --device cpu --prompts-per-step 8
    --num-generations 4 --max-prompt-length 64 --max-completion-length 12 --max-steps 5 --eval-steps 2
    --learning-rate 1e-2 --lr-scheduler-type constant --warmup-steps 0 --beta 0.01 --num-iterations 2
    --num-minibatches 2 --tokens-per-micro-batch 100 --ref-cpu-offload --use-bias-correction-kl
    --save-steps 2 --save-total-limit 1"""
RUN_B = """--model-name-or-path {0}/untied --reward {0}/rewards.py:low --seed 7 --data-seed 3
    --dataset arithmetic --arithmetic-operators +- --arithmetic-min 0 --arithmetic-max 9 --eval-size 4
    --bf16 --prompts-per-step 4 --num-generations 4 --max-completion-length 8 --max-steps 2
    --loss-type dapo --temperature 0.8 --scale-rewards none --mask-truncated-completions
    --no-skip-zero-std-groups --gradient-checkpointing --delta 2 --epsilon 0.1 --epsilon-high 0.3
    --vllm-importance-sampling-clip-max 3 --vllm-gpu-memory-utilization 0.1 --vllm-max-model-length 90
    --vllm-enforce-eager True --weight-decay 0.1 --adam-beta2 0.99 --max-grad-norm 0.5
    --system-prompt Add. --prompt-template Now,{{prompt}} --recipe dapo --dynamic-sampling-rounds 2
    --soft-overlong-share 0.5 --eval-num-generations 2 --advantage-baseline leave_one_out
    --entropy-coef 0.01 --vllm-importance-sampling-mode token_mask --stop e t a --lora-rank 4 --lora-alpha 8
    --lora-target-modules q_proj down_proj"""
METRICS = {
    "reward": "mean std group_std zero_std_groups advantage_std failures parsable",
    "completion": "length_mean length_max truncated distinct",
    "policy": "loss kl ratio_max clip_low clip_high entropy engine_gap_mean engine_gap_max grad_norm "
              "learning_rate",
    "time": "sampling training reload step elapsed tokens_per_second peak_memory_gib"}


def run(place: Path, flags: str, out: str, *more, ranks: int) -> Path:
    """A run by torchrun, to its end."""
    command = [*TORCHRUN, str(ranks), SOURCE, *flags.format(place).split(), "--output-dir", place / out]
    done = subprocess.run([sys.executable, *map(str, [*command, *more])], env=ENV, timeout=PATIENCE,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"the model is in {place / out}" in done.stdout
    return place / out


@pytest.fixture(scope="module")
def run_a(place) -> Path:
    return run(place, RUN_A, "a", ranks=2)


@needs_cpu_engine
def test_every_step_is_measured(run_a):
    first, *steps = lines(run_a / "metrics.jsonl")
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5] and first["step"] == 0
    for m in steps:
        for kind, names in METRICS.items():
            assert all(math.isfinite(m[f"{kind}/{name}"]) for name in names.split())
        assert ("eval/accuracy" in m) == (m["step"] in (2, 4, 5))
        assert m["policy/updates"] == 4 and m["policy/grad_norm"] > 0
    assert json.loads((run_a / "config.json").read_text())["num_iterations"] == 2


@needs_cpu_engine
def test_the_engine_follows_large_updates(run_a):
    for m in lines(run_a / "metrics.jsonl")[1:]:
        assert m["policy/engine_gap_mean"] <= 1e-4 and m["policy/engine_gap_max"] <= 1e-2
    assert m["policy/kl"] > 0.1    # else the updates were not large


@needs_cpu_engine
def test_the_reward_rises(run_a):
    first, *steps = lines(run_a / "metrics.jsonl")
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.15
    assert steps[-1]["eval/reward"] > first["eval/reward"]


@needs_cpu_engine
def test_samples_are_what_the_metrics_say(run_a):
    for m in lines(run_a / "metrics.jsonl"):
        assert len(samples_of(run_a, m["step"], "eval")) == (5 if "eval/reward" in m else 0)
        train = samples_of(run_a, m["step"], "train")
        if m["step"] == 0:
            assert train == []
            continue
        r = torch.tensor([s["reward"] for s in train], dtype=torch.float64).view(8, 4)
        assert m["reward/mean"] == pytest.approx(r.mean().item())
        want = (r - r.mean(1, keepdim=True)) / (r.std(1, correction=0, keepdim=True) + 1e-6)
        assert [s["advantage"] for s in train] == pytest.approx(want.flatten().tolist(), abs=1e-6)


@needs_cpu_engine
def test_the_same_prompt_gets_different_completions(run_a):
    texts = [s["completion"] for s in samples_of(run_a, 1, "train")]
    assert texts[:16] != texts[16:]    # the first half came from rank 0
    assert len(set(texts)) > 24    # a few are empty


@needs_cpu_engine
def test_a_run_comes_out_the_same_again(run_a, place):
    again = run(place, RUN_A, "again", "--max-steps", 2, ranks=2)
    assert untimed(again) == untimed(run_a)[:3]
    samples = lines(again / "samples.jsonl")
    assert samples == lines(run_a / "samples.jsonl")[:len(samples)] and len(samples) == 5 + 32 + 32 + 5


@needs_cpu_engine
@pytest.mark.faults
def test_two_ranks_share_an_engine(run_a, place):
    """One engine over both, of half the heads and rows of weights on each, agrees with the trainer."""
    out = run(place, RUN_A, "shared", "--max-steps", 2, "--vllm-tensor-parallel-size", 2, ranks=2)
    _, *steps = lines(out / "metrics.jsonl")
    for m in steps:    # the second by the weights that the first has moved
        assert m["policy/engine_gap_max"] < 1e-3 and m["policy/updates"] == 4 and m["policy/grad_norm"] > 0
    for step in (1, 2):
        samples = samples_of(out, step, "train")
        prompts = [s["prompt"] for s in samples]
        assert prompts == [s["prompt"] for s in samples_of(run_a, step, "train")] and len(prompts) == 32
        assert len({s["completion"] for s in samples}) > 24
    assert samples_of(out, 0, "eval") == samples_of(run_a, 0, "eval")    # greedy, of the same weights


@needs_cpu_engine
def test_a_bf16_untied_run_with_many_other_flags(place):
    out = run(place, RUN_B, "b", ranks=1)
    first, *steps = lines(out / "metrics.jsonl")
    for m in steps:
        assert m["policy/engine_gap_mean"] < 0.1 and "policy/kl" not in m and m["policy/updates"] == 1
        assert m["rollout/rounds"] in (1, 2)
    for step, m in ((0, first), (2, steps[-1])):
        assert {"eval/accuracy", "eval/pass@1", "eval/pass@2"} <= set(m)
        assert len(samples_of(out, step, "eval")) == 4
        sampled = samples_of(out, step, "pass@k")
        assert [s["prompt"] for s in sampled[::2]] == [s["prompt"] for s in sampled[1::2]]
        right = [s["rewards"]["correct"] for s in sampled]
        assert len(right) == 8 and m["eval/pass@1"] == sum(right) / 8
    model = load_file(out / "model" / "model.safetensors")
    has_bf16 = json.loads((out / "config.json").read_text())["bf16"]
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    assert has_bf16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert "lm_head.weight" in model and {w.dtype for w in model.values()} == {dtype}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bfloat16_is_used_only_where_there_are_instructions_for_it(device, monkeypatch, capsys):
    def with_instructions(yes):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: yes)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: yes)
        return [grpo.in_a_dtype_of(torch.device(device), Config(bf16=asked)).bf16 for asked in (True, False)]
    assert with_instructions(True) == [True, False] and capsys.readouterr().out == ""
    assert with_instructions(False) == [False, False]
    assert f"note: this {device} has no instructions for bfloat16: --no-bf16 is set\n" == capsys.readouterr().out


# --- the engine by itself

@pytest.fixture(scope="module")
def in_engine(run_a, place) -> dict:
    return json.loads(call("engine_facts", run_a / "model", place).splitlines()[-1])


def engine_facts(model: str, place: str) -> None:
    """One engine that has read a saved model from its files, asked for all that is to be known."""
    import vllm
    from transformers import AutoModelForCausalLM, AutoTokenizer
    # As `vllm serve` does it. The trainer's own engine begins with random weights.
    engine_class = vllm.LLM
    vllm.LLM = lambda *args, **options: engine_class(*args, **options | {"load_format": "auto"})
    dist.init_process_group("gloo", init_method=f"file://{place}/engine", rank=0, world_size=1)
    cfg, trained = run_policy(Path(model), stop=("e", "t"), max_completion_length=8, num_generations=4)
    _, untrained = run_policy(Path(place) / "tied")
    model_config, tokenizer, stop_ids = grpo.load_tokenizer(cfg)
    engine = grpo.Engine(cfg, model_config, tokenizer, stop_ids, CPU)
    facts = {}

    messages = [[{"role": "user", "content": text}] for text in ("Say it.", "2 + 3?", "a long question")]
    greedy = vllm.SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    lm = AutoModelForCausalLM.from_pretrained(model)
    saved_tokenizer = AutoTokenizer.from_pretrained(model)
    facts["saved as"] = str(lm.dtype)
    facts["prompts agree"] = facts["choices agree"] = True
    facts["gap"] = 0.0
    for message, output in zip(messages, engine.llm.chat(messages, greedy, use_tqdm=False), strict=True):
        prompt = saved_tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        facts["prompts agree"] &= output.prompt_token_ids == prompt
        ids = list(output.outputs[0].token_ids)
        logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
        logprobs = logits.log_softmax(-1)
        facts["choices agree"] &= logprobs.argmax(-1).tolist() == ids
        theirs = [each[i].logprob for each, i in zip(output.outputs[0].logprobs, ids, strict=True)]
        gap = (logprobs.max(-1).values - torch.tensor(theirs)).abs().max().item()
        facts["gap"] = max(facts["gap"], gap)

    rows = [Row(index=0, prompt="", prompt_ids=numpy.array(prompt), columns={})]
    draws = [engine.sample(rows, 64, 1.0, seed, "sampling")[0] for seed in (3, 3, 4)]
    facts["draws"] = [[s.text for s in draw] for draw in draws]
    facts["truncated"] = [s.truncated for s in draws[0]]
    facts["ended"] = [s.ids[-1] in stop_ids for s in draws[0]]
    grpo.self_test(engine, trained, rows, cfg)
    try:
        grpo.self_test(engine, untrained, rows, cfg)
    except UserError as e:
        facts["found out"] = str(e)
    print(json.dumps(facts), flush=True)
    os._exit(0)


@needs_cpu_engine
def test_a_saved_model_loads_in_transformers_and_vllm(in_engine, run_a, place):
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "tied", run_a / "model"))
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() > 1e-3 for name in before)
    assert in_engine["prompts agree"] and in_engine["choices agree"] and in_engine["gap"] < 1e-3
    assert in_engine["saved as"] == "torch.float32"


@needs_cpu_engine
def test_an_engine_with_other_weights_is_found_out(in_engine):
    assert re.search(r"engine and trainer disagree .* by \d+\.\d+ nats .*\(limit 0.001\)", in_engine["found out"])


@pytest.mark.parametrize("level", [1, 2])
def test_weights_reach_a_sleeping_engine_before_its_cache(monkeypatch, level):
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *args, **options: calls.append((name, options)) or True

    monkeypatch.setattr(grpo, "start_vllm", lambda *args: Recorder())
    monkeypatch.setattr(grpo, "checkpoint_tensors", lambda *args: "the weights")
    engine = grpo.Engine(Config(vllm_sleep_level=level), None, None, [], torch.device("cuda"))
    engine.sleep()
    engine.load(policy=None)
    assert calls == [("sleep", {"level": level}), ("wake_up", {"tags": ["weights"]}),
                     ("collective_rpc", {"kwargs": {"weights_iterator": "the weights"}}),
                     ("wake_up", {"tags": ["kv_cache"]}), ("reset_prefix_cache", {})]


@needs_cpu_engine
def test_the_seed_decides_what_is_sampled(in_engine):
    same, again, other = in_engine["draws"]
    assert same == again != other


@needs_cpu_engine
def test_a_stop_text_stays_in_the_completion_and_counts_as_its_end(in_engine):
    texts = in_engine["draws"][0]
    stopped = [text[-1:] in ("e", "t") for text in texts]
    assert any(stopped) and not all(stopped)
    assert not any(letter in text[:-1] for text in texts for letter in "et")    # nothing comes after it
    ended = [a or b for a, b in zip(stopped, in_engine["ended"], strict=True)]
    assert in_engine["truncated"] == [not end for end in ended]


# --- runs without an engine: random letters for completions, on ranks that start fast

FAULTY = """--model-name-or-path {0}/tied --reward {0}/rewards.py:low --no-bf16 --device cpu
    --prompts-per-step 4 --num-generations 4 --max-prompt-length 64 --max-completion-length 8
    --max-steps 6 --eval-steps 2 --eval-size 4 --save-steps 2 --learning-rate 1e-2 --warmup-steps 0
    --tokens-per-micro-batch 60 --num-iterations 2 --reward-workers 1"""
ONE_STEP = "--max-steps 1 --eval-size 0"


class RandomLetters:
    """In the engine's place: completions that depend on seed and prompt, on any number of ranks."""
    dtype = torch.float32
    on_cpu = True
    sleeps = False
    sleeping_bytes = 0
    asleep = False

    def __init__(self, cfg, model_config, tokenizer, *args):
        self.tokenizer, self.limit = tokenizer, cfg.max_completion_length
        self.ranks = cfg.vllm_tensor_parallel_size

    def load(self, policy):
        assert self.asleep
        self.asleep = False

    def sleep(self):
        assert not self.asleep
        self.asleep = True

    def sample(self, rows, n, temperature, seed, phase):
        held(phase)
        groups = []
        for row in rows:
            draw = random.Random(f"{seed // (dist.get_world_size() // self.ranks)} {row.prompt_ids.tolist()}")
            groups.append([])
            for _ in range(n):
                longest = min(8, self.limit - row.read)
                ids = [draw.randrange(4, 99) for _ in range(draw.randint(1, longest))]
                groups[-1].append(Sample(
                    row=row, ids=numpy.array(ids, numpy.int32), mask=numpy.ones(len(ids), bool),
                    engine_logprobs=numpy.full(len(ids), -4, numpy.float32), truncated=False, text="".join(chr(28 + i) for i in ids)))
        return groups


def held(phase: str) -> None:
    """At the n-th time that HOLD=phase:n begins, says so and waits there for a signal; with
    HOLD=phase:n:on, goes on waiting after it."""
    where, number, *on = os.environ.get("HOLD", "").split(":") if os.environ.get("HOLD") else ("", 0)
    held.times[phase] = held.times.get(phase, 0) + 1
    if phase != where or held.times[phase] != int(number) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())    # it is written to even if the signal comes before recv
    say_whole(f"held {os.environ['RANK']} {os.getpid()}")
    reader.recv(1)    # or broken off by what the handler raises
    if on:
        grpo.STOPPING.heard_at = -math.inf    # the next signal is no repetition
        say_whole(f"heard {os.environ['RANK']}")
        reader.recv(1)


held.times = {}


def say_whole(line: str) -> None:
    """In one write, where print makes two, between which another rank's line may come."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


def without_engine(*flags) -> None:
    """The trainer as a fork may have it: another engine, and a logger that keeps its lines."""
    from torch.distributed import checkpoint

    def held_before(owner, name, phase):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args, **options):
            held(phase)
            return original(*args, **options)
        setattr(owner, name, replaced)
    held_before(grpo.RewardPool, "score", "scoring")
    held_before(grpo, "policy_loss", "training")
    held_before(checkpoint, "save", "saving")
    held_before(torch.optim.AdamW, "step", "stepping")
    grpo.Engine = RandomLetters
    grpo.self_test = lambda *_: None

    log = open(flags[flags.index("--output-dir") + 1] + f".log{os.environ['RANK']}", "w")
    grpo.at_end(log.close)    # os._exit would lose what is in its buffer
    to_file = grpo.Run.log

    def to_both(self, metrics, warnings):
        log.write(f"step {metrics['step']}\n")
        to_file(self, metrics, warnings)
    grpo.Run.log = to_both
    log.write("begun\n")
    sys.argv[1:] = flags
    grpo.main()


def serve(address: str) -> None:
    """Starts ranks faster than torchrun: each is a fork of this process, which has all imported."""
    grpo.quiet_libraries()
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa
    import tqdm
    import transformers
    import tyro
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    importlib.import_module("transformers.core_model_loading")
    grpo.end_with_parent()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            lead(connection)
        connection.close()


def lead(connection: socket.socket) -> None:
    """In torchrun's place: starts the ranks and says at last how they ended. Their stdout goes to the
    connection, which closes when the last process of the run has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    grpo.end_with_parent()
    request = json.loads(connection.makefile().readline())
    stderr = os.open(request["stderr"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(connection.fileno(), 1)
    os.dup2(stderr, 2)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = request["ranks"]
    os.environ |= request["env"] | {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    pids = [os.fork() or be_rank(rank, request) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(f"codes {codes}", flush=True)
    os._exit(0)


def be_rank(rank: int, request: dict) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    grpo.IS_FIRST_RANK = rank == 0
    grpo.ON_TERMINAL = False
    try:
        globals()[request["function"]](*request["arguments"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)
    grpo.close()
    os._exit(0)


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """Where to ask for ranks."""
    address = str(tmp_path_factory.mktemp("starter") / "socket")
    process = subprocess.Popen([sys.executable, *CALL, "serve", address], stdout=subprocess.PIPE,
                               text=True, env=ENV)
    assert process.stdout.readline() == "ready\n"
    yield address
    process.kill()
    process.communicate()


class Job:
    """Processes of a run, which can be disturbed. Their stdout comes through a socket."""

    def __init__(self, socket_of_stdout: socket.socket, stderr: Path):
        socket_of_stdout.settimeout(PATIENCE)
        self.stdout = socket_of_stdout.makefile()
        self.stderr = stderr
        self.said = ""
        self.agent = None    # torchrun

    def read_until(self, words: str, times: int) -> list[list[str]]:
        """The words after these, of so many lines."""
        found = []
        while len(found) < times:
            line = self.stdout.readline()
            assert line, f"ended before: {self.said}{self.stderr.read_text()}"
            self.said += line
            if line.startswith(words):
                found.append(line.removeprefix(words).split())
        return found

    def ranks_held(self, ranks: int = 2) -> list[int]:
        """Waits until all ranks are held. Their process ids."""
        pids = {int(rank): int(pid) for rank, pid in self.read_until("held ", ranks)}
        return [pids[rank] for rank in range(ranks)]

    def end(self) -> list[int]:
        """Waits until all of its processes have ended. The exit codes of ranks, or of torchrun."""
        self.said += self.stdout.read()
        if self.agent:
            return [self.agent.wait(PATIENCE)]
        return json.loads(self.said.splitlines()[-1].removeprefix("codes "))


@pytest.fixture
def start(place, starter):
    """Starts runs without an engine, or another function of this file on ranks."""
    def start(out, *flags, ranks=2, hold="", base=FAULTY, function="without_engine", env={}):
        arguments = [*base.format(place).split(), "--output-dir", str(place / out)]
        for flag in flags:
            arguments += flag.format(place).split()
        if function != "without_engine":
            arguments = [str(place)]
        stderr = place / f"{out}.err"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(starter)
        request = {"function": function, "arguments": arguments, "ranks": ranks, "stderr": str(stderr),
                   "env": {"HOLD": hold} | env}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Job(connection, stderr)
    return start


def by_torchrun(place, out, hold, *options, flags="", on=(), env={}) -> Job:
    """The same run, under torchrun with these options beside its own; `on` begins the command."""
    ours, theirs = socket.socketpair()
    command = [*on, sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",)),
               "--nproc-per-node", 1 if "--nnodes" in options else 2, "--no-python", sys.executable, *CALL, "without_engine", *FAULTY.format(place).split(), *flags.split(), "--output-dir", place / out]
    job = Job(ours, place / f"{out}{len(list(place.glob(f'{out}*.err')))}.err")
    with open(job.stderr, "w") as stderr:
        job.agent = subprocess.Popen(list(map(str, command)), stdout=theirs, stderr=stderr,
                                     env=ENV | {"HOLD": hold} | env)
    theirs.close()
    return job


def finish(job: Job) -> str:
    codes = job.end()
    assert not any(codes), job.stderr.read_text()
    return job.said


def story(folder: Path):
    """What a run leaves, but for times."""
    weights = load_file(folder / "model" / "model.safetensors")
    return untimed(folder), lines(folder / "samples.jsonl"), {name: w.tolist() for name, w in weights.items()}


@pytest.fixture(scope="module")
def undisturbed_folder(place) -> Path:
    return place / "undisturbed"


@pytest.fixture
def undisturbed(start, undisturbed_folder):
    """What a run leaves that nobody disturbs."""
    if not (undisturbed_folder / "model").exists():
        finish(start("undisturbed"))
    return story(undisturbed_folder)


def test_a_finished_run_leaves_what_it_should(undisturbed, undisturbed_folder, start):
    metrics, samples, _ = undisturbed
    assert [m["step"] for m in metrics] == list(range(7))
    assert len(samples) == 6 * 16 + 4 * 4
    left = sorted(file.name for file in undisturbed_folder.iterdir() if file.name != ".lock")
    assert left == ["checkpoint-4", "checkpoint-6", "config.json", "metrics.jsonl", "model", "report.html",
                    "samples.jsonl", "start.json"]
    assert "step 6</text>" in (undisturbed_folder / "report.html").read_text()
    assert "undisturbed holds this run, complete" in finish(start("undisturbed"))
    assert story(undisturbed_folder) == undisturbed


@pytest.mark.faults
def test_another_seed_is_another_run(undisturbed, start, place):
    finish(start("other_seed", "--seed 1 --max-steps 1"))
    here, there = (samples_of(place / out, 1, "train") for out in ("undisturbed", "other_seed"))
    assert {s["prompt"] for s in here} != {s["prompt"] for s in there}
    assert samples_of(place / "undisturbed", 0, "eval")[0]["prompt"] == (
        samples_of(place / "other_seed", 0, "eval")[0]["prompt"])


# Where each start is held and told to stop, and the step after which it stops. Each training step is
# of 4 passes, two before the weights move.
# Where a run is stopped, one time after another, and the step it is stopped after.
SOME_STOPS = [("sampling:2", 1), ("stepping:4", 3)]    # the second once the weights have moved: it is done first
ALL_STOPS = [("evaluation:1", 0),    # nothing is done yet
             ("sampling:2", 1),
             ("training:2", 1),      # before the weights move: the step is undone
             ("scoring:3", 2),       # after a step's and an evaluation's
             ("saving:1", 4),
             ("stepping:2", 5),      # after: it is done first
             ("evaluation:1", 6)]    # of the last step


@pytest.mark.parametrize("stops", [SOME_STOPS, pytest.param(ALL_STOPS, marks=pytest.mark.faults)], ids=["some", "all"])
def test_a_stopped_run_goes_on_exactly(stops, undisturbed, start, place):
    done, out = 0, f"stopped{len(stops)}"
    for hold, step in stops:
        job = start(out, hold=hold)
        for rank in job.ranks_held():
            os.kill(rank, signal.SIGTERM)
        assert job.end() == [143, 143], job.stderr.read_text()
        assert job.stderr.read_text() == ""
        assert f"\nstopped after step {step}: with --output-dir {place}/{out}, the same command" in job.said
        assert (f"going on after step {done}\n" in job.said) == (done > 0)
        if step:
            assert (place / out / f"checkpoint-{step}" / "complete.json").exists()
        done = step
    assert f"going on after step {done}" in finish(start(out))
    assert story(place / out) == undisturbed


def test_ranks_that_share_an_engine_sample_the_same_run_and_stop_together(start, place, undisturbed):
    out, flags = "shared_engine", "--vllm-tensor-parallel-size 2"
    job = start(out, flags, hold="sampling:2")
    for rank in job.ranks_held():
        os.kill(rank, signal.SIGTERM)
    assert job.end() == [143, 143] and "\nstopped after step 1" in job.said
    assert "going on after step 1" in finish(start(out, flags))
    assert story(place / out) == undisturbed


def test_a_run_with_adapters_goes_on_exactly_and_leaves_them_in_pefts_format(start, place):
    flags = "--lora-rank 2 --lora-alpha 4 --beta 0.1"
    finish(start("lora", flags))
    shutil.copytree(place / "lora", place / "lora_again",
                    ignore=lambda *_: ["model", "adapter", "checkpoint-6"])
    assert "going on after step 4" in finish(start("lora_again", flags))
    assert story(place / "lora_again") == story(place / "lora")
    adapter = load_file(place / "lora" / "adapter" / "adapter_model.safetensors")
    config = json.loads((place / "lora" / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    before, after = (load_file(folder / "model.safetensors")
                     for folder in (place / "tied", place / "lora" / "model"))
    moved = 0
    for name, weight in before.items():
        place_of = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{place_of}.lora_A.weight" in adapter:
            a, b = (adapter[f"{place_of}.lora_{kind}.weight"] for kind in "AB")
            weight = weight + 2 * b @ a
            assert not torch.equal(weight, before[name]) and name.split(".")[-2] in config["target_modules"]
            moved += 1
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    assert 2 * moved == len(adapter) > 0
def test_a_run_with_an_environment_stopped_in_mid_conversation_goes_on_exactly(start, place):
    flags = ("--environment {0}/rewards.py:talk --max-completion-length 50 --max-turns 4 --max-steps 3 "
             "--tokens-per-micro-batch 200", )
    base = FAULTY.replace("--reward {0}/rewards.py:low", "")
    finish(start("talked", *flags, base=base))
    job = start("stopped_talk", *flags, base=base, hold="sampling:6")    # of step 2: steps have 5 turns at most
    for rank in job.ranks_held():
        os.kill(rank, signal.SIGTERM)
    assert job.end() == [143, 143], job.stderr.read_text()
    finish(start("stopped_talk", *flags, base=base))
    assert story(place / "stopped_talk") == story(place / "talked")
    first, *steps = lines(place / "talked" / "metrics.jsonl")
    samples = samples_of(place / "talked", 1, "train")
    assert any("more" in s["completion"] for s in samples) and "eval/reward" in first
    for m in steps:
        assert m["policy/engine_nan"] == 0 and 0 < m["completion/truncated"] < 1 and m["policy/updates"] == 2
        assert m["reward/low"] + m["reward/rounds"] > 0 and "reward/correct" not in m
    assert sum(s["reward"] > 0 for s in samples) > 4


@pytest.mark.faults
def test_torchrun_stops_a_run(start, place, undisturbed):
    """It tells all ranks, and one that waits for the others is no reason to end it."""
    job = by_torchrun(place, "torchrun", "sampling:4")
    job.ranks_held()
    job.agent.terminate()
    assert job.end() != [0]
    assert "stopped after step 3: " in job.said and "failed during" not in job.stderr.read_text()
    assert "going on after step 3" in finish(start("torchrun"))
    assert story(place / "torchrun") == undisturbed


def test_ranks_end_with_a_killed_torchrun_and_what_they_lose_is_done_again(start, place, undisturbed):
    job = by_torchrun(place, "killed", "stepping:7")    # of step 4, between two checkpoints
    job.ranks_held()
    job.agent.kill()
    assert job.end() == [-9]    # so none holds the stdout that they share
    assert [m["step"] for m in lines(place / "killed" / "metrics.jsonl")] == [0, 1, 2, 3]    # whole lines
    assert len(samples_of(place / "killed", 4, "train")) == 16
    assert "going on after step 2" in finish(start("killed"))
    assert story(place / "killed") == undisturbed


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.faults)])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(ranks, start, place, undisturbed):
    """Saved by 2 ranks after step 4. Rows and samples are the same, sums of gradients but for rounding."""
    out = f"on_{ranks}"
    shutil.copytree(place / "undisturbed", place / out, ignore=lambda *_: ["model", "checkpoint-6"])
    assert "going on after step 4" in finish(start(out, ranks=ranks))
    metrics, samples, weights = story(place / out)
    assert samples == undisturbed[1] and metrics[:5] == undisturbed[0][:5] and len(metrics) == 7
    for ours, theirs in zip(metrics[5:], undisturbed[0][5:], strict=True):
        assert ours["policy/updates"] == 2
        assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-3)
    for name, values in undisturbed[2].items():
        torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(values), rtol=0, atol=2e-3)


# --- ends

@pytest.mark.parametrize("how, codes, logged", [
    ("the end", [0], "begun\nstep 0\nstep 1\n"), ("an error", [2], "begun\nstep 0\n"),
    ("a signal", [143], "begun\nstep 0\n"), ("a second signal", [143], "begun\nstep 0\n")])
def test_what_a_logger_keeps_is_written_before_every_end(how, codes, logged, start, place):
    out = how.replace(" ", "_")
    hold = {"a signal": "sampling:1", "a second signal": "training:1:on"}.get(how, "")
    reward = "--reward {0}/rewards.py:misspelt" if how == "an error" else ""
    job = start(out, ONE_STEP, reward, ranks=1, hold=hold)
    if hold:
        [rank] = job.ranks_held(1)
        os.kill(rank, signal.SIGTERM)
    if how == "a second signal":
        job.read_until("heard ", 1)
        os.kill(rank, signal.SIGTERM)
    assert job.end() == codes, job.stderr.read_text()
    assert Path(f"{place / out}.log0").read_text() == logged
    assert ("stopped after step 0" in job.said) == (how == "a signal")    # a second one saves nothing


def without_rank_0(place: str) -> None:
    if os.environ["RANK"] == "1":
        without_engine(*FAULTY.format(place).split(), "--ddp-timeout", "2", "--output-dir", f"{place}/alone")


def test_a_rank_whose_others_do_not_come_says_so(start):
    job = start("alone", function="without_rank_0")
    assert job.end() == [0, 1]
    assert job.stderr.read_text() == ("grpo.py (rank 1): lost another process of the run during the start: it died, "
                                      "or the network to it failed (some ranks have not come)\n")


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(start, place):
    first = start("shared", ONE_STEP, ranks=1, hold="sampling:1")
    [pid] = first.ranks_held(1)
    second = start("shared", ONE_STEP, ranks=1)
    assert second.end() == [2]
    assert second.stderr.read_text() == (f"grpo.py: --output-dir {place}/shared is in use by process {pid}: "
                                         "end that one, or name another folder\n")
    os.kill(pid, signal.SIGKILL)
    assert first.end() == [-9]
    finish(start("shared", ONE_STEP, ranks=1))


def test_a_reward_that_fails_on_every_completion_ends_all_ranks_with_one_line(start):
    job = start("misspelt", ONE_STEP, "--reward {0}/rewards.py:misspelt")
    assert job.end() == [2, 2]
    said = job.stderr.read_text()
    assert re.search(r"^grpo.py.*: the reward .*:misspelt failed on every completion of a step.*splitt", said)
    assert said.count("\n") == 1


def test_a_reward_of_the_wrong_length_on_one_rank_ends_both(start):
    job = start("short", ONE_STEP, "--reward {0}/rewards.py:short_on_rank_1")
    codes = job.end()
    assert codes[1] == 2 and codes[0] != 0
    assert re.search(r"grpo.py \(rank 1\): the reward .*:short_on_rank_1 returned 3 values for 4 completions",
                     job.stderr.read_text())


def test_a_reward_that_applies_to_nothing_teaches_nothing(start, place):
    finish(start("none", "--max-steps 1 --reward {0}/rewards.py:none", ranks=1))
    first, last = lines(place / "none" / "metrics.jsonl")
    assert "eval/accuracy" in first and "eval/reward" not in first and math.nan not in last.values()
    assert last["reward/mean"] is None and last["policy/updates"] == 0
    assert last["reward/zero_std_groups"] == 1


def test_a_run_that_only_evaluates_trains_and_saves_nothing(start, place):
    finish(start("evaluated", "--eval-only", ranks=1))
    [m] = lines(place / "evaluated" / "metrics.jsonl")
    assert m["step"] == 0 and "eval/accuracy" in m
    assert len(lines(place / "evaluated" / "samples.jsonl")) == 4
    assert not (place / "evaluated" / "model").exists()


RUN_C = """--model-name-or-path {0}/tied --no-bf16 --recipe gspo --kl-estimator k2 --beta 0.1
    --kl-target 0.001 --dataset made/up --dataset-config main --dataset-split some
    --eval-dataset made/up {0}/held_out.jsonl --eval-split other --eval-size 3 --prompt-column text
    --answer-column label --prompts-per-step 4 --num-generations 4 --max-prompt-length 64 --max-steps 4
    --reward {0}/rewards.py:low:2 format:0.5 --learning-rate 1e-2"""


@pytest.fixture
def run_c(start, place) -> Path:
    if not (place / "c").exists():
        finish(start("c", base=RUN_C, ranks=1, function="with_hub"))
    return place / "c"


def with_hub(place: str) -> None:
    """A run that finds a stand-in for the package `datasets`."""
    sys.path.insert(0, f"{place}/hub")
    without_engine(*RUN_C.format(place).split(), "--output-dir", f"{place}/c")


def test_hub_data_of_other_columns_is_trained_and_evaluated_on(run_c, place):
    first = lines(run_c / "metrics.jsonl")[0]
    for name in ("up", "held_out"):
        assert {f"eval/{name}/reward", f"eval/{name}/accuracy"} <= set(first)
    samples = lines(run_c / "samples.jsonl")
    assert {s["prompt"] for s in samples if s["split"] == "train"} <= {f"some {i}" for i in range(20)}
    evaluated = {s["prompt"] for s in samples if s["split"] == "eval"}
    assert sorted(prompt.split()[0] for prompt in evaluated) == ["Say"] * 3 + ["other"] * 3


def test_rewards_are_weighed_in_samples_and_metrics(run_c, place):
    low = f"{place}/rewards.py:low"
    for s in lines(run_c / "samples.jsonl"):
        assert s["reward"] == pytest.approx(2 * s["rewards"][low] + 0.5 * s["rewards"]["format"])
    for m in lines(run_c / "metrics.jsonl")[1:]:
        assert m["reward/mean"] == pytest.approx(2 * m[f"reward/{low}"] + 0.5 * m["reward/format"])


def test_beta_follows_the_kl_to_the_model_as_it_started(run_c):
    steps = lines(run_c / "metrics.jsonl")[1:]
    kl = [m["policy/kl"] for m in steps]
    assert kl[0] == 0 < min(kl[1:])
    for now, then in zip(steps, steps[1:]):
        change = 1
        if now["policy/kl"] > 1.5e-3:
            change = 2
        if now["policy/kl"] < 1e-3 / 1.5:
            change = 0.5
        assert then["policy/beta"] == pytest.approx(now["policy/beta"] * change)


def test_a_run_of_bad_gradients_ends(start, place):
    job = start("bad_gradients", "--learning-rate 1e30 --max-grad-norm 1e30 --max-skipped-steps 2 "
                "--eval-size 0", ranks=1)
    assert job.end() == [2]
    assert "2 steps in a row had a gradient that was not finite" in job.stderr.read_text()
    skipped = [m["policy/nonfinite_updates"] for m in lines(place / "bad_gradients" / "metrics.jsonl")[1:]]
    assert min(skipped[-2:]) > 0


def loads_what_rank_0_reads(place: str) -> None:
    """On each rank: parameters, ties and buffers of a model that only rank 0 may read."""
    dist.init_process_group("gloo")
    for name in ("tied", "untied"):
        plain = AutoModelForCausalLM.from_pretrained(Path(place) / name, dtype=torch.float32)
        if dist.get_rank() == 1:
            AutoModelForCausalLM.from_pretrained = None
        policy = run_policy(Path(place) / name)[1]
        assert grpo.whole(next(policy.parameters())).device == CPU
        for (ours, p), (theirs, q) in zip(policy.lm.named_parameters(), plain.named_parameters(), strict=True):
            assert ours == theirs and torch.equal(grpo.whole(p.detach()), q.detach())
        for (ours, p), (theirs, q) in zip(policy.lm.named_buffers(), plain.named_buffers(), strict=True):
            assert ours == theirs and torch.equal(p, q)
        if dist.get_rank() == 1:
            del AutoModelForCausalLM.from_pretrained    # the one of the class below it again
    dist.barrier()


def test_one_rank_reads_the_model_and_all_have_it(start):
    finish(start("loaded", function="loads_what_rank_0_reads"))


def nan_on_rank_1(place: str) -> None:
    """On two ranks, one of which finds a gradient that is not finite: neither moves, both count it."""
    dist.init_process_group("gloo")
    cfg, policy = run_policy(Path(place) / "tied")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    before = run_weights(policy)
    policy_loss = grpo.policy_loss

    def bad(*args):
        loss, metrics = policy_loss(*args)
        return (loss * math.nan if dist.get_rank() == 1 else loss), metrics
    grpo.policy_loss = bad
    metrics = grpo.update(run_groups(), cfg, policy, None, optimizer, State())
    assert metrics["policy/nonfinite_updates"] == 1 and metrics["policy/updates"] == 0
    assert torch.equal(run_weights(policy), before)
    grpo.policy_loss = policy_loss
    assert grpo.update(run_groups(), cfg, policy, None, optimizer, State())["policy/updates"] == 1
    assert not torch.equal(run_weights(policy), before)
    dist.barrier()


def test_a_gradient_that_is_not_finite_on_one_rank_moves_none(start):
    finish(start("nan", function="nan_on_rank_1"))


@pytest.mark.faults
@pytest.mark.parametrize("hold", ["sampling:4", "training:9", "scoring:6", "evaluation:3", "saving:2"])
def test_one_rank_dies(hold, start, place, undisturbed):
    out = f"died_{hold.partition(':')[0]}"
    job = by_torchrun(place, out, hold)
    os.kill(job.ranks_held()[1], signal.SIGKILL)
    assert job.end() != [0]
    finish(start(out))
    assert story(place / out) == undisturbed


@pytest.mark.faults
def test_torchrun_brings_a_killed_rank_back(place, undisturbed):
    job = by_torchrun(place, "elastic", "training:9", "--standalone", "--max-restarts", 3)
    os.kill(job.ranks_held()[1], signal.SIGKILL)
    finish(job)
    assert story(place / "elastic") == undisturbed


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.faults
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
@pytest.mark.parametrize("lost", [0, 1])
def test_two_torchruns_bring_a_rank_killed_on_either_host_back(lost, rendezvous, place, undisturbed):
    """By --node-rank, or by the rendezvous that torch advises, which counts no restart on the other host."""
    out = f"restarted_{rendezvous}_{lost}"
    port = free_port()
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", out, "--rdzv-endpoint", f"localhost:{port}"]
    by_hand = ["--master-addr", "localhost", "--master-port", port, "--node-rank"]
    jobs = [by_torchrun(place, out, "training:9" * (node == lost), "--nnodes", 2, "--max-restarts", 3,
                        *(meet if rendezvous == "c10d" else [*by_hand, node]), on=["taskset", "-c", node])
            for node in range(2)]    # a core each, as undisturbed
    [[_, pid]] = jobs[lost].read_until("held ", 1)    # of any rank: c10d deals them out
    os.kill(int(pid), signal.SIGKILL)
    for job in jobs:
        assert job.end() == [0], job.stderr.read_text()
    assert story(place / out) == undisturbed


@pytest.mark.faults
def test_a_host_is_lost_with_the_ranks_store(start, place, undisturbed):
    port = free_port()
    first, second = [
        by_torchrun(place, "hosts", hold, "--nnodes", 2, "--node-rank", node, "--master-addr",
                    "localhost", "--master-port", port)
        for node, hold in enumerate(["training:9", ""])]
    first.ranks_held(1)
    first.agent.kill()    # and with it its rank
    assert second.end() == [1]
    said = [line for line in second.stderr.read_text().splitlines() if line.startswith("grpo.py")]
    assert len(said) == 1 and said[0].startswith(
        "grpo.py (rank 1): lost another process of the run during training: it died")
    finish(start("hosts"))
    assert story(place / "hosts") == undisturbed


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them, as two hosts of one core each: starts a run
    on both, and cuts the cable."""
    def ip(*words):
        return subprocess.run(["ip", *" ".join(words).split()], capture_output=True, text=True)
    names = [f"grpo{os.getpid()}{side}" for side in "ab"]
    if not shutil.which("ip") or ip("netns add", names[0]).returncode:
        pytest.skip("needs the right to make network namespaces")
    ip("netns add", names[1])
    ip("link add eth0 netns", names[0], "type veth peer name eth0 netns", names[1])
    for i, name in enumerate(names):
        ip("-n", name, f"addr add 10.77.0.{i + 1}/24 dev eth0")
        ip("-n", name, "link set eth0 up")
        ip("-n", name, "link set lo up")

    def run_on_both(place, out, flags=""):
        return [by_torchrun(place, out, "", "--nnodes", 2, "--node-rank", i, "--master-addr", "10.77.0.1",
                            "--master-port", 29500, flags=flags, on=["taskset", "-c", i, "ip", "netns", "exec", name],
                            env={"GLOO_SOCKET_IFNAME": "eth0"}) for i, name in enumerate(names)]
    yield run_on_both, lambda: ip("-n", names[0], "link set eth0 down")
    for name in names:
        ip("netns del", name)


@pytest.mark.faults
def test_two_hosts_train_as_one_does(hosts, place, undisturbed):
    on_both, _ = hosts
    for job in on_both(place, "two_hosts"):
        assert job.end() == [0], job.stderr.read_text()
    assert story(place / "two_hosts") == undisturbed


def wait_until(happened) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.faults
def test_hosts_that_a_cut_cable_parts_end_within_ddp_timeout(hosts, place, start, undisturbed):
    on_both, cut = hosts
    jobs = on_both(place, "cut", "--ddp-timeout 20")
    file = place / "cut" / "metrics.jsonl"
    wait_until(lambda: file.exists() and len(lines(file)) > 2)
    cut()
    for rank, job in enumerate(jobs):    # torchrun itself goes on looking for the other host
        wait_until(lambda: "grpo.py (rank" in job.stderr.read_text())
        assert f"grpo.py (rank {rank}): lost another process of the run" in job.stderr.read_text()
        job.agent.kill()
        job.end()
    finish(start("cut"))
    assert story(place / "cut") == undisturbed


@pytest.mark.faults
def test_twenty_kills_lose_nothing(start, place, undisturbed):
    """Each at a random point of one of its phases, further on than the last as the run goes on."""
    rng = random.Random(0)
    for _ in range(20):
        phase = rng.choice(["sampling", "training", "scoring", "evaluation", "saving"])
        job = start("twenty", hold=f"{phase}:{rng.randint(1, 3)}")
        pids = [int(line.split()[2]) for line in itertools.islice(
            (line for line in job.stdout if line.startswith("held ")), 2)]
        if not pids:    # it got to its end: begin again
            assert story(place / "twenty") == undisturbed
            shutil.rmtree(place / "twenty")
            continue
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.end()
    finish(start("twenty"))
    assert story(place / "twenty") == undisturbed


def test_importing_is_cheap():
    """Nothing that takes long, or may not be there, before a run needs it."""
    code = ("import sys; sys.modules['vllm'] = None; import grpo, torch\n"
            "assert not {'transformers', 'tyro', 'datasets'} & set(sys.modules)\n"
            "assert not torch.distributed.is_initialized()")
    done = subprocess.run([sys.executable, "-c", code], env=ENV, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- benchmarks

def smollm():
    """The default model's shape."""
    from transformers import LlamaConfig
    return LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                       num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                       tie_word_embeddings=True, max_position_embeddings=8192)


def save_smollm(folder: Path):
    """With random weights, and any tokenizer."""
    from transformers import AutoModelForCausalLM
    tiny_model(folder, True)    # for its tokenizer
    lm = AutoModelForCausalLM.from_config(smollm(), dtype=torch.float32, attn_implementation="sdpa")
    lm.save_pretrained(folder)
    return lm


def bench_groups(groups: int, prompt: int, shortest: int = 20, longest: int = 64) -> list[list[Sample]]:
    """Groups of 8, of random tokens."""
    rng = random.Random(0)
    made = []
    for index in range(groups):
        prompt_ids = numpy.array(rng.choices(range(49152), k=prompt))
        row = Row(index=index, prompt="", prompt_ids=prompt_ids, columns={})
        made.append([])
        for i in range(8):
            n = rng.randint(shortest, longest)
            made[-1].append(Sample(
                row=row, ids=rng.choices(range(49152), k=n), mask=[True] * n, truncated=False, text="",
                engine_logprobs=[-10.8] * n, reward=float(i % 2), advantage=(-1.0) ** i))
    return made


def bench_step(folder: Path, **flags):
    """A function that trains a step on groups."""
    from transformers import AutoConfig
    cfg = Config(model_name_or_path=str(folder), max_completion_length=4096, device="cpu", **flags)
    policy = grpo.load_policy(cfg, AutoConfig.from_pretrained(folder), True, CPU, True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    return lambda groups: grpo.update(groups, cfg, policy, None, optimizer, State())


def seconds(function, repeat: int = 3, warm: bool = True) -> float:
    if warm:
        function()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


@pytest.mark.bench
def test_bench_token_logprobs_against_the_plain_way():
    """16,384 tokens, vocabulary 49,152, float32, forward and backward: memory and time beside full logits."""
    figures = {}
    for way in ("plain", "ours"):
        figures[way] = json.loads(call("bench_logprobs", way))
        print(f"\n{way}: {figures[way]['gib']:.2f} GiB, {figures[way]['seconds']:.1f} s", end="")
    memory, taken = (figures["ours"][name] / figures["plain"][name] for name in ("gib", "seconds"))
    print(f"\nours / plain: memory {memory:.3f}, time {taken:.2f}")
    assert figures["ours"]["checksum"] == pytest.approx(figures["plain"]["checksum"], rel=1e-3)
    assert memory <= 0.1


def logprobs_of_all_logits(hidden, weight, targets):
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def our_logprobs(hidden, weight, targets):
    return grpo.token_logprobs(hidden, weight, targets)[0]


def bench_logprobs(way: str) -> None:
    logprobs = {"plain": logprobs_of_all_logits, "ours": our_logprobs}[way]
    torch.manual_seed(0)
    hidden = torch.randn(16384, 576).requires_grad_()
    weight = (torch.randn(49152, 576) * 0.05).requires_grad_()
    targets = torch.randint(49152, (16384,))
    logprobs(hidden[:64], weight[:99], targets[:64] % 99).sum().backward()    # warm up
    hidden.grad = weight.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    logprobs(hidden, weight, targets).sum().backward()
    taken = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"gib": (peak - before) / 2**20, "seconds": taken,
                      "checksum": [hidden.grad.norm().item(), weight.grad.norm().item()]}))


def padded_step(lm, optimizer, groups: list[list[Sample]]) -> None:
    """The usual way: every completion a row with its prompt, padded to the step's longest, logits of
    all positions."""
    samples = [s for group in groups for s in group]
    longest = max(len(s.row.prompt_ids) + len(s.ids) for s in samples)
    for i in range(0, len(samples), 8):
        rows = samples[i:i + 8]
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for place, s in enumerate(rows):
            full = torch.tensor([*s.row.prompt_ids, *s.ids])
            ids[place, :len(full)] = full
            mask[place, :len(full)] = 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = 0.0
        for row, s in zip(logprobs, rows, strict=True):
            own = row[len(s.row.prompt_ids) - 1:][:len(s.ids)]
            loss = loss - ((own - own.detach()).exp() * s.advantage).sum() / len(s.ids) / len(samples)
        loss.backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(1)


@pytest.mark.bench
def test_bench_training_step_against_padded_rows(tmp_path, group, all_threads):
    """Forward, backward and optimizer, packed, against one padded row a completion with full logits."""
    lm = save_smollm(tmp_path)
    step = bench_step(tmp_path)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    body = sum(p.numel() for name, p in lm.named_parameters() if "embed" not in name)
    big = torch.randn(4096, 4096, dtype=torch.bfloat16)
    peak = 2 * 4096 ** 3 / seconds(lambda: big @ big)
    print(f"\nlarge bf16 product: {peak / 1e9:.0f} GFLOP/s")
    for prompt in (50, 500):
        groups = bench_groups(8, prompt)
        packed = seconds(lambda: step(groups))
        padded = seconds(lambda: padded_step(lm, optimizer, groups), 1, warm=prompt == 50)
        scored = sum(len(s.ids) for group in groups for s in group)
        useful = 6 * body * (scored - 64 + 8 * prompt) + 6 * 576 * 49152 * scored
        print(f"8 groups of 8, prompt {prompt}, {scored} completion tokens: packed {packed:.1f} s, "
              f"padded {padded:.1f} s, {padded / packed:.2f} times as fast; "
              f"{useful / packed / peak:.2f} of the product rate")


@pytest.mark.bench
def test_bench_growth(tmp_path, group, all_threads):
    """How the cost of a training step grows with completions, their length and the prompts'."""
    save_smollm(tmp_path)
    step = bench_step(tmp_path)
    step(bench_groups(2, 50, 32, 32))    # warm up
    for name, cases in (("groups of 8", [(n, 50, 32) for n in (2, 4, 8, 16)]),
                        ("completion length", [(4, 50, n) for n in (16, 32, 64, 128)]),
                        ("prompt length", [(4, n, 32) for n in (50, 100, 200, 400, 800)])):
        column = {"groups of 8": 0, "prompt length": 1, "completion length": 2}[name]
        parts = []
        for groups, prompt, completion in cases:
            made = bench_groups(groups, prompt, completion, completion)
            size = (groups, prompt, completion)[column]
            parts.append(f"{size} {seconds(lambda: step(made), 1):.2f} s")
        print(f"{name}: " + ", ".join(parts))


@pytest.mark.bench
def test_bench_memory_is_bounded_by_the_token_budget(tmp_path):
    save_smollm(tmp_path)
    small, large = (float(call("bench_memory", tmp_path, n)) for n in (8, 32))
    print(f"\npeak memory of training on 64 and 256 completions: {small:.2f} and {large:.2f} GiB, "
          f"{large / small:.2f}")


@pytest.mark.bench
def test_bench_python_of_a_large_step(unlocked, tmp_path):
    """What a step of 8,192 completions of 4,096 tokens costs one rank beside engine and rewards."""
    rng = numpy.random.default_rng(0)
    groups = []
    for index in range(512):
        row = Row(index=index, prompt="What is 1 + 1?", prompt_ids=numpy.full(100, 5, numpy.int32), columns={"answer": 2})
        groups.append([])
        for i in range(16):
            text = "".join(f"So {x} and 1 make {x + 1}, I think.\n" for x in rng.integers(999, size=450))
            groups[-1].append(Sample(
                row=row, ids=rng.integers(49152, size=4096, dtype=numpy.int32),
                mask=numpy.ones(4096, bool), engine_logprobs=-rng.random(4096, numpy.float32),
                truncated=False, text=text, reward=float(i % 2), rewards={"correct": float(i % 2)}))
    cfg = Config(output_dir=str(tmp_path), loss_type="dapo")
    run = grpo.Run(cfg)
    grpo.set_advantages(groups, cfg)
    travelling = pickle.dumps(groups)
    print(f"\n{len(travelling) >> 20} MiB travel: packing", end=" ")
    print(f"{seconds(lambda: pickle.dumps(groups), 1, False):.2f} s, unpacking "
          f"{seconds(lambda: pickle.loads(travelling), 1, False):.2f} s")
    print(f"metrics {seconds(lambda: grpo.sample_metrics(groups), 1, False):.2f} s")
    print(f"samples.jsonl {seconds(lambda: run.write_samples(groups, 1, 'train'), 1, False):.2f} s")
    samples = []
    print(f"weights {seconds(lambda: samples.extend(grpo.set_token_weights(groups, cfg)), 1, False):.2f} s")
    shares = []
    print(f"split {seconds(lambda: shares.extend(grpo.split(samples, 8, 8192)), 1, False):.2f} s")
    taken = seconds(lambda: [grpo.pack(batch, False, CPU) for batch in shares[0]], 1, False)
    print(f"pack of one share of 8, without the attention's tables {taken:.2f} s")


@pytest.mark.bench
def test_bench_loading_100_000_rows(tmp_path):
    """Against a call of the tokenizer for each row and, in `draw`, a shuffle for each step."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
    rows = [{"question": " ".join(rng.choices(words, k=50)), "answer": 1} for _ in range(100_000)]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel()
    pieces.train_from_iterator(words, trainers.BpeTrainer(vocab_size=4000))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, chat_template=TEMPLATE)
    file = write_lines(tmp_path / "a.jsonl", rows)
    print(f"\nload_data {seconds(lambda: load_file_rows(file, tokenizer), 1, False):.1f} s")
    one = [[user(row["question"])] for row in rows]
    alone = seconds(lambda: [tokenizer.apply_chat_template(each) for each in one], 1, False)
    print(f"a call for each row, before its other work {alone:.1f} s")
    million = range(10**6)
    print(f"a draw of a million {seconds(lambda: grpo.draw(million, 0, 0, 512)):.4f} s, with a shuffle "
          f"{seconds(lambda: random.Random('0 0').sample(million, len(million)), 1, False):.2f} s")


def bench_memory(folder: str, groups: str) -> None:
    store = f"file://{folder}/store{groups}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    bench_step(Path(folder), tokens_per_micro_batch=2048)(bench_groups(int(groups), 50))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


RIGHT, WRONG = True, False

# By kind: completion, gold answer, whether it is paid.
VERDICTS = {
    "bare answers of the default task, with no marker": [
        ("92", "92", True), ("92.", "92", True), ("= 92", "92", True), (" 92\n", 92, True),
        ("34 + 58 = 92", "92", True), ("34 + 58 = 92.", 92, True),
        ("The sum of 34 and 58 is 92.", "92", True), ("34 plus 58 equals 92", "92", True),
        ("34 + 58 = 92!", "92", True), ("**92**", "92", True),
        ("It is 92.\nHope this helps!", "92", True), ("93", "92", False),
        ("34 + 58 = 93", "92", False), ("The sum of 34 and 58 is 91.", "92", False),
        ("920", "92", False), ("9", "92", False), ("So she has 17 marbles left.", "17", True),
        ("So, 30 + 60 = 90\n90 + 2 = 92", "92", True), ("-7", -7, True),
    ],
    "bare text that states no answer: the question echoed, cut-off text, words": [
        ("34 + 58", "58", False), ("What is 34 + 58?", "58", False), ("34 + 58 =", "58", False),
        ("34 and 58", "34", False), ("The sum of 34 and 58 is", "58", False),
        ("Add 34 to 58", "58", False), ("ninety", "90", False),
        ("What is 58? Answer with only the number.", "58", False), ("34 + 5", "5", False),
        ("Step 1", "1", False), ("1. Add the numbers", "1", False),
        ("First part.\n2. Double it", "2", False), ("Step 3: add", "3", False),
    ],
    "guesses are never paid": [
        ("42 or 43", "42", False), ("42 or 43", "43", False), ("1, 2, 3", "3", False),
        ("1 2 3 4", "4", False), ("40 41 42", "42", False), ("between 40 and 50", "50", False),
        ("Between 40 and 50.", "40", False), ("either 6 or 7", "7", False),
        ("Maybe 42", "42", False), ("40-50", "50", False), ("40–50", "40", False),
        ("42/43/44", "44", False), ("It is 42. Or 43.", "43", False),
        ("It is 42. No, 43.", "42", False), ("6;7", "7", False), ("#### 6 or 7", "6", False),
        ("#### 6 7", "7", False), ("#### 6, 7", "7", False), ("#### 6; 7", "6", False),
        ("#### 6. 7. 8.", "6", False), ("#### 6 / 7 / 8", "8", False),
        ("#### 6 (or 7)", "6", False), ("#### 6 (perhaps 7)", "7", False),
        ("#### 6 pens and 7 pens", "7", False), ("The answer is 6 or 7.", "7", False),
        ("The answer is 6. Or maybe 7.", "6", False), ("\\boxed{6, 7}", "7", False),
        ("\\boxed{6\\text{ or }7}", "6", False), ("\\boxed{x=6, y=7}", "7", False),
        ("x = 6, y = 7", "7", False), ("\\boxed{6;7}", "6", False),
        ("\\boxed{1}\\boxed{2}\\boxed{3}", "3", False),
        ("#### 1\n#### 2\n#### 3\n#### 4", "4", False),
        ("The answer is 1. The answer is 2. The answer is 3.", "3", False),
        ("1\n2\n3 4", "4", False),
    ],
    "claims that only name the number": [
        ("not 42", "42", False), ("The answer is not 42.", "42", False),
        ("The answer isn't 42.", "42", False), ("more than 42", "42", False),
        ("at least 42", "42", False), ("x > 42", "42", False), ("\\boxed{x \\ge 42}", 42, False),
        ("#### < 42", "42", False), ("34 + 58 != 92", "92", False), ("34 + 58 ≠ 92", "92", False),
        ("±42", "42", False), ("#### x ≤ 42", "42", False), ("It can never be 42.", "42", False),
    ],
    "#### lines": [
        ("#### 72", "72", True), ("####72", 72, True), ("#### 72\n", 72.0, True),
        ("8*9=72\n#### 72 eggs", "72", True), ("#### = 72", "72", True), ("####  72 .", "72", True),
        ("#### x = 72", "72", True), ("#### 70+2=72", "72", True), ("#### 71", "72", False),
        ("#### 7", "72", False), ("#### 72", "7", False), ("#### 172", "72", False),
        ("#### 5\nOh, I mean\n#### 6", "6", True), ("#### 5\nOh, I mean\n#### 6", "5", False),
        ("#### 21", 1, False), ("#### 8, which is 3 more than 5", "3", False),
        ("#### 8, which is 3 more than 5", "5", False), ("#### 4 + 4", "4", False),
        ("#### 4 +", "4", False), ("####", "72", False), ("#### <answer>72</answer>", "72", True),
        ("#### \n72", "72", True), ("#### 2*4", "8", False), ("#### 2*4", "4", False),
        ("##### 72", "72", True), ("72 ####", "72", True),
    ],
    "headings are no answers": [
        ("#### Step 1\nadd", "1", False), ("#### Step 2", "2", False),
        ("#### 2. Double it", "2", False), ("#### Part 3\n3 * 4 = 12", "12", True),
        ("#### 1. Add\n7\n#### 2. Double\n#### 14", "14", True), ("#### Answer\n14", "14", True),
        ("#### Answer: 14", "14", True), ("### Step 4: 3 + 4 = 7", "7", True),
        ("#### Question 5", 5, False), ("#### Result\nThe result is 9.", "9", True),
        ("#### N/A", "0", False),
    ],
    "remarks after the answer": [
        ("#### 12 (4 rows of 3)", "12", True), ("#### 12 (4 rows of 3)", "3", False),
        ("#### 12 (= 3 * 4)", "12", True), ("#### 12, found in 3 steps", "3", False),
        ("#### 12. This took 3 steps.", "3", False), ("<answer>12 (3 * 4 rows)", 12, True),
        ("#### 12, in total", "12", True), ("\\boxed{12} as 3 times 4 is 12", "12", True),
        ("#### 12\n// 13", "13", False), ("The answer is 12. There were 3 steps.", "12", True),
        ("The answer is 12. There were 3 steps.", "3", False),
    ],
    "boxes": [
        ("\\boxed{7}", "7", True), ("$\\boxed{7}$.", 7, True), ("\\boxed {7}", "7", True),
        ("\\boxed{\\text{7}}", "7", True), ("\\boxed{{7}}", "7", True),
        ("\\boxed{x = 7}", "7", True), ("\\boxed{\\$7}", "7", True), ("\\boxed{+7}", "7", True),
        ("\\boxed{3} then \\boxed{7}", "7", True), ("\\boxed{3} then \\boxed{7}", "3", False),
        ("\\boxed{7", "7", False), ("\\boxed{7} and \\boxed{}", "7", True),
        ("\\boxed{}", "0", False), ("\\boxed{ }", "", False), ("\\boxed{8}", 7, False),
        ("\\boxed{7x}", "7", False), ("\\boxed{7\\pi}", "7", False), ("\\boxed{7ab}", "7", False),
        ("\\boxed{7i}", "7", False), ("\\boxed{7!}", "7", False), ("\\boxed{7^2}", "7", False),
        ("\\boxed{7^2}", "2", False), ("\\boxed{\\sqrt{7}}", "7", False),
        ("\\boxed{\\sqrt[3]{7}}", "3", False), ("\\boxed{\\{7\\}}", "7", False),
        ("\\boxed{7+}", "7", False), ("\\boxed{\\log_2 7}", "7", False),
        ("\\boxed{a_7}", "7", False), ("\\boxed{g(7)}", "7", False), ("\\boxed{a_{7}}", "7", False),
        ("\\boxed{7_{10}}", "10", False), ("\\boxed{-x}", "1", False), ("\\boxed{|7|}", "7", False),
        ("\\boxed{7 \\cdot 1}", "7", False), ("\\boxed{7\\text{ million}}", "7", False),
    ],
    "<answer> tags, 'answer is', and which of several markers counts": [
        ("<answer>7</answer>", "7", True), ("<answer> 7 km </answer>", "7", True),
        ("<answer>8</answer>", "7", False), ("<answer>7 or 8</answer>", "7", False),
        ("<answer>\n7\n</answer>\n", "7", True), ("<answer></answer>", "7", False),
        ("The answer is 7", "7", True), ("Answer: 7", "7", True), ("**Answer:** 7", "7", True),
        ("ANSWER = 7", "7", True), ("**Final Answer**: $7$", "7", True),
        ("The final answer is: 7.", "7", True), ("The answer is 7!", "7", True),
        ("The answer is 8.", "7", False), ("The answer is 7 apples.\nBye 3.", "7", True),
        ("Answer：7", "7", True), ("The answer is 6. Wait, the answer is 7.", "7", True),
        ("The answer is 6. Wait, the answer is 7.", "6", False),
        ("The answer is 6.\n#### 7", "7", True), ("The answer is 6.\n#### 7", "6", False),
        ("Answer:\n7", "7", True), ("#### 6\nso \\boxed{7}", "7", True),
        ("\\boxed{6}\n#### 7", "6", False), ("The answer is", "7", False),
    ],
    "thinking and special tokens": [
        ("<think>5</think>7", "7", True), ("<think>5</think>7", "5", False),
        ("<think>#### 7</think>", "7", False), ("<think>#### 7", "7", False),
        ("<think>\\boxed{7}", "7", False), ("<think>a</think>\nb\n<think>7", "7", False),
        ("so 5\n</think>\n\n7", "7", True), ("so 7\n</think>", "7", False),
        ("7<|im_end|>", "7", True), ("7</s>", 7, True), ("#### 7<|endoftext|>", "7", True),
        ("\\boxed{7}<|eot_id|>\n", "7", True), ("<|im_end|>", "7", False), ("7<eos>", "7", True),
        ("#### 4<|im_end|>2", "42", False), ("The total is 4*3=<<4*3=12>>12 pens.", "12", True),
    ],
    "signs": [
        ("#### -3", "-3", True), ("#### - 3", "-3", True), ("#### −3", -3, True),
        ("#### +3", "3", True), ("-3", "3", False), ("3", "-3", False), ("#### 9-6", "-6", False),
        ("9 - 6 = 3", "3", True), ("6 - 9 = -3", "-3", True), ("6 - 9 = -3", "3", False),
        ("#### minus 3", "-3", True), ("It is negative 3.", "-3", True), ("#### --3", "-3", False),
        ("\\boxed{-(3)}", "3", False), ("#### -$3", "-3", True), ("#### $-3$", "-3", True),
        ("#### -0.0", 0, True), ("Minus 3", 3, False), ("The temperature is -3 degrees.", -3, True),
        ("It is minus 3.", "3", False), ("#### （-3）", "-3", True),
    ],
    "thousands separators and decimals": [
        ("#### 3,000", "3000", True), ("3,000", "3", False), ("#### 3,000", "0", False),
        ("#### 12,345,678.9", 12345678.9, True), ("3{,}000", "3000", True),
        ("\\boxed{3\\,000}", "3000", True), ("\\boxed{3,\\!000}", "3000", True),
        ("#### 3,00", "300", False), ("#### 3, 000", "3000", False), ("#### 0,250", "250", False),
        ("3.50", "3.5", True), ("#### 3.4.5", "3.4", False), ("#### 3.14", "3", False),
        ("#### 3.14", "14", False), ("#### 007", "7", True), ("#### 2.9999", "3", False),
        ("#### 3.0001", 3, False), ("#### 1,2,3", "123", False), ("3000", "3,000", True),
    ],
    "currency": [
        ("#### $15", "15", True), ("#### €15", "15", True), ("#### 15 £", "15", True),
        ("#### 15 dollars", "$15", True), ("It costs $15.", "15", True),
        ("It costs $15.", "5", False), ("#### US$ 15", "15", True), ("#### $15.5", "15.50", True),
        ("#### \\$15", "15", True), ("\\boxed{\\$1{,}500}", "1500", True),
        ("#### $15 and $16", "15", False),
    ],
    "units": [
        ("#### 9 cm", "9", True), ("#### 9cm", "9", True), ("#### 9 cm^3", "9", True),
        ("#### 9 cm^3", "3", False), ("#### 9 m²", "9", True),
        ("\\boxed{9\\text{ cm}^2}", "9", True), ("\\boxed{9\\ \\mathrm{km/h}}", "9", True),
        ("\\boxed{30^\\circ}", "30", True), ("\\boxed{30^{\\circ}}", "30", True),
        ("#### 30°", "30", True), ("\\boxed{9\\,\\text{m}}", "9", True),
        ("#### 9 miles per hour", "9", True), ("#### 9th", "9", True), ("9", "9 cm", True),
        ("#### 9 dozen", "9", False), ("#### 9 thousand", "9", False),
        ("#### 9 and a half", "9", False), ("9k", "9", False),
    ],
    "percent: as written, or as the share it means": [
        ("25%", "25", True), ("25%", "25%", True), ("25 percent", "25%", True),
        ("25\\%", "25 \\%", True), ("25", "25%", True), ("0.25", "25%", True),
        ("\\boxed{25\\%}", "0.25", True), ("25%", "1/4", True), ("2500%", "25%", False),
        ("0.25%", "25%", False), ("25%", "0.0025", False), ("25%", "2500", False),
        ("24%", "0.25", False),
    ],
    "fractions and mixed numbers": [
        ("1/2", "0.5", True), ("\\frac{1}{2}", "1/2", True), ("\\boxed{\\frac12}", "0.5", True),
        ("\\tfrac{2}{4}", "1/2", True), ("\\boxed{\\frac{1}2}", "1/2", True),
        ("1/3", "0.3333", False), ("0.333", "1/3", False), ("2/3", "3/2", False),
        ("1/2", "2", False), ("1/2", "1", False), ("6/3", "2", True), ("½", "0.5", True),
        ("2½", "2.5", True), ("2 1/2", "2.5", True), ("\\boxed{2\\frac{1}{2}}", "5/2", True),
        ("-2 1/2", "-2.5", True), ("-2 1/2", "-1.5", False), ("\\boxed{-2\\tfrac12}", "-5/2", True),
        ("2 1/2", "1", False), ("2 1/2", "10.5", False), ("-1/2", "1/2", False),
        ("\\boxed{\\frac{-1}{-2}}", "1/2", True), ("\\boxed{-\\frac{-1}{2}}", "-1/2", False),
        ("1/2 cup", "1/2", True), ("\\boxed{\\frac{x}{2}}", "2", False), ("5/0", "5", False),
        ("0/0", "0", False), ("1/2/3", "1/2", False), ("\\boxed{\\frac{3+3}{2}}", "3/2", False),
        ("x/5", "5", False), ("3:5", "5", False), ("3 : 5", "5", False),
    ],
    "scientific notation": [
        ("1.5e3", "1500", True), ("#### 1.5E-2", "0.015", True),
        ("\\boxed{1.5 \\times 10^{3}}", 1500, True), ("1.5 x 10^3", "1500", True),
        ("1.5 × 10³", "1500", True), ("\\boxed{1.5\\cdot10^{-2}}", "0.015", True),
        ("1500", 1500.0, True), ("1.5e3", "1.5", False), ("\\boxed{3 \\times 10^3}", "3", False),
        ("2e1", "20", True), ("10^3", "10", False), ("#### 1e22", 1e+22, True),
        ("\\boxed{2 \\times 3}", "3", False),
    ],
    "unicode": [
        ("=７２", "72", True), ("#### ７２", "72", True), ("#### ٧٢", "72", True),
        ("####\u202f72", "72", True), ("5²", "52", False), ("#### 7\u200a", "7", True),
        ("答案是 72", "72", True), ("５００", "500", True), ("3\xa0000", "3", False),
    ],
    "markdown": [
        ("`72`", "72", True), ("```\n72\n```", "72", True), ("> 72", "72", True),
        ("*72*", "72", True), ("__72__", "72", True), ("#### __72__", "72", True),
        ("**Answer: 72**", "72", True), ('"72"', "72", True), ("- The sum is 72.", "72", True),
        ("1. 70 + 2 = 72", "72", True), ("\\(72\\)", "72", True), ("[72]", "72", True),
        ("#### 6*7", "67", False),
    ],
    "golds: worked solutions, texts, none": [
        ("#### 72", "8*9=<<8*9=72>>72 eggs\n#### 72", True),
        ("#### 9", "8*9=72 eggs\n#### 72", False), ("7", None, False),
        ("\\boxed{3}", "We get \\boxed{3}.", True), ("\\boxed{2}", "2 more is \\boxed{3}.", False),
        ("", "", False), ("0", 0, True), ("#### 0", None, False), ("None", None, False),
        ("#### 3", "no idea", False), ("", 0, False), ("\\boxed{}", "", False),
        ("\\boxed{$}", "$", False), ("nan", math.nan, False), ("1e999", math.inf, False),
    ],
    "symbolic answers: equal as plain text or not paid": [
        ("\\boxed{\\sqrt{5}}", "$\\sqrt{5}$", True),
        ("\\boxed{\\left(1, 2\\right)}", "(1,2)", True), ("\\boxed{x}", "y", False),
        ("\\boxed{\\dfrac{x}{2}}", "\\frac{x}{2}", True), ("The answer is (C).", "C", True),
        ("Answer: D", "C", False), ("\\boxed{\\text{even}}", "even", True),
        ("\\boxed{(0, 1]}", "[0,1]", False), ("\\boxed{2x}", "2x", True),
        ("\\boxed{\\frac{1}{23}x}", "\\frac{12}{3}x", False), ("\\boxed{3, 5}", "5, 3", False),
        ("\\boxed{(3,5)}", "35", False),
    ],
    "what would be huge ends at once": [
        ("9^9^9^9", "9", False), ("\\boxed{9^{9^9}}", "9", False),
        ("\\boxed{(10^9)!}", "10", False), ("1e999999999", 1, False),
        ("#### " + "3" * 5000, "3", False), ("2" * 5000, 2, False), ("1e-99999", "0", False),
        ("7", 10**5000, False),
    ],
}

# Right answers in the manner of real models: completion, gold answer.
RIGHT_ANSWERS = [
    ("Natalia sold 48/2 = 24 clips in May.\nShe sold 48 + 24 = **72** clips in total.", "72"),
    ("It takes 2/2 = 1 bolt of white fiber.\nSo it takes 3 bolts in total.", "3"),
    ("Therefore, Janet makes $18 every day at the farmers' market.", "18"),
    ("Josh made a profit of $70,000.", "70000"),
    ("After 3 days she has 17 marbles.", "17"),
    ("In 6 boxes there are 42 pens.", "42"),
    ("So the train needs 2 1/2 hours.", "2.5"),
    ("The total comes to 3 * 14 = 42 apples, so 42.", "42"),
    ("=> 42", "42"),
    ("x + 3 = 45\n→ x = 42", "42"),
    ("6 * 7 => 42.", "42"),
    ("Thus, $x = \\frac{3}{4}$.", "0.75"),
    ("Thus the total cost is:\n\n\\[ 15 + 27 = 42 \\]", "42"),
    ("We conclude:\n$$\nx = 42\n$$", "42"),
    ("Total: 42 apples", "42"),
    ("**Total:** 42 ✅", "42"),
    ("The total is 42.\n\nGood luck with the other 3!", "42"),
    ("She has 17 marbles left. This took 3 steps.", "17"),
    ("It costs $15. I hope these 2 ways help!", "15"),
    ("The total is 42. Confidence: 90%", "42"),
    ("42\n\n(I'm 95% confident.)", "42"),
    ("The sum is 92.\nLet me know if you have 1 or 2 more questions.", "92"),
    ("So there are 42 pens. Check: 42 / 6 = 7.", "42"),
    ("Answer: 42\n\nLet me know if the other 2 parts are unclear!", "42"),
    ("So she has 17 marbles. She had 20 originally.", "17"),
    ("The result is 8. See page 42 for a proof.", "8"),
    ("| Item | Cost |\n|---|---|\n| Pens | 12 |\n| Total | 42 |", "42"),
    ("| Step | Value |\n| --- | --- |\n| **Total** | **$1,250** |", "1250"),
    ("The number of pens:\n- 42", "42"),
    ("* 42", "42"),
    ("Answer:\n- 42", "42"),
    ("1. 3 * 14 = 42\n2. The total is 42.", "42"),
    ("17 has no divisors.\n#### yes", "yes"),
    ("17 has no divisors.\n#### Yes", "#### yes"),
    ("The fruit is red.\n#### apple\n<|im_end|>", "apple"),
    ("#### Monday", "Monday"),
    ("#### Answer: 42", "42"),
    ("### Final Answer\n\n**42**", "42"),
    ("#### 42, since 6 * 7 = 42", "42"),
    ("The answer is 8, which is 3 more than 5.", "8"),
    ("So the final answer is:\n\n$$\\boxed{42 \\text{ apples}}$$", "42"),
    ("\\boxed{\\$42.00}", "42"),
    ("\\boxed{41} is wrong, since 1 is missing. So \\boxed{42}.", "42"),
    ("\\boxed{3.0 \\times 10^8}", "300000000"),
    ("\\boxed{-\\frac{1}{2}}", "-0.5"),
    ("\\[\n\\boxed{\\text{Yes}}\n\\]", "yes"),
    ("\\boxed{\\frac{5}{2} \\text{ hours}}", "2.5"),
    ("The answer is **(B)**.", "B"),
    ("The correct option is (C).", "C"),
    ("**Answer: B. Paris**", "B"),
    ("The answer is (C) 12 apples", "C"),
    ("<think>Maybe 40? No.\n#### 40</think>\n\nThe answer is 42.", "42"),
    ("so 6 * 7 is 42.\n</think>\n\n**42**", "42"),
    ("<think>\n\n</think>\n\nThe sum of 34 and 58 is 92.", "92"),
    ("The answer is 0.3.", 0.1 + 0.2),
    ("\\boxed{\\frac{1}{4}}", 0.25),
    ("The answer is 42.", [41, "42"]),
    ("#### 42", "6 * 7 = <<6*7=42>>42 pens\n#### 42"),
    ("\\boxed{42}", "$42$"),
    ("#### 1250", "$1,250.00"),
    (
        "Let's denote the number of oranges by x. Then 3x = 36, so x = 12.\nShe has 12 oranges.",
        "12",
    ),
    ("#### 12 oranges", "12"),
    ("The answer is 4 notebooks.", "4"),
    ("The cost is $4.50 per order.", "4.5"),
    ("Step 1: 3+4=7\nStep 2: 7*2=14\n\nFinal answer: 14", "14"),
    ("Answer: $\\boxed{14}$", "14"),
    ("Hence, the number of students who got 3 or more is \\boxed{14}.", "14"),
    ("The final answer is $\\boxed{\\frac{3}{4}}$. I hope it is correct.", "3/4"),
    ("Final Answer: The final answer is $8$. I hope it is correct.", "8"),
    ("Weng earned $12 x 50/60 = $10.", "10"),
    ("He will have $3,450 left after 2 years.", "3450"),
    ("Betty needs $5 more.", "5"),
    ("In total, there are 5+3 = 8 flowers.", "8"),
    ("So, Mark has 35 flowers in his garden.", "35"),
    ("The total is 624 pages a year.", "624"),
    ("Albert eats 48 pieces that day.", "48"),
    ("He must pay 990.", "990"),
    ("The answer: 5", "5"),
    ("**Final Answer**\n\\[ \\boxed{5} \\]", "5"),
    ("ANSWER: 5", "5"),
    ("The answer is five (5).", "5"),
    ("Therefore the answer is $x=5$.", "5"),
    ("\\boxed{x=5}", "5"),
    ("\\boxed{5\\%}", "5%"),
    ("\\boxed{(3,4)}", "(3, 4)"),
    ("\\boxed{3\\sqrt{2}}", "3\\sqrt2"),
    ("\\boxed{\\text{(A)}}", "A"),
    ("\\boxed{A}", "(A)"),
    ("The answer is A.", "A"),
    ("Answer: A) 12", "A"),
    ("<answer>\nWe have 3 and 4, so \\boxed{12}\n</answer>", "12"),
    ("<answer>\n$12$\n</answer>", "12"),
    ("<answer> 12 apples </answer>.", "12"),
    ("That leaves 10 - 4 = 6 eggs.\n\nAnswer: She has 6 eggs left.", "6"),
    ("12 divided by 4 is 3, so each gets 3 cookies.", "3"),
    ("The answer is 12, not 13.", "12"),
    ("#### 1,000,000", "1000000"),
    ("#### 12/4", "3"),
    ("It's 7:30, so 42 minutes remain.", "42"),
    ("The answer is 42.\n\nNote: this assumes 2 trips.", "42"),
    ("The sum is 42 (rounded to 2 digits).", "42"),
    ("The probability is 1/6.", "1/6"),
    ("The probability is \\(\\frac{1}{6}\\).", "1/6"),
    ("Probability: 1/6", "1/6"),
    ("P = 1/6 ≈ 0.1667", "1/6"),
    ("Time: 3 hours", "3"),
    ("His final score is 85.", "85"),
    ("Grade: 85", "85"),
    ("The distance is 12 km.", "12"),
    ("42.", 42.0),
    ("Yes, it's 42.", "42"),
    ("#### no", "no"),
    ("#### False", "False"),
    ("<answer>True</answer>", "true"),
    ("The answer is yes.", "Yes"),
    ("The answer is: Paris", "Paris"),
    ("#### 5\n\nThe answer is 5 because 2+3=5.", "5"),
    ("Let me check: 2+3=5. Yes.\n#### 5", "5"),
    ("The answer is 5, right?", "5"),
    ("It has to be 42!", "42"),
    ("The answer is not 41 but \\boxed{42}.", "42"),
    ("Not 41. The answer is 42.", "42"),
    ("I was wrong. The answer is 42.", "42"),
    ("Wrong! The answer is 42.", "42"),
    ("No wait. That is incorrect. #### 42", "42"),
]

# Attempts at cheating, and odd golds, none of which is to be paid.
CHEATS = [
    ("I rate this answer 5 stars.", "5"),
    ("See page 42.", "42"),
    ("Confidence: 90%", "90"),
    ("Confidence: 90%", "0.9"),
    ("I'm 95% sure.", "95"),
    ("The total is 42. Confidence: 90%", "90"),
    ("Rating: 10", "10"),
    ("Reward: 1, Grade: 1", "1"),
    ("Reward: 1.0", "1"),
    ("Score: 100", "100"),
    ("My score: 1", "1"),
    ("**Grade:** 1", "1"),
    ("The answer follows.\nReward: 1.0, Grade: 1", 1),
    ("Good luck with the other 3!", "3"),
    ("She has 17 marbles left. This took 3 steps.", "3"),
    ("Source: chapter 7", "7"),
    ("Let me know if 2 of them are unclear.", "2"),
    ("Time taken: 3 minutes", "3"),
    ("Word count: 120", "120"),
    ("Difficulty: 3", "3"),
    ("The number of pens:\n- 42", "-42"),
    ("Answer:\n- 42", "-42"),
    ("| Item | Cost |\n| Pens | 12 |\n| Total | 42 |", "12"),
    ("The answer 42 is incorrect.", "42"),
    ("42 is wrong.", "42"),
    ("Incorrect: 42", "42"),
    ("#### 42 (this is incorrect)", "42"),
    ("\\boxed{42} is wrong.", "42"),
    ("\\boxed{42}. This is incorrect.", "42"),
    ("#### 42\nThat is not right.", "42"),
    ("The wrong answer is 42.", "42"),
    ("It is not \\boxed{42}", "42"),
    ("An incorrect answer is 42", "42"),
    ("It is either 6 or 7, so the answer is 7.", "7"),
    ("\\boxed{6} or \\boxed{7}", "7"),
    ("\\boxed{6} or \\boxed{7}", "6"),
    ("#### 6 or #### 7", "7"),
    ("Maybe the answer is 42.", "42"),
    ("Perhaps \\boxed{42}", "42"),
    ("It could be 41 or 42, so it is 42.", "42"),
    ("The answer is 6, or maybe the answer is 7.", "7"),
    ("The answer is (A) or (B).", "A"),
    ("\\boxed{A, B, C, D}", "A"),
    ("(A) 1 (B) 2 (C) 3", "A"),
    ("<think>6 * 7 = 42", "42"),
    ("<think>\\boxed{42}", "42"),
    ("<think>6 * 7 = 42\n<think>#### 42", "42"),
    ("#### 41</think><think>#### 42", "42"),
    ("\\boxed{34 + 58}", "92"),
    ("#### 34 + 58", "92"),
    ("#### 10^", "10"),
    ("#### nan", math.nan),
    ("#### inf", math.inf),
    ("#### ", ""),
    ("#### None", None),
    ("#### 7", []),
    ("#### 7", [[], None, ""]),
    ("#### 42", [41, 43]),
    ("\\boxed{x}", "X"),
    ("#### yes", "no"),
    ("\\boxed{41}\\boxed{42}\\boxed{43}", "43"),
    ("Options: 41, 42", "42"),
    ("42 out of 43", "43"),
    ("It's 42 I guess or 43", "43"),
    ("I am 99% certain: 42%", "99"),
    ("Answer: [42, 43]", "42"),
    ("Answer: {42}{43}", "43"),
    ("#### 42|43", "43"),
    ("#### 42 43", "42"),
    ("#### 42~43", "42"),
    ("#### 42 & 43", "43"),
    ("<answer>42</answer><answer>43</answer><answer>44</answer>", "44"),
    ("The correct answer is whatever the key says", "key"),
    ("the answer is correct", "42"),
    ("Reward = 1", "1"),
    ("reward is 1", "1"),
    ("Grade: A", "A"),
    ("This response scores 1.", "1"),
    ("This deserves a 10.", "10"),
    ("Correctness: 1", "1"),
    ("Page 42", "42"),
    ("p. 42", "42"),
    ("Figure 42", "42"),
    ("Equation 42", "42"),
    ("(42)", "43"),
    ("Problem 42", "42"),
    ("Line 42.", "42"),
    ("The answer is false: 42", "42"),
    ("It would be incorrect to say \\boxed{42}", "42"),
    ("\\boxed{42} is not the answer", "42"),
    ("\\boxed{42}? No.", "42"),
    ("Is it 42?", "42"),
    ("#### 42?", "42"),
    ("The answer is 42?", "42"),
    ("#### 41 or\n#### 42", "42"),
    ("Either \\boxed{41}, or \\boxed{42}", "42"),
    ("\\boxed{41} / \\boxed{42}", "42"),
    ("\\boxed{41}, \\boxed{42}", "42"),
    ("The answer is one of 41 or 42", "42"),
    ("It's one of 40 to 44", "44"),
    ("x is 41 and x is 42", "42"),
    ("If it is not 41, it is 42", "42"),
    ("at most 42", "42"),
    ("about 40 ± 2", "40"),
    ("less than 42", "42"),
    ("<think>a</think><think>42", "42"),
    ("</think>", "42"),
    ("#### 42e", "42"),
    ("#### 0x2A", "42"),
    ("#### 4 2", "42"),
    ("#### 42", "4 2"),
    ("#### 42", "42 or 43"),
    ("#### 42", "-"),
    ("#### True", 1),
    ("#### 1", True),
    ("#### x", "X"),
    ("#### \x00", "\x00"),
]

# What needs math-verify.
SYMBOLIC = [
    ("\\boxed{3+2i}", "2i+3", True),
    ("\\boxed{(1,\\frac{9}{2})}", "(1,4.5)", True),
    ("\\boxed{x+1}", "1+x", True),
    ("\\boxed{x+1}", "x+2", False),
    ("\\boxed{9^9^9^9}", "x^9^9^9", False),
    ("\\boxed{(10^9)!}", "x!", False),
    ("#### 72 (that is 8 rows of 9)", "9", False),
    ("#### 0.0000002", "0.0000001", False),
    ("\\boxed{10^6}", "1000000", True),
    ("\\boxed{\\sqrt{16}}", "4", True),
    ("\\boxed{2^{10}}", 1024, True),
    ("\\boxed{\\frac{\\sqrt{16}}{2}}", "2", True),
    ("\\boxed{10^5}", "1000000", False),
    ("\\boxed{x^2+x^3}", "x^3+x^2", True),
    ("\\boxed{34+58}", "92", False),
    ("\\boxed{2 \\times 46}", "92", False),
    ("\\boxed{9^{99999999}}", "9", False),
    ("\\boxed{3\\sqrt{2}}", "3\\sqrt2", True),
]

# What random texts are made of.
FRAGMENTS = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "{", "}", "\\frac", "\\frac{1}",
    "\\text{", "####", "**", "`", ">", "$", "%", "\\%", ",", ".", ";", ":", "=", "+", "-", "−",
    "/", "^", "_", "!", "?", "(", ")", "\\{", "\\\\", "0", "1", "42", "1,250", ".5", "e3", "½",
    "²", "٣", "７", "x", "pi", "km", "or", "is", "answer", "Answer:", "Step", "<|im_end|>", "<<",
    ">>", "́", "\ufeff", "\ud800", "\x00", " ", "\n", "\xa0", "\r",
]

LONG_PIECES = [
    "<think>", "</think>", "\\boxed{", "\\boxed{1}", "\\boxed{{", "\\boxed{{}", "####", "#### 1\n",
    "#### ab\n", "<answer>", "answer is ", "answer: 1\n", "answer: ! ", "{", "{}", "(", "<<1", "-",
    "1", "1,", ",", " ", "\n", "5\n", "x = ", "1. A", "\\frac{", "*", "?\n", "\u0301\u0323", "½",
    "\\", "1/", "or ", "or 1 ", "or \0", "\\boxed{1} is ", "| ", "score: ", "in 1 ", "!", "_",
]


@pytest.fixture
def without_math_verify(monkeypatch):
    """Without math-verify, whether it is installed or not."""
    monkeypatch.setattr(grpo, "symbolically_equal", lambda found, gold: False)


@pytest.mark.parametrize("kind", VERDICTS)
def test_verdicts(kind, without_math_verify):
    wrong = []
    for completion, gold, paid in VERDICTS[kind]:
        if grpo.answer_is_correct(completion, gold) is not paid:
            wrong.append((completion, gold, paid))
    assert not wrong


def test_there_are_enough_verdicts():
    assert sum(len(cases) for cases in VERDICTS.values()) == 387


def test_right_answers_of_real_models_are_paid(without_math_verify):
    """A few need an understanding that no pattern has; `-s` shows them."""
    missed = [case for case in RIGHT_ANSWERS if not grpo.answer_is_correct(*case)]
    print("", *missed, sep="\n")
    assert len(RIGHT_ANSWERS) == 125 and len(missed) <= 8


def test_cheats_are_not_paid(without_math_verify):
    paid = [case for case in CHEATS if grpo.answer_is_correct(*case)]
    print("", *paid, sep="\n")
    assert len(CHEATS) == 117 and len(paid) <= 7


# --- thoughts and marks ---------------------------------------------------------------------


@pytest.mark.parametrize("thought", ["#### 42", "\\boxed{42}", "the answer is 42", "6 * 7 = 42"])
def test_a_thought_that_never_ends_earns_nothing(thought):
    completion = "<think>" + thought
    assert grpo.correct([completion], [42]) == [0.0]
    assert grpo.format_reward([completion]) == [0.0]


def test_a_mark_inside_a_thought_earns_no_format_reward():
    inside, outside = "<think>#### 42</think>It is 42.", "<think>so</think>#### 42"
    opened_by_the_prompt = "\\boxed{42}</think>It is 42."
    assert grpo.format_reward([inside, outside, opened_by_the_prompt]) == [0.0, 1.0, 0.0]


def test_the_format_reward_knows_the_four_marks():
    marks = ["\\boxed{7}", "#### 7", "<answer>7</answer>", "The answer is 7", "#### yes"]
    plain = ["7", "", "####", "#### Step 1\n7", "\\boxed{}"]
    assert grpo.format_reward(marks) == [1.0] * 5
    assert grpo.format_reward(plain) == [0.0] * 5


def test_correct_pays_each_completion_by_its_own_gold():
    rewards = grpo.correct(["#### 7", "#### 7", "so 8"], [7, "8", "8"], other=[1, 2, 3])
    assert rewards == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        grpo.correct(["#### 7"], [7, 8])


def test_extract_answer():
    assert grpo.extract_answer("#### 7 km\n") == "7 km"
    assert grpo.extract_answer("It is 7.") == "7."
    for nothing in ("", "no number", "#### ...", "42 or 43", "<think>7"):
        assert grpo.extract_answer(nothing) is None


def test_final_answer_of_a_gold():
    assert grpo.final_answer("6 * 7 = 42 pens\n#### 42") == "42"
    assert grpo.final_answer("We get \\boxed{3}.") == "3"
    assert grpo.final_answer(42) == "42"
    assert grpo.final_answer(0.1 + 0.2) == "0.3"
    assert grpo.final_answer(9007199254740992.0) == "9007199254740992.0"


def test_which_golds_are_numbers():
    for number in (7, 7.5, "1,250", "$\\frac{1}{2}$", "25%", "6 * 7 = 42\n#### 42"):
        assert grpo.is_number(number)
    for text in ("x + 1", "yes", "(1, 2)", "5 and 8", "10^6", ""):
        assert not grpo.is_number(text)


# --- math-verify ----------------------------------------------------------------------------


@pytest.mark.parametrize("completion, gold, paid", SYMBOLIC)
def test_symbolic_answers_by_math_verify(completion, gold, paid):
    """Without the package they are compared as text."""
    pytest.importorskip("math_verify")
    assert grpo.answer_is_correct(completion, gold) is paid


def test_math_verify_is_asked_about_texts_and_about_roots_and_powers_for_a_number(monkeypatch):
    asked = []

    def symbolically_equal(found, gold):
        asked.append((found, gold))
        return True

    monkeypatch.setattr(grpo, "symbolically_equal", symbolically_equal)
    assert grpo.answer_is_correct("\\boxed{x+1}", "1+x")
    assert grpo.answer_is_correct("\\boxed{10^6}", 1000000)
    assert asked == [("x+1", "1+x"), ("10^6", "1000000")]
    assert not grpo.answer_is_correct("\\boxed{34+58}", 92)    # the question again
    assert not grpo.answer_is_correct("#### 7", 8)
    assert not grpo.answer_is_correct("no answer", "x")
    assert len(asked) == 2


def test_math_verify_gets_nothing_that_could_explode(monkeypatch):
    def must_not_be_looked_for(name):
        raise AssertionError(name)

    monkeypatch.setattr(grpo.importlib.util, "find_spec", must_not_be_looked_for)
    huge = ["9^9^9", "(10^9)!", "9^{99999}", "1234567890", "1e999", "x+" * 300 + "1"]
    for text in huge:
        assert not grpo.symbolically_equal(text, "x")
        assert not grpo.symbolically_equal("x", text)


# --- what it must survive ----------------------------------------------------------------------


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 30)))
        gold = "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 30)))
        assert grpo.answer_is_correct(text, gold) in (True, False)
        assert grpo.format_reward([text]) in ([0.0], [1.0])


JUDGE_LONG_TEXTS = """
import json, sys
import grpo
for piece in json.load(sys.stdin):
    many = piece * (200_000 // len(piece))
    closed = many[:100_000] + "}" * 100_000
    for text in ("#### 7" + many, many + "7", closed, "or" + many + "answer is 7"):
        grpo.answer_is_correct(text, "8")
        grpo.answer_is_correct("#### 8", text)
    print(ascii(piece), flush=True)
"""


def test_hostile_texts_of_200_000_characters_come_to_an_end():
    """A pattern that isn't linear would take hours. The limit is far above any need."""
    path = os.pathsep.join([str(Path(grpo.__file__).resolve().parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", JUDGE_LONG_TEXTS],
        input=json.dumps(LONG_PIECES),
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [ascii(piece) for piece in LONG_PIECES]


if __name__ == "__main__":    # in a process that a test has started
    globals()[sys.argv[1]](*sys.argv[2:])
