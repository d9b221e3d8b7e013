"""Whole stacks: the golden tensors, decoding with caches, and a second implementation in loops."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.models.k3_config import LayerKind, read_config
from k3quant.models.k3_layer import decoder_layer, final_hidden
from k3quant.models.k3_tensors import layer_tensors, num_shards, shard_tensors
from k3quant.models.residual import Residual

# Rounding alone moves a golden logit by 1e-4 and a state by 2e-5 between implementations.
LOGIT_TOLERANCE = 5e-4
STATE_TOLERANCE = 1e-4


class Stack:
    """A model whose weights are all in memory."""

    def __init__(self, config, layers, experts, ends):
        self.config, self.layers, self.experts, self.ends = config, layers, experts, ends

    def forward(self, ids, caches=None, tap=None):
        """Return logits `[T, V]` and the caches of one window."""
        residual = Residual(self.ends["embed_tokens"][ids][None])
        caches = caches or [None] * len(self.layers)
        after = []
        for layer, (own, experts) in enumerate(zip(self.layers, self.experts, strict=True)):
            residual, cache = decoder_layer(
                residual,
                own,
                lambda wanted, experts=experts: (experts[e] for e in wanted),
                self.config,
                layer,
                cache=caches[layer],
                tap=tap,
            )
            after.append(cache)
        hidden = final_hidden(residual, self.ends, self.config)
        return (hidden @ self.ends["lm_head"].T)[0], after


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Compute on one thread: for small tensors two mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _kept(weights):
    """Copy weights, whose memory the walk uses again."""
    return {role: weight.clone() for role, weight in weights.items()}


@pytest.fixture(scope="module")
def stack(oracle):
    model = CheckpointModel(
        open_checkpoint(oracle), dtype=torch.float32, ahead_bytes=1 << 24, threads=1
    )
    config = model.config
    layers, experts = [], []
    with model.walk() as walk:
        for layer in range(config.num_hidden_layers):
            layers.append(_kept(walk.layer(layer)))
            every = range(config.moe.num_experts) if config.is_moe(layer) else ()
            experts.append([_kept(expert) for expert in walk.experts(layer, every)])
    ends = {"embed_tokens": model.embed(torch.arange(config.vocab_size))}
    ends["lm_head"] = torch.cat([weight for _, weight in model.head_blocks()])
    for role in ("norm", "output_attn_res_norm", "output_attn_res_proj"):
        ends[role] = model.global_weight(role)
    return Stack(config, layers, experts, ends)


@pytest.fixture(scope="module")
def golden(data):
    return load_file(data / "oracle" / "golden" / "text.safetensors")


@pytest.mark.parametrize("name", ["s37", "s64", "s130"])
def test_prefill_gives_the_golden_logits_and_states(stack, golden, name):
    logits, caches = stack.forward(golden[f"{name}.input_ids"])
    torch.testing.assert_close(logits, golden[f"{name}.logits"], rtol=0, atol=LOGIT_TOLERANCE)
    for layer, cache in enumerate(caches):
        if stack.config.layer_kinds[layer] is LayerKind.KDA:
            expected = golden[f"{name}.layers.{layer}.kda_state_vk"]
            torch.testing.assert_close(cache.state[0].mT, expected, rtol=0, atol=STATE_TOLERANCE)


def test_decoding_token_by_token_gives_the_golden_logits_and_states(stack, golden, data):
    summary = json.loads((data / "oracle" / "golden" / "summary.json").read_text())
    prefill = summary["decode"]["prefill_tokens"]
    ids = golden["s37.input_ids"]
    _, caches = stack.forward(ids[:prefill])
    steps = []
    for token in ids[prefill:]:
        logits, caches = stack.forward(token[None], caches)
        steps.append(logits[0])
    torch.testing.assert_close(
        torch.stack(steps), golden["decode.logits"], rtol=0, atol=LOGIT_TOLERANCE
    )
    for layer, cache in enumerate(caches):
        if stack.config.layer_kinds[layer] is LayerKind.KDA:
            expected = golden[f"decode.layers.{layer}.kda_state_vk"]
            torch.testing.assert_close(cache.state[0].mT, expected, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("cut", [1, 20, 64, 100])
def test_prefill_in_segments_equals_prefill_at_once(stack, golden, cut):
    ids = golden["s130.input_ids"]
    first, caches = stack.forward(ids[:cut])
    second, _ = stack.forward(ids[cut:], caches)
    torch.testing.assert_close(
        torch.cat((first, second)), golden["s130.logits"], rtol=0, atol=LOGIT_TOLERANCE
    )


@pytest.mark.parametrize("length", [1, 17, 63, 129])
def test_later_tokens_do_not_change_earlier_logits(stack, golden, length):
    ids = golden["s130.input_ids"]
    logits, _ = stack.forward(ids[:length])
    torch.testing.assert_close(logits, golden["s130.logits"][:length], rtol=0, atol=1e-4)


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "hidden_size": 24,
    "intermediate_size": 40,
    "vocab_size": 50,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
}
K3_LIKE = KIMI_LINEAR | {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "moe_layer_freq": 1,
    "q_lora_rank": 10,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 14,
    "latent_moe_use_norm": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "linear_attn_config": KIMI_LINEAR["linear_attn_config"]
    | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
}
VARIANTS = {
    "kimi-linear": KIMI_LINEAR,
    "k3-like": K3_LIKE,
    "softmax-router": KIMI_LINEAR | {"moe_router_activation_func": "softmax"},
    "no-shared-experts": KIMI_LINEAR | {"num_shared_experts": 0, "moe_renormalize": False},
}


def _random_stack(config, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def draw(spec):
        spread = 0.5 / math.sqrt(spec.shape[-1]) if len(spec.shape) == 2 else 0.5
        return 2 * spread * torch.randn(spec.shape, generator=rng)

    layers, experts = [], []
    for layer in range(config.num_hidden_layers):
        own, routed = {}, {}
        for spec in layer_tensors(config, layer, packed=False):
            place = own if spec.expert is None else routed.setdefault(spec.expert, {})
            place[spec.role] = draw(spec)
        layers.append(own)
        experts.append([routed[e] for e in sorted(routed)])
    ends = {spec.role: draw(spec) for spec in shard_tensors(config, num_shards(config))}
    return Stack(config, layers, experts, ends)


class Loops:
    """The same model once more, a token at a time, in numpy's float64."""

    def __init__(self, stack):
        self.config = stack.config
        as_numpy = lambda weights: {n: w.double().numpy() for n, w in weights.items()}  # noqa: E731
        self.layers = [as_numpy(own) for own in stack.layers]
        self.experts = [[as_numpy(e) for e in experts] for experts in stack.experts]
        self.ends = as_numpy(stack.ends)
        self.memory = [{} for _ in self.layers]

    def step(self, token):
        """Return the logits after one more token."""
        c = self.config
        p, blocks = self.ends["embed_tokens"][token], []
        for layer, w in enumerate(self.layers):
            h = self._mix(blocks, p, w, "self_attention_res")
            x = self._norm(h, w["input_layernorm"], c.rms_norm_eps)
            kda = c.layer_kinds[layer] is LayerKind.KDA
            a = (self._kda if kda else self._mla)(x, w, self.memory[layer])
            if c.attn_res_block_size and layer % c.attn_res_block_size == 0:
                blocks.append(p)
                p = a
            else:
                p = p + a
            h = self._mix(blocks, p, w, "mlp_res")
            x = self._norm(h, w["post_attention_layernorm"], c.rms_norm_eps)
            if c.is_moe(layer):
                p = p + self._moe(x, w, self.experts[layer])
            else:
                p = p + self._mlp(x, *(w[f"mlp.{n}_proj"] for n in ("gate", "up", "down")))
        h = self._mix(blocks, p, self.ends, "output_attn_res")
        return self.ends["lm_head"] @ self._norm(h, self.ends["norm"], c.rms_norm_eps)

    def _mix(self, blocks, p, w, name):
        if not self.config.attn_res_block_size or not blocks:
            return p
        sources = [*blocks, p]
        direction = w[f"{name}_norm"] * w[f"{name}_proj"][0]
        scores = np.array(
            [self._norm(s, direction, self.config.rms_norm_eps).sum() for s in sources]
        )
        shares = np.exp(scores - scores.max())
        return sum(s * share for s, share in zip(sources, shares / shares.sum(), strict=True))

    @staticmethod
    def _norm(x, weight, eps):
        return weight * x / np.sqrt((x * x).mean() + eps)

    def _kda(self, x, w, memory):
        kda = self.config.kda
        H, K = kda.num_heads, kda.head_dim
        part = {}
        for p in "qkv":
            raw = memory.setdefault(p, [np.zeros(H * K)] * 4)
            memory[p] = [*raw[1:], w[f"kda.{p}_proj"] @ x]
            y = sum(w[f"kda.{p}_conv1d"][:, 0, j] * u for j, u in enumerate(memory[p]))
            part[p] = (y / (1 + np.exp(-y))).reshape(H, K)
        r = (w["kda.f_b_proj"] @ (w["kda.f_a_proj"] @ x) + w["kda.dt_bias"]).reshape(H, K)
        rate = np.exp(w["kda.A_log"].flatten()[:H])[:, None]
        if kda.gate_lower_bound is None:
            log_decay = -rate * np.log1p(np.exp(r))
        else:
            log_decay = kda.gate_lower_bound / (1 + np.exp(-rate * r))
        beta = 1 / (1 + np.exp(-(w["kda.b_proj"] @ x)))
        full = kda.use_full_rank_gate
        gate = w["kda.g_proj"] @ x if full else w["kda.g_b_proj"] @ (w["kda.g_a_proj"] @ x)
        S = memory.setdefault("S", np.zeros((H, K, K)))
        out = []
        for h in range(H):
            q, k, v = (part[p][h] for p in "qkv")
            q = q / np.sqrt((q * q).sum() + 1e-6) / math.sqrt(K)
            k = k / np.sqrt((k * k).sum() + 1e-6)
            S[h] *= np.exp(log_decay[h])[:, None]
            S[h] += np.outer(k, beta[h] * (v - k @ S[h]))
            out.append(self._norm(q @ S[h], w["kda.o_norm"], self.config.rms_norm_eps))
        return w["kda.o_proj"] @ (np.concatenate(out) / (1 + np.exp(-gate)))

    def _mla(self, x, w, memory):
        mla = self.config.mla
        H, nope, rope = mla.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim
        compressed = w["mla.kv_a_proj_with_mqa"] @ x
        latent = self._norm(compressed[:-rope], w["mla.kv_a_layernorm"], 1e-6)
        kv = (w["mla.kv_b_proj"] @ latent).reshape(H, -1)
        memory.setdefault("kv", []).append((kv, compressed[-rope:]))
        if mla.q_lora_rank is None:
            q = w["mla.q_proj"] @ x
        else:
            q = w["mla.q_b_proj"] @ self._norm(w["mla.q_a_proj"] @ x, w["mla.q_a_layernorm"], 1e-6)
        q = q.reshape(H, -1)
        out = []
        for h in range(H):
            keys = [np.concatenate((kv[h, :nope], shared)) for kv, shared in memory["kv"]]
            scores = np.array([q[h] @ key for key in keys]) / math.sqrt(nope + rope)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            out.append(
                sum(s * kv[h, nope:] for s, (kv, _) in zip(shares, memory["kv"], strict=True))
            )
        gated = np.concatenate(out)
        if mla.mla_use_output_gate:
            gated = gated / (1 + np.exp(-(w["mla.g_proj"] @ x)))
        return w["mla.o_proj"] @ gated

    def _mlp(self, x, gate_proj, up_proj, down_proj):
        g, u = gate_proj @ x, up_proj @ x
        c = self.config
        if c.hidden_act == "situ":
            beta, linear = c.activation_situ_beta, c.activation_situ_linear_beta
            inner = beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear * np.tanh(u / linear)
        else:
            inner = g / (1 + np.exp(-g)) * u
        return down_proj @ inner

    def _moe(self, x, w, experts):
        moe = self.config.moe
        logits = w["moe.gate"] @ x
        scores = 1 / (1 + np.exp(-logits))
        if moe.moe_router_activation_func == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        choice = scores + w["moe.bias"]
        size = moe.num_experts // moe.num_expert_group
        groups = choice.reshape(-1, size)
        ranked = sorted(range(len(groups)), key=lambda g: -np.sort(groups[g])[-2:].sum())
        kept = ranked[: moe.topk_group]
        allowed = [e for e in range(moe.num_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.num_experts_per_token]
        total = sum(scores[e] for e in chosen) if moe.moe_renormalize else 1.0
        latent = moe.routed_expert_hidden_size is not None
        z = w["moe.latent_down"] @ x if latent else x
        y = 0
        for e in chosen:
            out = self._mlp(z, *(experts[e][f"expert.{n}"] for n in ("w1", "w3", "w2")))
            y = y + scores[e] / total * moe.routed_scaling_factor * out
        if latent:
            if moe.latent_moe_use_norm:
                y = self._norm(y, w["moe.latent_norm"], self.config.rms_norm_eps)
            y = w["moe.latent_up"] @ y
        if moe.num_shared_experts:
            y = y + self._mlp(x, *(w[f"moe.shared.{n}_proj"] for n in ("gate", "up", "down")))
        return y


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_config_equals_a_second_implementation_in_loops(variant):
    stack = _random_stack(read_config(variant))
    ids = torch.randint(50, (70,), generator=torch.Generator().manual_seed(1))
    logits, _ = stack.forward(ids)
    loops = Loops(stack)
    expected = np.stack([loops.step(token) for token in ids.tolist()])
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=5e-4)
