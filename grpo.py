"""GRPO in one file: trains a language model by reinforcement learning on rule rewards.

    torchrun --standalone grpo.py           # a quick experiment; --help: every flag and its meaning
    torchrun --standalone --nproc-per-node 8 grpo.py --dataset my.jsonl

One step: draw prompts; sample a group of completions for each (vLLM); score them; turn each group's
rewards into advantages; make the better completions more likely and the worse less (FSDP); hand the
weights back to vLLM. One record, `Sample`, flows through it. To try an idea, change a reward,
`group_advantages` or a surrogate. What follows the banner changes nothing of what is learnt.

Where it differs from the paper (arXiv:2402.03300):
 1. The engine that samples computes slightly other probabilities (mu) than the trainer: the
    surrogate is weighted by min(pi_old/mu, 2). The clipped ratio is pi_theta/pi_old, both ours.
 2. A group whose advantages are all 0 has no policy gradient: no forward pass, and no KL.
 3. A prompt and its completions share one row: the prompt is computed once, not once a completion.
 4. Rewards are functions of the text or games. There is no process supervision.
"""
import atexit, contextlib, copy, ctypes, functools, hashlib, html, importlib.util, inspect, json
import itertools, logging, math, multiprocessing.connection, multiprocessing.forkserver, numbers, os
import random, re, resource, runpy, shutil, signal, sys, time, traceback, unicodedata, warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Iterator, Literal
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")    # read when torch is imported
import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

# --- config ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Prompts and completions are counted over all ranks, tokens of a micro-batch on one."""
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct"    # folder or hub id
    output_dir: str | None = None    # a run's folder: one in it goes on. Default: a new runs/<time>
    recipe: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] = "grpo"    # sets flags
    seed: int = 0    # of prompt order and sampling; one seed gives the same run on the same machine
    device: Literal["auto", "cuda", "cpu"] = "auto"    # auto: GPUs where torch sees any
    bf16: bool = True    # compute in bfloat16, if the device can; weights and optimizer in float32
    eval_only: bool = False    # evaluate the model and end
    # --- data
    dataset: str = "arithmetic"    # or a JSON(L) file, path.py:function, a hub id, Parquet, CSV
    dataset_config: str | None = None    # configuration of a hub dataset
    dataset_split: str = "train"    # split of a hub dataset to train on
    eval_dataset: tuple[str, ...] = ()    # held-out sets. Default: problems set aside from dataset
    eval_split: str = "test"    # split of hub datasets to evaluate on
    eval_size: int = 256    # problems of each held-out set, at most; 0: no evaluation
    data_seed: int = 0    # of which problems are made and held out: runs share them across seeds
    shuffle_dataset: bool = True    # draw the rows of each epoch in a new order, not in the file's
    strict_dataset: bool = False    # end at the first unusable row, instead of dropping it
    prompt_column: str | None = None    # default: `prompt`, `question` or `problem`
    answer_column: str | None = None    # default: `answer` or `solution`
    system_prompt: str | None = None    # a system message before each prompt
    prompt_template: str = "{prompt}"    # the user's words around the prompt's text
    chat_template_kwargs: str = "{}"    # JSON for the chat template: '{"enable_thinking": false}'
    arithmetic_operators: str = "+"    # operators of the arithmetic problems, any of + - *
    arithmetic_min: int = 10    # smallest operand
    arithmetic_max: int = 99    # largest operand
    max_prompt_length: int = 512    # prompts of more tokens are dropped, and counted
    # --- rollout
    prompts_per_step: int = 16    # prompts of one step, over all ranks
    num_generations: int = 8    # completions of each prompt: its group (G in the paper)
    max_completion_length: int = 16    # completions are cut, and counted, at this many tokens
    stop: tuple[str, ...] = ()    # texts that end a completion; they stay in what the reward sees
    temperature: float = 1.0    # of sampling and of all logprobs; a cut choice couldn't be matched
    dynamic_sampling_rounds: int = 1    # to fill the step with groups whose rewards differ (DAPO)
    vllm_gpu_memory_utilization: float = 0.3    # share of a GPU; on the CPU of RAM, for the cache
    vllm_tensor_parallel_size: int = 1    # ranks, next to each other, that share one engine
    vllm_max_model_length: int | None = None    # default: longest prompt and completion together
    vllm_enable_sleep_mode: bool = True    # free vLLM's GPU memory while training
    vllm_sleep_level: Literal[1, 2] = 1    # its weights are copied to host memory; or 2: dropped
    vllm_enforce_eager: bool | None = None    # no compilation. Default: in short runs on the CPU
    environment: str | None = None    # path.py:function, a generator: a conversation, tools, a game
    max_turns: int = 8    # replies of the model to an environment, at most
    # --- reward
    reward: tuple[str, ...] = ("correct",)    # correct, format, path.py:function, each with :weight
    check_reward: str | None = None    # JSONL of completion, reward and columns: compare, and end
    reward_timeout: float = 10.0    # seconds a call of a reward may take
    reward_workers: int = 0    # processes that call rewards on a rank; 0: one a core, at most 8
    reward_memory: float = 4.0    # GiB of each of them
    soft_overlong_share: float = 0.0    # over this last share of tokens the reward falls by up to 1
    mask_truncated_completions: bool = False    # out of the loss; not out of their group's mean
    # --- objective
    scale_rewards: Literal["group", "batch", "none"] = "group"    # whose std divides advantages
    # several rewards: added up, then normalised; or each normalised in its group first (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize")
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"    # of all, or the others (RLOO)
    min_group_std: float = 1e-6    # as a share of the group's largest reward; below: no signal
    # mean over completions' means (grpo), all tokens (dapo, cispo), or a fixed length (dr_grpo)
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    importance_sampling_level: Literal["token", "sequence"] = "token"    # one ratio for each
    epsilon: float = 0.2    # the ratio pi_theta/pi_old is clipped below at 1 - epsilon
    epsilon_high: float | None = None    # and above at 1 + epsilon_high; default: epsilon
    delta: float | None = None    # two-sided clip: bounds ratios of negative advantage from above
    entropy_coef: float = 0.0    # weight of an entropy bonus
    beta: float = 0.0    # weight of the KL to the model as it started; 0 loads no reference model
    kl_estimator: Literal["k2", "k3"] = "k3"    # k3: the paper's; k2: its gradient is reverse KL's
    use_bias_correction_kl: bool = False    # multiply the KL by the ratio: right off-policy too
    kl_target: float | None = None    # beta doubles above 1.5 targets, halves below target / 1.5
    num_iterations: int = 1    # passes over each rollout
    num_minibatches: int = 1    # optimizer updates a pass; prompts are divided among them
    skip_zero_std_groups: bool = True    # no forward pass, no KL for groups without signal
    vllm_importance_sampling_correction: bool = True    # weight by pi_old/mu, mu under vLLM
    # a token's weight or, multiplied up, a sequence's; above the maximum cut, or 0 (mask)
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_mask"] = (
        "token_truncate")
    vllm_importance_sampling_clip_max: float = 2.0    # the maximum of that weight
    # --- optimization
    max_steps: int = 70    # steps, one rollout each
    learning_rate: float = 3e-5    # peak learning rate of AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"    # after the warm-up
    warmup_steps: int = 3    # steps over which the learning rate rises linearly
    weight_decay: float = 0.0    # of AdamW
    adam_beta2: float = 0.95    # of AdamW: its memory of squared gradients (0.95: about 20 updates)
    bf16_optimizer_states: bool = False    # AdamW's moments in bfloat16: 12 bytes a weight, not 16
    max_grad_norm: float = 1.0    # longer gradients are scaled down to this norm
    max_skipped_steps: int = 5    # end after so many steps in a row without a finite gradient
    tokens_per_micro_batch: int = 8192    # of one rank: bounds memory, changes no result
    gradient_checkpointing: bool = False    # recompute activations: less memory, a third more time
    ref_cpu_offload: bool = False    # keep the reference model's shards in CPU memory
    optimizer_cpu_offload: bool = False    # weights, gradients and optimizer there too
    fsdp_size: int = 0    # ranks that share one copy of weights and optimizer (HSDP); 0: all
    ddp_timeout: int = 1800    # seconds that ranks wait for each other
    lora_rank: int = 0    # train adapters of this rank on the frozen model; 0: all its weights
    lora_alpha: float = 32.0    # what adapters add is scaled by lora_alpha / lora_rank
    lora_target_modules: tuple[str, ...] = ()    # names of linear layers. Default: all but the head
    # --- evaluation and checkpoints
    eval_steps: int = 20    # evaluate before the first step, every so many steps, and at the end
    eval_num_generations: int = 0    # completions of a problem, at --temperature, for pass@k
    log_kl_steps: int | None = None    # measure the KL from the start so often. Default: eval_steps
    save_steps: int = 20    # write a checkpoint every so many steps, and when the run is stopped
    save_total_limit: int = 2    # keep so many, the newest
    save_only_model: bool = False    # as a model to load: a run can't go on from it
    log_completions_steps: int = 1    # write the training completions of every so many steps
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()    # send metrics there

    @property
    def max_length(self) -> int:
        return self.vllm_max_model_length or self.max_prompt_length + self.max_completion_length

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

# Flags of published variants: arXiv 2402.03300, 2503.14476, 2503.20783, 2507.18071, 2506.13585,
# 2402.14740. Those given beside --recipe win.
RECIPES = {
    "grpo": {},
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, dynamic_sampling_rounds=4,
                 soft_overlong_share=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "gspo": dict(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="cispo", epsilon_high=4.0),
    "rloo": dict(advantage_baseline="leave_one_out", scale_rewards="none"),
}

# --- record ---------------------------------------------------------------------------------------
@dataclass
class Row:
    """One problem."""
    index: int                   # tells rows apart
    prompt: str | list           # as given: text or chat messages
    prompt_ids: numpy.ndarray    # int32
    columns: dict[str, Any]      # of the row, for the reward
    thinks: bool = False         # the chat template has opened a <think> in the prompt
    read: int = 0                # tokens at the prompt's end that count as its completion's

@dataclass
class Sample:
    """One completion, on its way from the engine to the loss."""
    row: Row
    ids: numpy.ndarray              # int32, as the engine returned them, the end token included
    mask: numpy.ndarray             # bool: which the model sampled, all others are only read
    engine_logprobs: numpy.ndarray  # float32: log mu of each, at the sampling temperature
    truncated: bool                 # cut at max_completion_length
    text: str                       # what the reward sees
    turns: list = field(default_factory=list)    # what an environment and the model said, in turn
    reward: float | None = 0.0      # the weighted sum; None: no reward applies, it is left out
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    token_weight: float = 0.0       # what one of its tokens weighs in the loss

Group = list[Sample]    # the completions of one prompt

# --- training loop --------------------------------------------------------------------------------
def train(cfg: Config, trainer: "Trainer") -> None:
    """GRPO, from the first step to the last. Raises Stopped, on all ranks, once all is saved."""
    policy, engine, run, state = trainer.policy, trainer.engine, trainer.run, trainer.state
    saved_step = state.step
    STOPPING.listen()
    try:
        while True:
            if not state.reported:
                report(cfg, trainer)
            done = state.step == cfg.max_steps or cfg.eval_only
            if (done or state.step % cfg.save_steps == 0) and state.step != saved_step:
                run.save_checkpoint(trainer)
                saved_step = state.step
            if done:
                break
            stop_point()
            start = time.perf_counter()
            groups, metrics = sample_groups(cfg, trainer)
            set_advantages(groups, cfg)
            run.write_samples(groups, state.step + 1, "train")
            engine.sleep()
            sampled = time.perf_counter()
            metrics |= sample_metrics(groups)
            metrics |= update(groups, cfg, policy, trainer.reference, trainer.optimizer, state)
            trained = time.perf_counter()
            engine.load(policy)
            metrics |= costs(start, sampled, trained, metrics["completion/tokens"], engine)
            finish_step(cfg, trainer, groups, metrics)
    except Stopped:
        if state.step != saved_step:
            run.save_checkpoint(trainer)
        say(f"stopped after step {state.step}: {run.way_on()}")
        dist.barrier()
        raise
    if not cfg.eval_only:
        save_result(cfg, trainer)

def sample_groups(cfg: Config, trainer: "Trainer") -> tuple[list[Group], dict[str, Any]]:
    """The scored groups of a step, and how they came about: of one round of prompts or (DAPO,
    section 3.2) as many as it takes, and are allowed, to fill the step with differing rewards."""
    state, wanted = trainer.state, cfg.prompts_per_step
    kept, failures = [], 0
    for i in range(cfg.dynamic_sampling_rounds):
        rows = draw(trainer.rows, cfg.seed, state.drawn + i * wanted, wanted, cfg.shuffle_dataset)
        seed = (cfg.seed * 1_000_003 + state.step + 1) * cfg.dynamic_sampling_rounds + i
        groups, failed = rollout(trainer.engine, trainer.pool, rows, cfg.num_generations,
                                 cfg.temperature, seed, "sampling")
        failures += failed
        if cfg.dynamic_sampling_rounds == 1:
            kept = groups
        else:
            kept += [group for group in groups if rewards_differ(group, cfg.min_group_std)]
        if len(kept) >= wanted:
            break
    kept = kept[:wanted] or groups    # with no signal the last round stands for the step
    return kept, {"reward/failures": failures, "rollout/rounds": i + 1,
                  "rollout/dropped_groups": (i + 1) * wanted - len(kept)}

# --- advantage ------------------------------------------------------------------------------------
def group_advantages(rewards: Tensor, scale_rewards: str = "group", baseline: str = "mean",
                     min_group_std: float = 1e-6) -> Tensor:
    """Advantage of each completion in its group, (r - mean) / (std + 1e-6), population std (4.1).
    rewards [B, G]: B groups of G; nan is left out. scale_rewards: "group" divides by the group's
    std, "batch" by that of all rewards, "none" by nothing (Dr. GRPO, arXiv:2503.20783). baseline:
    "leave_one_out" takes the mean of the others of the group (RLOO, arXiv:2402.14740). A std of at
    most min_group_std times the group's largest reward is rounding, and gives exactly 0. Returns
    [B, G] in float32."""
    r = rewards.double()                                                      # [B, G]
    given = ~r.isnan()                                                        # [B, G]
    distance = r - r.nanmean(1, keepdim=True)                                 # [B, G]
    std = root_mean_square(distance)                                          # [B, 1]
    if baseline == "leave_one_out":
        n = given.sum(1, keepdim=True)                                        # [B, 1]
        distance = distance * n / (n - 1).clamp(1)
    size = r.abs().nan_to_num(0.0).amax(1, keepdim=True)                      # [B, 1]
    no_signal = root_mean_square(distance) <= min_group_std * size            # [B, 1]
    if scale_rewards == "group":
        distance = distance / (std + 1e-6)
    if scale_rewards == "batch":
        distance = distance / (r[given].std(correction=0) + 1e-6)
    return distance.masked_fill(no_signal | ~given, 0.0).float()

def decoupled_advantages(groups: list[Group], cfg: Config) -> Tensor:
    """Each reward normalised in its group, their weighted sum, divided by its std over the step
    (GDPO, arXiv:2601.05242, eq. 4 to 6). [B, G]"""
    weights = reward_weights(cfg) | {"overlong": 1.0}
    total = sum(weight * group_advantages(reward_table(groups, name), "group",
                                          cfg.advantage_baseline, cfg.min_group_std)
                for name, weight in weights.items())                          # [B, G]
    return total / (total.std(correction=0) + 1e-6)

def set_advantages(groups: list[Group], cfg: Config) -> None:
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        advantages = decoupled_advantages(groups, cfg)                        # [B, G]
    else:
        advantages = group_advantages(reward_table(groups), cfg.scale_rewards,
                                      cfg.advantage_baseline, cfg.min_group_std)
    for group, values in zip(groups, advantages.tolist(), strict=True):
        for sample, value in zip(group, values, strict=True):
            sample.advantage = value

def has_signal(group: Group) -> bool:
    return any(s.advantage != 0 for s in group)

# --- loss -----------------------------------------------------------------------------------------
@dataclass
class Tokens:
    """T sampled tokens of completions, as the loss sees them. Every tensor is [T]."""
    advantages: Tensor
    token_weights: Tensor                   # share of the token in the mean of its update
    sequence: Tensor                        # number of the token's completion
    engine_logprobs: Tensor                 # log mu
    old_logprobs: Tensor | None = None      # the policy's, at the weights that sampled
    ref_logprobs: Tensor | None = None      # the reference's, if there is one
    logprobs: Tensor | None = None          # the policy's now, with gradient
    entropy: Tensor | None = None           # of the policy's distribution, with gradient

MAX_EXPONENT = 20.0    # e**20 is 5e8: beyond, a ratio's or KL's gradient would overflow float32

