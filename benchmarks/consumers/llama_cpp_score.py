"""Load a GGUF export with llama.cpp, compare its tokenizer, score the golden ids on the CPU.

    python llama_cpp_score.py EXPORT_FOLDER golden_ppl.safetensors --text eval.txt

Needs the package `llama-cpp-python`, 0.3.36 or later, built for the CPU.
"""

import argparse
import ctypes
import time
from pathlib import Path

import llama_cpp as llama
import numpy as np
from golden import CONTEXT, add_options, compare, losses, read_golden, report, windows

KV_TYPES = {"f32": 0, "f16": 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, tolerance=0.003)
    parser.add_argument("--text", type=Path, help="text whose ids are the golden ones")
    parser.add_argument("--kv", choices=KV_TYPES, default="f32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    file = first_file(args.folder)
    ids, golden = read_golden(args.golden)
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    start = time.perf_counter()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(file).encode(), settings)
    if not model:
        raise SystemExit(f"{file}: llama.cpp refused it")
    loaded = time.perf_counter()
    record = {
        "consumer": "llama.cpp",
        "version": f"llama-cpp-python {llama.__version__}",
        "file": file.name,
        "parts": len(list(file.parent.glob("*.gguf"))),
        "kv": args.kv,
        "model": describe(model),
        "parameters": int(llama.llama_model_n_params(model)),
        "tensor_bytes": int(llama.llama_model_size(model)),
    }
    if args.text is not None:
        record["tokenizer_equal"] = tokenize(model, args.text.read_bytes()) == ids.tolist()
    nll = score(model, ids, kv=args.kv, threads=args.threads)
    record |= compare(nll, golden)
    record["load_seconds"] = round(loaded - start, 2)
    record["score_seconds"] = round(time.perf_counter() - loaded, 2)
    return report(
        record,
        tolerance=args.tolerance,
        expected=args.expected,
        results=args.results,
        name=args.name,
    )


def first_file(folder: Path) -> Path:
    """Return the only file, or the first part."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1 and not (files and "-00001-of-" in files[0].name):
        raise SystemExit(f"{folder}: expected one GGUF file or parts, got {len(files)} files")
    return files[0]


def describe(model: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode()


def tokenize(model: ctypes.c_void_p, text: bytes) -> list[int]:
    """Return the ids of a text, with nothing added and no control tokens taken from it."""
    vocab = llama.llama_model_get_vocab(model)
    ids = (llama.llama_token * len(text))()
    count = llama.llama_tokenize(vocab, text, len(text), ids, len(ids), False, False)
    if count < 0:
        raise SystemExit(f"tokenizer: expected at most {len(text)} ids, got {-count}")
    return list(ids[:count])


def score(model: ctypes.c_void_p, ids: np.ndarray, *, kv: str, threads: int) -> np.ndarray:
    """Return the loss of every id but the first, each window in an empty context."""
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = CONTEXT
    settings.type_k = settings.type_v = KV_TYPES[kv]
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit("llama.cpp: expected a context, got none")
    width = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    memory = llama.llama_get_memory(context)
    batch = llama.llama_batch_init(CONTEXT, 0, 1)
    found = []
    for inputs, targets in windows(ids):
        llama.llama_memory_clear(memory, True)
        batch.n_tokens = len(inputs)
        for place, token in enumerate(inputs.tolist()):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 1
        if llama.llama_decode(context, batch):
            raise SystemExit("llama.cpp: expected to decode a window, got an error")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(inputs), width))
        found.append(losses(logits, targets))
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return np.concatenate(found)


if __name__ == "__main__":
    raise SystemExit(main())