def policy_loss(tokens: Tokens, cfg: Config, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate with KL penalty (eq. 3), negated:

        - sum_t token_weights * (engine_weights * surrogate - beta KL + entropy_coef entropy)

    token_weights hold the mean's denominator, so that micro-batches add up. Returns the loss and
    metrics, each a value for every token [T]: means are over all tokens of the update, and the
    maximum where the name ends in _max."""
    ratio = policy_ratio(tokens, cfg.importance_sampling_level)               # [T]
    surrogate, _ = LOSS_TYPES[cfg.loss_type]
    value, metrics = surrogate(tokens, ratio, cfg)                            # [T]
    measured = tokens.engine_logprobs.isfinite()                              # [T]
    # vLLM may return nan for a token that is nearly certain: its weight is 1.
    gap = tokens.old_logprobs - tokens.engine_logprobs                        # [T] log pi_old/mu
    gap = gap.masked_fill(~measured, 0.0)
    if cfg.vllm_importance_sampling_correction:
        value = value * engine_weights(gap, tokens.sequence, cfg.vllm_importance_sampling_mode,
                                       cfg.vllm_importance_sampling_clip_max)
    if tokens.ref_logprobs is not None:
        log_ref_ratio = tokens.ref_logprobs - tokens.logprobs                 # [T]
        bounded = log_ref_ratio.clamp(max=MAX_EXPONENT)
        k3 = bounded.exp() - bounded - 1      # eq. 4
        kl = k3 if cfg.kl_estimator == "k3" else log_ref_ratio.square() / 2
        if cfg.use_bias_correction_kl:
            kl = kl * ratio
        value = value - beta * kl
        metrics["kl"] = k3
    if cfg.entropy_coef:
        value = value + cfg.entropy_coef * tokens.entropy
    metrics |= {"tokens": torch.ones_like(gap), "entropy": tokens.entropy, "ratio_max": ratio,
                "engine_gap_mean": gap.abs(), "engine_gap_max": gap.abs(), "engine_nan": ~measured}
    return -(tokens.token_weights * value).sum(), metrics

def policy_ratio(tokens: Tokens, level: str) -> Tensor:
    """rho = pi_theta / pi_old of each token; at the level "sequence", the geometric mean of its
    completion's (GSPO, arXiv:2507.18071, eq. 7). Returns [T]."""
    log_ratio = tokens.logprobs - tokens.old_logprobs                         # [T]
    if level == "sequence":
        lengths = sum_per_sequence(torch.ones_like(log_ratio), tokens.sequence)
        log_ratio = sum_per_sequence(log_ratio, tokens.sequence) / lengths
    return log_ratio.clamp(max=MAX_EXPONENT).exp()

def clipped_surrogate(tokens: Tokens, ratio: Tensor, cfg: Config) -> tuple[Tensor, dict]:
    """min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), rho at most delta where A < 0."""
    low, high, advantages = 1 - cfg.epsilon, 1 + cfg.clip_high, tokens.advantages
    bounded = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
    value = torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    return value, {"clip_low": (ratio < low) & (advantages < 0),
                   "clip_high": (ratio > high) & (advantages > 0)}

def cispo_surrogate(tokens: Tokens, ratio: Tensor, cfg: Config) -> tuple[Tensor, dict]:
    """min(rho, 1 + epsilon_high) A log pi_theta, rho a constant (arXiv:2506.13585, eq. 4): no
    token's gradient is stopped."""
    weight = ratio.detach().clamp(max=1 + cfg.clip_high)
    return weight * tokens.advantages * tokens.logprobs, {"ratio_cut": ratio > 1 + cfg.clip_high}

def sum_per_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Each token's value replaced by the sum over its completion. [T], [T] -> [T]"""
    return torch.zeros_like(values).index_add(0, sequence, values)[sequence]

def engine_weights(gap: Tensor, sequence: Tensor, mode: str, maximum: float) -> Tensor:
    """pi_old/mu of each token or its completion, from its log [T]; above the maximum cut or 0."""
    if mode == "sequence_mask":
        gap = sum_per_sequence(gap, sequence)
    weights = gap.exp()
    if mode == "token_truncate":
        return weights.clamp(max=maximum)
    return weights.masked_fill(weights > maximum, 0.0)

def completion_mean(completions: int, tokens: int, own_tokens: int, cfg: Config) -> float:
    return 1 / (completions * own_tokens)

def token_mean(completions: int, tokens: int, own_tokens: int, cfg: Config) -> float:
    return 1 / tokens

def fixed_length_mean(completions: int, tokens: int, own_tokens: int, cfg: Config) -> float:
    return 1 / (completions * cfg.max_completion_length)

# The surrogate, and what one token weighs in the mean over an update.
LOSS_TYPES = {
    "grpo": (clipped_surrogate, completion_mean),
    "dapo": (clipped_surrogate, token_mean),
    "dr_grpo": (clipped_surrogate, fixed_length_mean),
    "cispo": (cispo_surrogate, token_mean),
}

def set_token_weights(groups: list[Group], cfg: Config) -> list[Sample]:
    """Gives each sample its tokens' share in the mean of one update: the loss is then a sum of
    weighted tokens, however they are split. Returns the samples to train on."""
    completions = sum(len(group) for group in groups)
    candidates = [s for group in groups for s in group if in_loss(s, cfg)]
    tokens = sum(numpy.count_nonzero(s.mask) for s in candidates)
    _, token_share = LOSS_TYPES[cfg.loss_type]
    for s in candidates:
        s.token_weight = token_share(completions, tokens, numpy.count_nonzero(s.mask), cfg)
    if not any(has_signal(group) for group in groups):
        return []    # a step would only follow the optimizer's momentum
    if not cfg.skip_zero_std_groups:
        return candidates
    return [s for group in groups if has_signal(group) for s in group if in_loss(s, cfg)]

def in_loss(sample: Sample, cfg: Config) -> bool:
    if sample.reward is None or not numpy.any(sample.mask):
        return False
    return not (sample.truncated and cfg.mask_truncated_completions)

# --- update ---------------------------------------------------------------------------------------
def update(groups: list[Group], cfg: Config, policy: "Policy", reference: Callable | None,
           optimizer: torch.optim.AdamW, state: "State") -> dict[str, Any]:
    """All optimizer updates of a step's groups, the same on every rank. Returns their metrics."""
    STOPPING.phase = "training"
    rate = learning_rate(state.step, cfg)
    optimizer.param_groups[0]["lr"] = rate
    minibatches, planned = pack_minibatches(groups, cfg, policy, reference)
    measures, norms = [], []
    weights_moved = False
    passes = cfg.num_iterations * sum(len(batches) for batches in minibatches)
    bar = progress("training", total=passes)
    for iteration in range(cfg.num_iterations):
        first_update = iteration == 0 and cfg.num_minibatches == 1    # by the weights that sampled
        for batches in minibatches:
            for batch in batches:
                if not weights_moved:    # until then a stop costs only this step's samples
                    stop_point()
                logprobs, entropy = policy(batch)                             # [T], [T]
                if first_update:
                    batch.tokens.old_logprobs = logprobs.detach()
                tokens = replace(batch.tokens, logprobs=logprobs, entropy=entropy)
                loss, metrics = policy_loss(tokens, cfg, state.beta)
                # Copies of the shards (--fsdp-size) meet once an update.
                policy.set_requires_all_reduce(batch is batches[-1])
                # FSDP takes the mean of the ranks' gradients, and we want their sum.
                (loss * dist.get_world_size()).backward()
                measures.append(summed(metrics) | {"loss": loss.item()})
                bar.update()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            norms.append(whole(norm).item())
            if math.isfinite(norms[-1]):
                optimizer.step()
                weights_moved = True
            optimizer.zero_grad()
    bar.close()
    return update_metrics(measures, norms, planned * cfg.num_iterations) | {
        "policy/learning_rate": rate, "policy/beta": state.beta}

def pack_minibatches(groups: list[Group], cfg: Config, policy: "Policy",
                     reference: Callable | None) -> tuple[list[list["Batch"]], int]:
    """This rank's micro-batches of each optimizer update that has a signal, and how many updates a
    pass has with those that have none. Sets old and reference logprobs, once a rollout."""
    size = max(1, math.ceil(len(groups) / cfg.num_minibatches))
    budget = cfg.tokens_per_micro_batch if policy.packed else 1
    minibatches = []
    for i in range(0, len(groups), size):
        samples = set_token_weights(groups[i:i + size], cfg)
        mine = split(samples, dist.get_world_size(), budget)[dist.get_rank()]
        batches = [pack(piece, policy.packed, policy.device) for piece in mine]
        if batches:
            minibatches.append(batches)
    with torch.no_grad():
        for batch in itertools.chain.from_iterable(minibatches):
            if reference:
                batch.tokens.ref_logprobs = reference(batch)[0]
            if cfg.num_minibatches > 1:
                batch.tokens.old_logprobs = policy(batch)[0]
    return minibatches, math.ceil(len(groups) / size)

def learning_rate(step: int, cfg: Config) -> float:
    """Of a step counted from 0: a linear warm-up, then as lr_scheduler_type says."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * ((step + 1) / cfg.warmup_steps)
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    if cfg.lr_scheduler_type == "linear":
        return cfg.learning_rate * (1 - done)
    if cfg.lr_scheduler_type == "cosine":
        return cfg.learning_rate * (0.5 * (1 + math.cos(math.pi * done)))
    return cfg.learning_rate

# --- policy ---------------------------------------------------------------------------------------
class Policy(nn.Module):
    """A causal language model as a function from a batch to the logprobs and entropies of its
    scored tokens."""

    def __init__(self, lm, temperature: float, device: torch.device):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.device = device
        self.packed = lm.config._attn_implementation != "sdpa"    # its attention takes packed rows

    def forward(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        # For a model that it takes from transformers, vLLM replaces the class's own __call__ by one
        # that works in the engine only, for the instances that were there before it too.
        output = nn.Module.__call__(
            self.lm.base_model, input_ids=batch.input_ids, position_ids=batch.position_ids,
            use_cache=False, **batch.attention)
        hidden = output.last_hidden_state[0, batch.score_index]             # [T, D]
        head = self.lm.get_output_embeddings().weight    # inside this forward: FSDP has gathered it
        return token_logprobs(hidden, head, batch.targets, self.temperature)

# --- engine ---------------------------------------------------------------------------------------
class Engine:
    """vLLM inside this process, beside the model that trains. Ranks that share one do the same."""

    def __init__(self, cfg: Config, model_config, tokenizer, stop_ids: list[int],
                 device: torch.device):
        self.on_cpu = device.type == "cpu"
        self.llm = start_vllm(cfg, model_config, self.on_cpu)
        from vllm import SamplingParams
        self.dtype = compute_dtype(cfg)
        self.tokenizer = tokenizer
        self.sleeps = cfg.vllm_enable_sleep_mode and not self.on_cpu
        self.sleep_level = cfg.vllm_sleep_level
        self.sleeping_bytes = 0    # what torch counts as allocated, and is freed while it sleeps
        self.params = functools.partial(
            SamplingParams, logprobs=0, flat_logprobs=True, stop_token_ids=stop_ids,
            stop=list(cfg.stop), include_stop_str_in_output=True, detokenize=bool(cfg.stop))
        self.limit = cfg.max_completion_length
        self.ranks = cfg.vllm_tensor_parallel_size

    def sample(self, rows: list[Row], n: int, temperature: float, seed: int,
               phase: str) -> list[Group]:
        """n completions of each row's prompt; `seed` fixes the draw."""
        # vLLM draws from this process's generators: torch's, or numpy's for a seed a request.
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        if not rows:
            return []
        bar = functools.partial(progress, phase) if ON_TERMINAL else False
        rows = [row for row in rows for _ in range(n)]    # a request each, which the bar counts
        params = [self.params(temperature=temperature, max_tokens=self.limit - row.read)
                  for row in rows]
        prompts = [{"prompt_token_ids": row.prompt_ids.tolist()} for row in rows]
        outputs = self.llm.generate(prompts, params, use_tqdm=bar)
        samples = [self.to_sample(row, output.outputs[0])
                   for row, output in zip(rows, outputs, strict=True)]
        return [samples[i:i + n] for i in range(0, len(samples), n)]

    def to_sample(self, row: Row, completion) -> Sample:
        ids = numpy.array(completion.token_ids, numpy.int32)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if row.thinks:    # the prompt has opened the thought; the reward must see that it is one
            text = "<think>" + text
        return Sample(row=row, ids=ids, mask=numpy.ones(len(ids), bool), text=text,
                      engine_logprobs=numpy.array(completion.logprobs.logprobs, numpy.float32),
                      truncated=completion.finish_reason == "length")

    def load(self, policy: "Policy") -> None:
        """The policy's weights into the live engine, a tensor at a time, in the engine's dtype."""
        self.wake("weights")
        if self.on_cpu:
            self.llm.apply_model(remake_expert_kernels)
        weights = checkpoint_tensors(policy, self.dtype)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.on_cpu and policy.lm.config.tie_word_embeddings:
            self.llm.apply_model(repack_head)
        self.wake("kv_cache")
        dropped = self.llm.reset_prefix_cache()    # keys and values of the old weights
        require(dropped, "vLLM didn't drop the cache of the old weights")

    def sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=self.sleep_level)

    def wake(self, tag: str) -> None:
        if self.sleeps:    # vLLM itself passes over what is awake
            torch.cuda.empty_cache()    # what torch holds in reserve is lost to vLLM
            self.llm.wake_up(tags=[tag])

def rollout(engine: Engine, pool: "RewardPool", rows: list[Row], n: int, temperature: float,
            seed: int, phase: str) -> tuple[list[Group], int]:
    """Samples and scores this rank's share of the rows. Returns all ranks' groups, in the rows'
    order, and how many rewards failed on a completion: each rank then knows the whole step."""
    number, place = divmod(dist.get_rank(), engine.ranks)
    engines = dist.get_world_size() // engine.ranks
    share = rows[len(rows) * number // engines:len(rows) * (number + 1) // engines]
    seed = seed * engines + number
    groups, failures = [], []
    STOPPING.phase = phase
    with STOPPING.interruptible(engine.ranks == 1):    # none leaves others alone in an engine
        STOPPING.break_off_if_told()    # by a signal that came before
        groups = engine.sample(share, n, temperature, seed, phase)
        if place > 0:
            groups = []    # the engine's first rank has them
        converse(groups, engine, pool, temperature, seed, phase)
        failures = pool.score(groups)
    shares = gathered((groups, failures))
    stop_point()
    groups = [group for theirs, _ in shares for group in theirs]
    failures = [failure for _, theirs in shares for failure in theirs]
    report_failures(failures, len(rows) * n)
    return groups, len(failures)

# ==================================================================================================
# What follows changes nothing of what is learnt.

# --- data -----------------------------------------------------------------------------------------
def arithmetic_rows(cfg: Config) -> list[dict]:
    """Two-operand problems, shuffled. None of the first eval_size comes again, not even a + b as
    b + a."""
    operands = range(cfg.arithmetic_min, cfg.arithmetic_max + 1)
    size = len(operands)
    total = len(cfg.arithmetic_operators) * size**2
    rows = []
    held_out = set()
    for number in random.Random(cfg.data_seed).sample(range(total), min(total, 2**16)):
        operator = cfg.arithmetic_operators[number // size**2]
        a = operands[number // size % size]
        b = operands[number % size]
        answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
        problem = operator, answer, frozenset({a, b})    # b + a is the same, b - a is not
        if len(rows) < cfg.eval_size:
            held_out.add(problem)
        elif problem in held_out:
            continue
        question = f"What is {a} {operator} {b}? Answer with only the number."
        rows.append({"question": question, "answer": answer})
    return rows

def read_rows(name: str, cfg: Config, split: str) -> dict[str, Any]:
    """The rows of a dataset as they are given, by their places; a line of JSON as bytes."""
    if name.endswith((".json", ".jsonl")):
        data = Path(name).read_bytes()
        require(b"\0" not in data[:4], "it is UTF-16 or UTF-32, and must be UTF-8")
        if not re.match(rb"(\xef\xbb\xbf)?\s*\[", data):
            lines = enumerate(data.splitlines(), 1)    # as bytes: text may hold U+2028
            return {f"line {i}": line for i, line in lines if line.strip()}
        rows = json.loads(data)
    elif name == "arithmetic":
        rows = arithmetic_rows(cfg)
    elif ".py:" in name:
        rows = load_function("dataset", name)()
    else:
        with reported_as("it is no .json or .jsonl file and no path.py:function; for others: "
                         "pip install datasets", ImportError):
            from datasets import load_dataset
        if Path(name).is_file():
            rows = load_dataset(Path(name).suffix[1:], data_files=name, split="train")
        else:
            rows = load_dataset(name, cfg.dataset_config, split=split)
    return {f"row {i}": row for i, row in enumerate(rows, 1)}

def find_column(row: dict, names: list[str]) -> tuple[str, Any]:
    """The first of the columns that has a value, and the value; else ("", None). a.b is column a.b,
    or b inside a."""
    for name in names:
        value = row
        for key in [name] if name in row else name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return name, value
    return "", None

def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]

def is_text(value: Any) -> bool:
    """Whether it is text, not blank. Raises ValueError for half a surrogate pair."""
    return isinstance(value, str) and value.strip().encode() != b""

def is_gold(value: Any) -> bool:
    """Whether an answer can be compared with it: text or a finite number."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return is_text(value)

def plain_prompt(prompt: Any) -> str | list[dict]:
    """Text, or chat messages with their text parts joined and without blank system messages. Raises
    an exception of any kind for what is neither."""
    if isinstance(prompt, str):
        require(is_text(prompt), "it is blank")
        return prompt
    plain = []
    for message in prompt:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if message["role"] == "system" and not content.strip():
            continue
        require(is_text(message["role"]) and is_text(content), "a role or a content is blank")
        plain.append({**message, "content": content})
    require(plain[-1]["role"] != "assistant", "the last message is the assistant's own answer")
    return plain

def standard_row(row: Any, cfg: Config) -> dict:
    """The row with its prompt in `prompt` or `question` and its answer, if it has one, in `answer`,
    both checked. Raises UserError."""
    if isinstance(row, bytes):
        with reported_as("not JSON", ValueError, RecursionError):
            row = json.loads(row)
    require(isinstance(row, dict), f"a row must be an object of columns, not {row!r:.80}")
    if cfg.environment:
        with reported_as("the environment has no first words for it", Exception):
            row = {"prompt": play(cfg.environment, row, []), "row": row}
    names = [cfg.prompt_column] if cfg.prompt_column else ["prompt", "question", "problem"]
    column, prompt = find_column(row, names)
    require(column, f"a row needs a column `{'` or `'.join(names)}`, this one is {row!r:.80}")
    complaint = f"the {column} must be text or a list of {{role, content}}, not {prompt!r:.80}"
    with reported_as(complaint, Exception):    # whatever odd structures raise
        prompt = plain_prompt(prompt)
    names = [cfg.answer_column] if cfg.answer_column else ["answer", "solution"]
    _, answer = find_column(row, names)
    golds = as_list(answer)
    if "correct" in reward_weights(cfg):
        require(golds and all(map(is_gold, golds)), f"the reward `correct` needs a column "
                f"`{names[0]}` with text, a finite number or a list of them, not {answer!r:.40}")
    standard = row | {"answer": answer}
    if answer is None:
        del standard["answer"]
    standard.pop("prompt", None)
    standard["prompt" if column == "prompt" else "question"] = prompt
    return standard

def prompt_text(row: dict, tokenizer, cfg: Config) -> tuple[str, bool]:
    """The prompt as the model reads it, and whether the tokenizer adds its special tokens. A
    `question` is the user's turn in the model's chat template, if it has one; messages go through
    the template; a text `prompt` is read without it."""
    messages = row.get("prompt", row.get("question"))
    options = json.loads(cfg.chat_template_kwargs)
    if isinstance(messages, str):
        text = cfg.prompt_template.replace("{prompt}", messages)
        if "prompt" in row or not tokenizer.chat_template:
            require(not cfg.system_prompt and not options, "--system-prompt and "
                    "--chat-template-kwargs need messages or a `question`, and a chat template")
            return text, True
        messages = [{"role": "user", "content": text}]
    else:
        require(tokenizer.chat_template, "messages need a chat template, and the model has none: "
                "give it text, or name an instruct model with --model-name-or-path")
        require(cfg.prompt_template == "{prompt}", "--prompt-template needs text, not messages")
    if cfg.system_prompt:
        messages = [{"role": "system", "content": cfg.system_prompt}, *messages]
    with reported_as(f"the chat template refuses {str(messages):.200}", Exception):
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **options)
        text.encode()    # half a surrogate pair would fail all that is tokenized with it
    return text, False

def tokenize(read: list[tuple[Row, str]], special: bool, tokenizer) -> None:
    """Sets the tokens of rows: many at a time, on all cores."""
    for i in range(0, len(read), 1000):
        rows, texts = zip(*read[i:i + 1000])
        tokens = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        for row, ids in zip(rows, tokens, strict=True):
            if special and ids[:2] == [tokenizer.bos_token_id] * 2:    # the text begins with it
                del ids[0]
            row.prompt_ids = numpy.array(ids, numpy.int32)

def load_rows(name: str, split: str, tokenizer, cfg: Config, indices: Iterator[int]) -> list[Row]:
    """The rows of a dataset that are usable and short enough, shuffled. Says what it drops."""
    with reported_as(f"dataset {name} gave no rows", Exception, SystemExit):
        given = read_rows(name, cfg, split)
        require(given, "it is empty")
    rows, complaints = [], []
    read = {True: [], False: []}    # rows and their texts, with special tokens to be and without
    for place, raw in given.items():
        try:
            columns = standard_row(raw, cfg)
            text, special = prompt_text(columns, tokenizer, cfg)
        except (UserError, ArithmeticError, ValueError) as error:
            complaints.append(f"{place}: {error}")
            continue
        prompt = columns.pop("prompt", columns.get("question"))
        if cfg.environment:
            columns = columns["row"]
        thinks = text.rstrip().endswith("<think>")
        rows.append(Row(next(indices), prompt, numpy.empty(0), columns, thinks))
        read[special].append((rows[-1], text))
    for special in read:
        tokenize(read[special], special, tokenizer)
    if complaints:
        unusable = f"{len(complaints)} of {len(given)} rows are unusable, the first {complaints[0]}"
        require(rows and not cfg.strict_dataset, f"dataset {name}: {unusable}")
        say(f"dataset {name}: dropped: {unusable}")
    if name != "arithmetic":    # its problems come in random order
        rows = random.Random(cfg.data_seed).sample(rows, len(rows))
    limit = min(cfg.max_prompt_length, cfg.max_length - cfg.max_completion_length)
    short = [row for row in rows if len(row.prompt_ids) <= limit]
    if len(short) < len(rows):
        say(f"dataset {name}: dropped: {len(rows) - len(short)} of {len(rows)} prompts are longer "
            f"than {limit} tokens (--max-prompt-length, or what --vllm-max-model-length leaves)")
    return short

def load_data(cfg: Config, tokenizer) -> tuple[list[Row], dict[str, list[Row]]]:
    """Training rows, and held-out rows by set, which share no prompt with them. Says what was
    dropped."""
    indices = itertools.count()
    train = load_rows(cfg.dataset, cfg.dataset_split, tokenizer, cfg, indices)
    sets = {}
    for name in cfg.eval_dataset:
        sets[name] = load_rows(name, cfg.eval_split, tokenizer, cfg, indices)[:cfg.eval_size]
    if not sets:
        sets[cfg.dataset] = train[:cfg.eval_size]
        train = train[cfg.eval_size:]
    if cfg.eval_size == 0:
        sets = {}
    for name, rows in sets.items():
        require(rows, f"dataset {name}: no held-out prompt is within --max-prompt-length")
    # Conversations about different rows may begin alike.
    problem = lambda row: repr(row.columns) if cfg.environment else row.prompt_ids.tobytes()
    held_out = {problem(row) for rows in sets.values() for row in rows}
    fresh = [row for row in train if problem(row) not in held_out]
    if len(fresh) < len(train):
        say(f"dropped: {len(train) - len(fresh)} of {len(train)} training prompts are held out too")
    require(len(fresh) >= cfg.prompts_per_step or cfg.eval_only,
            f"dataset {cfg.dataset} leaves {len(fresh)} prompts to train on and {len(held_out)} "
            f"held out (--eval-size), fewer than the --prompts-per-step {cfg.prompts_per_step}")
    if "correct" in reward_weights(cfg) and not importlib.util.find_spec("math_verify"):
        golds = [as_list(row.columns["answer"])[0] for row in fresh[:256]]
        if not all(map(is_number, golds)):
            say("note: some answers are no plain numbers; completions must match them as text (pip "
                "install math-verify: as mathematics)")
    if not cfg.shuffle_dataset:
        fresh.sort(key=lambda row: row.index)
    return fresh, sets

def draw(rows: list[Row], seed: int, start: int, n: int, shuffle: bool = True) -> list[Row]:
    """The n rows after the first `start` of an endless stream, the same on every rank: each row
    once an epoch, in an order of its own each epoch if they are shuffled."""
    drawn = []
    for place in range(start, start + n):
        epoch, i = divmod(place, len(rows))
        drawn.append(rows[epoch_order(seed, epoch, len(rows))[i] if shuffle else i])
    return drawn

@functools.lru_cache(2)    # two epochs may meet in a step
def epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(n), n)

# --- checks of the config -------------------------------------------------------------------------
ABOVE_0 = """max_prompt_length prompts_per_step max_completion_length dynamic_sampling_rounds
    vllm_gpu_memory_utilization vllm_max_model_length reward_timeout reward_memory min_group_std
    epsilon epsilon_high delta kl_target num_iterations num_minibatches
    vllm_importance_sampling_clip_max max_steps learning_rate max_grad_norm max_skipped_steps
    tokens_per_micro_batch ddp_timeout lora_alpha eval_steps save_steps save_total_limit
    max_turns log_completions_steps vllm_tensor_parallel_size""".split()
NOT_BELOW_0 = """eval_size reward_workers soft_overlong_share entropy_coef beta warmup_steps
    weight_decay adam_beta2 fsdp_size lora_rank log_kl_steps eval_num_generations seed""".split()

def check_config(cfg: Config, world_size: int) -> None:
    """What flags alone can get wrong. Raises UserError naming the flag and what would be right."""
    for flag, right, rule in itertools.chain(rules(cfg), joint_rules(cfg, world_size)):
        require(right, f"--{flag.replace('_', '-')} {getattr(cfg, flag)!r} {rule}")

def rules(cfg: Config) -> Iterator[tuple]:
    """A flag, whether its value is right, what would be right: a later rule may rely on those
    before."""
    for flag in ABOVE_0:
        value = getattr(cfg, flag)
        if value is not None:
            yield flag, 0 < value < math.inf, "must be finite and above 0"
    for flag in NOT_BELOW_0:
        value = getattr(cfg, flag)
        if value is not None:
            yield flag, 0 <= value < math.inf, "must be finite and not negative"
    for flag in ("epsilon", "adam_beta2", "vllm_gpu_memory_utilization"):
        yield flag, getattr(cfg, flag) < 1, "must be below 1"
    yield "temperature", 0.01 <= cfg.temperature <= 2, "must be from 0.01 to 2, vLLM's range"
    yield "seed", cfg.seed < 2**31, "must be from 0 to 2**31 - 1"
    yield "soft_overlong_share", cfg.soft_overlong_share <= 1, (
        "is a share of --max-completion-length, at most 1")
    yield "num_generations", cfg.num_generations > 1, (
        "must be at least 2: each is judged against its group")
    yield "output_dir", cfg.output_dir != "", "must name a folder"
    if cfg.model_name_or_path.startswith(("/", ".")):
        yield "model_name_or_path", Path(cfg.model_name_or_path).is_dir(), "is no folder"
    yield "prompt_template", "{prompt}" in cfg.prompt_template, "must contain {prompt}"
    operators = re.fullmatch(r"[-+*]+", cfg.arithmetic_operators)
    yield "arithmetic_operators", operators, "takes any of + - *"
    yield "stop", all(cfg.stop), "takes texts that are not empty"
    names = {Path(name).stem for name in cfg.eval_dataset}
    different = len(names) == len(cfg.eval_dataset)
    yield "eval_dataset", different, "takes sets of different names: the metrics are called so"
    yield "reward", all(cfg.reward), "takes names that are not empty"
    weights = reward_weights(cfg)
    different = 0 < len(cfg.reward) == len(weights)
    yield "reward", different, "takes one or more different rewards"
    yield "reward", all(map(math.isfinite, weights.values())), "takes finite weights"
    with reported_as(f"--chat-template-kwargs {cfg.chat_template_kwargs!r} must be a JSON object",
                     ValueError, TypeError):
        dict(**json.loads(cfg.chat_template_kwargs))

def joint_rules(cfg: Config, world_size: int) -> Iterator[tuple]:
    """The same of flags that must fit each other."""
    fits = cfg.prompts_per_step % (world_size * cfg.num_minibatches) == 0
    yield "prompts_per_step", fits, (
        f"must be a multiple of {world_size} processes x --num-minibatches {cfg.num_minibatches}")
    surrogate, _ = LOSS_TYPES[cfg.loss_type]
    if cfg.fsdp_size:
        fits = world_size % cfg.fsdp_size == 0
        yield "fsdp_size", fits, f"must divide the {world_size} processes"
    fits = world_size % cfg.vllm_tensor_parallel_size == 0
    yield "vllm_tensor_parallel_size", fits, f"must divide the {world_size} processes"
    if cfg.delta is not None:
        clips = surrogate is clipped_surrogate
        yield "delta", clips, f"goes without --loss-type {cfg.loss_type}, which doesn't read it"
        bound = 1 + cfg.clip_high
        yield "delta", cfg.delta > bound, f"must be above 1 + epsilon_high = {bound}"
    if cfg.importance_sampling_level == "sequence":
        fits = cfg.loss_type == "grpo" and not cfg.use_bias_correction_kl
        yield "importance_sampling_level", fits, (
            "goes with --loss-type grpo and without --use-bias-correction-kl")
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        yield "scale_rewards", cfg.scale_rewards == "group", (
            "goes without --multi-objective-aggregation normalize_then_sum")
    if cfg.bf16_optimizer_states:
        # A mean of 8 bits isn't moved by what is within 1 in 256 x (1 - beta2) of it: a fifth.
        fits = cfg.adam_beta2 <= 0.98
        yield "adam_beta2", fits, "must be at most 0.98 with --bf16-optimizer-states"
    if cfg.beta == 0:
        yield "use_bias_correction_kl", not cfg.use_bias_correction_kl, "needs a --beta above 0"
        yield "kl_target", cfg.kl_target is None, "needs a --beta above 0"
    if cfg.environment:
        fits = cfg.reward == Config.reward
        yield "reward", fits, "goes without --environment, which returns the reward itself"
        yield "check_reward", cfg.check_reward is None, "goes without --environment"
        fits = cfg.vllm_tensor_parallel_size == 1
        yield "vllm_tensor_parallel_size", fits, "goes without --environment"
    if cfg.eval_only:
        yield "eval_only", cfg.eval_size > 0, "needs an --eval-size above 0"
    yield "vllm_max_model_length", cfg.max_length > cfg.max_completion_length, (
        f"leaves no room for a prompt beside --max-completion-length {cfg.max_completion_length}")
    yield "arithmetic_min", 0 <= cfg.arithmetic_max - cfg.arithmetic_min < 10**9, (
        f"is above --arithmetic-max {cfg.arithmetic_max}, or 10**9 and more below it")
    if cfg.device == "cuda":
        yield "device", torch.cuda.is_available(), (
            "needs a GPU and torch sees none: install a CUDA build of torch, or give --device cpu")

# --- rewards --------------------------------------------------------------------------------------
run_file = functools.cache(runpy.run_path)    # functions of one file share its module

def reward_weights(cfg: Config) -> dict[str, float]:
    """Weight of each reward that --reward names; the environment is the only one."""
    if cfg.environment:
        return {cfg.environment: 1.0}
    weights = {}
    for spec in cfg.reward:
        match = re.fullmatch(r"(?s)(.+?)(?::([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))?", spec)
        weights[match[1]] = float(match[2] or 1)
    return weights

@functools.cache
def load_function(flag: str, name: str) -> Callable:
    """What path.py:function, given to a flag, names; or one of REWARDS."""
    if flag == "reward" and name in REWARDS:
        return REWARDS[name]
    path, _, function_name = name.rpartition(":")
    require(Path(path).is_file(), f"--{flag} {name}: no file {path!r}; give path.py:function "
                                  "or another name from --help")
    sys.path.append(str(Path(path).resolve().parent))    # it may import what lies beside it
    try:
        function = run_file(path).get(function_name)
    except (Exception, SystemExit) as e:
        raise UserError(f"--{flag} {name}: importing {path} failed: "
                        f"{type(e).__name__}: {e}") from e
    complaint = f"{path} has no function {function_name!r} whose parameters can be seen"
    with reported_as(f"--{flag} {name}: {complaint}", Exception):
        inspect.signature(function)
    return function

def call_reward(name: str, samples: list[Sample]) -> list[Any]:
    """The rewards of completions, None where it doesn't apply; or what it raised for one alone. Of
    an environment: what `play` returns.

    The function gets those of these lists that it has parameters for, an entry a completion:
    prompts, completions, completion_ids and the columns of the first completion's row."""
    function = load_function("reward", name)
    parameters = inspect.signature(function).parameters
    records = []
    for sample in samples:
        own = {"completions": sample.text, "completion_ids": sample.ids.tolist()}
        records.append(sample.row.columns | {"prompts": sample.row.prompt} | own)
    arguments = {key: [record.get(key) for record in records] for key in records[0]}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {key: arguments[key] for key in parameters if key in arguments}
    try:
        if samples[0].turns:    # the function is an environment
            return [play(name, sample.row.columns, sample.turns) for sample in samples]
        rewards = list(function(**arguments))
    except BaseException as e:    # SystemExit too
        if len(samples) > 1:
            return [call_reward(name, [sample])[0] for sample in samples]
        return [f"{type(e).__name__}: {e}"]
    require(len(rewards) == len(samples),
            f"the reward {name} returned {len(rewards)} values for {len(samples)} completions")
    return [checked_reward(name, reward) for reward in rewards]

def checked_reward(name: str, reward: Any) -> float | None:
    if reward is None:
        return None
    complaint = f"the reward {name} must return finite numbers or None, got {reward!r:.200}"
    with reported_as(complaint, OverflowError):    # an int that no float can hold
        require(isinstance(reward, numbers.Real) and math.isfinite(reward), complaint)
    return float(reward)

def serve_rewards(cfg: Config, connection, printed: str) -> None:
    """The life of a worker: says that it is ready, then answers calls until it is killed."""
    # It dies with its parent, the fork server, which ends once nobody holds this descriptor:
    # nobody but the trainer is to hold it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    os.setpgid(0, 0)    # to be killed with what it has started
    limit = int(cfg.reward_memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        for name in reward_weights(cfg):
            load_function("reward", name)
        connection.send("ready")
        while True:
            connection.send(call_reward(*connection.recv()))
    except UserError as e:
        connection.send(e)

class Worker:
    """A process that calls rewards, one call at a time."""

    def __init__(self, cfg: Config, printed: str):
        context = multiprocessing.get_context("forkserver")
        self.connection, its_end = context.Pipe()
        self.process = context.Process(target=serve_rewards, args=(cfg, its_end, printed))
        self.process.start()
        its_end.close()
        with reported_as("--reward: a worker died, or took 2 minutes, as it imported the rewards",
                         OSError, EOFError):
            self.receive(120)

    def receive(self, seconds: float) -> Any:
        """Its next message. Raises TimeoutError if none comes, EOFError or OSError if it died."""
        if not self.connection.poll(seconds):
            raise TimeoutError
        message = self.connection.recv()
        if isinstance(message, UserError):
            raise message
        return message

class RewardPool:
    """Calls the rewards in processes: one that hangs, crashes, raises or eats memory costs only the
    completion at fault. A function with an attribute `whole_step`, True, gets all completions of a
    step in one call. What the rewards print is shown when the step is scored."""

    def __init__(self, cfg: Config, workers: int):
        """workers: how many, if --reward-workers doesn't say it; each starts at its first call."""
        self.cfg = cfg
        self.weights = reward_weights(cfg)
        flag = "environment" if cfg.environment else "reward"
        for name in self.weights:
            load_function(flag, name)    # to complain before anything else is loaded
        # It has no threads and no CUDA, and imports torch while the trainer loads the model.
        multiprocessing.forkserver.set_forkserver_preload(["torch"])
        multiprocessing.forkserver.ensure_running()
        atexit.register(self.close)    # before multiprocessing waits for its processes
        self.printed = f"/proc/{os.getpid()}/fd/{os.memfd_create('printed')}"
        workers = cfg.reward_workers or workers
        self.threads = ThreadPoolExecutor(workers)    # each waits for one worker
        self.idle: list[Worker | None] = [None] * workers

    def close(self) -> None:
        """Ends all workers and removes their temporary folder. Needed before os._exit only."""
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.util._run_finalizers()

    def call(self, name: str, samples: list[Sample]) -> None:
        """Sets the samples' rewards[name], to a text where there is none: what went wrong."""
        worker = self.idle.pop()    # the last used, which may keep a state
        if worker is None or not worker.process.is_alive():
            worker = Worker(self.cfg, self.printed)
        try:
            worker.connection.send((name, samples))
            answers = worker.receive(self.cfg.reward_timeout)
        except (OSError, EOFError) as e:
            with contextlib.suppress(ProcessLookupError):    # all of them have ended
                os.killpg(worker.process.pid, signal.SIGKILL)    # it, and what it has started
            worker.process.join()
            late = f"took over --reward-timeout {self.cfg.reward_timeout:g} s"
            fault = late if isinstance(e, TimeoutError) else "its process died"
            answers = [fault] * len(samples)
        self.idle.append(worker)
        for sample, answer in zip(samples, answers):
            sample.rewards[name] = answer

    def ask(self, name: str, calls: list[list[Sample]]) -> None:
        list(self.threads.map(self.call, itertools.repeat(name), calls))

    def ask_all(self, name: str, groups: list[Group]) -> None:
        """Calls a reward for groups. Where it hangs or dies it is asked again, a completion at a
        time: if it fails on all of one such group, not of others, as that might take hours."""
        whole_step = getattr(load_function("reward", name), "whole_step", False)
        samples = list(itertools.chain(*groups))
        self.ask(name, [samples] if whole_step and samples else groups)
        failed = [group for group in groups if isinstance(group[0].rewards[name], str)]
        for part in (failed[:1], failed[1:]):
            alone = list(itertools.chain(*part))
            self.ask(name, [[sample] for sample in alone])
            if all(isinstance(sample.rewards[name], str) for sample in alone):
                break

    def score(self, groups: list[Group]) -> list[str]:
        """Sets the samples' rewards, each and their weighted sum; what failed is 0, and returned.

        `correct` is asked too, as a metric, where it isn't a reward and every row has an answer;
        and with it `parsable`."""
        names = list(self.weights)
        if not self.cfg.environment:    # it has answered already, as the turns were played
            if all("answer" in group[0].row.columns for group in groups) and "correct" not in names:
                names.append("correct")
            if "correct" in names:
                names.append("parsable")
            for name in names:
                self.ask_all(name, groups)
        samples = list(itertools.chain(*groups))
        failures = []
        for name in names:
            for sample in samples:
                answer = sample.rewards[name]
                if isinstance(answer, str):
                    failures.append(f"{name}: {answer}, on {sample.text!r:.200}")
                    sample.rewards[name] = 0.0
        for sample in samples:
            sample.reward = self.weighted_sum(sample)
        printed = Path(self.printed).read_text(errors="replace")
        if printed:
            print(printed, end="", flush=True)
            os.truncate(self.printed, 0)
        return failures

    def weighted_sum(self, sample: Sample) -> float | None:
        """None where no reward applies. Too long a completion costs up to 1 (DAPO, equation 13)."""
        names = [name for name in self.weights if sample.rewards[name] is not None]
        if not names:
            return None
        terms = [self.weights[name] * sample.rewards[name] for name in names]
        last_tokens = self.cfg.soft_overlong_share * self.cfg.max_completion_length
        if last_tokens:
            excess = len(sample.ids) - self.cfg.max_completion_length
            sample.rewards["overlong"] = -max(0.0, excess / last_tokens + 1)
            terms.append(sample.rewards["overlong"])
        return round(sum(terms), 9)    # equal sums stay equal

def check_reward(pool: RewardPool, file: str) -> None:
    """Scores the completions of a file, and says where their reward isn't the one it has there."""
    with reported_as(f"--check-reward {file}: lines must be JSON objects with `completion`, a text,"
                     " and `reward`, a number", OSError, ValueError, KeyError, TypeError):
        cases = [json.loads(line) for line in Path(file).read_text().splitlines()]
        wanted = [float(case.pop("reward")) for case in cases]
        nothing = numpy.empty(0)
        groups = [[Sample(Row(i, case.get("prompt", ""), [], case), nothing, nothing, nothing,
                          False, str(case.pop("completion")))] for i, case in enumerate(cases)]
    pool.score(groups)    # starts the workers, which isn't to count
    start = time.perf_counter()
    failures = pool.score(groups)
    seconds = time.perf_counter() - start
    report_failures(failures, len(cases))
    wrong = 0
    for place, ([sample], reward) in enumerate(zip(groups, wanted), 1):
        if sample.reward != reward:
            wrong += 1
            say(f"line {place}: {sample.reward}, not {reward}, for {sample.text!r:.200}")
    say(f"{len(cases) - wrong} of {len(cases)} rewards are as wanted; a call takes "
        f"{1000 * seconds / max(1, len(cases)):.1f} ms")

# --- environments ---------------------------------------------------------------------------------
def converse(groups: list[Group], engine: Engine, pool: RewardPool, temperature: float, seed: int,
             phase: str) -> None:
    """With an environment, all that follows the first replies, one turn of all completions at a
    time. Sets their rewards. Its words are read and not trained on. A conversation that doesn't
    end within max_turns and max_completion_length has a reward of 0, and counts as truncated."""
    cfg, name = pool.cfg, pool.cfg.environment
    if not name:
        return
    samples = list(itertools.chain(*groups))
    for s in samples:
        s.turns = [s.row.prompt, s.text]
    playing = samples
    turn = 0
    while playing:
        turn += 1
        pool.ask_all(name, by_row(playing))
        told = []
        for s in playing:
            answer = s.rewards[name]
            if isinstance(answer, dict):
                s.rewards = answer
            if isinstance(answer, list):
                s.rewards[name] = 0.0
                s.truncated = True
                words = words_between(answer, s.ids, engine.tokenizer, cfg)
                fits = len(s.ids) + len(words) < cfg.max_completion_length
                if fits and turn < cfg.max_turns:
                    s.turns.append(answer)
                    extend(s, words, [False] * len(words), [0.0] * len(words))
                    told.append(s)
        rows = [replace(s.row, prompt_ids=numpy.append(s.row.prompt_ids, s.ids), read=len(s.ids))
                for s in told]
        replies = engine.sample(rows, 1, temperature, seed + turn * 10**9, phase)
        for s, [reply] in zip(told, replies, strict=True):
            s.turns.append(reply.text)
            extend(s, reply.ids, reply.mask, reply.engine_logprobs)
            s.truncated = reply.truncated
            s.text = engine.tokenizer.decode(s.ids)
        playing = told
    parts = dict.fromkeys(itertools.chain(*(s.rewards for s in samples)), 0.0)
    for s in samples:
        s.rewards = parts | s.rewards

def extend(sample: Sample, ids, mask, engine_logprobs) -> None:
    sample.ids = numpy.append(sample.ids, ids).astype(numpy.int32)
    sample.mask = numpy.append(sample.mask, mask)
    sample.engine_logprobs = numpy.append(sample.engine_logprobs, engine_logprobs)

def play(name: str, row: dict, turns: list) -> list[dict] | dict[str, float]:
    """What the environment says next, as chat messages; or, if it has ended, its rewards and under
    its name their sum. It is run from its start each time: no process must keep it between two
    turns. `random` is seeded by the row: all completions of a group play the same game."""
    random.seed(repr(row))
    game = load_function("environment", name)(copy.deepcopy(row))
    try:
        for reply, before in itertools.zip_longest([None, *turns[1::2]], turns[::2]):
            words = game.send(reply)
            if isinstance(words, str):
                words = {"role": "user", "content": words}
            words = as_list(words)
            require(before in (None, words), "it said something else when it was run again: it may "
                    "depend on the row, the replies and the module `random` only")
        return words
    except StopIteration as end:
        rewards = end.value if isinstance(end.value, dict) else {name: end.value}
        rewards = {part: float(checked_reward(part, value)) for part, value in rewards.items()}
        return rewards | {name: sum(rewards.values())}

def words_between(messages: list[dict], reply: list[int], tokenizer, cfg: Config) -> list[int]:
    """What the chat template puts between a reply and the next: the end that two conversations
    share which differ in the reply. Sampled tokens themselves are never made from text again."""
    chats = []
    for text in "ab":
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        words, special = prompt_text({"prompt": chat + messages}, tokenizer, cfg)
        chats.append(tokenizer(words, add_special_tokens=special)["input_ids"])
    first, second = chats
    n = 0
    while first[-n - 1] == second[-n - 1]:
        n += 1
    if first[-n] == reply[-1]:    # the model has ended its turn itself
        n -= 1
    return first[-n:]

# --- packing --------------------------------------------------------------------------------------
@dataclass
class Batch:
    """A micro-batch: a row of N tokens for the model to read, of which T are scored."""
    input_ids: Tensor            # [1, N]
    position_ids: Tensor         # [1, N]
    attention: dict[str, Any]    # what tells the model's attention who sees whom
    score_index: Tensor          # [T] place in the row of the hidden state that predicts the token
    targets: Tensor              # [T]
    tokens: Tokens

def by_row(samples: list[Sample]) -> list[Group]:
    return [list(group) for _, group in itertools.groupby(samples, key=lambda s: s.row.index)]

def packed_length(samples: list[Sample]) -> int:
    """Tokens of a row with these samples: each prompt once, and the completions."""
    prompts = {s.row.index: len(s.row.prompt_ids) for s in samples}
    return sum(prompts.values()) + sum(len(s.ids) for s in samples)

def split(samples: list[Sample], world_size: int, budget: int) -> list[list[list[Sample]]]:
    """Deals samples, group after group, into micro-batches: result[rank][micro-batch]. Ranks get
    nearly equal tokens and the same number of micro-batches, each of at most `budget` tokens or of
    one sample. A group over the budget is cut, its prompt repeated."""
    ranks = []
    for share in equal_shares(samples, world_size):
        micro_batches = []
        for group in by_row(share):
            parts = [group]
            if packed_length(group) > budget:
                parts = [[s] for s in group]
            for part in parts:
                if not micro_batches or packed_length(micro_batches[-1] + part) > budget:
                    micro_batches.append([])
                micro_batches[-1] += part
        ranks.append(micro_batches)
    most = max(map(len, ranks))
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in ranks]

def equal_shares(samples: list[Sample], world_size: int) -> list[list[Sample]]:
    """Cuts samples, in their order, into one share a rank, by where the middle of each lies in the
    tokens of all. The first of a row's samples counts with the prompt."""
    total = packed_length(samples)
    shares = [[] for _ in range(world_size)]
    before = 0    # tokens
    for group in by_row(samples):
        length = len(group[0].row.prompt_ids)
        for s in group:
            length += len(s.ids)
            middle = before + length / 2
            shares[int(middle / total * world_size)].append(s)
            before += length
            length = 0
    return shares

# On a GPU FlexAttention is compiled for the first row's length and once more for all others, with
# gradients and without. Rows under 256 tokens, which are two blocks, and lengths that differ where
# the number of blocks doesn't would take more variants, and torch compiles no more than eight.
ROW_MULTIPLE = {"cpu": 1, "cuda": 256}

# A micro-batch of nothing keeps a rank in step with those that have one more.
NOTHING = Sample(row=Row(index=-1, prompt="", prompt_ids=[0], columns={}), ids=[0], mask=[False],
                 engine_logprobs=[0.0], truncated=False, text="")

def pack(samples: list[Sample], packed: bool, device: torch.device) -> Batch:
    """A micro-batch in one row: each group is its prompt and then its completions, whose positions
    all go on from the prompt's. Sampled tokens are scored; a completion's last token is never
    read. `packed` off: one completion, under the model's own attention. On a GPU the row ends with
    tokens that no other sees."""
    samples = samples or [NOTHING]
    read, positions, parents = [], [], []    # of each prompt and completion; number of its prompt
    scored = []    # of each completion [6, T]: what the loss needs of its sampled tokens
    n = 0          # tokens read
    for group in by_row(samples):
        prompt, parent = group[0].row.prompt_ids, len(read)
        read.append(prompt)
        positions.append(numpy.arange(len(prompt)))
        parents.append(parent)
        n += len(prompt)
        prompt_end = n - 1    # it predicts the first token of every completion
        for s in group:
            predictors = numpy.arange(n - 1, n - 1 + len(s.ids))
            predictors[0] = prompt_end
            columns = numpy.broadcast_arrays(predictors, s.ids, len(read), s.advantage,
                                             s.token_weight, s.engine_logprobs)
            scored.append(numpy.compress(s.mask, columns, 1))    # in float64
            read.append(s.ids[:-1])
            positions.append(numpy.arange(len(prompt), len(prompt) + len(read[-1])))
            parents.append(parent)
            n += len(read[-1])
    padding = -n % ROW_MULTIPLE[device.type]
    if packed and padding:    # as a prompt without completions
        parents.append(len(read))
        read.append([0] * padding)
        positions.append([0] * padding)
    lengths = list(map(len, read))
    input_ids, position_ids = (torch.tensor(numpy.concatenate(pieces), device=device).long()
                               for pieces in (read, positions))                         # [N] each
    columns = torch.tensor(numpy.concatenate(scored, 1), device=device)                 # [6, T]
    score_index, targets, piece = columns[:3].long()
    advantages, token_weights, engine_logprobs = columns[3:].float()
    sequence = piece.unique(return_inverse=True)[1]    # [T] the completions from 0 on
    return Batch(input_ids[None], position_ids[None],
                 packed_attention(lengths, parents, device) if packed else {}, score_index, targets,
                 Tokens(advantages, token_weights, sequence, engine_logprobs))

def packed_attention(lengths: list[int], parents: list[int], device: torch.device) -> dict:
    """That a token sees its own sequence up to itself, and its prompt: on GPUs as FlexAttention's
    block mask, on the CPU as tables for `grouped_attention`."""
    if device.type == "cuda":
        return {"attention_mask": block_mask(lengths, parents, device)}
    n = sum(lengths)
    places = torch.arange(n, device=device).split(lengths)
    prompts = sorted(set(parents))
    completions = [i for i, parent in enumerate(parents) if i != parent]
    prompt_places = padded([places[i] for i in prompts], n)                   # [P, Lp]
    own_places = padded([places[i] for i in completions], n)                  # [C, Lc]
    seen_places = padded([places[parents[i]] for i in completions], n)        # [C, Lp]
    seen_places = torch.cat([seen_places, own_places], 1)                     # [C, Lp + Lc]
    in_tables = torch.cat([prompt_places.flatten(), own_places.flatten()])
    return {"place": in_tables.argsort()[:n],    # [N] where each token of the row is in the tables
            "tables": [attention_table(prompt_places, prompt_places, n),
                       attention_table(own_places, seen_places, n)]}

def padded(places: list[Tensor], n: int) -> Tensor:
    """[S, longest], filled with n, which lies after all tokens of the row."""
    return nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=n)

def attention_table(queries: Tensor, keys: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places of S sequences' queries [S, Lq] and keys [S, Lk], and which key a query sees: no
    later one. Padding is clamped to a real token, which no other token's output depends on."""
    mask = keys[:, None] <= queries[:, :, None]                               # [S, Lq, Lk]
    return queries.clamp(max=n - 1), keys.clamp(max=n - 1), mask

def block_mask(lengths: list[int], parents: list[int], device: torch.device):
    """FlexAttention's lists of blocks, each of 128 queries and 128 keys; N is a multiple of 128.
    torch's create_block_mask would hold all N^2 pairs, this holds 128 N at a time."""
    from torch.nn.attention.flex_attention import BlockMask
    repeats = torch.tensor(lengths, device=device)
    own = torch.arange(len(lengths), device=device).repeat_interleave(repeats)      # [N]
    prompt = torch.tensor(parents, device=device).repeat_interleave(repeats)        # [N]

    def sees(b, h, q, k):
        return (q >= k) & ((own[q] == own[k]) | (prompt[q] == own[k]))
    places = torch.arange(len(own), device=device)
    counts = []    # of the pairs seen, in each block
    for queries in places.split(128):
        seen = sees(None, None, queries[:, None], places)                     # [128, N]
        counts.append(seen.view(128, -1, 128).sum((0, 2)))
    counts = torch.stack(counts)[None, None]                            # [1, 1, N / 128, N / 128]
    full = counts == 128 * 128
    lists = []
    for blocks in ((counts > 0) & ~full, full):    # `sees` is asked about pairs of the former only
        order = blocks.int().argsort(descending=True, stable=True)
        lists += [blocks.sum(-1).int(), order.int()]
    return BlockMask.from_kv_blocks(*lists, mask_mod=sees)

def grouped_attention(module, query, key, value, attention_mask, scaling, tables, place, **kwargs):
    """Attention over a packed row without the forbidden pairs: the prompts over themselves, the
    completions over their prompt and themselves.
    query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))             # [N, heads, D]
    share = q.shape[1] // k.shape[1]
    outputs = []
    for q_index, k_index, mask in tables:
        # Query heads that share a key head are stacked along the length: keys are never repeated.
        qs = q[q_index].unflatten(2, (-1, share))                       # [S, Lq, K, share, D]
        qs = qs.permute(0, 2, 3, 1, 4).flatten(2, 3)                    # [S, K, share * Lq, D]
        ks, vs = (x[k_index].transpose(1, 2) for x in (k, v))           # [S, K, Lk, D]
        mask = mask.repeat(1, share, 1)[:, None]                        # [S, 1, share * Lq, Lk]
        out = attend(qs, ks, vs, mask, scaling)                         # [S, K, share * Lq, D]
        out = out.unflatten(2, (share, q_index.shape[1]))               # [S, K, share, Lq, D]
        outputs.append(out.permute(0, 3, 1, 2, 4).reshape(-1, q.shape[1], v.shape[2]))
    return torch.cat(outputs)[place][None], None

def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    if k.shape[2] > 128:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    # torch's kernel is made for long sequences: plain products take half its time.
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(exact) @ k.to(exact).mT).mul_(scaling).masked_fill_(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v

# --- logprobs -------------------------------------------------------------------------------------
def token_logprobs(hidden: Tensor, lm_head_weight: Tensor, targets: Tensor,
                   temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, in nats, both
    differentiable.

    hidden [N, D] predicts targets [N] through lm_head_weight [V, D]; the logits are divided by the
    temperature, and the softmax is in float32 whatever the inputs. Never holds [N, V]: a chunk of
    tokens at a time. Returns [N], [N]."""
    return TokenLogprobs.apply(hidden, lm_head_weight, targets, temperature)

class TokenLogprobs(torch.autograd.Function):
    """The backward pass recomputes each chunk's logits instead of keeping them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        log_z = hidden.new_empty(len(hidden), dtype=torch.float32)            # [N]
        logprobs, entropy = torch.empty_like(log_z), torch.empty_like(log_z)  # [N] each
        for chunk, logits in logit_chunks(hidden, weight, temperature):
            log_z[chunk] = logits.logsumexp(-1)    # log_softmax is less exact at large vocabularies
            log_p = logits.sub_(log_z[chunk, None])                           # [chunk, V]
            logprobs[chunk] = log_p.gather(1, targets[chunk, None])[:, 0]
            entropy[chunk] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)                                   # [N, D]
        d_weight = None
        if ctx.needs_input_grad[1]:    # the head isn't frozen
            d_weight = torch.zeros_like(weight, dtype=torch.float32)          # [V, D]
        d_logprobs = d_logprobs / ctx.temperature
        d_entropy = d_entropy / ctx.temperature
        entropy_counts = bool(d_entropy.any())
        for chunk, logits in logit_chunks(hidden, weight, ctx.temperature):
            log_p = logits.sub_(log_z[chunk, None])                           # [chunk, V]
            # d logprob / d logit = onehot - p, d entropy / d logit = -p (log p + entropy)
            slope = d_logprobs[chunk, None]
            if entropy_counts:
                slope = slope + d_entropy[chunk, None] * (log_p + entropy[chunk, None])
            d_logits = log_p.exp_().mul_(-slope)
            d_logits.scatter_add_(1, targets[chunk, None], d_logprobs[chunk, None])
            d_logits = d_logits.to(hidden.dtype)                              # [chunk, V]
            d_hidden[chunk] = d_logits @ weight
            if d_weight is None:
                continue
            if hidden.dtype == d_weight.dtype:    # without a second [V, D]
                d_weight.addmm_(d_logits.T, hidden[chunk])
            else:
                d_weight += d_logits.T @ hidden[chunk]
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None

def logit_chunks(hidden: Tensor, weight: Tensor,
                 temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Slices of tokens and their logits over temperature, [chunk, V] in float32; the product
    itself, with the division inside, is in the inputs' dtype. Of 2**23 logits on the CPU, near its
    cache; of more to keep a GPU busy."""
    logits_at_once = 2**27 if weight.is_cuda else 2**23
    size = max(1, logits_at_once // len(weight))
    zero = weight.new_zeros(1)
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        logits = torch.addmm(zero, hidden[chunk], weight.T, beta=0, alpha=1 / temperature)
        yield chunk, logits.float()

# --- models ---------------------------------------------------------------------------------------
def load_tokenizer(cfg: Config):
    """The model's config, its tokenizer, and the tokens that end a completion; opens no weights and
    runs no code of the model's folder. Raises UserError for a model that can't be trained here."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    name = cfg.model_name_or_path
    with reported_as(f"--model-name-or-path {name}: no such folder, no model hub has it or can be "
                     "reached (./run.sh brings a model along), or it needs code of its own, which "
                     "is never run", Exception):    # transformers has a dozen kinds
        model_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    check_model(cfg, model_config)
    ends = model_config.eos_token_id
    with contextlib.suppress(OSError):    # the file is optional
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    stop_ids = {*ends, tokenizer.eos_token_id} - {None}
    return model_config, tokenizer, sorted(stop_ids)

def check_model(cfg: Config, model_config) -> None:
    """What a model's config alone can tell against training it. Raises UserError."""
    from transformers import AutoModelForCausalLM
    name = cfg.model_name_or_path
    kind = type(model_config)
    classes = AutoModelForCausalLM._model_mapping
    require(model_config.get_text_config() is model_config,
            f"{name} is more than a text model ({kind.__name__}): only text models can be trained")
    require(kind in classes, f"{name} is not a causal language model ({kind.__name__})")
    require(classes[kind]._supports_sdpa, f"{name}: transformers' {classes[kind].__name__} can't "
            "compute its attention with torch's scaled_dot_product_attention, as training does")
    factors = ("final_logit_softcapping logits_soft_cap logit_scale logits_scaling "
               "lm_head_multiplier logits_mup_width_multiplier")
    for key in [*factors.split(), "quantization_config"]:
        value = getattr(model_config, key, None)
        require(value in (None, 1), f"{name} has {key} = {value}: only models whose logits are the "
                "plain product of hidden state and head can be trained")
    limit = getattr(model_config, "max_position_embeddings", None) or math.inf
    require(cfg.max_length <= limit, "--max-prompt-length + --max-completion-length (or "
            f"--vllm-max-model-length) is {cfg.max_length}, over the {limit} positions of {name}")

def check_memory(cfg: Config, model_config, device: torch.device) -> None:
    """Says what training takes of a rank's memory, by the model's config alone. Raises UserError if
    weights, gradients and optimizer don't fit. What autograd saves of a token is about 12 values a
    layer for each of its width and 4 for each of its inner width."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
    if cfg.lora_rank:
        lm.requires_grad_(False)
        add_adapters(lm, cfg)
    total = sum(p.numel() for p in lm.parameters())
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    bytes_each = compute_dtype(cfg).itemsize
    bytes_trained = 12 if cfg.bf16_optimizer_states else 16
    states = bytes_trained * trained + bytes_each * (total - trained)
    if cfg.beta and not cfg.lora_rank:
        states += bytes_each * total
    states /= cfg.fsdp_size or dist.get_world_size()
    layers, width = model_config.num_hidden_layers, model_config.hidden_size
    inner = getattr(model_config, "intermediate_size", None)
    if not isinstance(inner, int):
        inner = 4 * width
    values = layers * (12 * width + 4 * inner)
    if cfg.gradient_checkpointing:
        values = layers * width + values / layers
    activations = bytes_each * cfg.tokens_per_micro_batch * values
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = physical_memory() / from_torchrun("LOCAL_WORLD_SIZE", 1)
    estimate = (f"{states / 2**30:.1f} GiB for weights, gradients and optimizer, about "
                f"{activations / 2**30:.1f} for activations, of {memory / 2**30:.1f} a process")
    fits = states < memory or (cfg.optimizer_cpu_offload and device.type == "cuda")
    require(fits, f"{cfg.model_name_or_path} takes {estimate}: more processes (torchrun "
            "--nproc-per-node), --lora-rank 32 or --optimizer-cpu-offload take less")
    say(f"training takes {estimate}")

def physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

def miniature(model_config, max_length: int):
    """A random model in float32 of the same architecture: few layers and words, the same heads;
    windows and chunks matter in a short row if, and only if, they are under max_length."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("grouped", grouped_attention)
    config = copy.deepcopy(model_config)
    depth = config.num_hidden_layers
    config.num_hidden_layers = min(depth, 6)    # published models repeat their kinds within six
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:6])
        elif isinstance(value, int) and "intermediate_size" in key:
            setattr(config, key, 16)
        elif isinstance(value, int) and re.search("window|chunk", key):
            setattr(config, key, min(value, 16) if value < max_length else 1024)
    config.vocab_size = 512
    config.pad_token_id = None
    config.initializer_range = config.hidden_size ** -0.5    # so that what a token sees matters
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="grouped",
                                          dtype=torch.float32, trust_remote_code=False)
    for p in lm.parameters():
        if p.ndim < 2:    # what starts as nought, and would hide
            p += torch.randn_like(p) / 4
    return lm.eval()

def packs(cfg: Config, model_config, device: torch.device) -> bool:
    """Whether a packed row means what its completions mean alone: measured on a miniature, on two
    groups of random tokens, the second at the farthest positions of the run. Says why not."""
    lengths = [16, 8, 40, 64, 50]    # a prompt and two completions, a prompt and one
    parents = [0, 0, 0, 3, 3]
    far = max(0, cfg.max_length - 114)
    firsts = [0, 16, 16, far, far + 64]
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            lm = miniature(model_config, cfg.max_length)
            require(device.type == "cpu" or lm._supports_flex_attn, "it has no FlexAttention")
            pieces = []
            for first, length in zip(firsts, lengths):
                ids = torch.randint(lm.config.vocab_size, (length,))
                pieces.append(torch.stack([ids, torch.arange(first, first + length)]))
            attention = packed_attention(lengths, parents, torch.device("cpu"))
            together = hidden_states(lm, pieces, **attention).split(lengths)
            lm.set_attn_implementation("sdpa")
            for i in (1, 2, 4):
                alone = hidden_states(lm, [pieces[parents[i]], pieces[i]])[-lengths[i]:]
                error = (together[i] - alone).abs().max()
                require(error <= 1e-4, f"hidden states would be off by {error:.2g}")
    except Exception as problem:    # whatever a model can't do with such a row
        say("note: this model can't take packed rows: one row a completion, slower "
            f"({type(problem).__name__}: {problem!s:.150})".replace("UserError: ", ""))
        return False
    return True

def hidden_states(lm, pieces: list[Tensor], **attention) -> Tensor:
    """Of one row of pieces, each [2, length]: tokens and their positions. Returns [N, D]."""
    ids, positions = torch.cat(pieces, 1)[:, None]                          # [1, N] each
    return lm.base_model(input_ids=ids, position_ids=positions, use_cache=False,
                         **attention).last_hidden_state[0]

def load_policy(cfg: Config, model_config, packed: bool, device: torch.device,
                trainable: bool) -> Policy:
    """The model, sharded over the ranks. What isn't trained is held in the dtype that it computes
    in, the rest in float32."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    name = cfg.model_name_or_path
    AttentionInterface.register("grouped", grouped_attention)
    attention = "sdpa"
    if packed:
        attention = "flex_attention" if device.type == "cuda" else "grouped"
    dtype = compute_dtype(cfg)
    if trainable and not cfg.lora_rank:
        dtype = torch.float32
    options = dict(dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    if dist.get_rank() == 0:
        with reported_as(f"{name}: no weights in safetensors that fit its config", Exception):
            lm, found = AutoModelForCausalLM.from_pretrained(
                name, config=model_config, use_safetensors=True, output_loading_info=True,
                **options)
        missing = sorted(found["missing_keys"])
        require(not missing, f"{name}: no weights for {missing!s:.200}")
    else:
        with torch.device("meta"):    # rank 0 sends the weights
            lm = AutoModelForCausalLM.from_config(model_config, **options)
    require(lm.base_model is not lm, f"{name}: {type(lm).__name__} has no part without its head")
    head = lm.get_output_embeddings()
    require(isinstance(head, nn.Linear) and head.bias is None,
            f"{name}: its head is not a plain matrix product but a {head}")
    unique = dict(lm.named_parameters())
    for other, _ in lm.named_parameters(remove_duplicate=False):
        require(other in unique or not re.search(r"\.\d+\.", other),
                f"{name}: its layers share tensors ({other}), which FSDP can't shard")
    lm.requires_grad_(trainable and not cfg.lora_rank)
    if cfg.lora_rank:
        add_adapters(lm, cfg)
    lm.eval()    # dropout would take the ratio of an unchanged policy away from 1
    if trainable and cfg.gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    offload = cfg.optimizer_cpu_offload if trainable else cfg.ref_cpu_offload
    return shard(Policy(lm, cfg.temperature, device), cfg, offload)

def compute_dtype(cfg: Config) -> torch.dtype:
    return torch.bfloat16 if cfg.bf16 else torch.float32

def shard(policy: Policy, cfg: Config, offload: bool) -> Policy:
    """FSDP2, a layer at a time: gradients are reduced in float32."""
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy,
                                        fully_shard)
    device, lm, ranks = policy.device.type, policy.lm, dist.get_world_size()
    mesh = dist.init_device_mesh(device, (ranks,))
    if cfg.fsdp_size:
        mesh = dist.init_device_mesh(device, (ranks // cfg.fsdp_size, cfg.fsdp_size),
                                     mesh_dim_names=("replicate", "shard"))
    weights = policy.state_dict()
    offload &= device == "cuda"    # on the CPU it can hang
    # By default the outermost tensors stay whole after a forward pass alone, and what goes through
    # the parameters then finds copies in the compute dtype, unknown to the optimizer.
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(compute_dtype(cfg), torch.float32),
                   offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                   reshard_after_forward=True)
    for layer in reversed([*lm.modules()]):    # inner ones first
        if type(layer).__name__ in (lm._no_split_modules or []):
            layer.training = lm.is_gradient_checkpointing    # asks for it; its parts stay in eval
            fully_shard(layer, **options)
    fully_shard(policy, **options)
    if ranks > 1:
        receive_weights(policy, weights, "cpu" if offload else device)
    return policy

def receive_weights(policy: Policy, weights: dict[str, Tensor], place: str) -> None:
    """Rank 0's whole weights to the shards of all, a tensor at a time: only one rank of all reads
    the model's files."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    if dist.get_rank() > 0:
        policy.to_empty(device=place)
        policy.lm.tie_weights()
    set_model_state_dict(policy, weights, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    for buffer in policy.buffers():
        buffer.data = buffer.to(policy.device)
        dist.broadcast(buffer, 0)

class LoraLinear(nn.Linear):
    """y = W x + alpha / rank B A x, of which A [rank, in] and B [out, rank] are trained, in float32
    (LoRA, arXiv:2106.09685)."""
    enabled = True    # of all of them. Off, the model is the one that it started as

    def add_adapter(self, rank: int, alpha: float) -> None:
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not LoraLinear.enabled:
            return y
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale

    def merged(self, device: torch.device) -> Tensor:
        """[out, in] in float32. All ranks must ask."""
        weight, a, b = [whole(p.detach().to(device, torch.float32))
                        for p in (self.weight, self.lora_A, self.lora_B)]
        return torch.addmm(weight, b, a, alpha=self.scale)

def add_adapters(lm, cfg: Config) -> None:
    """To the linear layers of these names, or all but the head; the same on every rank."""
    torch.manual_seed(cfg.seed)
    linear = {name: layer for name, layer in lm.base_model.named_modules()
              if type(layer) is nn.Linear}
    kinds = {name.rpartition(".")[2] for name in linear}
    wanted = set(cfg.lora_target_modules or kinds)
    require(wanted <= kinds, f"--lora-target-modules: {cfg.model_name_or_path} has no "
            f"{sorted(wanted - kinds)}; it has {sorted(kinds)}")
    for name, layer in linear.items():
        if name.rpartition(".")[2] in wanted:
            layer.__class__ = LoraLinear    # keeps the names of what is there
            layer.add_adapter(cfg.lora_rank, cfg.lora_alpha)

def without_adapters(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the model as it started says."""
    LoraLinear.enabled = False
    try:
        return policy(batch)
    finally:
        LoraLinear.enabled = True

def save_adapters(policy: Policy, cfg: Config, folder: Path) -> None:
    """A folder in peft's format."""
    from safetensors.torch import save_file
    tensors = {}
    for name, p in policy.lm.named_parameters():
        if p.requires_grad:
            tensors[f"base_model.model.{name}.weight"] = whole(p.detach()).cpu()
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        layers = {name.split(".")[-3] for name in tensors}
        (folder / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": cfg.lora_rank,
            "lora_alpha": cfg.lora_alpha, "target_modules": sorted(layers),
            "base_model_name_or_path": cfg.model_name_or_path}))

def checkpoint_tensors(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under the names and in the shapes that a checkpoint has, of one layer at a
    time: transformers may hold several of a layer's tensors as one. All ranks must go through
    all of them. Parameters come in dtype, with adapters merged, buffers as they are."""
    from transformers.core_model_loading import revert_weight_conversion
    lm, device = policy.lm, policy.device
    stored = lm.state_dict().keys()
    tensors = itertools.chain(lm.named_parameters(), lm.named_buffers())
    layer_of = lambda named: re.match(r".*?\.\d+\.|", named[0])[0]
    for _, layer in itertools.groupby(tensors, layer_of):
        whole_tensors = {}
        for name, tensor in layer:
            module_name, _, kind = name.rpartition(".")
            module = lm.get_submodule(module_name)
            if kind in ("lora_A", "lora_B"):
                continue
            if isinstance(module, LoraLinear) and kind == "weight":
                whole_tensors[name] = module.merged(device).to(dtype)
            elif isinstance(tensor, nn.Parameter):
                whole_tensors[name] = whole(tensor.detach().to(device, dtype))
            elif name in stored:
                whole_tensors[name] = tensor
        yield from revert_weight_conversion(lm, whole_tensors).items()

def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; all ranks must ask for the same tensors in the same order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def remake_expert_kernels(model: nn.Module) -> None:
    """vLLM's CPU build packs a mixture's experts only when it makes their kernel: without this it
    would read reloaded experts as if they were packed."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None

def repack_head(model: nn.Module) -> None:
    """vLLM's CPU build keeps a packed copy of the head, which reloading a tied embedding leaves
    as it was."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

class HalfAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) that keeps its two moments in bfloat16. It computes in float32, a
    tensor at a time."""

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            mean, square = state["exp_avg"].float(), state["exp_avg_sq"].float()
            adamw(
                [p], [p.grad], [mean], [square], [], [state["step"]], fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
                eps=group["eps"], maximize=False)
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)

def make_optimizer(policy: Policy, cfg: Config) -> torch.optim.AdamW:
    """Of what is trained, with the state that AdamW else makes at its first step: a checkpoint is
    read into it."""
    kind, dtype = torch.optim.AdamW, torch.float32
    if cfg.bf16_optimizer_states:
        kind, dtype = HalfAdamW, torch.bfloat16
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = kind(trained, betas=(0.9, cfg.adam_beta2), weight_decay=cfg.weight_decay,
                     fused=True)
    for p in trained:
        optimizer.state[p] = {"step": torch.zeros((), device=p.device),
                              "exp_avg": torch.zeros_like(p.detach(), dtype=dtype),
                              "exp_avg_sq": torch.zeros_like(p.detach(), dtype=dtype)}
    return optimizer

def save_model(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """A folder for transformers and vLLM, by rank 0, written beside and renamed when whole."""
    state = {}
    for name, tensor in checkpoint_tensors(policy, dtype):
        if dist.get_rank() == 0:
            state[name] = tensor.cpu()
    if dist.get_rank() == 0:
        unfinished = folder.with_suffix(".unfinished")
        settings = policy.lm.generation_config
        try:
            settings.validate(strict=True)
        except ValueError:    # sampling settings without do_sample, which save_pretrained refuses
            settings.do_sample = True
        # OSError, or a kind of safetensors' own.
        with reported_as("the model can't be saved", Exception):
            policy.lm.save_pretrained(unfinished, state_dict=state, save_original_format=False)
            policy.lm.config.dtype = dtype    # the above has written that of the shards
            policy.lm.config.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(folder)

# --- the run's folder -----------------------------------------------------------------------------
@dataclass
class State:
    """What the rest of a run depends on beside the weights and the optimizer."""
    step: int = 0              # steps done
    drawn: int = 0             # prompts drawn
    beta: float = 0.0
    elapsed: float = 0.0       # seconds of steps and evaluations
    evaluating: float = 0.0    # of the latter alone
    skipped_steps: int = 0     # in a row, for a gradient that is not finite
    metrics: dict[str, Any] = field(default_factory=lambda: {"step": 0})    # of the last step
    reported: bool = False     # whether that step is evaluated and its metrics are written
    file_sizes: dict[str, int] = field(default_factory=dict)    # what the run had written by then
    first_eval: dict[str, float] = field(default_factory=dict)
    last_eval: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)    # of the last step, with advice
    history: list[dict[str, Any]] = field(default_factory=list)    # metrics of the last 20 steps

# Flags that change nothing of what is learnt: a run may go on with others.
FREE_FLAGS = """output_dir tokens_per_micro_batch gradient_checkpointing ref_cpu_offload
    optimizer_cpu_offload fsdp_size ddp_timeout reward_timeout reward_workers reward_memory
    vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_sleep_level max_skipped_steps save_steps
    save_total_limit log_completions_steps report_to""".split()

class Run:
    """The run's folder: config.json, metrics.jsonl, samples.jsonl, report.html, checkpoints and at
    the end the model. Rank 0 writes it; the lines of a step at once, so that a killed run leaves
    whole ones."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.rewards = []    # of the last 20 steps
        self.warned_of = set()    # what can't be written, said once
        self.loggers = {}
        self.is_writer = dist.get_rank() == 0
        # One clock names the folder for all, and no rank goes on if it can't be used.
        folder = gathered(cfg.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))[0]
        self.folder = Path(folder)
        self.model_folder = self.folder / "model"
        if self.is_writer:
            complaint = f"--output-dir {folder} can't be used"
            with reported_as(complaint, OSError, ValueError, TypeError):
                self.claim()
        dist.barrier()
        file = self.folder / "config.json"
        found = gathered(file.stat().st_mtime_ns if file.exists() else None)
        require(len(set(found)) == 1, f"--output-dir {folder} is not the same folder on all "
                "machines: name one on a file system that they share")
        # For loggers, which take only some characters: another run in a folder of this name is
        # another run to them too.
        self.name = re.sub(r"[^\w.-]", "-", f"{self.folder.resolve().name}-{found[0] // 10**9}")

    def claim(self) -> None:
        """Makes the folder, or finds the same run in it. Raises UserError naming what differs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock_folder(self.folder)
        file = self.folder / "config.json"
        flags, defaults = json.loads(json.dumps([asdict(self.cfg), asdict(Config())]))
        found = dict(json.loads(file.read_text())) if file.exists() else flags
        is_ours = "num_generations" in found and (self.begun() or not self.model_folder.exists())
        require(is_ours, f"--output-dir {self.folder} holds a config.json or model of something "
                "else: name another")
        if not self.begun():    # a start that failed doesn't count
            found = flags
            file.with_suffix(".new").write_text(json.dumps(flags, indent=1))
            file.with_suffix(".new").rename(file)
        for name, value in flags.items():
            theirs = found.get(name, defaults[name])    # or from before there was such a flag
            require(name in FREE_FLAGS or theirs == value,
                    f"--output-dir {self.folder} holds a run with --{name.replace('_', '-')} "
                    f"{theirs}, not {value}: name another, or give the same flags")

    def begun(self) -> bool:
        return (self.folder / "metrics.jsonl").exists() or bool(self.checkpoints())

    def way_on(self) -> str:
        if self.cfg.save_only_model:
            return "with --save-only-model there is no way to go on"
        return f"with --output-dir {self.folder}, the same command goes on"

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        found = {}
        for folder in self.folder.glob("checkpoint-*"):
            number = folder.name.removeprefix("checkpoint-")
            if number.isdecimal():
                found[int(number)] = folder
        return [found[number] for number in sorted(found, reverse=True)]

    def start_loggers(self) -> None:
        if not self.is_writer:
            return
        for name in self.cfg.report_to:
            complaint = f"--report-to {name} can't start"
            with (reported_as(complaint, Exception),
                  reported_as(f"pip install {name}", ImportError)):
                self.loggers[name] = start_logger(name, self)

    def log(self, metrics: dict[str, Any], warnings: dict[str, str]) -> None:
        """A step's metrics, once it is evaluated, and what holds of it: to the file, --report-to
        and the terminal."""
        # JSON has no nan: null is what was not measured.
        finite = {name: x if x is not None and math.isfinite(x) else None
                  for name, x in metrics.items()}
        self.write("metrics.jsonl", [finite | ({"warnings": warnings} if warnings else {})])
        measured = {name: x for name, x in finite.items() if x is not None}
        for name, send in self.loggers.items():
            with self.costs_a_warning(name):
                send(measured, step=metrics["step"])
        scores = [f"\n  {name:<24} {x:.3f}" for name, x in metrics.items()
                  if name.startswith("eval/")]
        if metrics["step"]:
            self.rewards = [*self.rewards[-19:], metrics["reward/mean"]]
            say(step_line(metrics, self.rewards, self.cfg))
        elif scores:
            say("before the first step:" + "".join(scores))

    def write_samples(self, groups: list[Group], step: int, split: str) -> None:
        if split == "train" and step % self.cfg.log_completions_steps:
            return
        self.write("samples.jsonl", [
            {"step": step, "split": split, "prompt": s.row.prompt, "completion": s.text,
             "reward": s.reward, "rewards": s.rewards, "advantage": s.advantage}
            for group in groups for s in group])

    def write_report(self) -> None:
        if not self.is_writer:
            return
        with self.costs_a_warning("report.html"):
            file = self.folder / "report.new"
            file.write_text(report_page(self.folder, self.cfg.max_steps), "utf-8", "replace")
            file.rename(file.with_suffix(".html"))

    def write(self, file: str, rows: list[dict]) -> None:
        if not self.is_writer:
            return
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self.costs_a_warning(file), open(self.folder / file, "ab", buffering=0) as f:
            size = f.tell()
            if f.write(lines) < len(lines):
                f.truncate(size)
                raise OSError("there is no room for a line")

    @contextlib.contextmanager
    def costs_a_warning(self, what: str) -> Iterator[None]:
        """A full disk or a logger out of reach costs what it should write, not the run."""
        try:
            yield
        except Exception as e:
            if what not in self.warned_of:
                say(f"warning: {self.folder}: {what} can't be written: {e!r:.300}; the run goes on")
            self.warned_of.add(what)

    def file_sizes(self) -> dict[str, int]:
        files = [self.folder / name for name in ("metrics.jsonl", "samples.jsonl")]
        return {file.name: file.stat().st_size for file in files if file.exists()}

    def rewind(self, state: State) -> None:
        """Drops what was written after the state was reached: it is done once more."""
        for name, size in self.file_sizes().items():
            if self.is_writer:
                os.truncate(self.folder / name, min(size, state.file_sizes.get(name, 0)))

    def save_checkpoint(self, trainer: "Trainer") -> None:
        """If it can't be written, the run goes on with the checkpoints it has."""
        from torch.distributed import checkpoint as dcp
        STOPPING.phase = "saving"
        folder = self.folder / f"checkpoint-{trainer.state.step}"
        try:
            if self.cfg.save_only_model:
                save_model(trainer.policy, trainer.tokenizer, folder, trainer.engine.dtype)
            else:
                self.save_all(trainer, folder)
        except (OSError, UserError, dcp.CheckpointException) as e:    # the last on all ranks
            say(f"warning: {folder} can't be written: {last_line(e)}; the run goes on, the earlier "
                "ones are kept")
        if self.is_writer:
            old = self.checkpoints()[self.cfg.save_total_limit:]
            for leftover in [*self.folder.glob("*.unfinished"), *old]:
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier()

    def save_all(self, trainer: "Trainer", folder: Path) -> None:
        """Written beside, then a marker with a digest of each file, then renamed."""
        from torch.distributed import checkpoint as dcp
        unfinished = folder.with_suffix(".unfinished")
        dcp.save(training_tensors(trainer.policy, trainer.optimizer), checkpoint_id=unfinished)
        shares = gathered(digests(unfinished, dist.get_rank(), dist.get_world_size()))
        if self.is_writer:
            marker = {"state": asdict(trainer.state), "rows": digest_of_rows(trainer.rows),
                      "sha256": functools.reduce(dict.__or__, shares)}
            (unfinished / "complete.json").write_text(json.dumps(marker))
            shutil.rmtree(folder, ignore_errors=True)    # a damaged one
            unfinished.rename(folder)

    def load_checkpoint(self, policy: Policy, optimizer, rows: list[Row]) -> State:
        """Overwrites weights and optimizer with those of the newest checkpoint that is whole, and
        returns its state; without one, that of a new run."""
        from torch.distributed import checkpoint as dcp
        folder, marker = gathered(self.newest_whole() if self.is_writer else None)[0]
        if folder is None:
            return State(beta=self.cfg.beta)
        require(marker["rows"] == digest_of_rows(rows),
                f"the rows of --dataset are not those that {folder} was trained on: put them back, "
                "or name another --output-dir")
        try:
            dcp.load(training_tensors(policy, optimizer), checkpoint_id=folder)
        except dcp.CheckpointException as e:
            raise UserError(f"{folder} doesn't fit the model: {last_line(e)}") from e
        return State(**marker["state"])

    def newest_whole(self) -> tuple[Path | None, dict]:
        """The newest checkpoint whose files have their digests, and its marker. Nothing of one is
        unpickled before."""
        for folder in self.checkpoints():
            try:
                marker = json.loads((folder / "complete.json").read_text())
                if marker["sha256"] != digests(folder):
                    raise ValueError("a file differs from its digest")
                State(**marker["state"])
                return folder, marker
            except (OSError, ValueError, KeyError, TypeError) as e:
                say(f"warning: {folder} is damaged ({type(e).__name__}: {e}), trying the one "
                    "before")
                damaged = folder.with_suffix(".damaged")    # so that it isn't one to keep
                shutil.rmtree(damaged, ignore_errors=True)
                folder.rename(damaged)
        return None, {}

def last_line(e: BaseException) -> str:
    return f"{str(e).strip().splitlines()[-1]:.300}"

def digests(folder: Path, share: int = 0, shares: int = 1) -> dict[str, str]:
    """Of one of so many equal shares of a checkpoint's files."""
    found = {}
    for path in sorted(folder.iterdir())[share::shares]:
        if path.name == "complete.json":
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:    # then it isn't found
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found

def digest_of_rows(rows: list[Row]) -> str:
    what = [(row.prompt_ids.tolist(), row.columns.get("answer")) for row in rows]
    return hashlib.sha256(repr(what).encode()).hexdigest()

def training_tensors(policy: Policy, optimizer) -> dict[str, Tensor]:
    """All tensors that are trained, and the optimizer's. There are no generators among them: each
    draw is seeded anew from its step."""
    tensors = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach()
            for key, value in optimizer.state[p].items():
                tensors[f"{name} {key}"] = value
    return tensors

def save_result(cfg: Config, trainer: "Trainer") -> None:
    """The trained model, and what has become better."""
    STOPPING.phase = "saving"
    state, folder = trainer.state, trainer.run.model_folder
    if cfg.lora_rank:
        save_adapters(trainer.policy, cfg, trainer.run.folder / "adapter")
    with reported_as(f"{folder} can't be written; {trainer.run.way_on()}", UserError):
        save_model(trainer.policy, trainer.tokenizer, folder, trainer.engine.dtype)
    dist.barrier()
    for name, before in state.first_eval.items():
        after = state.last_eval.get(name, math.nan)
        say(f"{name}: {before:.3f} before, {after:.3f} after {cfg.max_steps} steps")
    say(f"{state.elapsed / 60:.1f} minutes of training; the model is in {folder}: load it with\n"
        f"  AutoModelForCausalLM.from_pretrained({str(folder)!r})   or   vllm serve {folder}")

# --- metrics --------------------------------------------------------------------------------------
def mean(values) -> float | None:
    given = [x for x in values if x is not None]
    return sum(given) / len(given) if given else None

def reward_table(groups: list[Group], name: str | None = None) -> Tensor:
    """The rewards, or those of one name. [B, G] in float64, nan where none applies."""
    table = []
    for group in groups:
        rewards = [s.rewards.get(name) if name else s.reward for s in group]
        table.append([math.nan if reward is None else reward for reward in rewards])
    return torch.tensor(table, dtype=torch.float64)

def root_mean_square(x: Tensor) -> Tensor:
    """Of each row, nan left out. [B, G] -> [B, 1]"""
    return x.square().nanmean(1, keepdim=True).sqrt()

def population_std(rewards: Tensor) -> float:
    """Mean over rows [R, n] of their std, nan left out."""
    return root_mean_square(rewards - rewards.nanmean(1, keepdim=True)).nanmean().item()

def rewards_differ(group: Group, min_group_std: float) -> bool:
    """Whether the rewards of a group give a signal before the length's part in them."""
    parts = [s.rewards.get("overlong", 0.0) for s in group]
    rewards = reward_table([group]) - torch.tensor(parts, dtype=torch.float64)    # [1, G]
    return bool(group_advantages(rewards, min_group_std=min_group_std).any())

def sample_metrics(groups: list[Group]) -> dict[str, Any]:
    """What a step's samples say, over all ranks."""
    samples = [s for group in groups for s in group]
    rewards = reward_table(groups)                                            # [B, G]
    lengths = [int(numpy.count_nonzero(s.mask)) for s in samples]
    metrics = {
        "reward/mean": rewards.nanmean().item(), "reward/std": population_std(rewards.view(1, -1)),
        "reward/group_std": population_std(rewards),
        "reward/zero_std_groups": mean(not has_signal(group) for group in groups),
        "reward/advantage_std": numpy.std([s.advantage for s in samples]).item(),
        "completion/tokens": sum(lengths), "completion/length_mean": mean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated": mean(s.truncated for s in samples),
        "completion/distinct": mean(len({s.text for s in group}) / len(group) for group in groups)}
    for name in dict.fromkeys(name for s in samples for name in s.rewards):
        metrics[f"reward/{name}"] = mean(s.rewards.get(name) for s in samples)
    return metrics

def repetition(ids: numpy.ndarray) -> float:
    """Share of a completion's runs of 4 tokens that came before in it."""
    runs = list(zip(ids, ids[1:], ids[2:], ids[3:]))
    return (len(runs) - len(set(runs))) / max(1, len(runs))

def summed(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Of a micro-batch: each metric's sum over the tokens, or maximum where its name says so."""
    result = {}
    for name, values in metrics.items():
        if name.endswith("_max"):
            values = F.pad(values, (0, 1)).max()    # 0, if there is none
        result[name] = values.sum().item()
    return result

def update_metrics(measures: list[dict[str, float]], norms: list[float],
                   planned: int) -> dict[str, Any]:
    """What a step's updates say, over all ranks, from this rank's micro-batches and the gradient
    norms of its updates."""
    measures = list(itertools.chain(*gathered(measures)))
    finite_norms = [norm for norm in norms if math.isfinite(norm)]
    loss = sum(measure.pop("loss") for measure in measures)
    tokens = sum(measure.pop("tokens") for measure in measures)
    result = {"policy/loss": loss / max(1, len(norms)),
              "policy/grad_norm": sum(finite_norms) / max(1, len(finite_norms)),
              "policy/updates": len(finite_norms),
              "policy/skipped_updates": planned - len(finite_norms),
              "policy/nonfinite_updates": len(norms) - len(finite_norms)}
    for name in measures[0] if measures else []:
        values = [measure[name] for measure in measures]
        if name.endswith("_max"):
            result[f"policy/{name}"] = max(values)
        else:
            result[f"policy/{name}"] = sum(values) / tokens
    return result

def costs(start: float, sampled: float, trained: float, tokens: int, engine: Engine) -> dict:
    """Seconds of the parts of a step that ends now, and memory."""
    end = time.perf_counter()
    return {"time/sampling": sampled - start, "time/training": trained - sampled,
            "time/reload": end - trained, "time/step": end - start,
            "time/tokens_per_second": tokens / (end - start),
            "time/peak_memory_gib": peak_memory_gib(engine)}

def peak_memory_gib(engine: Engine) -> float:
    """Of rank 0 so far; on a GPU what torch holds, without the memory of an engine that sleeps."""
    if engine.on_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (torch.cuda.max_memory_allocated() - engine.sleeping_bytes) / 2**30

def show_warnings(history: list[dict[str, Any]], first: Sample, cfg: Config,
                  shown: dict[str, str]) -> dict[str, str]:
    """Says what in the steps up to this one should worry, in the step in which it begins: what was
    shown a step before isn't again. Returns all that holds now, with advice."""
    metrics = history[-1]
    found = trends(history, cfg) if len(history) == 20 else {}
    no_reward = metrics["reward/mean"] == metrics["reward/std"] == 0
    if metrics["step"] == 3 and no_reward:
        found["no completion got a reward, so there is nothing to learn from"] = (
            f"one was {first.text!r:.200}, read as {extract_answer(first.text)!r:.50}")
    if metrics["reward/zero_std_groups"] == 1:
        found["rewards differ within no group"] = "nothing to learn from"
    if metrics.get("policy/kl", 0) > 1:
        found["more than a nat a token of KL to the reference"] = "raise --beta"
    if metrics["completion/truncated"] > 0.95:
        found["nearly all completions are cut"] = "raise --max-completion-length"
    if metrics.get("policy/engine_gap_mean", 0) > 0.25:
        found["vLLM and trainer drift apart"] = "see policy/engine_gap_mean; try --no-bf16"
    for warning, advice in found.items():
        if warning not in shown:
            say(f"warning: step {metrics['step']}: {warning}: {advice}")
    return found

def trends(history: list[dict[str, Any]], cfg: Config) -> dict[str, str]:
    """What should worry in the last 10 steps beside the 10 before, and what to do about it."""
    before, now = averages(history[:10]), averages(history[10:])
    rise = Counter({name: now[name] - before[name] for name in now})
    learning = rise["reward/mean"] > 0.1 * before["reward/std"]
    still = abs(rise["reward/mean"]) < 0.05 * before["reward/std"]
    accuracy = now.get("eval/accuracy", 1.0)
    found = {}
    if still and abs(rise["policy/kl"]) < 0.1 * before["policy/kl"]:
        found["neither reward nor KL moves"] = "lower --beta or raise --learning-rate"
    if learning and rise["eval/accuracy"] < -0.02:
        found["reward rises and held-out accuracy falls"] = (
            "the reward is gamed or the rows are learnt by heart; read samples.jsonl")
    if not learning and now["policy/entropy"] < 0.5 * before["policy/entropy"]:
        found["entropy falls and reward doesn't rise"] = (
            "lower --learning-rate, or raise --epsilon-high or --entropy-coef")
    if now["completion/distinct"] < 0.2 and accuracy < 0.7 and abs(rise["eval/accuracy"]) < 0.01:
        found["a prompt's completions are nearly all the same"] = (
            "raise --temperature, or lower --learning-rate")
    if now["policy/clip_low"] + now["policy/clip_high"] > 0.5:
        found["half of the tokens are clipped"] = "lower --learning-rate or --num-iterations"
    norms = [metrics["policy/grad_norm"] for metrics in history]
    if max(norms[10:]) > 10 * sorted(norms)[10] > 0:
        found["the gradient's norm has spikes"] = "lower --learning-rate or --max-grad-norm"
    length, length_before = now["completion/length_mean"], before["completion/length_mean"]
    if not learning and not 0.5 * length_before < length < 1.5 * length_before:
        found["the length changes and reward doesn't rise"] = (
            f"it is {length:.0f} tokens, and was {length_before:.0f}; read samples.jsonl")
    if rise["reward/format"] < -0.1:
        found["fewer completions have the format"] = "raise format's weight in --reward"
    if now["reward/zero_std_groups"] > 0.9:
        solved = now.get("reward/correct", now["reward/mean"])
        found["9 of 10 groups have no signal"] = (
            f"the problems are too {'easy' if solved > 0.5 else 'hard'}, {solved:.0%} are solved")
    gap = now["policy/engine_gap_mean"]
    if gap > 0.05 and gap > 2 * before["policy/engine_gap_mean"]:
        found["vLLM and trainer drift apart"] = "see policy/engine_gap_mean; try --no-bf16"
    for name in reward_weights(cfg):
        values = {metrics.get(f"reward/{name}") for metrics in history}
        if len(cfg.reward) > 1 and len(values) == 1:
            found[f"the reward {name} is the same in all steps"] = "nothing is learnt from it"
    if rise["completion/truncated"] > 0.1:
        found["more completions are cut"] = (
            "raise --max-completion-length, or give --soft-overlong-share 0.2")
    return found

def averages(history: list[dict[str, Any]]) -> Counter:
    """Of each metric, over the steps that have it; 0 if none has."""
    names = {name for metrics in history for name in metrics}
    found = Counter()
    for name in names:
        found[name] = mean(metrics.get(name) for metrics in history) or 0.0
    return found

def step_line(metrics: dict[str, Any], rewards: list[float], cfg: Config) -> str:
    """rewards: of the last steps, for a small curve."""
    step, total = metrics["step"], cfg.max_steps
    parts = [f"step {step:>{len(str(total))}}/{total} {curve(rewards)}"]
    for label, name in (("reward", "reward/mean"), ("accuracy", "eval/accuracy"),
                        ("kl", "policy/kl")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.3f}")
    if "policy/clip_low" in metrics:
        parts.append(f"clipped {metrics['policy/clip_low'] + metrics['policy/clip_high']:.1%}")
    left = round(metrics["time/left"])
    return " | ".join([*parts, f"length {metrics['completion/length_mean']:.1f}",
                       f"{metrics['time/tokens_per_second']:.0f} tokens/s",
                       f"{metrics['time/step']:.1f} s", f"{left // 60}:{left % 60:02} left"])

def curve(values: list[float]) -> str:
    """A character a value."""
    given = [x for x in values if math.isfinite(x)]
    if not given:
        return ""
    low, high = min(given), max(given)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / (high - low + 1e-9))] for x in given)

def report_failures(failures: list[str], completions: int) -> None:
    """Says how many rewards failed on a completion. Raises UserError for a reward that did on all
    of them: a typo must not train on zeros all night."""
    if not failures:
        return
    say(f"warning: {len(failures)} rewards of {completions} completions failed, now 0; at last "
        f"{failures[-1]}")
    for name, count in Counter(failure.partition(": ")[0] for failure in failures).items():
        require(count < max(2, completions),
                f"the reward {name} failed on every completion of a step, at last {failures[-1]}")

# --- report ---------------------------------------------------------------------------------------
def start_logger(name: str, run: Run) -> Callable:
    """What takes a step's metrics, for a name of --report-to. A run that goes on does so there."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(run.folder / name)
        at_end(writer.close)

        def send(metrics: dict[str, float], step: int) -> None:
            for metric, value in metrics.items():
                writer.add_scalar(metric, value, step)
            writer.flush()    # else a killed run's last minutes are lost
        return send
    package = importlib.import_module(name)
    options = {"id": run.name, "dir": run.folder} if name == "wandb" else {}
    package.init(project=os.environ.get(f"{name.upper()}_PROJECT", "grpo"), name=run.name,
                 config=asdict(run.cfg), resume="allow", **options)
    at_end(package.finish)
    return package.log

CHARTS = {    # the metrics in each
    "Reward": r"reward/(?!(std|group_std|zero_std_groups|advantage_std|failures)$).*|eval/.*reward",
    "Held-out accuracy": r"eval/.*(accuracy|pass@\d+)",
    "Shares": r"completion/(distinct|truncated)|reward/zero_std_groups|eval/.*repetition",
    "Entropy, nats": "policy/entropy",
    "Length, tokens": r"completion/length_mean|eval/.*length_mean",
    "KL to the model as it started, nats": "policy/kl|eval/kl",
    "Gap between vLLM and trainer, nats": "policy/engine_gap_mean",
    "Seconds a step": "time/(step|sampling|training|reload)",
}
REPORT_STYLE = """<meta name="viewport" content="width=device-width"><style>
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --ink: #1b2130; --soft: #626d80;
  --line: #dde1e8; --warn: #c2570c; --c0: #2563eb; --c1: #ea580c; --c2: #0d9488; --c3: #9333ea;
  --c4: #db2777; --c5: #65a30d }
@media (prefers-color-scheme: dark) { :root { --page: #0e1218; --card: #171c25; --ink: #e4e8ef;
  --soft: #97a2b4; --line: #2b3341; --warn: #fdb022; --c0: #60a5fa; --c1: #fb923c; --c2: #2dd4bf;
  --c3: #c084fc; --c4: #f472b6; --c5: #a3e635 } }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--page);
  color: var(--ink); font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 22px; margin: 0 }
h2 { font-size: 16px; margin: 28px 0 8px }
p { color: var(--soft); margin: 2px 0 16px }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 12px }
figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
figure { margin: 0; padding: 12px; display: flex; flex-direction: column }
figcaption { font-weight: 600; flex: 1 }
span { display: block; font-size: 12px; font-weight: 400; color: var(--soft) }
span::before { content: ""; display: inline-block; width: 12px; height: 3px; border-radius: 2px;
  margin: 0 6px 3px 0; background: var(--c) }
svg { margin-top: 8px }
path { stroke: var(--line) }
polyline { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round;
  stroke-linecap: round }
line { stroke: var(--warn); stroke-dasharray: 2 2 }
text { fill: var(--soft); font-size: 9px; text-anchor: end }
section { overflow-x: auto }
table { border-collapse: collapse; width: 100%; min-width: 640px }
th, td { padding: 8px 12px; text-align: left; vertical-align: top }
td { border-top: 1px solid var(--line) }
th { font-size: 12px; color: var(--soft); overflow-wrap: normal }
div { white-space: pre-wrap; overflow: auto; min-width: 5em; max-height: 16em }
</style>"""

def read_metrics(file: Path) -> tuple[dict, dict]:
    """Of metrics.jsonl each metric's (step, value); and of each warning its first advice and the
    steps in which it began."""
    curves, warned, held = {}, {}, {}
    for line in file.read_bytes().splitlines():
        metrics = json.loads(line)
        step = metrics["step"]
        found = metrics.pop("warnings", {})
        for warning, advice in found.items():
            _, steps = warned.setdefault(warning, (advice, []))
            if warning not in held:
                steps.append(step)
        held = found
        for name, value in metrics.items():
            if value is not None:
                curves.setdefault(name, []).append((step, value))
    return curves, warned

def read_samples(file: Path) -> dict[str, list]:
    """Of samples.jsonl, which may be long, what is in its first 16 and its last 64 MiB: by split, a
    list of the rows of each step."""
    found = {"eval": {}, "pass@k": {}, "train": {}}
    if file.exists():
        with open(file, "rb") as f:
            lines = f.readlines(2**24)
            f.seek(max(f.tell(), file.stat().st_size - 2**26))
            lines += f
        for line in lines:
            if line.startswith(b'{"step": '):    # or else it is the rest of one
                row = json.loads(line)
                found[row["split"]].setdefault(row["step"], []).append(row)
    return {split: list(steps.values()) for split, steps in found.items()}

def chart(title: str, curves: dict[str, list], marks: str) -> str:
    """The curves of a chart as HTML, each in at most 500 points, means of neighbours. Nothing
    without curves."""
    chosen = {name: curves[name] for name in sorted(curves) if re.fullmatch(CHARTS[title], name)}
    if not chosen:
        return ""
    values = [0, *(value for curve in chosen.values() for _, value in curve)]
    low, high = min(values), max(values)
    last, _ = curves["step"][-1]
    legend = ""
    for i, (name, curve) in enumerate(chosen.items()):
        points = [part.mean(0) for part in numpy.array_split(curve, min(len(curve), 500))]
        line = " ".join(f"{300 * x / max(1, last):.1f},{100 * (high - y) / (high - low or 1):.1f}"
                        for x, y in [points[0], *points])    # a single one, drawn twice, is a dot
        color = f'style="--c: var(--c{i % 6})"'
        marks += f'<polyline {color} points="{line}"/>'
        ends = f"{curve[0][1]:.3g} → {curve[-1][1]:.3g}"
        legend += f"<span {color}>{html.escape(name)}: {ends}</span>"
    return f"""<figure><figcaption>{title}{legend}</figcaption><svg viewBox="-40 -6 346 120">
<path d="M0 0H300M0 50H300M0 100H300"/>{marks}<text x="-4" y="3">{high:.3g}</text>
<text x="-4" y="103">{low:.3g}</text><text x="300" y="113">step {last}</text></svg></figure>
"""

def table(title: str, columns: str, rows: list[dict]) -> str:
    """Texts, numbers and chat messages as HTML. Nothing without rows."""
    if not rows:
        return ""
    names = columns.split(", ")
    body = "".join(f"<th>{name}" for name in names)
    for row in rows:
        body += "<tr>"
        for name in names:
            cell = row[name]
            text = str(cell)
            if isinstance(cell, float):
                text = f"{cell:.3g}"
            if isinstance(cell, list):
                text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in cell)
            if len(text) > 4000:
                text = f"{text:.4000} [and {len(text) - 4000} characters]"
            body += f"<td><div>{html.escape(text)}</div>"
    return f"<h2>{title}</h2><section><table><tr>{body}</table></section>"

def report_page(folder: Path, max_steps: int) -> str:
    """The run so far as a page of HTML, read back from its files."""
    curves, warned = read_metrics(folder / "metrics.jsonl")
    step, seconds = curves["time/elapsed"][-1]
    marks, begun = "", []
    for warning, (advice, steps) in warned.items():
        begun.append({"warning": warning, "what to do": advice, "begins at steps": f"{steps}"})
        for x in steps[:20]:    # more would hide the curves
            marks += f"""<line transform="translate({300 * x / step:.1f})" y2="100">
<title>{html.escape(warning)}</title></line>"""
    charts = "".join(chart(title, curves, marks) for title in CHARTS)
    samples = read_samples(folder / "samples.jsonl")
    evals = samples["eval"]
    # Each evaluation has the same problems in the same order.
    pairs = [new | {"completion before": old["completion"], "reward before": old["reward"]}
             for old, new in zip(*evals[:1], *evals[-1:])]
    pairs.sort(key=lambda row: (row["reward before"] or 0) - (row["reward"] or 0))
    trained = [row for rows in samples["train"][-1:] for row in rows]
    random.Random(step).shuffle(trained)    # equal ones shouldn't all be of one prompt
    trained.sort(key=lambda row: row["reward"] or 0)
    surprising = sorted(trained, key=lambda row: -abs(row["advantage"]))
    name = html.escape(folder.name)
    columns = "prompt, completion, reward, advantage"
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">{REPORT_STYLE}
<title>{name}</title><h1>{name}</h1><p>Step {step} of {max_steps}, {seconds / 60:.1f} minutes<br>
{html.escape(" ".join(sys.argv[1:]))}</p><main>{charts}</main>
""" + (table("Warnings, dashed above", "warning, what to do, begins at steps", begun)
       + table("Held-out problems that gained most and least",
               "prompt, completion before, reward before, completion, reward",
               pairs[:3] + pairs[3:][-3:])
       + table("Best of the last training step", columns, trained[:-4:-1])
       + table("Worst", columns, trained[:3])
       + table("Most surprising: furthest from the mean of their group", columns, surprising[:3]))

# --- ends of steps --------------------------------------------------------------------------------
def finish_step(cfg: Config, trainer: "Trainer", groups: list[Group], metrics: dict) -> None:
    """Makes the step part of the state: from here on a stop doesn't undo it."""
    state = trainer.state
    state.step += 1
    state.drawn += metrics["rollout/rounds"] * cfg.prompts_per_step
    state.elapsed += metrics["time/step"]
    if metrics["policy/nonfinite_updates"]:
        state.skipped_steps += 1
    else:
        state.skipped_steps = 0
    state.beta = adapted_beta(state.beta, metrics.get("policy/kl"), cfg.kl_target)
    state.metrics = {"step": state.step} | metrics
    state.reported = False
    state.file_sizes = trainer.run.file_sizes()
    state.history = [*state.history[-19:], state.last_eval | state.metrics]
    state.warnings = show_warnings(state.history, groups[0][0], cfg, state.warnings)

def adapted_beta(beta: float, kl: float | None, target: float | None) -> float:
    """Adaptive beta: PPO, arXiv:1707.06347, section 4."""
    if target is None or kl is None:
        return beta
    if kl > 1.5 * target:
        return 2 * beta
    if kl < target / 1.5:
        return beta / 2
    return beta

def report(cfg: Config, trainer: "Trainer") -> None:
    """Evaluates if it is time to, and writes and shows the metrics of the last step."""
    state, metrics = trainer.state, trainer.state.metrics
    if state.step % cfg.eval_steps == 0 or state.step == cfg.max_steps:
        start = time.perf_counter()
        state.last_eval = evaluate(cfg, trainer)
        if state.step == 0:
            state.first_eval = state.last_eval
        taken = time.perf_counter() - start
        state.elapsed += taken
        state.evaluating += taken
        metrics |= state.last_eval | {"time/evaluation": taken}
    often = cfg.eval_steps if cfg.log_kl_steps is None else cfg.log_kl_steps
    if often and state.step and state.step % often == 0 and not cfg.beta:
        metrics |= kl_from_start(trainer)
    metrics |= {"time/elapsed": state.elapsed, "time/left": seconds_left(state, cfg)}
    trainer.run.log(metrics, state.warnings)
    if "time/evaluation" in metrics:
        trainer.run.write_report()
    state.reported = True
    state.file_sizes = trainer.run.file_sizes()
    require(state.skipped_steps < cfg.max_skipped_steps,
            f"{state.skipped_steps} steps in a row had a gradient that was not finite: lower "
            "--learning-rate; their completions are in samples.jsonl")

def seconds_left(state: State, cfg: Config) -> float:
    """By the means of a step and of an evaluation so far."""
    step_seconds = (state.elapsed - state.evaluating) / max(1, state.step)
    done = state.step // cfg.eval_steps + 1
    evaluations_left = math.ceil(cfg.max_steps / cfg.eval_steps) + 1 - done
    return ((cfg.max_steps - state.step) * step_seconds
            + max(0, evaluations_left) * state.evaluating / done)

def evaluate(cfg: Config, trainer: "Trainer") -> dict[str, float]:
    """Of each held-out set, greedy: mean rewards, accuracy with half its 95 % interval, lengths;
    pass@k of sampled completions. Shows one of them."""
    metrics = {}
    for name, rows in trainer.held_out.items():
        prefix = "eval/"
        if len(trainer.held_out) > 1:
            prefix = f"eval/{Path(name).stem}/"
        groups, _ = rollout(trainer.engine, trainer.pool, rows, 1, 0.0, cfg.seed, "evaluation")
        trainer.run.write_samples(groups, trainer.state.step, "eval")
        if trainer.state.step == 0 and not metrics and not cfg.beta:
            keep_start(groups, trainer)
        shown = groups[0][0]
        asked = shown.row.prompt
        if not isinstance(asked, str):
            asked = asked[-1]["content"]
        say(f"{str(asked)[-80:]!r} -> {shown.text!r:.100}: {shown.reward}")
        of_samples = sample_metrics(groups)
        sources = {"reward": "reward/mean"} | {each: f"reward/{each}" for each in shown.rewards}
        for each in ("length_mean", "truncated"):
            sources[each] = f"completion/{each}"
        for each, source in sources.items():
            value = of_samples[source]
            if value is not None and math.isfinite(value):
                metrics[prefix + each] = value
        metrics[prefix + "repetition"] = mean(repetition(s.ids) for [s] in groups)
        if "correct" not in shown.rewards:
            continue
        accuracy = metrics.pop(prefix + "correct")
        metrics[prefix + "accuracy"] = accuracy
        metrics[prefix + "accuracy_ci"] = 1.96 * math.sqrt(accuracy * (1 - accuracy) / len(groups))
        if cfg.eval_num_generations:
            groups, _ = rollout(trainer.engine, trainer.pool, rows, cfg.eval_num_generations,
                                cfg.temperature, cfg.seed, "evaluation")
            trainer.run.write_samples(groups, trainer.state.step, "pass@k")
            for power in range(cfg.eval_num_generations.bit_length()):
                metrics[f"{prefix}pass@{2**power}"] = pass_at_k(groups, 2**power)
    return metrics

def keep_start(groups: list[Group], trainer: "Trainer") -> None:
    """Writes the logprobs of the model as it starts, of its own completions."""
    samples = list(itertools.chain(*groups))
    kept = [[x.tolist() for x in (s.row.prompt_ids, s.ids, s.mask)] for s in samples]
    start = {"logprobs": policy_logprobs(samples, trainer), "samples": kept}
    if trainer.run.is_writer:
        (trainer.run.folder / "start.json").write_text(json.dumps(start))

def kl_from_start(trainer: "Trainer") -> dict[str, float]:
    """Of the policy from the model as it started, in nats a token of that one's held-out
    completions (k3), with no second model in memory."""
    file = trainer.run.folder / "start.json"
    if not file.exists():    # there is no held-out set
        return {}
    start = json.loads(file.read_text())
    samples = []
    for i, (prompt_ids, ids, mask) in enumerate(start["samples"]):
        samples.append(Sample(Row(i, "", numpy.array(prompt_ids), {}), numpy.array(ids),
                              numpy.array(mask), numpy.zeros(len(ids)), False, ""))
    log_ratio = torch.tensor(policy_logprobs(samples, trainer))        # [T]
    log_ratio -= torch.tensor(start["logprobs"])
    return {"eval/kl": (log_ratio.exp() - log_ratio - 1).mean().item()}

def policy_logprobs(samples: list[Sample], trainer: "Trainer") -> list[float]:
    """Of all tokens, one sample after the other, shared out among the ranks."""
    policy = trainer.policy
    budget = trainer.run.cfg.tokens_per_micro_batch if policy.packed else 1
    pieces = split(samples, dist.get_world_size(), budget)[dist.get_rank()]
    with torch.no_grad():
        mine = [policy(pack(piece, policy.packed, policy.device))[0].tolist() for piece in pieces]
    return [x for share in gathered(mine) for piece in share for x in piece]

def pass_at_k(groups: list[Group], k: int) -> float:
    """Unbiased estimate of the chance that one of k completions is right (arXiv:2107.03374, 1)."""
    total = 0.0
    for group in groups:
        wrong = sum(s.rewards.get("correct", 0) < 1 for s in group)
        total += 1 - math.comb(wrong, k) / math.comb(len(group), k)
    return total / len(groups)

# --- set-up ---------------------------------------------------------------------------------------
@dataclass
class Trainer:
    """Everything of a run on one rank."""
    policy: Policy
    reference: Callable | None    # the model as it started, called as the policy; None at beta 0
    optimizer: torch.optim.AdamW
    engine: Engine
    pool: RewardPool
    rows: list[Row]
    held_out: dict[str, list[Row]]
    run: Run
    tokenizer: Any
    state: State

def set_up(cfg: Config, device: torch.device, cores: int) -> Trainer | None:
    """Loads everything, the cheap and fallible first. None if there is nothing to train."""
    pool = RewardPool(cfg, min(8, cores))
    at_end(pool.close)
    if cfg.check_reward:
        check_reward(pool, cfg.check_reward)
        return None
    model_config, tokenizer, stop_ids = load_tokenizer(cfg)
    data = [load_data(cfg, tokenizer) if IS_FIRST_RANK else None]
    dist.broadcast_object_list(data)
    rows, held_out = data[0]
    run = Run(cfg)
    if run.model_folder.exists():
        say(f"{run.folder} holds this run, complete")
        return None
    require(not (cfg.save_only_model and run.begun()), f"--output-dir {run.folder} holds a run "
            f"of this kind: {run.way_on()}, name another folder")
    run.start_loggers()
    check_memory(cfg, model_config, device)
    packed = packs(cfg, model_config, device)
    policy = load_policy(cfg, model_config, packed, device, trainable=True)
    reference = None
    if cfg.beta and cfg.lora_rank:
        reference = functools.partial(without_adapters, policy)
    elif cfg.beta:
        reference = load_policy(cfg, model_config, packed, device, trainable=False)
    optimizer = make_optimizer(policy, cfg)
    state = run.load_checkpoint(policy, optimizer, rows)
    before = torch.cuda.memory_allocated()    # 0 without a GPU
    engine = Engine(cfg, model_config, tokenizer, stop_ids, device)
    if engine.sleeps:
        engine.sleeping_bytes = torch.cuda.memory_allocated() - before
    engine.sleep()    # so that the test below also finds what a sleep would lose
    engine.load(policy)
    test_rows = rows or next(iter(held_out.values()))
    self_test(engine, policy, test_rows[:2], cfg)
    run.rewind(state)
    say(f"{cfg.model_name_or_path} on {dist.get_world_size()} x {device.type}: "
        f"{cfg.prompts_per_step} prompts x {cfg.num_generations} completions a step, {len(rows)} "
        f"prompts to train on, {sum(map(len, held_out.values()))} held out; output in {run.folder}")
    if state.step:
        say(f"going on after step {state.step}")
    return Trainer(policy, reference, optimizer, engine, pool, rows, held_out, run, tokenizer,
                   state)

def self_test(engine: Engine, policy: Policy, rows: list[Row], cfg: Config) -> None:
    """Engine and trainer must agree on a few samples. The engine began with random weights: a
    tensor that didn't reach it shows here, and so does a model that vLLM or the packed rows compute
    differently."""
    groups = engine.sample(rows, cfg.num_generations, cfg.temperature, cfg.seed, "self-test")
    samples = [s for group in groups for s in group]
    budget = cfg.tokens_per_micro_batch if policy.packed else 1
    first_micro_batch = split(samples, 1, budget)[0][0]
    batch = pack(first_micro_batch, policy.packed, policy.device)
    with torch.no_grad():
        gap = (policy(batch)[0] - batch.tokens.engine_logprobs).abs()         # [T]
    limit = 0.25 if cfg.bf16 else 1e-3
    require(gap.nanmean() <= limit,
            f"engine and trainer disagree on the same tokens by {gap.nanmean():.4f} nats in the "
            f"mean (limit {limit}): vLLM has other weights than {cfg.model_name_or_path}, computes "
            "it differently, or lost some of it asleep (--vllm-sleep-level 1)")

def start_vllm(cfg: Config, model_config, on_cpu: bool):
    options = engine_options(cfg, model_config, on_cpu)
    from vllm import LLM
    with reported_as("vLLM did not start (short of memory? --vllm-gpu-memory-utilization and "
                     "--vllm-max-model-length set what it takes)", ValueError, RuntimeError):
        return LLM(cfg.model_name_or_path, dtype=compute_dtype(cfg),
                   seed=cfg.seed + dist.get_rank() // cfg.vllm_tensor_parallel_size, **options)

def engine_options(cfg: Config, model_config, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is told, beside model, dtype and seed. Raises UserError for vLLM's other build."""
    # By default vLLM's CPU build pins the trainer's threads to one core as well.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm.platforms import current_platform
    wanted, found = "cpu" if on_cpu else "cuda", current_platform.device_type
    require(found == wanted, f"--device: torch is to use the {wanted}, and this build of vLLM the "
            f"{found}")
    engines = dist.get_world_size() // cfg.vllm_tensor_parallel_size
    sequences = cfg.prompts_per_step // engines * cfg.num_generations
    sequences = min(sequences, 256 if on_cpu else 1024)
    options = dict(
        distributed_executor_backend="external_launcher",    # in this process
        tensor_parallel_size=cfg.vllm_tensor_parallel_size,
        load_format="dummy",                     # random weights: the policy's follow
        generation_config="vllm",                # no sampling defaults of the model's own
        logprobs_mode="processed_logprobs",      # at the sampling temperature
        skip_tokenizer_init=not cfg.stop, trust_remote_code=False,
        enable_prefix_caching=True, disable_log_stats=True,
        max_model_len=cfg.max_length, max_num_seqs=sequences,
        max_num_batched_tokens=max(8192, cfg.max_length))
    if on_cpu:
        allowed = int(cfg.vllm_gpu_memory_utilization * physical_memory())
        full = (sequences + 1) * cache_bytes(cfg, model_config)
        # Compiling takes longer than it saves in a short run.
        eager = cfg.max_steps * sequences * cfg.max_completion_length < 10**6
        options |= dict(kv_cache_memory_bytes=min(allowed, full), block_size=32)
    else:
        eager = False
        options |= dict(gpu_memory_utilization=cfg.vllm_gpu_memory_utilization,
                        enable_sleep_mode=cfg.vllm_enable_sleep_mode)
    if cfg.vllm_enforce_eager is not None:
        eager = cfg.vllm_enforce_eager
    return options | dict(enforce_eager=eager)

def cache_bytes(cfg: Config, model_config) -> int:
    """Of the keys and values of a sequence of full length."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    head_width = getattr(model_config, "head_dim", None)
    if not head_width:
        head_width = model_config.hidden_size // model_config.num_attention_heads
    tokens = 32 * (math.ceil(cfg.max_length / 32) + 1)    # in blocks of 32
    bytes_each = 2 if cfg.bf16 else 4
    return 2 * model_config.num_hidden_layers * heads * head_width * tokens * bytes_each

# --- signals and ends -----------------------------------------------------------------------------
class UserError(Exception):
    """Something the user can put right: shown as one line, without a traceback."""

def require(condition: Any, complaint: str) -> None:
    if not condition:
        raise UserError(complaint)

@contextlib.contextmanager
def reported_as(complaint: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turns exceptions of these kinds into a UserError: the complaint, then their first line."""
    try:
        yield
    except kinds as e:
        reason = str(e) or type(e).__name__
        raise UserError(f"{complaint}: {reason.splitlines()[0]:.300}") from e

IS_FIRST_RANK = os.environ.get("RANK", "0") == "0"
ON_TERMINAL = IS_FIRST_RANK and sys.stderr.isatty()
AT_END = contextlib.ExitStack()
# at_end(function): called once before this process ends, the last one first; not at a signal that
# comes before training.
at_end = AT_END.callback
NO_MEMORY = re.compile("(?i)out of memory|can't allocate memory")
NO_PEER = re.compile("(?i)gloo.*(connection|timed out|broken pipe|closed)")

def say(message: str) -> None:
    if IS_FIRST_RANK:
        print(f"{message}\n", end="", flush=True)    # in one write: no other's words come between

def progress(phase: str, iterable=None, total: int | None = None, **_):
    """The progress line of a phase, on a terminal only. `_`: what else vLLM gives its own."""
    from tqdm import tqdm
    return tqdm(iterable, total=total, desc=phase, leave=False, dynamic_ncols=True,
                disable=not ON_TERMINAL)

class Stopped(BaseException):
    """SIGTERM or Ctrl-C, raised on all ranks at the same stop point. args[0]: the signal."""

class BrokenOff(BaseException):
    """SIGTERM or Ctrl-C in what one rank does for itself; ends at `interruptible`."""

class Stopping:
    """What this rank was told by SIGTERM or Ctrl-C, and what it is doing."""

    def __init__(self):
        self.phase = "the start"
        self.signal = 0
        self.heard_at = -math.inf
        self.breakable = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.hear)

    def hear(self, number: int, frame) -> None:
        """The first signal stops the run, the next one ends this rank. One more passes over what
        hangs in its closing."""
        now = time.monotonic()
        if now < self.heard_at + 2:
            return    # torchrun repeats a signal
        self.heard_at = now
        if self.signal:
            leave(128 + number)
        self.signal = number
        self.break_off_if_told()

    def break_off_if_told(self) -> None:
        if self.breakable and self.signal:
            self.breakable = False
            raise BrokenOff

    def interruptible(self, alone: bool = True) -> "Stopping":
        """`with STOPPING.interruptible():` a signal ends the block, on this rank only; not if it
        isn't `alone` in it. The first line of the block is break_off_if_told(), for a signal that
        came before it."""
        self.alone = alone
        return self

    def __enter__(self) -> None:
        self.breakable = self.alone

    def __exit__(self, kind, error, trace) -> bool:
        self.breakable = False
        return kind is BrokenOff

STOPPING = Stopping()

def gathered(value: Any) -> list:
    """The value of every rank, in their order. All ranks must ask."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values

def stop_point() -> None:
    """Raises Stopped on all ranks if one was told to stop. All ranks must come here."""
    told = max(gathered(STOPPING.signal))
    if told:
        raise Stopped(told)

def close() -> None:
    """Calls what at_end was given, and empties all buffers."""
    try:
        AT_END.close()
    except Exception:    # raised when all have had their turn
        traceback.print_exc()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):    # a closed pipe; a signal in the middle of a print
            stream.flush()

def leave(code: int) -> None:
    """Closes and ends at once: the interpreter's own end would wait for ranks that may be gone."""
    close()
    os._exit(code)

def fail(error: Exception, name: str, store=None) -> None:
    """The first rank to fail says why and all end: each for itself, or by torchrun while it waits
    for another. `store` is the ranks' own, if they have met; `name` begins the line."""
    STOPPING.breakable = False
    code, reason = diagnosis(error)
    is_first = True
    if store is None:
        is_first = IS_FIRST_RANK
    else:
        # Where the store's host is gone each speaks; the kernel looks for it for 15 minutes.
        with contextlib.suppress(RuntimeError, TimeoutError):
            is_first = ThreadPoolExecutor(1).submit(store.add, "failed", 1).result(10) == 1
    if is_first:
        if reason is None:
            traceback.print_exception(error)
            reason = f"failed during {STOPPING.phase}"
        print(f"{name}: {reason}", file=sys.stderr, flush=True)
    leave(code)

def diagnosis(error: Exception) -> tuple[int, str | None]:
    """Exit code (2: the user can put it right) and the line to show; None: it takes a traceback."""
    if isinstance(error, UserError):
        return 2, str(error)
    text = str(error).partition("\n")[0][:200]
    during = f"during {STOPPING.phase}"
    runtime = isinstance(error, RuntimeError)    # which torch's, NCCL's and gloo's errors are
    if isinstance(error, MemoryError) or (runtime and NO_MEMORY.search(text)):
        return 2, (f"out of memory {during}: lower --tokens-per-micro-batch or --vllm-gpu-memory-"
                   f"utilization, or give --gradient-checkpointing ({text})")
    if runtime and (isinstance(error, dist.DistError) or NO_PEER.search(text)):
        return 1, (f"lost another process of the run {during}: it died, or the network to it "
                   f"failed ({text})")
    return 1, None

def end_with_parent() -> None:
    """Has the kernel kill this process when torchrun's agent ends, in whichever way. An agent that
    ended before can't be reached as the ranks meet, which ends this process too."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG
    if os.getppid() != parent:    # it ended meanwhile
        leave(1)

def lock_folder(folder: Path) -> None:
    """Refuses a folder that another process locked. The kernel lifts a lock as its holder dies."""
    import fcntl
    file = open(folder / ".lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"--output-dir {folder} is in use by process {file.read()}: end that one, "
                        "or name another folder") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    at_end(file.close)    # keeps it open, and so locked, till then

# --- main -----------------------------------------------------------------------------------------
TRL_NAMES = {
    "dataset_name": "use --dataset",
    "dataset_train_split": "use --dataset-split",
    "dataset_test_split": "use --eval-split",
    "reward_funcs": "use --reward, which takes correct, format and file.py:function",
    "reward_weights": "use --reward, where each name may end in :weight",
    "per_device_train_batch_size": "use --prompts-per-step, counted over all processes in prompts, "
                                   "and --tokens-per-micro-batch, which bounds memory",
    "gradient_accumulation_steps": "use --prompts-per-step; it is cut to --tokens-per-micro-batch",
    "steps_per_generation": "use --num-minibatches",
    "num_train_epochs": "use --max-steps",
    "warmup_ratio": "use --warmup-steps",
    "num_generations_eval": "use --eval-num-generations",
    "resume_from_checkpoint": "use --output-dir: the same command goes on with the run in it",
    "vllm_importance_sampling_cap": "use --vllm-importance-sampling-clip-max",
    "use_peft": "use --lora-rank",
    "lora_r": "use --lora-rank",
    "use_vllm": "vLLM always samples",
    "top_p": "the trainer's probabilities can't match a cut choice",
    "top_k": "the trainer's probabilities can't match a cut choice",
    "fp16": "use --bf16 or --no-bf16",
    "log_completions": "completions are in samples.jsonl in the run's folder",
    "sync_ref_model": "the reference is the model as it started; <run>/model can start a new run",
}

def refuse_other_names(arguments: list[str]) -> None:
    """A flag that goes by another name in TRL: says which is ours."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in TRL_NAMES:
            raise UserError(f"{flag} is no flag here: {TRL_NAMES[name]}")

def parse_flags() -> Config:
    """A recipe's flags are new defaults, so that those given beside it win."""
    import tyro
    parse = functools.partial(tyro.cli, Config, description=__doc__.partition("\n")[0],
                              console_outputs=IS_FIRST_RANK)
    cfg = parse()
    chosen = RECIPES[cfg.recipe]
    if not chosen:
        return cfg
    cfg = parse(default=Config(recipe=cfg.recipe, **chosen))
    flags = [f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in chosen]
    say(f"recipe {cfg.recipe}: {' '.join(flags)}")
    return cfg

def from_torchrun(name: str, default: int) -> int:
    return int(os.environ.get(name, default))

def check_launch(cfg: Config) -> None:
    require("RANK" in os.environ, "start it with torchrun: torchrun --standalone --nproc-per-node "
            "<GPUs, or 1> grpo.py ...")
    if from_torchrun("TORCHELASTIC_MAX_RESTARTS", 0) > 0:
        require(cfg.output_dir and not cfg.save_only_model, "torchrun --max-restarts needs an "
                "--output-dir, where a restart finds the run, and no --save-only-model")

def quiet_libraries() -> None:
    # Both are read when transformers is imported.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    sys.warnoptions.append("ignore:resource_tracker")    # it complains of processes that just end

def own_device(cfg: Config) -> tuple[torch.device, int]:
    """This rank's device and how many CPU cores are its own."""
    local_size = from_torchrun("LOCAL_WORLD_SIZE", 1)
    cores = max(1, len(os.sched_getaffinity(0)) // local_size)
    if cfg.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(cores)    # torchrun would leave it at 1
        return torch.device("cpu"), cores
    gpus = torch.cuda.device_count()
    require(local_size <= gpus, f"torchrun --nproc-per-node {local_size} needs as many GPUs, "
            f"torch sees {gpus}")
    device = torch.device("cuda", from_torchrun("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device, cores

def in_a_dtype_of(device: torch.device, cfg: Config) -> Config:
    """The config, in float32 where there are no instructions for bfloat16: without them a CPU takes
    up to 100 times as long."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        mkldnn = torch.backends.mkldnn.is_available()
        has_bf16 = mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if has_bf16 or not cfg.bf16:
        return cfg
    say(f"note: this {device.type} has no instructions for bfloat16: --no-bf16 is set")
    return replace(cfg, bf16=False)

def meet(store: dist.Store, rank: int, world_size: int, patience: float) -> dist.Store:
    """The store under a prefix for this start of the ranks alone: those that torchrun starts again,
    on each host in its own time, would find addresses of the dead. A start begins with rank 0; the
    others enter the newest, but none that they were in before, until one has them all."""
    if rank == 0:
        store.add("starts", 1)
    entered = 0
    deadline = time.monotonic() + patience
    while store.add(f"ranks in start {entered}", 0) < world_size:
        if time.monotonic() > deadline:
            raise dist.DistStoreError("some ranks have not come")
        newest = store.add("starts", 0)
        if newest > entered and store.add(f"rank {rank} in start {newest}", 1) == 1:
            entered = newest
            store.add(f"ranks in start {entered}", 1)
        time.sleep(0.01)
    return dist.PrefixStore(f"start {entered}", store)

def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # until there is something to save
    rank = from_torchrun("RANK", 0)
    world_size = from_torchrun("WORLD_SIZE", 1)
    name = "grpo.py" if world_size == 1 else f"grpo.py (rank {rank})"
    store = None
    try:
        refuse_other_names(sys.argv[1:])
        cfg = parse_flags()
        check_config(cfg, world_size)
        check_launch(cfg)
        end_with_parent()
        quiet_libraries()
        device, cores = own_device(cfg)
        cfg = in_a_dtype_of(device, cfg)
        store = next(dist.rendezvous("env://"))[0]
        store = meet(store, rank, world_size, cfg.ddp_timeout)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=cfg.ddp_timeout))
        trainer = set_up(cfg, device, cores)
        if trainer:
            train(cfg, trainer)
        close()    # the engine's own exit handler ends the process group
    except Stopped as stopped:
        leave(128 + stopped.args[0])
    except Exception as error:
        fail(error, name, store)

# --- answers --------------------------------------------------------------------------------------
# Characters. It bounds the digits of a number, and the cost of the patterns marked (*).
_LONGEST_ANSWER = 400

# Special tokens, and calculator notes such as <<6*7=42>>.
_NOISE = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>|<<[^<>]*>>")
_BRACED = r"(?:[^{}\\]|\\[\s\S])*+"
for _ in range(6):    # braces in braces, as deep as answers go: a bound keeps the search linear
    _BRACED = rf"(?:[^{{}}\\]|\\[\s\S]|\{{{_BRACED}\}})*+"
# A box, an <answer> tag, or a '####' line, unless it is a heading: '2. Words', or words above text.
_MARKER = re.compile(
    rf"""(?x) \\boxed\s*+ \{{({_BRACED})\}} | <answer> (?=([^<]*)) | \#{{4,}}+
    (?! \s*<answer> | [^\w\\\n\#]*+ \d+[.)][ ]+[^\W\d_]{{2}}
        | [^\w\\\n\#]*+ [^\W\d_]{{2}}[^\#\n]*+[\W_]*+\w )
    (?=([^\#\n]*))"""
)
_PROSE = re.compile(    # a bullet after it is no sign
    r"""(?ix) \b(?:answer|(?:option|choice)(?=[ ]is)) [\s*_"']*+ (?:is\b|[:=：])
    [\s*_:]*+ (?: (?<=\n) [-+•] \s )? (?=([^\n!]{0,401}))"""
)
# Words right before or after a mark (here \0) that make it a guess or take it back.
_TAKEN_BACK = re.compile(
    r"""(?ix) \b(?:n?or|either|maybe|perhaps|possibly|not|wrong|incorrect)\b
        (?: [^.!?\n]*\d[^.!?\n]*\banswer )?
        (?: [^\w\0.!?] | _ | \b(?:the|my|final|answer|is|boxed)\b )*+ \0
    | \0 [^\w\n]*\? | \0 [\W_]*+ (?:(?:but|and|this|that|it|which)\s+)* (?:is|was|['’]s)\s+
        (?:an?\s+)? (?: incorrect | wrong | false | not\s+(?:correct|right|the|true) )\b"""
)
# (*) What is not one plain claim; the end finds 'x = 3, y = 4'.
_HEDGE = re.compile(
    r"""(?ix) [<≤≥≠±] | \?$ | (?<![=-])> | != | n['’]t\b
    | \b(?: n?or | either | between | maybe | perhaps | possibly | not | never | at[ ](?:least|most)
        | incorrect | wrong | false )\b
    | \b(?:than|over|under|above|below)[ ][$\d-] | \b([a-z])[ ]?=.*\b(?!\1)[a-z][ ]?="""
)
# A sentence that takes the one before back ('42. Or 43.') stays with it, as a list of guesses.
_SENTENCE = re.compile(
    r"(?<=[.!?])\s+(?=[A-Z])(?!(?:Or|No|Not|Maybe|Perhaps|Wait|Actually)\b)"
)
_LABEL = re.compile(
    r"""(?ix) ^\#+[ ]*\d+[.)]\s.* | ^[\s>]*+ (?:[-+*•]\s+(?![-−(]))? (?:\d+[.)]\s+(?=[a-z]))?
    | \b(?:step|part|case|question|page|chapter|figure|equation|problem|line)\s*+\d+"""
)
# A sentence without a number, a question, or words about the answer or for the reader.
_REMARK = re.compile(
    r"""(?ix) ^[^\d¼-¾⅐-⅞]*$ | \?\s*$ | ^[^=]*(?:at[ ]first|initially|originally)\W*$
    | \b(?: good[ ]luck | I[ ](?:hope|rate|give) | thank | let[ ]me[ ]know | feel[ ]free
        | (?:took|in)[ ]\d+[ ](?:\w+[ ])?steps )\b
    | %[ ](?:confident|certain|sure)\b
    | ^[\W_]*+ (?:(?:my|the|self|final|overall)\W)? (?: confidence | certainty | correctness
        | rating | grade | score | reward | difficulty | see | source | reference | version
        | note | check | verif\w* | (?:word|token)s?[ ](?:count|used) | time[ ]taken )\b
        (?: [\W_]*\d | .*: | [ ]page )"""
)
_RESULT = re.compile(    # what follows one of these is the result
    r"""(?ix) [=-]> | [=≈→⇒] | (?<![\d\s]): | ^\|[ ].*\| (?=[^|]+\|?$)
    | \b(?: is | equals? | makes? | gives? | gets?
        | (?:are|was|were|has|have|costs?|totals?) (?=.*\d) )\b"""
)
# (*) LaTeX and typography to plain text, in this order.
_REWRITES = {
    "[−–‐‑]": "-",
    "—": " : ",
    "⁄": "/",
    r"[=-]>|[→⇒]|\\(?:[Rr]ightarrow|implies)\b": "=",
    r"\\[dtc]frac": r"\\frac",
    r"\\left\b|\\right\b|\\!|(?<=[-+])\s*\\?[$€£¥₹]": "",
    r"\\,(?=\d{3}(?!\d))|\{,\}": ",",
    r"\\[,;: ()\[\]]|~|\\q?quad\b|\^\s*\{?\s*\\circ\s*\}?|°": " ",
    r"\\(?:text|math|operatorname|mbox|boxed)(?:rm|bf|it)?\s*\{([^{}]*)\}": r"\1",
    r"\\?%|(?i:\bper ?cent\b)": "%",
    r"\\frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))":
        r" \1\2/\3\4",
    r"(?<=\d)\s*(?:\\times|\\cdot|[x×*·⋅])\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))":
        r"e\1\2",
    r"\\?[$€£¥₹]|\*\*|(?<!\w)[*_]+|[*_]+(?![\w{])|[`#]": " ",
    r"\s+": " ",
    "^[ :]+|[ .,;:]+$": "",
    r"(?i:^-|\b(?:minus|negative)) (?=[\d.])": "-",
    r"^\(([A-Za-z])\)$|^\(?([A-H])\) (?!or\b|and\b)[a-z\d][^(),]*$": r"\1\2",    # a choice
}
_PLAIN = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?!\d)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(    # sign, whole part of a mixed number, numerator, denominator (not 0)
    rf"""(?x) ((?<![\w)])[-+])? (?<![\w.]) (?:(\d+)[ ]+(?=\d+[ ]?/))?
    ({_PLAIN}(?:[eE][-+]?\d{{1,3}})?) (?:[ ]?/[ ]?(-?(?=[0.]*[1-9]){_PLAIN}))?"""
)
# What makes the one number '#' of a text less than its value: operators, variables, scale words.
_SPOILT = re.compile(
    r"""(?x) [\d^_\\√π∞+*×÷·|&=] | [-/][ ]?\(?[ ]?\# | \w\(\# | \#[ ]?(?:!|[-/]$)
    | \b[b-fi-kn-rt-zX-Z]\b | \#(?:a|[a-z][acexy]|[a-km-z]b)\b
    | (?i:\b(?:half|third|quarter|dozen|[mb]illion|hundred|thousand|squared|cubed|root|sqrt|pi
        |sin|cos|tan|log|ln)\b)"""
)
# Remarks: '(4 rows of 3)', ', which is 3 more'. A power of a unit, as in m^2.
_ASIDE = re.compile(r"[ ]\((?:=|[^()]*[a-z]{3})[^()]*\)|,?[ ](?:because|since|which|as)\b.*")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z]) ?\^ ?(?:\{\d\}|\d)(?!\d)")
_ROOT_OR_POWER = re.compile(r"(?=.*(?:\^|sqrt))[-+]?(?:\\sqrt|\\[dt]?frac|[\d{}^/.$\s])+")

def _spoken(completion: str) -> str:
    """What is said outside <think>, also where a thought never ends. No special tokens."""
    after = completion.rpartition("</think>")[2]
    return _NOISE.sub("\n", after.partition("<think>")[0])

def _number(text: str) -> tuple[Fraction, Fraction] | None:
    """The one number that a plain text states, as written and as a share: 25% is 25 and 1/4."""
    if _HEDGE.search(text):
        return None
    text = _UNIT_POWER.sub("", _LABEL.sub("", _ASIDE.sub("", text)))
    head, _, value = text.rpartition("=")
    if re.search(r"[,;] |\band\b", head):
        value = text
    found = set(_NUMBER.findall(value))
    if len(found) != 1 or _SPOILT.search(_NUMBER.sub("#", value)):
        return None
    sign, whole, top, bottom = (part.replace(",", "") for part in found.pop())
    number = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
    number *= Fraction(sign + "1")
    return number, number / 100 if "%" in value else number

def _readings(text: str) -> tuple[Fraction | str, Fraction | str]:
    """`text` as written and as a share: exact numbers if it states just one, else plain text."""
    if len(text) > _LONGEST_ANSWER:
        return text, text
    text = re.sub("(?=[¼-¾⅐-⅞])", " ", text)    # NFKC alone would turn 2½ into 21/2
    text = re.sub("(?<![²³¹⁰⁴-⁹⁺⁻])(?=[²³¹⁰⁴-⁹⁺⁻])", "^", text)    # and 5² into 52
    text = unicodedata.normalize("NFKC", text)
    text = "".join(str(unicodedata.decimal(c, c)) for c in text)
    for pattern, replacement in _REWRITES.items():
        text = re.sub(pattern, replacement, text)
    word = text.replace(" ", "")
    if len(word) > 1 and word.isalpha():
        word = word.lower()
    return _number(text) or (word, word)

def _claim(mark: re.Match) -> str:
    """The first sentence of what is marked, with the words beside it that take it back."""
    text = mark.string
    start, end = mark.span(mark.lastindex)
    claim = _SENTENCE.split(text[start:end].strip())[0]
    taken_back = _TAKEN_BACK.search(f"{text[:start][-100:]}\0{text[end:][:100]}")
    return f"{claim} {taken_back[0]}" if taken_back else claim

def _marked(text: str) -> list[str]:
    """The last claims marked as answers: boxes, '####' lines, <answer> tags, else 'answer is'."""
    for pattern in (_MARKER, _PROSE):
        marks = [m for m in pattern.finditer(text) if re.search(r"\w", m[m.lastindex])]
        if marks:
            break
    return [_claim(mark) for mark in marks[-20:]]

def extract_answer(completion: str) -> str | None:
    """What `completion` states outside <think>: its last marked answer, else its last number."""
    text = _spoken(completion)
    marked = _marked(text)
    if marked:    # two different answers are a correction, more are a list of guesses
        return marked[-1] if len({_readings(claim) for claim in marked}) <= 2 else None
    stated = ""
    for line in text.splitlines():
        for sentence in _SENTENCE.split(_LABEL.sub("", line).strip()):
            if not _REMARK.search(sentence):
                stated = sentence
    if len(stated) > _LONGEST_ANSWER or _HEDGE.search(stated):
        return None
    found = _RESULT.split(stated)[-1].strip().rstrip("!|")    # '92!' is no factorial here
    return found if is_number(found) else None

def final_answer(gold) -> str:
    """Of a gold answer that may be a worked solution."""
    if isinstance(gold, float) and not gold.is_integer():
        gold = f"{gold:.15g}"    # 0.1 + 0.2 is meant as 0.3
    marked = _marked(str(gold))
    return marked[-1] if marked else str(gold)

def is_number(gold) -> bool:
    """Whether its final answer is one plain number, which needs no symbolic comparison."""
    return isinstance(_readings(final_answer(gold))[0], Fraction)

def answer_is_correct(completion: str, answer) -> bool:
    """Whether `completion` states `answer`: a number, text, worked solution, or a list of these."""
    if isinstance(answer, (list, tuple)):
        return any(answer_is_correct(completion, each) for each in answer)
    if answer is None or isinstance(answer, (int, float)) and not abs(answer) < 10**300:
        return False    # NaN, infinity, or an integer of so many digits that it has no `str`
    found = extract_answer(completion)
    if found is None:
        return False
    gold = final_answer(answer)
    ours, truth = _readings(found), _readings(gold)
    if ours[0] == truth[0] or ours[1] == truth[1]:
        return True
    if isinstance(truth[0], Fraction) and not _ROOT_OR_POWER.fullmatch(found):
        return False    # of expressions for a number not a sum: that may be the question
    return symbolically_equal(found, gold)

def symbolically_equal(found: str, gold: str) -> bool:
    """Whether math-verify, if installed, finds two expressions equal. It gets none that explode."""
    huge = re.search(r"(?s).{400}|!|\^[^+*/=,]*\^|\^\W*\d{4}|\d{9}|[eE]\d{3}", f"{found}={gold}")
    if huge or not importlib.util.find_spec("math_verify"):
        return False
    from math_verify import parse, verify
    sides = [parse(f"${text.strip('$ ')}$", parsing_timeout=1, raise_on_error=False)
             for text in (gold, found)]
    return all(sides) and verify(*sides, timeout_seconds=1, raise_on_error=False)

def correct(completions: list[str], answer: list, **_) -> list[float]:
    """The default reward: 1 where the completion states the row's `answer`, else 0."""
    return [float(answer_is_correct(*pair)) for pair in zip(completions, answer, strict=True)]

def format_reward(completions: list[str], **_) -> list[float]:
    """1 where an answer is marked outside <think>: a box, '####', <answer> or 'the answer is'."""
    return [float(bool(_marked(_spoken(completion)))) for completion in completions]

def parsable(completions: list[str], **_) -> list[float]:
    """1 where the completion states an answer."""
    return [float(extract_answer(completion) is not None) for completion in completions]

REWARDS = {"correct": correct, "format": format_reward, "parsable": parsable}

if __name__ == "__main__":
    main()
